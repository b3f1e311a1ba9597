"""Sites that can only dial out meet at a relay: TLS from end to end, names, limits, deaths."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from trust_toys import SECRET, TERMS, Listed, identity, sites
from wan_toys import bytes_like, empty

from gossamer.core.errors import BadInput, RunFailed
from gossamer.real import LinkDown
from gossamer.wan.links.wire import Links, LinkSettings, Peer
from gossamer.wan.loop import in_loop
from gossamer.wan.relay import messages as R
from gossamer.wan.relay import server as relay_module
from gossamer.wan.relay.client import RelayClient, peer_of
from gossamer.wan.relay.messages import RelaySettings
from gossamer.wan.relay.server import RelayServer
from gossamer.wan.roster.messages import pack
from gossamer.wan.trust.access import Access
from gossamer.wan.trust.certificates import Identity
from gossamer.wan.trust.dial import Dial
from gossamer.wan.trust.guard import AioGuard, caller_of
from gossamer.wan.trust.terms import Party

SOON = LinkSettings(beat_s=0.2, silent_s=3.0, patience_s=60.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sites(tmp_path_factory.mktemp("wan"))


def until(true: Callable[[], Any]) -> None:
    while not true():
        time.sleep(0.01)


def serve(hub: Identity | None, bind: str = "127.0.0.1:0", **settings: Any) -> RelayServer:
    """A relay of site a, for b and c."""
    party = Party(TERMS, Listed("b", "c"))
    return RelayServer(bind, AioGuard("a", {TERMS.run: party}.get, hub), RelaySettings(**settings))


class Site:
    """One that listens on loopback alone, and stands at a relay."""

    def __init__(self, number: int, name: str, relay: str, me: Identity | None, settings: LinkSettings | None = None) -> None:
        self.number, self.name, self.me = number, name, me
        self.party = Party(TERMS, Listed("a", "b", "c"))
        self.names = {0: "b", 1: "c"}
        guard = AioGuard(name, {TERMS.run: self.party}.get, me)
        access = Access(self._channel, guard.listen, (guard,), self._admit)
        self.links = Links(number, 2, TERMS.run, access=access, settings=settings or SOON)
        self.client = RelayClient(Dial(self.party, name, relay, "a", me), local=self.links.port)

    def _channel(self, j: int, peer: Peer, options: Any) -> Any:
        assert peer.address is not None
        return Dial(self.party, self.name, peer.address, self.names[j], self.me).aio_channel(options)

    def _admit(self, j: int, context: Any) -> str | None:
        return None if caller_of(context).site == self.names[j] else "another site"

    def add_other(self) -> None:
        other = 1 - self.number
        self.links.add(other, peer_of(None, None, self.names[other], self.client))

    def meet(self) -> None:
        self.client.wait(60)
        self.add_other()
        until(lambda: self.links.links[1 - self.number].met.is_set())

    def close(self) -> None:
        self.links.close()
        self.client.close()


@contextmanager
def pair(relay: str, b: Identity | None, c: Identity | None, settings: LinkSettings | None = None) -> Iterator[tuple[Site, Site]]:
    with ExitStack() as stack:
        found = [Site(i, name, relay, me, settings) for i, (name, me) in enumerate((("b", b), ("c", c)))]
        for site in found:
            stack.callback(site.close)
            site.client.wait(60)
        for site in found:
            site.add_other()
        yield found[0], found[1]


def exchange(found: tuple[Site, Site], nbytes: int, tag: int = 8) -> None:
    """Both ways at once."""
    wires = [s.links.wire("data") for s in found]
    sent, got = [bytes_like(i, nbytes) for i in (0, 1)], [empty(nbytes) for _ in (0, 1)]
    works = [wires[1 - i].recv(got[i], i, tag) for i in (0, 1)] + [wires[i].send(sent[i], 1 - i, tag) for i in (0, 1)]
    for work in works:
        work.wait()
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("tls", [True, False])
def test_two_sites_that_only_dial_out_exchange_and_are_counted(made: Path, tls: bool) -> None:
    a, b, c = (identity(made, s) if tls else None for s in "abc")
    relay = serve(a)
    with pair(f"127.0.0.1:{relay.port}", b, c) as found:
        exchange(found, 3_000_000)
        counts = relay.counters()
        for site in "bc":
            one = counts[TERMS.run, site]
            assert one.stands and one.pipes == one.opened == 5
            assert 3_000_000 < one.received_bytes <= one.sent_bytes + 3_500_000 < 8_000_000
    until(lambda: not any(one.stands or one.pipes for one in relay.counters().values()))
    relay.close()


def test_the_relay_sees_nothing_of_what_passes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    real = relay_module.splice

    async def spying(one: Any, other: Any, passed: Any = lambda direction, nbytes: None) -> None:
        def spy(reader: Any) -> Any:
            class Spied:
                async def read(self, n: int) -> bytes:
                    seen.append(await reader.read(n))
                    return seen[-1]

            return Spied()

        await real((spy(one[0]), one[1]), (spy(other[0]), other[1]), passed)

    monkeypatch.setattr(relay_module, "splice", spying)
    relay = serve(identity(made, "a"))
    with pair(f"127.0.0.1:{relay.port}", identity(made, "b"), identity(made, "c")) as found:
        exchange(found, 300_000)
    relay.close()
    passed = b"".join(seen)
    assert len(passed) > 600_000
    for secret in (SECRET, TERMS.run.encode(), bytes_like(0, 300_000).numpy().tobytes()[1000:1032], b"gossamer.Link"):
        assert secret not in passed


def test_a_relay_that_dies_and_comes_back_costs_a_connection_and_nothing_else(made: Path) -> None:
    a = identity(made, "a")
    relay = serve(a)
    port = relay.port
    with pair(f"127.0.0.1:{port}", identity(made, "b"), identity(made, "c")) as found:
        exchange(found, 100_000)
        awaited, got = bytes_like(5, 200_000), empty(200_000)
        work = found[0].links.wire("data").recv(got, 1, 16)
        relay.close()
        until(lambda: all(s.links.links[1 - s.number].session is None for s in found))
        assert not any(s.client.stands for s in found)
        sending = found[1].links.wire("data").send(awaited, 0, 16)
        relay = serve(a, f"127.0.0.1:{port}")
        work.wait()
        sending.wait()
        assert torch.equal(got, awaited) and found[0].links.traffic()[1].sessions > 1
    relay.close()


def test_a_relay_that_stays_away_is_a_link_down_until_the_site_is_added_again(made: Path) -> None:
    a = identity(made, "a")
    relay = serve(a)
    port = relay.port
    impatient = LinkSettings(beat_s=0.2, silent_s=2.0, patience_s=4.0)
    with pair(f"127.0.0.1:{port}", identity(made, "b"), identity(made, "c"), impatient) as found:
        exchange(found, 1000)
        relay.close()
        for site in found:
            with pytest.raises(LinkDown, match="out of touch"):
                site.links.wire("data").recv(empty(5), 1 - site.number, 8).wait()
        relay = serve(a, f"127.0.0.1:{port}")
        for site in found:
            site.client.wait(60)
            site.add_other()
        exchange(found, 1000, 24)
    relay.close()


def test_the_end_of_a_site_ends_its_pipes_at_once(made: Path) -> None:
    relay = serve(identity(made, "a"))
    with pair(f"127.0.0.1:{relay.port}", identity(made, "b"), identity(made, "c")) as found:
        exchange(found, 1000)
        found[1].client.close()
        until(lambda: found[0].links.links[1].session is None)
        until(lambda: relay.counters()[TERMS.run, "b"].pipes == 0)
        assert found[0].client.stands and not relay.counters()[TERMS.run, "c"].stands
    relay.close()


def test_another_process_takes_the_place_of_an_earlier_one_of_its_own_site_alone(made: Path) -> None:
    relay = serve(identity(made, "a"))
    at = f"127.0.0.1:{relay.port}"
    with pair(at, identity(made, "b"), identity(made, "c")) as found:
        exchange(found, 1000)
        again = RelayClient(Dial(found[1].party, "c", at, "a", identity(made, "c")), local=None)
        again.wait(60)
        until(lambda: found[1].client.failure is not None)
        assert "another process of site c" in str(found[1].client.failure) and again.stands and found[0].client.stands
        with pytest.raises(RunFailed, match="another process"):
            found[1].client.wait(1)
        again.close()
    relay.close()


@pytest.mark.parametrize(
    ("site", "of", "why"),
    [("c", "theirs-b", "CA"), ("old", "ours", "expired"), ("a", "ours", "not in the roster")],
)
def test_who_may_not_stand_is_told_why(made: Path, monkeypatch: pytest.MonkeyPatch, site: str, of: str, why: str) -> None:
    relay = serve(identity(made, "a"))
    me = identity(made, "b", "theirs") if of == "theirs-b" else None
    if me is None and site != "old":
        me = identity(made, site)
    at = f"127.0.0.1:{relay.port}"
    party = Party(TERMS, Listed("a", "b", "c"))
    if site == "old":
        with pytest.raises(BadInput, match="expired"):
            identity(made, "old")
    else:
        assert me is not None
        client = RelayClient(Dial(party, me.site, at, "a", me), local=None)
        with pytest.raises(RunFailed, match=why):
            client.wait(1.0 if why == "not in the roster" else 60)
        client.close()
    relay.close()


def test_a_wrong_certificate_behind_the_relay_is_refused_by_the_other_site(made: Path) -> None:
    """b dials through the relay to what stands there as c, and is not: the relay lets it pass, TLS between the sites does not."""
    relay = serve(identity(made, "a"))
    at = f"127.0.0.1:{relay.port}"
    wrong = Site(0, "b", at, identity(made, "b"))
    wrong.names = {0: "b", 1: "b"}  # it takes the port that it reaches for site b
    right = Site(1, "c", at, identity(made, "c"))
    try:
        for site in (wrong, right):
            site.client.wait(60)
        peer = Peer(wrong.client.address_of("c"), dials=True)
        with pytest.raises(RunFailed, match=r"is not site b|another site|certificate"):
            wrong.links.connect({1: peer}, 60)
        assert not right.links.links
    finally:
        wrong.close()
        right.close()
        relay.close()


def ask(made: Path, relay: RelayServer, site: str, message: bytes) -> tuple[str, str]:
    """How a request for a pipe ends that says this, of a site with a good certificate."""

    async def call() -> tuple[str, str]:
        channel = Dial(Party(TERMS, Listed("a")), site, f"127.0.0.1:{relay.port}", "a", identity(made, site)).aio_channel()
        try:
            await channel.unary_unary(f"/{R.SERVICE}/Open")(message, timeout=30)
            return "OK", ""
        except grpc.RpcError as error:
            return error.code().name, str(error.details())
        finally:
            await channel.close()

    return in_loop(call())


def test_limits_and_rubbish(made: Path) -> None:
    relay = serve(identity(made, "a"), pipes_each=12, opens_s=8.0, sites=2)
    at = f"127.0.0.1:{relay.port}"
    with pair(at, identity(made, "b"), identity(made, "c")) as found:
        exchange(found, 1000)
        for message, code, why in (
            (b"{}", "INVALID_ARGUMENT", "no Open: to"),
            (b"\x80\x04.", "INVALID_ARGUMENT", "no Open"),
            (b"[" * 4000, "INVALID_ARGUMENT", "no Open"),
            (pack(R.Open(to="d")), "NOT_FOUND", "site d does not stand"),
            (pack(R.Open(to="b")), "NOT_FOUND", "site b does not stand"),  # itself
            (bytes(5000), "RESOURCE_EXHAUSTED", ""),
        ):
            found_code, text = ask(made, relay, "b", message)
            assert (found_code, why in text) == (code, True), (text, why)
        assert relay.counters()[TERMS.run, "b"].refused == 5
        assert ask(made, relay, "a", pack(R.Open(to="b")))[1].startswith("site a refuses this call: site a is not in the roster")
        for _ in range(3):  # strangers, and guesses of tokens
            for junk in (b"GET / HTTP/1.1\r\n\r\n", R.MAGIC + bytes(16) + b"hello", bytes(40), b"\x16\x03\x01\xff\xff"):
                with socket.create_connection(("127.0.0.1", relay.port)) as stranger, suppress(ConnectionError):
                    stranger.sendall(junk)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1000):
                        pass
        exchange(found, 1000, 16)
        assert found[0].links.traffic()[1].sessions == 1
        dialler = relay._sites[TERMS.run, "c"]

        def spent() -> int:
            dialler.may_open = 0.5  # it grows again by 8 a second
            return relay.counters()[TERMS.run, "c"].refused

        spent()
        in_loop(_end(next(iter(dialler.pipes))))
        until(spent)
        exchange(found, 1000, 24)
    relay.close()
    relay = serve(identity(made, "a"), pipes_each=4)
    with pair(f"127.0.0.1:{relay.port}", identity(made, "b"), identity(made, "c")) as found:
        until(lambda: relay.counters()[TERMS.run, "c"].refused)  # it needs five
    relay.close()
    with pytest.raises(BadInput, match="pipes_each of a relay is 0"):
        RelaySettings(pipes_each=0)


async def _end(pipe: Any) -> None:
    pipe.end()


def test_a_token_is_good_once(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []
    real = relay_module.secrets.token_bytes
    monkeypatch.setattr(relay_module.secrets, "token_bytes", lambda n: told.append(real(n)) or told[-1])
    relay = serve(identity(made, "a"))
    at = f"127.0.0.1:{relay.port}"
    with pair(at, identity(made, "b"), identity(made, "c")) as found:
        exchange(found, 1000)
        assert len([t for t in told if len(t) == R.TOKEN_BYTES]) >= 10
        for token in told:
            with socket.create_connection(("127.0.0.1", relay.port)) as thief:
                thief.sendall(R.MAGIC + token)
                assert thief.recv(1) == b""
        exchange(found, 1000, 16)
        assert found[0].links.traffic()[1].sessions == 1
    relay.close()


def test_who_does_not_read_stops_the_writer_and_the_relay_holds_little(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe to a port that never reads: what is taken from the writer stays below the windows on the way."""
    monkeypatch.setattr(R, "STALL_S", 2.0)
    relay = serve(identity(made, "a"))
    at = f"127.0.0.1:{relay.port}"
    party = Party(TERMS, Listed("a", "b", "c"))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        clients = [
            RelayClient(Dial(party, name, at, "a", identity(made, name)), local=local)
            for name, local in (("b", None), ("c", deaf.getsockname()[1]))
        ]
        for client in clients:
            client.wait(60)
        host, port = clients[0].address_of("c").rsplit(":", 1)
        with socket.create_connection((host, int(port))) as talker:
            talker.setblocking(False)
            sent = quiet = 0
            while quiet < 100:
                try:
                    sent += talker.send(bytes(1 << 18))
                    quiet = 0
                except BlockingIOError:
                    quiet += 1
                    time.sleep(0.01)
            assert sent < 100_000_000
            assert relay.counters()[TERMS.run, "b"].sent_bytes <= sent
        until(lambda: relay.counters()[TERMS.run, "b"].pipes == 0)
        for client in clients:
            client.close()
    relay.close()


def test_how_a_site_sees_another() -> None:
    class Relay:
        def address_of(self, site: str) -> str:
            return f"127.0.0.1:{len(site)}"

    relay: Any = Relay()
    assert peer_of("h:1", "i:1", "x", None) == Peer("i:1")
    assert peer_of(None, "i:1", "x", None) == Peer("i:1", dials=True)
    assert peer_of("h:1", None, "x", relay) == Peer(None, dials=False)
    assert peer_of(None, None, "x", relay) == Peer("127.0.0.1:1")
    with pytest.raises(BadInput, match="or both --relay"):
        peer_of(None, None, "x", None)


def test_a_site_that_dials_out_reaches_one_that_listens_whatever_their_numbers() -> None:
    low, high = Links(0, 2, "r"), Links(1, 2, "r")
    try:
        threads = [
            threading.Thread(target=low.connect, args=({1: Peer(f"127.0.0.1:{high.port}", dials=True)}, 30)),
            threading.Thread(target=high.connect, args=({0: Peer(None, dials=False)}, 30)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert low.links[1].session is not None and high.links[0].session is not None
    finally:
        low.close()
        high.close()
