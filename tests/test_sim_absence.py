"""Absent peers and no barrier, on the virtual clock: deaths, deadlines, returns, and how far a delay spreads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sim_toys import Hooks, Links, Times
from still import StillBody, mean_of, seat_of, state_of, still

from gossamer.core.errors import RunFailed
from gossamer.core.members import Roll, over
from gossamer.core.method import Method
from gossamer.core.plan import Plan
from gossamer.core.schedule import Constant
from gossamer.core.spread import ahead, spread
from gossamer.core.tree import Tree
from gossamer.recipes import Setting, dadam, diloco, gasloc
from gossamer.sim.absence import Absences
from gossamer.sim.driver import Simulation
from gossamer.sim.models import SimResult
from gossamer.worker.effects import Addr, Go, Program, Stop
from gossamer.worker.entry import back
from gossamer.worker.peer import peer, start
from gossamer.worker.state import State

N, ROUNDS = 6, 16


def setting(n: int = N, rounds: int = ROUNDS) -> Setting:
    return Setting(Plan((3,) * n, (1,) * n, 4), rounds=rounds, seed=3, schedule=Constant())


PLAIN: dict[str, Method] = {
    "dadam": replace(dadam(setting(), topology="two_peer"), rounds=ROUNDS),
    "ring": gasloc(setting(), topology="ring", outer_lr=1.0, outer_momentum=0.0),
    "one_peer": gasloc(setting(), topology="one_peer", outer_lr=1.0, outer_momentum=0.0),
    "two_peer": gasloc(setting(), outer_lr=0.8, outer_momentum=0.0),
    "overlap": gasloc(setting(), outer_lr=1.0, outer_momentum=0.0, overlap=0.5),
    "late": gasloc(setting(), topology="one_peer", outer_lr=1.0, outer_momentum=0.0, overlap=1.0),
}


class Snapshots(Hooks):
    """Keeps every worker's anchor at every boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.x: dict[int, dict[Addr, Tree]] = defaultdict(dict)
        self.at_s: dict[int, dict[Addr, float]] = defaultdict(dict)

    def boundary(self, worker: Addr, round: int, time_s: float, state: State, body: object) -> Go | Stop:
        self.x[round][worker] = {k: v.clone() for k, v in state.x.items()}
        self.at_s[round][worker] = time_s
        return super().boundary(worker, round, time_s, state, body)

    def rounds(self) -> list[dict[str, Any]]:
        return [r for r in self.notes if r["kind"] == "round"]

    def members(self) -> list[dict[str, Any]]:
        return [r for r in self.notes if r["kind"] == "members"]


def simulate(
    method: Method, step_s: Callable[[Addr], float] = lambda i: 1.0 + 0.1 * i, absences: Absences | None = None, link_s: float = 0.05
) -> tuple[SimResult, Snapshots]:
    hooks, n = Snapshots(), method.n
    bodies = [StillBody(i) for i in range(n)]
    programs = [still(i, method) for i in range(n)]
    times = Times(*[step_s(i) / 3 for i in range(n)])
    world = Simulation(programs, bodies, Links(lambda *_: link_s), times, hooks, rounds0=[1] * n, absences=absences)
    return world.run(), hooks


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kills", [{2: 5}, {0: 2, 5: 7}, {1: 4, 2: 4, 3: 9}])
def test_after_a_death_the_mean_of_the_living_stays_and_they_come_together(name: str, kills: dict[Addr, int]) -> None:
    """What a worker said before its death counts where it arrived. From its own last boundary on it is heard by nobody, so that the mean
    of the others moves no more: the exchange is skipped, later the graph is theirs alone."""
    method = PLAIN[name]
    absences = Absences(kills)
    result, hooks = simulate(method, absences=absences)
    living = [i for i in range(N) if i not in kills]
    assert [state is None for state in result.final] == [i in kills for i in range(N)]
    after = max(kills.values()) + (1 if PLAIN[name].cadence.overlap else 0)  # what was said in its last round may land in the next
    want = mean_of([hooks.x[after][i] for i in living])
    spread_of = []
    for round in range(after, ROUNDS + 1):
        trees = [hooks.x[round][i] for i in living]
        torch.testing.assert_close(mean_of(trees), want, rtol=0, atol=2e-6)
        spread_of.append(float(torch.stack([t["w"].double() for t in trees]).sub(mean_of(trees)).norm()))
    assert spread_of[-1] < (0.2 if name == "ring" else 0.1) * max(spread_of[0], 1e-3)
    for account in result.accounts:
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-9)


