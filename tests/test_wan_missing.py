"""What a site says of others while no session opens: who has left of its own will, and who of these is back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from coordinator_toys import caller, spec

from gossamer.app.wan.apart import Missing
from gossamer.app.wan.presence import Where
from gossamer.app.wan.waiting import Entrance
from gossamer.wan.roster import membership
from gossamer.wan.roster.membership import Membership
from gossamer.wan.roster.records import PROTOCOL, Card, Join, Member
from gossamer.wan.roster.sessions import NotYet

NAMES = {0: "lyon", 1: "oslo", 2: "porto"}


def called(seat: int) -> str:
    return f"site {NAMES[seat]}"


def listed(there: tuple[int, ...], left: tuple[int, ...] = ()) -> list[Member]:
    """As the roster has them."""
    return [Member(site=NAMES[j], seat=j, boot="0" * 32, card=Card(address=None), there=j in there, left=j in left) for j in NAMES]


def test_who_leaves_is_said_though_no_session_opens_without_it() -> None:
    said: list[str] = []
    missing = Missing(said.append, called)
    missing.listed(listed((0,), left=(1, 2)))
    assert not said, "of no session yet"
    missing.met((0, 1, 2))
    missing.listed(listed((0, 1, 2)))
    missing.listed(listed((0, 1)))
    assert not said, "who is out, and has not left, is not said to have"
    for _ in range(2):
        missing.listed(listed((0, 1), left=(2,)))
    assert said == ["site porto has left"]
    for _ in range(2):
        missing.listed(listed((0, 1, 2)))
    missing.met((0, 1, 2))
    assert said == ["site porto has left", "site porto is back"]
    missing.lost(1, "round 7: cut", "the others go on")
    missing.listed(listed((0,), left=(1, 2)))
    missing.met((0, 1, 2))
    assert said[2:] == [
        "site oslo is gone (round 7: cut): the others go on", "site porto has left", "site oslo is back", "site porto is back",
    ]  # fmt: skip


def test_a_site_that_waits_tells_who_has_left_and_its_coordinator_knows() -> None:
    """Of one that has left, and of one whose lease was over."""
    state = Membership(spec=spec(), seed=0)
    for site in ("lyon", "oslo", "porto"):
        state = membership.join(state, Join(protocol=PROTOCOL, spec=spec(), caller=caller(site), card=Card(address=None)))
    state = membership.leave(membership.expire(state, ["porto"]), caller("oslo"))
    assert [(m.there, m.left) for m in state.members] == [(True, False), (False, True), (False, False)]
    said: list[str] = []
    missing, opened = Missing(said.append, called), object()
    missing.met((0, 1, 2))
    answers: list[Any] = [NotYet("", "it needs 3; without oslo"), NotYet("", "it needs 3; without oslo"), opened]

    def open(have: object, timeout_s: float) -> Any:
        if isinstance(answer := answers.pop(0), NotYet):
            raise answer
        return answer

    client: Any = SimpleNamespace(roster=state.roster(), spec=spec(), news=SimpleNamespace(plan=0))
    sessions: Any = SimpleNamespace(open=open)
    entrance = Entrance(client, sessions, Where("lyon", "127.0.0.1:1"), said.append, missing, lambda: None)
    assert entrance.open(None) is opened
    assert said[0] == "site oslo has left" and len(said) == 2 and "it needs 3; without oslo" in said[1]
    again = membership.join(state, Join(protocol=PROTOCOL, spec=spec(), caller=caller("oslo"), card=Card(address=None)))
    assert [(m.there, m.left) for m in again.members] == [(True, False), (True, False), (False, False)]
