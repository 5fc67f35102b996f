"""`dp eval-desc`: descriptors of all atoms, one npy file of shape (frames, atoms, ndesc) for each system."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import numpy as np

from allforce.data.system import System
from allforce.errors import UserError
from allforce.infer.evaluate import Evaluator
from allforce.infer.systems import select_systems

log = logging.getLogger("deepmd.entrypoints.eval_desc")

DTYPES = {"fp32": np.float32, "fp64": np.float64}


class DescriptorOf(Evaluator):
    """Any model that has a descriptor, whatever it predicts."""

    kind = "descriptor"


def eval_desc(
    model: str, system: str | None = None, datafile: str | None = None, output: str = "desc", dtype: str = "native"
) -> None:
    """Write OUTPUT/<name of the system>.npy, atoms in the order of the data; native: the precision of the model."""
    dp = DescriptorOf(model, parallel=False)
    systems = select_systems(dp.get_type_map(), system, datafile)
    native = np.float32 if dp.precision == "float32" else np.float64
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for one, path in zip(systems, _paths(systems, folder), strict=True):
        log.info("# -------output of dp eval_desc------- ")
        log.info("# processing system : %s", one.name)
        log.info("# evaluating descriptors for %d frames", one.nframes)
        out = None
        for k, result in enumerate(dp.evaluate((one.frame(k) for k in range(one.nframes)), ("descriptor",))):
            if out is None:
                shape = (one.nframes, *result["descriptor"].shape)
                out = np.lib.format.open_memmap(path, "w+", dtype=DTYPES.get(dtype, native), shape=shape)
            out[k] = result["descriptor"]
        assert out is not None, "a system has at least one frame"
        out.flush()
        log.info("# descriptors saved to %s", path)
        log.info("# descriptor shape: %s", out.shape)
        log.info("# ----------------------------------- ")
    log.info("# eval_desc completed successfully")


def _paths(systems: list[System], folder: Path) -> list[Path]:
    names = [PurePosixPath(s.name.rstrip("/").replace("#", "/")).name for s in systems]
    twice = sorted({x for x in names if names.count(x) > 1})
    if twice:
        which = [s.name for s, x in zip(systems, names, strict=True) if x == twice[0]]
        raise UserError(
            f"The systems {', '.join(which)} would all be written to {twice[0]}.npy. Evaluate them one by one."
        )
    return [folder / f"{name}.npy" for name in names]
