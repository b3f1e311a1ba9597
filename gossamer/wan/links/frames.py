"""What travels between two sites: control frames as JSON, payload as raw bytes behind a header of 55. No pickle, no evaluation.

Everything that comes in is checked here before anybody acts on it: a frame that is too long, cut short, damaged, or not one of the kinds
below raises FrameError.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

WIRE_VERSION = 1
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 14, 1 << 20
MAX_CHUNKS = 1 << 20
"""Chunks of one message."""
MAX_CONTROL_BYTES = 1 << 20
"""Of one control message, which holds one or more frames, one a line."""
MAX_NOTE_BYTES = 4096
MAX_ACKS = 4096
MAX_POSTED_CHARS = 1 << 14

_HEADER = struct.Struct("<2sBIQIIQQQI")
_CRC = struct.Struct("<I")
_MAGIC = b"GW"
DATA_HEADER_BYTES = _HEADER.size + _CRC.size


class FrameError(Exception):
    """A frame that is none, or that its sender may not send now. The text says which, without its content."""


class DataHeader(NamedTuple):
    """What stands before the bytes of one chunk."""

    run: int
    """Mark of the run (see `run_mark`)."""
    sender: int
    tag: int
    chunk_bytes: int
    """Size of the chunks of this message, but of the last."""
    slot: int
    """The number of the receive, counted by the receiver per sender."""
    offset: int
    total: int
    """Bytes of the whole message."""


def run_mark(run: str, sender: int) -> int:
    """64 bits that tell the run and the sender apart from others."""
    return int.from_bytes(blake2b(f"{run}/{sender}".encode(), digest_size=8).digest(), "little")


def pack_chunk(h: DataHeader, payload: memoryview) -> bytes:
    """Header and bytes of one chunk."""
    head = _HEADER.pack(_MAGIC, WIRE_VERSION, h.sender, h.run, h.tag, h.chunk_bytes, h.slot, h.offset, h.total, len(payload))
    return b"".join((head, _CRC.pack(zlib.crc32(payload, zlib.crc32(head))), payload))


def unpack_chunk(data: bytes) -> tuple[DataHeader, memoryview]:
    """Header and bytes of one chunk.

    Raises:
        FrameError: not a chunk, cut short, too long, or damaged.
    """
    if len(data) < DATA_HEADER_BYTES:
        raise FrameError(f"a data frame of {len(data)} bytes is shorter than its {DATA_HEADER_BYTES}-byte header")
    magic, version, sender, run, tag, chunk, slot, offset, total, length = _HEADER.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise FrameError("a data frame starts with other bytes than this version's")
    payload = memoryview(data)[DATA_HEADER_BYTES:]
    if length != len(payload):
        raise FrameError(f"a data frame declares {length} bytes and has {len(payload)}")
    if not MIN_CHUNK_BYTES <= chunk <= MAX_CHUNK_BYTES or chunk & (chunk - 1):
        raise FrameError(f"chunks of {chunk} bytes: a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} was expected")
    if offset % chunk or offset >= total or length != min(chunk, total - offset):
        raise FrameError(f"a data frame of {length} bytes at {offset} is no chunk of a message of {total} bytes")
    if zlib.crc32(payload, zlib.crc32(memoryview(data)[: _HEADER.size])) != crc:
        raise FrameError("a data frame was damaged on the way (crc32 differs)")
    return DataHeader(run, sender, tag, chunk, slot, offset, total), payload


# ---- control

_Number = Annotated[int, Field(ge=0, lt=2**63)]
_Tag = Annotated[int, Field(ge=0, lt=2**31)]
_Mark = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Text = Annotated[str, Field(max_length=256)]


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Hello(_Frame):
    """The first frame of a control stream, by who dials."""

    kind: Literal["hello"] = "hello"
    version: int = WIRE_VERSION
    run: _Text
    sender: _Number
    receiver: _Number
    incarnation: _Mark
    """Drawn by a process at its start: another one is another process, which knows nothing of what was under way."""
    known: _Mark | None
    """The receiver's incarnation, where the two have met."""
    channels: Annotated[int, Field(ge=1, le=16)]
    terms: dict[_Text, _Text] = Field(max_length=16)
    """What both sides must have equal, by name (configuration, layout)."""


