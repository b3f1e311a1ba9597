"""What a site of a wide-area run does at its boundaries: evaluation, a copy of its state, checkpoints on its own disk, news."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gossamer.app.collect import STREAMS, by_worker, of_rank, opened
from gossamer.app.folder import JsonLines, RunFolder
from gossamer.app.job import Job
from gossamer.app.metrics import evaluation
from gossamer.app.progress import Progress, duration
from gossamer.app.served import Passing
from gossamer.app.wan.state import Snapshot, write
from gossamer.core.errors import RunFailed
from gossamer.core.tree import Tree
from gossamer.net.gates import Gated
from gossamer.train import checkpoint
from gossamer.train.data import Corpus
from gossamer.train.recut import ALONE
from gossamer.train.writing import Writer
from gossamer.wan.roster.records import Report
from gossamer.worker.account import TraceKind
from gossamer.worker.effects import Body, Go, Stop
from gossamer.worker.state import State


class SiteHooks:
    """One site's, over all sessions.

    Args:
        on_round: told what a site reports of itself, after each round; True: a stop at a common boundary is wanted.
        number: of this rank among all ranks of all sites.
        ranks: this rank among those of its site; None: it is the only one.
    """

    def __init__(
        self,
        job: Job,
        folder: RunFolder,
        corpus: Corpus,
        progress: Progress,
        me: int,
        on_round: Callable[[Report], bool],
        *,
        number: int,
        ranks: Gated | None,
    ) -> None:
        self.job, self.folder, self.progress, self.me, self.number = job, folder, progress, me, number
        self.place = ALONE if ranks is None else job.place(ranks.rank, ranks.size)
        self.held: Snapshot | None = None
        """The last boundary."""
        self.before: Snapshot | None = None
        """Of a site of several ranks: the one before, as long as another rank may not have come to the last."""
        self.ask_stop: Callable[[], None] = lambda: None
        self.begun_s = time.monotonic()
        """When this process's clock of the run showed 0."""
        self._corpus, self._ranks = corpus, ranks
        self._judge, self._on_round = job.judge(corpus, ranks), on_round
        self.written: Callable[[int, int, str | None], None] = self._written
        """Told (round, planned tokens, SHA-256) of each part of a checkpoint that this rank has written; None: it could not be. In any
        thread."""
        self._loss: float | None = None
        self._bytes = [0, 0]
        self.others_bytes = [0, 0]
        """What the other ranks of the site have sent and received."""
        self._exchanged_s: float | None = None
        """When the last exchange was."""
        self.passing: Passing | None = None
        """Where the global server's parameters are evaluated, in place of the site's own."""
        self._said: int | None = None  # the round of the last checkpoint
        self._files: dict[str, JsonLines] = {}
        self._full = False
        # What servers have goes with it, and they are at rest for that.
        self.writer = Writer(job.config.checkpoint.background and not job.servers)
        """Of this rank's parts of checkpoints."""

    # ---- records

    @property
    def records(self) -> Path:
        """The folder of the site's own records."""
        path = self.folder.path / "workers" / str(self.number)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Adds a record to one of STREAMS, if this rank keeps it."""
        if (kept := of_rank(self.place.rank, record)) is None:
            return
        self._write(name, kept)
        if name == "metrics.jsonl":
            self.told(kept)

    def _write(self, name: str, record: dict[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = opened(self.records, name)
        try:
            self._files[name].add(record)
            self._full = False
        except RunFailed as error:  # it waits for room
            if not self._full:
                self.trouble(f"{error}; the run goes on, and what is not written waits")
            self._full = True

    def close(self) -> None:
        """Waits for a checkpoint that is being written, and closes the files; a stream without records is an empty file."""
        self.writer.wait()
        try:
            for file in self._files.values():
                file.close()
        finally:
            self._files.clear()
        for name in STREAMS:
            (self.records / name).touch()

    def back_to(self, round: int, tokens: int) -> None:
        """The run goes on from `round`: what lies after it did not happen."""
        self.went_back(round, tokens)
        waiting = {name: file.let_go() for name, file in self._files.items()}  # for room on the disk
        self._files.clear()
        self.close()
        self.progress.goes_on(round, tokens)
        for name in STREAMS:
            RunFolder(self.records).cut(name, round)
            for record in waiting.get(name, ()):
                if record["round"] <= round and record["kind"] != "close":
                    self._write(name, record)
        if not any(self._bytes):  # what processes of this site before this one have sent and received
            done = [r for r in RunFolder(self.records).read_lines("metrics.jsonl") if r["kind"] in ("round", "close")]
            self._bytes = [sum(r["bytes_sent"] for r in done), sum(r["bytes_received"] for r in done)]

    def now_s(self) -> float:
        """What the clock of the run shows."""
        return time.monotonic() - self.begun_s

    def own(self, name: str, servers: Iterable[int] = ()) -> bytes:
        """What this site has recorded in one of STREAMS: itself, and these servers, where they were here."""
        files = [self.records / name, *(self.records.parent / str(seat) / name for seat in servers)]
        return b"".join(path.read_bytes() for path in files if path.is_file())

    # ---- what a world asks for

    def judge(self, tree: Tree) -> float:
        """The validation loss of the parameters of a whole model."""
        return (self._judge if self._ranks is None else self.job.judge(self._corpus))(tree)

    def boundary(self, seat: int, round: int, time_s: float, state: State, body: Body | None) -> Go | Stop:
        assert body is not None and self.held is not None
        if self.passing is not None:
            self.passing.completed(round, time_s)
            self._loss = self.passing.loss
        elif self.job.due(self.job.config.eval.every, round):
            if self._ranks is not None:
                self._ranks.gate.cross()
            self._loss = self._judge(state.x)
            self.add("metrics.jsonl", evaluation(round, self.me, state.tokens, time_s, self._loss))
        self.before = self.held if self._ranks is not None else None
        self.held = Snapshot.of(state, body, time_s, self.held.session)
        self.passed()
        if self.job.due(self.job.config.checkpoint.every, round):
            self.save(beside=True)
        if self.job.kills.get(self.me) == round and self.place.rank == self.place.ranks - 1:
            self.close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.shared(self._bytes)
        since_s = None if self._exchanged_s is None else time.monotonic() - self._exchanged_s
        sent, received = (own + others for own, others in zip(self._bytes, self.others_bytes, strict=True))
        report = Report(round=round, loss=self._loss, bytes_sent=sent, bytes_received=received, exchange_s=since_s)
        if self._on_round(report):
            self.ask_stop()
        whose = "validation loss" if self.job.method.synchronous or self.passing else f"validation loss of seat {self.me}"
        self.progress.update(round, state.tokens, self._loss, f"clock {duration(time_s)}", what=whose)
        return Go()

    def save(self, again: bool = False, beside: bool = False) -> None:
        """Writes a checkpoint of the last boundary, on this site's disk. A full disk is said, and costs no more than that.

        Args:
            again: even if there is one of it.
            beside: while the run goes on; otherwise it is written when this returns.
        """
        held = self.held
        self.writer.wait()  # the one before may fail, and it is of the same boundary, perhaps
        if held is not None and (self._said != held.state.round or again):
            self._said = held.state.round
            try:
                for file in self._files.values():
                    file.flush()
            except RunFailed as error:
                self._unsaved(held, error)
            else:
                self.writer.do(lambda: self._save(held))
        if not beside:
            self.writer.wait()

    def _save(self, held: Snapshot) -> None:
        try:
            _, sha = write(self.folder.checkpoints, self.me, held, self.place)
            self.written(held.state.round, held.state.tokens, sha)
        except RunFailed as error:
            self._unsaved(held, error)

    def _unsaved(self, held: Snapshot, error: RunFailed) -> None:
        self._said = None
        self.written(held.state.round, held.state.tokens, None)
        self.trouble(f"no checkpoint of round {held.state.round}, the run goes on: {error}")

    def close_checkpoint(self, round: int, tokens: int, shas: Sequence[str]) -> None:
        """All parts of a checkpoint are written."""
        parts = {self.me: shas, **self.beside(round)}
        checkpoint.close(self.folder.checkpoints, round, tokens, parts, keep=self.job.config.checkpoint.keep)

    def _written(self, round: int, tokens: int, sha: str | None) -> None:
        if sha is not None:
            self.close_checkpoint(round, tokens, [sha])

    trouble: Callable[[str], None] = staticmethod(lambda text: None)
    """Told what goes wrong without ending the run."""

    shared: Callable[[list[int]], None] = staticmethod(lambda own: None)
    """Told, at each boundary, the bytes that this rank has sent and received."""

    passed: Callable[[], None] = staticmethod(lambda: None)
    """Told of each boundary."""

    beside: Callable[[int], dict[int, list[str]]] = staticmethod(lambda round: {})
    """Writes the parts of servers that belong to the checkpoint of a round."""

    told: Callable[[dict[str, Any]], None] = staticmethod(lambda record: None)
    """Told each record of what the run does."""

    went_back: Callable[[int, int], None] = staticmethod(lambda round, tokens: None)
    """Told that the run goes on from a round, with its planned tokens."""

    def note(self, record: dict[str, Any]) -> None:
        if record["kind"] in ("round", "close"):
            self._bytes[0] += record["bytes_sent"]
            self._bytes[1] += record["bytes_received"]
            if record["bytes_sent"] or record["bytes_received"]:
                self._exchanged_s = time.monotonic()
        self.add("metrics.jsonl", by_worker(self.job, record))

    def span(self, seat: int, kind: TraceKind, start_s: float, end_s: float, round: int) -> None:
        self.add("trace.jsonl", {"worker": self.me, "kind": kind, "start_s": start_s, "end_s": end_s, "round": round + 1})
