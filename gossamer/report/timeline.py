"""The timeline of a run: what the page's script draws, which can be zoomed. Without the script there is the picture of the first rounds."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

from gossamer.report.read import Run
from gossamer.report.records import KINDS, Span
from gossamer.report.spent import timeline
from gossamer.report.style import KIND_COLORS, Chart
from gossamer.report.words import KIND_NAMES, worker_names

MOST_SPANS = 5000
MOST_WORKERS = 64
_STEPS = 1_000_000
"""Moments that are told apart over a run."""


def zoomable(run: Run, most: int = MOST_SPANS) -> Chart | None:
    """The picture of the first rounds, with all spans for the script; None without spans."""
    still = timeline(run)
    if still is None:
        return None
    spans = [s for s in run.spans if s.kind in KIND_COLORS and s.end_s > s.start_s]
    ids = sorted({s.worker for s in spans})[:MOST_WORKERS]
    spans = [s for s in spans if s.worker in ids]
    kept, least_s = longest(spans, most)
    note = f"{len(spans) - len(kept):,} spans shorter than {least_s:.2g} s are left out; gossamer trace has all." if least_s else ""
    return replace(still, data=as_json(run, kept, ids, note))


def longest(spans: list[Span], most: int) -> tuple[list[Span], float]:
    """At most `most` spans, the longest, in their order; and the length below which spans are left out, 0 where none are."""
    if len(spans) <= most:
        return spans, 0.0
    least_s = sorted((s.end_s - s.start_s for s in spans), reverse=True)[most]
    return [s for s in spans if s.end_s - s.start_s > least_s], least_s


def as_json(run: Run, spans: list[Span], ids: list[int], note: str) -> str:
    """Times as whole numbers of `unit_s` seconds; of each worker kind, begin, length, round, one after the other."""
    names = worker_names(run)
    begin_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    unit_s = (end_s - begin_s) / _STEPS
    kinds = [k for k in KINDS if any(s.kind == k for s in spans)]
    index = {kind: k for k, kind in enumerate(kinds)}
    rows: dict[int, list[int]] = defaultdict(list)
    for s in sorted(spans, key=lambda s: s.start_s):
        a, b = round((s.start_s - begin_s) / unit_s), round((s.end_s - begin_s) / unit_s)
        rows[s.worker] += [index[s.kind], a, max(1, b - a), s.round]
    firsts: dict[int, int] = {}
    for s in spans:
        at = round((s.start_s - begin_s) / unit_s)
        firsts[s.round] = min(at, firsts.get(s.round, at))
    told = {
        "names": [names[i] if i < len(names) else f"worker {i}" for i in ids],
        "kinds": [[kind, KIND_NAMES[kind], KIND_COLORS[kind]] for kind in kinds],
        "begin_s": begin_s,
        "unit_s": unit_s,
        "end": _STEPS,
        "rows": [rows[i] for i in ids],
        "rounds": sorted(firsts.items()),
        "note": note,
    }
    return json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")
