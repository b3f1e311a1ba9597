"""The commands `gossamer wan check`, `status`, `forget` and `relay`, and what a site shows to those who watch it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gossamer.app.wan.logs import Format, LogPlace, set_up_logs
from gossamer.app.wan.spec import identity_of, secret_of
from gossamer.app.wan.status import console, status_tables
from gossamer.core.errors import BadInput, RunFailed
from gossamer.real.signals import handling
from gossamer.wan.check import Check, no_coordinator
from gossamer.wan.findings import Finding, way_to
from gossamer.wan.relay.client import RelayClient
from gossamer.wan.relay.messages import RelaySettings
from gossamer.wan.relay.server import RelayServer
from gossamer.wan.roster.calls import Away, Channel, ask_status, plain
from gossamer.wan.roster.calls import forget as ask_forget
from gossamer.wan.roster.records import Session, Status
from gossamer.wan.trust.certificates import Identity, check_site
from gossamer.wan.trust.diagnose import speaks_tls
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.doors import Anybody
from gossamer.wan.trust.guard import AioGuard
from gossamer.wan.trust.terms import NAME, Distrusted, Party, Terms, check_address, check_bind, check_plain
from gossamer.wan.trust.vigil import Vigil

T = TypeVar("T")
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
    if site is not None:
        check_site(site, "--site")
    logging.getLogger("gossamer").addHandler(logging.NullHandler())  # the findings say it all
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
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    console.print(_SIGNS[finding.level], end=" ")
    console.print(f"{finding.what}: {finding.text}", markup=False)
    if finding.remedy:
        console.print(f"        -> {finding.remedy}", markup=False)


def _relay(address: str, site: str, mine: Identity | None, identity: Path | None, secret: Path | None) -> Finding:
    """Whether this site can stand at a relay."""
    known = secret_of(identity, secret)
    if known is None:
        raise BadInput(f"--relay {address}: a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
    check_address("--relay", address)
    if (finding := way_to("relay", address)).level == "wrong":
        return finding
    client = RelayClient(Dial(party(_NOBODY, known), site, address, None, mine), local=None)
    try:
        client.wait(15.0)
    except RunFailed as error:
        remedy = "give the address of gossamer wan relay, or of --relay of the coordinator; same secret and CA"
        return Finding("wrong", "relay", str(error), remedy)
    finally:
        client.close()
    return Finding("ok", "relay", f"{address} lets this site stand")


def party(run: str, secret: bytes) -> Party:
    """Of a run, for whoever is no site of it: anybody who knows the secret may call."""
    return Party(Terms(run, secret, None, None), Anybody())


def _channel(address: str, site: str, mine: Identity | None, identity: Path | None, secret: Path | None, run: str = _NOBODY) -> Channel:
    """To a coordinator, for whoever is no site of a run."""
    check_address("--coordinator", address)
    known = secret_of(identity, secret)
    if known is None:
        check_plain(address)
        return plain(address)
    return Dial(party(run, known), site, address, None, mine).channel


# ---- runs


def status(coordinator: str, *, run: str | None, watch: bool, every_s: float, identity: Path | None, secret: Path | None) -> None:
    """`gossamer wan status`.

    Raises:
        RunFailed: the coordinator does not answer, or has no such run.
    """
    mine = identity_of(identity)
    channel = _channel(coordinator, mine.site if mine else "status", mine, identity, secret)
    ask = lambda: _asked(coordinator, mine, lambda: ask_status(channel, run))  # noqa: E731
    if not watch:
        paper = console()
        paper.print(status_tables(ask(), paper.width))
        return
    over, paper = threading.Event(), console()
    with handling(lambda number: over.set()), Live(console=paper, auto_refresh=False, screen=False) as live:
        while not over.is_set():
            try:
                live.update(status_tables(ask(), paper.width), refresh=True)
            except Away as error:
                live.update(Text(f"{error}; trying again"), refresh=True)
            over.wait(every_s)


def forget(coordinator: str, run: str, *, site: str | None, identity: Path | None, secret: Path | None) -> None:
    """`gossamer wan forget`.

    Raises:
        RunFailed: there is no such run or site, it is there, or the coordinator does not answer.
    """
    for what, name in (("RUN", run), ("--site", site)):
        if name is not None and not NAME.fullmatch(name):
            raise BadInput(f"{what} {name!r}: expected the id of a {'run' if what == 'RUN' else 'site'}, as gossamer wan status shows it")
    mine = identity_of(identity)
    channel = _channel(coordinator, mine.site if mine else "status", mine, identity, secret)
    _asked(coordinator, mine, lambda: ask_forget(channel, run, site))
    said = f"run {run} is forgotten" if site is None else f"site {site} of run {run} is forgotten: its seat is free"
    console().print(said, markup=False)


def _asked(coordinator: str, mine: Identity | None, ask: Callable[[], T]) -> T:
    """What a coordinator answers; what it is no answer of, in words.

    Raises:
        RunFailed: there is none.
    """
    try:
        return ask()
    except Distrusted as error:
        if error.reason != "run":
            raise
        raise RunFailed(no_coordinator(coordinator, error)) from None
    except Away as error:
        if mine is None and speaks_tls(coordinator):
            raise RunFailed(f"{coordinator} wants certificates, and none was given: add --identity DIR (and --secret FILE)") from None
        if (finding := way_to("coordinator", coordinator)).level == "wrong":
            raise Away(f"{finding.text}: {finding.remedy}") from None
        raise Away(f"{coordinator}: {error}") from None


# ---- relay


def relay(
    bind: str, *, identity: Path | None, secret: Path | None, most_mbps: float | None, metrics: str | None, log_format: Format
) -> None:
    """`gossamer wan relay`: serves until Ctrl-C or SIGTERM, any run whose sites know the secret."""
    check_bind(bind, "--bind")
    if metrics is not None:
        check_bind(metrics, "--metrics")
    mine, known = identity_of(identity), secret_of(identity, secret)
    if known is None:
        raise BadInput("a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
    name = mine.site if mine else "relay"
    set_up_logs(log_format, site=name, run="-")
    whole = known
    guard = AioGuard(name, lambda run: party(run, whole), mine)
    server: RelayServer | None = None
    page = None
    over = threading.Event()
    try:
        if metrics is not None:
            from gossamer.wan.metrics import CoordinatorMetrics

            page = CoordinatorMetrics(lambda: Status(runs=()), relay=lambda: {} if server is None else server.counters())
            page.serve(metrics)
        server = RelayServer(bind, guard, RelaySettings(most_mbps=most_mbps))
        with handling(lambda number: over.set()), watched(mine, [guard.look], over):
            print(f"relay: listening at port {server.port}", flush=True)
            over.wait()
    finally:
        if page is not None:
            page.close()
        if server is not None:
            server.close()


@contextmanager
def watched(mine: Identity | None, looks: Sequence[Callable[[], None]], over: threading.Event) -> Iterator[None]:
    """Around a service that runs until `over`: ends calls of those whose certificates are not good any more, and the service with its own.

    Raises:
        RunFailed: its own was revoked, or has come to its end.
    """
    faults: list[RunFailed] = []

    def out(error: RunFailed) -> None:
        faults.append(error)
        over.set()

    vigil = Vigil(mine, looks, out)
    try:
        yield
    finally:
        vigil.close()
    if faults:
        raise RunFailed(f"{mine.site if mine else 'it'} cannot go on: {faults[0]}")


class SiteOps:
    """What a site tells those who watch it: figures for Prometheus, and where it is, for its log.

    Args:
        metrics: host:port of the page; None: no page.
        place: of the log.

    Raises:
        BadInput: the page's address cannot be bound.
    """

    def __init__(self, site: str, run: str, metrics: str | None, place: LogPlace) -> None:
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
        self._place.session, self._place.round = session.number, session.round
        if self._page is not None:
            self._page.session(session.number, session.generation, len(session.members), why)

    def note(self, record: Mapping[str, Any]) -> None:
        """A record of the site (docs/run-folder.md)."""
        if record["kind"] == "round":
            self._place.round = record["round"]
            if self._page is not None:
                self._page.round_done(record["round"], loss=record["loss"], tokens=record["tokens"], seconds=record)
        elif record["kind"] == "eval" and self._page is not None:
            self._page.evaluated(record["loss"])

    def coordinator(self, there: Callable[[], bool]) -> None:
        """Whether the coordinator answers; asked whenever the page is."""
        if self._page is not None:
            self._page.coordinator(there)

    def close(self) -> None:
        """Ends the page."""
        if self._page is not None:
            self._page.close()
