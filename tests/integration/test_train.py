"""dp train, whole, on a few atoms."""

import json
import math
import re
import sys

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from tiny import dp, rows, write_input

from allforce.cli import main
from allforce.files import checkpoint
from allforce.files.model_file import load_model
from allforce.infer.predict import DeepPot
from allforce.train.start import Job

pytest_plugins = ["folder_fixture"]


def train(folder, *args, **changes):
    write_input(folder, **changes)
    return main(["train", "input.json", *args])


def weights(folder, step):
    return checkpoint.read(folder / f"model.ckpt-{step}.safetensors").tensors


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_it_learns_and_leaves_its_files(folder, capsys):
    assert train(folder, "-l", "train.log", training__numb_steps=300, training__disp_freq=50) == 0
    table = np.array([[float(x) for x in row.split()] for row in rows(folder)])
    assert table[:, 0].tolist() == list(range(0, 301, 50))
    assert np.isfinite(table).all()
    first, last = table[0], table[-1]
    assert last[5] < 0.5 * first[5] and last[6] < 0.5 * first[6]  # force, held-out and training
    assert (folder / "checkpoint").read_text() == "model.ckpt-300.safetensors"
    assert json.loads((folder / "out.json").read_text())["training"]["save_ckpt"] == "model.ckpt"
    log = capsys.readouterr().err
    assert log.count("\n") == (folder / "train.log").read_text().count("\n")
    for pattern in (
        r"---Summary of DataSystem: Training     -{47}\n",
        r"DEEPMD INFO    ---Summary of the training-{39}\n\S+ \S+ DEEPMD INFO    serial\n",
        r"start training at lr 5\.00e-03 \(== 5\.00e-03\), final lr will be 1\.00e-05",
        r"Batch      50: trn: rmse = [\d.e+-]+, rmse_e = [\d.e+-]+, rmse_f = [\d.e+-]+, lr = [\d.e+-]+\n",
        r"Batch      50: val: rmse = [\d.e+-]+, rmse_e = [\d.e+-]+, rmse_f = [\d.e+-]+\n",
        r"batch      50 training time \d+\.\d\d s, testing time \d+\.\d\d s\n",
        r"Batch      50: total wall time = \d+\.\d\d s, eta = \d+:\d\d:\d\d at \d{4}-\d\d-\d\d \d\d:\d\d\n",
        r"saved checkpoint model\.ckpt\n",
        r"average training time: \d+\.\d{4} s/batch \(exclude first 50 batches\)\n",
        r"finished training\n(.*\n)*.*wall time: \d+\.\d{3} s\n$",
    ):
        assert re.search(pattern, log), pattern


def test_the_seed_fixes_the_run(folder):
    curves = []
    for _ in range(2):
        assert train(folder) == 0
        curves.append(((folder / "lcurve.out").read_bytes(), weights(folder, 20)))
    assert curves[0][0] == curves[1][0] and same(curves[0][1], curves[1][1])
    train(folder, training__seed=11)
    assert (folder / "lcurve.out").read_bytes() != curves[0][0]


def test_without_validation_and_at_other_frequencies(folder):
    assert train(folder, training__validation_data=None, training__numb_steps=7, training__save_freq=3) == 0
    assert (folder / "lcurve.out").read_text().startswith("# step       rmse_trn    rmse_e_trn    rmse_f_trn   lr")
    assert [row.split()[0] for row in rows(folder)] == ["0", "5", "7"]
    assert [step for step, _ in checkpoint.numbered(folder / "model.ckpt")] == [3, 6, 7]


def test_a_restart_continues_as_if_nothing_had_happened(folder):
    schedule = {"learning_rate__decay_rate": 0.9}  # the rate must not depend on the number of steps
    train(folder, **schedule)
    whole, final = rows(folder), weights(folder, 20)
    train(folder, training__numb_steps=10, **schedule)
    train(folder, "--restart", "model.ckpt", **schedule)
    text = (folder / "lcurve.out").read_text()
    assert rows(folder) == whole and text.count("# step") == 1
    assert same(weights(folder, 20), final)


