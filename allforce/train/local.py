"""`dp train --workers N`: the process that starts the workers and waits for them.

It loads no torch: the workers start at once, and it takes no memory beside them.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path

from allforce.distributed.launch import detect
from allforce.distributed.spawn import run_local_workers, worker_count
from allforce.errors import UserError


def check_arguments(args: Namespace) -> None:
    """Arguments that need each other."""
    if args.use_pretrain_script and not (args.init_model or args.init_frz_model or args.finetune):
        raise UserError("--use-pretrain-script needs a model: --finetune, --init-model or --init-frz-model.")
    if args.world_size is not None and not args.dry_run:
        raise UserError("--world-size belongs to --dry-run; the launcher or --workers says how many train.")
    if args.max_restarts and not starts_workers(args):
        raise UserError("--max-restarts belongs to --workers; other launchers have an option of their own.")


def starts_workers(args: Namespace) -> bool:
    """One worker is this process itself. Where a launcher has started several, --workers will be an error."""
    return args.workers is not None and (worker_count(args.workers) > 1 or detect().size > 1)


def train_with_workers(args: Namespace) -> int:
    """Start them, and start them again from their newest checkpoint when one was lost and that is asked for."""
    begun, words = time.time(), without(args.argv, "--workers", "--max-restarts")
    command = [sys.executable, "-m", "allforce", *words]
    return run_local_workers(args.workers, command, args.max_restarts, lambda: resumed(args.INPUT, command, begun))


def resumed(path: str, command: list[str], begun: float) -> list[str]:
    """The command that goes on from the newest intact checkpoint written since `begun`, else the same again."""
    from allforce.config.load import load_input
    from allforce.files import checkpoint

    training = load_input(path).training
    prefix = Path(training.save_dir or ".") / training.save_ckpt
    if not any(path.stat().st_mtime >= begun for _, path in checkpoint.numbered(prefix)):
        return command
    start = ("-i", "--init-model", "-r", "--restart", "-f", "--init-frz-model", "-t", "--finetune")
    flags = [word for word in without(command, *start) if word != "--use-pretrain-script"]
    return [*flags, "--restart", str(checkpoint.find(prefix))]


def without(argv: list[str], *options: str) -> list[str]:
    """A command line without some options and their values."""
    kept, skip = [], False
    for word in argv:
        if not skip and word not in options and not word.startswith(tuple(f"{o}=" for o in options)):
            kept.append(word)
        skip = not skip and word in options
    return kept
