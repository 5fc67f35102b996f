"""What it costs that a run tells about itself: phases, counted communication, metrics.jsonl, timeline, TensorBoard.

    python benchmarks/monitor_cost.py --workers 1 2

One training, whose steps take turns, ten at a time: nothing on; TensorBoard alone at every step; everything but
torch's profiler, with a line of metrics and a piece of the timeline at the end of a round. Ten steps last until all
that they caused has been written. Seconds are those of the clock and, less moved by what else the machine does, those
of rank 0's CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time, sleep

import torch
from common import WATER, find_systems, markdown_table, water_input, write_result

from allforce.config.load import load_input
from allforce.distributed import devices
from allforce.distributed.connect import connect
from allforce.distributed.launch import detect
from allforce.distributed.profile import CountedComm
from allforce.distributed.spawn import run_local_workers
from allforce.trace import phase
from allforce.train.boards import Boards
from allforce.train.monitor import Monitor
from allforce.train.source import Options
from allforce.train.start import prepare
from allforce.train.trainer import Trainer

PHASES = ("data wait", "forward", "moments", "moments", "backward", "moments", "communication", "optimizer")
MODES = ("nothing", "TensorBoard", "everything")
WARM_UP = 20  # steps of each mode
PIECE = 10  # steps of a mode before the next one has its turn
PATIENCE = 150.0  # seconds: fewer rounds on a slow machine


class Bench(Trainer):
    """A training in blocks."""

    def measure(self, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
        """(wall, CPU) seconds a step of every block."""
        counted, boards, none = self.comm, self.display.boards, Boards([])
        seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
        self.job.loader.start(*self.job.first_and_stride(0))
        self.monitor._open()
        start = perf_counter()
        for turn in range(-1, rounds):
            if turn > 3 and counted.gather(perf_counter() - start)[0] > PATIENCE:
                break
            spent = {mode: [0.0, 0.0] for mode in MODES}
            pieces = 1 if turn < 0 else steps // PIECE
            for piece in range(pieces):
                for mode in MODES[(turn + piece) % 3 :] + MODES[: (turn + piece) % 3]:  # no mode is always the first
                    self.comm = counted if mode == "everything" else counted.comm  # type: ignore[attr-defined]
                    self.display.boards = none if mode == "nothing" else boards
                    with self.monitor.trace.installed() if mode == "everything" else nullcontext():
                        self.comm.barrier()
                        wall, cpu = perf_counter(), process_time()
                        self.block(WARM_UP if turn < 0 else PIECE, mode, row=piece == pieces - 1)
                        spent[mode][0] += (perf_counter() - wall) / steps
                        spent[mode][1] += (process_time() - cpu) / steps
            if turn >= 0:
                for mode in MODES:
                    seconds[mode].append((spent[mode][0], spent[mode][1]))
        self.job.loader.close()
        self.comm, self.display.boards = counted, boards
        if counted.size == 1:
            seconds["alone"] = [(0.0, self.alone(steps=1000))]
        self.display.close()
        self.monitor._close()
        return seconds

    def block(self, steps: int, mode: str, row: bool = True) -> None:
        step = self.state.step
        for _ in range(steps):
            step = self.state.step
            self.gradients(step)
            self.record(step)
            self.update(step)
        if mode == "everything" and row:
            self.monitor.row(step, self.schedule.rate(step), self.loss.metric(self.flat.sums), None)
            self.display.speed(step, self.monitor.last_row)
        timeline, boards = self.monitor.timeline, self.display.boards
        boards.over.set()  # it waits for more otherwise
        while boards.queue.qsize() or (timeline is not None and timeline.queue.qsize()):
            sleep(1e-4)
        boards.over.clear()

    def alone(self, steps: int) -> float:
        """CPU seconds a step of all this without any training: as many phases, rows and entries."""
        begun, tiny = process_time(), torch.zeros(1)
        with self.monitor.trace.installed():
            for k in range(steps):
                for name in PHASES:
                    with phase(name):
                        pass
                self.comm.all_reduce_start(tiny).wait()
                self.record(k)
                self.monitor.step(1)
                if k % 20 == 19:
                    self.block(0, "everything")
        return (process_time() - begun) / steps


def worker(args: argparse.Namespace) -> None:
    """One of the workers, in the folder with input.json; rank 0 writes seconds.json."""
    world = detect()
    device, _ = devices.setup(world)
    comm = CountedComm(connect(world, "auto", device))
    job = prepare(load_input("input.json"), comm, Options("input.json", skip_neighbor_stat=True), device)
    monitor = Monitor(job.input.training, comm, device, {"host": "here"}, timeline="timeline.json")
    seconds = Bench(job, comm, monitor).measure(args.rounds, args.steps)
    if comm.rank == 0:
        Path("seconds.json").write_text(json.dumps(seconds))
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=WATER)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60, help="of a mode in a round, a multiple of 10")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    alone, load = "", os.getloadavg()[0]
    rows, data, script = [], [], [sys.executable, str(Path(__file__).resolve()), "--worker"]
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    systems = [system.resolve() for system in find_systems(args.data)]
    for workers in args.workers:
        with tempfile.TemporaryDirectory(prefix="allforce-bench-") as folder:
            os.chdir(folder)
            config = water_input(systems, 10**6, 10**6, args.batch)
            config["training"]["tensorboard"] = True
            Path("input.json").write_text(json.dumps(config))
            if code := run_local_workers(workers, [*script, f"--rounds={args.rounds}", f"--steps={args.steps}"]):
                raise SystemExit(code)
            seconds = json.loads(Path("seconds.json").read_text())
            os.chdir("/")
        if "alone" in seconds:
            alone = f" Without any training, all this takes {1e6 * seconds['alone'][0][1]:.0f} µs of CPU time a step."
        data.append({"workers": workers, "seconds": seconds})
        rows += [[str(workers), mode, *cells(seconds, mode, 0), *cells(seconds, mode, 1)] for mode in MODES]
    head = ["workers", "on", "ms a step", "more", "middle half", "CPU ms a step", "more", "middle half"]
    body = markdown_table(head, rows)
    rounds = " and ".join(str(len(run["seconds"]["nothing"])) for run in data)
    body += f"\n\nBatch {args.batch} a worker, {os.environ['OMP_NUM_THREADS']} thread(s) each, {rounds} rounds of "
    body += f"{args.steps} steps in each mode, in turns. `more` is the median over the rounds, against the same "
    body += "round's steps with nothing on. TensorBoard has every step; a line of metrics and a piece of the timeline "
    body += f"are written every {args.steps} steps.{alone} Load of the machine at the start: {load:.0f}."
    write_result("monitor_cost", "What it costs that a run tells about itself", body, {"runs": data}, ["ours"])


def cells(seconds: dict[str, list[tuple[float, float]]], mode: str, which: int) -> list[str]:
    mine, plain = ([block[which] for block in seconds[name]] for name in (mode, "nothing"))
    more = [a / b - 1 for a, b in zip(mine, plain, strict=True)]
    low, _, high = quantiles(more, n=4)
    return [f"{1e3 * median(mine):.2f}", f"{100 * median(more):+.1f} %", f"{100 * low:+.1f} … {100 * high:+.1f} %"]


if __name__ == "__main__":
    main()
