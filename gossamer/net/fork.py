"""Processes of one command that load its modules once: one process loads them, and each is forked from it.

    process = fork([sys.executable, "-m", "gossamer", "train", ...], env, log, modules=("gossamer.app.train",))

Loading torch and transformers takes seconds of every process; a fork takes hundredths of one. The process that forks is that of
`multiprocessing`'s forkserver. Linux only, and not where a module of those touches a GPU when it is loaded: CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver") if sys.platform == "linux" else None


class Forked:
    """What `subprocess.Popen` has, of a process that was forked."""

    def __init__(self, process: Any) -> None:
        self.pid: int = process.pid
        self._process = process
        self._lock = threading.Lock()

    @property
    def returncode(self) -> int | None:
        """As of the last look; negative for a signal."""
        return self.poll()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        with self._lock:  # the code is read from a pipe, once
            code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        connection.wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing, where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class _Outputs:
    """Standard output and error of this process, or a file for both, in the process that is forked."""

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._taken: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"_log": self._log, "_taken": [] if self._log else [reduction.DupFd(1), reduction.DupFd(2)]}

    def take(self) -> None:
        if self._log is not None:
            file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            found = [file, file]
        else:
            found = [each.detach() for each in self._taken]
        for to, here in enumerate(found, 1):
            os.dup2(here, to)
        for here in set(found):
            os.close(here)


def can_fork(argv: Sequence[str], modules: Sequence[str]) -> bool:
    """Whether the command is one of this Python, `-m MODULE ...`, and there is something to load beforehand."""
    return _context is not None and bool(modules) and list(argv[:2]) == [sys.executable, "-m"]


def fork(argv: Sequence[str], env: Mapping[str, str], log: Path | None, modules: Sequence[str]) -> Forked:
    """Runs `argv` in a session of its own, and kills it when this process dies.

    Args:
        argv: see `can_fork`.
        env: all of its environment. What is read while `modules` are loaded is as it was for the first process that was forked.
        log: its output is added there; None: goes where that of this process goes.
        modules: loaded once, for all processes that are forked.
    """
    assert _context is not None
    _context.set_forkserver_preload(list(modules))
    process = _context.Process(target=_run, args=(list(argv[2:]), dict(env), _Outputs(log)))
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS", "1")  # no threads in the process that forks
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    found = Forked(process)
    while found.poll() is None and not _leads(found.pid):
        time.sleep(0.001)
    return found


def _leads(pid: int) -> bool:
    """Whether it has a session of its own, and its group can be sent signals."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return True


def _tether() -> None:
    """The kernel kills this process when the launcher dies: that ends a pipe of which this one has the other side."""
    import fcntl  # Linux and its like

    launcher = multiprocessing.parent_process()
    assert launcher is not None
    pipe = fcntl.fcntl(launcher.sentinel, fcntl.F_DUPFD_CLOEXEC, 3)  # not where standard input and outputs come to be
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not launcher.is_alive():
        os._exit(1)


def _run(arguments: list[str], env: dict[str, str], outputs: _Outputs) -> None:
    _tether()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    outputs.take()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
