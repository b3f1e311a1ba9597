"""Sites and a coordinator as real processes of `gossamer wan`, each in a network namespace of its own, over emulated lines.

The emulator is a command that knows

    gen N MBIT ONE_WAY_MS JITTER_MS LOSS_PCT QUEUE_MS    prints a configuration of N nodes: lines `node I NAME ADDRESS MBIT`, with what
                                                         node I may send in all, and lines
                                                         `link I J MBIT ONE_WAY_MS JITTER_MS LOSS_PCT QUEUE_MS`, one for each direction
    up FILE     exec NODE COMMAND...     down            node I is at 10.77.0.(I+1)

Node i is site i, and one more node holds the coordinator. Run as a script this is such a process, which has loaded everything and waits for
its arguments on stdin, so that it comes when it is called.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.wan_link import _CONTROL, why_not
from gossamer.app import fleets

SITES = ("lyon", "oslo", "porto", "riga")
COORDINATOR_PORT, SITE_PORT = 7400, 7001
NOWHERE = "02:00:00:00:00:fe"
"""An address of the link layer that no node has: what is sent there is lost."""
Lines = dict[tuple[int, int], str]


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


@dataclass(frozen=True)
class Wan:
    """Lines between n sites and one coordinator."""

    n: int
    pairs: Mapping[tuple[int, int], tuple[float, float]]
    """(from, to) -> (Mbit/s, one way in ms)."""
    send_mbps: tuple[float, ...]
    """What each site may send in all."""
    queue_ms: float = 200.0
    loss_pct: float = 0.0

    @classmethod
    def of(cls, fleet: str, scale: float, **more: float) -> Wan:
        """The lines of a fleet with one worker a site, all rates divided by `scale`; times of travel stay."""
        found = fleets.load(fleet)
        links = {(i, j): found.link(i, j) for i in range(found.n) for j in range(found.n) if i != j}
        pairs = {at: (link.flow_mbps / scale, link.latency_ms) for at, link in links.items()}
        return cls(found.n, pairs, tuple(found.site(i).up_mbps / scale for i in range(found.n)), **more)

    @classmethod
    def equal(cls, n: int, mbps: float, one_way_ms: float, **more: float) -> Wan:
        """Equal lines."""
        return cls(n, {(i, j): (mbps, one_way_ms) for i in range(n) for j in range(n) if i != j}, (mbps,) * n, **more)

    @classmethod
    def home(cls, n: int, mbps: float, one_way_ms: float, down_mbps: float, up_mbps: float, **more: float) -> Wan:
        """Equal lines, but for the last site: a home, which sends less than it can take."""
        rate = {
            (i, j): up_mbps if i == n - 1 else min(mbps, down_mbps) if j == n - 1 else mbps for i in range(n) for j in range(n) if i != j
        }
        return cls(n, {at: (r, one_way_ms) for at, r in rate.items()}, (*(mbps,) * (n - 1), up_mbps), **more)

    def text(self, gen: str) -> str:
        """The configuration, from one of n + 1 equal nodes."""
        out = []
        for line in gen.splitlines():
            kind, *words = line.split()
            if kind == "node" and int(words[0]) < self.n:
                line = " ".join([kind, *words[:3], f"{self.send_mbps[int(words[0])]:.4f}"])
            elif kind == "link" and (at := (int(words[0]), int(words[1]))) in self.pairs:
                mbps, one_way_ms = self.pairs[at]
                line = f"link {at[0]} {at[1]} {mbps:.4f} {one_way_ms:.3f} 0 {self.loss_pct} {self.queue_ms}"
            out.append(line)
        return "\n".join(out) + "\n"


@contextmanager
def lines(emulator: str, wan: Wan, control: str = "cubic") -> Iterator[None]:
    """The lines are up, with this congestion control at all ends."""
    allowed = _CONTROL.read_text().split()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "lines.cfg"
        numbers = [str(x) for x in (wan.n + 1, 100, 20, 0, 0, 200)]
        config.write_text(wan.text(subprocess.run([emulator, "gen", *numbers], check=True, capture_output=True, text=True).stdout))
        if control not in allowed:  # of namespaces, and only while this runs
            _CONTROL.write_text(" ".join([*allowed, control]))
        try:
            subprocess.run([emulator, "up", str(config)], check=True, stdout=subprocess.DEVNULL)
            try:
                for node in range(wan.n + 1):
                    inside(emulator, node, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={control}")
                yield
            finally:
                subprocess.run([emulator, "down"], check=True, stdout=subprocess.DEVNULL)
        finally:
            _CONTROL.write_text(" ".join(allowed))


def inside(emulator: str, node: int, *argv: str) -> str:
    """What a command says that runs at a node."""
    return subprocess.run([emulator, "exec", str(node), *argv], check=True, capture_output=True, text=True).stdout


def device(emulator: str, node: int) -> str:
    """The node's network device."""
    found = re.search(r"dev (\S+)", inside(emulator, node, "ip", "route", "get", address(node + 1 if node == 0 else 0)))
    assert found is not None
    return found[1]


