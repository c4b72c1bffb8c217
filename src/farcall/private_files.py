"""Directories and files that nobody but this user may enter, read or write: checked, not hoped for.

Another user with write access to a directory could put files there, and one with read access could read keys. So owner
and mode are checked before a file is used, and a symbolic link never is. `fingerprint` tells when files have changed,
for readers that read theirs again. Knows no other part.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

Fingerprint: TypeAlias = tuple[tuple[int, int, int] | None, ...]


def fingerprint(paths: Iterable[str]) -> Fingerprint:
    """A value that changes whenever one of these files does."""
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def runtime_directory(chosen: str | None = None) -> Path:
    """The directory for presence files, sockets and the key of this user."""
    if chosen is not None:
        return Path(chosen)
    of_session = os.environ.get("XDG_RUNTIME_DIR")
    # Not that of another user, whose variable `sudo -E` keeps: files of root there would be in that user's way.
    if of_session and os.path.isdir(of_session) and os.stat(of_session).st_uid == os.getuid():
        return Path(of_session) / "farcall"
    usual = Path(tempfile.gettempdir()) / f"farcall-{os.getuid()}"
    if _is_taken(usual):  # by another user, perhaps so that nothing works here
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        return Path(state) / f"farcall-{socket.gethostname()}"  # hosts may share a home, and have other processes
    return usual


def _is_taken(path: Path) -> bool:
    """Is there something that this user did not put there, or no directory?"""
    try:
        found = path.lstat()
    except OSError:
        return False
    return not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid()


def pid_namespace() -> int:
    """The namespace of this process's id, since containers may share a runtime directory; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_left_files(directory: Path, suffix: str) -> None:
    """Remove the files of processes that were killed: ``directory/NAMESPACE-PROCESS-anything`` with that suffix."""
    for path in directory.glob(f"{pid_namespace()}-*{suffix}"):
        number = path.name.split("-")[1]
        if number.isdecimal() and not os.path.exists(f"/proc/{number}") and os.path.isdir("/proc/self"):
            path.unlink(missing_ok=True)


def private_directory(directory: Path) -> Path:
    """Make ``directory``, if it is not there; raises ``OSError`` where others may enter it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    return directory


def check_private(directory: Path) -> None:
    """Raise ``PermissionError`` unless ``directory`` is one, belongs to this user, and nobody else may enter it."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{directory} must be a directory of yours that is closed to others (chmod 700); or name another one "
            "(option runtime_directory)"
        )


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write ``path``, or replace it: readers see all of it or nothing."""
    os.replace(_write_beside(path, content, mode), path)


def _write_beside(path: Path, content: bytes, mode: int) -> Path:
    """A new file beside ``path``, which no link or file of another user can take the place of."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        partial.unlink()
        raise
    return partial


def private_bytes(directory: Path, name: str, size_bytes: int) -> bytes:
    """The random bytes of this user in the file ``name``, made at first use; raises ``OSError``."""
    path = private_directory(directory) / name
    for _ in range(2):
        try:
            return _read(path, size_bytes)
        except FileNotFoundError:
            partial = _write_beside(path, secrets.token_bytes(size_bytes), 0o600)
            try:
                os.link(partial, path)  # of several processes that make the file, one does
            except FileExistsError:
                pass
            finally:
                partial.unlink()
    return _read(path, size_bytes)


def _read(path: Path, size_bytes: int) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        content = file.read(size_bytes + 1)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a file of yours that is closed to others (chmod 600)")
    if len(content) != size_bytes:
        raise PermissionError(f"{path} is damaged: remove it, and farcall makes a new one")
    return content
