"""The coordinator's part of `gossamer wan check`: it says where a call comes from, dials back, and measures.

Nobody is to use it as a scanner, certificate or not. It dials a caller's advertised address alone, and that must be the address that the
call comes from, or one that the CA has written into the caller's certificate (`gossamer wan ca issue --host`); names in a
certificate do not lead into private networks. At most six times in half a minute for a site, and four at a time. Who answers is asked for
this site's certificate, and what comes back is a word and a sentence.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import grpc
from pydantic import Field, StringConstraints

from gossamer.wan.roster.messages import Name, Record, Refused, Text, pack, unpack
from gossamer.wan.roster.records import Address
from gossamer.wan.trust.certificates import Certificate, Identity, site_name
from gossamer.wan.trust.diagnose import diagnose
from gossamer.wan.trust.gate import Seen
from gossamer.wan.trust.terms import place_of

SERVICE = "gossamer.Check"
ANSWER = f"/{SERVICE}/Answer"
"""What the site that is dialled back answers to: its nonce."""
DIAL_S = 5.0
MOST_S, MOST_BYTES, PIECE_BYTES = 5.0, 1 << 30, 1 << 18
"""Of one measurement."""
AT_A_TIME = 4
OFTEN, WITHIN_S = 6, 30.0
_MAX_SITES = 4096

Nonce: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Reached: TypeAlias = Literal["open", "refused", "filtered", "unreachable"]


class Look(Record):
    """Asks who is there. `site` is believed where there are no certificates (on loopback)."""

    site: Name


class Looked(Record):
    """The answer."""

    source: Annotated[str, StringConstraints(max_length=64)]
    """The address that the call comes from, without its port."""
    site: Name | None
    """The coordinator's own id; None: it has no certificate."""


class Back(Record):
    """Asks to be dialled back."""

    site: Name
    address: Address


class Dialled(Record):
    """What came of it."""

    result: Literal["answers", "unresolved", "refused", "filtered", "unreachable", "stranger", "not_yours"]
    text: Text = ""
    nonce: Nonce | None = None
    """What the one who answers says."""


class Measure(Record):
    """Asks for bytes."""

    seconds: Annotated[float, Field(gt=0.0, le=MOST_S)]


class Taken(Record):
    """How many bytes have come."""

    nbytes: int


def reach(host: str, port: int, timeout_s: float = DIAL_S) -> tuple[Reached, str]:
    """What a new TCP connection meets, and what the system says of it."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except ConnectionRefusedError:
        return "refused", ""
    except TimeoutError:
        return "filtered", ""
    except OSError as error:
        return "unreachable", error.strerror or type(error).__name__
    return "open", ""


def addresses(host: str) -> list[str]:
    """The IP addresses of a host.

    Raises:
        OSError: it has none, or they cannot be looked up.
    """
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))


def plain_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address, of IPv4 also where it comes dressed as IPv6. None: it is none."""
    try:
        found = ipaddress.ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def may_dial(ip: str, host: str, source: str, certificate: Certificate | None) -> bool:
    """Whether a caller from `source` with this certificate may be dialled back at `ip`, to which `host` has been resolved."""
    found, came = plain_ip(ip), plain_ip(source)
    if found is None or found.is_unspecified or found.is_multicast or found.is_link_local:
        return False
    if found == came:
        return True
    if found.is_loopback or certificate is None:
        return False
    if certificate.covers(str(found)):
        return True
    return certificate.covers(host) and not found.is_private


