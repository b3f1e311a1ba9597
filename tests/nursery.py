"""Processes of the command line that need not load anything: one process has loaded it all, and forks.

    process = nursery().start(log, ["wan", "join", ...], cwd=folder)

Run as a script it is that process. It ends, with all that it has forked, when its standard input does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Started:
    """One process that was forked."""

    def __init__(self) -> None:
        self.pid = 0
        self.code: int | None = None
        """As of subprocess.Popen: negative for a signal."""
        self.begun, self.over = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout_s: float | None = None) -> int:
        assert self.over.wait(timeout_s), f"process {self.pid} has not ended in {timeout_s} s"
        assert self.code is not None
        return self.code

    def send_signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._lock = threading.Lock()
        self._asked: list[Started] = []
        self._by_pid: dict[int, Started] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, log: Path, arguments: list[str], cwd: Path) -> Started:
        """Runs `gossamer ARGUMENTS` with its output added to `log`, and the environment of now."""
        found = Started()
        env = {k: v for k, v in os.environ.items() if k.startswith("GOSSAMER_")}
        line = json.dumps({"log": str(log), "arguments": arguments, "cwd": str(cwd), "env": env}).encode() + b"\n"
        assert self._process.stdin is not None
        with self._lock:
            self._asked.append(found)
            self._process.stdin.write(line)
            self._process.stdin.flush()
        assert found.begun.wait(120), "no process could be forked"
        return found

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, pid, code = line.decode().split()
            if what == "begun":
                found = self._by_pid[int(pid)] = self._asked.pop(0)
                found.pid = int(pid)
                found.begun.set()
            else:
                found = self._by_pid.pop(int(pid))
                found.code = int(code)
                found.over.set()


@cache
def nursery() -> Nursery:
    """The one of this test process."""
    return Nursery()


def _child(asked: dict[str, Any]) -> None:
    with open(asked["log"], "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(asked["cwd"])
    os.environ.update(asked["env"])
    sys.argv = ["gossamer", *asked["arguments"]]
    code = 1
    try:
        from gossamer import cli

        code = cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    from gossamer.app.wan import run  # noqa: F401

    out, children, rest = os.dup(1), set(), b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    os.close(out)
                    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                    _child(json.loads(line))
                children.add(pid)
                os.write(out, f"begun {pid} 0\n".encode())
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            children.discard(pid)
            os.write(out, f"ended {pid} {os.waitstatus_to_exitcode(status)}\n".encode())
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0)


if __name__ == "__main__":
    main()
