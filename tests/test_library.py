"""gossamer.join in a loop of one's own: the bits of the project's own loop, resuming, leaving, and what is refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cadences import METHODS, UNEQUAL, N
from library_toys import ADAM, SMALL, User, live, reference, same, users
from toy import ToyBody, ToyModel

import gossamer
from gossamer.core.combine import mean
from gossamer.core.method import Method
from gossamer.core.plan import uniform
from gossamer.core.schedule import Constant, Cosine
from gossamer.real import Group, PeerLost
from gossamer.recipes import Setting, diloco, gasloc, local_dadam

CASES: dict[str, Method] = {
    "gossip": gasloc(replace(UNEQUAL, inner=ADAM)),
    "gossip late": gasloc(replace(UNEQUAL, inner=ADAM), codec="mod8", overlap=1.0),
    "early": local_dadam(replace(UNEQUAL, inner=ADAM)),
    **{name: replace(METHODS[name], inner=ADAM) for name in ("shard_plain", "shard_streaming", "gather_eager")},
}


@pytest.mark.parametrize("name", CASES)
def test_a_loop_of_one_s_own_has_the_bits_of_the_project_s_loop(name: str) -> None:
    method = CASES[name]
    run = reference(method)
    states = run.run()

    def job(group: Group) -> Any:
        user = User(group, method).steps(10_000)
        closed = user.outer.close()
        return user.outer._state, user.live, user.records, closed

    found = users(N, job)
    for i, (state, params, records, closed) in enumerate(found):
        assert same(state.x, states[i].x) and same(params, live(run)[i])
        assert closed == (method.rounds, "none", 0, 0) and len(records) == method.plan.steps[i] * method.rounds
        assert sum(r.bytes_sent for r in records) == run.sent[i]
        assert sum(r.completed for r in records) == method.rounds and records[-1].over and not records[-1].stopped
        notes = [note for note in run.notes if note["kind"] == "round" and note["worker"] == i]
        assert [r.metrics["loss"] for r in records if r.completed] == pytest.approx([note["loss"] for note in notes], rel=1e-6)
        if not method.cadence.overlap:
            assert [r.exchanged for r in records if r.completed] == [True] * method.rounds
            assert all(r.peers and r.waited_s >= 0 for r in records if r.completed)


def test_parameters_may_be_put_elsewhere_in_between() -> None:
    """As libraries do that keep all of a model in one buffer."""
    method = diloco(replace(SMALL, plan=uniform(1, 3, 2, ToyBody.LENGTH)))
    run = reference(method)
    run.run()

    def job(group: Group) -> Any:
        user = User(group, method).steps(1)
        for p in user.body.params.values():
            p.data = p.data.clone()
        user.steps(10_000).outer.close()
        return user.live

    assert same(users(1, job)[0], live(run)[0])


def test_one_process_alone_is_a_run() -> None:
    method = diloco(replace(SMALL, plan=uniform(1, 3, 2, ToyBody.LENGTH)))
    run = reference(method)
    states = run.run()
    body = ToyBody(0, ADAM)
    with gossamer.join(body.model, body.optimizer, method) as outer:
        while not outer.over:
            body.gradient(2)
            body.take()
            outer.step(tokens=2 * ToyBody.LENGTH)
    assert same({k: p.detach() for k, p in body.params.items()}, states[0].x)


@pytest.mark.parametrize(
    ("name", "cut"), [("gossip", "boundary"), ("gossip", "within"), ("gossip late", "boundary"), ("shard_streaming", "boundary")]
)
def test_resumed_is_uninterrupted(name: str, cut: str) -> None:
    """At a boundary, and in the middle of a round, each worker at a step of its own: of a round that has landed nothing."""
    method = CASES[name]
    run = reference(method)
    run.run()

    def first(group: Group) -> Any:
        user = User(group, method).rounds(2)
        if cut == "within":
            user.steps(user.outer.work.steps - 1)
        kept = user.kept()
        user.steps(10_000).outer.close()
        return kept, user.live

    def second(group: Group) -> Any:
        user = User(group, method)
        user.body.load(kept[group.me]["model"])
        user.body.load_state(kept[group.me]["body"])
        user.outer.load_state_dict(kept[group.me]["outer"])
        user.steps(10_000).outer.close()
        return user.live

    before = users(N, first)
    kept = [saved for saved, _ in before]
    after = users(N, second)
    assert all(same(a, b) and same(a, c) for a, (_, b), c in zip(after, before, live(run), strict=True))


def test_a_state_in_the_middle_of_a_round_that_has_landed_something_is_refused() -> None:
    method = diloco(replace(SMALL, plan=uniform(2, 6, 2, ToyBody.LENGTH)), overlap=0.5)

    def job(group: Group) -> Any:
        user = User(group, method).rounds(1).steps(1)
        user.outer.state_dict()
        user.steps(3)
        with pytest.raises(gossamer.BadInput, match="has landed already"):
            user.outer.state_dict()
        user.steps(10_000).outer.close()

    users(2, job)


def test_a_state_that_is_not_whole_is_said() -> None:
    method = diloco(replace(SMALL, plan=uniform(1, 3, 2, ToyBody.LENGTH)))
    body = ToyBody(0, ADAM)
    with gossamer.join(body.model, body.optimizer, method) as outer:
        whole = outer.state_dict()
    name = next(iter(whole["tensors"]))
    ways: dict[str, Any] = {
        rf"'{name}' is missing": {"tensors": {k: v for k, v in whole["tensors"].items() if k != name}},
        rf"'{name.partition('/')[2]}' is missing, or not of the model's shape": {"tensors": whole["tensors"] | {name: torch.zeros(99)}},
        "'residual' is missing": {"about": {k: v for k, v in whole["about"].items() if k != "residual"}},
        "'NoneType' object": {"tensors": None},
        "positional arguments": {"partial": [1] * 9},
    }
    body = ToyBody(0, ADAM)
    with gossamer.join(body.model, body.optimizer, method) as outer:
        for words, change in ways.items():
            with pytest.raises(gossamer.BadInput, match=rf"the state of worker 0 is not whole \(.*{words}.*\): give all that outer.state"):
                outer.load_state_dict(whole | change)
        with pytest.raises(gossamer.BadInput, match="'workers' is missing"):
            outer.load_state_dict({k: v for k, v in whole.items() if k != "workers"})
        outer.load_state_dict(whole)


# ---- leaving


@pytest.mark.parametrize("partial_", ["send", "drop"])
@pytest.mark.parametrize("weights", ["tokens", "uniform"])
def test_a_loader_that_ends_early_is_a_leave(weights: Any, partial_: Any) -> None:
    """Worker 1 ends in the middle of its second round. Its last steps count or not; then the others go on as if they were alone."""
    method = diloco(replace(SMALL, plan=uniform(3, 3, 2, ToyBody.LENGTH)), weights=weights)

    class Ends(ToyBody):
        def compute(self, work: Any) -> Any:
            before = self.cursor
            if before >= 3:
                steps = 2 if before == 3 and partial_ == "send" else 0
                self.cursor = before + 1
                done = super().compute(work._replace(steps=steps))
                self.cursor = before + 3
                return done
            return super().compute(work)

    run = reference(method, [Ends(i, ADAM) if i == 1 else ToyBody(i, ADAM) for i in range(3)])
    run.bodies[1].cursor = 0

    def job(group: Group) -> Any:
        user = User(group, method)
        user.steps(5 if group.me == 1 else 10_000)
        closed = user.outer.close(partial=partial_)
        return user.outer._state, closed, user.records

    found = users(3, job)
    assert found[1][1] == (4, "sent" if partial_ == "send" else "dropped", 2, 2)
    assert all(same(state.x, found[0][0].x) and state.round == 4 for state, _, _ in found)
    refused = [r.refused for r in found[0][2] if r.completed]
    assert refused == [(), () if partial_ == "send" else (1,), (1,), (1,)]


def test_all_leave_at_the_latest_end_of_a_loader_and_what_is_in_flight_lands() -> None:
    """Gossip: the number of rounds that take place is the same on every try, and on all."""
    method = gasloc(Setting(uniform(3, 3, 2, ToyBody.LENGTH), rounds=50, seed=5, inner=ADAM, schedule=Constant()), overlap=0.5)

    def job(group: Group) -> Any:
        user = User(group, method).steps((9, 4, 2)[group.me])
        closed = user.outer.close()
        assert all(not stream.pending for stream in user.outer._state.streams)
        return closed, user.live

    once, twice = users(3, job), users(3, job)
    assert [closed for closed, _ in once] == [(3, "none", 0, 0), (3, "sent", 1, 1), (3, "sent", 2, 2)]
    assert all(same(a, b) for (_, a), (_, b) in zip(once, twice, strict=True))


def test_what_all_have_left_early_goes_on_from_what_has_landed() -> None:
    """Of a model in fragments, which differ from worker to worker until they land."""
    method = CASES["shard_streaming"]

    def first(group: Group) -> Any:
        user = User(group, method).rounds(2)
        user.outer.close()
        return user.outer.state_dict()

    kept = users(N, first)

    def second(group: Group) -> bool:
        user = User(group, method)
        user.outer.load_state_dict(kept[group.me])
        user.outer.close()
        return same(user.live, user.outer._state.x)

    assert all(users(N, second))


def test_steps_after_the_end_are_dropped() -> None:
    method = diloco(SMALL)

    def job(group: Group) -> Any:
        user = User(group, method).steps(10_000)
        agreed = user.live
        record = user.steps(1).records[-1]
        assert record.over and not record.exchanged and not same(user.live, agreed)
        assert user.outer.close() == (4, "dropped", 1, 0)
        assert same(user.live, agreed)
        with pytest.raises(gossamer.BadInput, match="closed"):
            user.outer.step()

    users(2, job)


def test_who_is_asked_stops_with_all_and_is_gone_on_from() -> None:
    method = gasloc(replace(UNEQUAL, rounds=6, inner=ADAM), overlap=0.5)
    run = reference(method)
    run.run()

    def first(group: Group) -> Any:
        user = User(group, method).rounds(1)
        if group.me == 2:
            user.outer.ask_stop()
        user.steps(10_000)
        kept = user.kept()
        assert user.outer.stopped and user.records[-1].stopped and user.outer._state.round < 6
        user.outer.close()
        return kept

    kept = users(N, first)

    def second(group: Group) -> Any:
        user = User(group, method)
        user.body.load_state(kept[group.me]["body"])
        user.outer.load_state_dict(kept[group.me]["outer"])
        user.steps(10_000).outer.close()
        return user.live

    assert all(same(a, b) for a, b in zip(users(N, second), live(run), strict=True))


@pytest.mark.parametrize("on_lost", ["raise", "record"])
def test_a_lost_peer_is_an_exception_or_a_record(on_lost: Any) -> None:
    method = gasloc(Setting(uniform(3, 2, 2, ToyBody.LENGTH), rounds=8, seed=5, inner=ADAM, schedule=Constant()))

    def job(group: Group) -> Any:
        user = User(group, method, on_lost=on_lost)
        if group.me == 2:
            user.rounds(2).outer.__exit__(ValueError, ValueError("its disk is full"), None)
            return None
        if on_lost == "raise":
            with pytest.raises(PeerLost, match=r"worker \d is gone"):
                user.steps(10_000)
            with pytest.raises(gossamer.RunFailed, match="has failed"):
                user.outer.step()
            user.outer.close()
            return None
        user.steps(10_000)
        with user.outer.averaged():
            inside = user.live
        user.outer.close()
        return user.records[-1], inside, user.outer._state.x

    found = users(3, job, survives=on_lost == "record")
    if on_lost == "record":
        assert all(record.lost == (2,) and record.over and record.round == 8 for record, _, _ in found[:2])
        left = mean([x for _, _, x in found[:2]])
        assert all(same(averaged, left) for _, averaged, _ in found[:2])


# ---- looking


def test_averaged_is_the_mean_and_gives_the_parameters_back() -> None:
    gossip, sync = CASES["gossip"], diloco(replace(UNEQUAL, inner=ADAM))

    def job(method: Method, group: Group) -> Any:
        user = User(group, method).rounds(2)
        user.steps(0 if method is gossip else user.outer.work.steps - 1)
        before = user.live
        with user.outer.averaged():
            mean = user.live
        assert same(user.live, before)
        x = user.outer._state.x
        user.steps(10_000).outer.close()
        return {k: v.clone() for k, v in x.items()}, mean

    anchors = [s.x for s, _ in reference_snapshot(gossip, 2)]
    found = users(N, partial(job, gossip))
    assert all(same(mean, found[0][1]) for _, mean in found)
    want = {k: sum(a[k].double() for a in anchors) / N for k in anchors[0]}
    assert all(torch.allclose(found[0][1][k].double(), want[k], atol=1e-6) for k in want)
    agreed = reference_snapshot(sync, 2)[0][0].x
    assert all(same(mean, agreed) for _, mean in users(N, partial(job, sync)))


def reference_snapshot(method: Method, round: int) -> Any:
    run = reference(method)
    run.run()
    return run.snapshots[round]


def test_the_schedule_follows_planned_tokens_of_all_workers() -> None:
    """At every step of every worker: what the project's own body would set."""
    method = replace(diloco(replace(UNEQUAL, inner=ADAM)), schedule=Cosine(0.2))
    plan, total = method.plan, method.total_tokens

    def job(group: Group) -> Any:
        user = User(group, method)
        scheduler = user.outer.scheduler()
        seen = []
        while not user.outer.over:
            seen.append(user.body.optimizer.param_groups[0]["lr"])
            scheduler.step()  # as trainers do, before the record: it changes nothing
            user.steps(1)
        user.outer.close()
        assert scheduler.get_last_lr() == [0.01 * method.schedule.factor(total, total)] * len(user.body.optimizer.param_groups)
        return seen

    for i, seen in enumerate(users(N, job)):
        per_step = plan.tokens_per_round / plan.steps[i]
        places = [t * plan.tokens_per_round + h * per_step for t in range(method.rounds) for h in range(plan.steps[i])]
        assert seen == [0.01 * method.schedule.factor(tokens, total) for tokens in places]


