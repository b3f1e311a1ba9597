"""The ranks of one worker as one: the first of them decides, and tells the others, over a connection to each.

    lead = Lead(store, 3, local=True)        # rank 0
    for answer in lead.ask({"do": "save"}).wait(): ...

    follow = Follow(store, 1)                # rank 1, in another process
    for order in follow.orders(): follow.answer(order, {"sha256": ...})

Messages are JSON objects, a line each. Nothing is encrypted: the ranks of a worker are on one machine, or on a network that is trusted, as
everything is that torch.distributed sends among them.

`cross`, on both sides, is their gate (gossamer.net.gates).
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from gossamer.core.errors import RunFailed
from gossamer.net.talk import Line, Message, first_line, listening
from gossamer.real.board import Board, PeerLost

_KEY = "control"
_LOOK_S = 0.1
_GREET_S = 10.0
_DOOM_S = 10.0


class RankLost(RunFailed):
    """Another rank of this worker is gone, and the worker with it."""


class Ended(RunFailed):
    """What the ranks of the worker did together ended before its end; the reason is at another rank."""


class _Together:
    """What both sides of a crew have: the board of what they do now, and its end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.epoch = 0
        """Which of the things that they do together, one after the other."""
        self.over: RunFailed | None = None
        """Why it has ended before its end."""
        self.board: Board | None = None
        """Of its connections, once there are some."""
        self.number = 0
        """Gates passed in it."""
        self._ended: dict[int, RunFailed] = {}  # what has ended before it began here

    def begin(self, epoch: int) -> None:
        """The next thing that they do together."""
        with self.changed:
            self.epoch, self.over, self.board, self.number = epoch, self._ended.pop(epoch, None), None, 0

    def attach(self, board: Board) -> None:
        """Its connections are made."""
        with self.changed:
            self.board = board
            over = self.over
        if over is not None:
            board.fail(over)

    def check(self) -> None:
        """Raises what has ended it.

        Raises:
            RunFailed: it has ended.
        """
        if self.over is not None:
            raise self.over
        if self.board is not None:
            self.board.check()

    def _end(self, epoch: int, error: RunFailed) -> None:
        """Another rank says that it has ended."""
        with self.changed:
            if epoch > self.epoch:
                self._ended[epoch] = error
            if epoch != self.epoch or self.over is not None:
                return
            self.over = error
            board = self.board
            self.changed.notify_all()
        if board is not None:
            board.fail(error)


def _told(error: BaseException) -> Message:
    """A failure as a message."""
    lost = [error.worker, error.round, error.why, error.name] if isinstance(error, PeerLost) else None
    return {"lost": lost, "why": str(error)[:1000]}


def _failure(message: Message) -> RunFailed:
    lost = message["lost"]
    return PeerLost(*lost) if lost is not None else Ended(message["why"])


class Asked:
    """What the first rank has asked all others."""

    def __init__(self, lead: Lead, number: int) -> None:
        self._lead, self._number = lead, number

    def wait(self, check: Callable[[], None] = lambda: None, limit_s: float = math.inf) -> dict[int, Message]:
        """The answers, by rank.

        Args:
            limit_s: a rank that has not answered by then is taken for gone.

        Raises:
            RankLost: a rank is gone.
            RunFailed: of `check`.
        """
        lead, answers = self._lead, self._lead._answers[self._number]
        begun_s = time.monotonic()
        with lead.changed:
            while len(answers) < lead.size - 1:
                lead.check_ranks()
                check()
                if time.monotonic() - begun_s > limit_s:
                    silent = min(set(range(1, lead.size)) - answers.keys())
                    lead.gone.append(silent)
                    raise RankLost(
                        f"rank {silent} of this site has not answered for {limit_s:.0f} s, and the site ends with it: start it again"
                    )
                lead.changed.wait(_LOOK_S)
        del lead._answers[self._number]
        return dict(sorted(answers.items()))


