"""What `gossamer bench geomesh` runs: the fleet, the budget, the grid, and one row per method.

Fixed before any run: fleet `azure-4` and the tokens that the clock charges for an inner step, calibrated on the DiLoCo row's idle shares
alone (H100 straggler idle near 20.9 %, mean network idle near 65.8 %, Shin et al. 2026); the grid; the number of trials; the seeds; the
target, which is DiLoCo's own loss after 31 % of its tokens.
"""

from __future__ import annotations

from typing import Any

from gossamer.bench.search import Grid
from gossamer.bench.study import Row

ROUNDS = 45
STEPS = 16
SHARE = 0.31
"""Of DiLoCo's tokens: where the target lies."""
TRIALS = 9
TUNE_SEED = 0
SEEDS = (1, 2, 3)

BASE: dict[str, Any] = {
    "plan": {"name": "uniform", "steps": STEPS, "batch": 8, "sequence": 64},
    "model": {"preset": "micro"},
    "data": {"vocab_size": 512, "limit_mb": 8.0},
    "eval": {"every": 3, "sequences": 512, "batch": 64},
    "fleet": {"name": "azure-4"},
    # The clock: 51,200 tokens of a 148M-parameter model in an inner step. Codecs pass over their bytes at a fifth of the memory rate of the
    # slowest card (864 GB/s).
    "clock": {"charge_as": "llama-150m", "charge_tokens": 51_200, "codec_gbytes_per_s": 170.0},
    "run": {"rounds": ROUNDS, "device": "cpu"},
}

GRID: Grid = {
    "inner.lr": (0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 128e-3),
    "inner.weight_decay": (0.0, 0.03, 0.1, 0.3, 1.0),
    "method.outer_lr": (0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5),
    "method.outer_momentum": (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95),
    "method.local_lr": (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8),
    "method.report_every": (1, 2, 4, 8, 16, 32, 64),
    "plan.steps": (2, 4, 8, 16, 32, 64, 128),
}

_OUTER = {"method.outer_lr": 0.7, "method.outer_momentum": 0.6}
_ADAMW = {"inner.name": "adamw"}
_LION = {"inner.name": "lion"}
_MUON = {"inner.name": "muon"}
_GEOMESH = {"method.name": "geomesh", **_LION, "plan.name": "awb"}
_OVERLAP = {"method.overlap": 0.75, "plan.carry": True}
_EVERY_STEP = {"eval.every": 3 * STEPS}
_SAME_TOKENS = {"run.tokens": ROUNDS * STEPS * 4 * 8 * 64}

DILOCO = Row("diloco", "DiLoCo", {"method.name": "diloco", **_ADAMW}, {"inner.lr": 4e-3, **_OUTER})

MAIN: tuple[Row, ...] = (
    Row("ddp", "DDP", {"method.name": "ddp", **_ADAMW, **_EVERY_STEP}, {"inner.lr": 4e-3, "inner.weight_decay": 0.1}),
    DILOCO,
    Row(
        "diloco_h",
        "DiLoCo at its own best H",
        {"method.name": "diloco", **_ADAMW, **_SAME_TOKENS, "eval.every": 1},
        {"plan.steps": 32, **_OUTER, "inner.lr": 4e-3},
        by_time=True,
    ),
    Row(
        "diloco_int8",
        "DiLoCo, int8, streaming",
        {"method.name": "streaming_diloco", "method.codec": "int8", "method.fragments": 4, "method.overlap": 0.75, **_ADAMW},
        {"inner.lr": 4e-3, **_OUTER},
    ),
    Row("halos", "HALoS", {"method.name": "halos", **_ADAMW}, {"inner.lr": 4e-3, "method.local_lr": 3.2, "method.report_every": 8}),
    Row("awb", "AWB only", {**_GEOMESH, "method.codec": "fp32"}, {"inner.lr": 4e-3, **_OUTER}),
    Row("css", "CSS only", {**_GEOMESH, "plan.name": "uniform"}, {"inner.lr": 4e-3, **_OUTER}),
    Row("geomesh", "GeoMesh", _GEOMESH, {"inner.lr": 4e-3, **_OUTER}),
    Row("overlap", "GeoMesh + overlap", {**_GEOMESH, **_OVERLAP}, {"inner.lr": 4e-3, **_OUTER}),
    Row("muon", "GeoMesh + overlap, Muon inside", {**_GEOMESH, **_OVERLAP, **_MUON}, {"inner.lr": 16e-3, **_OUTER}),
    Row(
        "often",
        "GeoMesh + overlap at its own best H",
        {**_GEOMESH, **_OVERLAP, **_SAME_TOKENS, "eval.every": 2},
        {"plan.steps": 8, "inner.lr": 4e-3, **_OUTER},
    ),
    Row("replan", "GeoMesh + overlap + re-planning", {**_GEOMESH, **_OVERLAP, "method.replan": 0.02}, like="overlap"),
    Row("adamw", "GeoMesh, AdamW inside", {**_GEOMESH, **_ADAMW}, {"inner.lr": 4e-3, **_OUTER}),
    Row("adamw_overlap", "GeoMesh, AdamW inside + overlap", {**_GEOMESH, **_ADAMW, **_OVERLAP}, like="adamw"),
    Row(
        "adamw_replan",
        "GeoMesh, AdamW inside + overlap + re-planning",
        {**_GEOMESH, **_ADAMW, **_OVERLAP, "method.replan": 0.02},
        like="adamw",
    ),
)
"""Those with a start are tuned with at most TRIALS trials on the grid."""

