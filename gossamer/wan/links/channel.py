"""The streams between two sites while they are connected: one for control, some for payload, each on a TCP connection of its own.

Where one of them breaks, all are given up and a new session begins: what was on its way is told and sent again (see transfer.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from gossamer.wan.links.frames import (
    MAX_ACKS,
    MAX_CHUNK_BYTES,
    MAX_CONTROL_BYTES,
    Beat,
    Bye,
    Control,
    Echo,
    FrameError,
    pack_control,
    unpack_control,
)
from gossamer.wan.links.pacing import CHANNEL_GAIN, PAIR_GAIN, Flight, Pace
from gossamer.wan.loop import spawn
from gossamer.wan.trust.diagnose import plainly
from gossamer.wan.trust.terms import Distrusted

SERVICE = "gossamer.Link"
_BATCH = 256
_WINDOW_BYTES = 1 << 22

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.use_local_subchannel_pool", 1),  # a TCP connection per channel, not one for all with equal options
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES + MAX_CONTROL_BYTES),
    ("grpc.max_send_message_length", MAX_CHUNK_BYTES + MAX_CONTROL_BYTES),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)
SERVER_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES + MAX_CONTROL_BYTES),
    ("grpc.max_send_message_length", MAX_CHUNK_BYTES + MAX_CONTROL_BYTES),
    ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


class Stream(Protocol):
    """One side of a stream, whoever has dialled."""

    def read(self) -> Coroutine[Any, Any, bytes | None]:
        """The next message; None at the end."""

    async def write(self, data: bytes) -> None:
        """Sends a message; returns when there is room for another."""

    def cancel(self) -> None:
        """Ends the stream."""


class Dialled:
    """The side that has dialled."""

    def __init__(self, channel: Any, method: str) -> None:
        self._call = channel.stream_stream(f"/{SERVICE}/{method}")(wait_for_ready=False)

    async def read(self) -> bytes | None:
        with _cancelled():
            data = await self._call.read()
        return data if isinstance(data, bytes) else None

    async def write(self, data: bytes) -> None:
        with _cancelled():
            await self._call.write(data)

    def cancel(self) -> None:
        self._call.cancel()


@contextmanager
def _cancelled() -> Iterator[None]:
    """gRPC raises CancelledError where the stream was cancelled; here that means that the task was."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionError("the stream was cancelled") from None


