"""The names of the methods' own options, and what is said of a name that is none."""

from __future__ import annotations

from collections.abc import Collection

from gossamer.app.wording import nearest
from gossamer.core.errors import BadInput

OPTIONS: dict[str, tuple[str, ...]] = {
    "ddp": ("exchange", "hub"),
    "local_sgd": ("weights", "exchange", "hub"),
    "diloco": (
        "outer_lr", "outer_momentum", "nesterov", "weights", "codec", "exchange", "hub", "overlap", "eager", "fragments", "replan",
        "replan_smoothing", "correction",
    ),
    "streaming_diloco": ("outer_lr", "outer_momentum", "nesterov", "weights", "codec", "exchange", "hub", "fragments", "overlap"),
    "gasloc": (
        "topology", "momentum", "outer", "outer_lr", "outer_momentum", "nesterov", "outer_beta2", "outer_eps", "outer_decay", "alpha",
        "perfect", "admissible", "min_mbps", "codec", "slices", "prefer", "overlap", "average_every", "force",
    ),
    "dadam": ("topology", "alpha", "admissible", "min_mbps", "codec"),
    "local_dadam": ("topology", "alpha", "admissible", "min_mbps", "codec"),
    "geomesh": (
        "outer_lr", "outer_momentum", "weights", "codec", "magnitude", "embeddings", "error_feedback", "exchange", "hub", "overlap",
        "eager", "fragments", "replan", "replan_smoothing", "correction",
    ),
    "noloco": ("outer_lr", "outer_momentum", "force"),
    "sparse_loco": ("outer_lr", "decay", "share", "chunk", "values", "exchange", "hub"),
    "halos": (
        "block", "local_lr", "local_momentum", "local_delay", "global_lr", "global_momentum", "global_delay", "merge", "report_every",
    ),
}  # fmt: skip
"""What the keyword arguments of `gossamer.recipes` are called, repeated here so that a mistyped one is refused before torch is loaded."""


def unknown_option(name: str, title: str, known: Collection[str], reserved: Collection[str] = ()) -> BadInput:
    """That `method.<name>` is no key: with the nearest that is, or with all of them.

    Args:
        title: of the recipe.
        known: its options.
        reserved: arguments that other sections of the configuration fill.
    """
    head = f"unknown key method.{name}: {title} has no such option"
    if name in reserved:
        return BadInput(f"{head}; {name} is set by another section of the configuration")
    near = nearest(name, ["name", *known])
    if near == "name":
        return BadInput(f"{head}; did you mean method.name?")
    return BadInput(
        head + (f"; did you mean {near}?" if near else f"; its options are {', '.join(known)}" if known else "; it has no options")
    )


def check_named(method: str, options: Collection[str]) -> None:
    """Refuses an option that is none, of a method of ours; recipes of one's own are looked at when they are there.

    Raises:
        BadInput: as `unknown_option`.

    >>> check_named("noloco", ["outer_lr"])
    """
    for name in options:
        if method in OPTIONS and name not in OPTIONS[method]:
            raise unknown_option(name, method, OPTIONS[method], reserved=("setting",))
