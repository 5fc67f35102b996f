"""dp init and the recipe, from data to a training."""

import json

import numpy as np
import pytest
from tiny import dp, rows, write_input, write_system

from allforce.cli import main
from allforce.config.load import load_input
from allforce.errors import UserError
from allforce.train import fill, init, recipe

pytest_plugins = ["folder_fixture"]


def runs(folder, count, types=(0, 1)):
    return [init.Run(str(write_system(folder / f"run{k:02d}", list(types), 4, k)), []) for k in range(count)]


def opened(found):
    for run in found:
        run.systems = init.open_location(run.location)
        for system in run.systems:
            system.use_type_map(["A", "B"])
    return found


def test_from_data_to_a_model(folder):
    result = dp(folder, "init", "small", "large", "--time", "0.1s")
    assert result.returncode == 0, result.stderr
    assert "0.1s is short: 100 steps" in result.stderr and "next: dp train input.json" in result.stderr
    config = load_input("input.json")
    assert config.training.training_data.systems == ["small@:-4", "large@:-3"]
    assert config.training.validation_data.systems == ["small@-4:", "large@-3:"]
    assert config.model.type_map == ["A", "B"] and config.model.descriptor.sel == [8, 4]
    assert str(config.training.training_data.batch_size).startswith("mixed:")  # two compositions
    assert (config.optimizer.type, config.learning_rate.type, config.loss.schedule) == ("HybridMuon", "wsd", "step")
    data = json.loads((folder / "input.json").read_text())
    data["training"] |= {"numb_steps": 30, "disp_freq": 30}
    (folder / "short.json").write_text(json.dumps(data))
    assert main(["train", "short.json"]) == 0
    first, last = ([float(x) for x in row.split()] for row in (rows(folder)[0], rows(folder)[-1]))
    assert last[6] < 0.5 * first[6]  # rmse_f of frames that were held back
    assert dp(folder, "init", "small").returncode == 2  # input.json is there


@pytest.mark.parametrize(
    "seconds, atoms", [([1.0, 1.1, 1.3, 1.9], 128), ([1.0, 2.0], 32), ([1.2, 1.0, 1.5], 64), ([1.0], 32)]
)
def test_a_batch_is_full_where_the_step_begins_to_grow(seconds, atoms):
    rows = [{"batch": b, "seconds": s} for b, s in zip(fill.SIZES, seconds, strict=False)]
    assert fill.full(rows)["batch"] == f"auto:{atoms}"


def test_several_compositions_are_mixed(folder):
    systems = [s for run in opened(runs(folder, 2, types=(0, 1, 1))) for s in run.systems]
    assert recipe.mixed_batch(systems) is None
    systems += [s for run in opened(runs(folder / "b", 1, types=(1, 0, 0))) for s in run.systems]
    assert recipe.mixed_batch(systems) == "mixed:86"  # 256 atoms of 3 in a frame


def test_batches_of_several_sizes_are_timed(folder, capsys):
    write_input(folder)
    fill.measure("input.json", ["auto:4", "mixed:3"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch"] for row in rows] == ["auto:4", "mixed:3"] and all(row["seconds"] > 0 for row in rows)


def test_data_that_cannot_be_trained_with_are_told(folder):
    (folder / "small" / "set.000" / "force.npy").write_bytes(b"no numbers")
    result = dp(folder, "init", "small")
    assert result.returncode == 2 and "cannot be read as a .npy file" in result.stderr
    assert "Traceback" not in result.stderr


def test_whole_runs_are_held_back_where_there_are_many(folder):
    found = opened(runs(folder, 20))
    training, validation = init.split(found)
    assert validation == [found[9].location, found[19].location] and len(training) == 18
    alone = opened([init.Run(str(write_system(folder / "only", [1, 1], 4, 99)), [])])
    others = opened(runs(folder / "a", 19, types=(0, 0)))
    assert init.held_back([*others[:9], *alone, *others[9:]]) == [others[18]]


def test_runs_that_are_too_short_stay_whole(folder):
    few = opened([init.Run(str(write_system(folder / "few", [0, 1], 5, 7)), [])])
    assert init.split(few) == ([few[0].location], [])


@pytest.mark.parametrize("time, seconds", [("10m", 600), ("1.5h", 5400), ("1d", 86400), ("90s", 90)])
def test_times(time, seconds):
    assert init.in_seconds(time) == seconds


@pytest.mark.parametrize("time", ["10", "m", "0h", "-1h", "1w"])
def test_times_that_are_none(time):
    with pytest.raises(UserError, match="such as 10m"):
        init.in_seconds(time)


def test_recipe_keeps_data_and_model(folder, capsys):
    write_input(folder, training__numb_steps=50, training__disp_freq=150)
    assert main(["train", "input.json", "--recipe"]) == 0
    log = capsys.readouterr().err
    for line in (
        "model/fitting_net/input_scale: - → 0.1",
        "optimizer/type: Adam → HybridMuon",
        "training/numb_steps: 50 → 100",
        "training/training_data/batch_size: 2 → mixed:",
        "loss/schedule: - → step",
    ):
        assert line in log
    before, after = (json.loads((folder / name).read_text()) for name in ("input.json", "out.json"))
    assert after["model"]["descriptor"]["sel"] == before["model"]["descriptor"]["sel"]
    assert after["training"]["training_data"]["systems"] == before["training"]["training_data"]["systems"]
    assert after["training"]["numb_steps"] == 100 and after["training"]["disp_freq"] == 5
    assert np.isfinite([float(x) for x in rows(folder)[-1].split()]).all()


def test_recipe_for_data_without_energies_keeps_what_was_trained(folder, capsys):
    for energy in folder.rglob("energy.npy"):
        energy.unlink()
    write_input(folder, training__numb_steps=50, training__disp_freq=150)
    assert main(["train", "input.json", "--recipe"]) == 0
    assert "last layer fitted to 0 energies and " in capsys.readouterr().err
    assert (folder / "model.ckpt-100.safetensors").exists()