def test_the_metrics_tell_the_story_of_a_death() -> None:
    method = PLAIN["two_peer"]
    _, hooks = simulate(method, absences=Absences({2: 5}))
    (members,) = hooks.members()
    since = members["round"]
    assert members["absent"] == [2] and members["worker"] == 0
    assert 5 <= since <= 5 + 1 + max(ahead(method.topology, j, 5) for j in range(N))
    for record in hooks.rounds():
        t, me = record["round"] - 1, record["worker"]
        peers = over(method.topology, frozenset({2}) if t >= since else frozenset(), t).inn(me)
        gone = [2] if 5 <= t < since and 2 in peers else []
        assert record.get("absent", []) == gone
        assert set(map(int, record["weights"])) == {me, *peers} - set(gone)
    assert {r["worker"] for r in hooks.rounds() if r["round"] > 5} == {0, 1, 3, 4, 5}


def test_a_death_is_noticed_at_once_and_nobody_waits_longer() -> None:
    """Equal workers: the dead worker's last boundary is everybody's, and the next round takes no longer than any other."""
    whole, _ = simulate(PLAIN["ring"], lambda i: 1.0)
    result, _ = simulate(PLAIN["ring"], lambda i: 1.0, Absences({2: 5}))
    assert result.accounts[0].wall_s == pytest.approx(whole.accounts[0].wall_s, rel=1e-9)


@pytest.mark.parametrize("name", ["ring", "one_peer", "two_peer", "dadam", "overlap", "late"])
def test_past_the_deadline_both_sides_skip_and_the_mean_stays(name: str) -> None:
    """Worker 4 is slow. Whoever gives up on it is given up by it, and it catches up on nothing: the mean of all stays to rounding."""
    method = replace(PLAIN[name], deadline_s=1.5)
    result, hooks = simulate(method, lambda i: 5.0 if i == 4 else 1.0)
    absent = {(r["round"], r["worker"], j) for r in hooks.rounds() for j in r.get("absent", [])}
    assert absent and {j for _, _, j in absent} >= {4}
    assert all((t, j, i) in absent for t, i, j in absent), "one side skipped alone"
    for round, trees in hooks.x.items():
        torch.testing.assert_close(mean_of(list(trees.values())), mean_of(list(hooks.x[2].values())), rtol=0, atol=4e-6, msg=str(round))
    patient, _ = simulate(PLAIN[name], lambda i: 5.0 if i == 4 else 1.0)
    others = [i for i in range(N) if i != 4]
    assert max(result.accounts[i].wall_s for i in others) < 0.8 * max(patient.accounts[i].wall_s for i in others)
    again, _ = simulate(method, lambda i: 5.0 if i == 4 else 1.0)
    assert again.accounts == result.accounts


def test_a_deadline_that_nobody_misses_changes_nothing() -> None:
    method = PLAIN["two_peer"]
    want, _ = simulate(method)
    got, hooks = simulate(replace(method, deadline_s=50.0))
    assert got.accounts == want.accounts
    assert all(torch.equal(a.x["w"], b.x["w"]) for a, b in zip(got.final, want.final, strict=True) if a and b)
    assert not any("absent" in r for r in hooks.rounds())


@pytest.mark.parametrize("name", ["two_peer", "ring", "overlap", "late"])
def test_who_comes_back_takes_a_peers_state_and_its_place(name: str) -> None:
    method = replace(PLAIN[name], outer=replace(PLAIN[name].outer, momentum=0.5))
    body = StillBody(2)

    def restart(worker: Addr, round: int, sponsor: Addr, roll: Roll) -> Program:
        took.append((worker, round, sponsor))
        state = start(seat_of(worker, method), state_of(worker, method).x)
        state.round, state.roll = round, Roll(list(roll.epochs))
        seat = seat_of(worker, method)
        return back(seat, state, sponsor, peer(seat, state))

    took: list[tuple[Addr, int, Addr]] = []
    absences = Absences({2: 3}, {2: 7}, restart)
    hooks = Snapshots()
    bodies = [body if i == 2 else StillBody(i) for i in range(N)]
    times = Times(*[(1.0 + 0.1 * i) / 3 for i in range(N)])
    world = Simulation(
        [still(i, method) for i in range(N)], bodies, Links(lambda *_: 0.05), times, hooks, rounds0=[1] * N, absences=absences
    )
    result = world.run()
    ((_, since, sponsor),) = took
    gone, came = hooks.members()
    assert (gone["absent"], came["absent"], came["round"]) == ([2], [], since) and since > 7
    assert [state.round for state in result.final if state] == [ROUNDS] * N
    assert body.resets == 1
    mine = sorted(r["round"] for r in hooks.rounds() if r["worker"] == 2)
    assert mine == [2, 3, *range(since + 1, ROUNDS + 1)]
    # It begins as its sponsor: with the mean of the others and one more of the sponsor, which from then on stays.
    others = [hooks.x[since][i] for i in range(N) if i != 2]
    last = [state.x for state in result.final if state]
    if method.outer.momentum == 0:
        torch.testing.assert_close(mean_of(last), mean_of([*others, hooks.x[since][sponsor]]), rtol=0, atol=4e-6)
    lands = since + 1 + bool(method.cadence.overlap)
    first = next(r for r in hooks.rounds() if r["worker"] == 2 and r["round"] == lands)
    assert set(map(int, first["weights"])) == {2, *method.topology.at(since).inn(2)}
    assert result.accounts[sponsor].bytes_sent > min(a.bytes_sent for a in result.accounts)


