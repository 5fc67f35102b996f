"""Statistics against a plain evaluation of their definitions, serial and over several workers."""

import copy
import threading
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from data_files import arrays, write_npy

from allforce.config.load import validated_config
from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.data.loader import Loader
from allforce.data.prepare import Limit, Needs
from allforce.data.sample import Sample, count_neighbors, some_frames
from allforce.data.sampler import Sampler
from allforce.distributed.comm import SerialComm
from allforce.errors import UserError
from allforce.files.tree import tree_from_model
from allforce.models import MODELS
from allforce.models.bias import energy_bias, fit_energy_bias
from allforce.models.env_stat import environment_statistics, normalisation
from allforce.models.net_fitting import parameter_normalisation, parameter_sums
from allforce.models.sel import complete_sel, sel_auto
from allforce.models.table import TableConfig
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
    barrier, board, results = threading.Barrier(size, timeout=300), [None] * size, [None] * size

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
    needs = Needs(4, Limit(RCUT, SEL), numb_fparam=2, numb_aparam=1, **options)
    return Loader(data, Sampler(data, 0), needs)


def sample_of(data, comm=None, nbatch=10, stat_file=None, **options):
    return Sample(loader(data, **options), nbatch, comm or SerialComm(), stat_file=stat_file)


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
        for found, count in on_workers(size, lambda comm: count_neighbors(data.systems, RCUT, comm)):
            assert found == pytest.approx(least, rel=1e-14)
            assert count.tolist() == most.tolist() and count[3] == 0
    everyone = max(np.bincount(neighbor_list(f.coord, f.cell, RCUT)[0]).max() for f in all_frames(data))
    assert count_neighbors(data.systems, RCUT, SerialComm(), mixed=True)[1].tolist() == [everyone]


def test_neighbours_none_and_touching(tmp_path):
    write_npy(tmp_path / "far", arrays(1, (0, 0), box=30.0), (0, 0), ["A"])
    (far,) = open_systems(str(tmp_path / "far"), ["A"])
    assert count_neighbors([far], 3.0, SerialComm())[0] is None
    given = arrays(2, (0, 0))
    given["coord"][1] = 1.0
    write_npy(tmp_path / "near", given, (0, 0), ["A"])
    with pytest.raises(UserError, match="near, frame 1: atoms 0 and 1 .* on one place"):
        count_neighbors(open_systems(str(tmp_path / "near"), ["A"]), 3.0, SerialComm())


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
    assert sel_auto(most, sel) == expected


def test_sel_too_small():
    """sel 0 means that the type is left out on purpose."""
    config = MODELS["standard"].Config.model_validate(section(sel=[10, 19, 0, 5])).descriptor
    completed, warnings = complete_sel(config, lambda rcut, mixed: (1.0, np.array([10, 20, 30, 0])), None, mixed=False)
    assert completed.sel == [10, 19, 0, 5]
    assert len(warnings) == 1 and "sel of type 1 is 19, but the data has up to 20" in warnings[0]


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
    assert len(sample_of(data).members) == 10
    serial = environment_statistics(sample_of(data), config, SEL)
    np.testing.assert_allclose(serial[0], davg, rtol=1e-12)
    np.testing.assert_allclose(serial[1], dstd, rtol=1e-12)
    for size in (2, 3, 4):
        for found in on_workers(size, lambda comm: environment_statistics(sample_of(data, comm), config, SEL)):
            np.testing.assert_allclose(found, serial, rtol=1e-12, atol=0)


def test_pairs_excluded_by_the_model_count_as_zeros(data):
    serial = environment_statistics(sample_of(data, excluded_pairs=((0, 1), (2, 2))), descriptor(), SEL)
    np.testing.assert_allclose(serial, plain_environment(data, ((0, 1), (2, 2))), rtol=1e-12)


def test_set_davg_zero_and_smallest_deviation():
    sums = np.array([[[10, 5.0, 2.5], [30, 0, 30.0]], [[0, 0, 0], [0, 0, 0]]])
    davg, dstd = normalisation(sums)
    assert davg.tolist() == [[0.5, 0, 0, 0], [0, 0, 0, 0]]
    assert dstd.tolist() == [[0.01, 1, 1, 1], [0.1, 0.1, 0.1, 0.1]]
    assert normalisation(sums, set_davg_zero=True)[0].tolist() == [[0] * 4] * 2