@pytest.mark.parametrize("source", [".", "model.ckpt-10.safetensors", "model.ckpt-10"])
def test_restart_finds_its_checkpoint(folder, source, capsys):
    train(folder, training__numb_steps=10)
    capsys.readouterr()
    assert train(folder, "-r", source, training__numb_steps=11) == 0
    assert "Continue at step 10 of 11." in capsys.readouterr().err


def test_a_run_counts_and_removes_its_own_checkpoints_only(folder):
    """Those it wrote itself and those of the run that it continues, not what others left in the same place."""
    few = {"training__save_freq": 2, "training__max_ckpt_keep": 2}

    def steps():
        return [step for step, _ in checkpoint.numbered(folder / "model.ckpt")]

    train(folder, training__numb_steps=5, training__save_freq=5)
    foreign = weights(folder, 5)
    train(folder, training__numb_steps=12, training__seed=3, **few)
    assert steps() == [5, 10, 12]
    train(folder, "--restart", "model.ckpt-12", training__numb_steps=14, **few)
    assert steps() == [5, 12, 14]
    train(folder, "--init-model", "model.ckpt-14", training__numb_steps=8, **few)
    assert steps() == [5, 6, 8, 12, 14] and same(weights(folder, 5), foreign)


def test_init_model_takes_the_weights_and_begins_at_0(folder):
    train(folder)
    scratch = rows(folder)[0].split()
    train(folder, "--init-model", "model.ckpt", training__numb_steps=1, training__save_ckpt="new")
    first = rows(folder)[0].split()
    assert first[0] == "0" and first[-1] == scratch[-1]  # step and rate begin anew
    assert float(first[5]) < 0.9 * float(scratch[5])  # but not the errors, on the same batches
    assert checkpoint.read("new-1.safetensors").meta["updates"] == 1


def shift_labels(folder, per_type):
    for name in ("small", "large"):
        path = folder / name / "set.000" / "energy.npy"
        types = np.loadtxt(folder / name / "type.raw")
        np.save(path, np.load(path) + [np.sum(types == 0), np.sum(types == 1)] @ np.array(per_type))


def test_finetune_changes_the_bias_and_keeps_the_statistics(folder):
    train(folder)
    old, bias = weights(folder, 20), "model/fitting.bias_atom_e"
    new = []
    for name in ("same", "moved"):
        assert train(folder, "--finetune", "model.ckpt-20", training__numb_steps=1, training__save_ckpt=name) == 0
        new.append(checkpoint.read(f"{name}-1.safetensors").tensors)
        shift_labels(folder, [2.0, -5.0])
    assert (new[1][bias] - new[0][bias]).tolist() == pytest.approx([2.0, -5.0], abs=1e-9)
    assert torch.equal(new[1]["model/descriptor.davg"], old["model/descriptor.davg"])


def test_bias_can_be_fitted_again_after_training(folder):
    train(folder)
    plain = weights(folder, 20)
    train(folder, training__change_bias_after_training=True)
    fitted = weights(folder, 20)
    assert {k for k in plain if not torch.equal(plain[k], fitted[k])} == {"model/fitting.bias_atom_e"}


