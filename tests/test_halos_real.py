"""Asynchronous tiers over real connections: the programs of the simulator, their bits and bytes, deaths, and whole runs."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from net_toys import Hooks, in_threads
from sim_toys import Hooks as SimHooks
from sim_toys import Links, Times
from small_runs import flags, forked, settings
from toy import ToyBody, toy_layout, toy_start
from wan_toys import in_sites

from gossamer.app.config import load
from gossamer.app.folder import RunFolder
from gossamer.app.job import resolve
from gossamer.app.served import Keeping, last_key, part_key
from gossamer.cli import main
from gossamer.core.errors import RunFailed
from gossamer.core.inner import SGD
from gossamer.core.method import Method
from gossamer.core.plan import uniform
from gossamer.core.schedule import Constant
from gossamer.core.tree import Tree, sha256
from gossamer.real import Group, run
from gossamer.recipes import Setting
from gossamer.recipes.tiers import halos
from gossamer.sim.driver import Simulation
from gossamer.train import checkpoint
from gossamer.worker.account import Account
from gossamer.worker.effects import Compute, Done, Gather, Program, RecvAny, Send, Stop, Work
from gossamer.worker.seat import Seat
from gossamer.worker.server import client, first_of, programs, server
from gossamer.worker.state import State

pytestmark = pytest.mark.usefixtures("cache")


def method(n: int, rounds: int, speeds: Sequence[float] = (), regions: Sequence[int] = (), **options: Any) -> Method:
    """`rounds` blocks of 2 steps of the fastest worker."""
    setting = Setting(
        uniform(n, 2, 2, ToyBody.LENGTH), rounds, inner=SGD(lr=0.05), schedule=Constant(), speeds=tuple(speeds), regions=tuple(regions)
    )
    given = {"local_lr": 0.7, "local_delay": 2, "global_lr": 1.0, "report_every": 1} | options
    return replace(halos(setting, block=2, **given), rounds=rounds)


class Turns:
    """Lets workers end their blocks in a given order, each when all that the one before has set going has come to rest."""

    def __init__(self, order: Sequence[int], seats: int) -> None:
        self.order, self.changed = deque(order), threading.Condition()
        self.rests, self.flying = dict.fromkeys(range(seats), False), 0

    def await_turn(self, worker: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.order[0] == worker and not self.flying and all(self.rests.values()), 30.0)
            self.order.popleft()
            self.rests[worker] = False

    def watched(self, seat: int, program: Program) -> Program:
        reply: Any = None
        while True:
            try:
                effect = program.send(reply)
            except StopIteration as end:
                self.tell(seat, True, 0)
                final: State = end.value
                return final
            self.tell(seat, isinstance(effect, (RecvAny, Compute)), len(effect.to) if isinstance(effect, Send) else 0)
            reply = yield effect
            self.tell(seat, False, -1 if isinstance(effect, (RecvAny, Gather)) else 0)

    def tell(self, seat: int, rests: bool, flying: int) -> None:
        with self.changed:
            self.rests[seat], self.flying = rests, self.flying + flying
            self.changed.notify_all()


class Paced(ToyBody):
    """Takes so long for a step, and ends a block in its turn."""

    def __init__(self, worker: int, m: Method, step_s: float, *, dies_at: int | None = None, turns: Turns | None = None) -> None:
        super().__init__(worker, m.inner)
        self.step_s, self.dies_at, self.turns = step_s, dies_at, turns
        self.losses: list[float] = []

    def compute(self, work: Work) -> Done:
        if self.dies_at == len(self.losses):
            raise RuntimeError("pulled the plug")
        begin_s = time.monotonic()
        done = super().compute(work)
        self.losses.append(done.loss_sum / done.tokens)
        time.sleep(max(0.0, begin_s + self.step_s * work.steps - time.monotonic()))
        if self.turns:
            self.turns.await_turn(self.worker)
        return done


def in_reality(
    m: Method,
    step_s: Sequence[float],
    *,
    dies: dict[int, int] | None = None,
    hooks_of: Callable[[int], Any] = lambda seat: None,
    order: Sequence[int] = (),
    within: Callable[..., list[Any]] = in_threads,
    **more: Any,
) -> list[Any]:
    """(final state, account, body) of every seat; None of those who died."""
    assert m.tiers is not None
    n, seats = m.n, m.tiers.top + 1
    turns = Turns(order, seats) if order else None

    def job(group: Group) -> Any:
        seat = Seat(group.me, m, toy_layout(), run_id=7)
        body = Paced(group.me, m, step_s[group.me] if group.me < n else 0.0, dies_at=(dies or {}).get(group.me), turns=turns)
        program = client(seat, State(x=toy_start())) if seat.me < n else server(seat, first_of(seat, toy_start()))
        program = turns.watched(group.me, program) if turns else program
        state, account = run(program, body, hooks_of(group.me), group, servers=range(n, seats), **more)
        return state, account, body

    def survived(group: Group) -> Any:
        try:
            return job(group)
        except RunFailed as error:
            if dies is None or ("pulled the plug" not in str(error) and "is gone" not in str(error)):
                raise
            return str(error)

    return within(seats, survived, survives=True)


def in_simulation(m: Method, step_s: Sequence[float]) -> tuple[list[State | None], list[Account], list[int]]:
    """Final states, accounts, and the order in which workers ended their blocks."""
    hooks = SimHooks()
    assert m.tiers is not None
    seats = [Seat(i, m, toy_layout(), run_id=7) for i in range(m.n)]
    result = Simulation(
        programs(seats, [State(x=toy_start()) for _ in seats]),
        [ToyBody(i, m.inner) for i in range(m.n)],
        Links(lambda *_: 1e-4),
        Times(*step_s, *[0.0] * m.tiers.servers),
        hooks,
        servers=m.tiers.servers,
    ).run()
    ends = [(time_s, worker) for worker, _, time_s in hooks.crossed if worker < m.n]
    assert all(b - a > 1e-3 for (a, _), (b, _) in pairwise(sorted(ends))), "blocks must not end at one moment"
    return result.final, result.accounts, [worker for _, worker in sorted(ends)]


def same(a: Tree, b: Tree) -> bool:
    return sha256(a) == sha256(b)


@pytest.mark.parametrize(
    ("regions", "step_s", "options"),
    [
        ((0,), (0.1,), {"local_lr": 1.0, "local_momentum": 0.0, "local_delay": 1, "global_momentum": 0.0, "global_delay": 1, "merge": 1.0}),
        ((0,), (0.1,), {}),
        ((0, 1), (0.1, 0.17), {}),
        ((0, 0, 1), (0.1, 0.17, 0.131), {"report_every": 2, "merge": 0.5}),
    ],
    ids=["serial", "alone", "two-regions", "three-workers"],
)
def test_in_one_order_of_arrivals_bits_and_bytes_are_the_simulations(regions: Any, step_s: Any, options: dict[str, Any]) -> None:
    m = method(len(regions), 5, regions=regions, **options)
    final, accounts, order = in_simulation(m, step_s)
    found = in_reality(m, [0.0] * m.n, order=order)
    for seat, (want, account, (state, mine, _)) in enumerate(zip(final, accounts, found, strict=True)):
        assert want is not None and same(state.x, want.x), f"seat {seat}"
        assert state.round == want.round
        if seat < m.n:
            assert (mine.bytes_sent, mine.bytes_received) == (account.bytes_sent, account.bytes_received)
            assert state.tokens == want.tokens


def test_over_grpc_bits_and_bytes_are_the_simulations() -> None:
    m = method(2, 3, regions=(0, 1))
    final, accounts, order = in_simulation(m, (0.1, 0.17))
    found = in_reality(m, [0.0] * 2, order=order, within=in_sites)
    assert all(want is not None and same(state.x, want.x) for want, (state, *_) in zip(final, found, strict=True))
    assert [mine.bytes_sent for _, mine, _ in found[:2]] == [account.bytes_sent for account in accounts[:2]]


def test_asked_to_stop_all_workers_stop_at_one_block_and_their_servers_end() -> None:
    m = method(2, 100_000, regions=(0, 1))
    found = in_reality(m, (0.003, 0.005), hooks_of=lambda seat: Hooks(lambda round: Stop() if round >= 5 else None) if seat == 0 else None)
    assert found[0][0].round == found[1][0].round < 100_000
    reports = [state.round for state, *_ in found[2:]]
    assert reports[0] >= 5 and reports[1] >= 1 and reports[2] == reports[0] + reports[1]


def test_a_dead_worker_is_left_out_and_the_others_finish() -> None:
    m = method(3, 6, regions=(0, 0, 1))
    found = in_reality(m, (0.02,) * 3, dies={1: 2})
    assert "pulled the plug" in found[1]
    left = [found[i] for i in (0, 2, 3, 4, 5)]
    assert [state.round for state, *_ in left[:2]] == [6, 6]
    assert same(left[-1][0].x, left[-1][0].x) and not same(left[-1][0].x, toy_start())
    assert left[2][0].round >= 6, "the server of the dead one's region has reported all updates of the other"


def test_of_a_region_without_workers_the_server_says_goodbye() -> None:
    m = method(2, 6, regions=(0, 1), report_every=4)
    found = in_reality(m, (0.02, 0.02), dies={0: 3})
    assert "pulled the plug" in found[0]
    assert found[1][0].round == 6
    assert found[2][0].round == 1, "what the dead worker had pushed is reported at the end"


def test_without_the_global_server_nobody_goes_on() -> None:
    m = method(2, 400, regions=(0, 1))

    class Dies(Hooks):
        def boundary(self, worker: int, round: int, *_: Any) -> Any:
            if round == 3:
                raise RunFailed("pulled the plug")

    found = in_reality(m, (0.01, 0.01), dies={}, hooks_of=lambda seat: Dies() if seat == 4 else None)
    assert "pulled the plug" in found[4]
    assert all("the global server is gone" in found[i] for i in (2, 3))
    assert all("the server of worker" in found[i] for i in (0, 1))


def test_workers_of_unlike_speed_never_wait_for_each_other() -> None:
    m = method(2, 6, regions=(0, 1))
    found = in_reality(m, (0.01, 0.1))
    fast, slow = found[0][1], found[1][1]
    assert fast.seconds["straggler_idle"] == 0.0 == slow.seconds["straggler_idle"]
    assert sum(fast.seconds.values()) == pytest.approx(fast.wall_s)


def test_ahead_counts_workers_and_no_server() -> None:
    m = method(2, 4, regions=(0, 1))
    rounds: dict[int, list[float]] = {0: [], 1: []}

    class Clock(Hooks):
        def boundary(self, worker: int, round: int, *_: Any) -> Any:
            rounds[worker].append(time.monotonic())

    in_reality(m, (0.005, 0.1), hooks_of=lambda seat: Clock() if seat < 2 else None, ahead=1)
    # A worker tells of a round before its hook does, and of the next one after it: so this holds without any tolerance.
    assert all(fast >= slow for fast, slow in zip(rounds[0][2:], rounds[1], strict=False)), "one round ahead at the most"


# --- whole runs


TWO_REGIONS = """
name = "two"

