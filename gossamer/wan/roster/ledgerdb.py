"""The coordinator's state on disk: one SQLite file, each answer written before it is given.

A write-ahead log with full synchronisation: what a site was told is there after a crash of the process, of the machine, or a full disk. The
file belongs to one coordinator at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.wan.roster.membership import Membership
from gossamer.wan.roster.messages import Refused, pack, unpack
from gossamer.wan.roster.records import Plan, Session

_FORMAT = 1
_APPLICATION = 0x474F5353
_SCHEMA = """
CREATE TABLE runs (run TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE sessions (run TEXT NOT NULL, number INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (run, number)) WITHOUT ROWID;
CREATE TABLE plans (run TEXT NOT NULL, version INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (run, version)) WITHOUT ROWID;
"""


def unusable(path: Path, why: str) -> BadInput:
    """A file from which no coordinator can go on."""
    return BadInput(
        f"{path} cannot be used as the coordinator's state ({why}): expected a file that this made, or a place for one. Where such a file "
        "is damaged, move it away (with its -wal and -shm) and start anew: runs go on from what their sites know"
    )


class LedgerDB:
    """The file at `path`, made if there is none.

    Raises:
        BadInput: it is in use, unreadable, or no coordinator's.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=0.5, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN IMMEDIATE")
            self._open(path)
            self._db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            if "locked" in str(error):
                raise BadInput(f"{path} is in use by another coordinator: stop that one, or give this one a file of its own") from error
            raise unusable(path, str(error)) from error

    def _rows(self, question: str, *values: Any) -> list[Any]:
        """What the file says.

        Raises:
            Refused: (disk) it cannot be read.
        """
        try:
            return self._db.execute(question, values).fetchall()
        except sqlite3.Error as error:
            raise Refused("disk", f"the coordinator could not read its state ({error})", 1.0) from error

    def _open(self, path: Path) -> None:
        application = self._db.execute("PRAGMA application_id").fetchone()[0]
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if application == 0 and not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        elif application != _APPLICATION:
            raise BadInput(f"{path} is a database, but not of a coordinator: give another file")
        elif version != _FORMAT:
            raise BadInput(f"{path} has format {version}: expected {_FORMAT}, as this release writes it")

    @contextmanager
    def change(self) -> Iterator[None]:
        """All that is written within is there, or nothing of it.

        Raises:
            Refused: (disk) it could not be written.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise Refused("disk", f"the coordinator could not write its state ({error}); nothing was changed", 1.0) from error
            raise

    def runs(self) -> list[Membership]:
        """All runs."""
        return [unpack(Membership, state) for (state,) in self._rows("SELECT state FROM runs ORDER BY run")]

    def put(self, state: Membership) -> None:
        """Writes the state of a run."""
        self._db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (state.spec.run, pack(state)))

    def session(self, run: str, number: int) -> Session | None:
        """A session."""
        rows = self._rows("SELECT record FROM sessions WHERE run = ? AND number = ?", run, number)
        return unpack(Session, rows[0][0]) if rows else None

    def sessions(self, run: str, n: int) -> list[Session]:
        """The latest, newest first."""
        rows = self._rows("SELECT record FROM sessions WHERE run = ? ORDER BY number DESC LIMIT ?", run, n)
        return [unpack(Session, record) for (record,) in rows]

    def put_session(self, run: str, session: Session) -> None:
        """Writes a session, over one of that number which nobody has entered."""
        self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (run, session.number, pack(session)))

    def plan(self, run: str, version: int | None = None) -> Plan | None:
        """A plan; None as version: the latest."""
        rows = self._rows(
            "SELECT record FROM plans WHERE run = ? AND (? IS NULL OR version = ?) ORDER BY version DESC LIMIT 1", run, version, version
        )
        return unpack(Plan, rows[0][0]) if rows else None

    def put_plan(self, run: str, plan: Plan) -> None:
        """Writes a plan."""
        self._db.execute("INSERT INTO plans VALUES (?, ?, ?)", (run, plan.version, pack(plan)))

    def forget(self, run: str) -> None:
        """Removes all that there is of a run."""
        for table in ("runs", "sessions", "plans"):
            self._db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))

    def close(self) -> None:
        """Closes the file."""
        self._db.close()
