"""How the workers of a job find each other: one key-value store that all of them reach, within a time limit.

The workers of --workers inherit one that is a nameless file. Else rank 0 opens one (store.py), unless torchrun's agent
holds one already. Its address is known beforehand (MASTER_ADDR, a node list), or rank 0 announces it: in a file on one
host, in Horovod's HTTP store, or through MPI. It listens on the loopback when all workers are on one host, else on the
interface that leads to the others. What it holds is JSON text and the addresses of torch's own; nothing is unpickled.

Who comes to it must know the secret of the job: ALLFORCE_SECRET, or what rank 0 announces with the address. Where an
address is all that workers have in common, and no ALLFORCE_SECRET, it is the job's name, which tells jobs apart but
which a stranger may know. `World.exposed` says so.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from ..errors import UserError
from .launch import World
from .network import LOOPBACK, is_loopback, outward_address
from .store import HANDSHAKE, Refused, Server, Store

REMEDIES = {
    "slurm": "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500",
    "openmpi": "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 …",
    "hydra": "mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 …",
    "pals": "export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE) MASTER_PORT=29500",
    "jsrun": "export MASTER_ADDR=$(sort -u $LSB_DJOB_RANKFILE | grep -v batch | head -n 1) MASTER_PORT=29500",
    "flux": "export MASTER_ADDR=$(flux hostlist --expand local | cut -d' ' -f1) MASTER_PORT=29500",
}

S = TypeVar("S", bound=dist.Store)
Announce = Callable[[Any], Any]  # takes rank 0's record (None elsewhere), returns it on every rank


def time_limit() -> float:
    """Seconds the workers may take to find each other (ALLFORCE_TIMEOUT)."""
    text = os.environ.get("ALLFORCE_TIMEOUT", "60")
    try:
        return float(text)
    except ValueError:
        raise UserError(f"ALLFORCE_TIMEOUT={text} should be a number of seconds.") from None


def no_contact(world: World, why: str) -> UserError:
    """The error of a launcher that says N workers when they do not find each other."""
    remedy = REMEDIES.get(world.launcher, "export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500")
    return UserError(
        f"{world.started_by} started this process as rank {world.rank} of {world.size}, but the workers did not find"
        f" each other: {why} Add this line before the command (or within it), with a free port:\n    {remedy}\n"
        "If only one process was meant: export ALLFORCE_LAUNCHER=none. If workers start slowly: ALLFORCE_TIMEOUT=300."
    )


def open_store(world: World, limit: float, announce: Announce | None = None) -> tuple[dist.Store, str]:
    """The store of this job, and the address at which this rank reached it ("" where it is its own).

    `announce` (MPI) is used when nothing else leads to rank 0.
    """
    deadline = time.monotonic() + limit
    kind, _, place = world.meeting.partition("://")
    store: dist.Store
    if kind == "fd":
        store, host = dist.FileStore(f"/proc/self/fd/{place}", world.size), ""
    elif kind == "agent":
        host, _, port = place.rpartition(":")
        host = host.strip("[]")
        exposed(world, "it lies in torchrun's store, which has no password")
        store = dist.PrefixStore(world.job_key, _agent(world, host, int(port), deadline))
    elif kind == "tcp":
        host, _, port = place.rpartition(":")
        host = LOOPBACK if world.surely_one_host else host.strip("[]")
        exposed(world, "nothing but an address leads to rank 0, so whoever knows the name of the job is let in")
        store = _by_address(world, host, int(port), deadline)
    elif kind == "local":
        store, host = _announced(world, _file_announce(world), deadline)
    elif kind == "http":
        exposed(world, "it lies in Horovod's store, which has no password")
        store, host = _announced(world, _http_announce(world), deadline)
    elif announce is not None:
        store, host = _announced(world, lambda record, deadline: announce(record), deadline)
    else:
        raise no_contact(world, "nothing in the environment leads to rank 0, and mpi4py cannot be used to ask it.")
    return store, host


def exposed(world: World, why: str) -> None:
    if not world.secret:
        world.exposed = why


def _by_address(world: World, host: str, port: int, deadline: float) -> Store:
    secret = world.secret or f"{world.job_name} of {world.size}"
    if world.rank == 0:
        return _serve(_own(host, world), port, secret)
    try:
        return _connect(world, host, port, secret, deadline)
    except Refused:
        raise UserError(
            f"{world.started_by} started this process as rank {world.rank} of {world.size}, but what listens at {host}"
            f" port {port} has another secret: ALLFORCE_SECRET is not the same for all workers, and the launcher should"
            f" pass it on to each of them, or another job has this port: export MASTER_PORT={port + 1}"
        ) from None


def _own(host: str, world: World) -> str:
    """The address at which rank 0, known to the others as `host`, listens.

    Many machines resolve their own name to a loopback address: then it is that of the interface to the other hosts.
    """
    if host == LOOPBACK and world.surely_one_host:
        return LOOPBACK
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError):
        address = ""
    if address and not is_loopback(str(address)):
        return str(address)
    return LOOPBACK if world.one_host else outward_address(world.hosts)


def _serve(address: str, port: int, secret: str) -> Store:
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"MASTER_ADDR leads to {address}, which is not an address of {socket.gethostname()}, where rank 0 runs."
                " Set it to the host of rank 0."
            ) from None
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "in use by another program" if error.errno == errno.EADDRINUSE else "reserved for the system"
        raise UserError(
            f"Port {port} on {socket.gethostname()}, where rank 0 waits for the other workers, is {why}."
            f" Choose another one: export MASTER_PORT={port + 1 if port >= 1024 else 29500}"
        ) from None
    return Store(address, listener.getsockname()[1], secret, HANDSHAKE, Server(listener, secret))


def _connect(world: World, host: str, port: int, secret: str, deadline: float) -> Store:
    return _until(deadline, world, host, port, lambda seconds: Store(host, port, secret, min(HANDSHAKE, seconds)))


def _agent(world: World, host: str, port: int, deadline: float) -> dist.TCPStore:
    """The store of torchrun's agent."""
    return _until(deadline, world, host, port, lambda seconds: _client(host, port, seconds))


