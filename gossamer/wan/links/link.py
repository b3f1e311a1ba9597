"""One pair of sites: what outlives its connections."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from gossamer.wan.links.channel import Session
from gossamer.wan.links.frames import (
    Ack,
    Beat,
    Bye,
    Closed,
    Control,
    Echo,
    End,
    Finished,
    FrameError,
    Grant,
    Mismatch,
    Note,
    Noted,
    Posted,
    Sync,
    Synced,
    unpack_chunk,
)
from gossamer.wan.links.pacing import Bucket, Highest, Pace, chunk_for
from gossamer.wan.links.peerstore import PeerStore
from gossamer.wan.links.slips import Slips
from gossamer.wan.links.transfer import Inbox, Op, Outbox, bytes_of
from gossamer.wan.links.watch import Watch
from gossamer.wan.trust.access import Peer

log = logging.getLogger(__name__)

WireName: TypeAlias = Literal["data", "notes"]
_MAX_REFUSED, _MAX_LOGGED = 8, 100


@dataclass(frozen=True)
class LinkSettings:
    """How a site talks to the others. All sites of a run should have the same."""

    channels: int = 4
    """Data connections per pair: on a lossy line each is slowed down by its own losses only."""
    chunk_bytes: int = 1 << 18
    """The largest chunk, a power of two from 16 KiB to 1 MiB; slow lines take smaller ones."""
    beat_s: float = 1.0
    """Between signs of life."""
    silent_s: float = 5.0
    """Without a sign of life for so long, a connection is given up and made anew."""
    patience_s: float = 30.0
    """Out of touch for so long (silence included), a peer is held for gone."""
    most_mbps: float | None = None
    """The most payload to send to one peer; None: what the line takes."""


@dataclass(frozen=True)
class Traffic:
    """What has passed between this site and one peer."""

    payload_sent_bytes: int
    """Of data frames, with what was sent again, without headers of gRPC, TLS and TCP."""
    payload_received_bytes: int
    control_sent_bytes: int
    control_received_bytes: int
    resent_bytes: int
    """Payload that a broken connection made it send again."""
    twice_bytes: int
    """Payload that came again and was let go."""
    sessions: int
    """Connections made: 1 where none broke."""
    rtt_s: float | None
    rate_bytes_s: float
    """The highest rate of sending in the last seconds of it."""

    def __add__(self, other: Traffic) -> Traffic:
        """Of both together; the shorter round trip."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "rtt_s"}
        return Traffic(**sums, rtt_s=min((r for r in (self.rtt_s, other.rtt_s) if r is not None), default=None))


