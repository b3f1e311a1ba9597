"""One function per method. Each returns a composition; the difference of two recipes is the difference of two methods."""

from __future__ import annotations

from collections.abc import Callable

from gossamer.core.method import Method
from gossamer.recipes.gossip import dadam, gasloc, local_dadam, noloco
from gossamer.recipes.setting import Setting
from gossamer.recipes.sync import ddp, diloco, geomesh, local_sgd, sparse_loco, streaming_diloco
from gossamer.recipes.tiers import halos

REGISTRY: dict[str, Callable[..., Method]] = {
    recipe.__name__: recipe
    for recipe in (ddp, local_sgd, diloco, streaming_diloco, geomesh, sparse_loco, gasloc, noloco, dadam, local_dadam, halos)
}
"""Recipes by name: what a configuration's `method.name` may say."""

DEFAULT_PLAN: dict[str, str] = {"geomesh": "proportional"}
"""The plan a method takes when the configuration names none; `uniform` for the others."""

__all__ = ["DEFAULT_PLAN", "REGISTRY", "Setting", *REGISTRY]
