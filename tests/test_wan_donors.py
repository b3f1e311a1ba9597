"""Who may give state, how a run begins again, and what counts of the time without the coordinator: the rules, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_toys import X0, Desk, at, caller, spec

from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.records import HandIn, Have, Session


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


# ---- who may give state


def test_who_was_never_in_sync_gives_nothing_and_forms_nothing(desk: Desk) -> None:
    of = spec(seats=4, founders=2, without="elect")
    desk.found("a", "b", of=of)
    for site in ("c", "d"):
        desk.join(site, bootstrap=True, of=of)
        desk.propose(site, Have(round=99, digest="ff", session=1), number=2, alive=(0, 1, 2, 3))
    desk.wait(60.0, "c", "d")
    assert desk.state().session.number == 1
    assert "too few to go on, without a, b" in desk.why(), "not even when told to: they never had the state of this run"


def test_a_site_that_got_the_state_may_give_it(desk: Desk) -> None:
    of = spec(seats=3, founders=2)
    desk.found("a", "b", of=of)
    desk.join("c", of=of)
    desk.propose("c", None), desk.propose("a", at(3))
    session = desk.propose("b", at(3)).session
    assert session is not None and session.donors == (0, 1)
    desk.propose("a", None, number=3), desk.propose("b", None, number=3)
    assert "nobody is here who held" in desk.propose("c", X0, number=3).why, "it has not got it"
    session = desk.propose("c", at(3, 2), number=3).session
    assert session is not None and session.donors == (2,)


def test_a_state_of_another_branch_is_none(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3), gone=(2,)), desk.propose("b", at(3), gone=(2,))
    desk.propose("c", at(60), number=3), desk.propose("a", at(5, 2), number=3)
    session = desk.propose("b", at(5, 2), number=3).session
    assert session is not None and session.round == 5 and session.donors == (0, 1), "however far it went"


# ---- all gone, and back


def gone(desk: Desk, **changes: object) -> None:
    desk.found(of=spec(**changes))
    desk.go_on("a", "b", "c", have=at(3))
    desk.wait(60.0)
    assert desk.state().living == ()
    for site in ("a", "b", "c"):
        desk.join(site, boot=1, of=spec(**changes))


def test_a_fleet_that_comes_back_begins_where_the_best_was(desk: Desk) -> None:
    gone(desk)
    desk.propose("a", at(8, 2), boot=1), desk.propose("b", at(8, 2), boot=1)
    desk.wait(1.0)
    assert desk.state().session.number == 2 and "c may have the latest" in desk.why()
    session = desk.propose("c", at(9, 2), boot=1).session
    assert session is not None and (session.number, session.generation, session.round, session.donors) == (3, 1, 9, (2,))


def test_a_later_session_counts_for_more_than_rounds(desk: Desk) -> None:
    gone(desk)
    desk.propose("a", at(50, 1), boot=1), desk.propose("b", at(4, 2), boot=1)
    session = desk.propose("c", None, boot=1).session
    assert session is not None and session.round == 4 and session.donors == (1,)


def test_more_than_half_begin_again_after_the_deadline(desk: Desk) -> None:
    gone(desk)
    desk.coordinator.leave(caller("c", 1))
    for _ in range(40):
        for site in ("a", "b"):
            desk.beat(site, boot=1)
            desk.propose(site, at(8, 2), boot=1) if desk.state().session.number == 2 else None
        desk.wait(1.0)
    session = desk.state().session
    assert session.number == 3 and session.members == (0, 1) and session.generation == 1 and session.round == 8


def test_but_not_from_what_is_older_than_the_session(desk: Desk) -> None:
    gone(desk)
    desk.coordinator.leave(caller("c", 1))
    for _ in range(60):
        for site in ("a", "b"):
            desk.beat(site, boot=1)
            desk.propose(site, at(2, 1), boot=1)
        desk.wait(1.0)
    assert desk.state().session.number == 2
    desk.join("b", boot=2, bootstrap=True, take_over=True)
    session = desk.propose("b", at(2, 1), boot=2).session
    assert session is not None and session.members == (0, 1) and session.round == 2, "unless one is told to"


def test_the_state_of_a_process_that_lives_is_waited_for(desk: Desk) -> None:
    desk.found()
    desk.go_on("a", "b", "c", have=at(3))
    for site in ("b", "c"):
        desk.join(site, boot=1, bootstrap=True, take_over=True)
        desk.propose(site, at(3, 2), boot=1)
    desk.wait(5.0, "a")
    assert desk.state().session.number == 2 and "waits for a" in desk.why()
    session = desk.propose("a", at(9, 2)).session
    assert session is not None and session.round == 9 and session.donors == (0,) and session.generation == 0


# ---- without the coordinator


def handed(desk: Desk, site: str, session: Session) -> None:
    desk.coordinator.hand_in(HandIn(caller=caller(site), session=session))


def elected(number: int, *members: int, round: int = 5, by: int = 0) -> Session:
    return Session(number=number, generation=0, epoch=3, round=round, members=members, donors=members, digest="05", by=by)


def test_half_is_enough_for_the_coordinator(desk: Desk) -> None:
    of = spec(seats=4, without="elect", quorum="deadline")
    desk.found("a", "b", "c", "d", of=of)
    desk.wait(20.0, "a")
    desk.join("b", of=of)
    desk.propose("a", at(3), gone=(2, 3)), desk.propose("b", at(3), gone=(2, 3))
    assert desk.state().session.members == (0, 1)


def test_but_not_less(desk: Desk) -> None:
    of = spec(seats=5, without="elect", quorum="deadline")
    desk.found("a", "b", "c", "d", "e", of=of)
    desk.wait(20.0, "a", "b")
    desk.propose("a", at(3)), desk.propose("b", at(3))
    assert desk.state().session.number == 1 and "2 of the 5 sites" in desk.why() and "without c, d, e" in desk.why()
    for site in ("c", "d"):
        desk.join(site, of=of)
        desk.coordinator.leave(caller(site))
    assert desk.propose("a", at(3), number=2).session is not None, "who has left, of its own will, is not counted"


def test_a_majority_is_of_the_last_that_was_entered(desk: Desk) -> None:
    of = spec(seats=5, without="elect", quorum="deadline")
    desk.found("a", "b", "c", "d", "e", of=of)
    for site in ("a", "b", "c"):
        verdict = desk.propose(site, at(3), gone=(3, 4), number=2)
    assert verdict.session is not None and verdict.session.members == (0, 1, 2)
    for site in ("a", "b"):
        desk.propose(site, at(3), gone=(2, 3, 4), number=3)
    assert desk.state().session.number == 2, "c may be with d and e"
    desk.beat("c", entered=2)
    assert desk.propose("a", at(3), gone=(2, 3, 4), number=3).session is not None


def test_sessions_from_the_time_without_the_coordinator_count(desk: Desk) -> None:
    desk.found(of=spec(without="elect"))
    desk.restart()
    two = elected(2, 0, 1)
    handed(desk, "a", two)
    handed(desk, "b", two)
    assert desk.state().session == two and desk.state().inside == {0, 1} and desk.state().counts["handed_in"] == 1
    late = desk.propose("c", at(3), number=2)
    assert late.late and late.session == two
    desk.go_on("a", "b", have=at(6, 2))
    handed(desk, "b", two)
    assert desk.state().session.number == 3, "an old one that is known says nothing"


def test_one_that_nobody_entered_gives_way(desk: Desk) -> None:
    desk.found(of=spec(without="elect"))
    desk.propose("a", at(3)), desk.propose("b", at(3))
    assert desk.propose("c", at(3)).session is not None
    handed(desk, "a", elected(2, 0, 1))
    assert desk.state().session == elected(2, 0, 1) and desk.state().counts["replaced"] == 1


def test_a_fleet_that_fell_in_two_is_told(desk: Desk) -> None:
    desk.found(of=spec(without="elect"))
    desk.go_on("a", "b", "c", have=at(3))
    with pytest.raises(Refused, match=r"session 2, as site a has it \(sites a, b\) is not what the run did") as refused:
        handed(desk, "a", elected(2, 0, 1))
    assert refused.value.code == "conflict"
    with pytest.raises(Refused, match="itself is in"):
        handed(desk, "c", elected(3, 0, 1))


def test_nobody_opens_for_a_coordinator_that_is_waited_for(desk: Desk) -> None:
    desk.found()
    with pytest.raises(Refused, match="nobody else opens"):
        handed(desk, "a", elected(2, 0, 1, 2))


def test_a_coordinator_without_its_file_takes_the_session_that_runs(desk: Desk) -> None:
    for site in ("b", "a", "c"):
        desk.join(site)
    session = elected(7, 0, 1, 2).model_copy(update={"boots": ("00000000", "00000000", "0000000f")})
    handed(desk, "a", session)
    assert desk.state().session == session and desk.state().inside == {0, 1}, "that was another process of c"
    desk.beat("b", entered=7), desk.beat("c", entered=7)
    assert desk.state().inside == {0, 1}


def test_who_knows_more_than_the_coordinator_hands_it_in_first(desk: Desk) -> None:
    desk.found(of=spec(without="elect"))
    with pytest.raises(Refused, match="knows of session 4"):
        desk.propose("a", at(3, 4), number=5)


def test_what_was_proposed_before_a_sleep_is_void(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3)), desk.propose("b", at(3))
    desk.clock.now_s += 3600.0
    assert desk.propose("c", at(3)).session is None, "the others may have gone on without this coordinator"
    desk.propose("a", at(3))
    assert desk.propose("b", at(3)).session is not None


def test_nobody_stops_for_one_that_will_not_have_them(desk: Desk) -> None:
    desk.found("a", "b", "c")
    desk.go_on("a", "b", have=at(3), gone=(2,))
    for gone, waiting in (((0,), ()), ((), (2,))):
        desk.propose("c", at(2), gone=gone, alive=(0, 1, 2))
        desk.coordinator.tick()
        assert desk.coordinator.runs["demo"].waiting == waiting
