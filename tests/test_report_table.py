"""Tables say what the summaries say, in every form."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_folders import make_run

from gossamer.report.read import Run
from gossamer.report.table import COLUMNS, as_html, as_markdown, as_text, comparison, title, verdicts
from gossamer.report.words import comparison_sentence, labels


class Cells(HTMLParser):
    """The texts of the cells of each row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    late = {"time_to_target_s": None, "wall_s": 36_725.0}
    return [
        Run.load(make_run(tmp_path / "a", rounds=6)),
        Run.load(make_run(tmp_path / "b", "diloco", rounds=4, payload=90_000_000, change=late)),
        Run.load(make_run(tmp_path / "c", "odd | <b>name</b>", rounds=2)),
    ]


def seconds(text: str) -> float | None:
    if text == "—":
        return None
    hours, minutes, rest = map(float, text.split(":"))
    return 3600 * hours + 60 * minutes + rest


def check(cells: list[str], summary: dict[str, Any]) -> None:
    """Reads the printed cells back and compares them with the summary, within the printed precision."""
    names = [name for name, _ in COLUMNS]
    got = {n: c.strip() for n, c in zip(names, cells, strict=True)}
    assert got["world"] == summary["world"]
    assert float(got["final perplexity"].replace(",", "")) == pytest.approx(summary["final_perplexity"], abs=0.0051)
    assert float(got["final loss"]) == pytest.approx(summary["final_loss"], abs=0.000051)
    target = summary["time_to_target_s"]
    shown = seconds(got["time to target"])
    assert (shown is None) == (target is None)
    assert target is None or shown == pytest.approx(target, abs=0.51 if target >= 60 else 0.051)
    assert seconds(got["total time"]) == pytest.approx(summary["wall_s"], abs=0.51 if summary["wall_s"] >= 60 else 0.051)
    for name, key in (("straggler idle", "straggler_idle"), ("network idle", "network_idle"), ("utilisation", "utilisation")):
        assert float(got[name]) / 100 == pytest.approx(summary[key]["mean"], abs=0.00051)
    sent = sum(summary["bytes_sent"]) / len(summary["bytes_sent"]) / 1e6
    assert float(got["sent per worker"].replace(",", "")) == pytest.approx(sent, rel=0.005)
    assert int(got["rounds"].replace(",", "")) == summary["rounds"]
    assert int(got["tokens"].replace(",", "")) == summary["tokens"]


def summaries(runs: list[Run]) -> list[dict[str, Any]]:
    return [json.loads((run.folder / "summary.json").read_text()) for run in runs]


def test_text_says_the_summaries(runs: list[Run]) -> None:
    lines = as_text(runs).splitlines()
    rows = lines[5 : 5 + len(runs)]
    for line, summary in zip(rows, summaries(runs), strict=True):
        check(re.split(r"\s{2,}", line.strip()), summary)
    ends = {len(line) for line in rows}
    assert len(ends) == 1, "the last column is aligned to the right"


def test_markdown_says_the_summaries(runs: list[Run]) -> None:
    lines = [line for line in as_markdown(runs).splitlines() if line.startswith("|")]
    for line, summary in zip(lines[2:], summaries(runs), strict=True):
        check(re.split(r"(?<!\\)\|", line)[1:-1], summary)
    assert "<b>" not in as_markdown(runs)


def test_html_says_the_summaries(runs: list[Run]) -> None:
    page = as_html(runs)
    rows = Cells(page).rows
    assert len(rows) == 1 + len(runs)
    for row, summary in zip(rows[1:], summaries(runs), strict=True):
        check(row, summary)
    assert rows[3][0] == "odd | <b>name</b>", "escaped once, so that it reads as given"
    assert "<b>" not in page


def test_titles_name_units() -> None:
    units = dict(COLUMNS)
    assert units["final loss"] == "nats/token"
    assert units["sent per worker"] == "MB"
    assert units["time to target"] == units["total time"] == "h:mm:ss"
    assert units["straggler idle"] == units["network idle"] == units["utilisation"] == "%"


def test_the_title_tells_a_borrowed_clock(tmp_path: Path, runs: list[Run]) -> None:
    big = Run.load(make_run(tmp_path / "big", "ddp", rounds=1, charged_as="llama-1b"))
    said = "clock and bytes charged as llama-1b, loss from the small model that was trained"
    assert said not in title(runs)
    for form in (title, as_text, as_markdown, as_html):
        assert said in form([*runs, big])


def test_what_a_summary_lacks_is_a_dash(tmp_path: Path) -> None:
    run = Run.load(make_run(tmp_path / "a", rounds=1, change={"utilisation": None, "final_loss": None}))
    (row,) = comparison([run])
    assert row.utilisation is None
    assert row.cells()[3] == row.cells()[8] == "—"


def seeds(tmp_path: Path, losses: dict[str, list[float]]) -> list[Run]:
    return [
        Run.load(make_run(tmp_path / f"{method}{seed}", method, seed=seed, rounds=1, change={"final_loss": loss}))
        for method, values in losses.items()
        for seed, loss in enumerate(values)
    ]


def test_a_difference_inside_the_paired_spread_is_no_difference(tmp_path: Path) -> None:
    near = verdicts(seeds(tmp_path / "n", {"geomesh": [3.0, 3.2, 3.1], "diloco": [3.02, 3.17, 3.14]}))
    assert near == ["DiLoCo minus GeoMesh: +0.0100 ± 0.0361 nats per token over 3 seeds, not distinguishable."]
    far = verdicts(seeds(tmp_path / "f", {"geomesh": [3.0, 3.2, 3.1], "diloco": [3.11, 3.3, 3.2]}))
    assert far == ["DiLoCo minus GeoMesh: +0.1033 ± 0.0058 nats per token over 3 seeds, higher in these pairs."]


def test_one_seed_gives_no_verdict(tmp_path: Path) -> None:
    assert verdicts(seeds(tmp_path, {"geomesh": [3.0], "diloco": [3.5]})) == []
    assert "distinguishable" not in as_text(seeds(tmp_path / "x", {"geomesh": [3.0], "diloco": [3.0]}))


def test_a_narrow_terminal_gets_a_column_for_each_run(tmp_path: Path) -> None:
    runs = [Run.load(make_run(tmp_path / m, method=m)) for m in ("geomesh", "diloco")]
    wide, tall = as_text(runs), as_text(runs, width=80)
    assert max(map(len, tall.splitlines()[2:])) <= 80 < max(map(len, wide.splitlines()[2:]))
    cells = {cell for row in comparison(runs) for cell in row.cells()}
    assert all(cell in tall and cell in wide for cell in cells)
    folded = as_text(runs, width=28).splitlines()[2:]
    assert max(map(len, folded)) <= 28 and all(any(cell in line for line in folded) for cell in cells)


def test_times_and_bytes_are_compared_on_one_clock(tmp_path: Path) -> None:
    real = Run.load(make_run(tmp_path / "real", method="geomesh", network_s=0.0, payload=1000))
    charged = [Run.load(make_run(tmp_path / m, method=m, charged_as="llama-150m")) for m in ("gasloc", "diloco")]
    name = labels([real, *charged])[0]
    scores, rest = comparison_sentence([real, *charged]).split("; ", 1)
    assert scores.startswith("3 runs") and name not in rest
    assert f"{name} sent least" in comparison_sentence([real, *(Run.load(make_run(tmp_path / f"own-{m}", method=m)) for m in ("a", "b"))])
