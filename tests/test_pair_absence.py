"""Absent peers under compressed gossip and unequal work: the mean stays, ranges need no peer, metrics tell a real run to the bit."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from lockstep import Lockstep
from net_toys import Hooks as NetHooks
from net_toys import in_threads
from sim_toys import Hooks, Links, Times
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.cadence import Cadence
from gossamer.core.members import Roll
from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.core.tree import Tree
from gossamer.real import Group, run
from gossamer.recipes import Setting, gasloc, local_dadam
from gossamer.sim.absence import Absences
from gossamer.sim.driver import Simulation
from gossamer.sim.models import SimResult
from gossamer.worker.effects import Addr, Go, Program, Stop
from gossamer.worker.entry import back
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat
from gossamer.worker.state import State

N, ROUNDS = 5, 14
UNEQUAL = Setting(Plan((1, 2, 3, 5, 2), (3, 2, 1, 2, 1), ToyBody.LENGTH), rounds=ROUNDS, seed=3, schedule=Constant())
METHODS: dict[str, Method] = {
    "fp32": gasloc(UNEQUAL),
    **{f"mod{bits}": gasloc(UNEQUAL, codec=f"mod{bits}") for bits in (8, 4, 2, 1)},  # type: ignore[arg-type]
    "mod4_ring": gasloc(UNEQUAL, codec="mod4", topology="ring", momentum="mixed"),
    "mod4_overlap": replace(gasloc(UNEQUAL, codec="mod4"), cadence=Cadence(0.4)),
    "mod4_local_dadam": local_dadam(UNEQUAL, codec="mod4", topology="one_peer"),
    "signs": gasloc(UNEQUAL, codec="signs", topology="one_peer"),
}
PLAIN: dict[str, Method] = {
    **{f"mod{bits}": gasloc(UNEQUAL, codec=f"mod{bits}", outer_momentum=0.0) for bits in (8, 4, 2, 1)},  # type: ignore[arg-type]
    "mod4_local_dadam": METHODS["mod4_local_dadam"],
    "signs": gasloc(UNEQUAL, codec="signs", topology="ring", outer_momentum=0.0),
}
"""Those in which mixing is all that moves workers that learn nothing."""


class Still(ToyBody):
    """Learns nothing; everybody begins elsewhere."""

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.load(first(worker))

    def take(self) -> None: ...


def first(worker: int) -> Tree:
    g = torch.Generator().manual_seed(worker)
    return {name: v + torch.randn(v.shape, generator=g) for name, v in toy_start().items()}


def seat_of(worker: int, method: Method) -> Seat:
    return Seat(worker, method, toy_layout(), run_id=7)


def fresh(worker: int, method: Method, x: Tree, round: int = 0) -> State:
    state = start(seat_of(worker, method), x)
    state.round = round
    return state


def flat_mean(trees: list[Tree]) -> torch.Tensor:
    return torch.stack([torch.cat([v.double().flatten() for v in tree.values()]) for tree in trees]).mean(0)


class Kept(Hooks):
    """Keeps every worker's anchor and memory at every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.x: dict[int, dict[Addr, Tree]] = defaultdict(dict)
        self.memory: dict[int, dict[Addr, Tree]] = defaultdict(dict)

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: object) -> Go | Stop:
        self.x[round][worker] = {k: v.clone() for k, v in state.x.items()}
        self.memory[round][worker] = {k: v.clone() for k, v in state.memory.items()}
        return super().boundary(worker, round, time_s, state, body)

    def rounds(self) -> list[dict[str, Any]]:
        return [r for r in self.notes if r["kind"] == "round"]


