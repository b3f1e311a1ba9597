"""The formula for a round against the event simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.app.config import load as config_of
from gossamer.app.job import Job, resolve
from gossamer.app.planning.forecast import forecast, simulated
from gossamer.core.cadence import Cadence
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.wires import Net

CHARGED = ("clock.charge_as=llama-150m", "clock.charge_tokens=65536")
METHODS = {
    "diloco": ("method.name=diloco",),
    "geomesh": ("method.name=geomesh",),
    "shard": ("method.name=geomesh", "method.exchange=shard"),
    "overlap": ("method.name=geomesh", "method.overlap=0.5"),
    "ring": ("method.name=diloco", "method.exchange=ring"),
    "ddp": ("method.name=ddp", "plan.steps=3"),
    "gasloc": ("method.name=gasloc",),
    "one_peer": ("method.name=gasloc", "method.topology=one_peer"),
    "local_dadam": ("method.name=local_dadam",),
}


def job(fleet: str, *sets: str) -> Job:
    return resolve(config_of(sets=[f"fleet.name={fleet}", *CHARGED, *sets]))


def near(j: Job, rounds: int = 16) -> None:
    said, seen = forecast(j), simulated(j, rounds, noise=False)
    assert said.round_s == pytest.approx(seen.round_s, rel=0.1)
    assert said.utilisation == pytest.approx(seen.utilisation, abs=0.05)
    assert said.straggler + said.network == pytest.approx(seen.straggler + seen.network, abs=0.05)
    assert said.sent_bytes == pytest.approx(seen.sent_bytes, rel=0.15), "gossip: where a worker may sit out"
    for a in (said, seen):
        for i in range(j.n):
            assert a.compute_s[i] + a.straggler_s[i] + a.network_s[i] <= a.wall_s[i] * (1 + 1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fleet", ["azure-4", "straggler-8", "uniform-16"])
def test_the_formula_is_within_a_tenth_of_the_simulator(fleet: str, method: str) -> None:
    near(job(fleet, *METHODS[method]))


@pytest.mark.parametrize("cadence", [Cadence(0.2, 4), Cadence(0.0, 3), Cadence(0.3, 2)])
def test_so_it_is_with_fragments(cadence: Cadence) -> None:
    j = job("azure-4", "method.name=diloco")
    near(replace(j, method=replace(j.method, cadence=cadence)))


def test_so_it_is_where_every_worker_is_unlike() -> None:
    """More unlike uplinks than are told apart."""
    gpu = Gpu("card", 100.0, 40.0)
    n = 90
    sites = tuple(Site(f"s{i}", f"r{i % 3}", gpu, 100.0 + 37 * i % 900, 150.0 + 53 * i % 800, mfu=0.3 + 0.003 * i) for i in range(n))
    links = {(f"r{a}", f"r{b}"): Link(400.0 + 100 * a + 10 * b, 10.0 + 5 * a + b) for a in range(3) for b in range(3)}
    for sets in (("method.name=diloco",), ("method.name=geomesh", "plan.name=awb")):
        j = job("uniform-90", *sets)
        fleet = Fleet("unlike", sites, links)
        near(replace(j, fleet=fleet), rounds=4)


def test_without_limits_a_round_is_its_compute() -> None:
    j = job("uniform-5", "method.name=diloco", "clock.codec_gbytes_per_s=1e9")
    wire = Link(1e12, 0.0)
    site = replace(j.fleet.sites[0], up_mbps=float("inf"), down_mbps=float("inf"))
    fleet = replace(j.fleet, sites=(site,), links={("everywhere", "everywhere"): wire}, local=wire, message_s=0.0)
    said = forecast(replace(j, fleet=fleet))
    assert said.round_s == pytest.approx(said.compute_s[0], rel=1e-6) and said.utilisation == pytest.approx(1.0)
    assert forecast(job("uniform-1", "method.name=diloco")).network == 0.0


def test_links_are_read_once_for_a_pair_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("card", 100.0, 40.0)
    sites = tuple(Site(f"s{i}", f"r{i % 10}", gpu, 100.0 + i, 100.0 + i, workers=1 + i % 2) for i in range(700))
    links = {(f"r{a}", f"r{b}"): Link(100.0, 1.0) for a in range(10) for b in range(10)}
    fleet = Fleet("many", sites, links)
    read: list[tuple[int, int]] = []
    link = Fleet.link
    monkeypatch.setattr(Fleet, "link", lambda self, i, j: read.append((i, j)) or link(self, i, j))
    net = Net(fleet)
    assert fleet.n > 1000 and len(read) == 100
    assert len(net.groups[1]) <= 128
