"""Signs and magnitudes: what the bits are, what the magnitudes are, and that slices and ranks agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_codec import WHOLE, cut, decoded, encoded, mixed_tree, same_bits

from gossamer.core.codec import Sign
from gossamer.core.codec.payload import CHUNK
from gossamer.core.errors import BadInput
from gossamer.core.tree import Part, Tree, flat, layout_of, zeros_like

SIGNS = [
    Sign(),
    Sign(embeddings="same"),
    Sign(magnitude="row"),
    Sign(magnitude="block"),
    Sign(magnitude="block", block=13, embeddings="same"),
    Sign(magnitude="block", block=1, embeddings="same"),
]


def group_of(codec: Sign, part: Part) -> int:
    """Written out again, as the definition reads."""
    if codec.magnitude == "row" or (part.by_row and codec.embeddings == "row"):
        return part.row
    return codec.block if codec.magnitude == "block" else part.numel


def reference(codec: Sign, tree: Tree, part: Part) -> torch.Tensor:
    """m * (2s - 1) of the full tensor, in plain operations."""
    v = tree[part.name].view(-1)
    value = torch.where(v >= 0, 1.0, -1.0)
    for lo in range(0, part.numel, max(1, group_of(codec, part))):
        group = slice(lo, lo + group_of(codec, part))
        value[group] *= v[group].double().abs().mean().float()
    return value


@pytest.mark.parametrize("codec", SIGNS[:5], ids=str)
def test_decodes_to_mean_magnitude_times_sign(codec: Sign) -> None:
    tree = mixed_tree()
    value = decoded(codec, encoded(codec, tree, WHOLE), WHOLE, tree)
    for part in WHOLE:
        if part.name == "long" and group_of(codec, part) < 1000:
            continue  # the plain loop is slow; the groups of the other tensors cover it
        torch.testing.assert_close(flat(value, part), reference(codec, tree, part), rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_payload_is_magnitudes_then_bits(codec: Sign) -> None:
    tree = mixed_tree()
    for layout in (WHOLE, cut(WHOLE, 3)[1]):
        raw = encoded(codec, tree, layout).numpy()
        for part in layout:
            groups = len({i // group_of(codec, part) for i in range(part.lo, part.hi)})
            m = raw[: 4 * groups].view(np.float32)
            assert (m >= 0).all()
            bits = np.packbits(flat(tree, part).numpy() >= 0, bitorder="little")
            assert np.array_equal(raw[4 * groups : 4 * groups + bits.size], bits)
            size = codec.nbytes((part,))
            assert size == 4 * groups + -(-bits.size // 4) * 4
            assert not raw[4 * groups + bits.size : size].any(), "padding is zero"
            raw = raw[size:]
        assert raw.size == 0


@pytest.mark.parametrize("pieces", [2, 3, 7])
@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_slices_decode_to_the_whole(codec: Sign, pieces: int) -> None:
    tree = mixed_tree()
    tree["odd"].view(-1)[::9] = 0
    stats = codec.stats(tree, WHOLE)
    acc, whole = mixed_tree(1), mixed_tree(1)
    out = torch.empty(codec.nbytes(WHOLE), dtype=torch.uint8)
    zeros = codec.encode(tree, WHOLE, stats, out)
    codec.accumulate(out, WHOLE, whole, 0.3125)
    for piece in cut(WHOLE, pieces):
        out = torch.empty(codec.nbytes(piece), dtype=torch.uint8)
        zeros -= codec.encode(tree, piece, stats, out)
        codec.accumulate(out, piece, acc, 0.3125)
    assert same_bits(acc, whole)
    assert zeros == 0


@pytest.mark.parametrize("codec", SIGNS, ids=str)
def test_statistics_of_ranks_add_up(codec: Sign) -> None:
    tree = mixed_tree()
    whole = codec.stats(tree, WHOLE)
    parts = [codec.stats(tree, piece) for piece in cut(WHOLE, 3)]
    for part in WHOLE:
        total = sum((s[part.name] for s in parts), torch.zeros_like(whole[part.name]))
        assert whole[part.name].dtype == torch.float64
        assert whole[part.name].shape == (2, -(-part.numel // max(1, group_of(codec, part))))
        assert torch.equal(total[1], whole[part.name][1])
        torch.testing.assert_close(total[0], whole[part.name][0], rtol=1e-13, atol=0)
        assert int(total[1].sum()) == part.numel


def test_statistics_are_summed_in_float64() -> None:
    """A float32 sum, even a pairwise one, would lose the small ones beside 2^24."""
    v = torch.full((4 * CHUNK,), 2.0**-7)
    v[::2] = 2.0**24
    for codec, row in ((Sign(), 1), (Sign(magnitude="row"), 512)):
        tree = {"w": v.view(-1, row) if row > 1 else v}
        sums, counts = codec.stats(tree, layout_of(tree))["w"]
        assert torch.equal(sums, counts / 2 * (2.0**24 + 2.0**-7))


@pytest.mark.parametrize("codec", SIGNS[:4], ids=str)
def test_mean_magnitude_is_the_best_scale(codec: Sign) -> None:
    """The squared error of c * m * sign(D) over c is a parabola whose lowest point is c = 1, in each tensor."""
    tree = mixed_tree()
    value = decoded(codec, encoded(codec, tree, WHOLE), WHOLE, tree)

    def error(name: str, c: float) -> float:
        return float((tree[name].double() - c * value[name].double()).square().sum())

    for name in ("embed", "odd", "bias", "long"):
        assert error(name, 1.0) < min(error(name, 0.99), error(name, 1.01))
        assert error(name, 0.99) == pytest.approx(error(name, 1.01), rel=1e-5)


def test_an_untouched_row_does_not_move() -> None:
    tree = mixed_tree()
    for codec in (Sign(), Sign(magnitude="block"), Sign(magnitude="row", embeddings="same")):
        value = decoded(codec, encoded(codec, tree, WHOLE), WHOLE, tree)["embed"]
        assert not value[3:20].any()
        assert (value[:3] != 0).all()
    drift = decoded(Sign(embeddings="same"), encoded(Sign(embeddings="same"), tree, WHOLE), WHOLE, tree)["embed"]
    assert (drift[3:20] > 0).all(), "what the row magnitudes prevent"


def test_zeros_are_counted_where_they_move() -> None:
    tree = mixed_tree()
    tree["embed"][0, 5] = 0.0
    tree["odd"].view(-1)[:10] = 0.0
    tree["odd"].view(-1)[10:20] = -0.0
    tree["long"].view(-1)[CHUNK - 1 : CHUNK + 2] = 0.0
    tree["bias"].zero_()

    def zeros(codec: Sign) -> int:
        out = torch.empty(codec.nbytes(WHOLE), dtype=torch.uint8)
        return codec.encode(tree, WHOLE, codec.stats(tree, WHOLE), out)

    assert zeros(Sign()) == 1 + 20 + 3
    assert zeros(Sign(embeddings="same")) == 1 + 17 * 13 + 20 + 3
    assert zeros(Sign(magnitude="block", block=5)) == 1 + 3, "four whole blocks of zeros decode to zero"
    assert zeros(Sign(magnitude="block", block=1, embeddings="same")) == 0


def test_statistics_may_cover_more_than_what_is_encoded() -> None:
    """A shard of a site encodes with the magnitudes of the site, not with its own."""
    tree = {"w": torch.cat([torch.ones(10), torch.full((10,), -3.0)])}
    layout = layout_of(tree)
    shard = (replace(layout[0], hi=10),)
    acc = zeros_like(tree)
    Sign().accumulate(encoded(Sign(), tree, shard, Sign().stats(tree, layout)), shard, acc, 1.0)
    assert acc["w"].tolist() == [2.0] * 10 + [0.0] * 10
    nothing = {"w": torch.zeros(2, 1, dtype=torch.float64)}
    assert not decoded(Sign(), encoded(Sign(), tree, layout, nothing), layout, tree)["w"].any(), "0 where nothing was counted"


@pytest.mark.parametrize(
    "stats",
    [{}, {"w": torch.zeros(2, 3, dtype=torch.float64)}, {"w": torch.zeros(2, 1)}],
    ids=["missing", "of another magnitude", "float32"],
)
def test_foreign_statistics_are_refused(stats: dict[str, torch.Tensor]) -> None:
    tree = {"w": torch.ones(4)}
    out = torch.empty(Sign().nbytes(layout_of(tree)), dtype=torch.uint8)
    with pytest.raises(BadInput, match="statistics"):
        Sign().encode(tree, layout_of(tree), stats, out)
