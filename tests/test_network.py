"""The network model: exact times of small cases in both modes, and what must hold in all."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.app.fleets import load
from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.trace import Trace
from gossamer.sim.fair import fill
from gossamer.sim.network import Network, Queues, Sharing

Send: TypeAlias = tuple[float, int, int, int]
"""(when in seconds, from, to, bytes)."""
CARD = Gpu("card", 100.0, 24.0)
MB = 1_000_000
BOTH = pytest.mark.parametrize("sharing", ["queue", "fair"])


def star(n: int, mbps: float = 8.0, link_mbps: float = 8.0, latency_ms: float = 0.0, message_s: float = 0.0, **link: Any) -> Fleet:
    """n sites in one region; 8 Mbit/s are 1 MB/s."""
    sites = tuple(Site(f"s{i}", "x", CARD, up_mbps=mbps, down_mbps=mbps) for i in range(n))
    return Fleet("star", sites, {("x", "x"): Link(link_mbps, latency_ms, **link)}, message_s=message_s)


def with_site(fleet: Fleet, i: int, **changes: Any) -> Fleet:
    return replace(fleet, sites=(*fleet.sites[:i], replace(fleet.sites[i], **changes), *fleet.sites[i + 1 :]))


def drive(network: Network, sends: list[Send], first_key: int = 0) -> list[float]:
    """Launches `sends` in the order of time; returns when each was delivered. Each is delivered once."""
    heap: list[tuple[float, int, int, int | None]] = [(t, k, first_key + k, None) for k, (t, *_) in enumerate(sends)]
    heapq.heapify(heap)
    pushed, done = len(sends), dict[int, float]()
    while heap:
        now, _, key, version = heapq.heappop(heap)
        if version is None:
            events = network.launch(now, key, *sends[key - first_key][1:])
        else:
            delivered, events = network.finish(now, key, version)
            if delivered:
                assert key not in done
                done[key] = now
        for when, k, v in events:
            assert when >= now
            pushed += 1
            heapq.heappush(heap, (when, pushed, k, v))
    return [done[first_key + k] for k in range(len(sends))]


def times(fleet: Fleet, sends: list[Send], sharing: Sharing) -> list[float]:
    return drive(Network(fleet, 0, sharing), sends)


@BOTH
@pytest.mark.parametrize(("up", "link", "down"), [(8.0, 80.0, 80.0), (80.0, 8.0, 80.0), (80.0, 80.0, 8.0), (8.0, 8.0, 8.0)])
def test_one_message_takes_constant_plus_bytes_over_rate_plus_latency(sharing: Sharing, up: float, link: float, down: float) -> None:
    fleet = star(2, mbps=80.0, link_mbps=link, latency_ms=250.0, message_s=0.125)
    fleet = with_site(with_site(fleet, 0, up_mbps=up), 1, down_mbps=down)
    assert times(fleet, [(1.0, 0, 1, 2 * MB)], sharing) == pytest.approx([1.0 + 0.125 + 2.0 + 0.25])


@BOTH
def test_no_bytes_and_oneself(sharing: Sharing) -> None:
    assert times(star(2, latency_ms=500.0), [(3.0, 0, 1, 0), (4.0, 1, 1, MB)], sharing) == [3.5, 4.0]


def test_two_messages_out_of_one_node_queue_or_share() -> None:
    sends = [(0.0, 0, 1, MB), (0.0, 0, 2, MB)]
    assert times(star(3), sends, "queue") == pytest.approx([1.0, 2.0])
    assert times(star(3), sends, "fair") == pytest.approx([2.0, 2.0])


def test_two_messages_into_one_node_queue_or_share() -> None:
    sends = [(0.0, 0, 2, MB), (0.5, 1, 2, MB)]
    assert times(star(3), sends, "queue") == pytest.approx([1.0, 2.0])
    # alone for half a second, then half each: the first has 0.5 MB left at 0.5 s, ends at 1.5; the second then runs alone
    assert times(star(3), sends, "fair") == pytest.approx([1.5, 2.0])


def test_fair_flows_get_half_and_then_all() -> None:
    assert times(star(3), [(0.0, 0, 1, MB), (0.0, 0, 2, 2 * MB)], "fair") == pytest.approx([2.0, 3.0])


@BOTH
def test_messages_of_one_pair_follow_each_other(sharing: Sharing) -> None:
    sends = [(0.0, 0, 1, MB), (0.0, 0, 1, MB), (0.0, 0, 1, MB // 2)]
    assert times(star(2), sends, sharing) == pytest.approx([1.0, 2.0, 2.5])


@BOTH
def test_a_slow_link_does_not_block_a_fast_downlink(sharing: Sharing) -> None:
    fleet = replace(star(3, mbps=80.0, link_mbps=80.0), links={("x", "x"): Link(80.0, 0.0), ("s0", "s2"): Link(0.8, 0.0)})
    slow, fast = times(fleet, [(0.0, 0, 2, MB), (1.0, 1, 2, 8 * MB)], sharing)
    assert slow == pytest.approx(10.0)
    assert 1.8 - 1e-9 <= fast <= 1.9 + 1e-9  # 0.8 s alone; at most the service of the slow message more


def test_the_downlink_is_taken_in_the_order_of_arrival_not_of_launch() -> None:
    fleet = replace(star(3), links={("x", "x"): Link(8.0, 0.0), ("s0", "s2"): Link(8.0, 60_000.0)})
    assert times(fleet, [(0.0, 0, 2, MB), (1.0, 1, 2, MB)], "queue") == pytest.approx([61.0, 2.0])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_both_modes_agree_on_the_end_of_a_symmetric_exchange(n: int) -> None:
    """Everybody to everybody, each starting with its right neighbour: n - 1 services, then the latency."""
    sends = [(0.0, i, (i + d) % n, MB) for i in range(n) for d in range(1, n)]
    ends = [max(times(star(n, latency_ms=100.0), sends, sharing)) for sharing in ("queue", "fair")]
    assert ends == pytest.approx([n - 1 + 0.1] * 2)


@BOTH
def test_a_single_flow_is_limited_by_its_window(sharing: Sharing) -> None:
    fleet = star(2, link_mbps=8.0, latency_ms=500.0, window_bytes=500_000)
    assert times(fleet, [(0.0, 0, 1, MB)], sharing) == pytest.approx([2.5])


@BOTH
def test_a_trace_on_the_link_changes_the_rate_on_the_way(sharing: Sharing) -> None:
    fleet = star(2, mbps=80.0, trace=Trace((0.0, 1.0, 3.0, 5.0), (1.0, 0.5, 0.0, 2.0)))
    # 1 MB in the first second, 1 MB in the next two, none for two, then 2 MB/s; a late comer meets the last factor only
    assert times(fleet, [(0.0, 0, 1, 4 * MB), (10.0, 0, 1, MB)], sharing) == pytest.approx([6.0, 10.5])


@BOTH
@pytest.mark.parametrize("node", [0, 1])
def test_a_trace_on_a_node_changes_its_uplink_and_downlink(sharing: Sharing, node: int) -> None:
    fleet = with_site(star(2, link_mbps=800.0), node, trace=Trace((0.0, 1.0), (1.0, 0.25)))
    assert times(fleet, [(0.0, 0, 1, 2 * MB), (20.0, 1, 0, MB)], sharing) == pytest.approx([5.0, 24.0], rel=1e-9)


@BOTH
def test_jitter_is_a_function_of_the_key_and_keeps_the_order_of_a_pair(sharing: Sharing) -> None:
    fleet = star(3, mbps=800.0, link_mbps=8.0, jitter_ms=50.0)
    sends = [(0.01 * k, k % 2, 2, 10_000) for k in range(200)]
    first, other = drive(Network(fleet, 7, sharing), sends), drive(Network(fleet, 8, sharing), sends)
    assert first == drive(Network(fleet, 7, sharing), sends) and first != other
    for parity in (0, 1):
        lane = first[parity::2]
        assert lane == sorted(lane)
    assert all(t >= s[0] for t, s in zip(first, sends, strict=True)) and len(set(first)) > 10


def test_jitter_has_the_mean_it_is_given() -> None:
    fleet = star(2, mbps=8e6, link_mbps=8e6, jitter_ms=100.0)
    late = [t - 10.0 * k for k, t in enumerate(times(fleet, [(10.0 * k, 0, 1, 0) for k in range(2000)], "queue"))]
    assert sum(late) / len(late) == pytest.approx(0.1, rel=0.1)


@BOTH
def test_a_restored_network_goes_on_as_if_nothing_had_happened(sharing: Sharing) -> None:
    fleet = load("home")
    first = [(0.1 * k, k % 8, (3 * k + 1 + k // 8) % 8, MB) for k in range(60)]
    network = Network(fleet, 3, sharing)
    rest_s = max(drive(network, first))
    begin_s = rest_s if sharing == "fair" else 1.0 + first[-1][0]  # queues may still be full at the boundary
    later = [(begin_s + 0.1 * k, (5 * k) % 8, (5 * k + 1 + k % 7) % 8, MB) for k in range(60)]
    resumed = Network(fleet, 3, sharing)
    for node in range(fleet.n):
        resumed.restore(node, network.snapshot(node))
    assert drive(resumed, later, 1000) == drive(network, later, 1000)
    assert drive(Network(fleet, 3, sharing), later, 1000) != drive(Network(fleet, 4, sharing), later, 1000)


def test_old_links_are_forgotten() -> None:
    fleet = star(1000, mbps=80.0, link_mbps=8.0)
    network = Network(fleet)
    drive(network, [(float(k), 0, 1 + k % 999, MB) for k in range(3000)])
    assert isinstance(network._mode, Queues) and len(network._mode._link_free[0]) <= 300
    assert len(network.snapshot(0)) <= 2 + 5 * 2


def test_sharing_is_one_of_two() -> None:
    with pytest.raises(BadInput, match=r"'magic'.*'queue'"):
        Network(star(2), 0, "magic")  # type: ignore[arg-type]


SENDS = st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3 * MB)), min_size=1, max_size=25)


@BOTH
@settings(max_examples=60, deadline=None)
@given(sends=SENDS, caps=st.lists(st.floats(1.0, 40.0), min_size=5, max_size=5), rate=st.floats(1.0, 40.0))
def test_nothing_is_faster_than_its_lines(sharing: Sharing, sends: list[Send], caps: list[float], rate: float) -> None:
    """Everything arrives (see `drive`), no message before its own bytes fit, and no node carries more than its rate allows."""
    fleet = star(5, link_mbps=rate, latency_ms=20.0, message_s=0.01)
    for i, cap in enumerate(caps):
        fleet = with_site(fleet, i, up_mbps=cap, down_mbps=caps[-1 - i])
    sends = [s for s in sends if s[1] != s[2]]
    done = times(fleet, sends, sharing)
    for (start, src, dst, nbytes), end in zip(sends, done, strict=True):
        slowest = min(caps[src], rate, caps[-1 - dst]) * 125_000
        assert end >= start + nbytes / slowest + 0.03 - 1e-6
    for i in range(5):
        for side, cap in ((1, caps[i]), (2, caps[-1 - i])):
            for begin in sorted({s[0] for s in sends}):  # all that began since: its bytes need at least this long
                mine = [(s, e) for s, e in zip(sends, done, strict=True) if s[side] == i and s[0] >= begin]
                if mine:
                    assert max(e for _, e in mine) >= begin + sum(s[3] for s, _ in mine) / (cap * 125_000) - 1e-6
    assert done == times(fleet, sends, sharing)


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 3), st.integers(4, 7)), min_size=1, max_size=12),
    st.lists(st.floats(0.5, 20.0), min_size=8, max_size=8),
)
def test_fair_rates_are_max_min(flows: list[tuple[float, int, int]], room: list[float]) -> None:
    """Feasible, and each flow is at its own limit or passes a full node where none is faster."""
    rates = fill([c for c, *_ in flows], [f[1:] for f in flows], {k: room[k] for f in flows for k in f[1:]})
    load_at = {k: sum(r for r, f in zip(rates, flows, strict=True) if k in f[1:]) for k in range(8)}
    assert all(load_at[k] <= room[k] * (1 + 1e-9) for k in range(8))
    for rate, (cap, *nodes) in zip(rates, flows, strict=True):
        assert rate <= cap
        full = [
            k
            for k in nodes
            if load_at[k] >= room[k] * (1 - 1e-9) and rate >= max(r for r, f in zip(rates, flows, strict=True) if k in f[1:]) * (1 - 1e-9)
        ]
        assert rate == cap or full