def test_steps_are_the_optimizer_s_and_tokens_are_all_that_passed() -> None:
    """Accumulation over two passes; and a step that was skipped, as AMP does."""
    method = diloco(replace(SMALL, plan=uniform(1, 2, 2, ToyBody.LENGTH)), weights="tokens")
    body = ToyBody(0, ADAM)
    with gossamer.join(body.model, body.optimizer, method) as outer:
        body.gradient(1)
        first = outer.step(tokens=4)
        body.take()
        second, skipped = outer.step(tokens=4), outer.step(tokens=8)
        body.take()
        third = outer.step(tokens=8)
        assert [r.counted for r in (first, second, skipped, third)] == [False, True, False, True]
        assert [r.step for r in (first, second, skipped)] == [0, 1, 1] and third.completed
        assert third.metrics["tokens"] == 24
        body.take()
        body.take()
        with pytest.raises(gossamer.BadInput, match="stepped 2 times"):
            outer.step()


def test_a_contribution_that_is_not_finite_is_refused_and_the_inner_state_begins_afresh() -> None:
    method = diloco(SMALL)
    run = reference(method, [ToyBody(i, ADAM, poison_at=4 if i else None) for i in range(2)])
    states = run.run()

    def job(group: Group) -> Any:
        user = User(group, method, poison_at=4 if group.me else None).steps(10_000)
        user.outer.close()
        return user.live, [r.refused for r in user.records if r.completed]

    for params, refused in users(2, job):
        assert same(params, states[0].x) and refused == [(), (1,), (), ()]


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    model = ToyModel()
    with gossamer.join(model, torch.optim.SGD(model.parameters(), 0.1), "diloco", steps=3, batch=2, sequence=4, rounds=4):
        pass
    assert threading.active_count() <= before + 1
