"""The page is whole, self-contained, escaped, and its figures follow the data."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_folders import make_run

from gossamer.core.errors import BadInput
from gossamer.report import figures
from gossamer.report.page import render, settings, write_page
from gossamer.report.read import Run
from gossamer.report.style import Chart, run_styles

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checked(HTMLParser):
    """Parses a page; fails on tags that are not closed in order, and collects attributes, ids, tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attrs: list[tuple[str, str, str]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attrs += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attrs += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        else:
            self.text += data


def shape(svg: str) -> str:
    """The drawn paths and texts."""
    root = ET.fromstring(svg)
    drawn = [e.get("d") or e.text or "" for e in root.iter() if e.tag.endswith(("path", "text"))]
    uses = [f"{e.get('x')},{e.get('y')}" for e in root.iter() if e.tag.endswith("use")]
    return "|".join([*drawn, *uses])


def by_name(charts: list[Chart]) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts}


def test_a_page_is_self_contained(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a", rounds=4), make_run(tmp_path / "b", "gasloc", gossip=True, rounds=4)]
    for chosen in (folders[:1], folders):
        path = write_page(chosen, tmp_path / "out" / "report.html")
        page = Checked(path.read_text(encoding="utf-8"))
        assert not {"link", "img", "iframe"} & set(page.tags)
        assert not [a for a in page.attrs if a[1] == "src"]
        outside = [a for a in page.attrs if a[1] in ("src", "href", "xlink:href", "action") and not a[2].startswith("#")]
        assert outside == []
        loaded = [a for a in page.attrs if "://" in a[2] and not a[1].startswith("xmlns")]
        assert loaded == []
        assert "@import" not in page.text
        assert not re.search(r"url\((?!#)", path.read_text())
        ids = [value for _, name, value in page.attrs if name == "id"]
        assert len(ids) == len(set(ids))
        drawings = [value for tag, name, value in page.attrs if tag == "svg" and name == "aria-label"]
        assert len(drawings) == page.tags.count("svg") >= 4
        assert len(page.text) < 3_000_000
        assert all(drawings)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html"]


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"'$\\frac{1}$"
    config = {"name": evil, "data": {"source": evil, evil: 1}}
    change = {"world": evil, "worker_names": [evil, "b", "c", "d"], "charged_as": evil, "params_sha256": [evil] * 4, "seed": evil}
    folders = [make_run(tmp_path / "<i>x", evil, rounds=2, config=config, change=change), make_run(tmp_path / "b", rounds=2)]
    for chosen in (folders[:1], folders):
        page = Checked(render([Run.load(folder) for folder in chosen]))
        assert "i>x" not in page.tags
        assert not [code for code in page.scripts if "alert('x')" in code and not code.startswith("{")]
        assert all(json.loads(code) for code in page.scripts if code.startswith("{")), "data stays data"
        assert "alert('x')" in page.text, "shown as text"
        assert evil in page.text


def test_a_page_says_the_numbers_and_the_caution(tmp_path: Path) -> None:
    run = Run.load(make_run(tmp_path / "a", rounds=20))
    text = Checked(render([run])).text
    assert f"perplexity {run.summary['final_perplexity']:.1f} after 20 rounds" in text
    assert "It shows that the machinery works; it does not rank methods." in text
    assert run.summary["params_sha256"][0][:12] in text
    assert run.summary["params_sha256"][0] not in text, "shortened"
    assert "All workers ended with the same parameters, bit for bit." in text
    for name in ("config.toml", "metrics.jsonl", "plan.sequence"):
        assert name in text


def test_a_comparison_marks_what_differs(tmp_path: Path) -> None:
    runs = [
        Run.load(make_run(tmp_path / "a", rounds=2)),
        Run.load(make_run(tmp_path / "b", "diloco", rounds=2, config={"plan": {"steps": 60}, "extra": {"k": True}})),
    ]
    differing = {line.key: line.values for line in settings(runs) if line.differs}
    assert differing["plan.steps"] == ("30", "60")
    assert differing["extra.k"] == ("—", "true")
    assert "plan.batch" not in differing
    page = render(runs)
    marked = re.findall(r'<tr class="differs"><th scope="row"><code>([^<]*)', page)
    assert sorted(marked) == sorted(differing)


def test_every_figure_follows_the_data(tmp_path: Path) -> None:
    one = by_name(figures.of_run(Run.load(make_run(tmp_path / "a", rounds=4))))
    two = by_name(figures.of_run(Run.load(make_run(tmp_path / "b", rounds=4, seed=1, payload=5_000_000, network_s=9))))
    assert set(one) == set(two)
    expected = {"loss-tokens", "loss-time", "time-spent", "training-loss", "timeline", "bytes-by-worker", "bytes-by-round"}
    assert set(one) == expected | {"time-by-round", "waits", "links"}
    for name, chart in one.items():
        assert chart.alt and chart.caption
        assert "<text" in chart.svg or "<td" in chart.svg, "text stays text"
        assert chart.svg != two[name].svg, name
        if not chart.table and name != "links":
            assert len(shape(chart.svg)) > 300
            assert "<text" in chart.svg, "text stays text"
            assert shape(chart.svg) != shape(two[name].svg), name
    assert one["timeline"].data != two["timeline"].data


def test_comparison_figures_name_every_run(tmp_path: Path) -> None:
    methods = ("geomesh", "diloco", "ddp")
    runs = [Run.load(make_run(tmp_path / m, m, rounds=3, network_s=4.0 + i)) for i, m in enumerate(methods)]
    charts = by_name(figures.of_comparison(runs))
    assert set(charts) == {"loss-tokens", "loss-time", "time-by-run", "bytes-by-run"}
    for chart in charts.values():
        words = [e.text for e in ET.fromstring(chart.svg).iter() if e.tag.endswith("text")]
        assert {"GeoMesh", "DiLoCo", "DDP"} <= set(words), chart.name
    assert shape(charts["loss-time"].svg) != shape(charts["loss-tokens"].svg)


@pytest.mark.parametrize("workers", [1, 2, 32])
def test_any_number_of_workers_and_a_single_round(tmp_path: Path, workers: int) -> None:
    run = Run.load(make_run(tmp_path / "a", workers=workers, rounds=1, gossip=workers > 2))
    charts = by_name(figures.of_run(run))
    assert ("bytes-by-worker" in charts) == (workers > 1)
    rows = [e.text or "" for e in ET.fromstring(charts["time-spent"].svg).iter() if e.tag.endswith("text")]
    named = [t for t in rows if t.startswith(("A100", "workers "))]
    assert len(named) <= 16
    assert len(named) == workers or workers > 16


def test_without_evaluations_the_training_loss_is_drawn_and_said(tmp_path: Path) -> None:
    bare = Run.load(make_run(tmp_path / "a", rounds=3, evals=False))
    full = Run.load(make_run(tmp_path / "b", "diloco", rounds=3))
    assert "evaluation loss" in by_name(figures.of_run(full))["loss-tokens"].svg
    for runs in ([bare], [bare, full]):
        chart = by_name(figures.of_comparison(runs))["loss-tokens"]
        assert "training loss (nats per token)" in chart.svg
        assert "target" not in chart.svg, "training loss is not held against the target"


def test_a_run_without_events_still_gives_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=1)
    (folder / "metrics.jsonl").write_text("")
    (folder / "trace.jsonl").write_text("")
    page = Checked(render([Run.load(folder)]))
    assert page.tags.count("svg") == 1, "bytes per worker, from the summary"
    assert "canvas" not in page.tags


def test_methods_keep_their_colours() -> None:
    alone = dict(zip("abc", run_styles(["geomesh", "diloco", "ddp"], [0, 1, 2]), strict=True))
    mixed = run_styles(["diloco", "mine", "ddp", "geomesh"], [0, 1, 2, 3])
    assert (mixed[0], mixed[2], mixed[3]) == (alone["b"], alone["c"], alone["a"])
    many = run_styles([f"m{i}" for i in range(30)], list(range(30)))
    assert len(set(map(str, many))) == 30


def test_a_page_needs_runs_and_a_place(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds=1)
    with pytest.raises(BadInput, match="at least one"):
        write_page([], tmp_path / "x.html")
    with pytest.raises(BadInput, match="expected a list"):
        write_page(str(folder), tmp_path / "x.html")
    with pytest.raises(BadInput, match="is a folder"):
        write_page([folder], folder)
