"""Messages over a connection that breaks, loses, repeats and lies: the two ends without any network."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wan_toys import bytes_like, empty

from gossamer.real import LinkDown
from gossamer.wan.links.frames import (
    DATA_HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MIN_CHUNK_BYTES,
    Ack,
    Control,
    DataHeader,
    End,
    Finished,
    FrameError,
    Grant,
    Mismatch,
    Note,
    Noted,
    Sync,
    Synced,
    pack_chunk,
    pack_control,
    run_mark,
    unpack_chunk,
    unpack_control,
)
from gossamer.wan.links.pacing import Bucket, Pace
from gossamer.wan.links.slips import WINDOW, Slips
from gossamer.wan.links.transfer import Inbox, Op, Outbox, bytes_of
from gossamer.wan.links.watch import Watch

CHUNK = MIN_CHUNK_BYTES


class Wire:
    """A sender, a receiver, and a connection that does what the test wants. All control frames go through their bytes."""

    def __init__(self) -> None:
        self.up = True
        self.forth: deque[bytes] = deque()
        self.back: deque[bytes] = deque()
        self.flying: list[bytes] = []
        self.outbox = Outbox("r", 1, self._say(self.forth), lambda: CHUNK)
        self.inbox = Inbox("r", 1, self._say(self.back))
        self.slips = [Slips(self._say(self.forth)), Slips(self._say(self.back))]

    def _say(self, queue: deque[bytes]) -> Callable[[Control], None]:
        def say(frame: Control) -> None:
            if self.up:
                queue.append(pack_control([frame]))

        return say

    def launch(self) -> bool:
        if self.up and (found := self.outbox.take()):
            self.flying.append(found[2])
            return True
        return False

    def land(self, i: int, *, keep: bool = False) -> None:
        self.inbox.arrived(*unpack_chunk(self.flying[i] if keep else self.flying.pop(i)))

    def hear_back(self) -> None:
        for frame in unpack_control(self.back.popleft()):
            if isinstance(frame, Grant):
                self.outbox.granted(frame)
            elif isinstance(frame, Sync):
                self.outbox.sync()
            elif isinstance(frame, Synced):
                self.outbox.synced()
            elif isinstance(frame, Finished):
                self.outbox.finished(frame.slot)
            elif isinstance(frame, Note):
                self.slips[0].came(frame)
            elif isinstance(frame, Noted):
                self.slips[0].noted(frame.seq)
            else:
                assert isinstance(frame, Ack)
                for slot, i in frame.chunks:
                    self.outbox.acked(slot, i)

    def hear_forth(self) -> None:
        for frame in unpack_control(self.forth.popleft()):
            if isinstance(frame, End):
                self.inbox.end(frame)
            elif isinstance(frame, Mismatch):
                self.inbox.mismatch(frame.slot, frame.size)
            elif isinstance(frame, Note):
                self.slips[1].came(frame)
            else:
                assert isinstance(frame, Noted)
                self.slips[1].noted(frame.seq)

    def acknowledge(self) -> None:
        if self.up and (ack := self.inbox.acks(2)):
            self.back.append(pack_control([ack]))

    def cut(self) -> None:
        """Control frames and chunks on their way are lost."""
        self.up = False
        for queue in (self.forth, self.back):
            queue.clear()
        self.flying.clear()
        self.outbox.broken()

    def mend(self) -> None:
        self.up = True
        self.inbox.tell()
        for slips in self.slips:
            slips.tell()

    def settle(self) -> None:
        """All that can pass passes."""
        if not self.up:
            self.mend()
        while self.launch() or self.flying or self.forth or self.back or self.inbox._acks:
            while self.flying:
                self.land(0)
            self.acknowledge()
            while self.forth:
                self.hear_forth()
            while self.back:
                self.hear_back()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5 * CHUNK)), min_size=1, max_size=6),
    steps=st.integers(20, 300),
)
def test_every_message_arrives_once_and_whole_whatever_the_connection_does(seed: int, sizes: list[tuple[int, int]], steps: int) -> None:
    rng, wire = random.Random(seed), Wire()
    sent = [(tag, bytes_like(k, size)) for k, (tag, size) in enumerate(sizes)]
    got = [(tag, empty(size)) for tag, size in sizes]
    works: list[Op] = []

    def post(tag: int, tensor: torch.Tensor, box: Outbox | Inbox) -> None:
        works.append(Op(tensor))
        box.post(works[-1], tag, bytes_of(tensor))

    posts = [deque((wire.outbox, *m) for m in sent), deque((wire.inbox, *m) for m in got)]
    for _ in range(steps):
        what = rng.choices(["post", "launch", "land", "again", "forth", "back", "ack", "cut", "mend"], [3, 8, 6, 2, 4, 4, 3, 1, 3])[0]
        side = rng.choice(posts)
        if what == "post" and side:
            box, tag, tensor = side.popleft()
            post(tag, tensor, box)
        elif what == "launch":
            wire.launch()
        elif what in ("land", "again") and wire.flying:
            wire.land(rng.randrange(len(wire.flying)), keep=what == "again")
        elif what == "forth" and wire.forth:
            wire.hear_forth()
        elif what == "back" and wire.back:
            wire.hear_back()
        elif what == "ack":
            wire.acknowledge()
        elif what == "cut":
            wire.cut()
        elif what == "mend" and not wire.up:
            wire.mend()
    for box, tag, tensor in (*posts[0], *posts[1]):
        post(tag, tensor, box)
    wire.settle()
    for work in works:
        assert work._done.is_set(), "it never ends"
        work.wait()
    for (_, a), (_, b) in zip(sent, got, strict=True):
        assert torch.equal(a, b)
    assert not wire.outbox.busy


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(10, 200))
def test_every_note_arrives_once_and_in_order(seed: int, steps: int) -> None:
    rng, wire = random.Random(seed), Wire()
    works: list[Op] = []
    got: list[list[torch.Tensor]] = [[], []]
    sent = [0, 0]
    for _ in range(steps):
        what, k = rng.choices(["send", "post", "forth", "back", "cut", "mend"], [4, 4, 4, 4, 1, 2])[0], rng.randrange(2)
        if what == "send":
            works.append(Op(torch.full((2,), sent[k] % 256, dtype=torch.uint8)))
            wire.slips[k].send(works[-1], 0, bytes_of(works[-1].tensor))  # type: ignore[arg-type]
            sent[k] += 1
        elif what == "post":
            got[k].append(empty(2))
            wire.slips[k].post(Op(got[k][-1]), 0, bytes_of(got[k][-1]))
        elif what == "cut":
            wire.cut()
        elif what == "mend" and not wire.up:
            wire.mend()
        elif what == "forth" and wire.forth:
            wire.hear_forth()
        elif what == "back" and wire.back:
            wire.hear_back()
    for k in (0, 1):
        while len(got[k]) < sent[1 - k]:
            got[k].append(empty(2))
            wire.slips[k].post(Op(got[k][-1]), 0, bytes_of(got[k][-1]))
    wire.settle()
    assert all(work._done.is_set() for work in works)
    for k in (0, 1):
        assert [int(t[0]) for t in got[k][: sent[1 - k]]] == [i % 256 for i in range(sent[1 - k])]


def test_notes_that_nobody_reads_stay_with_their_sender() -> None:
    wire = Wire()
    for _ in range(3 * WINDOW):
        wire.slips[0].send(Op(empty(1)), 0, bytes_of(empty(1)))
    wire.settle()
    assert len(wire.slips[1]._lying) == WINDOW


# ---- what is refused


def granted(size: int) -> tuple[Wire, torch.Tensor, Op]:
    wire, place = Wire(), empty(size)
    op = Op(place)
    wire.inbox.post(op, 8, bytes_of(place))
    return wire, place, op


GOOD: dict[str, Any] = {"run": run_mark("r", 1), "sender": 1, "tag": 8, "chunk_bytes": CHUNK, "slot": 0, "offset": 0, "total": 100}


@pytest.mark.parametrize(
    "other",
    [
        {"run": run_mark("another", 1)}, {"sender": 2}, {"tag": 9}, {"slot": 1}, {"total": 101}, {"total": 2**60}, {"total": 99},
        {"offset": 1}, {"offset": CHUNK, "total": CHUNK + 100}, {"chunk_bytes": CHUNK + 1}, {"chunk_bytes": 1}, {"chunk_bytes": 2**31},
    ],
)  # fmt: skip
def test_a_chunk_that_was_not_asked_for_is_refused_and_writes_nothing(other: dict[str, int]) -> None:
    wire, place, op = granted(100)
    header = DataHeader(**(GOOD | other))
    with pytest.raises(FrameError):
        wire.inbox.arrived(*unpack_chunk(pack_chunk(header, memoryview(b"x" * min(header.total, 100)))))
    assert not place.any() and not op._done.is_set()
    wire.inbox.arrived(*unpack_chunk(pack_chunk(DataHeader(**GOOD), memoryview(b"x" * 100))))
    assert place.all()


@settings(max_examples=150, deadline=None)
@given(data=st.one_of(st.binary(max_size=400), st.text().map(str.encode)), cut=st.integers(0, 160), flip=st.integers(0, 8 * 152 - 1))
def test_random_cut_and_damaged_frames_are_refused(data: bytes, cut: int, flip: int) -> None:
    good = pack_chunk(DataHeader(**GOOD), memoryview(bytes(100)))
    damaged = bytearray(good)
    damaged[flip // 8] ^= 1 << flip % 8
    for frame in (data, good[:cut], good + b"x", bytes(damaged)):
        if frame == good:
            continue
        wire, _, _ = granted(100)
        with pytest.raises(FrameError):
            wire.inbox.arrived(*unpack_chunk(frame))
    with pytest.raises(FrameError):
        unpack_control(data)
    assert len(good) == DATA_HEADER_BYTES + 100


@pytest.mark.parametrize(
    "frame",
    [
        b'{"kind":"grant","slot":-1,"tag":0,"size":1}', b'{"kind":"grant","slot":0,"tag":2147483648,"size":1}',
        b'{"kind":"grant","slot":0,"tag":0,"size":1.5}', b'{"kind":"grant","slot":"0","tag":0,"size":1}',
        b'{"kind":"grant","slot":0,"tag":0,"size":1,"more":1}', b'{"kind":"eval","code":"1"}', b'{"kind":"end","slot":0,"sha256":"zz"}',
        b'{"kind":"note","seq":1,"tag":0,"body":"' + b"00" * 5000 + b'"}', b"[" * 100_000, b"x" * (MAX_CONTROL_BYTES + 1), b"",
        b'{"kind":"ack","chunks":[' + b",".join([b"[0,0]"] * 5000) + b"]}",
    ],
)  # fmt: skip
def test_a_control_frame_out_of_bounds_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_control(frame)


def test_another_content_than_declared_is_refused_and_asked_for_again_a_few_times() -> None:
    wire, _, op = granted(100)
    for _ in range(3):
        wire.inbox.arrived(*unpack_chunk(pack_chunk(DataHeader(**GOOD), memoryview(bytes(100)))))
        with pytest.raises(FrameError, match="sha256"):
            wire.inbox.end(End(slot=0, sha256="0" * 64))
    with pytest.raises(LinkDown, match="3 times"):
        op.wait()


def test_a_replayed_chunk_of_a_message_that_is_over_changes_nothing() -> None:
    wire, place, op = granted(100)
    old = pack_chunk(DataHeader(**GOOD), memoryview(b"x" * 100))
    wire.outbox.post(Op(bytes_like(1, 100)), 8, bytes_of(bytes_like(1, 100)))
    wire.settle()
    op.wait()
    wire.inbox.arrived(*unpack_chunk(old))
    assert torch.equal(place, bytes_like(1, 100)) and wire.inbox.twice_bytes == 100


# ---- pace and watch


def test_what_is_in_flight_follows_rate_and_round_trip() -> None:
    """A line of 1 MB/s and 0.1 s, whose queue holds whatever it is given: half a product of the two waits there, not more."""
    pace, now, flights = Pace(1.5, 2), 0.0, deque()
    free_s, most = 0.0, 0
    for _ in range(3000):
        while pace.room(10_000, 0.1):
            free_s = max(free_s, now) + 0.01
            flights.append((free_s + 0.1, pace.leave(10_000, now)))
        most = max(most, pace.flying_bytes) if now > 5 else most
        due_s, flight = flights.popleft()
        now = max(now, due_s)
        pace.land(flight, now)
    assert pace.rate_bytes_s == pytest.approx(1e6, rel=0.01)
    assert 150_000 < most <= 190_000


def test_acknowledgements_in_a_heap_are_no_fast_line() -> None:
    pace = Pace(2.0, 2)
    for second in range(20):
        flights = [pace.leave(10_000, second + k / 100) for k in range(100)]
        for flight in flights:
            pace.land(flight, second + 1.0)
    assert pace.rate_bytes_s < 1.1e6


def test_the_bucket_keeps_a_given_rate() -> None:
    bucket, now, passed = Bucket(1e6), 0.0, 0
    while now < 10:
        wait_s = bucket.wait_s(now, 1e9, 10_000)
        if wait_s:
            now += wait_s
        else:
            bucket.spend(10_000)
            passed += 10_000
    assert 10e6 <= passed <= 10.1e6
    assert Bucket(None).wait_s(0.0, 0.0, 10_000) == 0.0


def test_silence_is_counted_in_ticks_lived_through() -> None:
    watch = Watch(1.0, 3.0, 6.0)
    assert [watch.tick(True) for _ in range(3)] == ["well"] * 3
    watch.heard()
    assert [watch.tick(True) for _ in range(4)] == ["well"] * 3 + ["silent"]
    assert [watch.tick(False) for _ in range(3)] == ["well", "well", "lost"]
    number = watch.beat(1.0)
    watch.echoed(number, 1.5)
    watch.echoed(number, 9.0)
    assert watch.rtt_s == 0.5
