"""The process that has loaded what all workers load, and forks them: `python -m gossamer.net.nursery SOCKET MODULE ...`.

It is started and spoken to by `gossamer.net.fork`, over a pair of sockets that keep messages apart. A message to it comes with three open
files: what to become, as JSON, and the outputs. It answers `begun PID` and, when that process is over, `ended PID CODE`. It ends when the
other side does, and the kernel ends what it has forked when it does.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from gossamer.real.signals import end_with_parent

MESSAGE_BYTES = 1024


def serve(calls: socket.socket) -> dict[str, Any]:
    """Forks what is asked for. Returns in the forked process, with what it is to become; the forking one ends here."""
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([calls.fileno(), wake], [], [])
        if wake in ready:
            with suppress(BlockingIOError):
                while os.read(wake, 512):
                    pass
            for pid, code in _ended():
                calls.send(f"ended {pid} {code}".encode())
        if calls.fileno() in ready:
            message, files, _, _ = socket.recv_fds(calls, MESSAGE_BYTES, 3)
            if not message:
                os._exit(0)
            me = os.getpid()
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (calls.detach(), wake, woken):
                    os.close(each)
                return _begin(me, files)
            with suppress(OSError):  # it has been quicker
                os.setpgid(pid, pid)
            calls.send(f"begun {pid}".encode())
            for file in files:
                os.close(file)


def _ended() -> list[tuple[int, int]]:
    found = []
    with suppress(ChildProcessError):
        while (status := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((status[0], os.waitstatus_to_exitcode(status[1])))
    return found


def _begin(parent: int, files: list[int]) -> dict[str, Any]:
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)  # what is meant for it and all that it starts goes to its group
    request, out, err = files
    with os.fdopen(request, "rb") as file:
        file.seek(0)
        found: dict[str, Any] = json.loads(file.read())
    nothing = os.open(os.devnull, os.O_RDONLY)
    for here, to in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(here, to)
        os.close(here)
    return found


def become(found: dict[str, Any]) -> None:
    """What `python -m` would be."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(found["name"])  # as `ps -o comm` and `top` show it
    os.chdir(found["cwd"])
    os.environ.clear()
    os.environ.update(found["env"])
    sys.path[:] = found["path"]
    sys.argv = found["arguments"]
    for stream in (sys.stdout, sys.stderr):  # as opened for this process's own outputs
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """Until the other side ends; or, in a process that was forked, its whole life."""
    calls = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        with suppress(Exception):  # whoever needs it will say what is wrong with it, in the right place
            importlib.import_module(module)
    become(serve(calls))


if __name__ == "__main__":
    main()
