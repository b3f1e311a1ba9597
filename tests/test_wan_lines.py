"""Connections go from one session to the next, and only good ones do."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import pytest
from test_wan_wire import exchange
from wan_toys import QUICK, Line

from gossamer.wan.links.lines import Lines
from gossamer.wan.links.listening import Port
from gossamer.wan.links.wire import Links
from gossamer.wan.loop import in_loop
from gossamer.wan.trust.access import Access, Peer


class Keeping:
    """How site 1 dials: with connections that stay; and how many were made."""

    def __init__(self) -> None:
        self.lines, self.made = Lines(), 0

    def access(self) -> Access:
        def channel(seat: int, peer: Peer, options: Any) -> Any:
            def make() -> Any:
                self.made += 1
                return grpc.aio.insecure_channel(peer.address, options=list(options))

            return self.lines.take((seat, peer.address, tuple(options)), make)

        return Access(channel, release=lambda line, good: line.close(keep=good))


def session(number: int, port: Port, address: str, keeping: Keeping) -> tuple[Links, Links]:
    """Two sites that meet."""
    a = Links(0, 2, f"run/{number}", port=port, settings=QUICK)
    b = Links(1, 2, f"run/{number}", bind=None, settings=QUICK, access=keeping.access())
    thread = threading.Thread(target=a.connect, args=({1: Peer(None)}, 20))
    thread.start()
    b.connect({0: Peer(address)}, 20)
    thread.join()
    return a, b


@pytest.fixture
def port():
    found = Port("127.0.0.1:0", Access())
    in_loop(found.start())
    yield found
    in_loop(found.stop())


@pytest.mark.parametrize("first", [0, 1], ids=["the dialled leaves first", "the dialler leaves first"])
def test_the_next_session_has_the_connections_of_the_last(port: Port, first: int) -> None:
    keeping = Keeping()
    for number in range(3):
        both = session(number, port, f"127.0.0.1:{port.number}", keeping)
        exchange(both, 8, 1 << 20)
        both[first].close()
        both[1 - first].close()
        assert keeping.made == 1 + QUICK.channels
    in_loop(keeping.lines.close())


def test_a_dark_line_is_not_kept(port: Port) -> None:
    keeping, line = Keeping(), Line(port.number)
    a, b = session(0, port, line.address, keeping)
    line.dark.set()
    b.close()  # in vain: nobody hears it
    a.close()
    line.dark.clear()
    both = session(1, port, line.address, keeping)
    assert keeping.made == 2 * (1 + QUICK.channels)
    exchange(both, 8, 1 << 16)
    for links in both:
        links.close()
    in_loop(keeping.lines.close())
    line.close()


def test_a_connection_that_broke_is_not_kept(port: Port) -> None:
    keeping, line = Keeping(), Line(port.number)
    for number in range(2):
        both = session(number, port, line.address, keeping)
        exchange(both, 8, 1 << 16)
        for links in both:
            links.close()
        line.cut()  # between the sessions
    assert keeping.made <= 2 * (1 + QUICK.channels)
    both = session(2, port, line.address, keeping)  # and what lies there broken harms nobody
    exchange(both, 8, 1 << 16)
    for links in both:
        links.close()
    in_loop(keeping.lines.close())
    line.close()


def test_nothing_is_kept_after_the_end() -> None:
    class Channel:
        closed = False

        def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
            return grpc.ChannelConnectivity.READY

        async def close(self) -> None:
            self.closed = True

    async def course() -> None:
        lines, made = Lines(), [Channel(), Channel(), Channel()]
        held = [lines.take(key, lambda i=i: made[i]) for i, key in enumerate(("a", "a", "b"))]
        for line in held:
            await line.close(keep=True)
        assert [c.closed for c in made] == [False, True, False]  # one of a key
        await lines.drop(lambda key: key == "b")
        assert [c.closed for c in made] == [False, True, True]
        late = lines.take("a", Channel)
        await lines.close()
        await late.close(keep=True)
        assert made[0].closed

    asyncio.run(course())
