"""What a site of a wide-area run does at its boundaries: evaluation, a copy of its state, checkpoints on its own disk, news."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.app.collect import STREAMS
from gossamer.app.folder import JsonLines, RunFolder
from gossamer.app.job import Job
from gossamer.app.metrics import evaluation
from gossamer.app.progress import Progress, duration
from gossamer.app.wan_state import Snapshot, write
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree
from gossamer.real.group import Group
from gossamer.train import checkpoint
from gossamer.train.data import Corpus
from gossamer.wan.records import Report
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Body, Go, Stop
from gossamer.worker.state import State


class SiteHooks:
    """One site's, over all sessions.

    Args:
        on_round: told what a site reports of itself, after each round; True: a stop at a common boundary is wanted.
    """

    def __init__(
        self, job: Job, folder: RunFolder, corpus: Corpus, progress: Progress, me: int, on_round: Callable[[Report], bool]
    ) -> None:
        self.job, self.folder, self.progress, self.me = job, folder, progress, me
        self.held: Snapshot | None = None
        """The last boundary."""
        self.session = 0
        self.last_round: Callable[[], int | None] = lambda: None
        self.ask_stop: Callable[[], None] = lambda: None
        self.begun_s = time.monotonic()
        """When this process's clock of the run showed 0."""
        self._judge, self._on_round = job.judge(corpus), on_round
        self._loss: float | None = None
        self._bytes = [0, 0]
        self._exchanged_s: float | None = None
        """When the last exchange was."""
        self._said: int | None = None  # the round of the last checkpoint
        self._files: dict[str, JsonLines] = {}
        self._full = False

    # ---- records

    @property
    def records(self) -> Path:
        """The folder of the site's own records."""
        path = self.folder.path / "workers" / str(self.me)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Adds a record to one of STREAMS."""
        if name not in self._files:
            self._files[name] = JsonLines(self.records / name, every=64 if name.startswith("trace") else 1)
        try:
            self._files[name].add(record)
            self._full = False
        except RunFailed as error:  # it waits for room
            if not self._full:
                self.trouble(f"{error}; the run goes on, and what is not written waits")
            self._full = True
        if name == "metrics.jsonl":
            self.told(record)

    def close(self) -> None:
        """Closes the files; a stream without records is an empty file."""
        try:
            for file in self._files.values():
                file.close()
        finally:
            self._files.clear()
        for name in STREAMS:
            (self.records / name).touch()

    def back_to(self, round: int, tokens: int) -> None:
        """The run goes on from `round`: what lies after it did not happen."""
        self.close()
        self.progress.goes_on(round, tokens)
        for name in STREAMS:
            RunFolder(self.records).cut(name, round)

    def now_s(self) -> float:
        """What the clock of the run shows."""
        return time.monotonic() - self.begun_s

    # ---- what a world asks for

    def judge(self, tree: Tree) -> float:
        """The validation loss of the parameters of a whole model."""
        return self._judge(tree)

    def boundary(self, seat: int, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        assert body is not None
        if self._due(self.job.config.eval.every, round):
            self._loss = self._judge(state.x)
            self.add("metrics.jsonl", evaluation(round, self.me, state.tokens, time_s, self._loss))
        self.held = Snapshot.of(state, body, time_s, self.session)
        self.passed()
        if self._due(self.job.config.checkpoint.every, round):
            self.save()
        if self.job.kills.get(self.me) == round:
            self.close()
            os.kill(os.getpid(), signal.SIGKILL)
        since_s = None if self._exchanged_s is None else time.monotonic() - self._exchanged_s
        report = Report(round=round, loss=self._loss, bytes_sent=self._bytes[0], bytes_received=self._bytes[1], exchange_s=since_s)
        if self._on_round(report):
            self.ask_stop()
        whose = "validation loss" if self.job.method.synchronous else f"validation loss of seat {self.me}"
        self.progress.update(round, state.tokens, self._loss, f"clock {duration(time_s)}", what=whose)
        return Go()

    def save(self) -> None:
        """Writes a checkpoint of the last boundary, on this site's disk. A full disk is said, and costs no more than that."""
        held = self.held
        if held is None or self._said == held.state.round:
            return
        try:
            for file in self._files.values():
                file.flush()
            _, sha = write(self.folder.checkpoints, self.me, held)
            checkpoint.close(
                self.folder.checkpoints, held.state.round, held.state.tokens, {self.me: sha}, keep=self.job.config.checkpoint.keep
            )
            self._said = held.state.round
        except RunFailed as error:
            self.trouble(f"no checkpoint of round {held.state.round}, the run goes on: {error}")

    trouble: Callable[[str], None] = staticmethod(lambda text: None)
    """Told what goes wrong without ending the run."""

    passed: Callable[[], None] = staticmethod(lambda: None)
    """Told of each boundary."""

    told: Callable[[dict[str, Any]], None] = staticmethod(lambda record: None)
    """Told each record of what the run does."""

    def _due(self, every: int, round: int) -> bool:
        return round == self.job.method.rounds or (every > 0 and round % every == 0)

    def note(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("round", "close"):
            self._bytes[0] += record["bytes_sent"]
            self._bytes[1] += record["bytes_received"]
            if record["bytes_sent"] or record["bytes_received"]:
                self._exchanged_s = time.monotonic()
        self.add("metrics.jsonl", record)

    def span(self, seat: int, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        self.add("trace.jsonl", {"worker": self.me, "kind": kind, "start_s": start_s, "end_s": end_s, "round": round + 1})


def finish(
    job: Job, group: Group, hooks: SiteHooks, state: State, conclude: Callable[[dict[int, Tree], list[dict[str, bytes]]], str]
) -> str:
    """The end: everybody's records and parameters at the lowest living site, which makes the summary of them (`conclude`) and tells it.

    Returns:
        The summary.

    Raises:
        RunFailed: a site is gone (synchronous methods: the others do this again, in a session without it).
    """
    own = {name: (hooks.records / name).read_bytes() for name in STREAMS}
    attempt = 0
    while True:
        to, done = group.living[0], f"summary/{attempt}"
        told = {name: group.gather_bytes(own[name], to) for name in STREAMS}
        trees = group.gather_trees(state.x, to)
        if trees is not None:
            found = dict(trees)
            streams: list[dict[str, bytes]] = [{name: data} for name in STREAMS for data in told[name] or ()]
            summary = conclude(found, streams)
            group.post(done, summary)
            return summary
        while (said := group.posted([done])) is None and group.living[0] == to:
            group.board.check()
            time.sleep(0.02)
        if said is not None:
            return said[0]
        attempt += 1
