"""Status, figures, logs, and the commands."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_docs import check_command
from trust_toys import sites

from gossamer.app.wan import logs, status
from gossamer.cli import main
from gossamer.core.errors import BadInput
from gossamer.wan import dialback
from gossamer.wan.links.link import Traffic
from gossamer.wan.metrics import CoordinatorMetrics, SiteMetrics
from gossamer.wan.relay.messages import Counters
from gossamer.wan.relay.server import RelayServer
from gossamer.wan.roster.calls import plain
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.ended import Ended
from gossamer.wan.roster.records import Card, Report, RunStatus, SiteStatus, Spec, Status
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.doors import Anybody
from gossamer.wan.trust.guard import AioGuard, Guard, caller_of
from gossamer.wan.trust.terms import Party, Terms, new_secret, read_secret

SPEC = Spec(run="run-7", configuration="aa", layout="bb", versions={}, seats=2, synchronous=True, min_sites=2, floor_s=30.0)
STATUS = Status(
    runs=(
        RunStatus(
            run="run-7", epoch=4, generation=0, newest=12, sessions=(), why="the run waits for site oslo", counts={"joins": 3, "leaves": 0},
            sites=(
                SiteStatus(
                    site="lyon", seat=0, standing="in", address="h:1", lease_s=9.5, lag=0,
                    report=Report(round=12, loss=3.25, bytes_sent=2_500_000_000, bytes_received=999, exchange_s=1.5),
                ),
                SiteStatus(site="oslo", seat=1, standing="out", address=None, lease_s=None, lag=None, report=None),
            ),
        ),
    )
)  # fmt: skip


def figures(text: str) -> dict[str, float]:
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line and line[0] != "#"}


def traffic(sent: int, sessions: int = 1, rtt_s: float | None = 0.04) -> Traffic:
    return Traffic(sent, 2 * sent, 3, 4, 5, 6, sessions, rtt_s, 1e6)


# ---- figures


def test_a_site_tells_its_rounds_and_its_time() -> None:
    one = SiteMetrics("lyon", "run-7")
    for round, loss in ((1, 4.0), (2, None)):
        one.round_done(round, loss=loss, tokens=100, seconds={"compute_s": 6.0, "network_idle_s": 1.5, "straggler_idle_s": 0.5, "x": 9.9})
    one.evaluated(3.5)
    for why in ("start", "join", "join"):
        one.session(3, 1, 2, why)
    one.coordinator(lambda: True)
    found, labels = figures(one.text()), 'run="run-7",site="lyon"'
    for name, value in (
        ("round", 2), ("loss", 4), ("validation_loss", 3.5), ("tokens_total", 200), ("utilisation", 0.75), ("session", 3),
        ("generation", 1), ("session_members", 2), ("coordinator_there", 1),
    ):  # fmt: skip
        assert found[f"gossamer_{name}{{{labels}}}"] == value
    assert found[f'gossamer_seconds_total{{kind="network_idle",{labels}}}'] == 3
    assert found[f'gossamer_sessions_total{{{labels},why="join"}}'] == 2
    assert not any("9.9" in line for line in one.text().splitlines())


def test_traffic_counts_on_over_new_links_and_while_there_are_none() -> None:
    now: dict[str, Traffic] | None = {"oslo": traffic(100, sessions=3)}

    def read() -> dict[str, Traffic]:
        if now is None:
            raise RuntimeError("closed")
        return now

    one = SiteMetrics("lyon", "run-7", traffic=read)
    key = 'gossamer_peer_payload_sent_bytes_total{peer="oslo",run="run-7",site="lyon"}'
    again = key.replace("payload_sent_bytes", "reconnects")
    seen = []
    for state in ({"oslo": traffic(100, 3)}, None, {"oslo": traffic(40)}, {"oslo": traffic(70, 2, None)}, {}):
        now = state
        found = figures(one.text())
        seen.append((found[key], found[again]))
    assert seen == [(100, 2), (100, 2), (140, 2), (170, 3), (170, 3)]
    assert not any("round_trip" in k for k in figures(one.text()))


def test_a_coordinator_tells_who_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    one = CoordinatorMetrics(lambda: STATUS, relay=lambda: {("run-7", "lyon"): Counters(10, 20, 5, 6, 7, True)})
    found = figures(one.text())
    for key, value in (
        ('run_sites{run="run-7",standing="in"}', 1), ('run_sites{run="run-7",standing="out"}', 1), ('run_epoch{run="run-7"}', 4),
        ('run_newest_round{run="run-7"}', 12), ('run_waits{run="run-7"}', 1), ('run_events_total{event="joins",run="run-7"}', 3),
        ('site_lease_seconds{run="run-7",site="lyon"}', 9.5), ('site_loss{run="run-7",site="lyon"}', 3.25),
        ('site_sent_bytes{run="run-7",site="lyon"}', 2.5e9), ('relay_pipes{run="run-7",site="lyon"}', 5),
        ('relay_received_bytes_total{run="run-7",site="lyon"}', 20),
    ):  # fmt: skip
        assert found[f"gossamer_{key}"] == value, key
    assert not any("oslo" in key for key in found), "a site that told nothing has no figures"


def test_the_page_is_there_and_goes() -> None:
    one, two = SiteMetrics("lyon", "run-7"), SiteMetrics("oslo", "run-7")
    one.round_done(5, loss=None, tokens=1, seconds={})
    port = one.serve("127.0.0.1:0")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        assert figures(page.read().decode())['gossamer_round{run="run-7",site="lyon"}'] == 5
    with pytest.raises(BadInput, match="cannot be bound"):
        two.serve(f"127.0.0.1:{port}")
    with pytest.raises(BadInput, match="cannot be bound"):
        two.serve("127.0.0.1:http")
    one.close()
    one.close()
    assert two.serve(f"127.0.0.1:{port}") == port
    two.close()


# ---- logs


@pytest.mark.parametrize("format", ["json", "text"])
def test_a_log_has_one_line_for_each_message_and_says_where(format: logs.Format) -> None:
    file = io.StringIO()
    place = logs.set_up_logs(format, site="lyon", run="run-7", file=file)
    log = logging.getLogger("gossamer.wan.links.link")
    log.info("begins")
    place.session, place.round = 3, 17
    log.warning("refused %s", "a\nb\x1b[31m")
    try:
        raise ValueError("x\ny")
    except ValueError:
        log.exception("failed")
    logging.getLogger("elsewhere").warning("not ours")
    lines = file.getvalue().splitlines()
    if format == "json":
        *found, other = (json.loads(line) for line in lines)
        assert (other["logger"], other["message"]) == ("elsewhere", "not ours"), "stderr has objects alone"
        assert [(f["session"], f["round"], f["level"]) for f in found] == [(None, None, "info"), (3, 17, "warning"), (3, 17, "error")]
        assert {(f["site"], f["run"], f["logger"]) for f in found} == {("lyon", "run-7", "gossamer.wan.links.link")}
        assert found[1]["message"] == "refused a\nb\x1b[31m" and "ValueError" in found[2]["error"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found[0]["time"])
    else:
        assert len(lines) == 3
        assert re.fullmatch(r"\d\d:\d\d:\d\d INFO wan\.links\.link site=lyon run=run-7 session=- round=- begins", lines[0])
        assert "session=3 round=17 refused a\\nb\\x1b[31m" in lines[1] and "ValueError" in lines[2]


def test_a_later_set_up_replaces_the_first() -> None:
    files = [io.StringIO(), io.StringIO()]
    for file in files:
        logs.set_up_logs("text", site="a", run="r", file=file)
    logging.getLogger("gossamer.x").warning("once")
    assert files[0].getvalue() == "" and files[1].getvalue().count("once") == 1


# ---- status


def test_whatever_goes_to_stderr_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings, threads that fail, and the last word of a process."""
    logs.set_up_logs("json", site="lyon", run="run-7")
    warnings.warn("an old thing", DeprecationWarning, stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    assert main(["wan", "status", "--coordinator", "example.org:7400"]) == 2
    lines = capsys.readouterr().err.splitlines()
    warned, failed, last = (json.loads(line) for line in lines)
    assert "an old thing" in warned["message"] and warned["level"] == "warning"
    assert "ZeroDivisionError" in failed["message"] and "Traceback" in failed["error"]
    assert last["level"] == "error" and "not a loopback address" in last["message"] and last["site"] == "lyon"
    logs.set_up_logs("text", site="lyon", run="run-7")
    assert main(["wan", "status", "--coordinator", "example.org:7400"]) == 2
    assert capsys.readouterr().err.startswith("gossamer: example.org:7400")


def shown(found: Status, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(status.status_tables(found, width))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_table_of_a_run() -> None:
    text = shown(STATUS)
    assert "run run-7: 1 of 2 sites there" in text and "round 12" in text and "joins 3" in text and "leaves" not in text
    assert "the run waits for site oslo" in text
    (lyon,) = [line.split() for line in text.splitlines() if line.startswith("lyon")]
    assert lyon[:4] == ["lyon", "0", "in", "h:1"] and {"12", "3.250", "2.5", "GB", "999"} <= set(lyon)
    (oslo,) = [line.split() for line in text.splitlines() if line.startswith("oslo")]
    assert oslo[:5] == ["oslo", "1", "out", "dials", "out"] and set(oslo[5:]) == {"-"}
    assert "no run yet" in shown(Status(runs=()))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_its_terminal(width: int) -> None:
    far = STATUS.runs[0].sites[0].model_copy(update={"site": "s" * 60, "address": "203.113.201.115:17001", "standing": "finished"})
    text = shown(Status(runs=(STATUS.runs[0].model_copy(update={"sites": (far, *STATUS.runs[0].sites)}),)), width)
    assert max(map(len, text.splitlines())) <= width
    rows = [line.split() for line in text.splitlines() if "lyon" in line]
    assert len(rows) == 1 and rows[0][0] == "lyon" and {"12", "3.250", "2.5", "999", "9.5"} <= set(rows[0]), "each site has one line, whole"
    assert "finished" in text and ("address" in text) is (width >= 118)


def test_what_others_say_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Status(runs=(STATUS.runs[0].model_copy(update={"why": "waits for [red]x[/] \x1b[2J\u202e"}),)))
    assert "waits for [red]x[/] \\x1b[2J\\u202e" in text


def test_a_run_that_is_over_says_so() -> None:
    over = {"ended": Ended(site="oslo", round=40, at="2026-12-01 14:03")}
    text = shown(Status(runs=(STATUS.runs[0].model_copy(update=over),)))
    assert "run run-7: finished after 40 rounds, 2026-12-01 14:03 UTC; its summary is at site oslo" in text


# ---- commands


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = sites(tmp_path_factory.mktemp("wan"))
    new_secret(root / "run.secret")
    return root


def folder(made: Path, site: str) -> list[str]:
    return ["--identity", str(made / "ours" / "sites" / site), "--secret", str(made / "run.secret")]


@pytest.fixture
def coordinator(made: Path, tmp_path: Path) -> Iterator[str]:
    me, secret = Identity.load(made / "ours" / "sites" / "a"), read_secret(made / "run.secret")
    guard = Guard("a", lambda run: Party(Terms(run, secret, None, None), Anybody()), me)
    name = lambda context: caller_of(context).site  # noqa: E731
    with CoordinatorServer(
        tmp_path / "runs.db", "127.0.0.1:0", interceptors=[guard], listen=guard.listen, identify=name, threads=16,
        services=[dialback.check_handlers(name, me)],
    ) as server:  # fmt: skip
        yield f"127.0.0.1:{server.port}"


def test_check_says_what_is_wrong_and_fails(made: Path, coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wan", "check", "--coordinator", coordinator, "--seconds", "0", *folder(made, "b")]) == 0
    said = capsys.readouterr().out
    assert "ok" in said and "believe each other" in said and "wrong" not in said
    arguments = ["--coordinator", coordinator, "--seconds", "0", "--bind", "127.0.0.1:1", "--advertise", "0.0.0.0:1", *folder(made, "b")]
    assert main(["wan", "check", *arguments]) == 1
    out, err = capsys.readouterr()
    assert "wrong   advertise: 0.0.0.0:1 means all addresses" in out and "->" in out and "cannot take part like this: advertise" in err
    assert main(["wan", "check", "--coordinator", "example.org:7400"]) == 2  # no certificate, and not this machine


def test_check_tries_the_relay(made: Path, coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    me, secret = Identity.load(made / "ours" / "sites" / "a"), read_secret(made / "run.secret")
    relay = RelayServer("127.0.0.1:0", AioGuard("a", lambda run: Party(Terms(run, secret, None, None), Anybody()), me))
    arguments = ["wan", "check", "--coordinator", coordinator, "--seconds", "0", *folder(made, "b")]
    assert main([*arguments, "--relay", f"127.0.0.1:{relay.port}"]) == 0
    assert "lets this site stand" in capsys.readouterr().out
    relay.close()


def test_status_of_a_coordinator(made: Path, coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wan", "status", "--coordinator", coordinator, *folder(made, "b")]) == 0
    assert "no run yet" in capsys.readouterr().out
    assert main(["wan", "status", "--coordinator", coordinator, "--run", "other", *folder(made, "b")]) == 1
    assert "there is no run other here" in capsys.readouterr().err


def test_status_without_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CoordinatorServer(tmp_path / "runs.db", "127.0.0.1:0", threads=16) as server:
        at = f"127.0.0.1:{server.port}"
        client: Any = CoordinatorClient(plain(at), SPEC, "lyon", Card(address="127.0.0.1:5"))
        client.join(30)
        assert main(["wan", "status", "--coordinator", at]) == 0
        client.close()
    out = capsys.readouterr().out
    assert "run run-7: 1 of 2 sites there" in out and "lyon" in out and "127.0.0.1:5" in out


def test_a_relay_wants_the_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wan", "relay"]) == 2
    assert "a relay wants the run secret" in capsys.readouterr().err


# ---- examples


def test_the_examples_use_commands_that_exist() -> None:
    root = Path(__file__).resolve().parent.parent / "examples" / "wan"
    found = []
    for file in sorted(root.iterdir()):
        text = re.sub(r"\\\n\s*|(?<=[^#\n])\n      (?=--)", " ", file.read_text())
        found += re.findall(r"(?:gossamer |command: (?:>-\s+)?)(wan [^\n`]*)", text)
    assert len(found) >= 12 and sum("join" in line for line in found) == 3
    for line in found:
        check_command([re.sub(r"\$\{\w+\}|%i", "x", word) for word in line.split()])
