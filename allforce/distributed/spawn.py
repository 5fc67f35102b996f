"""`--workers N`: local workers without a launcher, on torch.distributed.run's own machinery."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch

from ..errors import UserError
from .devices import choose_threads, physical_cores
from .launch import World, detect

MARK = "ALLFORCE_SPAWNED"


def worker_count(text: str) -> int:
    """`auto`: one per GPU, or the cores divided by the threads each worker is to have (OMP_NUM_THREADS, else 1)."""
    if text == "auto":
        if torch.cuda.device_count():
            return torch.cuda.device_count()
        cores = physical_cores(os.sched_getaffinity(0))
        return max(1, cores // choose_threads(World(), cores=1).intra)
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--workers {text} should be a number of workers, 1 or more, or `auto`.")
    return int(text)


def run_local_workers(n: int | str, argv: list[str]) -> int:
    """Run the command `argv` as `n` workers on this host; the exit code of the first that failed, or 0.

    Nothing is restarted. The error a worker left with report() is shown once; ctrl-C ends all.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    world = detect()
    if world.size > 1:
        raise UserError(
            f"--workers starts its own workers, but {world.started_by} started {world.size} already: use one of them."
        )
    count = worker_count(str(n))
    for name in ("agent.server.api", "multiprocessing.api"):  # their reports of a failure are ours to give
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    os.environ[MARK] = "1"
    try:
        with tempfile.TemporaryDirectory(prefix="allforce-workers-") as logs:
            try:
                elastic_launch(_config(count, logs), argv[0])(*argv[1:])
            except ChildFailedError as error:
                return _report_failure(error, Path(logs))
    except SignalException as stopped:
        print(f"stopped by {stopped.sigval.name}; all workers have ended", file=sys.stderr)
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 130
    finally:
        del os.environ[MARK]
    return 0


def _config(count: int, logs: str):
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"is_host": "true"},
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=logs),
        shutdown_timeout=10,
    )


def report(message: str, code: int = 2) -> bool:
    """Leave the error of this worker to run_local_workers, which shows the first one once. False: show it yourself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or MARK not in os.environ:
        return False
    detail = {"message": message, "errorCode": code, "extraInfo": {"timestamp": int(time.time())}}
    Path(path).write_text(json.dumps({"message": detail}))
    return True


def _report_failure(error, logs: Path) -> int:
    """Show what the first worker that complained had to say; the agent itself may have noticed another one first."""
    reports = sorted(logs.rglob("error.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in reports:
        message = json.loads(path.read_text()).get("message")
        if isinstance(message, dict) and isinstance(message.get("errorCode"), int):
            print(message["message"], file=sys.stderr)
            return message["errorCode"]
    rank, first = error.get_first_failure()
    how = f"exit code {first.exitcode}" if first.exitcode > 0 else f"signal {-first.exitcode}"
    print(f"worker {rank} ended with {how}; the others were stopped", file=sys.stderr)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # a signal is a negative exit code
