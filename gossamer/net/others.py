"""The ranks of one worker but the first, which starts them: processes on this machine that end with it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from gossamer.core.errors import RunFailed
from gossamer.net.gloo import c10d
from gossamer.net.launch import Child, obituary, start

_SLOW_END_S = 5.0


class Others:
    """Ranks 1 to n - 1, each a process that runs `argv` with RANK set. Their output is in `log_dir`/rank-<i>.log.

    On Linux the kernel kills them when this process ends, however that happens.
    """

    def __init__(self, n: int, argv: Sequence[str], log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="gossamer-")
        path = Path(self._folder.name) / "store"
        self.store: Any = c10d.PrefixStore("site/0", c10d.FileStore(str(path), n))
        """What all ranks find each other by."""
        self.children: dict[int, Child] = {}
        try:
            for rank in range(1, n):
                self.children[rank] = start(rank, n, argv, log_dir / f"rank-{rank}.log", path, {})
        except BaseException:
            self.close(0.0)
            raise

    def check(self) -> None:
        """That all still run.

        Raises:
            RunFailed: one does not.
        """
        for rank, child in self.children.items():
            if child.process.poll() is not None:
                raise RunFailed(self.fate(rank))

    def fate(self, rank: int) -> str:
        """How a rank has ended, in words, with the end of what it said."""
        child = self.children[rank]
        with suppress(TimeoutExpired):
            child.code = child.process.wait(2.0)
        if child.code is None:
            return f"rank {rank} of this site is out of touch, and the site ends with it: see {child.log}"
        return obituary(f"rank {rank} of this site", child, "and the site ends with it")

    def close(self, grace_s: float = _SLOW_END_S) -> None:
        """Waits for their end, for `grace_s` together; then kills them."""
        until_s = time.monotonic() + grace_s
        for child in self.children.values():
            with suppress(TimeoutExpired):
                child.process.wait(max(0.0, until_s - time.monotonic()))
        for child in self.children.values():
            with suppress(ProcessLookupError, PermissionError):
                if child.process.poll() is None:
                    os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
        with suppress(OSError):
            self._folder.cleanup()


def this_program(*arguments: str) -> list[str]:
    """The command line of Gossamer in another process of this Python."""
    return [sys.executable, "-m", "gossamer", *arguments]
