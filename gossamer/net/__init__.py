"""The real world on torch.distributed: one worker per process, on one machine or on one trusted network."""

from __future__ import annotations

from gossamer.net.board import PeerLost
from gossamer.net.driver import C10dWorld, run
from gossamer.net.group import Group, init
from gossamer.net.launch import launch

__all__ = ["C10dWorld", "Group", "PeerLost", "init", "launch", "run"]
