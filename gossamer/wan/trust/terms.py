"""What the sites of a run must have in common before they believe each other, and how a call shows it.

Three things are asked of a peer, and each of them is checked on every call:

- *who*: its certificate, of the project's CA, names its site; not expired, not revoked (`certificates`), and in the roster of the run.
- *which run*: protocol version, run id, configuration and parameter layout are compared by name when a peer is greeted.
- *invited*: it knows the secret of the run. A certificate is for a project, the secret for one run; it never travels.

A greeting (one call, `greeting.HELLO`) makes a session: random, named by the server, with a key of its own from an exchange of X25519 keys
that the run secret authenticates, and the server's certificate signs. Every further call carries the session, a counter and a MAC under
that key: 56 bytes. So:

- A repeated call is refused: a server takes each counter of a session once, and no session that it did not make itself since its start. No
  clocks are compared and nothing need be remembered for long.
- Each call is of the run, version, configuration and layout that were agreed, without saying so again.
- The caller knows that the answer is the peer's: it carries a MAC too, which neither another member nor somebody with a stolen and by now
  revoked certificate can make.

A MAC of each call with the run secret itself would need none of this, but could be replayed after a restart of the server, and would show
nothing of the server to the caller. What a call carries (payload) is not in its MAC: TLS keeps it whole, and payload has its own hashes.

Loopback needs no certificates: sessions are the same, a site is what it says it is, and the secret keeps other users of the machine out.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import grpc

from gossamer.core.errors import BadInput, RunFailed
from gossamer.wan.files import write_atomically

Reason: TypeAlias = Literal[
    "certificate", "revoked", "expired", "early", "site", "run", "version", "configuration", "layout", "secret", "session", "replay",
    "malformed", "answer",
]  # fmt: skip
REFUSED_KEY = "gossamer-refused"
"""Trailing metadata of a refused call: its reason."""
SECRET_BYTES = 32
MOST_PORT = 65535
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{1,64}")
_PLACE = re.compile(r"(?:\[([^\[\]]{2,100})\]|([^\s/:\[\]]{0,253})):([0-9]{1,5})")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class RosterCheck(Protocol):
    """Who may take part in a run, now. Asked on every call, so it must be quick; it may change at any time."""

    @property
    def epoch(self) -> int:
        """Grows with every change; named in refusals."""

    def allows(self, site: str) -> bool:
        """Whether a site may call, and be called."""


@dataclass(frozen=True)
class Terms:
    """What all sites of a run have in common. A hash that is None is not compared by this one: a coordinator learns it from the sites."""

    run: str
    secret: bytes = field(repr=False)
    configuration: str | None
    layout: str | None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.run):
            raise BadInput(f"run id {self.run!r}: expected 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or a digit")
        if len(self.secret) < 16:
            raise BadInput(f"the run secret has {len(self.secret)} bytes, expected at least 16: make one with gossamer wan secret FILE")
        for what, value in (("configuration", self.configuration), ("layout", self.layout)):
            if value is not None and not _HASH.fullmatch(value):
                raise BadInput(f"{what} hash {value!r}: expected 1 to 64 of 0-9 and a-f")


@dataclass(frozen=True)
class Party:
    """A run, as one process takes part in it."""

    terms: Terms
    roster: RosterCheck


class Distrusted(RunFailed, grpc.RpcError):
    """A call that was refused, by the peer or by this side, or an answer that is not believed. The message says why, and what to do."""

    def __init__(self, reason: Reason, text: str, *, own: bool = False, said: bool = False) -> None:
        super().__init__(text)
        self.reason = reason
        self.own = own
        """It is this process's own certificate that is not good now, as it has seen for itself."""
        self.said = said
        """The peer says so, and nobody else."""

    @property
    def passing(self) -> bool:
        """Whether the same call may be accepted a little later: sessions end with their server, and rosters arrive."""
        return self.reason in ("session", "site")

    @property
    def of_certificate(self) -> bool:
        """Whether a certificate is not good now: it was revoked, or by the clock."""
        return self.reason in ("revoked", "expired", "early")

    @property
    def of_peer(self) -> bool:
        """Whether the peer's certificate is not good now, as this process has seen for itself."""
        return self.of_certificate and not self.own and not self.said

    def code(self) -> grpc.StatusCode:
        """As of other errors of gRPC."""
        return code_of(self.reason)

    def details(self) -> str:
        """As of other errors of gRPC."""
        return str(self)

    def __reduce__(self) -> tuple[type[Distrusted], tuple[Reason, str]]:
        return type(self), (self.reason, str(self))


def code_of(reason: Reason) -> grpc.StatusCode:
    """gRPC's status for a reason."""
    if reason in ("run", "version", "configuration", "layout"):
        return grpc.StatusCode.FAILED_PRECONDITION
    if reason == "site":
        return grpc.StatusCode.PERMISSION_DENIED
    return grpc.StatusCode.INVALID_ARGUMENT if reason == "malformed" else grpc.StatusCode.UNAUTHENTICATED


