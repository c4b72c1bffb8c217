"""Files and directories of one user: made so that nobody else may read them, and not believed where others may."""

from __future__ import annotations

import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farcall.private_files import private_bytes, runtime_directory


def test_all_get_the_bytes_that_one_made(tmp_path: Path) -> None:
    directory = tmp_path / "made"
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: private_bytes(directory, "key", 32), range(64)))
    assert len(set(found)) == 1
    assert len(found[0]) == 32
    assert os.listdir(directory) == ["key"]
    assert (directory / "key").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_not_used(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="chmod 700"):
        private_bytes(tmp_path, "key", 32)
    assert os.listdir(tmp_path) == []


def test_a_file_that_others_could_read_or_plant_is_not_believed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "key"
    path.write_bytes(bytes(32))
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        private_bytes(tmp_path, "key", 32)
    path.chmod(0o600)
    path.write_bytes(bytes(31))
    with pytest.raises(PermissionError, match="remove it"):
        private_bytes(tmp_path, "key", 32)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        private_bytes(tmp_path, "key", 32)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can own what another user's variable names")
def test_a_session_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "farcall"
    os.chown(tmp_path, 65534, -1)
    assert not runtime_directory().is_relative_to(tmp_path)


@pytest.mark.parametrize("by", ["file", "link", "directory"])
def test_where_another_user_took_the_name_the_home_is_used(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, home = tmp_path / f"farcall-{os.getuid()}", tmp_path / "home"
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_directory() == usual
    if by == "file":
        usual.touch()
    elif by == "link":
        usual.symlink_to(tmp_path)
    elif os.getuid() == 0:
        usual.mkdir()
        os.chown(usual, 65534, -1)
    else:
        pytest.skip("only root can make a directory of another user")
    assert runtime_directory() == home / ".local" / "state" / f"farcall-{socket.gethostname()}"
    assert len(private_bytes(runtime_directory(), "key", 32)) == 32
    assert runtime_directory().stat().st_mode & 0o777 == 0o700
