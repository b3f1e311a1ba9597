"""The one thread of a process that talks to the network: gRPC's asynchronous side wants one event loop."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_S = 0.1
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_kept: set[asyncio.Task[Any]] = set()  # the loop holds its tasks but weakly


def io_loop() -> asyncio.AbstractEventLoop:
    """The event loop, which runs in a thread of its own from the first call to the end of the process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_loop.run_forever, name="gossamer-wan", daemon=True)
            thread.start()
            atexit.register(_stop, _loop, thread)
        return _loop


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(2.0)


def spawn(job: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
    """A task of the event loop that nobody waits for. If it fails, the log says so, and `what` it was to do."""

    def told(task: asyncio.Task[None]) -> None:
        _kept.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s has failed: %s", what, error, exc_info=error)

    task = asyncio.get_running_loop().create_task(job)
    _kept.add(task)
    task.add_done_callback(told)
    return task


def in_loop(job: Coroutine[Any, Any, T], timeout_s: float | None = None, *, check: Callable[[], None] | None = None) -> T:
    """What `job` returns, run in the event loop; for other threads.

    Args:
        check: asked ten times a second meanwhile; what it raises cancels the job.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(job, io_loop())
    if check is not None:
        try:
            while not wait([future], _LOOK_S).done:
                check()
        except BaseException:
            future.cancel()
            raise
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise
