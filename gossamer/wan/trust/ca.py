"""The project's own certificate authority: `gossamer wan ca init|issue|revoke|list`.

A CA is a folder. `ca.key` signs: whoever has it can be any site, so it is kept off the training machines. `issued/` keeps a copy of every
certificate (no keys), `revoked.pem` is the signed list of those that are no longer good, with a number that grows. Everything is X.509 with
ECDSA on P-256, which gRPC's TLS takes (it does not take Ed25519).
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gossamer.core.errors import BadInput
from gossamer.wan.files import make_folder, write_atomically
from gossamer.wan.trust import certificates as C

_CA_KEY, _ISSUED, _SITES = "ca.key", "issued", "sites"
_EARLY = timedelta(hours=24)
"""Certificates are good from a day before they are made: a site's clock may be behind."""
_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")


class Issued(NamedTuple):
    """A certificate that the CA made, and what became of it."""

    certificate: C.Certificate
    state: C.Fault | Literal["good"]
    revoked: datetime | None


def init(folder: Path, *, name: str = "gossamer", days: int = 3650) -> Path:
    """Makes a CA in a new folder, and returns the folder.

    Args:
        name: of the project, for people who look at a certificate.
        days: how long the CA's own certificate is good.

    Raises:
        BadInput: the folder is in use, or a value cannot be meant.
    """
    if not 1 <= len(name) <= 40 or not name.isprintable():
        raise BadInput(f"--name {name!r}: expected 1 to 40 printable characters")
    now, key = C.now_utc(), ec.generate_private_key(ec.SECP256R1())
    ends = now + _span(days)
    digest = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    # The key's digest is in the name, so that certificates of two CAs with one name are told apart by whoever checks them.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} CA {digest.digest.hex()[:12]}")])
    authority = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(digest, critical=False)
        .sign(key, hashes.SHA256())
    )
    files = {
        C.CA_FILE: (_pem(authority), 0o644),
        _CA_KEY: (_key_pem(key), 0o600),
        C.REVOKED_FILE: (_revocation_list(authority, key, 1, {}), 0o644),
    }
    make_folder(folder, files, 0o700)
    return folder


