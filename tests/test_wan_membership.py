"""Who is in a run, by the rules and a clock of our own: no network here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_toys import Clock, Desk, caller, spec

from gossamer.core.errors import BadInput
from gossamer.wan.roster.ended import OVER
from gossamer.wan.roster.leases import Leases
from gossamer.wan.roster.ledgerdb import LedgerDB
from gossamer.wan.roster.membership import check_spec
from gossamer.wan.roster.messages import Refused, unpack
from gossamer.wan.roster.records import Ask, HandIn, Have, Join, Plan, Propose, Publish, Roster, RunStatus, Session


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


def test_seats_are_kept_and_named_sites_have_theirs(desk: Desk) -> None:
    desk.found()
    desk.coordinator.leave(caller("b"))
    assert desk.join("b", boot=7).seat == 1
    with pytest.raises(Refused, match="belong to other sites"):
        desk.join("d")
    named = spec("named", sites=("x", "y", "z"))
    assert desk.join("y", of=named).seat == 1
    with pytest.raises(Refused, match=r"not one of run named: wan\.sites names x, y, z"):
        desk.join("w", of=named)


def known(desk: Desk) -> RunStatus:
    """All that the coordinator tells of the run."""
    return desk.coordinator.status(Ask(run="demo")).runs[0]


def test_a_run_that_is_over_takes_nobody_and_stays_as_it_was(desk: Desk) -> None:
    desk.found()
    desk.coordinator.publish(Publish(caller=caller("a"), plan=Plan(version=1, since=4, body=OVER + "a")))
    desk.dies("b")
    desk.wait(5.0, "a", "c")
    assert desk.join("b").seat == 1, "whoever was in it may still have things to do"
    for site in ("a", "b", "c"):
        desk.beat(site, round=4)
        desk.coordinator.leave(caller(site))
    before = known(desk)
    assert [(one.standing, one.report.round) for one in before.sites if one.report is not None] == [("finished", 4)] * 3
    for site, take_over in (("a", False), ("b", True), ("d", False)):
        with pytest.raises(Refused, match="run demo is over: its summary is at site a") as refused:
            desk.join(site, boot=1, take_over=take_over)
        assert refused.value.refusal.retry_s is None and known(desk) == before


def test_a_join_that_cannot_be_kept_changes_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.found()
    desk.beat("a", round=4)
    desk.coordinator.leave(caller("a"))
    before = known(desk)

    def full(state: object) -> None:
        raise Refused("disk", "no room")

    with monkeypatch.context() as patch:
        patch.setattr(desk.db, "put", full)
        with pytest.raises(Refused, match="no room"):
            desk.join("a", boot=1)
    assert known(desk) == before
    desk.join("a", boot=1)
    assert next(one.report for one in known(desk).sites) is None, "it is another process, now that it is in"


# ---- leases


def test_a_lease_runs_out_and_the_rest_go_on(desk: Desk) -> None:
    desk.found()
    epoch = desk.state().epoch
    desk.wait(9.0, "a", "b")
    assert desk.standing("c") == "in"
    desk.wait(2.0, "a", "b")
    assert desk.standing("c") == "out" and desk.state().epoch == epoch + 1 and desk.state().counts["expiries"] == 1
    with pytest.raises(Refused) as refused:
        desk.beat("c")
    assert refused.value.code == "expired"


def test_why_a_site_was_put_out_is_known_until_it_comes_back(desk: Desk) -> None:
    desk.found()
    desk.coordinator.expel(caller("c"), "its certificate was revoked: make another")
    assert [m.fault for m in desk.state().roster().members] == ["", "", "its certificate was revoked"]
    desk.join("c")
    assert desk.standing("c") != "out" and not any(m.fault for m in desk.state().members)


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
    assert desk.standing("c") == "in"
    desk.wait(1.0, "b")
    assert desk.standing("c") == "out" and desk.standing("b") == "in" and desk.standing("a") == "in"


def test_a_site_that_was_out_of_sight_is_still_in_its_session(desk: Desk) -> None:
    desk.found()
    desk.wait(11.0, "a", "b")
    assert desk.join("c").seat == 2 and desk.standing("c") == "in"


def test_another_process_of_a_site_takes_its_place(desk: Desk) -> None:
    desk.found()
    desk.join("b", boot=1, take_over=True)
    assert desk.standing("b") == "waiting", "it has nothing of what the first one had"
    with pytest.raises(Refused) as refused:
        desk.beat("b", boot=0)
    assert refused.value.code == "superseded"
    desk.coordinator.leave(caller("b", boot=0))
    assert desk.standing("b") == "waiting", "the one that was replaced says nothing for it any more"


def test_a_join_that_is_made_twice_is_one(desk: Desk) -> None:
    desk.found()
    before = desk.state()
    desk.join("b")
    assert desk.state() == before


def test_a_flapping_site_waits(desk: Desk) -> None:
    desk.found()
    for boot in range(1, 5):
        desk.join("c", boot=boot, take_over=True)
    with pytest.raises(Refused) as refused:
        desk.join("c", boot=5, take_over=True)
    assert refused.value.code == "flapping" and refused.value.refusal.retry_s == pytest.approx(30.0)
    desk.join("a", boot=1, take_over=True)
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


# ---- what is refused


@pytest.mark.parametrize(
    "change, words",
    [
        ({"configuration": "bad"}, "configuration = bad \\(the run: c0ffee\\)"),
        ({"layout": "bad"}, "layout = bad"),
        ({"versions": {"gossamer": "0.2.0", "torch": "2.13"}}, "gossamer = 0.2.0 \\(the run: 0.1.0\\)"),
        ({"min_sites": 3}, "wan.min_sites = 3 \\(the run: 2\\)"),
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
        ({"sites": ("x",)}, "names 1 sites for 3 workers"),
        ({"without": "go_on"}, "for gossip"),
        ({"synchronous": False, "without": "elect"}, "called 'go_on'"),
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
    for kind in (Join, Propose, HandIn, Roster, Session):
        assert kind.model_config["frozen"] and kind.model_config["extra"] == "forbid" and kind.model_config["strict"]
