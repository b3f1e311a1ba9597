"""Compute time: a pure function of its key, with the mean and spread that it is given."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from gossamer.app.fleets import load
from gossamer.core.errors import BadInput
from gossamer.sim.timing import ComputeTime

FLEET = load("uniform-40")
STEP_S = FLEET.step_s(0, 8, 512, 1e9)


def clock(noise: float = 0.03, drift: float = 0.05, seed: int = 0) -> ComputeTime:
    return ComputeTime(FLEET, 512, 1e9, noise, drift, seed)


def test_without_noise_steps_cost_what_the_fleet_says() -> None:
    assert clock(0.0, 0.0).steps_s(3, 7, 5, 30, 8) == pytest.approx(30 * STEP_S)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 64, 99])
def test_a_round_cut_in_two_takes_as_long(cut: int) -> None:
    whole = clock().steps_s(17, 4, 0, 100, 8)
    fresh = clock()
    second, first = fresh.steps_s(17, 4, cut, 100 - cut, 8), fresh.steps_s(17, 4, 0, cut, 8)
    assert first + second == pytest.approx(whole, rel=1e-12)


def test_order_and_neighbours_do_not_matter() -> None:
    keys = [(w, r, s) for w in (0, 15, 16, 39) for r in (0, 8, 9) for s in (0, 40)]
    one, two = clock(), clock()
    forward = [one.steps_s(w, r, s, 7, 8) for w, r, s in keys]
    backward = [two.steps_s(w, r, s, 7, 8) for w, r, s in reversed(keys)]
    assert forward == backward[::-1] and len(set(forward)) == len(forward)
    assert forward != [clock(seed=1).steps_s(w, r, s, 7, 8) for w, r, s in keys]


def test_noise_has_mean_one_and_the_given_spread() -> None:
    noisy = clock(noise=0.1, drift=0.0)
    steps = [noisy.steps_s(w, r, h, 1, 8) / STEP_S for w in range(40) for r in range(2) for h in range(40)]
    assert fmean(steps) == pytest.approx(1.0, abs=0.01)
    assert stdev(math.log(s) for s in steps) == pytest.approx(0.1, rel=0.05)


def test_drift_is_slow_and_has_the_given_spread_in_every_round() -> None:
    fleet = load("uniform-2000")
    slow = ComputeTime(fleet, 512, 1e9, noise=0.0, drift=0.2)
    logs = {r: [math.log(slow.drift(w, r)) for w in range(2000)] for r in (0, 3, 4, 8, 9, 40)}
    for values in logs.values():
        assert stdev(values) == pytest.approx(0.2, rel=0.1)
        assert fmean(math.exp(v) for v in values) == pytest.approx(1.0, abs=0.02)
    near, far = (fmean((a + 0.02) * (b + 0.02) for a, b in zip(logs[r], logs[s], strict=True)) / 0.04 for r, s in ((3, 4), (0, 40)))
    assert near > 0.9 and abs(far) < 0.1


def test_passing_over_bytes_costs_their_time_or_nothing() -> None:
    assert ComputeTime(FLEET, 512, 1e9, codec_gbytes_per_s=2.0).span_s("decode", 4_000_000_000) == pytest.approx(2.0)
    assert ComputeTime(FLEET, 512, 1e9, codec_gbytes_per_s=math.inf).span_s("outer", 10**12) == 0.0


@pytest.mark.parametrize(
    ("name", "value"), [("noise", -0.1), ("drift", math.nan), ("sequence", 0), ("flops_per_token", 0.0), ("codec_gbytes_per_s", 0.0)]
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    arguments = {"sequence": 512, "flops_per_token": 1e9} | {name: value}
    with pytest.raises(BadInput, match=name):
        ComputeTime(FLEET, **arguments)  # type: ignore[arg-type]
