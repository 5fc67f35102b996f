"""The model behind dp scaling-test --predict, on costs that are known."""

from __future__ import annotations

import pytest

from allforce.train.predict import Link, above_mean, against, costs_from, table

BLOCKS = [{"size": s, "pairs": 80000 // s, "seconds": [0.010 + 1e-6 * 80000 / s] * 5} for s in (1, 2, 4, 8)]
FACTS = {
    "atoms": 1000,
    "frames": 1,
    "acc_freq": 1,
    "threads": 1,
    "device": "cpu",
    "alone": 0.081,
    "blocks": BLOCKS,
    "update": 0.002,
}
FACTS |= {"gradient_bytes": 4e6, "gradient": [0.0021] * 3, "gradient_short": [1e-4] * 3}
FACTS |= {"prediction_bytes": 24e3, "prediction": [1.3e-4] * 3, "prediction_short": [1e-4] * 3}


def test_costs_are_those_that_were_put_in():
    costs = costs_from(FACTS, cores=2)
    assert costs.fixed == pytest.approx(0.010) and costs.per_pair == pytest.approx(1e-6)
    assert costs.gradients == Link(pytest.approx(1e-4), pytest.approx(2e9))
    assert costs.halo == pytest.approx(0.0) and costs.spread == pytest.approx(0.0, abs=1e-12)


def test_rates_by_hand():
    costs, network = costs_from(FACTS, cores=2), Link(5e-6, 1e10)
    assert 1 / costs.rate(1, 1) == pytest.approx(0.081 + 0.002)  # alone
    assert 2 / costs.rate(2, 1) == pytest.approx(0.090 + 0.002 + 1e-4 + 0.002)
    assert 1 / costs.rate(2, 2) == pytest.approx(0.050 + 0.002 + 1e-4 + 3e-5 + 1e-4 + 0.002)
    assert 4 / costs.rate(4, 1) == pytest.approx(2 * 0.092 + 2e-4 + 1.5 * 0.002)  # four workers share two cores
    far = 0.092 + 9 * 5e-6 + 2 * 511 / 512 * 4e6 / 1e10
    assert 512 / costs.rate(512, 1, network) == pytest.approx(far)
    assert costs.rate(512, 8, network) < costs.rate(512, 1, network)  # splitting costs more than more frames


def test_waiting_grows_with_the_workers():
    assert above_mean(1) == 0.0 and 0.5 < above_mean(2) < 0.6 < above_mean(64) < above_mean(512) < 3.2


def test_tables():
    costs = costs_from(FACTS, cores=2)
    rows = table(costs, [8, 64], Link(5e-6, 1e10)).splitlines()[2:]
    assert [row.split("|")[1:3] for row in rows] == [[" 8 ", f" {s} "] for s in (1, 2, 8)] + [
        [" 64 ", f" {s} "] for s in (1, 2, 8)
    ]  # a block of 1000 atoms / 64 would be too small
    (line,) = against(costs, [(4, 1, costs.rate(4, 1) / 1.1)])
    assert "share 2 cores" in line and "+10 %" in line
