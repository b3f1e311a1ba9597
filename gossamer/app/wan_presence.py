"""Where a site of a wide-area run is, and its connections to everything else: coordinator, other sites, relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.app.wan_spec import RosterOf, advertised, identity_of, secret_of, terms_of
from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.access import Peer
from gossamer.wan.client import CoordinatorClient
from gossamer.wan.dial import Dial
from gossamer.wan.doors import Anybody, Doors
from gossamer.wan.listening import Port
from gossamer.wan.loop import in_loop
from gossamer.wan.neighbours import Neighbours
from gossamer.wan.records import Card, Roster, Spec
from gossamer.wan.relay_client import RelayClient, peer_of, relayed
from gossamer.wan.trust import Party, host_of, is_loopback
from gossamer.wan.wire import Links


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
    relay: str | None = None
    """For sites that cannot be dialled, this one or others."""
    metrics: str | None = None
    """Where figures for Prometheus are shown."""
    time_outs: bool = False
    """Show all of them."""


class Presence:
    """One site's, from its start to its end. It has not joined the run yet.

    Args:
        handlers: what else this site serves at its port.

    Raises:
        BadInput: what was given cannot be.
    """

    def __init__(self, spec: Spec, where: Where, handlers: Sequence[Any]) -> None:
        identity, secret = identity_of(where.identity), secret_of(where.identity, where.secret)
        self._me = where.site
        self._client: CoordinatorClient | None = None
        self._relay: RelayClient | None = None
        party = None if secret is None else Party(terms_of(spec, secret), RosterOf(self.roster))
        self.doors = Doors(where.site, party, identity)
        channel = self.doors.coordinator(where.coordinator)
        bind = where.bind
        if where.relay is not None and secret is None:
            raise BadInput(f"--relay {where.relay}: a relay wants the run secret: give --secret FILE, and --identity DIR off this machine")
        if bind is None and (where.relay is not None or is_loopback(host_of(where.coordinator))):
            bind = "127.0.0.1:0"
        self.access = self.doors.access(self.name_of)
        # The port must be known before the site joins, and the boot of the client before others ask for it.
        self.neighbours = Neighbours(where.site, self.doors, self.roster)
        self.port = Port(bind, self.access, [*handlers, self.neighbours.handlers()])
        in_loop(self.port.start())
        hidden = where.bind is None and where.relay is not None
        self.address = None if hidden else advertised(bind, where.advertise, self.port.number, where.coordinator)
        self.client = self._client = CoordinatorClient(channel, spec, where.site, Card(address=self.address), bootstrap=where.bootstrap)
        if where.relay is not None and secret is not None:
            dial = Dial(Party(terms_of(spec, secret), Anybody()), where.site, where.relay, None, identity)
            self._relay = RelayClient(dial, local=self.port.number)
        self.neighbours.begin(self.client.caller.boot, self.client.timeouts)

    def close(self) -> None:
        """Closes all connections."""
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
        roster = self.client.roster
        found = {j: roster.at(j) for j in members if j != links.me}
        peers = {j: peer_of(self.address, m.card.address, m.site, self._relay) if m is not None else Peer(None) for j, m in found.items()}
        try:
            links.connect(peers, self.client.timeouts.lease * 1.5, check=check)
        except RunFailed:
            for j in peers:
                if (link := links.links.get(j)) is None or link.session is None:
                    self.neighbours.lost(j)
            raise

    def roster(self) -> Roster | None:
        """The latest, with addresses of the relay for those that can be reached only there."""
        client = self._client
        try:
            found = None if client is None else client.roster
            return found if found is None or self._relay is None else relayed(found, self._me, self._relay)
        except RunFailed:
            return None

    def name_of(self, seat: int) -> str | None:
        """The site of a seat."""
        roster = self.roster()
        member = None if roster is None else roster.at(seat)
        return None if member is None else member.site

    def names(self, seats: tuple[int, ...]) -> dict[int, str]:
        """By seat."""
        return {j: self.name_of(j) or f"seat {j}" for j in seats}
