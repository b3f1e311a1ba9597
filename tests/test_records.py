"""Records on a disk that is full for a while, and who may read them."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from pathlib import Path

import pytest

from gossamer.app.folder import JsonLines, RunFolder, write_atomically
from gossamer.core.errors import RunFailed


class Full:
    """A file on a disk with so much room."""

    def __init__(self, path: Path, room: int) -> None:
        self.path, self.room = path, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = min(self.room, len(data))
        self.room -= n
        with self.path.open("ab") as file:
            return file.write(data[:n])

    def close(self) -> None:
        pass


@pytest.mark.parametrize("room", [0, 1, 20, 200])
def test_records_that_wait_for_room_survive_that_the_run_goes_back(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    records = [{"kind": "note", "round": k, "text": "x" * 30} for k in range(6)]
    lines.add(records[0])
    lines._file.close()
    lines._file = Full(path, room)  # type: ignore[assignment]
    for record in records[1:]:
        with suppress(RunFailed):
            lines.add(record)
    waiting = lines.let_go()
    monkeypatch.setattr("gossamer.app.folder.write_atomically", lambda *_: pytest.fail("there is no room for this"))
    RunFolder(tmp_path).cut(path.name, 3)
    there = RunFolder(tmp_path).read_lines(path.name)
    assert [*there, *(record for record in waiting if record["round"] <= 3)] == records[:4]


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


def test_whoever_may_read_other_files_may_read_those_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write_atomically(tmp_path / "summary.json", "{}")
    assert (tmp_path / "summary.json").stat().st_mode == (tmp_path / "other").stat().st_mode
