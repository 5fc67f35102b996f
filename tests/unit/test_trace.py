"""Phases: nesting, threads, errors, events."""

import threading

import pytest

from allforce import trace
from allforce.trace import Tracer, phase


def test_without_a_tracer_a_phase_is_nothing():
    with phase("a"):
        pass
    assert phase("a") is trace.NOTHING


def test_nested_phases_have_their_own_time_and_add_up():
    tracer = Tracer(events=1000)
    with tracer.installed():
        with phase("outer"):
            for _ in range(3):
                with phase("inner"), phase("innermost"):
                    sum(range(1000))
    totals = tracer.lane().totals
    assert {name: t.count for name, t in totals.items()} == {"innermost": 3, "inner": 3, "outer": 1}
    assert totals["outer"].own == pytest.approx(totals["outer"].seconds - totals["inner"].seconds)
    assert totals["inner"].own == pytest.approx(totals["inner"].seconds - totals["innermost"].seconds)
    assert sum(tracer.own_seconds().values()) == pytest.approx(totals["outer"].seconds)
    events = tracer.take_events()
    assert len(events) == 7 and tracer.take_events() == []
    outer = [e for e in events if e[1] == "outer"][0]
    assert all(outer[2] <= begin <= end <= outer[3] for _, _, begin, end in events)
    with phase("afterwards"):
        pass
    assert "afterwards" not in totals  # the tracer is not installed any more


def test_a_phase_in_itself_counts_its_time_once():
    tracer = Tracer()
    with tracer.installed(), phase("a"), phase("a"):
        sum(range(1000))
    total = tracer.lane().totals["a"]
    assert total.count == 2 and 0 < total.own < total.seconds


def test_threads_have_lanes_of_their_own():
    tracer = Tracer(events=1000)
    inside, go = threading.Barrier(5), threading.Event()

    def work():
        with phase("shared name"):
            inside.wait()  # all are in the phase at the same time
            go.wait()

    with tracer.installed():
        threads = [threading.Thread(target=work, name=f"loader_{k}") for k in range(4)]
        for thread in threads:
            thread.start()
        inside.wait()
        go.set()
        for thread in threads:
            thread.join()
    assert sorted(lane.name for lane in tracer.lanes) == [f"loader_{k}" for k in range(4)]
    assert all(lane.totals["shared name"].count == 1 and not lane.stack for lane in tracer.lanes)
    assert sorted(e[0] for e in tracer.take_events()) == [f"loader_{k}" for k in range(4)]


def test_an_error_ends_its_phases():
    tracer = Tracer()
    with tracer.installed(), pytest.raises(KeyError):
        with phase("a"), phase("b"):
            raise KeyError
    assert not tracer.lane().stack and set(tracer.lane().totals) == {"a", "b"}
    assert phase("c") is trace.NOTHING


def test_phases_are_named_to_torch_as_well():
    import torch

    tracer = Tracer()
    tracer.mirror = torch.profiler.record_function
    with torch.profiler.profile() as profile, tracer.installed(), phase("forward"):
        torch.ones(3) + 1
    assert "forward" in {event.key for event in profile.key_averages()}
