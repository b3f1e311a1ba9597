"""Many runs, in this process or in several, each of them claimed, simulated and stored as a cell."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from gossamer.app.config import Config
from gossamer.app.folder import RunFolder
from gossamer.app.grids.cell import cell_path, store
from gossamer.app.grids.compare import STOPPING
from gossamer.app.job import Job, resolve
from gossamer.app.lock import claimed
from gossamer.app.simulate import simulate
from gossamer.core.errors import BadInput, RunFailed, Stopped
from gossamer.real.signals import end_with_parent, handling
from gossamer.train import checkpoint

_POLL_S = 1.0
"""How often a cell that another process runs is looked for."""


@dataclass(frozen=True)
class Attempt:
    """A cell to run."""

    mark: str
    """Its hash."""
    config: Config
    cells: Path
    work: Path
    keep: bool
    """Whether the run folder stays, with its trace."""


class Outcome(NamedTuple):
    """How an attempt ended: `stored` (also as failed: then the message says why), `error` (not stored: it may go another way next time),
    `busy` (another process runs it) or `stopped`."""

    kind: Literal["stored", "error", "busy", "stopped"]
    message: str = ""


Ended: TypeAlias = Generator[tuple[Attempt, Outcome], None, None]


def outcomes(attempts: Sequence[Attempt], processes: int, *, quiet: bool = True) -> Ended:
    """Runs all attempts and yields each as it ends, `stored` or `error`. Cells that another program runs are waited for.

    Raises:
        KeyboardInterrupt, Stopped: Ctrl-C or SIGTERM. Runs in progress stop at their next round, and leave a checkpoint there.
        RunFailed: a process was killed.
    """
    if processes == 1 or len(attempts) < 2:
        yield from _one_by_one(attempts, quiet)
    else:
        yield from _side_by_side(attempts, processes)


def _one_by_one(attempts: Sequence[Attempt], quiet: bool) -> Ended:
    waiting = list(attempts)
    while waiting:
        busy = []
        for attempt in waiting:
            outcome = run(attempt, quiet)
            if outcome.kind == "stopped":
                raise KeyboardInterrupt
            if outcome.kind == "busy":
                busy.append(attempt)
            else:
                yield attempt, outcome
        if len(busy) == len(waiting):
            time.sleep(_POLL_S)
        waiting = busy


def _side_by_side(attempts: Sequence[Attempt], processes: int) -> Ended:
    context = multiprocessing.get_context("spawn")
    # Closing the other end tells all. Events would wait for each that listens, for ever where its process has ended.
    (stop, to_stop), (now, to_end) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(processes, len(attempts)), context, initializer=_begin, initargs=(stop, now))
    running: dict[Future[Outcome], Attempt] = {}
    try:
        with handling(interrupt):
            with _ignoring_interrupts():  # inherited by the processes, until they say otherwise
                running.update({pool.submit(run, attempt): attempt for attempt in attempts})
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                busy = [running[future] for future in done if future.result().kind == "busy"]
                for future in done:
                    attempt, outcome = running.pop(future), future.result()
                    if outcome.kind == "stopped":
                        raise KeyboardInterrupt
                    if outcome.kind != "busy":
                        yield attempt, outcome
                if busy:
                    if not running:
                        time.sleep(_POLL_S)
                    running.update({pool.submit(run, attempt): attempt for attempt in busy})
    except BrokenProcessPool:
        raise RunFailed(
            "a process of the pool was killed, perhaps for want of memory: finished cells are kept, and the same command goes on with the "
            "rest (with fewer --jobs, if it was memory)"
        ) from None
    except KeyboardInterrupt:
        print(f"{STOPPING}; once more ends them at once", file=sys.stderr, flush=True)
        to_stop.close()
        try:
            with handling(interrupt):
                pool.shutdown(cancel_futures=True)
        except KeyboardInterrupt:  # a second time
            to_end.close()
        raise
    finally:
        to_stop.close()
        pool.shutdown(cancel_futures=True)


def interrupt(number: int) -> None:
    """What a signal does where runs of others are waited for."""
    raise KeyboardInterrupt


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """Holds signals back while processes are started; one that comes meanwhile is delivered afterwards."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_stopping = threading.Event()
_in_a_run = threading.Event()


def _begin(stop: Any, now: Any) -> None:
    """A process of the pool begins. Ctrl-C in a terminal does not reach it: it is told by two pipes, in the one way that there is."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _asked)
    if sys.platform != "win32":
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_listen, args=(stop, now), daemon=True).start()


def _listen(*pipes: Any) -> None:
    for pipe in pipes:
        pipe.poll(None)  # until the other end is closed
        _stopping.set()
        _thread.interrupt_main(signal.SIGINT)


def _asked(number: int, frame: Any) -> None:
    _stopping.set()
    if _in_a_run.is_set():
        raise KeyboardInterrupt


def run(attempt: Attempt, quiet: bool = True) -> Outcome:
    """Claims, runs and stores one cell."""
    try:
        _in_a_run.set()
        if _stopping.is_set():
            return Outcome("stopped")
        with claimed(attempt.cells / f".{attempt.mark}.lock") as free:
            return _run(attempt, quiet) if free else Outcome("busy")
    except (KeyboardInterrupt, Stopped):
        return Outcome("stopped")
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {error}" if not isinstance(error, BadInput | RunFailed) else str(error))
    finally:
        _in_a_run.clear()


def _run(attempt: Attempt, quiet: bool) -> Outcome:
    path, folder = cell_path(attempt.cells, attempt.mark), attempt.work / attempt.mark
    if path.is_file():  # another program has been faster
        return Outcome("stored")
    job = resolve(attempt.config)
    begun_s = time.monotonic()
    try:
        done = _simulated(job, folder, quiet=quiet, lean=not attempt.keep)
    except RunFailed as error:
        if not _for_good(error):
            raise
        store(path, job, attempt.mark, folder=None, seconds=time.monotonic() - begun_s, failed=str(error))
        outcome = Outcome("stored", str(error))
    else:
        store(path, job, attempt.mark, folder=done, seconds=time.monotonic() - begun_s)
        outcome = Outcome("stored")
    if not attempt.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _simulated(job: Job, folder: Path, *, quiet: bool, lean: bool) -> RunFolder:
    """One run: from its last checkpoint, where an interrupted attempt left one that it can go on from."""
    if (folder / "config.toml").is_file():
        begun = RunFolder.existing(folder)
        if not begun.finished and checkpoint.latest(begun.checkpoints) is not None:
            try:
                return simulate(job, resume=begun, quiet=quiet, lean=lean)
            except BadInput:  # begun under other circumstances, such as another version of torch
                pass
        shutil.rmtree(folder)
    return simulate(job, folder, quiet=quiet, lean=lean)


def _for_good(error: BaseException) -> bool:
    """Whether a run would fail the same way again: not for want of disk or memory, nor by an error in the program, which may be mended."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, RunFailed)
