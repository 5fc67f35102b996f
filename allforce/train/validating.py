"""Errors on all validation data, the best models of a run, and its early end.

    E   energy per atom     F   components of forces     V   virial per atom          mean absolute, root mean square

Every batch fills a row of sums of its own and rows are added in one order: the number of workers changes nothing.
"""

from __future__ import annotations

from math import inf, sqrt
from pathlib import Path

import torch
from torch import Tensor

from allforce.config.schema import StopWhen
from allforce.data.batch import Batch
from allforce.files import checkpoint
from allforce.logs import log
from allforce.train.start import Job

QUANTITIES = {"E": ("energy", "energy"), "F": ("force", "forces"), "V": ("virial", "virial")}  # label, output


class FullValidation:
    """What the section `validating` asks for."""

    def __init__(self, job: Job):
        assert job.validation is not None  # since the schema
        self.job, self.comm, self.config, self.loader = job, job.comm, job.input.validating, job.validation
        start = self.config.full_val_start
        self.start = start * job.numb_steps if start <= 1 else int(start)
        self.wanted = {k: v for k, v in QUANTITIES.items() if v[1] in job.loss.wanted}
        self.best_prefix = Path(self.config.save_best_dir or job.prefix.parent) / "best.ckpt"
        self.batches = [
            [(i, k) for k in range(first, min(first + size, system.nframes))]
            for i, (system, size) in enumerate(
                zip(self.loader.dataset.systems, self.loader.dataset.batch_sizes, strict=True)
            )
            for first in range(0, system.nframes, size)
        ]
        if self.comm.rank == 0 and not job.restarted:
            Path(self.config.full_val_file).unlink(missing_ok=True)

    def due(self, step: int) -> bool:
        return step % self.config.validation_freq == 0 and step >= self.start and self.config.full_val_start != 1

    def run(self, step: int) -> float:
        """Evaluate, write a row, keep the model if it is one of the best; the figure that decides."""
        with self.job.state.averaged():
            figures = self.errors()
        chosen = figures[self.config.validation_metric]
        if self.comm.rank == 0:
            self._write(step, figures)
        if self.config.save_best:
            self._keep(step, chosen)
        return chosen

    def errors(self) -> dict[str, float]:
        """Over all frames, nan where no frame has the label."""
        rows = torch.zeros(len(self.batches), len(self.wanted), 3, dtype=torch.float64, device=self.loader.device)
        mesh = self.job.mesh
        for k in range(mesh.number, len(self.batches), mesh.groups):
            rows[k] = mesh.once(self._sums(self.loader.make(self.batches[k])))
        self.comm.all_reduce(rows)
        figures: dict[str, float] = {}
        for name, (absolute, square, count) in zip(self.wanted, rows.sum(0).tolist(), strict=True):
            figures[f"{name}:MAE"] = absolute / count if count else inf
            figures[f"{name}:RMSE"] = sqrt(square / count) if count else inf
        return figures

    @torch.no_grad()
    def _sums(self, batch: Batch) -> Tensor:
        """(quantities, 3): Σ|Δ|, ΣΔ² and their number."""
        prediction, rows = self.job.predict(batch), []
        for label, output in self.wanted.values():
            if label not in batch.labels:
                rows.append(batch.natoms.new_zeros(3, dtype=torch.float64))
                continue
            d = prediction[output].detach() - batch.labels[label]
            if output != "forces":
                d = d / (batch.natoms if d.dim() == 1 else batch.natoms[:, None])
            rows.append(torch.stack([d.abs().sum(), d.square().sum(), d.new_tensor(d.numel())]))
        return torch.stack(rows)

    def _write(self, step: int, figures: dict[str, float]) -> None:
        path = Path(self.config.full_val_file)
        head = "" if path.exists() else "# step" + "".join(f"{name:>12}" for name in figures) + "\n"
        with open(path, "a", encoding="utf-8") as file:
            file.write(head + f"{step:6d}" + "".join(f"{value:12.4e}" for value in figures.values()) + "\n")
        log.info(f"Batch {step:7d}: all validation data: " + ", ".join(f"{k} = {v:.2e}" for k, v in figures.items()))

    def _keep(self, step: int, chosen: float) -> None:
        """Write the checkpoint when it is among the best of this run, remove what is so no longer."""
        whole = self.job.state.checkpoint({**self.job.meta(self.job.state.step), "validation": chosen})
        if self.comm.rank > 0:
            return
        kept = [(checkpoint.read(p).meta["validation"], p) for p in self._of_run(step - 1)]
        if len(kept) >= self.config.max_best_ckpt and chosen >= sorted(kept)[self.config.max_best_ckpt - 1][0]:
            return
        path = self.best_prefix.with_name(f"{self.best_prefix.name}-{step}{checkpoint.SUFFIX}")
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(path, whole)
        log.info(f"best model so far: {path}" if not kept or chosen < min(kept)[0] else f"kept as good: {path}")
        for _, old in sorted(kept)[self.config.max_best_ckpt - 1 :]:
            old.unlink(missing_ok=True)

    def _of_run(self, step: int) -> list[Path]:
        return checkpoint.of_run(self.best_prefix, self.job.run, step)


class Patience:
    """Whether a run has made no progress for so many figures. Figures are those of all workers, so all decide alike."""

    def __init__(self, config: StopWhen | None):
        self.config, self.best, self.since, self.over = config, inf, 0, False

    def see(self, figure: float) -> None:
        if self.config is None:
            return
        if figure < self.best * (1 - self.config.change):
            self.best, self.since = figure, 0
        else:
            self.since += 1
        self.over = self.since >= self.config.patience