def issue(folder: Path, site: str, hosts: Sequence[str] = (), *, days: float = 365, out: Path | None = None) -> Path:
    """Makes a key and a certificate for a site, and returns the folder to bring there. Earlier certificates of the site stay good.

    Args:
        hosts: addresses or names that the site may be dialled at by those who do not know its id.
        days: how long it is good, at most as long as the CA itself.
        out: the folder to make; left out: sites/<site> in the CA's folder.

    Raises:
        BadInput: there is no CA, the folder is in use, or a value cannot be meant.
    """
    C.check_site(site)
    names = [_general_name(host) for host in hosts]
    with _open(folder) as (authority, key):
        now = C.now_utc()
        ends = now + _span(days)
        if ends > (last := authority.not_valid_after_utc):
            left = (last - now).days
            remedy = f"--days {left}" if left >= 1 else "a new CA, with gossamer wan ca init"
            raise BadInput(f"--days {days:g}: the CA in {folder} is good until {C.date(last)}: use {remedy}")
        mine = ec.generate_private_key(ec.SECP256R1())
        own = [x509.UniformResourceIdentifier(C.SITE_URI + site), x509.DNSName(C.site_name(site))]
        identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, site)]))
            .issuer_name(authority.subject)
            .public_key(mine.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLY)
            .not_valid_after(ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([*own, *dict.fromkeys(names)]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(mine.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(key, hashes.SHA256())
        )
        path = out or folder / _SITES / site
        if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
            raise BadInput(f"{path}: is there already, and nothing is overwritten: give another with --out, or move this one away")
        (folder / _ISSUED).mkdir(mode=0o700, exist_ok=True)
        # First the record: what is out in the world can be revoked.
        write_atomically(folder / _ISSUED / f"{certificate.serial_number:x}.pem", _pem(certificate), 0o644)
        files = {
            C.CA_FILE: (_pem(authority), 0o644),
            C.CERTIFICATE_FILE: (_pem(certificate), 0o644),
            C.KEY_FILE: (_key_pem(mine), 0o600),
            C.REVOKED_FILE: ((folder / C.REVOKED_FILE).read_bytes(), 0o644),
        }
        make_folder(path, files, 0o700)
        return path


def revoke(folder: Path, site: str, serial: str | None = None) -> list[Issued]:
    """Revokes the certificates of a site that are not revoked yet, or one of them, and returns those.

    Args:
        serial: of one certificate, hexadecimal as `list` prints it.

    Raises:
        BadInput: there is no CA, or no such certificate.
    """
    C.check_site(site)
    with _open(folder) as (authority, key):
        mine = [one for one in listing(folder) if one.certificate.site == site]
        if not mine:
            raise BadInput(f"site {site}: the CA in {folder} made no certificate for it: see gossamer wan ca list")
        chosen = [one for one in mine if serial is None or f"{one.certificate.serial:x}" == serial.lower()]
        if not chosen:
            raise BadInput(f"--serial {serial}: site {site} has no such certificate: see gossamer wan ca list")
        ends = [one for one in chosen if one.state != "revoked"]
        if not ends:
            raise BadInput(f"site {site}: already revoked: bring {folder / C.REVOKED_FILE} to the sites")
        known = C.Revocations(folder / C.REVOKED_FILE, authority)
        now = C.now_utc()
        dates = {one.certificate.serial: one.revoked for one in listing(folder) if one.revoked}
        dates |= {one.certificate.serial: now for one in ends}
        pem = _revocation_list(authority, key, known.number + 1, dates)
        write_atomically(folder / C.REVOKED_FILE, pem, 0o644, replace=True)
        return [Issued(one.certificate, "revoked", now) for one in ends]


def listing(folder: Path) -> list[Issued]:
    """Every certificate that the CA made, by site and date.

    Raises:
        BadInput: there is no CA, or a file in it is damaged.
    """
    revoked = C.Revocations(folder / C.REVOKED_FILE, _authority(folder))
    found = []
    for path in (folder / _ISSUED).glob("*.pem"):
        try:
            one = C.Certificate.parse(path.read_bytes())
        except ValueError as error:
            raise BadInput(f"{path}: not the certificate of a site ({error}): bring it back from a copy of the CA, or remove it") from None
        fault = one.fault(revoked)
        found.append(Issued(one, fault[0] if fault else "good", revoked.when(one.serial)))
    return sorted(found, key=lambda one: (one.certificate.site, one.certificate.begins, one.certificate.serial))


@contextmanager
def _open(folder: Path) -> Iterator[tuple[x509.Certificate, ec.EllipticCurvePrivateKey]]:
    """The CA's certificate and key, for one process at a time."""
    authority = _authority(folder)
    key = C.load_key(folder / _CA_KEY)
    if key.public_key() != authority.public_key():
        raise BadInput(f"{folder / _CA_KEY}: not the key of {folder / C.CA_FILE}: bring both back from one copy of the CA")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield authority, key
    finally:
        os.close(descriptor)


def _authority(folder: Path) -> x509.Certificate:
    if not (folder / C.CA_FILE).is_file():
        raise BadInput(f"{folder}: there is no CA: make one with gossamer wan ca init --ca {folder}")
    return C.load_authority(folder / C.CA_FILE)


def _span(days: float) -> timedelta:
    if not 0 < days <= 36500:
        raise BadInput(f"--days {days:g}: expected more than 0 and at most 36500")
    return timedelta(days=days)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    name = host.lower()
    if len(name) > 253 or not _HOST.fullmatch(name) or re.fullmatch(r"[\d.]+", name):
        raise BadInput(f"--host {host!r}: expected an IP address or a host name, without a port")
    if name.endswith("." + C.DOMAIN):
        raise BadInput(f"--host {host}: names in {C.DOMAIN} say which site a certificate is for: leave it out")
    return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _revocation_list(authority: x509.Certificate, key: ec.EllipticCurvePrivateKey, number: int, dates: dict[int, datetime]) -> bytes:
    """An X.509 CRL. Its next update is due when the CA ends: it does not grow stale, since sites may be out of reach for long."""
    built = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.subject)
        .last_update(C.now_utc())
        .next_update(authority.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, when in sorted(dates.items()):
        built = built.add_revoked_certificate(x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build())
    return built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
