"""A run as people see it: what the coordinator knows, for `gossamer wan status` and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gossamer.wan.roster.records import Member, RunStatus, Session, SiteStatus

if TYPE_CHECKING:
    from gossamer.wan.roster.coordinator import Run


def run_status(run: Run, sessions: Sequence[Session], now_s: float) -> RunStatus:
    """Of a run.

    Args:
        sessions: the last ones, newest first.
    """
    state = run.state
    first = max((run.reports[m.site].round for m in state.living if m.site in run.reports), default=None)
    if first is None and state.ended is not None:  # a coordinator that was started again
        first = state.ended.round
    return RunStatus(
        run=state.spec.run,
        epoch=state.epoch,
        generation=state.generation,
        newest=first,
        sessions=tuple(sessions),
        why=run.why,
        seats=state.spec.seats,
        ended=state.ended,
        sites=tuple(_site_status(run, m, first or 0, now_s) for m in state.members),
        counts=dict(state.counts),
    )


def _site_status(run: Run, member: Member, first: int, now_s: float) -> SiteStatus:
    state, report, last = run.state, run.reports.get(member.site), run.state.session
    standing: str = member.standing
    if state.ended is not None and not member.there and member.seat in state.left:
        standing = "finished"
    elif standing == "in" and last is not None and member.seat not in last.donors and (report is None or report.round < last.round):
        standing = "healing"
    if report is not None and report.exchange_s is not None:
        report = report.model_copy(update={"exchange_s": report.exchange_s + now_s - run.heard_s.get(member.site, now_s)})
    return SiteStatus(
        site=member.site,
        seat=member.seat,
        standing=standing,
        address=member.card.address,
        lease_s=run.leases.left_s(member.site, now_s),
        lag=None if report is None or not member.there else first - report.round,
        report=report,
    )
