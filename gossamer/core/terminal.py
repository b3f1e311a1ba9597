"""Messages for a terminal that other processes write to as well."""

from __future__ import annotations

import os
from typing import TextIO

_OWN_LINE = "\r\x1b[K"
"""To the start of the line, and erase what is on it."""


def redraws(file: TextIO | None) -> bool:
    """Whether what is written there is seen in a terminal in which a line can be drawn anew."""
    return file is not None and file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def own_line(text: str, file: TextIO | None) -> str:
    """A message as a line of its own, with its end, to be written to `file` in one piece: others write whenever they like.

    In a terminal the cursor may stand behind a progress line that another process draws: that copy of it is erased, and the next one
    comes below the message.
    """
    return f"{_OWN_LINE if redraws(file) else ''}{text}\n"
