"""Which worker a site is, how many ranks it has, and where each of them is reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gossamer.app.job import Job
from gossamer.app.summary import worker_names
from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.ranges import Ranges
from gossamer.wan.links.link import Traffic
from gossamer.wan.relay.client import RelayClient, peer_of
from gossamer.wan.roster.records import Card, Roster
from gossamer.wan.trust.access import Peer
from gossamer.wan.trust.terms import MOST_PORT, host_of, is_loopback, joined

ANY = ("0.0.0.0", "::", "")
"""Hosts that are all addresses of a machine."""


def places_of(job: Job) -> Ranges:
    """The ranks of all sites, as the groups of a run number them."""
    return job.ranges or Ranges((1,) * job.n, {})


def ranks_of(job: Job, site: str) -> int:
    """Ranks of a site.

    Raises:
        BadInput: the sites have unlike numbers, and it is not said which one this is.
    """
    ranks = set(job.fleet.ranks)
    if len(ranks) == 1:
        return ranks.pop()
    named = job.config.wan.sites
    if not named:
        raise BadInput(
            f"fleet {job.fleet.name} has workers of {', '.join(map(str, sorted(ranks)))} ranks, and site {site} does not know which it is: "
            "name all sites in wan.sites, in the order of the fleet's workers"
        )
    if site not in named:
        raise BadInput(f"site {site} is not one of wan.sites ({', '.join(named)}): check --site")
    return job.fleet.ranks[list(named).index(site)]


def names_of(job: Job, sites: Mapping[int, str]) -> list[str]:
    """What the workers are called: as their sites, by seat; one that is not known, as the fleet says."""
    known = {**dict(enumerate(job.config.wan.sites)), **sites}
    return [f"site {known[i]}" if i in known else name for i, name in enumerate(worker_names(job))]


def shifted(address: str | None, rank: int) -> str | None:
    """Where a rank listens, or is reached: so many ports above the first. Port 0 (any) stays.

    >>> shifted("0.0.0.0:7001", 2), shifted("[::1]:0", 2), shifted(None, 2)
    ('0.0.0.0:7003', '[::1]:0', None)

    Raises:
        BadInput: there is no such port.
    """
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal()) or int(port) + rank > MOST_PORT:
        raise BadInput(f"{address}: expected host:port, with a port that leaves room for those of rank {rank} (at most {MOST_PORT})")
    return f"{host}:{int(port) + rank if int(port) else 0}"


def inner_address(bind: str, port: int | None, address: str | None, local: bool) -> str:
    """Where the other ranks of its site reach a rank.

    Args:
        bind: what `bind_of` said.
        port: where it listens.
        address: which it advertises.
        local: all ranks are on one machine.

    Raises:
        BadInput: they are not, and cannot reach each other.
    """
    host = host_of(bind)
    if host in ANY:
        host = "127.0.0.1" if local else ""
    if not host and address is not None:
        return address
    if not host or (is_loopback(host) and not local):
        raise BadInput("the ranks of a site are on several machines and do not reach each other: give --bind and --advertise to each")
    return joined(host, port)


def address_of(card: Card, rank: int, site: str) -> str | None:
    """Where a rank of another site is reached; None: it dials.

    Raises:
        RunFailed: it does not say.
    """
    if rank == 0 or card.address is None:
        return card.address
    if rank > len(card.ranks):
        raise RunFailed(
            f"site {site} says where {1 + len(card.ranks)} of its ranks are reached, and has more: run one release on all sites"
        )
    return card.ranks[rank - 1]


def by_site(
    traffics: Iterable[Mapping[int, Traffic]], places: Ranges, names: Mapping[int, str], hosts: Mapping[int, int] | None = None
) -> dict[str, Traffic]:
    """Traffic of a rank, and of servers beside it, with all that is at each site together, by the names of the sites.

    Args:
        traffics: of each of them, by the number of the other end.
        hosts: servers, and at which site they are.
    """
    found: dict[str, Traffic] = {}
    for traffic in traffics:
        for number, one in sorted(traffic.items()):
            worker = places.workers[number] if number < places.n else (hosts or {}).get(number, number)
            name = names.get(worker, str(worker))
            found[name] = one if name not in found else found[name] + one
    return found


def peers_of(
    places: Ranges,
    number: int,
    members: Sequence[int],
    roster: Roster,
    mine: str | None,
    inner: Sequence[str],
    relay: RelayClient | None = None,
) -> dict[int, Peer]:
    """How a rank sees all others that take part in a session.

    Args:
        number: of this rank.
        mine: where it is reached; None: nowhere, it dials out.
        inner: where the ranks of this site reach each other.

    Raises:
        RunFailed: a site does not say where one of its ranks is reached.
        BadInput: neither side can be dialled.
    """
    found: dict[int, Peer] = {}
    for worker in members:
        member = roster.at(worker)
        for rank, j in enumerate(places.seats(worker)):
            if j == number:
                continue
            if worker == places.workers[number]:
                found[j] = Peer(inner[rank])
            elif member is None:
                found[j] = Peer(None)
            else:
                found[j] = peer_of(mine, address_of(member.card, rank, member.site), member.site, relay)
    return found
