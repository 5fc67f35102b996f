"""Inputs of PiNN, its parameter file or dictionary, as an input of ours.

    model_dir: run1                                              ─►  training/save_dir, disp_file, metrics_file
    network: {name: PiNet, params: {rc: 5.0, …}}                 ─►  model
    model:   {name: potential_model, params: {use_force: true}}  ─►  model (e_dress, e_scale, …) and loss
    optimizer: {class_name: Adam, config: {…}}                   ─►  optimizer, learning_rate
    parallel: true                                               ─►  training/parallel
    training: {…}                                                ─►  training, in our own form; options of PiNN

The older form (network: pinet, network_params, model_params) is read as well. Values are moved, and judged later by the
schema under their new names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allforce.errors import UserError

Data = dict[str, Any]

NETWORKS = {"PiNet": "pinet", "pinet": "pinet", "PiNet2": "pinet2", "pinet2": "pinet2"}
POTENTIAL_KEYS = ("e_dress", "e_scale", "e_unit")
DIPOLE_KEYS = ("d_scale", "d_unit", "charge_neutrality", "neutral_unit")
SHARED = ("e_scale", "e_unit", "d_scale", "d_unit")  # of the model and of its loss
# parameters of PiNN that make no difference here: metrics that are always there, a weight that PiNN never uses
WITHOUT_EFFECT = ("log_e_per_atom", "log_d_per_atom", "q_loss_multiplier")
LIMITS = ("max_energy", "max_force_comp", "max_dipole")  # false is their way to say none
OLD_OPTIMIZER = ("learning_rate", "use_norm_clip", "norm_clip", "use_decay", "decay_step", "decay_rate")
TOP = (
    *("model_dir", "network", "model", "optimizer", "parallel", "training", "precision", "seed"),
    *("network_params", "model_params"),
)
SYMBOLS = (
    "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr "
    "Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt "
    "Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv "
    "Ts Og"
).split()


def is_pinn(data: Data) -> bool:
    return "network" in data


def from_pinn(data: Data, where: str) -> Data:
    """The input that says the same in our words; where: its name in messages."""
    unknown = [name for name in data if name not in TOP and not str(name).startswith("_")]
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]}; in an input of PiNN are allowed: {', '.join(TOP)}.")
    network, net = _named(data, "network", where)
    name, params = _named(data, "model", where)
    name = name or "potential_model"
    if not isinstance(network, str) or network not in NETWORKS:
        raise UserError(f"{where}: network {network!r} is not known here; expected PiNet or PiNet2.")
    optimizer, rate = _optimizer(data, params, where)
    model = _model(NETWORKS[network], net, name, params, where)
    model |= {key: data[key] for key in ("precision", "seed") if key in data}
    loss = {key: False if value is None else value for key, value in params.items() if key not in WITHOUT_EFFECT}
    loss = {key: value for key, value in loss.items() if not (key in LIMITS and value is False)}
    loss = {key: value for key, value in loss.items() if key not in _refused(loss, where)}
    kind = "pinn" if name == "potential_model" else "pinn_dipole"
    if kind == "pinn_dipole":
        loss |= _dipole_terms(name, loss)
    loss |= {key: model[key] for key in SHARED if key in model}
    training = _training(data, where)
    return {
        "model": model,
        "learning_rate": rate,
        "optimizer": optimizer,
        "loss": {"type": kind, **loss},
        "training": training,
    }


def _named(data: Data, key: str, where: str) -> tuple[Any, Data]:
    """Name and parameters of network or model, in the new form {name, params} or the old one, name and key_params."""
    value = data.get(key)
    if value is None or isinstance(value, str):
        return value, section(data.get(f"{key}_params"), f"{key}_params", where)
    named = section(value, key, where)
    return named.get("name"), section(named.get("params"), f"{key}/params", where)


def section(value: Any, key: str, where: str) -> Data:
    """A copy of the keys and values at this place of the input; none when it was left out."""
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{where}: {key} should be keys with values; found {str(value)[:60]!r}.")
    return dict(value or {})


def _number(value: Any) -> Any:
    """A text that is a number as that number; all else is left to the schema."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _model(network: str, net: Data, name: str, params: Data, where: str) -> Data:
    """The section model; what belongs to it leaves `params`."""
    if "en_nodes" in net:
        net["out_nodes"] = net.pop("en_nodes")
    for key, only in (("out_pool", False), ("out_units", 1)):
        if net.pop(key, only) not in (only, None):
            raise UserError(f"{where}: network/params/{key} has to be {only}: models add up atoms themselves.")
    types = net.setdefault("atom_types", [1, 6, 7, 8])
    if not isinstance(types, list) or not all(isinstance(t, int) and 0 < t < len(SYMBOLS) for t in types):
        raise UserError(f"{where}: network/params/atom_types: found {types}; expected a list of atomic numbers.")
    net["type_map"] = [SYMBOLS[number] for number in types]
    if name == "potential_model":
        dress = section(params.pop("e_dress", None), "model/params/e_dress", where)
        keys: Data = {"e_dress": {str(element): _number(energy) for element, energy in dress.items()}}
        keys |= {key: _number(params.pop(key)) for key in POTENTIAL_KEYS if key in params}
        return {"type": network, **net, **keys}
    kind = "dipole" if name == "dipole_model" else str(name).removesuffix("_dipole_model")
    if kind == str(name):
        raise UserError(f"{where}: model {name!r} is not known here; expected potential_model or *_dipole_model.")
    keys = {key: params.pop(key) for key in DIPOLE_KEYS if key in params}
    return {"type": f"{network}_dipole", **net, "kind": kind, **keys}


