"""The virtual-clock world runs the real round loop: same bits and bytes as a world without a clock, same times with and without tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lockstep import Lockstep
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.cadence import Cadence
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.core.topology import TwoPeer
from gossamer.recipes import REGISTRY, Setting, dadam, diloco, gasloc, geomesh
from gossamer.sim.driver import Simulation
from gossamer.sim.memo import MemoCombine
from gossamer.sim.models import SimResult
from gossamer.sim.network import Network
from gossamer.sim.timing import ComputeTime
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat

N = 4
SITES = tuple(Site(f"s{i}", "here", Gpu("card", 1.0, 16.0), 10.0 + i, 20.0 - i, overhead_s=0.1 * (1 + i)) for i in range(N))
FLEET = Fleet("toys", SITES, {("here", "here"): Link(8.0, 20.0, jitter_ms=5.0)})


def setting(inner_steps: int = 3) -> Setting:
    return Setting(Plan((inner_steps,) * N, (2,) * N, ToyBody.LENGTH), rounds=4, seed=3, schedule=Constant())


UNEQUAL = replace(setting(), plan=Plan((1, 2, 3, 5), (3, 2, 1, 2), ToyBody.LENGTH))
METHODS = {name: recipe(setting()) for name, recipe in REGISTRY.items() if name != "halos"} | {
    "diloco_ring": diloco(setting(), exchange="ring"),
    "diloco_overlap": diloco(setting(), overlap=0.5),
    "geomesh_unequal_overlap": geomesh(UNEQUAL, overlap=0.3),
    "gasloc_unequal": gasloc(UNEQUAL),
    "gasloc_mod4": gasloc(UNEQUAL, codec="mod4"),
    "gasloc_mod1_overlap": replace(gasloc(UNEQUAL, codec="mod1"), cadence=Cadence(0.4)),
    "gasloc_signs": gasloc(UNEQUAL, codec="signs"),
    "gasloc_late": gasloc(UNEQUAL, overlap=1.0),
    "gasloc_adamw_overlap": gasloc(UNEQUAL, outer="adamw", outer_lr=0.01, overlap=0.4),
    "gasloc_restricted": gasloc(UNEQUAL, admissible=((0, 1), (1, 2), (2, 3))),
    "dadam_mod8": dadam(setting(), codec="mod8"),
}


def simulated(method: Method, bodies: list[ToyBody] | None, charge: float = 1e4) -> SimResult:
    combine = MemoCombine()
    seats = [Seat(i, method, toy_layout(), run_id=7, combine=combine) for i in range(N)]
    programs = [peer(seat, start(seat, toy_start() if bodies else {})) for seat in seats]
    timing = ComputeTime(FLEET, ToyBody.LENGTH, 1e9, seed=1)
    return Simulation(programs, bodies, Network(FLEET, 1), timing, None, charge=charge, sequence=ToyBody.LENGTH).run()


@pytest.mark.parametrize("name", METHODS)
def test_simulated_bits_and_bytes_are_those_without_a_clock(name: str) -> None:
    method = METHODS[name]
    plain = Lockstep(method)
    want = plain.run()
    got = simulated(method, [ToyBody(i, method.inner) for i in range(N)])
    for a, b in zip(got.final, want, strict=True):
        assert a is not None
        assert all(torch.equal(a.x[k], b.x[k]) for k in b.x)
    assert [account.bytes_sent for account in got.accounts] == plain.sent
    assert sum(account.bytes_received for account in got.accounts) == sum(plain.sent)
    for account in got.accounts:
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in METHODS if "_mod" not in name])  # repairs depend on the numbers
def test_a_timing_only_run_has_the_same_clock_and_bytes(name: str) -> None:
    method = METHODS[name]
    full = simulated(method, [ToyBody(i, method.inner) for i in range(N)])
    bare = simulated(method, None)
    assert bare.accounts == full.accounts
    assert bare.events == full.events


def test_gossip_waits_for_its_peers_alone() -> None:
    """On one round of two-peer gossip, the worker that is not a neighbour of the slowest never waits for it."""
    method = replace(gasloc(setting()), rounds=1)
    assert isinstance(method.topology, TwoPeer)
    result = simulated(method, None, charge=1.0)
    slowest = N - 1
    others = [i for i in range(N) if i != slowest and slowest not in method.topology.at(0).inn(i)]
    assert others
    for i in others:
        assert result.accounts[i].wall_s < result.accounts[slowest].seconds["compute"]
