"""N logical workers on this machine, a virtual clock, and a run folder like any other's."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gossamer.app.agreement import write_agreement
from gossamer.app.folder import JsonLines, RunFolder, default_path, no_checkpoint
from gossamer.app.job import Job
from gossamer.app.lock import alone_in
from gossamer.app.metrics import check_unchanged, evaluation, facts_of
from gossamer.app.planning.planned import begin
from gossamer.app.progress import Progress, duration, still
from gossamer.app.resuming.absence import absences_of
from gossamer.app.resuming.rollback import roll_back
from gossamer.app.summary import consensus_distance, fleet_mean, summarise
from gossamer.app.tracking.loggers import Loggers
from gossamer.app.tracking.sinks import check_loggers
from gossamer.app.trained import check_model
from gossamer.core.errors import BadInput, RunFailed, Stopped
from gossamer.core.tree import Tree, master, sha256
from gossamer.real.signals import handling
from gossamer.sim.absence import Absences
from gossamer.sim.driver import Simulation
from gossamer.sim.memo import MemoCombine
from gossamer.sim.network import Network
from gossamer.sim.seats import SeatNetwork
from gossamer.sim.timing import ComputeTime
from gossamer.train import checkpoint, weights
from gossamer.train.data import Corpus
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Body, Go, Stop
from gossamer.worker.state import State

FINAL = "the final model is evaluated and written"
"""What goes on after the last round."""


def simulate(
    job: Job,
    out: Path | None = None,
    resume: RunFolder | None = None,
    *,
    back_to: int | None = None,
    quiet: bool = False,
    lean: bool = False,
) -> RunFolder:
    """Trains all workers of `job` under the virtual clock.

    Args:
        out: folder of a new run; a name made of the title and the time by default.
        resume: the folder of a run to go on with, from its last whole checkpoint.
        back_to: of a run to go on with: from the checkpoint of this round; what came after it is put aside.
        quiet: show no progress.
        lean: write no trace, no checkpoint at the end and no model, and tell no loggers, for a run whose folder is thrown away.

    Raises:
        BadInput: the folder exists, or there is nothing to resume.
        RunFailed: the run could not go on.
    """
    check_loggers(job.config.log)
    if job.servers and job.kills:
        raise BadInput(
            f"clock.kill in a simulation is for workers that are each other's peers, and {job.method.name} has servers: leave it out"
        )
    if job.servers and job.config.checkpoint.every:
        raise BadInput(
            f"checkpoint.every = {job.config.checkpoint.every}, but a simulation of {job.method.name} keeps no checkpoints: leave it out; "
            "an interrupted one begins again (real runs have checkpoints)"
        )
    torch.set_num_threads(job.config.run.threads_per_worker)
    corpus = job.corpus()
    network = job.network()
    round0 = 0
    if resume:
        check_unchanged(job, corpus, resume.facts())
        if back_to is not None:
            with alone_in(resume.path):
                roll_back(resume, back_to)
        if resume.finished:
            return resume
        if job.method.tiers:
            raise BadInput(f"{job.method.name} keeps no checkpoints, so the run in {resume.path} cannot go on: begin a new one with --out")
        found = checkpoint.latest(resume.checkpoints)
        if found is None:
            raise no_checkpoint(resume.path)
        check_model(job, resume, found)
        round0 = found
        folder = resume
    else:
        folder = begin(out or default_path(job.title), job, facts_of(job, corpus, "sim"), corpus.tokenizer)
    with alone_in(folder.path):
        folder.goes_on()
        try:
            return _simulated(job, folder, corpus, network, round0, quiet=quiet, lean=lean)
        except (KeyboardInterrupt, Stopped):
            folder.was_stopped(checkpoint.newest(folder.checkpoints), "gossamer simulate --resume")
            raise


def _simulated(
    job: Job, folder: RunFolder, corpus: Corpus, network: Network | SeatNetwork, round0: int, *, quiet: bool, lean: bool
) -> RunFolder:
    parts: dict[int, checkpoint.Part] = {}
    if round0:
        there = checkpoint.read_manifest(folder.checkpoints, round0).parts
        parts = {i: checkpoint.read_part(folder.checkpoints, round0, i, job.home) for i in there}
        for name in ("metrics.jsonl", "trace.jsonl"):
            folder.cut(name, round0)
    bodies = [job.body(i, corpus) for i in range(job.n)]
    combine = MemoCombine()
    for i, (_, kept, extra) in parts.items():
        bodies[i].load_state(kept)
        assert isinstance(network, Network)
        network.restore(i, extra["network"])
    states = [parts[i].state if i in parts else job.first_state(i, master(body.tree)) for i, body in enumerate(bodies)]
    absences = absences_of(job, bodies, combine, parts, round0)
    for state in states if not parts else ():  # who is there from the start
        state.roll.epochs = list(absences.roll.epochs)
    clock = job.config.clock
    timing = ComputeTime(
        job.fleet, job.config.plan.sequence, job.flops_per_token, clock.noise, clock.drift, job.config.seed, clock.codec_gbytes_per_s,
        job.slowdown, job.method.rounds,
    )  # fmt: skip
    title = f"{job.title} on {job.fleet.name}"
    tokens0 = max(s.tokens for s in states)
    with (
        Progress(job.method.rounds, title, quiet=quiet, first_round=round0, first_tokens=tokens0) as progress,
        still(f"{title}: round {round0 + 1}/{job.method.rounds}", quiet=quiet) as now,
    ):
        hooks = SimHooks(job, folder, corpus, network, progress, absences, lean=lean, now=now)
        if round0:
            hooks.loggers.back_to(round0, tokens0)
        world = Simulation(
            job.programs(states, combine),
            bodies,
            network,
            timing,
            hooks,
            charge=job.bytes_charge,
            start_s=_starts_s(job, parts),
            rounds0=[round0] * job.n if parts else None,
            servers=job.servers,
            absences=absences,
            ahead=job.config.run.ahead,
        )
        try:
            with handling(partial(_asked_to_stop, hooks, quiet)):
                result = world.run()
                hooks.ended()
        finally:
            hooks.close()
    final = {i: state.x for i, state in enumerate(result.final[-1 if job.servers else 0 :]) if state is not None}
    if hooks.stopped_at is not None and hooks.stopped_at < job.method.rounds:
        raise Stopped(
            f"stopped after round {hooks.stopped_at} of {job.method.rounds}, where a checkpoint was written; "
            f"go on with: gossamer simulate --resume {folder.path}"
        )
    with still(f"{title}: {FINAL}", quiet=quiet):
        write_result(job, "sim", folder, final, hooks.judge, lean=lean)
    return folder


def _asked_to_stop(hooks: SimHooks, quiet: bool, number: int) -> None:
    """Answers Ctrl-C at once: a round may take minutes."""
    hooks.ask_stop(number)
    if not quiet:
        text = "stopping after this round or the next, with a checkpoint; once more ends it at once. To go on: gossamer simulate --resume"
        say = partial(print, f"{text} {hooks.folder.path}", file=sys.stderr, flush=True)
        threading.Thread(target=say, daemon=True).start()  # not from here, which may be within a print that the signal has interrupted


def _starts_s(job: Job, parts: dict[int, checkpoint.Part]) -> list[float] | None:
    """What each worker's clock shows at the start; the dead have none, and take the first."""
    if not parts:
        return None
    known = {i: float(part.extra["time_s"]) for i, part in parts.items()}
    return [known.get(i, min(known.values())) for i in range(job.n)]


