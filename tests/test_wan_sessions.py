"""When a session opens, with whom and from which state: the rules, one by one. No network, a clock of our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_toys import Desk, at, caller, spec

from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.records import Ask, Have, Plan, Publish, Session, Spec


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


def gossip(**changes: object) -> Spec:
    return spec(**{"synchronous": False, "without": "go_on", **changes})


# ---- the beginning


def test_a_run_begins_when_all_are_there_with_one_state(desk: Desk) -> None:
    for site in ("a", "b", "c"):
        desk.join(site)
    assert desk.propose("a").session is None
    assert "it begins with 3 sites" in (why := desk.propose("b").why) and "2 ask: a, b" in why and "wan.founders" in why
    first = desk.propose("c")
    all_three = Session(number=1, generation=0, epoch=3, round=0, members=(0, 1, 2), donors=(0, 1, 2), digest="00", by=None)
    assert first.session == all_three.model_copy(update={"boots": ("00000000",) * 3})
    assert desk.propose("a", number=1) == desk.propose("b", number=1) == first and not first.late
    assert desk.state().inside == {0, 1, 2}


def test_unlike_states_do_not_begin(desk: Desk) -> None:
    for site in ("a", "b", "c"):
        desk.join(site)
    desk.propose("a"), desk.propose("b")
    why = desk.propose("c", Have(round=0, digest="bad")).why
    assert "different states after 0 rounds (00: a, b; bad: c)" in why and "bootstrap" in why
    assert desk.propose("c").session is not None


def test_in_gossip_too_all_begin_alike(desk: Desk) -> None:
    for site in ("a", "b", "c"):
        desk.join(site, of=gossip())
    desk.propose("a"), desk.propose("b")
    assert "different states" in desk.propose("c", Have(round=0, digest="bad")).why
    session = desk.propose("c").session
    assert session is not None and session.digest is None and session.donors == (0, 1, 2)


def test_a_site_without_a_state_founds_nothing(desk: Desk) -> None:
    for site in ("a", "b", "c"):
        desk.join(site)
    desk.propose("a"), desk.propose("b")
    assert "2 ask: a, b; without a state: c" in desk.propose("c", None).why
    desk.join("b", boot=1, bootstrap=True, take_over=True)
    session = desk.propose("b", boot=1).session
    assert session is not None and session.members == (0, 1, 2) and session.donors == (0, 1), "those alike with the one that was told"


def test_who_is_there_without_a_word_is_not_called_missing(desk: Desk) -> None:
    desk.found()
    assert desk.propose("c", number=2).why.endswith("it needs 2 (wan.min_sites); a, b have not asked yet")
    desk.coordinator.leave(caller("a"))
    assert desk.propose("c", number=2).why.endswith("it needs 2 (wan.min_sites); without a; b has not asked yet")


def test_told_to_begin_is_not_told_to_be_alone(desk: Desk) -> None:
    desk.join("a", bootstrap=True)
    assert "without" not in desk.propose("a").why and "it needs 2 (wan.min_sites)" in desk.propose("a").why
    desk.join("b")
    assert desk.propose("b", None).session is None, "they do not know of each other"
    session = desk.propose("a").session
    assert session is not None and (session.members, session.donors) == ((0, 1), (0,))


def test_the_furthest_state_is_where_a_lost_run_begins(desk: Desk) -> None:
    for site in ("a", "b", "c"):
        desk.join(site)
    for site, round in (("a", 8), ("b", 9), ("c", 8)):
        verdict = desk.propose(site, at(round, session=4), number=5)
    assert verdict.session is not None and (verdict.session.number, verdict.session.round, verdict.session.donors) == (5, 9, (1,))


def test_one_site_alone_may_be_a_run(desk: Desk) -> None:
    desk.join("a", of=spec(seats=1, min_sites=1))
    assert desk.propose("a").session is not None


# ---- going on


def test_the_most_rounds_that_one_has_are_where_it_goes_on(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(7)), desk.propose("b", at(8))
    session = desk.propose("c", at(7)).session
    assert session is not None and (session.number, session.round, session.donors) == (2, 8, (1,))
    assert desk.state().counts["healed"] == 2


def test_all_that_are_in_it_are_waited_for(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3), number=2)
    assert "waits for c" in desk.propose("b", at(3), number=2).why
    desk.wait(90.0, "a", "b", "c")
    assert desk.state().session.number == 1
    assert desk.propose("c", at(3)).session is not None


def test_a_death_opens_it_for_the_others(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3)), desk.propose("b", at(3))
    desk.wait(11.0, "a", "b")
    assert desk.state().session.members == (0, 1) and desk.state().counts.get("late", 0) == 0


def test_whom_all_others_have_lost_is_not_waited_for(desk: Desk) -> None:
    desk.found()
    assert desk.propose("a", at(3), gone=(2,)).session is None, "the word of one is not enough"
    session = desk.propose("b", at(3), gone=(2,)).session
    assert session is not None and session.members == (0, 1)
    late = desk.propose("c", at(3), number=2)
    assert late.late and late.session == session and desk.state().counts["late"] == 1
    desk.propose("c", at(3), number=2)
    assert desk.state().counts["late"] == 1, "counted once"


def test_a_late_site_comes_back_as_one_that_heals(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3), gone=(2,)), desk.propose("b", at(3), gone=(2,))
    desk.propose("c", at(4), number=3)
    assert desk.coordinator.runs["demo"].waiting == (2,)
    desk.propose("a", at(9, 2), number=3)
    session = desk.propose("b", at(9, 2), number=3).session
    assert session is not None and (session.members, session.donors) == ((0, 1, 2), (0, 1))
    assert desk.coordinator.runs["demo"].waiting == ()


def test_what_a_site_said_before_its_lease_was_over_is_void(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3), number=2)
    desk.wait(11.0, "b", "c")
    assert desk.join("a").seat == 0 and desk.standing("a") == "in"
    desk.propose("b", at(3), number=2)
    assert "waits for a" in desk.propose("c", at(3), number=2).why, "it may have asked another one meanwhile"


def test_two_that_lose_each_other_are_no_quorum(desk: Desk) -> None:
    desk.found("a", "b", of=spec(seats=2))
    desk.propose("a", at(3), gone=(1,))
    assert "it needs 2" in desk.propose("b", at(3), gone=(0,)).why
    desk.wait(40.0, "a")
    assert desk.state().session.number == 1 and "without b" in desk.why()


def test_who_do_not_reach_each_other_are_in_no_session_together(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3), gone=(2,)), desk.propose("b", at(3))
    session = desk.propose("c", at(3), gone=(0,)).session
    assert session is not None and session.members == (0, 1)
    desk.propose("c", at(3), gone=(0,))
    assert desk.coordinator.runs["demo"].waiting == (), "nobody stops for a site that cannot be let in"
    desk.propose("c", at(3))
    assert desk.coordinator.runs["demo"].waiting == (2,)


def test_a_lonely_holder_of_the_state_is_not_left_out_for_strangers(desk: Desk) -> None:
    of = spec(seats=4, founders=2)
    desk.found("a", "b", of=of)
    desk.coordinator.leave(caller("b"))
    for site in ("b", "c", "d"):
        desk.join(site, boot=1, of=of)
    desk.propose("b", None, boot=1, number=2, gone=(0,)), desk.propose("c", None, boot=1, number=2)
    desk.propose("d", None, boot=1, number=2, gone=(0,))
    session = desk.propose("a", at(3), number=2, gone=(1, 3)).session
    assert session is not None and session.members == (0, 2)


def test_connections_that_are_on_their_way_are_waited_for(desk: Desk) -> None:
    of = spec(seats=3, founders=2)
    desk.found("a", "b", of=of)
    desk.join("c", of=of)
    desk.propose("c", None, number=2, alive=(0,))
    assert desk.coordinator.runs["demo"].waiting == (), "it does not reach b yet"
    desk.propose("a", at(3), number=2)
    assert "b, c are not connected yet" in desk.propose("b", at(3), number=2, alive=(0,)).why
    desk.wait(31.0, "a", "b", "c")
    assert desk.state().session.members == (0, 1), "as long as the deadline"


@pytest.mark.parametrize("relays", [(False, False), (True, False), (True, True)])
def test_who_can_never_reach_each_other_is_told_so_at_once(desk: Desk, relays: tuple[bool, bool]) -> None:
    of = spec(seats=2, founders=2)
    for site, relay in zip(("a", "b"), relays, strict=True):
        desk.join(site, of=of, address=None, relay=relay)
    desk.propose("a", alive=(0,))
    why = desk.propose("b", alive=(1,)).why
    if all(relays):
        assert why == "sites a, b are not connected yet"
    else:
        assert why.startswith("sites a and b only dial out, so neither reaches the other: give all sites --relay, or one of them --bind")
        desk.wait(31.0, "a", "b")
        assert desk.why() == why, "and after the deadline"
        desk.join("b", boot=1, of=of, take_over=True)
        desk.propose("b", boot=1, alive=(1,))
        assert "dial" not in desk.why()


def test_after_the_deadline_nobody_is_waited_for(desk: Desk) -> None:
    of = spec(quorum="deadline", founders=2)
    desk.found("a", "b", of=of)
    desk.join("c", of=of)
    desk.propose("c", at(3), number=2)
    desk.wait(60.0, "a", "b", "c")
    desk.propose("a", at(3), number=2)
    desk.wait(29.0, "a", "b", "c")
    assert desk.state().session.number == 1, "the deadline is not counted from a newcomer's word"
    desk.wait(2.0, "a", "b", "c")
    assert desk.state().session.members == (0, 2) and desk.state().counts["late"] == 1
    assert desk.propose("b", at(3), number=2).late and desk.state().counts["late"] == 1


def test_less_than_min_sites_never(desk: Desk) -> None:
    desk.found("a", "b", "c", of=spec(quorum="deadline"))
    desk.wait(20.0, "a")
    desk.propose("a", at(3))
    desk.wait(90.0, "a")
    assert desk.state().session.number == 1 and "without b, c" in desk.why()


def test_unlike_states_the_more_count_and_the_rest_heal(desk: Desk) -> None:
    desk.found()
    desk.propose("a", at(3)), desk.propose("b", at(3))
    session = desk.propose("c", at(3, digest="bad")).session
    assert session is not None and session.members == (0, 1, 2) and session.donors == (0, 1) and session.digest == "03"
    assert desk.state().counts["diverged"] == 1


def test_where_none_are_more_the_run_waits(desk: Desk) -> None:
    of = spec(seats=2)
    desk.found("a", "b", of=of)
    desk.propose("a", at(3), number=2)
    assert "03: a; bad: b" in desk.propose("b", at(3, digest="bad"), number=2).why
    desk.join("b", boot=1, bootstrap=True, of=of, take_over=True)
    session = desk.propose("b", at(3, digest="bad"), boot=1).session
    assert session is not None and session.donors == (1,) and session.digest == "bad"


def test_in_gossip_everybody_has_a_state_of_its_own(desk: Desk) -> None:
    desk.found("a", "b", "c", of=gossip())
    desk.propose("a", at(3, digest="a")), desk.propose("b", at(3, digest="b"))
    session = desk.propose("c", at(2, digest="c")).session
    assert session is not None and session.donors == (0, 1) and session.digest is None and session.round == 3


# ---- the rest


def test_a_plan_is_published_once(desk: Desk) -> None:
    desk.found()
    mine, other = (Plan(version=1, since=5, body=text) for text in ("mine", "other"))
    assert desk.coordinator.publish(Publish(caller=caller("a"), plan=mine)).plan == mine
    assert desk.coordinator.publish(Publish(caller=caller("b"), plan=other)).plan == mine
    with pytest.raises(Refused, match="the next one is 2"):
        desk.coordinator.publish(Publish(caller=caller("b"), plan=Plan(version=3, since=5, body="x")))
    desk.restart()
    assert desk.coordinator.plan(caller("c")).plan == mine
    desk.join("b", boot=1, take_over=True)
    with pytest.raises(Refused, match="in no session"):
        desk.coordinator.publish(Publish(caller=caller("b", 1), plan=Plan(version=2, since=5, body="x")))


def test_the_status_tells_who_lags_and_heals(desk: Desk) -> None:
    desk.found()
    desk.beat("a", round=9), desk.beat("b", round=4)
    (run,) = desk.coordinator.status(Ask(run="demo")).runs
    assert [(s.standing, s.lag) for s in run.sites] == [("in", 0), ("in", 5), ("in", 9)] and run.newest == 9
    desk.propose("a", at(9)), desk.propose("b", at(8))
    desk.propose("c", at(8))
    (run,) = desk.coordinator.status(Ask(run="demo")).runs
    assert [s.standing for s in run.sites] == ["in", "healing", "healing"] and [s.number for s in run.sessions] == [2, 1]
    desk.wait(11.0, step_s=3.0)
    desk.join("a", boot=1)
    (run,) = desk.coordinator.status(Ask(run="demo")).runs
    assert [s.standing for s in run.sites] == ["waiting", "out", "out"] and run.counts["expiries"] == 3
    with pytest.raises(Refused, match="there are: demo"):
        desk.coordinator.status(Ask(run="other"))


def test_a_full_disk_changes_nothing(desk: Desk) -> None:
    desk.found()
    before, pages = desk.state(), desk.db._db.execute("PRAGMA page_count").fetchone()[0]
    desk.db._db.execute(f"PRAGMA max_page_count = {pages}")

    def crowd() -> None:
        for k in range(100):
            desk.join("a", of=spec(f"run-{k}"))

    with pytest.raises(Refused, match="could not write") as refused:
        crowd()
    assert refused.value.code == "disk" and refused.value.refusal.retry_s is not None
    assert [state.spec.run for state in desk.db.runs()] == sorted(desk.coordinator.runs)
    desk.db._db.execute("PRAGMA max_page_count = 1000000")
    assert desk.state() == before
    assert desk.go_on("a", "b", "c", have=at(3)).number == 2
