"""W workers are one worker that accumulates W micro-batches, under every launcher and engine.

Systems of 5 and 8 atoms, so that the micro-batches of a step differ in size. The first moment of Adam after the first
step is the gradient times a constant: it agrees to 1e-13 of its norm, the parameters after 100 steps to 1e-8;
with two workers everything agrees bit for bit, because a sum of two has one order.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
from tiny import dp, write_data, write_input  # noqa: E402

from allforce.files import checkpoint  # noqa: E402

TRAINING = {"numb_steps": 100, "disp_freq": 50, "save_freq": 1, "max_ckpt_keep": 100}
STEPS = {f"training__{key}": value for key, value in TRAINING.items()}

# launcher, workers, engine, and whether the gradients of one host may be added up in shared memory past the engine
CASES = [
    ("torchrun", 4, "torch", False),
    ("torchrun", 3, "torch", True),
    ("hydra", 2, "mpi", True),
    ("hydra", 3, "mpi", False),
    ("openmpi", 4, "mpi", False),
    ("horovodrun", 2, "horovod", False),
    ("horovodrun", 3, "horovod", False),
    ("slurm", 2, "torch", False),
]


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.read(folder / f"model.ckpt-{step}.safetensors").tensors


def gradient(folder: Path) -> torch.Tensor:
    """(1 - beta1) times the gradient of step 0, all parameters in a row."""
    saved = tensors(folder, 1)
    return torch.cat([saved[name].flatten() for name in sorted(saved) if "/exp_avg/" in name])


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """One worker with acc_freq W, trained when first asked for."""
    done: dict[int, Path] = {}

    def reference(workers: int) -> Path:
        if workers not in done:
            folder = done[workers] = tmp_path_factory.mktemp(f"serial{workers}")
            write_data(folder)
            write_input(folder, **STEPS, training__acc_freq=workers)
            result = dp(folder, "train", "input.json")
            assert result.returncode == 0, result.stderr
        return done[workers]

    return reference


@pytest.mark.parametrize("launcher, workers, engine, shared", CASES)
def test_workers_are_micro_batches(launch, references, tmp_path, monkeypatch, launcher, workers, engine, shared):
    write_data(tmp_path)
    write_input(tmp_path, **STEPS)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "allforce", "train", "input.json"]
    result = launch(launcher, workers, *command, ALLFORCE_SHARED_MEMORY=str(int(shared)))
    assert result.returncode == 0, result.stdout
    assert re.search(rf"engine: +{engine}", result.stdout) and re.search(rf"world size: +{workers}\b", result.stdout)
    folder = references(workers)
    one, many = (gradient(place) for place in (folder, tmp_path))
    assert (one - many).norm() <= 1e-13 * one.norm() and one.norm() > 0
    before, after = tensors(folder, 100), tensors(tmp_path, 100)
    assert before.keys() == after.keys()
    for name in before:
        if workers == 2:
            assert torch.equal(before[name], after[name]), name
        elif name.startswith("model/"):
            torch.testing.assert_close(after[name], before[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("launcher, engine, shared", [("torchrun", "torch", False), ("hydra", "mpi", True)])
def test_one_all_reduce_a_step(launch, tmp_path, monkeypatch, launcher, engine, shared):
    """30 more steps are 30 more all-reduces, each of the whole gradient, and nothing else."""
    found = []
    for steps in (10, 40):
        folder = tmp_path / str(steps)
        folder.mkdir()
        write_data(folder)
        write_input(folder, training__numb_steps=steps, training__disp_freq=1000, training__save_freq=1000)
        monkeypatch.chdir(folder)
        command = [sys.executable, "-m", "allforce", "train", "input.json", "--comm-profile"]
        result = launch(launcher, 2, *command, ALLFORCE_SHARED_MEMORY=str(int(shared)))
        assert result.returncode == 0, result.stdout
        files = sorted(folder.glob("mpi_profile.*"))
        assert [path.name.split(".")[-1] for path in files] == ["0", "1"]
        assert f"engine = {engine}." in files[1].read_text() and "summary for all tasks" in files[0].read_text()
        rows = re.findall(r"^(MPI_\w+) +(\d+) +[\d.]+ +[\d.]+$", files[1].read_text(), re.M)
        found.append({name: int(calls) for name, calls in rows})
    assert found[1].pop("MPI_Allreduce") - found[0].pop("MPI_Allreduce") == 30
    assert found[0] == found[1] and "MPI_Bcast" in found[0]
