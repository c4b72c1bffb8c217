"""`farcall certificates`: an authority and certificates for the hosts of a cluster of one's own.

    DIR/ca.pem          the authority's certificate: every host needs it
    DIR/ca.key          its private key: keep it where you make certificates, and nowhere else
    DIR/HOST.pem        a host's certificate
    DIR/HOST.key        its private key: only on that host

Called again, it keeps the authority and makes new certificates for the hosts named: that is how hosts are added and
certificates renewed. Needs ``cryptography`` (``pip install farcall[tls]``); only making certificates does.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS = 3650


def make_certificates(
    directory: Path, hosts: Sequence[str], names: Sequence[str] = (), days: int = 365
) -> list[tuple[str, Path, Path]]:
    """Make (or keep) the authority in ``directory``, and a certificate for each of ``hosts``; their files.

    ``names``: names of workers, or other names of the hosts, that each certificate has as well.
    """
    try:
        from cryptography import x509
    except ImportError as error:
        raise SystemExit("making certificates needs the cryptography package: pip install 'farcall[tls]'") from error
    for host in hosts:
        if not host or "/" in host or host in (".", "..", "ca"):
            raise SystemExit(f"{host!r} is not a valid host name")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, authority_key = _authority(directory)
    made = []
    for host in hosts:
        key = _new_key()
        known = [_general_name(name) for name in dict.fromkeys((host, *_addresses_of(host), *names))]
        certificate = (
            _builder(_subject(host), key, days)
            .issuer_name(authority.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(known), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .add_extension(
                x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH, x509.OID_CLIENT_AUTH]),  # a member is both
                critical=False,
            )
        )
        made.append((host, *_write(directory, host, _signed(certificate, authority_key), key)))
    return made


def _authority(directory: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate_file, key_file = directory / "ca.pem", directory / "ca.key"
    if certificate_file.exists() or key_file.exists():
        try:
            key = load_pem_private_key(key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError) as error:
            raise SystemExit(f"cannot use the authority in {directory}: {error}") from error
        assert isinstance(key, EllipticCurvePrivateKey)
        return certificate, key
    key = _new_key()
    builder = (
        _builder(_subject("farcall cluster"), key, AUTHORITY_DAYS)
        .issuer_name(_subject("farcall cluster"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    certificate = _signed(builder, key)
    _write(directory, "ca", certificate, key)
    return certificate, key


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _subject(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.OID_COMMON_NAME, name[:64])])


def _builder(subject: x509.Name, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of hosts differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _addresses_of(host: str) -> list[str]:
    """The addresses under which others dial ``host``, where that is known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]).partition("%")[0] for entry in found})


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(
    directory: Path, name: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization

    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    # One after the other, each at once: a node that reads them between finds a pair that does not fit, and waits.
    _replace(key_file, text, 0o600)
    _replace(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return certificate_file, key_file


def _replace(path: Path, content: bytes, mode: int) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    fresh.replace(path)
