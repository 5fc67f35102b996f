"""Batches: collate against a plain reading of the frames, cache, background thread, parameters, mistakes."""

import logging
import socket

import numpy as np
import pytest
import torch
from data_files import arrays, write_npy

from allforce.data.batch import Frame
from allforce.data.cache import Cache, _group_limits, memory_of_host
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.data.loader import Loader, collate
from allforce.data.prepare import Limit, Needs
from allforce.data.sampler import Sampler
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.neighbors import neighbor_list
from allforce.train.datasets import make_cache

TYPES = (1, 0, 1, 2, 0)
MAP = ["A", "B", "C"]


def make(tmp_path, frames=(3, 2), types=TYPES, batch_size=2, extra=None, **options):
    for k, n in enumerate(frames):
        given = arrays(n, types, seed=k, labels=("energy", "force", "virial", "atom_ener"))
        write_npy(tmp_path / f"s{k}", given | (extra(n) if extra else {}), types, MAP)
    data = DataSet(open_systems(str(tmp_path), MAP), batch_size)
    cache, limit = options.pop("cache", None), Limit(3.5, options.pop("sel", None))
    return Loader(data, Sampler(data, 1), Needs(len(MAP), limit, **options), cache=cache)


def edge_table(batch):
    """Edges as (frame, place of centre in the file, place of neighbour, vector), sorted."""
    e = batch.edges
    rows = torch.cat([batch.frame[e.i, None], batch.order[e.i, None], batch.order[e.j, None], e.r.round(decimals=9)], 1)
    rows = rows.numpy() + 0.0
    return rows[np.lexsort(rows.T[::-1])]


def plain_edges(frames, rcut):
    """The same table from frames in the order of the file."""
    rows, start = [], 0
    for b, f in enumerate(frames):
        i, j, r = neighbor_list(f.coord, f.cell, rcut)
        real = (f.type[i] >= 0) & (f.type[j] >= 0)
        rows.append(np.column_stack([np.full(len(i), b), i + start, j + start, r.round(9)])[real] + 0.0)
        start += len(f.type)
    table = np.concatenate(rows)
    return table[np.lexsort(table.T[::-1])]


def check_layout(batch, frames):
    """Everything in the batch is where the legend says."""
    n = len(batch.type)
    types, coords = np.concatenate([f.type for f in frames]), np.concatenate([f.coord for f in frames])
    assert (batch.type.diff() >= 0).all()
    assert batch.type_counts == tuple(np.bincount(types[types >= 0], minlength=3).tolist())
    assert batch.natoms.tolist() == [(f.type >= 0).sum() for f in frames] and batch.natoms.dtype == torch.float64
    np.testing.assert_array_equal(batch.type, types[batch.order])
    np.testing.assert_array_equal(batch.coord, coords[batch.order])
    np.testing.assert_array_equal(
        batch.frame, np.repeat(np.arange(len(frames)), [len(f.type) for f in frames])[batch.order]
    )
    for name in frames[0].labels:
        joined = np.concatenate([f.labels[name] for f in frames])
        per_atom = name in ("force", "atom_ener")
        expected = (joined[batch.order] if per_atom else joined.reshape(len(frames), -1)).squeeze()
        np.testing.assert_array_equal(batch.labels[name].squeeze(), expected)
    e = batch.edges
    assert (e.i.diff() >= 0).all() and e.first.shape == (n + 1,) and e.first[-1] == len(e.i)
    for a in range(n):
        assert (e.i[e.first[a] : e.first[a + 1]] == a).all()
    assert e.i.dtype == e.j.dtype == e.first.dtype == torch.int64 and e.r.dtype == torch.float64


@pytest.mark.parametrize("size", [1, 2, 5])
def test_batches_hold_their_frames(tmp_path, size):
    loader = make(tmp_path, (5, 5), batch_size=size)
    for m in range(loader.dataset.total_batches()):
        members = loader.sampler.micro_batch(m)
        frames = [loader.dataset.systems[i].frame(k) for i, k in members]
        batch = loader.batch(m)
        check_layout(batch, frames)
        np.testing.assert_allclose(edge_table(batch), plain_edges(frames, 3.5), atol=2e-9)
        b = len(members)  # the last of a system has fewer than size
        assert batch.cell.shape == (b, 3, 3) and batch.nframes == b
        assert batch.labels["energy"].shape == (b,) and batch.labels["atom_ener"].shape == (5 * b,)
        again = loader.batch(m)
        assert torch.equal(again.edges.r, batch.edges.r) and torch.equal(again.edges.j, batch.edges.j)


def random_frame(rng, n, cell=True):
    types = rng.integers(-1, 3, n)
    return Frame(
        coord=rng.random((n, 3)) * 5,
        type=types,
        cell=np.eye(3) * 5 if cell else None,
        labels={"energy": rng.random(1), "force": rng.random((n, 3))},
        fparam=rng.random(2),
        aparam=rng.random((n, 1)),
    )