class Link:
    """This site's end of one pair. Everything runs in the event loop.

    Args:
        ended: told when a session has ended, with the reason.
        store: what this site has posted, and hears that the peer has.
    """

    def __init__(
        self,
        run: str,
        me: int,
        src: int,
        peer: Peer,
        settings: LinkSettings,
        ended: Callable[[Link, str], None],
        store: PeerStore | None = None,
    ) -> None:
        self.src, self.peer, self.settings = src, peer, settings
        self.incarnation: str | None = None
        """The peer's, once met."""
        self.session: Session | None = None
        self.over: str | None = None
        """Why nothing more can pass, where that is so."""
        self.parted = False
        """One of both has taken leave."""
        self.met = asyncio.Event()
        """The first session has begun, or none will."""
        self.trouble = "it was not reached yet"
        """Why there is no session."""
        self.watch = Watch(settings.beat_s, settings.silent_s, settings.patience_s)
        self.outbox = Outbox(run, me, self.say, self._chunk_bytes)
        self.inbox = Inbox(run, src, self.say)
        self.slips = Slips(self.say)
        self.sessions = 0
        self._ended = ended
        self._store = store or PeerStore(me)
        self._closed: set[WireName] = set()  # of our wires
        self._refused = 0  # sessions in a row that had to be closed, with nothing that arrived between them
        self._logged: set[str] = set()
        self._bucket = Bucket(settings.most_mbps * 125_000 if settings.most_mbps else None)
        self._rates = Highest(60.0)  # of a channel, over sessions
        self._past_bytes = [0, 0, 0, 0]

    # ---- what this site asks for

    def post(self, wire: WireName, op: Op, tag: int, *, receive: bool) -> None:
        """Starts a send or a receive."""
        if self.over is not None or wire in self._closed:
            op.end(self.over or "this wire is closed")
            return
        assert op.tensor is not None
        view = bytes_of(op.tensor)
        if wire == "notes":
            (self.slips.post if receive else self.slips.send)(op, tag, view)
        elif receive:
            self.inbox.post(op, tag, view)
        else:
            self.outbox.post(op, tag, view)
            self._wake()

    def close_wire(self, wire: WireName, why: str = "this wire is closed") -> None:
        """Ends all operations of one wire, here and at the peer."""
        if wire not in self._closed:
            self._closed.add(wire)
            self._fail(wire, why)
            self.say(Closed(wire=wire))

    def die(self, why: str) -> None:
        """Nothing more will pass."""
        if self.over is None:
            self.over = self.trouble = why
            for wire in ("data", "notes"):
                self._fail(wire, why)
            self.met.set()
            if self.session is not None:
                self.session.end(why)

    def _fail(self, wire: str, why: str) -> None:
        if wire == "notes":
            self.slips.fail(why)
        else:
            self.outbox.fail(why)
            self.inbox.fail(why)

    @property
    def busy(self) -> bool:
        """Something sent has not arrived."""
        return self.over is None and (self.outbox.busy or self.slips.busy)

    # ---- sessions

    def begin(self, session: Session) -> None:
        """A session begins: both sides tell what is open."""
        if self.session is not None:
            self.session.end("the peer has connected anew")
            self._count(self.session)
        self.outbox.broken()
        self.session = session
        self.sessions += 1
        self.watch.connected()
        for wire in sorted(self._closed):
            self.say(Closed(wire=wire))
        self.inbox.tell()
        self.slips.tell()
        self._store.tell(self.say)
        self.say(Beat(number=self.watch.beat(time.monotonic())))
        session.over.add_done_callback(lambda why: self._session_over(session, why.result()))
        session.start()
        self.met.set()

    def _session_over(self, session: Session, why: str) -> None:
        if self.session is not session:
            return
        self._count(session)
        self.session, self.trouble = None, why
        self.outbox.broken()
        if why.startswith("refused"):
            self._refused += 1
            if why not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(why)
                log.warning("site %d: %s", self.src, why)
            if self._refused >= _MAX_REFUSED:
                self.die(f"{_MAX_REFUSED} of its connections had to be closed ({why})")
        if self.over is None:
            self._ended(self, why)

    def _count(self, session: Session) -> None:
        for i, n in enumerate((*session.frame_bytes, *session.control_bytes)):
            self._past_bytes[i] += n

    def tick(self) -> None:
        """A beat's time has passed."""
        if self.over is not None or not self.met.is_set():
            return
        verdict = self.watch.tick(self.session is not None)
        if verdict == "lost":
            self.die(f"out of touch for {self.settings.patience_s:g} s ({self.trouble})")
        elif self.session is not None:
            if verdict == "silent":
                self.session.end(f"nothing came for {self.settings.silent_s:g} s")
            else:
                self.say(Beat(number=self.watch.beat(time.monotonic())))

    # ---- what a session asks for

    def say(self, frame: Control) -> None:
        """Sends a control frame; lost while there is no session."""
        if self.session is not None:
            self.session.say(frame)

    def heard(self) -> None:
        self.watch.heard()

    def chunk(self, data: bytes) -> None:
        if "data" not in self._closed:
            self.inbox.arrived(*unpack_chunk(data))

    def acks(self, most: int) -> Control | None:
        return self.inbox.acks(most)

    def next_chunk(self, pace: Pace) -> tuple[int, int, bytes] | float | None:
        chunk, rtt_s = self._chunk_bytes(), self.watch.rtt_s
        if self.session is None or not self.outbox.ready or not (pace.room(chunk, rtt_s) and self.session.pace.room(chunk, rtt_s)):
            return None
        wait_s = self._bucket.wait_s(time.monotonic(), self._rate(), chunk)
        if wait_s > 0:
            return wait_s
        found = self.outbox.take()
        if found is not None:
            self._bucket.spend(len(found[2]))
        return found

    def control(self, frame: Control) -> None:
        """Acts on a control frame.

        Raises:
            FrameError: its sender may not send it now.
        """
        if isinstance(frame, Ack):
            for slot, index in frame.chunks:
                self.outbox.acked(slot, index)
                if self.session is not None:
                    self.session.landed(slot, index)
        elif isinstance(frame, Grant | Sync | Synced | Finished):
            if "data" not in self._closed:
                self._of_outbox(frame)
        elif isinstance(frame, End):
            self.inbox.end(frame)
        elif isinstance(frame, Mismatch):
            self.inbox.mismatch(frame.slot, frame.size)
        elif isinstance(frame, Note):
            if "notes" not in self._closed:
                self.slips.came(frame)
        elif isinstance(frame, Noted):
            self.slips.noted(frame.seq)
        elif isinstance(frame, Echo):
            self.watch.echoed(frame.number, time.monotonic())
        elif isinstance(frame, Posted):
            self._store.heard(self.src, frame)
        elif isinstance(frame, Closed):
            self._closed.add(frame.wire)
            self._fail(frame.wire, f"site {self.src} has closed its wire")
        elif isinstance(frame, Bye):
            self.parted = True
            self.die(f"site {self.src} has left ({frame.why})")
        else:
            raise FrameError(f"a {frame.kind} frame within a session")

    def _of_outbox(self, frame: Grant | Sync | Synced | Finished) -> None:
        if isinstance(frame, Grant):
            self.outbox.granted(frame)
        elif isinstance(frame, Sync):
            self.outbox.sync()
        elif isinstance(frame, Synced):
            self.outbox.synced()
        else:
            self.outbox.finished(frame.slot)
            self._refused = 0
        self._wake()

    def _wake(self) -> None:
        if self.session is not None:
            self.session.wake()

    # ---- measures

    def _rate(self) -> float:
        return self.session.pace.rate_bytes_s if self.session is not None else 0.0

    def _chunk_bytes(self) -> int:
        if self.session is not None:
            self._rates.add(time.monotonic(), self._rate() / len(self.session.paces))
        return chunk_for(self._rates.value, 1 << 14, self.settings.chunk_bytes)

    @property
    def traffic(self) -> Traffic:
        """What has passed so far."""
        sent, received, control_sent, control_received = self._past_bytes
        if (s := self.session) is not None:
            sent, received = sent + s.frame_bytes[0], received + s.frame_bytes[1]
            control_sent, control_received = control_sent + s.control_bytes[0], control_received + s.control_bytes[1]
        again, twice = self.outbox.resent_bytes, self.inbox.twice_bytes
        return Traffic(sent, received, control_sent, control_received, again, twice, self.sessions, self.watch.rtt_s, self._rate())
