"""What every real world shares: one worker a process, over whatever wire connects the workers."""

from __future__ import annotations

from gossamer.real.board import PeerLost
from gossamer.real.driver import RealWorld, run
from gossamer.real.group import Group
from gossamer.real.wire import LinkDown, Store, Wire, Work

__all__ = ["Group", "LinkDown", "PeerLost", "RealWorld", "Store", "Wire", "Work", "run"]
