"""`farcall certificates`: what it writes, and what it keeps."""

from __future__ import annotations

import importlib
import ssl
import stat
import sys
from pathlib import Path

import pytest

from farcall.cli.certificates import make_certificates


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "farcall.cli.certificates")
    certificates = importlib.import_module("farcall.cli.certificates")
    with pytest.raises(SystemExit, match=r"farcall\[tls\]"):
        certificates.make_certificates(tmp_path, ["host"])


@pytest.mark.parametrize("host", ["", "../host", "ca", ".."])
def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(SystemExit, match="not a valid host name"):
        make_certificates(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


def test_files_and_who_may_read_them(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "tls"
    made = make_certificates(folder, ["localhost", "10.0.0.7"], ["w0"])
    assert [host for host, *_ in made] == ["localhost", "10.0.0.7"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [
        "10.0.0.7.key",
        "10.0.0.7.pem",
        "ca.key",
        "ca.pem",
        "localhost.key",
        "localhost.pem",
    ]
    for host, certificate, key in made:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        names = ssl._ssl._test_decode_cert(str(certificate))["subjectAltName"]  # type: ignore[attr-defined]
        assert ("DNS", "w0") in names
        assert host in [name for _, name in names]


def test_a_key_that_is_not_the_authoritys(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    make_certificates(tmp_path / "one", ["host"])
    make_certificates(tmp_path / "other", ["host"])
    key_file = tmp_path / "one" / "ca.key"
    key_file.write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(SystemExit, match=r"ca\.key is not the key of ca\.pem"):
        make_certificates(tmp_path / "one", ["host"])
    another_kind = rsa.generate_private_key(65537, 2048)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key_file.write_bytes(another_kind.private_bytes(pem, form, serialization.NoEncryption()))
    with pytest.raises(SystemExit, match="on an elliptic curve"):
        make_certificates(tmp_path / "one", ["host"])
    key_file.write_bytes(another_kind.private_bytes(pem, form, serialization.BestAvailableEncryption(b"word")))
    with pytest.raises(SystemExit, match="cannot use the authority"):
        make_certificates(tmp_path / "one", ["host"])


def test_called_again_it_keeps_the_authority_and_renews_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    ((_, certificate, _),) = make_certificates(tmp_path, ["localhost"])
    authority, before = (tmp_path / "ca.pem").read_bytes(), certificate.read_bytes()
    make_certificates(tmp_path, ["localhost", "another"])
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert certificate.read_bytes() != before
    (tmp_path / "ca.key").write_text("nothing")
    with pytest.raises(SystemExit, match="authority"):
        make_certificates(tmp_path, ["localhost"])
