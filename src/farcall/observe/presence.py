"""Presence files: one small file for each node, by which commands on this host find the nodes of this user.

Owns the directory, its files, and which of them are stale. A file has the addresses of its node and the observer's key:
its reader can look on, and no more (`protocol/handshake`). Only their user can read the directory and the files; a
directory that others could have put files into is not used.

A node removes its file when it ends. The file of a killed node is removed by the next command, which sees that the
process is gone (or that its number has gone to another). Of a process in another container nothing is known, so its
file stays.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from farcall.private_files import check_private, private_directory
from farcall.protocol.hello import observer_key
from farcall.secret import Secret

logger: logging.Logger = logging.getLogger("farcall")

_SUFFIX = ".node"
_MAX_FILE_BYTES = 64 * 1024


class Presence(msgspec.Struct, frozen=True):
    """A node on this host."""

    name: str
    rank: int
    cluster_id: str
    addresses: tuple[str, ...]
    key: str
    """The observer's key, in hexadecimal digits; empty where the secret is in a file, which may change."""
    process_id: int
    process_start: str
    """The start of the process, in the kernel's words: process ids are used again."""
    namespace: str
    """The namespace of the process id."""
    started_at: float
    cluster_name: str = ""
    secret_file: str = ""

    def observer_key(self) -> bytes:
        """What an observer of this node proves now; raises ``ValueError`` where the secret's file cannot be read."""
        return observer_key(Secret(path=self.secret_file).values[0]) if self.secret_file else bytes.fromhex(self.key)


class PresenceFile:
    """The file of one node, from its start to its end."""

    def __init__(self, directory: Path, presence: Presence) -> None:
        """Raises ``OSError`` where it cannot be written safely."""
        private_directory(directory)
        token = os.urandom(4).hex()
        self._path = directory / f"{presence.process_id}-{token}{_SUFFIX}"
        partial = self._path.with_suffix(".partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(presence))
        os.rename(partial, self._path)  # readers see all of it or nothing
        self._process_id = os.getpid()

    def remove(self) -> None:
        """The node has ended."""
        if os.getpid() == self._process_id:  # a forked child must not
            self._path.unlink(missing_ok=True)


def find_nodes(directory: Path) -> list[Presence]:
    """The nodes of this user on this host, the youngest cluster first; files of dead ones are removed.

    Raises ``PermissionError`` for a directory that nodes do not use because others may write to it.
    """
    try:
        check_private(directory)
    except FileNotFoundError:
        return []
    found = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                continue
            presence = msgspec.json.decode(path.read_bytes(), type=Presence)
        except (OSError, msgspec.DecodeError, ValueError):
            continue  # removed this moment, or not ours
        if _is_stale(presence):
            path.unlink(missing_ok=True)
        else:
            found.append(presence)
    youngest: dict[str, float] = {}
    for one in found:
        youngest[one.cluster_id] = max(youngest.get(one.cluster_id, 0.0), one.started_at)
    return sorted(found, key=lambda one: (-youngest[one.cluster_id], one.cluster_id, one.rank))


def process_start(process_id: int) -> str:
    """The start of a process; empty if there is none, or it cannot be known."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""


def namespace() -> str:
    """The namespace of process ids that this process lives in."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_stale(presence: Presence) -> bool:
    if presence.namespace != namespace():
        return False
    if presence.process_start:
        return process_start(presence.process_id) != presence.process_start
    try:
        os.kill(presence.process_id, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
