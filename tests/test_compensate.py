"""Gossip on unlike lines: steps that make up for them, one schedule for workers rounds apart, and the literature's model of a round."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gossamer.app.config import load as config_of
from gossamer.app.job import Job, resolve
from gossamer.app.planning.forecast import forecast, modelled_s, simulated
from gossamer.app.planning.plan import show
from gossamer.app.planning.timing import time_only
from gossamer.app.workload import costs_of, unhidden_of
from gossamer.core.awb import balance
from gossamer.core.fleet import Fleet
from gossamer.core.plan import Plan, uniform
from gossamer.core.predict import rounds_of_law, unhidden_s
from gossamer.core.topology import Graph, OnePeer, OnePeerExp, Ring, TwoPeer
from gossamer.core.wires import Net, by_law
from gossamer.worker.effects import Compute, Program

CHARGED = (
    "clock.charge_as=llama-134m",
    "clock.charge_tokens=262144",
    "clock.codec_gbytes_per_s=400",
    "plan.batch=4",
    "plan.sequence=64",
    "plan.fit=false",
    "method.name=gasloc",
)
KINDS = {
    "one_peer": ("method.topology=one_peer",),
    "two_peer": (),
    "int8": ("method.codec=mod8",),
    "overlap": ("method.overlap=0.5",),
    "whole block late": ("method.overlap=1.0", "method.codec=mod8"),
    "preferred": ("method.topology=one_peer", "method.prefer=1.0"),
    "ring": ("method.topology=ring",),
}


def job(*sets: str, fleet: str = "straggler-8", plan: str = "awb") -> Job:
    return resolve(config_of(sets=[*CHARGED, f"fleet.name={fleet}", f"plan.name={plan}", *sets]))


def lines(n: int, up_mbps: float, down_mbps: float, folder: Path) -> str:
    """A fleet file: n equal workers, and the last one's line."""
    site = 'region = "r"\ngpu = "A100 80GB"\nmfu = 0.45\n'
    path = folder / f"lines-{n}-{up_mbps:g}-{down_mbps:g}.toml"
    path.write_text(
        f'name = "lines"\nlocal = {{ rate_mbps = 1000, rtt_ms = 20 }}\n[[sites]]\nname = "fast"\n{site}workers = {n - 1}\n'
        f'up_mbps = 1000\ndown_mbps = 1000\n[[sites]]\nname = "slow"\n{site}up_mbps = {up_mbps}\ndown_mbps = {down_mbps}\n'
        '[[links]]\nbetween = ["r", "r"]\nrate_mbps = 1000\nrtt_ms = 20\n'
    )
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fleet", ["straggler-8", "straggler-8-200"])
def test_a_compensated_plan_is_never_slower_than_the_uniform_one(fleet: str, kind: str) -> None:
    """In the event simulation, of graphs and noise that the planner has not seen, to 1 %; at the same tokens a round."""
    paid, even = (job(*KINDS[kind], "seed=5", "run.rounds=40", fleet=fleet, plan=plan) for plan in ("awb", "uniform"))
    assert paid.method.plan.tokens_per_round == even.method.plan.tokens_per_round
    assert paid.method.plan.steps[7] <= min(paid.method.plan.steps[:7])
    assert simulated(paid).round_s <= 1.01 * simulated(even).round_s


def test_it_is_a_tenth_faster_where_the_line_is_what_takes_the_time() -> None:
    for sets in (KINDS["one_peer"], KINDS["int8"], KINDS["two_peer"]):
        paid, even = (simulated(job(*sets, plan=plan), 30, noise=False) for plan in ("awb", "uniform"))
        assert paid.round_s < 0.9 * even.round_s and paid.straggler < even.straggler


@pytest.mark.parametrize("kind", KINDS)
def test_equal_links_give_the_uniform_plan(kind: str) -> None:
    assert job(*KINDS[kind], fleet="uniform-6").method.plan == uniform(6, 30, 4, 64)


