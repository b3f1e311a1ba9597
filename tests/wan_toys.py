"""Sites on this machine, connected by gRPC: in threads, or one in a process of its own; and a line between them that can be cut.

Run as a script it is site 1, which listens nowhere or somewhere and does what it is told: `python wan_toys.py JOB PORT`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gossamer.real import Group, LinkDown, PeerLost
from gossamer.wan.links.wire import Links, LinkSettings, LinkWire, Peer

RUN = "a-run"
QUICK = LinkSettings(beat_s=0.1, silent_s=0.5, patience_s=2.0)


def bytes_like(seed: int, nbytes: int) -> torch.Tensor:
    """Bytes that look like none in particular."""
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=seed)).integers(0, 256, nbytes, dtype=np.uint8))


def empty(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def link_up(sites: list[Links], addresses: dict[int, str] | None = None) -> None:
    """Connects all; `addresses`: where to find a site, if not where it listens."""

    def one(me: Links) -> None:
        where = {s.me: Peer(f"127.0.0.1:{s.port}" if s.port else None) for s in sites if s is not me}
        me.connect(where | {j: Peer(a) for j, a in (addresses or {}).items() if j != me.me}, 30)

    errors: list[BaseException] = []

    def guarded(me: Links) -> None:
        try:
            one(me)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(s,), daemon=True) for s in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextmanager
def two(settings: LinkSettings | None = None, **options: Any) -> Iterator[tuple[Links, Links]]:
    """Two connected sites."""
    sites = [Links(i, 2, RUN, settings=settings, **options) for i in range(2)]
    try:
        link_up(sites)
        yield sites[0], sites[1]
    finally:
        for s in sites:
            s.close()


def in_sites(n: int, job: Callable[[Group], Any], *, timeout_s: float = 90.0, survives: bool = False) -> list[Any]:
    """What `job` returns for each of n sites in threads. The first error that is not the loss of another is raised again."""
    store = dist.HashStore()
    sites = [Links(i, n, RUN) for i in range(n)]
    results: list[Any] = [None] * n
    errors: list[BaseException] = []

    def work(me: Links) -> None:
        try:
            me.connect({s.me: Peer(f"127.0.0.1:{s.port}") for s in sites if s is not me}, 30)
            with Group(store, me.me, n, me.wire, start_timeout_s=30, survives=survives) as group:
                results[me.me] = job(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    hung = any(thread.is_alive() for thread in threads)
    for s in sites:
        s.close()
    if errors:
        errors.sort(key=lambda e: isinstance(e, PeerLost))
        raise errors[0]
    assert not hung, "a site hangs"
    return results


class Line:
    """A TCP line to 127.0.0.1:`port`, at `address`. It can be cut, which ends its connections, and go dark, which only stops them.

    `limit`: so many bytes pass to the far side, and then it is cut, once. `mbps`: what passes forth and back at most, in all connections
    together; what does not pass at once waits in short queues, and then at its sender.
    """

    def __init__(self, port: int, mbps: tuple[float, float] | None = None) -> None:
        self.mbps = mbps
        self._free_s = [0.0, 0.0]
        self._far = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.passed = 0
        self.limit: int | None = None
        self.dark = threading.Event()
        self._over = False
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(self._far)
                except OSError:
                    near.close()
                    raise
                if self.mbps is not None:
                    for end in (near, far):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
                with self._lock:
                    self._sockets += [near, far]
                if self._over:
                    self.cut()
                for a, b, forth in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass, args=(a, b, forth), daemon=True).start()

    def _pass(self, a: socket.socket, b: socket.socket, forth: bool) -> None:
        with suppress(OSError):
            while data := a.recv(1 << 16 if self.mbps is None else 1 << 12):
                if self.mbps is not None:
                    self._take_turn(len(data), forth)
                while self.dark.is_set() and not self._over:
                    time.sleep(0.01)
                b.sendall(data)
                if forth:
                    self.passed += len(data)
                    if self.limit is not None and self.passed > self.limit:
                        self.limit = None
                        self.cut()
        for s in (a, b):
            with suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def _take_turn(self, nbytes: int, forth: bool) -> None:
        assert self.mbps is not None
        way = 0 if forth else 1
        with self._lock:
            until_s = self._free_s[way] = max(time.monotonic(), self._free_s[way]) + 8e-6 * nbytes / self.mbps[way]
        time.sleep(max(0.0, until_s - time.monotonic()))

    def cut(self) -> None:
        """Ends the connections there are."""
        with self._lock:
            for s in self._sockets:
                with suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
                s.close()
            self._sockets.clear()

    def close(self) -> None:
        self._over = True
        self.dark.clear()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()


@contextmanager
def line_between(
    settings: LinkSettings, mbps: tuple[float, float] | None = None
) -> Iterator[tuple[LinkWire, LinkWire, Line, Links, Links]]:
    """Sites 0 and 1, which dials over a line: their data wires, the line, the sites."""
    sites = [Links(i, 2, RUN, settings=settings) for i in range(2)]
    assert sites[0].port is not None
    line = Line(sites[0].port, mbps)
    try:
        link_up(sites, {0: line.address})
        yield sites[0].wire("data"), sites[1].wire("data"), line, sites[0], sites[1]
    finally:
        for s in sites:
            s.close()
        line.close()


# ---- site 1 in a process of its own


@contextmanager
def process(job: str, site: Links) -> Iterator[subprocess.Popen[str]]:
    """Site 1 of `site`'s run."""
    root = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, __file__, job, str(site.port)], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        port = child.stdout.readline().strip()
        site.connect({1: Peer(f"127.0.0.1:{port}" if port != "None" else None)}, 60)
        yield child
    finally:
        child.kill()
        child.communicate()


def main() -> int:
    job, port = sys.argv[1:]
    links = Links(1, 2, RUN, bind=None if job == "dials" else "127.0.0.1:0", settings=QUICK if job == "dials" else None)
    print(links.port, flush=True)
    links.connect({0: Peer(f"127.0.0.1:{port}")}, 60)
    with suppress(LinkDown):
        if job == "leaves":
            links.wire("data").send(bytes_like(1, 100_000), 0, 8)
            links.close(30)
        else:
            links.wire("data").recv(empty(1), 0, 8).wait()  # for ever
    return 0


if __name__ == "__main__":
    sys.exit(main())
