"""Codecs of which two packets tell a difference: sizes, antisymmetry, the kept mean, ranges and what is outside of them, contraction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from test_codec import LAYOUTS, mixed_tree

from gossamer.core.codec.codes import Told
from gossamer.core.codec.modulo import Modulo
from gossamer.core.codec.pair import Meeting, PairCodec
from gossamer.core.codec.rotation import rotated, turned_back
from gossamer.core.codec.sign import Sign
from gossamer.core.codec.signs_and_slice import SignsAndSlice
from gossamer.core.consensus import moments
from gossamer.core.errors import BadInput
from gossamer.core.topology import Topology, topology
from gossamer.core.tree import Layout, Tree, flat, layout_of, map_tree, zeros_like

CODECS: list[PairCodec] = [
    *(Modulo(bits) for bits in (1, 2, 4, 8)),
    Modulo(4, block=1024),
    Modulo(1, block=8),
    Modulo(1, block=512, patience=2.5),
    Modulo(2, adaptive=False),
    SignsAndSlice(),
    SignsAndSlice(7, Sign(magnitude="row", embeddings="same")),
]
BITS = (8, 4, 2, 1)


def shifted(tree: Tree, size: float, seed: int) -> Tree:
    """The tree with a normal difference added to every number but those of the rows that nobody touched."""
    g = torch.Generator().manual_seed(seed)
    moved = {k: v + size * torch.randn(v.shape, generator=g) for k, v in tree.items()}
    moved["embed"][3:20] = tree["embed"][3:20]
    return moved


def said(codec: PairCodec, z: Tree, drift: Tree, layout: Layout, round: int, memory: Tree | None = None) -> torch.Tensor:
    """The payload, between two guard zones that must stay as they were; the buffer is dirty before."""
    n = codec.nbytes(layout)
    buffer = torch.full((n + 128,), 0xA5, dtype=torch.uint8)
    codec.encode(z, drift, layout, codec.start(layout) if memory is None else memory, round, buffer[64 : 64 + n])
    assert (buffer[:64] == 0xA5).all()
    assert (buffer[64 + n :] == 0xA5).all()
    return buffer[64 : 64 + n]


def met(a: Meeting, b: Meeting, said_a: torch.Tensor, said_b: torch.Tensor, weight: float = 0.5) -> int:
    """Two meetings hear each other. Returns how many numbers each had to say in full."""
    wrong_a, wrong_b = a.hear(said_b, weight), b.hear(said_a, weight)
    assert wrong_a.keys() == wrong_b.keys() and all(np.array_equal(wrong_a[k], wrong_b[k]) for k in wrong_a), "one verdict at both ends"
    full_a, full_b = a.full(wrong_a), b.full(wrong_b)
    assert full_a.numel() == full_b.numel()
    a.hear_full(full_b, wrong_a, weight)
    b.hear_full(full_a, wrong_b, weight)
    return full_a.numel() // 4


@pytest.mark.parametrize("name", ["whole", "last", "twice", "empty", "nothing"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_byte_is_accounted_for_and_nothing_is_changed(codec: PairCodec, name: str) -> None:
    z, layout = mixed_tree(), LAYOUTS[name]
    if name == "twice":  # a tensor of a gossip layout is whole, or one range of it
        layout = tuple({part.name: part for part in layout}.values())
    drift = shifted(zeros_like(z), 0.1, 1)
    before = {k: v.clone() for k, v in z.items()}
    for round in (0, 1, 5):
        first = said(codec, z, drift, layout, round)
        assert torch.equal(first, said(codec, z, drift, layout, round)), "every byte is written, padding too"
        assert all(torch.equal(z[k], before[k]) for k in z)


def test_sizes() -> None:
    layout = layout_of({"w": torch.zeros(512 * 1000)})
    assert [Modulo(bits).nbytes(layout) for bits in BITS] == [64000 * bits + 4000 for bits in BITS]
    assert 4 * 512000 / Modulo(4).nbytes(layout) > 7.5
    assert Modulo(1, block=512).nbytes(layout) == 64000 + 2000
    assert [4 * 512000 / Modulo(1, block=b).nbytes(layout) > least for b, least in ((256, 30), (512, 31))] == [True, True]
    assert Modulo(1).nbytes(layout_of({"w": torch.zeros(300)})) == 4 + 256 // 8 + 64 // 8, "a last block of 44 is filled up to 64"
    assert SignsAndSlice(8).nbytes(layout) == 64000 + 4 + 4 * 64000


@pytest.mark.parametrize("size", [1e-6, 0.1, 50.0])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_both_ends_come_to_the_same_difference_right_or_wrong(codec: PairCodec, size: float) -> None:
    """Each end knows the other's packet and its own, and so the pair keeps its sum, whatever the ranges hold: they are for 0.1 here."""
    base, layout = mixed_tree(), LAYOUTS["whole"]
    for round in (0, 1):
        a, b = shifted(base, size, 1), shifted(base, size, 2)
        drifts = shifted(zeros_like(base), 0.1, 3), shifted(zeros_like(base), 0.02, 4)
        said_a, said_b = said(codec, a, drifts[0], layout, round), said(codec, b, drifts[1], layout, round)
        meet_a, meet_b = codec.meet(a, said_a, layout, round), codec.meet(b, said_b, layout, round)
        full = met(meet_a, meet_b, said_a, said_b)
        if size == 50.0 and isinstance(codec, Modulo):
            assert full > 0
        for k in a:
            torch.testing.assert_close(meet_a.mixed[k] + meet_b.mixed[k], a[k] + b[k], rtol=3e-7, atol=3e-7 * (10 + 4 * size))
        assert any(not torch.equal(meet_a.mixed[k], a[k]) for k in a) or size == 1e-6


