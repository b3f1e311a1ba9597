"""Ctrl-C and SIGTERM, asked for politely, and processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handling(handler: Callable[[int], None]) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM call `handler` with their number. Only the main thread may take signals: in another one
    the block just runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, lambda number, frame: handler(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, previous in before.items():
            signal.signal(s, previous)


def end_with_parent() -> None:
    """This process is killed when the one that started it ends, however that happens (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
