"""One deadline from what was observed, and the time-outs that derive from it."""

from __future__ import annotations

import pytest

from gossamer.core.errors import BadInput
from gossamer.wan.deadlines import Deadline, Timeouts


def test_the_deadline_follows_the_arrivals() -> None:
    deadline = Deadline(1.0, spread=6.0)
    for s in (3.0, 3.0, 3.0, 3.0):
        deadline.arrived(s)
    assert deadline.seconds == 1.0, "four are too few to go by"
    deadline.arrived(4.0)
    assert deadline.seconds == 3.0
    for s in (5.0, 6.0, 7.0, 8.0):
        deadline.arrived(s)
    assert deadline.seconds == 4.0 + 6.0 * 1.0  # median 4; distances 0 1 1 1 1 1 2 3 4
    for _ in range(100):
        deadline.arrived(500.0)
    assert deadline.seconds == 500.0, "most are that slow now"
    for _ in range(128):
        deadline.arrived(0.001)
    assert deadline.seconds == 1.0, "never below the floor"


def test_a_deadline_that_cuts_everybody_off_grows() -> None:
    deadline, seen = Deadline(1.0), []
    for _ in range(400):
        seen.append(deadline.seconds)
        if deadline.seconds < 40.0:
            deadline.missed(deadline.seconds)
        else:
            deadline.arrived(40.0)
    assert seen[-1] >= 40.0


def test_one_slow_site_of_four_does_not_stretch_it() -> None:
    deadline = Deadline(1.0)
    for _ in range(20):
        for s in (2.0, 2.1, 2.2, 60.0):
            deadline.arrived(s)
    assert deadline.seconds < 4.0


@pytest.mark.parametrize(
    "change, words",
    [({"lease_s": 16.0}, "more than half of the deadline"), ({"beat_s": 4.0}, "two lost ones"), ({"call_s": 11.0}, "longer than the lease"),
     ({"connect_s": 2.0}, "would not be waited for"), ({"lease_s": -1.0}, "above 0"), ({"beat_s": float("nan")}, "above 0")],
)  # fmt: skip
def test_time_outs_that_do_not_go_together(change: dict[str, float], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Timeouts.of(30.0, **change)


def test_every_time_out_is_in_the_table_and_grows_with_the_deadline() -> None:
    one, ten = Timeouts.of(30.0), Timeouts.of(300.0)
    rows = one.table().splitlines()[1:]
    assert len(rows) == len(one.__dataclass_fields__)
    for name in one.__dataclass_fields__:
        assert getattr(ten, name) == pytest.approx(10 * getattr(one, name)), name
        assert f"{getattr(one, name):.3f}" in next(row for row in rows if row.split()[0] == name)
