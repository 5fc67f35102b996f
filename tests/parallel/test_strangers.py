"""Nobody takes a worker's place, or rank 0's, who does not know the secret of the job."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from conftest import ROOT

from allforce.distributed import store as stores
from allforce.distributed.launch import detect, scrubbed
from allforce.distributed.network import exactly
from allforce.distributed.secret import SIZE
from allforce.distributed.store import HELLO, Refused, Server, Store
from allforce.errors import UserError

HERE = Path(__file__).parent
SECRET = "0123456789abcdef" * 4
ENVIRONMENT = scrubbed(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


PROGRAM = """
import os, sys, torch
from allforce.distributed.connect import join
from allforce.distributed.launch import detect
from allforce.errors import UserError
if "OWN_SECRET" in os.environ:
    os.environ["ALLFORCE_SECRET"] = os.environ["OWN_SECRET"] + os.environ["ALLFORCE_RANK"]
try:
    comm = join(detect())
except UserError as error:
    print(error, flush=True)
    os._exit(2)
ones = torch.ones(10)
comm.all_reduce(ones)
comm.split(comm.rank % 2).close()
print("met", int(ones[0]))
comm.close()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def rank(number: int, size: int, port: int, **extra: str) -> subprocess.Popen:
    """A worker that was told an address and nothing else, as under srun on several hosts."""
    told = {"RANK": number, "SIZE": size, "LOCAL_RANK": number, "LOCAL_SIZE": size}
    environment = ENVIRONMENT | {f"ALLFORCE_{name}": str(value) for name, value in told.items()}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment | extra, **PIPES)


@contextlib.contextmanager
def started(*processes: subprocess.Popen) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_stranger_changes_nothing():
    """He comes while workers wait for a late one, tries everything, and holds more connections than strangers get."""
    port = free_port()
    early = [rank(n, 3, port, ALLFORCE_SECRET=SECRET) for n in (1, 0)]
    command = [sys.executable, str(HERE / "stranger.py"), "127.0.0.1", str(port)]
    guest = subprocess.Popen(command, env=ENVIRONMENT, **PIPES | {"stderr": subprocess.DEVNULL})
    with started(*early, guest):
        found = json.loads(guest.stdout.readline())
        assert not found["torch"] and set(found["secrets"]) == {"refused"} and all(found["hangs_up"]), found
        late = rank(2, 3, port, ALLFORCE_SECRET=SECRET)
        with started(late):
            outputs = [process.communicate(timeout=60)[0] for process in (*early, late)]
            assert [process.returncode for process in (*early, late)] == [0, 0, 0], outputs
            assert outputs == ["met 3\n"] * 3


def test_without_a_secret_the_name_of_the_job_counts():
    """Two jobs at one port by mistake: the worker of the other one is refused. Nobody who knows the name is."""
    port = free_port()
    workers = [rank(n, 2, port, ALLFORCE_JOB="one") for n in (0, 1)]
    with started(*workers):
        assert [w.communicate(timeout=60)[0] for w in workers] == ["met 2\n"] * 2
    first, other = rank(0, 2, port, ALLFORCE_JOB="one", ALLFORCE_TIMEOUT="20"), rank(1, 2, port, ALLFORCE_JOB="two")
    with started(first, other):
        output = other.communicate(timeout=60)[0]
        assert other.returncode == 2 and "another job has this port" in output, output


def test_wrong_secret():
    """The worker that has it is told, at once; rank 0 waits for the right one."""
    port = free_port()
    first = rank(0, 2, port, ALLFORCE_SECRET=SECRET)
    wrong = rank(1, 2, port, ALLFORCE_SECRET=SECRET[::-1])
    with started(first, wrong):
        output = wrong.communicate(timeout=60)[0]
        assert wrong.returncode == 2 and "ALLFORCE_SECRET is not the same for all workers" in output, output
        assert "Traceback" not in output and SECRET not in output and SECRET[::-1] not in output
        right = rank(1, 2, port, ALLFORCE_SECRET=SECRET)
        with started(right):
            assert [p.communicate(timeout=60)[0] for p in (first, right)] == ["met 2\n"] * 2


def test_rank_0_ends_while_others_wait():
    """Who waits in its store for a late worker hears of it at once."""
    port = free_port()
    first, second = rank(0, 3, port), rank(1, 3, port)
    with started(first, second):
        deadline, came = time.monotonic() + 60, 0
        while came < 2:  # rank 1, and rank 0 itself
            assert time.monotonic() < deadline
            lines = psutil.Process(first.pid).net_connections("tcp")
            came = sum(line.status == "ESTABLISHED" and line.laddr.port == port for line in lines)
        time.sleep(1)
        first.kill()
        output = second.communicate(timeout=30)[0]
        assert second.returncode == 2 and "ended before all of them had come" in output, output


