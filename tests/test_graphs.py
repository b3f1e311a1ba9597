"""`gossamer plan --topology`, and what `plan` says of the graph of a gossip method."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gossamer.app.config import load as config_of
from gossamer.app.job import Job, resolve
from gossamer.app.planning.graphs import exchange_s, gap_line, show
from gossamer.app.planning.plan import plan
from gossamer.core.consensus import rate, spectral_gap
from gossamer.core.errors import BadInput
from gossamer.core.matching import Preferred
from gossamer.core.topology import KNOWN, Graph, OnePeer, topology
from gossamer.core.wires import Net

TWO_REGIONS = """
[[sites]]
name = "east"
region = "e"
gpu = "A100 80GB"
workers = 4
up_mbps = 1000
down_mbps = 1000

[[sites]]
name = "west"
region = "w"
gpu = "A100 80GB"
workers = 4
up_mbps = 1000
down_mbps = 1000

[[links]]
between = ["e", "w"]
rate_mbps = 50
rtt_ms = 80
"""


def job(*sets: str) -> Job:
    return resolve(config_of(sets=list(sets)))


def shown(j: Job, *names: str) -> list[str]:
    out = io.StringIO()
    show(j, names, Console(file=out, width=200))
    return [line.strip() for line in out.getvalue().splitlines()]


def test_each_topology_has_its_gap() -> None:
    j = job("method.name=gasloc", "fleet.name=uniform-8", "seed=3")
    lines = shown(j, "all")
    for name in KNOWN:
        row = next(line for line in lines if line.startswith(f"{name} ")).split()
        assert row[2] == f"{spectral_gap(topology(name, 8, 3)):.4f}"
        graph = topology(name, 8, 3)
        assert row[-3:] == [f"{rate(form, graph, lr=0.8, momentum=0.7):.3f}" for form in ("local", "mixed", "outer")]
    assert any("as configured (form outer)" in line for line in lines)
    other = shown(job("method.name=diloco", "fleet.name=uniform-8"), "two_peer")
    assert any("as in gasloc" in line for line in other)
    mine = shown(job("method.name=noloco", "fleet.name=uniform-8", "method.outer_momentum=0.4"), "one_peer")
    assert any(line.endswith(f"{rate('outer', topology('one_peer', 8), lr=0.7, momentum=0.4, nesterov=False):.3f}") for line in mine)
    assert any("outer lr 0.7 and momentum 0.4, heavy ball" in line for line in mine)
    assert [line.split()[0] for line in shown(j, "ring", "ring") if line.startswith("ring")] == ["ring"]


def test_the_configured_graph_has_a_row_where_it_is_another() -> None:
    j = job("method.name=gasloc", "fleet.name=uniform-4")
    chain = OnePeer(4, 0, admissible=Graph(4, frozenset({(0, 1), (1, 2), (2, 3)})))
    lines = shown(replace(j, method=replace(j.method, topology=chain)), "one_peer")
    row = next(line for line in lines if line.startswith("OnePeer (configured)")).split()
    assert row[3] == f"{spectral_gap(chain):.4f}" and row[4] == "~"
    assert not any("(configured)" in line for line in shown(j, "one_peer"))


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(BadInput, match="did you mean 'two_peer'"):
        shown(job("fleet.name=uniform-4"), "twopeer")


def test_one_worker_has_a_table_too() -> None:
    assert any(line.startswith("ring ") for line in shown(job("fleet.name=uniform-1"), "all"))


def test_peers_by_link_are_quicker_and_agree_more_slowly(tmp_path: Path) -> None:
    fleet = tmp_path / "two.toml"
    fleet.write_text(TWO_REGIONS)
    j = job("method.name=gasloc", f"fleet.name={fleet}", "method.prefer=1.0")
    drawn = j.method.topology
    assert isinstance(drawn, Preferred)
    lines = shown(j, "two_peer")
    plain, near = (next(line for line in lines if line.startswith(start)).split() for start in ("two_peer  ", "two_peer, prefer 1"))
    assert float(near[4]) < float(plain[2])  # the gap, after "two_peer, prefer 1"
    assert near[5] == "~"
    net = Net(j.fleet)
    assert exchange_s(net, drawn, 1e7)[0] < 0.8 * exchange_s(net, topology("two_peer", 8, 0), 1e7)[0]
    out = io.StringIO()
    plan(j, Console(file=out, width=200))
    text = out.getvalue()
    assert "graph: spectral gap" in text and "(estimated)" in text and f"would have {spectral_gap(topology('two_peer', 8)):.3g}" in text


def test_only_gossip_has_a_graph_line() -> None:
    assert list(gap_line(job("method.name=diloco"))) == []
    (line,) = gap_line(job("method.name=local_dadam", "fleet.name=uniform-8"))
    assert "spectral gap 0.146 (exact), so plain averaging agrees to a thousandth in 44 rounds" in line


def test_a_schedule_that_agrees_after_a_period_is_not_said_to_agree_at_once() -> None:
    j = job("method.name=gasloc", "fleet.name=uniform-8", "method.average_every=5", "method.alpha=0.5")
    lines = shown(j, "one_peer_exp", "two_peer")
    mine = next(line for line in lines if line.startswith("Averaged (configured)")).split()
    assert mine[2:5] == ["3", "1.0000", "5"]  # four rounds of two messages, one of seven
    half = spectral_gap(topology("two_peer", 8, alpha=0.5))
    assert next(line for line in lines if line.startswith("two_peer ")).split()[2] == f"{half:.4f}"
    plain = shown(job("method.name=gasloc", "fleet.name=uniform-8"), "one_peer_exp")
    assert next(line for line in plain if line.startswith("one_peer_exp ")).split()[1:4] == ["1", "1.0000", "3"]