def _until(deadline: float, world: World, host: str, port: int, dial: Callable[[float], S]) -> S:
    while True:
        left = deadline - time.monotonic()
        try:
            return dial(max(0.1, left))
        except Refused:
            raise
        except (OSError, dist.DistError) as error:
            if left <= 0:
                raise no_contact(world, f"rank 0 does not answer at {host} port {port} ({error}).") from None
            time.sleep(0.1)


def _client(host: str, port: int, seconds: float) -> dist.TCPStore:
    """In a thread: torch waits without an end for the answer of a foreign program that listens at the port."""
    socket.create_connection((host, port), timeout=min(5.0, seconds)).close()  # fails quietly
    result: list[Any] = []

    def connect() -> None:
        limit = timedelta(seconds=max(1.0, seconds))
        try:
            result.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
        except dist.DistError as error:
            result.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(1.0, seconds))
    if not result:
        raise TimeoutError("what listens there is not rank 0")
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def _announced(world: World, announce: Callable[[Any, float], Any], deadline: float) -> tuple[Store, str]:
    """Rank 0 opens a store on a free port and tells where, with a secret; a wrong or old record leads nowhere."""
    if world.rank == 0:
        drawn = "" if world.secret else secrets.token_hex(32)
        world.secret = world.secret or drawn
        address = LOOPBACK if world.surely_one_host else outward_address(world.hosts)
        store = _serve(address, 0, world.secret)
        announce({"address": address, "port": store.place[1], "size": world.size, "secret": drawn}, deadline)
        return store, ""
    heard = "it left no record"
    while True:
        record = announce(None, deadline)
        if record and record["size"] == world.size:
            address, port, secret = record["address"], record["port"], world.secret or record["secret"]
            try:
                store = _connect(world, address, port, secret, min(deadline, time.monotonic() + 2))
                world.secret = secret
                return store, address
            except (UserError, Refused) as error:
                heard = f"its record of {address} port {port} leads nowhere"
                if isinstance(error, Refused):
                    heard += (
                        ": what listens there has another secret, and ALLFORCE_SECRET should be set for all or none"
                    )
        if time.monotonic() > deadline:
            raise no_contact(world, f"rank 0 was not found ({heard}); it may have died at its start.")
        time.sleep(0.1)