class Field:
    """Processes of one run, over lines that are up, in a folder of its own."""

    def __init__(self, emulator: str, root: Path, sets: Sequence[str], n: int) -> None:
        from gossamer.wan.trust import ca
        from gossamer.wan.trust.terms import new_secret

        self.emulator, self.root, self.n = emulator, root, n
        self.sets = [f"wan.sites={json.dumps(SITES[:n])}", *sets]
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.watched: list[dict[str, Any]] = []
        """What the coordinator said of the run, about twice a second, with `at_s` of this process's monotonic clock."""
        self._spare: dict[int, list[subprocess.Popen[str]]] = {}
        root.mkdir(parents=True, exist_ok=True)
        folder = ca.init(root / "ca")
        new_secret(root / "run.secret")
        for node, site in enumerate((*SITES[:n], "coordinator")):
            ca.issue(folder, site, [address(node)])

    def __enter__(self) -> Field:
        for node in range(self.n + 1):
            self.spare(node)
        self.coordinator()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in [*self.processes.values(), *(p for spare in self._spare.values() for p in spare)]:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
        if keep := os.environ.get("WAN_KEEP"):  # a folder for what the processes said, to look at afterwards
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(self.root, keep)

    def spare(self, node: int) -> None:
        """A process for later."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        argv = [self.emulator, "exec", str(node), sys.executable, "-m", "bench.wan_field"]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._spare.setdefault(node, []).append(process)

    def start(self, node: int, name: str, **what: Any) -> subprocess.Popen[str]:
        """A process goes to work at a node."""
        if not self._spare.get(node):
            self.spare(node)
        process = self.processes[name] = self._spare[node].pop(0)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()  # it has loaded everything
        process.stdin.write(json.dumps({"log": str(self.root / f"{name}.log"), **what}) + "\n")
        process.stdin.flush()
        return process

    def trust(self, site: str) -> list[str]:
        return ["--identity", str(self.root / "ca" / "sites" / site), "--secret", str(self.root / "run.secret")]

    @property
    def where(self) -> str:
        return f"{address(self.n)}:{COORDINATOR_PORT}"

    def coordinator(self) -> None:
        bind = f"0.0.0.0:{COORDINATOR_PORT}"
        argv = ["wan", "coordinator", "--state", str(self.root / "runs.db"), "--bind", bind, *self.trust("coordinator")]
        self.start(self.n, "coordinator", argv=argv)
        self.says("coordinator", "listening at port")

    def join(self, *sites: str, more: Sequence[str] = ()) -> None:
        for site in sites:
            node = SITES.index(site)
            argv = ["wan", "join", "--site", site, "--coordinator", self.where, "--out", str(self.root / "runs" / site)]
            argv += ["--bind", f"0.0.0.0:{SITE_PORT}", "--advertise", f"{address(node)}:{SITE_PORT}", *self.trust(site)]
            argv += [a for s in [*self.sets, *more] for a in ("--set", s)]
            self.start(node, site, argv=argv)

    def watch(self) -> None:
        """Fills `watched`, from a process beside the coordinator."""
        process = self.start(self.n, "watch", watch=[self.where, *self.trust("coordinator")[1::2]])

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                with suppress(ValueError):
                    self.watched.append({"at_s": time.monotonic(), **json.loads(line)})

        threading.Thread(target=read, daemon=True).start()

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def says(self, name: str, pattern: str, timeout_s: float = 120.0) -> str:
        """Waits until the log has it."""
        until_s = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.log(name))):
            ended = self.processes[name].poll() is not None
            if (ended and not re.search(pattern, self.log(name))) or time.monotonic() > until_s:
                raise RuntimeError(f"{name} {'has ended' if ended else 'is late'}, and never said {pattern!r}:\n{self.log(name)[-3000:]}")
            time.sleep(0.1)
        return found.group()

    def records(self, site: str, kind: str) -> list[dict[str, Any]]:
        """What a site has written so far of its own."""
        path = self.root / "runs" / site / "workers" / str(SITES.index(site)) / "metrics.jsonl"
        out = []
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):
                if (record := json.loads(line))["kind"] == kind:
                    out.append(record)
        return out

    def last_round(self, site: str) -> int:
        return max((r["round"] for r in self.records(site, "round")), default=0)

    def reaches(self, site: str, round: int, timeout_s: float = 300.0) -> None:
        """Waits until a site has completed the round."""
        until_s = time.monotonic() + timeout_s
        while self.last_round(site) < round:
            if time.monotonic() > until_s or self.processes[site].poll() is not None:
                raise RuntimeError(f"{site} never came to round {round}:\n{self.log(site)[-3000:]}")
            time.sleep(0.05)

    def standing(self, site: str) -> str:
        """As the coordinator last said."""
        return str(self.watched[-1]["standing"].get(site, "out")) if self.watched else "out"

    def leave(self, *sites: str, timeout_s: float = 120.0) -> None:
        """They are asked to, and do."""
        for site in sites:
            self.processes[site].send_signal(signal.SIGTERM)
        self.end(*sites, code=128 + signal.SIGTERM, timeout_s=timeout_s)

    def end(self, *sites: str, code: int = 0, timeout_s: float = 600.0) -> None:
        """They come to their end."""
        for site in sites:
            if (got := self.processes[site].wait(timeout_s)) != code:
                raise RuntimeError(f"{site} ended with exit code {got}, expected {code}:\n{self.log(site)[-3000:]}")

    def summary(self, site: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / "runs" / site / "summary.json").read_text())
        return found

    def cut(self, node: int, whole: bool) -> None:
        """All that goes to and from a node is lost (whole False), or arrives again (True). Nobody is told."""
        dev = device(self.emulator, node)
        for other in range(self.n + 1):
            for a, b in ((node, other), (other, node)) if other != node else ():
                if whole:
                    inside(self.emulator, a, "ip", "neigh", "del", address(b), "dev", dev)
                else:
                    inside(self.emulator, a, "ip", "neigh", "replace", address(b), "lladdr", NOWHERE, "dev", dev, "nud", "permanent")

    def memory(self, name: str) -> tuple[float, int]:
        """(MB resident, open files) of a process."""
        pid = self.processes[name].pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def field(emulator: str, wan: Wan, sets: Sequence[str]) -> Iterator[Field]:
    """Lines, coordinator, and room for sites."""
    with tempfile.TemporaryDirectory() as root, lines(emulator, wan), Field(emulator, Path(root), sets, wan.n) as found:
        yield found


def sets_of(**values: object) -> list[str]:
    """`--set` values; dots are written as two underscores, texts are quoted."""
    return [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]


def emulator_of(doc: str | None, *options: tuple[str, Any]) -> argparse.Namespace | None:
    """The arguments of a measurement; None, said aloud: it cannot be made here."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", default=os.environ.get("WAN_EMULATOR"))
    for name, default in options:
        parser.add_argument(name, type=type(default), default=default)
    args = parser.parse_args()
    if why := why_not(args.emulator):
        print(f"skipped: {why}")
        return None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the lines come down
    return args


