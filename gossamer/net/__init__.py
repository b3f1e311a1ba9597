"""The real world on torch.distributed's gloo: one worker per process, on one machine or on one trusted network."""

from __future__ import annotations

from gossamer.net.launch import launch
from gossamer.net.start import init, over_gloo

__all__ = ["init", "launch", "over_gloo"]
