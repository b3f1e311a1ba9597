"""Records on a disk that is full for a while."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from gossamer.app.folder import JsonLines
from gossamer.core.errors import RunFailed


def test_what_did_not_fit_is_written_when_there_is_room(tmp_path: Path) -> None:
    class Disk:
        """Takes so many bytes."""

        room, held = 0, b""

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            n = min(self.room, len(data))
            self.room, self.held = self.room - n, self.held + bytes(data[:n])
            return n

    lines, disk = JsonLines(tmp_path / "metrics.jsonl"), Disk()
    lines._file.close()
    lines._file = disk  # type: ignore[assignment]
    for k, room in enumerate((20, 0, 5, 3)):
        disk.room = room
        with pytest.raises(RunFailed, match="No space left"):
            lines.add({"round": k, "text": "x" * 30})
    disk.room = 10_000
    lines.flush()
    assert [json.loads(line)["round"] for line in disk.held.splitlines()] == [0, 1, 2, 3]
    lines.flush()
    assert disk.held.count(b"\n") == 4
