"""Gossamer in somebody's own training loop."""

from __future__ import annotations

from gossamer.library.joining import connect, join
from gossamer.library.outer import Outer
from gossamer.library.records import Closed, Record, Work
from gossamer.library.scheduler import PlannedLR

__all__ = ["Closed", "Outer", "PlannedLR", "Record", "Work", "connect", "join"]
