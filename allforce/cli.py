"""The commands `dp` and `allforce`: their arguments."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import threading
from argparse import ArgumentParser
from io import TextIOWrapper

from allforce import __version__
from allforce.commands import (
    change_bias,
    doc_train_input,
    doctor,
    eval_desc,
    freeze,
    init,
    ipi,
    lammps,
    model_devi,
    neighbor_stat,
    plot,
    report,
    scaling_test,
    show,
    test,
    train,
)
from allforce.distributed import ENGINES
from allforce.errors import UserError, file_problem
from allforce.later import postpone
from allforce.logs import LEVELS

BACKENDS = {
    "tensorflow": ["--tf", "--tensorflow"],
    "pytorch": ["--pt", "--pytorch"],
    "paddle": ["--pd", "--paddle"],
    "jax": ["--jax"],
    "dpmodel": ["--dp", "--dpmodel", "--np", "--numpy"],
    "tensorflow2": ["--tf2", "--tensorflow2"],
    "pytorch-exportable": ["--pt-expt", "--pytorch-exportable"],
}
ELSEWHERE = {
    "compress": "models need no compression here: the embedding nets are always evaluated through a table. To compress "
    "a model for DeePMD-kit, freeze it (`dp freeze -o model.dp`), convert and compress it there.",
    "convert-backend": "there is one backend here. `dp freeze -c IN -o OUT` turns every model that can be read (.dp, "
    ".yaml, .pt, a checkpoint) into .dp or .yaml; from .dp to .pth, .pb and others DeePMD-kit's own command converts.",
    "convert-from": "only DeePMD-kit itself reads its old .pb models. Convert them there, at last with "
    "`dp convert-backend model.pb model.dp`; .dp opens here.",
}  # commands of DeePMD-kit, and what serves instead
SHOWN = ["model-branch", "type-map", "descriptor", "fitting-net", "size", "observed-type", "serialization-tree"]


def parser() -> ArgumentParser:
    top = ArgumentParser("dp", description="Allforce: trains and uses Deep Potentials, on one worker or many.")
    top.add_argument("--version", action="version", version=f"Allforce v{__version__}")
    backend = top.add_mutually_exclusive_group()
    backend.add_argument(
        "-b", "--backend", choices=list(BACKENDS), help="accepted for compatibility: there is one backend"
    )
    for name, flags in BACKENDS.items():
        backend.add_argument(*flags, dest="backend", action="store_const", const=name, help=argparse.SUPPRESS)
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name in ELSEWHERE:
        commands.add_parser(name, description=ELSEWHERE[name])  # without `help` the list of commands leaves it out
    for add in (
        _init,
        _train,
        _doctor,
        _test,
        _freeze,
        _show,
        _neighbor_stat,
        _model_devi,
        _eval_desc,
        _change_bias,
        _doc,
        _scaling_test,
        _lammps,
        _ipi,
        _plot,
        _report,
    ):
        add(commands)
    return top


def _command(commands, name: str, run, help: str) -> ArgumentParser:
    form = argparse.ArgumentDefaultsHelpFormatter
    p = commands.add_parser(name, help=help, description=help, formatter_class=form, allow_abbrev=False)
    p.add_argument(
        "-v", "--log-level", choices=list(LEVELS), default="INFO", help="least important lines that are shown"
    )
    p.add_argument("-l", "--log-path", metavar="FILE", help="also write the log to this file")
    p.set_defaults(run=run)
    return p


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _doctor(commands) -> None:
    p = _command(commands, "doctor", doctor, "look whether all is well for a training, here or with many workers")
    p.add_argument("INPUT", nargs="?", help="also whether all workers see the same input and data")
    p.add_argument("--workers", metavar="N", help="start N workers on this machine and look at them")
    p.add_argument("--engine", choices=ENGINES, default="auto", help="what carries data between workers")


def _init(commands) -> None:
    p = _command(commands, "init", init, "write an input file for data, made for the time there is")
    p.add_argument("DATA", nargs="+", help="folders with systems, or files that ASE reads, such as run.extxyz")
    p.add_argument("--time", default="1h", help="how long the training may take on this machine: 10m, 1h, 1d")
    p.add_argument("-o", "--output", default="input.json", metavar="FILE", help="the input file")


def _train(commands) -> None:
    p = _command(commands, "train", train, "train a model")
    p.add_argument("INPUT", help="the input file, JSON or YAML")
    start = p.add_mutually_exclusive_group()
    start.add_argument(
        "-i", "--init-model", metavar="PREFIX", help="begin with the weights of this checkpoint or model"
    )
    start.add_argument(
        "-r",
        "--restart",
        metavar="PREFIX",
        help="continue the run of this checkpoint, prefix or folder; auto: the newest intact one, or from scratch",
    )
    start.add_argument("-f", "--init-frz-model", metavar="FILE", help="begin with the weights of this frozen model")
    start.add_argument(
        "-t", "--finetune", metavar="FILE", help="begin with this model, its energy bias changed to the new data"
    )
    p.add_argument("-o", "--output", default="out.json", metavar="FILE", help="where the complete input is written to")
    p.add_argument(
        "--skip-neighbor-stat", action="store_true", help="do not look for the neighbours of all the data first"
    )
    p.add_argument(
        "--recipe",
        action="store_true",
        help="data and model of INPUT, optimizer, rate and number of steps of the recipe",
    )
    p.add_argument("-m", "--mpi-log", choices=["master", "collect", "workers"], default="master", help=MPI_LOG_HELP)
    p.add_argument(
        "--workers", metavar="N", help="start N workers on this machine; auto: one per GPU, else cores / threads"
    )
    p.add_argument(
        "--max-restarts", type=_count, default=0, metavar="K", help="with --workers: go on so often when one is lost"
    )
    p.add_argument(
        "--max-wall-time", metavar="TIME", help="save and end after this time since the start, such as 11:50:00"
    )
    p.add_argument("--engine", choices=ENGINES, default="auto", help="what carries data between workers")
    p.add_argument(
        "--comm-profile", action="store_true", help="every worker writes its communication to mpi_profile.<job>.<rank>"
    )
    p.add_argument("--json-log", action="store_true", help="lines of the log as JSON objects")
    p.add_argument(
        "--dry-run", action="store_true", help="tell shapes, memory, rates and time by a few steps; write nothing"
    )
    p.add_argument("--world-size", type=_positive, metavar="W", help="with --dry-run: rates and batch of W workers")
    p.add_argument("--timeline", metavar="FILE", help="write when every worker did what, for chrome://tracing")
    p.add_argument(
        "--use-pretrain-script", action="store_true", help="take the model section from the model to begin with"
    )
    p.add_argument("--model-branch", default="", help="accepted empty only: models have one branch")


MPI_LOG_HELP = (
    "the log of many workers: 'master' is that of the first alone, 'collect' sends all lines through the first, "
    "'workers' lets each write its own"
)


def _model_and_data(p: ArgumentParser, model: str = "frozen_model") -> argparse._MutuallyExclusiveGroup:
    p.add_argument("-m", "--model", default=model, help="model file")
    data = p.add_mutually_exclusive_group()
    data.add_argument("-s", "--system", default=".", help="system, or folder with systems")
    data.add_argument("-f", "--datafile", metavar="LIST", help="file with one system per line")
    return data


def _test(commands) -> None:
    p = _command(commands, "test", test, "compare a model with labelled data")
    data = _model_and_data(p)
    data.add_argument("--train-data", metavar="JSON", help="the training data of this input file")
    data.add_argument("--valid-data", metavar="JSON", help="the validation data of this input file")
    p.add_argument("-S", "--set-prefix", help=argparse.SUPPRESS)
    p.add_argument("-n", "--numb-test", type=_count, default=0, help="frames of each system; 0: all")
    p.add_argument("-r", "--rand-seed", type=_count, help="seed of the shuffle")
    p.add_argument("--shuffle-test", action="store_true", help="take frames at random")
    p.add_argument("-d", "--detail-file", metavar="PREFIX", help="write labels and predictions to PREFIX.e.out, …")
    p.add_argument("-a", "--atomic", action="store_true", help="also atomic energies")
    p.add_argument("--head", "--model-branch", dest="head", help=argparse.SUPPRESS)


def _freeze(commands) -> None:
    p = _command(commands, "freeze", freeze, "write the model of a checkpoint to one file")
    p.add_argument(
        "-c",
        "--checkpoint-folder",
        "--checkpoint",
        default=".",
        help="checkpoint, prefix, or folder with a file `checkpoint`",
    )
    p.add_argument("-o", "--output", default="frozen_model", help="model file: .dp (default) or .yaml")
    p.add_argument("--head", "--model-branch", dest="head", help=argparse.SUPPRESS)


def _show(commands) -> None:
    p = _command(commands, "show", show, "tell what is in a model")
    p.add_argument("INPUT", help="model file or checkpoint")
    p.add_argument("ATTRIBUTES", nargs="+", choices=SHOWN, help="what to tell")


def _neighbor_stat(commands) -> None:
    p = _command(
        commands, "neighbor-stat", neighbor_stat, "smallest distance and largest numbers of neighbours of data"
    )
    p.add_argument("-s", "--system", default=".", help="system, or folder with systems")
    p.add_argument("-r", "--rcut", type=float, required=True, help="cutoff radius in Å")
    p.add_argument("-t", "--type-map", nargs="+", metavar="NAME", help="names of the types")
    p.add_argument("--mixed-type", "--one-type", action="store_true", help="all types together")


def _model_devi(commands) -> None:
    p = _command(commands, "model-devi", model_devi, "deviation between the predictions of several models")
    p.add_argument("-m", "--models", nargs="+", default=[f"graph.{k:03d}" for k in range(4)], help="model files")
    p.add_argument("-s", "--system", default=".", help="system, or folder with systems")
    p.add_argument("-S", "--set-prefix", help=argparse.SUPPRESS)
    p.add_argument("-o", "--output", default="model_devi.out", help="file the table is appended to")
    p.add_argument("-f", "--frequency", type=int, default=1, help="steps between frames, for the first column")
    p.add_argument("--real_error", action="store_true", help="errors against the labels instead of deviations")
    p.add_argument("--atomic", action="store_true", help="also the deviation of the force on every atom")
    p.add_argument("--relative", type=float, metavar="LEVEL", help="force deviations relative to |force| + LEVEL")
    p.add_argument("--relative_v", type=float, metavar="LEVEL", help="virial deviations relative to |virial| + LEVEL")


def _eval_desc(commands) -> None:
    p = _command(commands, "eval-desc", eval_desc, "write descriptors")
    _model_and_data(p)
    p.add_argument("-o", "--output", default="desc", help="folder for the .npy files")
    p.add_argument("--dtype", choices=["fp32", "fp64", "native"], default="native", help="type of the numbers")
    p.add_argument("--head", "--model-branch", dest="head", help=argparse.SUPPRESS)


def _change_bias(commands) -> None:
    p = _command(commands, "change-bias", change_bias, "fit the energy bias of a model to data")
    p.add_argument("INPUT", help="model file or checkpoint")
    data = p.add_mutually_exclusive_group()
    data.add_argument("-s", "--system", default=".", help="system, or folder with systems")
    data.add_argument("-f", "--datafile", metavar="LIST", help="file with one system per line")
    data.add_argument("-b", "--bias-value", type=float, nargs="+", help="the bias itself, one number per type")
    p.add_argument("-n", "--numb-batch", type=_count, default=0, help="batches of each system; 0: all")
    p.add_argument("-m", "--mode", choices=["change", "set"], default="change", help="fit the errors, or the labels")
    p.add_argument("-o", "--output", help="the new model; by default INPUT with _updated before the suffix")
    p.add_argument("--model-branch", help=argparse.SUPPRESS)


def _doc(commands) -> None:
    p = _command(commands, "doc-train-input", doc_train_input, "print the reference of the input file")
    p.add_argument("--out-type", choices=["markdown", "json_schema"], default="markdown", help="form")


def _scaling_test(commands) -> None:
    p = _command(commands, "scaling-test", scaling_test, "measure how training speeds up with workers on this machine")
    p.add_argument("INPUT", help="the input file of a training")
    p.add_argument("--workers", default="1,2,4", metavar="W,W,…", help="numbers of workers")
    p.add_argument("--steps", type=_count, default=100, help="steps measured for each, after as many to warm up")
    p.add_argument("--engine", default="auto", metavar="E,E,…", help="what carries data: auto, torch, mpi; or several")
    p.add_argument(
        "--strong", action="store_true", help="deal batch_size out to the workers, instead of so much for each"
    )
    p.add_argument(
        "--predict", metavar="W,W,…", help="also predict the speed of so many workers, from what a step costs here"
    )
    p.add_argument("--latency", type=float, default=5.0, help="of --predict: µs of a message between machines")
    p.add_argument("--bandwidth", type=float, default=10.0, help="of --predict: GB/s between machines")
    p.add_argument("-o", "--output", default="scaling.png", help="picture; needs matplotlib")


def _lammps(commands) -> None:
    p = _command(commands, "lammps", lammps, "run an input script of LAMMPS that says `pair_style allforce`")
    p.add_argument("-m", "--model", default="frozen_model", help="model file or checkpoint")
    p.add_argument("-in", dest="script", required=True, metavar="SCRIPT", help="input script of LAMMPS")
    p.add_argument("-var", nargs="+", action="append", metavar="NAME VALUE", help="variable of the script")
    p.add_argument("--lammps-log", default="log.lammps", metavar="FILE", help="LAMMPS's own log")


def _ipi(commands) -> None:
    p = _command(commands, "ipi", ipi, "compute forces for a waiting i-PI")
    p.add_argument("-m", "--model", default="frozen_model", help="model file or checkpoint")
    p.add_argument("-s", "--structure", required=True, help="file (of any kind that ASE reads) with the atoms in order")
    p.add_argument("--unix", metavar="NAME", help="unix socket /tmp/ipi_NAME")
    p.add_argument("--address", metavar="HOST:PORT", help="address of a socket on this machine")
    p.add_argument("--allow-remote", action="store_true", help="let --address be on another machine")


def _plot(commands) -> None:
    p = _command(commands, "plot", plot, "draw learning curves, dp test details, scaling or a timeline")
    p.add_argument("FILE", nargs="+", help="files of one kind, or folders with lcurve.out")
    p.add_argument("-o", "--output", help="picture: .png, .svg or .pdf; named after what it shows by default")
    p.add_argument("--term", action="store_true", help="draw in the terminal instead")


def _report(commands) -> None:
    p = _command(commands, "report", report, "write what a run has left in its folder to one HTML file")
    p.add_argument("RUN_DIR", nargs="?", default=".", help="folder in which a training ran or runs")
    p.add_argument("-o", "--output", help="the file; by default RUN_DIR/report.html")
    p.add_argument("--watch", action="store_true", help="serve it to this machine while the training goes on")
    p.add_argument("--port", type=_count, default=0, help="port of --watch; 0: any")


def leave(code: int) -> None:
    """End the process as Python does, but without the 0.1 s in which torch's libraries take themselves apart.

    Not where somebody waits for just that: a thread that has work to do, or a tool that was loaded before the program.
    """
    busy = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if busy or "LD_PRELOAD" in os.environ:
        return
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # of which Python itself tells
        return
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    if argv is None:  # a process of its own
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # a terminal without Å and µ gets \xc5 and \xb5
                stream.reconfigure(errors="backslashreplace")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would fight with torch's for the cores
        postpone()
    top = parser()
    args, rest = top.parse_known_args(argv)
    if args.command in ELSEWHERE:
        print(f"dp {args.command}: error: {ELSEWHERE[args.command]}", file=sys.stderr)
        return 2
    if rest:
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    args.argv = sys.argv[1:] if argv is None else argv
    if args.command is None:
        top.print_help()
        return 0
    if branch := getattr(args, "head", None) or getattr(args, "model_branch", None):
        print(f"dp {args.command}: error: --model-branch {branch}: models here have no branches.", file=sys.stderr)
        return 2
    if args.backend:
        print(f"dp: note: --backend {args.backend} has no effect, Allforce has one backend (PyTorch).", file=sys.stderr)
    try:
        if args.run is not train:  # which knows its workers first
            from allforce import logs

            logs.setup(args.log_level, args.log_path)
        code = args.run(args) or 0
        if argv is None:
            gc.freeze()  # to look through all of torch's objects for cycles would keep the terminal for a second
            if getattr(args, "alone", False):
                leave(code)
        return code
    except UserError as error:
        print(f"dp {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `dp doc-train-input | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"dp {args.command}: error: {file_problem(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
