"""Encoding in a round: one pass gives the bits of the separate steps, the accelerator's path those of the CPU's, and memory stays small."""

from __future__ import annotations

import tracemalloc
from collections.abc import Generator

import pytest
import torch
from test_codec import CODECS, LAYOUTS, WHOLE, cut, mixed_tree, same_bits
from torch import Tensor

from gossamer.core.codec import Codec, Sign, signs, signs_device, write
from gossamer.core.codec import payload as p
from gossamer.core.feedback import Feedback
from gossamer.core.tree import Layout, Part, Tree, layout_of, zeros_like

SIGNS = [
    Sign(),
    Sign(magnitude="row"),
    Sign(magnitude="block", embeddings="same"),
    Sign(magnitude="block", block=13),
    Sign(magnitude="block", block=1, embeddings="same"),
]


def odd_tree() -> Tree:
    """As mixed_tree, with zeros of both signs."""
    tree = mixed_tree()
    tree["odd"].view(-1)[::9], tree["odd"].view(-1)[::11] = 0.0, -0.0
    tree["long"].view(-1)[p.CHUNK - 1 : p.CHUNK + 2] = 0.0
    return tree


def buffers(codec: Codec, layouts: list[Layout]) -> list[tuple[Layout, Tensor]]:
    return [(layout, torch.full((codec.nbytes(layout),), 0xA5, dtype=torch.uint8)) for layout in layouts]


def finish(writing: Generator[Tensor, Tensor, list[int]], ranks: int = 1) -> list[int]:
    """Answers every statistic with that of `ranks` ranks that hold the same."""
    try:
        value = next(writing)
        while True:
            value = writing.send(value * ranks)
    except StopIteration as end:
        return list(end.value)


def step_by_step(
    codec: Codec, tree: Tree, layouts: list[Layout], feedback: Feedback | None, residual: Tree | None
) -> tuple[list, list[int]]:
    """What `write` does, written out again."""
    said, lost, payloads = tree, [], buffers(codec, layouts)
    if feedback and residual is not None:
        said = feedback.absorb(residual, tree)
    stats = codec.stats(said, tuple(part for layout in layouts for part in layout))
    for layout, out in payloads:
        lost.append(codec.encode(said, layout, stats, out))
    if residual is not None:
        for layout, out in payloads:
            codec.accumulate(out, layout, said, -1.0)
    return payloads, lost


