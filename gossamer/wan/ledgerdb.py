"""The coordinator's state on disk: one SQLite file, each answer written before it is given.

A write-ahead log with full synchronisation: what a site was told is there after a crash of the process, of the machine, or a full disk. The
file belongs to one coordinator at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gossamer.core.errors import BadInput
from gossamer.wan.membership import Membership
from gossamer.wan.messages import Refused, pack, unpack
from gossamer.wan.records import Commit, Plan

_FORMAT = 1
_APPLICATION = 0x474F5353
_SCHEMA = """
CREATE TABLE runs (run TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE commits (
    run TEXT NOT NULL, generation INTEGER NOT NULL, round INTEGER NOT NULL, fragment INTEGER NOT NULL, record BLOB NOT NULL,
    PRIMARY KEY (run, generation, round, fragment)) WITHOUT ROWID;
CREATE TABLE plans (run TEXT NOT NULL, version INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (run, version)) WITHOUT ROWID;
CREATE TABLE keys (run TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (run, key)) WITHOUT ROWID;
"""

MAX_KEYS = 100_000
MAX_RUN_CHARS = 256 << 20
"""Of all values of a run."""


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
            raise BadInput(
                f"{path} cannot be used as the coordinator's state ({error}): expected a file that this made, or a place for one"
            ) from error
        rows = self._db.execute("SELECT run, COUNT(*), COALESCE(SUM(LENGTH(value)), 0) FROM keys GROUP BY run")
        self._used: dict[str, tuple[int, int]] = {run: (n, chars) for run, n, chars in rows}

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
        return [unpack(Membership, state) for (state,) in self._db.execute("SELECT state FROM runs ORDER BY run").fetchall()]

    def put(self, state: Membership) -> None:
        """Writes the state of a run."""
        self._db.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (state.spec.run, pack(state)))

    def commit(self, run: str, generation: int, round: int, fragment: int) -> Commit | None:
        """A commit."""
        row = self._db.execute(
            "SELECT record FROM commits WHERE run = ? AND generation = ? AND round = ? AND fragment = ?", (run, generation, round, fragment)
        ).fetchone()
        return None if row is None else unpack(Commit, row[0])

    def put_commit(self, run: str, commit: Commit) -> None:
        """Writes a commit; of one place there is one."""
        self._db.execute(
            "INSERT INTO commits VALUES (?, ?, ?, ?, ?)", (run, commit.generation, commit.round, commit.fragment, pack(commit))
        )

    def replace_commit(self, run: str, commit: Commit) -> None:
        """Writes a commit over one that nobody has built on."""
        self._db.execute(
            "INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?)", (run, commit.generation, commit.round, commit.fragment, pack(commit))
        )

    def plan(self, run: str, version: int | None = None) -> Plan | None:
        """A plan; None as version: the latest."""
        row = self._db.execute(
            "SELECT record FROM plans WHERE run = ? AND (? IS NULL OR version = ?) ORDER BY version DESC LIMIT 1", (run, version, version)
        ).fetchone()
        return None if row is None else unpack(Plan, row[0])

    def put_plan(self, run: str, plan: Plan) -> None:
        """Writes a plan."""
        self._db.execute("INSERT INTO plans VALUES (?, ?, ?)", (run, plan.version, pack(plan)))

    def value(self, run: str, key: str) -> str | None:
        """The value of a key."""
        row = self._db.execute("SELECT value FROM keys WHERE run = ? AND key = ?", (run, key)).fetchone()
        return None if row is None else row[0]

    def set(self, run: str, key: str, value: str) -> None:
        """Sets a key.

        Raises:
            Refused: quota: the run has too many, or too long ones.
        """
        n, chars = self._used.get(run, (0, 0))
        old = self.value(run, key)
        n, chars = n + (old is None), chars + len(value) - len(old or "")
        if n > MAX_KEYS or chars > MAX_RUN_CHARS:
            raise Refused("quota", f"run {run} would have {n} keys of {chars} characters in all: at most {MAX_KEYS} and {MAX_RUN_CHARS}")
        with self.change():
            self._db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?)", (run, key, value))
        self._used[run] = (n, chars)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()
