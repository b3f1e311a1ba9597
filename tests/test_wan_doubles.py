"""Two processes under one site's name: never both in one session, and the first one is put out for a reason only."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from coordinator_toys import Desk, Process, at, caller, eventually, quick, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wan_run import sets_of
from test_wan_run_faults import meets
from test_wan_run_sessions import last
from wan_run_toys import field

from gossamer.core.errors import RunFailed
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.messages import Refused
from gossamer.wan.roster.records import Session

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "runs.db")
    yield made
    made.close()


def refused(desk: Desk, site: str, boot: int) -> Refused:
    with pytest.raises(Refused) as caught:
        desk.join(site, boot=boot)
    assert caught.value.code == "taken"
    return caught.value


def test_while_the_first_one_answers(desk: Desk) -> None:
    desk.found()
    desk.wait(60.0, "a", "b", "c")
    before = desk.state()
    first = refused(desk, "b", 1)
    assert first.refusal.retry_s == pytest.approx(1.25) and "its lease is over in 10 s" in str(first), "not known yet"
    desk.clock.now_s += 1.0
    desk.beat("b")
    second = refused(desk, "b", 1)
    assert second.refusal.retry_s is None
    for words in ("site b", "there for 61 s", "and answers", "Stop the other one", "10 s", "--take-over"):
        assert words in str(second)
    assert desk.state() == before and desk.standing("b") == "in", "nothing has changed for anybody"
    desk.wait(60.0, "a", "b", "c")
    assert refused(desk, "b", 2).refusal.retry_s is not None, "what was seen a minute ago says nothing of now"


def test_the_address_of_the_first_one_is_named(desk: Desk) -> None:
    desk.join("b", address="203.0.113.5:7001")
    refused(desk, "b", 1)
    desk.clock.now_s += 1.0
    desk.beat("b")
    assert "another process of site b at 203.0.113.5:7001 is in run demo" in str(refused(desk, "b", 1))


def test_a_crashed_one_is_followed_at_once(desk: Desk) -> None:
    desk.found()
    desk.dies("b")
    assert desk.join("b", boot=1).seat == 1 and desk.standing("b") == "waiting"


def test_a_stream_that_broke_and_a_site_that_lives(desk: Desk) -> None:
    desk.found()
    desk.dies("b")
    desk.beat("b")
    refused(desk, "b", 1)


def test_one_that_stands_still_is_waited_for_until_its_lease_is_over(desk: Desk) -> None:
    desk.found()
    came_s, until_s = desk.clock.now_s, desk.clock.now_s + 10.0
    while desk.clock.now_s < until_s - 1e-6:
        retry_s = refused(desk, "b", 1).refusal.retry_s
        assert retry_s is not None and 0 < retry_s <= 1.25
        desk.wait(retry_s, "a", "c", step_s=retry_s)
    assert desk.clock.now_s == pytest.approx(came_s + 10.0)
    desk.join("b", boot=1)


def test_or_it_is_taken_over_at_once(desk: Desk) -> None:
    desk.found()
    desk.join("b", boot=1, take_over=True)
    with pytest.raises(Refused, match="another process of site b has joined") as caught:
        desk.beat("b")
    assert caught.value.code == "superseded"


def test_after_a_restart_of_the_coordinator(desk: Desk) -> None:
    """It does not know who has died meanwhile. Who lives has shown itself within half a lease."""
    desk.found()
    desk.restart()
    assert refused(desk, "b", 1).refusal.retry_s is not None
    desk.wait(6.0, "a", "c")
    desk.join("b", boot=1)
    refused(desk, "a", 1)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "over", "propose", "propose", "beat", "die", "wait", "restart", "leave"]),
        st.sampled_from("ab"),
        st.integers(0, 1),
        st.sampled_from([0.5, 2.0, 6.0, 11.0]),
    ),
    min_size=20,
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(EVENTS)
def test_never_two_processes_of_one_site_in_one_session(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, str, int, float]]
) -> None:
    """Whatever they do: a session is given to one process of each of its sites; and a process that shows itself is put out by nobody who
    was not told to."""
    desk = Desk(tmp_path_factory.mktemp("desk") / "runs.db")
    two = spec(seats=2)
    given_to: dict[tuple[Session, str], set[int]] = defaultdict(set)
    try:
        first = desk.found("a", "b", of=two)
        given_to[first, "a"].add(0)
        given_to[first, "b"].add(0)
        heard_s = dict.fromkeys("ab", desk.clock.now_s)
        for what, site, boot, seconds in events:
            member = desk.state().find(site)
            with suppress(Refused):
                if what in ("join", "over"):
                    holder, sound = member.boot, member.there and desk.clock.now_s - heard_s.get(site, -1e9) < 2.0
                    desk.join(site, boot=boot, of=two, take_over=what == "over")
                    assert what == "over" or not sound or holder == caller(site, boot).boot, "a sound process was put out"
                    if holder != caller(site, boot).boot:
                        heard_s.pop(site, None)
                elif what == "beat":
                    desk.beat(site, boot=boot)
                    heard_s[site] = desk.clock.now_s
                elif what == "propose":
                    verdict = desk.propose(site, at(3), boot=boot, number=desk.state().session.number + (seconds < 6.0))
                    if verdict.session is not None and not verdict.late:
                        given_to[verdict.session, site].add(boot)
                elif what == "die" and member.boot == caller(site, boot).boot:
                    desk.dies(site, boot)
                    heard_s.pop(site, None)
                elif what == "wait":
                    desk.wait(seconds)
                elif what == "restart":
                    desk.restart()
                    heard_s.clear()
                elif what == "leave":
                    desk.coordinator.leave(caller(site, boot))
                    heard_s.pop(site, None)
        assert all(len(boots) == 1 for boots in given_to.values()), given_to
    finally:
        desk.close()


# ---- over the network


def test_clients(process: Process) -> None:
    made: list[CoordinatorClient] = []
    failures: list[RunFailed] = []
    try:
        made.append(first := process.client("b", quick()))
        eventually(lambda: first.stands, "the standing stream")
        second = process.client("b", quick(), join=False)
        made.append(second)
        with pytest.raises(Refused, match="and answers: two processes cannot be one site"):
            second.join(10.0)
        assert first.failure is None
        first.on_failure = failures.append
        made.append(third := process.client("b", quick(), take_over=True))
        eventually(lambda: first.failure is not None, "the first one gives up")
        assert failures == [first.failure] and "another process of site b has joined" in str(failures[0])
        with pytest.raises(RunFailed, match="another process of site b"):
            first.plan(1.0)
        third.close()  # without a word: as if it had died
        made.append(process.client("b", quick()))
    finally:
        for one in made:
            one.close()


@pytest.mark.timeout(300)
def test_at_the_same_port(text: Path, tmp_path: Path) -> None:
    sets = sets_of(text, 2, "diloco", run__rounds=5000, clock__pace_s=0.1, eval__every=0, checkpoint__every=0)
    with field(tmp_path / "wan", sets, tls=False) as run:
        with socket.create_server(("127.0.0.1", 0)) as one:
            bind = ("--bind", f"127.0.0.1:{one.getsockname()[1]}")
        run.join("lyon")
        run.join("oslo", options=bind)
        meets(run, "oslo", "lyon")
        first = run.processes["oslo"]

        def again(name: str, *options: str) -> None:
            """The same command, with what it says in a log of its own."""
            where = ["--site", "oslo", "--coordinator", f"127.0.0.1:{run.port}", "--out", str(run.root / "runs" / "oslo")]
            run._start(name, "join", *where, *bind, *options, *[word for s in sets for word in ("--set", s)])

        again("twin")
        run.ends("twin", code=2)
        assert "another process of site oslo at 127.0.0.1:" in run.log("twin") and "--take-over" in run.log("twin")
        again("third", "--take-over")
        assert first.wait(120) == 1, run.log("oslo")
        run.says("third", r"session \d+, from round [1-9]\d*: lyon, oslo")
        run.processes["oslo"] = run.processes["third"]
        run.trains("oslo", 2)


@pytest.mark.timeout(400)
def test_processes(text: Path, tmp_path: Path) -> None:
    sets = sets_of(text, 2, "diloco", run__rounds=5000, clock__pace_s=0.1, eval__every=0, checkpoint__every=0)
    with field(tmp_path / "wan", sets, tls=False) as run:
        run.join("lyon", "oslo")
        meets(run, "oslo", "lyon")
        run.trains("oslo", 2)

        def second(name: str, *options: str) -> None:
            """Another process of oslo, elsewhere."""
            where = ["--site", "oslo", "--coordinator", f"127.0.0.1:{run.port}", "--out", str(run.root / "runs" / name)]
            run._start(name, "join", *where, *options, *[word for s in sets for word in ("--set", s)])

        second("twin")
        run.ends("twin", code=2)
        assert "another process of site oslo at 127.0.0.1:" in run.log("twin") and "--take-over" in run.log("twin")
        run.trains("oslo", 2)

        second("third", "--take-over")
        run.ends("oslo", code=1)
        said = run.log("oslo")
        assert "site oslo stops here: another process of site oslo has joined run diloco since" in said and "Traceback" not in said
        assert last(run, "oslo", 1)[0] > 0, "its state is saved"
        meets_again(run, "third")

        run.kill("third")  # a crash
        run.ends("third", code=-signal.SIGKILL)
        second("fourth")
        meets_again(run, "fourth")

        os.kill(run.processes["fourth"].pid, signal.SIGSTOP)
        second("fifth")
        run.says("fifth", r"its lease is over in \d+ s; this one waits so long")
        meets_again(run, "fifth")
        os.kill(run.processes["fourth"].pid, signal.SIGCONT)
        run.ends("fourth", code=1)
        run.stops("fifth", "lyon")


def meets_again(run, name: str) -> None:  # type: ignore[no-untyped-def]
    run.says(name, r"session \d+, from round \d+: lyon, oslo")
    folder, until_s = run.root / "runs" / name / "workers" / "1" / "metrics.jsonl", time.monotonic() + 60
    while not folder.exists() or not any(json.loads(line)["kind"] == "round" for line in folder.read_text().splitlines()):
        assert time.monotonic() < until_s, run.log(name)
        time.sleep(0.05)