def test_last_layer_can_be_fitted_after_training(folder, capsys):
    """It changes the last layers and the bias, and what the model misses becomes less, also of data held back."""
    train(folder)
    plain = weights(folder, 20)
    assert main(["freeze", "-o", "plain.dp"]) == 0
    capsys.readouterr()
    train(folder, training__refit=True)
    assert "last layer fitted to 70 energies and 140 derivatives of them" in capsys.readouterr().err
    fitted = weights(folder, 20)
    last = {f"model/fitting.nets.{t}.layers.2.w" for t in range(2)}
    assert {k for k in plain if not torch.equal(plain[k], fitted[k])} == last | {"model/fitting.bias_atom_e"}
    assert main(["freeze", "-o", "fitted.dp"]) == 0
    errors = [DeepPot(name).eval(*coordinates(folder / "held")) for name in ("plain.dp", "fitted.dp")]
    energy, force = (np.load(folder / f"held/set.000/{name}.npy") for name in ("energy", "force"))
    before, after = (
        (np.abs(e[:, 0] - energy).mean(), np.square(f.reshape(len(f), -1) - force).mean()) for e, f, _ in errors
    )
    assert after[0] < 0.5 * before[0] and after[1] < before[1]


def coordinates(system):
    arrays = [np.load(system / f"set.000/{name}.npy") for name in ("coord", "box")]
    return *arrays, [int(t) for t in (system / "type.raw").read_text().split()]


def test_averaged_weights_are_what_is_fitted(folder):
    ema = {"training__enable_ema": True, "training__ema_decay": 0.9}
    train(folder, **ema)
    plain = weights(folder, 20)
    train(folder, training__refit=True, **ema)
    fitted = weights(folder, 20)
    last = {f"ema/fitting.nets.{t}.layers.2.w" for t in range(2)}
    assert {k for k in plain if not torch.equal(plain[k], fitted[k])} == last | {"model/fitting.bias_atom_e"}


@pytest.mark.parametrize(
    "change", [{"model__fitting_net__trainable": [True, True, False]}, {"model__atom_exclude_types": [1]}]
)
def test_a_last_layer_that_stays_leaves_the_bias_to_be_fitted(folder, change, capsys):
    train(folder, training__numb_steps=2, training__refit=True, **change)
    log = capsys.readouterr().err
    assert "energy bias changed by" in log and "last layer fitted" not in log


def test_other_type_map_is_refused(folder, capsys):
    train(folder, training__numb_steps=1)
    assert (
        train(folder, "--finetune", "model.ckpt", model__type_map=["A", "B", "C"], model__descriptor__sel=[9, 9, 9])
        == 2
    )
    assert "type_map" in capsys.readouterr().err


def test_accumulation_is_the_mean_over_micro_batches(folder):
    """Two micro-batches that are one and the same frame give the gradient of one."""
    one = {"training__training_data": {"systems": ["one"], "batch_size": 1}, "training__validation_data": None}
    from tiny import write_system

    write_system(folder / "one", [0, 1, 1, 0, 1], 1, 5)
    train(folder, **one)
    single = weights(folder, 20)
    train(folder, training__acc_freq=2, **one)
    double = weights(folder, 20)
    assert all(torch.allclose(single[k], double[k], rtol=1e-9, atol=1e-12) for k in single)


def test_sel_auto(folder, capsys):
    assert train(folder, training__numb_steps=1, model__descriptor__sel="auto") == 0
    sel = json.loads((folder / "out.json").read_text())["model"]["descriptor"]["sel"]
    assert all(n > 0 and n % 4 == 0 for n in sel)
    assert train(folder, "--skip-neighbor-stat", model__descriptor__sel="auto") == 2
    assert "--skip-neighbor-stat" in capsys.readouterr().err


def test_epochs(folder):
    assert train(folder, training__numb_steps=None, training__numb_epoch=2) == 0
    assert rows(folder)[-1].split()[0] == "70"  # 20 batches of small and 15 of large, twice


def test_gradient_norm_is_limited(folder):
    train(folder, training__numb_steps=1, training__gradient_max_norm=1e-30, optimizer={"type": "AdamW"})
    tensors = weights(folder, 1)
    moment = torch.cat([t.reshape(-1) for k, t in tensors.items() if k.startswith("optimizer/exp_avg/")])
    assert 0 < float(moment.norm()) <= 0.1 * 1e-30 * (1 + 1e-6)


