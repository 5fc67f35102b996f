"""Evaluation on several cores: parts of a batch and batches side by side give what one thread gives."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from allforce.data.batch import Frame
from allforce.data.loader import collate
from allforce.errors import UserError
from allforce.infer import threads
from allforce.infer.predict import DeepPot

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from make import small_model  # noqa: E402

WANTED = ("energy", "forces", "virial", "atomic energy", "atomic virial")
MODELS = {
    "se_e2_a": ({"type_one_side": False}, {}),
    "with parameters": ({}, {"numb_fparam": 1, "numb_aparam": 2}),
    "attention": ({"type": "se_atten", "attn_layer": 1}, {}),
    "three bodies": ({"type": "se_e3"}, {}),
}


@pytest.fixture
def cores():
    """Three threads, one edge is enough for a part."""
    before, edges = torch.get_num_threads(), threads.EDGES
    torch.set_num_threads(3)
    threads.EDGES = 1
    yield
    threads.EDGES = edges
    torch.set_num_threads(before)


def frames(model: DeepPot, count: int, seed: int = 0) -> list[Frame]:
    """Of 5 … atoms on a lattice, shaken; every other one is not periodic."""
    rng, out = np.random.default_rng(seed), []
    for k in range(count):
        grid = np.array(list(np.ndindex(3, 2, 2)))[: 5 + k % 7] * 2.0
        out.append(
            Frame(
                grid + rng.uniform(-0.4, 0.4, grid.shape),
                rng.integers(0, 2, len(grid)),
                np.diag([6.0, 5.0, 5.0]) if k % 2 else None,
                fparam=rng.normal(size=model.get_dim_fparam()),
                aparam=rng.normal(size=(len(grid), model.get_dim_aparam())),
            )
        )
    return out


@pytest.mark.parametrize("name", MODELS)
def test_parts_are_the_whole(name, cores):
    dp = DeepPot(small_model(*MODELS[name]))
    prepared = [dp.preparation(f, "") for f in frames(dp, 4)]
    batch = collate([f for f, _ in prepared], [p for _, p in prepared], 2)
    assert threads.parts_of(dp.model, batch, WANTED) == 3
    with torch.no_grad():
        whole = dp.model(batch, WANTED)
    parts = threads.predict(dp.model, batch, WANTED)
    assert set(parts) == set(WANTED)
    for key, value in parts.items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-11)
    assert torch.get_num_threads() == 3


def test_many_frames(cores):
    """More frames than fit at once, in their order; torch's threads are as before."""
    dp = DeepPot(small_model())
    dp.max_atoms = 12
    given = frames(dp, 17)
    results = list(dp.evaluate(given, WANTED))
    for frame, result in zip(given, results, strict=True):
        (one,) = DeepPot.evaluate(dp, [frame], WANTED)
        for key in WANTED:
            np.testing.assert_allclose(result[key], one[key], rtol=0, atol=1e-11)
    assert torch.get_num_threads() == 3


def test_an_error_in_one_thread_is_told(cores):
    dp = DeepPot(small_model())
    given = frames(dp, 6)
    given[4].coord[1] = given[4].coord[0]
    with pytest.raises(UserError, match="on one place"):
        list(dp.evaluate(given, WANTED))
    assert torch.get_num_threads() == 3


def test_dividing():
    assert threads.divided("abcd", [1, 1, 1, 1], 2) == [["a", "b"], ["c", "d"]]
    assert threads.divided("abc", [1, 1, 10], 2) == [["a", "b"], ["c"]]
    assert threads.divided("a", [5], 4) == [["a"]]
    assert threads.divided("ab", [0, 0], 4) == [["a", "b"]]