def test_a_synchronous_run_ends_with_the_death() -> None:
    method = diloco(setting())
    programs = [peer(seat_of(i, method), start(seat_of(i, method), {})) for i in range(N)]
    world = Simulation(
        programs, None, Links(lambda *_: 0.05), Times(*[1.0] * N), None, sequence=4, absences=Absences({2: 5}, goes_on=False)
    )
    with pytest.raises(RunFailed, match="worker 2 died after round 5"):
        world.run()


@pytest.mark.parametrize("name", ["ring", "one_peer", "two_peer", "dadam"])
def test_a_slow_worker_delays_its_peers_of_the_moment_and_then_theirs(name: str) -> None:
    """Worker s is five times as slow from round r on. In the trace of round r + k, exactly the workers of A_k are later than without it."""
    method, s, r = PLAIN[name], 3, 4

    class SlowFrom(Times):
        def steps_s(self, worker: Addr, round: int, first_step: int, steps: int, batch: int) -> float:
            return super().steps_s(worker, round, first_step, steps, batch) * (5.0 if worker == s and round >= r else 1.0)

    def crossed(times: Times) -> Snapshots:
        hooks = Snapshots()
        bodies = [StillBody(i) for i in range(N)]
        Simulation([still(i, method) for i in range(N)], bodies, Links(lambda *_: 0.05), times, hooks, rounds0=[1] * N).run()
        return hooks

    even, slow = crossed(Times(*[1.0] * N)), crossed(SlowFrom(*[1.0] * N))
    sets = list(spread(method.topology, s, r, lag=int(method.outer.before)))
    for k, held in enumerate(sets):
        late = {i for i in range(N) if slow.at_s[r + k + 1][i] > even.at_s[r + k + 1][i] + 1e-9}
        assert late == held
    idle = {worker for worker, kind, _, _, round in slow.spans if kind == "straggler_idle" and round == r}
    assert sets[0] - {s} <= idle and not idle & (set(range(N)) - sets[0])
    apart = max(max(done) - min(done) for done in _standings(slow))
    assert 1 <= apart <= max(ahead(method.topology, j, t, int(method.outer.before)) for j in range(N) for t in range(ROUNDS))


@pytest.mark.parametrize("most", [1, 2, 9])
def test_how_far_ahead_workers_may_be_can_be_bounded(most: int) -> None:
    """On a ring, where the graph lets them be two rounds apart. It costs the fast their lead and nobody a bit; what they lose is idle."""

    def run(ahead: int) -> tuple[SimResult, Snapshots]:
        hooks, method = Snapshots(), PLAIN["ring"]
        bodies = [StillBody(i) for i in range(N)]
        times = Times(*[4.0 if i == 1 else 1.0 for i in range(N)])
        programs = [still(i, method) for i in range(N)]
        return Simulation(programs, bodies, Links(lambda *_: 0.05), times, hooks, rounds0=[1] * N, ahead=ahead).run(), hooks

    (free, unbound), (held, bound) = run(0), run(most)
    assert max(max(done) - min(done) for done in _standings(bound)) == min(most, 2)
    assert max(max(done) - min(done) for done in _standings(unbound)) == 2
    assert all(torch.equal(a.x["w"], b.x["w"]) for a, b in zip(held.final, free.final, strict=True) if a and b)
    assert (held.accounts == free.accounts) == (most >= 2)
    for account in held.accounts:
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-9)


def _standings(hooks: Snapshots) -> list[list[int]]:
    """Rounds completed by each worker, after every crossing."""
    done, found = [1] * N, []
    for worker, round, _ in hooks.crossed:
        done[worker] = round
        found.append(list(done))
    return found