def test_float32(folder):
    precision = {"model__descriptor__precision": "float32", "model__fitting_net__precision": "float32"}
    assert train(folder, **precision) == 0
    tensors = weights(folder, 20)
    assert tensors["model/fitting.nets.0.layers.0.w"].dtype == torch.float32
    mixed = {"model__descriptor__precision": "float32", "model__fitting_net__precision": "float64"}
    assert train(folder, **mixed) == 0
    assert np.isfinite(float(rows(folder)[-1].split()[1]))


def test_frozen_parts_do_not_move(folder):
    train(
        folder,
        training__numb_steps=10,
        model__descriptor__trainable=False,
        model__fitting_net__trainable=[False, True, True],
    )
    after = weights(folder, 10)
    train(
        folder,
        training__numb_steps=20,
        model__descriptor__trainable=False,
        model__fitting_net__trainable=[False, True, True],
    )
    later = weights(folder, 20)
    moved = {k for k in after if k.startswith("model/") and not torch.equal(after[k], later[k])}
    assert moved and all(k.startswith("model/fitting.nets") and ".layers.0." not in k for k in moved)


def test_a_loss_that_is_not_finite_stops_the_run_with_words(folder, capsys):
    train(folder, training__numb_steps=10)
    huge = {"learning_rate__start_lr": 1e300, "learning_rate__stop_lr": 1e299}
    assert train(folder, "--restart", "model.ckpt", training__save_freq=1, **huge) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"not finite at step 11, in the batch of (small|large) frame \d+", error)
    assert "The last good checkpoint is model.ckpt-10.safetensors." in error
    assert [step for step, _ in checkpoint.numbered(folder / "model.ckpt")] == [10]
    (folder / "model.ckpt-10.safetensors").rename(folder / "model.ckpt-0.safetensors")
    assert train(folder, **huge) == 2  # what a run from the beginning finds there is another run's
    assert "No checkpoint had been written." in capsys.readouterr().err.splitlines()[-1]


def spoil(folder):
    """One frame of 70 has a force whose square is no number."""
    forces = np.load(folder / "small/set.000/force.npy")
    forces[7] = 1e200
    np.save(folder / "small/set.000/force.npy", forces)


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_run_goes_on_after_a_loss_that_is_not_finite(folder, capsys, action):
    spoil(folder)
    assert train(folder, training__numb_steps=80, training__on_nan=action) == 0
    log = capsys.readouterr().err
    assert log.count("The loss is not finite at step") == 2 and log.count("small frame 7") == 2, log  # 35 steps a pass
    assert log.count("The step is skipped" if action == "skip" else "Back to model.ckpt-") == 2, log
    assert all(torch.isfinite(w).all() for w in weights(folder, 80).values())
    assert not re.search("nan|inf", "".join(rows(folder)))


def test_a_gradient_that_is_not_finite_is_skipped(folder, capsys, monkeypatch):
    plain = Job.learn

    def spoiled(job, *args, **kwargs):
        loss = plain(job, *args, **kwargs)
        if job.state.step == 7:
            job.state.flat.gradient[3] = torch.inf
        return loss

    monkeypatch.setattr(Job, "learn", spoiled)
    assert train(folder, training__on_nan="skip") == 0
    log = capsys.readouterr().err
    assert log.count("The gradient is not finite at step 7, in the batch of") == 1, log
    assert all(torch.isfinite(w).all() for w in weights(folder, 20).values())


def test_skips_and_rewinds_have_an_end(folder, capsys):
    huge = {"learning_rate__start_lr": 1e300, "learning_rate__stop_lr": 1e299, "training__table": {"mode": "exact"}}
    assert train(folder, training__on_nan="skip", **huge) == 2
    assert "the step number 11 in a row that was not. No checkpoint" in capsys.readouterr().err.splitlines()[-1]
    train(folder, training__numb_steps=10)
    capsys.readouterr()
    assert train(folder, "--restart", "model.ckpt", training__on_nan="rewind", **huge) == 2
    log = capsys.readouterr().err
    assert log.count("Back to model.ckpt-10.safetensors") == 3, log
    assert "3 times the run has gone back to it" in log.splitlines()[-1]