def test_the_plan_does_not_depend_on_the_seed() -> None:
    plans = {job(*KINDS["one_peer"], f"seed={seed}", fleet="straggler-8-200").method.plan for seed in range(3)}
    assert len(plans) == 1 and min(next(iter(plans)).steps) > 1


def ends_s(j: Job, plan: Plan) -> list[float]:
    """When each worker has ended the first round."""
    one = replace(j, method=replace(j.method, plan=plan))
    return [account.wall_s for account in time_only(one, rounds=1, noise=False)[1].accounts]


def test_who_is_given_the_time_of_its_exchange_ends_with_the_others(tmp_path: Path) -> None:
    """A slow uplink, paid for in full: compute plus exchange is equal, both end the round within a step."""
    j = job("method.topology=one_peer", fleet=lines(2, 150, 1000, tmp_path))
    costs = costs_of(j.config, j.fleet, j.method.plan.batch, j.charged)
    c = unhidden_s(j.method, Net(j.fleet), j.layout, costs)
    plan = balance(costs.step_s, (4, 4), c, 60 * 4 * 64, 64)
    assert plan.steps[1] < plan.steps[0] - 10 and sum(plan.steps) == 60
    assert np.ptp(ends_s(j, plan)) <= costs.step_s[0]
    assert np.ptp(ends_s(j, uniform(2, 30, 4, 64))) > 10 * costs.step_s[0]
    assert max(ends_s(j, plan)) < max(ends_s(j, uniform(2, 30, 4, 64))) - 5 * costs.step_s[0]


@pytest.mark.parametrize("down_mbps", [150, 1000])
def test_between_two_workers_fewer_steps_buy_nothing(tmp_path: Path, down_mbps: float) -> None:
    """What one says in a round the other answers in the next: the pace is the mean of both ways, however the steps are dealt out."""
    j = job("method.topology=one_peer", fleet=lines(2, 150, down_mbps, tmp_path))
    assert j.method.plan.steps == (30, 30)
    assert unhidden_of(j.config, Net(j.fleet), j.method, j.layout, j.fleet, j.charged) == [0.0, 0.0]
    pace_s = []
    for slow in (30, 24, 18):
        other = replace(j, method=replace(j.method, plan=Plan((60 - slow, slow), (4, 4), 64)))
        pace_s.append(simulated(other, 60, noise=False).round_s)
    assert min(pace_s) == pytest.approx(max(pace_s), rel=0.01) and pace_s[0] <= 1.001 * min(pace_s)


# The exchange under the law of the graph


def net_of(*rates: tuple[float, float]) -> Net:
    fleet = job(plan="uniform").fleet
    site = fleet.sites[0]
    sites = tuple(replace(site, name=f"s{i}", workers=1, up_mbps=up, down_mbps=down) for i, (up, down) in enumerate(rates))
    return Net(Fleet("lines", sites, fleet.links, local=fleet.local))


def test_two_peers_send_two_models_through_a_line() -> None:
    net, nbytes = net_of(*((1000.0, 500.0),) * 7, (100.0, 50.0)), 1e8
    one = by_law(net, OnePeer(8, 0), nbytes, 16)
    two = by_law(net, TwoPeer(8, 0), nbytes, 16)
    delay_s = float(net.delay_s.max())
    assert one[0][7] == pytest.approx(8.0 + delay_s) and two[0][7] == pytest.approx(16.0 + delay_s)
    assert one[1][7] == pytest.approx(16.0) and two[1][7] == pytest.approx(32.0)
    assert len({*one[0][:7]}) == len({*two[1][:7]}) == 1, "those that are alike get one mean"
    assert one[1][0] == pytest.approx(1.6)


def test_who_sits_out_pays_nothing_that_round() -> None:
    said, heard = by_law(net_of(*((1000.0, 1000.0),) * 3), OnePeer(3, 0), 1.25e8, 30)
    assert heard == pytest.approx([2 / 3] * 3) and said == pytest.approx([2 / 3 * said[0] / heard[0]] * 3)


