"""Statistics against a plain evaluation of their definitions, serial and over several workers."""

import threading
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from data_files import arrays, write_npy

from allforce.data import stats
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.data.loader import Loader
from allforce.data.sampler import Sampler
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.neighbors import neighbor_list

MAP = ["A", "B", "C", "D"]  # D is in no system
SEL = [20, 30, 10, 0]
RCUT, RS, PROTECT = 4.0, 1.0, 0.02


class ThreadComm:
    """Workers that are threads of this process."""

    engine = "threads"

    def __init__(self, rank, size, barrier, board):
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def gather(self, value):
        self._board[self.rank] = value
        self._barrier.wait()
        values = list(self._board)
        self._barrier.wait()
        return values

    def all_reduce(self, tensor, op="sum"):
        parts = torch.stack(self.gather(tensor.clone()))
        tensor.copy_(parts.sum(0) if op == "sum" else getattr(parts, f"a{op}")(0))


def on_workers(size, work):
    """[work(comm) of each worker]"""
    barrier, board, results = threading.Barrier(size, timeout=60), [None] * size, [None] * size

    def run(rank):
        try:
            results[rank] = work(ThreadComm(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def descriptor(**options):
    given = {"rcut": RCUT, "rcut_smth": RS, "env_protection": PROTECT, "exclude_types": [], "set_davg_zero": False}
    return SimpleNamespace(**(given | options))


@pytest.fixture
def data(tmp_path):
    for k, (n, types) in enumerate([(5, (0, 1, 1, 2, 0)), (4, (1, 2, 2)), (1, (0, 0, 1, 1))]):
        given = arrays(n, types, seed=k) | {"fparam": np.random.default_rng(k).normal(3, 2, (n, 2))}
        given["aparam"] = np.random.default_rng(k + 9).normal(-1, 0.5, (n, len(types)))
        given["fparam"][:, 1] = 7.0
        write_npy(tmp_path / f"s{k}", given, types, MAP[:3])
    return DataSet(open_systems(str(tmp_path), MAP), 1)


def loader(data, **options):
    return Loader(data, Sampler(data, 0), RCUT, SEL, numb_fparam=2, numb_aparam=1, **options)


def all_frames(data):
    return [s.frame(k) for s in data.systems for k in range(s.nframes)]


def test_neighbours(data):
    least, most = np.inf, np.zeros(4)
    for f in all_frames(data):
        i, j, r = neighbor_list(f.coord, f.cell, RCUT)
        least = min(least, np.linalg.norm(r, axis=1).min())
        for a in range(len(f.type)):
            most = np.maximum(most, np.bincount(f.type[j[i == a]], minlength=4))
    for size in (1, 3):
        for found, count in on_workers(size, lambda comm: stats.neighbor_stat(data.systems, RCUT, comm)):
            assert found == pytest.approx(least, rel=1e-14)
            assert count.tolist() == most.tolist() and count[3] == 0
    everyone = max(np.bincount(neighbor_list(f.coord, f.cell, RCUT)[0]).max() for f in all_frames(data))
    assert stats.neighbor_stat(data.systems, RCUT, SerialComm(), mixed=True)[1].tolist() == [everyone]


def test_neighbours_none_and_touching(tmp_path):
    write_npy(tmp_path / "far", arrays(1, (0, 0), box=30.0), (0, 0), ["A"])
    (far,) = open_systems(str(tmp_path / "far"), ["A"])
    assert stats.neighbor_stat([far], 3.0, SerialComm())[0] is None
    given = arrays(2, (0, 0))
    given["coord"][1] = 1.0
    write_npy(tmp_path / "near", given, (0, 0), ["A"])
    with pytest.raises(UserError, match="near, frame 1: atoms 0 and 1 .* on one place"):
        stats.neighbor_stat(open_systems(str(tmp_path / "near"), ["A"]), 3.0, SerialComm())


@pytest.mark.parametrize(
    ("sel", "most", "expected"),
    [
        ("auto", [38, 72], [44, 80]),
        ("auto:1.1", [1, 0], [4, 0]),
        ("auto:1.5", [10, 3], [16, 4]),
        ("auto:1", [4, 5], [4, 8]),
    ],
)
def test_sel_auto(sel, most, expected):
    assert stats.sel_auto(most, sel) == expected


def test_sel_too_small():
    assert stats.sel_too_small([10, 20, 30], [10, 19, 0]) == [1]


def plain_environment(data, excluded=()):
    """davg, dstd by listing every slot of every atom."""
    slots = {t: [] for t in range(4)}
    for f in all_frames(data):
        i, j, r = neighbor_list(f.coord, f.cell, RCUT)
        for a in range(len(f.type)):
            rows = np.zeros((sum(SEL), 4))
            for n, e in enumerate(np.flatnonzero(i == a)):
                if tuple(sorted((f.type[a], f.type[j[e]]))) in excluded:
                    continue
                d = np.linalg.norm(r[e])
                u = min(max((d - RS) / (RCUT - RS), 0), 1)
                w = 1 + u**3 * (-6 * u**2 + 15 * u - 10)
                rows[n] = w / (d + PROTECT), *(w * r[e] / (d + PROTECT) ** 2)
            slots[int(f.type[a])].append(rows)
    davg, dstd = np.zeros((4, 4)), np.full((4, 4), 0.1)
    for t in range(3):
        rows = np.concatenate(slots[t])
        davg[t, 0] = rows[:, 0].mean()
        dstd[t] = [rows[:, 0].std(), *[rows[:, 1:].std()] * 3]
    return davg, np.maximum(dstd, 0.01)


@pytest.mark.parametrize("excluded", [(), ((0, 1), (2, 2))])
def test_environment(data, excluded):
    config = descriptor(exclude_types=[list(p) for p in excluded])
    davg, dstd = plain_environment(data, excluded)
    sample = stats.stat_sample(data, 10)
    assert len(sample) == 10
    serial = stats.envmat_stat(loader(data), config, sample, SerialComm())
    np.testing.assert_allclose(serial[0], davg, rtol=1e-12)
    np.testing.assert_allclose(serial[1], dstd, rtol=1e-12)
    for size in (2, 3, 4):
        for found in on_workers(size, lambda comm: stats.envmat_stat(loader(data), config, sample, comm)):
            np.testing.assert_allclose(found, serial, rtol=1e-12, atol=0)


def test_pairs_excluded_by_the_model_count_as_zeros(data):
    serial = stats.envmat_stat(
        loader(data, pair_exclude=[(0, 1), (2, 2)]), descriptor(), stats.stat_sample(data, 10), SerialComm()
    )
    np.testing.assert_allclose(serial, plain_environment(data, ((0, 1), (2, 2))), rtol=1e-12)


def test_set_davg_zero_and_smallest_deviation():
    sums = np.array([[[10, 5.0, 2.5], [30, 0, 30.0]], [[0, 0, 0], [0, 0, 0]]])
    davg, dstd = stats.envmat_normalisation(sums)
    assert davg.tolist() == [[0.5, 0, 0, 0], [0, 0, 0, 0]]
    assert dstd.tolist() == [[0.01, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]]
    assert stats.envmat_normalisation(sums, set_davg_zero=True)[0].tolist() == [[0] * 4] * 2


def test_the_sample_is_the_first_batches(data):
    data.batch_sizes = [2, 3, 1]
    assert stats.stat_sample(data, 1) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert len(stats.stat_sample(data, 100)) == 10


def test_energy_bias_of_workers_is_the_serial_one(data):
    counts = np.array([np.bincount(f.type, minlength=4) for f in all_frames(data)], dtype=float)
    energy = np.array([f.labels["energy"][0] for f in all_frames(data)])
    expected = np.linalg.pinv(counts) @ energy  # smallest norm: zero for D
    residual = energy - counts @ expected
    sample = stats.stat_sample(data, 10)
    for size in (1, 2, 3):
        for found in on_workers(size, lambda comm: stats.energy_bias(data.systems, sample, comm)):
            np.testing.assert_allclose(found.bias, expected, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(found.std, np.full(4, residual.std()), rtol=1e-11)
            assert found.rmse == pytest.approx(np.sqrt(np.mean((residual / counts.sum(1)) ** 2)), rel=1e-11)


def test_degenerate_compositions_have_the_smallest_norm():
    found = stats.fit_energy_bias(np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([5.0, 10.0]))
    np.testing.assert_allclose(found.bias, [1.0, 2.0], rtol=1e-13)
    assert found.rmse == pytest.approx(0, abs=1e-13)


def test_preset_energies_stay():
    counts = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0]])
    found = stats.fit_energy_bias(counts, counts @ [-3.0, 7.0], preset=[-3.0, None])
    np.testing.assert_allclose(found.bias, [-3.0, 7.0], rtol=1e-13)
    found = stats.fit_energy_bias(counts, counts @ [-3.0, 7.0], preset=[-2.0, None])
    x = counts[:, 1]
    assert found.bias[0] == -2.0
    assert found.bias[1] == pytest.approx(x @ (counts @ [-3.0, 7.0] + 2 * counts[:, 0]) / (x @ x))
    nothing = stats.fit_energy_bias(np.zeros((0, 2)), np.zeros(0), preset=[None, 4.0])
    assert nothing.bias.tolist() == [0.0, 4.0] and nothing.rmse is None


