"""The coordinator on 127.0.0.1, in a process of its own that is killed and started again; its clients; the time without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from coordinator_toys import X0, Process, at, caller, eventually, quick
from wan_toys import Line

from gossamer.core.errors import RunFailed
from gossamer.wan.roster.calls import Away, ask_status, plain
from gossamer.wan.roster.client import CoordinatorClient, Event
from gossamer.wan.roster.messages import Refused, pack
from gossamer.wan.roster.records import Card, Elect, Have, Known, Plan, Propose, Report, Session
from gossamer.wan.roster.sessions import NotYet, Sessions

TWO = {"seats": 2}


@pytest.fixture
def clients() -> Iterator[list[CoordinatorClient]]:
    made: list[CoordinatorClient] = []
    yield made
    for client in made:
        client.close()


class Fleet:
    """Sites that reach each other, whatever becomes of the coordinator."""

    def __init__(self, *clients: CoordinatorClient) -> None:
        self.there = {c.seat for c in clients}
        self.clients = {c.seat: c for c in clients}
        self.sites = {c.seat: self.site(c) for c in clients}
        self.lost: set[int] = set()
        """Whom the others have lost."""

    def site(self, client: CoordinatorClient) -> Sessions:
        return Sessions(client, alive=lambda: self.there - self.lost, gone=lambda: self.lost - {client.seat}, ask=self.ask)

    def add(self, client: CoordinatorClient) -> None:
        self.clients[client.seat], self.sites[client.seat] = client, self.site(client)
        self.there.add(client.seat)

    def ask(self, seat: int, data: bytes) -> bytes:
        if seat not in self.there - self.lost:
            raise RunFailed(f"seat {seat} is gone")
        return self.sites[seat].serve(data)

    def open(self, *seats: int, have: Have | None = X0, timeout_s: float = 30.0) -> Session:
        """These open a session together, and enter it."""
        found = together(*(lambda s=s: self.sites[s].open(have, timeout_s=timeout_s) for s in seats))
        assert len(set(found)) == 1 and found[0].members == tuple(sorted(seats)), found
        for seat in seats:
            self.sites[seat].entered(found[0])
        return found[0]


def fleet_of(process: Process, clients: list[CoordinatorClient], sites: str = "ab", run: str = "demo", **changes: Any) -> Fleet:
    """So many sites, in session 1."""
    of = quick(run, **{"seats": len(sites), **changes})
    made = [process.client(site, of) for site in sites]
    clients += made
    fleet = Fleet(*made)
    fleet.open(*range(len(sites)))
    return fleet


def together(*jobs: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


def test_sites_meet_and_part(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    a, b = clients
    assert (a.seat, b.seat) == (0, 1) and a.seed == b.seed >= 0
    a.wait_for(lambda r: r.inside == (0, 1), 10.0)
    b.leave()
    with pytest.raises(RunFailed, match="has left"):
        b.plan(1.0)
    began_s = time.monotonic()
    roster = a.wait_for(lambda r: r.inside == (0,), 10.0)
    assert time.monotonic() - began_s < a.timeouts.beat + 5.0 and roster.members[1].standing == "out"
    with pytest.raises(NotYet, match=r"it needs 2 \(wan\.min_sites\); without b"):
        fleet.sites[0].open(at(3), timeout_s=0.5)


def test_a_killed_coordinator_loses_nothing(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    a, b = clients
    first = fleet.sites[0].latest
    plan = Plan(version=1, since=3, body="{}")
    assert a.publish(plan, 5.0) == plan
    a.wait_for(lambda r: r.inside == (0, 1), 10.0)
    before = a.roster
    process.kill()
    with pytest.raises(Away):
        b.plan(0.3)
    eventually(lambda: a.away_s is not None and b.away_s is not None, "both notice")
    assert a.roster.inside == (0, 1), "the last roster stays"
    process.start()
    eventually(lambda: a.away_s is None and b.away_s is None, "both come back by themselves")
    assert b.plan(5.0) == plan
    assert (a.roster.epoch, a.roster.members, a.roster.session) == (before.epoch, before.members, first), "nobody had to join again"
    assert fleet.open(0, 1, have=at(4)).number == 2


def test_a_proposal_survives_the_coordinator(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    waiting = ThreadPoolExecutor(1).submit(lambda: fleet.sites[0].open(at(3), timeout_s=30.0))
    time.sleep(0.2)
    process.kill()
    time.sleep(0.2)
    process.start()
    assert fleet.sites[1].open(at(4), timeout_s=30.0) == waiting.result(10.0)


def test_kills_at_any_moment_give_nobody_another_answer(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    over, deaths = threading.Event(), []

    def kill() -> None:
        while not over.wait(0.6):
            process.kill()
            deaths.append(process.pid)
            process.start()

    with ThreadPoolExecutor(1) as killer:
        kills = killer.submit(kill)
        try:
            number = 1
            while len(deaths) < 4:
                session = fleet.open(0, 1, have=at(number, number))
                assert session.number == number + 1
                number = session.number
        finally:
            over.set()
            kills.result()
    assert clients[0].failure is None and clients[1].failure is None


def test_two_runs_side_by_side(process: Process, clients: list[CoordinatorClient]) -> None:
    one = fleet_of(process, clients, run="one")
    fleet_of(process, clients, run="two", synchronous=False, without="go_on", seed=7)
    a, b, c, d = clients
    assert (c.seed, d.seed) == (7, 7)
    one.open(0, 1, have=at(5))
    assert c.roster.session is not None and c.roster.session.number == 1
    d.leave()
    c.wait_for(lambda r: r.inside == (0,), 10.0)
    assert b.roster.inside == (0, 1)
    a.report(Report(round=5, loss=2.5))
    eventually(lambda: ask_status(plain(f"127.0.0.1:{process.port}"), "one").runs[0].newest == 5, "told with a beat")
    status = ask_status(plain(f"127.0.0.1:{process.port}"))
    assert [(r.run, len(r.sites), r.sessions[0].number) for r in status.runs] == [("one", 2, 2), ("two", 2, 1)]


def test_a_dead_process_is_out_before_its_lease_is_over(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet_of(process, clients, floor_s=30.0)
    a, b = clients
    eventually(lambda: b.stands, "its stream stands")
    b.close()  # without a word
    began_s = time.monotonic()
    a.wait_for(lambda r: r.inside == (0,), 20.0)
    assert time.monotonic() - began_s < a.timeouts.lease - 1.0


def test_a_newcomer_asks_and_the_others_hear_of_it(process: Process, clients: list[CoordinatorClient]) -> None:
    events: list[Event] = []
    of = quick(seats=3, founders=2)
    a, b = process.client("a", of, events=events), process.client("b", of)
    clients += [a, b]
    fleet = Fleet(a, b)
    fleet.open(0, 1)
    c = process.client("c", of)
    clients.append(c)
    fleet.add(c)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: fleet.sites[2].open(None, timeout_s=30.0))
        eventually(lambda: a.waiting == b.waiting == (2,), "somebody waits")
        eventually(lambda: any(e.kind == "waiting" for e in events), str(events))
        assert not asked.done() and c.waiting == ()
        session = together(*(lambda s=s: fleet.sites[s].open(at(6), timeout_s=30.0) for s in (0, 1)))[0]
        assert asked.result(10.0) == session and (session.members, session.donors, session.round) == ((0, 1, 2), (0, 1), 6)
    eventually(lambda: a.waiting == (), "nobody waits any more")
    assert fleet.sites[2].missed == 0


def test_a_site_that_is_left_out_is_let_in_next(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients, "abc")
    fleet.lost = {2}
    assert fleet.open(0, 1, have=at(3)).number == 2
    fleet.lost = set()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: fleet.sites[2].open(at(3), timeout_s=30.0))
        eventually(lambda: clients[0].waiting == (2,), "it asks for the one after")
        session = together(*(lambda s=s: fleet.sites[s].open(at(8, 2), timeout_s=30.0) for s in (0, 1)))[0]
        assert late.result(10.0) == session and session.number == 3 and session.donors == (0, 1)
    assert fleet.sites[2].missed == 1


def test_a_site_whose_line_was_dark_is_still_in_its_session(process: Process, clients: list[CoordinatorClient]) -> None:
    events: list[Event] = []
    of, line = quick(seats=3), Line(process.port)
    a, b = process.client("a", of), process.client("b", of)
    c = CoordinatorClient(plain(line.address), of, "c", Card(address=None), on_event=events.append)
    clients += [a, b, c]
    c.join(10.0)
    fleet = Fleet(a, b, c)
    fleet.open(0, 1, 2)
    line.dark.set()
    eventually(lambda: c.away_s is not None, "it notices, though nothing is closed")
    a.wait_for(lambda r: r.members[2].standing == "out", 10.0)
    line.dark.clear()
    a.wait_for(lambda r: r.members[2].standing == "in", 10.0)
    eventually(lambda: [e.kind for e in events if e.kind in ("expired", "rejoined")] == ["expired", "rejoined"], str(events))
    assert a.waiting == ()
    line.close()


def test_a_coordinator_that_was_stopped_puts_nobody_out(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    a, b = clients
    epoch = a.roster.epoch
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: a.away_s is not None and a.away_s > 2 * a.timeouts.lease, "stopped for more than a lease")
    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: a.away_s is None and b.away_s is None, "back")
    time.sleep(a.timeouts.grace)
    assert fleet.open(0, 1, have=at(3)).number == 2 and b.roster.epoch == epoch


def test_news_that_were_overtaken_are_let_go(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    a = clients[0]
    old = a.news
    session = fleet.open(0, 1, have=at(3))
    a.wait_for(lambda r: r.session == session, 10.0)
    a._heard(old)
    assert a.roster.session == session


def test_foreign_configuration_is_refused_in_words(process: Process, clients: list[CoordinatorClient]) -> None:
    clients.append(process.client("a"))
    for change, words in (
        ({"configuration": "f00"}, "configuration = f00 \\(the run: c0ffee\\)"),
        ({"layout": "f00"}, "layout = f00"),
    ):
        client = process.client("b", quick(**change), join=False)
        clients.append(client)
        with pytest.raises(Refused, match=words):
            client.join(5.0)


def test_the_world_is_told(process: Process, clients: list[CoordinatorClient]) -> None:
    events: list[Event] = []
    a = process.client("a", quick(seats=1, min_sites=1), events=events)
    clients.append(a)
    process.kill()
    eventually(lambda: any(e.kind == "away" for e in events), "told")
    assert a.away_s is not None
    process.start()
    eventually(lambda: any(e.kind == "back" for e in events), "told")
    assert [e.kind for e in events if e.kind in ("away", "back")] == ["away", "back"], "once each"
    assert a.away_s is None and "answers again, after" in next(e.text for e in events if e.kind == "back")


def test_a_run_whose_file_is_lost_goes_on(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients)
    session = fleet.open(0, 1, have=at(5))
    process.kill()
    for path in process.state.parent.glob("runs.db*"):
        path.unlink()
    process.start()
    for client in clients:
        client.wait_for(lambda r: r.session == session and r.inside == (0, 1), 20.0)
    assert fleet.open(0, 1, have=at(9, 2)).number == 3
    assert [c.seat for c in clients] == [0, 1]


# ---- without it


def test_sites_elect_one_and_hand_in_what_was_decided(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients, "abc", without="elect", floor_s=3.0)
    for client in clients:
        client.wait_for(lambda r: r.inside == (0, 1, 2), 10.0)
    process.kill()
    second = fleet.open(0, 1, 2, have=at(3))
    assert (second.number, second.by) == (2, 0)
    fleet.there.discard(0)  # the lowest dies, and the next one stands in
    fleet.lost.add(0)
    clients[0].close()
    third = fleet.open(1, 2, have=at(5, 2))
    assert (third.number, third.members, third.by) == (3, (1, 2), 1)
    process.start()
    eventually(lambda: clients[1].away_s is None and clients[2].away_s is None, "back")
    clients[1].wait_for(lambda r: r.session == third and r.inside == (1, 2), 10.0)
    fourth = fleet.open(1, 2, have=at(7, 3))
    assert (fourth.number, fourth.by) == (4, None)


def test_less_than_a_majority_decides_nothing(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients, "abc", without="elect", alone=True, min_sites=1, floor_s=3.0)
    for client in clients:
        client.wait_for(lambda r: r.inside == (0, 1, 2), 10.0)
    process.kill()
    fleet.there, fleet.lost = {2}, {0, 1}
    with pytest.raises(NotYet, match="too few to go on, without a, b"):
        fleet.sites[2].open(at(3), timeout_s=4.0)


def test_or_they_wait_for_it(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients, "abc", without="wait", floor_s=3.0)
    process.kill()
    with pytest.raises(NotYet, match="does not answer"):
        together(*(lambda s=s: fleet.sites[s].open(at(3), timeout_s=2.5) for s in range(3)))
    process.start()
    assert fleet.open(0, 1, 2, have=at(3)).number == 2


def test_nobody_stands_in_for_a_coordinator_that_is_there(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = fleet_of(process, clients, "abc", without="elect", floor_s=3.0)
    b = clients[1]
    request = Propose(caller=b.caller, number=2, have=at(3), alive=(0, 1, 2))
    answer = fleet.sites[0].serve(pack(Elect(propose=request, known=Known())))
    assert b'"ask_coordinator":true' in answer
    for rubbish in (b"nonsense", pack(Elect(propose=request.model_copy(update={"caller": caller("b", 5)}), known=Known()))):
        with pytest.raises(Refused):
            fleet.sites[0].serve(rubbish)


def test_a_site_that_went_astray_is_told_and_heals(process: Process, clients: list[CoordinatorClient]) -> None:
    events: list[Event] = []
    of = quick(seats=2)
    a, b = process.client("a", of), process.client("b", of, events=events)
    clients += [a, b]
    fleet = Fleet(a, b)
    first = fleet.open(0, 1)
    other = first.model_copy(update={"round": 9})
    fleet.sites[1].entered(other)
    eventually(lambda: any(e.kind == "astray" and "nobody else opens" in e.text for e in events), "told")
    a_opens = ThreadPoolExecutor(1).submit(lambda: fleet.sites[0].open(at(3), timeout_s=30.0))
    session = fleet.sites[1].open(at(99), timeout_s=30.0)
    assert session == a_opens.result(10.0) and session.donors == (0,) and session.round == 3
