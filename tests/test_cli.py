"""The command line: exit codes, messages without tracebacks, and progress in and outside a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gossamer import BadInput, RunFailed, __version__, cli
from gossamer.app.progress import Progress, still

COMMANDS = ("train", "simulate", "compare", "plan", "report", "trace", "demo")


class Commands:
    """Stands for gossamer.app.commands: notes the call, or raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))
            if self._error:
                raise self._error

        return call


def replace_commands(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> Commands:
    stand_in = Commands(error)
    monkeypatch.setitem(sys.modules, "gossamer.app.commands", stand_in)  # type: ignore[arg-type]
    import gossamer.app

    monkeypatch.setattr(gossamer.app, "commands", stand_in, raising=False)
    return stand_in


def test_arguments_reach_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = replace_commands(monkeypatch)
    assert cli.main(["train", "a.toml", "b.toml", "--set", "seed=1", "--set", "plan.steps=2", "--workers", "3", "--out", "runs/x"]) == 0
    assert cli.main(["simulate"]) == 0
    assert cli.main(["simulate", "a.toml", "--timing-only", "--resume", "runs/x"]) == 0
    assert cli.main(["compare", "a.toml", "b.toml", "--out", "runs/y"]) == 0
    assert cli.main(["plan", "a.toml"]) == 0
    assert cli.main(["report", "runs/x", "runs/y"]) == 0
    assert cli.main(["trace", "runs/x", "--to", "trace.json"]) == 0
    assert cli.main(["demo"]) == 0
    a, b, x, y = Path("a.toml"), Path("b.toml"), Path("runs/x"), Path("runs/y")
    assert commands.calls == [
        ("train", ([a, b], ["seed=1", "plan.steps=2"]), {"workers": 3, "resume": None, "round": None, "out": x}),
        ("simulate", ([], []), {"resume": None, "round": None, "out": None, "timing_only": False}),
        ("simulate", ([a], []), {"resume": x, "round": None, "out": None, "timing_only": True}),
        ("compare", ([a, b], []), {"base": None, "jobs": 1, "out": y}),
        ("plan", ([a], [], []), {}),
        ("report", ([x, y],), {"out": None}),
        ("trace", (x,), {"to": Path("trace.json")}),
        ("demo", (), {"out": None}),
    ]


@pytest.mark.parametrize(
    "error, code, message",
    [
        (BadInput("plan.steps = 0: expected more"), 2, "gossamer: plan.steps = 0: expected more\n"),
        (RunFailed("worker 3 died"), 1, "gossamer: worker 3 died\n"),
        (KeyboardInterrupt(), 130, "gossamer: interrupted\n"),
    ],
)
def test_errors_become_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, message: str
) -> None:
    replace_commands(monkeypatch, error)
    monkeypatch.delenv("GOSSAMER_DEBUG", raising=False)
    assert cli.main(["simulate"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_commands(monkeypatch, BadInput("no"))
    monkeypatch.setenv("GOSSAMER_DEBUG", "1")
    with pytest.raises(BadInput):
        cli.main(["simulate"])


@pytest.mark.parametrize(
    "arguments",
    [["simulat"], ["train", "--workers", "0"], ["compare", "--out", "x"], ["compare", "a.toml"], ["trace", "x"], ["plan", "--st", "a=1"]],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = replace_commands(monkeypatch)
    assert cli.main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert commands.calls == []


def test_help_and_version_as_a_module() -> None:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    run = lambda *a: subprocess.run([sys.executable, "-m", "gossamer", *a], capture_output=True, text=True, env=environment)  # noqa: E731
    assert run("--version").stdout == f"gossamer {__version__}\n"
    helped = run("--help")
    assert helped.returncode == 0
    assert all(f" {command} " in helped.stdout for command in COMMANDS)
    refused = run("nothing")
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


BEFORE_TORCH = """
import json, os, sys
from pathlib import Path
from gossamer.cli import main

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise KeyboardInterrupt

Path("begun").mkdir()
Path("begun/config.toml").write_text("")
Path("mistyped.toml").write_text("method.nam = 'gasloc'")
Path("begun/facts.json").write_text('{"world": "net"}')
codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
print("torch" in sys.modules, "transformers" in sys.modules)
print("---", file=sys.stderr)
sys.meta_path.insert(0, CtrlC())
codes.append(main(["train", "--workers", "4", "--out", "new"]))
print(*codes, Path("new").exists())
"""


REFUSED = [
    (["train", "--resume", "nowhere"], "nowhere is not a run folder (there is no such folder)"),
    (["train", "--resume", "begun", "--workers", "4"], "begun has no whole checkpoint to go on from"),
    (["train", "--resume", "begun", "a.toml"], "leave CONFIG out"),
    (["simulate", "--resume", "begun"], "resume it with that, not with simulate"),
    (["train", "--round", "3"], "give it with --resume"),
    (["train", "--workers", "2"], "--workers 2 does not fit fleet azure-4, which has 4: use --workers 4; or, for 2 alike, add "
     "--set fleet.name=uniform\n"),
    (["train"], "start them here with --workers 4"),
    (["simulate", "--set", "plan.stps=1"], "did you mean plan.steps?"),
    (["simulate", "--set", "method.nam=diloco"], "unknown key method.nam: geomesh has no such option; did you mean method.name?"),
    (["plan", "--set", "method.topolgy=ring", "--set", "method.name=gasloc"], "did you mean topology?"),
    (["simulate", "--timing-only", "--set", "method.zebra=1", "--set", "method.name=noloco"],
     "its options are outer_lr, outer_momentum, force"),
    (["compare", "mistyped.toml", "--out", "x"], "unknown key method.nam:"),
    (["simulate", "--set", "data.source=./nowhere"], "the corpus './nowhere' does not exist"),
    (["simulate", "--out", "begun"], "the run folder begun exists and is not empty"),
    (["compare", "nowhere.toml", "--out", "x"], "there is no file nowhere.toml"),
    (["compare", "nowhere.toml", "--out", "x", "--seeds", "2"], "there is no file nowhere.toml"),
    (["export", "nowhere", "--to", "x"], "nowhere is not a run folder"),
    (["export", "begun", "--to", "begun"], "begun exists and is not empty: choose another folder with --to"),
    (["eval", "nowhere"], "nowhere is no folder"),
    (["demo", "--out", "begun"], "the run folder begun exists"),
]  # fmt: skip


def test_what_can_be_refused_without_torch_is_and_what_takes_long_says_so(tmp_path: Path) -> None:
    code, arguments = BEFORE_TORCH, json.dumps([given for given, _ in REFUSED])
    environment = {**{k: v for k, v in os.environ.items() if k != "RANK"}, "PYTHONPATH": os.pathsep.join(["", *sys.path])}
    done = subprocess.run([sys.executable, "-c", code, arguments], capture_output=True, text=True, cwd=tmp_path, env=environment)
    loaded, codes = done.stdout.splitlines()
    assert loaded == "False False", done.stderr
    refused, _, stopped = done.stderr.partition("---\n")
    assert codes.split() == ["2"] * len(REFUSED) + ["130", "False"], done.stderr
    assert all(words in refused for _, words in REFUSED), refused
    assert "loading" not in refused
    assert stopped == "loading ...\ngossamer: interrupted: nothing was begun\n"


# Progress


def lines(rounds: int, first: int = 0, quiet: bool = False) -> list[str]:
    out, clock = io.StringIO(), iter(float(i) for i in range(10_000))
    with Progress(rounds, "run", quiet=quiet, first_round=first, file=out, now_s=lambda: next(clock)) as progress:
        for r in range(first + 1, rounds + 1):
            progress.update(round=r, tokens=1000 * r, loss=2.0, extra="virtual clock 1 s")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("rounds", [1, 7, 20, 1000])
def test_a_log_gets_about_ten_lines_and_the_last_round(rounds: int) -> None:
    said = lines(rounds)
    assert len(said) == 1 + min(rounds, 10)
    assert said[0] == f"run: {rounds} rounds"
    assert said[-1].startswith(f"run: round {rounds}/{rounds}, loss 2.000, ")
    assert "virtual clock 1 s" in said[-1]
    assert "left" not in said[-1]


def test_speed_and_time_left_count_from_the_start_of_this_process() -> None:
    # One tick of the clock a printed status: at the first, 1 s for 1 round of 1000 tokens.
    assert lines(10)[1] == "run: round 1/10, loss 2.000, 1k tokens/s, virtual clock 1 s, 9.0 s left"
    assert len(lines(20, first=18)) == 1 + 1
    assert lines(5, quiet=True) == []


def test_what_stands_still_says_so_in_a_log_and_what_is_quick_does_not() -> None:
    out, slow = io.StringIO(), 0.01
    with still("begins", every_s=slow, file=out) as now:
        for text in ("begins", "goes on"):
            now(text)
            for _ in range(2000):
                if text in out.getvalue():
                    break
                time.sleep(slow)
    said = out.getvalue().splitlines()
    assert said[0].startswith("begins (0.") and said[-1].startswith("goes on (")
    time.sleep(3 * slow)
    assert out.getvalue().splitlines() == said, "it is over"
    out = io.StringIO()
    with still("quick", file=out), still("not asked", quiet=True, every_s=slow, file=out):
        time.sleep(3 * slow)
    assert out.getvalue() == ""


def test_a_terminal_gets_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Progress(2, "a [b] run", file=out) as progress:
        progress.update(round=2, tokens=10, loss=None)
    assert "a [b] run" in out.getvalue()
    assert "round 2/2" in out.getvalue()
