"""The learning rate at each step: warm-up, then exponential, cosine or warm-up–stable–decay.

    t step, T numb_steps, W warm-up steps, T' = T - W, τ = t - W

The unscaled rate enters the loss prefactors; the optimizer's rate is that times a factor of the number of workers.
With loss/schedule "step" the prefactors follow start·LAST^(t/T) instead, whatever the rate does.
"""

from __future__ import annotations

from math import cos, exp, floor, log, pi, sqrt
from typing import TYPE_CHECKING, Any

from allforce.errors import UserError

if TYPE_CHECKING:
    from allforce.config.schema import LearningRateCosine, LearningRateExp, LearningRateWSD

LAST = 1e-3
SMALLEST_LR = 1e-10  # floor of stop_lr inside the logarithm of the exponential schedule

FACTORS = {"linear": float, "sqrt": sqrt, "none": lambda workers: 1.0}


def worker_factor(scale_by_worker: str, workers: int) -> float:
    """What the optimizer's rate is multiplied with: W, √W or 1."""
    return FACTORS[scale_by_worker](workers)


class Schedule:
    """lr(t), the unscaled rate, and rate(t), what the optimizer uses with W workers."""

    def __init__(
        self,
        config: LearningRateExp | LearningRateCosine | LearningRateWSD,
        numb_steps: int,
        workers: int = 1,
        loss: str = "lr",
    ):
        self.config, self.steps, self.loss = config, numb_steps, loss
        self.start, self.stop = config.rates(numb_steps)
        self.warmup = int(config.warmup_ratio * numb_steps) if config.warmup_ratio is not None else config.warmup_steps
        if self.warmup and self.warmup >= numb_steps:
            raise UserError(
                f"learning_rate/warmup_steps: a warm-up of {self.warmup} steps leaves none of the run's {numb_steps}. "
                "Make it shorter than training/numb_steps."
            )
        self.factor = worker_factor(config.scale_by_worker, workers)
        self._decay = SCHEDULES[config.type](self, config)

    def loss_lr(self, step: int) -> float:
        """What the loss prefactors follow."""
        return self.lr(step) if self.loss == "lr" else self.start * LAST ** (step / self.steps)

    def lr(self, step: int) -> float:
        """The unscaled rate."""
        if step >= self.warmup:
            return self._decay(step - self.warmup)
        if self.config.warmup_from_unscaled:
            return self.start
        first = self.config.warmup_start_factor * self.start
        return first + (self.start - first) * step / self.warmup

    def rate(self, step: int) -> float:
        """The rate of the optimizer."""
        if step < self.warmup and self.config.warmup_from_unscaled:
            return self.start * (1.0 + (self.factor - 1.0) * step / self.warmup)
        return self.lr(step) * self.factor


def _exponential(schedule: Schedule, config: Any):
    """max(stop, start·r^floor(τ/s)), with r such that the rate would arrive at stop_lr after T' steps."""
    total, start, stop = max(schedule.steps - schedule.warmup, 1), schedule.start, schedule.stop
    s = config.decay_steps
    if config.decay_rate is None and s >= total:
        s = 100 if total // 10 > 100 else total // 100 + 1
    rate = config.decay_rate
    if rate is None:
        rate = exp(log(max(stop, SMALLEST_LR) / start) / (total / s))
    return lambda t: max(stop, start * rate ** (t / s if config.smooth else floor(t / s)))


def _cosine(schedule: Schedule, config: Any):
    """stop + (start - stop)/2·(1 + cos πτ/T')"""
    total, start, stop = schedule.steps - schedule.warmup, schedule.start, schedule.stop
    return lambda t: stop if t >= total else stop + (start - stop) / 2 * (1 + cos(pi * t / total))


def _wsd(schedule: Schedule, config: Any):
    """start until the last D = ratio·T steps, then down to stop with x = (τ - T' + D)/D in one of three ways."""
    total, start, stop = schedule.steps - schedule.warmup, schedule.start, schedule.stop
    length = min(max(int(config.decay_phase_ratio * schedule.steps), 1), total)
    down = {
        "inverse_linear": lambda x: 1 / (x / stop + (1 - x) / start),
        "cosine": lambda x: stop + (start - stop) / 2 * (1 + cos(pi * x)),
        "linear": lambda x: start + (stop - start) * x,
    }[config.decay_type]
    return lambda t: start if t < total - length else down(min((t - total + length) / length, 1.0))


SCHEDULES = {"exp": _exponential, "cosine": _cosine, "wsd": _wsd}
