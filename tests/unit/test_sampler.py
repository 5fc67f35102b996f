"""The order of micro-batches: coverage, random access, sharding, probabilities."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allforce.config.drawing import auto_prob_blocks, batch_form
from allforce.data.dataset import DataSet
from allforce.data.discover import partition
from allforce.data.sampler import Sampler, make_sampler, stride
from allforce.errors import UserError


def dataset(frames, batch_size=1, natoms=10, **options):
    labels = frozenset(["energy"])
    systems = [
        SimpleNamespace(name=f"s{i}", nframes=n, natoms=natoms, periodic=True, label_names=labels)
        for i, n in enumerate(frames)
    ]
    return DataSet(systems, batch_size, **options)


def epoch(data, sampler, e):
    n = data.total_batches()
    return [sampler.micro_batch(m) for m in range(e * n, (e + 1) * n)]


@given(
    frames=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**40),
    e=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_every_frame_once_per_epoch(frames, batch, seed, e):
    data = dataset(frames, batch)
    batches = epoch(data, Sampler(data, seed), e)
    seen = Counter(pair for b in batches for pair in b)
    assert seen == Counter((i, k) for i, n in enumerate(frames) for k in range(n))
    for b in batches:
        assert len({i for i, _ in b}) == 1 and 1 <= len(b) <= batch


def test_epochs_and_seeds_differ_and_repeat():
    data = dataset([30, 50])
    one = Sampler(data, 5)
    assert epoch(data, one, 0) != epoch(data, one, 1)
    assert epoch(data, one, 0) == epoch(data, Sampler(data, 5), 0)
    assert epoch(data, one, 0) != epoch(data, Sampler(data, 6), 0)
    assert epoch(data, one, 0) != epoch(data, Sampler(data, 5, rank=0), 0) != epoch(data, Sampler(data, 5, rank=1), 0)


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=20))
@settings(max_examples=20, deadline=None)
def test_random_access(places):
    data = dataset([13, 4, 29], 3, sys_probs=[0.21, 0.46, 0.33])
    walking = Sampler(data, 9)
    in_order = {m: walking.micro_batch(m) for m in range(0, max(places) + 1)} if max(places) < 1500 else {}
    jumping = Sampler(data, 9)
    for m in places:
        assert jumping.micro_batch(m) == in_order.get(m, Sampler(data, 9).micro_batch(m))


def test_uneven_probabilities():
    probabilities = [0.21, 0.46, 0.33]
    data = dataset([13, 4, 29], 3, sys_probs=probabilities)
    total = 20000
    sampler = Sampler(data, 1)
    batches = [sampler.micro_batch(m) for m in range(total)]
    share = np.bincount([b[0][0] for b in batches]) / total
    np.testing.assert_allclose(share, probabilities, atol=3e-3)
    for i, n in enumerate([13, 4, 29]):  # a system shows all its frames before any of them comes again
        frames = [k for b in batches if b[0][0] == i for _, k in b]
        for start in range(0, len(frames) - n, n):
            assert sorted(frames[start : start + n]) == list(range(n))
    first = epoch(data, sampler, 0)
    assert {p for b in first for p in b} == {(i, k) for i, n in enumerate([13, 4, 29]) for k in range(n)}


def test_system_with_probability_zero_is_never_drawn():
    data = dataset([5, 5], sys_probs=[0.0, 1.0])
    assert {b[0][0] for b in epoch(data, Sampler(data, 3), 0)} == {1}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_workers_share_one_order(size):
    data = dataset([11, 20, 7], 2)
    one = Sampler(data, 4)
    for rank in range(size):
        mine = make_sampler(data, 4, "global", rank)
        a, b = stride("global", rank, size)
        for k in range(30):
            assert mine.micro_batch(a + b * k) == one.micro_batch(k * size + rank)


def test_replicate_has_an_order_per_worker():
    data = dataset([40])
    orders = [[make_sampler(data, 4, "replicate", r).micro_batch(k) for k in range(40)] for r in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(o) == sorted(orders[0]) for o in orders)
    assert stride("replicate", 2, 3) == stride("partition", 2, 3) == (0, 1)


def test_partition():
    shares = [partition(list(range(11)), rank, 4) for rank in range(4)]
    assert shares == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


def test_mixed_batches():
    data = dataset([5, 8, 3], "mixed:4")
    assert data.mixed_batch == 4 and data.total_batches() == 4
    batches = epoch(data, Sampler(data, 2), 0)
    assert [len(b) for b in batches] == [4, 4, 4, 4]
    assert len({p for b in batches for p in b}) == 16
    assert any(len({i for i, _ in b}) > 1 for b in batches)


@pytest.mark.parametrize(
    ("form", "expected"),
    [(3, [3, 3]), ([2, 5], [2, 5]), ("auto", [4, 1]), ("auto:100", [10, 2]), ("max:50", [5, 1]), ("max:5", [1, 1])],
)
def test_batch_size_forms(form, expected):
    systems = [SimpleNamespace(name="s", nframes=9, natoms=n, label_names=frozenset()) for n in (10, 64)]
    data = DataSet(systems, form)
    assert data.batch_sizes == expected
    assert data.n_batches.tolist() == [-(-9 // b) for b in expected]


def test_filter_drops_large_systems():
    systems = [SimpleNamespace(name="s", nframes=9, natoms=n) for n in (10, 64)]
    assert [s.natoms for s in DataSet(systems, "filter:30").systems] == [10]
    with pytest.raises(UserError, match="leaves no system.*10 atoms"):
        DataSet(systems, "filter:5")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.2, 0.3, 0.5]),
        ({"auto_prob": "prob_uniform"}, [1 / 3, 1 / 3, 1 / 3]),
        ({"auto_prob": "prob_sys_size;0:2:0.75;2:3:0.25"}, [0.3, 0.45, 0.25]),
        ({"auto_prob": "prob_sys_size; 0:1:2.0; 1:2:2.0"}, [0.5, 0.5, 0.0]),
        ({"sys_probs": [0.6, -1, -1]}, [0.6, 0.15, 0.25]),
        ({"sys_probs": [0.1, 0.2, 0.7]}, [0.1, 0.2, 0.7]),
    ],
)
def test_probabilities(options, expected):
    np.testing.assert_allclose(dataset([20, 30, 50], **options).probabilities, expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": [1]}, "training/training_data/batch_size: has 1 entries for 2 systems"),
        ({"batch_size": "automatic"}, "'automatic' is not a number"),
        ({"batch_size": 0}, "less than 1 frame"),
        ({"batch_size": "mixed:0"}, '\'mixed:0\' is not a number, a list, "auto" or "auto:N"'),
        ({"auto_prob": "prob_size"}, "'prob_size' is not \"prob_uniform"),
        ({"auto_prob": "prob_sys_size;0:3:1"}, "does not fit 2 systems"),
        ({"auto_prob": "prob_sys_size;0:x:1"}, "start:end:weight"),
        ({"sys_probs": [0.5]}, "1 entries for 2 systems"),
        ({"sys_probs": [0.5, 0.6]}, "sum 1.1; expected 1"),
        ({"sys_probs": [0.5, 0.2]}, "sum 0.7; expected 1"),
        ({"sys_probs": [1.5, -1]}, "sum 1.5; expected 1"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(UserError, match=message):
        dataset([4, 5], **options)


def test_mixed_batches_need_equal_labels():
    systems = [
        SimpleNamespace(name=n, nframes=2, natoms=2, label_names=frozenset(x))
        for n, x in (("a", ["energy", "force"]), ("b", ["energy"]))
    ]
    with pytest.raises(UserError, match=r"a has \['energy', 'force'\] and b has \['energy'\]"):
        DataSet(systems, "mixed:4")
    DataSet(systems, 4)


def test_summary_table():
    data = dataset([80, 160], natoms=192)
    name = data.systems[1].name = "/a/very/long/path/that/does/not/fit/into/the/column/data_1"
    data.systems[1].periodic = False
    assert data.summary() == [
        "---Summary of DataSystem: Training     -----------------------------------------------",
        "Found 2 System(s):",
        "                                    system  natoms  bch_sz   n_bch       prob  pbc",
        "                                        s0     192       1      80  3.333e-01    T",
        "-- " + name[-39:] + "     192       1     160  6.667e-01    F",
        "-" * 86,
    ]


def test_forms():
    assert batch_form("auto") == ("auto", 32) and batch_form("filter:300") == ("filter", 300)
    assert auto_prob_blocks("prob_uniform") is None and auto_prob_blocks("prob_sys_size") == []
    assert auto_prob_blocks("prob_sys_size; 0:2:0.3; 2:3:.7e0") == [(0, 2, 0.3), (2, 3, 0.7)]
    assert auto_prob_blocks("prob_sys_size;0:1:1e-3") == [(0, 1, 1e-3)]
    for wrong in ("prob_uniform;0:1:1", "prob_sys_size;2:2:1", "prob_sys_size;0:1:-1", "prob_sys_size;0:1:0"):
        with pytest.raises(ValueError):
            auto_prob_blocks(wrong)