def _dipole_terms(name: str, loss: Data) -> Data:
    """Terms that a dipole model of PiNN has on without being asked."""
    return {
        "vector_dipole": loss.get("vector_dipole", name == "AD_OS_dipole_model"),
        "regularization": loss.get("regularization", "BC_R" in name) and "BC_R" in name,
        "use_charge": name == "dipole_model",
    }


def _refused(loss: Data, where: str) -> tuple[str, ...]:
    """Parameters that are taken at their neutral value only."""
    for key in ("no_force_comp", "separate_errors"):
        if loss.get(key):
            raise UserError(
                f"{where}: model/params/{key} is not offered: steps would depend on chance. Leave it out; the "
                "gradient of the whole loss is taken in every step."
            )
    return ("no_force_comp", "separate_errors")


def _optimizer(data: Data, params: Data, where: str) -> tuple[Data, Data]:
    """Optimizer and learning rate; PiNN's default where none is given, the older form's keys leave `params`."""
    old = {key: params.pop(key) for key in OLD_OPTIMIZER if key in params}
    if data.get("optimizer") is None and "model_params" in data:
        decay = old.get("decay_rate", 0.999) if old.get("use_decay", True) else 1.0
        clip = {"global_clipnorm": old.get("norm_clip", 0.01)} if old.get("use_norm_clip", True) else {}
        schedule = (old.get("learning_rate", 3e-4), old.get("decay_step", 10000), decay, True)
        return {"type": "KerasAdam", **clip}, _decay(*schedule)
    if data.get("optimizer") is None:
        return {"type": "KerasAdam", "clipnorm": 0.01}, _decay(3e-4, 10000, 0.994, False)
    given = section(data["optimizer"], "optimizer", where)
    name, config = given.get("class_name"), section(given.get("config"), "optimizer/config", where)
    if name != "Adam":
        raise UserError(f"{where}: optimizer {name!r} of Keras is not known here; expected Adam.")
    rate = config.pop("learning_rate", 0.001)
    if isinstance(rate, dict):
        if rate.get("class_name") != "ExponentialDecay":
            found = rate.get("class_name")
            raise UserError(f"{where}: the schedule {found!r} of Keras is not known here; expected ExponentialDecay.")
        c = section(rate.get("config"), "optimizer/config/learning_rate/config", where)
        schedule = (
            c.get("initial_learning_rate"),
            c.get("decay_steps"),
            c.get("decay_rate"),
            c.get("staircase", False),
        )
        rate = _decay(*schedule)
    else:
        rate = _decay(rate, 10000, 1.0, False)
    for key, neutral in {"decay": 0.0, "amsgrad": False, "name": None}.items():
        value = config.pop(key, neutral)
        if value != neutral and key != "name":
            raise UserError(f"{where}: optimizer/config/{key} is {value}; only {neutral} is known here.")
    return {"type": "KerasAdam", **{key: value for key, value in config.items() if value is not None}}, rate


def _decay(start: Any, steps: Any, rate: Any, staircase: bool) -> Data:
    """start · rate^(t/steps)"""
    form = {"decay_steps": steps, "decay_rate": rate, "smooth": not staircase}
    return {"type": "exp", "start_lr": start, "stop_lr": 0.0, **form}


def _training(data: Data, where: str) -> Data:
    """What PiNN's command line has as options, with its defaults."""
    training = {
        "numb_steps": 1000000,
        "disp_freq": 1000,
        "save_freq": 10000,
        "max_ckpt_keep": 1,
        **section(data.get("training"), "training", where),
    }
    if "numb_epoch" in training:
        training.pop("numb_steps")
    training.setdefault("training_data", {"systems": "train.yml", "batch_size": "mixed:10"})
    if "validation_data" not in training and Path("eval.yml").exists():
        training["validation_data"] = {"systems": "eval.yml", "batch_size": "mixed:10"}
    training.setdefault("parallel", bool(data.get("parallel", False)))
    if folder := model_dir(data, where):
        files = {"disp_file": "lcurve.out", "metrics_file": "metrics.jsonl"}
        training = {"save_dir": folder, **{key: f"{folder}/{name}" for key, name in files.items()}, **training}
    return training


def model_dir(data: Data, where: str) -> str | None:
    """The folder of the model; None when the parameters name none."""
    folder = data.get("model_dir")
    if folder is not None and not isinstance(folder, (str, Path)):
        raise UserError(f"{where}: model_dir should be the name of a folder; found {str(folder)[:60]!r}.")
    return str(folder) if folder else None