class Welcome(_Frame):
    """The answer to Hello."""

    kind: Literal["welcome"] = "welcome"
    incarnation: _Mark
    session: _Mark


class Attach(_Frame):
    """The first frame of a data stream, by who dials."""

    kind: Literal["attach"] = "attach"
    session: _Mark
    channel: Annotated[int, Field(ge=0, lt=16)]


class Sync(_Frame):
    """What follows tells, by Grant, of all receives that are open; a slot below `next` that is not told of is done."""

    kind: Literal["sync"] = "sync"
    next: _Number


class Synced(_Frame):
    """All open receives have been told."""

    kind: Literal["synced"] = "synced"


class Grant(_Frame):
    """A receive is posted: the sender may send so many bytes. Said again, with what has come, after a break."""

    kind: Literal["grant"] = "grant"
    slot: _Number
    tag: _Tag
    size: _Number
    chunk_bytes: Annotated[int, Field(ge=0, le=MAX_CHUNK_BYTES)] = 0
    have: Annotated[str, Field(max_length=MAX_CHUNKS // 4 + 8, pattern=r"^[0-9a-f]*$")] = ""
    """Bits of the chunks that have come, in hex, lowest first."""


class Mismatch(_Frame):
    """The message for a slot has another size than was posted."""

    kind: Literal["mismatch"] = "mismatch"
    slot: _Number
    size: _Number


class Ack(_Frame):
    """Chunks that have come: (slot, index)."""

    kind: Literal["ack"] = "ack"
    chunks: tuple[tuple[_Number, _Number], ...] = Field(max_length=MAX_ACKS)


class End(_Frame):
    """The digest of a whole message: sha256 of the sha256s of its chunks, in order."""

    kind: Literal["end"] = "end"
    slot: _Number
    sha256: _Digest


class Finished(_Frame):
    """A message has come whole."""

    kind: Literal["finished"] = "finished"
    slot: _Number


class Note(_Frame):
    """A small message of the notes wire."""

    kind: Literal["note"] = "note"
    seq: _Number
    tag: _Tag
    body: Annotated[str, Field(max_length=2 * MAX_NOTE_BYTES, pattern=r"^([0-9a-f]{2})*$")]


class Noted(_Frame):
    """A receive has taken a note."""

    kind: Literal["noted"] = "noted"
    seq: _Number


class Posted(_Frame):
    """A short text that the sender has put where all sites can see it. Told to every peer, and all of them again in every new session."""

    kind: Literal["posted"] = "posted"
    key: Annotated[str, Field(min_length=1, max_length=256)]
    value: Annotated[str, Field(max_length=MAX_POSTED_CHARS)]


class Beat(_Frame):
    """A sign of life. The receiver answers with Echo."""

    kind: Literal["beat"] = "beat"
    number: _Number


class Echo(_Frame):
    """The answer to a Beat."""

    kind: Literal["echo"] = "echo"
    number: _Number


class Closed(_Frame):
    """One of the sender's two wires is closed."""

    kind: Literal["closed"] = "closed"
    wire: Literal["data", "notes"]


class Bye(_Frame):
    """The sender leaves."""

    kind: Literal["bye"] = "bye"
    why: _Text


Control: TypeAlias = (
    Hello | Welcome | Attach | Sync | Synced | Grant | Mismatch | Ack | End | Finished | Note | Noted | Posted | Beat | Echo | Closed | Bye
)
_CONTROL: TypeAdapter[Control] = TypeAdapter(Annotated[Control, Field(discriminator="kind")])


def pack_control(frames: Iterable[Control]) -> bytes:
    """One control message of some frames."""
    return b"\n".join(frame.model_dump_json().encode() for frame in frames)


def unpack_control(data: bytes) -> list[Control]:
    """The frames of one control message.

    Raises:
        FrameError: too long, or one of them is none.
    """
    if len(data) > MAX_CONTROL_BYTES:
        raise FrameError(f"a control message of {len(data)} bytes: at most {MAX_CONTROL_BYTES} were expected")
    try:
        return [_CONTROL.validate_json(line) for line in data.split(b"\n")]
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise FrameError(f"a control frame that is none ({where}: {first['type']})") from None