def test_average_of_the_interval(folder):
    every = {
        "training__disp_freq": 1,
        "training__validation_data": None,
        "training__training_data": {"systems": "small", "batch_size": 1},
    }
    train(folder, **every)
    single = [float(row.split()[3]) for row in rows(folder)]
    train(folder, **{**every, "training__disp_freq": 5}, training__disp_avg=True)
    mean = [float(row.split()[3]) for row in rows(folder)]
    assert mean[1] == pytest.approx(math.sqrt(np.mean(np.square(single[1:6]))), rel=0.01)


def test_mistakes_get_words(folder, capsys, monkeypatch):
    assert main(["train", "nothing.json"]) == 2
    write_input(folder, training__numb_stepps=3)
    assert main(["train", "input.json"]) == 2
    assert "numb_steps" in capsys.readouterr().err
    assert train(folder, "-r", "nowhere") == 2
    assert "no such checkpoint" in capsys.readouterr().err
    assert train(folder, "--model-branch", "x") == 2
    frozen = {"model__descriptor__trainable": False, "model__fitting_net__trainable": False}
    assert train(folder, **frozen) == 2
    assert "nothing to train" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", None)
    assert train(folder, training__tensorboard=True) == 2
    error = capsys.readouterr().err
    assert "tensorboard is not installed" in error and "Traceback" not in error


def test_files_that_cannot_be_written_are_told_before_training(folder, capsys):
    (folder / "file").write_text("")
    for args, changes in (
        (["-o", "no/such/out.json"], {}),
        ([], {"training__disp_file": "no/such/l.out"}),
        ([], {"training__save_dir": "file"}),
    ):
        assert train(folder, *args, **changes) == 2
        error = capsys.readouterr().err
        assert "Batch" not in error and "Traceback" not in error and "dp train: error: " in error


def test_numbers_per_type_are_held_against_the_types_of_the_data(folder, capsys):
    for key, value in (
        ("descriptor__sel", [16]),
        ("descriptor__exclude_types", [[0, 5]]),
        ("pair_exclude_types", [[0, 5]]),
        ("atom_exclude_types", [5]),
        ("fitting_net__atom_ener", [1.0]),
    ):
        assert train(folder, model__type_map=None, **{f"model__{key}": value}) == 2
        assert f"error: model/{key.replace('__', '/')}: {value}" in capsys.readouterr().err


def test_systems_without_labels_teach_nothing(folder, capsys):
    assert train(folder, training__numb_steps=1) == 0
    assert "no label" not in capsys.readouterr().err
    (folder / "small" / "set.000" / "energy.npy").unlink()
    assert train(folder, training__numb_steps=1) == 0
    assert "no label" not in capsys.readouterr().err  # forces are enough
    (folder / "small" / "set.000" / "force.npy").unlink()
    assert train(folder, training__numb_steps=5) == 0
    assert re.search("WARNING 1 of 2 training systems have no label .* from them: small\n", capsys.readouterr().err)
    assert train(folder, training__training_data={"systems": "small"}) == 2
    assert "no system has a label" in capsys.readouterr().err


def write_xyz(folder, energy, forces):
    """The system `small` as extended XYZ with labels of these names."""
    sets, types = folder / "small" / "set.000", [0, 1, 1, 0, 1]
    coord, box, e, f = (np.load(sets / f"{name}.npy") for name in ("coord", "box", "energy", "force"))
    images = []
    for k in range(len(e)):
        atoms = Atoms(["OH"[t] for t in types], coord[k].reshape(-1, 3), cell=box[k].reshape(3, 3), pbc=True)
        atoms.info[energy], atoms.arrays[forces] = e[k], f[k].reshape(-1, 3)
        images.append(atoms)
    ase.io.write(folder / "small.xyz", images, format="extxyz")


