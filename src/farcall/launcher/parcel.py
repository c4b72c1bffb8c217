"""The working directory of the driver, packed for workers that have none of the same path.

Owns the choice of files (all but ``.git``, those that ``.gitignore`` files name, and `SECRETS`), the name of a parcel
(a hash of its bytes, so that a host gets each only once) and its place at a worker: a directory that only this user may
enter. There the newest `KEPT` stay, and those in use: a worker holds a lock on its own, which ends with it. The
functions at the end run on workers.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from farcall.channel.segments import host_token
from farcall.errors import LaunchFailed
from farcall.private_files import private_directory, runtime_directory
from farcall.rpc.handles import Worker

logger: logging.Logger = logging.getLogger("farcall")

SECRETS = (
    *(".env", ".env.*", ".envrc", "*.key", "*.pem", "*.ppk", "*.p12", "*.pfx", ".netrc", ".pypirc", ".git-credentials"),
    *("id_rsa.*", "id_dsa.*", "id_ecdsa.*", "id_ed25519.*"),  # copies, too
    *(".ssh", ".gnupg", ".aws", ".kube"),
)
"""Files and directories that are not sent, whatever ``.gitignore`` says; so are private keys of SSH (``id_rsa``)."""
MOST_BYTES = 512 << 20
SEND_S = 600.0
KEPT = 4
_TRIES = 3
_LIST_S = 120.0
_LARGEST = 3
_MOST_NAMED = 5
_NAME_LENGTH = hashlib.sha256().digest_size * 2


class Parcel:
    """A directory as one piece of bytes. Any thread may send it."""

    def __init__(self, directory: str) -> None:
        self._data = _pack(directory)
        self.name: str = hashlib.sha256(self._data).hexdigest()
        root = Path(directory).resolve()
        entries = (Path(entry or ".").resolve() for entry in sys.path)
        # The program's own modules are in the entries below the directory.
        self._path = [str(entry.relative_to(root)) for entry in entries if entry.is_relative_to(root)]
        self._sending: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def send(self, worker: Worker) -> None:
        """Put the directory on the worker's host, and the worker into it."""
        patient = worker.options(timeout=SEND_S)
        with self._sending[patient.call(host_token)]:  # one worker of a host at a time: the next one finds it there
            for _ in range(_TRIES):
                if patient.call(enter_parcel, self.name, self._path):
                    return
                patient.call(unpack_parcel, self.name, self._data)
        raise LaunchFailed(f"{worker.name}: the directory that ship=True sent was deleted again and again")


def _pack(directory: str) -> bytes:
    packed = io.BytesIO()
    names = _without_secrets(_files(directory))
    _check_size(directory, names)
    # The same files give the same bytes: no times, no owners.
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for name in names:
            archive.add(os.path.join(directory, name), name, recursive=False, filter=_anonymous)
    return packed.getvalue()


def _without_secrets(names: Sequence[str]) -> list[str]:
    secret = [name for name in names if _is_secret(name)]
    if secret:
        more = len(secret) - _MOST_NAMED
        logger.warning(
            "ship=True leaves out what may be secret: %s%s. Workers that need it must get it in another way",
            ", ".join(secret[:_MOST_NAMED]),
            f" and {more} more" if more > 0 else "",
        )
    return [name for name in names if not _is_secret(name)]


def _is_secret(name: str) -> bool:
    parts = Path(name.lower()).parts
    is_key = parts[-1].startswith("id_") and "." not in parts[-1]  # id_ed25519; id_map.py is code
    return is_key or any(fnmatchcase(part, pattern) for part in parts for pattern in SECRETS)


