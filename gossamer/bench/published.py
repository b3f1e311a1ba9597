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
