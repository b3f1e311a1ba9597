"""The ranks of a site as its first one leads them: it alone joins the run, decides, and tells the others.

Between sessions all ranks hold one boundary (`settle`). In a session each has connections of its own to the ranks of the other sites. A
rank that cannot go on with the session says so at the next gate (gossamer.net.crew), and all stop there. A rank that dies takes the site
down.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gossamer.app.job import Job
from gossamer.app.wan.holding import Holding
from gossamer.app.wan.logs import note
from gossamer.app.wan.places import inner_address
from gossamer.app.wan.state import have_of, mark_of
from gossamer.core.errors import RunFailed
from gossamer.net.crew import Asked, Lead
from gossamer.net.gates import Gated
from gossamer.net.gloo import c10d
from gossamer.net.others import Others, this_program
from gossamer.net.site import TorchSite
from gossamer.net.start import all_here, common_store
from gossamer.net.talk import Message
from gossamer.real.board import Board
from gossamer.real.site import Alone
from gossamer.wan.roster.records import Have, Roster, Session

_START_S = 600.0
_MOURN_S = 3.0
_SAVE_S = 60.0
_LOOK_S = 0.1


class Ranks:
    """Of one site, led from here. Of a site of one rank nothing is asked of anybody.

    Args:
        others: those that this process has started; None: torchrun has.
        local: all are on this machine.
    """

    def __init__(self, size: int = 1, lead: Lead | None = None, others: Others | None = None, *, local: bool = True) -> None:
        self.size, self.local = size, local
        self.site: Alone | Gated = Alone()
        self.even = True
        """All ranks had come to the boundary that they settled on, and to no other."""
        self.asked: Callable[[int], None] = lambda signal: None
        """Told of signals that another rank was given."""
        self._lead, self._others = lead, others
        self._holding: Holding
        self._bytes: dict[int, list[int]] = {}
        self._saved: dict[int, dict[int, str]] = {}
        self._saves = threading.Lock()
        self._doing: Asked | None = None  # what they do of the session that is opened
        self._over = threading.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where the others reach the ranks after the first; none where they cannot be dialled."""
        found = [greeting["address"] for greeting in self._greetings]
        return () if None in found else tuple(found)

    @property
    def lost(self) -> bool:
        """One is gone, and the site ends with it."""
        return self._lead is not None and bool(self._lead.gone)

    @property
    def _greetings(self) -> list[Message]:
        return [] if self._lead is None else [self._lead.greetings[r] for r in range(1, self.size)]

    def inner(self, bind: str | None, port: int | None, address: str | None) -> list[str]:
        """Where the ranks reach each other."""
        if self._lead is None or bind is None:
            return []
        return [inner_address(bind, port, address, self.local), *(greeting["inner"] for greeting in self._greetings)]

    def check(self) -> None:
        """That all are there.

        Raises:
            RankLost: one is not.
        """
        if self._lead is not None:
            self._lead.check_ranks()

    # ---- start

    @classmethod
    def of(cls, job: Job, size: int, started: bool, command: Sequence[str], logs: Path) -> Ranks:
        """Those of a site, all come.

        Args:
            size: how many it has.
            started: torchrun has started them all; otherwise they are here, by `command`, with their output in `logs`.

        Raises:
            RunFailed: some did not come.
        """
        if size == 1:
            return cls()
        others = None if started else Others(size, this_program(*command), logs)
        try:
            store, local = (others.store, True) if others is not None else (started_store(size), all_here(size))
            lead = Lead(store, size, local=local, alive=others.check if others is not None else lambda: None, doomed=_doomed)
            if others is not None:
                lead.fate = others.fate
            found = cls(size, lead, others, local=local)
            found.site = Gated(torch_site(job, store, 0, size, local), lead)
        except BaseException:
            if others is not None:
                others.close(0.0)
            raise
        return found

    def start(self, me: int, folder: Path, found: int | None, roster: Callable[[], Roster | None]) -> Asked | None:
        """The others load what they need, for worker `me`, as this one does meanwhile."""
        if self._lead is None:
            return None
        threading.Thread(target=self._tell_rosters, args=(roster,), daemon=True).start()
        return self._lead.ask({"do": "start", "worker": me, "folder": str(folder), "found": found})

    def started(self, asked: Asked | None, holding: Holding, check: Callable[[], None]) -> None:
        """They have. `check`, here and below: raises what ends the wait, such as a signal."""
        self._holding = holding
        if self._lead is None or asked is None:
            return
        self._lead.hear = self._heard
        holding.hooks.written = self._written
        asked.wait(check)

    # ---- between sessions

    def settle(self, check: Callable[[], None], limit_s: float) -> Have | None:
        """All ranks go back to the last boundary that all of them hold. What this site holds there; None: they have none in common.

        Args:
            limit_s: a rank that does not answer for so long ends the site: the other sites wait for it as long as it is there.

        Raises:
            RankLost: one is gone.
        """
        mine = self._holding.marks()
        if self._lead is None:
            return have_of(self._holding.held, [int(mine[0]["mark"])])
        theirs = [answer["held"] for answer in self._lead.ask({"do": "held"}).wait(check, limit_s).values()]
        with self._saves:
            self._saved.clear()
        for one in mine:
            same = [next((o for o in held if (o["round"], o["session"]) == (one["round"], one["session"])), None) for held in theirs]
            if None not in same:
                self.even = one is mine[0] and all(held[0] == there for held, there in zip(theirs, same, strict=True))
                self._lead.tell({"do": "settle", "round": one["round"], "id": 0})
                self._holding.settle(one["round"])
                return have_of(self._holding.held, [int(one["mark"]), *(int(o["mark"]) for o in same if o is not None)])
        return None

    def save(self) -> None:
        """All write a checkpoint of the last boundary that all of them hold, unless one is out of touch."""
        if self._lead is None:
            self._holding.hooks.save()
            return
        with suppress(RunFailed):
            if self.settle(lambda: None, _SAVE_S) is not None:
                asked = self._lead.ask({"do": "save"})
                self._holding.hooks.save()
                asked.wait(limit_s=_SAVE_S)

    # ---- a session

    def open(self, session: Session, roster: Roster, inner: Sequence[str]) -> None:
        """The others connect to the ranks of other sites, as this one does meanwhile."""
        if self._lead is not None:
            self._lead.begin(self._lead.epoch + 1)
            order = {"do": "session", "session": session.model_dump_json(), "roster": roster.model_dump_json(), "inner": list(inner)}
            self._doing = self._lead.ask(order | {"epoch": self._lead.epoch})

    def connected(self, lost: Callable[[int], None], check: Callable[[], None]) -> None:
        """They have connections.

        Raises:
            RunFailed: one lacks some; `lost` is told of these sites.
        """
        if self._doing is None:
            return
        for rank, answer in self._doing.wait(check).items():
            if answer["why"] is not None:
                for worker in answer["missing"]:
                    lost(worker)
                raise RunFailed(f"rank {rank}: {answer['why']}")

    def meet(self) -> None:
        """They go into the group, as this one does meanwhile."""
        if self._lead is not None:
            self._doing = self._lead.ask({"do": "meet"})

    def met(self, board: Board, check: Callable[[], None]) -> None:
        """They are in the group."""
        if self._lead is not None:
            self._lead.attach(board)
            self._await(check)

    def _await(self, check: Callable[[], None]) -> dict[int, Message]:
        """What they answer, unless the session ends before."""
        lead, doing = self._lead, self._doing
        assert lead is not None and doing is not None

        def both() -> None:
            check()
            lead.check()

        return doing.wait(both)

    def begin(self, taken_from: int | None, keeps: bool) -> None:
        """They take the state of the session, and run its program."""
        if self._lead is not None:
            self._doing = self._lead.ask({"do": "run", "taken_from": taken_from, "keeps": keeps})

    def mark(self, mine: int, check: Callable[[], None]) -> str:
        """The mark of the state of all ranks at the start of the session."""
        state = self._holding.held.state
        theirs = {} if self._lead is None else self._await(check)
        return mark_of([mine, *(int(answer["mark"]) for answer in theirs.values())], state)

    def check_with(self, board: Board) -> Callable[[], None]:
        """What to call before each inner step."""
        if self._lead is None:
            return board.check
        lead, hooks = self._lead, self._holding.hooks

        def check() -> None:
            lead.cross()
            hooks.before = None  # all have come to this round

        return check

    def end(self, error: BaseException) -> None:
        """The session ends before its end."""
        if self._lead is not None:
            self._lead.end(error)

    def mourn(self) -> None:
        """A rank of this site seems to be gone. Waits for certainty.

        Raises:
            RankLost: it is.
        """
        until_s = time.monotonic() + _MOURN_S
        while self._lead is not None and time.monotonic() < until_s:
            self.check()
            time.sleep(_LOOK_S)

    # ---- what the others say

    def _heard(self, rank: int, message: Message) -> None:
        if "asked" in message:
            self.asked(int(message["asked"]))
        elif "bytes" in message:
            self._bytes[rank] = message["bytes"]
            self._holding.hooks.others_bytes = [sum(one[k] for one in self._bytes.values()) for k in range(2)]
        elif "saved" in message:
            self._part(rank, *message["saved"])

    def _written(self, round: int, tokens: int, sha: str | None) -> None:
        self._part(0, round, tokens, sha)

    def _part(self, rank: int, round: int, tokens: int, sha: str | None) -> None:
        """A part of a checkpoint. The last one closes it."""
        hooks = self._holding.hooks
        with self._saves:
            if sha is None:
                self._saved.pop(round, None)
                return
            parts = self._saved.setdefault(round, {})
            parts[rank] = sha
            if len(parts) < self.size:
                return
            del self._saved[round]
            try:
                hooks.close_checkpoint(round, tokens, [parts[r] for r in range(self.size)])
            except RunFailed as error:
                hooks.trouble(f"no checkpoint of round {round}, the run goes on: {error}")

    def _tell_rosters(self, roster: Callable[[], Roster | None]) -> None:
        seen = -1
        while not self._over.wait(_LOOK_S):
            found = roster()
            if found is not None and found.revision != seen and self._lead is not None:
                seen = found.revision
                self._lead.tell({"roster": found.model_dump_json()})

    def close(self) -> None:
        """Lets the others go, and waits for their end."""
        self._over.set()
        if self._lead is None:
            return
        lost = self.lost
        self._lead.close()
        if isinstance(self.site, Gated) and not lost:
            with suppress(Exception):
                self.site.end()
        if self._others is not None:
            self._others.close(0.0 if lost else 10.0)


def started_store(size: int) -> Any:
    """Of ranks that torchrun, or the first of them, has started."""
    return c10d.PrefixStore(f"site/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", common_store(size, _START_S))


def torch_site(job: Job, store: Any, rank: int, size: int, local: bool) -> TorchSite:
    """The process group of the ranks. Returns when all have come."""
    device = job.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found = TorchSite(store, rank, size, device=device.type, local=local)
    if device.type == "cuda":  # the device mesh may have chosen another
        torch.cuda.set_device(device)
    return found


def _doomed(why: str) -> None:
    """The main thread is stuck with a rank that is gone."""
    note(f"error: {why}")
    os._exit(1)
