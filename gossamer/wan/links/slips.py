"""The small messages of the notes wire: they travel with the control frames, without a grant, and are told of again after a break.

Who receives says that a receive has *taken* a slip; until then it is the sender's. No more than WINDOW are on their way or lie unread,
so a peer that does not read its notes fills nobody's memory but that of who writes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gossamer.wan.links.frames import MAX_NOTE_BYTES, Control, FrameError, Note, Noted
from gossamer.wan.links.transfer import Op

WINDOW = 1024
"""Slips on their way or unread."""


class Slips:
    """Both directions of one pair.

    Args:
        say: sends a control frame to the peer; lost while there is no connection.
    """

    def __init__(self, say: Callable[[Control], None]) -> None:
        self._say = say
        self._number = 0
        self._sent: dict[int, tuple[Op, Note]] = {}
        self._queue: deque[tuple[Op, Note]] = deque()
        self._came = 0  # numbers up to here have come
        self._unread: dict[int, deque[Note]] = {}
        self._lying: set[int] = set()  # numbers of the unread
        self._posted: dict[int, deque[tuple[Op, memoryview]]] = {}

    @property
    def busy(self) -> bool:
        """Some slip was not taken yet."""
        return bool(self._sent or self._queue)

    def send(self, op: Op, tag: int, view: memoryview) -> None:
        """A slip to send."""
        if len(view) > MAX_NOTE_BYTES:
            op.end(f"a note of {len(view)} bytes: at most {MAX_NOTE_BYTES} fit, larger messages go by the data wire")
            return
        self._number += 1
        self._queue.append((op, Note(seq=self._number, tag=tag, body=view.hex())))
        self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._sent) < WINDOW:
            op, note = self._queue.popleft()
            self._sent[note.seq] = op, note
            self._say(note)

    def tell(self) -> None:
        """Says again what was not taken, at the start of a connection."""
        for _, note in self._sent.values():
            self._say(note)

    def noted(self, seq: int) -> None:
        """The peer has taken a slip."""
        if (sent := self._sent.pop(seq, None)) is not None:
            sent[0].end()
            self._fill()

    def post(self, op: Op, tag: int, view: memoryview) -> None:
        """A receive of exactly the bytes of `view`."""
        self._posted.setdefault(tag, deque()).append((op, view))
        self._match(tag)

    def came(self, note: Note) -> None:
        """A slip has come.

        Raises:
            FrameError: out of order, or more than may lie unread.
        """
        if note.seq <= self._came:
            if note.seq not in self._lying:
                self._say(Noted(seq=note.seq))
            return
        if note.seq != self._came + 1:
            raise FrameError("notes that come out of order")
        if len(self._lying) >= WINDOW:
            raise FrameError(f"more than {WINDOW} notes lie unread")
        self._came = note.seq
        self._lying.add(note.seq)
        self._unread.setdefault(note.tag, deque()).append(note)
        self._match(note.tag)

    def _match(self, tag: int) -> None:
        unread, posted = self._unread.get(tag), self._posted.get(tag)
        while unread and posted:
            note, (op, view) = unread.popleft(), posted.popleft()
            self._lying.discard(note.seq)
            self._say(Noted(seq=note.seq))
            body = bytes.fromhex(note.body)
            if len(body) != len(view):
                op.end(f"a note of {len(body)} bytes was sent where {len(view)} were awaited (tag {tag})")
                continue
            view[:] = body
            op.end()
        if unread is not None and not unread:
            del self._unread[tag]
        if posted is not None and not posted:
            del self._posted[tag]

    def fail(self, why: str) -> None:
        """Nothing more can be sent or come."""
        for op, _ in [*self._sent.values(), *self._queue, *(p for q in self._posted.values() for p in q)]:
            op.end(why)
        for part in (self._sent, self._queue, self._posted, self._unread, self._lying):
            part.clear()