def test_fixed_and_restricted_graphs_are_taken_worker_by_worker() -> None:
    net = net_of(*((1000.0, 1000.0),) * 4)
    star = Graph.of(4, [(0, 1), (0, 2), (0, 3)])
    assert by_law(net, OnePeer(4, 0, admissible=star), 1.25e8, 60)[1][0] == pytest.approx(1.0)
    assert sum(by_law(net, OnePeer(4, 0, admissible=star), 1.25e8, 60)[1][1:]) == pytest.approx(1.0)
    assert by_law(net, Ring(4), 1.25e8, 2)[1] == pytest.approx([2.0] * 4)
    assert by_law(net, OnePeerExp(4), 1.25e8, 2)[1] == pytest.approx([1.0] * 4)
    assert (rounds_of_law(8), rounds_of_law(128), rounds_of_law(10_000)) == (32, 32, 8)


# The model of the literature


def test_the_models_of_a_round() -> None:
    """max_i 2 T_i^comm + max_i H_i T_i^comp; and of gossip max_i (k_i T_i^comm + H_i T_i^comp)."""
    ring = job("method.name=diloco", "method.exchange=ring", plan="uniform")
    t = costs_of(ring.config, ring.fleet, ring.method.plan.batch, ring.charged).step_s[0]
    slow_s = 8 * ring.bytes_charge * ring.method.wire.nbytes(ring.layout) / 100e6
    assert modelled_s(ring) == pytest.approx(2 * slow_s + 30 * t, rel=1e-3)
    for kind, k in (("one_peer", 1), ("two_peer", 2)):
        j = job(*KINDS[kind])
        fast, slow = j.method.plan.steps[0], j.method.plan.steps[7]
        assert modelled_s(j) == pytest.approx(max(k * slow_s + slow * t, k * slow_s / 10 + fast * t), rel=1e-3)
    assert modelled_s(job("method.name=geomesh", plan="uniform")) is None


def test_plan_prints_the_model_beside_the_event_simulation() -> None:
    for sets, law in ((KINDS["one_peer"], "max_i (k_i T_i^comm + H_i T_i^comp)"), (("method.name=diloco",), "max_i 2 T_i^comm + max_i")):
        j, out = job(*sets), io.StringIO()
        show(j, Console(file=out, width=400), forecast(j))
        line = next(line for line in out.getvalue().splitlines() if line.startswith("a round: "))
        said = [float(x) for x in re.findall(r"([\d.]+) s (?:by|worked|in)", line)]
        assert law in line and said == pytest.approx([modelled_s(j), forecast(j).round_s, simulated(j, 16, noise=False).round_s], abs=0.01)
    show(j, Console(file=(out := io.StringIO()), width=400), simulated(j))
    assert "s in this simulation" in out.getvalue()


def test_a_batch_that_memory_does_not_hold_at_once_may_be_kept() -> None:
    assert job("plan.fit=true").method.plan.batch[0] < 4 == job().method.plan.batch[0]


# The schedule


def watched(program: Program, works: list[tuple[float, float, int]]) -> Program:
    """`program`; notes what it computes."""
    try:
        effect = next(program)
        while True:
            if isinstance(effect, Compute):
                works.append((effect.work.tokens0, effect.work.tokens_per_step, effect.work.steps))
            effect = program.send((yield effect))
    except StopIteration as end:
        return end.value


def test_workers_rounds_apart_are_at_one_place_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round t spans the same planned tokens for 35 steps as for one, whoever is ahead on the clock."""
    works: list[list[tuple[float, float, int]]] = [[] for _ in range(8)]
    programs = Job.programs
    monkeypatch.setattr(Job, "programs", lambda self, *a: [watched(p, w) for p, w in zip(programs(self, *a), works, strict=True)])
    j = job("method.topology=one_peer", "run.rounds=12")
    time_only(j, noise=False)
    plan = j.method.plan
    assert max(plan.steps) > 10 * min(plan.steps)
    for i, seen in enumerate(works):
        assert len(seen) == 12
        for t, (tokens0, per_step, steps) in enumerate(seen):
            assert tokens0 == t * plan.tokens_per_round and steps == plan.steps[i]
            assert tokens0 + steps * per_step == pytest.approx((t + 1) * plan.tokens_per_round)
