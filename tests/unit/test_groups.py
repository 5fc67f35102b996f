"""spatial_workers: auto, by its rule: as few blocks as memory and the number of micro-batches allow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from allforce.data.dataset import DataSet
from allforce.data.discover import open_systems
from allforce.distributed.comm import SerialComm
from allforce.neighbors import neighbor_list
from allforce.train import groups
from allforce.train.groups import PAIR, choose_groups, largest_batch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "models"), str(TESTS / "parallel")]
from make import small_model  # noqa: E402
from test_spatial import write_data  # noqa: E402


class Alike(SerialComm):
    """Workers of one machine who all say the same."""

    def __init__(self, size: int):
        self.size = size  # type: ignore[misc]

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


@pytest.fixture
def training(tmp_path):
    """Six frames each of four systems, two in a micro-batch: twelve micro-batches."""
    write_data(tmp_path)
    return DataSet(open_systems(str(tmp_path), ["A", "B"]), 2)


def test_counts_the_pairs_of_the_largest_batch(training, monkeypatch):
    monkeypatch.setattr(groups, "BLOCK", 4)  # a part of the frame stands for all of it
    atoms, pairs = largest_batch(training, 4.0)
    frame = next(s for s in training.systems if s.name.endswith("triclinic")).frame(0)
    assert atoms == 22
    assert pairs == pytest.approx(2 * len(neighbor_list(frame.coord, frame.cell, 4.0)[0]), rel=0.15)


@pytest.mark.parametrize(
    "workers, share, size",
    [
        (1, 99, 1),
        (4, 99, 1),
        (12, 99, 1),
        (24, 99, 2),
        (36, 99, 3),
        (8, 1.0, 1),
        (8, 0.9, 2),
        (6, 0.4, 3),
        (4, 0.01, 4),
    ],
)
def test_rule(training, monkeypatch, workers, share, size):
    """share: half of a worker's memory, relative to what the largest micro-batch needs."""
    model = small_model()
    need = largest_batch(training, model.needs.limit.rcut)[1] * PAIR
    monkeypatch.setattr(groups, "memory_of_host", lambda: 2 * share * need * workers)
    found, why = choose_groups(training, model, Alike(workers), torch.device("cpu"))
    assert found == size and f"auto is {size}." in why
    assert ("may not fit" in why) == (share == 0.01)