@pytest.mark.parametrize("says", [HELLO + bytes(SIZE) + b"\1" * SIZE, b"SSH-2.0-OpenSSH_9.2\r\n" * 10, b""])
def test_false_rank_0(says):
    """One who speaks like rank 0 but does not know the secret, and programs that are none at all."""
    lines: list[socket.socket] = []

    def talk() -> None:
        while len(lines) < 100:
            with contextlib.suppress(OSError):
                lines.append(listener.accept()[0])
                lines[-1].sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = rank(1, 2, listener.getsockname()[1], ALLFORCE_SECRET=SECRET, ALLFORCE_TIMEOUT="3")
        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        with started(worker):
            output = worker.communicate(timeout=60)[0]
        heard = b"".join(line.recv(1000) for line in lines if says.startswith(HELLO))
        for _ in range(100):
            socket.create_connection(listener.getsockname()).close()
        thread.join()
    for line in lines:
        line.close()
    assert worker.returncode == 2 and "Traceback" not in output, output
    expected = "has another secret" if says.startswith(HELLO) else "what listens there is not rank 0"
    assert expected in output, output
    assert len(heard) == 2 * SIZE * says.startswith(HELLO) and SECRET.encode() not in heard


def test_a_place_in_the_engine(launch):
    """Who got into gloo's mesh, here through a store without a password, cannot prove himself there."""
    result = launch("workers", 2, sys.executable, "-c", PROGRAM, OWN_SECRET="a secret of rank ", timeout=60)
    assert result.returncode == 2 and "met" not in result.stdout, result.stdout
    assert "does not share its secret with rank" in result.stdout and "Traceback" not in result.stdout, result.stdout


# ---- the store itself


@contextlib.contextmanager
def served(secret: str = SECRET) -> Iterator[Store]:
    listener = socket.create_server(("127.0.0.1", 0))
    yield Store("127.0.0.1", listener.getsockname()[1], secret, 5, Server(listener, secret))


def test_keys_and_values():
    """As torch sees it: through its C++ half, with prefixes, from several threads at a time."""
    with served() as mine:
        other = Store(*mine.place, SECRET, 5)
        view = dist.PrefixStore("group", mine)
        view.set("text", "Å")
        assert other.get("group/text").decode() == "Å" == view.get("text").decode()
        mine.set("bytes", bytes(range(256)) * 1000)
        assert other.get("bytes") == bytes(range(256)) * 1000
        assert view.check(["text"]) and not view.check(["text", "none"])
        threads = [threading.Thread(target=lambda: [view.add("sum", 2) for _ in range(50)]) for _ in range(8)]
        threads += [threading.Thread(target=view.wait, args=(["late"], timedelta(seconds=20)))]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        other.set("group/late", "now")
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads) and other.add("group/sum", 0) == 800
        assert view.delete_key("text") and not view.delete_key("text")
        begun = time.monotonic()
        with pytest.raises(TimeoutError):
            view.wait(["never"], timedelta(seconds=0.3))
        assert 0.2 < time.monotonic() - begun < 5 and view.check(["late"])


def through(place: tuple[str, int], change) -> tuple[socket.socket, int]:
    """Somebody on the way, who sees all bytes to rank 0 and may change them."""
    door = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket, alter) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(alter(piece))
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        with contextlib.suppress(OSError), door.accept()[0] as here, socket.create_connection(place) as there:
            back = threading.Thread(target=carry, args=(there, here, lambda piece: piece), daemon=True)
            back.start()
            carry(here, there, change)
            back.join(5)

    threading.Thread(target=run, daemon=True).start()
    return door, door.getsockname()[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda piece: piece.replace(b"mine", b"evil"),
        lambda piece: piece * 2 if b"mine" in piece else piece,  # said again
        lambda piece: b"\xff" + piece[1:] if b"mine" in piece else piece,  # four billion bytes to come
    ],
)
def test_bytes_changed_on_the_way(change):
    with served() as mine:
        door, port = through(mine.place, change)
        with door:
            victim = Store("127.0.0.1", port, SECRET, 5)
            with pytest.raises(OSError):
                victim.set("key", "mine")
                victim.set("key", "mine")
            assert not mine.check(["key"]) or mine.get("key") == b"mine"


def test_strangers_have_little_room_and_time(monkeypatch):
    monkeypatch.setattr(stores, "STRANGERS", 20)
    monkeypatch.setattr(stores, "HANDSHAKE", 1.0)
    with served() as mine:
        held = [socket.create_connection(mine.place, timeout=5) for _ in range(60)]
        assert Store(*mine.place, SECRET, 5).add("key", 1) == 1
        with pytest.raises(Refused):
            Store(*mine.place, "wrong", 5)
        for line in held:  # rank 0 has closed them, some at once, the others after the time
            with line, contextlib.suppress(ConnectionError):
                assert exactly(line, len(HELLO) + SIZE).startswith(HELLO)
                assert line.recv(1) == b""
        assert mine.add("key", 1) == 2
        port = mine.place[1]
        del mine
    deadline = time.monotonic() + 5
    while any(c.laddr.port == port for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"):
        assert time.monotonic() < deadline, "the store stays open"
        time.sleep(0.05)


def test_the_secret_is_not_shown(monkeypatch):
    base = {"ALLFORCE_RANK": "1", "ALLFORCE_SIZE": "2", "ALLFORCE_LOCAL_RANK": "1", "ALLFORCE_LOCAL_SIZE": "2"}
    world = detect(base | {"ALLFORCE_SECRET": SECRET})
    assert world.secret == SECRET and SECRET not in repr(world)
    assert "ALLFORCE_SECRET" not in scrubbed({"ALLFORCE_SECRET": SECRET})
    with pytest.raises(UserError, match="has 6 characters"):
        detect(base | {"ALLFORCE_SECRET": "secret"})
