"""Runs inside DeePMD-kit's own environment: python peer_family.py jobs.json

Each job: make a random model of the section `section` and write it to `model`, or read ours from there; evaluate it by
the NumPy reference backend on the structures of `input` (npz), and, where `frozen` is given, by TensorFlow.
"""

import json
import os
import sys
import warnings

import numpy as np

warnings.simplefilter("ignore")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from deepmd.dpmodel.model.base_model import BaseModel  # noqa: E402
from deepmd.dpmodel.model.model import get_model  # noqa: E402
from deepmd.dpmodel.utils.serialization import load_dp_model, save_dp_model  # noqa: E402


def with_statistics(tree, rng, davg):
    """Random mean and deviation of the environment in the tree of a descriptor."""
    for part in tree.get("list", [tree]):
        stored = part["@variables"]
        nt, slots, width = stored["davg"].shape
        mean = np.zeros((nt, slots, width))
        mean[..., 0] = davg * rng.uniform(0.5, 1.0, (nt, 1))
        columns = [rng.uniform(0.1, 0.3, nt)] + [rng.uniform(0.1, 0.3, nt)] * (width > 1)
        std = np.stack([columns[min(c, 1)] for c in range(width)], 1)[:, None, :]
        part["@variables"] = stored | {"davg": mean, "dstd": np.repeat(std, slots, 1)}


def made(job):
    rng = np.random.default_rng(job["seed"])
    tree = get_model(job["section"]).serialize()
    with_statistics(tree["descriptor"], rng, job["davg"])
    if tree["fitting"]["type"] == "property":  # no other fitting has a deviation
        shape = tree["@variables"]["out_bias"].shape
        tree["@variables"] = {"out_bias": rng.normal(0.0, 1.0, shape), "out_std": rng.uniform(0.5, 2.0, shape)}
    save_dp_model(job["model"], {"model": tree, "backend": "DPModel", "model_def_script": job["section"]})


def by_numpy(job):
    data = np.load(job["input"])
    model = BaseModel.deserialize(load_dp_model(job["model"])["model"])
    n = len(data["coord"])
    result = model.call(data["coord"], np.tile(data["type"], (n, 1)), data["cell"])
    np.savez(job["output"], **{k: np.asarray(v) for k, v in result.items() if v is not None})


def by_tensorflow(job):
    from deepmd.entrypoints.convert_backend import convert_backend
    from deepmd.infer import DeepPot

    data = np.load(job["input"])
    convert_backend(INPUT=job["model"], OUTPUT=job["frozen"])
    values = DeepPot(job["frozen"]).eval(data["coord"], data["cell"], data["type"])
    np.savez(job["output_tf"], **dict(zip(("energy", "force", "virial"), values, strict=True)))


for job in json.load(open(sys.argv[1])):
    if "section" in job:
        made(job)
    by_numpy(job)
    if "frozen" in job:
        by_tensorflow(job)
