"""PiNet on the files of MiMiC runs, as a script of PiNN; also: mpirun -np 2 python train_pinet.py"""

import sys
from pathlib import Path

from allforce.pinn import (
    EvalSpec,
    TrainSpec,
    distribute_data,
    load_mimic,
    potential_model,
    sparse_batch,
    train_and_evaluate,
)  # fmt: skip

HERE = Path(__file__).parent
mpt = [str(HERE / "water.mpt")] * 3
trr = [str(HERE / f"run{k}.trr") for k in (1, 2, 3)]
ener = [str(HERE / f"run{k}.energies") for k in (1, 2, 3)]

mpt_chunks, trr_chunks, ener_chunks = distribute_data(mpt, trr, ener)
split = {"train": 8, "vali": 2}
params = {
    "model_dir": "pinet_run",
    "network": {
        "name": "PiNet",
        "params": {"atom_types": [1, 8], "rc": 4.0, "pp_nodes": [8], "pi_nodes": [8], "ii_nodes": [8], "depth": 2},
    },
    "model": {
        "name": "potential_model",
        "params": {"e_dress": {1: -62.9144, 8: -31.4572}, "use_force": True, "use_e_per_atom": True},
    },
    "optimizer": {"class_name": "Adam", "config": {"learning_rate": 0.005, "global_clipnorm": 1.0}},
    "seed": 1,
    "training": {"disp_freq": 10},
    "parallel": True,
}
data = load_mimic(mpt_chunks, trr_chunks, ener_chunks, split=split)
train_and_evaluate(
    potential_model(params),
    TrainSpec(
        lambda: data["train"].shuffle(100).repeat().apply(sparse_batch(2)),
        max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 100,
    ),
    EvalSpec(lambda: data["vali"].apply(sparse_batch(2))),
)
