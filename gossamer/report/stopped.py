"""`stopped.json` of a run folder: the run was stopped by a signal, and can go on."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

STOPPED = "stopped.json"


@dataclass(frozen=True)
class Stop:
    """How a run was left."""

    checkpoint: int | None
    """Round of the last whole one; None: there is none."""
    command: str
    """What goes on with it; the folder follows."""


def stop_of(folder: Path) -> Stop | None:
    """What the folder says; None: nothing, or nothing that can be read."""
    try:
        found = json.loads((folder / STOPPED).read_text(encoding="utf-8"))
        kept = found["checkpoint"]
        return Stop(None if kept is None else int(kept), str(found["command"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def said(stop: Stop, folder: Path, round: int) -> str:
    """In words, for whoever looks.

    Args:
        round: what all workers have completed.

    >>> said(Stop(7, "gossamer simulate --resume"), Path("runs/one"), 7)
    'stopped after round 7; go on with: gossamer simulate --resume runs/one'
    """
    if stop.checkpoint is None:
        return f"stopped after round {round:,}, before its first checkpoint: begin it again, with another --out"
    from_there = "" if stop.checkpoint >= round else f" from the checkpoint of round {stop.checkpoint:,}"
    return f"stopped after round {max(round, stop.checkpoint):,}; go on{from_there} with: {stop.command} {shlex.quote(str(folder))}"
