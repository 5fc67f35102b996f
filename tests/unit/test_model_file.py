"""Model files: what is written comes back, files of other origins are understood, everything else is a clear error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml

from allforce.errors import UserError
from allforce.files.checkpoint import Checkpoint, save
from allforce.files.container import read_tree, write_tree
from allforce.files.model_file import load_model, save_model
from allforce.files.tree import observed_types
from allforce.infer.freeze import freeze
from allforce.infer.invariant import DeepProperty
from allforce.infer.predict import DeepPot
from allforce.models.standard import StandardConfig, StandardModel

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from make import small_model  # noqa: E402

COORD = np.array([[0.0, 0.0, 0.0], [1.1, 0.2, 0.1], [0.1, 1.2, 0.3], [2.0, 1.9, 0.4], [0.5, 0.6, 2.1]])
TYPES = [0, 1, 1, 0, 1]


def make(descriptor: dict | None = None, fitting: dict | None = None, **model: object) -> StandardModel:
    """A small model with random weights, statistics and bias."""
    section = {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a", "sel": [6, 9], "rcut": 4.0, "rcut_smth": 0.5, "neuron": [2, 4, 8]}
        | {"axis_neuron": 3, "seed": 1, "precision": "float64"}
        | (descriptor or {}),
        "fitting_net": {"neuron": [5, 5], "seed": 2, "precision": "float64"} | (fitting or {}),
        **model,
    }
    potential = StandardModel(StandardConfig.model_validate(section))
    with torch.no_grad():
        potential.descriptor.davg[:, 0] = torch.tensor([0.11, 0.07])
        potential.descriptor.dstd.copy_(torch.tensor([[0.2, 0.1, 0.1, 0.1], [0.3, 0.15, 0.15, 0.15]]))
        potential.fitting.bias_atom_e.copy_(torch.tensor([-90.5, -12.25]))
        for k, name in enumerate(("fparam_avg", "fparam_inv_std", "aparam_avg", "aparam_inv_std")):
            getattr(potential.fitting, name).fill_(0.5 + k)
    potential.min_nbor_dist = 0.875
    return potential


def energies(model: StandardModel, **parameters: object) -> tuple[np.ndarray, ...]:
    return DeepPot(model, table="exact").eval(COORD.reshape(1, -1), None, TYPES, atomic=True, **parameters)


def edit_json(path: Path, change) -> None:
    """Change the tree of a .dp in place."""
    with h5py.File(path, "r+") as file:
        tree = json.loads(file.attrs["json"])
        change(tree, file)
        file.attrs["json"] = json.dumps(tree)


VARIANTS = {
    "two_sided": make,
    "one_sided": lambda: make({"type_one_side": True}),
    "resnet_dt": lambda: make({"resnet_dt": True}, {"resnet_dt": False}),
    "float32": lambda: make({"precision": "float32"}, {"precision": "float32"}),
    "parameters": lambda: make(None, {"numb_fparam": 2, "numb_aparam": 1, "default_fparam": [0.5, 0.25]}),
    "excluded": lambda: make({"exclude_types": [[0, 1]]}, pair_exclude_types=[[1, 1]], atom_exclude_types=[1]),
    "vacuum": lambda: make(None, {"atom_ener": [-1.0, None], "trainable": [True, False, True]}),
    "activations": lambda: make({"activation_function": "GELU"}, {"activation_function": "silut:2.0"}),
}


@pytest.mark.parametrize("suffix", [".dp", ".yaml"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_comes_back(variant: str, suffix: str, tmp_path: Path) -> None:
    model = VARIANTS[variant]()
    save_model(model, tmp_path / f"m{suffix}")
    again = load_model(tmp_path / f"m{suffix}")
    assert again.config.descriptor == model.config.descriptor
    assert again.config.pair_exclude_types == model.config.pair_exclude_types
    assert again.config.atom_exclude_types == model.config.atom_exclude_types
    assert again.min_nbor_dist == 0.875
    with torch.no_grad():  # zeros are written for what counts for nothing
        for t in model.config.atom_exclude_types:
            model.fitting.bias_atom_e[t] = 0.0
            for parameter in model.fitting.nets[t].layers[-1].parameters():
                parameter.zero_()
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]) and value.dtype == again.state_dict()[name].dtype, name
    given = {"fparam": [1.0, 2.0], "aparam": [0.7]} if variant == "parameters" else {}
    for a, b in zip(energies(model, **given), energies(again, **given), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(tmp_path.iterdir()) == [tmp_path / f"m{suffix}"]  # no temporary file is left


def test_layout_of_the_dp_file(tmp_path: Path) -> None:
    """Names, shapes and places that DeePMD-kit looks for."""
    save_model(DeepPot(make()).model, tmp_path / "m.dp")
    with h5py.File(tmp_path / "m.dp") as file:
        tree = json.loads(file.attrs["json"])
        model = tree["model"]
        assert model["@class"] == "Model" and model["@version"] == 2 and model["type_map"] == ["O", "H"]
        assert sorted(file) == [f"variable_{n:04d}" for n in range(len(file))]
        embeddings = model["descriptor"]["embeddings"]
        assert embeddings["ndim"] == 2 and len(embeddings["networks"]) == 4
        first = embeddings["networks"][0]["layers"][0]["@variables"]
        assert file[first["w"]].shape == (1, 2) and file[first["b"]].shape == (2,) and first["idt"] is None
        assert file[model["descriptor"]["@variables"]["davg"]].shape == (2, 15, 4)
        last = model["fitting"]["nets"]["networks"][1]["layers"][-1]
        assert (
            last["trainable"]
            and last["activation_function"] == "none"
            and file[last["@variables"]["w"]].shape == (5, 1)
        )
        np.testing.assert_array_equal(file[model["fitting"]["@variables"]["bias_atom_e"]], [[-90.5], [-12.25]])
        np.testing.assert_array_equal(file[model["@variables"]["out_bias"]], np.zeros((1, 2, 1)))
        np.testing.assert_array_equal(file[model["@variables"]["out_std"]], np.ones((1, 2, 1)))
        assert file[tree["@variables"]["min_nbor_dist"]][()] == 0.875


def test_two_sided_nets_lie_centre_first(tmp_path: Path) -> None:
    """Position of (centre, neighbour) is centre + ntypes·neighbour: a change in net 2 (0, 1) moves oxygen alone."""
    save_model(make(), tmp_path / "m.dp")
    before = energies(load_model(tmp_path / "m.dp"))[3][0, :, 0]

    def change(tree: dict, file: h5py.File) -> None:
        layer = tree["model"]["descriptor"]["embeddings"]["networks"][2]["layers"][2]
        file[layer["@variables"]["w"]][...] *= 1.5

    edit_json(tmp_path / "m.dp", change)
    after = energies(load_model(tmp_path / "m.dp"))[3][0, :, 0]
    moved = np.abs(after - before) > 1e-12
    np.testing.assert_array_equal(moved, np.array(TYPES) == 0)


def test_both_biases_count(tmp_path: Path) -> None:
    """PyTorch-origin files have the bias in out_bias, and an out_std that means nothing for energies."""
    save_model(make(), tmp_path / "m.dp")
    before = energies(load_model(tmp_path / "m.dp"))[3]

    def change(tree: dict, file: h5py.File) -> None:
        tree["backend"] = "PyTorch"
        file[tree["model"]["@variables"]["out_bias"]][...] = [[[2.0], [3.0]]]
        file[tree["model"]["@variables"]["out_std"]][...] = 7.0

    edit_json(tmp_path / "m.dp", change)
    after = energies(load_model(tmp_path / "m.dp"))[3]
    np.testing.assert_allclose((after - before)[0, :, 0], np.array([2.0, 3.0])[TYPES], atol=1e-12)


def test_old_files_with_unit_axes_and_missing_keys(tmp_path: Path) -> None:
    model = make({"resnet_dt": True})
    save_model(model, tmp_path / "m.yaml")
    tree = yaml.safe_load((tmp_path / "m.yaml").read_text())
    variables = tree["model"]["descriptor"]["embeddings"]["networks"][0]["layers"][1]["@variables"]
    for name in ("b", "idt"):
        variables[name]["value"] = [variables[name]["value"]]  # (1, out)
    variables["w"]["value"][0][0] = repr(variables["w"]["value"][0][0])  # a number that YAML 1.1 took for text
    for part, key in (
        ("descriptor", "env_protection"),
        ("fitting", "default_fparam"),
        ("fitting", "use_aparam_as_mask"),
    ):
        del tree["model"][part][key]
    del tree["model_def_script"], tree["@variables"]
    parts = (tree["model"], tree["model"]["descriptor"], tree["model"]["fitting"])
    for part in parts:  # one list in several places: YAML writes an anchor and refers to it
        part["type_map"] = parts[0]["type_map"]
    nets = tree["model"]["descriptor"]["embeddings"]["networks"] + tree["model"]["fitting"]["nets"]["networks"]
    for layer in (layer for net in nets for layer in net["layers"]):
        layer["@version"] = 1
        layer.pop("trainable", None)
    tree["model"]["fitting"]["@version"] = 2
    tree["model"]["fitting"]["@variables"] |= {"case_embd": None, "default_fparam_tensor": variables["b"]}
    text = yaml.safe_dump(tree)
    assert "type_map: *id" in text
    (tmp_path / "m.yaml").write_text(text)
    again = load_model(tmp_path / "m.yaml")
    assert again.min_nbor_dist is None
    np.testing.assert_array_equal(energies(model)[0], energies(again)[0])


def _set(*path: object, value: object):
    def change(tree: dict, file: h5py.File) -> None:
        node = tree
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


def _array(*path: str, place: tuple, value: float):
    def change(tree: dict, file: h5py.File) -> None:
        node = tree
        for key in path:
            node = node[key]
        array = file[node][...]
        array[place] = value
        file[node][...] = array

    return change


def _cut(tree: dict, file: h5py.File) -> None:
    del tree["model"]["fitting"]["nets"]["networks"][0]["layers"][1]


def _narrow(tree: dict, file: h5py.File) -> None:
    variables = tree["model"]["fitting"]["nets"]["networks"][0]["layers"][0]["@variables"]
    variables["w"] = tree["model"]["@variables"]["out_bias"]


DESCRIPTOR = ("model", "descriptor")
BAD = {
    "newer Descriptor": (_set(*DESCRIPTOR, "@version", value=4), "Descriptor has version 4.*known here is 3"),
    "newer Model": (_set("model", "@version", value=3), "Model has version 3"),
    "newer Layer": (
        _set(*DESCRIPTOR, "embeddings", "networks", 0, "layers", 0, "@version", value=3),
        "Layer has version 3",
    ),
    "descriptor": (_set(*DESCRIPTOR, "type", value="dpa3"), "descriptor of type 'dpa3' is not supported.*se_e2_a"),
    "fitting": (_set("model", "fitting", "type", value="dens"), "fitting_net of type 'dens' is not supported"),
    "model type": (_set("model", "type", value="linear_ener"), "model type 'linear_ener' is not supported"),
    "spin": (_set("model", "fitting", "spin", value={"a": 1}), "'spin'"),
    "tot_ener_zero": (_set("model", "fitting", "tot_ener_zero", value=True), "'tot_ener_zero': True"),
    "value": (_set(*DESCRIPTOR, "rcut", value=-1.0), "model/descriptor/rcut"),
    "slots": (_array(*DESCRIPTOR, "@variables", "davg", place=(0, 3, 0), value=9.0), "davg differs between neighbour"),
    "symmetry": (
        _array(*DESCRIPTOR, "@variables", "dstd", place=(0, slice(None), 2), value=9.0),
        "rotational symmetry",
    ),
    "vector mean": (_array(*DESCRIPTOR, "@variables", "davg", place=(..., 1), value=0.1), "rotational symmetry"),
    "layers": (_cut, "fitting net 0: found 2 layers, expected 3"),
    "shape": (_narrow, r"fitting net 0 layer 0 w: found shape \(1, 2, 1\), expected \(24, 5\)"),
    "variable": (_set("model", "@variables", "out_bias", value="/variable_9999"), "not a readable .dp"),
    "no model": (lambda tree, file: tree.pop("model"), "no entry 'model'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_says_why(name: str, tmp_path: Path) -> None:
    save_model(make(), tmp_path / "m.dp")
    change, message = BAD[name]
    edit_json(tmp_path / "m.dp", change)
    with pytest.raises(UserError, match=message) as error:
        load_model(tmp_path / "m.dp")
    assert str(tmp_path / "m.dp") in str(error.value)


def test_tensorflow_file_with_out_std(tmp_path: Path) -> None:
    save_model(make(), tmp_path / "m.dp")
    edit_json(tmp_path / "m.dp", _set("backend", value="TensorFlow"))
    load_model(tmp_path / "m.dp")
    edit_json(tmp_path / "m.dp", _array("model", "@variables", "out_std", place=(0, 0, 0), value=2.0))
    with pytest.raises(UserError, match="out_std"):
        load_model(tmp_path / "m.dp")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.pb", b"x", r"dp convert-backend m.pb m.dp"),
        ("m.pth", b"x", r"dp convert-backend m.pth m.dp"),
        ("m.dp", b"not hdf5", "not a readable .dp"),
        ("m.yaml", b"a: [", "not a readable .yaml"),
        ("m.yaml", b"a: 1", "no entry 'model'"),
        ("m.pt", b"nonsense", "not a readable PyTorch checkpoint"),
        ("m.safetensors", b"nonsense", "not a checkpoint or model, but a text that begins with .nonsense"),
        ("m.dp", None, "no such model file"),
        ("m.ckpt", None, "no such checkpoint"),
    ],
)
def test_files_that_are_no_models(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / name)


def test_only_known_suffixes_are_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="convert-backend m.dp m.pb"):
        save_model(make(), tmp_path / "m.pb")
    with pytest.raises(UserError, match="does not exist"):
        save_model(make(), tmp_path / "nowhere" / "m.dp")


def pt_file(path: Path, model: StandardModel, **params: object) -> dict:
    """A checkpoint as DeePMD-kit's PyTorch backend writes it."""
    nnei = sum(model.config.descriptor.sel)
    prefix = "model.Default."
    state: dict = {
        f"{prefix}min_nbor_dist": torch.tensor(0.875, dtype=torch.float64),
        f"{prefix}atomic_model.out_bias": torch.tensor([[[-90.5], [-12.25]]], dtype=torch.float64),
        f"{prefix}atomic_model.out_std": torch.full((1, 2, 1), 3.0),
        f"{prefix}atomic_model.descriptor.sea.mean": model.descriptor.davg[:, None].repeat(1, nnei, 1),
        f"{prefix}atomic_model.descriptor.sea.stddev": model.descriptor.dstd[:, None].repeat(1, nnei, 1),
        f"{prefix}atomic_model.fitting_net.bias_atom_e": torch.zeros(2, 1, dtype=torch.float64),
        f"{prefix}atomic_model.descriptor.sea.compress_info.0": torch.zeros(0),
    }
    for part, nets in (("descriptor.sea", model.descriptor.nets), ("fitting_net", model.fitting.nets)):
        for n, net in enumerate(nets):
            for k, layer in enumerate(net.layers):
                for collection in ("networks", "_networks"):
                    key = f"{prefix}atomic_model.{part}.filter_layers.{collection}.{n}.layers.{k}"
                    state[f"{key}.matrix"], state[f"{key}.bias"] = layer.w.data, layer.b.data
                    if layer.idt is not None:
                        state[f"{key}.idt"] = layer.idt.data
    section = model.config.model_dump() | {"info": {"observed_type": ["H", "O"]}, "model_branch_alias": []} | params
    section["fitting_net"] = section["fitting_net"] | {"dim_case_embd": 0}
    state["_extra_state"] = {"model_params": section, "train_infos": {"lr": 0.001, "step": 5}}
    torch.save({"model": state, "optimizer": {}}, path)
    return state