[[sites]]
name = "a"
region = "east"
gpu = "H100 80GB"
up_mbps = 900
down_mbps = 900

[[sites]]
name = "b"
region = "west"
gpu = "H100 80GB"
up_mbps = 900
down_mbps = 900

[[links]]
from = "east"
to = "west"
rate_mbps = 500
rtt_ms = 10

[[links]]
from = "west"
to = "east"
rate_mbps = 500
rtt_ms = 10
"""


def told(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_processes_of_one_region_with_one_worker_end_with_the_bits_of_the_simulation(text: Path, tmp_path: Path) -> None:
    sets = settings(text, method__name='"halos"', fleet__name='"uniform-1"', method__report_every=1, method__local_delay=2, run__rounds=6)
    sets += ["method.block=2", "method.local_lr=1.4", "clock.pace_s=0.25"]
    assert main(["simulate", "--out", str(tmp_path / "sim"), *flags(sets)]) == 0
    assert main(["train", "--workers", "1", "--out", str(tmp_path / "real"), *flags(sets)]) == 0
    (sim, simulated), (real, records) = told(tmp_path / "sim"), told(tmp_path / "real")
    for key in ("params_sha256", "final_loss", "tokens", "bytes_sent", "bytes_received", "rounds", "dead", "consensus_distance"):
        assert real[key] == sim[key], key
    found, want = ([(r["round"], r["tokens"]) for r in rs if r["kind"] == "eval"] for rs in (records, simulated))
    assert set(found) == set(want) and len(set(found)) == 6, "the last report may come before the last block's end is told, or after"
    assert all(r["worker"] == "fleet" for r in records if r["kind"] == "eval")
    rounds, others = ([r for r in rs if r["kind"] == "round"] for rs in (records, simulated))
    assert [r["loss"] for r in rounds] == [r["loss"] for r in others]
    assert {json.loads(line)["worker"] for line in (tmp_path / "real/trace.jsonl").read_text().splitlines()} == {0}
    assert main(["report", str(tmp_path / "real")]) == 0


class Posts(Counter[str]):
    """A group as a server of one worker's region sees it: what was posted, and how often."""

    me, last_round = 1, 4

    def post(self, key: str, value: str) -> None:
        self[key] += 1

    def posted(self, keys: Sequence[str]) -> list[str] | None:
        return [""] * len(keys) if all(self[key] for key in keys) else None

    def posted_by(self, keys: dict[int, str]) -> dict[int, str] | None:
        return None if self.posted([*keys.values()]) is None else dict.fromkeys(keys, "")