def _check_size(directory: str, names: Sequence[str]) -> None:
    """Raise before a byte is read: the directory may hold a data set."""
    sizes = {name: os.lstat(os.path.join(directory, name)).st_size for name in names}
    if sum(sizes.values()) > MOST_BYTES:
        largest = sorted(names, key=lambda name: -sizes[name])[:_LARGEST]
        raise LaunchFailed(
            f"ship=True would send more than {MOST_BYTES >> 20} MiB of {directory}: name in .gitignore what workers do "
            "not need, or put data where they can read it. The largest: "
            + ", ".join(f"{name} ({sizes[name] >> 20} MiB)" for name in largest)
        )


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    return entry


def _files(directory: str) -> list[str]:
    """The files below ``directory`` that git would not ignore, by relative path."""
    if shutil.which("git") is None:
        raise LaunchFailed("ship=True needs git, which is not installed here")
    # In a repository of its own: this works outside of any, and does not see the index of an outer one.
    with tempfile.TemporaryDirectory(prefix="farcall-ship-") as scratch:
        _git(directory, "init", "-q", "--bare", scratch)
        place = (f"--git-dir={scratch}", f"--work-tree={directory}")
        found = _git(directory, *place, "ls-files", "-z", "--others", "--exclude-standard")
    names = []
    for name in (os.fsdecode(name) for name in found.split(b"\0") if name):
        if name.endswith("/"):  # a repository inside, a submodule perhaps: pack its files as well
            names += [name + inner for inner in _files(os.path.join(directory, name))]
        else:
            names.append(name)
    return sorted(names)


def _git(directory: str, *words: str) -> bytes:
    try:
        done = subprocess.run(["git", *words], cwd=directory, capture_output=True, timeout=_LIST_S)
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"ship=True: git did not list {directory} within {_LIST_S:g} s") from None
    if done.returncode:
        raise LaunchFailed(f"ship=True: git cannot list {directory}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


# At a worker.


def _folder(name: str) -> Path:
    return private_directory(private_directory(runtime_directory()) / "parcels") / name


def enter_parcel(name: str, path: Sequence[str]) -> bool:
    """Work in the directory of this name, if it is here."""
    folder = _folder(name)
    if not _hold(folder):
        return False
    os.utime(folder)  # the newest from now on
    os.chdir(folder)
    sys.path[:0] = [os.path.normpath(folder / entry) for entry in path] or [str(folder)]
    return True


def unpack_parcel(name: str, data: bytes) -> None:
    """Put the whole directory at once where `enter_parcel` finds it."""
    folder = _folder(name)
    if hashlib.sha256(data).hexdigest() != name:
        raise ValueError("the directory arrived damaged")
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        # Of Python 3.11.4. Links may lead out of the directory: to data that has the same path everywhere.
        safely: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(scratch, **safely)
        os.rename(scratch, folder)
    except OSError:
        if not folder.is_dir():  # another program of this user may have sent the same meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # of two processes that delete at the same time, one finds less than it listed
        _delete_old(folder)


def _hold(folder: Path) -> bool:
    """Keep the folder while this process, or a child of it, lives; False: there is no such folder."""
    import fcntl  # for Linux alone, and the driver imports this module

    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    with suppress(OSError):  # a file system without locks: nothing is deleted there
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while another process renames the folder, to delete it
    if folder.is_dir() and os.path.samestat(os.fstat(descriptor), os.stat(folder)):
        return True  # the descriptor stays open, and with it the lock
    os.close(descriptor)
    return False


def _delete_old(new: Path) -> None:
    """Delete folders that are neither new nor in use, and those that a killed process left half unpacked."""
    import fcntl

    age = {one: time.time() - one.lstat().st_mtime for one in new.parent.iterdir() if one != new}
    whole = sorted((one for one in age if len(one.name) == _NAME_LENGTH), key=lambda one: age[one])
    for one in whole[KEPT - 1 :]:
        descriptor = os.open(one, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unwanted = Path(tempfile.mkdtemp(dir=new.parent))
            os.rename(one, unwanted)  # under the lock: no process can enter it
            shutil.rmtree(unwanted, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(descriptor)
    for one in age:
        if one not in whole and age[one] > SEND_S:
            shutil.rmtree(one, ignore_errors=True)
