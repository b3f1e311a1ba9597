"""Who waits for whom, in words, when nothing can happen any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gossamer.sim.mailbox import in_words
from gossamer.sim.worker import Worker
from gossamer.worker.effects import Addr

_LINES = 8
"""Workers listed."""


def deadlock(workers: Sequence[Worker], now_s: float) -> str:
    """Names who waits for whom: first those who wait for somebody that has finished (a cause), then those of a cycle, then the rest."""
    n = len(workers)
    stuck = {worker.addr: worker for worker in workers if not worker.finished}
    lacking: dict[Addr, list[Addr]] = {}
    for worker in stuck.values():
        gather = worker.gather
        lacking[worker.addr] = [] if gather is None else [j for j in gather.frm if gather.tag * n + j in worker.mail.lacks]
    cycle = _cycle({i: next((j for j in missing if j in stuck), missing[0]) for i, missing in lacking.items() if missing})
    first = sorted(stuck, key=lambda i: (all(j in stuck for j in lacking[i]), i not in cycle, i))
    lines = [_line(stuck[i], lacking[i], stuck) for i in first[:_LINES]]
    if len(stuck) > len(lines):
        lines.append(f"and {len(stuck) - len(lines)} more")
    if cycle:
        shown = [*cycle[:_LINES], "...", cycle[0]] if len(cycle) > _LINES else [*cycle, cycle[0]]
        lines.append("cycle: " + " waits for ".join(map(str, shown)))
    return "\n  ".join(
        [
            f"deadlock at {now_s:.6g} s: {len(stuck)} of {n} workers wait for messages that nobody will send. "
            "Whom a worker hears must be who sends to it, tag by tag.",
            *lines,
        ]
    )


def _line(worker: Worker, lacking: Sequence[Addr], stuck: Collection[Addr]) -> str:
    if worker.gather is None:
        return f"server {worker.addr} waits for anybody's message"
    names = ", ".join(str(j) if j in stuck else f"{j} (finished)" for j in lacking[:4])
    more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
    return f"worker {worker.addr}, in round {worker.round}, lacks {in_words(worker.gather.tag)} from worker {names}{more}"


def _cycle(awaited: Mapping[Addr, Addr]) -> list[Addr]:
    """A cycle of who waits for whom, from its lowest address on; empty when there is none."""
    done: set[Addr] = set()
    for first in awaited:
        path: dict[Addr, None] = {}
        j = first
        while j in awaited and j not in done and j not in path:
            path[j] = None
            j = awaited[j]
        if j in path:
            cycle = list(path)[list(path).index(j) :]
            low = cycle.index(min(cycle))
            return cycle[low:] + cycle[:low]
        done.update(path)
    return []
