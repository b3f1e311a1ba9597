"""A wide-area run on this machine: a coordinator and sites, each a process of the command line, with certificates."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import free
from small_runs import flags, forked

from gossamer.app.folder import RunFolder
from gossamer.net.fork import Forked
from gossamer.wan.trust import ca
from gossamer.wan.trust.terms import new_secret

SITES = ("lyon", "oslo", "porto", "riga")


class Field:
    """Processes of one run, in a folder of its own."""

    def __init__(self, root: Path, sets: list[str], *, tls: bool = True, beside: tuple[str, ...] = ()) -> None:
        self.root, self.sets, self.tls, self.beside = root, sets, tls, beside
        self.processes: dict[str, Forked] = {}
        root.mkdir(parents=True, exist_ok=True)
        if tls:
            folder = ca.init(root / "ca")
            new_secret(root / "run.secret")
            for site in ("coordinator", *SITES):
                ca.issue(folder, site, ["127.0.0.1"])
        self.port = free()

    def _trust(self, site: str) -> list[str]:
        return ["--identity", str(self.root / "ca" / "sites" / site), "--secret", str(self.root / "run.secret")] if self.tls else []

    def _start(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.processes[name] = forked(self.root / f"{name}.log", ["wan", *arguments], self.root, env)

    def coordinator(self) -> None:
        bind = f"127.0.0.1:{self.port}"
        self._start(
            "coordinator", "coordinator", "--state", str(self.root / "runs.db"), "--bind", bind, *self.beside, *self._trust("coordinator")
        )
        self.says("coordinator", rf"listening at port {self.port}")

    def join(self, *sites: str, more: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> None:
        for site in sites:
            self._start(site, *self._joins(site, more, options))

    def _joins(self, site: str, more: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> list[str]:
        where = ["--site", site, "--coordinator", f"127.0.0.1:{self.port}", "--out", str(self.root / "runs" / site)]
        return ["join", *where, *options, *self._trust(site), *flags([*self.sets, *more])]

    def ranks_join(self, site: str, ranks: int) -> tuple[str, ...]:
        """A site each of whose ranks is started from outside, as torchrun does. What the processes are called here."""
        port = str(free())
        names = (site, *(f"{site}, rank {rank}" for rank in range(1, ranks)))
        for rank, name in enumerate(names):
            env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            self._start(name, *self._joins(site), env=env | {"MASTER_PORT": port})
        return names

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def says(self, name: str, pattern: str, timeout_s: float = 90.0) -> str:
        """Waits until the log has it."""
        until_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.log(name))):
            process = self.processes[name]
            assert process.poll() is None or re.search(pattern, self.log(name)), f"{name} has ended:\n{self.log(name)}"
            assert time.monotonic() < until_s, f"{name} never said {pattern!r}:\n{self.log(name)}"
            time.sleep(0.05)
        return found.group(1) if found.groups() else found.group()

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def ends(self, *names: str, code: int = 0, timeout_s: float = 120.0) -> None:
        """All come to their end with this exit code."""
        for name in names:
            assert self.processes[name].wait(timeout_s) == code, self.log(name)

    def summary(self, site: str) -> dict[str, Any]:
        return json.loads((self.root / "runs" / site / "summary.json").read_text())

    def records(self, site: str, where: Callable[[dict[str, Any]], bool] = lambda r: True) -> list[dict[str, Any]]:
        return [r for r in RunFolder(self.root / "runs" / site).read_lines("metrics.jsonl") if where(r)]

    def losses(self, site: str, seat: int) -> dict[int, float]:
        """Training loss of a seat, by round."""
        return {r["round"]: r["loss"] for r in self.records(site, lambda r: r["kind"] == "round" and r["worker"] == seat)}

    def own(self, site: str) -> list[dict[str, Any]]:
        """Records that a site has written so far (of several ranks, the first)."""
        folders = sorted((self.root / "runs" / site / "workers").glob("*"), key=lambda path: int(path.name))
        return RunFolder(folders[0]).read_lines("metrics.jsonl") if folders else []

    def trains(self, site: str, rounds: int, timeout_s: float = 90.0) -> None:
        """Waits until a site has completed so many rounds more."""
        until_s = time.monotonic() + timeout_s
        first = self._last(site)
        while self._last(site) < first + rounds:
            assert time.monotonic() < until_s and self.processes[site].poll() is None, self.log(site)
            time.sleep(0.05)

    def _last(self, site: str) -> int:
        return max((r["round"] for r in self.own(site) if r["kind"] == "round"), default=0)

    def stops(self, *sites: str) -> None:
        """All are asked to leave, and do."""
        for site in sites:
            self.kill(site, signal.SIGTERM)
        self.ends(*sites, code=128 + signal.SIGTERM)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(30)


@contextmanager
def field(root: Path, sets: list[str], *, tls: bool = True, beside: tuple[str, ...] = ()) -> Iterator[Field]:
    """A coordinator, and room for sites."""
    found = Field(root, sets, tls=tls, beside=beside)
    try:
        found.coordinator()
        yield found
    finally:
        found.close()
