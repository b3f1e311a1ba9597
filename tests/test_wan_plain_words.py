"""What sites say of what happens to them: once, and in words that are true."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from coordinator_toys import quick

from gossamer.app.wan.logs import loading
from gossamer.app.wan.out import Out
from gossamer.app.wan.presence import Presence
from gossamer.app.wan.site import STOPPING, SiteRun, goes_on_from
from gossamer.app.wan.spec import secret_of
from gossamer.cli import main
from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.links.channel import words
from gossamer.wan.links.frames import WIRE_VERSION, Hello
from gossamer.wan.links.listening import Listener
from gossamer.wan.roster import calls
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.records import Card, Member
from gossamer.wan.trust.terms import Distrusted

RAW = (
    "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:7400: Handshake read failed "
    "(recvmsg:Connection reset by peer (104))"
)


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = (lambda: code), (lambda: details)


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        (grpc.StatusCode.UNAVAILABLE, RAW, "the connection broke"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "the connection broke"),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect: Connection refused (111)", "it refuses the connection"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "no answer in time"),
        (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for x:1", "its name does not resolve"),
    ],
)
def test_what_grpc_says_is_put_in_words(code: grpc.StatusCode, details: str, said: str) -> None:
    error: Any = Failed(code, details)
    assert str(calls._away(error)) == f"the coordinator does not answer ({said})" and words(error) == said


def test_what_a_peer_says_stays_as_it_is() -> None:
    error: Any = Distrusted("site", "a site says: Connection refused")
    assert "a site says: Connection refused" in calls._words(error) and "a site says: Connection refused" in words(error)


def test_a_coordinator_that_comes_back_is_announced_as_its_absence_was(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's log shows warnings. That the coordinator was slow for a moment is none."""
    client, now = CoordinatorClient(calls.plain("127.0.0.1:1"), quick(), "a", Card(address=None)), [100.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))
    beat_s = client.timeouts.beat
    for _ in range(3):
        client._calls._lost("no answer in time")
        assert client.away_s == 0.0, "known at once"
        now[0] += beat_s
        client._calls._lost("no answer in time")
        client._calls.reached()
    assert client.away_s is None and not caplog.records
    for waited_s in (0.0, 5 * beat_s, beat_s):
        now[0] += waited_s
        client._calls._lost("it refuses the connection")
    client._calls.reached()
    client._calls.reached()
    client.close()
    said = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(said) == 2 and "does not answer (it refuses the connection)" in said[0]
    assert f"answers again, after {6 * beat_s:.1f} s" in said[1]


class Asked:
    def __init__(self) -> None:
        self.stops = 0

    def ask_stop(self, number: int) -> None:
        self.stops += 1


def test_a_signal_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site, said, group = SiteRun.__new__(SiteRun), [], Asked()
    site._asked, site._signalled, site._group = None, False, group  # type: ignore[assignment]
    monkeypatch.setattr(site, "_say", said.append)
    monkeypatch.setattr("threading.Thread", lambda target, args, daemon: SimpleNamespace(start=lambda: target(*args)))
    site.on_signal(2)
    assert said == [STOPPING] == ["stopping at the end of the round; once more ends at once"] and group.stops == 1
    with pytest.raises(KeyboardInterrupt):
        site.on_signal(2)
    assert len(said) == 1


def test_a_site_that_leaves_says_what_it_keeps(tmp_path: Path) -> None:
    folder: Any = SimpleNamespace(there=True, path=tmp_path, checkpoints=tmp_path / "checkpoints")
    assert goes_on_from(folder) == ""
    made = folder.checkpoints / "round-000007"
    made.mkdir(parents=True)
    (made / "manifest.json").write_text("{}")
    kept = f": there is a checkpoint of round 7 in {tmp_path}, and the same command with --out {tmp_path} goes on from there"
    assert goes_on_from(folder) == kept
    folder.there = False
    assert goes_on_from(folder) == ""


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (Distrusted("revoked", "it was revoked", own=True), "gossamer wan ca issue b --out NEWFOLDER makes another certificate, and with "),
        (Distrusted("early", "too early", own=True), "the same command goes on there"),
        (RunFailed("another process has taken its place"), "the same command goes on there"),
    ],
)
def test_the_same_command_does_not_go_on_with_a_revoked_certificate(why: RunFailed, said: str) -> None:
    out = Out("b")
    out.say(why)
    assert out.goes_on().startswith(said) and ("--identity NEWFOLDER" in out.goes_on()) == (getattr(why, "reason", "") == "revoked")


def test_why_a_site_is_gone() -> None:
    """As the coordinator says it."""
    presence, links = Presence.__new__(Presence), SimpleNamespace(out=None)
    found = Member(site="b", seat=1, boot="0" * 32, card=Card(address=None))
    presence.client = SimpleNamespace(roster=SimpleNamespace(at=lambda seat: found))  # type: ignore[assignment]
    presence._places, presence._relay, presence.hosts = SimpleNamespace(workers=(0, 1)), None, {}  # type: ignore[assignment]
    presence.watch(links, [1])  # type: ignore[arg-type]
    assert links.out(1) is None
    found = found.model_copy(update={"there": False})
    assert links.out(1) == "its process is gone: the coordinator has not heard of it since"
    found = found.model_copy(update={"fault": "the certificate of site b (serial 5) was revoked on 2026-11-30"})
    assert links.out(1) == found.fault
    found = found.model_copy(update={"boot": "1" * 32, "there": True})
    assert links.out(1) == "its process is gone: another one has joined in its place"


def test_a_secret_that_is_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"run\.secret: no such file: give the run's secret with --secret FILE"):
        secret_of(tmp_path, None)


def test_a_site_says_that_it_loads_before_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    loading("text", "lyon")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "loading ...\n")
    loading("json", "lyon")
    shown = capsys.readouterr()
    assert shown.out == "" and json.loads(shown.err)["message"] == "loading ..."


def test_that_is_the_first_that_it_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def loads(format: str, site: str) -> None:
        raise BadInput(f"{format} {site}")

    monkeypatch.setattr("gossamer.app.wan.logs.loading", loads)
    assert main(["wan", "join", "nowhere.toml", "--site", "lyon", "--coordinator", "nonsense", "--log-format", "json"]) == 2
    assert "json lyon" in capsys.readouterr().err


@pytest.mark.parametrize(("parted", "warnings"), [(True, 0), (False, 1)])
def test_who_has_said_farewell_and_calls_once_more_is_no_news(caplog: pytest.LogCaptureFixture, parted: bool, warnings: int) -> None:
    """A call that was on its way when a site left is refused, as that of a site that was given up is, but without a warning."""
    link: Any = SimpleNamespace(incarnation="b2" * 16, over="site 2 has left (its program has ended)", parted=parted)
    access: Any = SimpleNamespace(admit=lambda number, context: None)
    listener = Listener(0, 3, "r/1", "a1" * 16, {}, access, lambda number: link)
    ended = []

    async def abort(code: grpc.StatusCode, why: str) -> None:
        ended.append((code, why))

    call: Any = SimpleNamespace(abort=abort, peer=lambda: "ipv4:127.0.0.1:7001")
    hello = Hello(version=WIRE_VERSION, run="r/1", sender=2, receiver=0, incarnation="b2" * 16, known="a1" * 16, channels=1, terms={})
    asyncio.run(listener.control(hello, call, call))
    assert ended == [(grpc.StatusCode.PERMISSION_DENIED, link.over)]
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == warnings