def _file_announce(world: World) -> Callable[[Any, float], Any]:
    """A file in a directory of this user only, named by the job; it appears whole or not at all."""
    folder = Path(tempfile.gettempdir()) / f"allforce-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise UserError(f"{folder} should be a directory of this user with mode 0700; remove it, or set TMPDIR.")
    path = folder / hashlib.sha256(world.job_key.encode()).hexdigest()[:24]

    def announce(record: Any, deadline: float) -> Any:
        if world.rank == 0:
            remove_stale(folder)
            part = path.with_suffix(f".{os.getpid()}")
            part.touch(mode=0o600)
            part.write_text(json.dumps(record | {"owner": _owner(os.getpid())}))
            part.replace(path)
            world.cleanup.append(path)
            atexit.register(path.unlink, missing_ok=True)
            return record
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None

    return announce


def remove_stale(folder: Path) -> None:
    """Remove the records of jobs that were killed before all had met: of those whose rank 0 is surely gone."""
    for path in folder.iterdir():
        try:
            where, pid, started = json.loads(path.read_text())["owner"]
            if where == _owner(os.getpid())[0] and _owner(pid) != [where, pid, started]:
                path.unlink(missing_ok=True)
        except (OSError, ValueError, TypeError, KeyError):
            continue  # not a record, or removed by its owner just now


def _owner(pid: int) -> list[Any]:
    """A process as nobody else ever is: machine since its start, name space of process numbers, number, and start."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        machine = ""
    try:
        return [machine, pid, psutil.Process(pid).create_time()]
    except psutil.Error:
        return [machine, pid, 0.0]


def _http_announce(world: World) -> Callable[[Any, float], Any]:
    """horovodrun's own key-value server: PUT and GET /scope/key, 404 until the key is there."""
    url = f"{world.meeting}/allforce/store"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a web proxy

    def announce(record: Any, deadline: float) -> Any:
        body = json.dumps(record).encode() if world.rank == 0 else None
        request = urllib.request.Request(url, data=body, method="PUT" if world.rank == 0 else "GET")
        while True:
            try:
                with direct.open(request, timeout=5) as answer:
                    return record if world.rank == 0 else json.loads(answer.read())
            except urllib.error.HTTPError as error:
                if error.code != 404 or world.rank == 0:
                    raise no_contact(world, f"Horovod's store {url} answered {error}.") from None
                return None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise no_contact(world, f"Horovod's store {url} does not answer ({error}).") from None
                time.sleep(0.1)

    return announce


def call_the_roll(world: World, store: dist.Store, entry: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """Every rank writes its entry and waits for all others; those missing are named.

    Rank 0's entry has a secret for what comes after, where all have none in common yet. It leaves last: in MPI_Init,
    which holds the interpreter, it answers nobody.
    """
    if store.add(f"claims/{world.rank}", 1) > 1:
        raise UserError(
            f"Two processes claim to be rank {world.rank} of {world.size}: variables of two launchers are mixed."
        )
    drawn = secrets.token_hex(32) if world.rank == 0 and not world.secret else ""
    store.set(f"roll/{world.rank}", json.dumps(entry | {"size": world.size, "secret": drawn}))
    deadline = time.monotonic() + limit
    roll = [json.loads(text) for text in store.multi_get(_all_have("roll", world, store, limit, deadline))]
    store.set(f"read/{world.rank}", "")
    if world.rank == 0:
        _all_have("read", world, store, limit, deadline)
    for path in world.cleanup:  # all have come: nobody needs the record any more
        path.unlink(missing_ok=True)
    world.secret = world.secret or roll[0]["secret"]
    return roll


def _all_have(what: str, world: World, store: dist.Store, limit: float, deadline: float) -> list[str]:
    """The keys of all ranks for this, when they are there."""
    keys = [f"{what}/{rank}" for rank in range(world.size)]
    while not _there(world, store, keys):
        if time.monotonic() > deadline:
            missing = [rank for rank in range(world.size) if not _there(world, store, [keys[rank]])]
            names = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            raise UserError(
                f"{world.started_by} started this process as rank {world.rank} of {world.size}, but rank {names} did"
                f" not appear within {limit:g} s: it has died at its start, and its own output says why, or it starts"
                f" later than that: ALLFORCE_TIMEOUT={max(300, 2 * limit):.0f}."
            )
        time.sleep(max(0.02, world.size / 2000))  # all ask rank 0
    return keys


def _there(world: World, store: dist.Store, keys: list[str]) -> bool:
    try:
        return store.check(keys)
    except (OSError, dist.DistError) as error:
        raise UserError(
            f"{world.started_by} started this process as rank {world.rank} of {world.size}, but what the workers meet"
            f" at, rank 0 or the launcher, ended before all of them had come; its own output says why ({error})."
        ) from None
