"""What the papers report, to set beside ours."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """One row of Shin et al. 2026 (GeoMesh), 150M parameters, C4, target perplexity 30."""

    to_target_h: float | None
    perplexity: float
    straggler_idle: str
    """Of the H100."""
    network_idle: float | None
    """Mean over the workers."""
    total_h: float | None = None
    """Training hours, from the ablation table."""


GEOMESH: dict[str, Published] = {
    "diloco": Published(3.7, 23.0, "20.9 %", 0.658, 12.0),
    "halos": Published(2.0, 25.7, "about 0", 0.104),
    "awb": Published(None, 23.3, "—", None, 7.6),
    "css": Published(None, 23.3, "—", None, 6.5),
    "geomesh": Published(1.1, 23.4, "below 2.6 %", 0.118, 2.8),
    "fp16": Published(None, 23.0, "—", None, 10.0),
    "int8": Published(None, 23.2, "—", None, 8.0),
}


class Pair(NamedTuple):
    """GASLoC's and DAdam's validation loss in nats; None where it is not reported."""

    gasloc: float | None
    dadam: float | None


GASLOC_ONCE: dict[str, Pair] = {
    "ring": Pair(3.36, 3.33),
    "complete": Pair(3.29, 3.25),
    "one_peer": Pair(3.24, 3.29),
    "two_peer": Pair(3.22, 3.28),
}
"""Cagnasso, Belilovsky and Oyallon 2026: 134M parameters, 2.7B tokens, H = 1, 8 workers. DDP: 3.18."""
DDP_ONCE = 3.18
GASLOC_ONCE_SECOND: dict[str, Pair] = {
    "ring": Pair(2.70, 2.73),
    "complete": Pair(None, 2.70),
    "one_peer": Pair(2.71, None),
    "two_peer": Pair(2.69, None),
}
"""551M parameters, 11B tokens, H = 1, 16 workers. DDP: 2.64."""
DDP_ONCE_SECOND = 2.64
GASLOC_MANY: dict[str, tuple[float, float]] = {
    "diloco": (2.64, 2.67),
    "gasloc_ring": (2.68, 2.79),
    "gasloc_one_peer": (2.67, 2.81),
    "gasloc_two_peer": (2.64, 2.72),
    "local_ring": (2.92, 3.07),
    "local_complete": (2.84, 2.97),
}
"""551M parameters, H = 30, 8 and 16 workers."""

ZEROSHOT: dict[str, float] = {"diloco": 37.88, "halos": 37.39, "geomesh": 37.58}
"""Shin et al. 2026: mean zero-shot accuracy in per cent at 150M parameters. Standard errors are not reported."""