def write_result(
    job: Job,
    world: str,
    folder: RunFolder,
    trees: dict[int, Tree],
    judge: Callable[[Tree], float],
    dead: Sequence[int] = (),
    without_records: Sequence[int] = (),
    lean: bool = False,
    names: Sequence[str] | None = None,
) -> None:
    """The model of a finished run and its `summary.json`. `trees`: the parameters of the workers that are left; where there are servers,
    the global one's alone, and `dead` says which workers are not. `without_records`: whose records are elsewhere. `lean`: no model.
    `names`: of the workers, where the fleet does not say them."""
    living = list(trees.values())
    if not living:
        raise RunFailed("no worker has come to the end of the run: all had died, so there is no model (clock.kill: leave one of them)")
    losses = {i: judge(t) for i, t in trees.items()} if not job.method.synchronous and not job.servers else None
    records = folder.read_lines("metrics.jsonl")
    model = fleet_mean(job, living)
    summary = summarise(
        job,
        world,
        records,
        final_loss=judge(model),
        worker_losses=None if losses is None else [losses.get(i) for i in range(job.n)],
        distance=None if job.servers else consensus_distance(living),
        hashes=[sha256(living[0])] if job.servers else [sha256(trees[i]) if i in trees else None for i in range(job.n)],
        dead=dead if job.servers else [i for i in range(job.n) if i not in trees],
        model=sha256(model),
        agreed=write_agreement(job, folder, [r for r in records if r["round"] > job.method.since[0]]),
    )
    if not lean:
        mean_of = tuple(trees)[:1] if job.method.synchronous else tuple(trees)
        weights.write(folder.path, weights.Weights(model, job.method.rounds, summary["tokens"], mean_of))
    if names is not None:
        summary["worker_names"] = list(names)
    folder.write_summary(summary | ({"without_records": list(without_records)} if without_records else {}))


