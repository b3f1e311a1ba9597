"""How long compute takes on the virtual clock: a model of step time, with noise and drift that depend on their key alone.

    seconds(worker, round, steps) = step_s(worker, batch) * D(worker, round) * sum over steps of E(worker, round, step)

E = exp(sigma z - sigma^2 / 2), z standard normal: each step on its own, mean 1. D has the same form with `drift` in place of sigma and a z
that changes slowly: between knots k rounds apart, z = cos(a) z_left + sin(a) z_right, a from 0 to pi / 2, which keeps its variance at 1.
No number depends on the order of calls, on what other workers do, or on how a round is cut into stretches.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gossamer.core.errors import BadInput
from gossamer.core.fleet import Fleet
from gossamer.core.rng import Stream, normal
from gossamer.core.slowdown import Slowdown
from gossamer.worker.effects import SpanKind

_WORKERS = 16
_STEPS = 32
_KNOT_ROUNDS = 8
_KEPT = 1024
"""Blocks that are kept, at least; room for a few rounds of all workers where that is more."""
_ROUNDS = 4


class _Normals:
    """Standard normals for (worker, step) in blocks, and what each block adds up to; the latest blocks are kept."""

    def __init__(self, seed: int, sigma: float, kept: int) -> None:
        self._seed, self._sigma, self._kept = seed, sigma, kept
        self._blocks: dict[tuple[int, int, int], NDArray[np.float64]] = {}

    def _block(self, key: tuple[int, int, int]) -> NDArray[np.float64]:
        """[worker of the group, steps]: the sum of E over the first steps of the block."""
        z = normal(_WORKERS * _STEPS, self._seed, Stream.STEP_NOISE, *key).reshape(_WORKERS, _STEPS)
        sums = np.zeros((_WORKERS, _STEPS + 1))
        np.cumsum(np.exp(self._sigma * z - 0.5 * self._sigma**2), axis=1, out=sums[:, 1:])
        if len(self._blocks) >= self._kept:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[key] = sums
        return sums

    def total(self, worker: int, round: int, lo: int, hi: int) -> float:
        """Sum of E over the steps lo (included) to hi (excluded)."""
        group, row = divmod(worker, _WORKERS)
        if not lo and hi <= _STEPS:  # the usual case
            sums = self._blocks.get((group, round, 0))
            return (self._block((group, round, 0)) if sums is None else sums).item(row, hi)
        total = 0.0
        for block in range(lo // _STEPS, (hi - 1) // _STEPS + 1):
            key, base = (group, round, block), block * _STEPS
            sums = self._blocks.get(key)
            if sums is None:
                sums = self._block(key)
            total += sums.item(row, min(hi - base, _STEPS)) - sums.item(row, max(lo - base, 0))
        return total


class ComputeTime:
    """Step times of a fleet.

    Args:
        sequence: tokens per sequence.
        flops_per_token: forward and backward, about 6 times the parameters.
        noise: sigma of the lognormal noise of each step (0.03: 3 %); 0 switches it off.
        drift: sigma of the slow factor of each worker over rounds (0.05: 5 %); 0 switches it off.
        codec_gbytes_per_s: at what rate encoding, decoding and outer steps pass over their bytes; infinity makes them free.
        slowdown: a worker that slows down in the middle of `rounds` rounds.

    Raises:
        BadInput: a value out of range.

    >>> from gossamer.core.fleet import Gpu, Site
    >>> site = Site("lab", "here", Gpu("card", 100.0, 16.0), mfu=0.5, overhead_s=0.1, up_mbps=100.0, down_mbps=100.0)
    >>> timing = ComputeTime(Fleet("one", (site,), {}), sequence=100, flops_per_token=1e11, noise=0.0, drift=0.0)
    >>> timing.steps_s(0, round=0, first_step=0, steps=10, batch=2), timing.span_s("encode", 8_000_000_000)
    (5.0, 2.0)
    """

    def __init__(
        self,
        fleet: Fleet,
        sequence: int,
        flops_per_token: float,
        noise: float = 0.03,
        drift: float = 0.05,
        seed: int = 0,
        codec_gbytes_per_s: float = 4.0,
        slowdown: Slowdown | None = None,
        rounds: int = 0,
    ) -> None:
        for name, value in (("noise", noise), ("drift", drift)):
            if not 0 <= value < 2:
                raise BadInput(f"{name} is {value}: expected a sigma from 0 to below 2 (0.03 for 3 %)")
        for name, number in (("flops_per_token", flops_per_token), ("codec_gbytes_per_s", codec_gbytes_per_s), ("sequence", sequence)):
            if not number > 0:
                raise BadInput(f"{name} is {number}: expected a number above 0")
        self._fleet, self._sequence, self._flops_per_token = fleet, sequence, flops_per_token
        self._kept = max(_KEPT, _ROUNDS * -(-fleet.n // _WORKERS))
        self._noise = _Normals(seed, noise, self._kept) if noise else None
        self._drift, self._seed = drift, seed
        self._bases: dict[tuple[int, int], float] = {}
        self._knots: dict[tuple[int, int], list[float]] = {}
        self._drifts: dict[tuple[int, int], list[float]] = {}
        self._s_per_byte = 1e-9 / codec_gbytes_per_s
        self._slowdown, self._rounds = slowdown, rounds

    def steps_s(self, worker: int, round: int, first_step: int, steps: int, batch: int) -> float:
        """Seconds that `worker` needs for steps first_step to first_step + steps - 1 of `round`, `batch` sequences each."""
        base_s = self._bases.get((worker, batch))
        if base_s is None:
            base_s = self._fleet.step_s(worker, batch, self._sequence, self._flops_per_token)
            self._bases[worker, batch] = base_s
        count = float(steps) if self._noise is None else self._noise.total(worker, round, first_step, first_step + steps)
        seconds = base_s * (self.drift(worker, round) if self._drift else 1.0) * count
        return seconds if self._slowdown is None else seconds * self._slowdown.of(worker, round, self._rounds)

    def drift(self, worker: int, round: int) -> float:
        """The slow factor D of `worker` in `round`: mean 1 over workers."""
        if not self._drift:
            return 1.0
        group, row = divmod(worker, _WORKERS)
        found = self._drifts.get((group, round))
        if found is None:
            knot, offset = divmod(round, _KNOT_ROUNDS)
            angle = 0.5 * math.pi * offset / _KNOT_ROUNDS
            c, s, sigma = math.cos(angle), math.sin(angle), self._drift
            ends = zip(self._knot(group, knot), self._knot(group, knot + 1), strict=True)
            found = [math.exp(sigma * (c * left + s * right) - 0.5 * sigma**2) for left, right in ends]
            if len(self._drifts) >= self._kept:
                del self._drifts[next(iter(self._drifts))]
            self._drifts[group, round] = found
        return found[row]

    def _knot(self, group: int, knot: int) -> list[float]:
        """z of a group of workers."""
        found = self._knots.get((group, knot))
        if found is None:
            if len(self._knots) >= self._kept:
                del self._knots[next(iter(self._knots))]
            found = self._knots[group, knot] = normal(_WORKERS, self._seed, Stream.DRIFT, group, knot).tolist()
        return found

    def span_s(self, kind: SpanKind, nbytes: int) -> float:
        """Seconds charged for passing over `nbytes` while encoding, decoding or in an outer step: all at the same rate, whatever `kind`."""
        return nbytes * self._s_per_byte