def test_collate_of_unequal_frames_in_file_order():
    """Different sizes, virtual atoms, with and without cell, atoms not sorted."""
    rng = np.random.default_rng(5)
    frames = [random_frame(rng, n, cell=n != 4) for n in (7, 4, 1, 12)]
    batch = collate(frames, [neighbor_list(f.coord, f.cell, 3.0) for f in frames], 3, "x")
    check_layout(batch, frames)
    np.testing.assert_allclose(edge_table(batch), plain_edges(frames, 3.0), atol=2e-9)
    assert batch.cell[1].abs().sum() == 0 and batch.cell[0, 0, 0] == 5
    np.testing.assert_array_equal(batch.fparam, np.stack([f.fparam for f in frames]))
    np.testing.assert_array_equal(batch.aparam, np.concatenate([f.aparam for f in frames])[batch.order])


def test_collate_of_sorted_frames_is_the_same():
    rng = np.random.default_rng(6)
    frames = [random_frame(rng, n) for n in (6, 9)]
    plain = collate(frames, [neighbor_list(f.coord, f.cell, 3.0) for f in frames], 3)
    ready = [f.by_type() for f in frames]
    fast = collate(ready, [neighbor_list(f.coord, f.cell, 3.0) for f in ready], 3)
    for name in ("type", "frame", "coord", "order", "aparam"):
        assert torch.equal(getattr(plain, name), getattr(fast, name)), name
    np.testing.assert_array_equal(edge_table(plain), edge_table(fast))
    assert plain.type_counts == fast.type_counts


def test_single_atom_and_no_edges():
    frame = Frame(np.zeros((1, 3)), np.array([1]), None, {"energy": np.ones(1)})
    batch = collate([frame], [neighbor_list(frame.coord, None, 3.0)], 3)
    assert batch.edges.first.tolist() == [0, 0] and batch.cell is None and batch.edges.r.shape == (0, 3)
    assert batch.type_counts == (0, 1, 0)


def test_unequal_labels_in_a_batch():
    a = Frame(np.zeros((1, 3)), np.array([0]), None, {"energy": np.ones(1)})
    b = Frame(np.zeros((1, 3)), np.array([0]), None, {})
    none = neighbor_list(a.coord, None, 3.0)
    with pytest.raises(UserError, match="same labels"):
        collate([a, b], [none, none], 1, "here")


def test_cache_is_bounded_and_changes_nothing(tmp_path):
    loader = make(tmp_path, (6, 6), batch_size=1)
    tiny, none = (make(tmp_path, (6, 6), batch_size=1, cache=Cache(size)) for size in (7000, 0))
    for m in range(40):
        expected = loader.batch(m).edges.r
        assert torch.equal(tiny.batch(m).edges.r, expected) and torch.equal(none.batch(m).edges.r, expected)
    assert len(loader._cache) == 12 and 0 < len(tiny._cache) < 4 and len(none._cache) == 0


def test_two_loaders_share_one_budget(tmp_path):
    shared = Cache(7000)
    first, second = (make(tmp_path / name, (6, 6), batch_size=1, cache=shared) for name in "ab")
    second.dataset.systems[0].name = "other"
    for m in range(12):
        assert torch.equal(first.batch(m).coord, second.batch(m).coord)  # equal files: keys must not meet
        assert "other" not in first.batch(m).name
    assert 0 < len(shared) < 4 and shared.free >= 0


class Hosts(SerialComm):
    """Workers on several hosts, of which this one runs `here`."""

    def __init__(self, here, elsewhere):
        self.names = [socket.gethostname()] * here + ["elsewhere"] * elsewhere
        self.size = len(self.names)

    def gather(self, value):
        return self.names


def test_workers_of_a_host_share_its_memory():
    assert make_cache(4.0, SerialComm()).free == 4 * 2**30
    assert make_cache(4.0, Hosts(32, 32)).free == 2**27
    assert make_cache(None, Hosts(2, 0)).free == memory_of_host() // 8


def test_limit_of_a_control_group(tmp_path):
    (tmp_path / "self").write_text("0::/job_7/step_0\n")
    group = tmp_path / "root/job_7"
    (group / "step_0").mkdir(parents=True)
    (group / "memory.max").write_text("1000\n")
    (group / "step_0/memory.max").write_text("max\n")
    assert _group_limits(tmp_path / "self", tmp_path / "root") == [1000]
    assert _group_limits(tmp_path / "none") == []


@pytest.mark.parametrize("at_once", [1, 8])
def test_background_thread(tmp_path, at_once, monkeypatch):
    monkeypatch.setattr("allforce.data.loader.AT_ONCE", at_once)
    loader = make(tmp_path)
    for first, stride in ((0, 1), (5, 3)):
        loader.start(first, stride)
        for k in range(12):
            assert torch.equal(loader.next().coord, loader.batch(first + stride * k).coord)
    loader.close()
    loader.close()


def test_mistakes_reach_the_consumer_in_their_turn(tmp_path):
    loader = make(tmp_path, (4,), batch_size=1)
    bad = loader.sampler.micro_batch(3)[0][1]
    force = np.load(tmp_path / "s0/set.000/force.npy")
    force[bad] = np.nan
    np.save(tmp_path / "s0/set.000/force.npy", force)
    loader.start(0, 1)
    for _ in range(3):
        loader.next()
    with pytest.raises(UserError, match=f"force.npy of frame {bad} holds nan"):
        loader.next()
    loader.close()


