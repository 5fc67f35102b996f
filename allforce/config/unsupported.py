"""What DeePMD-kit has and Allforce does not (yet): an error by name, except at the value that means "off".

Inputs in use carry many such keys at their neutral values ("enable_compile": false); those are accepted and dropped.
"""

from __future__ import annotations

from typing import Any

ANY = object()  # the key has no effect while the key it belongs to is off

# path of the object -> key -> its neutral values, ANY, or a dict for an object with neutral keys of its own
KEYS: dict[str, dict[str, Any]] = {
    "": {
        "nvnmd": [None, {}, {"enable": False}],
        "loss_dict": [None],
        "learning_rate_dict": [None],
    },
    "validating": {
        "ema_full_validation": [False],
        "compiled_infer": [False],
        "tf32_infer": [False],
        "amp_infer": [False],
    },
    "model": {
        "use_srtab": [None],
        "smin_alpha": ANY,
        "sw_rmin": ANY,
        "sw_rmax": ANY,
        "srtab_add_bias": ANY,
        "type_embedding": [None],
        "modifier": [None],
        "compress": [None],
        "spin": [None],
        "finetune_head": [None, ""],
        "model_branch_alias": [[]],
        "info": [None, {}],
        "bridging_method": [None, "None", "none"],
        "bridging_r_inner": ANY,
        "bridging_r_outer": ANY,
        "model_dict": [None],
        "shared_dict": [None],
        "fitting_net_dict": [None],
    },
    "model/fitting_net": {"dim_case_embd": [0], "layer_name": [None], "tot_ener_zero": [False]},
    "optimizer": {"enable_gram": ANY, "flash_muon": ANY, "magma_muon": [False]},
    "loss": {
        "start_pref_h": [0],
        "limit_pref_h": [0],
        "start_pref_gf": [0],
        "limit_pref_gf": [0],
        "numb_generalized_coord": [0],
    },
    "training": {
        "mixed_precision": [None],
        "ema_ckpt_keep": ANY,
        "ckpt_keep_ratio": [None],
        "neighbor_graph_method": ["auto"],
        "enable_compile": [False],
        "enable_tf32": [False],
        "data_dict": [None],
        "model_prob": [None],
        "num_epoch_dict": [None],
        "fitting_weight": [None],
    },
    "training/training_data": {"min_pair_dist": [None, 0], "set_prefix": [None, "set"]},
    "training/validation_data": {"min_pair_dist": [None, 0], "set_prefix": [None, "set"]},
}

# path of the object -> other values of its `type`
TYPES: dict[str, tuple[str, ...]] = {
    "model": ("dpa4", "frozen", "pairtab", "pairwise_dprc", "linear_ener"),
    "model/descriptor": (
        *("loc_frame", "se_a_tpe", "se_a_ebd", "se_a_ebd_v2"),
        *("se_a_tpe_v2", "se_a_mask", "se_e3_tebd", "dpa2", "dpa3", "dpa4", "DPA4"),
        *("dpa4c", "SeZM"),
    ),
    "model/fitting_net": ("population", "dpa4_ener"),
    "optimizer": ("LKF", "AdaMuon"),
    "loss": ("ener_spin", "population", "dens"),
}

# such a value -> what serves here instead
INSTEAD = {
    "LKF": "HybridMuon, too, needs several times fewer steps than Adam, without a covariance of gigabytes",
    "AdaMuon": "HybridMuon is the nearest",
}

# key -> other values it has there
VALUES: dict[str, tuple[str, ...]] = {"precision": ("float16", "bfloat16")}
PREFIXES: dict[str, tuple[str, ...]] = {"batch_size": ("mix:",)}  # "mix:N", for LMDB data


def is_neutral(value: Any, neutral: Any) -> bool:
    """Whether a value is one of the neutral ones. false is not 0 here, nor is true 1."""
    if neutral is ANY:
        return True
    if isinstance(neutral, dict):
        return value is None or (
            isinstance(value, dict) and all(k in neutral and is_neutral(v, neutral[k]) for k, v in value.items())
        )
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral)
