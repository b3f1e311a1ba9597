"""What a person meets who runs a job of sites: refusals that leave nothing behind, folders, waiting, ends, and words for all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinator_toys import caller, quick
from small_runs import flags, settings
from trust_toys import identity, sites
from wan_run_toys import field

from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.app.progress import Progress
from gossamer.app.wan.authority import _say
from gossamer.app.wan.folder import SiteFolder
from gossamer.app.wan.presence import Where
from gossamer.app.wan.spec import run_name
from gossamer.app.wan.state import Snapshot, read, write
from gossamer.app.wan.waiting import Waiting, elsewhere, waits
from gossamer.cli import main
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.tree import master
from gossamer.train import checkpoint
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.roster.calls import Away, ask_status, plain
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.records import Card, Member, Propose, Report, Roster, Spec, Verdict
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.roster.sessions import NotYet, Sessions
from gossamer.wan.trust.diagnose import speaks_tls
from gossamer.wan.trust.guard import Guard

pytestmark = pytest.mark.usefixtures("cache")

ROOT = Path(__file__).resolve().parent.parent
SPEC = Spec(run="run-7", configuration="aa", layout="bb", versions={}, seats=4, synchronous=True, min_sites=2, floor_s=30.0)


def sets_of(text: Path, **more: object) -> list[str]:
    base: dict[str, object] = {"method__name": '"diloco"', "fleet__name": '"uniform-2"', "wan__deadline_s": 12.0, "wan__run": '"one"'}
    return settings(text, **(base | more))


# ---- a whole run


@pytest.mark.timeout(300)
def test_what_a_newcomer_does_wrong_can_be_done_right_after(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = sets_of(text)
    with field(tmp_path, sets, tls=False) as run:
        at, runs = f"127.0.0.1:{run.port}", run.root / "runs"
        # The first try, and another: nobody needs a command to begin anew while no session has been.
        run.join("lyon", more=("plan.steps=7",))
        run.says(
            "lyon", r"it begins with 2 sites, and 1 asks: lyon .*wan\.founders not set.*There: lyon \(this site\); not there: 1 that has"
        )
        run.stops("lyon")
        assert not (runs / "lyon").exists(), "no session, no folder"
        run.join("lyon")
        run.says("lyon", r"it begins with 2 sites[^\n]*\n(?s:.*)it begins with 2 sites")
        # A site with another configuration is told which; nothing is left of it.
        run.join("oslo", more=("plan.steps=9", "seed=4"))
        run.ends("oslo", code=2)
        said = run.log("oslo")
        assert "plan.steps = 9 (the run: 2), seed = 4 (the run: 0)" in said and "--set wan.run=NAME" in said and "--resume" not in said
        assert not (runs / "oslo").exists()
        run.join("oslo")
        run.ends("lyon", "oslo")
        assert json.loads((runs / "oslo" / "facts.json").read_text()).items() >= {"site": "oslo", "run": "one", "seat": 1}.items()
        # The run is over: status says so, and what comes after it is told.
        status = ["wan", "status", "--coordinator", at]
        assert main(status) == 0
        shown = capsys.readouterr().out
        assert "run one: finished after 4 rounds" in shown and [line.split()[2] for line in shown.splitlines()[-2:]] == ["finished"] * 2
        assert all(line.split()[4] == "4" for line in shown.splitlines()[-2:]), "the last report counts"
        for name, out, code, words in (
            ("lyon", "oslo", 2, "is of site oslo, and this is site lyon"),
            ("oslo", "oslo", 0, "site oslo has finished run one"),
            ("lyon", "anew", 2, "run one is over: its summary is at site lyon"),
        ):
            run._start("again", "join", "--site", name, "--coordinator", at, "--out", str(runs / out), *flags(sets))
            run.ends("again", code=code)
            assert words in run.log("again")
        assert not (runs / "anew").exists()
        assert main(["wan", "forget", "one", "--coordinator", at]) == 0 and main(status) == 0
        shown = capsys.readouterr().out
        assert "run one is forgotten" in shown and "no run yet" in shown
        assert main(["wan", "forget", "one", "--coordinator", at]) == 1
        assert main(["wan", "forget", "no run", "--coordinator", at]) == 2


@pytest.mark.timeout(120)
def test_every_line_of_stderr_is_an_object(text: Path, tmp_path: Path) -> None:
    """Of a site that is refused."""
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", threads=16) as server:
        at = f"127.0.0.1:{server.port}"
        other: Any = CoordinatorClient(plain(at), SPEC, "lyon", Card(address="127.0.0.1:5"))
        other.join(30)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        arguments = [
            "wan",
            "join",
            "--site",
            "oslo",
            "--coordinator",
            at,
            "--log-format",
            "json",
            *flags(sets_of(text, wan__run='"run-7"')),
        ]
        done = subprocess.run([sys.executable, "-m", "gossamer", *arguments], capture_output=True, text=True, env=env, cwd=tmp_path)
        other.close()
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and found[-1]["level"] == "error" and "differs from run run-7" in found[-1]["message"]
    assert found[0]["message"] == "loading ..."
    assert found[1]["message"].startswith("site oslo of run run-7") and "site oslo of run run-7" in done.stdout
    assert {line["run"] for line in found[1:]} == {"run-7"}


# ---- folders


def test_a_folder_is_of_one_site_and_one_run(text: Path, tmp_path: Path) -> None:
    job = resolve(load([], sets_of(text)))
    data, path = job.corpus(), tmp_path / "here"
    new = SiteFolder(path, job, data, "lyon", "one")
    assert not new.there and not path.exists()
    new.begin(1)
    new.begin(1)
    again = SiteFolder(path, job, data, "lyon", "one")
    assert again.there and again.seat == 1
    for site, run, words in (("oslo", "one", "is of site lyon"), ("lyon", "two", "is of run one, and this is run two")):
        with pytest.raises(BadInput, match=words):
            SiteFolder(path, job, data, site, run)
    with pytest.raises(BadInput, match="had seat 1 in"):
        again.begin(0)
    with pytest.raises(BadInput, match=r"plan\.steps = 9 \(the run: 2\)"):
        SiteFolder(path, resolve(load([], sets_of(text, plan__steps=9))), data, "lyon", "one")
    facts = path / "facts.json"
    facts.write_text(facts.read_text().replace('"wan"', '"net"'))
    with pytest.raises(BadInput, match=r"is none of a site, but of gossamer train: choose another folder with --out"):
        SiteFolder(path, job, data, "lyon", "one")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(BadInput, match="choose another folder with --out") as refused:
        SiteFolder(tmp_path / "other", job, data, "lyon", "one")
    assert "--resume" not in str(refused.value)


def test_a_checkpoint_of_another_model_or_command_is_named_with_what_to_do(text: Path, tmp_path: Path) -> None:
    job = resolve(load([], sets_of(text)))
    body = job.body(0, job.corpus())
    held = Snapshot.of(job.first_state(0, master(body.tree)), body, 1.0, 3)
    sha = write(tmp_path, 0, held)[1]
    checkpoint.close(tmp_path, 0, 0, {0: sha})
    assert read(tmp_path, 0, 0, body).session == 3
    name = next(iter(held.state.x))
    for x, extra, words in (
        ({**held.state.x, name: torch.zeros(3)}, {"time_s": 1.0, "session": 3}, f"is of another model, which has another {name}: put"),
        (held.state.x, {}, "is none that a site has written: put its own"),
    ):
        state = replace(held.state, x=x)
        checkpoint.close(tmp_path, 0, 0, {0: checkpoint.write_part(tmp_path, 0, 0, state, held.body, extra)})
        with pytest.raises(RunFailed, match=words):
            read(tmp_path, 0, 0, body)


# ---- waiting


def test_waiting_is_said_when_it_is_new_and_every_half_minute() -> None:
    now, said = [0.0], []
    waiting = Waiting(said.append, now_s=lambda: now[0])
    for now[0] in range(100):
        waiting.still("for oslo" if now[0] < 70 else "for lyon")
    assert [s for s in said if not s.startswith("still")] == ["for oslo", "for lyon"]
    assert [s for s in said if s.startswith("still")] == ["still waiting, after 30 s: for oslo", "still waiting, after 1 min 0 s: for oslo"]


def test_what_passes_by_itself_is_not_said() -> None:
    said: list[str] = []
    waiting = Waiting(said.append, twice=True)
    for text in ("a", "b", "c", "c", "b", "c"):
        waiting.still(text)
    assert said == ["c"]


class Sluggish:
    """A coordinator that does not always answer in time, as a site has it."""

    def __init__(self) -> None:
        self.spec, self.seat, self.session, self.astray, self.away_s = quick(), 0, None, None, None
        self.caller, self.timeouts = caller("lyon"), Timeouts.of(quick().floor_s)
        self.roster = Roster(run="demo", revision=1, epoch=1, generation=0, members=(), session=None)

    def hand_in(self, timeout_s: float) -> None:
        if self.away_s is not None:
            raise Away("the coordinator does not answer (no answer in time)")

    def propose(self, request: Propose, timeout_s: float) -> Verdict:
        return Verdict(session=None, why="it begins with 3 sites")


def test_a_coordinator_that_is_slow_for_a_moment_changes_nothing_of_what_is_waited_for() -> None:
    said: list[str] = []
    client: Any = Sluggish()
    sessions, waiting = Sessions(client, alive=tuple, gone=tuple, ask=lambda seat, data: data), Waiting(said.append, twice=True)
    moment_s, long_s = client.timeouts.beat, 1.1 * client.timeouts.beat
    for client.away_s in (moment_s, moment_s, None, None, moment_s, moment_s, None, None, long_s, long_s, None, None):
        with pytest.raises(NotYet) as found:
            sessions.open(None, timeout_s=0.002)
        if found.value.why:
            waiting.still(found.value.why)
    assert said == ["it begins with 3 sites", "the coordinator does not answer (no answer in time)", "it begins with 3 sites"]


def test_who_is_there_and_who_is_not() -> None:
    members = [Member(site=s, seat=i, boot="0" * 32, card=Card(address=None), there=s != "porto") for i, s in enumerate(("lyon", "porto"))]
    roster = Roster(run="run-7", revision=1, epoch=1, generation=0, members=tuple(members), session=None)
    assert (
        waits(SPEC, roster, "lyon", "w\x1b") == r"run run-7 waits: w\x1b. There: lyon (this site); not there: porto, 2 that have never come"
    )
    named = SPEC.model_copy(update={"sites": ("lyon", "porto", "riga", "oslo")})
    assert waits(named, roster, "porto", "w").endswith("There: lyon; not there: porto, riga (has never come), oslo (has never come)")


def test_a_place_where_no_coordinator_will_ever_be(tmp_path: Path) -> None:
    made = sites(tmp_path)
    guard = Guard("a", lambda run: None, identity(made, "a"))
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", interceptors=[guard], listen=guard.listen, threads=8) as server:
        at = f"127.0.0.1:{server.port}"
        assert speaks_tls(at) and not speaks_tls("127.0.0.1:1")
        assert "wants certificates" in str(elsewhere(Where("lyon", at), Away("no answer")))
        assert main(["wan", "status", "--coordinator", at]) == 1
    with CoordinatorServer(tmp_path / "more.db", "127.0.0.1:0", threads=8) as server:
        where = Where("lyon", f"127.0.0.1:{server.port}")
        assert not speaks_tls(where.coordinator) and elsewhere(where, Away("no answer")) is None
    assert "is no coordinator" in str(elsewhere(where, Away("no answer", other=True)))


# ---- what is shown


def test_the_last_exchange_is_ever_longer_ago(tmp_path: Path) -> None:
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", threads=16) as server:
        at = plain(f"127.0.0.1:{server.port}")
        quick = SPEC.model_copy(update={"floor_s": 1.2})
        client: Any = CoordinatorClient(at, quick, "lyon", Card(address="127.0.0.1:5"))
        client.join(30)
        client.report(Report(round=3, exchange_s=5.0))
        seen: list[float] = []
        while len(seen) < 3:
            one = ask_status(at).runs[0].sites[0].report
            if one is not None and one.exchange_s is not None and (not seen or one.exchange_s > seen[-1]):
                seen.append(one.exchange_s)
        client.report(Report(round=4, exchange_s=0.5))
        client.leave()
        last = ask_status(at).runs[0].sites[0].report
    assert seen[0] >= 5.0 and last is not None and last.round == 4, "what was told last is told before a site leaves"


def test_what_is_left_is_counted_from_where_a_site_came_in() -> None:
    now = [0.0]
    progress = Progress(100, "x", quiet=True, now_s=lambda: now[0])
    progress.goes_on(90, 900)
    now[0] = 10.0
    assert progress._status(91, 910, None, "", "loss") == "round 91/100, 1 tokens/s, 1 min 30 s left"


def test_time_outs_are_shown_when_asked_for(text: Path, tmp_path: Path) -> None:
    with field(tmp_path, sets_of(text), tls=False) as run:
        run.join("lyon", options=("--time-outs",))
        run.says("lyon", r"keepalive +\d")
        run.kill("lyon", signal.SIGTERM)
        run.ends("lyon", code=128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("option", "address"),
    [
        ("--coordinator", "127.0.0.1"), ("--coordinator", "http://127.0.0.1:7400"), ("--relay", "127.0.0.1:abc"), ("--bind", "127.0.0.1"),
        ("--bind", "127.0.0.1:70000"), ("--advertise", "lyon:99999"), ("--advertise", f"{'x' * 300}:1"),
        ("--advertise", "%s:7469"), ("--advertise", "a..b:1"), ("--advertise", "999.1.1.1:1"), ("--bind", "::1:7469"),
        ("--metrics", "127.0.0.1:http"),
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_not_waited_for(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, address: str
) -> None:
    given = {"--coordinator": "127.0.0.1:1", option: address}
    command = ["wan", "join", "--site", "lyon", "--out", str(tmp_path / "run"), *(word for pair in given.items() for word in pair)]
    assert main([*command, *flags(sets_of(text))]) == 2
    said = capsys.readouterr().err
    assert address in said and "expected HOST:PORT" in said


def test_without_certificates_a_site_is_on_loopback(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others would be told that theirs is the wrong address."""
    command = ["wan", "join", "--site", "lyon", "--out", str(tmp_path / "run"), "--coordinator", "127.0.0.1:1", "--bind", "127.0.0.1:0"]
    assert main([*command, "--advertise", "lyon.example.org:7001", *flags(sets_of(text))]) == 2
    said = capsys.readouterr().err
    assert "--advertise lyon.example.org:7001: not a loopback address, and there is no certificate" in said and "--identity DIR" in said