@pytest.mark.parametrize("feedback", [None, Feedback(), Feedback(decay=0.9)], ids=["none", "full", "0.9"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("codec", CODECS + SIGNS, ids=str)
def test_write_is_absorb_stats_encode_and_take_off(codec: Codec, pieces: int, feedback: Feedback | None) -> None:
    tree, before = odd_tree(), odd_tree()
    mine, wanted = (None if feedback is None else mixed_tree(seed=3) for _ in range(2))
    for residual in (mine, wanted):
        if residual is not None:
            residual["odd"].view(-1)[::9], residual["odd"].view(-1)[::11] = 0.0, -0.0
    layouts = cut(WHOLE, pieces)
    expected, lost = step_by_step(codec, tree, layouts, feedback, wanted)
    got = buffers(codec, layouts)
    assert finish(write(codec, tree, WHOLE, got, feedback, mine)) == lost
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(got, expected, strict=True))
    assert same_bits(tree, before), "what is said is left as it is"
    if mine is not None and wanted is not None:
        assert same_bits(mine, wanted)


@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_magnitudes_are_those_of_the_site(codec: Sign) -> None:
    """Three ranks that hold the same have the magnitudes of one; two statistics that add up are one mean."""
    tree = mixed_tree()
    one, three = buffers(codec, [WHOLE]), buffers(codec, [WHOLE])
    finish(write(codec, tree, WHOLE, one))
    finish(write(codec, tree, WHOLE, three), ranks=3)
    assert torch.equal(one[0][1], three[0][1])


@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_statistics_are_asked_for_tensor_by_tensor(codec: Sign) -> None:
    tree = mixed_tree()
    writing, stats = write(codec, tree, WHOLE, buffers(codec, cut(WHOLE, 3))), codec.stats(tree, WHOLE)
    value = next(writing)
    for part in WHOLE:
        torch.testing.assert_close(value, stats[part.name], rtol=1e-13, atol=0)
        value = writing.send(value) if part is not WHOLE[-1] else value


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the path of tensors on an accelerator."""

    def scan(
        self: Sign, values: Tensor, part: Part, bits: p.Bytes | None, sums: Tensor | None, said: Tensor | None = None, decay: float = 1.0
    ) -> object:
        return signs_device.scan(values, self._place(part), bits, None if sums is None else sums.numpy(), said, decay)

    def add(self: Sign, target: Tensor, part: Part, bits: p.Bytes, scaled: p.Floats) -> None:
        if part.size:
            signs_device.add(target, bits, self._place(part), scaled)

    monkeypatch.setattr(Sign, "_scan", scan)
    monkeypatch.setattr(Sign, "_add", add)
    monkeypatch.setattr(signs_device, "CHUNK", 1 << 16)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_the_accelerators_path_gives_the_same_bytes(codec: Sign, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, layout = odd_tree(), LAYOUTS[name]
    tree["bias"][4:6] = torch.tensor([float("nan"), -float("inf")])

    def all_of_it() -> tuple[dict[str, Tensor], Tensor, int, Tree, list[int], Tensor, Tree]:
        stats, out, acc = codec.stats(tree, layout), torch.zeros(codec.nbytes(layout), dtype=torch.uint8), mixed_tree(1)
        lost = codec.encode(tree, layout, host, out)
        codec.accumulate(out, layout, acc, 0.3125)
        written, residual = torch.zeros_like(out), mixed_tree(2)
        zeros = finish(write(codec, tree, layout, [(layout, written)], Feedback(0.9), residual))
        return stats, out, lost, acc, zeros, written, residual

    host = codec.stats(tree, layout)
    stats, out, lost, acc, zeros, written, residual = all_of_it()
    on_device(monkeypatch)
    stats_d, out_d, lost_d, acc_d, zeros_d, written_d, residual_d = all_of_it()
    assert torch.equal(out, out_d)
    assert (lost, zeros) == (lost_d, zeros_d)
    assert same_bits({k: v.nan_to_num() for k, v in acc.items()}, {k: v.nan_to_num() for k, v in acc_d.items()})
    for key, value in stats.items():
        torch.testing.assert_close(stats_d[key], value, rtol=1e-13, atol=0, equal_nan=True)
    # Its own sums differ in the last bits of a float64, and so may a magnitude, by one float32.
    at = 0
    for part in layout:
        split, end = at + 4 * codec._groups(part), at + codec.nbytes((part,))
        m, m_d = (raw[at:split].clone().view(torch.float32) for raw in (written, written_d))
        torch.testing.assert_close(m, m_d, rtol=1.2e-7, atol=0, equal_nan=True)
        assert torch.equal(written[split:end], written_d[split:end])
        at = end
    for key, v in residual.items():
        torch.testing.assert_close(v, residual_d[key], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1001])
def test_bits_are_packed_and_spread_alike(size: int) -> None:
    v = torch.randn(size, generator=torch.Generator().manual_seed(size))
    bits = torch.zeros(-(-size // 8), dtype=torch.uint8)
    signs.scan(v.numpy(), signs.Place(0, size, 0, 1), bits.numpy(), None)
    assert torch.equal(signs_device.packed(v), bits)
    assert torch.equal(signs_device.spread(bits, size), torch.where(v >= 0, 1.0, -1.0))


@pytest.mark.parametrize("codec", SIGNS[:3], ids=str)
def test_nothing_as_large_as_a_tensor_is_made(codec: Sign) -> None:
    n = 1 << 22
    tree, residual = {"w": torch.randn(n // 512, 512)}, {"w": torch.randn(n // 512, 512)}
    layout = layout_of(tree)
    ((_, out),) = pieces = buffers(codec, [layout])
    acc = zeros_like(tree)
    finish(write(codec, tree, layout, pieces, Feedback(0.9), residual))
    tracemalloc.start()
    try:
        finish(write(codec, tree, layout, pieces, Feedback(0.9), residual))
        codec.accumulate(out, layout, acc, 0.5)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * n / 4, "scratch is a few chunks"
