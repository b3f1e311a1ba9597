"""How sites meet at the start of a session: nobody waits in vain, and a signal ends every wait."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_wan_restarts import session
from test_wan_run import sets_of
from wan_run_toys import Field, field

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.wan.meeting import Meeting, Vain, patiently
from gossamer.app.wan.places import places_of
from gossamer.app.wan.presence import Presence, Where
from gossamer.app.wan.ranks import Ranks
from gossamer.app.wan.spec import spec_of
from gossamer.core.ranges import Ranges
from gossamer.wan.loop import in_loop
from gossamer.wan.roster.calls import Away
from gossamer.wan.roster.sessions import NotYet, Sessions

pytestmark = pytest.mark.usefixtures("cache")


class Others:
    """Sites 1 and 2, as site 0 sees them at the start of session 7."""

    def __init__(self) -> None:
        self.members = {j: SimpleNamespace(boot=f"{j}", there=True) for j in (1, 2)}
        self.lost: set[int] = set()
        self.doubted: list[int] = []
        links = {j: SimpleNamespace(over=None, session=None) for j in (1, 2)}
        self.links: Any = SimpleNamespace(me=0, links=links)
        self.sessions: Any = SimpleNamespace(latest=None)
        roster = SimpleNamespace(at=self.members.get)
        neighbours = SimpleNamespace(gone=lambda: frozenset(self.lost), lost=self.doubted.append)
        presence: Any = SimpleNamespace(client=SimpleNamespace(roster=roster), neighbours=neighbours, name_of=("a", "b", "c").__getitem__)
        self.looks: list[int] = []
        self.meeting = Meeting(
            session(7, 0, 1, 2), presence, self.sessions, self.links, lambda: self.looks.append(1), Ranges((1,) * 3, {}), Ranks()
        )


def test_who_may_still_come_is_waited_for() -> None:
    others = Others()
    others.sessions.latest = session(7, 0, 1, 2)
    others.links.links[1].session = object()
    others.lost, others.members[1].there = {1}, False  # it is connected: what others say of it does not count
    others.meeting.check()
    assert others.looks
    others.sessions.latest = session(6, 0, 1, 2)
    others.meeting.check()


def test_who_is_slow_to_come_is_asked_once_whether_it_is_there() -> None:
    others = Others()
    others.links.links[1].session = object()
    others.meeting._doubt_s = time.monotonic()
    for _ in range(3):
        others.meeting.check()
    assert others.doubted == [2]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda o: o.lost.add(2), "site c is gone"),
        (lambda o: setattr(o.links.links[1], "over", "its process has ended"), "site b is gone \\(its process has ended\\)"),
        (lambda o: setattr(o.members[1], "boot", "2"), "site b is another process now"),
        (lambda o: setattr(o.members[1], "there", False), "site b is out of the run"),
        (lambda o: setattr(o.sessions, "latest", session(8, 0, 1)), "gone on to session 8"),
        (lambda o: setattr(o.sessions, "latest", session(7, 0, 1)), "gone on to session 7"),
    ],
)
def test_whom_nobody_should_wait_for(what: Any, why: str) -> None:
    others = Others()
    others.meeting.check()
    what(others)
    with pytest.raises(Vain, match=why):
        others.meeting.check()


def test_a_wait_ends_with_what_the_check_raises() -> None:
    over = threading.Event()

    def check() -> None:
        raise Away("a signal")

    with pytest.raises(Away):
        patiently(over.wait, check)

    async def forever() -> None:
        import asyncio

        await asyncio.sleep(1e6)

    with pytest.raises(Away):
        in_loop(forever(), check=check)
    over.set()
    assert patiently(lambda: 5, lambda: None) == 5
    with pytest.raises(ZeroDivisionError):
        patiently(lambda: 1 // 0, lambda: None)


@contextmanager
def ghost(run: Field, site: str, sets: list[str]) -> Iterator[None]:
    """A process of a site that asks for a session, gets it, and does not come."""
    job = resolve(load([], sets))
    presence = Presence(spec_of(job, job.corpus()), Where(site, f"127.0.0.1:{run.port}"), [], places_of(job), Ranks())
    try:
        presence.client.join(30.0)
        near = presence.neighbours
        sessions = Sessions(presence.client, alive=near.alive, gone=near.gone, ask=near.ask)
        found = None
        while found is None:
            with suppress(NotYet):
                found = sessions.open(None, timeout_s=30.0)
        yield
    finally:
        presence.close()


@pytest.mark.timeout(300)
def test_a_site_that_dies_before_the_session_costs_no_time_out_and_signals_end_all_waits(text: Path, tmp_path: Path) -> None:
    """All time-outs are longer than what this test waits."""
    sets = sets_of(text, 2, "diloco", run__rounds=5000, clock__pace_s=0.1, eval__every=50, wan__deadline_s=600.0)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join("lyon", "oslo")
        run.says("lyon", "session 1, ")
        run.trains("lyon", 2)
        run.kill("oslo", signal.SIGTERM)
        run.ends("oslo", code=128 + signal.SIGTERM)
        with ghost(run, "oslo", sets):
            run.says("lyon", "session 2, ")
        run.says("lyon", "session 2 did not come about: site oslo is gone")
        run.join("oslo")
        run.says("oslo", r"session \d+, from round [1-9]\d*: lyon, oslo")  # again and again as long as it takes: no wait is a long one
        run.trains("lyon", 2)
        run.kill("oslo")
        with ghost(run, "oslo", sets):
            run.says("lyon", r"session \d+, from round [1-9]\d*: lyon, oslo\n$")
            run.stops("lyon")  # while it is connecting
        (run.root / "lyon.log").unlink()
        run.join("lyon")
        run.says("lyon", "waits: ")
        run.stops("lyon")  # while it waits for others
        run.kill("coordinator")
        (run.root / "lyon.log").unlink()
        run.join("lyon")
        run.says("lyon", "waiting for the coordinator")
        run.stops("lyon")  # and for the coordinator