def stand_still(
    method: Method, absences: Absences | None = None, step_s: Mapping[int, float] | None = None, bodies: list[Any] | None = None
) -> tuple[SimResult, Kept]:
    """Workers that learn nothing, and begin apart: after round 1, since in round 0 all must be equal."""
    hooks = Kept()
    programs = [peer(seat_of(i, method), fresh(i, method, first(i), 1)) for i in range(N)]
    times = Times(*[(step_s or {}).get(i, 1.0 + 0.1 * i) for i in range(N)])
    world = Simulation(
        programs, bodies or [Still(i) for i in range(N)], Links(lambda *_: 0.05), times, hooks, rounds0=[1] * N, absences=absences
    )
    return world.run(), hooks


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kills", [{2: 5}, {0: 2, 3: 6}])
def test_after_a_death_compressed_mixing_keeps_the_mean_of_the_living(name: str, kills: dict[int, int]) -> None:
    result, hooks = stand_still(PLAIN[name], Absences(kills))
    living = [i for i in range(N) if i not in kills]
    assert [i for i, state in enumerate(result.final) if state is None] == sorted(kills)
    means = [flat_mean([hooks.x[t][i] for i in living]) for t in range(max(kills.values()), ROUNDS + 1)]
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], rtol=0, atol=2e-6)
    assert any(r.get("sent_in_full") for r in hooks.rounds()) or name == "signs", "nothing was out of range"


@pytest.mark.parametrize("name", PLAIN)
def test_past_the_deadline_both_sides_skip_repairs_and_all(name: str) -> None:
    """Worker 4 is slow. A pair that skips says nothing in full either; one that does not repairs at both ends, however long that takes."""
    _, hooks = stand_still(replace(PLAIN[name], deadline_s=3.0), step_s={4: 9.0})
    absent = {(r["round"], r["worker"], j) for r in hooks.rounds() for j in r.get("absent", [])}
    assert absent and all((t, j, i) in absent for t, i, j in absent), "one side skipped alone"
    means = [flat_mean(list(hooks.x[t].values())) for t in range(2, ROUNDS + 1)]
    for mean in means[1:]:
        torch.testing.assert_close(mean, means[0], rtol=0, atol=4e-6)


@pytest.mark.parametrize("name", ["mod8", "mod4"])
def test_who_comes_back_knows_no_ranges_and_learns_them(name: str) -> None:
    """Ranges are a worker's own and travel with its packet: no peer has to remember anything of another. What a fresh one cannot tell
    goes in full, once, and then its ranges are as wide as the others'."""
    method, body = METHODS[name], ToyBody(2)

    def restart(worker: Addr, round: int, sponsor: Addr, roll: Roll) -> Program:
        state = fresh(worker, method, toy_start(), round)
        state.roll = Roll(list(roll.epochs))
        return back(seat_of(worker, method), state, sponsor, peer(seat_of(worker, method), state))

    hooks = Kept()
    programs = [peer(seat_of(i, method), fresh(i, method, toy_start())) for i in range(N)]
    bodies = [body if i == 2 else ToyBody(i) for i in range(N)]
    absences = Absences({2: 3}, {2: 6}, restart)
    Simulation(programs, bodies, Links(lambda *_: 0.05), Times(*[0.1] * N), hooks, absences=absences).run()
    mine = sorted(r["round"] for r in hooks.rounds() if r["worker"] == 2)
    again = min(t for t in mine if t > 3)
    assert mine == [1, 2, 3, *range(again, ROUNDS + 1)]
    steps = {i: torch.cat([m.flatten() for m in hooks.memory[ROUNDS][i].values()]).double() for i in range(N)}
    usual = torch.stack([steps[i] for i in range(N) if i != 2]).mean(0)
    assert float((steps[2] - usual).abs().mean()) <= 1.5, "its steps are other powers of two than its peers'"
    late = [r.get("sent_in_full", 0.0) for r in hooks.rounds() if r["round"] > again + 3]
    assert sum(late) / len(late) < 0.1


