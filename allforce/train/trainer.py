"""The training loop, the only one, and the only place where models and workers meet.

Step s of W workers: every worker takes acc_freq micro-batches, the gradient is the mean over all W·acc_freq of them,
one collective adds it up together with the sums behind the displayed figures, and the optimizer makes one update.
Workers that split frames (training/spatial_workers) are a group that counts as one worker: see distributed/mesh.py.
"""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from allforce.data.batch import Batch
from allforce.distributed.profile import CountedComm
from allforce.errors import UserError
from allforce.logs import CollectHandler, log
from allforce.trace import CHECKPOINT, DATA, DISPLAY, OPTIMIZER, VALIDATION, phase
from allforce.train.build import change_bias, refit
from allforce.train.display import Display
from allforce.train.free_cores import FreeCores
from allforce.train.monitor import Monitor
from allforce.train.on_nan import Guard
from allforce.train.start import Job
from allforce.train.stopping import CODES, REASONS, Requests
from allforce.train.validating import FullValidation, Patience
from allforce.train.writer import Writer

LOOK_EVERY = 16  # steps between two looks at the flags where a look makes the device wait


class Trainer:
    """Trains what `start.prepare` put together."""

    def __init__(
        self,
        job: Job,
        comm: CountedComm,
        monitor: Monitor,
        collector: CollectHandler | None = None,
        wall_time: float | None = None,
        cores: FreeCores | None = None,
    ):
        self.job, self.comm, self.monitor, self.collector, self.cores = job, comm, monitor, collector, cores
        self.requests, self.writer = Requests(wall_time), Writer(job.prefix, job.input.training.max_ckpt_keep)
        self.config, self.state, self.loss, self.schedule = job.input.training, job.state, job.loss, job.schedule
        self.model, self.flat, self.mesh = job.state.model, job.state.flat, job.mesh
        if self.config.acc_freq == 1:
            self.flat.write_directly()
        self.first, self.last = job.state.step, job.numb_steps
        self.display = Display(
            self.config, job.loss.names, comm.rank, self.first, self.last, job.restarted, monitor.facts
        )
        self.full = FullValidation(job) if job.input.validating.full_validation else None
        self.patience = Patience(self.config.stop_when)
        self.sum_since = torch.zeros_like(self.flat.sums)  # for disp_avg
        if job.sum_since is not None and len(job.sum_since) == len(self.sum_since):
            self.sum_since.copy_(torch.tensor(job.sum_since, dtype=self.sum_since.dtype))
        self.seen: list[tuple[str, Tensor]] = []  # this worker's micro-batches of the step and their losses
        self.frames = 0  # of this worker in the step
        self.guard = Guard(job, comm, self.writer)

    def run(self) -> int:
        """Evaluate, show, save, step. The exit code: 0, or that of a signal."""
        if self.comm.watch is not None:
            self.comm.watch.doing = self.doing
        with self.monitor.running(), self.requests:
            return self.loop()

    def loop(self) -> int:
        self.job.loader.start(*self.job.first_and_stride(self.first))
        try:
            while (step := self.state.step) < self.last and not self.patience.over:
                if self.shows(step):
                    self.refresh()
                if not self.gradients(step):
                    self.leave_out()
                    continue
                self.record(step)
                if self.shows(step):
                    self.show(step)
                if self.saves(step):
                    self.save(step)
                if self.full is not None and self.full.due(step):
                    self.validate_all(step)
                if (reason := self.stop_reason(step)) is not None:
                    return self.stop(step, reason)
                self.update(step)
            self.finish()
            return 0
        finally:
            self.writer.wait()
            self.job.loader.close()
            self.display.close()

    def doing(self) -> tuple[int, str]:
        """Step and phase, for the watch."""
        stack = [span.name for lane in self.monitor.trace.lanes[:1] for span in lane.stack]
        return self.state.step, " of ".join(reversed(stack)) or "the loop"

    def shows(self, step: int) -> bool:
        """A restarted run begins at a step whose row has been written."""
        return step % self.config.disp_freq == 0 and not (self.job.restarted and step == self.first)

    def saves(self, step: int) -> bool:
        return step % self.config.save_freq == 0 and step > self.first

    # ---- a step

    def gradients(self, step: int) -> bool:
        """Mean gradient and metric sums over this step's micro-batches of all workers, for the present weights; whether
        they are finite."""
        lr = self.schedule.loss_lr(step)
        self.seen.clear()
        self.frames = 0
        for micro in range(self.config.acc_freq):
            with phase(DATA):
                batch = self.job.loader.next()
            scale = 1.0 / (self.config.acc_freq * self.mesh.groups)
            self.seen.append((batch.name, self.job.learn(batch, lr, scale, first=micro == 0)))
            self.frames += batch.nframes if self.mesh.leads else 0
        if self.requests.any():
            self.flat.flags.copy_(torch.tensor(self.requests.asked))
        self.flat.reduce_finish(self.flat.reduce_start(self.comm), self.comm)
        if not self.guard.finite(step, self.seen, self.shows(step) or self.saves(step)):
            return False
        if self.config.disp_avg:
            self.sum_since += self.flat.sums
        return True

    def update(self, step: int) -> None:
        with phase(OPTIMIZER):
            self.state.update(self.schedule.rate(step), self.config.gradient_max_norm)
        self.monitor.step(self.frames)
        self.display.progress(self.state.step)
        if self.cores is not None:
            self.cores.look()

    def leave_out(self) -> None:
        """The step is not made: nothing is shown or saved, and the next one has the next micro-batches."""
        self.state.step += 1
        self.monitor.step(self.frames)
        self.display.progress(self.state.step)

    def stop_reason(self, step: int) -> int | None:
        """Which end some worker was asked for, the same on all: the flags have come with the gradients."""
        if self.flat.wire.device.type != "cpu" and step % LOOK_EVERY:
            return None
        *ends, table = self.flat.flags.tolist()
        if table and self.monitor.steps > 1:  # else there is nothing to tell yet
            self.requests.asked[-1] = False  # before the answer: who has read it may ask again
            self.flat.flags.zero_()
            self.monitor.report()
        return next((k for k in reversed(range(len(ends))) if ends[k]), None)

    def stop(self, step: int, reason: int) -> int:
        """Save what was reached; a restart computes this step again."""
        if not self.saves(step) and not (self.job.restarted and step == self.first):
            self.save(step)
        self.writer.finish()
        if self.comm.rank == 0:
            log.info(f"stopped by {REASONS[reason]} at step {step} of {self.last}: --restart auto goes on from here")
        return CODES[reason]

    # ---- what is shown and saved

    def show(self, step: int) -> None:
        sums = self.flat.sums
        if self.config.disp_avg and step > self.first:
            sums = self.sum_since
        training = self.loss.metric(sums)
        self.sum_since.zero_()
        begun = perf_counter()
        with phase(DISPLAY):
            with phase(VALIDATION), self.state.averaged():
                validation = self.validate(step)
            rate = self.schedule.rate(step)
            self.display.figures(step, rate, training, validation, perf_counter() - begun)
            if validation is not None:
                self.display.scalars(step, lambda: validation, rate, "val")
            if self.collector is not None:
                self.collector.flush_all()
        if self.full is None and validation is not None:
            self.patience.see(validation[self.loss.progress])
        self.monitor.row(step, rate, training, validation)
        self.display.speed(step, self.monitor.last_row)
        if self.config.tensorboard_histograms and self.display.boards:
            self.display.boards.histograms(step, self.flat.copy())

    def validate_all(self, step: int) -> None:
        assert self.full is not None
        with phase(VALIDATION):
            self.patience.see(self.full.run(step))

    def record(self, step: int) -> None:
        """The training figures of this step for the boards."""
        if self.display.boards and step % self.config.tensorboard_freq == 0:
            sums = self.flat.sums.clone()
            self.display.scalars(step, lambda: self.loss.metric(sums), self.schedule.rate(step), "train")

    def validate(self, step: int) -> dict[str, float] | None:
        """Figures of the validation micro-batches of this step, dealt out to the workers.

        Every micro-batch fills a row of its own and rows are added in one order: the number of workers changes nothing.
        """
        if self.job.validation is None or self.config.validation_data is None:
            return None
        count, lr = self.config.validation_data.numb_btch, self.schedule.loss_lr(step)
        rows = torch.zeros(count, len(self.flat.sums), dtype=torch.float64, device=self.flat.wire.device)
        first = step // self.config.disp_freq * count
        for k in range(self.mesh.number, count, self.mesh.groups):
            rows[k] = self.mesh.once(self.evaluate(self.job.validation.batch(first + k), lr))
        self.comm.all_reduce(rows)
        return self.loss.metric(rows.sum(0))

    def evaluate(self, batch: Batch, lr: float) -> Tensor:
        with torch.no_grad():
            return self.loss(self.job.predict(batch), batch, lr)[1]

    def refresh(self) -> None:
        """What the model does now and then, such as more nodes for its table; equal weights decide alike everywhere."""
        with phase(DISPLAY):
            line = self.model.refresh()
        if line and self.comm.rank == 0:
            log.info(line)

    def fit_after_training(self) -> None:
        """Where that is not possible (no energies in the data), as all workers find, the model is saved as it is."""
        nbatch, split = self.job.input.model.data_bias_nsample, self.config.sharding != "partition"
        try:
            with self.state.averaged(changing=True):
                if self.config.refit:
                    refit(self.model, self.job.loader, self.comm, split)
                elif self.config.change_bias_after_training:
                    change_bias(self.model, self.job.loader, nbatch, self.comm, split)
        except UserError as error:
            if self.comm.rank == 0:
                log.warning(f"training/{'refit' if self.config.refit else 'change_bias_after_training'}: {error}")

    def save(self, step: int) -> None:
        with phase(CHECKPOINT):
            whole = self.state.checkpoint(self.job.meta(step))
            if self.config.disp_avg:
                whole.meta["sum_since"] = self.sum_since.tolist()
            if self.comm.rank == 0:
                self.writer.save(whole)

    def finish(self) -> None:
        """The last row: the weights after the last update on the next micro-batches, without an update."""
        step = self.state.step
        if step > self.first:
            self.refresh()
            lr = self.schedule.loss_lr(step)
            self.seen.clear()
            sums = torch.zeros_like(self.flat.sums)
            for _ in range(self.config.acc_freq):
                batch = self.job.loader.next()
                one = self.evaluate(batch, lr)
                self.seen.append((batch.name, one[0]))
                sums += self.mesh.once(one)
            self.comm.all_reduce(sums)
            self.flat.sums.copy_(sums)
            self.guard.finite(step, self.seen, due=True, update=False)
            self.record(step)
            self.show(step)
            self.fit_after_training()
            self.save(step)
            self.writer.finish()
            if self.full is not None and step == self.last and self.full.config.full_val_start != 1:
                self.validate_all(step)
        if self.patience.over and self.comm.rank == 0:
            log.info(f"ended at step {step} of {self.last}: {self.patience.since} validations without progress")
        self.display.farewell()
        self.monitor.finish()
