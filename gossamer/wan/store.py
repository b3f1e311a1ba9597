"""The store of a run (see `gossamer.real.wire.Store`), kept by the coordinator.

While the coordinator is away nobody is held up: what is set is kept here and sent when it is back, and a key that cannot be looked up is
not (yet) set. Only `get` of a key that was not seen before waits for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from gossamer.core.errors import RunFailed
from gossamer.wan.calls import Away
from gossamer.wan.client import CoordinatorClient

_KEPT = 4096
"""Values that were seen, kept for `get`: a key is set once."""


class RunStore:
    """Keys of one run, or of a part of it.

    Args:
        prefix: before every key, such as the generation: keys stay when a run begins again.
    """

    def __init__(self, client: CoordinatorClient, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self._seen: OrderedDict[str, str] = OrderedDict()
        self._unsent: OrderedDict[str, str] = OrderedDict()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        client.when_back.append(self._catch_up)

    def set(self, key: str, value: str) -> None:
        """Sets a key; when the coordinator is away, as soon as it is back."""
        name = self._prefix + key
        with self._lock:
            self._unsent[name] = value
            self._keep(name, value)
        self._send()

    def get(self, key: str) -> bytes:
        """The value of a key that is set.

        Raises:
            Away: the coordinator has not answered for as long as it takes sites to connect.
            RunFailed: it is not set.
        """
        name = self._prefix + key
        with self._lock:
            value = self._seen.get(name)
        if value is None:
            found = self._client.get([name], self._client.timeouts.connect)
            if not found.found:
                raise RunFailed(f"key {key} is not set in the store of run {self._client.spec.run}: wait for it first")
            value = found.values[0]
            with self._lock:
                self._keep(name, value)
        return value.encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set, as far as can be known."""
        return self.wait(keys, 0.0)

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys are set, or become so within `timeout_s`. False at once while the coordinator is away."""
        self._send()
        names = [self._prefix + key for key in keys]
        with self._lock:
            missing = [name for name in names if name not in self._seen]
        if not missing:
            return True
        if self._client.away_s is not None:
            return False
        try:
            found = self._client.get(missing, self._client.timeouts.call, wait_s=timeout_s)
        except Away:
            return False
        if found.found:
            with self._lock:
                for name, value in zip(missing, found.values, strict=True):
                    self._keep(name, value)
        return found.found

    def _keep(self, name: str, value: str) -> None:
        self._seen[name] = value
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)

    def _send(self) -> None:
        if self._unsent and self._client.away_s is None:
            self._catch_up()

    def _catch_up(self) -> None:
        """Sends what is unsent, in order. One thread does; the others leave it to that one."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            while True:
                with self._lock:
                    if not self._unsent:
                        return
                    name, value = next(iter(self._unsent.items()))
                try:
                    self._client.set(name, value, self._client.timeouts.call)
                except Away:
                    return
                with self._lock:
                    if self._unsent.get(name) == value:
                        del self._unsent[name]
        finally:
            self._sending.release()
