"""Models of PiNN with a folder each: train, evaluate, predict, as its scripts call for it."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from allforce import logs
from allforce.config.load import parse_input
from allforce.config.pinn import model_dir, section
from allforce.config.read import read_file
from allforce.config.schema import Input
from allforce.data.batch import Batch
from allforce.data.dataset import DataSet
from allforce.data.loader import collate
from allforce.data.pinn import Dataset
from allforce.data.prepare import Preparation
from allforce.data.system import System
from allforce.distributed import devices
from allforce.distributed.comm import Comm
from allforce.distributed.connect import join
from allforce.distributed.launch import World, detect
from allforce.distributed.profile import CountedComm
from allforce.errors import UserError
from allforce.files import checkpoint
from allforce.files.model_file import load_model
from allforce.infer.evaluate import AnyModel, Evaluator
from allforce.logs import CollectHandler, log
from allforce.losses import LOSSES
from allforce.models import MODELS, Model
from allforce.pinn.metrics import Metrics
from allforce.train.datasets import fingerprint
from allforce.train.entry import give_up, run
from allforce.train.source import Options
from allforce.train.start import NothingToDo
from allforce.writing import write_whole

Data = Callable[[], Dataset]


@dataclass
class TrainSpec:
    input_fn: Data
    max_steps: int = 1000000


@dataclass
class EvalSpec:
    input_fn: Data
    steps: int | None = None  # batches; all when left out


class Connection(NamedTuple):
    """This process among the workers, made once."""

    world: World
    comm: CountedComm
    device: torch.device
    threads: devices.Threads
    collector: CollectHandler | None


@functools.cache
def connection() -> Connection:
    world = detect()
    device, threads = devices.setup(world)
    comm = join(world, "auto", device)
    here = Connection(world, comm, device, threads, logs.setup("INFO", None, "master", comm))
    if world.note and comm.rank == 0:
        log.warning(world.note)
    if comm.size > 1:  # what a script leaves uncaught ends all workers, which would wait for this one
        sys.excepthook = lambda kind, error, trace: os._exit(give_up(error, comm, here.collector))
    atexit.register(comm.close)
    return here


def potential_model(params: dict[str, Any] | str | Path) -> Estimator:
    """A model of energies and forces from PiNN's parameters, given as a dictionary or a YAML file."""
    return _model(params, "potential_model", "potential")


def dipole_model(params: dict[str, Any] | str | Path) -> Estimator:
    """A model of dipoles. Which one, the parameters say: model: {name: AC_dipole_model, …}."""
    return _model(params, "dipole_model", "dipole")


def get_model(params: dict[str, Any] | str | Path) -> Estimator:
    """The model that the parameters name; also from the folder of a run, which has its params.yml."""
    return _model(params, "potential_model", "model")


def _model(params: dict[str, Any] | str | Path, default: str, expected: str) -> Estimator:
    if not isinstance(params, dict):
        path = Path(params)
        params = read_file(path / "params.yml" if path.is_dir() else path)
    own: dict[str, Any] = _plain(params)
    if not isinstance(own.get("model"), dict):
        own["model"] = {"name": own.get("model") or default, "params": own.get("model_params") or {}}
    name = own["model"].setdefault("name", default)
    if expected not in str(name):
        raise UserError(f"{default}: the parameters name the model {name!r}; expected one with {expected} in its name.")
    return Estimator(own)


