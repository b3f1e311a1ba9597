"""Gossamer: train one model on workers that are far apart, unlike, and rarely in touch.

Importing it is light: nothing heavy (torch, transformers) is loaded until a part that needs it is used.

>>> import gossamer
>>> gossamer.__version__
'0.1.0'
"""

from __future__ import annotations

import importlib
from types import ModuleType

from gossamer.core.errors import BadInput, RunFailed, Stopped

__all__ = ["BadInput", "RunFailed", "Stopped", "__version__", "recipes"]

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Loads `gossamer.recipes`, the methods, when it is first asked for."""
    if name == "recipes":
        return importlib.import_module("gossamer.recipes")
    raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
