"""Asynchronous tiers (HALoS): the servers' rule, who waits for whom, what is kept and what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from sim_toys import Hooks, Links, Times
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.errors import RunFailed
from gossamer.core.inner import SGD
from gossamer.core.method import Method
from gossamer.core.plan import uniform
from gossamer.core.schedule import Constant, Cosine
from gossamer.core.tiers import DelayedNesterov, Tiers
from gossamer.core.tree import Tree, sha256
from gossamer.recipes import Setting, halos
from gossamer.sim.driver import Simulation
from gossamer.sim.models import SimResult
from gossamer.worker.effects import Done, RecvAny, Send, Work
from gossamer.worker.packet import HEADER_BYTES
from gossamer.worker.seat import Seat
from gossamer.worker.server import first_of, programs, server
from gossamer.worker.state import State

PLAIN = {f"{tier}_{key}": value for tier in ("local", "global") for key, value in (("lr", 1.0), ("momentum", 0.0), ("delay", 1))}
"""Servers that subtract what arrives."""


def method(n: int = 4, rounds: int = 3, speeds: Sequence[float] = (), regions: Sequence[int] = (), **options: Any) -> Method:
    """`rounds` blocks of 4 steps of the fastest worker."""
    setting = Setting(
        uniform(n, 4, 2, ToyBody.LENGTH), rounds, inner=SGD(lr=0.05), schedule=Constant(), speeds=tuple(speeds), regions=tuple(regions)
    )
    return replace(halos(setting, block=4, **options), rounds=rounds)


class Watch(Hooks):
    """Keeps the global server's parameters, and what each worker's body was given and gave."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.served: list[tuple[float, Tree]] = []

    def boundary(self, worker: int, round: int, time_s: float, state: State, body: object) -> Any:
        if worker >= self.n:
            self.served.append((time_s, {k: v.clone() for k, v in state.x.items()}))
        return super().boundary(worker, round, time_s, state, body)


class Recorder(ToyBody):
    """Adds up its own drifts: y - x of every stretch."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.moved = {k: torch.zeros_like(p.data, dtype=torch.float64) for k, p in self.params.items()}

    def compute(self, work: Work) -> Done:
        before = {k: p.data.double() for k, p in self.params.items()}
        done = super().compute(work)
        for k, p in self.params.items():
            self.moved[k] += p.data.double() - before[k]
        return done


def run(
    m: Method, bodies: Sequence[ToyBody] | None, *, step_s: Sequence[float] | None = None, latency: Any = None, hooks: Hooks | None = None
) -> SimResult:
    n = m.n
    seats = [Seat(i, m, toy_layout(), run_id=7) for i in range(n)]
    states = [State(x=toy_start() if bodies else {}) for _ in range(n)]
    assert m.tiers is not None
    return Simulation(
        programs(seats, states),
        bodies,
        Links(latency or (lambda src, dst, nbytes: 0.01)),
        Times(*(step_s or [0.1 * (1 + 0.013 * i) for i in range(n)]), *[0.0] * m.tiers.servers),
        hooks,
        sequence=ToyBody.LENGTH,
        servers=m.tiers.servers,
    ).run()


def bodies_of(m: Method, **more: Any) -> list[Recorder]:
    return [Recorder(i, m.inner, **more) for i in range(m.n)]


def model_of(result: SimResult) -> Tree:
    final = result.final[-1]
    assert final is not None
    return final.x


# --- the rule


def test_arrivals_from_rest_move_a_server_by_their_sum_and_one_momentum_step() -> None:
    """0.2 N + 3.2 * 0.9 after N = 16 unit arrivals, from the published settings; nothing of the momentum before."""
    rule = method().tiers.local_rule  # type: ignore[union-attr]
    x, one = {"w": torch.zeros(3, dtype=torch.float32)}, {"w": torch.ones(3)}
    memory = rule.init(x)
    for k in range(1, 17):
        rule.step(x, one, memory)
        want = 0.2 * k + (3.2 * 0.9 if k == 16 else 0.0)
        assert torch.allclose(x["w"], torch.full((3,), -want)), k
    assert torch.equal(one["w"], torch.ones(3))


def test_without_delay_the_rule_is_nesterovs() -> None:
    """N = 1: x -= lr (D + b m) with m = b m + D, torch's SGD with nesterov."""
    g = torch.Generator().manual_seed(0)
    rule, w = DelayedNesterov(0.7, 0.9, 1), torch.nn.Parameter(torch.zeros(5))
    x, torchs = {"w": torch.zeros(5)}, torch.optim.SGD([w], lr=0.7, momentum=0.9, nesterov=True)
    memory = rule.init(x)
    for _ in range(6):
        D = torch.randn(5, generator=g)
        rule.step(x, {"w": D}, memory)
        w.grad = D.clone()
        torchs.step()
        assert torch.allclose(x["w"], w.data, atol=1e-6)


