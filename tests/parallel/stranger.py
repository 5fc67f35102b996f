"""Comes to rank 0's store without the secret of the job and tries what a stranger may: stranger.py HOST PORT.

Prints a line of JSON with what was let in, and then holds many silent connections until it is killed.
"""

import json
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from allforce.distributed import store

HELD = 2 * store.STRANGERS


def until_open(host: str, port: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            assert time.monotonic() < deadline, "rank 0 does not listen"
            time.sleep(0.05)


def as_torch_store(host: str, port: int) -> list[str]:
    """Read, list and change keys as every client of torch's TCP store can. What that gave."""
    got: list[str] = []

    def try_all() -> None:
        try:
            other = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
            got.append("connected")
            other.set("roll/0", "mine")
            got.extend(other.list_keys())
        except (dist.DistError, RuntimeError):
            pass

    thread = threading.Thread(target=try_all, daemon=True)
    thread.start()
    thread.join(5)
    return got


def with_secret(host: str, port: int, secret: str) -> str:
    try:
        other = store.Store(host, port, secret, 5)
        other.set("roll/0", "mine")
        return "written"
    except store.Refused:
        return "refused"


def hangs_up(host: str, port: int, text: bytes) -> bool:
    """Rank 0 says hello, at most that it refuses, and nothing else."""
    with socket.create_connection((host, port), timeout=5) as line:
        try:
            line.sendall(text)
            line.shutdown(socket.SHUT_WR)
            heard = b""
            while piece := line.recv(1 << 16):
                heard += piece
        except ConnectionError:
            return True
    return heard.startswith(store.HELLO) and not heard[len(store.HELLO) + store.SIZE :].strip(b"\0")


def main(host: str, port: int) -> None:
    until_open(host, port)
    texts = [b"\xff" * 100_000, b"\xff" * 4, b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64), b"{}\n" * 1000, b""]
    found = {
        "torch": as_torch_store(host, port),
        "secrets": [with_secret(host, port, text) for text in ("", "guess", "explicit", "explicit of 3", "slurm-1-0")],
        "hangs_up": [hangs_up(host, port, text) for text in texts],
    }
    held = [socket.create_connection((host, port), timeout=5) for _ in range(HELD)]
    print(json.dumps(found | {"held": len(held)}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
