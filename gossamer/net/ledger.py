"""The clock and the books of one real worker: every moment belongs to one kind, so that the seconds add up to the wall time.

    compute                     in the body (pacing included)
    encode, decode, outer       what a Span says of the time since the last effect; loading parameters is `outer`
    straggler_idle, network_idle    waits, split by `split_wait`
    send                        all else: handing messages over, posting receives, notes, the program's own book-keeping

Time at boundaries (checkpoints, evaluation, agreement on a stop) is no worker's time: it is taken out of the clock, see `paused_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gossamer.worker.account import Account, Hooks, TraceKind, split_wait
from gossamer.worker.effects import Addr

KINDS: tuple[TraceKind, ...] = ("compute", "straggler_idle", "network_idle", "encode", "decode", "outer", "send")


class _Wait(NamedTuple):
    """A wait that is over, and whose READY notes have not all come: by a hair they can be later than the message itself."""

    begin_s: float
    end_s: float
    last: Addr
    origins: Sequence[Addr]
    ready_round: int
    round: int


class Ledger:
    """Accounts for one worker.

    Args:
        ready_at: round -> READY stamps, by the monotonic clock.
        start_s: what the worker's clock shows at the start (a resumed run).
    """

    def __init__(self, me: Addr, hooks: Hooks | None, ready_at: Callable[[int], Mapping[Addr, float]], start_s: float, round: int) -> None:
        self.me = me
        self.round = round
        """Rounds completed."""
        self.account = Account()
        self.paused_s = 0.0
        """Time at boundaries, which is in no account."""
        self.bytes_sent = 0
        """This and the next two: since the last round note."""
        self.bytes_received = 0
        self.waited_for: Addr | None = None
        """Whom the longest wait was for."""
        self._hooks = hooks
        self._ready_at = ready_at
        self._mark_s = time.monotonic()
        self._zero_s = self._mark_s - start_s  # when the worker's clock showed 0, pauses taken out
        self._start_s = start_s
        self._noted_s = start_s
        self._seconds: dict[TraceKind, float] = dict.fromkeys(KINDS, 0.0)
        self._longest_s = 0.0
        self._open: tuple[TraceKind, float, float] | None = None  # a stretch of the trace that may still grow
        self._waits: list[_Wait] = []

    @property
    def time_s(self) -> float:
        """What the worker's clock shows at the last effect."""
        return self._mark_s - self._zero_s

    def spend(self, kind: TraceKind) -> None:
        """The time since the last call went into `kind`."""
        begin_s, self._mark_s = self._mark_s, time.monotonic()
        self._book(kind, begin_s - self._zero_s, self.time_s)

    def pause(self) -> None:
        """The time since the last call is taken out of the clock."""
        now_s = time.monotonic()
        self.paused_s += now_s - self._mark_s
        self._zero_s += now_s - self._mark_s
        self._mark_s = now_s

    def wait(self, arrivals_s: Mapping[Addr, float], carries: Mapping[Addr, Sequence[Addr]] | None, ready_round: int) -> None:
        """The time since the last call was a wait for these messages, which arrived at these times of the monotonic clock."""
        begin_s = self._mark_s
        last = min(arrivals_s, key=lambda j: (-arrivals_s[j], j), default=self.me)
        if not arrivals_s or arrivals_s[last] <= begin_s:
            self.spend("send")
            return
        self._mark_s = end_s = time.monotonic()
        if end_s - begin_s > self._longest_s:
            self._longest_s, self.waited_for = end_s - begin_s, last
        wait = _Wait(begin_s - self._zero_s, self.time_s, last, (last,) if carries is None else carries[last], ready_round, self.round)
        self._waits.append(wait)
        if set(wait.origins) <= set(self._ready_at(ready_round)):
            self.settle()

    def settle(self) -> None:
        """Splits the waits so far with the READY notes that have come by now; one that came after its message makes all of the wait
        straggler idle, one that has not come yet is not known."""
        waits, self._waits = self._waits, []
        if waits:
            self.flush()
        for w in waits:
            ready_s = {j: at_s - self._zero_s for j, at_s in self._ready_at(w.ready_round).items()}
            straggler_s, network_s = split_wait(w.begin_s, {w.last: w.end_s}, {w.last: w.origins}, ready_s)
            self._book("straggler_idle", w.begin_s, w.begin_s + straggler_s, w.round)
            self._book("network_idle", w.end_s - network_s, w.end_s, w.round)

    def _book(self, kind: TraceKind, begin_s: float, end_s: float, round: int | None = None) -> None:
        if end_s <= begin_s:
            return
        self._seconds[kind] += end_s - begin_s
        if self._hooks is None:
            return
        if round is not None:
            self._hooks.span(self.me, kind, begin_s, end_s, round)
        elif self._open is not None and self._open[0] == kind and self._open[2] == begin_s:
            self._open = (kind, self._open[1], end_s)
        else:
            self.flush()
            self._open = (kind, begin_s, end_s)

    def flush(self) -> None:
        """Reports the open stretch of the trace."""
        if self._open is not None and self._hooks is not None:
            self._hooks.span(self.me, *self._open, self.round)
        self._open = None

    def record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A note as it goes to the metrics: with worker and time, and for a round with where its seconds and bytes went."""
        self.settle()
        full = {"worker": self.me, "time_s": self.time_s, **record}
        if record.get("kind") in ("round", "close"):
            full |= {f"{kind}_s": seconds for kind, seconds in self._seconds.items()}
            full |= {"wall_s": self.time_s - self._noted_s, "bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received}
            full["waited_for"] = self.waited_for
            self._carry()
        return full

    def _carry(self) -> None:
        """Moves what was counted since the last round note to the account."""
        for kind, seconds in self._seconds.items():
            self.account.add(kind, seconds)
            self._seconds[kind] = 0.0
        self.account.bytes_sent += self.bytes_sent
        self.account.bytes_received += self.bytes_received
        self.account.wall_s = self.time_s - self._start_s
        self.bytes_sent = self.bytes_received = 0
        self._longest_s, self.waited_for, self._noted_s = 0.0, None, self.time_s

    def close(self) -> Account:
        """The account of the whole run."""
        self.settle()
        self.flush()
        self._carry()
        return self.account
