"""The outer state in the checkpoints of other people's trainers, which are written when those like."""

from __future__ import annotations

import logging
from typing import Any

from gossamer.core.errors import BadInput
from gossamer.library import Outer

_log = logging.getLogger(__name__)


def outer_state(outer: Outer) -> dict[str, Any] | None:
    """What a checkpoint of now has to hold; None, and a warning, in the middle of a round of which something is said already: training goes
    on, but not from that checkpoint."""
    try:
        return outer.state_dict()
    except BadInput as error:
        _log.warning("The last checkpoint has no outer state, and cannot be gone on from: %s", error)
        return None
