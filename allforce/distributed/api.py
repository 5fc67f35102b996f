"""Data parallelism for a model of one's own: the eight steps, with the same engines as `dp train`.

Everything works in one process, too: without a launcher there is one worker, and nothing is sent.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UserError, file_problem, program_line
from ..trace import Tracer
from . import devices
from .averaging import Named, average_gradients
from .comm import Comm, LostContact
from .connect import join
from .launch import World, detect
from .mpi_profile import write_profile
from .profile import CountedComm
from .sharding import Mode, Shard
from .shared import HostComm
from .timeline import LIMIT as EVENTS
from .timeline import open_timeline, packed
from .torch_comm import TorchComm
from .trees import read_tree, send, write_tree
from .watch import LIMIT, LOST

__all__ = [
    "DistributedOptimizer", "all_reduce", "average", "barrier", "broadcast", "ddp", "device", "gather", "init", "load",
    "local_rank", "local_size", "rank", "save", "scale_lr", "shard", "shutdown", "size",
]  # fmt: skip
SCALES = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}  # the rate is multiplied by size to this power


@dataclass
class Team:
    world: World
    comm: CountedComm
    device: torch.device
    profile: bool = False
    timeline: str | None = None
    trace: Tracer = field(default_factory=Tracer)
    until_the_end: ExitStack = field(default_factory=ExitStack)


_team: Team | None = None


# ---- 1, 2: who am I, and on which device


def init(engine: str = "auto", timeout: float = LIMIT) -> None:
    """Join the workers that the launcher started, pin this one's GPU, share out the cores. A second call does nothing.

    From here on an exception of one worker ends all of them, a UserError is shown without a traceback, and the exit of
    the program closes the connection. A worker that dies, or whose process gives no sign of life for `timeout` seconds,
    ends all others with exit code 75 and a line that names it; how long it computes does not matter.
    """
    global _team
    if _team is not None:
        return
    sys.excepthook = _give_up
    world = detect()
    own, _ = devices.setup(world)
    profile, timeline = os.environ.get("ALLFORCE_COMM_PROFILE", "0") != "0", os.environ.get("HOROVOD_TIMELINE")
    comm = join(world, engine, own, exact=profile or bool(timeline))
    timeline = timeline if comm.engine != "horovod" else None  # which writes its own
    comm.timed = profile or bool(timeline)
    if comm.watch is not None:
        comm.watch.limit, comm.watch.doing = timeout, lambda: (-1, f"the program, after {comm.calls} collectives")
    elif world.note and comm.rank == 0:
        _warn(world.note)
    _team = Team(world, comm, own, profile, timeline)
    if timeline:
        _team.trace.max_events = EVENTS // comm.size
        _team.until_the_end.enter_context(_team.trace.installed())
    sys.excepthook = _give_up  # torch has put its own in the way
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the workers; all of them call it. Done at the exit of the program, too."""
    global _team
    atexit.unregister(shutdown)
    if sys.excepthook is _give_up:
        sys.excepthook = sys.__excepthook__
    team, _team = _team, None
    if team is not None:
        team.until_the_end.close()
        if team.timeline:
            _write_timeline(team, team.timeline)
        if team.profile:
            try:
                write_profile(team.comm)
            except OSError as error:
                _warn(f"ALLFORCE_COMM_PROFILE: {file_problem(error)}")
        gc.collect()  # DistributedDataParallel, in cycles, holds the group, whose threads must end here
        if team.comm.watch is not None:
            team.comm.watch.leave()
            team.comm.watch = None
        team.comm.close()


def _write_timeline(team: Team, path: str) -> None:
    """The collectives of all workers, and what phases the program has named."""
    comm = team.comm
    events = [("main", *span) for span in comm.settle() if span[2] > span[1]] + team.trace.take_events()
    gathered, hosts = comm.comm.gather(packed(events, comm.origin)), comm.comm.gather(socket.gethostname())
    if comm.rank == 0 and (timeline := open_timeline(path, hosts, _warn)) is not None:
        timeline.add(gathered)
        timeline.close()


