"""Runs side by side in processes, one of which is killed."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from small_runs import settings

from gossamer.app.config import load
from gossamer.app.grids import compare, pool
from gossamer.app.grids.pool import Attempt, Outcome, outcomes
from gossamer.app.job import resolve
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


class Pool:
    """Stands for a pool: all that it is given was stopped."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, *_: Any) -> Future[Outcome]:
        done: Future[Outcome] = Future()
        done.set_result(Outcome("stopped"))
        return done

    def shutdown(self, **_: bool) -> None: ...


def test_a_ctrl_c_is_answered_at_once(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    configs = [load([], settings(text, name=f'"{k}"', fleet__name='"uniform-2"')) for k in ("a", "b")]
    monkeypatch.setattr(pool, "ProcessPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        list(outcomes([Attempt("0", c, tmp_path, tmp_path, False) for c in configs], 2))
    assert capsys.readouterr().err == f"{compare.STOPPING}; once more ends them at once\n"
    monkeypatch.setattr(compare, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(compare, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare.compare([resolve(c) for c in configs], tmp_path / "out", processes=2)
    assert capsys.readouterr().err.endswith(f"{compare.STOPPING}\n")