class _Limits:
    """Who asked how often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked_s: dict[str, list[float]] = {}
        self._now = 0

    @contextmanager
    def taken(self, site: str) -> Iterator[None]:
        """A place.

        Raises:
            Refused: too often, or too many at a time.
        """
        now_s = time.monotonic()
        with self._lock:
            late = [t for t in self._asked_s.get(site, []) if t > now_s - WITHIN_S]
            if len(late) >= OFTEN:
                raise Refused("quota", f"site {site} was checked {OFTEN} times in {WITHIN_S:g} s: try again later", WITHIN_S)
            if self._now >= AT_A_TIME:
                raise Refused("quota", f"{AT_A_TIME} sites are being checked: try again in a moment", DIAL_S)
            if len(self._asked_s) >= _MAX_SITES:
                self._asked_s.clear()
            self._asked_s[site] = [*late, now_s]
            self._now += 1
        try:
            yield
        finally:
            with self._lock:
                self._now -= 1


class _Who(NamedTuple):
    site: str
    source: str
    certificate: Certificate | None


def check_handlers(identify: Callable[[Any], str | None], identity: Identity | None) -> Any:
    """Handlers of gRPC (with threads) for the coordinator's server.

    Args:
        identify: the site that makes a call; None: it says nothing (loopback), and the site is who it says it is.
        identity: the coordinator's own.
    """
    dials, measures = _Limits(), _Limits()

    def who(site: str, context: Any) -> _Who:
        seen = Seen.of(context)
        known = identify(context)
        if known is not None and known != site:
            raise Refused("identity", f"a call for site {site} with the certificate of site {known}")
        return _Who(site, seen.host, Certificate.parse(seen.pem) if seen.pem else None)

    def refused(context: Any, error: Refused) -> None:
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, pack(error.refusal).decode())

    def look(data: bytes, context: Any) -> bytes:
        try:
            caller = who(unpack(Look, data).site, context)
        except Refused as error:
            refused(context, error)
            raise
        return pack(Looked(source=caller.source, site=identity.site if identity else None))

    def back(data: bytes, context: Any) -> bytes:
        try:
            asked = unpack(Back, data)
            caller = who(asked.site, context)
            with dials.taken(caller.site):
                return pack(_dial_back(asked.address, caller, identity))
        except Refused as error:
            refused(context, error)
            raise

    def up(pieces: Iterator[bytes], context: Any) -> bytes:
        nbytes, until_s = 0, time.monotonic() + 2 * MOST_S
        try:
            with measures.taken(identify(context) or Seen.of(context).host):
                for piece in pieces:
                    nbytes += len(piece)
                    if nbytes > MOST_BYTES or time.monotonic() > until_s:
                        break
        except Refused as error:
            refused(context, error)
            raise
        return pack(Taken(nbytes=nbytes))

    def down(data: bytes, context: Any) -> Iterator[bytes]:
        try:
            asked = unpack(Measure, data)
            with measures.taken(identify(context) or Seen.of(context).host):
                until_s, piece = time.monotonic() + asked.seconds, os.urandom(PIECE_BYTES)
                for _ in range(MOST_BYTES // PIECE_BYTES):
                    if time.monotonic() > until_s or not context.is_active():
                        break
                    yield piece
        except Refused as error:
            refused(context, error)
            raise

    handlers = {
        "Look": grpc.unary_unary_rpc_method_handler(look),
        "Back": grpc.unary_unary_rpc_method_handler(back),
        "Up": grpc.stream_unary_rpc_method_handler(up),
        "Down": grpc.unary_stream_rpc_method_handler(down),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _dial_back(address: str, caller: _Who, identity: Identity | None) -> Dialled:
    host, port = place_of(address)
    try:
        found = addresses(host)
    except (OSError, UnicodeError) as error:
        return Dialled(result="unresolved", text=str(getattr(error, "strerror", None) or error)[:200])
    allowed = [ip for ip in found if may_dial(ip, host, caller.source, caller.certificate)]
    if not allowed or not 0 < port < 65536:
        return Dialled(result="not_yours", text=", ".join(found)[:200])
    ip = allowed[0]  # looked up once: what is dialled is what was allowed
    reached, said = reach(ip, port)
    if reached != "open":
        return Dialled(result=reached, text=said)
    at = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
    if identity is not None and (words := diagnose(at, identity, caller.site, DIAL_S)):
        return Dialled(result="stranger", text=words[:1000])
    return _asked(at, caller.site, identity)


def _asked(at: str, site: str, identity: Identity | None) -> Dialled:
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 1024)]
    if identity is None:
        channel = grpc.insecure_channel(at, options=options)
    else:
        credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate.pem)
        channel = grpc.secure_channel(at, credentials, options=[*options, ("grpc.ssl_target_name_override", site_name(site))])
    with channel:
        try:
            answer = channel.unary_unary(ANSWER)(b"", timeout=DIAL_S)
        except grpc.RpcError as error:
            code = error.code()
            return Dialled(result="stranger", text=f"it does not answer to Gossamer's check ({code.name.lower() if code else 'no status'})")
    try:
        return Dialled(result="answers", nonce=answer.decode("ascii"))
    except ValueError:
        return Dialled(result="stranger", text="it answers something else than Gossamer's check")
