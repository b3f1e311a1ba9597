"""The gRPC wire over loopback: bytes, order, credit, deaths, cuts, strangers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wan_toys import QUICK, RUN, bytes_like, empty, in_sites, line_between, link_up, process, two

from gossamer.core.errors import BadInput, RunFailed
from gossamer.real import Group, LinkDown
from gossamer.wan.links.channel import SERVICE
from gossamer.wan.links.frames import Attach, DataHeader, Hello, pack_chunk, pack_control, run_mark
from gossamer.wan.links.wire import Access, Links, LinkSettings, Peer

CHUNK = 1 << 16
Pair = tuple[Links, Links]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with two() as sites:
        yield sites


def exchange(pair: Pair, tag: int, *sizes: int) -> None:
    """Both ways at once, and every bit is looked at."""
    wires = [s.wire("data") for s in pair]
    sent = {(i, k): bytes_like(1000 * tag + 2 * k + i, size) for i in (0, 1) for k, size in enumerate(sizes)}
    got = {key: empty(t.numel()) for key, t in sent.items()}
    works = [wires[1 - i].recv(t, i, tag) for (i, _), t in got.items()]
    works += [wires[i].send(t, 1 - i, tag) for (i, _), t in sent.items()]
    for work in works:
        work.wait()
    assert all(torch.equal(got[key], sent[key]) for key in sent)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 20_000_000])
def test_bytes_of_any_size_pass_both_ways_at_once(pair: Pair, size: int) -> None:
    exchange(pair, 8, size)


def test_messages_of_one_tag_keep_their_order(pair: Pair) -> None:
    exchange(pair, 16, 300_000, 1, 0, 70_000, *range(40))


def test_a_large_message_uses_all_channels(pair: Pair) -> None:
    exchange(pair, 17, 5_000_000)
    session = pair[0].links[1].session
    assert session is not None and all(p.rate_bytes_s > 0 for p in session.paces) and len(session.paces) == 4


def test_other_tags_overtake_a_message_that_nobody_awaits_yet(pair: Pair) -> None:
    a, b = (s.wire("data") for s in pair)
    early = a.send(bytes_like(1, 1_000_000), 1, 24)
    exchange(pair, 25, 100_000)
    late = empty(1_000_000)
    b.recv(late, 0, 24).wait()
    early.wait()
    assert torch.equal(late, bytes_like(1, 1_000_000))


def test_what_is_not_awaited_stays_with_its_sender(pair: Pair) -> None:
    """A quick sender of 100 MB to a receiver that awaits 1 MB after the other: nothing leaves before its place is there."""
    a, b = (s.wire("data") for s in pair)
    before = pair[1].traffic()[0].payload_received_bytes
    message = bytes_like(2, 1_000_000)
    sends = [a.send(message, 1, 32) for _ in range(100)]
    for k in range(1, 6):
        got = empty(1_000_000)
        b.recv(got, 0, 32).wait()
        assert torch.equal(got, message)
        passed = pair[1].traffic()[0].payload_received_bytes - before
        assert k * 1_000_000 <= passed < k * 1_010_000
    for work in [b.recv(empty(1_000_000), 0, 32) for _ in range(95)] + sends:
        work.wait()


def test_a_message_of_another_size_fails_at_both_ends_and_harms_nothing_else(pair: Pair) -> None:
    a, b = (s.wire("data") for s in pair)
    sent, awaited = a.send(bytes_like(3, 1000), 1, 40), b.recv(empty(999), 0, 40)
    for work in (sent, awaited):
        with pytest.raises(LinkDown, match="1000 bytes was sent where 999 were awaited"):
            work.wait()
    exchange(pair, 40, 1000)


def test_notes_pass_while_payload_does(pair: Pair) -> None:
    big = threading.Thread(target=exchange, args=(pair, 48, 20_000_000))
    big.start()
    a, b = (s.wire("notes") for s in pair)
    unread = [a.send(bytes_like(i, 12), 1, 0) for i in range(50)]
    for i, work in enumerate(unread):
        got = empty(12)
        b.recv(got, 0, 0).wait()
        work.wait()
        assert torch.equal(got, bytes_like(i, 12))
    big.join()


# ---- what breaks


def test_a_cut_in_the_middle_is_mended_and_only_the_rest_is_sent_again() -> None:
    with line_between(LinkSettings(chunk_bytes=1 << 16)) as (near, far, line, _, dialler):
        message, got = bytes_like(4, 8_000_000), empty(8_000_000)
        line.limit = 4_000_000
        awaited = near.recv(got, 1, 8)
        far.send(message, 0, 8).wait()
        awaited.wait()
        traffic = dialler.traffic()[0]
        assert torch.equal(got, message)
        assert traffic.sessions == 2 and line.limit is None
        assert traffic.resent_bytes < 4_000_000, "it began from the start again"


def test_a_slow_line_that_is_full_both_ways_is_not_taken_for_a_dead_one() -> None:
    """A line of a home, ten times slower forth than back: beats of a tenth of a second pass all the time, and a note overtakes."""
    slow = LinkSettings(beat_s=0.1, silent_s=1.0, patience_s=5.0)
    with line_between(slow, (20.0, 2.0)) as (_, _, _, *pair):  # site 1 dials: what it sends goes forth
        forth, back = bytes_like(1, 6_000_000), bytes_like(2, 600_000)
        got = empty(forth.numel()), empty(back.numel())
        wires, notes = [s.wire("data") for s in pair], [s.wire("notes") for s in pair]
        begun_s = time.monotonic()
        works = [wires[0].recv(got[0], 1, 1), wires[1].recv(got[1], 0, 1), wires[1].send(forth, 0, 1), wires[0].send(back, 1, 1)]
        time.sleep(0.7)
        note = empty(8)
        incoming = notes[1].recv(note, 0, 0)
        notes[0].send(bytes_like(3, 8), 1, 0)
        incoming.wait()
        passed_s = time.monotonic() - begun_s
        for work in works:
            work.wait()
        assert torch.equal(got[0], forth) and torch.equal(got[1], back) and torch.equal(note, bytes_like(3, 8))
        assert passed_s < time.monotonic() - begun_s, "the note has waited for the payload"
        assert [s.traffic()[1 - s.me].sessions for s in pair] == [1, 1]
        assert [s.traffic()[1 - s.me].resent_bytes for s in pair] == [0, 0]


def test_a_line_that_is_dark_for_a_while_is_mended() -> None:
    with line_between(LinkSettings(beat_s=0.1, silent_s=0.3, patience_s=60)) as (near, far, line, _, dialler):
        message, got = bytes_like(5, 1_000_000), empty(1_000_000)
        line.dark.set()
        awaited, sent = near.recv(got, 1, 8), far.send(message, 0, 8)
        while dialler.links[0].session is not None:
            time.sleep(0.01)
        line.dark.clear()
        awaited.wait()
        sent.wait()
        assert torch.equal(got, message) and dialler.traffic()[0].sessions > 1


def test_a_line_that_stays_dark_is_a_death_in_the_end() -> None:
    with line_between(QUICK) as (near, far, line, _, _):
        line.dark.set()
        for work in (near.recv(empty(5), 1, 8), far.recv(empty(5), 0, 8)):
            with pytest.raises(LinkDown, match="out of touch for 2 s"):
                work.wait()
        with pytest.raises(LinkDown):
            far.send(empty(5), 0, 8).wait()


@pytest.mark.parametrize("job", ["listens", "dials"])
def test_a_killed_process_is_seen(job: str) -> None:
    """At once where its address answers for it; where it has none, when it has not come back."""
    site = Links(0, 2, RUN, settings=QUICK if job == "dials" else LinkSettings())
    try:
        with process(job, site) as child:
            works = [site.wire("data").recv(empty(5), 1, 8), site.wire("notes").recv(empty(5), 1, 0)]
            os.kill(child.pid, signal.SIGKILL)
            for work in works:
                with pytest.raises(LinkDown, match="process has ended" if job == "listens" else "out of touch"):
                    work.wait()
    finally:
        site.close()


def test_a_stopped_process_is_silent_and_comes_back() -> None:
    site = Links(0, 2, RUN, settings=LinkSettings(beat_s=0.1, silent_s=0.3, patience_s=60))
    try:
        with process("listens", site) as child:
            os.kill(child.pid, signal.SIGSTOP)
            while site.links[1].session is not None:
                time.sleep(0.01)
            os.kill(child.pid, signal.SIGCONT)
            site.wire("data").send(empty(1), 1, 8).wait()
            assert site.traffic()[1].sessions > 1
    finally:
        site.close()


def test_a_farewell_waits_for_what_is_on_its_way() -> None:
    site = Links(0, 2, RUN)
    try:
        with process("leaves", site) as child:
            got = empty(100_000)
            time.sleep(0.1)
            site.wire("data").recv(got, 1, 8).wait()
            assert torch.equal(got, bytes_like(1, 100_000))
            assert child.wait(30) == 0
            with pytest.raises(LinkDown, match="has left"):
                site.wire("data").recv(got, 1, 8).wait()
    finally:
        site.close()


def test_closing_one_wire_ends_its_operations_at_both_ends_and_leaves_the_other() -> None:
    with two() as (a, b):
        awaited = [a.wire("data").recv(empty(5), 1, 8), b.wire("data").recv(empty(5), 0, 8), b.wire("data").send(empty(5), 0, 9)]
        note = b.wire("notes").recv(empty(5), 0, 0)
        a.wire("data").close()
        for work in awaited:
            with pytest.raises(LinkDown, match="closed"):
                work.wait()
        a.wire("notes").send(bytes_like(6, 5), 1, 0).wait()
        note.wait()
        a.wire("notes").close()
        with pytest.raises(LinkDown):
            b.wire("notes").recv(empty(5), 0, 0).wait()


def test_a_site_that_comes_anew_begins_from_nothing() -> None:
    first, one = Links(0, 2, RUN), Links(1, 2, RUN)
    again = None
    try:
        link_up([first, one])
        stale = first.wire("data").recv(empty(7), 1, 8)
        one.close()
        with pytest.raises(LinkDown):
            stale.wait()
        again = Links(1, 2, RUN)
        link_up([first, again])
        exchange((first, again), 8, 1000)
    finally:
        for s in (first, one, *([again] if again else [])):
            s.close()


# ---- who is let in


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"run": "another"}, "another run"),
        ({"terms": {"configuration": "b"}}, "the configuration of site 1 is b, that of site 0 is a"),
        ({"admit": True}, "not on the roster"),
    ],
)
def test_who_does_not_belong_is_refused_by_name(options: dict[str, object], why: str) -> None:
    def admit(site: int, context: object) -> str | None:
        return f"site {site} is not on the roster"

    mine = {"run": RUN, "terms": {"configuration": "a"}}
    theirs = mine | {k: v for k, v in options.items() if k != "admit"}
    a = Links(0, 2, **mine, access=Access(admit=admit) if "admit" in options else None)  # type: ignore[arg-type]
    b = Links(1, 2, **theirs)  # type: ignore[arg-type]
    try:
        a.add(1, Peer(None))
        with pytest.raises(RunFailed, match=why):
            b.connect({0: Peer(f"127.0.0.1:{a.port}")}, 20)
    finally:
        a.close()
        b.close()


def test_who_cannot_be_reached_and_where_nobody_can() -> None:
    a, b, c = (Links(i, 3, RUN, bind=None if i else "127.0.0.1:0") for i in range(3))
    try:
        with pytest.raises(BadInput, match="one of the two must listen"):
            b.add(2, Peer(None))
        with pytest.raises(RunFailed, match=r"no connection, after up to 0\.3 s, to site 1 \(dials in\)"):
            a.connect({1: Peer(None)}, 0.3)
        with pytest.raises(BadInput, match="cannot listen"):
            Links(1, 2, RUN, bind=f"127.0.0.1:{a.port}")
        link_up([a, b])
        exchange((a, b), 8, 1000)
    finally:
        for s in (a, b, c):
            s.close()


def knock(site: Links, method: str, messages: list[bytes]) -> grpc.StatusCode:
    """What a stranger meets who sends this."""
    with grpc.insecure_channel(f"127.0.0.1:{site.port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{method}")(iter(messages), timeout=20)
        with suppress(grpc.RpcError):
            for _ in call:
                pass
        code: grpc.StatusCode = call.code()
        return code


HELLO = Hello(run="guessed", sender=1, receiver=0, incarnation="0" * 32, known=None, channels=1, terms={})
GREETINGS = [b"{}", b"\x80\x04.", pack_control([HELLO]), pack_control([Attach(session="0" * 32, channel=0)]), b"[" * 10_000]
CHUNKS = pack_chunk(DataHeader(run_mark(RUN, 1), 1, 8, CHUNK, 0, 0, 10), memoryview(bytes(10)))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["control", "data"]),
    messages=st.lists(st.one_of(st.binary(max_size=300), st.sampled_from([*GREETINGS, CHUNKS, bytes(5_000_000)])), min_size=1, max_size=3),
)
def test_strangers_are_refused_and_the_run_is_unharmed(pair: Pair, method: str, messages: list[bytes]) -> None:
    assert knock(pair[0], method, messages) in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED)
    exchange(pair, 56, 1000)
    assert pair[0].traffic()[1].sessions == 1


def test_a_group_of_three_sites_works_over_it() -> None:
    def job(group: Group) -> object:
        group.all_equal({"layout": "a"})
        return group.gather_bytes(bytes([group.me]) * 100_000)

    assert in_sites(3, job) == [[bytes([i]) * 100_000 for i in range(3)], None, None]