def test_a_server_writes_the_round_at_which_all_stop_once_and_at_rest(text: Path, tmp_path: Path) -> None:
    """A second writing would not be what a manifest, which may be there already, says."""
    job = resolve(
        load([], settings(text, method__name='"halos"', fleet__name='"uniform-1"', run__rounds=8, method__block=2, checkpoint__every=2))
    )
    posts = Posts()
    keeping = Keeping(job, cast(Any, posts), RunFolder(tmp_path), 0)

    def waiting() -> Program:
        for said in ([part_key(2, 0)], [last_key(4)], [part_key(4, 0)]):
            posts.update(said)
            yield RecvAny(0)
        return State(x={})

    deque(keeping.watched(waiting()), maxlen=0)
    assert posts[part_key(2, 1)] == 1 and not posts[part_key(4, 1)]
    keeping.ended()
    assert posts[part_key(4, 1)] == 1 and not posts[part_key(6, 1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_run_is_resumed_with_the_bits_of_one_that_was_not_interrupted(number: int, text: Path, tmp_path: Path) -> None:
    """One worker, so that there is one order of arrivals. Stopped, or all killed after a checkpoint: then what was on its way is not."""
    sets = settings(text, method__name='"halos"', fleet__name='"uniform-1"', method__report_every=1, method__local_delay=3, run__rounds=14)
    sets += ["method.block=2", "method.local_lr=1.4", "clock.pace_s=0.25"]
    out = tmp_path / "real"
    run = forked(tmp_path / "log", ["train", "--workers", "1", "--out", str(out), *flags([*sets, "checkpoint.every=2"])], tmp_path)
    until_s = time.monotonic() + 90
    while checkpoint.newest(out / "checkpoints") is None:
        assert time.monotonic() < until_s and run.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.02)
    run.send_signal(number)
    assert run.wait(60) == (130 if number == signal.SIGTERM else -number)
    found = checkpoint.latest(out / "checkpoints")
    assert found is not None and sorted(checkpoint.read_manifest(out / "checkpoints", found).parts) == [0, 1, 2], "a worker and two servers"
    assert not (out / "summary.json").exists()
    assert main(["train", "--workers", "1", "--resume", str(out)]) == 0
    assert main(["simulate", "--out", str(tmp_path / "sim"), *flags(sets)]) == 0
    (sim, _), (real, records) = told(tmp_path / "sim"), told(out)
    for key in ("tokens", "rounds", "dead", *(("params_sha256", "final_loss") if number == signal.SIGTERM else ())):
        assert real[key] == sim[key], key
    assert real["final_loss"] == pytest.approx(sim["final_loss"], abs=0.1)
    assert [r["round"] for r in records if r["kind"] == "round"] == list(range(1, 15))


def test_a_killed_worker_is_named_and_the_run_goes_on_to_its_end(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "two.toml"
    fleet.write_text(TWO_REGIONS)
    sets = settings(text, method__name='"halos"', fleet__name=f'"{fleet}"', run__rounds=12, plan__steps=2, method__report_every=1)
    sets += ["method.block=2", "method.local_delay=2", "method.local_lr=1.4", "method.global_lr=1.0", "inner.lr=3e-3", "clock.kill=[[1,4]]"]
    out = tmp_path / "real"
    assert main(["train", "--workers", "2", "--out", str(out), *flags(sets)]) == 0
    said = capfd.readouterr().err
    assert "worker 1 was killed (SIGKILL), the others go on without it" in said
    summary, records = told(out)
    assert summary["dead"] == [1] and summary["rounds"] == 12 and len(summary["params_sha256"]) == 1
    evals = [r for r in records if r["kind"] == "eval"]
    assert evals[-1]["round"] == 12 and summary["final_loss"] == evals[-1]["loss"] < evals[0]["loss"]
    assert {r["round"] for r in records if r["kind"] == "round" and r["worker"] == 1} == {1, 2, 3, 4}
    assert main(["simulate", "--out", str(tmp_path / "sim"), *flags(sets)]) == 2
    assert "clock.kill in a simulation" in capfd.readouterr().err