def test_pytorch_checkpoint(tmp_path: Path) -> None:
    model = make({"resnet_dt": True})
    pt_file(tmp_path / "m.pt", model)
    again = load_model(tmp_path / "m.pt")
    for a, b in zip(energies(model), energies(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert again.min_nbor_dist == 0.875
    assert observed_types(load_model(tmp_path / "m.pt")) == ["H", "O"]


def test_pytorch_checkpoint_of_a_property(tmp_path: Path) -> None:
    """Here out_std counts: y_i = out_std·net + out_bias."""
    model = small_model({}, {"type": "property", "property_name": "gap"}, mode="exact")
    model.fitting.bias.copy_(torch.tensor([[-90.5], [-12.25]]))
    model.fitting.std.fill_(3.0)
    pt_file(tmp_path / "m.pt", model)
    a, b = (DeepProperty(m, table="exact").eval(COORD[None], None, TYPES) for m in (model, tmp_path / "m.pt"))
    np.testing.assert_array_equal(a, b)
    assert b[0].shape == (1, 1) and DeepProperty(tmp_path / "m.pt").get_var_name() == "gap"


PARTS = {"se_e2_a": ".sea", "se_r": "", "se_e3": ".seat", "dpa1": ".se_atten", "se_atten_v2": ".se_atten"}


def pt_layers(tree: dict, prefix: str) -> dict[str, dict]:
    """Layers of the tree of a descriptor by their names in DeePMD-kit's PyTorch backend."""
    part, out = f"{prefix}{PARTS[tree['type']]}", {}
    for key, name in (("embeddings", "filter_layers"), ("embeddings_strip", "filter_layers_strip")):
        for n, net in enumerate(tree[key]["networks"] if key in tree else ()):
            out |= {f"{part}.{name}.networks.{n}.layers.{k}": layer for k, layer in enumerate(net["layers"])}
    if "type_embedding" in tree:
        (layer,) = tree["type_embedding"]["embedding"]["layers"]
        out[f"{prefix}.type_embedding.embedding.embedding_net.layers.0"] = layer
        for n, layer in enumerate(tree["attention_layers"]["attention_layers"]):
            name = f"{part}.dpa1_attention.attention_layers.{n}"
            out |= {f"{name}.attention_layer.{key}": layer["attention_layer"][key] for key in ("in_proj", "out_proj")}
            out[f"{name}.attn_layer_norm"] = layer["attn_layer_norm"]
    return out


def pt_descriptor(tree: dict, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors of the tree of a descriptor by their names in DeePMD-kit's PyTorch backend."""
    if tree["type"] == "hybrid":
        parts = (pt_descriptor(part, f"{prefix}.descrpt_list.{n}") for n, part in enumerate(tree["list"]))
        return {name: tensor for part in parts for name, tensor in part.items()}
    arrays = {f"{prefix}{PARTS[tree['type']]}.mean": tree["@variables"]["davg"]}
    arrays[f"{prefix}{PARTS[tree['type']]}.stddev"] = tree["@variables"]["dstd"]
    for name, layer in pt_layers(tree, prefix).items():
        names = {"matrix": "w", "bias": "b", "idt": "idt"}
        arrays |= {f"{name}.{theirs}": layer["@variables"].get(ours) for theirs, ours in names.items()}
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    "descriptor",
    [
        {"type": "se_e2_r", "type_one_side": True, "resnet_dt": True},
        {"type": "se_e3"},
        {"type": "se_atten", "attn_layer": 2, "use_tebd_bias": True},
        {"type": "se_atten", "tebd_input_mode": "strip"},
        {"type": "se_atten_v2"},
        {"type": "hybrid", "list": [{"type": "se_e2_a"}, {"type": "se_e2_r"}]},
    ],
    ids=lambda section: "_".join(str(v) for v in section.values() if isinstance(v, str)),
)
def test_pytorch_checkpoints_of_the_family(descriptor: dict, tmp_path: Path) -> None:
    """Names as they are in checkpoints of DeePMD-kit 3.2."""
    model = small_model(descriptor, mode="exact")
    state = pt_descriptor(model.descriptor.to_tree(["O", "H"]), "model.Default.atomic_model.descriptor")
    for n, net in enumerate(model.fitting.nets):
        for k, layer in enumerate(net.layers):
            name = f"model.Default.atomic_model.fitting_net.filter_layers.networks.{n}.layers.{k}"
            state |= {f"{name}.matrix": layer.w.data, f"{name}.bias": layer.b.data}
            if layer.idt is not None:
                state[f"{name}.idt"] = layer.idt.data
    state["model.Default.atomic_model.out_bias"] = model.fitting.bias_atom_e[None, :, None].clone()
    section = model.config.model_dump()
    more = {"_extra_state": {"model_params": section, "train_infos": {"lr": 0.001, "step": 5}}}
    torch.save({"model": state | more, "optimizer": {}}, tmp_path / "m.pt")
    for a, b in zip(energies(model), energies(load_model(tmp_path / "m.pt")), strict=True):
        np.testing.assert_array_equal(a, b)
    name = next(name for name in state if name.endswith(".mean"))
    torch.save({"model": {k: v for k, v in state.items() if k != name} | more}, tmp_path / "m.pt")
    with pytest.raises(UserError, match=f"no tensor '{name.removeprefix('model.Default.')}'"):
        load_model(tmp_path / "m.pt")


def test_pytorch_checkpoints_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    descriptor = make().config.descriptor.model_dump()
    for params, message in (
        ({"descriptor": descriptor | {"type": "dpa2"}}, "descriptor of type 'dpa2' is not supported"),
        ({"model_dict": {}}, "multi-task"),
        ({"use_srtab": "table.txt"}, "model/use_srtab"),
    ):
        pt_file(path, make(), **params)
        with pytest.raises(UserError, match=message):
            load_model(path)
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="no entry model/_extra_state"):
        load_model(path)


class Trap:
    def __reduce__(self):
        return (print, ("code of the file was run",))


def test_no_code_of_a_pt_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"model": Trap()}, tmp_path / "m.pt")
    with pytest.raises(UserError, match="not a readable PyTorch checkpoint"):
        load_model(tmp_path / "m.pt")
    assert "run" not in capsys.readouterr().out


