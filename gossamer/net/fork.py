"""Processes of one command that load its modules once: one process loads them, and they are forked from it.

    process = fork([sys.executable, "-m", "gossamer", "train", ...], env, log, modules=("gossamer.app.train",))

Loading torch and transformers takes seconds of every process; a fork takes hundredths of one. `multiprocessing`'s forkserver would serve,
but it runs the user's script again in each process, loads within reach of the terminal's Ctrl-C, and needs a short path for its socket.
Linux only, and not where a module of those touches a GPU when it is loaded: CUDA does not survive a fork.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gossamer.net.nursery import MESSAGE_BYTES

_COMM_CHARS = 15


class GivenUp(Exception):
    """The process was no longer wanted before there was one."""


class Forked:
    """What `subprocess.Popen` has, of a process that was forked."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        """Negative for a signal."""
        self.begun, self.over = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not self.over.wait(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing, where it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Told by whoever forked it."""
        self.returncode = code
        self.begun.set()
        self.over.set()


class Nursery:
    """The process that forks, as its user sees it.

    Args:
        modules: loaded by it, for all that are forked.
        env: its environment while it loads them.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        ours, theirs = (_high(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        command = [sys.executable, "-m", "gossamer.net.nursery", str(theirs.fileno()), *modules]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(  # a session of its own: Ctrl-C of the terminal does not reach it
            command, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[theirs.fileno()], env=dict(env), start_new_session=True
        )
        theirs.close()
        self._calls = ours
        self._lock = threading.Lock()
        self._asked: deque[Forked] = deque()
        self._running: dict[int, Forked] = {}
        self.alive = True
        threading.Thread(target=self._listen, name="nursery", daemon=True).start()

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        *,
        name: str,
        cwd: Path | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> Forked:
        """Runs `argv`, which is `python -m MODULE ...`, in a group of its own. It dies with the nursery, and that with this process.

        Args:
            log: its output is added there; None: goes where that of this process goes.
            name: of the process, where tools show that.
            cwd: the present folder by default.
            given_up: asked now and then while the modules are loaded.

        Raises:
            GivenUp: it was.
        """
        own = {"name": name[:_COMM_CHARS], "cwd": str(cwd or Path.cwd()), "env": dict(env), "arguments": list(argv[2:])}
        paths = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
        request = os.memfd_create("request")
        files = [request, *_outputs(log)]
        found = Forked()
        try:
            os.write(request, json.dumps(own | {"path": list(dict.fromkeys([*paths, *sys.path]))}).encode())
            with self._lock:
                self._asked.append(found)
                socket.send_fds(self._calls, [b"fork"], files)
        except BrokenPipeError:
            found.ended(-signal.SIGKILL)
        finally:
            for file in files:
                os.close(file)
        while not found.begun.wait(0.1):
            if given_up():
                self._process.kill()
                raise GivenUp
        return found

    def close(self) -> None:
        """Ends it, and all that it has forked."""
        with suppress(OSError):
            self._calls.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _listen(self) -> None:
        with suppress(OSError):
            while message := self._calls.recv(MESSAGE_BYTES):
                what, *numbers = message.decode().split()
                pid = int(numbers[0])
                if what == "begun":
                    found = self._running[pid] = self._asked.popleft()
                    found.pid = pid
                    found.begun.set()
                else:
                    self._running.pop(pid).ended(int(numbers[1]))
        with self._lock:
            self.alive = False
            for found in [*self._running.values(), *self._asked]:
                found.ended(-signal.SIGKILL)  # the kernel has seen to it
        self._calls.close()
        self._process.wait()


_nurseries: dict[frozenset[str], Nursery] = {}


def can_fork(argv: Sequence[str], modules: Sequence[str]) -> bool:
    """Whether the command is one of this Python, `-m MODULE ...`, and there is something to load beforehand."""
    return sys.platform == "linux" and bool(modules) and list(argv[:2]) == [sys.executable, "-m"]


def load_early(modules: Sequence[str], env: Mapping[str, str]) -> None:
    """Has the modules loaded beside what this process does until it forks. Nothing, where there is nothing to fork."""
    if sys.platform == "linux" and modules:
        nursery(modules, env)


def nursery(modules: Sequence[str], env: Mapping[str, str]) -> Nursery:
    """One of this process that has loaded these modules, or more, and is kept; `env` is its environment if it has to be started."""
    there = (each for key, each in _nurseries.items() if key >= {*modules} and each.alive and each.owner == os.getpid())
    if (found := next(there, None)) is None:
        found = _nurseries[frozenset(modules)] = Nursery(modules, env)
        atexit.register(found.close)
    return found


def _high(given: socket.socket) -> socket.socket:
    """Not where standard input and outputs are, or would be if they were open."""
    import fcntl  # not where there is nothing to fork

    with given:
        return socket.socket(fileno=fcntl.fcntl(given.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _outputs(log: Path | None) -> list[int]:
    """Open files for standard output and error."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        return [file, os.dup(file)]
    streams = ((1, sys.__stdout__), (2, sys.__stderr__))  # None: was not open when this process began
    return [os.open(os.devnull, os.O_WRONLY) if stream is None else os.dup(number) for number, stream in streams]