def test_atomic_energies_go_first_and_excluded_types_have_none(tmp_path):
    types = (0, 1, 1)
    given = arrays(4, types, labels=("energy",))
    given["atom_ener"] = np.array([[1.0, 2.0, 4.0], [2.0, 2.0, 4.0], [1.0, 2.0, 4.0], [2.0, 2.0, 4.0]])
    write_npy(tmp_path / "a", given, types, MAP[:2])
    write_npy(tmp_path / "b", arrays(3, (2, 2, 0), labels=("energy",), seed=3), (2, 2, 0), MAP[:3])
    systems = open_systems(str(tmp_path), MAP[:3])
    sample = [(0, k) for k in range(4)] + [(1, k) for k in range(3)]
    found = stats.energy_bias(systems, sample, SerialComm())
    fit = stats.energy_bias(systems[1:], [(0, 0), (0, 1), (0, 2)], SerialComm())
    np.testing.assert_allclose(found.bias[:2], [1.5, 3.0])
    np.testing.assert_allclose(found.std[:2], [0.5, 1.0])
    assert found.bias[2] != 0 and fit.bias[1] == pytest.approx(0, abs=1e-14)
    assert stats.energy_bias(systems, sample, SerialComm(), preset=[None, 9.0, None]).bias[1] == 9.0
    assert stats.energy_bias(systems[1:], [(0, 0)], SerialComm(), atom_exclude=[2]).bias[2] == 0


