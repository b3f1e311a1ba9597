"""The commands `gossamer wan check`, `gossamer wan status` and `gossamer wan relay`, and the logs of wide-area runs."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gossamer.app.progress import duration
from gossamer.app.wan_spec import identity_of, secret_of
from gossamer.core.errors import BadInput, RunFailed
from gossamer.real.signals import handling
from gossamer.wan.calls import Away, Channel, ask_status, plain
from gossamer.wan.certificates import Identity
from gossamer.wan.check import Check, Finding
from gossamer.wan.dial import Dial
from gossamer.wan.doors import Anybody
from gossamer.wan.guard import AioGuard
from gossamer.wan.records import RunStatus, Session, SiteStatus, Status
from gossamer.wan.relay import RelayServer
from gossamer.wan.relay_client import RelayClient
from gossamer.wan.relay_messages import RelaySettings
from gossamer.wan.trust import Party, Terms, check_plain

Format = Literal["text", "json"]
_SIGNS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "wrong": "[red]wrong  [/]"}
_NOBODY = "status"
"""The run that is named in a greeting when no run is meant."""


# ---- check


def check(
    coordinator: str,
    *,
    site: str | None,
    bind: str | None,
    advertise: str | None,
    relay: str | None,
    identity: Path | None,
    secret: Path | None,
    seconds: float,
) -> None:
    """`gossamer wan check`.

    Raises:
        BadInput: what was given cannot be.
        RunFailed: something is wrong; all of it has been printed.
    """
    mine = identity_of(identity)
    name = site or (mine.site if mine else "site")
    channel = _channel(coordinator, name, mine, identity, secret)
    found = []
    for finding in Check(channel, name, coordinator, bind, advertise, mine, seconds=seconds).run():
        found.append(finding)
        _show(finding)
    if relay is not None:
        found.append(_relay(relay, name, mine, identity, secret))
        _show(found[-1])
    if bad := [one.what for one in found if one.level == "wrong"]:
        raise RunFailed(f"site {name} cannot take part like this: {', '.join(bad)}")


def _show(finding: Finding) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(_SIGNS[finding.level], end=" ")
    console.print(f"{finding.what}: {finding.text}", markup=False)
    if finding.remedy:
        console.print(f"        -> {finding.remedy}", markup=False)


def _relay(address: str, site: str, mine: Identity | None, identity: Path | None, secret: Path | None) -> Finding:
    """Whether this site can stand at a relay."""
    known = secret_of(identity, secret)
    if known is None:
        raise BadInput(f"--relay {address}: a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
    client = RelayClient(Dial(_party(_NOBODY, known), site, address, None, mine), local=None)
    try:
        client.wait(15.0)
    except RunFailed as error:
        return Finding("wrong", "relay", str(error), "check the address; start gossamer wan relay there, with the same secret and CA")
    finally:
        client.close()
    return Finding("ok", "relay", f"{address} lets this site stand")


def _party(run: str, secret: bytes) -> Party:
    return Party(Terms(run, secret, None, None), Anybody())


def _channel(address: str, site: str, mine: Identity | None, identity: Path | None, secret: Path | None, run: str = _NOBODY) -> Channel:
    """To a coordinator, for whoever is no site of a run."""
    known = secret_of(identity, secret)
    if known is None:
        check_plain(address)
        return plain(address)
    return Dial(_party(run, known), site, address, None, mine).channel


# ---- status


def status(coordinator: str, *, run: str | None, watch: bool, every_s: float, identity: Path | None, secret: Path | None) -> None:
    """`gossamer wan status`.

    Raises:
        RunFailed: the coordinator does not answer, or has no such run.
    """
    mine = identity_of(identity)
    channel = _channel(coordinator, mine.site if mine else "status", mine, identity, secret)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    if not watch:
        console.print(status_tables(ask_status(channel, run)))
        return
    over = threading.Event()
    with handling(lambda number: over.set()), Live(console=console, auto_refresh=False, screen=False) as live:
        while not over.is_set():
            try:
                live.update(status_tables(ask_status(channel, run)), refresh=True)
            except Away as error:
                live.update(f"{error}; trying again", refresh=True)
            over.wait(every_s)


def status_tables(found: Status) -> Table | str:
    """One table for each run, below one another."""
    if not found.runs:
        return "the coordinator knows no run yet"
    whole = Table.grid()
    for run in found.runs:
        whole.add_row(_heading(run))
        whole.add_row(_sites(run))
    return whole


def _heading(run: RunStatus) -> str:
    there = sum(one.standing != "out" for one in run.sites)
    number = run.sessions[0].number if run.sessions else 0
    parts = [f"run {run.run}", f"{there} of {len(run.sites)} sites there", f"session {number}", f"epoch {run.epoch}"]
    parts += [f"round {run.newest}"] if run.newest is not None else []
    counts = ", ".join(f"{number} {name}" for name, number in sorted(run.counts.items()) if number)
    return ", ".join(parts) + (f"\n{counts}" if counts else "") + (f"\n{run.why}" if run.why else "")


def _sites(run: RunStatus) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("site")
    for name in ("seat", "standing", "address", "round", "lag", "loss", "sent", "received", "last exchange", "lease"):
        table.add_column(name, justify="left" if name in ("standing", "address") else "right")
    for one in run.sites:
        table.add_row(*_row(one))
    return table


def _row(one: SiteStatus) -> tuple[str, ...]:
    r = one.report
    return (
        one.site,
        str(one.seat),
        one.standing,
        one.address or "dials out",
        "-" if r is None else str(r.round),
        "-" if one.lag is None else str(one.lag),
        "-" if r is None or r.loss is None else f"{r.loss:.3f}",
        "-" if r is None else size(r.bytes_sent),
        "-" if r is None else size(r.bytes_received),
        "-" if r is None or r.exchange_s is None else duration(r.exchange_s),
        "-" if one.lease_s is None else duration(one.lease_s),
    )


def size(nbytes: float) -> str:
    """In the largest unit of 1000 that leaves at least 1.

    >>> size(999), size(1500), size(2.5e9)
    ('999 B', '1.5 kB', '2.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


# ---- relay


def relay(
    bind: str, *, identity: Path | None, secret: Path | None, most_mbps: float | None, metrics: str | None, log_format: Format
) -> None:
    """`gossamer wan relay`: serves until Ctrl-C or SIGTERM, any run whose sites know the secret."""
    mine, known = identity_of(identity), secret_of(identity, secret)
    if known is None:
        raise BadInput("a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
    name = mine.site if mine else "relay"
    set_up_logs(log_format, site=name, run="-")
    whole = known
    server = RelayServer(bind, AioGuard(name, lambda run: _party(run, whole), mine), RelaySettings(most_mbps=most_mbps))
    page = None
    over = threading.Event()
    try:
        if metrics is not None:
            from gossamer.wan.metrics import CoordinatorMetrics

            page = CoordinatorMetrics(lambda: Status(runs=()), relay=server.counters)
            page.serve(metrics)
        with handling(lambda number: over.set()):
            print(f"relay: listening at port {server.port}", flush=True)
            over.wait()
    finally:
        if page is not None:
            page.close()
        server.close()


# ---- logs


@dataclass
class LogPlace:
    """Where a process is in its run: stands in each line of its log. Set the fields when they change."""

    site: str
    run: str
    session: int | None = None
    round: int | None = None


def set_up_logs(format: Format, *, site: str, run: str, file: TextIO | None = None, level: int = logging.INFO) -> LogPlace:
    """Logs of Gossamer as one line each, with site, run, session and round. A later call in a process replaces the first.

    Args:
        format: text: `14:03:05 WARNING wan.link site=lyon run=r session=3 round=17 what happened`; json: one object a line, with the keys
            time (UTC), level, logger, site, run, session, round, message, and error where there was a traceback.
        file: stderr by default.

    Returns:
        To be kept up to date by the caller.
    """
    place = LogPlace(site, run)
    handler = logging.StreamHandler(file or sys.stderr)
    handler.setFormatter(_Json(place) if format == "json" else _Text(place))
    logger = logging.getLogger("gossamer")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return place


class SiteOps:
    """What a site tells those who watch it: figures for Prometheus, and where it is, for its log.

    Args:
        metrics: host:port of the page; None: no page.
        place: of the log.

    Raises:
        BadInput: the page's address cannot be bound.
    """

    def __init__(self, site: str, run: str, metrics: str | None, place: LogPlace | None) -> None:
        self._place = place
        self._traffic: Callable[[], Mapping[str, Any]] = dict
        self._page = None
        if metrics is not None:
            from gossamer.wan.metrics import SiteMetrics

            self._page = SiteMetrics(site, run, traffic=lambda: self._traffic())
            self._page.serve(metrics)

    def session(self, session: Session, why: str, traffic: Callable[[], Mapping[str, Any]]) -> None:
        """A session has been entered. `traffic`: of its connections, by the names of the peers."""
        self._traffic = traffic
        if self._place is not None:
            self._place.session, self._place.round = session.number, session.round
        if self._page is not None:
            self._page.session(session.number, session.generation, len(session.members), why)

    def note(self, record: Mapping[str, Any]) -> None:
        """A record of the site (docs/run-folder.md)."""
        if record["kind"] == "round":
            if self._place is not None:
                self._place.round = record["round"]
            if self._page is not None:
                self._page.round_done(record["round"], loss=record["loss"], tokens=record["tokens"], seconds=record)
        elif record["kind"] == "eval" and self._page is not None:
            self._page.evaluated(record["loss"])

    def coordinator(self, there: bool) -> None:
        """Whether the coordinator answers."""
        if self._page is not None:
            self._page.coordinator(there)

    def close(self) -> None:
        """Ends the page."""
        if self._page is not None:
            self._page.close()


class _Text(logging.Formatter):
    def __init__(self, place: LogPlace) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        p, at = self._place, time.strftime("%H:%M:%S", time.localtime(record.created))
        where = f"site={p.site} run={p.run} session={_dash(p.session)} round={_dash(p.round)}"
        text = _one_line(record.getMessage() + (f": {self.formatException(record.exc_info)}" if record.exc_info else ""))
        return f"{at} {record.levelname} {record.name.removeprefix('gossamer.')} {where} {text}"


class _Json(logging.Formatter):
    def __init__(self, place: LogPlace) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        p = self._place
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "site": p.site,
            "run": p.run,
            "session": p.session,
            "round": p.round,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["error"] = self.formatException(record.exc_info)
        return json.dumps(found)


def _dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _one_line(text: str) -> str:
    """Whatever a peer has said ends no line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
