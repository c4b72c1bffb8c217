"""A temporary directory of one process; a later one removes those of processes that a signal ended too soon."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_BEING_MADE_S = 60.0
"""A directory is made first and locked then: a younger one may have a process, though no lock."""


class OwnFolder(tempfile.TemporaryDirectory[str]):
    """A new directory, which goes with its process.

    A lock on it says that its process lives, whatever number that had: the kernel takes the lock back.
    """

    def __init__(self, prefix: str) -> None:
        import fcntl  # for Linux alone, and the driver imports this module

        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(left)
        super().__init__(prefix=prefix)
        self._held = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: then only this process removes the directory
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def cleanup(self) -> None:
        """Remove it; again is no error."""
        super().cleanup()
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)


def _remove_if_left(folder: Path) -> None:
    import fcntl

    try:
        found = folder.lstat()
        if found.st_uid != os.getuid() or time.time() - found.st_mtime < _BEING_MADE_S:
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # its process lives
    finally:
        os.close(descriptor)