def test_names_of_labels_of_a_file(folder, capsys):
    """The same training as from the folder; without the names the keys of the file are in the message."""
    write_xyz(folder, "E_mp2", "F_mp2")
    changes = {"model__type_map": ["O", "H"], "training__validation_data": None}
    system = {"file": "small.xyz", "energy": "E_mp2", "forces": "F_mp2"}
    assert train(folder, training__training_data={"systems": [system], "batch_size": 2}, **changes) == 0
    named = rows(folder)
    changes["model__type_map"] = ["A", "B"]
    assert train(folder, training__training_data={"systems": ["small"], "batch_size": 2}, **changes) == 0
    last, expected = (np.array(r[-1].split(), dtype=float) for r in (named, rows(folder)))
    np.testing.assert_allclose(last, expected, rtol=1e-3)  # the file has 8 decimals
    capsys.readouterr()
    changes["model__type_map"] = ["O", "H"]
    assert train(folder, training__training_data={"systems": ["small.xyz"]}, **changes) == 2
    message = capsys.readouterr().err
    assert "no system has a label that the loss uses (in small.xyz: its frames have E_mp2, F_mp2)" in message


def test_systems_without_labels_of_all_workers_are_named(folder, capsys):
    for label in ("energy", "force"):
        (folder / "small" / "set.000" / f"{label}.npy").unlink()
    data = {"systems": ["large", "held", "small"]}  # with partition the last is that of rank 1
    for sharding in ("global", "partition"):
        write_input(folder, training__sharding=sharding, training__training_data=data)
        done = dp(folder, "train", "input.json", "--workers", "2")
        assert done.returncode == 0, done.stderr
        found = re.findall("WARNING (.*) training systems have no label .* from them: (.*)", done.stderr)
        assert found == [("1 of 3", "small")]


def test_a_frame_without_atoms_is_an_error_of_the_data(folder, capsys):
    types = np.tile([0, 1, 1, 0, -1], (40, 1))
    np.save(folder / "small" / "set.000" / "real_atom_types.npy", types)
    assert train(folder, training__numb_steps=1) == 0
    types[7] = -1
    np.save(folder / "small" / "set.000" / "real_atom_types.npy", types)
    for args in ([], ["--skip-neighbor-stat"]):
        assert train(folder, *args) == 2
        assert "error: small/set.000: real_atom_types.npy of frame 7 has" in capsys.readouterr().err


def test_a_restart_does_not_change_the_model(folder, capsys):
    train(folder, training__numb_steps=2)
    for key, value in (("rcut", 4.0), ("sel", [16, 24]), ("activation_function", "gelu")):
        assert train(folder, "-r", "model.ckpt", **{f"model__descriptor__{key}": value}) == 2
        assert f"model/descriptor/{key} is {value}" in capsys.readouterr().err
    assert train(folder, "-i", "model.ckpt", model__descriptor__sel=[16, 24]) == 0
    assert "WARNING model/descriptor/sel is [16, 24]" in capsys.readouterr().err


def test_average_of_the_weights(folder):
    """Validated, frozen, continued exactly; the raw weights go on as without it."""
    rate = {"learning_rate__start_lr": 0.01, "learning_rate__decay_rate": 1.0}
    train(folder, **rate)
    plain, curve = weights(folder, 20), rows(folder)
    ema = {"training__enable_ema": True, "training__ema_decay": 0.9, **rate}
    train(folder, **ema)
    saved, with_ema = weights(folder, 20), rows(folder)
    names = [k.removeprefix("ema/") for k in saved if k.startswith("ema/")]
    assert names and all(torch.equal(saved[k], v) for k, v in plain.items())
    assert curve[0] == with_ema[0] and curve[-1] != with_ema[-1]  # averaged before the first update: the same
    model = load_model(folder / "model.ckpt").state_dict()
    assert all(torch.equal(model[k], saved[f"ema/{k}"]) for k in names)
    (folder / "model.ckpt-20.safetensors").unlink()
    train(folder, "--restart", "model.ckpt-10", **ema)
    assert all(torch.equal(weights(folder, 20)[k], v) for k, v in saved.items())


