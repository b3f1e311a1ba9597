"""Whom a site reaches: what counts, and from when on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from coordinator_toys import eventually

from gossamer.app.wan.ranks import Ranks
from gossamer.wan.deadlines import Timeouts
from gossamer.wan.links.listening import Port
from gossamer.wan.loop import in_loop
from gossamer.wan.neighbours import Neighbours, Ping, _Known
from gossamer.wan.roster.records import Card, Member
from gossamer.wan.trust.doors import Doors

OSLO = Member(site="oslo", seat=1, boot=f"{7:032x}", card=Card(address="127.0.0.1:1"))


def made() -> tuple[Neighbours, _Known]:
    doors: Any = SimpleNamespace(caller=lambda context: None)
    found = Neighbours("lyon", doors, lambda: None)
    found._boot, found._timeouts = f"{8:032x}", Timeouts.of(30.0)
    known = found._known[1] = _Known(OSLO, 0.0)
    return found, known


def pinged(neighbours: Neighbours) -> None:
    in_loop(neighbours._pinged(Ping(site="oslo", boot=OSLO.boot).model_dump_json().encode(), None))


def test_who_is_lost_is_not_reached_any_more_at_once() -> None:
    neighbours, _ = made()
    pinged(neighbours)
    assert neighbours.alive() == {1}
    neighbours.lost(1)
    assert neighbours.alive() == frozenset()


def test_what_a_site_said_before_it_was_lost_does_not_count() -> None:
    neighbours, known = made()
    pinged(neighbours)
    neighbours.lost(1)
    pinged(neighbours)  # it dials in only: nothing else can be known of it
    assert neighbours.alive() == {1}

    async def asked() -> None:
        known.task = asyncio.ensure_future(asyncio.sleep(0))

    in_loop(asked())
    neighbours.lost(1)
    pinged(neighbours)
    assert neighbours.alive() == frozenset() and known.hurry.is_set(), "it is asked instead"


def test_an_answer_to_what_was_asked_before_does_not_count() -> None:
    neighbours, known = made()
    answers: list[bytes] = []

    class Call:
        def __init__(self, data: bytes, timeout: float) -> None: ...

        def __await__(self) -> Any:
            if not answers:
                neighbours.lost(1)  # while the answer is on its way
            answers.append(Ping(site="oslo", boot=OSLO.boot).model_dump_json().encode())
            alive.append(neighbours.alive())
            yield from asyncio.sleep(0).__await__()
            return answers[-1]

    alive: list[frozenset[int]] = []
    channel = SimpleNamespace(unary_unary=lambda method: Call)
    neighbours._channels["oslo", "127.0.0.1:1"] = channel

    async def watch() -> None:
        task = asyncio.ensure_future(neighbours._watch(known))
        while len(answers) < 2:
            await asyncio.sleep(0.01)
        task.cancel()

    neighbours._heard(known)
    in_loop(watch(), 20.0)
    assert alive[:2] == [frozenset(), frozenset()], "the first answer was to a question from before"
    assert neighbours.alive() == {1}


def test_who_is_about_to_end_shows_itself_to_nobody_any_more() -> None:
    """A site that failed and takes its time to end had answered once more, and was taken for returned."""
    ranks: Any = SimpleNamespace(gone=[])
    doors = Doors("oslo", None, None)
    oslo = Neighbours("oslo", doors, lambda: None)
    oslo._boot, oslo._timeouts = OSLO.boot, Timeouts.of(30.0)
    oslo.ends = lambda: Ranks(2, ranks).lost
    port = Port("127.0.0.1:0", doors.access({}.get), [oslo.handlers()])
    in_loop(port.start())
    lyon, _ = made()
    lyon._doors = Doors("lyon", None, None)
    known = lyon._known[1] = _Known(OSLO.model_copy(update={"card": Card(address=f"127.0.0.1:{port.number}")}), 0.0)

    async def watch() -> None:
        known.task = asyncio.ensure_future(lyon._watch(known))

    in_loop(watch())
    try:
        eventually(lambda: lyon.alive() == {1}, "it answers")
        lyon.lost(1)
        eventually(lambda: lyon.alive() == {1}, "a line that was cut and is there again")
        ranks.gone.append(1)
        lyon.lost(1)
        eventually(lambda: lyon.gone() == {1}, "asked since, it has not answered")
        assert lyon.alive() == frozenset()
    finally:
        lyon.close()
        in_loop(doors.lines.close())
        in_loop(port.stop())