def test_published_settings_are_the_defaults() -> None:
    tiers = method(regions=(0, 0, 1, 1)).tiers
    assert tiers == Tiers((0, 0, 1, 1), DelayedNesterov(3.2, 0.9, 16), DelayedNesterov(0.3, 0.5, 2), 0.25, 32, 1.0)


# --- identities


def test_one_worker_and_plain_servers_are_serial_training() -> None:
    """1 region, 1 worker, K = 1, a = 1, lr 1, b 0, N 1, servers without latency: to rounding (x - (x - y) is y to the last bit or two)."""
    m = method(n=1, rounds=5, merge=1.0, report_every=1, **PLAIN)
    got = run(m, bodies_of(m), latency=lambda *_: 0.0)
    alone = ToyBody(0, m.inner)
    for t in range(5):
        alone.compute(Work(4, 2, float(t * m.plan.tokens_per_round), m.plan.tokens_per_round / 4))
    for k, want in alone.params.items():
        assert torch.allclose(model_of(got)[k], want.data, rtol=1e-6, atol=1e-7)
        assert torch.allclose(got.final[0].x[k], want.data, rtol=1e-6, atol=1e-7)  # type: ignore[union-attr]


@pytest.mark.parametrize("regions", [(0, 0, 0, 0), (0, 1, 1, 2)])
def test_plain_servers_hold_what_all_workers_moved(regions: tuple[int, ...]) -> None:
    """lr 1, b 0, N 1 and no merge before the end: x_g = x_0 - sum of all D, the last partial reports included."""
    m = method(rounds=3, regions=regions, report_every=1000, **PLAIN)
    bodies = bodies_of(m)
    got = model_of(run(m, bodies))
    for k, x0 in toy_start().items():
        assert torch.allclose(got[k].double(), x0.double() + sum(b.moved[k] for b in bodies), atol=1e-5)


def test_what_arrives_between_report_and_answer_is_lost_to_the_global_server() -> None:
    """A slow answer: the updates under it are in x_l, and in no later report."""
    m = method(n=1, rounds=6, report_every=2, merge=0.25, **PLAIN)
    hooks, bodies = Watch(1), bodies_of(m)
    slow = run(m, bodies, step_s=[1.0], latency=lambda src, dst, _: 9.0 if src == 2 else 0.0, hooks=hooks)
    assert slow.final[1].round == 2, "a report of blocks 1 and 2; 3 and 4 arrive under its answer; 5 and 6"  # type: ignore[union-attr]
    lost = sum(float((model_of(slow)[k].double() - toy_start()[k].double() - bodies[0].moved[k]).abs().sum()) for k in toy_start())
    quick_bodies = bodies_of(m)
    quick = run(m, quick_bodies, step_s=[1.0], latency=lambda *_: 0.0)
    kept = sum(float((model_of(quick)[k].double() - toy_start()[k].double() - quick_bodies[0].moved[k]).abs().sum()) for k in toy_start())
    assert quick.final[1].round == 3 and kept < 1e-4 < lost  # type: ignore[union-attr]


def test_a_merge_is_the_weighted_mean_and_the_next_report_starts_from_it() -> None:
    """Driven by hand: the local server's answers and reports, number by number."""
    m = method(n=1, rounds=2, merge=0.25, report_every=1, **PLAIN)
    zeros = {k: torch.zeros_like(v) for k, v in toy_start().items()}
    seat = Seat(1, m, toy_layout(), run_id=7)
    worker, top = Seat(0, m, toy_layout(), run_id=7), Seat(2, m, toy_layout(), run_id=7)
    program = server(seat, first_of(seat, {k: v.clone() for k, v in zeros.items()}))
    sent: list[tuple[int, float]] = []

    def until_it_waits(reply: Any = None) -> None:
        effect = program.send(reply)
        while not isinstance(effect, RecvAny):
            if isinstance(effect, Send):
                tree = {k: torch.zeros_like(v) for k, v in zeros.items()}
                m.codec.accumulate(effect.packet.payload, toy_layout(), tree, 1.0)
                sent.append((effect.to[0], float(tree["bias"][0])))
            effect = program.send(None)

    def says(who: Seat, value: float, round: int) -> Any:
        from gossamer.core.tree import digest
        from gossamer.worker.seat import Said

        tree = {k: torch.full_like(v, value) for k, v in zeros.items()}
        return who.pack(tree, who.layout, 5, Said(round, 1, digest(zeros)))

    until_it_waits()
    until_it_waits((0, says(worker, 1.0, 0)))  # D = 1: x = -1, u = 0 - (-1) = 1
    assert sent == [(2, 1.0), (0, -1.0)]
    until_it_waits((2, says(top, 3.0, 0)))  # x = 0.75 * -1 + 0.25 * 3 = 0
    until_it_waits((0, says(worker, 4.0, 1)))  # x = 0 - 4; u = 0 - (-4)
    assert sent[2:] == [(2, 4.0), (0, -4.0)]


def test_a_run_is_the_same_twice_and_without_tensors_takes_as_long() -> None:
    m = method(rounds=4, regions=(0, 0, 1, 1), report_every=3)
    one, two, bare = run(m, bodies_of(m)), run(m, bodies_of(m)), run(m, None)
    assert sha256(model_of(one)) == sha256(model_of(two)) != sha256(toy_start())
    assert one.accounts == two.accounts == bare.accounts and one.events == bare.events


