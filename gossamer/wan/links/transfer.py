"""The two ends of the messages between one pair of sites, without any input or output: what to send next, and what to do with what comes.

Who receives counts its receives per sender in *slots* and grants each as it is posted; who sends fills the oldest grant of a tag with its
oldest message of that tag. So nothing travels before its place is there, and a message is known by (sender, tag, slot) whatever happens to
the connection: after a break the receiver tells its open slots and the chunks that it has, and the sender goes on with the rest. A chunk
that comes twice is taken once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from hashlib import sha256

from torch import Tensor

from gossamer.real.wire import LinkDown
from gossamer.wan.links.frames import (
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MIN_CHUNK_BYTES,
    Ack,
    Control,
    DataHeader,
    End,
    Finished,
    FrameError,
    Grant,
    Mismatch,
    Sync,
    Synced,
    pack_chunk,
    run_mark,
)

MAX_OPEN = 1 << 16
"""Receives that one peer may have posted and not filled."""
_TRIES = 3
"""So often a message may come with another digest than declared."""


class Op:
    """One send or receive, as its caller sees it (a Work)."""

    __slots__ = ("_done", "_why", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        """Kept until the end of the operation."""
        self._done = threading.Event()
        self._why: str | None = None

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            LinkDown: it will not come.
        """
        self._done.wait()
        if self._why is not None:
            raise LinkDown(self._why)

    def end(self, why: str | None = None) -> None:
        """The operation has ended: well, or for this reason."""
        if not self._done.is_set():
            self._why, self.tensor = why, None
            self._done.set()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a uint8 tensor, contiguous and on the CPU; no copy."""
    return memoryview(tensor.detach().view(-1).numpy())  # type: ignore[arg-type]  # numpy's stubs know no buffer before 3.12


class _Out:
    """A message that is being sent."""

    __slots__ = ("again", "chunk", "digests", "flying", "fresh", "have", "op", "size", "slot", "tag", "undigested", "view")

    def __init__(self, op: Op, tag: int, view: memoryview) -> None:
        self.op, self.tag, self.view, self.size = op, tag, view, len(view)
        self.slot = -1
        self.chunk = 0
        self.fresh = 0
        """The first chunk that was never sent."""
        self.again: deque[int] = deque()
        self.flying: set[int] = set()

    def start(self, slot: int, chunk: int) -> None:
        self.slot, self.chunk = slot, chunk
        self.undigested = -(-self.size // chunk)
        self.have = bytearray(self.undigested)
        self.digests = bytearray(32 * self.undigested)

    def due(self) -> bool:
        return bool(self.again) or self.fresh < len(self.have)


class Outbox:
    """What one site sends to one peer.

    Args:
        say: sends a control frame to the peer; lost while there is no connection.
        chunk_bytes: the size of chunks to cut a message into now.
    """

    def __init__(self, run: str, me: int, say: Callable[[Control], None], chunk_bytes: Callable[[], int]) -> None:
        self._mark, self._me, self._say, self._chunk_bytes = run_mark(run, me), me, say, chunk_bytes
        self._waiting: dict[int, deque[_Out]] = {}  # by tag: no grant yet
        self._grants: dict[int, deque[tuple[int, int]]] = {}  # by tag: (slot, size), no message yet
        self._granted: set[int] = set()  # their slots
        self._open: dict[int, _Out] = {}  # by slot
        self._due: deque[_Out] = deque()
        self._refused: dict[int, int] = {}  # slot -> size of a message that did not fit
        self._next = 0  # slots below have been granted
        self._doubted: set[int] | None = None  # not told of yet, since Sync
        self.resent_bytes = 0

    @property
    def busy(self) -> bool:
        """Some message has not arrived whole."""
        return bool(self._open or self._waiting)

    @property
    def ready(self) -> bool:
        """There is a chunk to send."""
        return bool(self._due)

    def post(self, op: Op, tag: int, view: memoryview) -> None:
        """A message to send."""
        self._waiting.setdefault(tag, deque()).append(_Out(op, tag, view))
        self._match(tag)

    def sync(self) -> None:
        """The peer begins to tell its open slots."""
        self._doubted = set(self._open)

    def synced(self) -> None:
        """It has told them all: what it did not tell has arrived."""
        for slot in self._doubted or ():
            self.finished(slot)
        self._doubted = None

    def granted(self, grant: Grant) -> None:
        """A receive is posted, or told of again."""
        slot = grant.slot
        if self._doubted is not None:
            self._doubted.discard(slot)
        if slot in self._open:
            self._resume(self._open[slot], grant)
        elif slot in self._refused:
            self._say(Mismatch(slot=slot, size=self._refused[slot]))
        elif slot >= self._next:
            if len(self._granted) >= MAX_OPEN:
                raise FrameError(f"more than {MAX_OPEN} receives are posted")
            self._next = slot + 1
            self._granted.add(slot)
            self._grants.setdefault(grant.tag, deque()).append((slot, grant.size))
            self._match(grant.tag)
        elif slot not in self._granted:
            raise FrameError("a receive is granted that is over")

    def _match(self, tag: int) -> None:
        waiting, grants = self._waiting.get(tag), self._grants.get(tag)
        while waiting and grants:
            out, (slot, size) = waiting.popleft(), grants.popleft()
            self._granted.discard(slot)
            if out.size != size:
                self._refused[slot] = out.size
                self._say(Mismatch(slot=slot, size=out.size))
                out.op.end(f"a message of {out.size} bytes was sent where {size} were awaited (tag {tag})")
                continue
            chunk = min(max(self._chunk_bytes(), MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
            while size > chunk * MAX_CHUNKS and chunk < MAX_CHUNK_BYTES:
                chunk *= 2
            out.start(slot, chunk)
            self._open[slot] = out
            if out.due():
                self._due.append(out)
            else:
                self._close(out)
        if waiting is not None and not waiting:
            del self._waiting[tag]
        if grants is not None and not grants:
            del self._grants[tag]

    def _resume(self, out: _Out, grant: Grant) -> None:
        """Goes on with what the peer lacks."""
        n = len(out.have)
        bits = bytes.fromhex(grant.have)
        if grant.size != out.size or (bits and (grant.chunk_bytes != out.chunk or len(bits) != -(-n // 8))):
            raise FrameError("a receive is told of again, with other sizes")
        before = out.fresh
        for i in range(n):
            out.have[i] = bits[i // 8] >> i % 8 & 1 if bits else 0
        out.again = deque(i for i in range(before) if not out.have[i] and i not in out.flying)
        if out.due() and out not in self._due:
            self._due.append(out)
        if not out.undigested:
            self._close(out)

    def take(self) -> tuple[int, int, bytes] | None:
        """The next chunk to send: slot, index, frame."""
        while self._due:
            out = self._due[0]
            if out.again:
                i = out.again.popleft()
                if out.have[i]:
                    continue
                self.resent_bytes += min(out.chunk, out.size - i * out.chunk)
            elif out.fresh < len(out.have):
                i = out.fresh
                out.fresh += 1
            else:
                self._due.popleft()
                continue
            out.flying.add(i)
            payload = out.view[i * out.chunk : (i + 1) * out.chunk]
            frame = pack_chunk(DataHeader(self._mark, self._me, out.tag, out.chunk, out.slot, i * out.chunk, out.size), payload)
            if not any(out.digests[32 * i : 32 * i + 32]):
                out.digests[32 * i : 32 * i + 32] = sha256(payload).digest()
                out.undigested -= 1
                if not out.undigested:
                    self._close(out)
            return out.slot, i, frame
        return None

    def _close(self, out: _Out) -> None:
        self._say(End(slot=out.slot, sha256=sha256(out.digests).hexdigest()))

    def acked(self, slot: int, index: int) -> None:
        """A chunk has come."""
        out = self._open.get(slot)
        if out is None:
            return
        if index >= len(out.have):
            raise FrameError("a chunk is acknowledged that there is not")
        out.flying.discard(index)
        out.have[index] = 1

    def finished(self, slot: int) -> None:
        """A message has come whole."""
        out = self._open.pop(slot, None)
        if out is not None:
            if out in self._due:
                self._due.remove(out)
            out.op.end()

    def broken(self) -> None:
        """The connection broke: chunks on their way may not arrive. The rest waits for the peer to say what it has."""
        self._due.clear()
        for out in self._open.values():
            out.flying.clear()

    def fail(self, why: str) -> None:
        """Nothing more can be sent."""
        for out in [*self._open.values(), *(o for q in self._waiting.values() for o in q)]:
            out.op.end(why)
        self._open.clear()
        self._waiting.clear()
        self._grants.clear()
        self._granted.clear()
        self._due.clear()


class _In:
    """A receive that is posted."""

    __slots__ = ("chunk", "declared", "digests", "have", "left", "op", "size", "slot", "tag", "tries", "view")

    def __init__(self, op: Op, slot: int, tag: int, view: memoryview) -> None:
        self.op, self.slot, self.tag, self.view, self.size = op, slot, tag, view, len(view)
        self.chunk = 0
        self.left = 0 if not view else -1
        self.have = self.digests = bytearray()
        self.declared = ""
        self.tries = 0

    def start(self, chunk: int) -> None:
        self.chunk, self.left = chunk, -(-self.size // chunk)
        self.have, self.digests = bytearray(self.left), bytearray(32 * self.left)

    def grant(self) -> Grant:
        bits = bytearray(-(-len(self.have) // 8))
        for i, has in enumerate(self.have):
            bits[i // 8] |= has << i % 8
        return Grant(slot=self.slot, tag=self.tag, size=self.size, chunk_bytes=self.chunk, have=bits.hex())


class Inbox:
    """What one site receives from one peer."""

    def __init__(self, run: str, src: int, say: Callable[[Control], None]) -> None:
        self._mark, self._src, self._say = run_mark(run, src), src, say
        self._open: dict[int, _In] = {}
        self._next = 0
        self._acks: list[tuple[int, int]] = []
        self.twice_bytes = 0
        """Bytes that came more than once, and were let go."""

    def post(self, op: Op, tag: int, view: memoryview) -> None:
        """A receive of exactly the bytes of `view`."""
        one = self._open[self._next] = _In(op, self._next, tag, view)
        self._next += 1
        self._say(one.grant())

    def tell(self) -> None:
        """Says all open slots, at the start of a connection."""
        self._acks.clear()
        self._say(Sync(next=self._next))
        for one in self._open.values():
            self._say(one.grant())
        self._say(Synced())

    def arrived(self, h: DataHeader, payload: memoryview) -> None:
        """A chunk, checked against what was posted. Nothing is allocated for it.

        Raises:
            FrameError: it is none that was asked for.
        """
        if h.run != self._mark or h.sender != self._src:
            raise FrameError("a data frame of another run or sender")
        if h.slot >= self._next:
            raise FrameError("a data frame for a receive that was not posted")
        one = self._open.get(h.slot)
        if one is None:
            self.twice_bytes += len(payload)
            return
        if h.total != one.size or h.tag != one.tag:
            raise FrameError(f"a message of {h.total} bytes, tag {h.tag}, where {one.size} bytes, tag {one.tag}, were posted")
        if not one.chunk:
            if -(-h.total // h.chunk_bytes) > MAX_CHUNKS:
                raise FrameError("a message in too many chunks")
            one.start(h.chunk_bytes)
        if h.chunk_bytes != one.chunk:
            raise FrameError("a message whose chunks change their size")
        i = h.offset // one.chunk
        self._acks.append((one.slot, i))
        if one.have[i]:
            self.twice_bytes += len(payload)
            return
        one.view[h.offset : h.offset + len(payload)] = payload
        one.digests[32 * i : 32 * i + 32] = sha256(payload).digest()
        one.have[i] = 1
        one.left -= 1
        self._complete(one)

    def end(self, end: End) -> None:
        """The digest of a message."""
        one = self._open.get(end.slot)
        if one is not None:
            one.declared = end.sha256
            self._complete(one)
        elif end.slot >= self._next:
            raise FrameError("the digest of a receive that was not posted")

    def _complete(self, one: _In) -> None:
        if one.left or not one.declared:
            return
        if sha256(one.digests).hexdigest() == one.declared:
            del self._open[one.slot]
            self._say(Finished(slot=one.slot))
            one.op.end()
            return
        one.tries += 1
        one.declared = ""
        if one.size:
            one.start(one.chunk)
        if one.tries >= _TRIES:
            del self._open[one.slot]
            one.op.end(f"a message of {one.size} bytes came {_TRIES} times with another content than declared (sha256)")
        raise FrameError("a message came with another content than declared (sha256)")

    def mismatch(self, slot: int, size: int) -> None:
        """The peer's message has another size than was posted."""
        one = self._open.pop(slot, None)
        if one is not None:
            one.op.end(f"a message of {size} bytes was sent where {one.size} were awaited (tag {one.tag})")

    def acks(self, most: int) -> Ack | None:
        """What has come since the last call, at most so many chunks."""
        if not self._acks:
            return None
        some, self._acks = self._acks[:most], self._acks[most:]
        return Ack(chunks=tuple(some))

    def fail(self, why: str) -> None:
        """Nothing more can come."""
        for one in self._open.values():
            one.op.end(why)
        self._open.clear()
        self._acks.clear()
