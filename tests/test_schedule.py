"""Schedules: end points, monotony, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.errors import BadInput
from gossamer.core.schedule import SCHEDULES, WSD, Constant, Cosine, schedule_named

ALL = [Constant(), Cosine(), Cosine(0.0, 0.5, 0.0), WSD(), WSD(0.0, 1.0, 0.2, 0.1), WSD(0.5, 0.5), WSD(0.1, 0.0)]


@given(st.sampled_from(ALL), st.floats(0, 1), st.floats(1, 1e13))
def test_depends_on_progress_only_and_stays_in_range(schedule, progress, total):
    value = schedule.factor(progress * total, total)
    assert 0.0 <= value <= 1.0
    assert value == pytest.approx(schedule.factor(progress, 1.0), abs=1e-9)


@pytest.mark.parametrize("schedule", ALL)
def test_keeps_its_last_value_past_the_end(schedule):
    assert schedule.factor(2e6, 1e6) == schedule.factor(1e6, 1e6)


def test_cosine_end_points():
    s = Cosine(warmup=0.25, start=0.02, floor=0.3)
    assert s.factor(0, 400) == pytest.approx(0.02)
    assert s.factor(50, 400) == pytest.approx(0.51)
    assert s.factor(100, 400) == 1.0
    assert s.factor(250, 400) == pytest.approx(0.65)  # half way down
    assert s.factor(400, 400) == pytest.approx(0.3)


def test_wsd_end_points():
    s = WSD(warmup=0.1, decay=0.5, start=0.0, floor=0.2)
    assert [s.factor(t, 100) for t in (0, 5, 10, 30, 50, 75, 100)] == pytest.approx([0, 0.5, 1, 1, 1, 0.6, 0.2])


@pytest.mark.parametrize("schedule", [Cosine(), WSD()])
def test_rises_then_falls(schedule):
    values = [schedule.factor(t, 1000) for t in range(1001)]
    top = values.index(max(values))
    assert values[:top] == sorted(values[:top]) and values[top:] == sorted(values[top:], reverse=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cosine(warmup=1.0),
        lambda: Cosine(floor=-0.1),
        lambda: Cosine(start=1.5),
        lambda: WSD(warmup=0.6, decay=0.6),
        lambda: WSD(decay=float("nan")),
        lambda: Cosine().factor(1, 0),
    ],
)
def test_refuses(make):
    with pytest.raises(BadInput, match=r"expected|more than the whole run"):
        make()


def test_by_name():
    assert schedule_named("wsd", {"decay": 0.1}) == WSD(decay=0.1)
    assert {type(schedule_named(name)) for name in SCHEDULES} == {Constant, Cosine, WSD}
    with pytest.raises(BadInput, match="did you mean 'cosine'"):
        schedule_named("cosin")
    with pytest.raises(BadInput, match="did you mean 'warmup'"):
        schedule_named("cosine", {"warm_up": 0.1})
