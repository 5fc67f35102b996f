"""se_e2_r: the common suite, and a dense slot-by-slot reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make import small_model
from suite import ModelSuite, batch_of, evaluate, structure

from allforce.data.batch import Frame
from allforce.models import kernels, moments

RADIAL = {"type": "se_e2_r"}


class TestTwoSided(ModelSuite):
    make = staticmethod(lambda: small_model(RADIAL))


class TestOneSide(ModelSuite):
    make = staticmethod(lambda: small_model(RADIAL | {"type_one_side": True, "resnet_dt": True}, ntypes=3))


class TestExact(ModelSuite):
    make = staticmethod(lambda: small_model(RADIAL, mode="exact"))


class TestExcluded(ModelSuite):
    make = staticmethod(lambda: small_model(RADIAL | {"exclude_types": [[0, 1]], "env_protection": 0.1}, ntypes=3))


def dense(model, frame: Frame) -> np.ndarray:
    """D by the formula, slot by slot: (1/5)(1/nnei) Σ net(x); x = 0 for excluded pairs, R = 0 for empty slots."""
    d, c = model.descriptor, model.config.descriptor
    images = [np.array(k) @ frame.cell for k in np.ndindex(3, 3, 3)]
    images = [image - frame.cell.sum(0) for image in images]
    out = []
    for i, tau in enumerate(frame.type):
        avg, std = float(d.davg[tau, 0]), float(d.dstd[tau, 0])
        total = np.zeros(c.neuron[-1])
        for t in range(len(model.type_map)):
            r = [
                np.linalg.norm(frame.coord[j] - frame.coord[i] + m)
                for j in np.flatnonzero(frame.type == t)
                for m in images
            ]
            r = sorted(x for x in r if 1e-9 < x <= c.rcut)[: c.sel[t]]
            u = np.clip((np.array(r) - c.rcut_smth) / (c.rcut - c.rcut_smth), 0, 1)
            s = (1 + u**3 * (-6 * u**2 + 15 * u - 10)) / (np.array(r) + c.env_protection)
            x = (np.concatenate([s, np.zeros(c.sel[t] - len(r))]) - avg) / std
            if [0, 1] in c.exclude_types and {tau, t} == {0, 1}:
                x[: len(r)] = 0.0
            net = d.nets[t] if c.type_one_side else d.nets[tau + len(model.type_map) * t]
            with torch.no_grad():
                total += net(torch.from_numpy(x)[:, None]).numpy().sum(0)
        out.append(total / sum(c.sel) / 5)
    return np.array(out)


@pytest.mark.parametrize("mode", ["table", "exact"])
@pytest.mark.parametrize("options", [{}, {"type_one_side": True}, {"exclude_types": [[0, 1]]}, {"sel": [8, 9]}])
def test_dense_reference(options, mode):
    """Padding of `sel` counts, excluded neighbours count as x = 0, more neighbours than `sel` keep the nearest."""
    model, frame = small_model(RADIAL | options, mode=mode), structure(3, 8, 2)
    found = evaluate(model, frame, wanted=("descriptor",)).descriptor
    np.testing.assert_allclose(found, dense(model, frame), rtol=0, atol=1e-10)


@pytest.mark.parametrize("one_side", [True, False])
def test_eager_compiled_and_in_pieces_agree(one_side, monkeypatch):
    model = small_model(RADIAL | {"type_one_side": one_side}, ntypes=3, nodes=32)
    batch = batch_of(model, structure(0, 9, 3), structure(1, 5, 3))

    def run() -> list[torch.Tensor]:
        p = model(batch, ("energy", "forces"))
        loss = (p["energy"] ** 2).mean() + (p["forces"] ** 2).mean()
        return [p["energy"], p["forces"], *torch.autograd.grad(loss, list(model.parameters()))]

    compiled = run()
    monkeypatch.setattr(moments, "MOMENTS_BYTES", 1)
    pieces = run()
    monkeypatch.setenv(kernels.SWITCH, "torch")
    for a, b, c in zip(compiled, pieces, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-12)