def test_two_atoms_on_one_place(tmp_path):
    loader = make(tmp_path, (2,), batch_size=1)
    coord = np.load(tmp_path / "s0/set.000/coord.npy")
    coord[1, 3:6] = coord[1, 9:12] + [6.0, 0, 0]  # atom 1 on an image of atom 3
    np.save(tmp_path / "s0/set.000/coord.npy", coord)
    loader.frame(0, 0)
    with pytest.raises(UserError, match="s0, frame 1: atoms (1 and 3|3 and 1) .*on one place"):
        loader.frame(0, 1)


def test_cell_without_volume_names_the_frame(tmp_path):
    loader = make(tmp_path, (2,), batch_size=1)
    np.save(tmp_path / "s0/set.000/box.npy", np.zeros((2, 9)))
    with pytest.raises(UserError, match="s0, frame 0: the cell .* has no volume"):
        loader.frame(0, 0)


def test_sel_overflow_warns_once_and_counts(tmp_path, caplog):
    loader = make(tmp_path, sel=[1, 1, 0], batch_size=1)
    with caplog.at_level(logging.WARNING):
        for m in range(5):
            batch = loader.batch(m)
            for a in range(5):
                near = batch.type[batch.edges.j[batch.edges.i == a]]
                assert (torch.bincount(near, minlength=3) <= torch.tensor([1, 1, 0])).all()
    assert loader.prepare.dropped > 0 and len(caplog.records) == 1
    assert "beyond model = [1, 1, 0]" in caplog.text


def test_excluded_pairs_have_no_edges(tmp_path):
    loader = make(tmp_path, excluded_pairs=((0, 1), (2, 2)))
    free = make(tmp_path)
    e, t = loader.batch(0).edges, loader.batch(0).type
    f = free.batch(0).edges
    pairs = {tuple(sorted(p)) for p in zip(t[e.i].tolist(), t[e.j].tolist(), strict=True)}
    assert pairs and not pairs & {(0, 1), (2, 2)}
    kept = [tuple(sorted(p)) not in {(0, 1), (2, 2)} for p in zip(t[f.i].tolist(), t[f.j].tolist(), strict=True)]
    assert len(e.i) == sum(kept) < len(f.i)


def test_parameters(tmp_path):
    def extra(n):
        return {"fparam": np.arange(2.0 * n).reshape(n, 2), "aparam": np.arange(5.0 * n).reshape(n, 5)}

    loader = make(tmp_path, (3,), batch_size=2, extra=extra, numb_fparam=2, numb_aparam=1)
    (_, a), (_, b) = loader.sampler.micro_batch(0)
    batch = loader.batch(0)
    assert batch.fparam.tolist() == [[2 * a, 2 * a + 1], [2 * b, 2 * b + 1]]
    file_order = torch.empty_like(batch.aparam)
    file_order[batch.order] = batch.aparam
    assert file_order[:, 0].tolist() == [*range(5 * a, 5 * a + 5), *range(5 * b, 5 * b + 5)]
    assert make(tmp_path, (3,)).batch(0).fparam is None
    with pytest.raises(UserError, match="numb_fparam is 3, but .*s0 has 2 of them"):
        make(tmp_path, (3,), extra=extra, numb_fparam=3)


def test_default_fparam(tmp_path):
    with pytest.raises(UserError, match="numb_fparam is 1, but .*s0 has no fparam.npy"):
        make(tmp_path, numb_fparam=1)
    with pytest.raises(UserError, match="numb_aparam is 1, but .*s0 has no aparam.npy"):
        make(tmp_path, numb_aparam=1)
    assert make(tmp_path, numb_fparam=1, default_fparam=[0.5]).batch(0).fparam.tolist() == [[0.5], [0.5]]


def test_mixed_batch_and_mixed_type(tmp_path):
    real = np.array([[0, 1, -1, 2, 1], [1, 1, 0, -1, -1], [0, 0, 0, 0, 0]])
    write_npy(tmp_path / "m", arrays(3, (0,) * 5, seed=7) | {"real_atom_types": real}, (0,) * 5, MAP)
    write_npy(tmp_path / "n", arrays(3, (2, 0), seed=8), (2, 0), MAP)
    data = DataSet(open_systems(str(tmp_path), MAP), "mixed:3")
    loader = Loader(data, Sampler(data, 0), Needs(len(data.type_map), Limit(3.0)))
    sizes = []
    for m in range(2):
        frames = [data.systems[i].frame(k) for i, k in loader.sampler.micro_batch(m)]
        batch = loader.batch(m)
        check_layout(batch, frames)
        np.testing.assert_allclose(edge_table(batch), plain_edges(frames, 3.0), atol=2e-9)
        sizes += batch.natoms.tolist()
    assert sorted(sizes) == [2, 2, 2, 3, 4, 5]
