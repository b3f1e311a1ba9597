"""Re-planning while running: one plan on all workers, only when it pays, bit for bit in every world and across a resume."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lockstep import Lockstep
from net_toys import Hooks, in_threads
from toy import ToyBody, toy_layout, toy_start

from gossamer.core.errors import BadInput, RunFailed
from gossamer.core.fleet import Fleet, Gpu, Link, Site
from gossamer.core.inner import AdamW
from gossamer.core.method import Method
from gossamer.core.plan import Plan, uniform
from gossamer.core.replan import Planned, Replan
from gossamer.core.schedule import Constant
from gossamer.core.slowdown import Slowdown
from gossamer.real import Group, run
from gossamer.recipes import Setting, diloco, gasloc, geomesh
from gossamer.sim.driver import Simulation
from gossamer.sim.memo import MemoCombine
from gossamer.sim.models import SimResult
from gossamer.sim.network import Network
from gossamer.sim.timing import ComputeTime
from gossamer.train import checkpoint, packing
from gossamer.worker.account import Account
from gossamer.worker.effects import Body, Done, Go, Stop, Work
from gossamer.worker.packet import HEADER_BYTES, Header, blank, seal, unseal
from gossamer.worker.peer import peer, start
from gossamer.worker.seat import Seat
from gossamer.worker.state import State

N, ROUNDS, H = 4, 10, 6
FIRST = uniform(N, steps=H, batch=2, sequence=ToyBody.LENGTH)
SETTING = Setting(FIRST, rounds=ROUNDS, seed=3, inner=AdamW(lr=1e-2), schedule=Constant())
GATHER = geomesh(SETTING, replan=0.05, correction="work")
METHODS = {
    "gather": GATHER,
    "fragments": diloco(SETTING, weights="tokens", fragments=2, overlap=0.3, replan=0.05, replan_smoothing=0.6, correction="work"),
    "overlap": geomesh(SETTING, overlap=0.4, replan=0.05, replan_smoothing=0.6),
    "shard_overlap": diloco(SETTING, overlap=0.4, replan=0.05, correction="work"),
    "feedback": geomesh(SETTING, error_feedback=True, replan=0.05, correction="work"),
}
SITES = tuple(Site(f"s{i}", "here", Gpu("card", 1.0, 16.0), 10.0, 20.0, overhead_s=0.1) for i in range(N))
FLEET = Fleet("toys", SITES, {("here", "here"): Link(100.0, 1.0)})
SLOW = Slowdown(worker=1, factor=3.0, at=0.5)


class TimedBody(ToyBody):
    """Says how long its steps take, the same in every world: worker 1 three times as long from round five on, all a little unevenly."""

    def compute(self, work: Work) -> Done:
        at = self.cursor
        slow = 3.0 if self.worker == 1 and at >= 4 * H else 1.0
        return super().compute(work)._replace(seconds=work.steps * slow * (0.1 + 0.001 * (at % 7)))


def simulated(method: Method, bodies: list[ToyBody] | None, slowdown: Slowdown | None = SLOW, resume: Any = None) -> tuple[SimResult, Any]:
    combine = MemoCombine()
    seats = [Seat(i, method, toy_layout(), run_id=7, combine=combine) for i in range(N)]
    states = [start(seat, toy_start() if bodies else {}) for seat in seats]
    if resume:
        states = [copy.deepcopy(state) for state, _ in resume]
        for body, (_, kept) in zip(bodies or [], resume, strict=True):
            body.load_state(copy.deepcopy(kept))
    timing = ComputeTime(FLEET, ToyBody.LENGTH, 1e9, seed=1, slowdown=slowdown, rounds=method.rounds)
    hooks = Keeper()
    world = Simulation(
        [peer(seat, state) for seat, state in zip(seats, states, strict=True)],
        bodies,
        Network(FLEET, 1),
        timing,
        hooks,
        sequence=ToyBody.LENGTH,
        rounds0=[states[0].round] * N,
    )
    return world.run(), hooks


class Keeper:
    """Keeps the notes, and every worker's state at every boundary."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        self.saved: dict[int, list[Any]] = {}

    def boundary(self, worker: int, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        self.saved.setdefault(round, [None] * N)[worker] = copy.deepcopy((state, body.state() if body else None))
        return Go()

    def note(self, record: dict[str, Any]) -> None:
        self.notes.append(record)

    def span(self, worker: int, kind: str, start_s: float, end_s: float, round: int) -> None: ...


@cache
def slowed(name: str) -> tuple[SimResult, Keeper]:
    """The run of METHODS[name] with noise and drift on, and worker 1 slowed to a third in the middle."""
    return simulated(METHODS[name], [ToyBody(i, METHODS[name].inner) for i in range(N)])


def same(states: list[Any], want: list[Any]) -> bool:
    return all(torch.equal(a.x[k], b.x[k]) for a, b in zip(states, want, strict=True) for k in b.x)


def plans(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [note for note in notes if note["kind"] == "plan"]


# ---- what is decided


def test_a_new_plan_is_taken_from_the_threshold_on() -> None:
    rule = Replan(threshold=0.2)
    times = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
    even = rule.decide(Planned(), FIRST, times, since=1)
    assert even.gain == 0.0 and even.planned.version == 0
    best = rule.decide(Planned(), FIRST, times | {1: 3.0}, since=1)
    assert best.gain is not None and best.gain > 0.2 and best.planned.plan is not None
    assert best.planned.plan.tokens_per_round == FIRST.tokens_per_round and best.planned.plan.batch == FIRST.batch
    promised = best.gain
    assert Replan(threshold=promised).decide(Planned(), FIRST, times | {1: 3.0}, since=1).planned.version == 1
    assert Replan(threshold=promised * 1.001).decide(Planned(), FIRST, times | {1: 3.0}, since=1).planned.version == 0


def test_the_predicted_gain_is_time_per_token() -> None:
    rule = Replan(threshold=0.01)
    step_s = (0.5, 0.7, 1.1, 1.3)
    decision = rule.decide(Planned(), FIRST, dict(enumerate(step_s)), since=1)
    new = decision.planned.at(1, FIRST)
    old_s = max(h * s for h, s in zip(FIRST.steps, step_s, strict=True)) / FIRST.tokens_per_round
    new_s = max(h * s for h, s in zip(new.steps, step_s, strict=True)) / new.tokens_per_round
    assert decision.gain == 1 - new_s / old_s


def test_measurements_are_smoothed_and_unknown_ones_change_nothing() -> None:
    rule = Replan(threshold=0.9, smoothing=0.25)
    one = rule.decide(Planned(), FIRST, {0: 1.0, 1: 2.0}, since=1)
    assert one.gain is None and one.planned.step_s == (1.0, 2.0, 0.0, 0.0)
    two = rule.decide(one.planned, FIRST, {0: 3.0, 1: 0.0, 2: 4.0, 3: 8.0}, since=2)
    assert two.gain is not None and two.planned.step_s == (1.5, 2.0, 4.0, 8.0)


def test_patience_waits_for_a_gain_that_lasts() -> None:
    rule = Replan(threshold=0.05, smoothing=1.0, patience=2)
    slow, even = {0: 1.0, 1: 2.0, 2: 1.0, 3: 1.0}, dict.fromkeys(range(N), 1.0)
    planned = Planned()
    for round, (times, version) in enumerate([(slow, 0), (even, 0), (slow, 0), (slow, 1), (slow, 1)]):
        planned = rule.decide(planned, FIRST, times, since=round + 1).planned
        assert planned.version == version


def test_an_exchange_that_nothing_hides_is_reckoned_with() -> None:
    """A plan that makes room for a slow link is the best one, so it is kept."""
    times, unhidden_s = dict.fromkeys(range(N), 1.0), (0.0, 0.0, 0.0, 4.0)
    first = Plan((7, 7, 7, 3), FIRST.batch, FIRST.sequence)
    assert Replan(unhidden_s=unhidden_s).decide(Planned(), first, times, since=1).planned.version == 0
    assert Replan().decide(Planned(), first, times, since=1).planned.version == 1


def test_who_does_not_take_part_is_left_out_and_keeps_its_steps() -> None:
    """Three of four: planned as a fleet of those three would be, whether the fourth was ever measured or not."""
    rule, small, there = Replan(threshold=0.05), replace(FIRST, steps=FIRST.steps[:3], batch=FIRST.batch[:3]), (0, 1, 3)
    want = rule.decide(Planned(), small, {0: 1.0, 1: 3.0, 2: 2.0}, since=1)
    for known in (Planned(), Planned(step_s=(0.0, 0.0, 50.0, 0.0))):
        got = rule.decide(known, FIRST, {0: 1.0, 1: 3.0, 3: 2.0}, since=1, there=there)
        new = got.planned.at(1, FIRST)
        assert got.gain == want.gain and got.planned.version == 1
        assert new.among(there).steps == want.planned.at(1, small).steps and new.steps[2] == FIRST.steps[2]
        assert rule.decide(known, FIRST, {0: 1.0, 1: 3.0, 3: 2.0}, since=1).planned.plan != got.planned.plan
    exact = replace(FIRST, exact=tuple(map(float, FIRST.steps)))
    new = rule.decide(Planned(), exact, {0: 1.0, 1: 3.0, 3: 2.0}, since=1, there=there).planned.at(1, exact)
    assert new.exact[2] == exact.exact[2] and new.among(there).usual_tokens == exact.among(there).usual_tokens


def test_a_plan_holds_from_its_round_on() -> None:
    new, old = uniform(N, 3, 1, 4), uniform(N, 4, 1, 4)
    planned = Planned(version=2, since=5, plan=new, previous=old)
    assert [planned.at(t, FIRST) for t in (4, 5, 6)] == [old, new, new]
    assert replace(planned, version=1, previous=None).at(4, FIRST) is FIRST
    assert Planned().at(0, FIRST) is FIRST


# ---- in the simulator


@pytest.mark.parametrize("name", METHODS)
def test_all_workers_hold_one_plan_and_the_slowed_one_gets_less(name: str) -> None:
    method, (result, hooks) = METHODS[name], slowed(name)
    for round in range(1, ROUNDS + 1):
        assert len({state.planned for state, _ in hooks.saved[round]}) == 1
        assert len({state.tokens for state, _ in hooks.saved[round]}) == 1
    final = [state for state in result.final if state is not None]
    assert same(final[1:], final[:-1])
    taken = plans(hooks.notes)
    assert taken and [note["version"] for note in taken] == list(range(1, len(taken) + 1))
    assert final[0].planned.version == len(taken) and tuple(taken[-1]["steps"]) == final[0].planned.plan.steps
    assert all(note["predicted_gain"] >= 0.05 and note["round"] > SLOW.first_round(ROUNDS) for note in taken)
    assert taken[-1]["steps"][1] < H <= min(h for i, h in enumerate(taken[-1]["steps"]) if i != 1)
    fields = Path("docs/run-folder.md").read_text().split('`kind = "plan"`')[1].split("##")[0]
    assert {*taken[0]} - {"kind"} == {name for row in re.findall(r"^\| (`.*?) \|", fields, re.M) for name in re.findall(r"`(\w+)`", row)}
    rounds = {(note["round"], note["worker"]): note for note in hooks.notes if note["kind"] == "round"}
    assert [rounds[ROUNDS, i]["steps"] for i in range(N)] == taken[-1]["steps"]
    assert rounds[ROUNDS, 1]["tokens"] == taken[-1]["steps"][1] * 2 * ToyBody.LENGTH

    still, bare = simulated(replace(method, replan=None), None)
    assert not plans(bare.notes)
    waits = [sum(note["straggler_idle_s"] for note in h.notes if note["kind"] == "round" and note["round"] > 8) for h in (hooks, bare)]
    assert waits[0] < waits[1] / 2
    assert result.accounts[0].wall_s < still.accounts[0].wall_s


@pytest.mark.parametrize("name", ["gather", "shard_overlap"])
def test_without_a_reason_nothing_is_planned_anew(name: str) -> None:
    """Noise and drift alone stay below a threshold of 20 %, and the bits are those of a run that cannot plan anew."""
    method = replace(METHODS[name], replan=Replan(threshold=0.2))
    result, hooks = simulated(method, [ToyBody(i, method.inner) for i in range(N)], slowdown=None)
    assert not plans(hooks.notes) and len(hooks.saved[ROUNDS][0][0].planned.step_s) == N
    still, _ = simulated(replace(method, replan=None), [ToyBody(i, method.inner) for i in range(N)], slowdown=None)
    assert same(list(result.final), list(still.final))
    assert result.accounts == still.accounts


@pytest.mark.parametrize("name", METHODS)
def test_a_timing_only_run_plans_the_same(name: str) -> None:
    assert plans(simulated(METHODS[name], None)[1].notes) == plans(slowed(name)[1].notes)


@pytest.mark.parametrize("name", METHODS)
def test_a_resume_across_a_new_plan_is_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    """From the boundaries before and after the decision, by way of a checkpoint on disk."""
    method, (result, hooks) = METHODS[name], slowed(name)
    turn = plans(hooks.notes)[0]["round"]
    assert any(state.planned.version for state, _ in hooks.saved[turn])
    for round in (turn - 1, turn):
        kept = []
        for i, (state, body) in enumerate(hooks.saved[round]):
            hashes = {i: checkpoint.write_part(tmp_path / f"{i}", round, i, state, {})}
            checkpoint.close(tmp_path / f"{i}", round, state.tokens, hashes)
            read = checkpoint.read_part(tmp_path / f"{i}", round, i).state
            assert read.planned == state.planned
            kept.append((read, body))
        again, later = simulated(method, [ToyBody(i, method.inner) for i in range(N)], resume=kept)
        assert same(list(again.final), list(result.final))
        assert [s.planned for s in again.final if s] == [s.planned for s in result.final if s]
        key = ("version", "steps", "batch", "predicted_gain", "step_s", "round")
        assert [[n[k] for k in key] for n in plans(later.notes)] == [[n[k] for k in key] for n in plans(hooks.notes) if n["round"] > round]


def test_a_checkpoint_of_a_release_without_re_planning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(x=toy_start(), round=3)
    with monkeypatch.context() as patched:
        patched.setattr(packing, "asdict", lambda planned: {})
        checkpoint.close(tmp_path, 3, 0, {0: checkpoint.write_part(tmp_path, 3, 0, state, {})})
    assert checkpoint.read_part(tmp_path, 3, 0).state.planned == Planned()


# ---- in the real world


def trained(method: Method, ask_at: int = 1 << 30, resume: list[Any] | None = None) -> list[tuple[State, Account, Any]]:
    class Saver(Hooks):
        saved: Any = None

        def boundary(self, worker: int, round: int, time_s: float, state: State, body: Any) -> Go | Stop:
            if round == self.group.last_round:  # type: ignore[attr-defined]
                self.saved = copy.deepcopy((state, body.state()))
            return Stop() if round >= ask_at else Go()

    def job(group: Group) -> tuple[State, Account, Any]:
        seat, body = Seat(group.me, method, toy_layout(), run_id=7), TimedBody(group.me, method.inner)
        state = start(seat, toy_start())
        if resume:
            state, kept = copy.deepcopy(resume[group.me])
            body.load_state(kept)
        hooks = Saver()
        hooks.group = group  # type: ignore[attr-defined]
        final, account = run(peer(seat, state), body, hooks, group, rounds0=state.round)
        return final, account, hooks.saved

    return in_threads(N, job)


@pytest.mark.parametrize("name", METHODS)
def test_simulated_and_real_runs_plan_alike_and_have_the_same_bits(name: str) -> None:
    """Bodies that say how long their steps take, so that both worlds measure the same."""
    method = METHODS[name]
    plain = Lockstep(method, [TimedBody(i, method.inner) for i in range(N)])
    want = plain.run()
    assert want[0].planned.version > 0 and plans(plain.notes)
    sim, hooks = simulated(method, [TimedBody(i, method.inner) for i in range(N)])
    real = trained(method)
    for states in (list(sim.final), [final for final, _, _ in real]):
        assert same(states, want)
        assert [s.planned for s in states if s] == [s.planned for s in want]
    assert [n["steps"] for n in plans(hooks.notes)] == [n["steps"] for n in plans(plain.notes)]
    assert [account.bytes_sent for _, account, _ in real] == plain.sent


@pytest.mark.parametrize("name", ["gather", "shard_overlap"])
def test_a_real_run_resumes_across_a_new_plan(name: str) -> None:
    method = METHODS[name]
    want = Lockstep(method, [TimedBody(i, method.inner) for i in range(N)]).run()
    first = trained(method, ask_at=4)
    assert {4 < final.round < ROUNDS for final, _, _ in first} == {True}
    second = trained(method, resume=[saved for _, _, saved in first])
    assert same([final for final, _, _ in second], want)
    assert second[0][0].planned == want[0].planned


def test_worlds_measure_what_a_body_does_not_say() -> None:
    """Both worlds fill in the seconds; without a body that knows, the plan of a real run rests on its own clock."""
    _, hooks = simulated(GATHER, [ToyBody(i, GATHER.inner) for i in range(N)], slowdown=None)
    charged = ComputeTime(FLEET, ToyBody.LENGTH, 1e9, seed=1).steps_s(2, 0, 0, H, 2)
    assert hooks.saved[1][0][0].planned.step_s[2] == pytest.approx(charged / H, rel=1e-6)

    def job(group: Group) -> State:
        method = replace(GATHER, rounds=2, replan=Replan(threshold=0.99))
        seat = Seat(group.me, method, toy_layout(), run_id=7)
        return run(peer(seat, start(seat, toy_start())), ToyBody(group.me, method.inner), None, group)[0]

    measured = {final.planned.step_s for final in in_threads(N, job)}
    assert len(measured) == 1 and all(s > 0 for s in measured.pop())


def test_workers_whose_plans_differ_are_found_out() -> None:
    """The plan is part of the digest that each packet carries."""
    method = METHODS["gather"]
    bodies = [TimedBody(i, method.inner) for i in range(N)]
    saved = Lockstep(method, bodies)
    saved.run(stop=2)
    kept = saved.snapshots[2]
    kept[2][0].planned = replace(kept[2][0].planned, step_s=(1.0,) * N)
    with pytest.raises(RunFailed, match="momentum or plan"):
        Lockstep(method, [TimedBody(i, method.inner) for i in range(N)]).run(resume=kept)


# ---- the header, and what is refused


def test_the_header_carries_the_step_time_and_refuses_too_many_tokens() -> None:
    header = Header(2**64 - 1, 3, 1, 0, 5, 1, 7, 2**63 + 1, 2**32 - 1, 1, 0.15625)
    packet = seal(blank(12), header)
    assert HEADER_BYTES == 64 and packet.nbytes == 76
    assert unseal(packet.data.clone()).header == header
    assert unseal(seal(blank(0), header._replace(step_s=0.1)).data).header.step_s == pytest.approx(0.1, rel=1e-7)
    with pytest.raises(RunFailed, match="4294967296 tokens in round 3"):
        seal(blank(0), header._replace(tokens=2**32))


def test_an_older_packet_is_refused_by_its_version() -> None:
    data = seal(blank(4), Header(1, 0, 3, 0, 0, 1, 0, 0, 10)).data
    data[4] = 1
    with pytest.raises(RunFailed, match="worker 3 speaks packet version 1, this one 2"):
        unseal(data)


def test_compositions_that_cannot_plan_anew_are_refused() -> None:
    for method in (gasloc(SETTING), diloco(SETTING, exchange="ring")):
        with pytest.raises(BadInput, match="every other's step time"):
            replace(method, replan=Replan())
    from gossamer.recipes import ddp

    with pytest.raises(BadInput, match="nothing to plan anew"):
        replace(ddp(SETTING), replan=Replan())
    with pytest.raises(BadInput, match="for 4 workers"):
        replace(GATHER, replan=Replan(unhidden_s=(0.0,)))
    with pytest.raises(BadInput, match="longer than a packet can say"):
        diloco(replace(SETTING, plan=uniform(N, 2**20, 2**10, 4)))
    for fault in ({"threshold": 0.0}, {"threshold": 1.0}, {"smoothing": 0.0}, {"smoothing": 1.5}, {"patience": 0}):
        with pytest.raises(BadInput, match="re-planning"):
            Replan(**fault)
    for slow in ((0, 0.0, 0.5), (0, 2.0, 1.0), (0, float("inf"), 0.5)):
        with pytest.raises(BadInput, match="slow-down"):
            Slowdown(*slow)
