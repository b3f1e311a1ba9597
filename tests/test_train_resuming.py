"""Inner steps that were broken off are gone on with, and give the bits of steps that were not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gossamer.core.errors import RunFailed
from gossamer.core.inner import AdamW, Lion
from gossamer.core.schedule import Cosine
from gossamer.train.compute import TrainBody
from gossamer.train.data import Sampler
from gossamer.train.model import build
from gossamer.train.resuming import Resuming
from gossamer.worker.effects import Work

DROPOUT = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
TOKENS = np.random.Generator(np.random.Philox(5)).integers(0, 60, 4000).astype(np.uint16)
STEPS = 6
WORK = Work(STEPS, 3, 120.0, 7.0)


def body(inner) -> TrainBody:
    batches = Sampler(TOKENS, 16, seed=7, worker=0)
    return TrainBody(build(DROPOUT, 64, 0), inner, Cosine(), 1000, batches, seed=7)


class Counted:
    """Fails in front of one step, and counts those that were taken."""

    def __init__(self, of: TrainBody, fail_at: int | None) -> None:
        self.of, self.fail_at, self.begun = of, fail_at, 0
        of.between_steps = self

    def __call__(self) -> None:
        if self.fail_at is not None and self.begun == self.fail_at:
            self.fail_at = None
            raise RunFailed("lost")
        self.begun += 1


def everything(of: TrainBody, done) -> tuple:
    held = {**{k: v.clone() for k, v in of.tree.items()}, **of.state()}
    return done.tokens, done.loss_sum, {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in held.items()}


def boundary(inner) -> tuple[TrainBody, dict, dict]:
    """A body after a round, with what its boundary holds."""
    b = body(inner)
    b.compute(Work(2, 3, 0.0, 7.0))
    return b, {k: v.clone() for k, v in b.tree.items()}, b.state()


def again(b: TrainBody, resuming: Resuming, start: dict, state: dict) -> None:
    """As a site begins a round again."""
    resuming.load_state(state)
    resuming.begin(start)
    resuming.load(start)


@pytest.mark.parametrize("inner", [AdamW(lr=1e-2), Lion(lr=1e-3)], ids=["adamw", "lion"])
@pytest.mark.parametrize("at", range(STEPS + 1))
def test_no_step_is_taken_twice_and_the_bits_are_the_same(inner, at):
    plain, _, _ = boundary(inner)
    expected = everything(plain, plain.compute(WORK))
    b, start, state = boundary(inner)
    resuming = Resuming(b)
    resuming.boundary()
    count = Counted(b, at if at < STEPS else None)
    if at < STEPS:
        with pytest.raises(RunFailed, match="lost"):
            resuming.compute(WORK)
    else:  # all done; the exchange after it is what failed
        resuming.compute(WORK)
    resuming.break_off()
    again(b, resuming, start, state)
    assert everything(b, resuming.compute(WORK)) == expected
    assert count.begun == STEPS


def test_broken_off_twice_also_before_it_had_begun_anew():
    plain, _, _ = boundary(AdamW(lr=1e-2))
    expected = everything(plain, plain.compute(WORK))
    b, start, state = boundary(AdamW(lr=1e-2))
    resuming = Resuming(b)
    resuming.boundary()
    count = Counted(b, 2)
    with pytest.raises(RunFailed):
        resuming.compute(WORK)
    resuming.break_off()
    again(b, resuming, start, state)
    resuming.break_off()  # a session that never came about
    again(b, resuming, start, state)
    count.fail_at = 4
    with pytest.raises(RunFailed):
        resuming.compute(WORK)
    resuming.break_off()
    again(b, resuming, start, state)
    assert everything(b, resuming.compute(WORK)) == expected
    assert count.begun == STEPS


def other_parameters(start: dict) -> dict:
    return {k: v + 1e-3 for k, v in start.items()}


@pytest.mark.parametrize("what", ["parameters", "plan", "state", "second stretch", "loaded since"])
def test_what_differs_is_done_anew(what):
    """Whoever goes on from other parameters, with another plan or with a donor's state begins at its first step."""
    b, start, state = boundary(AdamW(lr=1e-2))
    resuming = Resuming(b)
    resuming.boundary()
    if what == "second stretch":
        resuming.compute(Work(1, 3, 113.0, 7.0))
    count = Counted(b, 3)
    with pytest.raises(RunFailed):
        resuming.compute(WORK)
    if what == "loaded since":
        resuming.load(other_parameters(start))
    resuming.break_off()
    resuming.load_state(state)
    resuming.begin(None if what == "state" else start)
    resuming.load(other_parameters(start) if what == "parameters" else start)
    work = WORK._replace(tokens_per_step=8.0) if what == "plan" else WORK
    got = everything(b, resuming.compute(work))
    assert count.begun == 3 + STEPS
    plain, _, _ = boundary(AdamW(lr=1e-2))
    if what == "parameters":
        plain.load(other_parameters(start))
    assert got == everything(plain, plain.compute(work))


class Torn:
    """Batches, of which the third fails to come, once."""

    def __init__(self, batches: Sampler) -> None:
        self.batches, self.sequence, self.asked = batches, batches.sequence, 0

    def batch(self, first: int, count: int) -> torch.Tensor:
        self.asked += 1
        if self.asked == 3:
            raise RunFailed("disk")
        return self.batches.batch(first, count)


def test_a_step_that_failed_in_its_middle_is_not_gone_on_from():
    b, start, state = boundary(AdamW(lr=1e-2))
    resuming = Resuming(b)
    resuming.boundary()
    b.batches = Torn(b.batches)
    with pytest.raises(RunFailed, match="disk"):
        resuming.compute(WORK)
    resuming.break_off()
    again(b, resuming, start, state)
    plain, _, _ = boundary(AdamW(lr=1e-2))
    assert everything(b, resuming.compute(WORK)) == everything(plain, plain.compute(WORK))
