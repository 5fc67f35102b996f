"""What averaging gradients costs a model of one's own: allforce.distributed and torch's DistributedDataParallel (gloo).

Two workers of one thread, the same net and batches; blocks of steps in turn, A B C A B C …: ours, DDP, and the same
step without any communication, in one run over one pair of processes. Overhead is a step's time less that
of the step alone.

    python benchmarks/own_model.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from common import environment, markdown_table, write_result
from torch import nn

NETS = {  # name -> widths of the layers, batch
    "small": ([64, 64, 64, 10], 32),
    "classifier": ([784, 256, 128, 10], 32),
    "potential": ([100, 240, 240, 240, 1], 192),
    "wide": ([1024, 1024, 1024, 10], 16),
}
WAYS = ("alone", "ours", "ddp")


def net(widths: list[int]) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def worker(rounds: int, seconds: float) -> None:
    """On every rank: medians of the seconds per step, as JSON from rank 0."""
    import allforce.distributed as ad

    ad.init(engine="torch")
    results = {}
    for name, (widths, batch) in NETS.items():
        x = torch.randn(batch, widths[0], generator=torch.Generator().manual_seed(ad.rank()))
        steps = {way: make_step(way, net(widths), x, ad) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            block(steps[way], 20, ad)
        count = max(20, int(seconds / ad.average(block(steps["ddp"], 20, ad))))
        for _ in range(rounds):
            for way in WAYS:
                times[way].append(ad.average(block(steps[way], count, ad)))
        parameters = sum(a * b + b for a, b in zip(widths, widths[1:], strict=False))
        results[name] = {"parameters": parameters, "batch": batch, "steps": count, "seconds": times}
    if ad.rank() == 0:
        print("RESULT " + json.dumps(results), flush=True)


def make_step(way: str, model: nn.Module, x: torch.Tensor, ad):
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    forward = model
    if way == "ours":
        optimizer = ad.DistributedOptimizer(optimizer, model)
    if way == "ddp":
        forward = ad.ddp(model, gradient_as_bucket_view=True)  # its faster setting

    def step() -> None:
        optimizer.zero_grad()
        forward(x).pow(2).mean().backward()
        optimizer.step()

    return step


def block(step, count: int, ad) -> float:
    """Seconds per step of a block that all ranks begin together."""
    ad.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - begin) / count


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=15)
    arguments.add_argument("--seconds", type=float, default=0.3, help="of a block")
    arguments.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.worker:
        worker(args.rounds, args.seconds)
        return
    script = Path(__file__).resolve()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), "--worker"]
    command += ["--rounds", str(args.rounds), "--seconds", str(args.seconds)]
    done = subprocess.run(command, env=environment("ours", 1), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout + done.stderr)
    results = json.loads(lines[0].removeprefix("RESULT "))
    rows = []
    for name, one in results.items():
        alone, ours, ddp = (median(one["seconds"][way]) * 1e6 for way in WAYS)
        ratio = median(d / o for d, o in zip(one["seconds"]["ddp"], one["seconds"]["ours"], strict=True))
        rows.append(
            [name, f"{one['parameters']:,}", str(one["batch"]), f"{alone:.0f}", f"{ours:.0f} (+{ours - alone:.0f})",
             f"{ddp:.0f} (+{ddp - alone:.0f})", f"{ratio:.2f}"]
        )  # fmt: skip
    head = ["net", "parameters", "batch", "no communication", "allforce.distributed", "DDP on gloo", "DDP / ours"]
    body = (
        "Microseconds per training step (forward, backward, SGD) on 2 workers of one thread, medians; in brackets what"
        f" averaging the gradients adds.\n{args.rounds} rounds of blocks in turn; the last column is the median of the"
        " ratios of the rounds.\n\n" + markdown_table(head, rows)
    )
    write_result(
        "own_model", "Averaging gradients: allforce.distributed and DistributedDataParallel", body, results, ["ours"]
    )


if __name__ == "__main__":
    main()