FULL = {
    "full_validation": True,
    "validation_freq": 4,
    "full_val_start": 0,
    "validation_metric": "f:rmse",
    "max_best_ckpt": 2,
}


def test_all_validation_data_and_the_best_models(folder):
    train(folder, validating=FULL)
    lines = (folder / "val.log").read_text().splitlines()
    assert lines[0].split() == ["#", "step", "E:MAE", "E:RMSE", "F:MAE", "F:RMSE"]
    values = {int(row[0]): [float(x) for x in row[1:]] for row in map(str.split, lines[1:])}
    assert list(values) == [0, 4, 8, 12, 16, 20]
    best = sorted(values, key=lambda step: values[step][3])[:2]
    assert [s for s, _ in checkpoint.numbered(folder / "best.ckpt")] == sorted(best)
    potential = DeepPot(folder / f"best.ckpt-{best[0]}.safetensors")
    coord, force, energy = (np.load(folder / f"held/set.000/{x}.npy") for x in ("coord", "force", "energy"))
    box = np.load(folder / "held/set.000/box.npy")
    e, f = potential.eval(coord, box, [0, 0, 1, 1, 1, 0])[:2]
    expected = [abs(e.ravel() - energy).mean() / 6, np.sqrt(((f.reshape(force.shape) - force) ** 2).mean())]
    assert [values[best[0]][0], values[best[0]][3]] == pytest.approx(expected, rel=1e-4)
    train(folder, "--restart", "model.ckpt-10", validating=FULL)
    assert [int(line.split()[0]) for line in (folder / "val.log").read_text().splitlines()[7:]] == [12, 16, 20]


def test_a_run_without_progress_ends(folder, capsys):
    slow = {"learning_rate__start_lr": 1e-9, "learning_rate__stop_lr": 1e-10, "training__numb_steps": 100}
    assert train(folder, training__stop_when={"patience": 2}, validating={**FULL, "save_best": False}, **slow) == 0
    assert "ended at step 9 of 100: 2 validations without progress" in capsys.readouterr().err
    assert checkpoint.numbered(folder / "model.ckpt")[-1][0] == 9 and not checkpoint.numbered(folder / "best.ckpt")


def test_a_restart_does_not_change_the_optimizer(folder, capsys):
    train(folder, training__numb_steps=2)
    assert train(folder, "-r", "model.ckpt", optimizer={"type": "HybridMuon"}) == 2
    assert "has the state of another optimizer (exp_avg, exp_avg_sq)" in capsys.readouterr().err
    assert train(folder, "-i", "model.ckpt", optimizer={"type": "HybridMuon"}) == 0


def test_a_restart_elsewhere_does_not_change_the_precision(folder, capsys, monkeypatch):
    """The precision "default" is that of the environment of the first run, and its checkpoint knows it."""
    monkeypatch.setenv("DP_INTERFACE_PREC", "low")
    assert train(folder, training__numb_steps=2) == 0
    assert json.loads((folder / "out.json").read_text())["model"]["descriptor"]["precision"] == "float32"
    monkeypatch.delenv("DP_INTERFACE_PREC")
    capsys.readouterr()
    assert train(folder, "-r", "model.ckpt", training__numb_steps=4) == 2
    expected = "model/descriptor/precision is float64, but model.ckpt was trained with float32"
    assert expected in capsys.readouterr().err
    assert main(["freeze", "-o", "model.dp"]) == 0 and load_model("model.dp").config.descriptor.precision == "float32"
    assert train(folder, "-i", "model.ckpt", training__numb_steps=1) == 0
    assert f"WARNING {expected}" in capsys.readouterr().err


