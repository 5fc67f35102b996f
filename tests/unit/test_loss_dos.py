"""The loss `dos` against its formula, written out in numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from allforce.losses.dos import DosLoss, DosLossConfig

SIZES = np.array([3.0, 5.0])  # atoms of the two frames
LABELS = {"dos": "dos", "atom_dos": "atomic dos"}  # label -> output


def test_formula_and_figures():
    rng = np.random.default_rng(3)
    shapes = {"dos": (2, 6), "atom_dos": (8, 6)}
    label, found = ({k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(2))
    batch = SimpleNamespace(
        labels={k: torch.from_numpy(v) for k, v in label.items()},
        natoms=torch.from_numpy(SIZES),
        type=torch.zeros(8, dtype=torch.int64),
    )
    start, limit = (
        {"dos": 1.0, "cdf": 2.0, "ados": 3.0, "acdf": 4.0},
        {"dos": 0.5, "cdf": 0.25, "ados": 3.0, "acdf": 0.0},
    )
    given = {f"start_pref_{k}": v for k, v in start.items()} | {f"limit_pref_{k}": v for k, v in limit.items()}
    loss = DosLoss(DosLossConfig.model_validate({"type": "dos", **given}), 1e-3, ("dos", "atomic dos"))
    prediction = {LABELS[k]: torch.from_numpy(v) for k, v in found.items()}
    total, sums = loss(prediction, batch, 2e-4)
    d = {k: found[k] - label[k] for k in shapes}
    square = {
        "dos": d["dos"], "cdf": d["dos"].cumsum(1), "ados": d["atom_dos"], "acdf": d["atom_dos"].cumsum(1)
    }  # fmt: skip
    square = {k: v**2 for k, v in square.items()}
    weight = {k: limit[k] + (start[k] - limit[k]) * 0.2 for k in start}
    assert float(total) == pytest.approx(sum(weight[k] * square[k].mean() for k in start), rel=1e-12)
    figures = loss.metric(sums)
    assert list(figures) == ["rmse", "rmse_dos", "rmse_ados", "rmse_cdf", "rmse_acdf"]
    assert figures["rmse_acdf"] == pytest.approx(np.sqrt(square["acdf"].mean()), rel=1e-12)
    assert figures["rmse_cdf"] == pytest.approx(np.sqrt((square["cdf"] / SIZES[:, None] ** 2).mean()), rel=1e-12)


def test_data_without_a_label_leave_its_terms_out():
    batch = SimpleNamespace(
        labels={"dos": torch.ones(1, 4)}, natoms=torch.tensor([2.0]), type=torch.zeros(2, dtype=torch.int64)
    )
    loss = DosLoss(DosLossConfig.model_validate({"type": "dos", "start_pref_dos": 1.0}), 1e-3, ("dos", "atomic dos"))
    total, sums = loss({"dos": torch.zeros(1, 4), "atomic dos": torch.zeros(2, 4)}, batch, 1e-3)
    assert float(total) == 1.0 and np.isnan(loss.metric(sums)["rmse_ados"])
