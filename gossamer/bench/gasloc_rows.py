"""What `gossamer bench gasloc` runs: the tables and figures of Cagnasso, Belilovsky and Oyallon 2026, small, and what goes past them.

Fixed before any run: the model, the global batch (64 sequences of 32 tokens, whatever the number of workers), 43 outer rounds of 30 inner
steps, or 300 of one step, the grid (the paper's, longer at both ends so that no best value need lie on an edge; inner rates for a model
this small), the number of trials, the seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.bench.search import Grid
from gossamer.bench.study import Row

ROUNDS = 43
STEPS = 30
ONCE_ROUNDS = 300
"""Of the tables with one inner step a round, where a round costs most."""
SEQUENCES = 64
"""Of all workers together in an inner step."""
WORKERS = 8
TRIALS = 8
TUNE_SEED = 0
SEEDS = (1, 2, 3)


def shape(workers: int, steps: int, rounds: int) -> dict[str, Any]:
    """Settings of a run with so many workers, inner steps a round and rounds; the global batch stays."""
    return {
        "fleet.workers": workers,
        "plan.batch": SEQUENCES // workers,
        "plan.steps": steps,
        "run.rounds": rounds,
        "eval.every": max(1, rounds // 14),
    }


BASE: dict[str, Any] = {
    "plan": {"name": "uniform", "steps": STEPS, "batch": SEQUENCES // WORKERS, "sequence": 32},
    "model": {"preset": "nano"},
    "data": {"vocab_size": 512, "limit_mb": 8.0},
    "eval": {"every": 3, "sequences": 512, "batch": 64},
    "fleet": {"name": "uniform", "workers": WORKERS},
    "run": {"rounds": ROUNDS, "device": "cpu"},
}

GRID: Grid = {
    "inner.lr": (1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 128e-3),
    "method.outer_lr": (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4),
    "method.outer_momentum": (0.0, 0.3, 0.5, 0.7, 0.9, 0.95),
}

TOPOLOGIES = ("ring", "complete", "one_peer", "two_peer")
"""Of both tables."""


def _gossip(topology: str, **options: Any) -> dict[str, Any]:
    return {"method.name": "gasloc", "method.topology": topology, "method.force": True} | {f"method.{k}": v for k, v in options.items()}


_OUTER = {"method.outer_lr": 0.8, "method.outer_momentum": 0.7}
_ONCE = shape(WORKERS, 1, ONCE_ROUNDS)

T1A: tuple[Row, ...] = (
    Row("ddp", "DDP", {"method.name": "ddp", **_ONCE}, {"inner.lr": 16e-3}),
    *(
        Row(f"dadam_{name}", f"DAdam {name}", {"method.name": "dadam", "method.topology": name, **_ONCE}, {"inner.lr": 16e-3})
        for name in TOPOLOGIES
    ),
    *(Row(f"gasloc_{name}_h1", f"GASLoC {name}, H = 1", {**_gossip(name), **_ONCE}, {"inner.lr": 16e-3, **_OUTER}) for name in TOPOLOGIES),
)

T1B: tuple[Row, ...] = (
    Row("diloco", "DiLoCo", {"method.name": "diloco"}, {"inner.lr": 16e-3, **_OUTER}),
    *(Row(f"gasloc_{name}", f"GASLoC {name}", _gossip(name), {"inner.lr": 16e-3, **_OUTER}) for name in TOPOLOGIES),
    *(
        Row(f"local_{name}", f"Local-DAdam {name}", {"method.name": "local_dadam", "method.topology": name}, {"inner.lr": 16e-3})
        for name in TOPOLOGIES
    ),
)

HEADLINE = ("diloco", "gasloc_one_peer", "gasloc_two_peer")
WIDE: Mapping[int, Mapping[str, int]] = {
    16: {row.key: 2 if row.key in HEADLINE else 1 for row in T1B},
    32: {"diloco": 1, "gasloc_two_peer": 1},
}
"""By number of workers: seeds of rows of T1B, with what was tuned at 8."""

SECOND_SIZE: dict[str, Any] = {"model.preset": "micro", **shape(16, 1, ONCE_ROUNDS)}
"""0.14M parameters and 16 workers: T1A again, with what was tuned at the first size."""

FORMS: tuple[Row, ...] = (
    Row("two_peer_local", "momentum as printed (local)", _gossip("two_peer", momentum="local"), like="gasloc_two_peer"),
    Row("two_peer_mixed", "momentum on mixed iterates (mixed)", _gossip("two_peer", momentum="mixed"), like="gasloc_two_peer"),
)

F7: tuple[Row, ...] = (
    Row("two_peer_sgd", "two_peer, SGD", _gossip("two_peer", outer="sgd"), {"inner.lr": 16e-3, "method.outer_lr": 0.8}),
    Row("two_peer_heavy_ball", "two_peer, heavy ball", _gossip("two_peer", outer="heavy_ball"), {"inner.lr": 16e-3, **_OUTER}),
    Row("complete_sgd", "complete, SGD", _gossip("complete", outer="sgd"), like="two_peer_sgd"),
    Row("complete_heavy_ball", "complete, heavy ball", _gossip("complete", outer="heavy_ball"), like="two_peer_heavy_ball"),
)
"""Nesterov is T1B's row."""
F7_SEEDS = 2

