"""How much payload may be on its way, so that a line is full and its queue is not.

Each data channel measures the rate at which its chunks are acknowledged, takes the highest of the last seconds, and keeps at most
2 * rate * round trip in flight, and two chunks. A channel that TCP has throttled after a loss measures less and takes less, so its
share goes to the others. The channels of a pair together keep at most 2 * rate * round trip in flight, and two chunks each: what
waits in the network's queue, where control frames wait too, stays about one such product. And they draw on one token bucket, filled at a
little more than their rate.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

CHANNEL_GAIN, PAIR_GAIN = 2.0, 2.0
_BURST_GAIN = 1.25
_KEPT_S = 3.0
_LEAST_BYTES, _MOST_BYTES = 1 << 18, 1 << 24
_FIRST_RTT_S = 0.1
_CHUNK_S = 0.01
_LEAST_WAIT_S = 0.001


class Flight(NamedTuple):
    """A chunk on its way."""

    nbytes: int
    delivered: int
    """Bytes that the channel had delivered when the chunk left."""
    since_s: float
    """When the last of those had been acknowledged."""
    sent_s: float
    before_s: float
    """When the one acknowledged last had left."""


class Highest:
    """The highest value of the last `kept_s` seconds.

    >>> top = Highest(2.0)
    >>> [top.add(t, v) for t, v in ((0.0, 5.0), (1.0, 3.0), (2.5, 2.0))]
    [5.0, 5.0, 3.0]
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._values: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, value: float) -> float:
        """Adds a value; the highest."""
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now_s, value))
        while len(self._values) > 1 and self._values[0][0] < now_s - self._kept_s:
            self._values.popleft()
        return self.value

    @property
    def value(self) -> float:
        """The highest; 0 where there is none."""
        return self._values[0][1] if self._values else 0.0


class Pace:
    """What one channel, or all channels of a pair together, may have in flight: gain * rate * round trip, and so many chunks."""

    def __init__(self, gain: float, chunks: int) -> None:
        self._gain, self._chunks = gain, chunks
        self.flying_bytes = 0
        self._delivered = 0
        self._at_s = self._left_s = 0.0
        self._rate = Highest(_KEPT_S)

    @property
    def rate_bytes_s(self) -> float:
        """The highest rate measured in the last seconds of sending; 0: none yet."""
        return self._rate.value

    def room(self, chunk_bytes: int, rtt_s: float | None) -> bool:
        """Whether one more chunk may leave."""
        window = self._gain * self.rate_bytes_s * (rtt_s or _FIRST_RTT_S) + self._chunks * chunk_bytes
        least = self._chunks * _LEAST_BYTES // 2 if not self.rate_bytes_s else 0
        return self.flying_bytes < min(max(window, least), self._chunks * _MOST_BYTES // 2)

    def leave(self, nbytes: int, now_s: float) -> Flight:
        """A chunk leaves."""
        if not self.flying_bytes:
            self._at_s = self._left_s = now_s
        self.flying_bytes += nbytes
        return Flight(nbytes, self._delivered, self._at_s, now_s, self._left_s)

    def land(self, flight: Flight, now_s: float) -> None:
        """It is acknowledged. The rate since it left is taken over the longer of the times that sending and acknowledging took, so that
        acknowledgements that come in a heap do not look like a fast line."""
        self.flying_bytes -= flight.nbytes
        self._delivered += flight.nbytes
        self._at_s, self._left_s = now_s, flight.sent_s
        took_s = max(now_s - flight.since_s, flight.sent_s - flight.before_s)
        if took_s > 0:
            self._rate.add(now_s, (self._delivered - flight.delivered) / took_s)


class Bucket:
    """Tokens for the payload of a pair.

    Args:
        most_bytes_s: a rate that may not be exceeded, or None.
    """

    def __init__(self, most_bytes_s: float | None) -> None:
        self._most = most_bytes_s
        self._tokens = 0.0
        self._at_s: float | None = None

    def wait_s(self, now_s: float, measured_bytes_s: float, chunk_bytes: int) -> float:
        """How long until the next chunk may leave; 0: now."""
        rate = min(_BURST_GAIN * measured_bytes_s or float("inf"), self._most or float("inf"))
        if rate == float("inf"):
            return 0.0
        burst = max(4 * chunk_bytes, 0.02 * rate)
        past_s = now_s - self._at_s if self._at_s is not None else 0.0
        self._tokens = min(burst, self._tokens + rate * past_s) if self._at_s is not None else burst
        self._at_s = now_s
        return 0.0 if self._tokens >= 0 else max(-self._tokens / rate, _LEAST_WAIT_S)

    def spend(self, nbytes: int) -> None:
        """A chunk leaves."""
        self._tokens -= nbytes


def chunk_for(channel_bytes_s: float, least: int, most: int) -> int:
    """The size of chunks that take about 10 ms on a channel of this rate, a power of two; 64 KiB where the rate is not known.

    >>> chunk_for(0, 1 << 14, 1 << 18), chunk_for(312_500, 1 << 14, 1 << 18), chunk_for(1e9, 1 << 14, 1 << 18)
    (65536, 16384, 262144)
    """
    wanted = channel_bytes_s * _CHUNK_S or 1 << 16
    size = least
    while size * 2 <= most and size * 1.5 < wanted:
        size *= 2
    return size
