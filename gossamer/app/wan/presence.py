"""Where a site of a wide-area run is, and its connections to everything else: coordinator, other sites, relay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gossamer.app.wan.places import peers_of
from gossamer.app.wan.ranks import Ranks
from gossamer.app.wan.spec import RosterOf, advertised, identity_of, secret_of, terms_of
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.ranges import Ranges
from gossamer.wan.links.listening import Port, taken
from gossamer.wan.links.wire import Links
from gossamer.wan.loop import in_loop
from gossamer.wan.neighbours import Neighbours
from gossamer.wan.relay.client import BACK_S, RelayClient, peer_of, relayed
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.messages import printable
from gossamer.wan.roster.records import RELAY, Card, Roster, Spec
from gossamer.wan.trust.access import Access, Peer
from gossamer.wan.trust.doors import Doors
from gossamer.wan.trust.terms import Party, check_address, check_bind, check_plain, host_of, is_loopback
from gossamer.wan.trust.vigil import Vigil

_LOOK_S = 0.1
_GONE = "its process is gone"


@dataclass(frozen=True)
class Where:
    """Where a site is, and how it comes in."""

    site: str
    coordinator: str
    bind: str | None = None
    advertise: str | None = None
    identity: Path | None = None
    secret: Path | None = None
    bootstrap: bool = False
    take_over: bool = False
    relay: str | None = None
    """For sites that cannot be dialled, this one or others."""
    metrics: str | None = None
    """Where figures for Prometheus are shown."""
    time_outs: bool = False
    """Show all of them."""


def bind_of(where: Where, ranks: int) -> str | None:
    """Where a process of the site listens. One that was not told to does so on loopback, where others may come in there: by way of a relay,
    on this machine, or its own other ranks."""
    if where.bind is None and (where.relay is not None or ranks > 1 or is_loopback(host_of(where.coordinator))):
        return "127.0.0.1:0"
    return where.bind


def address_at(where: Where, bind: str | None, port: int | None) -> str | None:
    """Where other sites reach this process; None: nowhere, it dials out.

    Args:
        bind: what `bind_of` said.
        port: where it listens.
    """
    dials_out = where.bind is None and (where.relay is not None or not is_loopback(host_of(where.coordinator)))
    if dials_out and where.relay is not None:
        return None
    return advertised(None if dials_out else bind, where.advertise, port, where.coordinator)


def check_relay(where: Where, ranks: int) -> None:
    """Refuses what a relay is not for.

    Raises:
        BadInput: the site has several ranks.
    """
    if where.relay is not None and ranks > 1:
        raise BadInput(
            f"--relay {where.relay}: a relay knows one process of a site, and site {where.site} has {ranks} ranks: leave it out and give "
            "--bind and --advertise, or neither where all other sites can be dialled"
        )


def with_servers(access: Access, n: int, hosts: Mapping[int, int]) -> Access:
    """Who calls for a server before it is known here where that is, is asked to call again (there is no link to it yet), not refused.

    Args:
        n: the first number of a server.
        hosts: server -> the worker at whose site it is, where that is known.
    """

    def admit(number: int, context: Any) -> str | None:
        return None if number >= n and number not in hosts else access.admit(number, context)

    return replace(access, admit=admit)


def missing(links: Links, peers: Mapping[int, Peer], places: Ranges) -> list[int]:
    """The sites to one of whose ranks there is no connection, this one left out."""
    own = places.workers[links.me]
    found = {places.workers[j] for j in peers if (link := links.links.get(j)) is None or link.session is None}
    return sorted(found - {own})


class Presence:
    """One site's, from its start to its end. It has not joined the run yet.

    Args:
        handlers: what else this site serves at its port.
        places: the ranks of all sites.
        ranks: those of this site.
        on_out: told why this site cannot go on, in a thread of its own.

    Raises:
        BadInput: what was given cannot be.
    """

    def __init__(
        self,
        spec: Spec,
        where: Where,
        handlers: Sequence[Any],
        places: Ranges,
        ranks: Ranks,
        on_out: Callable[[RunFailed], None] = lambda error: None,
    ) -> None:
        for option, address in (("--coordinator", where.coordinator), ("--relay", where.relay), ("--advertise", where.advertise)):
            if address is not None:
                check_address(option, address)
        if where.bind is not None:
            check_bind(where.bind, "--bind")
        if where.identity is None and where.advertise is not None:
            check_plain(where.advertise, "--advertise")
        identity, secret = identity_of(where.identity), secret_of(where.identity, where.secret)
        self._me, self._places = where.site, places
        self._client: CoordinatorClient | None = None
        self._relay: RelayClient | None = None
        party = None if secret is None else Party(terms_of(spec, secret), RosterOf(self._told))
        self.doors = Doors(where.site, party, identity)
        channel = self.doors.coordinator(where.coordinator)
        if where.relay is not None and secret is None:
            raise BadInput(f"--relay {where.relay}: a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
        bind = bind_of(where, ranks.size)
        self.hosts: dict[int, int] = {}
        """Where servers are: their seat -> that of the site. Those of the session that is being met, once that is agreed on."""
        self.access = with_servers(self.doors.access(self._name_at), places.n, self.hosts)
        # The port must be known before the site joins, and the boot of the client before others ask for it.
        self.neighbours = Neighbours(where.site, self.doors, self.roster)
        self.neighbours.ends = lambda: ranks.lost
        self.port = Port(bind, self.access, [*handlers, self.neighbours.handlers()])
        self._unbound: BadInput | None = None
        """Why it does not listen yet: the port is taken, maybe by the process whose place this one comes to take."""
        try:
            in_loop(self.port.start())
        except BadInput as error:
            if bind is None or not taken(bind):
                raise
            self._unbound, self.port.number = error, int(bind.rpartition(":")[2])
        self.address = address_at(where, bind, self.port.number)
        self.inner = ranks.inner(bind, self.port.number, self.address)
        """Where the ranks of this site reach each other."""
        card = Card(
            address=self.address,
            ranks=ranks.addresses if self.address is not None else (),
            capabilities=() if where.relay is None else (RELAY,),
        )
        self.client = self._client = CoordinatorClient(
            channel, spec, where.site, card, bootstrap=where.bootstrap, take_over=where.take_over
        )
        self.client.on_failure = on_out
        if where.relay is not None and secret is not None:
            self._relay = RelayClient(
                self.doors.service(where.relay),
                local=self.port.number,
                begin=False,
                patience_s=self.client.timeouts.lease,
                there=self._there,
            )
            self.doors.relayed = self._relay.whose
        self.neighbours.begin(self.client.caller.boot, self.client.timeouts)
        self._vigil = Vigil(identity, [self.doors.look], on_out)

    def joined(self, check: Callable[[], None] = lambda: None) -> None:
        """This process is the site, and no other: now it may stand for it at the relay, and listen where another one of its did.

        Args:
            check: asked meanwhile; what it raises ends the wait.

        Raises:
            BadInput: it cannot listen, as long as a round may take.
        """
        until_s = time.monotonic() + self.client.timeouts.deadline
        while self._unbound is not None:
            try:
                in_loop(self.port.start())
                self._unbound = None
            except BadInput:
                if time.monotonic() > until_s:
                    self.client.leave()
                    raise
                check()
                time.sleep(_LOOK_S)
        if self._relay is not None:
            self._relay.begin()

    def close(self) -> None:
        """Closes all connections."""
        self._vigil.close()
        with suppress(Exception):
            self.client.close()
        self.neighbours.close()
        in_loop(self.doors.lines.close())
        if self._relay is not None:
            self._relay.close()
        in_loop(self.port.stop())

    def connect(self, links: Links, members: tuple[int, ...], check: Callable[[], None]) -> None:
        """Connections to all members.

        Args:
            check: asked meanwhile; what it raises ends the wait.

        Raises:
            RunFailed: to some there are none, who count as gone in the next opening.
        """
        peers = peers_of(self._places, links.me, members, self.client.roster, self.address, self.inner, self._relay)
        try:
            links.connect(peers, self.client.timeouts.lease * 1.5, check=check)
        except RunFailed:
            for worker in missing(links, peers, self._places):
                self.neighbours.lost(worker)
            raise

    def watch(self, links: Links, members: Sequence[int]) -> None:
        """Has these connections given up where the coordinator or the relay knows that the process at their other end is gone.

        Args:
            members: of the session that they are for.
        """
        boots = {j: m.boot for j in members if (m := self.client.roster.at(j)) is not None}

        def out(number: int) -> str | None:
            workers = self._places.workers
            seat = workers[number] if number < len(workers) else self.hosts.get(number, -1)
            member = self.client.roster.at(seat)
            if member is None or seat not in boots:
                return None
            if member.boot != boots[seat]:
                return f"{_GONE}: another one has joined in its place"
            if not member.there:
                return printable(member.fault) or f"{_GONE}: the coordinator has not heard of it since"
            absent_s = None if self._relay is None else self._relay.absent_s(member.site)
            return None if absent_s is None or absent_s < BACK_S else f"{_GONE}: it does not stand at the relay any more"

        links.out = out

    @property
    def listens(self) -> bool:
        """Whether others reach this site, be it by a relay."""
        return self.address is not None or self._relay is not None

    def peer(self, seat: int) -> Peer:
        """How this site sees that of a server, or of a worker where all sites have one rank. Itself it sees where it listens.

        Raises:
            BadInput: neither can be dialled, and there is no relay.
        """
        member = self.client.roster.at(self.hosts.get(seat, seat))
        if member is None:
            return Peer(None)
        if member.seat == self.client.seat:
            return Peer(self.port.local)
        return peer_of(self.address, member.card.address, member.site, self._relay)

    def called(self, seat: int) -> str:
        """What the seat of a worker or a server is called in messages."""
        site = f"site {self.name_of(self.hosts.get(seat, seat)) or f'at seat {seat}'}"
        return f"a server at {site}" if seat in self.hosts else site

    def _name_at(self, number: int) -> str | None:
        """The site of one of the numbers that connections have: of ranks, then of servers."""
        workers = self._places.workers
        return self.name_of(workers[number] if number < len(workers) else self.hosts.get(number, -1))

    def roster(self) -> Roster | None:
        """The latest, with addresses of the relay for those that can be reached only there."""
        found = self._told()
        return found if found is None or self._relay is None else relayed(found, self._me, self._relay)

    def _told(self) -> Roster | None:
        """The latest; None: this site has not joined yet."""
        client = self._client
        try:
            return None if client is None else client.roster
        except RunFailed:
            return None

    def _there(self, site: str) -> bool:
        """Whether a site is, as far as this one knows."""
        return any(m.site == site and m.there for m in self.client.roster.members)

    def name_of(self, seat: int) -> str | None:
        """The site of a seat."""
        roster = self._told()
        member = None if roster is None else roster.at(seat)
        return None if member is None else member.site

    def names(self, seats: tuple[int, ...]) -> dict[int, str]:
        """By seat."""
        return {j: self.name_of(j) or f"seat {j}" for j in seats}
