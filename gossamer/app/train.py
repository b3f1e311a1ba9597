"""Real runs: one worker a process, over torch.distributed; N of them on this machine, or one of several under torchrun."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from gossamer.app.collect import STREAMS, by_worker, collect, of_rank, opened
from gossamer.app.folder import JsonLines, RunFolder, no_checkpoint
from gossamer.app.job import Job
from gossamer.app.lock import alone_in
from gossamer.app.metrics import check_unchanged, evaluation, facts_of
from gossamer.app.planning import planned
from gossamer.app.progress import Progress, duration
from gossamer.app.resuming.absence import part_of
from gossamer.app.resuming.resize import settle, settled
from gossamer.app.resuming.rollback import ended_until, roll_back
from gossamer.app.served import Passing, ServerHooks, last_key, part_key, processes, seats_of, serve, servers_of
from gossamer.app.tracking.loggers import Loggers
from gossamer.app.tracking.sinks import check_loggers
from gossamer.app.trained import check_model
from gossamer.core.errors import BadInput, RunFailed, Stopped
from gossamer.core.inner import Muon
from gossamer.core.tree import Tree, layout_hash, master
from gossamer.net.fork import load_early
from gossamer.net.launch import launch
from gossamer.net.start import STORE_ENV, init
from gossamer.real.driver import run
from gossamer.real.group import Group
from gossamer.train import checkpoint
from gossamer.train.data import Corpus
from gossamer.train.parts import put
from gossamer.train.writing import Writer
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Body, Go, Stop
from gossamer.worker.peer import peer
from gossamer.worker.ranks import among_ranks, check_ranks
from gossamer.worker.server import client
from gossamer.worker.state import State


def _check_world(job: Job) -> None:
    if 0 in job.kills.values():
        raise BadInput("clock.kill with round 0 is for simulations, of a run that a worker never came to: give a round from 1 here")
    check_several_ranks(job)
    if job.returns:
        raise BadInput(
            f"clock.back = {job.config.clock.back}: only a simulated worker comes back by itself; leave it out, or use gossamer simulate"
        )


def check_several_ranks(job: Job) -> None:
    """Refuses what does not go with workers of several ranks, where there are some.

    Raises:
        BadInput: naming what to use in its place.
    """
    if job.ranges is not None:
        check_ranks(job.method)
        if isinstance(job.method.inner, Muon):
            raise BadInput("inner optimizer muon needs whole matrices, which workers of several ranks do not have: use lion or adamw")
        if job.config.model.adapter.rank and job.config.model.dtype != "fp32":
            raise BadInput(
                f'model.dtype = "{job.config.model.dtype}" leaves an adapter in float32, and workers of several ranks cut parameters of '
                'one type: set model.dtype = "fp32"'
            )


WORKER_MODULES = ("gossamer.app.train", "transformers.models.llama.modeling_llama")
"""What every worker loads. Not where there is a GPU: whatever of it looks for one would spoil it for processes that are forked."""


def launch_local(job: Job, out: Path, *, resume: bool = False, back_to: int | None = None) -> Path:
    """Runs all workers of `job` as processes on this machine, to their common end. Returns the run folder.

    Args:
        back_to: of a run to resume: from the checkpoint of this round; what came after it is put aside.

    Raises:
        BadInput: the folder is in the way, or is none to resume.
        RunFailed: a worker failed; what it was has been said.
        Stopped: the run was asked to stop, and can be resumed.
    """
    check_loggers(job.config.log)
    job.pace_s(0)  # refuses, before anything is made, a slow-down of workers without a pace
    _check_world(job)
    modules = WORKER_MODULES if job.device.type == "cpu" else ()
    env = {"OMP_NUM_THREADS": str(job.config.run.threads_per_worker)}
    load_early(modules, {**os.environ, **env})
    corpus = job.corpus()  # made once, before all workers ask for it
    if resume:
        folder, given = RunFolder.existing(out), ["--resume", str(out)]
        check_unchanged(job, corpus, settle(folder, job))
        if back_to is not None:
            with alone_in(out):
                roll_back(folder, back_to, job.method.since[0])
        if folder.finished:
            return out
        if (found := checkpoint.latest(folder.checkpoints)) is None:
            raise no_checkpoint(out)
        check_model(job, folder, found)
        if job.config.checkpoint.resized:  # what was planned was for others
            planned.write(out, job, "net")
    else:
        planned.begin(out, job, facts_of(job, corpus, "net"), corpus.tokenizer)
        given = ["--out", str(out), str(out / "config.toml")]
    job.models.let_go()

    def last() -> str | None:
        found = checkpoint.latest(out / "checkpoints")
        return None if found is None else f"round {found}; go on with: gossamer train --workers {job.n} --resume {out}"

    with alone_in(out):
        RunFolder(out).goes_on()
        code = launch(
            processes(job),
            [sys.executable, "-m", "gossamer", "train", *given],
            out / "logs",
            env=env,
            last_checkpoint=last,
            survives=job.goes_on,
            seats=seats_of(job),
            modules=modules,
        )
        if code in (130, 143):
            RunFolder(out).was_stopped(checkpoint.newest(out / "checkpoints"), f"gossamer train --workers {job.n} --resume")
    if code in (130, 143):
        raise Stopped(f"stopped; last whole checkpoint: {last() or 'none yet'}")
    if code == 2:
        raise BadInput(f"a worker refused its input; its words are above, or in {out / 'logs'}")
    if code:
        raise RunFailed(f"the run in {out} has failed; the reason is above")
    return out


def work(job: Job, out: Path, *, resume: bool = False, back_to: int | None = None) -> Path:
    """One worker of a run, or one rank of it, in this process.

    Args:
        back_to: as of `launch_local`; equal on all workers, the first of which sees to it.

    Raises:
        BadInput: the environment or the folder is not as it should be.
        RunFailed: the run could not go on.
    """
    check_loggers(job.config.log)
    _check_world(job)
    torch.set_num_threads(job.config.run.threads_per_worker)
    job.pace_s(0)
    corpus = job.corpus()
    if job.ranges and job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    with closing(Loggers.of(job, out)) as loggers, init(survives=_survives(job), seats=seats_of(job), device=job.device.type) as group:
        if job.ranges and job.device.type == "cuda":  # the device mesh may have chosen another
            torch.cuda.set_device(job.device)
        if group.n != processes(job):
            also = f" and {job.servers} servers" if job.servers else ""
            raise BadInput(
                f"{group.n} processes were started for the {job.n} workers{also} of fleet {job.fleet.name}: start {processes(job)} "
                f"(--workers {job.n}, or torchrun --nproc-per-node), or use fleet.name = uniform-{group.n}"
            )
        group.all_equal(
            {
                "configuration": job.run_id,
                "parameter layout": layout_hash(job.layout),
                "ranks": str(job.fleet.ranks),
                "corpus": corpus.content_hash,
                "parameters that are not trained": job.models.frozen_digest or "none",
                "torch": torch.__version__,
            }
        )
        folder = _folder(job, group, out, corpus, resume)
        if resume:
            check_unchanged(job, corpus, settled(folder, job))
            if back_to is not None:
                if group.me == 0:
                    roll_back(folder, back_to, job.method.since[0])
                group.all_equal({"round to go back to": back_to})  # that others do not look before it is done
            if folder.finished:
                return folder.path
        if round0 := _first_round(group, folder) if resume else 0:
            check_model(job, folder, round0)
        if tells := group.me == 0 and STORE_ENV not in os.environ:  # our launcher does it itself
            folder.goes_on()
        state, hooks = _run(job, group, folder, corpus, round0, loggers)
        collect(job, group, folder, hooks, state)
        if folder.finished and group.me == group.living[0]:  # where everybody's records are
            loggers.rest(folder.read_lines("metrics.jsonl"), told=0, after=ended_until(folder.path))
        stopped = group.stopped_by
        if stopped and tells:
            folder.was_stopped(checkpoint.newest(folder.checkpoints), "the same torchrun command with --resume")
    if stopped:
        raise SystemExit(128 + stopped)
    return folder.path


def _survives(job: Job) -> bool:
    """Whether this worker goes on when another one is gone. Whoever started it must let it."""
    ours = STORE_ENV in os.environ
    if job.config.run.on_death == "continue" and not ours and job.n > 1:
        raise BadInput(
            'run.on_death = "continue" is for --workers: torchrun ends all workers when one has died. Set run.on_death = "stop", and resume'
        )
    return job.goes_on and ours


def _folder(job: Job, group: Group, out: Path, corpus: Corpus, resume: bool) -> RunFolder:
    """The run folder, on storage that all workers share: made by worker 0 unless our launcher has made it."""
    if group.me == 0 and not resume and STORE_ENV not in os.environ:
        planned.begin(out, job, facts_of(job, corpus, "net"), corpus.tokenizer)
    group.all_equal({"run folder": str(out) if STORE_ENV in os.environ else "made"})
    if not (out / "config.toml").is_file():
        raise BadInput(
            f"worker {group.me} does not see the run folder {out} that worker 0 made: give --out on storage that all machines share"
        )
    return RunFolder.existing(out)


def _first_round(group: Group, folder: RunFolder) -> int:
    """The round of the newest whole checkpoint. Worker 0 reads them all through; the others take its word, and each reads its own part."""
    if group.me == 0:
        group.post("resume", str(checkpoint.latest(folder.checkpoints) or ""))
    said = group.posted(["resume"], wait=True)
    if not said or not said[0]:
        raise no_checkpoint(folder.path)
    return int(said[0])


def _run(job: Job, group: Group, folder: RunFolder, corpus: Corpus, round0: int, loggers: Loggers) -> tuple[State, NetHooks | ServerHooks]:
    if job.servers and group.me >= job.n:
        return serve(job, group, Mine(folder, group.me), corpus, folder, round0)
    site, seat = group.site, job.rank_seat(group.me)
    me = seat.me
    body = job.body(me, corpus, job.pace_s(me), site if site.size > 1 else None)
    start_s = 0.0
    mine = Mine(folder, group.me, site.rank, None if group.me else loggers)
    if round0:
        state, kept, extra = part_of(job, folder.checkpoints, round0, me, body.home, job.place(site.rank, site.size), seat)
        body.load_state(kept)
        start_s = extra["time_s"]
        for name in STREAMS:
            mine.folder.cut(name, round0, job.method.since[0])
        if not group.me:
            loggers.back_to(round0, state.tokens)
    else:
        state = job.first_state(me, master(body.tree), seat)
    title = f"{job.title} on {job.fleet.name}"
    with Progress(job.method.rounds, title, quiet=group.me != 0, first_round=round0, first_tokens=state.tokens) as progress:
        hooks = NetHooks(job, group, folder, mine, corpus, progress, me, round0)
        program = client(seat, state) if job.servers else among_ranks(seat, peer(seat, state))
        ahead = job.config.run.ahead
        try:
            with hooks.writer:
                state, _ = run(program, body, hooks, group, start_s=start_s, rounds0=round0, ahead=ahead, servers=servers_of(job))
        finally:
            mine.close()
    hooks.close_checkpoints(wait=True)
    if missed := hooks.missed_pace():
        print(missed, file=sys.stderr)
    return state, hooks


class Mine:
    """One worker's own records while the run goes: whole whatever happens to the others, merged by worker 0 at the end. Worker 0 tells its
    own to the loggers as they come."""

    def __init__(self, folder: RunFolder, seat: int, rank: int = 0, loggers: Loggers | None = None) -> None:
        path = folder.path / "workers" / str(seat)
        self._rank, self._loggers = rank, loggers
        path.mkdir(parents=True, exist_ok=True)
        self.folder = RunFolder(path)
        self._files: dict[str, JsonLines] = {}

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Adds a record to one of STREAMS, if this rank keeps it."""
        if (kept := of_rank(self._rank, record)) is None:
            return
        if name not in self._files:
            self._files[name] = opened(self.folder.path, name)
        self._files[name].add(kept)
        if self._loggers is not None and name == "metrics.jsonl":
            self._loggers.add(kept)

    def flush(self) -> None:
        """Writes what waits."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Closes the files; a stream without records is an empty file."""
        for name in STREAMS:
            (self.folder.path / name).touch()
        for file in self._files.values():
            file.close()


