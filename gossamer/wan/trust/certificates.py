"""Certificates as a peer sees them: which site one names, whether it is good now, and what to do when it is not.

A certificate's site stands in it twice: as the URI gossamer://site/<id>, which servers read, and as the DNS name
<id>.gossamer.internal, which clients have TLS check instead of an address (`site_name`): a site is the same behind another address.

Validity is a matter of dates, so this is the one place that reads the wall clock, this machine's own.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import re
import stat
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gossamer.core.errors import BadInput
from gossamer.wan.files import write_atomically

log = logging.getLogger("gossamer.wan.trust")

SITE_URI = "gossamer://site/"
DOMAIN = "gossamer.internal"
"""A name that no public DNS server answers for."""
CA_FILE, CERTIFICATE_FILE, KEY_FILE, REVOKED_FILE = "ca.pem", "site.pem", "site.key", "revoked.pem"
"""What a site's folder holds. All but the key may be read by anybody."""
MAX_REVOKED_BYTES = 1 << 20
Fault: TypeAlias = Literal["revoked", "expired", "early"]
_SITE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SOON_DAYS = 14


def now_utc() -> datetime:
    """This machine's date and time."""
    return datetime.now(UTC)


def date(when: datetime) -> str:
    """As in messages: 2027-01-31 12:00 UTC."""
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def check_site(site: str, what: str = "site") -> str:
    """A site id, if it is one. The one place that says what is.

    Args:
        what: says it, for the message.

    Raises:
        BadInput: it could not be part of a host name.
    """
    if not _SITE.fullmatch(site):
        raise BadInput(f"{what} {site!r}: expected 1 to 63 of a-z, 0-9 and -, beginning and ending with a letter or a digit")
    return site


def site_name(site: str) -> str:
    """The DNS name in the certificate of a site, whatever its address.

    >>> site_name("lyon")
    'lyon.gossamer.internal'
    """
    return f"{site}.{DOMAIN}"


@dataclass(frozen=True)
class Certificate:
    """What is read of a certificate. Who signed it was checked by TLS, or by `Identity.load`."""

    site: str
    serial: int
    begins: datetime
    ends: datetime
    hosts: tuple[str, ...]
    """Addresses and names it may be found at, the site's own name left out."""
    pem: bytes = field(repr=False)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(pem: bytes) -> Certificate:
        """Reads a PEM certificate.

        Raises:
            ValueError: not a certificate, or not one of a site.
        """
        parsed = x509.load_pem_x509_certificate(pem)
        try:
            names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            raise ValueError("it names no site") from None
        sites = [uri[len(SITE_URI) :] for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(SITE_URI)]
        if len(sites) != 1 or not _SITE.fullmatch(sites[0]):
            raise ValueError(f"it names {len(sites)} sites, expected one")
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        return Certificate(
            sites[0],
            parsed.serial_number,
            parsed.not_valid_before_utc,
            parsed.not_valid_after_utc,
            tuple(h for h in hosts if h != site_name(sites[0])),
            pem,
        )

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Whether the holder of the certificate's key signed the message (ECDSA, SHA-256)."""
        key = x509.load_pem_x509_certificate(self.pem).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        try:
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True

    def check_issued_by(self, authority_pem: bytes) -> None:
        """Checks who signed it.

        Raises:
            ValueError: not this CA.
        """
        authority = x509.load_pem_x509_certificate(authority_pem)
        try:
            x509.load_pem_x509_certificate(self.pem).verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise ValueError("not signed by this CA") from None

    def covers(self, host: str) -> bool:
        """Whether the certificate names this host, an address or a name."""
        try:
            return str(ipaddress.ip_address(host.strip("[]"))) in self.hosts
        except ValueError:
            return host.lower() in self.hosts

    def fault(self, revocations: Revocations) -> tuple[Fault, str] | None:
        """Why it is not to be believed now: a short reason, and words with the date and the remedy. None: it is good."""
        again = f"whoever keeps the certificates makes another, with gossamer wan ca issue {self.site}"
        if when := revocations.when(self.serial):
            return "revoked", f"the certificate of site {self.site} (serial {self.serial:x}) was revoked on {date(when)}: {again}"
        if self.ends < (now := now_utc()):
            return "expired", f"the certificate of site {self.site} expired on {date(self.ends)}, and it is {date(now)} here: {again}"
        if now < self.begins:
            return "early", (
                f"the certificate of site {self.site} is good from {date(self.begins)}, and it is {date(now)} here: set the clock, or wait"
            )
        return None


