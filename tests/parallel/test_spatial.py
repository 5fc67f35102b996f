"""Frames split over workers give what one worker gives: gradient to 1e-12, parameters after 50 steps to 1e-8.

Cells thinner than the cutoff, triclinic and none; frames with fewer atoms than there are workers, so that blocks are
empty; groups of workers beside each other, and several micro-batches a step.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from test_parallel_training import gradient, tensors  # noqa: E402
from tiny import dp, rows, write_input  # noqa: E402

CELLS = {
    "triclinic": np.array([[7.0, 0.0, 0.0], [2.1, 6.5, 0.0], [-1.3, 1.7, 6.1]]),
    "thin": np.array([[3.1, 0.0, 0.0], [0.0, 14.0, 0.0], [0.4, 0.0, 5.0]]),
    "cluster": None,
    "pair": np.eye(3) * 9.0,
}
ATOMS = {"triclinic": 11, "thin": 7, "cluster": 9, "pair": 2}
TRAINING = {"numb_steps": 50, "disp_freq": 25, "save_freq": 1, "max_ckpt_keep": 100}
CHANGES = {
    **{f"training__{key}": value for key, value in TRAINING.items()},
    "training__training_data": {"systems": list(CELLS), "batch_size": 2},
    "training__validation_data": {"systems": ["thin"], "batch_size": 1, "numb_btch": 3},
    "loss__start_pref_v": 1.0,
    "loss__limit_pref_v": 1.0,
    "loss__start_pref_ae": 1.0,
    "loss__limit_pref_ae": 1.0,
}


def write_data(root: Path) -> None:
    """Atoms on a grid with noise, labels out of the air: the numbers are what counts here."""
    rng = np.random.default_rng(5)
    for name, cell in CELLS.items():
        n, frames = ATOMS[name], 6
        box = np.eye(3) * 6.0 if cell is None else cell
        steps = np.maximum(np.round(np.linalg.norm(box, axis=1) / 1.7), 1).astype(int)
        grid = np.stack(np.meshgrid(*(np.arange(k) / k for k in steps), indexing="ij"), -1).reshape(-1, 3)
        x = (grid[rng.permutation(len(grid))[:n]] + rng.normal(scale=0.02, size=(frames, n, 3))) @ box
        folder = root / name / "set.000"
        folder.mkdir(parents=True)
        (root / name / "type.raw").write_text(" ".join(str(k % 2) for k in range(n)))
        (root / name / "type_map.raw").write_text("A\nB\n")
        labels = {"coord": x, "energy": rng.normal(size=frames), "force": rng.normal(size=(frames, n, 3))}
        labels["atom_ener"] = rng.normal(size=(frames, n))
        if cell is None:
            (root / name / "nopbc").touch()
        else:
            labels["box"], labels["virial"] = np.tile(cell.ravel(), (frames, 1)), rng.normal(size=(frames, 9))
        for key, value in labels.items():
            np.save(folder / f"{key}.npy", value.reshape(frames, -1) if key != "energy" else value)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One worker that takes so many micro-batches a step, trained when first asked for."""
    done: dict[int, Path] = {}

    def folder(acc_freq: int) -> Path:
        if acc_freq not in done:
            here = done[acc_freq] = tmp_path_factory.mktemp(f"serial{acc_freq}")
            write_data(here)
            write_input(here, **CHANGES, training__acc_freq=acc_freq)
            result = dp(here, "train", "input.json")
            assert result.returncode == 0, result.stderr
        return done[acc_freq]

    return folder


def compare(one: Path, many: Path) -> None:
    a, b = gradient(one), gradient(many)
    assert (a - b).norm() <= 1e-12 * a.norm() and a.norm() > 0
    before, after = tensors(one, 50), tensors(many, 50)
    assert before.keys() == after.keys()
    for name in before:
        if name.startswith("model/"):
            torch.testing.assert_close(after[name], before[name], rtol=1e-8, atol=1e-8)
    assert len(rows(one)) == 3
    for line, other in zip(rows(one), rows(many), strict=True):
        np.testing.assert_allclose([float(x) for x in other.split()], [float(x) for x in line.split()], rtol=1e-2)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_one_frame_over_all_workers(reference, tmp_path, workers):
    """With rates scaled by the workers: a group counts as one of them."""
    write_data(tmp_path)
    write_input(tmp_path, **CHANGES, training__spatial_workers=workers, learning_rate__scale_by_worker="linear")
    result = dp(tmp_path, "train", "--workers", str(workers), "input.json")
    assert result.returncode == 0, result.stderr
    assert f"2 frames a step (1 groups of {workers} workers)" in result.stdout + result.stderr
    compare(reference(1), tmp_path)


@pytest.mark.parametrize(
    "launcher, workers, engine, shared, size, acc_freq",
    [
        ("hydra", 2, "mpi", True, 2, 1),
        ("hydra", 4, "mpi", False, 2, 2),
        ("torchrun", 4, "torch", True, 2, 2),
        ("openmpi", 3, "mpi", False, 3, 1),
        ("horovodrun", 2, "horovod", False, 2, 1),
    ],
)
def test_launchers_and_groups(
    launch, reference, tmp_path, monkeypatch, launcher, workers, engine, shared, size, acc_freq
):
    write_data(tmp_path)
    write_input(tmp_path, **CHANGES, training__spatial_workers=size, training__acc_freq=acc_freq)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "allforce", "train", "input.json"]
    result = launch(launcher, workers, *command, ALLFORCE_SHARED_MEMORY=str(int(shared)))
    assert result.returncode == 0, result.stdout
    assert re.search(rf"engine: +{engine}", result.stdout)
    compare(reference(workers // size * acc_freq), tmp_path)


def test_auto(tmp_path):
    """One micro-batch in all the data: both workers are needed for it."""
    write_data(tmp_path)
    one = {"systems": ["triclinic"], "batch_size": 6}
    write_input(
        tmp_path,
        **CHANGES | {"training__training_data": one, "training__numb_steps": 2},
        training__spatial_workers="auto",
    )
    result = dp(tmp_path, "train", "--workers", "2", "input.json")
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert (
        "spatial_workers: auto is 2. The largest micro-batch has 66 atoms" in text and "1 groups of 2 workers" in text
    )


def test_workers_that_make_no_groups(tmp_path):
    write_data(tmp_path)
    write_input(tmp_path, **CHANGES, training__spatial_workers=3)
    result = dp(tmp_path, "train", "--workers", "2", "input.json")
    assert result.returncode == 2
    assert "training/spatial_workers is 3, but 2 workers cannot be grouped by 3" in result.stderr
    assert "Traceback" not in result.stderr
