"""Exported traces carry the run's spans, second for microsecond."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from report_folders import make_run, read_lines

from gossamer.core.errors import BadInput
from gossamer.report.perfetto import export


def test_durations_equal_the_trace(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=3)
    events = json.loads(export(folder, tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    spans = read_lines(folder / "trace.jsonl")
    assert len(complete) == len(spans)
    for event, span in zip(complete, spans, strict=True):
        assert event["name"].replace(" ", "_").replace("outer_step", "outer") == span["kind"]
        assert event["pid"] == span["worker"]
        assert event["args"] == {"round": span["round"]}
        assert event["ts"] == pytest.approx(span["start_s"] * 1e6)
        assert event["dur"] == pytest.approx((span["end_s"] - span["start_s"]) * 1e6)


def test_every_row_is_named_and_its_spans_do_not_overlap(tmp_path: Path) -> None:
    events = json.loads(export(make_run(tmp_path / "a", rounds=3), tmp_path / "t.json").read_text())["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            rows[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(rows) == threads
    assert processes[0] == "worker 0: H100"
    for spans in rows.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


def test_no_half_file_and_clear_errors(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=1)
    with pytest.raises(BadInput, match="is a folder"):
        export(folder, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="cannot write"):
        export(folder, tmp_path / "file" / "trace.json")
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".part")]
