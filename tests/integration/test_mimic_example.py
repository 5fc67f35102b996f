"""The MiMiC example: its files hold the frames of the water example, and `dp train` and `dp test` take them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny import ROOT, dp

from allforce.config.load import load_input
from allforce.data.discover import below, open_systems

EXAMPLE, WATER = ROOT / "examples/mimic", ROOT / "examples/water/data"


def test_files_hold_the_frames_of_water():
    data = load_input(EXAMPLE / "input.json").training
    assert data.validation_data is not None
    systems = open_systems(below(EXAMPLE, data.training_data.systems), ["O", "H"])
    systems += open_systems(below(EXAMPLE, data.validation_data.systems), ["O", "H"])
    assert [s.nframes for s in systems] == [24, 24, 12]
    for system, source in zip(systems, ("train/280K", "train/400K", "valid/300K"), strict=True):
        arrays = {key: np.load(WATER / source / f"set.000/{key}.npy") for key in ("coord", "box", "energy", "force")}
        types = np.loadtxt(WATER / source / "type.raw", dtype=int)
        for k in (0, system.nframes - 1):
            frame = system.frame(k)
            assert (frame.type == types).all() and frame.cell is not None
            np.testing.assert_allclose(frame.coord.ravel(), arrays["coord"][k + 1], atol=2e-6)  # float32 of 10 Å
            np.testing.assert_allclose(frame.cell.ravel(), arrays["box"][k + 1], atol=2e-6)
            np.testing.assert_allclose(frame.labels["energy"], arrays["energy"][k + 1], atol=2e-9)  # 1e-10 Hartree
            np.testing.assert_allclose(frame.labels["force"].ravel(), arrays["force"][k + 1], atol=1e-6)


@pytest.mark.parametrize("options", [[], ["--workers", "2"]])
def test_train_and_test(tmp_path, options):
    for path in EXAMPLE.glob("[rw]*.[mte]*"):
        shutil.copy(path, tmp_path)
    config = json.loads((EXAMPLE / "input.json").read_text())
    config["model"]["descriptor"] |= {"neuron": [4, 8], "axis_neuron": 2}
    config["model"]["fitting_net"]["neuron"] = [8]
    config["training"] |= {"numb_steps": 4, "disp_freq": 2, "save_freq": 4}
    (tmp_path / "input.json").write_text(json.dumps(config))
    result = dp(tmp_path, "train", *options, "input.json")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "lcurve.out").read_text().count("\n") == 5  # two of a title, steps 0, 2, 4
    tested = dp(tmp_path, "test", "-m", "model.ckpt", "--valid-data", "input.json", "-n", "3")
    assert tested.returncode == 0 and "Force  RMSE" in tested.stdout + tested.stderr, tested.stderr


def test_damaged_trajectory_is_one_paragraph(tmp_path):
    for path in EXAMPLE.glob("[rwi]*.[mtej]*"):
        shutil.copy(path, tmp_path)
    whole = (tmp_path / "run2.trr").read_bytes()
    Path(tmp_path / "run2.trr").write_bytes(whole[:-7])
    result = dp(tmp_path, "train", "input.json")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"run2.trr: frame 24, at byte {len(whole) // 25 * 24}" in result.stderr
