"""Presence files: one small file per node, through which commands on this host find the nodes of this user.

Owns the directory, its files, and the decision which of them are stale. A file holds the addresses of its node and the
observer's key: its reader can observe, and no more (`protocol/handshake`). Only the user can read the directory and the
files; a directory that other users can write to is not used.

A node removes its file when it ends. The file of a killed node is removed by the next node that starts, or the next
command: its process is gone, or (only commands look that closely) another process has its id. The file of a process in
another container stays, since its state is unknown here.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from farcall.private_files import check_private, pid_namespace, private_directory, remove_left_files, write_whole
from farcall.protocol.hello import observer_key
from farcall.secret import Secret

_SUFFIX = ".node"
_MAX_FILE_BYTES = 64 * 1024


class Presence(msgspec.Struct, frozen=True):
    """A node on this host."""

    name: str
    rank: int
    cluster_id: str
    addresses: tuple[str, ...]
    key: str
    """The observer's key, in hexadecimal digits; empty if the secret is in a file, which may change."""
    process_id: int
    process_start: str
    """The start time of the process, as the kernel writes it: process ids are reused."""
    namespace: int
    """The namespace of the process id."""
    started_at: float
    cluster_name: str = ""
    secret_file: str = ""
    encrypts: bool = True
    program: str = ""
    """The name of the program that it is part of; empty if it has none, as a worker of `farcall.launch`."""

    def observer_key(self) -> bytes:
        """The key that an observer must prove now; raises ``ValueError`` if the secret's file cannot be read."""
        return observer_key(Secret(path=self.secret_file).values[0]) if self.secret_file else bytes.fromhex(self.key)


_DECODER: msgspec.json.Decoder[Presence] = msgspec.json.Decoder(Presence)


class PresenceFile:
    """The file of one node, from its start to its end."""

    def __init__(self, directory: Path, presence: Presence) -> None:
        """Raise ``OSError`` if the file cannot be written safely."""
        private_directory(directory)
        remove_left_files(directory, _SUFFIX)
        self._path = directory / f"{presence.namespace}-{presence.process_id}-{os.urandom(4).hex()}{_SUFFIX}"
        write_whole(self._path, msgspec.json.encode(presence))
        self._process_id = os.getpid()

    def remove(self) -> None:
        """Remove the file: the node has ended."""
        if os.getpid() == self._process_id:  # a forked child must not remove its parent's file
            self._path.unlink(missing_ok=True)


def find_nodes(directory: Path) -> list[Presence]:
    """Find the nodes of this user on this host, the youngest cluster first; remove the files of dead nodes.

    Raises ``PermissionError`` for a directory that nodes do not use because other users may write to it.
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
            presence = _DECODER.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, ValueError):
            continue  # removed meanwhile, or not a presence file
        if _is_stale(presence):
            path.unlink(missing_ok=True)
        else:
            found.append(presence)
    youngest: dict[str, float] = {}
    for one in found:
        youngest[one.cluster_id] = max(youngest.get(one.cluster_id, 0.0), one.started_at)
    return sorted(found, key=lambda one: (-youngest[one.cluster_id], one.cluster_id, one.rank))


def process_start(process_id: int) -> str:
    """The start time of a process; empty if it does not exist, or the system does not tell."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_stale(presence: Presence) -> bool:
    if presence.namespace != pid_namespace():
        return False
    if presence.process_start:
        return process_start(presence.process_id) != presence.process_start
    try:
        os.kill(presence.process_id, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
