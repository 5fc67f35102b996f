"""The loss `property` against its formulas, written out in numpy."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from allforce.errors import UserError
from allforce.losses.property import PropertyLoss, PropertyLossConfig

OUTPUTS = ("property", "property atoms", "property deviation")
ATOMS = np.array([[3.0], [5.0]])  # of the two frames
SIGMA = np.array([0.5, 2.0])
FIGURES = {
    "smooth_mae": lambda d, y: np.where(abs(d) < 0.4, d**2 / 0.8, abs(d) - 0.2),
    "mae": lambda d, y: abs(d),
    "mse": lambda d, y: d**2,
    "rmse": lambda d, y: d**2,
    "mape": lambda d, y: abs(d / (y + 1e-3)),
}


def loss_of(**keys):
    return PropertyLoss(PropertyLossConfig.model_validate({"type": "property", **keys}), 1e-3, OUTPUTS)


def case(atoms):
    """A batch, predictions, and the errors d and labels per atom."""
    rng = np.random.default_rng(4)
    label, found = rng.normal(size=(2, 2)) * 3, rng.normal(size=(2, 2)) * 3
    tensors = (torch.from_numpy(np.broadcast_to(x, s).copy()) for x, s in ((atoms, (2, 1)), (SIGMA, (2, 2))))
    batch = SimpleNamespace(labels={"property": torch.from_numpy(label)}, type=torch.zeros(8, dtype=torch.int64))
    prediction = dict(zip(OUTPUTS, (torch.from_numpy(found).requires_grad_(), *tensors), strict=True))
    return batch, prediction, (found - label) / atoms, label / atoms


@pytest.mark.parametrize("atoms", [ATOMS, np.ones((2, 1))], ids=["extensive", "intensive"])
@pytest.mark.parametrize("function", FIGURES)
def test_formula_and_figures(function, atoms):
    batch, prediction, d, label = case(atoms)
    loss = loss_of(loss_func=function, metric=list(FIGURES), beta=0.4)
    total, sums = loss(prediction, batch, 1e-4)
    scaled = FIGURES[function](d if function == "mape" else d / SIGMA, label)
    expected = {"rmse": np.sqrt(scaled.mean()), "mape": scaled.mean()}.get(function, scaled.sum())
    assert float(total.detach()) == pytest.approx(expected, rel=1e-12)
    figures = loss.metric(sums)
    assert list(figures) == ["rmse", *(f"{name}_property" for name in FIGURES)]
    assert figures["rmse"] == pytest.approx(np.sqrt(expected), rel=1e-12)
    for name, formula in FIGURES.items():
        value = formula(d, label).mean()
        assert figures[f"{name}_property"] == pytest.approx(np.sqrt(value) if name == "rmse" else value, rel=1e-12)
    (gradient,) = torch.autograd.grad(total, prediction["property"])
    assert gradient.isfinite().all() and gradient.abs().min() > 0


@pytest.mark.parametrize("function", FIGURES)
def test_no_error_has_a_gradient_of_zero(function):
    batch, prediction, _, _ = case(ATOMS)
    batch.labels["property"] = prediction["property"].detach().clone()
    total, _ = loss_of(loss_func=function)(prediction, batch, 1e-4)
    (gradient,) = torch.autograd.grad(total, prediction["property"])
    assert float(total.detach()) == 0.0 and (gradient == 0.0).all()


def test_data_without_the_label_teach_nothing():
    batch, prediction, _, _ = case(ATOMS)
    batch.labels = {"energy": torch.zeros(2)}
    loss = loss_of()
    assert not loss.learns_from(batch.labels) and loss.learns_from({"property"})
    total, sums = loss(prediction, batch, 1e-4)
    assert float(total.detach()) == 0.0 and np.isnan(loss.metric(sums)["mae_property"])


def test_another_model_is_refused():
    config = PropertyLossConfig.model_validate({"type": "property"})
    with pytest.raises(UserError, match="needs a model that predicts one; model/fitting_net gives energy, forces"):
        PropertyLoss(config, 1e-3, ("energy", "forces"))
