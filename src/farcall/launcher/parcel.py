"""The working directory of the driver, packed for workers that have none of the same path.

Owns what is packed (all but what ``.gitignore`` files name, and ``.git``), its name (a hash of its bytes, so that a
host which has it is not sent it again) and where it lies at a worker: in a directory that only this user may enter.
The functions at the end run on workers.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farcall.channel.segments import host_token
from farcall.errors import LaunchFailed
from farcall.private_files import private_directory, runtime_directory
from farcall.rpc.handles import Worker

__all__ = ["Parcel"]

MOST_BYTES = 512 << 20
SEND_S = 600.0


class Parcel:
    """A directory as one piece of bytes. Any thread may send it."""

    def __init__(self, directory: str) -> None:
        self._data = _pack(directory)
        self.name: str = hashlib.sha256(self._data).hexdigest()
        root = Path(directory).resolve()
        entries = (Path(entry or ".").resolve() for entry in sys.path)
        # Of the program's own modules: those below the directory.
        self._path = [str(entry.relative_to(root)) for entry in entries if entry.is_relative_to(root)]
        self._sending: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def send(self, worker: Worker) -> None:
        """Have the directory at the worker, and the worker in it."""
        patient = worker.options(timeout=SEND_S)
        with self._sending[patient.call(host_token)]:  # one worker of each host at a time: the second finds it there
            if not patient.call(enter_parcel, self.name, self._path):
                patient.call(unpack_parcel, self.name, self._data)
                patient.call(enter_parcel, self.name, self._path)


def _pack(directory: str) -> bytes:
    packed = io.BytesIO()
    # The same files give the same bytes: no times, no owners.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name in _files(directory):
            archive.add(os.path.join(directory, name), name, recursive=False, filter=_anonymous)
            if packed.tell() > MOST_BYTES:
                raise LaunchFailed(
                    f"ship=True would send more than {MOST_BYTES >> 20} MiB of {directory}: name in .gitignore what "
                    "workers do not need, or put data where they can read it"
                )
    return packed.getvalue()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    return entry


def _files(directory: str) -> list[str]:
    """The files below ``directory`` that git would not ignore, by relative path."""
    if shutil.which("git") is None:
        raise LaunchFailed("ship=True reads .gitignore by git, which is not installed here")
    # A repository of its own, so that it works outside one, and so that files of an outer one's index do not matter.
    with tempfile.TemporaryDirectory(prefix="farcall-ship-") as scratch:
        subprocess.run(["git", "init", "-q", "--bare", scratch], check=True, capture_output=True)
        listing = ["git", f"--git-dir={scratch}", f"--work-tree={directory}", "ls-files", "-z", "--others"]
        found = subprocess.run([*listing, "--exclude-standard"], cwd=directory, check=True, capture_output=True)
    names = [os.fsdecode(name) for name in found.stdout.split(b"\0") if name]
    return sorted(name for name in names if not name.endswith("/"))


# At a worker.


def _folder(name: str) -> Path:
    return private_directory(private_directory(runtime_directory()) / "parcels") / name


def enter_parcel(name: str, path: Sequence[str]) -> bool:
    """Work in the directory of this name, if it is here."""
    folder = _folder(name)
    if not folder.is_dir():
        return False
    os.chdir(folder)
    sys.path[:0] = [os.path.normpath(folder / entry) for entry in path] or [str(folder)]
    return True


def unpack_parcel(name: str, data: bytes) -> None:
    """Put the directory where `enter_parcel` finds it, at once and whole."""
    folder = _folder(name)
    if hashlib.sha256(data).hexdigest() != name:
        raise ValueError("the directory that was sent is not the one that was packed")
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # of Python 3.11.4
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(scratch, **safely)
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():  # else another program of this user sent the same meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
