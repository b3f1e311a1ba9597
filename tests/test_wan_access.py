"""The gRPC wire behind certificates and the run's secret, and with a peer that is let in and then talks nonsense."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from trust_toys import TERMS, Listed, identity, sites
from wan_toys import RUN, bytes_like, empty, link_up, two

from gossamer.core.errors import RunFailed
from gossamer.real import LinkDown
from gossamer.wan.links.wire import Links
from gossamer.wan.loop import in_loop
from gossamer.wan.trust.access import Access, Peer, with_tls
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.guard import AioGuard, caller_of
from gossamer.wan.trust.terms import Party, Terms

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


def access(number: int, me: Identity | None, roster: Listed, terms: Terms = TERMS) -> Access:
    """As a site of a run has it."""
    party = Party(terms, roster)
    guard = AioGuard(NAMES[number], {terms.run: party}.get, me)
    dials: dict[str, Dial] = {}

    def channel(j: int, peer: Peer, options: object) -> object:
        assert peer.address is not None
        one = dials.setdefault(peer.address, Dial(party, NAMES[number], peer.address, NAMES[j], me))
        return one.aio_channel(options)  # type: ignore[arg-type]

    def admit(j: int, context: object) -> str | None:
        return None if caller_of(context).site == NAMES[j] else f"number {j} is site {NAMES[j]}"

    return Access(channel, guard.listen, (guard,), admit)


def passes(pair: tuple[Links, Links]) -> None:
    for me, them in (pair, pair[::-1]):
        got = empty(300_000)
        awaited = them.wire("data").recv(got, me.me, 8)
        me.wire("data").send(bytes_like(me.me, 300_000), them.me, 8).wait()
        awaited.wait()
        assert torch.equal(got, bytes_like(me.me, 300_000))


@pytest.mark.parametrize("tls", [True, False])
def test_bytes_pass_behind_certificates_and_behind_the_secret_alone(made: Path, tls: bool) -> None:
    pair = [Links(i, 2, RUN, access=access(i, identity(made, NAMES[i]) if tls else None, Listed(*NAMES))) for i in (0, 1)]
    try:
        link_up(pair)
        passes((pair[0], pair[1]))
        assert pair[0].traffic()[1].sessions == 1
    finally:
        for s in pair:
            s.close()


@pytest.mark.parametrize(
    ("number", "site", "of", "secret", "why"),
    [
        (1, "b", "theirs", TERMS.secret, "CA"),
        (1, "b", "ours", b"x" * 32, "secret"),
        (2, "b", "ours", TERMS.secret, "number 2 is|list index|looked for"),
    ],
)
def test_who_is_not_believed_gets_no_connection(made: Path, number: int, site: str, of: str, secret: bytes, why: str) -> None:
    a = Links(0, 2, RUN, access=access(0, identity(made, "a"), Listed(*NAMES)))
    b = Links(number, 3, RUN, access=access(1, identity(made, site, of), Listed(*NAMES), replace(TERMS, secret=secret)))
    try:
        a.add(1, Peer(None))
        with pytest.raises(RunFailed, match=why):
            b.connect({0: Peer(f"127.0.0.1:{a.port}")}, 5)
    finally:
        a.close()
        b.close()


def test_a_site_that_is_struck_off_the_roster_is_cut_off(made: Path) -> None:
    roster = Listed(*NAMES)
    mine = access(0, identity(made, "a"), roster)
    a = Links(0, 2, RUN, access=mine)
    b = Links(1, 2, RUN, access=access(1, identity(made, "b"), Listed(*NAMES)))
    try:
        link_up([a, b])
        roster.sites.discard("b")
        ended = a.links[1].session
        assert ended is not None
        mine.interceptors[0].sweep()
        in_loop(_over(ended.over))
        assert a.traffic()[1].sessions == 1
        roster.sites.add("b")
        passes((a, b))
        assert a.traffic()[1].sessions == 2
    finally:
        a.close()
        b.close()


async def _over(future: asyncio.Future[str]) -> None:
    await asyncio.shield(future)


def test_credentials_of_grpc_do_alone(made: Path) -> None:
    seen: list[bytes] = []

    def of(site: str) -> Access:
        one = identity(made, site)
        pair = (one.key_pem, one.certificate.pem)
        server = grpc.ssl_server_credentials([pair], one.authority_pem, require_client_auth=True)

        def admit(number: int, context: object) -> str | None:
            seen.append(context.auth_context()["x509_pem_cert"][0])  # type: ignore[attr-defined]
            return None

        return with_tls(server, grpc.ssl_channel_credentials(one.authority_pem, *pair), admit)

    pair = [Links(i, 2, RUN, access=of(NAMES[i])) for i in (0, 1)]
    try:
        link_up(pair)
        passes((pair[0], pair[1]))
        assert len(seen) == 1 and seen[0].startswith(b"-----BEGIN CERTIFICATE")
    finally:
        for s in pair:
            s.close()


@pytest.mark.parametrize("stream", ["control", "data"])
@pytest.mark.parametrize("nonsense", [b"\x80\x04.", bytes(500), b'{"kind":"hello"}', b'{"kind":"synced","more":1}'])
def test_nonsense_within_a_session_costs_the_session_and_nothing_else(
    stream: str, nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with two() as pair, caplog.at_level(logging.WARNING):
        pending = pair[0].wire("data").recv(empty(10), 1, 16)
        passes(pair)
        session = pair[1].links[0].session
        assert session is not None

        async def talk() -> None:
            where = session._control if stream == "control" else session._streams[0]
            await where.write(nonsense)
            await asyncio.shield(session.over)

        in_loop(talk())
        passes(pair)
        pair[1].wire("data").send(bytes_like(3, 10), 0, 16).wait()
        pending.wait()
        assert pair[0].traffic()[1].sessions == 2
        assert [r.getMessage() for r in caplog.records if "refused" in r.getMessage()], "it was not logged"


class Nonsense:
    """What looks like a frame to who sends it."""

    def model_dump_json(self) -> str:
        return "{}"


def test_a_peer_that_talks_nothing_but_nonsense_is_given_up() -> None:
    with two() as pair:
        lost = pair[0].wire("data").recv(empty(10), 1, 8)

        async def talk() -> None:
            link = pair[1].links[0]
            while link.over is None:
                if (session := link.session) is not None:
                    session.say(Nonsense())  # type: ignore[arg-type]
                    await asyncio.wait([session.over], timeout=5)
                await asyncio.sleep(0.01)

        in_loop(talk(), 60)
        with pytest.raises(LinkDown, match="8 of its connections had to be closed"):
            lost.wait()
