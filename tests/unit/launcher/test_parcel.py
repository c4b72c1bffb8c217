"""What is packed of a directory, and its name."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from farcall.errors import LaunchFailed
from farcall.launcher import parcel
from farcall.launcher.parcel import Parcel

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / "package").mkdir(parents=True)
    (made / "package" / "module.py").write_text("x = 1")
    (made / ".gitignore").write_text("*.large\n/private/\n")
    (made / "private").mkdir()
    (made / "private" / "key").write_text("mine")
    (made / "weights.large").write_text("too much")
    return made


def names(packed: Parcel) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed._data), mode="r:gz") as archive:
        return sorted(archive.getnames())


def test_what_gitignore_names_stays(project: Path) -> None:
    assert names(Parcel(str(project))) == [".gitignore", "package/module.py"]


def test_known_secrets_stay_and_it_is_said(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = [".gitignore", "package/id_map.py", "package/keys.py", "package/module.py", "package/environment"]
    secret = [".env", ".env.local", "id_ed25519", "package/Server.PEM", "package/ca.key", ".aws/credentials", ".netrc"]
    secret += ["id_rsa.old", "deploy.ppk", ".envrc"]
    for name in kept[1:] + secret:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).touch()
    assert names(Parcel(str(project))) == sorted(kept)
    [said] = caplog.messages
    assert ": .aws/credentials, .env, .env.local, " in said
    assert "and 5 more" in said


def test_the_name_is_of_the_content_alone(project: Path) -> None:
    before = Parcel(str(project)).name
    os.utime(project / "package" / "module.py", (1, 1))
    (project / "other.large").write_text("ignored")
    assert Parcel(str(project)).name == before
    (project / "package" / "module.py").write_text("x = 2")
    assert Parcel(str(project)).name != before


def test_too_much_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "MOST_BYTES", 0)
    with pytest.raises(LaunchFailed, match=r"(?s)name in \.gitignore what workers do not need.*package/module\.py"):
        Parcel(str(project))


def test_a_repository_inside_is_packed_as_well(project: Path) -> None:
    inner = project / "submodule"
    subprocess.run(["git", "init", "-q", str(inner)], check=True, timeout=60)
    (inner / "code.py").write_text("y = 1")
    (inner / ".gitignore").write_text("*.o\n")
    (inner / "code.o").write_text("")
    found = [".gitignore", "package/module.py", "submodule/.gitignore", "submodule/code.py"]
    assert names(Parcel(str(project))) == found


def test_links_lead_where_they_did(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (project / "data").symlink_to("/usr")
    packed = Parcel(str(project))
    parcel.unpack_parcel(packed.name, packed._data)
    assert (tmp_path / "farcall" / "parcels" / packed.name / "data").readlink() == Path("/usr")


def test_old_ones_that_nobody_works_in_are_deleted(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "farcall" / "parcels"
    sent = []
    for number in range(parcel.KEPT + 3):
        (project / "package" / "module.py").write_text(f"x = {number}")
        packed = Parcel(str(project))
        sent.append(packed.name)
        if number == 0:
            folder.mkdir(mode=0o700, parents=True)
            (tmp_path / "farcall").chmod(0o700)
            (folder / "left_half").mkdir()
            os.utime(folder / "left_half", (1, 1))
            (folder / "being_made").mkdir()
        parcel.unpack_parcel(packed.name, packed._data)
        if number == 1:
            assert parcel._hold(folder / packed.name)  # somebody works there
        os.utime(folder / packed.name, (1000 + number, 1000 + number))
    there = {path.name for path in folder.iterdir()}
    assert there == {"being_made", sent[1], *sent[-parcel.KEPT :]}
    assert not parcel._hold(folder / sent[0])


def test_what_arrives_is_what_was_packed(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    packed = Parcel(str(project))
    with pytest.raises(ValueError, match="arrived damaged"):
        parcel.unpack_parcel(packed.name, packed._data + b"x")
    parcel.unpack_parcel(packed.name, packed._data)
    parcel.unpack_parcel(packed.name, packed._data)  # another program was quicker
    folder = tmp_path / "farcall" / "parcels"
    assert [path.name for path in folder.iterdir()] == [packed.name]
    assert (folder / packed.name / "package" / "module.py").read_text() == "x = 1"
