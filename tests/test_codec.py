"""What holds for every codec: exact sizes, error bounds, slices, multiply-then-add, clean inputs, and refusals by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from gossamer.core.codec import Bf16, Codec, Fp16, Fp32, Int8, Sign, TopK, by_name
from gossamer.core.codec.payload import CHUNK
from gossamer.core.errors import BadInput
from gossamer.core.tree import Layout, Part, Tree, flat, layout_of, zeros_like

CODECS: list[Codec] = [
    Fp32(),
    Fp16(),
    Bf16(),
    Int8(),
    Int8(block=7),
    Int8(block=CHUNK + 3),
    Sign(),
    Sign(magnitude="row", embeddings="same"),
    Sign(magnitude="block", block=10, embeddings="same"),
    Sign(magnitude="block", block=CHUNK + 5),
    TopK(),
    TopK(share=0.3, chunk=50, values="fp16"),
    TopK(share=1, chunk=64),
    TopK(share=0.01, chunk=65536, values="bf16"),
]
FLOAT_CODECS: list[Codec] = [Fp32(), Fp16(), Bf16()]


def mixed_tree(seed: int = 0) -> Tree:
    """Odd sizes, a scalar, an empty tensor, an embedding with untouched rows, and one tensor longer than two chunks."""
    g = torch.Generator().manual_seed(seed)
    tree = {
        "embed": torch.randn(31, 13, generator=g),
        "scalar": torch.randn((), generator=g),
        "empty": torch.zeros(0, 5),
        "one": torch.randn(1, generator=g),
        "odd": torch.randn(5, 3, 7, generator=g),
        "bias": torch.randn(37, generator=g),
        "long": torch.randn(3, CHUNK - 11, generator=g) * torch.linspace(0.1, 9, CHUNK - 11),
    }
    tree["embed"][3:20] = 0
    return tree


def cut(layout: Layout, pieces: int) -> list[Layout]:
    """A partition of every part into ranges of nearly equal length (not multiples of anything)."""

    def edge(part: Part, i: int) -> int:
        return part.lo + part.size * i // pieces

    return [tuple(replace(part, lo=edge(part, i), hi=edge(part, i + 1)) for part in layout) for i in range(pieces)]


WHOLE = layout_of(mixed_tree(), by_row=("embed",))
LAYOUTS: dict[str, Layout] = {
    "whole": WHOLE,
    "plain": layout_of(mixed_tree()),
    "empty": (),
    "middle": cut(WHOLE, 3)[1],
    "last": cut(WHOLE, 5)[4],
    "twice": tuple(part for piece in cut(WHOLE, 2) for part in piece),
    "nothing": tuple(replace(part, lo=part.hi) for part in WHOLE),
}


def encoded(codec: Codec, tree: Tree, layout: Layout, stats: dict[str, Tensor] | None = None) -> Tensor:
    """The payload, between two guard zones that must stay as they were; the buffer is dirty before."""
    n = codec.nbytes(layout)
    buffer = torch.full((n + 128,), 0xA5, dtype=torch.uint8)
    codec.encode(tree, layout, codec.stats(tree, layout) if stats is None else stats, buffer[64 : 64 + n])
    assert (buffer[:64] == 0xA5).all()
    assert (buffer[64 + n :] == 0xA5).all()
    return buffer[64 : 64 + n]


def decoded(codec: Codec, payload: Tensor, layout: Layout, like: Tree) -> Tree:
    """What the payload stands for; elements not carried are zero."""
    acc = zeros_like(like)
    codec.accumulate(payload, layout, acc, 1.0)
    return acc


def same_bits(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k].view(-1).view(torch.int32), b[k].view(-1).view(torch.int32)) for k in a)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_every_byte_is_accounted_for(codec: Codec, name: str) -> None:
    tree, layout = mixed_tree(), LAYOUTS[name]
    before = {k: v.clone() for k, v in tree.items()}
    first = encoded(codec, tree, layout)
    assert first.numel() % 4 == 0
    assert torch.equal(first, encoded(codec, tree, layout)), "every byte is written, padding too"
    assert same_bits(tree, before), "encode does not modify the tree"
    assert codec.nbytes(layout) == sum(codec.nbytes((part,)) for part in layout)
    for part in layout:  # order and independence of the parts
        size, stats = codec.nbytes((part,)), codec.stats(tree, layout)
        assert torch.equal(first[:size], encoded(codec, tree, (part,), stats))
        first = first[size:]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_accumulate_is_multiply_then_add(codec: Codec) -> None:
    tree, layout = mixed_tree(), LAYOUTS["middle"]
    payload = encoded(codec, tree, layout)
    value = decoded(codec, payload, layout, tree)
    weight = float(np.float32(0.37))
    acc = mixed_tree(seed=1)
    expected = {k: v.clone() for k, v in acc.items()}
    for part in layout:
        target = flat(expected, part)
        target += flat(value, part) * weight
    codec.accumulate(payload, layout, acc, weight)
    assert same_bits(acc, expected)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_was_not_heard_is_the_difference(codec: Codec) -> None:
    tree = mixed_tree()
    payload = encoded(codec, tree, WHOLE)
    value = decoded(codec, payload, WHOLE, tree)
    residual = {k: v.clone() for k, v in tree.items()}
    codec.accumulate(payload, WHOLE, residual, -1.0)
    assert all(torch.equal(residual[k], tree[k] - value[k]) for k in tree)
    for k, v in tree.items():
        if isinstance(codec, Sign):  # v - m rounds where v is far below m
            limit = 2.0**-23 * torch.maximum(v.abs(), value[k].abs())
            assert ((value[k] + residual[k] - v).abs() <= limit).all()
        else:  # the difference of neighbours is exact (Sterbenz), and so is the sum
            assert torch.equal(value[k] + residual[k], v)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_lossy_says_the_truth(codec: Codec) -> None:
    tree = mixed_tree()
    value = decoded(codec, encoded(codec, tree, WHOLE), WHOLE, tree)
    assert same_bits(value, tree) is not codec.lossy


@pytest.mark.parametrize("codec", FLOAT_CODECS, ids=str)
def test_slices_of_float_codecs_add_up_to_the_whole(codec: Codec) -> None:
    tree = mixed_tree()
    acc = zeros_like(tree)
    for piece in cut(WHOLE, 4):
        codec.accumulate(encoded(codec, tree, piece), piece, acc, 0.5)
    whole = zeros_like(tree)
    codec.accumulate(encoded(codec, tree, WHOLE), WHOLE, whole, 0.5)
    assert same_bits(acc, whole)


@pytest.mark.parametrize(
    "codec, dtype, relative, absolute", [(Fp16(), torch.float16, 2.0**-11, 2.0**-25), (Bf16(), torch.bfloat16, 2.0**-8, 2.0**-134)], ids=str
)
def test_sixteen_bits_round_like_torch_and_saturate(codec: Codec, dtype: torch.dtype, relative: float, absolute: float) -> None:
    tree = mixed_tree()
    value = decoded(codec, encoded(codec, tree, WHOLE), WHOLE, tree)
    for k, v in tree.items():
        assert torch.equal(value[k], v.to(dtype).float())
        assert ((value[k] - v).abs() <= relative * v.abs() + absolute).all()
    top, inf = torch.finfo(dtype).max, float("inf")
    huge = {"w": torch.tensor([3.4e38, -3.4e38, inf, -inf, float("nan"), -0.0])}
    got = decoded(codec, encoded(codec, huge, layout_of(huge)), layout_of(huge), huge)["w"]
    assert got[:4].tolist() == [top, -top, top, -top]
    assert got[4].isnan()


@pytest.mark.parametrize("block", [1, 7, 256, CHUNK + 3])
def test_int8_error_is_half_a_step(block: int) -> None:
    codec = Int8(block=block)
    tree = mixed_tree() | {"tiny": torch.tensor([1e-45, -3e-43, 0.0, 2e-38]), "huge": torch.tensor([3.4e38, -1e38])}
    tree["bias"][:14] = 0
    for layout in (layout_of(tree), cut(layout_of(tree), 3)[1]):
        value = decoded(codec, encoded(codec, tree, layout), layout, tree)
        for part in layout:
            v, got = flat(tree, part), flat(value, part)
            for a, b in zip(v[: 300 * block].split(block), got[: 300 * block].split(block), strict=True):
                step = max(float(a.abs().max()) / 127, 2.0**-126) if a.any() else 0.0
                assert ((a - b).double().abs() <= step / 2 * (1 + 1e-5)).all()


def test_int8_does_not_hide_what_is_not_finite() -> None:
    for bad in (float("nan"), float("inf")):
        tree = {"w": torch.ones(12)}
        tree["w"][5] = bad
        codec = Int8(block=4)
        got = decoded(codec, encoded(codec, tree, layout_of(tree)), layout_of(tree), tree)["w"]
        assert got.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_identity_of_the_codecs() -> None:
    names = ["fp32", "fp16", "bf16", "int8", "sign", "topk"]
    assert [by_name(name).id for name in names] == [1, 2, 3, 4, 5, 6]
    assert all(by_name(name).version == 1 for name in names)
    assert [by_name(name)() for name in names] == [Fp32(), Fp16(), Bf16(), Int8(), Sign(), TopK()]
    layout = layout_of({"w": torch.zeros(6)})
    assert [by_name(name)().nbytes(layout) for name in names] == [24, 12, 12, 12, 8, 8]


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: by_name("int9"), "int8"),
        (lambda: by_name("Sign"), "'sign'"),
        (lambda: Int8(block=0), "block"),
        (lambda: Int8(block=2.5), "2.5"),  # type: ignore[arg-type]
        (lambda: Sign(magnitude="rows"), "'row'"),  # type: ignore[arg-type]
        (lambda: Sign(embeddings="tensor"), "embeddings"),  # type: ignore[arg-type]
        (lambda: Sign(block=-1), "-1"),
        (lambda: TopK(share=0), "share"),
        (lambda: TopK(share=1.01), "1.01"),
        (lambda: TopK(share=float("nan")), "nan"),
        (lambda: TopK(chunk=65537), "65536"),
        (lambda: TopK(values="fp8"), "fp8"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_named(make: object, word: str) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match=word):
        make()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_does_not_fit_is_refused(codec: Codec) -> None:
    tree = {"w": torch.ones(4, 4)}
    layout = layout_of(tree)
    stats, n = codec.stats(tree, layout), codec.nbytes(layout)
    good = encoded(codec, tree, layout)
    for out in (torch.zeros(n + 4, dtype=torch.uint8), torch.zeros(n, dtype=torch.int8), torch.zeros(2 * n, dtype=torch.uint8)[::2]):
        with pytest.raises(BadInput, match="nbytes"):
            codec.encode(tree, layout, stats, out)
    with pytest.raises(BadInput, match="nbytes"):
        codec.accumulate(good[:-4], layout, zeros_like(tree), 1.0)
    wrong: list[tuple[Tree, str]] = [
        ({"v": torch.ones(4, 4)}, "lacks"),
        ({"w": torch.ones(4, 4, dtype=torch.bfloat16)}, "float32"),
        ({"w": torch.ones(4, 8)[:, ::2]}, "contiguous"),
        ({"w": torch.ones(4, 5)}, "elements"),
    ]
    for other, word in wrong:
        with pytest.raises(BadInput, match=word):
            codec.encode(other, layout, stats, torch.zeros(n, dtype=torch.uint8))
        with pytest.raises(BadInput, match=word):
            codec.accumulate(good, layout, other, 1.0)