def new_secret(path: Path) -> None:
    """Writes a new run secret, for its owner alone to read.

    Raises:
        BadInput: there is a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(path, secrets.token_hex(SECRET_BYTES).encode() + b"\n", 0o600)
    except FileExistsError:
        raise BadInput(f"{path}: is there already, and nothing is overwritten: give another file, or move this one away") from None


def read_secret(path: Path) -> bytes:
    """The run secret in a file that `gossamer wan secret` made.

    Raises:
        BadInput: it is none, or others may read it.
    """
    try:
        with path.open("rb") as file:
            text = file.read(1024).strip()
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}: make a run secret with gossamer wan secret {path}, the same on all sites") from None
    if os.name == "posix" and mode & 0o077:
        raise BadInput(f"{path}: mode {mode:04o}, others may read the run secret: chmod 600 {path}")
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * SECRET_BYTES), text):
        raise BadInput(f"{path}: not a run secret: expected {2 * SECRET_BYTES} hexadecimal digits, as gossamer wan secret writes them")
    return bytes.fromhex(text.decode())


def mac(key: bytes, label: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 of a label and parts, each with its length before it, so that no two lists of parts are the same bytes."""
    message = b"".join(len(part).to_bytes(8, "big") + part for part in (label.encode(), *parts))
    return hmac.digest(key, message, hashlib.sha256)


def same(a: bytes, b: bytes) -> bool:
    """Comparison in a time that does not depend on where they differ."""
    return hmac.compare_digest(a, b)


def is_loopback(host: str) -> bool:
    """Whether a host, without a port, is this machine by way of no network. A name is, only if it is localhost."""
    host = host.strip("[]").lower()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def host_of(address: str) -> str:
    """Of host:port or [host]:port.

    >>> host_of("[::1]:443"), host_of("10.0.0.1:443")
    ('::1', '10.0.0.1')
    """
    return address.rpartition(":")[0].strip("[]")


def joined(host: str, port: int | None) -> str:
    """host:port, or [host]:port.

    >>> joined("::1", 443), joined("10.0.0.1", 443)
    ('[::1]:443', '10.0.0.1:443')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def place_of(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of host:port or [host]:port.

    >>> place_of("[::1]:443")
    ('::1', 443)

    Raises:
        ValueError: the port is no number.
    """
    return host_of(address), int(address.rpartition(":")[2])


def _parted(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None: that is no HOST:PORT.

    >>> _parted("[::1]:443"), _parted("oslo.example.org:0"), _parted(":7001")
    (('::1', 443), ('oslo.example.org', 0), ('', 7001))
    >>> [_parted(a) for a in ("::1:443", "999.1.1.1:1", "a..b:1", "[a]:1", "a:65536")]
    [None, None, None, None, None]
    """
    match = _PLACE.fullmatch(address)
    if match is None or int(match[3]) > MOST_PORT:
        return None
    host = match[2] if match[1] is None else match[1]
    labels = host.removesuffix(".").split(".")
    try:
        if match[1] is not None:
            ipaddress.IPv6Address(host)
        elif labels[-1].isdecimal():  # no name ends like that
            ipaddress.IPv4Address(host)
        elif host and not all(map(_LABEL.fullmatch, labels)):
            return None
    except ValueError:
        return None
    return host, int(match[3])


def check_address(option: str, address: str) -> tuple[str, int]:
    """Host and port of what is to be dialled.

    Args:
        option: which says it.

    Raises:
        BadInput: it has another form.
    """
    if (found := _parted(address)) is None or not all(found):
        raise BadInput(
            f"{option} {address!r}: expected HOST:PORT with a port from 1 to {MOST_PORT}, such as 203.0.113.5:7001 or [2001:db8::5]:7001"
        )
    return found


def check_bind(address: str, option: str = "") -> None:
    """Refuses what is no place to listen at. gRPC would take a port above 65535, and listen at another one. Port 0 is any.

    Args:
        option: which says it, where that is not plain.

    Raises:
        BadInput: it has another form.
    """
    if _parted(address) is None:
        raise BadInput(
            f"{option}{' ' if option else ''}{address}: cannot be bound: expected HOST:PORT with a port up to {MOST_PORT}, such as "
            "0.0.0.0:7001 or [::]:7001"
        )


def check_plain(address: str, option: str = "") -> None:
    """Refuses to go without TLS anywhere but on loopback.

    Args:
        option: which says it, where that is not plain.

    Raises:
        BadInput: the address is another one.
    """
    if not is_loopback(host_of(address)):
        raise BadInput(
            f"{option}{' ' if option else ''}{address}: not a loopback address, and there is no certificate: give the folder of "
            "gossamer wan ca issue with --identity DIR"
        )
