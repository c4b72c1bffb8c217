"""`farcall certificates`: an authority and certificates for the hosts of a cluster of one's own.

    DIR/ca.pem          the authority's certificate: every host needs it
    DIR/ca.key          its private key: keep it where you make certificates, and nowhere else
    DIR/HOST.pem        a host's certificate
    DIR/HOST.key        its private key: only on that host

Called again, it keeps the authority and makes new certificates for the hosts named: that is how hosts are added and
certificates renewed.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from farcall.private_files import write_whole
from farcall.runtime.rendezvous.addresses import is_loopback
from farcall.transport.certificate import as_pem, certificate_of, new_key, subject_of

AUTHORITY_DAYS = 3650


def make_certificates(
    directory: Path, hosts: Sequence[str], names: Sequence[str] = (), days: int = 365
) -> list[tuple[str, Path, Path]]:
    """Make (or keep) the authority in ``directory``, and a certificate for each of ``hosts``; their files.

    A host is a name or an address; or ``name=address,address``, where others dial addresses that this machine does not
    find by the name. ``names``: names of workers that each certificate has as well.
    """
    known = {}
    for host, given, others in (host.partition("=") for host in hosts):
        if not host or "/" in host or host in (".", "..", "ca"):
            raise SystemExit(f"{host!r} is not a valid host name")
        known[host] = [other.strip() for other in others.split(",")] if given else _addresses_of(host)
        if not all(known[host]):
            raise SystemExit(f"{host}= is followed by no address: write {host}=ADDRESS, or {host}=ADDRESS,ADDRESS")
        if not known[host]:
            print(
                f"{host}: no address of it is known here. Members advertise addresses, unless told a name "
                f"(FARCALL_ADVERTISE): if others dial one, write {host}=ADDRESS",
                file=sys.stderr,
            )
    named = {host: [_general_name(name) for name in dict.fromkeys((host, *known[host], *names))] for host in known}
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, authority_key = _authority(directory)
    made = []
    for host, alternatives in named.items():
        key = new_key()
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        both_roles = x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH, x509.OID_CLIENT_AUTH])  # a member has both
        certificate = (
            certificate_of(host, key, days)
            .issuer_name(authority.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(both_roles, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        made.append((host, *_write(directory, host, certificate, key)))
    return made


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_file, key_file = directory / "ca.pem", directory / "ca.key"
    if certificate_file.exists() or key_file.exists():
        try:
            kept = serialization.load_pem_private_key(key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError, TypeError) as error:  # TypeError: the key needs a password
            raise SystemExit(f"cannot use the authority in {directory}: {error}") from error
        if not isinstance(kept, ec.EllipticCurvePrivateKey) or certificate.public_key() != kept.public_key():
            raise SystemExit(
                f"cannot use the authority in {directory}: ca.key is not the key of ca.pem, on an elliptic curve, that "
                "this command has made; put the right file back, or name another directory for a new authority"
            )
        return certificate, kept
    key = new_key()
    may_sign = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    name = "farcall cluster"
    certificate = (
        certificate_of(name, key, AUTHORITY_DAYS)
        .issuer_name(subject_of(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(may_sign, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(directory, "ca", certificate, key)
    return certificate, key


def _addresses_of(host: str) -> list[str]:
    """The addresses under which others dial ``host``, where that is known here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = {str(entry[4][0]).partition("%")[0] for entry in found}
    # What a host's own name means on that host, in many distributions: nobody else dials it.
    return sorted(one for one in addresses if one == host or host == "localhost" or not is_loopback(one))


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        if not name.isascii():
            raise SystemExit(f"{name!r} cannot be in a certificate: write it in ASCII") from None
        return x509.DNSName(name)


def _write(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    certificate_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    # A node that reads the two files between these writes finds a pair that does not fit, and keeps the old one.
    key_text, certificate_text = as_pem(key, certificate)
    write_whole(key_file, key_text)
    write_whole(certificate_file, certificate_text, 0o644)
    return certificate_file, key_file
