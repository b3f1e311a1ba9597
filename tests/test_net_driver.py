"""The torch.distributed world, its workers in threads of one process: messages, order, failures, the end."""

from __future__ import annotations

import time

import pytest
import torch
from net_toys import SAY, Body, Hooks, all_but, in_threads, packet_of, same, talk

from gossamer.core.errors import RunFailed
from gossamer.real import Group, PeerLost, run
from gossamer.worker.effects import Compute, Expect, Gather, Program, Ready, Send, SiteSum, Tag, Work
from gossamer.worker.packet import HEADER_BYTES, Packet
from gossamer.worker.state import State

TAG = Tag.of(0, SAY)
BIG = 5_000_000


def ends(group: Group, program: Program) -> State:
    return run(program, Body(), None, group)[0]


def says(*packets: Packet, to: int) -> Program:
    for packet in packets:
        yield Send((to,), TAG, packet)
    return State(x={})


def test_every_bit_arrives_whoever_the_peers_are() -> None:
    """Peers change by round: a matching, then everybody, then nobody, as in gossip."""

    def peers(me: int, round: int) -> tuple[int, ...]:
        return ((me ^ 1,), all_but(me, 4), (), (me ^ 2,))[round % 4]

    rounds = [s.round for s in in_threads(4, lambda g: ends(g, talk(g.me, lambda t: peers(g.me, t), 12)))]
    assert rounds == [12] * 4


def test_big_and_small_packets_cross() -> None:
    sizes = (BIG, 0, BIG)
    accounts = in_threads(3, lambda g: run(talk(g.me, lambda _: all_but(g.me, 3), 3, lambda j: sizes[j]), Body(), None, g)[1])
    assert [a.bytes_sent for a in accounts] == [3 * 2 * (HEADER_BYTES + size) for size in sizes]
    assert [a.bytes_received for a in accounts] == [3 * (2 * HEADER_BYTES + sum(sizes) - sizes[i]) for i in range(3)]


def test_one_tag_is_first_in_first_out() -> None:
    sizes = (BIG, 10, 100_000, 0)

    def hears() -> Program:
        for size in sizes:
            yield Expect(TAG, {0: HEADER_BYTES + size})
        yield Compute(Work(1, 1, 0.0, 0.0))
        for k, size in enumerate(sizes):
            got = yield Gather(TAG, (0,), 0)
            assert same(got[0], 0, k, size)
        return State(x={})

    said = [packet_of(0, k, size) for k, size in enumerate(sizes)]
    in_threads(2, lambda g: ends(g, says(*said, to=1) if g.me == 0 else hears()))


def test_who_ends_first_loses_no_message() -> None:
    def hears() -> Program:
        yield Compute(Work(1, 1, 0.0, 0.0))
        yield Expect(TAG, {0: HEADER_BYTES + BIG})
        got = yield Gather(TAG, (0,), 0)
        assert same(got[0], 0, 0, BIG)
        return State(x={})

    def job(group: Group) -> None:
        run(hears() if group.me else says(packet_of(0, 0, BIG), to=1), Body(0.3), None, group)

    in_threads(2, job)


def test_a_ready_that_nobody_awaits_hangs_nothing() -> None:
    def program(me: int) -> Program:
        for t in range(3):
            yield Ready(all_but(me, 3), t)
        return State(x={})

    in_threads(3, lambda g: ends(g, program(g.me)))


def test_an_expect_that_nobody_answers_hangs_nothing() -> None:
    def program(me: int) -> Program:
        yield Expect(TAG, {1 - me: 100})
        return State(x={})

    in_threads(2, lambda g: ends(g, program(g.me)))


def test_a_message_that_nobody_awaits_is_named() -> None:
    with pytest.raises(RunFailed, match="worker 0 has sent 1 messages to worker 1, which awaited 0"):
        in_threads(2, lambda g: ends(g, says(*[packet_of(0, 0, 9)][: 1 - g.me], to=1)))


def test_a_damaged_byte_is_noticed() -> None:
    def job(group: Group) -> None:
        packet = packet_of(0, 0, 1000)
        assert packet.data is not None
        packet.data[HEADER_BYTES + 500] ^= 1  # after sealing: as if damaged on the way
        ends(group, hears() if group.me else says(packet, to=1))

    def hears() -> Program:
        yield Expect(TAG, {0: HEADER_BYTES + 1000})
        yield Gather(TAG, (0,), 0)
        return State(x={})

    with pytest.raises(RunFailed, match="worker 0 for round 0 was damaged on the way"):
        in_threads(2, job)


def test_the_others_learn_at_once_who_failed() -> None:
    """Worker 2 raises while 0 and 1 wait for it; worker 1 also waits for 0. Both blame worker 2, although 0 may be gone first."""
    blamed: dict[int, object] = {}

    def fails() -> Program:
        yield Compute(Work(1, 1, 0.0, 0.0))
        raise ValueError("a bug")

    def waits(frm: int) -> Program:
        yield Expect(TAG, {frm: 100})
        yield Gather(TAG, (frm,), 0)
        return State(x={})

    def job(group: Group) -> None:
        try:
            run(fails() if group.me == 2 else waits(2 if group.me == 0 else 0), Body(0.2), None, group)
        except RunFailed as error:
            blamed[group.me] = error
            raise

    with pytest.raises(RunFailed):
        in_threads(3, job)
    for i in (0, 1):
        error = blamed[i]
        assert isinstance(error, PeerLost) and error.worker == 2, error
    assert "worker 2, round 0: ValueError: a bug" in str(blamed[2])


def test_a_failure_is_noticed_without_waiting_for_that_worker() -> None:
    """Worker 0 expects nothing from worker 1, and still ends."""

    def works() -> Program:
        while True:
            yield Compute(Work(1, 1, 0.0, 0.0))

    def fails() -> Program:
        yield Compute(Work(1, 1, 0.0, 0.0))
        raise ValueError("a bug")

    with pytest.raises(RunFailed):
        in_threads(2, lambda g: ends(g, fails() if g.me else works()))


@pytest.mark.parametrize(
    "effect, message",
    [
        (Gather(TAG, (1,), 0), "gathers tag 0 from worker 1 without an Expect"),
        (Send((1,), TAG, Packet(packet_of(0, 0, 1).header, 65, None)), "a packet without data"),
        ("nonsense", "asked for 'nonsense', which is no effect"),
    ],
)
def test_a_wrong_program_is_told_what_is_wrong(effect: object, message: str) -> None:
    def program() -> Program:
        yield effect  # type: ignore[misc]
        return State(x={})

    with pytest.raises(RunFailed, match=message) as caught:
        in_threads(2, lambda g: ends(g, program() if g.me == 0 else says(to=0)))
    assert caught.value.__notes__ == ["in worker 0"]


def test_one_worker_alone_is_the_same_code() -> None:
    def program() -> Program:
        v = yield SiteSum(torch.tensor([1.0, 2.0]))
        assert v.tolist() == [1.0, 2.0]
        return (yield from talk(0, lambda _: (), 5))

    hooks = Hooks()
    started_s = time.monotonic()
    (result,) = in_threads(1, lambda g: run(program(), Body(0.001), hooks, g))
    assert result[0].round == 5
    assert hooks.rounds == [1, 2, 3, 4, 5]
    assert 0.0 < result[1].wall_s <= time.monotonic() - started_s
