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
from typing import Any

from gossamer.worker.account import MOST_LINKS, Account, Hooks, TraceKind, landed, split_wait
from gossamer.worker.effects import Addr

KINDS: tuple[TraceKind, ...] = ("compute", "straggler_idle", "network_idle", "encode", "decode", "outer", "send")


class Ledger:
    """Accounts for one worker.

    Args:
        ready_at: (round, fragment) -> READY stamps, by the monotonic clock.
        start_s: what the worker's clock shows at the start (a resumed run).
    """

    def __init__(
        self, me: Addr, hooks: Hooks | None, ready_at: Callable[[int, int], Mapping[Addr, float]], start_s: float, round: int
    ) -> None:
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
        self.links: dict[Addr, list[float]] = {}
        """What came straight from its sender: sender -> [bytes, seconds], since the last round note."""
        self._hooks = hooks
        self._ready_at = ready_at
        self._mark_s = time.monotonic()
        self._zero_s = self._mark_s - start_s  # when the worker's clock showed 0, pauses taken out
        self._start_s = start_s
        self._noted_s = start_s
        self._seconds: dict[TraceKind, float] = dict.fromkeys(KINDS, 0.0)
        self._longest_s = 0.0
        self._open: tuple[TraceKind, float, float] | None = None  # a stretch of the trace that may still grow

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

    def wait(
        self,
        arrivals_s: Mapping[Addr, float],
        carries: Mapping[Addr, Sequence[Addr]] | None,
        ready_round: int,
        fragment: int = 0,
        nbytes: Mapping[Addr, int] | None = None,
    ) -> None:
        """The time since the last call was a wait for these messages, which arrived at these times of the monotonic clock.
        `nbytes`: how long they were, of those that count.

        A READY note has a connection of its own and can be later than the message by a hair. Where this worker has said READY for the
        round itself, so have those whose data it has just got: a note of theirs that is not here is on its way, arrives after the wait,
        and all of the wait is straggler idle. (To leave such a note out would turn all of the wait into network idle instead.) Before
        that, nothing is known of them: they are left out.
        """
        begin_s = self._mark_s
        if carries is None and nbytes and len(nbytes) <= MOST_LINKS:
            stamps = self._ready_at(ready_round, fragment)
            for j in nbytes.keys() & stamps.keys():
                landed(self.links, j, nbytes[j], arrivals_s[j] - stamps[j])
        last = min(arrivals_s, key=lambda j: (-arrivals_s[j], j), default=self.me)
        if not arrivals_s or arrivals_s[last] <= begin_s:
            self.spend("send")
            return
        self._mark_s = end_s = time.monotonic()
        if end_s - begin_s > self._longest_s:
            self._longest_s, self.waited_for = end_s - begin_s, last
        ready_s = dict(self._ready_at(ready_round, fragment))
        if self.me in ready_s:
            for j in (last,) if carries is None else carries[last]:
                ready_s.setdefault(j, end_s)
        straggler_s, _ = split_wait(begin_s, {last: end_s}, carries, ready_s)
        middle_s = min(begin_s + straggler_s, end_s)
        self._book("straggler_idle", begin_s - self._zero_s, middle_s - self._zero_s)
        self._book("network_idle", middle_s - self._zero_s, end_s - self._zero_s)

    def _book(self, kind: TraceKind, begin_s: float, end_s: float) -> None:
        if end_s <= begin_s:
            return
        self._seconds[kind] += end_s - begin_s
        if self._hooks is None:
            return
        if self._open is not None and self._open[0] == kind and self._open[2] == begin_s:
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
        full = {"worker": self.me, "time_s": self.time_s, **record}
        if record.get("kind") in ("round", "close"):
            full |= {f"{kind}_s": seconds for kind, seconds in self._seconds.items()}
            full |= {"wall_s": self.time_s - self._noted_s, "bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received}
            full["waited_for"] = self.waited_for
            if self.links:
                full["links"] = {str(j): told for j, told in sorted(self.links.items())}
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
        self.links = {}

    def close(self) -> Account:
        """The account of the whole run."""
        self.flush()
        self._carry()
        return self.account
