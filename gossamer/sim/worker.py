"""One worker as the driver sees it: where it stands, what it waits for, and where its time and bytes went."""

from __future__ import annotations

from typing import Any

from gossamer.core.errors import RunFailed
from gossamer.sim.mailbox import Mailbox
from gossamer.worker.account import Account, Hooks, TraceKind
from gossamer.worker.effects import Addr, Body, Effect, Gather, Program
from gossamer.worker.state import State

_KINDS: tuple[TraceKind, ...] = ("compute", "straggler_idle", "network_idle", "encode", "decode", "outer")


class Worker:
    """One worker as the driver sees it."""

    __slots__ = (
        "account", "addr", "body", "final", "finished", "gather", "heard_bytes", "mail", "noted_s", "now_s", "parked", "program",
        "round", "said_bytes", "seconds", "serves", "start_s", "step", "waited_for", "waited_s", "waits",
    )  # fmt: skip

    def __init__(
        self, addr: Addr, program: Program, body: Body | None, start_s: float, round: int, mail: Mailbox, serves: bool = False
    ) -> None:
        self.addr = addr
        self.mail = mail
        self.serves = serves  # a server: no body, no rounds, and nobody's metrics
        self.program = program
        self.body = body
        self.start_s = self.now_s = self.noted_s = start_s
        self.round = round
        self.step = 0  # inner steps done in this round
        self.parked: Effect | None = None  # an effect that waits for the clock to reach now_s
        self.gather: Gather | None = None  # the wait that this worker is in
        self.waits = 0  # waits for messages so far: a deadline belongs to one of them
        self.account = Account()
        self.seconds: dict[TraceKind, float] = dict.fromkeys(_KINDS, 0.0)  # this and the next four: since the last round note
        self.said_bytes = 0
        self.heard_bytes = 0
        self.waited_s = 0.0
        self.waited_for: Addr | None = None
        self.final: State | None = None
        self.finished = False

    def revive(self, program: Program, now_s: float, round: int, mail: Mailbox) -> None:
        """The worker comes back with `round`. The time that it was dead is in no account."""
        self.program, self.mail, self.round, self.step = program, mail, round, 0
        self.start_s += now_s - self.now_s
        self.now_s = self.noted_s = now_s
        self.final, self.finished, self.parked, self.gather = None, False, None, None

    def settle(self) -> None:
        """Moves what was counted since the last round note to the account."""
        account = self.account
        for kind, seconds in self.seconds.items():
            account.add(kind, seconds)
            self.seconds[kind] = 0.0
        account.bytes_sent += self.said_bytes
        account.bytes_received += self.heard_bytes
        self.said_bytes = self.heard_bytes = 0
        self.waited_s, self.waited_for, self.noted_s = 0.0, None, self.now_s

    def waited(self, last: Addr, now_s: float, straggler_s: float, network_s: float, hooks: Hooks | None) -> None:
        """A wait that ended now with what `last` sent, and how its time is split."""
        begin_s, self.now_s = self.now_s, now_s
        self.seconds["straggler_idle"] += straggler_s
        self.seconds["network_idle"] += network_s
        if now_s - begin_s > self.waited_s:
            self.waited_s, self.waited_for = now_s - begin_s, last
        if hooks is not None:
            middle_s = begin_s + straggler_s if network_s else now_s
            if straggler_s:
                hooks.span(self.addr, "straggler_idle", begin_s, middle_s, self.round)
            if network_s:
                hooks.span(self.addr, "network_idle", middle_s, now_s, self.round)

    def record(self, record: dict[str, Any]) -> dict[str, Any]:
        """A note as it goes to the metrics: with worker and time, and for a round with where its seconds and bytes went."""
        full = {"worker": self.addr, "time_s": self.now_s, **record}
        if record.get("kind") in ("round", "close"):
            for kind, seconds in self.seconds.items():
                full[f"{kind}_s"] = seconds
            full["wall_s"] = self.now_s - self.noted_s
            full["bytes_sent"] = self.said_bytes
            full["bytes_received"] = self.heard_bytes
            full["waited_for"] = self.waited_for
            if self.mail.links:
                full["links"] = {str(j): told for j, told in sorted(self.mail.links.items())}
                self.mail.links = {}
            self.settle()
        return full


def failure(worker: Worker, error: Exception) -> RunFailed:
    """What a worker's program or body raised, with its name."""
    what = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    return RunFailed(f"worker {worker.addr}, round {worker.round}: {what}")