def known(codec: Modulo, layout: Layout, step: float) -> Tree:
    """The memory of one who takes this step (of rotated numbers) in every block."""
    memory = codec.start(layout)
    for rows in memory.values():
        rows[0], rows[1] = math.log2(step), 0.999 * step / codec.least
    return memory


def learn(memory: Tree, meeting: Meeting) -> None:
    for name, rows in meeting.memory().items():
        memory[name][: len(rows)] = rows


def differences(codec: Modulo, d: np.ndarray, rounds: int, step: float, weight: float = 1.0) -> np.ndarray:
    """How `rounds` rounds move one who is d away, rotated, [sent coordinates], with this step."""
    a, found = {"w": torch.linspace(-3, 7, codec.block)}, []
    layout = layout_of(a)
    for round in range(rounds):
        whole = np.zeros((1, codec.block), np.float32)
        whole[0, : d.size] = d
        b = {"w": a["w"] + torch.from_numpy(turned_back(whole, round)[0] / codec.block)}
        payloads = [said(codec, z, {}, layout, round, known(codec, layout, step)) for z in (a, b)]
        meeting = codec.meet(a, payloads[0], layout, round)
        assert not meeting.hear(payloads[1], weight)
        found.append(rotated((meeting.mixed["w"] - a["w"]).numpy()[None], round)[0, : d.size])
    return np.array(found)


