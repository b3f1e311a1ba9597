"""How far apart workers are: sketches, what is expected, what a run writes, and what its page shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import corpus, settings

from gossamer.app.config import load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.simulate import simulate
from gossamer.core.consensus import spectral_gap
from gossamer.core.disagreement import expected, response
from gossamer.core.errors import BadInput
from gossamer.core.outer import CombineWhileAdapt, Gossip, Outer
from gossamer.core.sketch import BUCKETS, read, sketch, spread, write
from gossamer.core.topology import Topology, topology
from gossamer.report.graphs import graphs, heard_by_all
from gossamer.report.page import render
from gossamer.report.read import Run
from gossamer.report.table import laid_out

RULES: list[tuple[Outer, str]] = [
    (Gossip(1.0, 0.0), "one_peer"),
    (Gossip(0.8, 0.7), "two_peer"),
    (Gossip(0.8, 0.5, nesterov=False), "one_peer"),
    (Gossip(0.8, 0.3, "mixed"), "ring"),
    (Gossip(0.7, 0.2, "local"), "complete"),
    (Gossip(0.7, 0.2, "local"), "two_peer"),
    (CombineWhileAdapt(), "ring"),
]


def played(outer: Outer, graph: Topology, drifts: list[float], elements: int) -> list[float]:
    """chi of n models of so many elements, by the outer rule itself, with normal drifts of the given spreads."""
    n, generator = graph.n, torch.Generator().manual_seed(5)
    x = [{"w": torch.zeros(elements)} for _ in range(n)]
    s = [outer.init(t) for t in x]
    out = []
    for t, q in enumerate(drifts):
        g = torch.randn(n, elements, generator=generator) * q * (n / (n - 1)) ** 0.5 / elements**0.5
        said = [outer.emit({"w": x[i]["w"].clone()}, {"w": -g[i].clone()}, s[i]) for i in range(n)]
        w = torch.from_numpy(graph.at(t).dense()).float()
        mixed = w @ torch.stack([z["w"] for z in said])
        for i in range(n):
            x[i], s[i] = outer.step(x[i], {"w": -g[i].clone()}, said[i], {"w": mixed[i].clone()}, s[i])
        out.append(spread(torch.stack([v["w"] for v in x]).double().numpy()))
    return out


@pytest.mark.parametrize(("outer", "name"), RULES)
def test_the_expected_distance_is_that_of_a_simulation(outer: Outer, name: str) -> None:
    graph = topology(name, 8, seed=3)
    drifts = [1.0, 2.0, 1.0, 0.5, 0.1, 0.1, 3.0, 1.0]
    law = response(outer)
    assert law is not None
    told = expected(law, [graph.at(t).dense() for t in range(8)], drifts)
    got = played(outer, graph, drifts, 40_000)
    assert got == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize("name", ["one_peer", "two_peer"])
def test_a_long_run_of_averaging_has_the_distance_of_the_spectral_gap(name: str) -> None:
    graph = topology(name, 12, seed=1)
    rho = 1 - spectral_gap(graph)
    law = response(Gossip(1.0, 0.0))
    assert law is not None
    told = expected(law, [graph.at(t).dense() for t in range(400)], [1.0] * 400)
    assert float(np.mean(np.square(told))) == pytest.approx(rho**2 / (1 - rho**2), rel=0.03)
    assert told[0] == pytest.approx(rho, rel=1e-9)


def test_who_is_left_out_does_not_count() -> None:
    law = response(Gossip(1.0, 0.0))
    assert law is not None
    pair = np.array([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1.0]])
    there = [np.array([True, True, False])]
    assert expected(law, [pair], [1.0], there) == pytest.approx([0.0], abs=1e-7)
    assert expected(law, [pair], [1.0])[0] > 0.5


def test_a_sketch_tells_distances() -> None:
    generator = torch.Generator().manual_seed(1)
    trees = [{"a": torch.randn(300, 200, generator=generator), "b": torch.randn(7, generator=generator)} for _ in range(12)]
    rows = np.stack([sketch(t) for t in trees])
    flat = np.stack([torch.cat([t["a"].reshape(-1), t["b"]]).double().numpy() for t in trees])
    assert spread(rows) == pytest.approx(spread(flat), rel=4 * (0.5 / BUCKETS / 11) ** 0.5)
    mixing = topology("two_peer", 12, seed=2).at(0).dense()
    assert spread(mixing @ rows) / spread(rows) == pytest.approx(spread(mixing @ flat) / spread(flat), rel=0.12)
    assert sketch({"a": trees[0]["a"] - trees[1]["a"], "b": trees[0]["b"] - trees[1]["b"]}) == pytest.approx(rows[0] - rows[1], abs=1e-3)
    assert (sketch(trees[0]) == sketch({k: v.clone() for k, v in trees[0].items()})).all()
    assert read(write(rows[0])) == pytest.approx(rows[0], rel=1e-6)


@pytest.mark.parametrize("text", ["", "abc", "!" * 328, write(np.zeros(BUCKETS))[:-4]])
def test_a_damaged_sketch_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="damaged"):
        read(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOSSAMER_CACHE", str(tmp_path_factory.mktemp("cache")))
        text = corpus(tmp_path_factory.mktemp("text"))
        sets = settings(text, method__name='"gasloc"', fleet__name='"aws-10"', run__rounds=6, eval__workers="true", eval__every=3)
        return simulate(resolve(load([], sets)), tmp_path_factory.mktemp("run") / "gasloc", quiet=True).path


def test_what_a_run_writes_is_near_what_it_is(run: Path) -> None:
    found = json.loads((run / "consensus.json").read_text())
    evaluations = [r for r in RunFolder(run).read_lines("metrics.jsonl") if r["kind"] == "eval"]
    exact = {r["round"]: r["consensus_distance"] for r in evaluations if r["worker"] == "fleet"}
    assert sorted(exact) == [3, 6]
    for t, distance in exact.items():
        assert found["distance"][t - 1] == pytest.approx(distance, rel=0.25)
    ratios = [a / b for b, a in zip(found["before"], found["after"], strict=True)]
    assert (sum(r * r for r in ratios) / len(ratios)) ** 0.5 == pytest.approx(found["contraction_expected"], rel=0.15)
    # Of equal starts, one round's expectation is what the graph does to white drifts; the later ones have their correlations.
    assert found["expected"][0] == pytest.approx(found["distance"][0], rel=0.15)
    summary = json.loads((run / "summary.json").read_text())
    own = summary["final_loss_workers"]
    assert own["best"] == min(own["workers"]) <= own["mean"] <= max(own["workers"]) == own["worst"]
    last = {r["worker"]: r["loss"] for r in evaluations if r["round"] == 6 and r["worker"] != "fleet"}
    assert [last[i] for i in range(10)] == own["workers"]
    assert summary["consensus"]["contraction_expected"] == found["contraction_expected"]
    assert summary["worker_regions"][:2] == ["Oregon", "Virginia"]


def test_the_report_of_gossip_tells_how_workers_agreed(run: Path) -> None:
    page = render([Run.load(run)])
    for words in ("How far apart the workers are", "What a round of mixing leaves", "Who mixed with whom", "own loss", "round 6", "Oregon"):
        assert words in page
    assert "The mean model (" in page
    chart = graphs(Run.load(run))
    assert chart is not None
    records = [r for r in RunFolder(run).read_lines("metrics.jsonl") if r["kind"] == "round" and r["round"] == 1]
    pairs = {tuple(sorted((r["worker"], int(j)))) for r in records for j in r["weights"] if int(j) != r["worker"]}
    assert len(pairs) == 10
    assert all(f"{i}–{j}" in chart.alt.split("; ")[0] for i, j in pairs)
    assert chart.svg.split("round 2")[0].count("<path") - chart.svg.split("Graph of round 1")[0].count("<path") >= len(pairs)


def test_who_has_heard_of_everybody() -> None:
    graph = topology("ring", 9)
    rounds = [{(min(i, j), max(i, j)): 0.25 for i in range(9) for j in graph.at(t).inn(i)} for t in range(6)]
    assert heard_by_all(9, rounds) == 4
    assert heard_by_all(9, rounds[:3]) is None


def test_a_table_that_is_too_wide_is_folded() -> None:
    columns = [(f"a long name {i}", "s") for i in range(12)]
    rows = [[f"row {k}", *(f"{k}.{i}" for i in range(11))] for k in range(9)]
    lines = laid_out(columns, rows, 1, 60)
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("row 3") for line in lines) > 1
    assert all(sum(f"{k}.{i}" in line.split() for line in lines) == 1 for k in range(9) for i in range(11))
