"""Gossamer: train one model on workers that are far apart, unlike, and rarely in touch.

Importing it is light: nothing heavy (torch, transformers) is loaded until a part that needs it is used.

>>> import gossamer
>>> gossamer.__version__
'0.2.0'
"""

from __future__ import annotations

import importlib
from typing import Any

from gossamer.core.errors import BadInput, RunFailed, Stopped

__all__ = ["BadInput", "PeerLost", "RunFailed", "Stopped", "__version__", "connect", "join", "recipes"]

__version__ = "0.2.0"

_LATER = {"join": "gossamer.library", "connect": "gossamer.library", "PeerLost": "gossamer.real.board"}


def __getattr__(name: str) -> Any:
    """Loads `recipes` (the methods), `join` and `connect` (library use) and `PeerLost` when they are first asked for."""
    if name == "recipes":
        return importlib.import_module("gossamer.recipes")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