VARIANT_SEEDS = 2
"""Of the rows below: the first so many of SEEDS."""


def _variant(key: str, title: str, like: str, base: dict[str, Any], **options: Any) -> Row:
    """A row that differs from a tuned one in a few options of the method and takes its tuned values."""
    return Row(key, title, {**base, **{f"method.{name}": value for name, value in options.items()}}, like=like)


_PLAIN = {**_GEOMESH, **_ADAMW}
_BOTH = {**_PLAIN, **_OVERLAP}
_EVEN = {**_GEOMESH, "plan.name": "uniform"}
VARIANTS: tuple[Row, ...] = (
    _variant("fp32", "codec fp32", "adamw", _PLAIN, codec="fp32"),
    _variant("fp16", "codec fp16", "adamw", _PLAIN, codec="fp16"),
    _variant("int8", "codec int8", "adamw", _PLAIN, codec="int8"),
    _variant("topk", "codec top-k, 1/64, with feedback", "adamw", _PLAIN, codec="topk", error_feedback="worker"),
    _variant("feedback", "sign + error feedback", "adamw", _PLAIN, error_feedback="worker"),
    _variant("row", "sign, magnitude per row", "adamw", _PLAIN, magnitude="row"),
    _variant("block", "sign, magnitude per block of 256", "adamw", _PLAIN, magnitude="block"),
    _variant("same", "sign, one magnitude a tensor everywhere (published)", "adamw", _PLAIN, embeddings="same"),
    _variant("shard", "route shard", "adamw", _PLAIN, exchange="shard"),
    _variant("shard_feedback", "route shard + feedback on the mean", "adamw", _PLAIN, exchange="shard", error_feedback="mean"),
    _variant("eager", "overlap, eager", "adamw_overlap", _BOTH, eager=True),
    _variant("half", "overlap 0.5", "adamw_overlap", {**_BOTH, "method.overlap": 0.5}),
    _variant("streaming", "overlap, streaming in 4 fragments", "adamw_overlap", _BOTH, fragments=4),
    _variant("work", "overlap, drifts normalised by work", "adamw_overlap", _BOTH, correction="work"),
    _variant("lion", "CSS only without its signs: fp32, Lion, uniform plan", "css", _EVEN, codec="fp32"),
    _variant("css_adamw", "CSS only with AdamW inside", "diloco", {**_EVEN, **_ADAMW}),
)
"""Codecs, magnitudes, routes and cadences: the tuned values of the row that each is like, one option changed. Most are of the row with
AdamW inside, whose losses differ less between seeds than Lion's."""

_HINDERED = {**_BOTH, "clock.slow_worker": 1, "clock.slow_factor": 2.0, "clock.slow_at": 0.33}
SLOWED: tuple[Row, ...] = (
    _variant("slow", "AdamW inside + overlap, a worker half as fast from a third on", "adamw", _HINDERED),
    _variant("slow_replan", "the same, re-planned", "adamw", _HINDERED, replan=0.03),
    _variant("slow_replan_work", "the same, re-planned, outer step corrected", "adamw", _HINDERED, replan=0.03, correction="work"),
)
"""Under a mid-run slow-down of one worker."""

SECOND = ("diloco", "halos", "geomesh", "adamw_overlap")
SECOND_SIZE: dict[str, Any] = {"model.preset": "tiny", "data.vocab_size": 1024}
"""0.56M parameters."""

WIRE_WORKERS = (4, 8, 16, 32)
