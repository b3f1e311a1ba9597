"""The greeting: what two peers say before the first call, and what every call carries after it. See `gossamer.wan.trust.terms`."""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Annotated, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import Field, StringConstraints, ValidationError

from gossamer.wan.roster.messages import Hash, Name, Record
from gossamer.wan.trust.terms import Distrusted, mac

HELLO = "/gossamer.Trust/Hello"
LIST = "/gossamer.Trust/List"
"""Asks for the list of revoked certificates, if it has a higher number than that in the question (8 bytes). Anybody with a certificate of
the CA may, revoked or not: the CA has signed the list, and a site that is refused can see for itself why."""
TAKE = "/gossamer.Trust/Take"
"""Brings a newer list, in a session."""
CALL_KEY = "gossamer-call-bin"
"""Metadata of every call but HELLO and LIST: session, counter, MAC."""
ANSWER_KEY = "gossamer-answer-bin"
"""Initial metadata of every answer: a MAC."""
MAC_BYTES, SESSION_BYTES, COUNTER_BYTES = 32, 16, 8
CALL_BYTES = SESSION_BYTES + COUNTER_BYTES + MAC_BYTES
MAX_HELLO_BYTES = 4096
MAX_LIST_BYTES = 1 << 18
"""Of a list of revoked certificates that a greeting hands on; longer ones are brought by hand."""
MAX_WELCOME_BYTES = MAX_LIST_BYTES + (1 << 15)
WINDOW = 4096
"""Calls of one session that may be overtaken."""

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Hex16 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
G = TypeVar("G", "Hello", "Welcome")


class Hello(Record):
    """Who comes, to whom, and what for."""

    protocol: Annotated[int, Field(ge=0, lt=2**31)]
    run: Name
    site: Name
    to: Name | None
    """None: whoever answers for the address."""
    configuration: Hash | None
    layout: Hash | None
    revocations: Annotated[int, Field(ge=0, lt=2**63)]
    """Number of the list of revoked certificates in use; 0: none."""
    key: Hex32
    """Public key, X25519, for this greeting alone."""


class Welcome(Record):
    """The answer to one that is believed."""

    site: Name
    epoch: Annotated[int, Field(ge=0, lt=2**63)]
    session: Hex16
    key: Hex32
    listed: Annotated[int, Field(ge=0, lt=2**63)]
    """Number of the list of revoked certificates in use; 0: none. A caller with a newer one brings it."""
    revocations: Annotated[str, StringConstraints(max_length=MAX_LIST_BYTES)] | None
    """A newer list than the caller's, PEM."""
    certificate: Annotated[str, StringConstraints(max_length=8192)] | None
    """PEM; None on loopback without TLS."""
    signature: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2,1024}$")] | None
    """Of `said`, with the key of the certificate."""


def pack(record: Record, secret: bytes, label: str, before: bytes = b"") -> bytes:
    """A MAC with the run secret, then JSON. `before`: what it answers."""
    text = record.model_dump_json().encode()
    return mac(secret, label, before, text) + text


def unpack(kind: type[G], raw: bytes, limit: int) -> G:
    """Reads the JSON of a greeting. The MAC in front is checked apart, when it is known whose secret it must be.

    Raises:
        Distrusted: it is none. The text does not repeat what was sent.
    """
    if not MAC_BYTES < len(raw) <= limit:
        raise Distrusted("malformed", f"a greeting of {len(raw)} bytes: expected {MAC_BYTES + 2} to {limit}")
    try:
        return kind.model_validate_json(raw[MAC_BYTES:])
    except ValidationError as error:
        one = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:32] for part in one["loc"])[:64]
        raise Distrusted("malformed", f"a greeting that is none ({where or 'JSON'}: {one['type']})") from None


def protocol_of(raw: bytes) -> int | None:
    """The version in a greeting of whatever version, if it can be found."""
    if len(raw) > MAX_HELLO_BYTES:
        return None
    try:
        found = json.loads(raw[MAC_BYTES:])
    except (ValueError, RecursionError):
        return None
    version = found.get("protocol") if isinstance(found, dict) else None
    return version if type(version) is int and 0 <= version < 2**31 else None


def said(hello: bytes, session: str, key: str, site: str) -> bytes:
    """What the server's certificate signs: the whole greeting, and what is agreed on it."""
    return b"gossamer welcome\0" + hashlib.sha256(hello).digest() + f"{session} {key} {site}".encode()


def new_key() -> tuple[X25519PrivateKey, str]:
    """A key for one greeting, and its public half."""
    key = X25519PrivateKey.generate()
    return key, key.public_key().public_bytes_raw().hex()


def session_key(mine: X25519PrivateKey, theirs: str, secret: bytes, hello: bytes, session: str) -> bytes:
    """What both have after the greeting, and nobody else.

    Raises:
        Distrusted: their key is no key.
    """
    try:
        shared = mine.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(theirs)))
    except ValueError:
        raise Distrusted("malformed", "a greeting whose key is none") from None
    return mac(secret, "session", shared, hello, session.encode())


def call_mac(key: bytes, method: str, counter: int) -> bytes:
    """Of a call."""
    return mac(key, "call", method.encode(), counter.to_bytes(COUNTER_BYTES, "big"))


def answer_mac(key: bytes, method: str, counter: int) -> bytes:
    """Of the answer to it."""
    return mac(key, "answer", method.encode(), counter.to_bytes(COUNTER_BYTES, "big"))


def number_of(raw: bytes) -> int:
    """Of the list that somebody has who asks for a newer one.

    Raises:
        Distrusted: it is no number.
    """
    if len(raw) != 8:
        raise Distrusted("malformed", f"a question for the list of revoked certificates of {len(raw)} bytes: expected a number of 8")
    return int.from_bytes(raw, "big")


class Window:
    """The counters that a session has used: a bit for each of the last WINDOW, and all before those."""

    def __init__(self) -> None:
        self._top = 0
        self._bits = 0  # bit k: top - k was used
        self._lock = threading.Lock()

    def take(self, counter: int) -> bool:
        """Whether this counter is used for the first time; it is used then.

        >>> window = Window()
        >>> [window.take(k) for k in (1, 3, 2, 3, 0)]
        [True, True, True, False, False]
        """
        with self._lock:
            if counter > self._top:
                shift = counter - self._top
                self._bits = ((self._bits << shift) | 1) & ((1 << WINDOW) - 1) if shift < WINDOW else 1
                self._top = counter
                return True
            behind = self._top - counter
            if counter < 1 or behind >= WINDOW or self._bits >> behind & 1:
                return False
            self._bits |= 1 << behind
            return True
