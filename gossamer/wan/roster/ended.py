"""The end of a run, as the coordinator learns and tells it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import StringConstraints

from gossamer.wan.roster.messages import Name, Record, Round

OVER = "over "
"""How the plan begins that the site with the summary publishes when it has all; its name follows."""


AT = "--coordinator HOST:PORT"
"""In advice of a coordinator, which does not know where others reach it. Who shows the advice may (`gossamer.app.wan.waiting.advice`)."""


class Ended(Record):
    """A run that has come to its end."""

    site: Name
    """Which has the summary."""
    round: Round
    at: Annotated[str, StringConstraints(pattern=r"^[0-9: -]{16,19}$")]
    """UTC, as the coordinator's clock had it; for people alone."""


def ended(site: str, body: str, round: int) -> Ended | None:
    """What a plan of `site` says of the end of the run; None: it is another plan."""
    if not body.startswith(OVER):
        return None
    return Ended(site=site, round=round, at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))


def to_forget(run: str, site: str | None = None) -> str:
    """The command that has a run forgotten, or a site of it.

    >>> to_forget("first"), to_forget("first", "SITE")
    ('gossamer wan forget first --coordinator HOST:PORT', 'gossamer wan forget first --site SITE --coordinator HOST:PORT')
    """
    return f"gossamer wan forget {run}{'' if site is None else f' --site {site}'} {AT}"


def is_over(run: str, site: str) -> str:
    """For who comes too late: `site` has the summary."""
    return (
        f"run {run} is over: its summary is at site {site}. For another run give it its own id: --set wan.run=NAME, or forget the old one: "
        f"{to_forget(run)}"
    )
