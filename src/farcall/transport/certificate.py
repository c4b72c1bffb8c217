"""Certificates and their keys, as bytes: the parts that all have, and one that a process makes for itself.

Importing this loads ``cryptography``, which takes 40 ms.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh key, on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def subject_of(name: str) -> x509.Name:
    """The subject of a certificate for ``name``."""
    return x509.Name([x509.NameAttribute(x509.OID_COMMON_NAME, name[:64])])


def certificate_of(subject: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    """A certificate that lacks its issuer, its purposes and its signature."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject_of(subject))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of hosts differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def as_pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> tuple[bytes, bytes]:
    """The contents of two files: the key, and the certificate."""
    text = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return text, certificate.public_bytes(_PEM)


def self_signed() -> tuple[bytes, bytes, bytes]:
    """A fresh key, its certificate, and the digest of that: it says nothing of who has it, and nobody verifies it."""
    key = new_key()
    made = certificate_of("farcall", key, days=1).issuer_name(subject_of("farcall")).sign(key, hashes.SHA256())
    return *as_pem(key, made), hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).digest()