def _plain(value: Any) -> Any:
    """A copy of parameters without NumPy's numbers, tuples and paths, which are no values of an input file."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


class Estimator:
    """A model with its folder, as PiNN's models have one: train, evaluate, predict."""

    def __init__(self, params: dict[str, Any]):
        self.params = params
        self.model_dir = Path(model_dir(params, "params") or "PiNN_model")
        self.input = self._input()
        self.trained: tuple[Model, int] | None = None  # by this process, and its steps: on all workers the same

    def _input(self, batch: int = 1, steps: int = 1000000, sharding: str = "global", held_out: bool = False) -> Input:
        """The input of a run with data that are given later."""
        systems = {"systems": "given by a script", "batch_size": f"mixed:{batch}"}
        training = {
            "numb_steps": steps,
            "sharding": sharding,
            **section(self.params.get("training"), "training", "params"),
            "training_data": systems,
        }
        if held_out:
            training["validation_data"] = systems
        return parse_input({**self.params, "model_dir": self.model_dir, "training": training}, "params")

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint of the folder, if it has one."""
        prefix = self.model_dir / self.input.training.save_ckpt
        return checkpoint.find(prefix) if checkpoint.numbered(prefix) else None

    @property
    def global_step(self) -> int:
        if self.trained is not None:
            return self.trained[1]
        return int(checkpoint.read(self.latest).meta["step"]) if self.latest else 0

    def load(self) -> Model:
        """The model as it was trained here or saved last, or untrained."""
        if self.trained is not None:
            return self.trained[0]
        return load_model(self.latest) if self.latest else MODELS[self.input.model.type](self.input.model)

    def train(self, input_fn: Data, max_steps: int = 1000000, eval_fn: Data | None = None) -> Estimator:
        """Train, from the newest checkpoint of the folder on if there is one, until max_steps."""
        here = connection()
        try:
            self._train(here, input_fn, max_steps, eval_fn)
        except BaseException as error:
            if here.comm.size == 1:
                raise
            raise SystemExit(give_up(error, here.comm, here.collector)) from None
        return self

    def _train(self, here: Connection, input_fn: Data, max_steps: int, eval_fn: Data | None) -> None:
        dataset, held_out = input_fn(), eval_fn() if eval_fn is not None else None
        given = (dataset.systems(), held_out.systems() if held_out is not None else None)
        if not all(here.comm.gather(bool(given[1]))):  # all workers evaluate, or none does
            given = (given[0], None)
        sharding = self._sharding(given[0], here.comm)
        settings = self._input(dataset.batch_size or 1, int(max_steps), sharding, bool(given[1]))
        if here.comm.rank == 0:
            self.model_dir.mkdir(parents=True, exist_ok=True)
            self._write_params()
        restart = here.comm.gather(str(self.latest) if self.latest else None)[0]
        options = Options("params", str(self.model_dir / "out.json"), restart=restart)
        try:
            job = run(settings, options, *here, data=given)
        except NothingToDo:
            return
        if job.exit_code:  # asked to end by a signal
            raise SystemExit(job.exit_code)
        self.trained = job.state.model, job.state.step

    def _sharding(self, systems: list[System], comm: Comm) -> str:
        """Whether the workers have equal data, or each its own share as distribute_data gives it."""
        for system in systems:
            system.use_type_map(self.input.model.type_map)
        prints = comm.gather(fingerprint(DataSet(systems, 1)) if systems else "")
        return "global" if len(set(prints)) == 1 else "partition"

    def _write_params(self) -> None:
        import yaml

        text = yaml.safe_dump(self.params, sort_keys=False)
        path = self.model_dir / "params.yml"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text.encode())

    def evaluate(self, input_fn: Data, steps: int | None = None) -> dict[str, float]:
        """PiNN's metrics over the batches of a data set: METRICS/E_MAE, METRICS/E_RMSE, …, loss, global_step."""
        comm = connection().comm
        evaluator = AnyModel(self.load(), parallel=False)
        loss = LOSSES[self.input.loss.type](self.input.loss, 1.0)
        metrics = Metrics(loss, {**self.params["model"].get("params", {})})
        for batch in self._batches(evaluator, input_fn(), steps):
            with torch.no_grad():
                prediction = evaluator.model(batch, metrics.wanted(evaluator.model.outputs))
                metrics.add(prediction, batch)
        return {**metrics.result(comm), "global_step": float(self.global_step)}

    def _batches(self, evaluator: Evaluator, dataset: Dataset, steps: int | None) -> Iterator[Batch]:
        prepare = Preparation(evaluator.needs)
        frames = [(s, k) for s in dataset.systems() for k in range(s.nframes)]
        for system in {id(s): s for s, _ in frames}.values():
            system.use_type_map(evaluator.get_type_map())
        size = dataset.batch_size or 1
        for begin in range(0, len(frames), size)[:steps]:
            parts = [prepare(s.frame(k), f"{s.name}, frame {k}") for s, k in frames[begin : begin + size]]
            yield collate([f for f, _ in parts], [p for _, p in parts], evaluator.get_ntypes()).to(evaluator.device)

    def predict(self, input_fn: Data) -> Iterator[dict[str, np.ndarray]]:
        """For every structure: energy, forces (n, 3), stress (3, 3); or dipole, charge, charges (n,)."""
        evaluator = AnyModel(self.load(), parallel=False)
        dataset = input_fn()
        length = not getattr(self.input.loss, "vector_dipole", True)
        for system in dataset.systems():
            system.use_type_map(evaluator.get_type_map())
            frames = [system.frame(k) for k in range(system.nframes)]
            wanted = [x for x in PREDICTED if x in evaluator.model.outputs]
            for frame, result in zip(frames, evaluator.evaluate(frames, wanted), strict=True):
                virial, norm = result.pop("virial", None), result.pop("dipole norm", None)
                if virial is not None and frame.cell is not None:
                    result["stress"] = -virial.reshape(3, 3) / abs(np.linalg.det(frame.cell))
                yield result if norm is None or not length else {**result, "dipole": norm}


PREDICTED = ("energy", "forces", "virial", "dipole", "dipole norm", "charge", "charges")


def train_and_evaluate(model: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, float]:
    """Train, the learning curve with errors of the evaluation data, and give PiNN's metrics at the end."""
    model.train(train_spec.input_fn, train_spec.max_steps, eval_spec.input_fn)
    metrics = model.evaluate(eval_spec.input_fn, eval_spec.steps)
    if connection().comm.rank == 0:
        log.info("evaluation: " + ", ".join(f"{name} = {value:.6g}" for name, value in metrics.items()))
    return metrics


def get_calc(model: Estimator | str | Path, **kwargs: Any):
    """The ASE calculator of a model or of the folder of a run: energy, forces, stress; dipole, charges."""
    from allforce.infer.ase import DP

    return DP((model if isinstance(model, Estimator) else get_model(model)).load(), parallel=False, **kwargs)