@pytest.mark.parametrize("bits", BITS)
def test_a_difference_in_range_has_the_mean_and_the_error_of_the_formula(bits: int) -> None:
    step = 2.0**-5
    codec = Modulo(bits, adaptive=False)
    for steps in (0.0, 0.25, 0.5, 0.95, 0.6 * codec.reach):
        d = steps * step
        delta = differences(codec, np.full(codec.block // codec.every, d, np.float32), 40, step)
        assert np.abs(delta - d).max() <= step * (1 + 1e-2)
        assert delta.mean() == pytest.approx(d, abs=0.02 * step)
        f = steps - math.floor(steps)
        assert np.mean(delta**2) == pytest.approx(d**2 + step**2 * f * (1 - f), abs=0.03 * step**2 + 1e-2 * d**2)
        if not d:
            assert np.abs(delta).max() < 1e-4, "equal numbers are equal however coarse the steps"


def gain(bits: int, c: float) -> float:
    """(E d delta)^2 / (E delta^2 E d^2) for normal d of size 1 and steps c: the share of a difference that a pair can take away."""
    x = np.linspace(-6 / c, 6 / c, 40001)
    p, half = np.exp(-((x * c) ** 2) / 2), 1 << (bits - 1)
    low, f = np.floor(x), x - np.floor(x)
    a, b = (np.where(np.mod(k, 2 * half) == half, 0, np.mod(k + half, 2 * half) - half) for k in (low, low + 1))
    mean, square = (1 - f) * a + f * b, (1 - f) * a**2 + f * b**2
    return float((p * x * mean).sum() ** 2 / (p * square).sum() / (p * x**2).sum())


@pytest.mark.parametrize("bits, c", [(4, 0.55), (4, 1.1), (2, 1.6), (2, 2.0), (2, 2.7), (2, 4.0)])
def test_a_pair_takes_away_the_share_of_theory(bits: int, c: float) -> None:
    """With the alpha that both find in their packets, which is nearly the best one; single coordinates outside the range included."""
    codec, rng = Modulo(bits), np.random.default_rng(1)
    normal = torch.special.ndtri((torch.arange(codec.block) + 0.5) / codec.block).numpy()
    d = (rng.permutation(normal / np.sqrt(np.square(normal).mean())) / c * 0.125).astype(np.float32)
    moved = differences(codec, d, 60, 0.125, 0.5)
    left = np.square(d - 2 * moved).mean() / np.square(d).mean()
    assert 1 - left == pytest.approx(gain(bits, c), abs=0.04)


def test_one_number_outside_the_range_is_always_found_and_its_block_goes_in_full() -> None:
    codec, base = Modulo(4), {"w": torch.linspace(-1, 1, 700)}
    layout, drift = layout_of(base), {"w": torch.full((700,), 0.01)}
    for place in range(0, 700, 23):
        for far in (2.1, -3.7, 1e4, -3e7):
            a, b = {"w": base["w"].clone()}, {"w": base["w"] + 0.004}
            b["w"][place] += far
            payloads = [said(codec, z, drift, layout, 0) for z in (a, b)]
            ends = codec.meet(a, payloads[0], layout, 0), codec.meet(b, payloads[1], layout, 0)
            assert met(*ends, *payloads) == min(256, 700 - place // 256 * 256)
            block = slice(place // 256 * 256, place // 256 * 256 + 256)
            exact = (a["w"] + b["w"])[block] / 2
            torch.testing.assert_close(ends[0].mixed["w"][block], exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_a_block_far_outside_its_range_is_found(bits: int) -> None:
    """Differences of four times what the range is for."""
    codec, g = Modulo(bits), torch.Generator().manual_seed(3)
    a = {"w": torch.randn(256 * 200, generator=g)}
    far = {"w": a["w"] + 60 * codec.reach * torch.randn(256 * 200, generator=g)}
    layout = layout_of(a)
    payloads = [said(codec, z, {}, layout, 0, known(codec, layout, 16.0)) for z in (a, far)]
    ends = codec.meet(a, payloads[0], layout, 0), codec.meet(far, payloads[1], layout, 0)
    assert met(*ends, *payloads) > 0.97 * a["w"].numel()


def test_ranges_follow_what_was_seen() -> None:
    """They widen at once, keep while they fit, fall by two octaves a round at most, and follow the widest heard."""
    codec, g = Modulo(4), torch.Generator().manual_seed(7)
    z = {"w": torch.zeros(256)}
    layout, unit = layout_of(z), {"w": torch.randn(256, generator=g)}
    memory, steps = [codec.start(layout), codec.start(layout)], []
    for round, size in enumerate((0.0, 3.0, 3.0, 2.6, 0.003, 0.003, 0.003)):
        other = {"w": size * unit["w"]}
        payloads = [said(codec, v, {}, layout, round, m) for v, m in zip((z, other), memory, strict=True)]
        ends = codec.meet(z, payloads[0], layout, round), codec.meet(other, payloads[1], layout, round)
        assert (met(*ends, *payloads) > 0) == (round == 1)
        for m, end in zip(memory, ends, strict=True):
            learn(m, end)
        assert torch.equal(memory[0]["w"], memory[1]["w"])
        steps.append(int(payloads[0][0]) - 128)
    first = math.ceil(math.log2(0.55 * 3 * float(unit["w"].norm())))
    assert steps[2:4] == [first, first]
    assert steps[5:] == [first - 2, first - 4]
    wide = known(codec, layout, 4.0)
    payloads = [said(codec, z, {}, layout, 0, m) for m in (memory[0], wide)]
    meeting = codec.meet(z, payloads[0], layout, 0)
    assert not meeting.hear(payloads[1], 0.5)
    assert float(meeting.memory()["w"][0]) == 2


@dataclass
class Consensus:
    """n workers that only mix: what is left of their disagreement after each round, as a root mean square."""

    codec: Modulo
    graph: Topology
    step: float | None = None
    """Every block's step, of rotated numbers, in all rounds. None: the codec's own ranges."""
    numbers: int = 1500
    drift: float = 0.0
    """Of the steps between rounds; what the workers have in common moves half as much."""
    growth: tuple[float, ...] = (1.0,)
    """Of the drift, round by round; the last one stays."""

    def run(self, rounds: int) -> list[float]:
        n, g = self.graph.n, torch.Generator().manual_seed(5)
        z = [{"w": 5.0 + (0.0 if self.drift else 1.0) * torch.randn(self.numbers, generator=g)} for _ in range(n)]
        layout, first = layout_of(z[0]), {"w": torch.full((self.numbers,), 3.0)}
        memory = [self.codec.start(layout) for _ in range(n)]
        self.full, left = 0, []
        for t in range(rounds):
            drift = [first if not t and self.step is None else {}] * n
            if self.drift:
                common = torch.randn(self.numbers, generator=g)
                size = self.drift * self.growth[min(t, len(self.growth) - 1)]
                drift = [{"w": size * (common / 2 + torch.randn(self.numbers, generator=g))} for _ in range(n)]
                z = [map_tree(torch.sub, v, d) for v, d in zip(z, drift, strict=True)]
            mean = torch.stack([v["w"].double() for v in z]).mean(0)
            if self.step:
                memory = [known(self.codec, layout, self.step) for _ in range(n)]
            payloads = [said(self.codec, z[i], drift[i], layout, t, memory[i]) for i in range(n)]
            meetings = [self.codec.meet(z[i], payloads[i], layout, t) for i in range(n)]
            for i in range(n):
                for j, w in self.graph.at(t).row(i):
                    if i < j:
                        self.full += 2 * met(meetings[i], meetings[j], payloads[i], payloads[j], w)
            z = [m.mixed for m in meetings]
            for kept, meeting in zip(memory, meetings, strict=True):
                learn(kept, meeting)
            together = torch.stack([v["w"].double() for v in z])
            left.append(float((together - together.mean(0)).pow(2).mean().sqrt()))
            assert float((together.mean(0) - mean).abs().max()) < 3e-7 * float(together.abs().max()), (
                "the mean stays to rounding, at any number of bits"
            )
        return left


@pytest.mark.parametrize("name", ["one_peer", "two_peer"])
@pytest.mark.parametrize("bits", BITS)
def test_disagreement_falls_to_the_floor_of_a_fixed_step(bits: int, name: str) -> None:
    """At alpha = 1 and step s the mean square error of a pair's difference is at most s^2 / 4, so disagreement ends at
    sigma^2 <= (s^2 / 16) / (2 l1 - l2); below that only a smaller step helps. (s of rotated numbers is 16 times as large.)"""
    graph = topology(name, 8, seed=1)
    codec = Modulo(bits, adaptive=False)
    step = 2.0 ** round(math.log2(4 / codec.reach))  # so that ranges hold nearly all differences from the start
    left = Consensus(codec, graph, 16 * step).run(30)
    l1, l2 = moments(graph) or (0.0, 0.0)
    floor = step / 4 / math.sqrt(2 * l1 - l2)
    assert np.sqrt(np.mean(np.square(left[15:]))) < 1.05 * floor


@pytest.mark.parametrize("name", ["one_peer", "two_peer"])
@pytest.mark.parametrize("bits", BITS)
def test_adaptive_mixing_contracts_at_any_number_of_bits(bits: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disagreement shrinks round by round, at least as fast as exact mixing in a share alpha of the rounds (half, where every
    second number is sent): per round by the mean of 1 - share * alpha * l1, in the mean square."""
    alphas: list[float] = []
    original = Told.alpha

    def spy(told: Told, noise: np.float32) -> np.ndarray:
        found = original(told, noise)
        alphas.append(float(found.mean()))
        return found

    monkeypatch.setattr(Told, "alpha", spy)
    graph, codec = topology(name, 8, seed=1), Modulo(bits)
    rounds = 25 if bits > 2 else 40
    left = Consensus(codec, graph).run(rounds)
    l1, _ = moments(graph) or (0.0, 0.0)
    per_round = np.array(alphas).reshape(rounds, -1).mean(axis=1) / codec.every
    predicted = math.exp(0.5 * float(np.log1p(-per_round * l1).sum()))
    assert left[-1] < 1.5 * predicted
    assert left[-1] < {8: 1e-3, 4: 0.01, 2: 0.1, 1: 0.3}[bits]


def test_adapting_pays_where_a_coarse_step_is_all_there_is() -> None:
    """A step of three times the differences: at alpha = 1 pairs do not get nearer."""
    graph = topology("one_peer", 8, seed=1)
    plain, adaptive = (Consensus(Modulo(2, adaptive=kind), graph, 16 * 4.0).run(20) for kind in (False, True))
    assert adaptive[-1] < 0.75 * plain[-1]


@pytest.mark.parametrize("bits", BITS)
def test_drifts_that_grow_stay_in_range(bits: int) -> None:
    """As in a warm-up: twice as large in each of the first rounds. Ranges grow with them, and little goes in full."""
    fleet = Consensus(Modulo(bits), topology("two_peer", 8, seed=1), drift=0.05, growth=(1.0, 2.0, 4.0, 8.0, 16.0, 20.0))
    fleet.run(10)
    assert fleet.full < 0.02 * 10 * 8 * 2 * fleet.numbers


def test_signs_and_slice_are_their_formula() -> None:
    codec, layout, base = SignsAndSlice(3), LAYOUTS["plain"], mixed_tree()
    z = [shifted(base, 1.0, k) for k in (1, 2)]
    drift = [shifted(zeros_like(base), 0.1, k) for k in (3, 4)]
    decoded = []
    for d in drift:
        sign, acc = Sign(), zeros_like(base)
        out = torch.empty(sign.nbytes(layout), dtype=torch.uint8)
        sign.encode(d, layout, sign.stats(d, layout), out)
        sign.accumulate(out, layout, acc, 1.0)
        decoded.append(acc)
    seen = zeros_like(base)
    for round in range(3):
        payloads = [said(codec, z[i], drift[i], layout, round) for i in (0, 1)]
        meeting = codec.meet(z[0], payloads[0], layout, round)
        assert not meeting.hear(payloads[1], 0.25)
        want = {k: z[0][k] - 0.25 * (decoded[1][k] - decoded[0][k]) for k in base}
        for part in codec.slice(layout, round):
            flat(want, part).copy_(flat(z[0], part) + 0.25 * (flat(z[1], part) - flat(z[0], part)))
            flat(seen, part).add_(1)
        for k in base:
            torch.testing.assert_close(meeting.mixed[k], want[k], rtol=1e-5, atol=1e-6)
    assert all((v == 1).all() for v in seen.values()), "every number once in so many rounds"


def test_settings_that_cannot_be_are_refused() -> None:
    for make in (lambda: Modulo(3), lambda: Modulo(8, block=12), lambda: Modulo(8, patience=0.5), lambda: SignsAndSlice(0)):
        with pytest.raises(BadInput):
            make()
    codec, layout = Modulo(8), LAYOUTS["plain"]
    with pytest.raises(BadInput, match="memory"):
        said(codec, mixed_tree(), {}, layout, 0, {part.name: torch.zeros(0, dtype=torch.uint8) for part in layout})
