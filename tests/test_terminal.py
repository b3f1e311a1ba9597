"""What a terminal shows while a progress line is redrawn in it: each message on a line of its own."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from gossamer.app.progress import Progress
from gossamer.app.wan.logs import set_up_logs
from gossamer.app.wan.site import SiteRun
from gossamer.net.launch import launch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        """The lines of a screen that is wide and high enough for all that was written."""
        lines, row, column = [""], 0, 0
        for code, char in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|(.)", self.getvalue(), re.DOTALL):
            if code in ("2K", "K", "0K"):
                lines[row] = "" if code == "2K" else lines[row][:column]
            elif code.endswith("A"):
                row -= int(code[:-1])
            elif char == "\r":
                column = 0
            elif char == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif char:
                lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
                column += 1
            else:
                assert code.endswith(("m", "h", "l")), code
        return [line.rstrip() for line in lines]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """What is logged meanwhile goes to it, and no further, once `outputs` are there."""
    logger, one = logging.getLogger("gossamer"), Terminal()
    before = (list(logger.handlers), logger.level, logger.propagate)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    yield one
    logger.handlers[:], logger.level, logger.propagate = before


def outputs(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, err: io.StringIO) -> None:
    """In the test itself: before it pytest puts its own there once more."""
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)


def test_what_a_site_says_stands_above_its_progress(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs(monkeypatch, terminal, terminal)
    site: Any = SiteRun.__new__(SiteRun)
    site._console = Console(emoji=False, highlight=False, soft_wrap=True)
    site.spec, site.where = SimpleNamespace(run="first"), SimpleNamespace(site="a")
    site.job = SimpleNamespace(method=SimpleNamespace(rounds=4))
    set_up_logs("text", site="a", run="first", level=logging.WARNING)
    log = logging.getLogger("gossamer.wan.gate")
    with site._progress(SimpleNamespace(state=SimpleNamespace(round=0, tokens=0))) as progress:
        site._say("session 1, from round 0: c, a, b")
        progress.update(1, 10, 2.5)
        log.warning("a line of the log")
        progress.update(2, 20, 2.5)
        print("gossamer: to standard error", file=sys.stderr)
        site._say("site b has left")
        progress.update(4, 40, 2.5)
    log.warning("after it")
    first, logged, printed, second, bar, last = terminal.shown()[:6]
    assert (first, printed, second) == ("session 1, from round 0: c, a, b", "gossamer: to standard error", "site b has left")
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING wan\.gate site=a run=first session=- round=- a line of the log", logged)
    assert bar.startswith("first at a ") and "round 4/4" in bar
    assert last.endswith("after it") and "".join(terminal.shown()).count("first at a") == 1


def test_what_goes_to_a_file_is_not_shown_above_the_progress(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    outputs(monkeypatch, terminal, file)
    set_up_logs("text", site="a", run="first", level=logging.WARNING)
    with Progress(2, "run"):
        print("printed", file=sys.stderr)
        logging.getLogger("gossamer.wan.gate").warning("logged")
    assert file.getvalue().startswith("printed\n") and file.getvalue().endswith(" logged\n")
    assert "printed" not in terminal.getvalue() and "logged" not in terminal.getvalue()


def test_the_launcher_begins_lines_of_its_own(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Worker 0, another process, has left the cursor behind its progress line, and draws it again after the message."""
    outputs(monkeypatch, terminal, terminal)
    terminal.write("run ---- round 3/9, 5 s left^C")
    assert launch(1, ["sh", "-c", "kill -9 $$"], tmp_path, grace_s=1.0) == 1
    terminal.write("\r\x1b[2Krun ---- round 4/9, 4 s left")
    said = terminal.shown()
    assert said[0] == "worker 0 was killed (SIGKILL), so the run was ended." and said[-1] == "run ---- round 4/9, 4 s left"
    assert not [line for line in said[:-1] if "left" in line]


def test_without_a_terminal_a_message_of_the_launcher_is_its_text_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(1, ["sh", "-c", "exit 3"], tmp_path, grace_s=1.0) == 1
    assert capsys.readouterr().err == "worker 0 failed (exit code 3), so the run was ended.\nThere is no whole checkpoint yet.\n"
