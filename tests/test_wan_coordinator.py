"""The coordinator on 127.0.0.1, in a process of its own that is killed and started again; its clients; the time without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from coordinator_toys import Nursery, Process, eventually, quick
from wan_toys import Line

from gossamer.core.errors import RunFailed
from gossamer.wan.calls import Away, ask_status, plain
from gossamer.wan.client import CoordinatorClient, Event
from gossamer.wan.messages import Refused
from gossamer.wan.records import Card, Have, Plan, Propose, Report, Share
from gossamer.wan.rounds import Rounds
from gossamer.wan.store import RunStore

ALL = (Share(seat=0, weight=100), Share(seat=1, weight=50))
TWO = {"seats": 2}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def process(nursery: Nursery, tmp_path: Path) -> Iterator[Process]:
    made = Process(nursery, tmp_path / "runs.db")
    yield made
    made.kill()


@pytest.fixture
def clients() -> Iterator[list[CoordinatorClient]]:
    made: list[CoordinatorClient] = []
    yield made
    for client in made:
        client.close()


def pair(
    process: Process, clients: list[CoordinatorClient], run: str = "demo", **changes: Any
) -> tuple[CoordinatorClient, CoordinatorClient]:
    of = quick(run, **{**TWO, **changes})
    a, b = process.client("a", of), process.client("b", of)
    clients += [a, b]
    a.wait_for(lambda r: r.synced == (0, 1), 10.0)
    return a, b


def together(*jobs: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [f.result() for f in [pool.submit(job) for job in jobs]]


def test_sites_meet_and_part(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    assert (a.seat, b.seat) == (0, 1) and a.seed == b.seed >= 0
    assert a.roster.synced == (0, 1)
    b.leave()
    with pytest.raises(RunFailed, match="has left"):
        b.set("k", "v", 1.0)
    began_s = time.monotonic()
    roster = a.wait_for(lambda r: r.synced == (0,), 10.0)
    assert time.monotonic() - began_s < a.timeouts.beat + 5.0 and roster.members[1].standing == "out"


def test_a_killed_coordinator_loses_nothing(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    verdicts = together(*(lambda c=c: c.propose(0, ALL, timeout_s=10.0) for c in (a, b)))
    a.set("key", "value", 5.0)
    plan = Plan(version=1, since=3, body="{}")
    assert a.publish(plan, 5.0) == plan
    before = a.roster
    process.kill()
    with pytest.raises(Away):
        b.set("other", "x", 0.3)
    eventually(lambda: a.away_s is not None and b.away_s is not None, "both notice")
    assert a.roster.synced == (0, 1), "the last roster stays"
    process.start()
    eventually(lambda: a.away_s is None and b.away_s is None, "both come back by themselves")
    assert verdicts[0].commit is not None and {v.commit for v in verdicts} == {verdicts[0].commit}
    for c in (a, b):
        other = tuple(Share(seat=s, weight=1) for s in (0, 1))
        assert c.propose(0, other, timeout_s=5.0).commit == verdicts[0].commit, "the same answer after a restart"
    assert b.get(["key"], 5.0).values == ("value",) and b.plan(5.0) == plan
    assert (a.roster.epoch, a.roster.members) == (before.epoch, before.members), "nobody had to join again"


def test_a_proposal_survives_the_coordinator(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    half = (ALL[0],)
    waiting = ThreadPoolExecutor(1).submit(lambda: a.propose(0, half, timeout_s=20.0))
    time.sleep(0.2)
    process.kill()
    time.sleep(0.2)
    process.start()
    assert b.propose(0, ALL, timeout_s=10.0).commit is not None
    verdict = waiting.result(10.0)
    assert verdict.commit is not None and verdict.commit.by == 1


def test_kills_at_any_moment_give_nobody_another_answer(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    over, deaths = threading.Event(), []

    def kill() -> None:
        while not over.wait(0.6):
            process.kill()
            deaths.append(process.pid)
            process.start()

    with ThreadPoolExecutor(1) as killer:
        kills = killer.submit(kill)
        try:
            t = -1
            while len(deaths) < 4:
                t += 1
                jobs = []
                for who, c in enumerate((a, b)):
                    took = tuple(Share(seat=seat, weight=10 * t + who) for seat in (0, 1))
                    jobs.append(lambda c=c, t=t, took=took: c.propose(t, took, timeout_s=30.0))
                first, second = together(*jobs)
                assert first.commit is not None and first.commit == second.commit
        finally:
            over.set()
            kills.result()
    assert a.failure is None and b.failure is None


def test_two_runs_side_by_side(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients, "one")
    c, d = pair(process, clients, "two", synchronous=False, without="go_on", seed=7)
    a.set("key", "of one", 5.0)
    assert not c.get(["key"], 5.0).found and (c.seed, d.seed) == (7, 7)
    assert a.propose(0, ALL, timeout_s=5.0).commit is not None and d.news.newest is None
    d.leave()
    c.wait_for(lambda r: r.synced == (0,), 10.0)
    assert b.roster.synced == (0, 1)
    status = ask_status(plain(f"127.0.0.1:{process.port}"))
    assert [(r.run, len(r.sites), r.newest) for r in status.runs] == [("one", 2, 0), ("two", 2, None)]


def test_a_dead_process_is_out_before_its_lease_is_over(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients, floor_s=30.0)
    eventually(lambda: b.stands, "its stream stands")
    b.close()  # without a word
    began_s = time.monotonic()
    a.wait_for(lambda r: r.synced == (0,), 20.0)
    assert time.monotonic() - began_s < a.timeouts.lease - 1.0


def test_a_site_whose_line_was_dark_joins_again_and_heals(process: Process, clients: list[CoordinatorClient]) -> None:
    events: list[Event] = []
    of, line = quick(seats=3, founders=2), Line(process.port)
    a, b = process.client("a", of), process.client("b", of)
    c = CoordinatorClient(plain(line.address), of, "c", Card(address=None), have=None, on_event=events.append)
    clients += [a, b, c]
    c.join(10.0)
    c.synced(Have(round=0, digest="00"), "a", 5.0)
    line.dark.set()
    eventually(lambda: c.away_s is not None, "it notices, though nothing is closed")
    a.wait_for(lambda r: r.members[2].standing == "out", 10.0)
    line.dark.clear()
    a.wait_for(lambda r: r.members[2].standing == "healing", 10.0)
    eventually(lambda: [e.kind for e in events if e.kind in ("expired", "rejoined")] == ["expired", "rejoined"], str(events))
    with pytest.raises(Refused) as refused:
        c.propose(0, (Share(seat=2, weight=1),), timeout_s=1.0)
    assert refused.value.code == "not_in_sync"
    line.close()


def test_a_coordinator_that_was_stopped_puts_nobody_out(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    epoch = a.roster.epoch
    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: a.away_s is not None and a.away_s > 2 * a.timeouts.lease, "stopped for more than a lease")
    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: a.away_s is None and b.away_s is None, "back")
    time.sleep(a.timeouts.grace)
    assert a.propose(0, ALL, timeout_s=5.0).commit is not None and b.roster.epoch == epoch


def test_news_that_were_overtaken_are_let_go(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients, synchronous=False, without="go_on")
    old = a.news
    b.leave()
    a.wait_for(lambda r: r.pending is not None, 10.0)
    asked = a.roster
    a.promise(asked.pending or 0, 4)
    a.wait_for(lambda r: r.turn is not None and r.turn.since == 4, 10.0)
    turn = a.roster.turn
    for stale in (old, old.model_copy(update={"roster": asked})):
        a._heard(stale)
        assert a.roster.turn == turn and a.roster.pending is None, "even where the epoch is the same"


def test_of_two_processes_of_a_site_the_later_stays(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    again = process.client("b", quick(**TWO))
    clients.append(again)
    eventually(lambda: b.failure is not None, "the first one gives up")
    with pytest.raises(RunFailed, match="another process of site b"):
        b.set("k", "v", 1.0)
    assert again.failure is None and a.failure is None


def test_foreign_configuration_is_refused_in_words(process: Process, clients: list[CoordinatorClient]) -> None:
    clients.append(process.client("a"))
    for change, words in (
        ({"configuration": "f00"}, "another configuration f00 \\(expected c0ffee\\)"),
        ({"layout": "f00"}, "another layout f00"),
    ):
        client = process.client("b", quick(**change), join=False)
        clients.append(client)
        with pytest.raises(Refused, match=words):
            client.join(5.0)


def test_waiting_for_a_key(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: a.get(["x", "y"], 5.0, wait_s=20.0))
        b.set("x", "1", 5.0)
        time.sleep(0.1)
        assert not waiting.done()
        b.set("y", "2", 5.0)
        assert waiting.result(5.0).values == ("1", "2")
    assert not a.get(["z"], 5.0, wait_s=0.05).found


def test_the_store_holds_nobody_up(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    mine, theirs, later = RunStore(a, "0/"), RunStore(b, "0/"), RunStore(b, "1/")
    mine.set("k", "é")
    assert theirs.check(["k"]) and theirs.get("k").decode() == "é" and not later.check(["k"])
    assert theirs.wait(["k"], 5.0) and not theirs.wait(["none"], 0.05)
    with pytest.raises(RunFailed, match="not set"):
        theirs.get("none")
    process.kill()
    eventually(lambda: a.away_s is not None and b.away_s is not None, "away")
    began_s = time.monotonic()
    mine.set("n", "1")
    mine.set("m", "2")
    assert mine.check(["n", "m"]) and not theirs.check(["n"]) and theirs.get("k").decode() == "é"
    assert time.monotonic() - began_s < 0.5
    process.start()
    eventually(lambda: theirs.check(["n", "m"]), "sent when it is back")
    assert theirs.get("m") == b"2"


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
    assert a.away_s is None and "is back after" in next(e.text for e in events if e.kind == "back")


def test_a_run_whose_file_is_lost_begins_again(process: Process, clients: list[CoordinatorClient]) -> None:
    a, b = pair(process, clients)
    for c in (a, b):
        c.report(Report(round=5, loss=2.5), Have(round=5, digest="55"))
    process.kill()
    for path in process.state.parent.glob("runs.db*"):
        path.unlink()
    process.start()
    roster = a.wait_for(lambda r: r.founded == 5, 10.0)
    assert roster.synced == (0, 1)


# ---- without it


class Fleet:
    """Sites that can talk to each other, whatever becomes of the coordinator."""

    def __init__(self, *clients: CoordinatorClient) -> None:
        self.there = set(range(len(clients)))
        self.rounds = {c.seat: Rounds(c, lambda: set(self.there), self.ask) for c in clients}

    def ask(self, seat: int, data: bytes) -> bytes:
        if seat not in self.there:
            raise RunFailed(f"seat {seat} is gone")
        return self.rounds[seat].serve(data)

    def commit(self, round: int, *seats: int, timeout_s: float = 20.0) -> list[Any]:
        jobs = []
        for seat in seats:
            took = tuple(Share(seat=s, weight=100 * round + seat) for s in seats)
            jobs.append(lambda seat=seat, took=took: self.rounds[seat].commit(round, took, timeout_s=timeout_s))
        return together(*jobs)


def trio(process: Process, clients: list[CoordinatorClient], **changes: Any) -> Fleet:
    of = quick(**{"floor_s": 3.0, **changes})
    clients += [process.client(s, of) for s in ("a", "b", "c")]
    for client in clients:
        client.wait_for(lambda r: r.synced == (0, 1, 2), 10.0)
    return Fleet(*clients)


def test_sites_elect_one_and_hand_in_what_was_decided(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = trio(process, clients, without="elect")
    assert len({v.commit for v in fleet.commit(0, 0, 1, 2)}) == 1
    process.kill()
    decided = [fleet.commit(t, 0, 1, 2)[0].commit for t in (1, 2)]
    fleet.there.discard(0)  # the lowest dies, and the next one stands in
    later = fleet.commit(3, 1, 2)
    assert None not in decided and {s.seat for s in later[0].commit.took} == {1, 2} and later[0].commit == later[1].commit
    clients[0].close()
    process.start()
    eventually(lambda: clients[1].away_s is None and clients[2].away_s is None, "back")
    assert len({v.commit for v in fleet.commit(4, 1, 2)}) == 1
    for t, commit in enumerate([*decided, later[0].commit], start=1):
        assert clients[2].propose(t, (Share(seat=2, weight=1),), timeout_s=5.0).commit == commit
    clients[1].wait_for(lambda r: r.synced == (1, 2), 10.0)


def test_less_than_a_majority_decides_nothing(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = trio(process, clients, without="elect", alone=True, min_sites=1)
    fleet.commit(0, 0, 1, 2)
    process.kill()
    fleet.there = {2}
    (verdict,) = fleet.commit(1, 2, timeout_s=2.5)
    assert verdict.commit is None and "too few to go on" in verdict.why


def test_or_they_wait_for_it(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = trio(process, clients, without="wait")
    process.kill()
    verdicts = fleet.commit(0, 0, 1, 2, timeout_s=2.5)
    assert {v.commit for v in verdicts} == {None} and "does not answer" in verdicts[0].why
    process.start()
    assert len({v.commit for v in fleet.commit(0, 0, 1, 2)} - {None}) == 1


def test_nobody_stands_in_for_a_coordinator_that_is_there(process: Process, clients: list[CoordinatorClient]) -> None:
    fleet = trio(process, clients, without="elect")
    clients[1]._calls._lost_s = time.monotonic() - 60.0  # this one believes that it is away
    verdict = fleet.rounds[1]._of_site(0, Propose(caller=clients[1].caller, round=0, took=ALL))
    assert verdict.commit is None and verdict.ask_coordinator
    with pytest.raises(Refused):
        fleet.rounds[0].serve(b"nonsense")
