"""The real world: answers the effects of one worker's program in this process, over a group.

    with init() as group:               # gossamer.net; or Group(...) over a wire of your own
        state, account = run(program, body, hooks, group)

The program is the one that the simulator runs; with the same seed the parameters agree bit for bit.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from gossamer.core.errors import RunFailed
from gossamer.real.group import Group
from gossamer.real.ledger import Ledger
from gossamer.real.mailbox import Mailbox, post
from gossamer.real.signals import handling
from gossamer.real.transport import Receipt
from gossamer.worker.account import Account, Hooks
from gossamer.worker.effects import (
    Addr,
    Body,
    Boundary,
    Compute,
    Done,
    Effect,
    Expect,
    Gather,
    Go,
    Load,
    Note,
    Program,
    Ready,
    RecvAny,
    Reply,
    Send,
    SiteSum,
    Span,
    Stop,
)
from gossamer.worker.packet import Packet, unseal
from gossamer.worker.pump import Final, Pump
from gossamer.worker.state import State

T = TypeVar("T")
_REASON_S = 1.0
"""How long a rank whose collective has failed waits to learn who is gone."""
_NO_ROUND = 2**32 - 1


class RealWorld:
    """One worker's world. It runs one program, once.

    Args:
        hooks: metrics, trace, checkpoints; None for none of them. A Stop from `boundary` is a request: all workers agree on one boundary.
        group: the connections to the other workers; closing it is up to whoever made it, after `run`.
        start_s: what the worker's clock shows at the start (a resumed run).
        rounds0: rounds completed before the start.
        ahead: the most rounds that a worker may have completed more than the slowest; 0: as many as its peers let it. Where it is given,
            everybody tells everybody of each round.
        servers: the seats that take whatever comes first, and have no rounds. Their boundaries are shown to the hooks alone.
        on_signal: told of SIGINT and SIGTERM, in the signal handler; None: all workers are asked to stop, for that signal.
    """

    def __init__(
        self,
        hooks: Hooks | None,
        group: Group,
        *,
        start_s: float = 0.0,
        rounds0: int = 0,
        ahead: int = 0,
        servers: Collection[Addr] = (),
        on_signal: Callable[[int], None] | None = None,
    ) -> None:
        self.group = group
        self.round = rounds0
        """Rounds completed."""
        self._hooks = hooks
        self._ahead = ahead
        self._servers = frozenset(servers)
        self._mail = Mailbox(group.transport, group.board)
        self._start_s = start_s
        self._stop_asked = False
        self._on_signal = on_signal or group.ask_stop
        self._posted: dict[tuple[int, Addr], deque[Receipt]] = defaultdict(deque)
        group.notes.start_at(rounds0)
        group.board.round = rounds0

    def run(self, program: Program, body: Body) -> tuple[State, Account]:
        """Runs the program to its end, or to the boundary at which all workers stop (see `Group.stopped_by`).

        SIGINT and SIGTERM ask for that while it runs; a second one interrupts at once.

        Raises:
            RunFailed: the program or its body raised, or a message is not what was expected; a PeerLost, as soon as it is noticed, when
                another worker is gone. The group is closed then.
        """
        self.begin(program, body)
        with self._failing(), handling(self._ask_stop):
            step = self._next(None)
            while isinstance(step, Compute):
                step = self._next(self._within_site(partial(body.compute, step.work)))
        return step.state, self.close()

    def begin(self, program: Program, body: Body) -> None:
        """Takes a program whose inner steps somebody else takes, who calls `advance` after each stretch, and `close` after the last. Of
        `body` only what a Load and a Boundary ask for is used. Signals stay as they are."""
        self._body = body
        self._ledger = Ledger(self.group.me, self._hooks, self.group.notes.ready_at, self._start_s, self.round)
        self._pump = Pump(program, self)
        self._begin_s = time.monotonic()
        if self._ahead and self.group.me in self._servers:
            self.group.notes.keep_up(_NO_ROUND, _NO_ROUND)  # nobody ever waits for a server's rounds

    def advance(self, done: Done | None) -> Compute | Final:
        """Goes on to the next stretch of inner steps, or to the end, with what the last stretch gave (None at first).

        Raises:
            RunFailed: as `run`.
        """
        with self._failing():
            return self._next(done)

    def check(self) -> None:
        """Between two stretches: whether the run can still go on.

        Raises:
            RunFailed: as `run`.
        """
        with self._failing():
            self.group.board.check()

    def close(self) -> Account:
        """The account of the whole run, once that is over."""
        return self._ledger.close()

    def _next(self, done: Done | None) -> Compute | Final:
        if done is not None:
            done = done if done.seconds else done._replace(seconds=time.monotonic() - self._begin_s)
            self._ledger.spend("compute")
        step = self._pump.advance(done)
        self._ledger.spend("send")
        if isinstance(step, Compute):
            self.group.board.check()
            self._begin_s = time.monotonic()
        return step

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What is raised within ends the program and the group, and says where it was."""
        try:
            try:
                yield
            except RunFailed as error:
                if error is self.group.board.failure:
                    raise
                raise RunFailed(f"{self._name}, round {self.round}: {error}") from error
            except Exception as error:
                raise RunFailed(f"{self._name}, round {self.round}: {type(error).__name__}: {error}") from error
        except BaseException as error:
            with suppress(Exception):  # the first failure is the one to report
                self._pump.program.close()
            self.group.abort(error)
            raise

    @property
    def paused_s(self) -> float:
        """Seconds at boundaries (checkpoints, evaluation), which are in no account."""
        return self._ledger.paused_s

    @property
    def _name(self) -> str:
        return self.group.board.name(self.group.me)

    def _within_site(self, call: Callable[[], T]) -> T:
        """What `call` returns, which may talk to the other ranks of the worker. When one of them is gone it fails, and the notes tell why
        a moment later."""
        try:
            return call()
        except RuntimeError:
            if self.group.site.size > 1:
                with suppress(RunFailed):
                    self.group.board.wait(lambda: False, _REASON_S)
                self.group.board.check()
            raise

    def answer(self, effect: Effect) -> Reply:
        """The reply to any effect but Compute; it may block."""
        ledger, transport = self._ledger, self.group.transport
        ledger.spend(effect.kind if isinstance(effect, Span) else "send")
        self.group.board.check()
        if isinstance(effect, Load):
            self._body.load(effect.tree, effect.reset_inner)
            ledger.spend("outer")
        elif isinstance(effect, Expect):
            for j, nbytes in effect.sizes.items():
                self._posted[effect.tag, j].append(transport.receive(j, effect.tag, nbytes, unseal))
        elif isinstance(effect, Ready):
            self.group.notes.ready(tuple(effect.to), effect.round, effect.fragment)
        elif isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, Gather):
            return self._gather(effect)
        elif isinstance(effect, RecvAny):
            return self._recv_any(effect)
        elif isinstance(effect, SiteSum):
            return self._within_site(lambda: self.group.site.sum(effect.value))
        elif isinstance(effect, Boundary):
            return self._cross(effect)
        elif isinstance(effect, Note):
            record = ledger.record(effect.record)
            if self._hooks is not None:
                self._hooks.note(record)
        elif not isinstance(effect, Span):
            raise RunFailed(f"the program asked for {effect!r}, which is no effect")
        return None

    def _send(self, effect: Send) -> None:
        data = effect.packet.data
        if data is None:
            raise RunFailed("a packet without data (a timing-only run) exists in the simulator only")
        for j in [j for j in effect.to if j not in self.group.board.dead]:
            if j in self._servers:
                post(self.group.transport, j, effect.tag, data)
            else:
                self.group.transport.send(j, effect.tag, data)
            self._ledger.bytes_sent += effect.packet.nbytes

    def _gather(self, effect: Gather) -> dict[Addr, Packet]:
        receipts: dict[Addr, Receipt] = {}
        for j in effect.frm:
            queue = self._posted.get((effect.tag, j))
            if not queue:
                raise RunFailed(f"the program gathers tag {effect.tag} from worker {j} without an Expect for it")
            receipts[j] = queue.popleft()
            if not queue:
                del self._posted[effect.tag, j]
        taken = self._await(receipts, effect)
        now_s = time.monotonic()
        arrivals_s = {j: r.at_s if taken[j] else now_s for j, r in receipts.items()}
        heard = [r for j, r in receipts.items() if taken[j]]
        nbytes = {r.src: r.value.nbytes for r in heard if r.error is None}
        self._ledger.wait(arrivals_s, effect.carries, effect.round, effect.fragment, nbytes)
        for r in heard:
            if r.error is not None:
                raise r.error
        packets: dict[Addr, Packet] = {r.src: r.value for r in heard}
        self._ledger.bytes_received += sum(p.nbytes for p in packets.values())
        return packets

    def _recv_any(self, effect: RecvAny) -> tuple[Addr, Packet | None]:
        src, packet = self._mail.first(effect)
        self._ledger.spend("network_idle")
        self._ledger.bytes_received += packet.nbytes if packet else 0
        return src, packet

    def _await(self, receipts: Mapping[Addr, Receipt], effect: Gather) -> dict[Addr, bool]:
        """Waits, and tells from whom a message has come that counts. Of the dead, what has come counts."""
        board, pairs, tag = self.group.board, self.group.notes.pairs, effect.tag

        def known(j: Addr, r: Receipt) -> bool | None:
            if j in board.dead and (r.done or r.lost):
                return r.done and (effect.deadline_s is None or bool(pairs.resolved(tag, j, True)))
            if effect.deadline_s is None:
                return True if r.done else None
            return pairs.resolved(tag, j, r.done)

        found: dict[Addr, bool] = {}

        def all_known() -> bool:
            for j, r in receipts.items():
                if j not in found and (takes := known(j, r)) is not None:
                    found[j] = takes
            return len(found) == len(receipts)

        if not board.wait(all_known, effect.deadline_s):
            with board.changed:
                for j in receipts.keys() - found.keys():
                    pairs.give_up(tag, j)
            board.wait(all_known)
        return found

    def _cross(self, effect: Boundary) -> Go | Stop:
        """Agrees on whether to stop here before the hooks are asked, so that they know the last boundary (`Group.last_round`)."""
        ledger, notes = self._ledger, self.group.notes
        if self.group.me in self._servers:
            if self._hooks is not None:
                self._hooks.boundary(self.group.me, effect.round, ledger.time_s, effect.state, self._body)
            return Go()
        if self._ahead:
            notes.keep_up(effect.round, self._ahead)
            ledger.spend("straggler_idle")
        ledger.flush()
        stop = notes.cross(effect.round)
        self.round = ledger.round = self.group.board.round = effect.round
        asked = Go() if self._hooks is None else self._hooks.boundary(self.group.me, effect.round, ledger.time_s, effect.state, self._body)
        if isinstance(asked, Stop) and not stop:
            notes.request_stop(0)
        ledger.pause()
        if stop:
            return Stop()
        return Go(notes.members.absent(effect.round)) if self.group.board.survives else Go()

    def _ask_stop(self, number: int) -> None:
        if self._stop_asked:
            raise KeyboardInterrupt
        self._stop_asked = True
        self._on_signal(number)


def run(
    program: Program,
    body: Body,
    hooks: Hooks | None,
    group: Group,
    *,
    start_s: float = 0.0,
    rounds0: int = 0,
    ahead: int = 0,
    servers: Collection[Addr] = (),
    on_signal: Callable[[int], None] | None = None,
) -> tuple[State, Account]:
    """Runs one worker's program over `group` (see RealWorld)."""
    world = RealWorld(hooks, group, start_s=start_s, rounds0=rounds0, ahead=ahead, servers=servers, on_signal=on_signal)
    return world.run(program, body)