def watching(where: str, identity: str, secret: str) -> None:
    """Prints what the coordinator says, a JSON object a line."""
    from gossamer.app.wan.ops import _channel
    from gossamer.app.wan.spec import identity_of
    from gossamer.wan.roster.calls import Away, ask_status

    mine = identity_of(Path(identity))
    assert mine is not None
    channel = _channel(where, mine.site, mine, Path(identity), Path(secret))
    while True:
        with suppress(Away):
            for run in ask_status(channel, None).runs:
                leases = {s.site: s.lease_s for s in run.sites}
                standing = {s.site: s.standing for s in run.sites}
                told = {"epoch": run.epoch, "counts": run.counts, "leases": leases, "standing": standing, "newest": run.newest}
                print(json.dumps(told), flush=True)
        time.sleep(0.5)


def main() -> int:
    from gossamer import cli
    from gossamer.app.wan import ops, run  # noqa: F401

    print("here", flush=True)
    said = sys.stdin.readline()
    if not said:
        return 0
    what = json.loads(said)
    with open(what["log"], "ab") as file:
        if "watch" not in what:
            os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if "watch" in what:
        watching(*what["watch"])
    if "torchft" in what:
        from bench import wan_torchft

        return wan_torchft.replica(what["torchft"])
    sys.argv = ["gossamer", *what["argv"]]
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
