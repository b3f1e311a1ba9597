"""The timeline of a run: what the page's script draws, which can be zoomed. Without the script there is the picture of the first rounds."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gossamer.report.read import Run
from gossamer.report.records import KINDS, Span
from gossamer.report.spent import drawn, timeline
from gossamer.report.style import KIND_COLORS, Chart
from gossamer.report.words import KIND_NAMES, worker_name, worker_names

MOST_SPANS = 40_000
MOST_WORKERS = 64
_STEPS = 1_000_000
"""Moments that are told apart over a run."""


def zoomable(run: Run, most: int = MOST_SPANS) -> Chart | None:
    """The picture of the first rounds, with all spans for the script; None without spans."""
    still = timeline(run)
    if still is None:
        return None
    spans = drawn(run)
    ids = sorted({s.worker for s in spans})[:MOST_WORKERS]
    spans = [s for s in spans if s.worker in ids]
    last = fitting(spans, most)
    kept = [s for s in spans if s.round <= last]
    rounds = max(s.round for s in spans)
    note = f"Rounds up to {last:,} of {rounds:,}; gossamer trace has all." if last < rounds else ""
    return replace(still, data=as_json(run, kept, ids, note))


def fitting(spans: Sequence[Span], most: int) -> int:
    """The last round up to which there are at most `most` spans; the first round in any case."""
    count, last = 0, min(s.round for s in spans)
    for number, mine in sorted(Counter(s.round for s in spans).items()):
        count += mine
        if count > most:
            break
        last = number
    return last


def as_json(run: Run, spans: list[Span], ids: list[int], note: str) -> str:
    """Times as whole numbers of `unit_s` seconds; of each worker, one after the other: kind, gap after the one
    before, length, rounds after the one before."""
    names = worker_names(run)
    begin_s, end_s = min(s.start_s for s in spans), max(s.end_s for s in spans)
    unit_s = (end_s - begin_s) / _STEPS
    kinds = [k for k in KINDS if any(s.kind == k for s in spans)]
    index = {kind: k for k, kind in enumerate(kinds)}
    rows: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, tuple[int, int]] = {}
    for s in sorted(spans, key=lambda s: s.start_s):
        a, b = round((s.start_s - begin_s) / unit_s), round((s.end_s - begin_s) / unit_s)
        end, number = ends.get(s.worker, (0, 0))
        b = max(a + 1, b)
        rows[s.worker] += [index[s.kind], a - end, b - a, s.round - number]
        ends[s.worker] = b, s.round
    firsts: dict[int, int] = {}
    for s in spans:
        at = round((s.start_s - begin_s) / unit_s)
        firsts[s.round] = min(at, firsts.get(s.round, at))
    told = {
        "names": [worker_name(names, i) for i in ids],
        "kinds": [[kind, KIND_NAMES[kind], KIND_COLORS[kind]] for kind in kinds],
        "begin_s": begin_s,
        "unit_s": unit_s,
        "end": _STEPS,
        "rows": [rows[i] for i in ids],
        "rounds": sorted(firsts.items()),
        "note": note,
    }
    return json.dumps(told, separators=(",", ":")).replace("<", "\\u003c")
