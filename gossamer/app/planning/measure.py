"""One worker, measured: seconds and peak memory of an inner step at several batch sizes, by the very steps of a run.

Batches double from one sequence on, until tokens a second stop rising, a step has 65,536 tokens, or the memory would not do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, cast

import torch

from gossamer.app.config import Config
from gossamer.app.job import Job, resolve
from gossamer.app.planning import memory
from gossamer.core.errors import BadInput
from gossamer.train.compute import Precision, TrainBody
from gossamer.train.data import Corpus
from gossamer.worker.effects import Work

MOST_TOKENS = 65_536
"""Of a step, where batches double by themselves."""
GAIN = 0.05
"""Tokens a second rise by less than this share at two doublings in a row: the knee is passed."""
UNEVEN = 0.25
"""Share of the median by which the quartiles of a batch size's step times may lie apart: beyond it something else had the machine."""
WARM_UP = 2
_LEAST_S, _MOST_STEPS = 0.25, 50
"""Steps are timed for so long at least, unless there are so many."""


@dataclass(frozen=True)
class Point:
    """Inner steps of one batch size."""

    batch: int
    tokens: int
    step_s: float
    """Median."""
    memory_gb: float
    """Peak."""
    spread: float = 0.0
    """How far the quartiles of the step times lie apart, as a share of the median."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.step_s


@dataclass(frozen=True)
class Measured:
    """What one worker can do."""

    points: tuple[Point, ...]
    """Batches rising."""
    half_gb: tuple[int, float] | None
    """(tokens, GB) of a step of one shorter sequence, where only one batch fits: a line needs two points."""
    ended: str
    """Why there is no larger batch, in words."""

    @property
    def knee(self) -> int:
        """The smallest batch with at least 1 - GAIN of the best tokens a second."""
        best = max(p.rate for p in self.points)
        return next(p.batch for p in self.points if p.rate >= (1 - GAIN) * best)

    @property
    def disturbed(self) -> tuple[int, ...]:
        """Batches whose time is in doubt: its steps were uneven (UNEVEN), or fewer tokens a second than at the batch before and the one
        after, by more than GAIN of either."""
        rates = [p.rate for p in self.points]
        dips = {k for k in range(1, len(rates) - 1) if rates[k] < (1 - GAIN) * min(rates[k - 1], rates[k + 1])}
        return tuple(p.batch for k, p in enumerate(self.points) if k in dips or p.spread > UNEVEN)

    @property
    def memory_gb(self) -> tuple[tuple[int, float], ...]:
        """Points (tokens of a step, GB), tokens rising."""
        return ((self.half_gb,) if self.half_gb else ()) + tuple((p.tokens, p.memory_gb) for p in self.points)


def measure(
    job: Job,
    worker: int,
    corpus: Corpus,
    *,
    batches: Sequence[int] | None,
    steps: int,
    limit_gb: float,
    say: Callable[[Point], None] = lambda point: None,
) -> Measured:
    """Measures the inner steps of `job` in this process, as worker `worker`.

    Args:
        batches: sequences per step, rising; None: 1, 2, 4, ...
        steps: to time at each batch, at least.
        limit_gb: memory that a step may use. A batch that would exceed it, by the line through what was measured, is not tried.
        say: told of each point.

    Raises:
        BadInput: the first batch does not fit.
    """
    sequence = job.config.plan.sequence
    meter = _Meter(job, worker, _body(job, worker, corpus))
    settled_gb = meter.used_gb()
    if settled_gb >= limit_gb:
        raise BadInput(
            f"the limit of memory is {limit_gb:g} GB, and {settled_gb:.3g} GB are taken before the first step: "
            "raise --memory-limit-gb, or choose a smaller model"
        )
    points: list[Point] = []
    ended = ""
    for batch in batches or _doubling(points, sequence):
        expected_gb = _expected_gb(points, settled_gb, batch * sequence)
        if expected_gb > limit_gb:
            ended = f"a batch of {batch} would need {expected_gb:.3g} GB of {limit_gb:.3g}"
            break
        taken = meter.measure(batch, sequence, steps)
        if taken is None or taken[1] > limit_gb:
            ended = f"a batch of {batch} " + ("ran out of memory" if taken is None else f"needs {taken[1]:.3g} GB of {limit_gb:.3g}")
            if not points:
                raise BadInput(f"{ended}: raise --memory-limit-gb where there is more, lower plan.sequence, or choose a smaller model")
            break
        if not points:
            settled_gb = meter.used_gb()
        points.append(Point(batch, batch * sequence, *taken, spread=meter.spread))
        say(points[-1])
    if not ended:
        passed = "tokens a second stopped rising" if _knee_passed(points) else f"a step has {MOST_TOKENS:,} tokens at most"
        ended = "no larger one was asked for" if batches else passed
    if _still_rising(points):
        ended += " (tokens a second still rose)"
    return Measured(tuple(points), meter.half(points[0]) if len(points) == 1 else None, ended)


def _body(job: Job, worker: int, corpus: Corpus) -> TrainBody:
    """A worker's body that cuts no batch into pieces: what a whole one takes is to be known. The job's fleet may have fewer workers."""
    body = job.body(worker % job.n, corpus)
    body.micro_batch = None
    return body


def _doubling(points: Sequence[Point], sequence: int) -> Iterator[int]:
    """1, 2, 4, ...; `points` grows while this goes on. Two batches are tried however long a sequence is."""
    batch = 1
    while batch <= 2 or (batch * sequence <= MOST_TOKENS and not _knee_passed(points)):
        yield batch
        batch *= 2


def _knee_passed(points: Sequence[Point]) -> bool:
    best = [max(p.rate for p in points[: k + 1]) for k in range(len(points))]
    return len(best) > 2 and best[-2] < (1 + GAIN) * best[-3] and best[-1] < (1 + GAIN) * best[-2]


def _still_rising(points: Sequence[Point]) -> bool:
    """Beyond all before, not beyond a dip alone: where the knee is passed they do not."""
    return len(points) > 1 and points[-1].rate > (1 + GAIN) * max(p.rate for p in points[:-1])


def _expected_gb(points: Sequence[Point], settled_gb: float, tokens: int) -> float:
    """What a step of `tokens` will take: by the line through the last two points; the first is what is used between steps."""
    if not points:
        return settled_gb
    last = points[-1]
    near_t, near_gb = (points[-2].tokens, points[-2].memory_gb) if len(points) > 1 else (0, settled_gb)
    return last.memory_gb + max(0.0, last.memory_gb - near_gb) * (tokens - last.tokens) / (last.tokens - near_t)


class _Meter:
    """Times steps of one worker, and watches their memory."""

    def __init__(self, job: Job, worker: int, body: TrainBody) -> None:
        self.job, self.worker, self.body = job, worker, body
        self.spread = 0.0
        """Of the last measurement: `Point.spread`."""
        self._here = body.device.type == "cuda" or memory.can_reset()

    def used_gb(self) -> float:
        """Between steps; 0 where it is not known."""
        if not self._here:
            return 0.0
        memory.reset_peak(self.body.device)
        return memory.used_gb(self.body.device)

    def measure(self, batch: int, sequence: int, steps: int) -> tuple[float, float] | None:
        """(median seconds of a step, peak GB); None where memory ran out."""
        if sequence != self.body.batches.sequence:
            self.body.batches = replace(cast(Any, self.body.batches), sequence=sequence)  # a sampler, or documents that are packed
        if self._here:
            memory.reset_peak(self.body.device)
        try:
            times_s = self._times_s(batch, steps)
        except RuntimeError as error:  # torch's own OutOfMemoryError is one; on a CPU there is none
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error) and "enough memory" not in str(error):
                raise
            return None
        self.spread = spread_of(times_s)
        if self._here:
            return median(times_s), memory.peak_gb(self.body.device)
        return median(times_s), memory.peak_in_child_gb(_steps_alone, self.job.config, self.worker, batch, sequence)

    def half(self, point: Point) -> tuple[int, float] | None:
        """(tokens, GB) of a step of sequences half as long."""
        length = self.job.config.plan.sequence // 2
        taken = self.measure(point.batch, length, steps=1)
        return None if taken is None else (point.batch * length, taken[1])

    def _times_s(self, batch: int, steps: int) -> list[float]:
        for _ in range(WARM_UP):
            self._step(batch)
        times_s: list[float] = []
        while len(times_s) < steps or (sum(times_s) < _LEAST_S and len(times_s) < _MOST_STEPS):
            times_s.append(self._step(batch))
        return times_s

    def _step(self, batch: int) -> float:
        begin_s = time.monotonic()
        self.body.compute(Work(steps=1, batch=batch, tokens0=0.0, tokens_per_step=0.0))  # it ends when the device has ended
        return time.monotonic() - begin_s


def spread_of(times_s: Sequence[float]) -> float:
    """How far the quartiles lie apart, as a share of the median; 0 of fewer than four times, which say nothing of it.

    >>> spread_of([1.0, 1.0, 1.0, 1.0, 5.0]), spread_of([1.0, 3.0])
    (0.0, 0.0)
    """
    if len(times_s) < 4:
        return 0.0
    low, middle, high = quantiles(times_s, n=4, method="inclusive")
    return (high - low) / middle


def _steps_alone(config: Config, worker: int, batch: int, sequence: int) -> None:
    """Two steps in a process of their own."""
    torch.set_num_threads(config.run.threads_per_worker)
    job = resolve(config)
    corpus = job.corpus()
    body = _body(job, worker, corpus)
    body.batches = corpus.batches(sequence, config.seed, worker % job.n, job.n)
    body.compute(Work(steps=2, batch=batch, tokens0=0.0, tokens_per_step=0.0))


def matmul_tflops(device: torch.device, precision: Precision) -> float:
    """Rate of a square matrix product, 2 m^3 operations, in 1e12 a second: median of five, m = 1024 (8192 on a GPU)."""
    m = 8192 if device.type == "cuda" else 1024
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.full((m, m), 0.5, dtype=dtype, device=device)
    times_s = []
    for _ in range(WARM_UP + 5):
        begin_s = time.monotonic()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.monotonic() - begin_s)
    return 2.0 * m**3 / median(times_s[WARM_UP:]) / 1e12
