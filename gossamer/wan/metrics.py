"""Figures for Prometheus: what a site and a coordinator tell of themselves at /metrics, over http, on loopback unless told otherwise.

    metrics = SiteMetrics("lyon", "run-7", traffic=lambda: {names[j]: t for j, t in links.traffic().items()})
    metrics.serve("127.0.0.1:9464")
    metrics.round_done(12, loss=3.41, tokens=51200, seconds={"compute_s": 8.1, "network_idle_s": 0.4})

What the rest of the process knows already (traffic, roster) is read when Prometheus asks. Nothing secret is told, and nobody can change
anything here; the page is plain http, so that it belongs on loopback or a network of one's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gossamer.core.errors import BadInput
from gossamer.wan.links.link import Traffic
from gossamer.wan.relay.messages import Counters
from gossamer.wan.roster.records import Report, Status
from gossamer.wan.trust.terms import check_bind, place_of

log = logging.getLogger(__name__)

KINDS = ("compute", "encode", "decode", "outer", "straggler_idle", "network_idle")
"""Of the time of a round, as in its record."""
STANDINGS = ("in", "healing", "waiting", "out")


class _Page:
    """A registry of its own, and a page that shows it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._server: tuple[Any, threading.Thread] | None = None

    def serve(self, address: str = "127.0.0.1:9464") -> int:
        """Shows the page at http://address/metrics; the port.

        Raises:
            BadInput: the address cannot be bound.
        """
        check_bind(address, "--metrics")
        try:
            host, port = place_of(address)
            self._server = start_http_server(port, addr=host or "0.0.0.0", registry=self._registry)
        except OSError as error:
            raise BadInput(f"--metrics {address}: cannot be bound ({error}): give HOST:PORT, with a port that is free") from None
        return int(self._server[0].server_port)

    def text(self) -> str:
        """The page."""
        return generate_latest(self._registry).decode()

    def close(self) -> None:
        """Ends the page."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join(2.0)


class SiteMetrics(_Page):
    """Of one site of one run. Methods may be called from any thread.

    Args:
        traffic: what has passed to and from each peer, by its name; asked whenever the page is.
    """

    def __init__(self, site: str, run: str, *, traffic: Callable[[], Mapping[str, Traffic]] | None = None) -> None:
        super().__init__()
        self._labels = {"site": site, "run": run}

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"gossamer_{name}", text, list(self._labels), registry=self._registry).labels(**self._labels)

        def counter(name: str, text: str, *more: str) -> Any:
            made = Counter(f"gossamer_{name}", text, [*self._labels, *more], registry=self._registry)
            return made if more else made.labels(**self._labels)

        self._round = gauge("round", "Rounds completed.")
        self._loss = gauge("loss", "Training loss of the last round, nats per token.")
        self._valid = gauge("validation_loss", "Validation loss, nats per token.")
        self._tokens = counter("tokens", "Tokens that this site has trained on since its start.")
        self._seconds = counter("seconds", "Time since the start of this site, by what it was spent on.", "kind")
        self._utilisation = gauge("utilisation", "Share of the last round's time in inner steps.")
        self._session = gauge("session", "Number of the session.")
        self._generation = gauge("generation", "How often the run has begun again.")
        self._members = gauge("session_members", "Sites in the session.")
        self._sessions = counter("sessions", "Sessions entered since the start of this site, by why they began.", "why")
        self._there = gauge("coordinator_there", "1: the coordinator answers; 0: it does not.")
        self._registry.register(_Peers(self._labels, traffic or (dict)))

    def round_done(self, round: int, *, loss: float | None, tokens: int, seconds: Mapping[str, float]) -> None:
        """A round is over.

        Args:
            round: rounds completed.
            loss: training loss of the round, nats per token.
            tokens: of this site in the round.
            seconds: its time by kind, named as in the record of a round (compute_s, network_idle_s, ...); what else is in it is ignored.
        """
        self._round.set(round)
        if loss is not None:
            self._loss.set(loss)
        self._tokens.inc(tokens)
        spent_s = {kind: float(seconds.get(f"{kind}_s", 0.0)) for kind in KINDS}
        for kind, value in spent_s.items():
            self._seconds.labels(**self._labels, kind=kind).inc(max(0.0, value))
        if (total_s := sum(spent_s.values())) > 0:
            self._utilisation.set(spent_s["compute"] / total_s)

    def evaluated(self, loss: float) -> None:
        """The validation loss, nats per token."""
        self._valid.set(loss)

    def session(self, number: int, generation: int, members: int, why: str) -> None:
        """A session begins. `why`: one of a few words, such as start, join, lost."""
        self._session.set(number)
        self._generation.set(generation)
        self._members.set(members)
        self._sessions.labels(**self._labels, why=why[:64]).inc()

    def coordinator(self, there: Callable[[], bool]) -> None:
        """Whether the coordinator answers; asked whenever the page is."""
        self._there.set_function(lambda: float(there()))


class _Peers(Collector):
    """Traffic by peer. A peer whose numbers fall has new connections, of another session: what it had counts on."""

    FIELDS = (
        ("payload_sent_bytes", "peer_payload_sent_bytes", "Payload sent, what was sent again included."),
        ("payload_received_bytes", "peer_payload_received_bytes", "Payload received."),
        ("control_sent_bytes", "peer_control_sent_bytes", "Control frames sent."),
        ("control_received_bytes", "peer_control_received_bytes", "Control frames received."),
        ("resent_bytes", "peer_resent_bytes", "Payload that broken connections made this site send again."),
        ("sessions", "peer_connections", "Connections made."),
    )

    def __init__(self, labels: Mapping[str, str], traffic: Callable[[], Mapping[str, Traffic]]) -> None:
        self._labels, self._traffic = dict(labels), traffic
        self._lock = threading.Lock()
        self._last: dict[str, Traffic] = {}
        self._before: dict[tuple[str, str], int] = {}

    def describe(self) -> list[Any]:
        """Of the library: nothing is asked before the page is."""
        return []

    def collect(self) -> Iterator[Any]:
        """Of the library."""
        with self._lock:
            self._read()
            for name, metric, text in self.FIELDS:
                family = CounterMetricFamily(f"gossamer_{metric}", text, labels=[*self._labels, "peer"])
                for peer, t in sorted(self._last.items()):
                    family.add_metric([*self._labels.values(), peer], self._before.get((peer, name), 0) + getattr(t, name))
                yield family
            reconnects = CounterMetricFamily("gossamer_peer_reconnects", "Connections made anew.", labels=[*self._labels, "peer"])
            rtt = GaugeMetricFamily("gossamer_peer_round_trip_seconds", "Shortest round trip of late.", labels=[*self._labels, "peer"])
            rate = GaugeMetricFamily("gossamer_peer_rate_bytes_per_second", "Highest rate of late.", labels=[*self._labels, "peer"])
            for peer, t in sorted(self._last.items()):
                reconnects.add_metric([*self._labels.values(), peer], self._before.get((peer, "again"), 0) + max(0, t.sessions - 1))
                if t.rtt_s is not None:
                    rtt.add_metric([*self._labels.values(), peer], t.rtt_s)
                rate.add_metric([*self._labels.values(), peer], t.rate_bytes_s)
            yield from (reconnects, rtt, rate)

    def _read(self) -> None:
        try:
            now = dict(self._traffic())
        except Exception as error:  # links that are being closed: the last figures stand
            log.debug("no traffic: %s", error)
            return
        for peer, t in now.items():
            old = self._last.get(peer)
            if old is not None and any(getattr(t, name) < getattr(old, name) for name, _, _ in self.FIELDS):
                for name, _, _ in self.FIELDS:
                    self._before[peer, name] = self._before.get((peer, name), 0) + getattr(old, name)
                self._before[peer, "again"] = self._before.get((peer, "again"), 0) + max(0, old.sessions - 1)
            self._last[peer] = t


class CoordinatorMetrics(_Page):
    """Of a coordinator, and the relay beside it.

    Args:
        status: of all runs; asked whenever the page is.
        relay: its counters by run and site.
    """

    def __init__(self, status: Callable[[], Status], *, relay: Callable[[], Mapping[tuple[str, str], Counters]] | None = None) -> None:
        super().__init__()
        self._registry.register(_Runs(status, relay or (dict)))


class _Runs(Collector):
    def __init__(self, status: Callable[[], Status], relay: Callable[[], Mapping[tuple[str, str], Counters]]) -> None:
        self._status, self._relay = status, relay

    def describe(self) -> list[Any]:
        """Of the library: nothing is asked before the page is."""
        return []

    def collect(self) -> Iterator[Any]:
        """Of the library."""

        def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"gossamer_{name}", text, labels=["run", *labels])

        sites = gauge("run_sites", "Sites by standing.", "standing")
        epoch, generation = gauge("run_epoch", "Changes of the members."), gauge("run_generation", "How often the run has begun again.")
        newest, session = gauge("run_newest_round", "Rounds completed, by the first site."), gauge("run_session", "Number of the session.")
        waits = gauge("run_waits", "1: the run waits for something.")
        lease = gauge("site_lease_seconds", "Left of a site's lease.", "site")
        lag = gauge("site_lag_rounds", "Rounds behind the first site.", "site")
        loss = gauge("site_loss", "As the site reports it.", "site")
        done = gauge("site_round", "Rounds completed, as the site reports it.", "site")
        sent, received = (gauge(f"site_{way}_bytes", "As the site reports it.", "site") for way in ("sent", "received"))
        events = CounterMetricFamily("gossamer_run_events", "Joins, leaves, expired leases, refusals, ...", labels=["run", "event"])
        for run in self._status().runs:
            standing = [one.standing for one in run.sites]
            for name in STANDINGS:
                sites.add_metric([run.run, name], standing.count(name))
            epoch.add_metric([run.run], run.epoch)
            generation.add_metric([run.run], run.generation)
            newest.add_metric([run.run], run.newest or 0)
            session.add_metric([run.run], run.sessions[0].number if run.sessions else 0)
            waits.add_metric([run.run], bool(run.why))
            for event, number in sorted(run.counts.items()):
                events.add_metric([run.run, event], number)
            for one in run.sites:
                report = one.report or Report()
                told = one.report is not None
                for family, value in (
                    (lease, one.lease_s), (lag, one.lag), (loss, report.loss), (done, report.round if told else None),
                    (sent, report.bytes_sent if told else None), (received, report.bytes_received if told else None),
                ):  # fmt: skip
                    if value is not None:
                        family.add_metric([run.run, one.site], value)
        yield from (sites, epoch, generation, newest, session, waits, lease, lag, loss, done, sent, received, events)
        yield from self._relayed()

    def _relayed(self) -> Iterator[Any]:
        labels = ["run", "site"]
        counters = [
            CounterMetricFamily(f"gossamer_relay_{name}", text, labels=labels)
            for name, text in (
                ("sent_bytes", "By the site."),
                ("received_bytes", "To the site."),
                ("refused", "Calls refused."),
            )
        ]
        pipes = GaugeMetricFamily("gossamer_relay_pipes", "Pipes that are open.", labels=labels)
        for (run, site), one in sorted(self._relay().items()):
            for family, value in zip(counters, (one.sent_bytes, one.received_bytes, one.refused), strict=True):
                family.add_metric([run, site], value)
            pipes.add_metric([run, site], one.pipes)
        yield from (*counters, pipes)
