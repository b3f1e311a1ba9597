"""Small notes between the workers, on connections of their own: READY, the agreement on a last round, the farewell, the loss of a worker.

Why connections of their own: a note must not queue behind megabytes of payload, and READY is stamped on arrival. Why a listener per peer
that always has a receive posted: a send may be a rendezvous (gloo), so a note that nobody awaits would block its sender's exit. READY needs
no matching Expect this way, whoever sends it to whom.

The agreement on a last round. A worker that is asked to stop (a signal, a Stop from the hooks) tells all others; each, whatever it is
doing, publishes once p_i = 1 + the last boundary that it has passed, and from then on passes no boundary before it knows everybody's p.
All stop at the first boundary at or after R = max p_i. Nobody has passed a boundary >= p_i before publishing, nor >= R afterwards, so all
stop at the same one, whatever the method and however far ahead some are. Publishing needs no progress of the program, so nobody waits for
long; and since everybody completes all rounds before R, no message of those rounds is missing.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch
from torch import Tensor

from gossamer.core.errors import RunFailed
from gossamer.real.board import Board, Crew, PeerLost, join_all
from gossamer.real.members import Members, View
from gossamer.real.pairs import Pairs
from gossamer.real.wire import LinkDown, Wire, Work
from gossamer.worker.effects import Addr

_NOTE = struct.Struct("<BB2xII")
_READY, _STOP, _END, _LEFT, _LOST, _DEAD, _VIEW, _TAKEN, _SKIP, _AT = range(10)
_NOT_AGREED = 2**32 - 1
_KEPT_ROUNDS = 2
"""READY stamps are kept for this many rounds back: an exchange in flight across a boundary still asks for them."""


class Notes:
    """Sends notes, and listens to each peer in a thread of its own."""

    def __init__(self, wire: Wire, board: Board, members: Sequence[Addr] | None = None) -> None:
        self.board = board
        self.me: Addr = wire.rank()
        self.others = tuple(j for j in (range(wire.size()) if members is None else members) if j != self.me)
        self.ready_s: dict[tuple[int, int], dict[Addr, float]] = defaultdict(dict)
        """(Round, fragment) -> worker -> when its READY arrived, by this worker's monotonic clock."""
        self.ended: dict[Addr, tuple[int, int]] = {}
        """Worker -> messages that it has sent to this one, receives that it has posted from this one, in all."""
        self.signal: int | None = None
        """The signal that asked for the stop; 0 when the hooks did; None while nobody has."""
        self.stopped = False
        """This worker has stopped at the agreed boundary."""
        self.members = Members(self.me, wire.size(), members)
        """Who is alive; only where a worker goes on when another is gone. Then the last round is agreed on there, too."""
        self.pairs = Pairs(self.me, lambda j, tag, taken: self._send(j, _TAKEN if taken else _SKIP, tag))
        self._viewed: dict[Addr, list[tuple[Addr, int]]] = defaultdict(list)  # views that are coming in
        self._last: dict[Addr, int] = {}  # the p_i of the agreement
        self._at: dict[Addr, int] = {}  # rounds that the others have completed, where that is told
        self._passed = 0
        self._wire = wire
        self._crew = Crew()
        self._sending = dict.fromkeys(self.others, 0)  # by receiver, as in Transport
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        board.on_death = self._learn
        self._threads = [threading.Thread(target=self._listen, args=(j,), daemon=True) for j in self.others]
        self._threads.append(threading.Thread(target=self._await_request, daemon=True))
        for thread in self._threads:
            thread.start()

    # ---- READY

    def ready(self, to: tuple[Addr, ...], round: int, fragment: int = 0) -> None:
        """This worker's compute of `round`, as far as `fragment` carries it, is done."""
        with self.board.changed:
            self.ready_s[round, fragment][self.me] = time.monotonic()
        for j in to:
            self._send(j, _READY, round, fragment)

    def ready_at(self, round: int, fragment: int = 0) -> dict[Addr, float]:
        """A copy of the stamps of `round` and `fragment`."""
        with self.board.changed:
            return dict(self.ready_s.get((round, fragment), {}))

    # ---- stopping

    def ask_stop(self, signal: int) -> None:
        """Asks all workers to stop at one boundary. Safe in a signal handler: it takes no lock."""
        self._asked.put(signal)

    def request_stop(self, signal: int) -> None:
        """The same, at once: on return this worker has published. Not for signal handlers."""
        with self.board.changed:
            self._publish(signal)

    @property
    def last_round(self) -> int | None:
        """The boundary to stop at, when it is agreed."""
        if self.board.survives:
            return self.members.since.get(self.members.stop)
        return max(self._last.values()) if len(self._last) == len(self.others) + 1 else None

    def start_at(self, round: int) -> None:
        """The run starts with `round` rounds completed."""
        with self.board.changed:
            self._passed = self.members.passed = round
            self._at = {j: max(round, self._at.get(j, 0)) for j in self.others}

    @property
    def living(self) -> tuple[Addr, ...]:
        """The others that are there."""
        return tuple(j for j in self.others if j not in self.board.dead)

    def cross(self, round: int) -> bool:
        """Passes the boundary after `round` rounds; True where this worker stops there instead. Waits for an agreement that is under way.

        Raises:
            RunFailed: a worker is gone.
        """
        board = self.board
        with board.changed:
            board.wait(lambda: self.members.settled)
            if self.me in self._last:
                board.wait(lambda: self.last_round is not None)
            last = self.last_round
            self.stopped = last is not None and round >= last
            self._passed = self.members.passed = board.round = round
            self.pairs.forget(round)
            for old in [key for key in self.ready_s if key[0] < round - _KEPT_ROUNDS]:
                del self.ready_s[old]
            return self.stopped

    def _publish(self, signal: int) -> None:
        """Under the condition: says once which boundary this worker can still stop at."""
        if self.board.survives:
            if self.members.stop not in self.members.dead:
                self.signal = signal if self.signal is None else self.signal
            self._learn(frozenset({self.members.stop}))
            return
        if self.me in self._last:
            return
        self.signal = signal if self.signal is None else self.signal
        self._last[self.me] = self._passed + 1
        for j in self.others:
            self._send(j, _STOP, self._last[self.me], signal=signal)
        self.board.changed.notify_all()

    def keep_up(self, round: int, ahead: int) -> None:
        """This worker has completed `round` rounds: tells all, and waits until everybody has completed `round - ahead`.

        Raises:
            RunFailed: a worker is gone.
        """
        with self.board.changed:
            for j in self.living:
                self._send(j, _AT, round)
            self.board.wait(lambda: min((self._at[j] for j in self.living), default=round) >= round - ahead)

    def _learn(self, gone: frozenset[Addr]) -> None:
        """Under the condition: a worker is dead (with all of its ranks, in one view), or a stop was asked for."""
        self._tell(self.members.learn(gone))

    def _tell(self, view: View | None) -> None:
        if view is None:
            return
        for j in self.living:
            if j in view.dead:
                continue
            for dead in sorted(view.dead):
                self._send(j, _DEAD, dead, view.since.get(dead, _NOT_AGREED))
            self._send(j, _VIEW, view.first, len(view.dead), signal=self.signal or 0)
        self.board.changed.notify_all()

    def _hear(self, src: Addr, first: int, signal: int) -> None:
        """Under the condition: another worker's view is complete."""
        said = self._viewed.pop(src, [])
        view = View(frozenset(j for j, _ in said), first, {j: since for j, since in said if since != _NOT_AGREED})
        if self.me in view.dead:
            self.board.fail(RunFailed(f"{self.board.name(src)} has lost the connection to this one"))
            return
        if self.members.stop in view.dead and self.signal is None:
            self.signal = signal
        mine = self.members.hear(src, view)
        self._tell(mine)
        for j in view.dead - {self.members.stop}:
            self._lost_by(src, j)

    def _lost_by(self, src: Addr, dead: Addr) -> None:
        """Under the condition: another worker says who is dead. That one is told: it may be alive, where the connection between these two
        alone has broken, and must not wait for those who take it for gone."""
        if dead not in self.board.dead and dead not in self.board.left:
            self._send(dead, _LOST, dead)
        self.board.gone(dead, f"{self.board.name(src)} lost it")

    def _await_request(self) -> None:
        while (signal := self._asked.get()) is not None:
            self.request_stop(signal)

    # ---- leaving

    def end(self, sent: dict[Addr, int], posted: dict[Addr, int]) -> None:
        """This worker's program has ended: no further message, no further receive. Counts by peer."""
        for j in self.living:
            self._send(j, _END, sent[j], posted[j])

    def leave(self) -> None:
        """Tells all that nothing is missing here, and waits until all have said so: then connections may close.

        Raises:
            RunFailed: a worker is gone.
        """
        for j in self.living:
            self._send(j, _LEFT)
        self.board.wait(lambda: self.board.left.issuperset(self.living) and not any(self._sending[j] for j in self.living))

    def lost(self, worker: Addr, round: int, timeout_s: float) -> None:
        """Tells those who are still there who has failed, before any connection closes here. Waits at most `timeout_s` for that."""
        for j in self.others:
            if j != worker:
                self._send(j, _LOST, worker, round)
        deadline_s = time.monotonic() + timeout_s
        with self.board.changed:
            while any(self._sending[j] for j in self.living) and (left_s := deadline_s - time.monotonic()) > 0:
                self.board.changed.wait(left_s)

    def hang_up(self, timeout_s: float = 2.0) -> None:
        """Closes all connections and lets the threads end (see Transport.hang_up)."""
        self._asked.put(None)
        self._wire.close()
        self._crew.dismiss(timeout_s)
        join_all(self._threads, timeout_s)

    # ---- the wire

    def _send(self, dst: Addr, kind: int, a: int = 0, b: int = 0, *, signal: int = 0) -> None:
        data = torch.frombuffer(bytearray(_NOTE.pack(kind, signal, a, b)), dtype=torch.uint8)
        with suppress(LinkDown):  # a closed connection: its listener has noticed
            work = self._wire.send(data, dst, 0)
            with self.board.changed:
                self._sending[dst] += 1
            self._crew.do(lambda: self._sent(work, data, dst))

    def _sent(self, work: Work, data: Tensor, dst: Addr) -> None:
        with suppress(LinkDown):
            work.wait()
        with self.board.changed:
            self._sending[dst] -= 1
            self.board.changed.notify_all()

    def _listen(self, src: Addr) -> None:
        buffer = torch.empty(_NOTE.size, dtype=torch.uint8)
        while True:
            try:
                self._wire.recv(buffer, src, 0).wait()
            except LinkDown as error:
                self.board.gone(src, str(error))
                return
            at_s = time.monotonic()
            kind, signal, a, b = _NOTE.unpack(buffer.numpy().tobytes())
            with self.board.changed:
                if kind == _READY:
                    self.ready_s[a, b][src] = at_s
                elif kind == _STOP:
                    self._last[src] = a
                    self._publish(signal)
                elif kind == _END:
                    self.ended[src] = (a, b)
                elif kind == _AT:
                    self._at[src] = a
                elif kind == _DEAD:
                    self._viewed[src].append((a, b))
                elif kind == _VIEW:
                    self._hear(src, a, signal)
                elif kind in (_TAKEN, _SKIP):
                    self.pairs.hear(src, a, kind == _TAKEN)
                elif kind == _LOST and self.board.survives and a == src:
                    self.board.gone(a, "it failed")
                elif kind == _LOST and self.board.survives and a != self.me:
                    self._lost_by(src, a)
                elif kind == _LOST:
                    why = "it failed" if a == src else f"{self.board.name(src)} lost it"
                    lost = PeerLost(a, b, why, self.board.name(a))
                    self.board.fail(lost if a != self.me else RunFailed(f"{self.board.name(src)} has lost the connection to this one"))
                elif kind == _LEFT:
                    self.board.left.add(src)
                self.board.changed.notify_all()
            if kind == _LEFT:
                return
