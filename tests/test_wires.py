"""What every wire must do, whatever it is made of; and the real world over each of them, with faults too."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from net_toys import Hooks, in_threads
from still import StillBody, setting, still
from test_net_bits import METHODS, SETTING, N, same, trained
from test_sim_bits import simulated
from toy import ToyBody
from wires import Cables, Faulty, MemoryWire, Room, Wrap, over_memory

from gossamer.core.errors import RunFailed
from gossamer.core.method import Method
from gossamer.net.gloo import GlooWire
from gossamer.real import Group, LinkDown, PeerLost, Wire, run
from gossamer.recipes import gasloc
from gossamer.worker.effects import Tag

TRAINED = {"diloco": METHODS["diloco"], "geomesh": METHODS["geomesh"], "gasloc": gasloc(SETTING, topology="two_peer")}
BIG = 3_000_000
Pair = tuple[Wire, Wire]


# ---- two wires of each kind


@contextmanager
def by_memory() -> Iterator[Pair]:
    room = Room(2)
    yield MemoryWire(room, 0), MemoryWire(room, 1)


@contextmanager
def by_memory_with_faults() -> Iterator[Pair]:
    """The wrapper is a wire, too."""
    room, rng = Room(2), random.Random(1)
    yield tuple(Faulty(MemoryWire(room, i), Cables(), delay_s=lambda dst, tag: rng.random() * 0.003) for i in (0, 1))  # type: ignore[misc]


@contextmanager
def by_gloo() -> Iterator[Pair]:
    store, found = dist.HashStore(), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: GlooWire(store, i, 2, local=True)})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield found[0], found[1]


@contextmanager
def by_grpc() -> Iterator[Pair]:
    from wan_toys import two

    with two() as (a, b):
        yield a.wire("data"), b.wire("data")


def in_memory(n: int, job: Callable[[Group], Any], wrap: Wrap = lambda wire, channel: wire, survives: bool = False) -> list[Any]:
    return in_threads(n, job, group_of=over_memory(n, wrap, survives=survives))


def in_sites(n: int, job: Callable[[Group], Any]) -> list[Any]:
    from wan_toys import in_sites

    return in_sites(n, job)


PAIRS = {"memory": by_memory, "faulty": by_memory_with_faults, "gloo": by_gloo, "grpc": by_grpc}
WORLDS: dict[str, Callable[..., list[Any]]] = {"memory": in_memory, "gloo": in_threads, "grpc": in_sites}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with PAIRS[request.param]() as wires:
        try:
            yield wires
        finally:
            for wire in wires:
                wire.close()
                wire.close()  # may be called again


def noise(seed: int, nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def blank(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_wire_knows_who_it_is(pair: Pair) -> None:
    assert [(w.rank(), w.size()) for w in pair] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("first", ["send", "recv"])
def test_every_bit_arrives_both_ways_at_once(pair: Pair, first: str) -> None:
    """Whether the receive is posted before the send or after it, which does not wait."""
    said, heard = [noise(i, BIG) for i in (0, 1)], [blank(BIG) for _ in (0, 1)]
    works = []
    for kind in (first, "recv" if first == "send" else "send"):
        for i, wire in enumerate(pair):
            works.append(wire.send(said[i], 1 - i, 8) if kind == "send" else wire.recv(heard[i], 1 - i, 8))
    for work in works:
        work.wait()
    assert all(torch.equal(heard[1 - i], said[i]) for i in (0, 1))


def test_one_tag_is_first_in_first_out(pair: Pair) -> None:
    sizes = (BIG, 1, 70_000, 64, 5)
    said, heard = [noise(k, size) for k, size in enumerate(sizes)], [blank(size) for size in sizes]
    works = [pair[1].recv(t, 0, 16) for t in heard[:2]]
    works += [pair[0].send(t, 1, 16) for t in said]
    works += [pair[1].recv(t, 0, 16) for t in heard[2:]]
    for work in works:
        work.wait()
    assert all(torch.equal(a, b) for a, b in zip(heard, said, strict=True))


def test_a_message_that_nobody_awaits_holds_up_no_other_tag(pair: Pair) -> None:
    early = pair[0].send(noise(1, BIG), 1, 24)
    got = blank(100)
    late = pair[0].send(noise(2, 100), 1, 25)
    pair[1].recv(got, 0, 25).wait()
    late.wait()
    assert torch.equal(got, noise(2, 100))
    slow = blank(BIG)
    pair[1].recv(slow, 0, 24).wait()
    early.wait()
    assert torch.equal(slow, noise(1, BIG))


@pytest.mark.parametrize("closer", [0, 1])
def test_closing_ends_what_is_on_its_way_here_and_there(pair: Pair, closer: int) -> None:
    works = [pair[i].recv(blank(100), 1 - i, tag) for i in (0, 1) for tag in (8, 9)]
    ended: list[LinkDown] = []

    def waits(work: Any) -> None:
        try:
            work.wait()
        except LinkDown as error:
            ended.append(error)

    threads = [threading.Thread(target=waits, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    pair[closer].close()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 4 and all(str(error) for error in ended)
    for i in (0, 1):
        with pytest.raises(LinkDown):
            pair[i].send(noise(1, 10), 1 - i, 16).wait()
        with pytest.raises(LinkDown):
            pair[i].recv(blank(10), 1 - i, 16).wait()


def test_a_message_of_another_length_is_no_tensor() -> None:
    with by_memory() as (a, b):
        got = b.recv(blank(10), 0, 8)
        for work in (a.send(noise(1, 11), 1, 8), got):
            with pytest.raises(LinkDown, match="11 bytes came where 10 were expected"):
                work.wait()


# ---- the real world over each wire


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TRAINED)
def test_the_bits_and_bytes_are_the_simulators(world: str, name: str) -> None:
    method = TRAINED[name]
    want = simulated(method, [ToyBody(i, method.inner) for i in range(N)])
    got = trained(method, within=WORLDS[world])
    assert same([final for final, _, _ in got], [final for final in want.final if final is not None])
    assert [a.bytes_sent for _, a, _ in got] == [a.bytes_sent for a in want.accounts]
    assert [a.bytes_received for _, a, _ in got] == [a.bytes_received for a in want.accounts]


def same_as_simulated(method: Method, wrap: Wrap) -> bool:
    want = simulated(method, [ToyBody(i, method.inner) for i in range(N)])
    got = trained(method, within=partial(in_memory, wrap=wrap))
    return same([final for final, _, _ in got], [final for final in want.final if final is not None])


@pytest.mark.parametrize("name", ["diloco", "geomesh", "gasloc"])
def test_delays_change_no_bit(name: str) -> None:
    rng, cables = random.Random(5), Cables()
    assert same_as_simulated(METHODS[name], lambda wire, channel: Faulty(wire, cables, delay_s=lambda dst, tag: rng.random() * 0.02))


@pytest.mark.parametrize("name", ["diloco", "gasloc"])
def test_a_line_that_stands_still_for_a_while_changes_no_bit(name: str) -> None:
    cables, calls = Cables(), [0]

    def wrap(wire: Wire, channel: Literal["data", "notes"]) -> Wire:
        def delay_s(dst: int, tag: int) -> float:
            if channel == "data" and tag == Tag.of(1, Tag.SAY) and not calls[0]:
                calls[0] += 1
                for j in range(1, N):
                    cables.hold(0, j)
                threading.Timer(0.4, lambda: [cables.free(0, j) for j in range(1, N)]).start()
            return 0.0

        return Faulty(wire, cables, delay_s=delay_s)

    assert same_as_simulated(METHODS[name], wrap) and calls == [1]


def test_a_bit_that_flips_on_the_way_is_noticed() -> None:
    tag = Tag.of(2, Tag.SAY)

    def spoil(data: torch.Tensor, dst: int, sent: int) -> torch.Tensor:
        if sent != tag or dst != 3:
            return data
        changed = data.clone()
        changed[-1] ^= 1
        return changed

    cables = Cables()
    with pytest.raises(RunFailed, match="round 2 was damaged on the way"):
        same_as_simulated(METHODS["gasloc"], lambda wire, channel: Faulty(wire, cables, spoil=spoil if channel == "data" else no_change))


def no_change(data: torch.Tensor, dst: int, tag: int) -> torch.Tensor:
    return data


def cutting(cables: Cables, cut: Callable[[], None], *, by: int, round: int) -> Wrap:
    """Faulty wires; worker `by` cuts something as it says its part of `round`."""

    def wrap(wire: Wire, channel: Literal["data", "notes"]) -> Wire:
        def delay_s(dst: int, tag: int) -> float:
            if channel == "data" and wire.rank() == by and tag == Tag.of(round, Tag.SAY):
                cut()
            return 0.0

        return Faulty(wire, cables, delay_s=delay_s)

    return wrap


def test_a_cut_line_ends_a_synchronous_run_everywhere() -> None:
    cables, ended = Cables(), {}

    def job(group: Group) -> None:
        try:
            method = replace(METHODS["diloco"], rounds=50)
            trained(method, within=lambda n, job: job(group))
        except RunFailed as error:
            ended[group.me] = error
            raise

    with pytest.raises(RunFailed):
        in_memory(N, job, cutting(cables, lambda: cables.cut(0, 1), by=0, round=3))
    assert sorted(ended) == list(range(N)), "somebody did not notice"
    for me, error in ended.items():
        if isinstance(error, PeerLost):
            assert error.worker in {0, 1} - {me} and error.round in (2, 3, 4)
        else:
            assert me in (0, 1) and "has lost the connection to this one" in str(error)


def test_gossip_goes_on_without_a_worker_that_is_cut_off() -> None:
    n, lost = 4, 2
    method = gasloc(setting(n, 20), outer_lr=1.0, outer_momentum=0.0)
    cables = Cables()

    def job(group: Group) -> tuple[int, frozenset[int]] | None:
        hooks = Hooks()
        with suppress(RunFailed):
            final, _ = run(still(group.me, method), StillBody(group.me), hooks, group, rounds0=1)
            return final.round, frozenset(hooks.notes[-1].get("weights", {}))
        return None

    found = in_memory(n, job, cutting(cables, lambda: cables.isolate(lost, n), by=lost, round=6), survives=True)
    for i in set(range(n)) - {lost}:
        assert found[i] is not None and found[i][0] == 20
        assert set(map(int, found[i][1])) == set(range(n)) - {lost}, "the last round is that of those who are left"


# ---- the documentation


def test_the_page_shows_the_wire_of_the_tests() -> None:
    root = Path(__file__).resolve().parent
    shown = (root.parent / "docs" / "extend.md").read_text().split("```python file=my_wire.py\n")[1].split("```")[0]
    kept = (root / "wires.py").read_text().split("# ---- docs/extend.md\n\n\n")[1].split("\n\n\n# ---- groups")[0]
    assert shown.split("\n\n\n", 1)[1].strip() == kept.strip()
