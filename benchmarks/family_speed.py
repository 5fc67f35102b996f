"""Training speed of the descriptors beside se_e2_a: Allforce and DeePMD-kit on the same input and data, alternating.

    python benchmarks/family_speed.py --data WATER                    # all of them
    python benchmarks/family_speed.py --cases se_e2_r,concat,strip    # some

The settings are those of DeePMD-kit's examples for water, in float64 with one frame a step. How time is taken: see
train_speed.py.
"""

from __future__ import annotations

import argparse

from common import find_systems, water_input
from train_speed import Case, common_options, run

EXAMPLE = {"rcut": 6.0, "rcut_smth": 0.5, "resnet_dt": False, "precision": "float64", "seed": 1}
ATTEN = EXAMPLE | {"type": "se_atten", "sel": 120, "neuron": [25, 50, 100], "axis_neuron": 16, "attn": 128}
PAIRS = EXAMPLE | {"type": "se_e2_a", "sel": [20, 40], "rcut": 4.0, "neuron": [10, 20, 40], "axis_neuron": 4}
RADIAL = EXAMPLE | {"type": "se_e2_r", "sel": [46, 92], "neuron": [5, 10, 20]}

# name -> (what the table calls it, descriptor, widths of the fitting net, cost of a step beside that of se_e2_a)
DESCRIPTORS: dict[str, tuple[str, dict, list[int], float]] = {
    "se_e2_r": ("se_e2_r", RADIAL, [120] * 3, 0.4),
    "concat": ("se_atten, attn_layer 0, concat", ATTEN | {"attn_layer": 0}, [240] * 3, 2.0),
    "strip": ("se_atten, attn_layer 0, strip", ATTEN | {"attn_layer": 0, "tebd_input_mode": "strip"}, [240] * 3, 2.0),
    "se_e3": (
        "se_e3",
        EXAMPLE | {"type": "se_e3", "sel": [46, 92], "rcut": 5.8, "neuron": [2, 4, 8]},
        [240] * 3,
        4.0,
    ),
    "attention": ("se_atten, attn_layer 2", ATTEN | {"attn_layer": 2}, [240] * 3, 16.0),
    "hybrid": ("hybrid: se_e2_a, se_e2_r", {"type": "hybrid", "list": [PAIRS, RADIAL]}, [240] * 3, 1.0),
}


def case(name: str, args: argparse.Namespace) -> Case:
    title, descriptor, widths, cost = DESCRIPTORS[name]

    def configure(steps: int, display: int) -> dict:
        config = water_input(find_systems(args.data), steps, display)
        config["model"]["descriptor"] = descriptor
        config["model"]["fitting_net"]["neuron"] = widths
        return config

    return Case({"descriptor": title}, 1, configure, cost)


def main() -> None:
    parser = common_options(__doc__, "family_speed")
    parser.add_argument("--cases", default=",".join(DESCRIPTORS), help="of: %(default)s")
    args = parser.parse_args()
    run("Training speed of the other descriptors", [case(name, args) for name in args.cases.split(",")], args)


if __name__ == "__main__":
    main()