def test_own_checkpoint_and_freeze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is found by file, prefix and directory, and frozen to a name with or without suffix."""
    monkeypatch.chdir(tmp_path)
    model = make()
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    meta = {"step": 7, "model": model.config.model_dump(mode="json"), "model_numbers": {"min_nbor_dist": 0.875}}
    path = save(Path("model.ckpt"), Checkpoint(tensors, meta), keep=5)
    for source in (str(path), "model.ckpt", "."):
        np.testing.assert_array_equal(energies(load_model(source))[0], energies(model)[0])
    assert freeze(".", "frozen_model") == Path("frozen_model.dp")
    assert freeze("model.ckpt", "m.v1") == Path("m.v1.dp")
    assert freeze(str(path), "m.yaml") == Path("m.yaml")
    for name in ("frozen_model", "frozen_model.dp", "m.v1.dp", "m.yaml"):
        again = load_model(name)
        np.testing.assert_array_equal(energies(again)[0], energies(model)[0])
        assert again.min_nbor_dist == 0.875


def test_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failing write leaves the old file and nothing else."""
    path = tmp_path / "m.dp"
    save_model(make(), path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_tree(path, {"model": object()})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    assert read_tree(path)["model"]["type_map"] == ["O", "H"]


@pytest.mark.parametrize("suffix", [".dp", ".yaml"])
def test_lists_of_arrays_in_a_file_of_another_descriptor(suffix: str, tmp_path: Path) -> None:
    """DeePMD-kit's larger descriptors keep lists of arrays (and null among them) below "@variables"."""
    save_model(make(), tmp_path / "m.dp")
    tree = read_tree(tmp_path / "m.dp")
    weights = [np.arange(3.0), None, np.ones((2, 2))]
    tree["model"]["descriptor"] = {"type": "dpa2", "@variables": {"g1_residual": weights, "inner": {"list": [weights]}}}
    path = tmp_path / f"other{suffix}"
    write_tree(path, tree)
    back = read_tree(path)["model"]["descriptor"]["@variables"]
    for found in (back["g1_residual"], back["inner"]["list"][0]):
        assert found[1] is None
        np.testing.assert_array_equal(found[0], weights[0])
        np.testing.assert_array_equal(found[2], weights[2])
    with pytest.raises(UserError, match="descriptor of type 'dpa2' is not supported"):
        load_model(path)


def test_types_without_energy_are_written_as_zeros(tmp_path: Path) -> None:
    """DeePMD-kit's TensorFlow backend would add their energies; here, and in other backends, nothing changes."""
    model = make(atom_exclude_types=[1])
    before = energies(model)
    save_model(model, tmp_path / "m.dp")
    fitting = read_tree(tmp_path / "m.dp")["model"]["fitting"]
    kept, left_out = (net["layers"][-1]["@variables"] for net in fitting["nets"]["networks"])
    assert kept["w"].any() and not left_out["w"].any() and not left_out["b"].any()
    assert fitting["@variables"]["bias_atom_e"].ravel().tolist() == [-90.5, 0.0]
    assert model.fitting.bias_atom_e.tolist() == [-90.5, -12.25] and model.fitting.nets[1].layers[-1].w.any()
    for a, b in zip(before, energies(load_model(tmp_path / "m.dp")), strict=True):
        np.testing.assert_array_equal(a, b)


def test_null_where_deepmd_kit_writes_null(tmp_path: Path) -> None:
    """As its stored models have it: no atom_ener, no smallest distance."""
    save_model(make(), tmp_path / "m.yaml")
    tree = yaml.safe_load((tmp_path / "m.yaml").read_text())
    for name in ("atom_ener", "default_fparam", "layer_name", "spin", "rcond"):
        tree["model"]["fitting"][name] = None
    for name in ("preset_out_bias", "pair_exclude_types", "atom_exclude_types"):
        tree["model"][name] = None
    tree["@variables"] = {"min_nbor_dist": None}
    (tmp_path / "m.yaml").write_text(yaml.safe_dump(tree))
    model = load_model(tmp_path / "m.yaml")
    assert model.config.fitting_net.atom_ener == [] and model.min_nbor_dist is None
    for a, b in zip(energies(make()), energies(model), strict=True):
        np.testing.assert_array_equal(a, b)
    save_model(model, tmp_path / "again.dp")
    assert read_tree(tmp_path / "again.dp")["@variables"] == {}  # null there stops its TensorFlow backend


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"descriptor": {"exclude_types": [[0, 1]]}}, "exclude_types with a mean of the environment that is not zero"),
        ({"pair_exclude_types": [[0, 1]]}, "pair_exclude_types: DeePMD-kit's TensorFlow backend"),
        ({"atom_exclude_types": [1]}, None),
        ({}, None),
    ],
)
def test_freezing_tells_what_another_backend_makes_otherwise(
    changes: dict, words: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(make(**changes), tmp_path / "m.dp")
    freeze(str(tmp_path / "m.dp"), str(tmp_path / "frozen.dp"))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (words is not None) and all(words in line for line in told)
