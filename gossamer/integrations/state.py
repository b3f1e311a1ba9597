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


def say_if_over(outer: Outer) -> None:
    """That a run which is gone on with has come to its end before."""
    if outer.over:
        _log.warning(
            "The run had come to its end after round %d when this checkpoint was written: nothing is trained, and a step that the trainer "
            "takes is dropped. For more rounds join for another run with the model as it is",
            outer.work.round,
        )
