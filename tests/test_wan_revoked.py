"""A certificate that was revoked, or has ended, while connections stand: both ends, and how the list gets around."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from coordinator_toys import caller, eventually, spec
from trust_toys import ECHO, SECRET, TERMS, WATCH, Listed, dial, fresh, serving
from wan_toys import RUN, empty

from gossamer.core.errors import RunFailed
from gossamer.real import LinkDown
from gossamer.wan.links.wire import Links, Peer
from gossamer.wan.loop import in_loop
from gossamer.wan.relay.client import RelayClient
from gossamer.wan.relay.server import RelayServer
from gossamer.wan.roster.calls import Away
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.records import Card
from gossamer.wan.roster.service import CoordinatorServer
from gossamer.wan.trust import ca, certificates, vigil
from gossamer.wan.trust import greeting as G
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.doors import Anybody, Doors
from gossamer.wan.trust.guard import AioGuard, Guard, caller_of, ended_of
from gossamer.wan.trust.terms import Distrusted, Party, Terms
from gossamer.wan.trust.vigil import Vigil

NAMES = ("a", "b")


def revoke(folder: Path, site: str, *at: Identity) -> None:
    ca.revoke(folder, site)
    for one in at:
        shutil.copy2(folder / "revoked.pem", one.folder / "revoked.pem")


@contextmanager
def linked(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Identity], dict[str, Doors], dict[str, Links]]]:
    """Sites a (seat 0) and b (seat 1), which dials."""
    folder, a, load = fresh(tmp_path)
    mine = {"a": a, "b": load("b")}
    doors = {site: Doors(site, Party(TERMS, Listed(*NAMES)), mine[site]) for site in NAMES}
    links = {site: Links(i, 2, RUN, access=doors[site].access(dict(enumerate(NAMES)).get)) for i, site in enumerate(NAMES)}
    try:
        connecting = threading.Thread(target=links["a"].connect, args=({1: Peer(f"127.0.0.1:{links['b'].port}")}, 30))
        connecting.start()
        links["b"].connect({0: Peer(f"127.0.0.1:{links['a'].port}")}, 30)
        connecting.join()
        yield folder, mine, doors, links
    finally:
        for one in links.values():
            one.close()


@pytest.mark.parametrize("revoked", ["a", "b"])
def test_a_link_ends_whoever_has_dialled(tmp_path: Path, revoked: str) -> None:
    """The one that stays has accepted the connection, or made it: it ends, and is not made again."""
    with linked(tmp_path) as (folder, mine, doors, links):
        stays, seat = next(n for n in NAMES if n != revoked), NAMES.index(revoked)
        pending = links[stays].wire("data").recv(empty(10), seat, 8)
        doors[stays].look()
        assert links[stays].links[seat].session is not None, "nothing was revoked yet"
        revoke(folder, revoked, mine[stays])
        doors[stays].look()
        with pytest.raises(LinkDown, match=rf"the certificate of site {revoked} \(serial .*was revoked on"):
            pending.wait()
        made = links[stays].traffic()[seat].sessions
        other = Links(seat, 2, RUN, access=doors[revoked].access(dict(enumerate(NAMES)).get), bind=None)
        try:
            with pytest.raises(RunFailed, match="was revoked on"):
                other.connect({1 - seat: Peer(f"127.0.0.1:{links[stays].port}", dials=True)}, 30)
        finally:
            other.close()
        assert links[stays].traffic()[seat].sessions == made == 1


@pytest.mark.parametrize("seen", ["by looking", "at its next call"])
def test_a_link_ends_where_the_certificate_of_the_other_side_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    with linked(tmp_path) as (folder, _, doors, links):
        short = Identity.load(ca.issue(folder, "b", days=2, out=tmp_path / "short"))

        def dialling(run: str) -> Links:
            return Links(1, 2, run, access=Doors("b", Party(TERMS, Listed(*NAMES)), short).access({0: "a"}.get), bind=None)

        again, more = dialling("other"), dialling("third")
        there = Links(0, 2, "other", access=doors["a"].access({1: "b"}.get))
        try:
            there.add(1, Peer(None))
            again.connect({0: Peer(f"127.0.0.1:{there.port}")}, 30)
            pending = there.wire("data").recv(empty(10), 1, 8)
            monkeypatch.setattr(certificates, "now_utc", lambda: datetime.now(UTC) + timedelta(days=3))
            if seen == "by looking":
                doors["a"].look()
            else:
                with pytest.raises(RunFailed, match="expired on"):
                    more.connect({0: Peer(f"127.0.0.1:{there.port}")}, 30)
            with pytest.raises(LinkDown, match="the certificate of site b expired on"):
                pending.wait()
            assert links["a"].links[1].session is not None, "the other certificate of that site is good"
        finally:
            more.close()
            again.close()
            there.close()


def test_calls_under_way_end_on_the_side_that_makes_them(tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)
    b = load("b")
    with serving(a, Listed("b", "c")) as (address, _):
        one = dial(address, b)
        with one.channel() as channel:
            stream = channel.unary_stream(WATCH)(b"", timeout=30)
            assert next(stream) == b"here"
            one.look()
            revoke(folder, "a", b)
            one.look()
            with pytest.raises(Distrusted, match=r"of site a .* was revoked") as caught:
                next(stream)
            assert caught.value.of_peer

    c = load("c")
    with serving(a, Listed("c")) as (address, _):

        async def streams() -> None:
            aio = Dial(Party(TERMS, Listed("a")), "c", address, "a", c)
            channel = aio.aio_channel()
            stream = channel.unary_stream(WATCH)(b"", timeout=30)
            assert await stream.read() == b"here"
            waits = asyncio.ensure_future(stream.read())
            revoke(folder, "b", c)
            await asyncio.to_thread(aio.look)
            for work in (waits, stream.read(), channel.unary_unary(ECHO)(b"", timeout=10)):
                with pytest.raises(Distrusted, match=r"of site a .* was revoked"):
                    await work
            assert channel.ended is not None

        in_loop(streams(), 30)


@pytest.mark.parametrize("sides", ["threads", "aio"])
def test_a_caller_brings_its_newer_list(tmp_path: Path, sides: str) -> None:
    folder, a, load = fresh(tmp_path)
    b, c = load("b"), load("c")
    with serving(a, Listed("b", "c")) as (address, _), dial(address, c).channel() as channel:
        one = dial(address, b)
        stream = channel.unary_stream(WATCH)(b"", timeout=30)
        assert next(stream) == b"here"

        def call() -> None:
            if sides == "threads":
                with one.channel() as two:
                    two.unary_unary(ECHO)(b"", timeout=10)
            else:

                async def there() -> None:
                    aio = one.aio_channel()
                    await aio.unary_unary(ECHO)(b"", timeout=10)
                    await aio.close()

                in_loop(there(), 30)

        call()
        before = (a.folder / "revoked.pem").read_bytes()
        revoke(folder, "c", b)
        call()  # greets anew, since its list is another
        assert (a.folder / "revoked.pem").read_bytes() == (folder / "revoked.pem").read_bytes() != before
        with pytest.raises(grpc.RpcError):
            next(stream)


def test_no_list_is_taken_from_whoever_is_not_let_in(tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)
    ca.revoke(folder, "b")
    pem = (folder / "revoked.pem").read_bytes()
    with serving(a, Listed("b")) as (address, _), dial(address, load("b"))._raw(grpc, ()) as raw:
        with pytest.raises(grpc.RpcError, match="without a session"):
            raw.unary_unary(G.TAKE)(pem, timeout=10)
        assert a.revocations.number == 1
        for bad in (b"", b"123456789"):
            with pytest.raises(grpc.RpcError, match="expected a number"):
                raw.unary_unary(G.LIST)(bad, timeout=10)
        assert raw.unary_unary(G.LIST)(bytes(8), timeout=10) == a.revocations.pem
        assert raw.unary_unary(G.LIST)((1).to_bytes(8, "big"), timeout=10) == b""


def test_a_damaged_list_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, a, load = fresh(tmp_path)
    one = dial("127.0.0.1:1", load("b"))
    guard = Guard("a", {TERMS.run: Party(TERMS, Listed("b"))}.get, a)
    for junk in (b"junk", b"more junk", b"x" * (G.MAX_LIST_BYTES + 1)):
        assert guard.take(junk) == b"" and a.revocations.number == 1
    assert len([r for r in caplog.records if "not taken" in r.getMessage()]) == 1
    revoke(folder, "b")
    assert guard.take((folder / "revoked.pem").read_bytes()) == b"" and a.revocations.number == 2
    old = one._identity
    assert old is not None
    guard.take(old.revocations.pem)
    assert a.revocations.number == 2 and len([r for r in caplog.records if "not taken" in r.getMessage()]) == 1, "an old one is no fault"


def test_a_revoked_site_sees_for_itself(tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)
    b = load("b")
    with serving(a, Listed("b")) as (address, _):
        one = dial(address, b)
        with one.channel() as channel:
            channel.unary_unary(ECHO)(b"", timeout=10)
            revoke(folder, "b", a)
            with pytest.raises(Distrusted, match="site a refuses this call: the certificate of site b") as caught:
                channel.unary_unary(ECHO)(b"", timeout=10)
            assert caught.value.said and not caught.value.own and not caught.value.of_peer
            one.look()
            assert b.certificate.fault(b.revocations) is not None
            with pytest.raises(Distrusted, match="certificate of site") as seen:
                channel.unary_unary(ECHO)(b"", timeout=10)
            assert seen.value.own


def test_nobody_is_stopped_by_the_word_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, a, load = fresh(tmp_path)
    b = load("b")
    with serving(a, Listed("b")) as (address, guard):
        one = dial(address, b)
        with monkeypatch.context() as patch, one.channel() as channel:
            lie = Distrusted("revoked", "the certificate of site b was revoked: I say so")
            patch.setattr(guard, "_check_certificate", lambda certificate: (_ for _ in ()).throw(lie))
            with pytest.raises(Distrusted, match="I say so"):
                channel.unary_unary(ECHO)(b"", timeout=10)
            one.look()
        assert b.certificate.fault(b.revocations) is None
        with one.channel() as channel:
            assert channel.unary_unary(ECHO)(b"hi", timeout=10) == b"b run-1 hi"


def test_a_vigil_tells_of_its_own_certificate_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vigil, "EVERY_S", 0.01)
    folder, a, load = fresh(tmp_path)
    told: list[Distrusted] = []
    looked = threading.Semaphore(0)

    def broken() -> None:
        raise ValueError("a look that fails")

    for me, harm in ((a, lambda: revoke(folder, "a", a)), (load("b"), lambda: None)):
        one = Vigil(me, [broken, looked.release], told.append)
        try:
            assert looked.acquire(timeout=10) and not told
            harm()
            if me is not a:
                for days, said in ((365 - 10, 1), (365 - 8, 1), (365 - 2, 2), (365 + 1, 3)):
                    monkeypatch.setattr(certificates, "now_utc", lambda days=days: datetime.now(UTC) + timedelta(days=days))
                    monkeypatch.setattr(vigil, "now_utc", certificates.now_utc)
                    eventually(lambda said=said: sum("expires on" in r.getMessage() for r in caplog.records) == said, f"{days} days")
            eventually(lambda: len(told) == 1, "it is told")
            for _ in range(3):
                assert looked.acquire(timeout=10)
        finally:
            one.close()
        (fault,) = told
        assert fault.own and fault.reason == ("revoked" if me is a else "expired")
        told.clear()
    Vigil(None, [broken], told.append).close()


def test_a_relay_is_brought_the_list_and_lets_nobody_stand_who_is_in_it(tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)
    sites = {site: load(site) for site in ("b", "c")}
    guard = AioGuard("a", {TERMS.run: Party(TERMS, Anybody())}.get, a)
    relay = RelayServer("127.0.0.1:0", guard)
    doors = {site: Doors(site, Party(TERMS, Anybody()), me) for site, me in sites.items()}
    clients = {site: RelayClient(doors[site].service(f"127.0.0.1:{relay.port}"), local=None) for site in sites}
    try:
        for client in clients.values():
            client.wait(30)
        revoke(folder, "c", sites["b"])
        doors["b"].look()
        assert (a.folder / "revoked.pem").read_bytes() == (folder / "revoked.pem").read_bytes()
        eventually(lambda: clients["c"].failure is not None, "it is put out")
        assert "the certificate of site c" in str(clients["c"].failure) and clients["b"].stands
        doors["c"].look()
        assert sites["c"].certificate.fault(sites["c"].revocations) is not None, "it sees for itself"
    finally:
        for client in clients.values():
            client.close()
        relay.close()


# ---- the coordinator


@contextmanager
def coordinator(tmp_path: Path, me: Identity) -> Iterator[tuple[CoordinatorServer, Guard]]:
    guard = Guard("a", lambda run: Party(Terms(run, SECRET, None, None), Anybody()), me)
    name: Callable[[Any], str] = lambda context: caller_of(context).site  # noqa: E731
    with CoordinatorServer(
        tmp_path / "runs.db", "127.0.0.1:0", interceptors=[guard], listen=guard.listen, identify=name, ended=ended_of
    ) as server:
        yield server, guard


def client_of(server: CoordinatorServer, me: Identity) -> CoordinatorClient:
    party = Party(Terms("demo", SECRET, None, None), Anybody())
    channel = Dial(party, me.site, f"127.0.0.1:{server.port}", None, me).channel
    return CoordinatorClient(channel, spec(), me.site, Card(address=None))


def test_the_coordinator_puts_a_revoked_site_out(tmp_path: Path) -> None:
    folder, a, load = fresh(tmp_path)
    with coordinator(tmp_path, a) as (server, guard):
        clients = {site: client_of(server, load(site)) for site in ("b", "c")}
        try:
            for client in clients.values():
                client.join(10)
                eventually(lambda client=client: client.stands, "the standing stream")
            revoke(folder, "b", a)
            guard.look()
            eventually(lambda: not server.coordinator.runs["demo"].state.find("b").there, "long before its lease of 10 s is over", 3.0)
            out = server.coordinator.runs["demo"].state.find("b")
            words = r"the certificate of site b \(serial [0-9a-f]+\) was revoked on \d[-0-9: ]+( UTC)?"
            assert re.fullmatch(words, out.fault), "the others are told why"
            eventually(lambda: clients["c"].roster.at(out.seat) == out, "they are")
            assert server.coordinator.runs["demo"].state.find("c").there
            server.coordinator.expel(caller("c", 7), "another process")
            assert server.coordinator.runs["demo"].state.find("c").there
        finally:
            for client in clients.values():
                client.close()


def test_a_coordinator_that_does_not_believe_counts_as_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock may be wrong, or its own certificate: no site ends for that."""
    folder, a, load = fresh(tmp_path)
    b = load("b")
    with coordinator(tmp_path, a) as (server, guard):
        client = client_of(server, b)
        try:
            client.join(10)
            with monkeypatch.context() as patch:
                lie = Distrusted("expired", "the certificate of site b expired: my clock says so")
                patch.setattr(guard, "_check_certificate", lambda certificate: (_ for _ in ()).throw(lie))
                client._hurry.set()
                eventually(lambda: client.away_s is not None, "away")
                with pytest.raises(Away, match="my clock says so"):
                    client.plan(0.5)
            client._hurry.set()
            eventually(lambda: client.away_s is None, "there again")
            failures: list[RunFailed] = []
            client.on_failure = failures.append
            revoke(folder, "b", b)
            client._hurry.set()
            eventually(lambda: bool(failures), "this is its own")
            assert "the certificate of site b" in str(client.failure)
        finally:
            client.close()
