"""Workers that are forked from one process, which has loaded their modules: as those that are started, and loaded once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_net_launch import alive, until

HERE = Path(__file__).resolve().parent
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


def start(job: str, folder: Path, closed: str = "") -> subprocess.Popen[str]:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "fork_toys", job, str(folder), "2"]
    return subprocess.Popen(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(folder: Path) -> list[dict]:
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


def test_modules_are_loaded_once_and_a_worker_has_its_own_place_environment_and_output(tmp_path: Path) -> None:
    out, _ = start("end", tmp_path).communicate(timeout=60)
    one, two = said(tmp_path)
    assert one["loaded_by"] == two["loaded_by"] not in (one["pid"], two["pid"])
    assert {w["said"] for w in (one, two)} == {"to workers"} and {w["stdin"] for w in (one, two)} == {""}
    assert "worker 0 speaks" in out and "worker 1 speaks" not in out and out.endswith("code 0\n")
    assert (tmp_path / "worker-1.log").read_text() == "worker 1 speaks\n"


@pytest.mark.parametrize(("job", "words"), [("fail", "worker 1 failed (exit code 7)"), ("die", "worker 1 was killed (SIGKILL)")])
def test_how_a_worker_has_ended_is_said(job: str, words: str, tmp_path: Path) -> None:
    out, _ = start(job, tmp_path).communicate(timeout=60)
    assert words in out and "worker 1 speaks" in out and out.endswith("code 1\n")


def test_a_killed_launcher_leaves_no_worker_behind_though_it_had_nothing_open(tmp_path: Path) -> None:
    with start("wait", tmp_path, closed="<&- >&- 2>&-") as launcher:
        until(lambda: all((tmp_path / f"{i}.json").exists() for i in range(2)))
        launcher.kill()
    until(lambda: not any(alive(w["pid"]) for w in said(tmp_path)))


def test_signals_are_passed_on(tmp_path: Path) -> None:
    launcher = start("wait", tmp_path)
    until(lambda: all((tmp_path / f"{i}.json").exists() for i in range(2)))
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate(timeout=60)
    assert out.endswith("code 143\n")
    assert not any(alive(w["pid"]) for w in said(tmp_path))


def test_a_script_without_a_guard_runs_once_and_closed_outputs_are_no_fault(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom gossamer.net import launch\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with open(folder / 'runs', 'a') as file:\n    file.write('x')\n"
        "code = launch(2, [sys.executable, '-m', 'fork_toys', 'end', str(folder)], folder, modules=('fork_toys',))\n"
        "(folder / 'code').write_text(str(code))\n"
    )
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, str(script)], env=ENV, timeout=60)
    assert done.returncode == 0 and (tmp_path / "code").read_text() == "0" and (tmp_path / "runs").read_text() == "x"
    assert [w["said"] for w in said(tmp_path)] == [None, None]


def test_a_stop_while_modules_are_loaded_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow_to_load.py").write_text("import time\nopen('loading', 'w').close()\ntime.sleep(100)\n")
    call = "launch(2, [sys.executable, '-m', 'x'], Path('logs'), modules=('slow_to_load',))"
    code = f"import sys; from pathlib import Path; from gossamer.net import launch; sys.exit({call})"
    paths = {**ENV, "PYTHONPATH": os.pathsep.join([ENV["PYTHONPATH"], str(tmp_path)])}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=paths, cwd=tmp_path)
    until(lambda: (tmp_path / "loading").exists())
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 130