class NetHooks:
    """Metrics, trace, evaluation and checkpoints of one real worker.

    A checkpoint is the cut "every worker's own boundary of one round": each writes its part, beside its next steps, and posts its hash;
    the lowest that is left closes the round when the parts of all that are left are there, without making anybody wait.
    """

    def __init__(
        self, job: Job, group: Group, folder: RunFolder, mine: Mine, corpus: Corpus, progress: Progress, worker: int, round0: int = 0
    ) -> None:
        self.job, self.group, self.folder, self.mine, self.progress, self.worker = job, group, folder, mine, progress, worker
        self._corpus, self._site = corpus, group.site
        self._judge = job.judge(corpus, group.site if group.site.size > 1 else None)
        self._open: dict[int, int] = {}  # round -> planned tokens, of checkpoints that this worker has not closed
        self._loss: float | None = None
        self._compute_s, self._asked_s, self._steps = 0.0, 0.0, 0
        self.writer = Writer(job.config.checkpoint.background)
        """Of this worker's parts of checkpoints. Who leaves has to wait for it."""
        self._passing = Passing(job, group, round0) if job.servers else None

    @property
    def records(self) -> Path:
        """The folder of the worker's own records."""
        return self.mine.folder.path

    def judge(self, tree: Tree) -> float:
        """The validation loss of the parameters of a whole model."""
        return (self._judge if self._site.size == 1 else self.job.judge(self._corpus))(tree)

    def boundary(self, seat: int, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        worker, site = self.worker, self._site
        self.writer.check()
        if self._passing:
            self._passing.completed(round, time_s)
            self._loss = self._passing.loss
        elif self.job.due(self.job.config.eval.every, round):
            self._loss = self._judge(state.x)
            self.mine.add("metrics.jsonl", evaluation(round, worker, state.tokens, time_s, self._loss))
        last = round == self.group.last_round
        if last:
            self.group.post(last_key(round), str(round))
        if last or self.job.due(self.job.config.checkpoint.every, round):
            assert body is not None
            self.mine.flush()
            place = self.job.place(site.rank, site.size)
            part = checkpoint.stage(self.folder.checkpoints, round, worker, state, body.state(), {"time_s": time_s}, place)
            self.writer.do(lambda: self.group.post(part_key(round, seat), put(part)))
            self._open[round] = state.tokens
        self.close_checkpoints()
        if self.job.kills.get(worker) == round and site.rank == site.size - 1:
            self.mine.flush()
            self.writer.wait()
            print(f"worker {worker} is killed after round {round}, as clock.kill says", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        whose = "validation loss" if self.job.method.synchronous or self._passing else f"worker {worker}'s validation loss"
        self.progress.update(round, state.tokens, self._loss, f"clock {duration(time_s)}", what=whose)
        return Go()

    def close_checkpoints(self, wait: bool = False) -> None:
        """Closes the checkpoints of which all parts are there (the lowest worker that is left)."""
        group, folder = self.group, self.folder.checkpoints
        if group.me != group.living[0]:
            return
        if group.me:  # it may have taken over: what the one before has closed, or passed over, is done
            done = checkpoint.newest(folder) or 0
            self._open = {round: tokens for round, tokens in self._open.items() if round > done}
        for round in sorted(self._open):
            posted = group.posted_by({i: part_key(round, i) for i in range(group.n)}, wait=wait)
            if posted is not None:
                places = self.job.ranges.seats if self.job.ranges else lambda w: range(w, w + 1)
                parts = {w: [posted[s] for s in places(w)] for w in range(self.job.n) if all(s in posted for s in places(w))}
                parts |= {s: [posted[s]] for s in servers_of(self.job) if s in posted}
                checkpoint.close(folder, round, self._open.pop(round), parts, keep=self.job.config.checkpoint.keep)

    def note(self, record: dict[str, Any]) -> None:
        if record["kind"] == "round":
            self._compute_s += record["compute_s"]
            self._asked_s += record["steps"] * (self.job.pace_s(self.worker, record["round"] - 1) or 0.0)
            self._steps += record["steps"]
        self.mine.add("metrics.jsonl", by_worker(self.job, record))

    def missed_pace(self) -> str | None:
        """What to say where this worker could not keep the pace that was asked for."""
        if not self._asked_s or self._compute_s <= 1.1 * self._asked_s:
            return None
        asked_s = self._asked_s / self._steps
        return (
            f"worker {self.worker} could not keep its pace: {self._compute_s / self._steps:.3f} s an inner step, {asked_s:.3f} s asked. "
            "The idle times of this run are this machine's, not the fleet's: raise clock.pace_s"
        )

    def span(self, seat: int, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        self.mine.add("trace.jsonl", {"worker": self.worker, "kind": kind, "start_s": start_s, "end_s": end_s, "round": round + 1})