# --- work and waiting


def test_steps_follow_speed_and_tokens_follow_the_plan() -> None:
    m = halos(Setting(uniform(4, 30, 8, 512), rounds=20, speeds=(10.0, 5.0, 4.9, 0.1)))
    assert m.plan.steps == (8, 4, 4, 1), "the fastest takes 8, the others ceil(8 * speed), at least 1"
    assert m.total_tokens == pytest.approx(20 * 4 * 30 * 8 * 512, rel=0.02)
    assert m.heard_by == 1 and not m.synchronous


def test_evaluations_are_as_frequent_as_a_synchronous_methods() -> None:
    m = halos(Setting(uniform(4, 30, 8, 512), rounds=20, speeds=(10.0, 5.0, 4.9, 0.1)))
    assert m.tiers is not None
    due = [block for block in range(1, m.rounds + 1) if m.tiers.evaluates(1, block)]
    assert 19 <= len(due) <= 20 and max(b - a for a, b in pairwise(due)) <= m.tiers.blocks_per_round + 1
    assert not any(m.tiers.evaluates(0, block) for block in range(1, 50))
    assert sum(m.tiers.evaluates(5, block) for block in range(1, m.rounds + 1)) in (3, 4)


def test_nobody_waits_for_a_straggler() -> None:
    """One worker ten times slower: its own blocks take longer, the others' time and waits are what they were."""
    m = method(rounds=4, regions=(0, 0, 1, 1), report_every=2)
    even, uneven = run(m, None, step_s=[0.1] * 4), run(m, None, step_s=[0.1, 0.1, 0.1, 1.0])
    for i in range(3):
        assert uneven.accounts[i].share("straggler_idle") == 0.0
        assert uneven.accounts[i].seconds["network_idle"] == pytest.approx(even.accounts[i].seconds["network_idle"], rel=1e-3)
        assert uneven.accounts[i].wall_s == pytest.approx(even.accounts[i].wall_s, rel=1e-3)
    assert uneven.accounts[3].wall_s > 5 * even.accounts[3].wall_s
    for account in uneven.accounts:
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s)


def test_a_worker_trains_with_planned_global_tokens() -> None:
    """The schedule is a function of the block alone: workers of unlike speed stand at equal tokens at equal blocks."""
    m = replace(method(rounds=3, speeds=(4.0, 2.0, 1.0, 1.0)), schedule=Cosine())
    asked: dict[int, list[Work]] = {}

    class Asked(ToyBody):
        def compute(self, work: Work) -> Done:
            asked.setdefault(self.worker, []).append(work)
            return super().compute(work)

    run(m, [Asked(i, m.inner) for i in range(4)])
    assert [[w.steps for w in asked[i]] for i in range(4)] == [[4] * 3, [2] * 3, [1] * 3, [1] * 3]
    for i in range(4):
        assert [w.tokens0 for w in asked[i]] == [t * m.plan.tokens_per_round for t in range(3)]
        assert all(w.steps * w.tokens_per_step == m.plan.tokens_per_round for w in asked[i])


def test_a_poisoned_update_is_refused_and_counted() -> None:
    m = method(rounds=3, report_every=1000, **PLAIN)
    bodies = [Recorder(i, m.inner, poison_at=5 if i == 2 else None) for i in range(4)]
    hooks = Hooks()
    got = model_of(run(m, bodies, hooks=hooks))
    assert all(torch.isfinite(v).all() for v in got.values())
    rounds = [r for r in hooks.notes if r["kind"] == "round"]
    assert [(r["worker"], r["round"]) for r in rounds if r["refused"]] == [(2, 2)]
    assert {r["worker"] for r in hooks.notes} == {0, 1, 2, 3} and {w for w, *_ in hooks.spans} <= {0, 1, 2, 3}, "servers are no workers"


def test_a_worker_that_starts_elsewhere_is_refused() -> None:
    m = method(n=2)
    seats = [Seat(i, m, toy_layout(), run_id=7) for i in range(2)]
    starts = programs(seats, [State(x=toy_start()), State(x=toy_start(seed=1))])
    with pytest.raises(RunFailed, match="1 starts from other parameters"):
        Simulation(starts, bodies_of(m), Links(lambda *_: 0.01), Times(0.1, 0.1, 0.0, 0.0), None, servers=2).run()


def test_bytes_are_a_push_and_an_answer_a_block() -> None:
    m = method(rounds=4, regions=(0, 0, 1, 1), report_every=1000)
    result, whole = run(m, None), Seat(0, m, toy_layout()).whole_bytes
    for account in result.accounts[:4]:
        assert (account.bytes_sent, account.bytes_received) == (4 * whole + HEADER_BYTES, 4 * whole)
    assert [a.bytes_sent for a in result.accounts[4:]] == [8 * whole + whole] * 2 + [0]
