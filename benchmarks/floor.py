"""The floor of a training step: the time of its matrix products alone on this machine.

Energies, forces and the gradient of both losses need, whatever the program, six passes over the fitting net (forward,
gradient to the descriptor, tangent, its adjoint, and two weight gradients, done as one product over 2N rows) and, on
the table, five over T = A C: T itself, dE/dA, the tangent, and two gradients of C (again one product). Products alone:
no activations, no edges, no optimizer. Everything is allocated beforehand.

    python benchmarks/floor.py --atoms 64,128 --batch 1 --nodes 64
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import pairwise
from statistics import median

import torch
from common import markdown_table, write_result

Product = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def product(m: int, k: int, n: int, dtype: torch.dtype) -> Product:
    """Operands and result of (m, k) @ (k, n)."""
    return torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype), torch.empty(m, n, dtype=dtype)


def passes(rows: int, k: int, n: int, dtype: torch.dtype, adjoints: int) -> list[Product]:
    """y = x W: two products forward (value, tangent), `adjoints` backward, and xᵀ g over the rows of both."""
    forward = [product(rows, k, n, dtype) for _ in range(2)]
    backward = [product(rows, n, k, dtype) for _ in range(adjoints)]
    both, gradient = torch.randn(2 * rows, k, dtype=dtype), torch.randn(2 * rows, n, dtype=dtype)
    return [*forward, *backward, (both.T, gradient, torch.empty(k, n, dtype=dtype))]


def fitting(counts: list[int], widths: list[int], dtype: torch.dtype) -> list[Product]:
    """Six passes over the hidden layers of the fitting net of each type."""
    return [p for n in counts for a, b in pairwise(widths) for p in passes(n, a, b, dtype, adjoints=2)]


def table(atoms: int, rows: int, width: int, dtype: torch.dtype) -> list[Product]:
    """T (4N, M1) = A (4N, types · K) C; nobody reads a gradient of the loss with respect to A."""
    return passes(4 * atoms, rows, width, dtype, adjoints=1)


def flops(products: list[Product]) -> float:
    return sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b, _ in products)


def seconds(products: list[Product], budget: float) -> float:
    """Median time of all products in a row, measured for about `budget` seconds."""

    def once() -> float:
        start = time.perf_counter()
        for a, b, out in products:
            torch.mm(a, b, out=out)
        return time.perf_counter() - start

    once()
    estimate = once()
    return median(once() for _ in range(max(5, int(budget / estimate))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", default="64,128", help="atoms of each type in a frame")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, default=64, help="K, spline coefficients of a type")
    parser.add_argument("--embedding", type=int, default=100)
    parser.add_argument("--axis", type=int, default=16)
    parser.add_argument("--neuron", default="240,240,240")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    counts = [int(n) for n in args.atoms.split(",")]
    widths = [args.embedding * args.axis, *map(int, args.neuron.split(","))]
    rows, data = [], []
    for dtype in (torch.float64, torch.float32):
        for batch in args.batch:
            of_types = [n * batch for n in counts]
            parts = {
                "fitting net": fitting(of_types, widths, dtype),
                "table": table(sum(of_types), len(counts) * args.nodes, args.embedding, dtype),
            }
            parts["all"] = [p for products in parts.values() for p in products]
            for part, products in parts.items():
                work, t = flops(products), seconds(products, args.seconds)
                name = str(dtype).removeprefix("torch.")
                rows.append([name, str(batch), part, f"{work / 1e9:.2f}", f"{t * 1e3:.1f}", f"{work / t / 1e9:.0f}"])
                data.append({"precision": name, "batch": batch, "part": part, "flop": work, "seconds": t})
    body = markdown_table(["precision", "batch", "products of", "GFLOP", "ms", "GFLOP/s"], rows)
    body += f"\n\n{args.threads} threads, {args.atoms} atoms of each type, K = {args.nodes}."
    write_result("floor", "Floor of a training step: its matrix products alone", body, {"rows": data}, ["ours"])


if __name__ == "__main__":
    main()
