"""Gradient accumulation: pieces of a batch add up to the step of the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.app.config import load as config_of
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.core.errors import BadInput
from gossamer.core.inner import SGD, AdamW, Inner
from gossamer.core.schedule import Constant
from gossamer.core.tree import Tree
from gossamer.train.compute import TrainBody
from gossamer.train.data import Sampler
from gossamer.train.model import build
from gossamer.worker.effects import Done, Work
from tests.small_runs import corpus, settings

SPEC = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = np.random.Generator(np.random.Philox(5)).integers(0, 60, 4000).astype(np.uint16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


def body(inner: Inner, micro_batch: int | None) -> TrainBody:
    batches = Sampler(TOKENS, 16, seed=7, worker=0)
    return TrainBody(build(SPEC, 64, 0), inner, Constant(), 1000, batches, seed=7, micro_batch=micro_batch)


def near(done: Done, other: Done) -> None:
    a, b = done.tree, other.tree
    assert a is not None and b is not None and list(a) == list(b)
    assert done.tokens == other.tokens and done.loss_sum == pytest.approx(other.loss_sum, rel=1e-6)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def copy(tree: Tree | None) -> Tree:
    assert tree is not None
    return {k: v.clone() for k, v in tree.items()}


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_of_pieces_is_the_step_of_the_whole(micro: int, clip: float | None) -> None:
    """7 sequences, also in unequal pieces; a clip far below the norm acts on the whole gradient, not on a piece's."""
    inner = SGD(lr=0.1, clip=clip)
    whole, pieces = body(inner, None), body(inner, micro)
    work = Work(steps=3, batch=7, tokens0=0, tokens_per_step=112)
    near(pieces.compute(work), whole.compute(work))
    assert pieces.cursor == whole.cursor == 21 and pieces.steps == whole.steps == 3, "one optimizer step for all pieces"


@pytest.mark.parametrize("micro", [2, 3])
def test_so_is_a_gradient(micro: int) -> None:
    work = Work(1, 8, 0, 128, kind="grad")
    near(body(AdamW(lr=1e-3), micro).compute(work), body(AdamW(lr=1e-3), None).compute(work))


@pytest.mark.parametrize("micro", [4, 5, 100])
def test_a_batch_that_fits_keeps_its_bits(micro: int) -> None:
    work = Work(2, 4, 0, 64)
    a, b = (copy(body(AdamW(lr=1e-3), m).compute(work).tree) for m in (micro, None))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_no_sequence_at_a_time_is_refused() -> None:
    with pytest.raises(BadInput, match="micro_batch is 0"):
        body(AdamW(lr=1e-3), 0)


def test_a_run_asks_for_it_by_its_key(tmp_path: Path) -> None:
    sets = settings(corpus(tmp_path / "text"), method__name="diloco", fleet__name='"uniform-2"', plan__batch=4, run__rounds=2)
    hashes = {}
    for micro in ("3", "4", ""):
        job = resolve(config_of(sets=[*sets, f"plan.micro_batch={micro}"] if micro else sets))
        assert job.body(0, job.corpus()).micro_batch == (3 if micro == "3" else None)
        folder = simulate(job, tmp_path / f"run{micro}", quiet=True)
        hashes[micro] = json.loads((folder.path / "summary.json").read_text())["params_sha256"]
    assert hashes[""] == hashes["4"] != hashes["3"]
