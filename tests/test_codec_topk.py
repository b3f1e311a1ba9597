"""The largest of each chunk: which they are, how ties are settled, and how they travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_codec import WHOLE, cut, decoded, encoded, mixed_tree, same_bits

from gossamer.core.codec import TopK
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Layout, Tree, flat, layout_of, zeros_like


def chosen(v: np.ndarray, k: int) -> list[int]:
    """Largest |v| first, the lowest position among equals; NaN is the largest. Written out again."""
    size = np.where(np.isnan(v), np.inf, np.abs(v))
    return sorted(np.argsort(-size, kind="stable")[:k].tolist())


def trees() -> dict[str, Tree]:
    g = torch.Generator().manual_seed(3)
    ties = torch.randint(-2, 3, (5000,), generator=g).float()
    sparse = torch.zeros(5000)
    sparse[::700] = torch.randn(8, generator=g)
    return {"mixed": mixed_tree(), "ties": {"w": ties}, "zeros": {"w": torch.zeros(5000)}, "sparse": {"w": sparse}}


@pytest.mark.parametrize("name", ["mixed", "ties", "zeros", "sparse"])
@pytest.mark.parametrize("codec", [TopK(), TopK(share=0.1, chunk=50), TopK(share=0.5, chunk=64), TopK(share=1 / 32, chunk=64)], ids=str)
def test_keeps_the_largest_of_each_chunk(codec: TopK, name: str) -> None:
    tree = trees()[name]
    layout: Layout = layout_of(tree)
    for picked in (layout, cut(layout, 3)[1]):
        raw = encoded(codec, tree, picked).numpy()
        for part in picked:
            v = flat(tree, part).numpy()
            chunks = [v[a : a + codec.chunk] for a in range(0, v.size, codec.chunk)]
            where = [chosen(c, max(1, round(codec.share * c.size))) for c in chunks]
            total = sum(map(len, where))
            values, positions = raw[: 4 * total].view(np.float32), raw[4 * total : 6 * total].view(np.uint16)
            assert positions.tolist() == [i for w in where for i in w]
            assert values.tolist() == [c[i] for c, w in zip(chunks, where, strict=True) for i in w]
            assert codec.nbytes((part,)) == -(-6 * total // 4) * 4
            raw = raw[codec.nbytes((part,)) :]


@pytest.mark.parametrize("values, dtype", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_sixteen_bit_values_round_the_same_choice(values: str, dtype: torch.dtype) -> None:
    tree = mixed_tree()
    plain, narrow = TopK(share=0.1), TopK(share=0.1, values=values)  # type: ignore[arg-type]
    full = decoded(plain, encoded(plain, tree, WHOLE), WHOLE, tree)
    half = decoded(narrow, encoded(narrow, tree, WHOLE), WHOLE, tree)
    assert same_bits(half, {k: v.to(dtype).float() for k, v in full.items()})
    assert narrow.nbytes(WHOLE) < plain.nbytes(WHOLE)


def test_everything_kept_is_lossless() -> None:
    assert not TopK(share=1).lossy
    assert TopK(share=1, values="bf16").lossy
    assert TopK(share=0.999).lossy
    tree = mixed_tree()
    codec = TopK(share=1, chunk=100)
    assert same_bits(decoded(codec, encoded(codec, tree, WHOLE), WHOLE, tree), tree)


def test_the_error_is_what_was_left_out() -> None:
    """|D - decoded| never exceeds the smallest number kept of its chunk."""
    v = torch.randn(4096 * 3, generator=torch.Generator().manual_seed(0))
    tree = {"w": v}
    codec = TopK(share=1 / 64)
    value = decoded(codec, encoded(codec, tree, layout_of(tree)), layout_of(tree), tree)["w"]
    for a, b in zip(v.split(4096), value.split(4096), strict=True):
        assert int((b != 0).sum()) == 64
        assert (a - b).abs().max() <= b[b != 0].abs().min()


def test_a_nan_is_sent() -> None:
    v = torch.ones(4096)
    v[77] = float("nan")
    tree = {"w": v}
    codec = TopK(share=1 / 4096)
    value = decoded(codec, encoded(codec, tree, layout_of(tree)), layout_of(tree), tree)["w"]
    assert value[77].isnan()


def test_a_position_outside_its_chunk_is_refused() -> None:
    tree = {"w": torch.arange(6.0)}
    codec = TopK(share=0.5, chunk=4)
    layout = layout_of(tree)
    payload = encoded(codec, tree, layout)
    payload[4 * 3 : 4 * 3 + 2] = 5
    with pytest.raises(RunFailed, match="position"):
        codec.accumulate(payload, layout, zeros_like(tree), 1.0)
