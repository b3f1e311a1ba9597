"""How the connections of a site are made and let in: with TLS and the checks of a gate, with TLS alone, or plainly on one machine.

guard = AioGuard("lyon", find, identity)                       # gossamer.wan.trust.guard
dials = {j: Dial(party, "lyon", address, name, identity) ...}  # gossamer.wan.trust.dial
access = Access(
    channel=lambda j, peer, options: dials[j].aio_channel(options),
    listen=guard.listen,
    interceptors=(guard,),
    admit=lambda j, context: None if caller_of(context).site == names[j] else f"site {j} is {names[j]}",
)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

Options: TypeAlias = Sequence[tuple[str, int | str]]


@dataclass(frozen=True)
class Peer:
    """Where another site is.

    Args:
        address: host:port that it advertises; None: it cannot be reached, and dials.
        name: the name in its certificate, where TLS goes by that and it is not the host of the address.
        dials: whether this site dials it; None: where both can be reached, the one with the higher number dials.
    """

    address: str | None
    name: str | None = None
    dials: bool | None = None


def _plain_channel(number: int, peer: Peer, options: Options) -> Any:
    return grpc.aio.insecure_channel(_address(peer), options=list(options))


def _plain_port(server: Any, address: str) -> int:
    return int(server.add_insecure_port(address))


async def _close(channel: Any, good: bool) -> None:
    await channel.close()


@dataclass(frozen=True)
class Access:
    """How connections are made and let in. Without arguments: plainly, and everybody who knows the run.

    Args:
        channel: (number of the peer, peer, options) -> a channel of grpc.aio to it, or what behaves like one.
        listen: (server of grpc.aio, host:port) -> the port that was added to it. RuntimeError or BadInput: it cannot be.
        interceptors: of the server.
        admit: (number that a caller says it has, context of the call) -> why it is refused, or None.
        ended: (context of a call) -> why this side has ended it, for good; None: it has not.
        release: (channel, whether its connection is good) -> closes it; one that is good may be kept for the next session.
    """

    channel: Callable[[int, Peer, Options], Any] = _plain_channel
    listen: Callable[[Any, str], int] = _plain_port
    interceptors: tuple[Any, ...] = ()
    admit: Callable[[int, Any], str | None] = lambda number, context: None
    ended: Callable[[Any], str | None] = lambda context: None
    release: Callable[[Any, bool], Awaitable[None]] = _close


def with_tls(
    server: grpc.ServerCredentials, channel: grpc.ChannelCredentials, admit: Callable[[int, Any], str | None] | None = None
) -> Access:
    """TLS with these credentials, and `admit` to look at the caller's certificate (`context.auth_context()`)."""

    def dial(number: int, peer: Peer, options: Options) -> Any:
        named = [("grpc.ssl_target_name_override", peer.name)] if peer.name is not None else []
        return grpc.aio.secure_channel(_address(peer), channel, options=[*options, *named])

    def listen(at: Any, address: str) -> int:
        return int(at.add_secure_port(address, server))

    return Access(dial, listen) if admit is None else Access(dial, listen, admit=admit)


def _address(peer: Peer) -> str:
    assert peer.address is not None
    return peer.address
