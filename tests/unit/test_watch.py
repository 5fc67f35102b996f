"""Who is waited for, as the watch of rank 0 sees it."""

from types import SimpleNamespace

import pytest

from allforce.distributed.comm import SerialComm
from allforce.distributed.profile import CountedComm
from allforce.distributed.watch import PATIENCE, Line, Peer, Watch

NOW = 1000.0


def words(*others: Peer, calls: int = 7, inside: bool = True, seconds: float = PATIENCE + 1) -> list[str]:
    """What rank 0 says that has been in its call, or out of it, for some seconds."""
    watch, said = Watch.__new__(Watch), []
    watch.comm = SimpleNamespace(rank=0, size=1 + len(others))
    watch.me = Peer(0, "rank 0", NOW, calls=calls, inside=inside, since=NOW - seconds)
    watch.lines = {fd: Line(None, 0.0, peer=peer) for fd, peer in enumerate(others)}
    watch.warn = said.append
    watch._look_for_waiting(NOW)
    watch._look_for_waiting(NOW + 1)  # once in ten seconds is enough
    return said


def test_a_worker_behind_the_others_is_named():
    (line,) = words(Peer(1, "rank 1", NOW, calls=6, step=3, doing="forward"))
    assert line == f"waiting for rank 1 for {PATIENCE + 1:.0f} s (in step 3, forward)"


@pytest.mark.parametrize("calls, inside", [(7, True), (8, True), (8, False)])
def test_a_silent_worker_is_named_wherever_it_stopped(calls, inside):
    """Also in the very call in which the others wait, and where nobody counts calls."""
    (line,) = words(Peer(1, "rank 1", NOW - 12, calls=7), calls=calls, inside=inside)
    assert line.startswith("waiting for rank 1") and "no sign of life for 12 s" in line


def test_nobody_is_named_while_all_go_on():
    assert not words(Peer(1, "rank 1", NOW, calls=7), seconds=1.0)
    assert not words(Peer(1, "rank 1", NOW, calls=6), inside=False)  # rank 0 works on something long itself
    assert not words(Peer(1, "rank 1", NOW - PATIENCE / 2, calls=6), seconds=1.0)


def test_many_are_not_all_named():
    assert len(words(*(Peer(rank, f"rank {rank}", NOW, calls=6) for rank in range(1, 512)))) == 4


def test_collectives_that_are_not_counted_are_seen():
    """The times of calls are compared by a collective of its own, in which rank 0 may wait as in any other."""

    class Two(SerialComm):
        size = 2

        def all_reduce(self, tensor, op="sum"):
            seen.append((comm.calls, comm.inside))

        def gather(self, value):
            return [value, value]

    seen, comm = [], CountedComm(Two())
    comm.barrier()
    calls = comm.calls
    comm.settle()
    assert seen == [(calls + 1, True)] and not comm.inside