def test_the_sample_is_the_first_batches(data):
    data.batch_sizes = [2, 3, 1]
    assert some_frames(data, 1, spread=False) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert len(some_frames(data, 100, spread=False)) == 10
    assert some_frames(data, 100, spread=True) == some_frames(data, 100, spread=False)


def test_a_sample_from_everywhere(data):
    data.batch_sizes = [2, 3, 1]
    frames = [s.nframes for s in data.systems]
    assert some_frames(data, 1, spread=True) == [
        (0, 0), (0, frames[0] // 2), (1, 0), (1, frames[1] // 3), (1, 2 * frames[1] // 3), (2, 0)
    ]  # fmt: skip


def test_energy_bias_of_workers_is_the_serial_one(data):
    counts = np.array([np.bincount(f.type, minlength=4) for f in all_frames(data)], dtype=float)
    energy = np.array([f.labels["energy"][0] for f in all_frames(data)])
    expected = np.linalg.pinv(counts) @ energy  # smallest norm: zero for D
    residual = energy - counts @ expected
    for size in (1, 2, 3):
        for found in on_workers(size, lambda comm: energy_bias(sample_of(data, comm))):
            np.testing.assert_allclose(found.bias, expected, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(found.std, np.full(4, residual.std()), rtol=1e-11)
            assert found.rmse == pytest.approx(np.sqrt(np.mean((residual / counts.sum(1)) ** 2)), rel=1e-11)


def test_degenerate_compositions_have_the_smallest_norm():
    found = fit_energy_bias(np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([5.0, 10.0]))
    np.testing.assert_allclose(found.bias, [1.0, 2.0], rtol=1e-13)
    assert found.rmse == pytest.approx(0, abs=1e-13)


def test_preset_energies_stay():
    counts = np.array([[1.0, 2.0], [2.0, 1.0], [3.0, 5.0]])
    found = fit_energy_bias(counts, counts @ [-3.0, 7.0], preset=[-3.0, None])
    np.testing.assert_allclose(found.bias, [-3.0, 7.0], rtol=1e-13)
    found = fit_energy_bias(counts, counts @ [-3.0, 7.0], preset=[-2.0, None])
    x = counts[:, 1]
    assert found.bias[0] == -2.0
    assert found.bias[1] == pytest.approx(x @ (counts @ [-3.0, 7.0] + 2 * counts[:, 0]) / (x @ x))
    nothing = fit_energy_bias(np.zeros((0, 2)), np.zeros(0), preset=[None, 4.0])
    assert nothing.bias.tolist() == [0.0, 4.0] and nothing.rmse is None


def test_atomic_energies_go_first_and_excluded_types_have_none(tmp_path):
    types = (0, 1, 1)
    given = arrays(4, types, labels=("energy",))
    given["atom_ener"] = np.array([[1.0, 2.0, 4.0], [2.0, 2.0, 4.0], [1.0, 2.0, 4.0], [2.0, 2.0, 4.0]])
    write_npy(tmp_path / "a", given, types, MAP[:2])
    write_npy(tmp_path / "b", arrays(3, (2, 2, 0), labels=("energy",), seed=3), (2, 2, 0), MAP[:3])
    systems = open_systems(str(tmp_path), MAP[:3])

    def sample(systems):
        data = DataSet(systems, 1)
        return Sample(Loader(data, Sampler(data, 0), Needs(3, Limit(RCUT))), 10, SerialComm())

    found, fit = energy_bias(sample(systems)), energy_bias(sample(systems[1:]))
    np.testing.assert_allclose(found.bias[:2], [1.5, 3.0])
    np.testing.assert_allclose(found.std[:2], [0.5, 1.0])
    assert found.bias[2] != 0 and fit.bias[1] == pytest.approx(0, abs=1e-14)
    assert energy_bias(sample(systems), preset=[None, 9.0, None]).bias[1] == 9.0
    assert energy_bias(sample(systems[1:]), excluded=[2]).bias[2] == 0


def test_bias_of_what_a_model_misses(tmp_path):
    """Labels that are off by 2 eV per A and -5 per B, over workers; a system without energies takes no part."""
    model = MODELS["standard"](validated_config(section(type_map=MAP[:2], sel=[9, 9]), "test"))
    needs = model.needs
    for name, types in (("a", (0, 1, 1)), ("b", (0, 0, 1))):
        write_npy(tmp_path / name, arrays(3, types, labels=("energy",)), types, MAP[:2])
    write_npy(tmp_path / "c", arrays(3, labels=("force",)), type_map=MAP[:2])
    data = DataSet(open_systems(str(tmp_path), MAP[:2]), 1)
    for system, types in ((tmp_path / "a", (0, 1, 1)), (tmp_path / "b", (0, 0, 1))):
        batches = Loader(data, Sampler(data, 0), needs)
        index = 0 if system.name == "a" else 1
        with torch.no_grad():
            own = [float(model(batches.make([(index, k)]), ("energy",))["energy"][0]) for k in range(3)]
        np.save(system / "set.000" / "energy.npy", np.array(own) + np.array([2.0, -5.0])[list(types)].sum())
    data = DataSet(open_systems(str(tmp_path), MAP[:2]), 1)

    def fitted(comm):
        own = copy.deepcopy(model)
        own.change_bias(Sample(Loader(data, Sampler(data, 0), needs), 10, comm))
        return own.fitting.bias_atom_e.numpy()

    for size in (1, 2, 4):
        for bias in on_workers(size, fitted):
            np.testing.assert_allclose(bias, [2.0, -5.0], rtol=1e-9)


@pytest.mark.parametrize("kind, parameters", [("se_e2_a", 0), ("se_e2_a", 2), ("se_atten", 0)])
def test_input_of_the_fitting_nets(data, kind, parameters):
    """Products of the first layer with the descriptors: mean 0 and the deviation asked for, alike on all workers."""
    data = DataSet(data.systems[:2], 1)

    def fitted(comm, scale=0.1):
        config = section(neuron=[64], input_scale=scale, numb_fparam=parameters)
        if kind == "se_atten":
            config["descriptor"] |= {"type": kind, "sel": sum(SEL), "attn_layer": 0}
        model = MODELS["standard"](validated_config(config, "test"))
        loader = Loader(data, Sampler(data, 0), model.needs)
        model.fit_statistics(Sample(loader, 10, comm))
        model.prepare(TableConfig())
        model.fit_input(Sample(loader, 10, comm, spread=True, most=5))
        return model

    for model in on_workers(2, fitted):
        other = fitted(SerialComm())
        for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
    assert model.config.fitting_net.input_scale is None and "input_scale" not in str(tree_from_model(model))
    drawn, dim = fitted(SerialComm(), None), model.fitting.dim
    loader = Loader(data, Sampler(data, 0), model.needs)
    batches = list(Sample(loader, 10, SerialComm(), spread=True, most=5).batches())
    assert len(batches) > 2
    with torch.no_grad():
        whole = [model.descriptor.alone(batch) for batch in batches]
    for t, (net, before) in enumerate(zip(model.fitting.nets, drawn.fitting.nets, strict=True)):
        parts = [D if kind == "se_atten" else D.split(b.type_counts)[t] for D, b in zip(whole, batches, strict=True)]
        D, w, b = torch.cat(parts), net.layers[0].w.detach(), net.layers[0].b.detach()
        old = before.layers[0].w.detach()
        assert torch.equal(w[dim:], old[dim:])
        if len(D) == 0:
            assert torch.equal(w, old)
            continue
        torch.testing.assert_close((D @ w[:dim] + b).mean(0), before.layers[0].b.detach(), rtol=0, atol=1e-9)
        deviation = float((D.var(0, unbiased=False).sum() / sum(old.shape)).sqrt())
        torch.testing.assert_close(w[:dim], old[:dim] * min(0.1 / deviation, 100.0), rtol=1e-6, atol=0)


def test_parameters(data):
    fparam = np.array([f.fparam for f in all_frames(data)])
    aparam = np.concatenate([f.aparam for f in all_frames(data)])

    def found(comm, name, width):
        return parameter_normalisation(parameter_sums(sample_of(data, comm), name, width), 0.01)

    for size in (1, 3):
        for mean, inverse in on_workers(size, lambda comm: found(comm, "fparam", 2)):
            np.testing.assert_allclose(mean, fparam.mean(0), rtol=1e-12)
            np.testing.assert_allclose(inverse, [1 / fparam[:, 0].std(), 100.0], rtol=1e-12)
        for mean, inverse in on_workers(size, lambda comm: found(comm, "aparam", 1)):
            np.testing.assert_allclose(mean, aparam.mean(0), rtol=1e-12)
            np.testing.assert_allclose(inverse, 1 / aparam.std(0), rtol=1e-12)


def section(sel=None, type_map=None, **fitting):
    small = {"type": "se_e2_a", "sel": sel or SEL, "rcut": RCUT, "rcut_smth": RS, "neuron": [4], "axis_neuron": 2}
    return {
        "type_map": type_map or MAP,
        "descriptor": {**small, "seed": 1},
        "fitting_net": {"neuron": [4], "seed": 1, **fitting},
    }


def statistics(data, comm=None, stat_file=None, read_only=False, split=True, **fitting):
    """State of a model after it has looked at the data."""
    model = MODELS["standard"](validated_config(section(numb_fparam=2, numb_aparam=1, **fitting), "test"))
    sample = Sample(Loader(data, Sampler(data, 0), model.needs), 10, comm or SerialComm(), split, stat_file)
    model.fit_statistics(sample)
    sample.file.save(read_only)
    names = (
        "descriptor.davg",
        "descriptor.dstd",
        "fitting.bias_atom_e",
        "fitting.fparam_avg",
        "fitting.fparam_inv_std",
    )
    return {k: v.numpy() for k, v in model.state_dict().items() if k in names or "aparam" in k}


@pytest.mark.parametrize("name", ["cache/stat.hdf5", "cache/stat"])
def test_stat_file(data, tmp_path, name):
    path = str(tmp_path / name)
    first = statistics(data, stat_file=path)
    for f in tmp_path.glob("s*/set.000/*.npy"):
        f.unlink()  # what follows must come from the cache
    again = statistics(data, stat_file=path)
    assert len(first) == 7 and first.keys() == again.keys()
    for key in first:
        np.testing.assert_array_equal(first[key], again[key])
    if name.endswith("hdf5"):
        with h5py.File(path) as f:
            group = f["A B C D"]
            assert group["bias_atom_energy"].shape == (4, 1) and group["fparam"].shape == (2, 3)
            (key,) = [k for k in group if len(k) == 40]
            assert sorted(group[key]) == [f"{p}_{t}" for p in "ar" for t in range(4)]
            assert group[key]["r_0"].shape == (3,)


def test_stat_file_that_is_only_read(data, tmp_path):
    path = str(tmp_path / "stat.h5")
    with pytest.raises(UserError, match="lacks .*bias_atom_energy.* stat_file_mode is read"):
        statistics(data, stat_file=path, read_only=True)
    assert not (tmp_path / "stat.h5").exists()
    statistics(data, stat_file=path)
    statistics(data, stat_file=path, read_only=True)


def test_statistics_of_all_and_of_partitioned_workers(data):
    serial = statistics(data)
    assert serial["fitting.bias_atom_e"][0] != -5.0
    given = statistics(data, atom_ener=[-5.0, None, None, None])
    assert given["fitting.bias_atom_e"][0] == -5.0

    def own(comm):
        share = DataSet(data.systems[:2] if comm.rank == 0 else data.systems[2:], 1)
        return statistics(share, comm, split=False)

    for found in on_workers(2, own):
        for key in ("descriptor.davg", "descriptor.dstd", "fitting.bias_atom_e"):
            np.testing.assert_allclose(found[key], serial[key], rtol=1e-12)
