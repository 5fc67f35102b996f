"""se_e3: the common suite, and a dense pair-by-pair reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from make import small_model
from suite import ModelSuite, batch_of, evaluate, results_on_threads, structure

from allforce.data.batch import Frame
from allforce.models import kernels
from allforce.models.se_e3 import pairs_of_edges

ANGLES = {"type": "se_e3"}


class TestTable(ModelSuite):
    make = staticmethod(lambda: small_model(ANGLES))


class TestExact(ModelSuite):
    make = staticmethod(lambda: small_model(ANGLES | {"resnet_dt": True}, mode="exact"))


class TestThreeTypes(ModelSuite):
    make = staticmethod(lambda: small_model(ANGLES | {"exclude_types": [[0, 1]], "env_protection": 0.01}, ntypes=3))


def dense(model, frame: Frame) -> np.ndarray:
    """D by the formula: Σ_{a ≤ b} 1/(sel_a sel_b) Σ_jk g net(g), g = v_j·v_k."""
    d, c, nt = model.descriptor, model.config.descriptor, len(model.type_map)
    images = [np.array(k) @ frame.cell - frame.cell.sum(0) for k in np.ndindex(3, 3, 3)]
    out = []
    for i, tau in enumerate(frame.type):
        v: list[list[np.ndarray]] = [[] for _ in range(nt)]
        for j, t in enumerate(frame.type):
            for image in images:
                x = frame.coord[j] - frame.coord[i] + image
                r = np.linalg.norm(x)
                if 1e-9 < r <= c.rcut and [tau, t] not in c.exclude_types and [t, tau] not in c.exclude_types:
                    u = np.clip((r - c.rcut_smth) / (c.rcut - c.rcut_smth), 0, 1)
                    w = 1 + u**3 * (-6 * u**2 + 15 * u - 10)
                    v[t].append(w * x / r**2 / float(d.dstd[tau, 1]))
        total = np.zeros(c.neuron[-1])
        for n, (a, b) in enumerate(d.pairs):
            g = np.array([x @ y for x in v[a] for y in v[b]]).reshape(-1, 1)
            with torch.no_grad():
                total += (g * d.nets[n](torch.from_numpy(g)).numpy()).sum(0) / (c.sel[a] * c.sel[b])
        out.append(total)
    return np.array(out)


@pytest.mark.parametrize("mode", ["table", "exact"])
@pytest.mark.parametrize("exclude", [[], [[0, 1]]])
def test_dense_reference(exclude, mode):
    model, frame = small_model(ANGLES | {"exclude_types": exclude}, mode=mode, nodes=512), structure(3, 8, 2)
    found = evaluate(model, frame, wanted=("descriptor",)).descriptor
    expected = dense(model, frame)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


def test_compiled_and_by_autograd_agree(monkeypatch):
    model = small_model(ANGLES, ntypes=3, nodes=64)
    batch = batch_of(model, structure(0, 9, 3), structure(1, 5, 3))

    def run() -> list[torch.Tensor]:
        p = model(batch, ("energy", "forces"))
        loss = (p["energy"] ** 2).mean() + (p["forces"] ** 2).mean()
        return [p["energy"], p["forces"], *torch.autograd.grad(loss, list(model.parameters()))]

    compiled = run()
    monkeypatch.setenv(kernels.SWITCH, "torch")
    for a, b in zip(compiled, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.detach().abs().max()))


def test_the_number_of_threads_changes_no_bit(monkeypatch):
    one, two = (results_on_threads(small_model(ANGLES), n, monkeypatch) for n in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_neighbours_nearer_than_the_table_are_exact():
    model, exact = small_model(ANGLES), small_model(ANGLES, mode="exact")
    frame = structure(6)
    frame.coord[1] = frame.coord[0] + [0.31, 0.1, 0.05]
    a, b = evaluate(model, frame), evaluate(exact, frame)
    torch.testing.assert_close(a.energy, b.energy, rtol=1e-12, atol=0)
    torch.testing.assert_close(a.forces, b.forces, rtol=1e-10, atol=1e-10)


def test_pairs_of_edges():
    model = small_model(ANGLES)
    edges = batch_of(model, structure(0, 4), structure(1, 3)).edges
    j, k = (x.tolist() for x in pairs_of_edges(edges))
    i = edges.i.tolist()
    assert list(zip(j, k, strict=True)) == [(a, b) for a in range(len(i)) for b in range(len(i)) if i[a] == i[b]]
