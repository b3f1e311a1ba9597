"""Runs and sites that the coordinator forgets, and how it says in what a site differs from its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_toys import X0, Desk, at, caller, spec
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.wan.spec import settings_of_job
from gossamer.wan.roster.differing import MAX_SETTINGS, differences, settings_of
from gossamer.wan.roster.messages import Refused, pack, printable, unpack
from gossamer.wan.roster.records import Forget, Plan, Publish, Spec


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


def forget(desk: Desk, site: str | None = None) -> None:
    desk.coordinator.forget(Forget(run="demo", site=site), "somebody")


def rows(desk: Desk) -> int:
    return sum(desk.db._db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in ("runs", "sessions", "plans"))


# ---- runs


def test_a_run_is_forgotten_when_nobody_is_there(desk: Desk) -> None:
    desk.found()
    desk.coordinator.publish(Publish(caller=caller("a"), plan=Plan(version=1, since=3, body="x")))
    with pytest.raises(Refused, match="sites that are there: a, b, c") as refused:
        forget(desk)
    assert refused.value.code == "conflict" and rows(desk) == 3
    for site in ("a", "b"):
        desk.coordinator.leave(caller(site))
    with pytest.raises(Refused, match="that are there: c"):
        forget(desk)
    desk.wait(11.0)  # c is not heard of for its lease
    forget(desk)
    assert rows(desk) == 0 and not desk.coordinator.runs
    desk.restart()
    assert not desk.coordinator.runs, "also on disk"
    with pytest.raises(Refused, match="no run demo here") as refused:
        forget(desk)
    assert refused.value.code == "unknown"
    assert desk.join("z", of=spec(configuration="aaaa")).seat == 0, "its name is free for another run"


def test_a_run_that_never_began_makes_room_for_another_configuration(desk: Desk) -> None:
    desk.join("a")
    with pytest.raises(Refused, match="differs from run demo"):
        desk.join("b", of=spec(configuration="aaaa"))
    desk.coordinator.leave(caller("a"))
    desk.join("b", of=spec(configuration="aaaa"))
    assert [m.site for m in desk.state().members] == ["b"] and desk.state().spec.configuration == "aaaa"
    desk.restart()
    assert desk.state().spec.configuration == "aaaa"


def test_a_run_that_has_begun_is_not_replaced(desk: Desk) -> None:
    desk.found()
    for site in ("a", "b", "c"):
        desk.coordinator.leave(caller(site))
    with pytest.raises(Refused, match=r"--set wan\.run=NAME, or forget the old one: gossamer wan forget demo"):
        desk.join("a", boot=1, of=spec(configuration="aaaa"))
    assert desk.join("a", boot=1).seat == 0


def test_forgetting_a_live_run_is_not_proposed(desk: Desk) -> None:
    desk.join("a")
    with pytest.raises(Refused) as refused:
        desk.join("b", of=spec(configuration="aaaa"))
    assert "there: a" in str(refused.value) and "forget" not in str(refused.value)


# ---- sites


def test_the_seat_of_a_lost_site_goes_to_a_new_one(desk: Desk) -> None:
    desk.found()
    desk.wait(11.0, "a", "b")
    with pytest.raises(Refused, match=r"a there, b there, c out.*gossamer wan forget demo --site SITE"):
        desk.join("d")
    for site, words in (("a", "site a is there"), ("q", "no site q; its sites are a, b, c")):
        with pytest.raises(Refused, match=words):
            forget(desk, site)
    forget(desk, "c")
    assert desk.join("d").seat == 2
    session = desk.go_on("a", "b", have=at(3), gone=(2,))
    assert session.members == (0, 1)
    desk.propose("d", X0)
    for site in ("a", "b"):
        taken = desk.propose(site, at(4, 2), number=3).session
    assert taken is not None and taken.members == (0, 1, 2) and taken.donors == (0, 1), "it takes the state of the run, and gives none"


def test_what_a_forgotten_site_had_is_not_waited_for(desk: Desk) -> None:
    """All processes have died, and one site is lost for good: the others begin again without it."""
    desk.found()
    desk.go_on("a", "b", "c", have=at(5))
    desk.wait(11.0)
    for site in ("a", "b"):
        desk.join(site, boot=1)
    for site in ("a", "b"):
        why = desk.propose(site, at(5, 2), boot=1).why
    assert "c may have the latest state" in why and "gossamer wan forget demo --site SITE" in why
    forget(desk, "c")
    session = desk.state().session
    assert session.number == 3 and session.members == (0, 1) and session.round == 5 and session.generation == 1


def test_a_forgotten_site_counts_for_no_majority(desk: Desk) -> None:
    """Where sites may stand in for the coordinator, half of the last session must be there."""
    of = spec(without="elect", seats=5, min_sites=2)
    desk.found("a", "b", "c", "d", "e", of=of)
    desk.wait(11.0, "a", "b")
    for site in ("a", "b"):
        why = desk.propose(site, at(3), gone=(2, 3, 4)).why
    assert "2 of the 5 sites of the last session are here" in why
    forget(desk, "e")
    for site in ("a", "b"):
        session = desk.propose(site, at(3), gone=(2, 3)).session
    assert session is not None and session.members == (0, 1)


def test_a_forgotten_site_that_comes_back_is_a_new_one(desk: Desk) -> None:
    desk.found()
    desk.wait(11.0, "a", "b")
    forget(desk, "c")
    desk.join("c", boot=1)
    member = desk.state().find("c")
    assert member.seat == 2 and not member.ever and member.session == 0


# ---- what differs


def described(*sets: str) -> Spec:
    settings = settings_of_job(resolve(load([], ["fleet.name=uniform-3", *sets])))
    mark = "".join(f"{ord(c):x}" for c in "".join(sets))[:60] or "0"
    return spec(configuration=mark, settings=settings)


def test_settings_are_named_with_both_values() -> None:
    said = differences(described(), described("plan.steps=3", "seed=7", "data.source=/somewhere/else"))
    assert "plan.steps = 3 (the run: " in said
    assert "seed = 7 (the run: 0)" in said and 'data.source = "/somewhere/else" (the run: "stdlib")' in said
    assert "contents" not in said and "layout" not in said and "configuration" not in said, "what follows from these is not named"
    assert differences(described(), described()) == ""


def test_what_the_settings_do_not_show_is_told_too() -> None:
    ours = spec(settings=settings_of({"fleet": {"name": "f.toml"}}, {"fleet": "one"}))
    theirs = spec(settings=settings_of({"fleet": {"name": "f.toml"}}, {"fleet": "two"}), configuration="f00")
    assert "what the fleet is made of" in differences(ours, theirs)
    assert "configuration = f00 (the run: c0ffee)" in differences(spec(), spec(configuration="f00")), "of a release that told none"
    corpus = {"gossamer": "0.1.0", "torch": "2.13", "corpus": "ab"}
    said = differences(spec(versions=corpus), spec(versions=corpus | {"corpus": "cd", "torch": "2.14"}))
    assert said == "the text of data.source (hash) = cd (the run: ab), torch = 2.14 (the run: 2.13)"


@given(st.dictionaries(st.text(max_size=100), st.one_of(st.text(), st.integers(), st.lists(st.text()), st.none()), max_size=8))
def test_whatever_the_settings_are_they_travel_and_are_printable(tables: dict[str, object]) -> None:
    found = spec(settings=settings_of(tables, {"fleet": "x"}))
    assert unpack(Spec, pack(found)) == found
    said = differences(spec(settings=settings_of({}, {"fleet": "y"}), configuration="f00"), found)
    assert said == printable(said) and len(said) < 700


@pytest.mark.parametrize(
    "settings",
    [{"a": "\x1b[31m"}, {"a": "x\ny"}, {"a": "x" * 121}, {"a b": "1"}, {"": "1"}, {"a": 1}, {f"k{i}": "" for i in range(MAX_SETTINGS + 1)}],
)
def test_settings_that_are_none_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        spec(settings=settings)


def test_a_refusal_is_short_and_printable(desk: Desk) -> None:
    long = {f"section.key-{i}": "v" * 100 for i in range(300)}
    desk.join("a" * 63, of=spec(configuration="aa", settings=dict.fromkeys(long, "w" * 100)))
    with pytest.raises(Refused) as refused:
        desk.join("b" * 63, of=spec(settings=long))
    text = str(refused.value)
    assert "and 29" in text and text.endswith("--set wan.run=NAME") and len(text) < 1024
    assert str(Refused("foreign", "a\x1b[2J\u202e\n")) == "a\\x1b[2J\\u202e\\n"
