"""Why a site cannot go on in its run: its certificate is not good any more, or another process has taken its place."""

from __future__ import annotations

import threading

from gossamer.core.errors import RunFailed
from gossamer.real.board import Board
from gossamer.wan.trust.terms import Distrusted


class Out:
    """Of one site. Any thread may say it; the first reason counts."""

    def __init__(self, site: str) -> None:
        self.why: RunFailed | None = None
        self._site = site
        self._board: Board | None = None
        self._lock = threading.Lock()

    def say(self, error: RunFailed) -> None:
        """This site cannot go on. What it does in a session ends now."""
        with self._lock:
            if self.why is not None:
                return
            self.why, board = error, self._board
        if board is not None:
            board.fail(error)

    def check(self) -> None:
        """Raises the reason, if there is one.

        Raises:
            RunFailed: this site is out.
        """
        if self.why is not None:
            raise RunFailed(f"site {self._site} stops here: {self.why}")

    def goes_on(self) -> str:
        """What to do, so that this site goes on with what it keeps."""
        if isinstance(self.why, Distrusted) and self.why.reason in ("revoked", "expired"):
            made = f"gossamer wan ca issue {self._site} --out NEWFOLDER"
            return f"{made} makes another certificate, and with --identity NEWFOLDER the same command goes on there"
        return "the same command goes on there"

    def ends(self, board: Board) -> None:
        """From now on, what ends with this site's part in the run."""
        with self._lock:
            self._board = board
        if self.why is not None:
            board.fail(self.why)

    def because(self, error: RunFailed) -> bool:
        """Whether that is why the run of this site has failed: said before, or found out by a call of its own."""
        if isinstance(error, Distrusted) and error.own:
            self.say(error)
        return self.why is not None
