"""What a script of PiNN calls: models, data, training and evaluation.

    from allforce.pinn import potential_model, distribute_data, load_mimic, train_and_evaluate, TrainSpec, EvalSpec

    mpt_chunks, trr_chunks, ener_chunks = distribute_data(mpt, trr, ener)
    dataset = lambda: load_mimic(mpt_chunks, trr_chunks, ener_chunks, split={"train": 8, "vali": 2})
    params = {"model_dir": "run1", "network": {"name": "PiNet", "params": {"rc": 4.5}}, "parallel": True}
    model = potential_model(params)
    train_and_evaluate(
        model,
        TrainSpec(lambda: dataset()["train"].apply(sparse_batch(10)), max_steps=10000),
        EvalSpec(lambda: dataset()["vali"].apply(sparse_batch(10))),
    )

Started by torchrun, mpirun, srun, … it trains on all workers together. A UserError that the script does not catch ends
it with one paragraph and exit code 2, as `dp` does.
"""

import sys

from allforce.data.pinn import Dataset, distribute_data, load_ase, load_mimic, load_tfrecord, sparse_batch
from allforce.errors import end_program
from allforce.pinn.estimator import (
    Estimator,
    EvalSpec,
    TrainSpec,
    dipole_model,
    get_calc,
    get_model,
    potential_model,
    train_and_evaluate,
)

__all__ = [
    "Dataset",
    "Estimator",
    "EvalSpec",
    "TrainSpec",
    "dipole_model",
    "distribute_data",
    "get_calc",
    "get_model",
    "load_ase",
    "load_mimic",
    "load_tfrecord",
    "potential_model",
    "sparse_batch",
    "train_and_evaluate",
]

if sys.excepthook is sys.__excepthook__:  # unless the program has one of its own
    sys.excepthook = end_program
