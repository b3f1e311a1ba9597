"""A run's spans as Chrome trace events, which ui.perfetto.dev opens (drop the file on the page)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gossamer.report.read import Run
from gossamer.report.words import KIND_NAMES, method_name, worker_name, worker_names
from gossamer.report.write import write_whole

MAIN, SENDS = 1, 2
"""Thread ids within a worker's process. Sends overlap other work, so they have a row of their own."""


def events(run: Run) -> list[dict[str, Any]]:
    """Metadata and complete events: a process per worker, ts and dur in microseconds from the run's start."""
    names = worker_names(run)
    out: list[dict[str, Any]] = []
    for worker in sorted({s.worker for s in run.spans}):
        name = worker_name(names, worker)
        name = name if name == f"worker {worker}" else f"worker {worker}: {name}"
        out.append({"ph": "M", "name": "process_name", "pid": worker, "tid": MAIN, "args": {"name": name}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": worker, "tid": MAIN, "args": {"sort_index": worker}})
        out.append({"ph": "M", "name": "thread_name", "pid": worker, "tid": MAIN, "args": {"name": "work and waiting"}})
        if any(s.worker == worker and s.kind == "send" for s in run.spans):
            out.append({"ph": "M", "name": "thread_name", "pid": worker, "tid": SENDS, "args": {"name": "send"}})
    for s in run.spans:
        out.append(
            {
                "ph": "X",
                "name": KIND_NAMES.get(s.kind, s.kind),
                "cat": "idle" if s.kind.endswith("_idle") else "work",
                "pid": s.worker,
                "tid": SENDS if s.kind == "send" else MAIN,
                "ts": s.start_s * 1e6,
                "dur": (s.end_s - s.start_s) * 1e6,
                "args": {"round": s.round},
            }
        )
    return out


def export(folder: Path | str, out: Path | str) -> Path:
    """Writes the trace of the run in `folder` to `out` (JSON) and returns its path."""
    run = Run.load(folder)
    text = json.dumps({"traceEvents": events(run), "displayTimeUnit": "ms", "otherData": {"method": method_name(run.summary["method"])}})
    return write_whole(Path(out), text)