def test_a_coordinator_listens_where_it_was_told_to_or_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for bind, state in (("127.0.0.1:70000", tmp_path / "runs.db"), ("127.0.0.1:0", tmp_path / "file" / "runs.db")):
        assert main(["wan", "coordinator", "--bind", bind, "--state", str(state)]) == 2
    said = capsys.readouterr().err
    assert "127.0.0.1:70000: cannot be bound: expected HOST:PORT" in said
    assert "file/runs.db cannot be used as the coordinator's state" in said


@pytest.mark.parametrize("run", ["Привет", "a b", "r" * 65, "../one"])
def test_an_id_of_a_run_is_not_made_into_another_one(text: Path, run: str) -> None:
    with pytest.raises(BadInput, match=r"wan\.run is .*expected 1 to 64 of"):
        run_name(resolve(load([], sets_of(text, wan__run=json.dumps(run, ensure_ascii=False)))))
    assert run_name(resolve(load([], sets_of(text, wan__run='"one-1.b_2"')))) == "one-1.b_2"


def test_addresses_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """In some of them there is the name of a picture."""
    _say("waits for [2001:db8:100:5::1]:7001")
    assert capsys.readouterr().out == "waits for [2001:db8:100:5::1]:7001\n"
    with Progress(4, "2001:db8:100:5::1"):
        assert "2001:db8:100:5::1" in capsys.readouterr().out
