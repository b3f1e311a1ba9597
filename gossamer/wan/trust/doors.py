"""How one site is entered and enters others: with certificates and the run's secret, or plainly where all are on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from gossamer.wan.links.lines import Line, Lines
from gossamer.wan.roster.calls import Channel, plain
from gossamer.wan.trust.access import Access, Options, Peer
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.guard import AioGuard, caller_of, ended_of
from gossamer.wan.trust.terms import Party, check_plain


class Anybody:
    """A roster for calls to the coordinator, which is no site: whoever shows a certificate of the CA and knows the secret."""

    epoch = 0

    def allows(self, site: str) -> bool:
        return True


class Doors:
    """Connections of site `me`, in one run.

    Args:
        party: the run, as this site takes part in it; None: plainly, for loopback, where everybody on the machine is believed.
        identity: certificate and key; None: loopback alone.

    Raises:
        BadInput: the certificate is another site's.
    """

    def __init__(self, me: str, party: Party | None, identity: Identity | None) -> None:
        self.me, self._party, self._identity = me, party, identity
        self._guard = None if party is None else AioGuard(me, lambda run: party if run == party.terms.run else None, identity)
        self._dials: dict[tuple[str | None, str], Dial] = {}
        self.relayed: Callable[[str], str | None] = lambda address: None
        """The site to which an address leads by a relay."""
        self.lines = Lines()
        """Connections between sessions."""

    def coordinator(self, address: str) -> Channel:
        """Channels to the coordinator, for threads.

        Raises:
            BadInput: plainly, and not on this machine.
        """
        if self._party is None:
            check_plain(address)
            return plain(address)
        return self.service(address).channel

    def service(self, address: str) -> Dial:
        """The coordinator, or a relay: whoever has a certificate for the address.

        Raises:
            BadInput: no certificate, and not an address of this machine.
        """
        assert self._party is not None
        found = self._dials[None, address] = Dial(Party(self._party.terms, Anybody()), self.me, address, None, self._identity)
        return found

    def channel(self, site: str, address: str, options: Options = ()) -> Any:
        """A channel of grpc.aio, or what behaves like one, to another site."""
        if self._party is None:
            return grpc.aio.insecure_channel(address, options=list(options))
        found = self._dials.get((site, address))
        if found is None:
            found = self._dials[site, address] = Dial(self._party, self.me, address, site, self._identity)
            found.relayed = self.relayed(address) is not None
        return found.aio_channel(options)

    def access(self, name_of: Callable[[int], str | None]) -> Access:
        """For Links and their Port. `name_of`: the site with a seat, as the roster says; None: nobody."""
        guard = self._guard

        def channel(seat: int, peer: Peer, options: Options) -> Any:
            assert peer.address is not None
            site, address = name_of(seat) or "", peer.address
            return self.lines.take((site, address, tuple(options)), lambda: self.channel(site, address, options))

        if guard is None:
            return Access(channel, _listen_plain, release=_give_back)

        def admit(seat: int, context: Any) -> str | None:
            site, meant = caller_of(context).site, name_of(seat)
            return None if site == meant else f"site {site} says that it has seat {seat}, which is {meant or 'nobody'}'s"

        def ended(context: Any) -> str | None:
            fault = ended_of(context)
            return str(fault) if fault is not None and fault.of_certificate else None

        return Access(channel, guard.listen, (guard,), admit, ended, _give_back)

    def caller(self, context: Any) -> str | None:
        """Who makes a call, where that is known for certain; None: plainly."""
        return None if self._guard is None else caller_of(context).site

    def look(self) -> None:
        """Ends calls of and to those whose certificates are not good any more. To be called now and then."""
        if self._guard is not None:
            self._guard.look()
        for dial in list(self._dials.values()):
            dial.look()

    def sweep(self) -> None:
        """The roster has changed."""
        if self._guard is not None:
            self._guard.sweep()


async def _give_back(line: Line, good: bool) -> None:
    await line.close(keep=good)


def _listen_plain(server: Any, address: str) -> int:
    check_plain(address)
    return int(server.add_insecure_port(address))


QUIET: Sequence[tuple[str, int | str]] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Of channels for small calls between sites."""
