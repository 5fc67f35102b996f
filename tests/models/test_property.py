"""The fitting `property`: its equation, its constants from data on any number of workers, its files."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from make import small_model
from suite import batch_of, structure

from allforce.data.batch import Frame
from allforce.errors import UserError
from allforce.files.model_file import load_model, save_model
from allforce.losses.property import PropertyLoss, PropertyLossConfig
from allforce.models.property import PropertyConfig

GAP = {"type": "property", "property_name": "gap", "task_dim": 2}
BIAS = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
STD = torch.tensor([[0.3, 2.0], [0.7, 1.1]], dtype=torch.float64)


def model(**changes):
    section = changes.pop("model", None)
    made = small_model({}, GAP | changes, section)
    made.fitting.bias.copy_(BIAS)
    made.fitting.std.copy_(STD)
    return made


def predicted(made, *frames):
    batch = batch_of(made, *frames)
    with torch.no_grad():
        return batch, made(batch, made.fitting.outputs)


@pytest.mark.parametrize("intensive", [False, True])
def test_by_its_formula(intensive):
    """y_i = σ net + bias; the frame has their sum or mean; frames side by side are frames one by one."""
    made, frames = model(intensive=intensive), [structure(4, 6), structure(5, 9)]
    batch, p = predicted(made, *frames)
    with torch.no_grad():
        D = made.descriptor.alone(batch)
        for i, t in enumerate(batch.type.tolist()):
            y = made.fitting.nets[t](D[i : i + 1])[0] * STD[t] + BIAS[t]
            torch.testing.assert_close(p["atomic property"][i], y, rtol=1e-12, atol=1e-12)
    for k, (frame, n) in enumerate(zip(frames, (6, 9), strict=True)):
        total = p["atomic property"][batch.frame == k].sum(0)
        torch.testing.assert_close(p["property"][k], total / n if intensive else total, rtol=1e-12, atol=1e-12)
        assert float(p["property atoms"][k]) == (1 if intensive else n)
        torch.testing.assert_close(p["property"][k], predicted(made, frame)[1]["property"][0], rtol=0, atol=1e-11)
    assert torch.equal(p["property deviation"], STD[:1].expand(2, 2))


@pytest.mark.parametrize("intensive", [False, True])
def test_excluded_types_count_neither_in_the_sum_nor_in_the_mean(intensive):
    made, whole = model(intensive=intensive, model={"atom_exclude_types": [1]}), model()
    f = structure(3, 8)
    _, p = predicted(made, f)
    batch, q = predicted(whole, f)
    first = batch.type == 0
    expected = q["atomic property"][first].sum(0) / (first.sum() if intensive else 1)
    torch.testing.assert_close(p["property"][0], expected, rtol=1e-12, atol=1e-12)
    assert (p["atomic property"][~first] == 0).all() and 0 < first.sum() < 8
    assert float(p["property atoms"]) == (1 if intensive else first.sum())
    only = Frame(f.coord, np.ones_like(f.type), f.cell)  # atoms of the excluded type alone
    assert (predicted(made, only)[1]["property"] == 0).all()


@pytest.mark.parametrize("function", ["smooth_mae", "mse", "rmse", "mape"])
@pytest.mark.parametrize("intensive", [False, True])
def test_gradient_of_the_loss(intensive, function):
    """By finite differences, of a weight of the descriptor and one of the fitting."""
    made = model(intensive=intensive, model={"atom_exclude_types": [1]})
    config = PropertyLossConfig.model_validate({"type": "property", "loss_func": function, "beta": 0.1})
    loss, batch = PropertyLoss(config, 1e-3, made.outputs), batch_of(made, structure(0), structure(1, 6))
    batch.labels = {"property": torch.tensor([[30.0, -5.0], [7.0, 9.0]], dtype=torch.float64)}

    def value() -> torch.Tensor:
        return loss(made(batch, loss.wanted), batch, 1e-4)[0]

    parameters = [made.descriptor.nets[0].layers[1].w, made.fitting.nets[0].layers[0].w]
    for parameter, gradient in zip(parameters, torch.autograd.grad(value(), parameters), strict=True):
        place, h = int(gradient.abs().argmax()), 1e-5
        with torch.no_grad():
            parameter.view(-1)[place] += h
            up = float(value())
            parameter.view(-1)[place] -= 2 * h
            down = float(value())
            parameter.view(-1)[place] += h
        assert float(gradient.view(-1)[place]) == pytest.approx((up - down) / (2 * h), rel=1e-5)


@pytest.mark.parametrize("suffix", ["dp", "yaml"])
@pytest.mark.parametrize("distinguish", [True, False])
def test_files_keep_it(tmp_path, suffix, distinguish):
    made = model(distinguish_types=distinguish, intensive=True, trainable=[True, False, True])
    if not distinguish:
        made.fitting.bias.copy_(BIAS[:1].expand(2, 2))
        made.fitting.std.copy_(STD[:1].expand(2, 2))
    path = tmp_path / f"m.{suffix}"
    save_model(made, path)
    read = load_model(path)
    for name in ("property_name", "task_dim", "intensive", "distinguish_types", "trainable"):
        assert getattr(read.config.fitting_net, name) == getattr(made.config.fitting_net, name)
    f = structure(1)
    for name, value in predicted(made, f)[1].items():
        torch.testing.assert_close(predicted(read, f)[1][name], value, rtol=0, atol=1e-12)
    assert made.to_tree()["fitting"]["@version"] == 6


def test_constants_in_trees():
    """DeePMD-kit adds bias_atom_e to the net's output, and takes the first type's constants where it is told so."""
    made = model(distinguish_types=True)
    tree = deepcopy(made.to_tree())  # its arrays are those of the model
    tree["fitting"]["@variables"]["bias_atom_e"] = np.array([[1.0, 2.0], [3.0, 4.0]])
    made.load_tree(tree, None, "m")
    torch.testing.assert_close(made.fitting.bias, BIAS + STD * torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tree["fitting"]["@variables"]["bias_atom_e"][:] = 0.0
    shared = model(distinguish_types=False)
    shared.load_tree(tree, None, "m")
    assert torch.equal(shared.fitting.bias, BIAS[:1].expand(2, 2)) and torch.equal(shared.fitting.std, STD[[0, 0]])
    assert shared.to_tree()["fitting"]["distinguish_types"] is False
    shared.fitting.bias.copy_(BIAS)  # of a model with constants of types that a run began with
    assert shared.to_tree()["fitting"]["distinguish_types"] is True
    for name in ("out_bias", "out_std"):
        bad = {**tree, "@variables": {**tree["@variables"], name: np.zeros((1, 2, 3))}}
        with pytest.raises(UserError, match=rf"m: {name} has shape \(1, 2, 3\), expected \(2, 2\)"):
            made.load_tree(bad, None, "m")
    old = {k: v for k, v in tree["fitting"].items() if k not in ("distinguish_types", "task_dim")}
    section = type(made.fitting).section_from_tree(old, "m")
    assert section["distinguish_types"] is False and section["task_dim"] == 2 and section["property_name"] == "gap"


BAD = {
    "coord": ({"property_name": "coord"}, "coord.npy holds no labels"),
    "per atom": ({"property_name": "force", "task_dim": 3}, "force.npy has 3 number.s. of an atom"),
    "width": ({"property_name": "virial", "task_dim": 6}, "virial.npy has 9 number.s. of a frame"),
    "atomic": ({"property_name": "ener", "task_dim": 2}, "atom_ener.npy has 1 number.s. of an atom"),
    "folder": ({"property_name": "../gap"}, "property_name"),
    "empty": ({"property_name": ""}, "property_name"),
    "none": ({"task_dim": 0}, "task_dim"),
    "huge": ({"task_dim": 10**9}, "task_dim"),
    "large": ({"task_dim": 16_384, "neuron": [16_384]}, "task_dim: makes a layer of 2.7e.08 weights"),
    "layers": ({"trainable": [True]}, "trainable: has 1 entries; expected 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        PropertyConfig.model_validate(GAP | changes)


def test_usual_labels_may_be_the_property():
    for name, width in (("energy", 1), ("virial", 9), ("dipole", 3), ("dos", 7), ("property", 4)):
        config = PropertyConfig.model_validate(GAP | {"property_name": name, "task_dim": width})
        assert config.named_labels() == {"property": (name, width)}
