"""One rank of a real run in tests: trains several methods one after the other; the first seat writes what all workers ended with.

Run as a script: `python site_worker.py WIRE FOLDER CONFIGURATION...`, with WIRE gloo or grpc, which connects the workers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gossamer.app.collect import everybody
from gossamer.app.config import load
from gossamer.app.job import resolve
from gossamer.core.tree import master, sha256
from gossamer.net import init
from gossamer.net.gloo import c10d
from gossamer.net.site import site_of
from gossamer.net.start import STORE_ENV
from gossamer.real import Group, run
from gossamer.real.seats import Seats
from gossamer.train.data import Sampler
from gossamer.worker.peer import peer
from gossamer.worker.ranks import among_ranks


class Heard:
    """Hooks that keep the losses and what each rank of a worker says of the others."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, object]] = []

    def boundary(self, *args: object) -> object:
        from gossamer.worker.effects import Go

        return Go()

    def note(self, record: dict[str, object]) -> None:
        if record["kind"] == "round":
            self.rounds.append({k: record.get(k) for k in ("loss", "tokens", "weights", "drift_norm", "sketch", "bytes_sent")})

    def span(self, *args: object) -> None: ...


@contextmanager
def over_grpc(seats: Seats) -> Iterator[Group]:
    """All ranks of all workers, each with connections of its own; within a worker torch.distributed, as ever."""
    from gossamer.wan.links.wire import Links, Peer

    me, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = c10d.FileStore(os.environ[STORE_ENV], n)
    links = Links(me, n, "a-run")
    store.set(f"port/{me}", str(links.port))
    try:
        links.connect({j: Peer(f"127.0.0.1:{store.get(f'port/{j}').decode()}") for j in range(n) if j != me}, 60)
        with Group(store, me, n, links.wire, seats=seats, site=lambda: site_of(store, seats, me, local=True)) as group:
            yield group
    finally:
        links.close()


def main(wire: str, out: Path, configs: list[Path]) -> None:
    """Runs each configuration and writes <configuration>.json, and what each seat noted."""
    torch.set_num_threads(1)
    jobs = {path.stem: resolve(load([path])) for path in configs}
    ranges = next(iter(jobs.values())).ranges
    assert ranges is not None
    seats = Seats(ranges.workers)
    with init(seats=seats) if wire == "gloo" else over_grpc(seats) as group:
        for name, job in jobs.items():
            seat, site, corpus = job.rank_seat(group.me), group.site, job.corpus()
            ranks = site if site.size > 1 else None
            body = job.body(seat.me, corpus, None, ranks)
            assert isinstance(body.batches, Sampler)
            judge = job.judge(corpus, ranks)
            hooks = Heard()
            state = job.first_state(seat.me, master(body.tree), seat)
            first = judge(state.x)
            state, _ = run(among_ranks(seat, peer(seat, state)), body, hooks, group)
            losses = [first, judge(state.x), judge(state.x)]
            (out / f"{name}-{group.me}.json").write_text(json.dumps({"rounds": hooks.rounds, "losses": losses}))
            if (trees := everybody(job, group, state, 0)) is not None:
                torch.save(trees, out / f"{name}.pt")
                shas = [sha256(trees[w]) for w in range(job.n)]
                whole = job.judge(corpus)
                (out / f"{name}.json").write_text(json.dumps({"sha256": shas, "losses": [whole(trees[w]) for w in range(job.n)]}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(a) for a in sys.argv[3:]])
