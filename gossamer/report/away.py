"""Who was not there for some rounds, and what the sums of a run leave out for that: as its records know it, and no more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

from gossamer.report.read import Run

LEFT_OUT = "some records are missing"
"""Beside a number."""


def gaps(run: Run) -> dict[int, list[tuple[int, int]]]:
    """For each worker that has records: pairs of rounds of which it has some, and of none in between."""
    done: dict[int, set[int]] = defaultdict(set)
    for r in run.rounds:
        done[r.worker].add(r.round)
    return {i: [(a, b) for a, b in pairwise(sorted(done[i])) if b > a + 1] for i in sorted(done)}


def came_back(run: Run, called: Callable[[int], str]) -> list[str]:
    """Who was gone for some rounds and came back. `called`: a worker's name, in prose."""
    if run.summary["world"] != "wan":
        return [f"{called(i)} died after round {a} and was back in round {b}" for i, found in gaps(run).items() for a, b in found]
    said = []
    for i, found in gaps(run).items():
        for a, b in found:
            if (since := _left_out(run, i, a, b)) is None:
                said.append(f"{called(i)} has no records of rounds {a + 1} to {b - 1}, and was there in round {b}")
            else:
                lost = f" (its records of rounds {a + 1} to {since} are lost)" if since > a else ""
                said.append(f"{called(i)} was away from round {since + 1} on{lost} and back in round {b}")
    return said


def stayed_away(run: Run, called: Callable[[int], str]) -> list[str]:
    """Who was gone at the end."""
    said = []
    for i in run.summary.get("dead") or ():
        last = max((r.round for r in run.rounds if r.worker == i), default=0)
        if run.summary["world"] != "wan":
            said.append(f"{called(i)} died after round {last}")
        elif (since := _left_out(run, i, last, None)) is None:
            said.append(f"{called(i)} was not there at the end")
        else:
            said.append(f"{called(i)} was away from round {since + 1} on")
    return said


def tokens_left_out(run: Run) -> bool:
    """Whether the sum of tokens lacks rounds that were trained, or may have been: their records are lost, or at a site that has gone."""
    if run.summary["world"] != "wan" or not run.finished:
        return False
    lost = any(_left_out(run, i, a, b) != a for i, found in gaps(run).items() for a, b in found)
    return lost or bool(run.summary.get("without_records"))


def time_left_out(run: Run) -> bool:
    """Whether the total time, the longest of all workers', lacks something: no worker has records of all rounds, and some are lost. Not
    known, and so not said, in a folder without the records of all who were there at the end."""
    first, found = min((r.round for r in run.rounds), default=1), gaps(run)
    there = set(range(run.workers)) - set(run.summary.get("dead") or ())
    if not tokens_left_out(run) or there - set(found):
        return False
    reach = {i: {r.round for r in run.rounds if r.worker == i} for i in found}
    rounds = set(range(first, int(run.summary["rounds"]) + 1))
    return not any(rounds <= reach[i] for i in found)


def _left_out(run: Run, worker: int, after: int, before: int | None) -> int | None:
    """The round after which the others went on without a worker that has records up to `after`, and again from `before` on. None: it is
    not known."""
    since = None
    for one in sorted(run.members, key=lambda one: one.round):
        if one.round < after or (before is not None and one.round >= before - 1):  # that is where it comes back
            continue
        if worker not in one.absent:
            since = None
        elif since is None:
            since = one.round
    return since