class Lead(_Together):
    """The first rank's side.

    Args:
        store: what the ranks find each other by (a store of torch.distributed).
        size: ranks of the worker.
        local: all are on this machine.
        alive: raises where a rank cannot come any more.
        doomed: called in a thread some seconds after a rank was lost: whoever is stuck in a collective with it does not come back.

    Raises:
        RunFailed: some ranks did not come.
    """

    def __init__(
        self,
        store: Any,
        size: int,
        *,
        local: bool,
        alive: Callable[[], None] = lambda: None,
        doomed: Callable[[str], None] = lambda why: None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.size = size
        self.greetings: dict[int, Message] = {}
        """What each rank has said of itself at the start."""
        self.gone: list[int] = []
        """Ranks that are gone, in the order in which they went."""
        self.fate: Callable[[int], str] = lambda rank: f"rank {rank} of this site is gone, and the site ends with it: see its output"
        self.hear: Callable[[int, Message], None] = lambda rank, message: None
        """Told what a rank says unasked, in a thread of its own."""
        self._doomed = doomed
        self._answers: dict[int, dict[int, Message]] = defaultdict(dict)
        self._asked = 0
        self._votes: dict[int, tuple[int, int]] = {}
        self._lines: dict[int, Line] = {}
        self._over = False
        self._meet(store, local, alive, timeout_s)

    def _meet(self, store: Any, local: bool, alive: Callable[[], None], timeout_s: float) -> None:
        token = secrets.token_hex(16)
        with listening(local) as server:
            host = "127.0.0.1" if local else os.environ.get("MASTER_ADDR") or socket.gethostname()
            store.set(_KEY, json.dumps([host, server.getsockname()[1], token]))
            server.settimeout(_LOOK_S)
            until_s = time.monotonic() + timeout_s
            while len(self._lines) < self.size - 1:
                alive()
                if time.monotonic() > until_s:
                    missing = sorted(set(range(1, self.size)) - self._lines.keys())
                    raise RunFailed(f"rank {missing[0]} of this site did not come within {timeout_s:.0f} s: start all {self.size} of them")
                with suppress(TimeoutError):
                    self._greet(server.accept()[0], token)
        for line in self._lines.values():
            line.start()

    def _greet(self, sock: socket.socket, token: str) -> None:
        sock.settimeout(_GREET_S)
        try:
            greeting = json.loads(first_line(sock))
            rank = greeting["rank"]
            if not hmac.compare_digest(str(greeting["token"]), token) or rank in self._lines or not 0 < rank < self.size:
                raise ValueError("not one of the ranks")
        except (OSError, ValueError, KeyError, TypeError):
            sock.close()
            return
        self.greetings[rank] = greeting
        self._lines[rank] = Line(sock, lambda message: self._listen(rank, message), lambda: self._lost(rank))

    # ---- messages

    def tell(self, message: Message) -> None:
        """Says this to all other ranks."""
        for line in self._lines.values():
            line.say(message)

    def ask(self, order: Message) -> Asked:
        """The same, and each answers."""
        self._asked += 1
        self._answers[self._asked] = {}
        self.tell(order | {"id": self._asked})
        return Asked(self, self._asked)

    def check_ranks(self) -> None:
        """That all are there.

        Raises:
            RankLost: one is not.
        """
        if self.gone:
            raise RankLost(self.fate(self.gone[0]))

    def end(self, error: BaseException) -> None:
        """What they do now ends here: all others stop."""
        self.tell({"over": self.epoch, **_told(error)})

    # ---- gates

    def cross(self) -> None:
        """See Gate."""
        board, number = self.board, self.number + 1
        assert board is not None
        try:
            board.wait(lambda: all(self._votes.get(rank, (0, 0)) >= (self.epoch, number) for rank in self._lines))
            board.check()
        except RunFailed as error:
            self.end(error)
            raise
        self.number = number
        self.tell({"pass": number, "epoch": self.epoch})

    # ---- in the threads of the lines

    def _listen(self, rank: int, message: Message) -> None:
        if "vote" in message:
            self._votes[rank] = message["epoch"], message["vote"]
            if (board := self.board) is not None:
                with board.changed:
                    board.changed.notify_all()
        elif "re" in message:
            with self.changed:
                if (answers := self._answers.get(message["re"])) is not None:
                    answers[rank] = message
                self.changed.notify_all()
        elif "over" in message:
            self._end(message["over"], _failure(message))
        else:
            self.hear(rank, message)

    def _lost(self, rank: int) -> None:
        if self._over:
            return
        with self.changed:
            self.gone.append(rank)
            self.changed.notify_all()
        why = self.fate(rank)
        if self.board is not None:
            self.board.fail(RankLost(why))
        time.sleep(_DOOM_S)
        if not self._over:
            self._doomed(why)

    def close(self) -> None:
        """Lets the others go."""
        self._over = True
        self.tell({"do": "end", "id": 0})
        for line in self._lines.values():
            line.close()


class Follow(_Together):
    """Another rank's side. Where the first rank is gone, the process ends at once: `orphaned` is called in a thread.

    Args:
        greeting: what it says of itself.

    Raises:
        RunFailed: the first rank is not there.
    """

    def __init__(self, store: Any, rank: int, greeting: Message, *, orphaned: Callable[[], None], timeout_s: float = 600.0) -> None:
        super().__init__()
        self.told: Callable[[Message], None] = lambda message: None
        """Told what the first rank says beside its orders."""
        self._orders: SimpleQueue[Message] = SimpleQueue()
        self._kept: Message | None = None
        self._passed = (0, 0)
        host, port, token = json.loads(store.get(_KEY))
        try:
            sock = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise RunFailed(f"rank {rank} does not reach the first rank of its site at {host}, port {port}: {error}") from error
        self._line = Line(sock, self._listen, orphaned)
        self._line.say(greeting | {"rank": rank, "token": token})
        self._line.start()

    def orders(self) -> Iterator[Message]:
        """What the first rank asks for, to the end."""
        while (order := self.next_order())["do"] != "end":
            yield order

    def next_order(self) -> Message:
        """The next one."""
        if self._kept is not None:
            order, self._kept = self._kept, None
            return order
        return self._orders.get()

    def put_back(self, order: Message) -> None:
        """It comes next again."""
        self._kept = order

    def answer(self, order: Message, answer: Message) -> None:
        """The answer to an order."""
        self._line.say(answer | {"re": order["id"]})

    def say(self, message: Message) -> None:
        """Says this to the first rank."""
        self._line.say(message)

    def end(self, error: BaseException) -> None:
        """This rank cannot go on with what they do now."""
        self._line.say({"over": self.epoch, **_told(error)})

    def cross(self) -> None:
        """See Gate."""
        board, number = self.board, self.number + 1
        assert board is not None
        try:
            board.check()
        except RunFailed as error:
            self.end(error)
            raise
        self._line.say({"vote": number, "epoch": self.epoch})
        with self.changed:  # from here on the first rank decides, whatever happens to this one
            while self._passed < (self.epoch, number) and self.over is None:
                self.changed.wait(_LOOK_S)
            if self._passed >= (self.epoch, number):
                self.number = number
                return
            over = self.over
        assert over is not None
        board.fail(over)
        board.check()

    def close(self) -> None:
        """Ends the connection: for the first rank this one is gone."""
        self._line.close()

    def _listen(self, message: Message) -> None:
        if "pass" in message:
            with self.changed:
                self._passed = message["epoch"], message["pass"]
                self.changed.notify_all()
        elif "over" in message:
            self._end(message["over"], _failure(message))
        elif "do" in message:
            if message["do"] == "end":
                self._line.finished = True
            self._orders.put(message)
        else:
            self.told(message)
