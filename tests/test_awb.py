"""Adaptive workload balancing: whole steps, one round time, memory respected, links paid for."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gossamer.app.config import load as config_of
from gossamer.app.job import Job, resolve
from gossamer.app.workload import micro_batch, plan_of
from gossamer.core.awb import Balance, balance, continuous, knee
from gossamer.core.errors import BadInput
from gossamer.core.plan import uniform

SEQUENCE = 16
WORKER = st.tuples(st.floats(1e-3, 1e3), st.integers(1, 32), st.floats(0, 1e3))
"""t_i, B_i, c_i."""
FLEETS = st.lists(WORKER, min_size=1, max_size=12)


def solved(workers: list[tuple[float, int, float]], sequences: int) -> Balance:
    t, b, c = (tuple(column) for column in zip(*workers, strict=True))
    tokens = sequences * SEQUENCE
    return Balance(t, c, balance(t, b, c, tokens, SEQUENCE), tokens)


def by_hand(workers: list[tuple[float, int, float]], sequences: int) -> tuple[int, ...]:
    """The definition, one step at a time, in exact arithmetic."""
    exact = [(Fraction(t), b, Fraction(c)) for t, b, c in workers]
    steps = [1] * len(workers)
    total = sum(b for _, b, _ in workers)
    while total < sequences:
        i = min(range(len(steps)), key=lambda i: (exact[i][2] + (steps[i] + Fraction(1, 2)) * exact[i][0], i))
        if total + exact[i][1] - sequences >= sequences - total:
            break
        steps[i], total = steps[i] + 1, total + exact[i][1]
    return tuple(steps)


@given(FLEETS, st.integers(1, 400))
def test_steps_are_dealt_out_in_the_order_in_which_they_are_due(workers: list[tuple[float, int, float]], sequences: int) -> None:
    assert solved(workers, sequences).plan.steps == by_hand(workers, sequences)


@given(FLEETS, st.integers(1, 100_000))
def test_tokens_are_as_near_as_one_step_of_one_worker(workers: list[tuple[float, int, float]], sequences: int) -> None:
    b = solved(workers, sequences)
    batches = [w[1] for w in workers]
    assert min(b.plan.steps) >= 1 and b.plan.batch == tuple(batches)
    if sequences >= sum(batches):
        assert 2 * abs(b.tokens_off) <= max(batches) * SEQUENCE
    else:
        assert set(b.plan.steps) == {1}


@given(FLEETS, st.integers(1, 1000))
def test_nobody_waits_longer_than_one_step_of_the_slowest(workers: list[tuple[float, int, float]], sequences: int) -> None:
    b = solved(workers, sequences)
    taken = [(c + h * t, h, t) for (t, _, c), h in zip(workers, b.plan.steps, strict=True)]
    free = [end_s for end_s, h, _ in taken if h > 1]  # one step is the least: who is late with it cannot be helped
    assume(free)
    assert max(free) - min(end_s for end_s, _, _ in taken) <= max(t for _, _, t in taken) * (1 + 1e-9)


@given(FLEETS, st.integers(1, 1000), st.integers(0, 11), st.floats(0, 1e3))
def test_a_dearer_link_never_gives_more_steps(workers: list[tuple[float, int, float]], sequences: int, who: int, more: float) -> None:
    who %= len(workers)
    dearer = [(t, b, c + more if i == who else c) for i, (t, b, c) in enumerate(workers)]
    assert solved(dearer, sequences).plan.steps[who] <= solved(workers, sequences).plan.steps[who]


@given(st.floats(1e-6, 1e6), st.floats(0, 1e6), st.integers(1, 64), st.integers(1, 30), st.integers(1, 300))
def test_equal_workers_get_the_uniform_plan(step_s: float, unhidden_s: float, batch: int, n: int, steps: int) -> None:
    plan = uniform(n, steps, batch, SEQUENCE)
    assert balance([step_s] * n, [batch] * n, [unhidden_s] * n, plan.tokens_per_round, SEQUENCE) == plan


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=12), st.integers(1, 100), st.integers(1, 32))
def test_with_equal_batches_the_tokens_are_met_exactly(workers: list[tuple[float, float]], steps: int, batch: int) -> None:
    tokens = len(workers) * steps * batch * SEQUENCE
    times, waits = zip(*workers, strict=True)
    assert balance(times, [batch] * len(workers), waits, tokens, SEQUENCE).tokens_per_round == tokens


@given(FLEETS, st.integers(1, 1000))
def test_only_differences_of_exchange_times_matter(workers: list[tuple[float, int, float]], sequences: int) -> None:
    whole = [(float(Fraction(round(t * 64) + 1, 64)), b, float(round(c))) for t, b, c in workers]  # sums of these are exact
    assert solved([(t, b, c + 256.0) for t, b, c in whole], sequences).plan == solved(whole, sequences).plan


@given(FLEETS, st.integers(1, 1000))
def test_the_continuous_optimum_solves_its_equation(workers: list[tuple[float, int, float]], sequences: int) -> None:
    t, b, c = zip(*workers, strict=True)
    assume(sequences > sum(b))
    at_s = continuous(t, b, c, sequences)
    total = sum(max(1.0, (at_s - ci) / ti) * bi for ti, bi, ci in workers)
    assert total == pytest.approx(sequences, rel=1e-6)


@given(FLEETS, st.integers(1, 1000))
def test_whole_steps_never_gain(workers: list[tuple[float, int, float]], sequences: int) -> None:
    """Also where more tokens are planned than asked for, since nobody takes less than a step."""
    balanced = solved(workers, sequences)
    assert balanced.loss >= 0.0 and balanced.round_s >= balanced.ideal_s * (1 - 1e-9)


def test_the_loss_of_whole_steps_is_told() -> None:
    """Two workers, 3 : 2 in speed, 5 steps in a round: 3 and 2 lose nothing, and 4 steps in all cannot be cut so."""
    assert solved([(2.0, 1, 0.0), (3.0, 1, 0.0)], 5).loss == pytest.approx(0.0)
    four = solved([(2.0, 1, 0.0), (3.0, 1, 0.0)], 4)
    assert four.plan.steps == (2, 2) and four.loss == pytest.approx(6 / (4 / (1 / 2 + 1 / 3)) - 1)
    assert (four.round_s, four.spread_s, four.tokens_off) == (6.0, 2.0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 0.0], [1, 1], [0.0, 0.0], 10, 1), "worker 1 takes 0.0 s"),
        (([1.0, float("nan")], [1, 1], [0.0, 0.0], 10, 1), "worker 1 takes nan s"),
        (([1.0], [1], [-1.0], 10, 1), "exchange of worker 0 takes -1.0 s"),
        (([1.0], [1, 1], [0.0], 10, 1), "1 step times, 2 batch sizes"),
        (([1.0], [0], [0.0], 10, 1), "B = 0"),
        (([1.0], [1], [0.0], 0, 1), "0 tokens a round"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[list[float], list[int], list[float], int, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        balance(*arguments)


@given(st.floats(0, 10), st.floats(1e-3, 10), st.integers(1, 64), st.integers(0, 64), st.floats(0.1, 1.0))
def test_the_knee_is_the_smallest_batch_that_is_nearly_the_best(t0: float, per: float, least: int, more: int, share: float) -> None:
    most = least + more

    def rate(b: int) -> float:
        return b / (t0 + per * b)

    found = knee(lambda b: t0 + per * b, least, most, share)
    best = max(rate(b) for b in range(least, most + 1))
    assert least <= found <= most and rate(found) >= share * best
    assert found == least or rate(found - 1) < share * best


# In a job: the batch by memory, the steps by what the exchange leaves


def job(*sets: str, fleet: str = "azure-4") -> Job:
    return resolve(config_of(sets=["plan.name=awb", f"fleet.name={fleet}", *sets]))


def test_awb_of_equal_workers_is_the_uniform_plan() -> None:
    for method in ("diloco", "geomesh", "gasloc"):
        assert job(f"method.name={method}", fleet="uniform-6").method.plan == uniform(6, 30, 8, 128)


CHARGED = ("clock.charge_as=llama-150m", "clock.charge_tokens=65536")


def test_a_batch_leaves_the_headroom_of_every_memory_free() -> None:
    roomy, tight, less = job(*CHARGED), job(*CHARGED, "plan.headroom=0.4"), job(*CHARGED, "plan.batch_max=64", "plan.headroom=0.3")
    for j, headroom in ((roomy, 0.1), (tight, 0.4), (less, 0.3)):
        memory = j.charged.footprint(j.method)
        for i, b in enumerate(j.method.plan.batch):
            site = j.fleet.site(i)
            assert memory.step_gb(site, b * j.charged.sequence) <= (1 - headroom) * site.limit_gb
            fits = memory.batch_max(site, j.charged.sequence, headroom)
            assert fits is not None and (b == 8 or b == fits < 8)
    assert roomy.method.plan.batch[0] == 8 > tight.method.plan.batch[2] >= 1, "80 GB hold what 48 GB do not"
    for j in (roomy, tight):
        asked = 4 * 30 * 8 * 128
        assert 2 * abs(j.method.plan.tokens_per_round - asked) <= max(j.method.plan.batch) * 128


def test_a_measured_memory_goes_before_the_estimate() -> None:
    j = job()
    measured = replace(j.fleet.sites[0], memory_gb=((128, 10.0), (256, 20.0)), memory_limit_gb=40.0)  # 10 GB a sequence
    fleet = replace(j.fleet, sites=(measured, *j.fleet.sites[1:]))
    plan = plan_of(j.config, fleet, j.layout, j.charged, lambda p: replace(j.method, plan=p))
    assert plan.batch == (3, 8, 8, 8)
    assert micro_batch(j.config, measured, batch=8) == 3, "a plan that asks for more is cut"
    assert micro_batch(j.config, measured, batch=3) is None and micro_batch(j.config, j.fleet.sites[1], batch=8) is None


def test_more_sequences_are_taken_only_where_they_are_faster() -> None:
    """azure-4 pays 5 ms a step: a tiny model is far below its knee at 8 sequences, a charged 150M at 65,536 tokens is past it."""
    assert min(job("plan.batch_max=32").method.plan.batch) > 8
    assert max(job(*CHARGED, "plan.batch_max=32").method.plan.batch) == 8


def test_a_slow_line_takes_fewer_steps_unless_the_exchange_is_hidden() -> None:
    line = job("method.name=diloco", *CHARGED, fleet="straggler-8").method.plan
    assert line.steps[7] < min(line.steps[:7])
    hidden = job("method.name=geomesh", "method.exchange=shard", "method.overlap=0.5", *CHARGED, fleet="straggler-8").method.plan
    assert len(set(hidden.steps)) == 1


def test_a_batch_limit_below_the_batch_is_refused() -> None:
    with pytest.raises(BadInput, match=r"plan.batch_max = 4 is below plan.batch = 8"):
        job("plan.batch_max=4")
