"""Worker processes: they find each other, one failure ends all and is named, signals stop all at one boundary, none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import net_toys
import pytest
from net_toys import in_processes

from gossamer.net import launch

ENV = {**os.environ, "PYTHONPATH": str(Path(net_toys.__file__).resolve().parent.parent)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's")


def shell(n: int, script: str, folder: Path, grace_s: float = 2.0, rounds: bool = True) -> tuple[int, str]:
    said: list[str] = []
    code = launch(n, ["sh", "-c", script], folder, env={"FOLDER": str(folder)}, say=said.append, grace_s=grace_s, rounds=rounds)
    return code, "\n".join(said)


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_four_processes_exchange_every_bit(tmp_path: Path) -> None:
    code, said = in_processes(4, "exchange", tmp_path)
    assert (code, said) == (0, "")
    reports = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(4)]
    sizes = [64 + (5_000_000 if i == 0 else 64 + i) for i in range(4)]
    assert [r["round"] for r in reports] == [4] * 4
    assert [r["sent"] for r in reports] == [4 * 3 * s for s in sizes]
    assert [r["received"] for r in reports] == [4 * (sum(sizes) - s) for s in sizes]
    assert reports[0]["bytes"] == [[], [1], [2, 2], [3, 3, 3]]


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    code, said = in_processes(3, "die", tmp_path)
    assert code == 1
    assert said.startswith("worker 1 was killed (SIGKILL)")
    assert "last words of worker 1" in said
    assert str(tmp_path / "worker-1.log") in said
    assert "Last whole checkpoint: round 3 in ckpt." in said
    assert [(tmp_path / f"{i}.lost").read_text() for i in (0, 2)] == ["1", "1"]


def test_the_cause_is_named_not_the_first_to_end(tmp_path: Path) -> None:
    code, said = in_processes(3, "raise_error", tmp_path)
    assert code == 1
    assert said.startswith("worker 2 failed (exit code 1)")
    assert "ValueError: a bug of worker 2" in said
    assert [(tmp_path / f"{i}.lost").read_text() for i in (0, 1)] == ["2", "2"]


def test_a_signal_stops_all_workers_at_one_boundary(tmp_path: Path) -> None:
    argv = [sys.executable, net_toys.__file__, "until_stopped", str(tmp_path), "2"]
    launcher = subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, text=True)
    until(lambda: all((tmp_path / f"{i}.runs").exists() for i in range(2)))
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "stopping all workers at the end of a round" in out
    stopped = [int((tmp_path / f"{i}.stopped").read_text()) for i in range(2)]
    assert stopped[0] == stopped[1] > 0


def test_signals_are_passed_on(tmp_path: Path) -> None:
    """Worker 1 sends SIGTERM to its parent, the launcher in this process, once worker 0 is ready for it."""
    script = """
    trap 'exit 143' TERM
    [ "$RANK" = 0 ] && touch $FOLDER/ready
    while [ ! -e $FOLDER/ready ]; do sleep 0.02; done
    [ "$RANK" = 1 ] && kill -TERM $PPID
    while true; do sleep 0.02; done
    """
    code, said = shell(2, script, tmp_path)
    assert code == 143
    assert said == "stopping all workers at the end of a round; once more ends them at once"


@pytest.mark.parametrize(("rounds", "end"), [(True, "kill -INT $$"), (False, "exit 130")])
def test_a_stop_that_one_worker_did_not_hear_ends_it_too(rounds: bool, end: str, tmp_path: Path) -> None:
    """Worker 1 has missed the signal, as it may while it starts. Worker 0 is gone: there is no round at whose end they could meet."""
    script = f"""
    if [ "$RANK" = 1 ]; then trap 'touch $FOLDER/told' INT; else trap 'trap - INT; {end}' INT; fi
    touch $FOLDER/ready-$RANK
    while [ ! -e $FOLDER/ready-0 ]; do sleep 0.02; done
    [ "$RANK" = 1 ] && kill -INT $PPID
    while true; do sleep 0.02; done
    """
    code, said = shell(2, script, tmp_path, rounds=rounds)
    assert code == 130
    assert said.startswith("stopping all workers") and ("round" in said) == rounds


def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    script = """
    trap 'touch $FOLDER/told-$RANK' INT
    touch $FOLDER/ready-$RANK
    if [ "$RANK" = 1 ]; then
        while [ ! -e $FOLDER/ready-0 ]; do sleep 0.02; done
        kill -INT $PPID
        while [ ! -e $FOLDER/told-0 ]; do sleep 0.02; done
        kill -INT $PPID
    fi
    while true; do sleep 0.02; done
    """
    assert shell(2, script, tmp_path)[0] == 130


@linux
def test_a_killed_launcher_leaves_no_worker_behind(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/$RANK.part; mv {tmp_path}/$RANK.part {tmp_path}/$RANK; exec sleep 100"
    code = f"from pathlib import Path; from gossamer.net import launch; launch(2, ['sh', '-c', {script!r}], Path({str(tmp_path)!r}))"
    with subprocess.Popen([sys.executable, "-c", code], env={**ENV, "TMPDIR": str(tmp_path)}) as launcher:
        until(lambda: all((tmp_path / str(i)).exists() for i in range(2)))
        launcher.kill()
    pids = [int((tmp_path / str(i)).read_text()) for i in range(2)]
    until(lambda: not any(alive(pid) for pid in pids))


def test_workers_know_their_place_and_all_is_well(tmp_path: Path) -> None:
    code, said = shell(3, 'echo "$RANK $WORLD_SIZE $OMP_NUM_THREADS ${GOSSAMER_STORE:+store}" > $FOLDER/$RANK', tmp_path)
    assert (code, said) == (0, "")
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == [f"{i} 3 1 store\n" for i in range(3)]


def test_bad_input_is_told_once(tmp_path: Path) -> None:
    assert shell(2, "exit 2", tmp_path) == (2, "")  # worker 0 has said it
    code, said = shell(2, '[ "$RANK" = 0 ] && exec sleep 100; echo what is this; exit 2', tmp_path)
    assert code == 2
    assert "worker 1 failed (exit code 2)" in said and "what is this" in said


def test_all_that_have_failed_before_anybody_looks_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets = sys.modules["gossamer.net.launch"]._Fleet
    watch = fleets.watch
    monkeypatch.setattr(fleets, "watch", lambda fleet: (watch(fleet), until(lambda: not fleet.running)))
    code, said = shell(2, "exit 7", tmp_path)
    assert code == 1 and "failed (exit code 7), so the run was ended" in said


def test_only_what_this_run_wrote_is_shown(tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text("of a run before\n")
    code, said = shell(2, '[ "$RANK" = 0 ] || { echo of this run; exit 7; }; exec sleep 100', tmp_path)
    assert code == 1
    assert "worker 1 failed (exit code 7)" in said and "of this run" in said and "of a run before" not in said
    assert "There is no whole checkpoint yet." in said
    assert (tmp_path / "worker-1.log").read_text() == "of a run before\nof this run\n"


@linux
def test_who_does_not_end_is_killed_with_all_it_started(tmp_path: Path) -> None:
    script = """
    [ "$RANK" = 1 ] && { while [ ! -s $FOLDER/0 ]; do sleep 0.05; done; exit 1; }
    trap '' TERM INT
    sleep 100 &
    echo "$$ $!" > $FOLDER/0
    while true; do sleep 0.1; done
    """
    code, said = shell(2, script, tmp_path, grace_s=0.4)
    assert code == 1 and said.startswith("worker 1 failed (exit code 1)")
    pids = [int(p) for p in (tmp_path / "0").read_text().split()]
    until(lambda: not any(alive(pid) for pid in pids))


@linux
def test_a_death_before_all_are_connected_ends_the_run_though_others_would_survive_it(tmp_path: Path) -> None:
    """Worker 0 has waited for worker 1 for ten minutes, beside a message that it goes on."""
    script = '[ "$RANK" = 1 ] && kill -KILL $$; exec sleep 100'
    said: list[str] = []
    begun_s = time.monotonic()
    code = launch(2, ["sh", "-c", script], tmp_path, say=said.append, grace_s=1.0, survives=True)
    assert code == 1 and time.monotonic() - begun_s < 30
    assert said[0].startswith("worker 1 was killed (SIGKILL), so the run was ended.")