def test_types_without_energy_take_no_part_in_the_bias(folder):
    """All energy must go to type 0, after the training as before it."""
    change = {"training__numb_steps": 2, "model__atom_exclude_types": [1]}
    train(folder, **change)
    before = weights(folder, 2)["model/fitting.bias_atom_e"]
    train(folder, training__change_bias_after_training=True, **change)
    after = weights(folder, 2)["model/fitting.bias_atom_e"]
    assert after[1] == before[1] == 0.0 and after[0] != before[0]
    main(["freeze", "-o", "model.dp"])
    assert main(["change-bias", "model.dp", "-s", "small"]) == 0
    assert load_model("model_updated.dp").fitting.bias_atom_e[1] == 0.0


def test_energies_in_vacuum_from_isolated_atoms(folder, capsys):
    """Frames with one atom alone give atom_ener; the model then has exactly these energies there, and says so."""
    write_xyz(folder, "energy", "forces")
    alone = [Atoms(symbol, [[1.0, 2.0, 3.0]], info={"energy": e}) for symbol, e in (("H", -0.75), ("O", -2.5))]
    changes = {
        "model__type_map": ["O", "H"],
        "model__fitting_net__atom_ener": "isolated",
        "model__descriptor__set_davg_zero": True,  # then an atom alone has a descriptor of zeros
        "training__validation_data": None,
        "training__numb_steps": 4,
    }
    data = {"systems": ["small.xyz", "alone.xyz"], "batch_size": 2}
    ase.io.write(folder / "alone.xyz", alone[:1], format="extxyz")
    assert train(folder, training__training_data=data, **changes) == 2
    assert 'atom_ener: "isolated", but the training data has no frame' in capsys.readouterr().err
    ase.io.write(folder / "alone.xyz", alone, format="extxyz")
    assert train(folder, training__training_data=data, **changes) == 0
    assert main(["freeze", "-o", "model.dp"]) == 0
    model = load_model("model.dp")
    assert model.config.fitting_net.atom_ener == [-2.5, -0.75]
    energy = [DeepPot(model).eval(np.ones((1, 3)), None, [t])[0][0, 0] for t in range(2)]
    np.testing.assert_allclose(energy, [-2.5, -0.75], atol=1e-12)
    changes["training__numb_steps"] = 6
    assert train(folder, "-r", "model.ckpt", training__training_data=data, **changes) == 0  # the same model goes on
    alone[0].info["energy"] = -0.5
    ase.io.write(folder / "alone.xyz", [*alone, Atoms("H", [[0.0, 0.0, 0.0]], info={"energy": -0.75})], format="extxyz")
    assert train(folder, training__training_data=data, **changes) == 2
    assert "Energies of one atom alone differ: -0.5 eV in alone.xyz" in capsys.readouterr().err


def test_isolated_atoms_among_several_workers(folder):
    write_xyz(folder, "energy", "forces")
    alone = [Atoms(symbol, [[1.0, 2.0, 3.0]], info={"energy": e}) for symbol, e in (("H", -0.75), ("O", -2.5))]
    ase.io.write(folder / "alone.xyz", alone, format="extxyz")
    data = {"systems": ["small.xyz", "alone.xyz"], "batch_size": 2}
    changes = {"model__type_map": ["O", "H"], "model__fitting_net__atom_ener": "isolated"}
    for sharding in ("global", "partition"):  # where the first worker has no isolated atom
        write_input(
            folder, training__training_data=data, training__sharding=sharding, training__numb_steps=2,
            training__validation_data=None, **changes,
        )  # fmt: skip
        done = dp(folder, "train", "input.json", "--workers", "2")
        assert done.returncode == 0, done.stderr
        assert load_model("model.ckpt").config.fitting_net.atom_ener == [-2.5, -0.75]
