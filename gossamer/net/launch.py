"""N worker processes on this machine: started, watched, and ended together.

Torch's elastic launcher kills all workers when one dies and does not say which one was to blame; this one does. Across machines, torchrun
is the equally supported way.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from gossamer.core.terminal import own_line
from gossamer.net.fork import Forked, GivenUp, can_fork, nursery
from gossamer.net.start import STORE_ENV, begun_of, marker_of
from gossamer.real.seats import Seats
from gossamer.real.signals import handling
from gossamer.worker.effects import Addr

_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Linux: the kernel kills the worker when its launcher dies, however that happens (PR_SET_PDEATHSIG survives exec)."""

_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_TAIL_LINES = 12


@dataclass
class Child:
    """A process that was started."""

    process: subprocess.Popen[bytes] | Forked
    log: Path | None
    """Where its output goes; None: to the launcher's own (worker 0)."""
    log_start_bytes: int = 0
    code: int | None = None


@dataclass
class _Fleet:
    """The processes, and what is known of their ends."""

    children: list[Child]
    store: Path
    rounds: bool = True
    """The workers stop together at the end of a round, when asked."""
    asked: int | None = None
    """The signal that asked for a stop."""
    at_once: bool = False
    """It was asked twice, and the workers killed."""
    ends: SimpleQueue[Addr] = field(default_factory=SimpleQueue)
    seats: Seats | None = None
    """Which processes are ranks of one worker, where some have several."""
    untold: int = 0
    """Ends that nobody has taken from the queue."""
    lost: set[Addr] = field(default_factory=set)
    """Whose end has been told, ranks of the same worker included."""

    def name(self, i: Addr) -> str:
        """As messages have it."""
        return self.seats.name(i) if self.seats else f"worker {i}"

    def site(self, i: Addr) -> tuple[Addr, ...]:
        """The ranks of the worker of process i."""
        return self.seats.site(i) if self.seats else (i,)

    def bury(self, i: Addr) -> bool:
        """Process i has failed, and with it its worker: ends its other ranks. False where that has been done."""
        new = i not in self.lost
        self.lost |= set(self.site(i))
        for j in self.site(i):
            if self.children[j].code is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.children[j].process.pid, signal.SIGKILL)
        return new

    @property
    def running(self) -> list[Child]:
        return [c for c in self.children if c.code is None]

    @property
    def begun(self) -> bool:
        """Whether all workers were connected. Before that those who are left would wait for one that will not come."""
        return all(begun_of(self.store, i).exists() for i in range(len(self.children)))

    def watch(self) -> None:
        self.untold = len(self.children)
        for i, child in enumerate(self.children):
            threading.Thread(target=self._await_end, args=(i, child), daemon=True).start()

    def _await_end(self, i: Addr, child: Child) -> None:
        child.code = child.process.wait()
        self.ends.put(i)

    def next_end(self, timeout_s: float | None = None) -> Addr | None:
        """The next worker to end, or None."""
        try:
            found = self.ends.get(timeout=timeout_s)
        except Empty:
            return None
        self.untold -= 1
        return found

    def tell(self, number: int) -> None:
        """A signal to all that still run."""
        for child in self.running:
            with suppress(ProcessLookupError):
                child.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to all that still run, and to the processes that they started."""
        for child in self.running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)

    def failed(self, i: Addr) -> bool:
        """Whether the end of worker i ends the run."""
        code = self.children[i].code
        if self.at_once or (self.asked is not None and code in (-signal.SIGINT, -signal.SIGTERM)):  # the latter: still starting
            return False
        return code not in (0, *_STOPPED)

    @property
    def parted(self) -> bool:
        """A stop was asked for, and they will not come to it together: they have no rounds, or one ended while it was still starting."""
        early = any(c.code in (-signal.SIGINT, -signal.SIGTERM) for c in self.children)
        return self.asked is not None and (early or not self.rounds)

    def cause(self, i: Addr, timeout_s: float) -> Addr:
        """Worker i failed; whoever it failed for, once that one has ended."""
        marker = marker_of(self.store, i)
        if not marker.exists():
            return i
        lost = int(marker.read_text())
        deadline_s = time.monotonic() + timeout_s
        while self.children[lost].code is None and time.monotonic() < deadline_s:
            self.next_end(0.05)
        return lost if self.children[lost].code not in (None, 0) else i


def launch(
    n: int,
    argv: Sequence[str],
    log_dir: Path,
    *,
    env: Mapping[str, str] | None = None,
    last_checkpoint: Callable[[], str | None] = lambda: None,
    say: Callable[[str], None] = lambda text: print(own_line(text, sys.stderr), end="", file=sys.stderr, flush=True),
    grace_s: float = 10.0,
    rounds: bool = True,
    survives: bool = False,
    seats: Seats | None = None,
    modules: Sequence[str] = (),
) -> int:
    """Runs `argv` n times, as workers 0 to n - 1 of one run, to their common end. No process of it is left when this returns.

    Worker 0 writes to this process's output, worker i to `log_dir`/worker-<i>.log. The first worker that fails ends the run, unless the
    others go on without it. Ctrl-C and SIGTERM are passed on, and all workers stop at one boundary; a second one kills them.

    Args:
        argv: the command of one worker, which finds the others by `gossamer.net.init`.
        env: variables to set beside the present ones. OMP_NUM_THREADS is 1 unless set.
        last_checkpoint: what to go on from, in words, or None; asked when a worker has failed.
        say: shows a message.
        grace_s: how long the others may take to end by themselves.
        rounds: False: the workers have no rounds to stop after; Ctrl-C ends them.
        survives: whether the others go on when a worker has failed, once all are connected, unless it was given bad input.
        seats: which of the n processes are ranks of one worker, where some have several; they end together.
        modules: what all workers load, to be loaded once and forked where that can be (gossamer.net.fork); none: each loads its own.

    Returns:
        An exit code: 0 all ended well (or, of those that go on, at least one), 1 a worker failed, 2 a worker was given bad input, 130 or
        143 stopped by a signal.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gossamer-") as folder:
        fleet = _Fleet([], Path(folder) / "store", rounds, seats=seats)
        try:
            with handling(partial(_pass_on, fleet, say)):
                for i in range(n):
                    log = log_dir / f"worker-{i}.log" if i else None
                    try:
                        fleet.children.append(start(i, n, argv, log, fleet.store, env or {}, modules, lambda: fleet.asked is not None))
                    except GivenUp:
                        return 128 + (fleet.asked or 0)
                if fleet.asked is not None:  # while they were being started
                    fleet.tell(fleet.asked)
                fleet.watch()
                return _supervise(fleet, last_checkpoint, say, grace_s, survives)
        finally:
            fleet.kill()
            for child in fleet.children:
                child.process.wait()