class Accepted:
    """The side that was dialled."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def read(self) -> bytes | None:
        data = await self._context.read()
        return data if isinstance(data, bytes) else None

    async def write(self, data: bytes) -> None:
        await self._context.write(data)

    def cancel(self) -> None:
        """Nothing: the stream ends as its handler returns."""


class Owner(Protocol):
    """Whose session it is (a Link)."""

    def control(self, frame: Control) -> None:
        """A control frame has come."""

    def chunk(self, data: bytes) -> None:
        """A data frame has come."""

    def heard(self) -> None:
        """Something has come."""

    def next_chunk(self, pace: Pace) -> tuple[int, int, bytes] | float | None:
        """A chunk to send now, or in how many seconds to ask again, or None: nothing now."""

    def acks(self, most: int) -> Control | None:
        """Chunks to acknowledge."""


class Session:
    """One connection of a pair. It ends as a whole, once."""

    def __init__(self, owner: Owner, mark: str, control: Stream, channels: int) -> None:
        self.mark = mark
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it has ended."""
        self.well = False
        """It has ended at the peer's word, so that its connections are good."""
        self.paces = [Pace(CHANNEL_GAIN, 2) for _ in range(channels)]
        self.pace = Pace(PAIR_GAIN, 2 * channels)
        self.control_bytes = [0, 0]
        """Sent, received."""
        self.frame_bytes = [0, 0]
        """Of data frames: sent, received."""
        self._owner = owner
        self._control = control
        self._said: deque[Control] = deque()
        self._flights: dict[tuple[int, int], list[tuple[int, Flight, Flight]]] = {}
        self._work = asyncio.Event()  # there may be a chunk to send
        self._words = asyncio.Event()  # there are control frames to send
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life

    def start(self) -> None:
        """Begins to read and write control frames."""
        self._do(self._read_control())
        self._do(self._write_control())

    def attach(self, k: int, stream: Stream) -> bool:
        """Takes in data channel k; False where it has it, or has no such channel."""
        if k in self._streams or k >= len(self.paces) or self.over.done():
            return False
        self._streams[k] = stream
        self._do(self._read_data(stream))
        self._do(self._write_data(stream, self.paces[k], k))
        return True

    def end(self, why: str) -> None:
        """Ends it, for the first reason given."""
        if not self.over.done():
            self.over.set_result(why)
            self._control.cancel()
            for stream in self._streams.values():
                stream.cancel()
            for task in self._tasks:
                task.cancel()

    def _do(self, job: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await job
                self.well = not self.over.done() or self.well
                self.end("the connection was closed")
            except asyncio.CancelledError:
                self.end("the connection was closed")
            except FrameError as error:
                self.end(f"refused: {error}")
            except grpc.RpcError as error:
                self.end(f"the connection broke ({words(error)})")
            except Exception as error:  # of gRPC, which has several for a stream that has ended
                self.end(f"the connection broke ({type(error).__name__})")

        task = spawn(guarded(), "a stream")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: job.close())  # of one that was cancelled before it had begun

    # ---- control

    def say(self, frame: Control) -> None:
        """Sends a control frame, in order, without waiting."""
        self._said.append(frame)
        self._words.set()

    async def _write_control(self) -> None:
        while True:
            frames: list[Control] = []
            size = 0
            while self._said and len(frames) < _BATCH and size < MAX_CONTROL_BYTES // 4:
                frame = self._said.popleft()
                size += len(getattr(frame, "have", "")) + len(getattr(frame, "body", "")) + len(getattr(frame, "value", ""))
                frames.append(frame)
            if (ack := self._owner.acks(MAX_ACKS)) is not None:
                frames.append(ack)
            if not frames:
                self._words.clear()
                await self._words.wait()
                continue
            data = pack_control(frames)
            self.control_bytes[0] += len(data)
            await self._control.write(data)

    async def _read_control(self) -> None:
        while (data := await self._control.read()) is not None:
            self._owner.heard()
            self.control_bytes[1] += len(data)
            for frame in unpack_control(data):
                if isinstance(frame, Beat):
                    self.say(Echo(number=frame.number))
                    continue
                self.well = self.well or isinstance(frame, Bye)
                self._owner.control(frame)
                if isinstance(frame, Bye):
                    return

    # ---- payload

    def wake(self) -> None:
        """There may be a chunk to send."""
        self._work.set()

    def landed(self, slot: int, index: int) -> None:
        """A chunk was acknowledged."""
        if flights := self._flights.pop((slot, index), None):
            now_s = time.monotonic()
            for k, own, shared in flights:
                self.paces[k].land(own, now_s)
                self.pace.land(shared, now_s)
            self._work.set()

    async def _write_data(self, stream: Stream, pace: Pace, k: int) -> None:
        while True:
            found = self._owner.next_chunk(pace)
            if isinstance(found, float):
                await asyncio.sleep(found)
                continue
            if found is None:
                self._work.clear()
                await self._work.wait()
                continue
            slot, index, data = found
            now_s = time.monotonic()
            flight = k, pace.leave(len(data), now_s), self.pace.leave(len(data), now_s)
            self._flights.setdefault((slot, index), []).append(flight)
            self.frame_bytes[0] += len(data)
            await stream.write(data)

    async def _read_data(self, stream: Stream) -> None:
        while (data := await stream.read()) is not None:
            self._owner.heard()
            self.frame_bytes[1] += len(data)
            self._owner.chunk(data)
            self._words.set()


def words(error: grpc.RpcError) -> str:
    """What gRPC says, shortly."""
    if not isinstance(error, Distrusted) and (said := plainly(str(error.details() or ""))) is not None:
        return said
    first = [*str(error.details() or "").splitlines(), ""][0]
    return f"{error.code().name.lower()}: {first[:200]}".rstrip(": ")
