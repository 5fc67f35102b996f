"""Rank 0's key-value store, by which workers find each other, for those alone who know the secret of the job.

torch's own TCP store has no password. Here both sides prove that they know the secret k (H of secret.py) before
anything else is understood; a and b are random numbers of 32 bytes:

    rank 0 → worker     HELLO a
    worker → rank 0     b H(k, "worker" a b)
    rank 0 → worker     H(k, "rank 0" a b), or zeros for a wrong proof

Then sealed requests and answers go to and fro. Nothing is unpickled, and nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

from .network import exactly
from .secret import SIZE, Seals, proof

HELLO = b"allforce store 1"
HANDSHAKE = 10.0  # seconds that a connection has to prove itself
STRANGERS = 256  # connections at a time that have not; for one more the oldest must go


class Refused(ConnectionError):
    """The other side does not know the secret, or says that this one does not."""


class Server:
    """A thread of rank 0 that has the keys and their values. It rests while another one holds the interpreter."""

    def __init__(self, listener: socket.socket, secret: str):
        self.listener, self.secret = listener, secret.encode()
        self.values: dict[bytes, bytes] = {}
        self.strangers: list[asyncio.StreamWriter] = []  # the oldest first
        self.awaited: dict[bytes, asyncio.Event] = {}  # keys that are not there yet
        self.over = asyncio.Event()
        threading.Thread(target=lambda: asyncio.run(self._run()), name="allforce-store", daemon=True).start()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        door = await asyncio.start_server(self._talk, sock=self.listener, backlog=4096)
        await self.over.wait()
        door.close()

    def close(self) -> None:
        """Not waited for: Python may be shutting down, its threads at rest for ever."""
        with contextlib.suppress(RuntimeError, AttributeError):  # closed already, or not begun
            self.loop.call_soon_threadsafe(self.over.set)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self.strangers) == STRANGERS:
            self.strangers.pop(0).transport.abort()
        self.strangers.append(writer)
        try:
            seals = await asyncio.wait_for(self._admit(reader, writer), HANDSHAKE)
            self.strangers.remove(writer)
            while True:
                count = seals.length(await reader.readexactly(4))
                request = seals.unseal(await reader.readexactly(count))
                for key in request[1:] if request[:1] == [b"get"] else ():
                    while key not in self.values:
                        await self.awaited.setdefault(key, asyncio.Event()).wait()
                writer.write(seals.seal(self._answer(request)))
                await writer.drain()
        except (OSError, EOFError, ValueError, KeyError, asyncio.TimeoutError, asyncio.CancelledError):
            pass  # it has ended, or does not talk as a worker does, or the store is closed
        finally:
            self.strangers = [stranger for stranger in self.strangers if stranger is not writer]
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Seals:
        nonce = secrets.token_bytes(SIZE)
        writer.write(HELLO + nonce)
        nonces = nonce + await reader.readexactly(SIZE)
        known = hmac.compare_digest(await reader.readexactly(SIZE), proof(self.secret, b"worker", nonces))
        writer.write(proof(self.secret, b"rank 0", nonces) if known else bytes(SIZE))
        if not known:
            raise ConnectionError("a stranger")
        return Seals(self.secret, nonces, worker=False)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        values = self.values
        match request:
            case [b"get", *keys]:
                return [values[key] for key in keys]
            case [b"check", *keys]:
                return [b"%d" % all(key in values for key in keys)]
            case [b"delete", key]:
                return [b"%d" % (values.pop(key, None) is not None)]
            case [b"set", key, value]:
                values[key] = value
            case [b"add", key, number]:
                values[key] = value = b"%d" % (int(values.get(key, b"0")) + int(number))
            case _:
                raise ValueError("no request")
        if key in self.awaited:
            self.awaited.pop(key).set()
        return [value] if request[0] == b"add" else []


class Store(dist.Store):
    """The store as a worker and torch see it. Threads that ask at the same time have a line each.

    torch holds the C++ half of this object only, so somebody must hold this one while a group of workers lives.
    """

    def __init__(self, address: str, port: int, secret: str, seconds: float, server: Server | None = None):
        super().__init__()
        self.place, self.secret, self.server = (address, port), secret.encode(), server
        self.idle: list[tuple[socket.socket, Seals]] = []
        self.idle.append(self._dial(seconds))

    def __del__(self) -> None:
        for line, _ in self.idle:
            line.close()
        if self.server is not None:
            self.server.close()

    def _dial(self, seconds: float) -> tuple[socket.socket, Seals]:
        line = socket.create_connection(self.place, timeout=seconds)
        with contextlib.ExitStack() as failure:
            failure.enter_context(line)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                hello = exactly(line, len(HELLO) + SIZE)
            except TimeoutError:
                hello = b""
            if not hello.startswith(HELLO):
                raise ConnectionError("what listens there is not rank 0")
            nonces = hello[len(HELLO) :] + secrets.token_bytes(SIZE)
            line.sendall(nonces[SIZE:] + proof(self.secret, b"worker", nonces))
            if not hmac.compare_digest(exactly(line, SIZE), proof(self.secret, b"rank 0", nonces)):
                raise Refused("what listens there has another secret than this worker")
            failure.pop_all()
        return line, Seals(self.secret, nonces, worker=True)

    def _ask(self, *request: str | bytes, limit: timedelta | None = None) -> list[bytes]:
        try:
            line, seals = self.idle.pop()
        except IndexError:
            line, seals = self._dial(HANDSHAKE)
        with contextlib.ExitStack() as failure:
            failure.enter_context(line)
            line.settimeout((limit or self.timeout).total_seconds())  # type: ignore[attr-defined]
            line.sendall(seals.seal([r.encode() if isinstance(r, str) else r for r in request]))
            answer = seals.unseal(exactly(line, seals.length(exactly(line, 4))))
            failure.pop_all()
        self.idle.append((line, seals))
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask("get", *keys)

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, str(value))[0])

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", *keys) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("get", *keys, limit=timeout)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key) == [b"1"]

    def clone(self) -> Store:
        return self

    deleteKey = delete_key  # noqa: N815  the name by which C++ asks
