"""Writing beside training: one thing at a time, in a thread, while the next inner steps are taken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Writer:
    """What is given to it is done in the order given. What goes wrong is raised where it is next asked, in the thread that asks.

        with Writer() as writer:
            writer.do(lambda: close(put(staged)))
            ...                                      # inner steps
            writer.check()                           # at the next boundary

    Leaving the block waits for what is under way.

    Args:
        beside: in a thread; otherwise `do` does it.
    """

    def __init__(self, beside: bool = True) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if beside else None
        self._last: Future[None] | None = None

    def do(self, job: Callable[[], None]) -> None:
        """Does `job`, after the one before is done: what two of them hold is held at most.

        Raises:
            RunFailed: the one before failed, and this one is not done.
        """
        self.wait()
        if self._thread is None:
            job()
        else:
            self._last = self._thread.submit(job)

    def check(self) -> None:
        """Raises RunFailed where the last one has failed by now."""
        if self._last is not None and self._last.done():
            self.wait()

    def wait(self) -> None:
        """Until the last one is done.

        Raises:
            RunFailed: it failed.
        """
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:  # else the first failure is the one to tell
                raise
        finally:
            if self._thread is not None:
                self._thread.shutdown()
