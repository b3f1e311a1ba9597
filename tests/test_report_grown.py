"""What the page tells beyond a run's own numbers: who waited for whom, what links gave, what was planned; and a run that goes on."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report_folders import make_plan, make_run, read_lines, write_lines

from gossamer.core.errors import BadInput
from gossamer.report import live
from gossamer.report.dark import on_dark, themed
from gossamer.report.links import links, links_of
from gossamer.report.read import Run
from gossamer.report.reality import lines, table
from gossamer.report.rounds import MOST_COLUMNS, cells_of, columns, time_by_round
from gossamer.report.spent import drawn, timeline
from gossamer.report.style import PALETTE, channels, luminance, on
from gossamer.report.timeline import fitting, zoomable
from gossamer.report.waits import matrix, waits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run.load(make_plan(make_run(tmp_path_factory.mktemp("grown") / "a", rounds=6), rounds=6))


def test_all_idle_time_is_put_down_to_somebody(run: Run) -> None:
    found = waits(run)
    assert set(found) == {(i, (i + 1) % 4) for i in range(4)}
    idle_s = sum(r.seconds["straggler_idle"] + r.seconds["network_idle"] for r in run.rounds)
    assert math.isclose(sum(a + b for a, b, _ in found.values()), idle_s)
    nobody = replace(run, rounds=tuple(replace(r, waited_for=None) for r in run.rounds))
    assert matrix(nobody) is None
    chart = matrix(run)
    assert chart is not None
    assert chart.svg.count('class="num heat"') == 4


def test_links_give_bytes_over_seconds_and_are_held_against_the_narrowest_part(run: Run) -> None:
    found = links_of(run)
    assert set(found) == {(i, j) for i in range(4) for j in range(4) if i != j}
    one = [r.links[0] for r in run.rounds if r.worker == 1]
    assert math.isclose(found[0, 1].mbps, 8e-6 * sum(b for b, _ in one) / sum(s for _, s in one))
    assert (found[0, 1].nominal_mbps, found[1, 0].nominal_mbps) == (5.0, 8.0)
    charged = links_of(replace(run, summary={**run.summary, "bytes_charge": 10.0}))
    assert math.isclose(charged[0, 1].mbps, 10 * found[0, 1].mbps)
    unknown = links(replace(run, planned=None))
    assert unknown is not None and "nominal" not in unknown.caption.lower()
    assert links(replace(run, rounds=tuple(replace(r, links={}) for r in run.rounds))) is None


def test_the_plan_is_held_against_what_came_of_it(run: Run) -> None:
    rounds = tuple(replace(r, steps=30 if r.worker == 0 else 20, tokens=(30 if r.worker == 0 else 20) * 4 * 128) for r in run.rounds)
    first, second, *_ = lines(replace(run, rounds=rounds))
    assert (first.steps.planned, first.steps.measured, second.steps.measured) == (30, 30, 20)
    assert (first.batch.planned, first.batch.measured) == (8, 4)
    assert first.round_s.measured == pytest.approx(sum(r.wall_s for r in run.rounds if r.worker == 0) / 6)
    assert first.idle_s.planned == 3.0
    chart = table(run)
    assert chart is not None and "was to take 30.00 s" in chart.alt
    assert table(replace(run, planned=None)) is None


def test_a_damaged_plan_is_named(tmp_path: Path) -> None:
    folder = make_plan(make_run(tmp_path / "a", rounds=1))
    told = json.loads((folder / "plan.json").read_text())
    for key, value in (("steps", [1]), ("workers", None), ("lines", {"sites": ["a"]}), ("round", [])):
        (folder / "plan.json").write_text(json.dumps(told | {key: value}))
        with pytest.raises(BadInput, match=r"plan.json.*remove it"):
            Run.load(folder)


def test_rounds_are_put_together_as_means(run: Run) -> None:
    cells = cells_of(run, columns([0, 1, 2, 3, 4, 5], 2))
    mine = [r.seconds["compute"] for r in run.rounds if r.worker == 2]
    assert cells[2, 0]["compute"] == pytest.approx(sum(mine[:3]) / 3)
    assert cells[2, 1]["compute"] == pytest.approx(sum(mine[3:]) / 3)
    many = replace(run, rounds=tuple(replace(r, round=r.round * 1000) for r in run.rounds))
    chart = time_by_round(many)
    assert chart is not None and "put together" in chart.caption
    assert max(map(len, re.findall(r'd="((?:M[^M]*)+)" fill', chart.svg))) < 200 * MOST_COLUMNS


def test_a_timeline_has_all_spans_or_those_of_the_first_rounds(run: Run) -> None:
    chart = zoomable(run)
    assert chart is not None
    data = json.loads(chart.data)
    assert sum(len(row) for row in data["rows"]) == 4 * len([s for s in run.spans if s.end_s > s.start_s])
    index = {name: k for k, (name, *_) in enumerate(data["kinds"])}
    for worker, row in enumerate(data["rows"]):
        end, number = 0, 0
        for k, s in enumerate(sorted((s for s in run.spans if s.worker == worker and s.end_s > s.start_s), key=lambda s: s.start_s)):
            kind, gap, length, more = row[4 * k : 4 * k + 4]
            number += more
            assert (kind, number) == (index[s.kind], s.round)
            assert data["begin_s"] + (end + gap) * data["unit_s"] == pytest.approx(s.start_s, abs=2 * data["unit_s"])
            end += gap + length
            assert data["begin_s"] + end * data["unit_s"] == pytest.approx(s.end_s, abs=2 * data["unit_s"])
    spans = [s for s in run.spans if s.end_s > s.start_s]
    of_two = sum(s.round < 2 for s in spans)
    assert [fitting(spans, most) for most in (1, of_two - 1, of_two, len(spans))] == [0, 0, 1, 5]
    assert json.loads((zoomable(run, of_two) or chart).data)["note"].startswith("Rounds up to 1 of 5")


def test_what_comes_after_the_last_round_is_of_the_last_round(run: Run) -> None:
    """A run of six rounds has no seventh, though its last exchanges may land after its end."""
    six = replace(run, spans=tuple(replace(s, round=s.round + 2) for s in run.spans))
    assert max(s.round for s in six.spans) == 7
    for told in (six, replace(six, planned=None, summary={**run.summary, "rounds": 6})):
        chart = zoomable(told)
        assert chart is not None and [number for number, _ in json.loads(chart.data)["rounds"]] == [2, 3, 4, 5, 6]
        assert json.loads((zoomable(told, 1) or chart).data)["note"].startswith("Rounds up to 2 of 6")
    one = timeline(replace(run, planned=None, summary={**run.summary, "rounds": 1}))
    assert one is not None and one.caption.startswith("Rounds 0 to 1,")
    goes_on = replace(six, planned=None, finished=False)  # how many there will be is not known
    assert max(s.round for s in drawn(goes_on)) == 7


def test_colours_are_readable_on_a_dark_page() -> None:
    assert themed('<i style="background:#d55e00"></i>') == '<i style="background:var(--cd55e00,#d55e00)"></i>'
    assert themed('<use xlink:href="#abcdef"/>') == '<use xlink:href="#abcdef"/>'
    assert on_dark("#000000") > "#707070"
    for fill in PALETTE:  # and what is written on a coloured shape, on a light page and on a dark one
        for turned in (str, on_dark):
            low, high = sorted(luminance(channels(turned(color))) for color in (fill, on(fill)))
            assert (high + 0.05) / (low + 0.05) > 3.4, fill


def unfinished(folder: Path, split: bool) -> Path:
    """The run as it is while it goes on: without a summary; of a real run the records are its workers', beside those of when it was last
    stopped."""
    (folder / "summary.json").unlink()
    for name in ("metrics.jsonl", "trace.jsonl") if split else ():
        records = read_lines(folder / name)
        write_lines(folder / name, [r for r in records if r["round"] < 2])
        for i in {r["worker"] for r in records} - {"fleet"}:
            own = folder / "workers" / str(i)
            own.mkdir(parents=True, exist_ok=True)
            write_lines(own / name, [r for r in records if r["worker"] == i])
    (folder / "facts.json").write_text(json.dumps({"world": "net" if split else "sim", "parameters": 1_310_720}))
    return folder


@pytest.mark.parametrize("split", [False, True])
def test_a_run_that_goes_on_is_read_as_far_as_it_is(tmp_path: Path, split: bool) -> None:
    whole = Run.load(make_plan(make_run(tmp_path / "a", rounds=6), rounds=9))
    folder = unfinished(whole.folder, split)
    metrics = folder / ("workers/0/metrics.jsonl" if split else "metrics.jsonl")
    before = live.version(folder)
    with metrics.open("a") as file:
        file.write('{"kind":"round","round":6,"wor')
    found = live.load(folder)
    assert live.version(folder) != before
    assert not found.finished
    assert {(r.round, r.worker) for r in found.rounds} == {(r.round, r.worker) for r in whole.rounds}
    for key in ("workers", "tokens", "bytes_sent", "wall_s"):
        assert found.summary[key] == pytest.approx(whole.summary[key]), key
    for key in ("utilisation", "network_idle"):
        assert found.summary[key]["workers"] == pytest.approx(whole.summary[key]["workers"], abs=1e-9)
    if not split:
        assert found.number("final_loss") == whole.number("final_loss")
    os.truncate(metrics, metrics.stat().st_size - 3)
    assert live.load(folder).rounds == found.rounds


def test_a_run_that_goes_on_with_other_workers_is_theirs(tmp_path: Path) -> None:
    """Its plan is of four; what those who left had written is still there."""
    folder = unfinished(make_plan(make_run(tmp_path / "a", rounds=3)), split=True)
    own = folder / "workers" / "5"
    own.mkdir()
    write_lines(own / "metrics.jsonl", [r | {"worker": 5} for r in read_lines(folder / "workers" / "0" / "metrics.jsonl")])
    for n, seen in ((6, {0, 1, 2, 3, 5}), (2, {0, 1})):
        (folder / "facts.json").write_text(json.dumps({"world": "net", "steps": [1] * n}))
        found = live.load(folder)
        assert found.workers == n == len(found.bytes_sent) and {r.worker for r in found.rounds} == seen


def test_a_run_that_has_just_begun_is_none_the_less_one(tmp_path: Path) -> None:
    folder = unfinished(make_plan(make_run(tmp_path / "a", rounds=1)), split=False)
    for name in ("metrics.jsonl", "trace.jsonl"):
        (folder / name).unlink()
    found = live.load(folder)
    assert (found.summary["rounds"], found.number("final_loss"), found.workers) == (0, None, 4)
    with pytest.raises(BadInput, match=r"has no config.toml"):
        live.load(tmp_path)
