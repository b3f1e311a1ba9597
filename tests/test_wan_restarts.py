"""A site that was killed and starts again at once: the session that its last process was in is not one of the new process."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coordinator_toys import at, caller, spec

from gossamer.app.folder import RunFolder
from gossamer.app.wan import hooks
from gossamer.app.wan.bound import Bound
from gossamer.app.wan.state import Snapshot
from gossamer.core.errors import BadInput, RunFailed
from gossamer.train.recut import ALONE
from gossamer.train.writing import Writer
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.roster.records import Propose, Roster, Session, Verdict
from gossamer.wan.roster.sessions import GoneOn, NotYet, Sessions
from gossamer.worker.state import State


def session(number: int, *members: int) -> Session:
    return Session(number=number, generation=0, epoch=3, round=9, members=members, donors=members, digest="09", by=None)


class Client:
    """Of site b, seat 1, at a coordinator that opens what it is told to."""

    def __init__(self, latest: Session | None) -> None:
        self.spec, self.seat, self.caller, self.astray, self.away_s = spec(), 1, caller("b", 1), None, None
        self.timeouts = Timeouts.of(30.0)
        self.asked: list[Propose] = []
        self.opens: Session | None = None
        self.tell(latest)

    def tell(self, latest: Session | None) -> None:
        self.session = latest
        self.roster = Roster(run="demo", revision=1, epoch=3, generation=0, members=(), session=latest)

    def hand_in(self, timeout_s: float) -> None: ...

    def propose(self, request: Propose, timeout_s: float) -> Verdict:
        self.asked.append(request)
        if self.opens is None:
            return Verdict(session=None, why="the session waits for c")
        self.tell(self.opens)
        return Verdict(session=self.opens)


def sessions_of(client: Client) -> Sessions:
    some: Any = SimpleNamespace(alive=lambda: (0, 2), gone=lambda: ())
    return Sessions(client, alive=some.alive, gone=some.gone, ask=lambda seat, data: b"")  # type: ignore[arg-type]


def test_the_session_of_an_earlier_process_is_not_entered() -> None:
    client = Client(session(6, 0, 1, 2))
    found = sessions_of(client)
    for _ in range(2):
        with pytest.raises(NotYet, match="waits for c"):
            found.open(at(8, session=5), timeout_s=0.1)
    assert {p.number for p in client.asked} == {7}
    client.opens = session(7, 0, 1, 2)
    assert found.open(at(8, session=5), timeout_s=5.0) == client.opens


def test_what_opens_while_it_asks_is_entered_though_the_answer_was_lost() -> None:
    client = Client(None)
    found = sessions_of(client)
    with pytest.raises(NotYet):
        found.open(at(0), timeout_s=0.1)
    client.tell(session(1, 0, 1, 2))
    assert found.open(at(0), timeout_s=5.0) == session(1, 0, 1, 2)


def test_the_sessions_that_opened_without_it_are_remembered() -> None:
    client = Client(session(6, 0, 1, 2))
    found = sessions_of(client)
    assert found.known(7) is None
    for number in range(6, 40):
        client.tell(session(number, 0, 2))
        assert found.latest == found.known(number) == session(number, 0, 2)
    assert found.known(38) == session(38, 0, 2) and found.known(6) is None, "the last ones"


def test_whom_a_site_left_behind_is_waited_for_again_when_it_was_left_behind_itself() -> None:
    """A slow site takes the others for slow. Where these go on without it, it asks them to let it in."""
    client = Client(session(6, 0, 1, 2))
    late, found = [2], sessions_of(client)
    found._gone = lambda: late
    found.on_missed = late.clear
    with pytest.raises(NotYet):
        found.open(at(8, session=6), timeout_s=0.1)
    assert client.asked[-1].gone == (2,)
    client.tell(session(7, 0, 2))
    with pytest.raises(NotYet):
        found.open(at(8, session=6), timeout_s=0.1)
    assert client.asked[-1].gone == ()


def test_a_session_that_was_asked_for_by_an_earlier_process_is_not_entered() -> None:
    """It opens while this one asks for it, and is heard of later."""
    client = Client(session(6, 0, 1, 2))
    found = sessions_of(client)
    with pytest.raises(NotYet):
        found.open(at(8, session=5), timeout_s=0.1)
    other = session(7, 0, 1, 2).model_copy(update={"boots": ("a", "b", "c")})
    client.tell(other)
    with pytest.raises(NotYet):
        found.open(at(8, session=5), timeout_s=0.1)
    assert client.asked[-1].number == 8 and found.missed == 1
    mine = session(8, 0, 1, 2).model_copy(update={"boots": ("a", client.caller.boot[:8], "c")})
    client.tell(mine)
    assert found.open(at(8, session=5), timeout_s=5.0) == mine


def test_of_one_number_a_site_is_in_one_session_at_most() -> None:
    client = Client(None)
    found = sessions_of(client)
    client.opens = session(3, 0, 1)
    assert found.open(at(0), timeout_s=5.0) == client.opens
    client.opens = None
    client.tell(session(3, 1, 2))
    with pytest.raises(NotYet):
        found.open(at(0), timeout_s=0.1)
    assert client.asked[-1].opened == 3
    client.tell(session(4, 1, 2))
    assert found.open(at(0), timeout_s=5.0) == session(4, 1, 2)


def test_what_a_process_is_bound_to_the_next_one_knows() -> None:
    client, kept = Client(None), []
    found = sessions_of(client)
    found.remember((), kept.append)
    for number in (3, 4):
        found.bind(session(number, 0, 1, 2))
    assert kept[-1] == (session(3, 0, 1, 2), session(4, 0, 1, 2)), "any of them may have been entered"
    later = sessions_of(client)
    later.remember(kept[-1], kept.append)
    with pytest.raises(NotYet):
        later.open(at(0), timeout_s=0.1)
    assert (client.asked[-1].bound, client.asked[-1].opened) == (kept[-1], 4)
    client.enter = lambda session: None  # type: ignore[attr-defined]
    later.bind(session(5, 0, 1))
    later.entered(session(5, 0, 1))
    assert kept[-1] == (session(5, 0, 1),), "the others are over"
    client.tell(session(6, 0, 2))
    with pytest.raises(GoneOn, match="session 6"):
        later.bind(session(6, 0, 1))


def test_a_file_of_sessions_is_whole_or_refused(tmp_path: Path) -> None:
    said: list[str] = []
    file = Bound(tmp_path, said.append)
    assert file.read() == ()
    file.keep((session(3, 0, 1),))
    assert Bound(tmp_path, said.append).read() == (session(3, 0, 1),)
    (tmp_path / "sessions.json").write_text("{")
    with pytest.raises(BadInput, match=r"sessions\.json is damaged"):
        file.read()
    full = Bound(tmp_path / "gone", said.append)
    for _ in range(2):
        full.keep((session(3, 0, 1),))
    assert len(said) == 1 and "free some space" in said[0]


def test_a_checkpoint_that_fails_beside_the_run_is_tried_again_where_it_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that leaves: what it hands in last is of the boundary whose checkpoint is still being written, in vain."""
    at_work, tries, written = threading.Event(), list[int](), list[str | None]()

    def write(*_: Any) -> tuple[Path, str]:
        tries.append(at_work.wait(10.0))
        if len(tries) == 1:
            raise RunFailed("the disk is full")
        return tmp_path, "sha"

    monkeypatch.setattr(hooks, "write", write)
    mine = hooks.SiteHooks.__new__(hooks.SiteHooks)
    mine.writer, mine.held, mine._said, mine._files = Writer(), Snapshot(State(x={}, round=3), {}, 0.0, 1), None, {}
    mine.folder, mine.me, mine.place = RunFolder(tmp_path), 0, ALONE
    mine.written = lambda round, tokens, sha: written.append(sha)
    mine.save(beside=True)
    threading.Timer(0.05, at_work.set).start()
    mine.save()
    assert written == [None, "sha"] and tries == [True, True]
