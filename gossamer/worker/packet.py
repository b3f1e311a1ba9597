"""The wire format: a 64-byte header, then raw little-endian payload. No pickle anywhere.

    magic "GSMR" | version | flags | run id | round | sender | kind | codec id | codec version | crc32 | layout | digest | tokens | step_s |
    length

A packet of another run, layout, codec or version is refused by name.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.errors import RunFailed
from gossamer.core.method import MAX_TOKENS

HEADER_BYTES = 64
VERSION = 2
"""2: tokens take 4 bytes instead of 8, and the time of an inner step the other 4."""
REFUSED = 1
"""Flag: the sender refused its own contribution (not finite, or far too large); it carries no weight."""
DONE = 2
"""Flag: nothing more will come from the sender (to servers)."""

_HEADER = struct.Struct("<4sHHQIIBBBxIQQIfQ")
_MAGIC = b"GSMR"
assert _HEADER.size == HEADER_BYTES


class Header(NamedTuple):
    """What a packet says of itself."""

    run_id: int
    round: int
    sender: int
    kind: int
    codec_id: int
    codec_version: int
    layout: int
    """Hash of the full layout."""
    digest: int
    """Mark of the sender's anchor and outer state at the start of the round; equal on all workers of a synchronous method."""
    tokens: int
    """Tokens that the sender consumed in the round (its weight); at most MAX_TOKENS."""
    flags: int = 0
    step_s: float = 0.0
    """Seconds that an inner step of the round took, as measured by the sender, a number that float32 holds; 0: not known."""


class Packet(NamedTuple):
    """An immutable message. `data` is header and payload in one uint8 tensor; None in timing-only runs."""

    header: Header
    nbytes: int
    """Bytes on the wire, header included."""
    data: Tensor | None
    zeros: int = 0
    """Exact zeros that the codec could not say (the sender knows; it does not travel)."""

    @property
    def payload(self) -> Tensor:
        """The payload as a uint8 view."""
        assert self.data is not None
        return self.data[HEADER_BYTES:]


def blank(payload_bytes: int) -> Tensor:
    """A buffer to encode into: zeroed header, uninitialised payload (`buffer[HEADER_BYTES:]`)."""
    data = torch.empty(HEADER_BYTES + payload_bytes, dtype=torch.uint8)
    data[:HEADER_BYTES] = 0
    return data


def seal(data: Tensor, header: Header) -> Packet:
    """Writes the header in front of an encoded payload.

    Raises:
        RunFailed: more tokens than the header holds.
    """
    h = header
    if not 0 <= h.tokens <= MAX_TOKENS:
        raise RunFailed(
            f"worker {h.sender} says {h.tokens} tokens in round {h.round}, and a packet holds 0 to {MAX_TOKENS}: take fewer steps"
        )
    crc = zlib.crc32(data[HEADER_BYTES:].numpy().data)
    raw = _HEADER.pack(
        _MAGIC, VERSION, h.flags, h.run_id, h.round, h.sender, h.kind, h.codec_id, h.codec_version, crc, h.layout, h.digest, h.tokens,
        h.step_s, data.numel() - HEADER_BYTES,
    )  # fmt: skip
    data[:HEADER_BYTES] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return Packet(header, data.numel(), data)


def unseal(data: Tensor) -> Packet:
    """Reads what came over the wire (uint8, contiguous, on the CPU).

    Raises:
        RunFailed: not a Gossamer packet, another version, a wrong length, or damaged on the way.
    """
    if data.numel() < HEADER_BYTES:
        raise RunFailed(f"a message of {data.numel()} bytes is shorter than the {HEADER_BYTES}-byte header of a packet")
    magic, version, flags, run_id, rnd, sender, kind, cid, cver, crc, layout, mark, tokens, step_s, length = _HEADER.unpack(
        data[:HEADER_BYTES].numpy().tobytes()
    )
    if magic != _MAGIC:
        raise RunFailed(f"a message starts with {magic!r}, not {_MAGIC!r}: the sender is not a Gossamer worker")
    if version != VERSION:
        raise RunFailed(f"worker {sender} speaks packet version {version}, this one {VERSION}: run the same release on all workers")
    if length != data.numel() - HEADER_BYTES:
        raise RunFailed(f"worker {sender} declares a payload of {length} bytes and sent {data.numel() - HEADER_BYTES}")
    if zlib.crc32(data[HEADER_BYTES:].numpy().data) != crc:
        raise RunFailed(f"the payload of worker {sender} for round {rnd} was damaged on the way (crc32 differs)")
    return Packet(Header(run_id, rnd, sender, kind, cid, cver, layout, mark, tokens, flags, step_s), data.numel(), data)


def payload_bytes(head: Tensor) -> int:
    """What a header (uint8, 64 bytes, on the CPU) says of the length of its payload.

    Raises:
        RunFailed: not the header of a packet.
    """
    magic, *_, length = _HEADER.unpack(head.numpy().tobytes())
    if magic != _MAGIC:
        raise RunFailed(f"a message starts with {magic!r}, not {_MAGIC!r}: the sender is not a Gossamer worker")
    return int(length)


def check(packet: Packet, *, run_id: int, round: int, sender: int, codec: tuple[int, int], layout: int) -> None:
    """Refuses a foreign packet by name.

    Raises:
        RunFailed: run, round, sender, codec or layout is not the one awaited.
    """
    h = packet.header
    for what, got, want in (
        ("run id", h.run_id, run_id),
        ("round", h.round, round),
        ("sender", h.sender, sender),
        ("codec (id, version)", (h.codec_id, h.codec_version), codec),
        ("parameter layout", h.layout, layout),
    ):
        if got != want:
            raise RunFailed(
                f"a packet from worker {h.sender} (awaited: worker {sender}) has {what} {got}, expected {want}: "
                "all workers must run one configuration and one release"
            )
