"""The sessions that a site is bound to, in its run folder: a later process of it must know of them (`Sessions.bind`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gossamer.core.errors import BadInput
from gossamer.wan.files import write_atomically
from gossamer.wan.roster.messages import Record, Refused, pack, unpack
from gossamer.wan.roster.records import MAX_BOUND, Session

FILE = "sessions.json"


class _Bound(Record):
    bound: Annotated[tuple[Session, ...], Field(max_length=MAX_BOUND)]


class Bound:
    """The file of one run folder.

    Args:
        trouble: told when it cannot be written. The run goes on: what it guards against takes another failure, and a cut at that moment.
    """

    def __init__(self, folder: Path, trouble: Callable[[str], None]) -> None:
        self._path, self._trouble = folder / FILE, trouble
        self._full = False

    def read(self) -> tuple[Session, ...]:
        """What was last kept.

        Raises:
            BadInput: the file is damaged.
        """
        if not self._path.exists():
            return ()
        try:
            return unpack(_Bound, self._path.read_bytes()).bound
        except (Refused, OSError) as error:
            raise BadInput(
                f"{self._path} is damaged ({error}): expected the sessions that this site has come to; remove it only while all other "
                "sites of the run are there"
            ) from None

    def keep(self, bound: tuple[Session, ...]) -> None:
        """Writes it, whole or not at all."""
        try:
            write_atomically(self._path, pack(_Bound(bound=bound)), 0o644, replace=True)
            self._full = False
        except OSError as error:
            if not self._full:
                self._trouble(f"{self._path} cannot be written ({error}): the run goes on; free some space")
            self._full = True