class Revocations:
    """The signed list of revoked certificates in a file, read again when the file changes. A list that is damaged, signed by another or
    older than the one in use is not taken: what was revoked stays revoked.

    Args:
        path: the list (an X.509 CRL, PEM).
        authority: certificate of the CA that must have signed it.

    Raises:
        BadInput: the file cannot be used.
    """

    def __init__(self, path: Path, authority: x509.Certificate) -> None:
        self.path = path
        self._authority = authority
        self._lock = threading.Lock()
        self._warned = False
        self._seen = self._stamp()
        try:
            self._pem = self._read()
            self._list = self._parse(self._pem)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: the list of revoked certificates cannot be used ({error}): copy revoked.pem from the CA") from None

    @property
    def number(self) -> int:
        """Grows with every list."""
        return self._list[0]

    @property
    def pem(self) -> bytes:
        """The list in use, to hand on."""
        return self._pem

    def when(self, serial: int) -> datetime | None:
        """When the certificate with this serial number was revoked; None: it was not. Looks whether the file has changed."""
        self.refresh()
        return self._list[1].get(serial)

    def refresh(self) -> None:
        """Reads the file again, if it is another."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        with self._lock:
            if stamp == self._seen:
                return
            self._seen = stamp
            try:
                pem = self._read()
                found = self._parse(pem)
                if found[0] < self.number:
                    raise ValueError(f"number {found[0]} is older than number {self.number}, which is in use")
                if found[0] > self.number:
                    self._list, self._pem = found, pem
            except (OSError, ValueError) as error:
                log.error("%s: not taken (%s); the list of before stays in use", self.path, error)

    def offer(self, pem: bytes) -> bool:
        """Takes a list from elsewhere, if it is newer and truly the CA's, and keeps it in the file. Whether it was taken."""
        with self._lock:
            try:
                found = self._parse(pem)
            except ValueError as error:
                if not self._warned:
                    log.error("a list of revoked certificates from a peer is not taken: %s", error)
                self._warned = True
                return False
            if found[0] <= self.number:
                return False
            self._list, self._pem = found, pem
            try:
                write_atomically(self.path, pem, 0o644, replace=True)
                self._seen = self._stamp()
            except OSError as error:
                log.error("%s: cannot be written (%s); the new list is in use until this process ends", self.path, error)
            return True

    def _read(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(MAX_REVOKED_BYTES + 1)

    def _parse(self, pem: bytes) -> tuple[int, dict[int, datetime]]:
        """Its number, and when each certificate on it was revoked."""
        if len(pem) > MAX_REVOKED_BYTES:
            raise ValueError(f"longer than {MAX_REVOKED_BYTES} bytes")
        found = x509.load_pem_x509_crl(pem)
        key = self._authority.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        if not found.is_signature_valid(key):
            raise ValueError("not signed by this CA")
        try:
            number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        except x509.ExtensionNotFound:
            raise ValueError("it has no number") from None
        return number, {one.serial_number: one.revocation_date_utc for one in found}

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True)
class Identity:
    """Who this process is: its certificate and key, the CA it believes, and what the CA has revoked."""

    certificate: Certificate
    key_pem: bytes = field(repr=False)
    authority_pem: bytes = field(repr=False)
    revocations: Revocations
    folder: Path

    @classmethod
    def load(cls, folder: Path, revoked: Path | None = None) -> Identity:
        """Reads the folder that `gossamer wan ca issue` made for a site.

        Args:
            folder: holds ca.pem, site.pem, site.key and revoked.pem.
            revoked: the list of revoked certificates, where it is not the one in the folder.

        Raises:
            BadInput: a file is missing or does not belong to the others, the key can be read by others, or the certificate is not good now.
        """
        files = {name: _read(folder / name) for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)}
        if os.name == "posix" and (mode := stat.S_IMODE((folder / KEY_FILE).stat().st_mode)) & 0o077:
            raise BadInput(f"{folder / KEY_FILE}: mode {mode:04o}, others may read the private key: chmod 600 {folder / KEY_FILE}")
        authority = load_authority(folder / CA_FILE)
        path = folder / CERTIFICATE_FILE
        try:
            certificate = Certificate.parse(files[CERTIFICATE_FILE])
        except ValueError as error:
            raise BadInput(f"{path}: not the certificate of a site ({error}): make one with gossamer wan ca issue SITE") from None
        parsed = x509.load_pem_x509_certificate(files[CERTIFICATE_FILE])
        try:
            certificate.check_issued_by(files[CA_FILE])
        except ValueError:
            raise BadInput(f"{path}: not signed by the CA in {folder / CA_FILE}: take both from one CA") from None
        key = load_key(folder / KEY_FILE)
        if key.public_key() != parsed.public_key():
            raise BadInput(f"{folder / KEY_FILE}: not the key of {path}: take both from one gossamer wan ca issue")
        mine = cls(certificate, files[KEY_FILE], files[CA_FILE], Revocations(revoked or folder / REVOKED_FILE, authority), folder)
        if fault := certificate.fault(mine.revocations):
            raise BadInput(f"{path}: {fault[1]}")
        if (left := certificate.ends - now_utc()) < timedelta(days=_SOON_DAYS):
            days = left.total_seconds() / 86400
            log.warning("%s: expires on %s, in %.1f days: gossamer wan ca issue %s", path, date(certificate.ends), days, certificate.site)
        return mine

    @property
    def site(self) -> str:
        """The id of this site."""
        return self.certificate.site

    def sign(self, message: bytes) -> bytes:
        """ECDSA, SHA-256."""
        key = serialization.load_pem_private_key(self.key_pem, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key.sign(message, ec.ECDSA(hashes.SHA256()))


def load_authority(path: Path) -> x509.Certificate:
    """The certificate of a CA.

    Raises:
        BadInput: it is none.
    """
    try:
        found = x509.load_pem_x509_certificate(_read(path))
        if not isinstance(found.public_key(), ec.EllipticCurvePublicKey):
            raise ValueError("its key is not one of an elliptic curve")
    except ValueError as error:
        raise BadInput(f"{path}: not the certificate of a CA ({error}): take the ca.pem that gossamer wan ca init made") from None
    return found


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key, not encrypted.

    Raises:
        BadInput: it is none.
    """
    try:
        found = serialization.load_pem_private_key(_read(path), None)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise BadInput(f"{path}: not a private key of the kind that gossamer wan ca makes: make the folder again")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}: expected a folder as gossamer wan ca issue makes it") from None
