"""The store of a group (see `gossamer.real.wire.Store`), held by the sites themselves.

What a site sets it tells all others over their control streams, and everything again in each new session, so that a broken connection loses
nothing. Nobody else is needed: a group over the internet starts, compares and ends without the coordinator.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from gossamer.core.errors import RunFailed
from gossamer.wan.links.frames import Control, FrameError, Posted
from gossamer.wan.loop import io_loop

MAX_KEYS = 4096
"""Of one site."""


class PeerStore:
    """Keys of one group, as one site knows them. A key is set once; what came first counts."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.push: Callable[[Control], None] = lambda frame: None
        """Says a frame to all peers; called in the event loop."""
        self._mine: dict[str, Posted] = {}
        self._values: dict[str, str] = {}
        self._counts: Counter[int] = Counter()
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Sets a key, and tells everybody.

        Raises:
            RunFailed: one site sets too many.
        """
        frame = Posted(key=key, value=value)
        with self._lock:
            if len(self._mine) >= MAX_KEYS:
                raise RunFailed(f"site {self.me} has set {MAX_KEYS} keys in the store of its group: no more fit")
            self._mine[key] = frame
            self._values.setdefault(key, value)
        io_loop().call_soon_threadsafe(self.push, frame)

    def get(self, key: str) -> bytes:
        """The value of a key that is set.

        Raises:
            RunFailed: it is not.
        """
        with self._lock:
            if key not in self._values:
                raise RunFailed(f"key {key} is not set in the store of the group: wait for it first")
            return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set, as far as this site has heard."""
        with self._lock:
            return all(key in self._values for key in keys)

    # ---- for links, in the event loop

    def tell(self, say: Callable[[Control], None]) -> None:
        """Tells a peer all that this site has set."""
        with self._lock:
            frames = list(self._mine.values())
        for frame in frames:
            say(frame)

    def heard(self, src: int, frame: Posted) -> None:
        """A peer has set a key.

        Raises:
            FrameError: it sets more than a site may.
        """
        with self._lock:
            if frame.key in self._values:
                return
            if self._counts[src] >= MAX_KEYS:
                raise FrameError(f"more than {MAX_KEYS} keys")
            self._counts[src] += 1
            self._values[frame.key] = frame.value
