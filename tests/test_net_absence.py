"""Real workers that die, and exchanges that are given up: the agreement by enumeration of chances, then in threads over gloo."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from dataclasses import replace

import pytest
import torch
from net_toys import Body, Hooks, all_but, in_threads, talk
from still import StillBody, mean_of, seat_of, setting, state_of, still

from gossamer.core.members import over
from gossamer.core.method import Method
from gossamer.core.spread import spread
from gossamer.core.tree import Tree
from gossamer.real import Group, run
from gossamer.real.members import Members, View
from gossamer.real.pairs import Pairs
from gossamer.recipes import gasloc
from gossamer.worker.effects import Done, Stop, Work
from gossamer.worker.peer import peer

N = 4


class Town:
    """Members of n workers whose notes take their time; workers die at any moment, in the middle of a broadcast too."""

    def __init__(self, n: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.members = [Members(i, n) for i in range(n)]
        self.alive = set(range(n))
        self.wires: dict[tuple[int, int], deque[View | None]] = {(i, j): deque() for i in range(n) for j in range(n) if i != j}
        self.entered: list[dict[int, frozenset[int]]] = [{0: frozenset()} for _ in range(n)]

    def publish(self, i: int, view: View | None, reach: float = 1.0) -> None:
        for j in self.members:
            if view is not None and j.me != i and self.rng.random() < reach:
                self.wires[i, j.me].append(view)

    def die(self, i: int) -> None:
        """Some of what it said last is lost; then its connections close."""
        self.alive.remove(i)
        for j in range(len(self.members)):
            if j != i:
                wire = self.wires[i, j]
                while wire and self.rng.random() < 0.5:
                    wire.pop()
                wire.append(None)

    def step(self) -> None:
        ready = [(i, j) for (i, j), wire in self.wires.items() if wire and j in self.alive]
        if ready and self.rng.random() < 0.7:
            i, j = self.rng.choice(ready)
            view = self.wires[i, j].popleft()
            mine = self.members[j].learn(frozenset({i})) if view is None else self.members[j].hear(i, view)
            self.publish(j, mine)
            return
        i = self.rng.choice(sorted(self.alive))
        if self.members[i].settled:
            self.members[i].passed += 1
            self.entered[i][self.members[i].passed] = self.members[i].absent(self.members[i].passed)


@pytest.mark.parametrize("seed", range(300))
def test_all_living_agree_in_every_round_on_who_takes_part(seed: int) -> None:
    town, n = Town(5, seed), 5
    deaths = {town.rng.randrange(60): town.rng.randrange(n) for _ in range(town.rng.randrange(1, 4))}
    ask, asker = town.rng.randrange(90), -1
    for moment in range(600):
        if (dies := deaths.get(moment)) in town.alive:
            town.die(dies)
        if moment == ask and town.alive:
            asker = min(town.alive)
            town.publish(asker, town.members[asker].learn(frozenset({n})))
        town.step()
    rounds = {t for i in town.alive for t in town.entered[i]}
    for t in rounds:
        assert len({town.entered[i][t] for i in town.alive if t in town.entered[i]}) == 1, f"round {t}"
    gone = set(range(n)) - town.alive
    for i in town.alive:
        assert town.members[i].settled and town.members[i].dead - {n} == gone
        assert asker not in town.alive or n in town.members[i].dead
        assert town.members[i].since == town.members[min(town.alive)].since
        assert max(town.entered[i]) > max(town.members[i].since[j] for j in gone), "it went on without them"


@pytest.mark.parametrize("seed", range(200))
def test_a_pair_has_one_verdict_whoever_gives_up_when(seed: int) -> None:
    """Two workers, packets and notes in any order, deadlines at any moment: both take or both skip, and both get to know."""
    rng, tag = random.Random(seed), 41
    notes: dict[int, deque[bool]] = {0: deque(), 1: deque()}
    pairs = [Pairs(i, lambda j, tag, taken: notes[j].append(taken)) for i in (0, 1)]
    waits, here = [False, False], [False, False]
    found: list[bool | None] = [None, None]
    todo = ["say0", "say1", "give0", "give1"]
    rng.shuffle(todo)
    todo = [step for step in todo if step.startswith("say") or rng.random() < 0.6]
    sent: list[int] = []
    for _ in range(200):
        choice = rng.random()
        if todo and choice < 0.3:
            step, i = todo[0][:-1], int(todo[0][-1])
            if step == "say":
                waits[i] = True
                sent.append(1 - i)
            elif not waits[i]:
                todo.append(todo[0])
            elif found[i] is None:
                pairs[i].give_up(tag, 1 - i)
            todo.pop(0)
        elif sent and choice < 0.5:
            here[sent.pop(rng.randrange(len(sent)))] = True
        else:
            j = rng.randrange(2)
            if notes[j]:
                pairs[j].hear(1 - j, tag, notes[j].popleft())
        for i in (0, 1):
            if waits[i] and found[i] is None:
                found[i] = pairs[i].resolved(tag, 1 - i, here[i])
    assert found[0] is not None and found[0] == found[1]


class Died(Exception):
    """A worker of a test is gone."""


def fleet(method: Method, kill: dict[int, int], pauses: dict[int, float] | None = None, say: bool = False) -> dict[int, tuple[Tree, list]]:
    """Runs still workers in threads; who is to die goes without a word, or saying so. Returns anchor and notes of the others."""
    gone: list[int] = []

    class Paced(StillBody):
        def compute(self, work: Work) -> Done:
            time.sleep((pauses or {}).get(self.me, 0.003))
            return super().compute(work)

    def job(group: Group) -> tuple[Tree, list] | None:
        hooks = Hooks(lambda round: die(group) if kill.get(group.me) == round else None)
        body = Paced(group.me)
        body.me = group.me
        try:
            final, account = run(still(group.me, method), body, hooks, group, rounds0=1)
        except Died:
            return None
        assert sum(account.seconds.values()) == pytest.approx(account.wall_s, rel=1e-6)
        return final.x, hooks.notes

    def die(group: Group) -> None:
        gone.append(group.me)
        if not say:
            group._hang_up()
            group._closed = True
        raise Died

    def tolerant(group: Group) -> tuple[Tree, list] | None:
        try:
            return job(group)
        except Exception as error:
            if group.me in kill:
                return None
            raise AssertionError(f"worker {group.me} did not go on") from error

    found = in_threads(method.n, tolerant, survives=True)
    assert sorted(gone) == sorted(kill)
    return {i: result for i, result in enumerate(found) if result is not None}


@pytest.mark.parametrize("say", [False, True])
@pytest.mark.parametrize("kill", [{2: 5}, {0: 3, 3: 4}])
def test_the_others_go_on_and_their_mean_stays(kill: dict[int, int], say: bool) -> None:
    method = gasloc(setting(N + 1, 20), outer_lr=1.0, outer_momentum=0.0)
    results = fleet(method, kill, say=say)
    assert sorted(results) == [i for i in range(N + 1) if i not in kill]
    notes = [r for _, told in results.values() for r in told]
    members = [r for r in notes if r["kind"] == "members"]
    assert members and set(members[-1]["absent"]) == set(kill)
    since = {j: min(r["round"] for r in members if j in r["absent"]) for j in kill}
    epochs = {r["round"]: frozenset(r["absent"]) for r in members}
    for r in notes:
        if r["kind"] == "round":
            t, me = r["round"] - 1, r["worker"]
            absent = frozenset().union(*[a for start, a in epochs.items() if start <= t])
            peers = over(method.topology, absent, t).inn(me)
            assert set(r.get("absent", [])) <= {j for j in kill if kill[j] <= t < since[j]} & set(peers)
            assert set(map(int, r["weights"])) == {me, *peers} - set(r.get("absent", []))
    trees = [x for x, _ in results.values()]
    apart = max(float((x["w"] - mean_of(trees)).norm()) for x in trees)
    assert apart < 0.05


def test_a_fleet_may_die_down_to_one() -> None:
    method = gasloc(setting(3, 12), topology="one_peer", outer_momentum=0.0)
    results = fleet(method, {0: 3, 2: 6})
    assert list(results) == [1]
    assert len([r for r in results[1][1] if r["kind"] == "round"]) == 11


def test_past_the_deadline_both_sides_skip_in_the_real_world_too() -> None:
    """Worker 1 is slow: it gets skipped, and skips. The mean of all stays to rounding, whatever the moments were."""
    method = replace(gasloc(setting(N, 12), outer_lr=1.0, outer_momentum=0.0), deadline_s=0.05)
    results = fleet(method, {}, {1: 0.3})
    absent = {(r["round"], r["worker"], j) for _, told in results.values() for r in told for j in r.get("absent", [])}
    assert absent and all((t, j, i) in absent for t, i, j in absent)
    trees = [x for x, _ in results.values()]
    torch.testing.assert_close(mean_of(trees), mean_of([state_of(i, method).x for i in range(N)]), rtol=0, atol=4e-6)


def test_nobody_waits_for_anybody_but_the_peers_of_the_round() -> None:
    """Worker 0 stands still in round 3 until all others are as far as the graphs let them get. A barrier anywhere, and they never would."""
    n, r = 6, 3
    method = gasloc(setting(n, 14), topology="one_peer")
    sets = list(spread(method.topology, 0, r))
    furthest = {i: r + min(k for k, held in enumerate(sets) if i in held) for i in range(1, n)}
    assert max(furthest.values()) > r, "a seed for which somebody gets ahead"
    there, lock, done = threading.Event(), threading.Lock(), dict.fromkeys(range(n), 0)

    class Standing(StillBody):
        def compute(self, work: Work) -> Done:
            if self.me == 0 and done[0] == r:
                assert there.wait(30), f"somebody waited: {done}, expected {furthest}"
            return super().compute(work)

    def job(group: Group) -> int:
        def crossed(round: int) -> None:
            with lock:
                done[group.me] = round
                if all(done[i] >= far for i, far in furthest.items()):
                    there.set()

        body = Standing(group.me)
        body.me = group.me
        state = state_of(group.me, method)
        final, _ = run(peer(seat_of(group.me, method), state), body, Hooks(crossed), group, rounds0=1)
        return final.round

    assert in_threads(n, job) == [14] * n


def test_real_workers_can_be_kept_together() -> None:
    """Worker 0 of a ring is slow, and the graph would let others be three rounds ahead. What is counted here comes a moment after a worker
    has told the others of its round, so that a bound of one round shows as two."""
    n, lock, done, apart = 8, threading.Lock(), dict.fromkeys(range(8), 0), []

    def job(group: Group) -> int:
        def crossed(round: int) -> None:
            with lock:
                done[group.me] = round
                apart.append(max(done.values()) - min(done.values()))

        sides = sorted({(group.me - 1) % n, (group.me + 1) % n})
        body = Body(0.02 if group.me == 0 else 0.0)
        return run(talk(group.me, lambda _: sides, 15), body, Hooks(crossed), group, ahead=1)[0].round

    assert in_threads(n, job) == [15] * n
    assert max(apart) <= 2


def test_a_stop_is_agreed_on_by_those_who_are_left() -> None:
    def job(group: Group) -> tuple[int, int | None]:
        def at_boundary(round: int) -> Stop | None:
            if group.me == 3 and round == 4:
                group._hang_up()
                group._closed = True
                raise Died
            return Stop() if group.me == 1 and round >= 6 else None

        try:
            peers = all_but(group.me, N - 1) if group.me < N - 1 else ()
            state, _ = run(talk(group.me, lambda t: peers, 10_000), Body(0.001), Hooks(at_boundary), group)
        except Exception:
            assert group.me == 3
            return 0, None
        return state.round, group.stopped_by

    found = in_threads(N, job, survives=True)
    assert len(set(found[:3])) == 1 and found[0][0] > 6 and found[0][1] == 0