def _warn(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _here() -> Team:
    init()
    assert _team is not None
    return _team


def fail(error: BaseException) -> NoReturn:
    """End all workers as an exception that nobody caught would."""
    _give_up(type(error), error, error.__traceback__)


def _give_up(kind: type[BaseException], error: BaseException, trace: Any) -> NoReturn:
    """An exception nobody caught: say it, and end all workers, which would wait for this one."""
    team, code = _team, 2 if issubclass(kind, UserError) else 1
    if isinstance(error, LostContact):
        code = LOST
        if team is not None and team.comm.watch is not None:
            team.comm.watch.wait_for_word()  # it knows who was lost
        print(f"error: {error}. All workers end.", file=sys.stderr, flush=True)
    elif issubclass(kind, UserError):
        name = "" if team is None else f"rank {team.comm.rank} on {socket.gethostname()}: "
        print(f"error: {name}{program_line(trace)}{error}", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)
    if team is not None:
        if team.comm.rank > 0:
            time.sleep(1.0)  # mostly all have the same complaint: let the first end the job
        team.comm.abort(code)
    raise SystemExit(code)


def connection() -> Comm:
    """What carries everything below, for parts that bring collectives of their own."""
    return _here().comm


def rank() -> int:
    return _here().comm.rank


def size() -> int:
    return _here().comm.size


def local_rank() -> int:
    """The number of this worker among those of its machine."""
    return _here().world.local_rank


def local_size() -> int:
    return _here().world.local_size


def device() -> torch.device:
    """The GPU of this worker's local rank, or the CPU."""
    return _here().device


# ---- 3, 4: learning rate and optimizer


def scale_lr(lr: float, how: str = "linear") -> float:
    """lr × size (linear), lr × √size (sqrt), lr (none)."""
    if how not in SCALES:
        raise UserError(f"scale_lr: how is {how!r}. Expected one of {', '.join(SCALES)}")
    return lr * size() ** SCALES[how]


def DistributedOptimizer(optimizer: Optimizer, model: Named = None, accumulate: int = 1) -> Any:
    """The optimizer, which from now on sees gradients that are means over all workers.

    They are averaged at the end of every `accumulate`-th backward pass, in one collective. `model` (or its
    named_parameters) gives the parameters their names in messages. Added are
        no_sync()        a context in which backward passes only add up on this worker
        synchronize()    average now, for those who collect gradients in another way
    """
    return average_gradients(_here().comm, optimizer, model, accumulate)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    """The model in torch's DistributedDataParallel, over the same workers; the model itself when there is but one."""
    team = _here()
    comm: Comm = team.comm
    while isinstance(comm, (CountedComm, HostComm)):
        comm = comm.comm
    if comm.size == 1:
        return model
    if not isinstance(comm, TorchComm):
        raise UserError(
            f"ddp: the workers are joined by the engine {comm.engine}, but torch's DistributedDataParallel needs"
            " torch's own. Begin with init(engine='torch')"
        )
    ids = [team.device.index] if team.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, process_group=comm.group, **options)


# ---- 5: the same beginning


def broadcast(*objects: Any, root: int = 0) -> Any:
    """Give all workers the root's state of models, optimizers, schedulers (whatever has a state_dict), or its value.

    Tensors are overwritten; other values (numbers, texts, lists, dicts) are returned.
    """
    comm = _here().comm
    is_root = comm.rank == root
    states = send(comm, [_state(thing) for thing in objects] if is_root else None, root)
    results = [thing if is_root else _restore(thing, state) for thing, state in zip(objects, states, strict=True)]
    return results[0] if len(results) == 1 else results


def _state(thing: Any) -> Any:
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _restore(thing: Any, state: Any) -> Any:
    if isinstance(thing, Tensor):
        thing.detach().copy_(state)
        return thing
    if not hasattr(thing, "load_state_dict"):
        return state
    try:
        thing.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"the state does not fit this {type(thing).__name__}: {error}. It was made for another model or optimizer"
        ) from None
    return thing


