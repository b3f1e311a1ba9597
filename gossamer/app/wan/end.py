"""The end of a wide-area run: one site makes the summary, of everybody's records and parameters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence

from gossamer.app.collect import STREAMS, everybody, merge
from gossamer.app.folder import RunFolder
from gossamer.app.job import Job
from gossamer.app.served import servers_of
from gossamer.app.simulate import write_result
from gossamer.app.wan.hooks import SiteHooks
from gossamer.core.tree import Tree
from gossamer.real.group import Group
from gossamer.train import weights
from gossamer.worker.server import ServerGone
from gossamer.worker.state import State


def conclude(
    job: Job,
    group: Group,
    folder: RunFolder,
    hooks: SiteHooks,
    state: State,
    missing: Callable[[list[int]], None],
    made: Callable[[], None],
    names: Sequence[str],
) -> bool:
    """Everybody's records and parameters at the lowest living site, which writes the result and tells all.

    Args:
        missing: told who is not there at the end.
        made: called where this site has written the result.
        names: of the workers.

    Returns:
        Whether this site made the summary.

    Raises:
        RunFailed: a site is gone (synchronous methods: the others do this again, in a session without it).
    """
    hooks.close()
    mine = False

    def write(trees: dict[int, Tree], streams: list[dict[str, bytes]]) -> str:
        nonlocal mine
        mine = True
        for name in STREAMS:
            merge(folder, name, [one[name] for one in streams if name in one])
        gone = [j for j in range(job.n) if j not in (group.living if job.servers else trees)]
        write_result(job, "wan", folder, trees, hooks.judge, dead=gone, without_records=gone, names=names)
        if gone:
            missing(gone)
        made()
        return (folder.path / "summary.json").read_text()

    servers = [j for j in servers_of(job) if j not in group.members]  # those that are there speak for themselves
    summary = finish(job, group, {name: hooks.own(name, servers) for name in STREAMS}, state, write)
    if not mine:
        for name in STREAMS:
            merge(folder, name, [hooks.own(name, servers_of(job))])
        found = json.loads(summary)
        if job.method.synchronous and job.ranges is None and not job.servers:  # the model of the run, here too
            weights.write(folder.path, weights.Weights(state.x, job.method.rounds, found["tokens"], (hooks.me,)))
        folder.write_summary(found)
    return mine


def finish(
    job: Job,
    group: Group,
    own: Mapping[str, bytes],
    state: State,
    conclude: Callable[[dict[int, Tree], list[dict[str, bytes]]], str],
) -> str:
    """The end: everybody's records (`own`) and parameters at the lowest living site, which makes the summary of them (`conclude`) and tells
    it. Of servers the global one hands over the model.

    Returns:
        The summary; empty: only servers are left, which make none.

    Raises:
        RunFailed: a site is gone (synchronous methods: the others do this again, in a session without it).
    """
    attempt = 0
    while (to := group.living[0]) not in servers_of(job):
        done = f"summary/{attempt}"
        told = {name: group.gather_bytes(own[name], to) for name in STREAMS}
        found = everybody(job, group, state, to)
        if found is not None:
            if job.servers and not found:
                raise ServerGone("the global server is gone, and with it the model of the run")
            streams: list[dict[str, bytes]] = [{name: data} for name in STREAMS for data in told[name] or ()]
            summary = conclude(found, streams)
            group.post(done, summary)
            return summary
        while (said := group.posted([done])) is None and group.living[0] == to:
            group.board.check()
            time.sleep(0.02)
        if said is not None:
            return said[0]
        attempt += 1
    return ""