def test_bias_of_what_a_model_misses(tmp_path):
    """Predictions that are off by 2 eV per A and -5 per B, over workers; a system without energies takes no part."""
    for name, types in (("a", (0, 1, 1)), ("b", (0, 0, 1))):
        write_npy(tmp_path / name, arrays(3, types, labels=("energy",)), types, MAP[:2])
    write_npy(tmp_path / "c", arrays(3, labels=("force",)), type_map=MAP[:2])
    systems = open_systems(str(tmp_path), MAP[:2])
    sample = [(i, k) for k in range(3) for i in range(3)]

    def predict(members):
        for i, k in members:
            frame = systems[i].frame(k)
            yield frame.labels["energy"].item() - np.array([2.0, -5.0])[frame.type].sum()

    for size in (1, 2, 4):
        for found in on_workers(
            size, lambda comm: stats.fit_frames(systems, stats.share(sample, comm), comm, predict=predict)
        ):
            np.testing.assert_allclose(found.bias, [2.0, -5.0], rtol=1e-12)


def test_parameters(data):
    sample = stats.stat_sample(data, 10)
    fparam = np.array([f.fparam for f in all_frames(data)])
    aparam = np.concatenate([f.aparam for f in all_frames(data)])
    for size in (1, 3):
        for mean, inverse in on_workers(size, lambda comm: stats.fparam_stat(loader(data), sample, comm)):
            np.testing.assert_allclose(mean, fparam.mean(0), rtol=1e-12)
            np.testing.assert_allclose(inverse, [1 / fparam[:, 0].std(), 100.0], rtol=1e-12)
        for mean, inverse in on_workers(size, lambda comm: stats.aparam_stat(loader(data), sample, comm)):
            np.testing.assert_allclose(mean, aparam.mean(0), rtol=1e-12)
            np.testing.assert_allclose(inverse, 1 / aparam.std(0), rtol=1e-12)


