"""Rate and round-trip time of every directed link, over the transport that carries the exchange.

    with init() as group:
        links = measure_links(group)        # of this worker to each other one

One pair at a time: `schedule` is the same list on all workers, and whoever has measured a pair tells the one whose turn is next. Of a pair
one worker measures, by its own clock alone; the other answers.

- Round trip: the median of some answers to 8 bytes. Threads and the transport itself are in it, as they are in an exchange.
- Rate: 8 bytes / (T - RTT), T from handing the message over to the answer that all of it has come. Beginning with 1 MB the message grows
  fourfold until it takes 0.2 s and four round trips, or has 64 MB; then the median of up to three.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gossamer.real.group import Group
from gossamer.real.transport import Receipt
from gossamer.worker.effects import Addr, Tag

_ASK, _ANSWER, _DATA, _TURN = (Tag.of(k, 7) for k in (2, 3, 4, 5))  # kind 7 is no program's; gossamer.real.group has others
_END, _PING = 0, 1
"""What is asked; any greater number is the bytes of a message that will follow."""
_PINGS, _WARM_UP = 15, 3
_REPEATS, _REPEAT_S = 3, 2.0
_ENOUGH_S, _ENOUGH_TRIPS = 0.2, 4
_FIRST_BYTES, _MOST_BYTES = 1_000_000, 64_000_000


@dataclass(frozen=True)
class LinkMeasure:
    """One direction between two workers."""

    frm: Addr
    to: Addr
    rate_mbps: float
    """Of one message, alone."""
    rtt_ms: float
    """There and back, of 8 bytes each way."""
    probe_bytes: int
    """Size of the message that the rate was measured with."""


def schedule(n: int) -> list[tuple[Addr, Addr]]:
    """Who measures its link to whom, one after the other.

    >>> schedule(3)
    [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    """
    return [pair for a in range(n) for b in range(a + 1, n) for pair in ((a, b), (b, a))]


def measure_links(group: Group, *, most_bytes: int = _MOST_BYTES) -> list[LinkMeasure]:
    """This worker's links to all others. All workers call it; worker 0 begins, at once, so let it know first that nobody is computing.

    Args:
        most_bytes: of a message, at most.

    Raises:
        RunFailed: a worker is gone.
    """
    order, found = schedule(group.n), []
    turns = [frm for frm, _ in order]
    for k, (frm, to) in enumerate(order):
        if group.me == frm:
            if k and turns[k - 1] != frm:
                _await(group, group.transport.receive(turns[k - 1], _TURN, 8, _number))
            found.append(_measure(group, to, most_bytes))
            if k + 1 < len(order) and turns[k + 1] != frm:
                group.transport.send(turns[k + 1], _TURN, _word(k + 1))
        elif group.me == to:
            _answer(group, frm)
    return found


def _measure(group: Group, to: Addr, most_bytes: int) -> LinkMeasure:
    trips_s = [_ask(group, to, _PING) for _ in range(_WARM_UP + _PINGS)]
    rtt_s = median(trips_s[_WARM_UP:])
    data = _noise(min(_FIRST_BYTES, most_bytes))
    while (taken_s := _transfer(group, to, data)) < max(_ENOUGH_S, _ENOUGH_TRIPS * rtt_s) and data.numel() < most_bytes:
        data = _noise(min(4 * data.numel(), most_bytes))
    times_s = [taken_s]
    while len(times_s) < _REPEATS and sum(times_s) < _REPEAT_S:
        times_s.append(_transfer(group, to, data))
    _send_word(group, to, _ASK, _END)
    taken_s = median(times_s)
    return LinkMeasure(group.me, to, 8e-6 * data.numel() / max(taken_s - rtt_s, taken_s / _ENOUGH_TRIPS), 1e3 * rtt_s, data.numel())


def _noise(size: int) -> Tensor:
    """Bytes that nothing on the way can compress."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def _ask(group: Group, to: Addr, what: int) -> float:
    """Seconds until the answer."""
    answer = group.transport.receive(to, _ANSWER, 8, _number)
    begin_s = time.monotonic()
    _send_word(group, to, _ASK, what)
    _await(group, answer)
    return answer.at_s - begin_s


def _transfer(group: Group, to: Addr, data: Tensor) -> float:
    """Seconds from handing `data` over to the answer that it has come."""
    _ask(group, to, data.numel())  # the other has posted its receive
    answer = group.transport.receive(to, _ANSWER, 8, _number)
    begin_s = time.monotonic()
    group.transport.send(to, _DATA, data)
    _await(group, answer)
    return answer.at_s - begin_s


def _answer(group: Group, frm: Addr) -> None:
    """Answers what `frm` asks, until it has measured."""
    asked = group.transport.receive(frm, _ASK, 8, _number)
    while (what := _await(group, asked)) != _END:
        asked = group.transport.receive(frm, _ASK, 8, _number)  # before the answer, so that the next question finds it
        data = group.transport.receive(frm, _DATA, what, lambda _: None) if what != _PING else None
        _send_word(group, frm, _ANSWER, what)
        if data is not None:
            _await(group, data)
            _send_word(group, frm, _ANSWER, what)


def _send_word(group: Group, to: Addr, tag: int, number: int) -> None:
    group.transport.send(to, tag, _word(number))


def _await(group: Group, receipt: Receipt) -> Any:
    group.board.wait(lambda: receipt.done)
    return receipt.value


def _word(number: int) -> Tensor:
    return torch.frombuffer(bytearray(number.to_bytes(8, "little")), dtype=torch.uint8)


def _number(data: Tensor) -> int:
    return int.from_bytes(data.numpy().tobytes(), "little")
