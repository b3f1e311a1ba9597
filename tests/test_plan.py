"""Plans: whole steps in proportion to speed, none below one, the total kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.errors import BadInput
from gossamer.core.plan import Plan, proportional, uniform
from gossamer.recipes import Setting, dadam, ddp, diloco, halos

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20)


def test_tokens_are_steps_times_batch_times_sequence() -> None:
    plan = Plan((3, 5), (2, 4), sequence=10)
    assert (plan.n, plan.tokens(0), plan.tokens(1), plan.tokens_per_round) == (2, 60, 200, 260)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((0, 1), (1, 1), 8), "worker 0 has H = 0"),
        (((1, 1), (1, 0), 8), "worker 1 has H = 1 steps of B = 0"),
        (((1,), (1, 1), 8), "1 step counts and 2 batch sizes"),
        (((), (), 8), "0 step counts"),
        (((1,), (1,), 0), "0 tokens"),
    ],
)
def test_impossible_plans_are_refused(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Plan(*fields)


@given(SPEEDS, st.integers(1, 200))
def test_proportional_keeps_the_total_and_is_near_the_share(speeds: list[float], steps: int) -> None:
    plan = proportional(speeds, steps, batch=4, sequence=8)
    n = len(speeds)
    assert sum(plan.steps) == n * steps and min(plan.steps) >= 1 and plan.batch == (4,) * n
    above = [i for i in range(n) if plan.steps[i] > 1]
    if len(above) == n:  # nobody was lifted to one step
        shares = [n * steps * v / sum(speeds) for v in speeds]
        if min(shares) >= 1:
            assert all(abs(h - s) < 1 + 1e-6 for h, s in zip(plan.steps, shares, strict=True))
    for i in range(n):  # a faster worker never gets less
        for j in range(n):
            if speeds[i] > speeds[j]:
                assert plan.steps[i] >= plan.steps[j]


@given(st.floats(1e-6, 1e6), st.integers(1, 30), st.integers(1, 500))
def test_equal_speeds_give_the_uniform_plan(speed: float, n: int, steps: int) -> None:
    assert proportional([speed] * n, steps, 2, 16) == uniform(n, steps, 2, 16)


@given(SPEEDS, st.integers(1, 50))
def test_only_ratios_of_speeds_matter(speeds: list[float], steps: int) -> None:
    assert proportional(speeds, steps, 1, 1) == proportional([4.0 * v for v in speeds], steps, 1, 1)


def test_a_very_slow_worker_gets_one_step_and_the_others_share_the_rest() -> None:
    assert proportional([1.0, 1.0, 1e-9], steps=3, batch=1, sequence=1).steps == (4, 4, 1)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_must_be_a_number_above_zero(speed: float) -> None:
    with pytest.raises(BadInput, match="speed of worker 1"):
        proportional([1.0, speed], 3, 1, 1)


@given(st.lists(st.floats(1.0, 1e3), min_size=1, max_size=8), st.integers(1, 40))
def test_carried_steps_add_up_to_the_exact_ones(exact: list[float], rounds: int) -> None:
    n = len(exact)
    plan = Plan((1,) * n, (2,) * n, 8, exact=tuple(exact))
    of = [plan.at(t) for t in range(rounds)]
    assert all(p.exact == () and min(p.steps) >= 1 for p in of)
    for i, h in enumerate(exact):
        assert abs(sum(p.steps[i] for p in of) - h * rounds) <= 0.5 + 1e-6
        assert {p.steps[i] for p in of} <= {int(h) - 1, int(h), int(h) + 1}
    assert plan.at(3) == plan.at(3)
    assert Plan((3, 4), (2, 2), 8).at(5) == Plan((3, 4), (2, 2), 8)


def test_exact_steps_fit_the_plan() -> None:
    with pytest.raises(BadInput, match="exact step counts"):
        Plan((3, 4), (2, 2), 8, exact=(3.5,))
    with pytest.raises(BadInput, match="1 or more"):
        Plan((3, 4), (2, 2), 8, exact=(3.5, 0.5))


@given(st.lists(st.tuples(st.floats(1.0, 50.0), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 40))
def test_tokens_of_carried_steps_are_those_of_the_rounds(workers: list[tuple[float, int]], rounds: int) -> None:
    exact, batch = zip(*workers, strict=True)
    plan = Plan((1,) * len(exact), batch, 8, exact=exact)
    assert plan.tokens_before(rounds) == sum(plan.at(t).tokens_per_round for t in range(rounds))
    assert Plan((2,) * len(exact), batch, 8).tokens_before(rounds) == rounds * 2 * sum(batch) * 8


def test_a_schedule_ends_with_the_tokens_of_carried_steps() -> None:
    """Not with those of the rounded plan, which may be far from them where batches are unlike."""
    plan = Plan((1, 4), (4, 8), 16, exact=(1.5, 4.25))
    method = diloco(Setting(plan, rounds=40))
    assert method.total_tokens == plan.tokens_before(40) == 40 * 640 != 40 * plan.tokens_per_round


@pytest.mark.parametrize("make", [ddp, dadam])
def test_one_step_a_round_is_one_where_steps_are_carried(make: Any) -> None:
    method = make(Setting(Plan((3, 3, 3), (2, 2, 2), 16, exact=(3.0, 3.0, 3.0)), rounds=4))
    assert method.rounds == 12 and all(method.plan.at(t).steps == (1, 1, 1) for t in range(12))


def test_a_block_of_halos_is_what_its_speed_says_where_steps_are_carried() -> None:
    assert halos(Setting(Plan((3, 3), (2, 2), 16, exact=(3.5, 2.5)), rounds=4)).plan.at(5).steps == (8, 8)