def test_signs_count_by_the_tokens_of_those_who_take_part() -> None:
    """Without worker 3, half of the fleet's tokens, the mean of the others moves by their own token-weighted mean drift, no less."""
    method = replace(gasloc(UNEQUAL, codec="signs", topology="complete", outer_lr=1.0, outer_momentum=0.0), rounds=1)
    living = [i for i in range(N) if i != 3]
    states = [fresh(i, method, toy_start()) for i in range(N)]
    for state in states:
        state.roll.enter(0, {3})
    got = Lockstep(method).run(resume=[(state, ToyBody(i, method.inner).state()) for i, state in enumerate(states)])
    plan, want = method.plan, {k: v.double() for k, v in toy_start().items()}
    for i in living:
        body = ToyBody(i, method.inner)
        for _ in range(plan.steps[i]):
            body.gradient(plan.batch[i])
            body.take()
        for k, p in body.params.items():
            want[k] -= plan.tokens(i) / sum(plan.tokens(j) for j in living) * (toy_start()[k] - p.data).double()
    torch.testing.assert_close(flat_mean([got[i].x for i in living]), flat_mean([want]), rtol=0, atol=1e-6)


class Told(Absences):
    """The deaths of a run as the metrics of another tell them: from which round on the graphs leave the dead out."""

    def __init__(self, kills: dict[Addr, int], notes: list[dict[str, Any]]) -> None:
        super().__init__(kills)
        for r in sorted((r for r in notes if r["kind"] == "members"), key=lambda r: r["round"]):
            self.roll.enter(r["round"], r["absent"])

    def bury(self, worker: Addr, rounds: Any) -> None:
        self.gone[worker] = float("inf")


class Died(Exception):
    """A worker of a test is gone."""


def real(method: Method, kills: dict[Addr, int]) -> tuple[dict[Addr, State], list[dict[str, Any]]]:
    """The living's final states, and all notes, of workers in threads over gloo."""
    notes: list[dict[str, Any]] = []

    def job(group: Group) -> State | None:
        def die(round: int) -> None:
            if kills.get(group.me) == round:
                group.board.wait(lambda: not any(group.transport.sending.values()))
                time.sleep(0.05)  # what is on its way arrives: what a broken connection loses is another test's
                group._hang_up()
                group._closed = True
                raise Died

        hooks = NetHooks(die)
        try:
            final, _ = run(peer(seat_of(group.me, method), fresh(group.me, method, toy_start())), ToyBody(group.me), hooks, group)
        except Exception:
            if group.me in kills:
                return None
            raise
        finally:
            notes.extend(hooks.notes)
        return final

    found = in_threads(N, job, survives=True)
    return {i: state for i, state in enumerate(found) if state is not None}, notes


@pytest.mark.parametrize("name", METHODS)
def test_a_real_run_with_a_death_has_the_bits_that_its_metrics_tell(name: str) -> None:
    """When the living agree depends on the moment. Given what the metrics say of it, the simulator ends with the same bits."""
    method, kills = METHODS[name], {2: 5}
    living, notes = real(method, kills)
    assert sorted(living) == [0, 1, 3, 4] and any(r["kind"] == "members" for r in notes)
    programs = [peer(seat_of(i, method), fresh(i, method, toy_start())) for i in range(N)]
    hooks = Hooks()
    world = Simulation(
        programs, [ToyBody(i) for i in range(N)], Links(lambda *_: 0.05), Times(*[0.1] * N), hooks, absences=Told(kills, notes)
    )
    final = world.run().final
    for i, state in living.items():
        same = final[i]
        assert same is not None
        assert all(torch.equal(state.x[k], same.x[k]) for k in state.x), f"worker {i}"
        assert all(torch.equal(state.memory[k], same.memory[k]) for k in state.memory)
        assert all(torch.equal(state.outer[s][k], same.outer[s][k]) for s in state.outer for k in state.x)
    assert story(notes, living) == story(hooks.notes, living)


def story(notes: list[dict[str, Any]], living: Collection[Addr]) -> list[Any]:
    rounds = [r for r in notes if r["kind"] == "round" and r["worker"] in living]
    return sorted((r["round"], r["worker"], r.get("absent", []), r.get("sent_in_full", 0.0)) for r in rounds)
