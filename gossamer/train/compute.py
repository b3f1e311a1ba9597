"""The body of a worker: a model, its inner optimizer and its data, taking the inner steps that a program asks for.

body = TrainBody(model, AdamW(lr=3e-3), Cosine(), total_tokens=1e8, batches=Sampler(corpus.train, 128, seed=0, worker=3))
done = body.compute(Work(steps=30, batch=8, tokens0=0, tokens_per_step=8192))
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.inner import Inner, clip_, set_lr
from gossamer.core.rng import Stream, words
from gossamer.core.schedule import Schedule
from gossamer.core.tree import Tree
from gossamer.train.data import Batches, Remembering
from gossamer.train.model import by_row, longest_sequence, parameters_of
from gossamer.train.shard import Ranks, local_parameters, shard, share
from gossamer.worker.effects import Done, Work

Precision: TypeAlias = Literal["fp32", "bf16"]
_RNG, _CUDA_RNG, _DATA = "rng", "rng_cuda", "data"


class Taken(NamedTuple):
    """How far a stretch of inner steps has come."""

    steps: int = 0
    tokens: int = 0
    loss_sum: Tensor | float = 0.0
    """Sum over the tokens of the loss in nats, float64."""


_NONE = Taken()


class TrainBody:
    """Implements `gossamer.worker.effects.Body`.

    The trees that it gives are live views, valid until the next `compute` or `load`.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        schedule: Schedule,
        total_tokens: float,
        batches: Batches,
        *,
        seed: int = 0,
        worker: int = 0,
        device: str | torch.device = "cpu",
        precision: Precision = "fp32",
        pace_s: float | None = None,
        slow: tuple[float, float] = (math.inf, 1.0),
        micro_batch: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """
        Args:
            model: moved to `device`; called as model(input_ids=...).logits.
            total_tokens: planned global tokens of the run (the schedule's whole).
            seed: with `worker`, the key of the random numbers that dropout draws. The caller's random state is never touched.
            precision: "bf16" runs forward and backward under autocast; parameters and optimizer state keep their dtype.
            pace_s: seconds that an inner step shall take at least: a faster one sleeps, and that counts as compute.
            slow: (planned global tokens, factor): work that begins there or later is paced at factor * pace_s.
            micro_batch: sequences of one forward and backward pass. A larger batch is cut, and the gradients of the pieces, weighted by
                their tokens, add up to that of the whole, to rounding, before it is clipped and used. None: never cut.
            ranks: where the worker has several, this one's place among them: it holds a shard of the model, and its trees are of that.

        Raises:
            BadInput: a device or precision that is not there, a sequence longer than the model's positions, a bad pace or micro-batch.
        """
        self.device = device_named(device)
        check_precision(precision, self.device)
        if pace_s is not None and not 0 < pace_s < float("inf"):
            raise BadInput(f"pace_s is {pace_s}; expected a positive number of seconds per inner step, or none")
        if micro_batch is not None and micro_batch < 1:
            raise BadInput(f"micro_batch is {micro_batch}; expected 1 sequence or more, or none")
        longest = longest_sequence(model)
        if longest is not None and batches.sequence > longest:
            raise BadInput(
                f"sequences of {batches.sequence} tokens exceed the model's {longest} positions: shorten them or enlarge the model"
            )
        self.ranks = ranks
        tables = by_row(model)
        self.model = shard(model, ranks) if ranks else model.to(self.device)
        self.inner, self.schedule, self.total_tokens = inner, schedule, total_tokens
        self.batches, self.precision, self.pace_s, self.slow, self.micro_batch = batches, precision, pace_s, slow, micro_batch
        self._owners: Mapping[str, Any] = parameters_of(self.model)
        self._params = local_parameters(self.model) if ranks else parameters_of(self.model)
        for p in self._params.values():
            if not p.is_contiguous():
                p.data = p.data.contiguous()
        self._live: Tree = {name: p.detach() for name, p in self._params.items()}
        self._optimizer = inner.build(self._params, tables)
        self.cursor = 0
        """Sequences consumed since the start of the run."""
        self.steps = 0
        """Optimizer steps taken."""
        self.between_steps: Callable[[], None] = lambda: None
        """Called before each inner step, gradient or step on one. What it raises ends `compute` there; `taken` tells after how many."""
        self.taken = _NONE
        """How far the last stretch of inner steps has come."""
        own = (worker, ranks.rank) if ranks and ranks.rank else (worker,)
        key = int(words(1, seed, Stream.INIT, 1, *own)[0] >> 1)
        self._rng = torch.Generator().manual_seed(key).get_state()
        self._cuda_rng = torch.Generator(self.device).manual_seed(key).get_state() if self.device.type == "cuda" else None

    def compute(self, work: Work, taken: Taken = _NONE) -> Done:
        """Takes the steps of `work`. `steps` and `apply` give the parameters, `grad` the mean gradient of one batch, not clipped.

        Args:
            taken: of `steps`, what has been done of them before.
        """
        self.model.train()
        with self._own_randomness():
            if work.kind == "apply":
                return self._apply(work)
            begin_s = time.monotonic()
            done = self._grad(work) if work.kind == "grad" else self._steps(work, taken)
        return done if self.ranks is None else self._agreed(done, time.monotonic() - begin_s, self.ranks)

    @property
    def home(self) -> torch.device:
        """Of the trees; what the program makes of them is there too."""
        return self.device

    @property
    def tree(self) -> Tree:
        """Live views of the parameters."""
        return dict(self._live)

    def _agreed(self, done: Done, seconds: float, ranks: Ranks) -> Done:
        """What all ranks say of the stretch: the loss of all, and the mean of their seconds."""
        both = ranks.sum(torch.tensor([done.loss_sum, seconds], dtype=torch.float64)).tolist()
        return done._replace(loss_sum=both[0], seconds=both[1] / ranks.size)

    def load(self, tree: Tree, reset_inner: bool = False) -> None:
        """Sets the parameters named in `tree`, cast to their dtype.

        Raises:
            RunFailed: a name or a shape that the model does not have.
        """
        for name, value in tree.items():
            live = self._live.get(name)
            if live is None or live.shape != value.shape:
                has = "no such parameter" if live is None else f"shape {tuple(live.shape)}"
                raise RunFailed(f"a tree with {name!r} of shape {tuple(value.shape)} came for a model with {has}: the models differ")
            self._set(name, value)
        if reset_inner:
            self._optimizer.state.clear()

    def _set(self, name: str, value: Tensor) -> None:
        self._live[name].copy_(value)

    def state(self) -> dict[str, Any]:
        """Copies: "<optimizer state>/<parameter>", "buffer/<name>" (persistent buffers), random states, cursor and
        steps, and where the data are, where that is more than the cursor."""
        out: dict[str, Any] = {"cursor": self.cursor, "steps": self.steps, _RNG: self._rng.clone()}
        if self._cuda_rng is not None:
            out[_CUDA_RNG] = self._cuda_rng.clone()
        for name, p in self._params.items():
            for key, value in self._optimizer.state.get(p, {}).items():
                if value is not None:
                    out[f"{key}/{name}"] = value.clone() if isinstance(value, Tensor) else value
        if isinstance(self.batches, Remembering):
            out[_DATA] = self.batches.state()
        return out | {f"buffer/{name}": b.clone() for name, b in self._buffers().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave; what it does not name (moments before the first step) is forgotten.

        Raises:
            RunFailed: the state of another model.
        """
        self._optimizer.state.clear()
        buffers = self._buffers()
        for key, value in state.items():
            slot, _, name = key.partition("/")
            if not name:
                continue
            here = buffers.get(name) if slot == "buffer" else self._params.get(name)
            if here is not None and isinstance(value, Tensor) and value.ndim and value.shape != here.shape:  # torch may not look
                raise RunFailed(
                    f"the saved state has {key!r} of shape {tuple(value.shape)}, where this model has {tuple(here.shape)}: it is another "
                    "model's; resume with the configuration of the run"
                )
            if slot == "buffer" and name in buffers:
                buffers[name].copy_(value)
            elif name in self._params:
                self._optimizer.state[self._params[name]][slot] = self._placed(slot, value, self._params[name])
            else:
                raise RunFailed(f"the saved state names {name!r}, which this model does not have: resume with the configuration of the run")
        self.cursor, self.steps = int(state["cursor"]), int(state["steps"])
        if _RNG in state:
            self._rng = state[_RNG].clone()
        if isinstance(self.batches, Remembering) and _DATA in state:
            self.batches.load_state(state[_DATA])
        if self._cuda_rng is not None and _CUDA_RNG in state:
            self._cuda_rng = state[_CUDA_RNG].clone()

    def _steps(self, work: Work, taken: Taken) -> Done:
        start = time.monotonic()
        first, tokens = taken.steps, taken.tokens
        total = torch.zeros((), dtype=torch.float64, device=self.device) + taken.loss_sum
        self.taken = taken
        for h in range(first, work.steps):
            self.between_steps()
            self.taken = _NONE  # within a step, what there is cannot be gone on from
            loss, n = self._backward(work.batch)
            total = total + loss.double() * n
            tokens += n
            self._step(work.tokens0 + h * work.tokens_per_step)
            self.taken = Taken(h + 1, tokens, total)
            self._sleep_until(start, h + 1 - first, work.tokens0)
        return Done(dict(self._live), tokens, float(total))

    def _grad(self, work: Work) -> Done:
        start = time.monotonic()
        self.between_steps()
        loss, n = self._backward(work.batch)
        # A parameter that the loss does not reach has gradient zero, not none: every worker sends every tensor.
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._params.items()}
        done = Done(grads, n, float(loss.double() * n))
        self._sleep_until(start, 1, work.tokens0)
        return done

    def _apply(self, work: Work) -> Done:
        assert work.tree is not None
        self.between_steps()
        for name, p in self._params.items():
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(work.tree[name])  # a copy: clipping must not change what was agreed
        self._step(work.tokens0)
        return Done(dict(self._live), 0, 0.0)

    def _backward(self, count: int) -> tuple[Tensor, int]:
        """Zeroes the gradients and forms those of the mean loss of the next `count` sequences. Returns (mean loss in nats, tokens); of
        several ranks each its share of that mean, and the tokens of all."""
        batch = self.batches.batch(self.cursor, count)
        self.cursor += count
        for p in self._owners.values():
            p.grad = None
        mean = torch.zeros((), device=self.device)
        size = self.micro_batch or max(1, count)
        pieces = share(batch, size, self.ranks) if self.ranks else [(piece, len(piece) / count) for piece in batch.split(size)]
        for piece, part in pieces:
            loss = mean_loss(self.model, to_device(piece, self.device), self.precision)
            if part != 1.0:
                loss = loss * part
            cast(Any, loss).backward()
            mean = mean + loss.detach()
        if self.ranks:
            for name, p in self._owners.items():
                self._params[name].grad = None if p.grad is None else p.grad.to_local()
        return mean, count * (batch.shape[1] - 1)

    def _step(self, tokens: float) -> None:
        set_lr(self._optimizer, self.schedule.factor(tokens, self.total_tokens))
        if self.inner.clip is not None:
            total = self.ranks.sum if self.ranks else None
            clip_([p.grad for p in self._params.values() if p.grad is not None], self.inner.clip, total)
        self._optimizer.step()
        self.steps += 1

    def _sleep_until(self, start: float, steps: int, tokens: float) -> None:
        if self.pace_s is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pace_s = self.pace_s * (self.slow[1] if tokens >= self.slow[0] else 1.0)
        time.sleep(max(0.0, start + steps * pace_s - time.monotonic()))

    def _buffers(self) -> dict[str, Tensor]:
        kept = self.model.state_dict(keep_vars=True).keys()
        return {name: b for name, b in self.model.named_buffers() if name in kept}

    def _placed(self, slot: str, value: Any, p: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        # torch keeps AdamW's step count on the CPU unless the optimizer is fused.
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        return value.clone() if slot == "step" and not fused else value.to(p.device, copy=True)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Dropout draws from this worker's own sequence, so that workers in one process do not disturb each other or the caller."""
        cuda = self._cuda_rng is not None
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            torch.set_rng_state(self._rng)
            if self._cuda_rng is not None:
                torch.cuda.set_rng_state(self._cuda_rng, self.device)
            try:
                yield
            finally:
                self._rng = torch.get_rng_state()
                if cuda:
                    self._cuda_rng = torch.cuda.get_rng_state(self.device)


def mean_loss(model: nn.Module, batch: Tensor, precision: Precision = "fp32", reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats of the next token. `batch`: int64 [B, L + 1] on the model's device."""
    inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].reshape(-1)
    if precision == "bf16":
        with torch.autocast(batch.device.type, torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
    else:
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets, reduction=reduction)


def to_device(batch: Tensor, device: torch.device) -> Tensor:
    """A host batch on `device`, without waiting for the copy."""
    if device.type == "cuda":
        return batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device)


def device_named(device: str | torch.device) -> torch.device:
    """The torch device of that name; "auto" takes an accelerator where there is one.

    Raises:
        BadInput: not a device, or not on this machine.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"device {str(device)!r} is not one that torch knows; expected 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise BadInput(f"device {str(device)!r} is not on this machine, which has {count} CUDA devices: use 'cpu' or 'auto'")
        return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found


def check_precision(precision: str, device: torch.device) -> None:
    """Refuses what `device` cannot do.

    Raises:
        BadInput: an unknown precision, or bf16 on a device without it.
    """
    if precision not in ("fp32", "bf16"):
        raise BadInput(f"precision is {precision!r}; expected 'fp32' or 'bf16'")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise BadInput(f"{torch.cuda.get_device_name(device)} has no bfloat16: use precision 'fp32'")
