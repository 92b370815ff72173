"""Makes the certificates of a run's hosts, and checks the files of a process before it uses them."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weightsync.config import TlsFiles
from weightsync.errors import ConfigError

_REMEDY = "make new files with weightsync keys"
_HOST = "[A-Za-z0-9._:-]{1,64}"
"""It names a folder, and is the name in a certificate."""
_EARLIER = datetime.timedelta(minutes=5)
"""Certificates are valid from a little before now, for hosts whose clocks are behind."""


def make_keys(folder: Path, hosts: Sequence[str], days: int) -> tuple[list[Path], datetime.datetime]:
    """Write a CA's certificate, and a certificate with its key for the fleet, or in a folder for each host.

    The CA's own key is not stored, so that nobody can make another certificate of this CA. Returns the
    folders, for `TlsFiles.within`, and when they expire. Raises ConfigError if one of the files exists, or a
    host is no name.
    """
    for number, host in enumerate(hosts):
        if host in hosts[:number] or host in (".", "..") or not re.fullmatch(_HOST, host):
            remedy = (
                "give each host once, by a name or an address of 1 to 64 letters, digits, '.', ':', '-', '_'"
            )
            raise ConfigError("--host", host, remedy)
    folders = [folder / host for host in hosts] or [folder]
    files = [Path(path) for each in folders for path in TlsFiles.within(str(each)).paths]
    for path in files:
        if path.exists():
            raise ConfigError("FOLDER", str(folder), f"{path} exists: give another folder, or remove it")
    until = now() + datetime.timedelta(days=days)
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca_name = f"weightsync CA {x509.random_serial_number():x}"[:30]  # one CA is told from another by its name
    ca = certificate(ca_name, ca_name, ca_key, ca_key, until, is_ca=True)
    for each, name in zip(folders, hosts or ["fleet"], strict=True):
        key = ec.generate_private_key(ec.SECP256R1())
        made = TlsFiles.within(str(each))
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(made.ca, ca.public_bytes(serialization.Encoding.PEM))
        own = certificate(name, ca_name, key, ca_key, until, is_ca=False)
        _write(made.certificate, own.public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write(made.key, private)
    return folders, until


def check(files: TlsFiles) -> None:
    """Raise ConfigError for a file that is missing, has expired, or does not belong to the other files."""
    cas, chain = _read("ca", files.ca), _read("certificate", files.certificate)
    for name, path, found in (("ca", files.ca, cas), ("certificate", files.certificate, chain)):
        first, last = max(x.not_valid_before_utc for x in found), min(x.not_valid_after_utc for x in found)
        if now() > last:
            raise _error(name, path, f"it expired on {last:%Y-%m-%d %H:%M} UTC: {_REMEDY}")
        if now() < first:
            remedy = f"it is valid from {first:%Y-%m-%d %H:%M} UTC on: set this host's clock, or {_REMEDY}"
            raise _error(name, path, remedy)
    if not any(_has_issued(ca, chain[-1]) for ca in cas):
        raise _error("certificate", files.certificate, f"it is not of the CA in {files.ca}")
    data = _bytes("key", files.key)
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        raise _error("key", files.key, f"it is no private key without a password: {_REMEDY}") from None
    if key.public_key() != chain[0].public_key():
        raise _error("key", files.key, f"it is not the key of {files.certificate}")


def certificate(
    name: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    until: datetime.datetime,
    *,
    is_ca: bool,
) -> x509.Certificate:
    """Return the certificate of `key`, signed by `issuer_key`, valid from now `until` then."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - _EARLIER)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .add_extension(_usage(is_ca=is_ca), critical=True)
    )
    return builder.sign(issuer_key, hashes.SHA256())


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write(path: str, data: bytes) -> None:
    """Write a file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _has_issued(ca: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _read(name: str, path: str) -> list[x509.Certificate]:
    """Return the certificates in a file: of CAs, or of a host and of those between its CA and it."""
    data = _bytes(name, path)
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError:
        raise _error(name, path, f"it is no certificate: {_REMEDY}") from None


def _bytes(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _error(name, path, f"{error.strerror}: each host needs the file at this path") from None


def _error(name: str, path: str, remedy: str) -> ConfigError:
    return ConfigError(f"sync.tls.{name}", path, remedy)


def now() -> datetime.datetime:
    """Return the time of this host's clock."""
    return datetime.datetime.now(datetime.UTC)