def model(**options):
    fitting = SimpleNamespace(atom_ener=[], rcond=None)
    given = {"data_stat_nbatch": 10, "data_stat_protect": 0.01, "preset_out_bias": None, "atom_exclude_types": []}
    return SimpleNamespace(descriptor=descriptor(env_protection=0.0), fitting_net=fitting, **(given | options))


@pytest.mark.parametrize("name", ["cache/stat.hdf5", "cache/stat"])
def test_stat_file(data, tmp_path, name):
    path = str(tmp_path / name)
    first = stats.statistics(loader(data), model(), SerialComm(), path)
    for f in tmp_path.glob("s*/set.000/*.npy"):
        f.unlink()  # what follows must come from the cache
    again = stats.statistics(loader(data), model(), SerialComm(), path)
    for a, b in zip(
        (first.davg, first.dstd, first.energy.bias, first.energy.std, *first.fparam, *first.aparam),
        (again.davg, again.dstd, again.energy.bias, again.energy.std, *again.fparam, *again.aparam),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    if name.endswith("hdf5"):
        with h5py.File(path) as f:
            group = f["A B C D"]
            assert group["bias_atom_energy"].shape == (4, 1) and group["fparam"].shape == (2, 3)
            (key,) = [k for k in group if len(k) == 40]
            assert sorted(group[key]) == [f"{p}_{t}" for p in "ar" for t in range(4)] and group[key]["r_0"].shape == (
                3,
            )


def test_stat_file_that_is_only_read(data, tmp_path):
    path = str(tmp_path / "stat.h5")
    with pytest.raises(UserError, match="lacks .*bias_atom_energy.* stat_file_mode is read"):
        stats.statistics(loader(data), model(), SerialComm(), path, read_only=True)
    assert not (tmp_path / "stat.h5").exists()
    stats.statistics(loader(data), model(), SerialComm(), path)
    stats.statistics(loader(data), model(), SerialComm(), path, read_only=True)


def test_statistics_of_all_and_of_partitioned_workers(data):
    serial = stats.statistics(loader(data), model(), SerialComm())
    atom_ener = SimpleNamespace(atom_ener=[-5.0, None, None, None], rcond=None)
    assert stats.statistics(loader(data), model(), SerialComm()).energy.bias[0] != -5.0
    config = model()
    config.fitting_net = atom_ener
    assert stats.statistics(loader(data), config, SerialComm()).energy.bias[0] == -5.0

    def own(comm):
        share = DataSet(data.systems[:2] if comm.rank == 0 else data.systems[2:], 1)
        return stats.statistics(loader(share), model(), comm, split=False)

    for found in on_workers(2, own):
        np.testing.assert_allclose(found.davg, serial.davg, rtol=1e-12)
        np.testing.assert_allclose(found.dstd, serial.dstd, rtol=1e-12)
        np.testing.assert_allclose(found.energy.bias, serial.energy.bias, rtol=1e-12)
