"""Checkpoint files: whole or not there, found by file, prefix and folder, the oldest removed."""

import json
import os
from pathlib import Path

import pytest
import torch

from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.checkpoint import Checkpoint


def make(step: int, run: str = "ours") -> Checkpoint:
    flat = torch.arange(6.0, dtype=torch.float64)
    tensors = {"model/a": flat[:2].view(1, 2), "model/b": flat[2:], "optimizer/exp_avg/a": torch.ones(1, 2)}
    return Checkpoint(tensors, {"step": step, "run": run, "model": {"type_map": ["O"]}})


def test_written_and_read_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = checkpoint.save(tmp_path / "model.ckpt", make(7), keep=5)
    back = checkpoint.read(path)
    assert back.step == 7 and back.meta["model"] == {"type_map": ["O"]}
    assert set(back.part("model")) == {"a", "b"}
    assert torch.equal(back.tensors["model/b"], torch.arange(2.0, 6.0, dtype=torch.float64))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_found_by_file_prefix_and_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (5, 10):
        newest = checkpoint.save(tmp_path / "model.ckpt", make(step), keep=5)
    assert (tmp_path / "checkpoint").read_text() == "model.ckpt-10.safetensors"
    for name in (newest, "model.ckpt", "model.ckpt-10", ".", "checkpoint"):
        assert checkpoint.read(checkpoint.find(name)).step == 10
    assert checkpoint.read(checkpoint.find("model.ckpt-5")).step == 5


def test_prefix_without_its_link_is_the_newest_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (9, 10):
        checkpoint.write(tmp_path / f"m-{step}.safetensors", make(step))
    assert checkpoint.find("m").name == "m-10.safetensors"


def test_other_folder_is_named_from_here_and_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path / "deep" / "model.ckpt", make(3), keep=5)
    assert checkpoint.find(".").samefile(checkpoint.find("deep"))


def steps(prefix):
    return [step for step, _ in checkpoint.numbered(prefix)]


def test_oldest_are_removed_and_those_of_other_runs_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 900):
        checkpoint.write(tmp_path / f"m-{step}.safetensors", make(step, "theirs"))
    nameless = make(3)
    del nameless.meta["run"]
    checkpoint.write(tmp_path / "m-3.safetensors", nameless)
    (tmp_path / "m-4.safetensors").write_bytes(b"cut off")
    for step in range(10, 15):
        checkpoint.save(tmp_path / "m", make(step), keep=2)
    assert steps(tmp_path / "m") == [1, 2, 3, 4, 13, 14, 900]


def test_later_steps_of_the_run_are_left_until_it_is_there_again(tmp_path, monkeypatch):
    """A restart from 10 when 20 and 30 had been written."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30, 15):
        checkpoint.save(tmp_path / "m", make(step), keep=3)
    assert steps(tmp_path / "m") == [10, 15, 20, 30]
    checkpoint.save(tmp_path / "m", make(40), keep=3)
    assert steps(tmp_path / "m") == [20, 30, 40]


def test_truncated_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "m-1.safetensors"
    checkpoint.write(path, make(1))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="damaged"):
        checkpoint.read(path)
    for content, what in (
        (
            b"not at all a checkpoint",
            "not a checkpoint or model, but a text that begins with 'not at all a checkpoint'",
        ),
        (b"\x80\x02}q\x00(X\x05\x00\x00\x00modelq", "not a checkpoint or model, but a file of another kind"),
        (b"", "the file is empty"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=what) as refused:
            checkpoint.read(path)
        assert "damaged" not in str(refused.value)
    with pytest.raises(UserError, match="no such checkpoint"):
        checkpoint.find(tmp_path / "nothing")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m-1.safetensors"
    checkpoint.write(path, make(1))

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "serialise", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write(path, make(2))
    assert checkpoint.read(path).step == 1 and os.listdir(tmp_path) == [path.name]


def test_every_flipped_bit_is_noticed(tmp_path):
    """One bit of every byte of the file, header and tensors alike."""
    path = tmp_path / "m-1.safetensors"
    checkpoint.write(path, make(1))
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            checkpoint.read(path)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            checkpoint.read(path)
    path.write_bytes(whole)
    assert checkpoint.read(path).step == 1


def test_files_without_a_checksum_are_read(tmp_path):
    from safetensors.torch import save_file

    old = make(4)
    header = {"allforce": json.dumps({"format": "allforce checkpoint", "version": 1, **old.meta})}
    save_file(old.tensors, tmp_path / "m-4.safetensors", metadata=header)
    assert checkpoint.read(checkpoint.find(tmp_path / "m")).step == 4


@pytest.mark.parametrize("name", [".", "m", "checkpoint"])
def test_the_newest_intact_one_is_found_and_said(tmp_path, monkeypatch, caplog, name):
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path / "m", make(step), keep=9)
        os.utime(f"m-{step}.safetensors", (step, step))
    Path("m-30.safetensors").write_bytes(Path("m-30.safetensors").read_bytes()[:-1])
    Path("m-40.safetensors").unlink()  # link and `checkpoint` lead nowhere
    with caplog.at_level("WARNING", "deepmd"):
        assert checkpoint.read(checkpoint.find(name)).step == 20
    assert "m-40.safetensors does not exist" in caplog.text and "m-30.safetensors is damaged" in caplog.text
    assert "m-20.safetensors is taken instead" in caplog.text
    with pytest.raises(UserError, match="damaged.*The newest intact one is m-20"):
        checkpoint.read("m-30.safetensors")


def test_the_pointed_one_is_the_newest_not_the_highest_number(tmp_path, monkeypatch):
    """A restart from 10 has reached 15; 20 is of the time before."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 15):
        checkpoint.save(tmp_path / "m", make(step), keep=9)
    assert {checkpoint.find(name).name for name in (".", "m")} == {"m-15.safetensors"}


def test_half_written_files_are_swept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".m-3.safetensors.123.tmp", ".m.safetensors.9.tmp", ".checkpoint.77.tmp", "m-3.safetensors", "tmp"):
        Path(name).touch()
    checkpoint.sweep(tmp_path / "m")
    assert sorted(os.listdir()) == ["m-3.safetensors", "tmp"]


def test_what_another_run_is_writing_is_not_swept(tmp_path, monkeypatch):
    """Two runs in one working folder, each with a save_dir of its own."""
    monkeypatch.chdir(tmp_path)
    for name in (".checkpoint.77.tmp", ".checkpoint.78.tmp"):
        Path(name).touch()
    os.utime(".checkpoint.78.tmp", (0, 0))
    checkpoint.sweep(tmp_path / "mine/m")
    assert os.listdir() == [".checkpoint.77.tmp"]
