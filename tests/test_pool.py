"""Runs side by side in processes, one of which is killed."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest
from small_runs import settings

from gossamer.app.config import load
from gossamer.app.grids.pool import Attempt, outcomes
from gossamer.core.errors import RunFailed

pytestmark = pytest.mark.usefixtures("cache")


def test_where_processes_are_killed_the_others_are_not_waited_for(text: Path, tmp_path: Path) -> None:
    sets = settings(text, fleet__name='"uniform-2"', method__name='"diloco"', run__rounds=100_000)
    (tmp_path / "cells").mkdir()
    attempts = [Attempt(f"{k}", load([], [*sets, f"seed={k}"]), tmp_path / "cells", tmp_path / "work", False) for k in range(2)]
    errors: list[BaseException] = []

    def runs() -> None:
        try:
            list(outcomes(attempts, 2))
        except RunFailed as error:
            errors.append(error)

    thread = threading.Thread(target=runs, daemon=True)
    thread.start()
    end_s = time.monotonic() + 120.0
    while not all((tmp_path / "work" / a.mark / "metrics.jsonl").exists() for a in attempts):
        assert thread.is_alive() and time.monotonic() < end_s
        time.sleep(0.05)
    for process in multiprocessing.active_children():
        process.kill()
    thread.join(60.0)
    assert not thread.is_alive() and "a process of the pool was killed" in str(errors[0])