class SimHooks:
    """Metrics, trace, evaluation of the fleet's mean, checkpoints and clean stops of a simulated run.

    A cut is every worker's own boundary of one round; several may be open at once. Evaluation costs no virtual time. Where there are
    servers, the global one's parameters at the time of the cut are evaluated, and there are no checkpoints.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        corpus: Corpus,
        network: Network | SeatNetwork,
        progress: Progress,
        absences: Absences,
        *,
        lean: bool = False,
        now: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._now, self._title = now, f"{job.title} on {job.fleet.name}"
        self.job, self.folder, self.network, self.progress, self.absences = job, folder, network, progress, absences
        self.judge = job.judge(corpus)
        self.metrics = JsonLines(folder.path / "metrics.jsonl")
        self.trace = JsonLines(folder.path / "trace.jsonl", every=256) if not lean else None
        self.loggers = Loggers({}, job.n) if lean else Loggers.of(job, folder.path)
        self.stop_asked = False
        self.stopped_at: int | None = None
        self._furthest = 0
        self._cuts: dict[int, dict[int, tuple[float, Tree | None]]] = defaultdict(dict)
        self._parts: dict[int, dict[int, str]] = defaultdict(dict)
        self._loss: float | None = None
        self._served: Tree = {}  # the global server's parameters, and since when it has them
        self._served_s = self._judged_s = 0.0

    def boundary(self, worker: int, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        if worker >= self.job.n:
            self._served, self._served_s = master(state.x), time_s
            return Go()
        self._furthest = max(self._furthest, round)
        if self.stop_asked and self.stopped_at is None:
            self.stopped_at = min(self._furthest + 1, self.job.method.rounds)
        due = self.job.due(self.job.config.eval.every, round) and not self.job.servers
        self._cuts[round][worker] = (time_s, master(state.x) if due else None)
        thrown_away = self.trace is None and round == self.job.method.rounds
        due = self.job.due(self.job.config.checkpoint.every, round) and not thrown_away
        if (round == self.stopped_at or due) and not self.job.servers:
            self._save(worker, round, time_s, state, body)
        if len(self._cuts[round]) == self._expected(round):
            self._closed(round, state.tokens)
        return Stop() if round == self.stopped_at else Go()

    def _expected(self, round: int) -> int:
        """How many workers come to the boundary of `round`."""
        return self.job.n - len(self.absences.missing(round))

    def _save(self, worker: int, round: int, time_s: float, state: State, body: Body | None) -> None:
        assert body is not None and isinstance(self.network, Network)
        extra = {"time_s": time_s, "network": self.network.snapshot(worker), "absences": self.absences.snapshot()}
        where = self.folder.checkpoints
        self._parts[round][worker] = checkpoint.write_part(where, round, worker, state, body.state(), extra)
        if len(self._parts[round]) == self._expected(round):
            hashes = self._parts.pop(round)
            if self.trace:
                self.trace.flush()
            checkpoint.close(where, round, state.tokens, hashes, keep=self.job.config.checkpoint.keep)

    def _closed(self, round: int, tokens: int) -> None:
        """All workers have passed the round."""
        cut = self._cuts.pop(round)
        time_s = max(t for t, _ in cut.values())
        trees = [tree for _, (_, tree) in sorted(cut.items()) if tree is not None]
        tiers = self.job.method.tiers
        if tiers and (round == self.job.method.rounds or tiers.evaluates(self.job.config.eval.every, round)):
            trees = [self._served]
        if trees:
            self._loss = self.judge(fleet_mean(self.job, trees))
            self._judged_s = time_s
            distance = None if tiers else consensus_distance(trees)
            self.note(evaluation(round, "fleet", tokens, time_s, self._loss, distance=distance))
            if self.job.config.eval.workers and not self.job.method.synchronous and not tiers:
                for worker, (t, tree) in sorted(cut.items()):
                    self.note(evaluation(round, worker, tokens, t, self.judge(tree or {})))
        self.loggers.closed(round)
        self.progress.update(round, tokens, self._loss, f"virtual clock {duration(time_s)}", what="validation loss")

    def ended(self) -> None:
        """All programs have. The last reports to a global server came after the last cut."""
        if self._served and self._served_s > self._judged_s:
            method = self.job.method
            self.note(evaluation(method.rounds, "fleet", method.total_tokens, self._served_s, self.judge(self._served)))

    def note(self, record: dict[str, Any]) -> None:
        self.metrics.add(record)
        self.loggers.add(record)

    def span(self, worker: int, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        if kind == "compute":
            self._now(f"{self._title}: round {round + 1}/{self.job.method.rounds}, worker {worker} of {self.job.n} has computed")
        if self.trace:
            self.trace.add({"worker": worker, "kind": kind, "start_s": start_s, "end_s": end_s, "round": round + 1})

    def ask_stop(self, number: int) -> None:
        """Stops at the next round; asked a second time, or where there are no checkpoints, at once."""
        if self.stop_asked:
            raise KeyboardInterrupt
        if self.job.servers:
            raise Stopped(f"stopped; {self.job.method.name} keeps no checkpoints, so a run that was stopped begins again")
        self.stop_asked = True

    def close(self) -> None:
        """Closes the files."""
        self.metrics.close()
        if self.trace:
            self.trace.close()
        self.loggers.close()
