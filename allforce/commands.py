"""What each command does with its arguments: one short function, imports inside it."""

from __future__ import annotations

import gc
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from allforce.errors import UserError


@contextmanager
def loading() -> Iterator[None]:
    """Imports. They make half a million objects that stay: to search these for garbage again and again, meanwhile and
    later, would take half as long as the imports themselves."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def train(args: Namespace) -> int:
    from allforce.distributed.orphans import end_with_launcher

    end_with_launcher()
    from allforce.train.local import check_arguments, starts_workers, train_with_workers

    check_arguments(args)
    if starts_workers(args):  # this process waits for them, and needs no torch for that
        return train_with_workers(args)
    from allforce.train import free_cores  # noqa: F401  # looks at the cores from now on

    with loading():
        from allforce.train.torch_calls import check_torch

        check_torch()
        from allforce.train.entry import train
    return train(args)


def doctor(args: Namespace) -> int:
    with loading():
        from allforce.train.doctor import doctor
    return doctor(args)


def init(args: Namespace) -> None:
    with loading():
        from allforce.train.init import init
    init(args.DATA, args.time, args.output)


def scaling_test(args: Namespace) -> None:
    with loading():
        from allforce.train.predict import network_of
        from allforce.train.scaling import scaling_test
    workers, predict = (_numbers(name, getattr(args, name)) for name in ("workers", "predict"))
    if predict and args.strong:
        raise UserError("--predict is about workers with a micro-batch each: leave --strong out.")
    engines = args.engine.split(",")
    if unknown := set(engines) - {"auto", "torch", "mpi"}:
        raise UserError(
            f"--engine {args.engine}: {', '.join(sorted(unknown))} is unknown. Choose of: auto, torch, mpi."
        )
    network = network_of(args.latency, args.bandwidth)
    scaling_test(args.INPUT, workers, args.steps, args.output, engines, args.strong, predict, network)


def _numbers(name: str, text: str | None) -> list[int]:
    if text is not None and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UserError(f"--{name} {text} should be numbers of workers with commas between, such as 1,2,4.")
    return [] if text is None else [int(w) for w in text.split(",")]


def plot(args: Namespace) -> None:
    from allforce.report.plot import plot

    if picture := plot(args.FILE, args.output, args.term):
        print(f"{picture}: {', '.join(args.FILE)}")


def report(args: Namespace) -> None:
    if args.watch:
        from allforce.report.serve import watch

        watch(args.RUN_DIR, args.port)
    else:
        from allforce.report.html import report

        print(f"report: {report(args.RUN_DIR, args.output)}")


def test(args: Namespace) -> None:
    with loading():
        from allforce import logs
        from allforce.infer.test import run_test
        from allforce.infer.workers import all_workers
    workers = all_workers()
    if workers.size > 1:
        logs.setup(args.log_level, args.log_path, comm=workers.comm)
    data = {
        "system": args.system,
        "datafile": args.datafile,
        "train_data": args.train_data,
        "valid_data": args.valid_data,
    }
    frames = {"numb_test": args.numb_test, "rand_seed": args.rand_seed, "shuffle_test": args.shuffle_test}
    with workers.ending_together():
        run_test(args.model, **data, **frames, detail_file=args.detail_file, atomic=args.atomic)


def freeze(args: Namespace) -> None:
    with loading():
        from allforce.infer.freeze import freeze
    freeze(args.checkpoint_folder, args.output)


def show(args: Namespace) -> None:
    with loading():
        from allforce.infer.show import show
    show(args.INPUT, args.ATTRIBUTES)


def neighbor_stat(args: Namespace) -> None:
    with loading():
        from allforce.infer.neighbor_stat import neighbor_stat
    neighbor_stat(args.system, args.rcut, args.type_map, args.mixed_type)


def model_devi(args: Namespace) -> None:
    with loading():
        from allforce.infer.devi import model_devi
    relative = {"relative": args.relative, "relative_v": args.relative_v}
    model_devi(args.models, args.system, args.output, args.frequency, args.real_error, args.atomic, **relative)


def eval_desc(args: Namespace) -> None:
    with loading():
        from allforce.infer.desc import eval_desc
    eval_desc(args.model, args.system, args.datafile, args.output, args.dtype)


def lammps(args: Namespace) -> None:
    with loading():
        from allforce import logs
        from allforce.infer.lammps import run_script
        from allforce.infer.workers import all_workers
    workers = all_workers()
    if workers.size > 1:
        logs.setup(args.log_level, args.log_path, comm=workers.comm)
    with workers.ending_together():
        run_script(args.model, args.script, args.var or [], args.lammps_log)


def ipi(args: Namespace) -> None:
    with loading():
        from allforce.infer.ipi import serve_forces
    serve_forces(args.model, args.structure, args.unix, args.address, args.allow_remote)


def change_bias(args: Namespace) -> None:
    with loading():
        from allforce.infer.bias import change_bias
    data = {"system": args.system, "datafile": args.datafile, "bias_value": args.bias_value}
    change_bias(args.INPUT, **data, numb_batch=args.numb_batch, mode=args.mode, output=args.output)


def doc_train_input(args: Namespace) -> None:
    with loading():
        from allforce.config.reference import json_schema, reference_markdown
    if args.out_type == "markdown":
        print(reference_markdown())
    else:
        import json

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
