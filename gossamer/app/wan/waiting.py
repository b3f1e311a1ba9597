"""How a site comes into its run, and what it says while it waits: for the coordinator, for the other sites."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gossamer.app.progress import duration
from gossamer.app.wan.apart import Missing
from gossamer.app.wan.meeting import patiently
from gossamer.app.wan.presence import Where
from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.roster.calls import Away
from gossamer.wan.roster.client import CoordinatorClient
from gossamer.wan.roster.ended import AT, OVER, is_over
from gossamer.wan.roster.messages import Refused, printable
from gossamer.wan.roster.records import Have, Roster, Session, Spec
from gossamer.wan.roster.sessions import NotYet, Sessions
from gossamer.wan.trust.diagnose import speaks_tls

_OPEN_S = 1.0
"""An opening is asked for again so often, and what it waits for is said."""
_FIRST_S = 2.0
"""After so long without an answer from the coordinator, that is said."""
_AGAIN_S = 30.0
"""That it still waits is said so often."""


class Waiting:
    """What is said while something does not happen: when there is something new, and every half minute.

    Args:
        twice: what is new counts when it is there a second time: what passes by itself is nobody's concern.
    """

    def __init__(self, say: Callable[[str], None], *, twice: bool = False, now_s: Callable[[], float] = time.monotonic) -> None:
        self._say, self._twice, self._now_s = say, twice, now_s
        self._said = self._last = ""
        self._begun_s = self._told_s = now_s()

    def still(self, text: str) -> None:
        """It has not happened yet, because of this."""
        now_s, new, self._last = self._now_s(), text != self._last, text
        if text != self._said:
            if self._twice and new:
                return
            self._say(text)
        elif now_s - self._told_s >= _AGAIN_S:
            self._say(f"still waiting, after {duration(now_s - self._begun_s)}: {text}")
        else:
            return
        self._said, self._told_s = text, now_s


class Entrance:
    """A site's way into its run, and into each of its sessions.

    Args:
        missing: told who is listed, while no session opens.
        check: raises what ends the waiting, such as a signal.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        sessions: Sessions,
        where: Where,
        say: Callable[[str], None],
        missing: Missing,
        check: Callable[[], None],
    ) -> None:
        self._client, self._sessions, self._where, self._say, self._check = client, sessions, where, say, check
        self._missing = missing

    def join(self) -> None:
        """Joins the run, when the coordinator answers.

        Raises:
            BadInput: it will not have this site as it is, or the run is over.
            Refused: for now.
            RunFailed: no coordinator answers there.
        """
        waiting, client, taken = Waiting(self._say), self._client, ""
        timeout_s = min(_FIRST_S, client.timeouts.call)
        while True:
            try:
                patiently(partial(client.join, timeout_s), self._check)
                break
            except Away as error:
                timeout_s = client.timeouts.call
                if (words := elsewhere(self._where, error)) is not None:
                    raise RunFailed(words) from None
                waiting.still(f"waiting for the coordinator at {self._where.coordinator}: {error}")
            except Refused as error:
                if error.refusal.retry_s is None:
                    raise BadInput(advice(str(error), self._where)) from None
                if error.code != "taken":
                    raise
                taken = taken or f"{error}; this one waits so long, or give --take-over"
                waiting.still(taken)
            self._check()
        self.check_over()

    def open(self, have: Have | None) -> Session:
        """The next session."""
        waiting, client = Waiting(self._say, twice=True), self._client
        while True:
            self._check()
            try:
                return patiently(lambda: self._sessions.open(have, timeout_s=_OPEN_S), self._check)
            except NotYet as error:
                self._missing.listed(client.roster.members)
                if error.why:
                    waiting.still(advice(waits(client.spec, client.roster, self._where.site, error.why), self._where))
                if client.news.plan:
                    self.check_over()

    def check_over(self) -> None:
        """That the run has not come to its end while this site was away.

        Raises:
            BadInput: it has.
        """
        run = self._client.spec.run
        with suppress(Away, Refused):
            plan = self._client.plan(self._client.timeouts.call)
            if plan is not None and plan.body.startswith(OVER):
                self._client.leave()
                raise BadInput(advice(is_over(run, printable(plan.body.removeprefix(OVER))), self._where))


def advice(text: str, where: Where) -> str:
    """What a coordinator says, its commands with the options that they need at this site.

    >>> advice("after gossamer wan forget first --coordinator HOST:PORT", Where("lyon", "127.0.0.1:7400"))
    'after gossamer wan forget first --coordinator 127.0.0.1:7400'
    """
    given = (("--coordinator", where.coordinator), ("--identity", where.identity), ("--secret", where.secret))
    return text.replace(AT, " ".join(f"{option} {value}" for option, value in given if value is not None))


def waits(spec: Spec, roster: Roster, me: str, why: str) -> str:
    """For whom or what a run waits, and who is there.

    >>> spec = Spec(run="r", configuration="a", layout="b", versions={}, seats=3, synchronous=True, min_sites=2, floor_s=30.0)
    >>> waits(spec, Roster(run="r", revision=1, epoch=1, generation=0, members=(), session=None), "lyon", "nobody asks")
    'run r waits: nobody asks. Not there: 3 that have never come'
    """
    there = [m.site + (" (this site)" if m.site == me else "") for m in roster.members if m.there]
    gone = [m.site for m in roster.members if not m.there]
    known = {m.site for m in roster.members}
    unseen = [f"{site} (has never come)" for site in spec.sites if site not in known]
    if not spec.sites and (more := spec.seats - len(roster.members)) > 0:
        unseen.append(f"{more} that {'has' if more == 1 else 'have'} never come")
    parts = [f"there: {', '.join(there)}"] if there else []
    parts += [f"not there: {', '.join([*gone, *unseen])}"] if gone or unseen else []
    standing = "; ".join(parts)
    return f"run {spec.run} waits: {printable(why)}" + (f". {standing[0].upper()}{standing[1:]}" if standing else "")


def elsewhere(where: Where, error: Away) -> str | None:
    """Why it is of no use to wait for a coordinator at that address; None: it may come."""
    if error.other:
        return f"{where.coordinator} is no coordinator, though somebody answers there: give --coordinator the address of one"
    if where.identity is None and speaks_tls(where.coordinator):
        return f"the coordinator at {where.coordinator} wants certificates, and none was given: add --identity DIR (and --secret FILE)"
    return None
