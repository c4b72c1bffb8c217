"""The directory of a launcher goes with its process, however that ended."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from farcall.launcher.own_folder import OwnFolder

LONG_AGO = (1.0, 1.0)


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_a_dead_process_left_goes_with_the_next_launch(tmp_path: Path) -> None:
    left = tmp_path / "launch-left"
    left.mkdir()
    (left / "store").write_text("records")
    os.utime(left, LONG_AGO)
    being_made = tmp_path / "launch-young"
    being_made.mkdir()
    other = tmp_path / "other-left"
    other.mkdir()
    os.utime(other, LONG_AGO)
    folder = OwnFolder("launch-")
    assert sorted(os.listdir(tmp_path)) == sorted([Path(folder.name).name, "launch-young", "other-left"])
    folder.cleanup()
    folder.cleanup()
    assert sorted(os.listdir(tmp_path)) == ["launch-young", "other-left"]


def test_the_directory_of_one_that_lives_stays() -> None:
    one = OwnFolder("launch-")
    os.utime(one.name, LONG_AGO)
    two = OwnFolder("launch-")
    assert os.path.isdir(one.name)
    one.cleanup()
    two.cleanup()
