"""Why TLS with a peer does not come about, in plain words. gRPC says "Socket closed" or quotes its TLS library."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
from pathlib import Path

from gossamer.wan.trust.certificates import Certificate, Identity, date, site_name
from gossamer.wan.trust.terms import host_of, place_of

_AGAIN = "gossamer wan ca issue"
_SAID = {
    "connection refused": "it refuses the connection",
    "reset by peer": "the connection broke",
    "broken pipe": "the connection broke",
    "socket closed": "the connection broke",
    "connection timed out": "the connection does not come about in time",
    "timeout occurred": "the connection does not come about in time",
    "no route to host": "there is no way to it",
    "unreachable": "there is no way to it",
    "dns resolution failed": "its name does not resolve",
    "name or service not known": "its name does not resolve",
    "deadline exceeded": "no answer in time",
}
"""What gRPC says, in small letters -> in plain words. Among several, the first."""


def plainly(details: str) -> str | None:
    """What gRPC says of a connection or a call that has failed, in words; None: there are none for that.

    >>> plainly("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connect: Connection refused (111)")
    'it refuses the connection'
    """
    said = details.lower()
    return next((words for text, words in _SAID.items() if text in said), None)


def diagnose(address: str, identity: Identity, site: str | None, timeout_s: float = 2.0) -> str | None:
    """Makes one TLS connection to a peer and says what is wrong with it; None: nothing is, or the address does not answer.

    Args:
        address: host:port.
        site: the peer that is expected there; None: one that has a certificate for the host.

    Raises:
        OSError: the address cannot be looked up.
    """
    at = place_of(address)
    found: str | None = None
    for _ in range(2):  # a line may break by chance just when the peer has seen the certificate: what is said for good is seen twice
        try:
            plain = socket.create_connection(at, timeout_s)
        except (ConnectionError, TimeoutError):
            return None
        with plain:
            found = _handshake(plain, address, identity, site)
        if found is None or found != _closed(address, identity):
            return found
    return found


def shown(address: str, identity: Identity, timeout_s: float = 2.0) -> Certificate | None:
    """The certificate of a site that answers at host:port, whatever host it is for; None: there is none that can be read."""
    context = _context(identity)
    context.check_hostname = False
    try:
        with socket.create_connection(place_of(address), timeout_s) as plain, context.wrap_socket(plain) as secure:
            return Certificate.parse(ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"").encode())
    except (OSError, ValueError):
        return None


def speaks_tls(address: str, timeout_s: float = 2.0) -> bool:
    """Whether TLS answers at host:port, for whoever has no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said there
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(place_of(address), timeout_s) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except (OSError, ValueError, OverflowError):
        return False


def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=identity.authority_pem.decode())
    # The key is read from memory, not from the site's folder, which may hold another by now; this interface of Python wants files.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pair.pem"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(identity.certificate.pem + identity.key_pem)
        context.load_cert_chain(path)
    return context


def _handshake(plain: socket.socket, address: str, identity: Identity, site: str | None) -> str | None:
    try:
        with _context(identity).wrap_socket(plain, server_hostname=site_name(site) if site else host_of(address)) as secure:
            # With TLS 1.3 the peer judges last. One that agrees speaks; that of gRPC refuses by closing, without a word.
            return None if secure.recv(1) else _closed(address, identity)
    except ssl.SSLCertVerificationError as error:
        return _not_verified(address, error, site)
    except ssl.SSLEOFError:
        return None  # nobody said why: a line that broke, a process that ended, a relay that has nobody at its other end
    except ssl.SSLError as error:
        return _not_agreed(address, error.reason or "")
    except ConnectionError:
        return _closed(address, identity)
    except OSError:
        return None


def _closed(address: str, identity: Identity) -> str:
    mine = identity.certificate
    return (
        f"{address} ends the connection when it has seen this site's certificate (of site {mine.site}, good from {date(mine.begins)} to "
        f"{date(mine.ends)}): it believes another CA, or its clock is wrong: use one CA for all sites, and set the clock there"
    )


def _not_verified(address: str, error: ssl.SSLCertVerificationError, site: str | None) -> str:
    said = error.verify_message or str(error)
    if "expired" in said:
        return f"the certificate of {address} has expired: issue another there with {_AGAIN}, or set this machine's clock"
    if "not yet valid" in said:
        return f"the certificate of {address} is not good yet: set the clock of that machine or of this one"
    if "ostname mismatch" in said or "IP address mismatch" in said:
        if site:
            return f"{address} is not site {site}, or its certificate is not one of {_AGAIN}: check the address"
        return f"the certificate of {address} is not for that host: issue it with --host {host_of(address)}, or say which site it is"
    return f"the certificate of {address} is not of this project's CA ({said}): use one CA for all sites of the project"


def _not_agreed(address: str, reason: str) -> str:
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG"):
        return f"{address} answers without TLS: it is not a site, or was started for loopback only"
    return f"{address} does not agree on TLS ({reason or 'no reason given'}): check that it is a site of this project"
