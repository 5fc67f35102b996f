"""Learning-rate schedules against the formulas written out."""

from math import cos, exp, log, pi, sqrt

import pytest

from allforce.config.schema import LearningRateCosine, LearningRateExp, LearningRateWSD
from allforce.errors import UserError
from allforce.schedule import Schedule, worker_factor


def test_exp_ends_at_stop_lr_and_falls_in_steps():
    s = Schedule(LearningRateExp(start_lr=1e-3, stop_lr=1e-6, decay_steps=200), 4000)
    assert s.lr(0) == s.lr(199) == 1e-3
    assert s.lr(200) == pytest.approx(1e-3 * exp(log(1e-3) / 20), rel=1e-14)
    assert s.lr(4000) == pytest.approx(1e-6, rel=1e-12)
    assert s.lr(10**6) == 1e-6


def test_exp_decay_steps_longer_than_the_run_are_shortened():
    assert Schedule(LearningRateExp(start_lr=1e-3, decay_steps=5000), 2000).lr(100) < 1e-3  # 100 when T/10 > 100
    short = Schedule(LearningRateExp(start_lr=1e-3, decay_steps=5000), 300)  # 300 // 100 + 1 = 4
    assert short.lr(3) == 1e-3 > short.lr(4)
    given = Schedule(LearningRateExp(start_lr=1e-3, decay_steps=5000, decay_rate=0.5), 300)
    assert given.lr(299) == 1e-3


def test_exp_smooth_and_given_rate():
    s = Schedule(LearningRateExp(start_lr=1.0, stop_lr=1e-9, decay_steps=10, decay_rate=0.5, smooth=True), 1000)
    assert s.lr(5) == pytest.approx(sqrt(0.5), rel=1e-14)


def test_default_stop_lr_and_ratio():
    assert Schedule(LearningRateCosine(start_lr=1e-3), 10).lr(10) == 5e-8
    assert Schedule(LearningRateCosine(start_lr=1e-3, stop_lr_ratio=0.1), 10).lr(10) == pytest.approx(1e-4)


def test_cosine():
    s = Schedule(LearningRateCosine(start_lr=1.0, stop_lr=0.2), 100)
    assert s.lr(25) == pytest.approx(0.2 + 0.4 * (1 + cos(pi / 4)))


@pytest.mark.parametrize(
    "kind, middle", [("inverse_linear", 1 / (0.5 / 0.1 + 0.5)), ("linear", 0.55), ("cosine", 0.55)]
)
def test_wsd(kind, middle):
    s = Schedule(LearningRateWSD(start_lr=1.0, stop_lr=0.1, decay_phase_ratio=0.2, decay_type=kind), 100)
    assert s.lr(79) == 1.0 == s.lr(80)
    assert s.lr(90) == pytest.approx(middle)
    assert s.lr(100) == pytest.approx(0.1)


def test_down_to_zero():
    for config in (
        LearningRateCosine(start_lr=1.0, stop_lr=0.0),
        LearningRateWSD(start_lr=1.0, stop_lr=0.0, decay_type="linear"),
        LearningRateWSD(start_lr=1.0, stop_lr=0.0, decay_type="cosine"),
    ):
        s = Schedule(config, 100)
        assert s.lr(100) == s.lr(200) == 0.0 < s.lr(99) < 0.2
    assert Schedule(LearningRateExp(start_lr=1.0, stop_lr=0.0, decay_steps=1), 100).lr(100) == pytest.approx(1e-10)


def test_loss_weights_follow_the_rate_or_the_steps():
    config = LearningRateCosine(start_lr=0.01, stop_lr=0.0, warmup_steps=10)
    follows, own = Schedule(config, 100, workers=4), Schedule(config, 100, workers=4, loss="step")
    assert all(follows.loss_lr(t) == follows.lr(t) for t in (0, 5, 10, 50, 100))
    assert [own.loss_lr(t) / 0.01 for t in (0, 50, 100)] == pytest.approx([1.0, 1e-1**1.5, 1e-3])
    assert all(follows.rate(t) == own.rate(t) for t in (0, 5, 10, 50, 100))


def test_warmup_then_decay_over_the_rest():
    s = Schedule(LearningRateCosine(start_lr=1.0, stop_lr=0.1, warmup_steps=10, warmup_start_factor=0.2), 110)
    assert s.lr(0) == pytest.approx(0.2)
    assert s.lr(5) == pytest.approx(0.6)
    assert s.lr(10) == 1.0
    assert s.lr(60) == pytest.approx(0.55)
    assert Schedule(LearningRateCosine(start_lr=1.0, warmup_ratio=0.1), 50).warmup == 5


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match="a warm-up of 10 steps"):
        Schedule(LearningRateCosine(start_lr=1.0, warmup_steps=10), 10)


@pytest.mark.parametrize("rule, factor", [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_workers_scale_the_optimizer_only(rule, factor):
    s = Schedule(LearningRateExp(start_lr=1e-3, stop_lr=1e-6, decay_steps=10, scale_by_worker=rule), 100, workers=4)
    assert worker_factor(rule, 4) == factor
    for step in (0, 35, 100):
        assert s.rate(step) == pytest.approx(factor * s.lr(step), rel=1e-14)


def test_warmup_from_the_unscaled_rate():
    config = LearningRateCosine(start_lr=1.0, stop_lr=0.1, warmup_steps=10, warmup_from_unscaled=True)
    s = Schedule(config, 110, workers=4)
    assert [s.rate(0), s.rate(5), s.rate(10)] == [1.0, 2.5, 4.0]
    assert s.lr(0) == s.lr(5) == s.lr(10) == 1.0  # the prefactors of the loss see no warm-up


def test_longer_runs_begin_with_a_smaller_rate():
    config = LearningRateWSD(
        start_lr=0.04, stop_lr=0.0, decay_phase_ratio=1.0, decay_type="linear", reference_steps=100
    )
    for steps, first in ((50, 0.04), (100, 0.04), (400, 0.02), (10_000, 0.004)):
        s = Schedule(config, steps)
        assert s.lr(0) == pytest.approx(first) and s.lr(steps // 2) == pytest.approx(first / 2) and s.lr(steps) == 0.0
        assert Schedule(config, steps, loss="step").loss_lr(0) == s.start  # the first weights of the loss


@pytest.mark.parametrize("stop, last", [({"stop_lr_ratio": 0.5}, 0.01), ({"stop_lr": 0.03}, 0.02), ({}, 5e-8)])
def test_last_rate_of_a_longer_run(stop, last):
    assert Schedule(LearningRateCosine(start_lr=0.04, reference_steps=100, **stop), 400).lr(400) == pytest.approx(last)
