"""From the records of a run to its loggers, without ever holding the run up.

    loggers = Loggers.of(job, folder)     # nothing is opened yet
    loggers.add(record)                   # what goes to metrics.jsonl
    loggers.close()

Each logger has a thread of its own, which opens it, feeds it and closes it. One that fails, or hangs, or is too slow, is given up with one
message, and training goes on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

from gossamer.app.job import Job
from gossamer.app.tracking.series import Fleet, Row, row_of
from gossamer.app.tracking.sinks import SINKS, Run, Sink

_MOST_WAITING = 100_000
"""Rows that may wait for a logger."""
_LAST_S = 60.0
"""How long a logger may take with the last rows."""
_SHOWN = 300
"""Letters of an error that are shown."""


def _say(text: str) -> None:
    print(f"gossamer: {text}", file=sys.stderr, flush=True)


class Feed:
    """One logger and its thread.

    Args:
        opens: makes the logger, in its thread.
        say: told once why the logger is given up.
        last_s: seconds that it may take with what is left at the end.
    """

    def __init__(self, name: str, opens: Callable[[], Sink], say: Callable[[str], None], last_s: float = _LAST_S) -> None:
        self._name, self._opens, self._say, self._last_s = name, opens, say, last_s
        self._waiting: Queue[Callable[[Sink], None] | None] = Queue(_MOST_WAITING)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._feed, name=f"log to {name}", daemon=True)
        self._thread.start()

    def put(self, ask: Callable[[Sink], None] | None) -> None:
        """Asks something of the logger, some time; None: to close."""
        if not self._given_up.is_set():
            try:
                self._waiting.put_nowait(ask)
            except Full:
                self._give_up(f"{_MOST_WAITING} rows wait for it")

    def close(self) -> None:
        """Waits for what is left, for a while."""
        self.put(None)
        self._thread.join(self._last_s)
        if self._thread.is_alive():
            self._give_up(f"it has not taken all within {self._last_s:g} s")

    def _feed(self) -> None:
        try:
            sink = self._opens()
            while (ask := self._waiting.get()) is not None:
                ask(sink)
            sink.close()
        except BaseException as error:  # whatever a library raises, an exit too: it ends this thread alone
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            words = " ".join(why.split())
            short = words if len(words) <= _SHOWN else f"{words[:_SHOWN]} ..."
            self._say(f"logging to {self._name} has failed ({short}); the run goes on, and metrics.jsonl has everything")


class Loggers:
    """All loggers of one process. They are opened with the first record, so a process without any opens none.

    Args:
        opens: a logger's name -> what makes it.
        workers: how many complete a round.
        speaker: as of `gossamer.app.tracking.series.row_of`.
        say: told once of each logger that fails.
    """

    def __init__(
        self, opens: Mapping[str, Callable[[], Sink]], workers: int, speaker: int | None = None, say: Callable[[str], None] = _say
    ) -> None:
        self._opens, self._speaker, self._say = opens, speaker, say
        self._fleet = Fleet(workers)
        self._feeds: list[Feed] | None = None
        self._tokens = 0

    @classmethod
    def of(cls, job: Job, folder: Path, *, me: int = 0, site: str = "", run: str = "", say: Callable[[str], None] = _say) -> Loggers:
        """Those that `[log]` asks for.

        Args:
            folder: the run folder.
            me: the worker whose process this is.
            site, run: of a wide-area run: this site, and the id of the run, under which those of all sites are grouped.
        """
        section = job.config.log
        name = section.name or (f"{job.title} at {site}" if site else job.title)
        told = Run(folder, section.project, name, run, section.offline, job.config.model_dump(exclude_none=True))
        opens: dict[str, Callable[[], Sink]] = {one: partial(SINKS[one], told) for one in dict.fromkeys(section.to)}
        return cls(opens, job.n, me if job.method.synchronous else None, say)

    def add(self, record: Mapping[str, Any]) -> None:
        """One record as it goes to metrics.jsonl."""
        if self._opens:
            self._tokens = record.get("tokens_total", self._tokens)
            self._show(row_of(record, self._speaker, self._tokens))
            self._show(self._fleet.add(record))

    def closed(self, round: int) -> None:
        """All workers that come to the end of this round have."""
        self._show(self._fleet.closed(round))

    def back_to(self, round: int, tokens: int) -> None:
        """The run goes on from `round`, at `tokens`: what lies after it did not happen."""
        self._fleet.back_to(round)
        for feed in self._opened():
            feed.put(lambda sink: sink.back_to(tokens))

    def rest(self, records: Iterable[Mapping[str, Any]], told: int, after: int = 0) -> None:
        """At the end of a run of several processes: the records of all but worker `told`, whose own have been added as they came, and the
        numbers of the fleet.

        Args:
            after: of later rounds than this alone: the run had come to its end before, and was taken back to it.
        """
        if not self._opens or self._fleet.n == 1:
            return
        fleet = Fleet(self._fleet.n)
        for record in records:
            if record["round"] <= after:
                continue
            if record["worker"] != told:
                self._tokens = record.get("tokens_total", self._tokens)
                self._show(row_of(record, tokens=self._tokens))
            self._show(fleet.add(record))
        for row in fleet.left():
            self._show(row)

    def close(self) -> None:
        """Closes the loggers, as far as they let it."""
        for feed in self._feeds or ():
            feed.close()
        self._feeds = []

    def _show(self, row: Row | None) -> None:
        if row is not None:
            for feed in self._opened():
                feed.put(lambda sink: sink.log(row))

    def _opened(self) -> list[Feed]:
        if self._feeds is None:
            self._feeds = [Feed(name, opens, self._say) for name, opens in self._opens.items()]
        return self._feeds
