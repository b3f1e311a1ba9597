"""What `gossamer wan check` says, line by line, and of the way to a service: does its name resolve, does its port accept connections?"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gossamer.wan import dialback as D
from gossamer.wan.trust.terms import place_of

Level = Literal["ok", "warning", "wrong"]


class Finding(NamedTuple):
    """One line of the report."""

    level: Level
    what: str
    text: str
    remedy: str = ""


def ok(what: str, text: str) -> Finding:
    """As it should be."""
    return Finding("ok", what, text)


def wrong(what: str, text: str, remedy: str) -> Finding:
    """To be mended before this site can take part."""
    return Finding("wrong", what, text, remedy)


def way_to(what: Literal["coordinator", "relay"], address: str) -> Finding:
    """What a new connection to the host:port of a service meets."""
    host, port = place_of(address)
    try:
        found = D.addresses(host)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or error
        remedy = "check the spelling and this machine's DNS, or give an IP address"
        return wrong(what, f"the name {host} does not resolve ({said})", remedy)
    reached, said = D.reach(host, port)
    at = address if host in found else f"{address} ({', '.join(found)})"
    if reached == "open":
        return ok(what, f"{at} accepts connections")
    if reached == "refused":
        return wrong(
            what,
            f"{at} refuses the connection: the machine is there, and nothing listens at this port",
            f"start gossamer wan {what} there with --bind 0.0.0.0:PORT (not 127.0.0.1), and check the port",
        )
    if reached == "filtered":
        return wrong(
            what,
            f"{at} does not answer within {D.DIAL_S:g} s: something on the way drops the packets",
            f"open TCP port {port} for incoming connections in the firewall or security group of the {what}, "
            "and for outgoing ones in that of this site; check that the machine is on",
        )
    return wrong(what, f"{at} cannot be reached ({said})", "check the address, and this machine's own network")