F4_STEPS = (1, 2, 5, 10, STEPS, 100)
"""Up to 5 with what was tuned at 1, from 10 on with what was tuned at 30."""
F4 = HEADLINE
ONCE: Mapping[str, str] = {"diloco": "gasloc_complete_h1"}
"""The same method with one step a round, where it has another key than `<key>_h1`."""

F8_OUTER_LR = (0.4, 0.6, 0.8, 1.0)
F8_MOMENTUM = (0.5, 0.7, 0.9)
F8 = ("gasloc_two_peer", "gasloc_complete")

FLEETS = {"10": "straggler-8", "20": "straggler-8-200"}
"""One worker's line at so many per cent of 1 Gbit/s, both directions."""


def wide_area(fleet: str) -> dict[str, Any]:
    """The clock of the figure of loss against time: bytes and FLOPs of a 134M-parameter model, 2M tokens in an inner step of 8 workers."""
    return {
        "fleet.name": fleet,
        "clock.charge_as": "llama-134m",
        "clock.charge_tokens": 262_144,
        "clock.codec_gbytes_per_s": 400.0,  # a fifth of the memory rate of the card
        "eval.every": 1,
    }


_AWB = {"plan.name": "awb", "plan.fit": False}
_INT8 = {"method.codec": "mod8"}
F3: tuple[Row, ...] = (
    Row("diloco_wan", "DiLoCo", {"method.name": "diloco", "method.exchange": "ring"}, like="diloco"),
    Row("one_peer_even", "one_peer, equal H", _gossip("one_peer"), like="gasloc_one_peer"),
    Row("one_peer_awb", "one_peer, compensating H", {**_gossip("one_peer"), **_AWB}, like="gasloc_one_peer"),
    Row("two_peer_even", "two_peer, equal H", _gossip("two_peer"), like="gasloc_two_peer"),
    Row("two_peer_awb", "two_peer, compensating H", {**_gossip("two_peer"), **_AWB}, like="gasloc_two_peer"),
    Row("two_peer_late", "two_peer, compensating H, overlapped", {**_gossip("two_peer", overlap=1.0), **_AWB}, like="gasloc_two_peer"),
    Row("two_peer_int8", "two_peer, compensating H, 8-bit", {**_gossip("two_peer", codec="mod8"), **_AWB}, like="gasloc_two_peer"),
    Row(
        "two_peer_int8_late",
        "two_peer, compensating H, 8-bit, half a round late",
        {**_gossip("two_peer", codec="mod8", overlap=0.5), **_AWB},
        like="gasloc_two_peer",
    ),
)


def _ours(key: str, title: str, **options: Any) -> Row:
    return Row(key, title, _gossip("two_peer", **options), like="gasloc_two_peer")


OURS: tuple[Row, ...] = (
    _ours("plain", "two_peer, float32"),
    _ours("mod8", "8-bit", codec="mod8"),
    _ours("mod4", "4-bit", codec="mod4"),
    _ours("mod2", "2-bit", codec="mod2"),
    _ours("mod1", "1-bit", codec="mod1"),
    _ours("signs", "signs of the drift and an exact quarter", codec="signs"),
    _ours("late", "overlapped, a whole round late", overlap=1.0),
    _ours("prefer", "peers drawn by the rate of their link", prefer=1.0),
    _ours("average", "global average every 8 rounds", average_every=8),
)
"""On the fleet with a line of 10 %, every worker with the same H, so that losses differ by the option alone."""
OURS_SEEDS = 2
