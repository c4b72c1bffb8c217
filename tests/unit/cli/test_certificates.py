"""`farcall certificates`: what it writes, and what it keeps."""

from __future__ import annotations

import socket
import ssl
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall.cli.app import app
from farcall.cli.certificates import make_certificates


@pytest.mark.parametrize("host", ["", "../host", "ca", ".."])
def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    with pytest.raises(SystemExit, match="not a valid host name"):
        make_certificates(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("host", "name"), [("höst=10.0.0.7", "w0"), ("host0=höst", "w0"), ("host0=10.0.0.7", "wörker")]
)
def test_a_name_that_no_certificate_can_have(tmp_path: Path, host: str, name: str) -> None:
    with pytest.raises(SystemExit, match=r"'(höst|wörker)' cannot be in a certificate"):
        make_certificates(tmp_path / "new", [host], [name])
    assert not (tmp_path / "new").exists()


def test_files_and_who_may_read_them(tmp_path: Path) -> None:
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


def names_in(certificate: Path) -> set[str]:
    return {name for _, name in ssl._ssl._test_decode_cert(str(certificate))["subjectAltName"]}  # type: ignore[attr-defined]


def test_addresses_that_members_advertise_may_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host's own name is often an address of loopback, or unknown elsewhere."""
    found = {"host1": ["10.0.0.8", "127.0.1.1"], "host2": ["127.0.1.1"]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (at, 0)) for at in found[host]])
    made = make_certificates(tmp_path, ["host0=10.0.0.7, 10.1.0.7", "host1", "host2"])
    assert [names_in(certificate) for _, certificate, _ in made] == [
        {"host0", "10.0.0.7", "10.1.0.7"},
        {"host1", "10.0.0.8"},
        {"host2"},
    ]
    assert capsys.readouterr().err.startswith("host2: no address of it is known here")
    with pytest.raises(SystemExit, match="host0=ADDRESS"):
        make_certificates(tmp_path, ["host0="])


def test_a_key_that_is_not_the_authoritys(tmp_path: Path) -> None:
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
    ((_, certificate, _),) = make_certificates(tmp_path, ["localhost"])
    authority, before = (tmp_path / "ca.pem").read_bytes(), certificate.read_bytes()
    make_certificates(tmp_path, ["localhost", "another"])
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert certificate.read_bytes() != before
    (tmp_path / "ca.key").write_text("nothing")
    with pytest.raises(SystemExit, match="authority"):
        make_certificates(tmp_path, ["localhost"])


def test_what_a_host_has_to_set_is_one_line_to_copy(tmp_path: Path) -> None:
    """Whatever the folder is called: it was cut where a terminal ends, and brackets in it were taken for a style."""
    folder = tmp_path / f"{'long ' * 30}[red]"
    (line, *_) = CliRunner().invoke(app, ["certificates", str(folder), "host0=10.0.0.7"]).output.splitlines()
    assert line == (
        f"host0: FARCALL_TLS_CA={folder}/ca.pem FARCALL_TLS_CERT={folder}/host0.pem FARCALL_TLS_KEY={folder}/host0.key"
    )
