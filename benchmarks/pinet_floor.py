"""A training step of PiNet beside its matrix products and scatters alone.

One step (energies, forces, and the gradient of a loss on both) is run once by automatic differentiation, while every
matrix product and every gather or sum between atoms and pairs that it makes is written down with its operands. Then the
step as it is trained, the one by automatic differentiation, and the list alone are timed in turns, in seconds of the
processor (one thread), so that other programs count little. A further time is that of the list with torch's tanh
of every activation, once.

    python benchmarks/pinet_floor.py --seconds 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from common import WATER, markdown_table, write_result
from torch.utils._python_dispatch import TorchDispatchMode

from allforce.data.discover import open_systems
from allforce.data.loader import collate
from allforce.data.prepare import Preparation
from allforce.distributed.devices import keep_freed_memory
from allforce.losses import LOSSES
from allforce.models import MODELS
from allforce.models.pinn import PiNetPotential
from allforce.models.potential import Potential

aten = torch.ops.aten
COUNTED = {aten.mm, aten.addmm, aten.bmm, aten.index_select, aten.index_add, aten.index_add_, aten.scatter_add_}
WIDE = {"pi_nodes": [64], "pp_nodes": [64] * 4, "ii_nodes": [64] * 4, "out_nodes": [64]}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "PiNet, PiNN's defaults": ("pinet", {}),
    "PiNet2, PiNN's defaults": ("pinet2", {}),
    "PiNet, 64 wide": ("pinet", {"depth": 5, "rc": 4.5, "basis_type": "gaussian", "n_basis": 10, **WIDE}),
}


class Written(TorchDispatchMode):
    """Writes down the calls that count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in COUNTED or func.overloadpacket is aten.tanh:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def step_of(kind: str, keys: dict[str, Any], precision: str, frames: int) -> Callable[[], Any]:
    cls, loss_cls = MODELS[kind], LOSSES["pinn"]
    model = cls(cls.Config.model_validate({"type_map": ["O", "H"], "seed": 1, "precision": precision, **keys}))
    loss = loss_cls(loss_cls.Config(use_force=True, use_e_per_atom=True), 1.0)
    (system, *_) = open_systems(str(WATER / "data/train"), ["O", "H"])
    prepare = Preparation(model.needs)
    parts = [prepare(system.frame(k), "water") for k in range(frames)]
    batch = collate([f for f, _ in parts], [p for _, p in parts], 2)
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(
        loss(model(batch, loss.wanted), batch, 1.0)[0], parameters, materialize_grads=True
    )


def by_autograd(step: Callable[[], Any]) -> None:
    with patch.object(PiNetPotential, "energies_and_gradient", Potential.energies_and_gradient):
        step()


def in_turns(step: Callable[[], Any], calls: list[tuple[Callable, tuple, dict]], seconds: float) -> list[float]:
    """Median times of the step, of that by autograd, of the products and scatters alone, and of these with tanh."""
    short = [call for call in calls if call[0].overloadpacket is not aten.tanh]
    whats = [step, partial(by_autograd, step), partial(repeat, short), partial(repeat, calls)]
    times: list[list[float]] = [[] for _ in whats]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for place, what in enumerate(whats):
            begun = time.process_time()
            what()
            times[place].append(time.process_time() - begun)
    return [median(one) for one in times]


@torch.no_grad()
def repeat(calls: list[tuple[Callable, tuple, dict]]) -> None:
    for func, args, kwargs in calls:
        func(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each measurement")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every training does
    rows, data = [], []
    for name, (kind, keys) in NETWORKS.items():
        for precision in ("float64", "float32"):
            step = step_of(kind, keys, precision, args.frames)
            step()
            with Written() as written, patch("allforce.models.pinet_ops._tanh", torch.tanh):
                by_autograd(step)
            whole, autograd, alone, tanh = in_turns(step, written.calls, args.seconds)
            cells = [f"{x * 1e3:.1f}" for x in (whole, autograd, alone, tanh)]
            rows.append([name, precision, *cells, f"{whole / alone:.2f}", f"{whole / tanh:.2f}"])
            times = {"step": whole, "by autograd": autograd, "floor": alone, "with tanh": tanh}
            data.append({"network": name, "precision": precision, **times})
    head = [
        "network",
        "precision",
        "step, ms",
        "by autograd, ms",
        "products and scatters, ms",
        "with torch's tanh, ms",
        "ratio",
        "ratio with that",
    ]
    body = markdown_table(head, rows)
    body += f"\n\nOne thread, {args.frames} frame(s) of water (96 atoms); medians of processor time, measured in turns."
    write_result(
        "pinet_floor", "A step of PiNet and its matrix products and scatters alone", body, {"rows": data}, ["ours"]
    )


if __name__ == "__main__":
    main()
