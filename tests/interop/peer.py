"""Runs inside DeePMD-kit's own environment: python peer.py jobs.json

Each job: train in the folder `train` and freeze, or convert the model `model` to `frozen`; evaluate the structures of
`input` (npz) with it and write `output` (npz); convert the frozen model to `back`.
"""

import json
import os
import subprocess
import sys
import warnings

import numpy as np

warnings.simplefilter("ignore")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from deepmd.entrypoints.convert_backend import convert_backend  # noqa: E402
from deepmd.infer import DeepPot  # noqa: E402


def evaluate(job):
    data = np.load(job["input"])
    optional = {name: data[name] for name in ("fparam", "aparam") if name in data}
    cell = data["cell"] if "cell" in data else None
    names = ("energy", "force", "virial", "atom_energy", "atom_virial")
    values = DeepPot(job["frozen"]).eval(data["coord"], cell, data["type"], atomic=True, **optional)
    np.savez(job["output"], **dict(zip(names, values, strict=True)))


for job in json.load(open(sys.argv[1])):
    if "train" in job:
        dp = [os.path.join(os.path.dirname(sys.executable), "dp")]
        for command in (["train", "input.json"], ["freeze", "-o", job["frozen"]]):
            done = subprocess.run(dp + command, cwd=job["train"], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
    if not os.path.exists(job["frozen"]):
        convert_backend(INPUT=job["model"], OUTPUT=job["frozen"])
    if "input" in job:
        evaluate(job)
    if "back" in job:
        convert_backend(INPUT=job["frozen"], OUTPUT=job["back"])