# ---- 6: data


def shard(data: Iterable[Any], mode: Mode = "global", seed: int | None = None) -> Shard:
    """This worker's batches of a DataLoader, a list or any iterable; see sharding.py for the modes.

    `seed` and the number of the epoch fix every random order, also that of a DataLoader with shuffle=True. A list is
    taken in its order when there is no seed.
    """
    return Shard(_here().comm, data, mode, seed)


# ---- 7: checkpoints


def save(path: str | Path, model: Any, optimizer: Any = None, step: int = 0, **more: Any) -> None:
    """Rank 0 writes the states of model, optimizer and `more` (schedulers, scalers, plain values) to one file, whole or
    not at all: safetensors with JSON in its header, no pickle. The other workers do nothing.
    """
    if _here().comm.rank == 0:
        parts = {"model": model, "optimizer": optimizer, "step": step, **more}
        write_tree(path, {name: _state(part) for name, part in parts.items()})


def load(path: str | Path, model: Any = None, optimizer: Any = None, **more: Any) -> dict[str, Any]:
    """Restore what save() wrote, on every worker; rank 0 alone reads the file. Returns the plain values: step, …"""
    comm = _here().comm
    state, problem = None, None
    if comm.rank == 0:
        try:
            state = read_tree(path)
        except UserError as error:
            problem = str(error)
    problem = comm.gather(problem)[0]
    if problem is not None:
        raise UserError(problem)
    state = send(comm, state, 0)
    parts = {name: part for name, part in {"model": model, "optimizer": optimizer, **more}.items() if part is not None}
    for name, part in parts.items():
        if state.get(name) is None:
            raise UserError(f"{path}: has no {name}; it has {', '.join(k for k, v in state.items() if v is not None)}")
        _restore(part, state[name])
    return {name: value for name, value in state.items() if name not in ("model", "optimizer", *parts)}


# ---- 8: figures of all workers


def average(value: Any) -> Any:
    """The mean over all workers of a number, a tensor, or a dict or list of them, in one collective."""
    return all_reduce(value, "mean")


def all_reduce(value: Any, op: str = "mean") -> Any:
    """mean, sum, max or min over all workers of a number, a tensor, or a dict or list of them, in one collective."""
    if op not in ("mean", "sum", "max", "min"):
        raise UserError(f"all_reduce: op is {op!r}. Expected mean, sum, max or min")
    team = _here()
    leaves: list[Any] = []
    _collect(value, leaves)
    tensors = [x.detach() if isinstance(x, Tensor) else torch.tensor(float(x)) for x in leaves]
    flat = [t.to(team.device, torch.float64).reshape(-1) for t in tensors]
    wire = torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64, device=team.device)
    team.comm.all_reduce(wire, "sum" if op == "mean" else op)
    if op == "mean":
        wire /= team.comm.size
    parts = iter(wire.split([f.numel() for f in flat]))
    return _put_back(value, parts)


def _collect(value: Any, leaves: list[Any]) -> None:
    if isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _collect(part, leaves)
    else:
        leaves.append(value)


def _put_back(value: Any, parts: Any) -> Any:
    if isinstance(value, dict):
        return {name: _put_back(part, parts) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_put_back(part, parts) for part in value])
    part = next(parts)
    if not isinstance(value, Tensor):
        return float(part)
    dtype = value.dtype if value.is_floating_point() else torch.float64
    return part.to(value.device, dtype).reshape(value.shape)


def gather(value: Any) -> list[Any]:
    """The values of all workers (tensors, numbers, texts, lists and dicts of them), on every worker."""
    comm = _here().comm
    return [send(comm, value if comm.rank == root else None, root) for root in range(comm.size)]


def barrier() -> None:
    """Wait until all workers have come."""
    _here().comm.barrier()