def start(
    i: Addr,
    n: int,
    argv: Sequence[str],
    log: Path | None,
    store: Path,
    env: Mapping[str, str],
    modules: Sequence[str] = (),
    given_up: Callable[[], bool] = lambda: False,
) -> Child:
    """Process i of n, which finds the others by `store`.

    Args:
        log: where its output goes; None: to this process's own.
        modules: see `launch`.
        given_up: whether it is not wanted any more, while modules are loaded.

    Raises:
        GivenUp: it was not.
    """
    ours = {"RANK": i, "LOCAL_RANK": i, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, STORE_ENV: store}
    full = {"OMP_NUM_THREADS": "1", **os.environ, **env, **{k: str(v) for k, v in ours.items()}}
    full.pop("GLOO_SOCKET_IFNAME", None)  # all are on this machine: the loopback interface, whatever is set for other runs
    if can_fork(argv, modules):
        start_bytes = log.stat().st_size if log is not None and log.exists() else 0
        process = nursery(modules, full).fork(argv, full, log, name=f"gossamer {i}", given_up=given_up)
        return Child(process, log, start_bytes)
    tethered = [sys.executable, "-S", "-E", "-c", _TETHER, str(os.getpid()), *argv] if sys.platform == "linux" else list(argv)
    if log is None:  # a session of its own: Ctrl-C at the terminal reaches the launcher only, which passes it on once
        return Child(subprocess.Popen(tethered, env=full, stdin=subprocess.DEVNULL, start_new_session=True), None)
    with log.open("ab") as out:
        start_bytes = out.tell()
        started = subprocess.Popen(tethered, env=full, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    return Child(started, log, start_bytes)


def _supervise(fleet: _Fleet, last_checkpoint: Callable[[], str | None], say: Callable[[str], None], grace_s: float, survives: bool) -> int:
    while fleet.untold:
        i = fleet.next_end(0.5)
        if fleet.parted:
            break
        if i is None or not fleet.failed(i):
            continue
        if survives and fleet.children[i].code != 2 and fleet.begun:
            if fleet.bury(i) and any(not set(fleet.site(j)) & fleet.lost for j, c in enumerate(fleet.children) if c.code is None):
                say(obituary(fleet.name(i), fleet.children[i], "the others go on without it"))
            continue
        cause = fleet.cause(i, grace_s)
        if not fleet.failed(cause):  # it was told to stop while it could not do so cleanly; the others only lost it
            break
        code = fleet.children[cause].code
        if not (code == 2 and _has_ended_so(fleet.children[0], 2)):  # bad input: worker 0 has said it already
            checkpoint = last_checkpoint()
            say(obituary(fleet.name(cause), fleet.children[cause], "so the run was ended"))
            say(f"Last whole checkpoint: {checkpoint}." if checkpoint else "There is no whole checkpoint yet.")
        _end(fleet, grace_s)
        return 2 if code == 2 else 1
    _end(fleet, grace_s)
    codes = {c.code for c in fleet.children}
    if fleet.asked is not None and codes != {0}:
        return 128 + fleet.asked
    if survives and 0 not in codes and not codes & set(_STOPPED):
        say("No worker is left.")
        return 1
    return next((code for code in _STOPPED if code in codes), 0)


def _end(fleet: _Fleet, grace_s: float) -> None:
    """Ends those who still run. They have lost a worker and end by themselves, saying so; then they are asked, then killed."""
    _wait(fleet, grace_s / 4)
    fleet.tell(signal.SIGTERM)
    _wait(fleet, grace_s)
    fleet.kill()
    while fleet.running:
        fleet.next_end(0.05)


def _wait(fleet: _Fleet, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while fleet.running and time.monotonic() < deadline_s:
        fleet.next_end(0.05)


def _has_ended_so(child: Child, code: int, within_s: float = 2.0) -> bool:
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(within_s)
    return child.process.returncode == code


def obituary(name: str, child: Child, then: str) -> str:
    """How a process has ended, and the end of what it said."""
    code = child.code or 0
    if code < 0:
        fate = f"was killed ({signal.Signals(-code).name})"
    else:
        fate = f"failed (exit code {code})"
    lines = [f"{name} {fate}, {then}."]
    if -code == signal.SIGKILL:
        lines.append("If nobody killed it, the system did, which it does when memory runs out.")
    if child.log is not None:
        with child.log.open("rb") as log:
            log.seek(child.log_start_bytes)
            tail = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        lines.append(f"Its output is in {child.log}" + (", and ends with:" if tail else " (empty)."))
        lines += [f"  {line}" for line in tail]
    return "\n".join(lines)


def _pass_on(fleet: _Fleet, say: Callable[[str], None], number: int) -> None:
    if fleet.asked is None:
        fleet.asked = number
        say(f"stopping all workers{' at the end of a round' if fleet.rounds else ''}; once more ends them at once")
        fleet.tell(number)
    else:
        fleet.at_once = True
        fleet.kill()
