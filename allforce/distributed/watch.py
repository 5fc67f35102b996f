"""Nobody waits for the dead: one watch over all workers, whatever engine carries their data.

A thread of every worker has a line to that of rank 0, apart from the engine: an abstract unix socket on one host, TCP
on the interface that leads to the others across hosts. A worker proves by HMAC that it knows the secret of the job
(secret.py). Twice a second it says what it is doing, in lines of JSON; nothing else is understood.

    the line closes                     the worker has ended: all others end, within a second
    silence for the limit               it hangs, or its host is dead: all others end
    behind the others for 10 s          a line of the log says who is waited for, and goes on waiting
    five times slower than the others   a line of the log names it, once
    the launcher has ended              so does this worker

The limit is `training.distributed_timeout`. Workers end with the exit code LOST: nobody's mistake, try again.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .launch import LASTING, LOST, World
from .network import exactly, outward_address
from .profile import CountedComm
from .secret import SIZE, proof
from .spawn import report
from .store import HANDSHAKE

LIMIT = 30.0  # seconds, until the input says otherwise
INTERVAL = 0.5  # seconds between two signs of life
PATIENCE = 10.0  # seconds of waiting that are worth a line
SLOW, STEPS = 5.0, 8  # times slower than the others over this many steps
PAUSE = 0.2  # seconds for the last words to be read
LONGEST = 1 << 16  # bytes of a line


@dataclass
class Peer:
    """What is known of another worker."""

    rank: int
    name: str  # rank 1 (process 4711 on node07)
    heard: float  # when, by our clock
    calls: int = 0  # collectives it has come to
    inside: bool = True  # one of them, waiting for others
    since: float = 0.0  # when it went in or came out, by our clock
    step: int = -1
    busy: float = 0.0  # seconds spent outside of collectives
    doing: str = ""
    logged: float = 0.0  # seconds of waiting that the log has said
    slow: int = 0  # comparisons in a row in which it was
    mark: tuple[int, float] = (-1, 0.0)  # step and busy at the last comparison


@dataclass
class Line:
    """One connection; `peer` is None until it has said who it is."""

    socket: socket.socket
    born: float
    challenge: bytes = b""
    peer: Peer | None = None
    text: bytearray = field(default_factory=bytearray)


class Watch:
    """Started by all workers together after they have met; `doing` may be set to tell step and phase."""

    def __init__(self, comm: CountedComm, world: World, limit: float = LIMIT):
        self.stopping = False  # this worker has given up and told the others
        self.comm, self.world, self.limit = comm, world, limit
        self.doing: Callable[[], tuple[int, str]] = lambda: (-1, "the start")
        self.warn: Callable[[str], None] = lambda words: print(words, file=sys.stderr, flush=True)
        self.poll, self.lines, self.over = selectors.DefaultSelector(), dict[int, Line](), threading.Event()
        self.wake, self.pipe = socket.socketpair()
        self.poll.register(self.pipe, selectors.EVENT_READ, "wake")
        self.left: list[Peer] = []  # who has ended its program in peace
        self.listener: socket.socket | None = None
        self.thread = threading.Thread(target=self._run, name="allforce-watch", daemon=True)
        self._hold_launcher()
        place = self._meet()
        problem = self._dial(place) if comm.rank > 0 else ""
        if comm.rank > 0:
            self.thread.start()
        self.problem = next(filter(None, comm.gather(problem)), "")  # why there is no watch, on all workers
        if self.problem:
            self._stop()

    # ---- meeting

    def _meet(self) -> Any:
        """Who is there, and where rank 0 is to be reached."""
        own = [_here(), f"rank {self.comm.rank} (process {os.getpid()} on {socket.gethostname()})"]
        everyone = self.comm.gather(own)
        self.names = [name for _, name in everyone]
        one_host = len({here for here, _ in everyone}) == 1
        offer = self._listen(one_host) if self.comm.rank == 0 else None
        place, now = self.comm.gather(offer)[0], time.monotonic()
        self.me = Peer(self.comm.rank, self.names[self.comm.rank], now)
        self.waited_for = set(range(1, self.comm.size)) if self.comm.rank == 0 else set()
        self.begun = now
        if self.comm.rank == 0:
            self.thread.start()
        return place

    def _dial(self, place: Any) -> str:
        """Join rank 0's watch; why not, when that fails."""
        line = socket.socket(socket.AF_UNIX if isinstance(place, str) else _family(place[0]))
        line.settimeout(HANDSHAKE)
        try:
            line.connect("\0" + place if isinstance(place, str) else tuple(place))
            challenge = exactly(line, SIZE)
            shown = {"rank": self.comm.rank, "proof": self._proof(challenge, self.comm.rank)}
            line.sendall(json.dumps(shown).encode() + b"\n")
        except OSError as error:
            line.close()
            return f"{self.me.name} does not reach rank 0 at {place} ({error})"
        now = time.monotonic()
        self._add(Line(line, now, peer=Peer(0, self.names[0], now, since=now)))
        return ""

    def _proof(self, challenge: bytes, rank: int) -> str:
        return proof(self.world.secret.encode(), b"watch", challenge, str(rank).encode()).hex()

    def _listen(self, one_host: bool) -> Any:
        if one_host and sys.platform == "linux":
            name = f"allforce-{secrets.token_hex(16)}"
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind("\0" + name)
            place: Any = name
        else:
            try:
                address = outward_address(self.world.hosts)
            except UserError:
                return ""  # where nobody is reached
            self.listener = socket.create_server((address, 0), family=_family(address))
            place = list(self.listener.getsockname()[:2])
        self.listener.listen(self.comm.size + 16)
        self.listener.setblocking(False)
        self.poll.register(self.listener, selectors.EVENT_READ, "door")
        return place

    def _add(self, line: Line) -> None:
        line.socket.setblocking(False)
        self.lines[line.socket.fileno()] = line
        self.poll.register(line.socket, selectors.EVENT_READ, line)

    def _drop(self, line: Line) -> None:
        self.poll.unregister(line.socket)
        del self.lines[line.socket.fileno()]
        line.socket.close()

    def _hold_launcher(self) -> None:
        """A launcher that is gone leaves nobody who would end the workers."""
        if self.world.launcher in LASTING and hasattr(os, "pidfd_open") and self.world.launcher_pid > 1:
            with contextlib.suppress(OSError):  # gone already: who started this worker is not who it seems to be
                self.poll.register(os.pidfd_open(self.world.launcher_pid), selectors.EVENT_READ, "launcher")

    # ---- the thread

    def _run(self) -> None:
        looked = time.monotonic()
        while not self.over.is_set():
            ready = self.poll.select(max(0.0, looked + INTERVAL - time.monotonic()))
            now = time.monotonic()
            if now - looked > 10 * INTERVAL:  # this worker itself was stopped for a while: that is nobody's silence
                for line in self.lines.values():
                    line.born += now - looked
                    if line.peer is not None:
                        line.peer.heard += now - looked
            for key, _ in ready:
                self._serve(key.data, now)
            if now - looked >= INTERVAL:
                looked = now
                me = self._update(now)
                self._say({"news": [me.calls, me.inside, now - me.since, me.step, me.busy, me.doing]})
                self._look(now)

    def _serve(self, what: Any, now: float) -> None:
        if what == "wake":
            self.pipe.recv(64)
        elif what == "launcher":
            self.end(LOST, f"The launcher (process {self.world.launcher_pid}) has ended: rank {self.comm.rank} ends.")
        elif what == "door":
            assert self.listener is not None
            with contextlib.suppress(OSError):
                line = Line(self.listener.accept()[0], now, challenge=secrets.token_bytes(SIZE))
                line.socket.setblocking(False)
                line.socket.send(line.challenge)
                self._add(line)
        elif what.socket.fileno() in self.lines:
            self._read(what, now)

    def _read(self, line: Line, now: float) -> None:
        try:
            piece = line.socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        line.text += piece
        *texts, rest = line.text.split(b"\n")
        line.text = bytearray(rest)
        try:
            for text in texts:
                self._hear(line, json.loads(text), now)
        except (ValueError, TypeError, KeyError, AttributeError):
            piece = b""  # a stranger
        if piece and len(rest) <= LONGEST:
            return
        self._drop(line)
        if line.peer is not None and not self.over.is_set():
            self._lost(line.peer, "has ended")

    def _hear(self, line: Line, said: dict[str, Any], now: float) -> None:
        if line.peer is None:
            rank = said["rank"]
            if rank not in self.waited_for or not hmac.compare_digest(self._proof(line.challenge, rank), said["proof"]):
                raise ValueError("a stranger")
            self.waited_for.remove(rank)
            line.peer = Peer(rank, self.names[rank], now, since=now)
            return
        peer = line.peer
        peer.heard = now
        if "news" in said:
            peer.calls, peer.inside, since, peer.step, peer.busy, peer.doing = said["news"]
            peer.since = now - since
        if "left" in said:
            peer.calls = said["left"]
            self.left.append(peer)
            line.peer = None  # its line may close now
        if "end" in said:
            code, words, by = said["end"]
            self._say({"end": [code, "", by]}, but=line)
            self.end(code, words if self._speaks(by) else "")

    def _update(self, now: float) -> Peer:
        """What this worker knows of itself."""
        me, comm = self.me, self.comm
        me.heard, me.calls, me.inside, me.since = now, comm.calls, comm.inside, comm.since
        me.step, me.doing = self.doing()
        me.busy = time.perf_counter() - comm.begun - comm.record.seconds
        return me

    def _everyone(self) -> list[Peer]:
        return [self.me, *(line.peer for line in self.lines.values() if line.peer is not None)]

    def _say(self, what: dict[str, Any], but: Line | None = None) -> None:
        text = json.dumps(what).encode() + b"\n"
        for line in list(self.lines.values()):
            if line.peer is not None and line is not but:
                with contextlib.suppress(OSError):  # stopped, and its buffer is full: it is heard of by its silence
                    line.socket.send(text)

    def _look(self, now: float) -> None:
        for line in list(self.lines.values()):
            if line.peer is None:
                if now - line.born > HANDSHAKE:
                    self._drop(line)
            elif now - line.peer.heard > self.limit:
                self._lost(line.peer, f"has given no sign of life for {now - line.peer.heard:.0f} s")
        if self.waited_for and now - self.begun > max(self.limit, HANDSHAKE):
            self._lost(Peer(rank := min(self.waited_for), self.names[rank], now), "did not come to the watch")
        for peer in self.left:
            if self.me.inside and self.me.calls > peer.calls:
                self._lost(peer, "has left its program, but the others still need it")
        self._look_for_waiting(now)
        if self.comm.rank == 0:
            self._look_for_slow()

    # ---- what is said

    def _look_for_waiting(self, now: float) -> None:
        """Rank 0 sees all; another worker sees rank 0 alone and speaks only when that is silent."""
        everyone = self._everyone()
        if self.comm.rank > 0 and not (self._speaks(0) and now - everyone[-1].heard > PATIENCE / 2):
            return
        front = max(peer.calls for peer in everyone)
        came = [peer.since for peer in everyone if peer.calls == front and peer.inside]
        waited = now - min(came, default=now)
        late = []
        for peer in everyone:
            silent = now - peer.heard  # a stopped worker may have come to the very call in which the others wait
            seconds = max(waited if peer.calls < front else 0.0, silent if silent >= PATIENCE else 0.0)
            if seconds == 0.0:
                peer.logged = 0.0
            elif seconds >= peer.logged + PATIENCE:
                peer.logged = seconds // PATIENCE * PATIENCE
                late.append((peer, seconds, silent))
        for peer, seconds, silent in late[:4]:
            state = f", which has given no sign of life for {silent:.0f} s" if silent > 4 * INTERVAL else ""
            self.warn(f"waiting for {peer.name} for {seconds:.0f} s{state} (in {_place(peer)})")

    def _look_for_slow(self) -> None:
        """Seconds a step outside of collectives, of each worker since it was last compared, against their median."""
        everyone = self._everyone()
        if any(peer.mark[0] < 0 or peer.step < peer.mark[0] for peer in everyone):
            for peer in everyone:
                peer.mark = (peer.step, peer.busy)
            return
        if len(everyone) < 2 or min(peer.step - peer.mark[0] for peer in everyone) < STEPS:
            return
        rates = {peer.rank: (peer.busy - peer.mark[1]) / (peer.step - peer.mark[0]) for peer in everyone}
        for peer in everyone:
            usual = statistics.median(rate for rank, rate in rates.items() if rank != peer.rank)
            peer.slow = peer.slow + 1 if rates[peer.rank] > max(SLOW * usual, 0.01) else min(peer.slow, 0)
            if peer.slow == 2:  # twice in a row: a checkpoint is no slowness
                peer.slow = -(10**9)  # said once
                took = f"{rates[peer.rank]:.3f} s a step by itself, the others {usual:.3f} s"
                self.warn(f"{peer.name} is slow: {took}. All wait for it; look at what else runs on its cores or GPU.")
            peer.mark = (peer.step, peer.busy)

    def _speaks(self, about: int) -> bool:
        """One worker of each host says what all of them notice; rank 0 alone, as long as it is there."""
        return self.comm.rank == 0 or (about == 0 and (self.comm.rank == 1 or self.world.local_rank == 0))

    def _lost(self, peer: Peer, how: str) -> None:
        if self.stopping:  # they end because this worker told them to
            return
        words = f"{peer.name} {how}; it was in {_place(peer)}. All workers end."
        self._say({"end": [LOST, "", peer.rank]})
        self.end(LOST, words if self._speaks(peer.rank) else "")

    # ---- the end

    def end(self, code: int, words: str) -> None:
        """End this process, whatever its main thread waits for."""
        if words and not report(words, code):
            with contextlib.suppress(OSError):
                print(words, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        if self.comm.rank == 0:
            time.sleep(2 * PAUSE)  # the others read why
        os._exit(code)

    def stop_all(self, code: int) -> None:
        """This worker gives up, and has said why: the others end with the same code. The caller ends this one."""
        self.stopping = True
        words = f"{self.names[self.comm.rank]} stopped the job."
        self._say({"end": [code, words, self.comm.rank]})
        time.sleep(PAUSE)  # who ends with unread text in its buffer takes back what it has sent

    def close(self) -> None:
        """The run is over for all: all workers call it together."""
        self.comm.barrier()
        self._stop()

    def leave(self) -> None:
        """This worker has come to its end and does not wait for the others, who are told."""
        self._halt()
        self._say({"left": self.comm.calls})
        self._hang_up()

    def _stop(self) -> None:
        self._halt()
        self.comm.barrier()  # nobody looks any more: now lines may close
        self._hang_up()

    def _halt(self) -> None:
        self.over.set()
        self.wake.send(b"x")
        self.thread.join()

    def _hang_up(self) -> None:
        for line in list(self.lines.values()):
            self._drop(line)
        for thing in (self.listener, self.wake, self.pipe):
            if thing is not None:
                thing.close()
        self.poll.close()

    def wait_for_word(self, seconds: float = 3.0) -> None:
        """The engine lost a worker: the watch knows which one, and ends this process when it hears of it."""
        time.sleep(seconds)


def _place(peer: Peer) -> str:
    return f"step {peer.step}, {peer.doing}" if peer.step >= 0 else peer.doing or "the start"


def _here() -> str:
    """What two workers have in common that reach each other by an abstract unix socket."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
