"""Who is in a run, by the rules and a clock of our own: no network here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_toys import X0, Clock, Desk, caller, spec

from gossamer.core.errors import BadInput
from gossamer.wan.leases import Leases
from gossamer.wan.ledgerdb import LedgerDB
from gossamer.wan.membership import check_spec
from gossamer.wan.messages import Refused, unpack
from gossamer.wan.records import Commit, HandIn, Have, Join, Promise, Roster, Share, Spec


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


# ---- the beginning


def test_a_run_begins_when_all_are_there_with_one_state(desk: Desk) -> None:
    assert [desk.join(s).seat for s in ("a", "b")] == [0, 1]
    assert desk.state().founded is None and "2 of 3" in desk.state().why
    admission = desk.join("c")
    assert admission.roster.founded == 0 and admission.roster.synced == (0, 1, 2) and admission.roster.why == ""


def test_unlike_states_do_not_begin(desk: Desk) -> None:
    desk.join("a"), desk.join("b")
    desk.join("c", have=Have(round=0, digest="bad"))
    assert desk.state().founded is None and "different states" in desk.state().why
    desk.join("c", boot=1)
    assert desk.state().founded == 0


def test_a_site_without_a_state_founds_nothing(desk: Desk) -> None:
    desk.join("a"), desk.join("b"), desk.join("c", have=None)
    assert desk.state().founded is None
    desk.join("b", boot=1, bootstrap=True)
    assert desk.synced() == {0, 1}, "those alike with the one that was told to begin"
    assert desk.standing("c") == "healing"


def test_the_furthest_state_is_where_a_lost_run_begins(desk: Desk) -> None:
    for site, round in (("a", 8), ("b", 9), ("c", 8)):
        desk.join(site, have=Have(round=round, digest=f"{round}"))
    assert desk.state().founded == 9 and desk.synced() == {1}


def test_one_site_alone_may_be_a_run(desk: Desk) -> None:
    alone = spec(seats=1, min_sites=1)
    assert desk.join("a", of=alone).roster.founded == 0


def test_seats_are_kept_and_named_sites_have_theirs(desk: Desk) -> None:
    desk.found()
    desk.coordinator.leave(caller("b"))
    assert desk.join("b", boot=7, have=None).seat == 1
    with pytest.raises(Refused, match="belong to other sites"):
        desk.join("d")
    named = spec("named", sites=("x", "y", "z"))
    assert desk.join("y", of=named).seat == 1
    with pytest.raises(Refused, match="not one of this run"):
        desk.join("w", of=named)


# ---- who may be in sync


def test_who_was_never_in_sync_gives_nothing_and_forms_nothing(desk: Desk) -> None:
    desk.found("a", "b", "c", of=spec(seats=4, founders=3))
    desk.join("d", have=X0, of=spec(seats=4, founders=3))
    assert desk.standing("d") == "healing", "an x0 is no state of a run that goes on"
    with pytest.raises(Refused, match="never in sync"):
        desk.heal("d", 0, donor=None)
    desk.wait(60.0, "d")
    assert desk.synced() == set(), "all who were in sync are gone, and the one that is left is not"
    assert "start them again" in desk.state().why
    with pytest.raises(Refused, match="nobody is in sync"):
        desk.heal("d", 0, donor="d")
    desk.join("d", boot=1, have=Have(round=99, digest="ff"), bootstrap=True, of=spec(seats=4, founders=3))
    assert desk.synced() == set(), "not even when told to: it has never had the state of this run"


def test_a_donor_must_be_in_sync(desk: Desk) -> None:
    four = spec(seats=4, founders=2)
    desk.found("a", "b", of=four)
    desk.join("c", of=four), desk.join("d", of=four)
    with pytest.raises(Refused, match="not in sync"):
        desk.heal("c", 0, donor="d")
    desk.heal("c", 0, donor="a")
    desk.heal("d", 0, donor="c")
    assert desk.synced() == {0, 1, 2, 3}


def test_a_state_that_the_fleet_has_left_behind_is_stale(desk: Desk) -> None:
    two = spec(founders=2)
    desk.found("a", "b", of=two)
    desk.join("c", have=None, of=two)
    desk.commit(0, "a", "b")
    with pytest.raises(Refused, match="in round 1") as refused:
        desk.heal("c", 0, donor="a")
    assert refused.value.code == "stale"
    desk.heal("c", 1, donor="a")
    assert desk.commit(1, "a", "b", "c").present == (0, 1, 2)


def test_a_fleet_that_comes_back_begins_where_it_was(desk: Desk) -> None:
    desk.found()
    for t in range(4):
        desk.commit(t, "a", "b", "c")
    desk.wait(60.0)
    assert desk.state().living == ()
    desk.join("a", boot=1, have=Have(round=3, digest="33"))
    desk.join("b", boot=1, have=Have(round=3, digest="33"))
    assert desk.synced() == set() and "c had the latest" in desk.state().why, "c may have more than this"
    desk.join("c", boot=1, have=Have(round=4, digest="44"))
    assert desk.state().founded == 4 and desk.synced() == {2} and desk.state().generation == 1
    desk.heal("a", 4, donor="c", boot=1)
    assert desk.state().next_round == 4


def test_all_that_was_committed_is_enough_to_begin_again(desk: Desk) -> None:
    desk.found()
    desk.commit(0, "a", "b", "c")
    desk.wait(60.0)
    desk.join("a", boot=1, have=Have(round=1, digest="11"))
    desk.join("b", boot=1, have=Have(round=1, digest="11"))
    assert desk.synced() == {0, 1}, "two are a quorum, and nobody can have more than all"


def test_rounds_that_were_lost_are_committed_anew(desk: Desk) -> None:
    desk.found()
    desk.commit(0, "a", "b", "c"), desk.commit(1, "a", "b", "c")
    desk.wait(60.0)
    for site in ("a", "b", "c"):
        desk.join(site, boot=1, have=Have(round=1, digest="11"))
    verdicts = [desk.propose(s, 1, {0: 1, 1: 1, 2: 1}, boot=1) for s in ("a", "b", "c")]
    assert verdicts[0].commit is not None and verdicts[0].commit.generation == 1 and verdicts[0].commit.took[0].weight == 1


# ---- leases


def test_a_lease_runs_out_and_the_rest_go_on(desk: Desk) -> None:
    desk.found()
    epoch = desk.state().epoch
    desk.wait(9.0, "a", "b")
    assert desk.standing("c") == "synced"
    desk.wait(2.0, "a", "b")
    assert desk.standing("c") == "out" and desk.state().epoch == epoch + 1 and desk.state().counts["expiries"] == 1
    with pytest.raises(Refused) as refused:
        desk.beat("c")
    assert refused.value.code == "expired"


def test_a_coordinator_that_slept_blames_nobody(desk: Desk) -> None:
    desk.found()
    desk.wait(5.0, "a", "b", "c")
    desk.wait(3600.0, step_s=3600.0)  # it was stopped
    assert len(desk.state().living) == 3
    desk.wait(11.0)
    assert desk.state().living == (), "but from then on silence counts"


def test_leases_begin_anew_after_a_restart(desk: Desk) -> None:
    desk.found()
    desk.wait(9.0)
    desk.restart()
    desk.wait(9.0)
    assert len(desk.state().living) == 3
    desk.wait(2.0)
    assert desk.state().living == ()


def test_a_broken_stream_shortens_a_lease(desk: Desk) -> None:
    desk.found()
    desk.coordinator.doubt(caller("c"))
    desk.coordinator.doubt(caller("b"))
    desk.coordinator.doubt(caller("a", boot=9))  # of a process that is not it
    desk.wait(2.0, "b")
    assert desk.standing("c") == "synced"
    desk.wait(1.0, "b")
    assert desk.standing("c") == "out" and desk.standing("b") == "synced" and desk.standing("a") == "synced"


def test_another_process_of_a_site_takes_its_place(desk: Desk) -> None:
    desk.found()
    desk.join("b", boot=1, have=None)
    assert desk.standing("b") == "healing", "it has nothing of what the first one had"
    with pytest.raises(Refused) as refused:
        desk.beat("b", boot=0)
    assert refused.value.code == "superseded"
    desk.coordinator.leave(caller("b", boot=0))
    assert desk.standing("b") == "healing", "the one that was replaced says nothing for it any more"


def test_a_join_that_is_made_twice_is_one(desk: Desk) -> None:
    desk.found()
    before = desk.state()
    desk.join("b")
    assert desk.state() == before


def test_a_flapping_site_waits(desk: Desk) -> None:
    desk.found()
    for boot in range(1, 5):
        desk.join("c", boot=boot)
    with pytest.raises(Refused) as refused:
        desk.join("c", boot=5)
    assert refused.value.code == "flapping" and refused.value.refusal.retry_s == pytest.approx(30.0)
    desk.join("a", boot=1)
    desk.wait(31.0, step_s=1.0)
    desk.join("c", boot=6)


def test_leases_of_the_clock_alone() -> None:
    clock = Clock()
    leases = Leases(10.0, 2.0, clock())
    leases.renew("a", clock())
    clock.now_s += 4.0
    assert leases.tick(clock()) == [] and leases.left_s("a", clock()) == 6.0
    leases.doubt("a", clock())
    assert leases.left_s("a", clock()) == 2.0
    leases.drop("a")
    leases.doubt("a", clock())
    assert leases.left_s("a", clock()) is None


# ---- turns of gossip


def gossip(**changes: object) -> Spec:
    return spec(**{"synchronous": False, "without": "go_on", "seats": 4, "founders": 3, **changes})


def test_a_turn_begins_where_nobody_has_been(desk: Desk) -> None:
    desk.found("a", "b", "c", of=gossip())
    first = desk.state().turn
    assert first is not None and first.since == 0 and first.present == (0, 1, 2)
    desk.join("d", have=None, of=gossip())
    assert desk.state().pending is None, "one that heals is in no graph"
    desk.heal("d", 5, donor="a")
    pending = desk.state().pending
    assert pending == desk.state().epoch
    for site, round in (("a", 7), ("b", 12)):
        desk.beat(site, promise=Promise(epoch=pending, first=round))
    desk.beat("c", promise=Promise(epoch=pending - 1, first=99))  # of an epoch that is over: says nothing
    assert desk.state().turn == first
    desk.beat("c", promise=Promise(epoch=pending, first=9))
    turn = desk.state().turn
    assert turn is not None and (turn.since, turn.present) == (12, (0, 1, 2, 3)) and desk.state().pending is None
    desk.restart()
    assert desk.state().turn == turn


def test_a_death_among_promises_makes_them_void(desk: Desk) -> None:
    desk.found("a", "b", "c", of=gossip())
    desk.join("d", have=None, of=gossip())
    desk.heal("d", 5, donor="a")
    old = desk.state().pending
    desk.beat("a", promise=Promise(epoch=old, first=7))
    desk.beat("b", promise=Promise(epoch=old, first=8))
    desk.wait(11.0, "a", "b", "d")
    new = desk.state().pending
    assert new is not None and new > old and desk.state().promises == {}
    desk.beat("a", promise=Promise(epoch=new, first=7))
    desk.beat("b", promise=Promise(epoch=new, first=8))
    turn = desk.state().turn
    assert turn is not None and (turn.since, turn.present) == (8, (0, 1, 3)), "nobody waits for the dead, nor for the comer"


def test_gossip_takes_a_site_back_with_its_own_state(desk: Desk) -> None:
    desk.found("a", "b", "c", of=gossip())
    desk.wait(11.0, "a", "b")
    desk.join("c", boot=1, have=Have(round=4, digest="44"), of=gossip())
    desk.heal("c", 4, donor=None, boot=1)
    assert desk.synced() == {0, 1, 2}


# ---- what is refused


@pytest.mark.parametrize(
    "change, words",
    [
        ({"configuration": "bad"}, "configuration bad \\(expected c0ffee\\)"),
        ({"layout": "bad"}, "layout bad"),
        ({"versions": {"gossamer": "0.2.0", "torch": "2.13"}}, "gossamer 0.2.0 \\(expected 0.1.0\\)"),
        ({"min_sites": 3}, "min_sites 3 \\(expected 2\\)"),
    ],
)
def test_a_foreign_site_is_refused_by_name(desk: Desk, change: dict[str, object], words: str) -> None:
    desk.join("a")
    with pytest.raises(Refused, match=words) as refused:
        desk.join("b", of=spec(**change))
    assert refused.value.code == "foreign" and len(desk.state().members) == 1


def test_loopback_is_for_sites_of_one_machine(desk: Desk) -> None:
    desk.join("a", address="203.0.113.5:7400")
    for local in ("127.0.0.1:7400", "localhost:1", "[::1]:7400"):
        with pytest.raises(Refused, match="loopback"):
            desk.join("b", address=local)
    desk.join("b", address=None)
    desk.join("x", address="127.0.0.1:1", of=spec("here"))
    desk.join("y", address="127.0.0.1:2", of=spec("here"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"min_sites": 1}, "silently"),
        ({"min_sites": 9}, "at most 3"),
        ({"founders": 1}, "founders is 1"),
        ({"sites": ("x",)}, "1 sites for 3 seats"),
        ({"without": "go_on"}, "for gossip"),
        ({"synchronous": False, "without": "elect"}, "nothing to elect"),
        ({"lease_s": 20.0}, "lease of 20"),
    ],
)
def test_runs_that_cannot_be(desk: Desk, change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        check_spec(spec(**change))
    with pytest.raises(Refused, match=words):
        desk.join("a", of=spec(**change))
    assert desk.coordinator.runs == {}


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b"\xff\xfe", b'{"round": "1", "digest": "00"}', b'{"round": 1, "digest": "00", "x": 1}',
     b'{"round": 1e99, "digest": "0"}',     b'{"round": -1, "digest": "00"}',
     b'{"round": 1, "digest": "../etc"}', b'{"round": NaN, "digest": "00"}',
     b"[" * 100_000, b" " * (5 << 20)],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(Refused) as refused:
        unpack(Have, data)
    assert refused.value.code == "garbage" and len(str(refused.value)) < 400 and str(refused.value).isascii()


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be looked at as one " * 40)
    with pytest.raises(BadInput, match="cannot be used"):
        LedgerDB(text)
    assert text.read_text().startswith("not a database")
    LedgerDB(tmp_path / "runs.db").close()
    first = LedgerDB(tmp_path / "runs.db")
    with pytest.raises(BadInput, match="in use by another coordinator"):
        LedgerDB(tmp_path / "runs.db")
    first.close()


def test_records_are_what_they_say() -> None:
    for kind in (Join, Commit, HandIn, Roster, Share):
        assert kind.model_config["frozen"] and kind.model_config["extra"] == "forbid" and kind.model_config["strict"]
