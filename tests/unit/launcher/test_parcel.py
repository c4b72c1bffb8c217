"""What is packed of a directory, and its name."""

from __future__ import annotations

import io
import os
import shutil
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


def test_the_name_is_of_the_content_alone(project: Path) -> None:
    before = Parcel(str(project)).name
    os.utime(project / "package" / "module.py", (1, 1))
    (project / "other.large").write_text("ignored")
    assert Parcel(str(project)).name == before
    (project / "package" / "module.py").write_text("x = 2")
    assert Parcel(str(project)).name != before


def test_too_much_is_told(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "MOST_BYTES", 0)
    with pytest.raises(LaunchFailed, match=r"name in \.gitignore what workers do not need"):
        Parcel(str(project))


def test_what_arrives_is_what_was_packed(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    packed = Parcel(str(project))
    with pytest.raises(ValueError, match="not the one that was packed"):
        parcel.unpack_parcel(packed.name, packed._data + b"x")
    parcel.unpack_parcel(packed.name, packed._data)
    parcel.unpack_parcel(packed.name, packed._data)  # another program was quicker
    folder = tmp_path / "farcall" / "parcels"
    assert [path.name for path in folder.iterdir()] == [packed.name]
    assert (folder / packed.name / "package" / "module.py").read_text() == "x = 1"
