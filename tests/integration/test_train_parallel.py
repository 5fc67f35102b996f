"""dp train with real workers: W workers are one worker with W micro-batches."""

import json
import re

import numpy as np
import torch
from tiny import dp, rows, write_input

from allforce.cli import main
from allforce.files import checkpoint

pytest_plugins = ["folder_fixture"]


def parallel(folder, workers, *args, code=0, **changes):
    write_input(folder, **changes)
    result = dp(folder, "train", "input.json", "--workers", str(workers), *args)
    assert result.returncode == code, result.stderr
    return result.stderr


def serial(folder, *args, **changes):
    write_input(folder, **changes)
    assert main(["train", "input.json", *args]) == 0


def final(folder, step=20):
    return checkpoint.read(folder / f"model.ckpt-{step}.safetensors").tensors


def test_two_workers_are_one_with_two_micro_batches_bit_for_bit(folder):
    log = parallel(folder, 2, "--mpi-log", "collect", "-l", "all.log")
    two, curve = final(folder), rows(folder)
    serial(folder, training__acc_freq=2)
    one = final(folder)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert rows(folder) == curve
    for pattern in (r"world size:           2\n", r"global batch:         4 frames a step \(2 workers\)\n"):
        assert len(re.findall(pattern, log)) == 2, pattern  # the summary of each worker
    times = [re.search(r"DEEPMD rank:(\d)  INFO    batch +\d+ training time", line) for line in log.splitlines()]
    assert sorted(t[1] for t in times if t) == ["0"] * 4 + ["1"] * 4
    assert log.count("trn:") == 5  # rank 0 alone
    lines = (folder / "all.log").read_text().splitlines()
    assert len(lines) == log.count("DEEPMD")
    stamps = [line[: line.index("]")] for line in lines]
    assert stamps == sorted(stamps)


def test_workers_go_back_alike_after_a_loss_that_is_not_finite(folder):
    forces = np.load(folder / "small/set.000/force.npy")
    forces[7] = 1e200
    np.save(folder / "small/set.000/force.npy", forces)
    log = parallel(folder, 2, training__on_nan="rewind", training__numb_steps=40)
    assert 1 <= log.count("Back to model.ckpt-") == log.count("small frame 7"), log
    two, curve = final(folder, 40), rows(folder)
    serial(folder, training__acc_freq=2, training__on_nan="rewind", training__numb_steps=40)
    one = final(folder, 40)
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert rows(folder) == curve


def test_what_is_fitted_after_training_does_not_depend_on_the_workers(folder):
    parallel(folder, 2, training__refit=True)
    two = final(folder)
    serial(folder, training__refit=True, training__acc_freq=2)
    one = final(folder)
    assert all(torch.equal(one[k], two[k]) for k in one)
    parallel(folder, 2, training__refit=True, training__sharding="partition")


MUON = {"optimizer": {"type": "HybridMuon"}, "learning_rate__scale_by_worker": "none"}


def test_an_optimizer_shared_out_is_one_workers_bit_for_bit(folder):
    """Also where another number of workers continues: the checkpoint has the whole state."""
    serial(folder, **MUON, training__acc_freq=2)
    one, curve = final(folder), rows(folder)
    parallel(folder, 2, **MUON, training__zero_stage=1)
    two = final(folder)
    assert any(k.startswith("optimizer/momentum/") for k in one) and one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert rows(folder) == curve
    (folder / "model.ckpt-20.safetensors").unlink()
    serial(folder, "--restart", "model.ckpt-10", **MUON, training__acc_freq=2)
    assert all(torch.equal(one[k], v) for k, v in final(folder).items())
    (folder / "model.ckpt-20.safetensors").unlink()
    parallel(folder, 2, "--restart", "model.ckpt-10", **MUON, training__zero_stage=1)
    assert all(torch.equal(one[k], v) for k, v in final(folder).items())


def test_three_workers_continue_what_one_began(folder):
    loss = {"loss__limit_pref_f": 100}  # constant, because prefactors follow the unscaled rate
    one = {**loss, "learning_rate__decay_rate": 0.9, "learning_rate__start_lr": 0.015, "training__acc_freq": 3}
    serial(folder, **one)
    reference = final(folder)
    serial(folder, **one, training__numb_steps=10)
    three = {**loss, "learning_rate__decay_rate": 0.9, "learning_rate__scale_by_worker": "linear"}
    parallel(folder, 3, "--restart", "model.ckpt", "-m", "workers", "-l", "own.log", **three)
    continued = final(folder)
    assert all(torch.allclose(reference[k], continued[k], rtol=1e-8, atol=1e-10) for k in reference)
    assert [float(row.split()[-1]) for row in rows(folder)][::3] == [0.015, 0.011]  # steps 0 and 15
    text = (folder / "own_2.log").read_text()
    assert re.search(r"my rank: +2\n", text) and "rank:2 " not in text and "trn:" not in text
    assert "trn:" in (folder / "own_0.log").read_text()


def test_partition_with_short_gradients_and_fewer_steps(folder):
    changes = {"sharding": "partition", "gradient_precision": "bfloat16", "scale_steps_by_worker": True}
    log = parallel(folder, 2, **{f"training__{k}": v for k, v in changes.items()})
    assert [int(row.split()[0]) for row in rows(folder)] == [0, 2, 4, 6, 8, 10]
    assert [step for step, _ in checkpoint.numbered(folder / "model.ckpt")] == [5, 10]
    assert json.loads((folder / "out.json").read_text())["training"]["numb_steps"] == 20  # what was asked for
    assert "DEEPMD rank:" not in log and log.count("my rank:              0") == 1  # master


def test_a_mistake_is_told_once_and_ends_all(folder):
    error = parallel(folder, 2, code=2, training__training_data={"systems": ["nowhere"]})
    assert "has ended" not in error  # the others end because they are told to
    assert error.count("'nowhere' does not exist") == 1 and "Traceback" not in error
