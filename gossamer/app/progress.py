"""Progress of a run: a live line in a terminal, a plain line now and then elsewhere; and of what has no rounds, such lines alone.

with Progress(total_rounds=20, title="geomesh on azure-4") as progress:
    progress.update(round=1, tokens=122_880, loss=6.1, extra="virtual clock 41 s")
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from gossamer.core.terminal import redraws

_WIDE = 110
"""Columns of a terminal in which there is room for more than the essentials."""
_PLAIN_LINES = 10
"""Lines that a run prints where there is no terminal, about."""
STILL_S = 10.0
"""Seconds between the lines of `still`."""


class Progress:
    """Rounds done, loss, tokens per second and time left.

    In a terminal one line is redrawn; elsewhere (a log, a pipe) a line is printed about every tenth of the run; `quiet` prints nothing.

    Args:
        total_rounds: rounds of the whole run.
        title: what is running.
        quiet: print nothing at all.
        first_round: rounds that a resumed run has done already.
        first_tokens: tokens that a resumed run has consumed already.
        file: where to print; standard output by default.
        console: where to print, in place of a file. What else is printed on it while the live line is shown goes above that line, as does
            what this process prints to standard output, and to standard error where that is a terminal; not what other consoles print.
        now_s: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        total_rounds: int,
        title: str,
        *,
        quiet: bool = False,
        first_round: int = 0,
        first_tokens: int = 0,
        file: TextIO | None = None,
        console: Console | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._title, self._quiet = total_rounds, title, quiet
        self._first_round, self._first_tokens = first_round, first_tokens
        self._console = Console(file=file, emoji=False, highlight=False, soft_wrap=True) if console is None else console
        self._now_s = now_s
        self._begin_s = now_s()
        self._shown = first_round * _PLAIN_LINES // max(1, total_rounds)
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Progress:
        self._begin_s = self._now_s()
        if self._quiet:
            return self
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[status]}", markup=False),
                console=self._console,
                redirect_stderr=redraws(sys.stderr),  # a file gets what is meant for it
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._first_round, status="starting")
            self._bar.start()
        else:
            self._print(f"{self._title}: {self._total} rounds")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def goes_on(self, round: int, tokens: int) -> None:
        """The run goes on from another place than where it was, for those who train a stretch of it: what is left is told from here."""
        self._first_round, self._first_tokens, self._begin_s = round, tokens, self._now_s()

    def update(self, round: int, tokens: int, loss: float | None, extra: str = "", *, what: str = "loss") -> None:
        """Tells how far the run is.

        Args:
            round: rounds completed.
            tokens: tokens that all workers have consumed so far.
            loss: in nats; None when there is none.
            extra: anything else worth a few words, such as the virtual clock.
            what: whose loss it is, in a word or two.
        """
        if self._quiet:
            return
        status = self._status(round, tokens, loss, extra, what)
        if self._bar is not None:
            self._bar.update(self._task, completed=round, status=status)
            return
        tenth = round * _PLAIN_LINES // max(1, self._total)
        if tenth > self._shown or round >= self._total:
            self._shown = tenth
            self._print(f"{self._title}: {status}")

    def _status(self, round: int, tokens: int, loss: float | None, extra: str, what: str) -> str:
        spent_s = self._now_s() - self._begin_s
        done = round - self._first_round
        parts = [f"round {round}/{self._total}"]
        if loss is not None:
            parts.append(f"{what} {loss:.3f}")
        if spent_s > 0 and tokens > self._first_tokens:
            parts.append(f"{count((tokens - self._first_tokens) / spent_s)} tokens/s")
        if extra and (self._bar is None or self._console.width >= _WIDE):
            parts.append(extra)
        if done > 0 and round < self._total:
            parts.append(f"{duration(spent_s / done * (self._total - round))} left")
        return ", ".join(parts)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)


@contextmanager
def still(text: str, *, quiet: bool = False, every_s: float = STILL_S, file: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Says now and then what goes on while the block runs, and for how long it has, where there is no terminal: a log that stands still for
    minutes looks like a program that hangs. What ends sooner than `every_s` says nothing.

    Args:
        text: what goes on; the function that the block is given changes it.
        file: standard error by default, since tables go to the other.
    """
    out = sys.stderr if file is None else file
    now, over, begin_s = [text], threading.Event(), time.monotonic()

    def change(text: str) -> None:
        now[0] = text

    def tell() -> None:
        while not over.wait(every_s):
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(f"{now[0]} ({duration(time.monotonic() - begin_s)})", file=out, flush=True)

    if quiet or out.isatty():
        yield change
        return
    teller = threading.Thread(target=tell, name="still", daemon=True)
    teller.start()
    try:
        yield change
    finally:
        over.set()
        teller.join()


def duration(seconds: float) -> str:
    """A time in two units at most.

    >>> duration(0.31), duration(42), duration(192), duration(7500), duration(200_000)
    ('0.3 s', '42 s', '3 min 12 s', '2 h 5 min', '2 d 7 h')
    """
    if not math.isfinite(seconds):
        return "unknown time"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size_s, unit, part_s, part in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size_s:
            return f"{whole // size_s} {unit} {whole % size_s // part_s} {part}"
    return f"{whole} s"


def count(number: float) -> str:
    """A large number in three digits.

    >>> count(950), count(12_300), count(4_560_000)
    ('950', '12.3k', '4.56M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
