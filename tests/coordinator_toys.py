"""Runs, sites and clocks for the tests of the coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ports import free

from gossamer.wan.roster.calls import plain
from gossamer.wan.roster.client import CoordinatorClient, Event
from gossamer.wan.roster.coordinator import Coordinator
from gossamer.wan.roster.ledgerdb import LedgerDB
from gossamer.wan.roster.records import (
    PROTOCOL,
    RELAY,
    Admission,
    Beat,
    Caller,
    Card,
    Have,
    Join,
    Propose,
    Report,
    Session,
    Spec,
    Verdict,
)

X0 = Have(round=0, digest="00")


def spec(run: str = "demo", **changes: Any) -> Spec:
    fields: dict[str, Any] = {
        "run": run,
        "configuration": "c0ffee",
        "layout": "1a",
        "versions": {"gossamer": "0.1.0", "torch": "2.13"},
        "seats": 3,
        "synchronous": True,
        "min_sites": 2,
        "floor_s": 30.0,
    }
    return Spec(**{**fields, **changes})


def caller(site: str, boot: int = 0, run: str = "demo") -> Caller:
    return Caller(run=run, site=site, boot=f"{boot:032x}")


def at(round: int, session: int = 1, digest: str | None = None) -> Have:
    """The state after so many rounds, of that session."""
    return Have(round=round, digest=digest or f"{round:02x}", session=session)


class Clock:
    """Monotonic seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Desk:
    """A coordinator without a network, on a clock of its own."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path, self.clock = path, clock or Clock()
        self.open()

    def open(self) -> None:
        self.db = LedgerDB(self.path)
        self.db._db.execute("PRAGMA synchronous = OFF")  # no machine crashes in a test
        self.coordinator = Coordinator(self.db, self.clock)

    def restart(self) -> None:
        self.db.close()
        self.clock.now_s = 5.0  # another process may have any clock
        self.open()

    def close(self) -> None:
        self.db.close()

    def join(
        self,
        site: str,
        boot: int = 0,
        bootstrap: bool = False,
        address: str | None = "",
        of: Spec | None = None,
        take_over: bool = False,
        relay: bool = False,
    ) -> Admission:
        of = of or spec()
        address = f"10.0.0.{ord(site[0])}:7001" if address == "" else address
        who, card = caller(site, boot, of.run), Card(address=address, capabilities=(RELAY,) if relay else ())
        return self.coordinator.join(Join(protocol=PROTOCOL, spec=of, caller=who, card=card, bootstrap=bootstrap, take_over=take_over))

    def dies(self, site: str, boot: int = 0) -> None:
        """A process ends: its standing stream breaks."""
        self.coordinator.doubt(caller(site, boot))

    def propose(
        self,
        site: str,
        have: Have | None = X0,
        boot: int = 0,
        number: int | None = None,
        gone: tuple[int, ...] = (),
        alive: tuple[int, ...] | None = None,
        entered: int = 0,
    ) -> Verdict:
        """A site asks for the next session. It reaches everybody there but those gone, unless told otherwise."""
        state = self.state()
        last = state.session.number if state.session is not None else 0
        reached = tuple(m.seat for m in state.living if m.seat not in gone) if alive is None else alive
        return self.coordinator.propose(
            Propose(
                caller=caller(site, boot),
                number=last + 1 if number is None else number,
                entered=self.key(entered),
                have=have,
                alive=reached,
                gone=gone,
            )
        )

    def go_on(self, *sites: str, have: Have | None = X0, gone: tuple[int, ...] = (), boot: int = 0) -> Session:
        """These ask for the next session, and enter it."""
        state = self.state()
        number = state.session.number + 1 if state.session is not None else 1
        verdicts = [self.propose(site, have, gone=gone, boot=boot, number=number) for site in sites]
        assert verdicts[-1].session is not None, verdicts[-1].why
        for site in sites:
            self.beat(site, boot=boot, entered=number)
        return verdicts[-1].session

    def found(self, *sites: str, of: Spec | None = None) -> Session:
        """These join and begin the run."""
        for site in sites or ("a", "b", "c"):
            self.join(site, of=of)
        return self.go_on(*(sites or ("a", "b", "c")))

    def beat(self, site: str, boot: int = 0, round: int = 0, entered: int = 0) -> Any:
        return self.coordinator.beat(Beat(caller=caller(site, boot), report=Report(round=round), entered=self.key(entered)))

    def key(self, number: int) -> str | None:
        """Of the latest session, if that is its number."""
        session = self.state().session
        return session.key if session is not None and session.number == number else None

    def wait(self, seconds: float, *alive: str, step_s: float = 1.0) -> None:
        """Time passes, and of those alive there are signs."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s = min(until_s, self.clock.now_s + step_s)
            for site in alive:
                self.beat(site)
            self.coordinator.tick()

    def state(self, run: str = "demo") -> Any:
        return self.coordinator.runs[run].state

    def why(self) -> str:
        return self.coordinator.runs["demo"].why

    def standing(self, site: str) -> str:
        return str(self.state().find(site).standing)


_NURSERY = """
import os, signal, sys
from pathlib import Path
from gossamer.wan.roster.service import CoordinatorServer
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("here", flush=True)
for line in sys.stdin:
    if os.fork() == 0:
        state, port = line.rstrip().rsplit(" ", 1)
        with CoordinatorServer(Path(state), f"127.0.0.1:{port}") as server:
            print(os.getpid(), flush=True)
            server.wait()
"""


class Nursery:
    """Starts coordinators in processes of their own, without the seconds that Python takes to import everything."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _NURSERY]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parent.parent
        )
        assert self._line() == "here"

    def start(self, state: Path, port: int) -> int:
        """A coordinator that listens; its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{state} {port}\n")
        return int(self._line())

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Process:
    """A coordinator that can be killed and started again on the same port and file."""

    def __init__(self, nursery: Nursery, state: Path) -> None:
        self.state, self.port = state, free()
        self._nursery = nursery
        self.start()

    def start(self) -> None:
        self.pid = self._nursery.start(self.state, self.port)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        eventually(self._is_gone, "a killed process ends")

    def _is_gone(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def client(
        self, site: str, of: Spec | None = None, events: list[Event] | None = None, join: bool = True, **options: Any
    ) -> CoordinatorClient:
        heard = events if events is not None else []
        channel = plain(f"127.0.0.1:{self.port}")
        made = CoordinatorClient(channel, of or quick(), site, Card(address=None), on_event=heard.append, **options)
        if join:
            made.join(10.0)
        return made


def quick(run: str = "demo", **changes: Any) -> Spec:
    """With short time-outs: a lease of one second and a half."""
    return spec(run, **{"floor_s": 4.5, **changes})


def eventually(true: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until_s, what
        time.sleep(0.01)
