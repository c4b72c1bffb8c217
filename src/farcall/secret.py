"""The secret that every member of a cluster proves: given as a value, or in a file that is read again when it changes.

A file has one secret, or two while the secret is being changed, one to a line. A process proves the first and lets in
peers that prove either. To change the secret without shutting a member out, bring all files to one of these states
before any goes on to the next:

    old       before
    old, new  all members prove the old one, and know the new one
    new, old  all members prove the new one, and let in those with the old one
    new       after: the old one opens nothing any more

Where the changed file cannot be used, its earlier contents hold, and a warning is logged. Knows nothing of proofs.

A secret of fewer than 32 bytes is probably a word of somebody's. Whoever sees a proof can try words, so such a secret
is made slow to try: what others get is made of it by scrypt, in 0.1 s.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from functools import lru_cache

from farcall.private_files import Fingerprint, fingerprint

logger: logging.Logger = logging.getLogger("farcall")

MIN_SECRET_BYTES = 16
RANDOM_SECRET_BYTES = 32
"""Of so many bytes a secret is taken for random ones."""
_MAX_FILE_BYTES = 4096
_MOST = 2


class Secret:
    """The secret as one process knows it, for any thread. Mutable: the contents of the file."""

    __slots__ = ("_lock", "_seen", "_values", "path")

    def __init__(self, value: bytes = b"", *, path: str = "") -> None:
        """``value``, or the contents of the file ``path``; raises ``ValueError`` where they cannot be used."""
        self.path: str = path
        self._lock = threading.Lock()
        self._seen: Fingerprint = fingerprint([path]) if path else ()
        self._values: tuple[bytes, ...] = _read(path) if path else (value,)

    @property
    def values(self) -> tuple[bytes, ...]:
        """Keys made of those that are good now; the first is the one to prove."""
        return tuple(value if len(value) >= RANDOM_SECRET_BYTES else _once_stretched(value) for value in self.given())

    def given(self) -> tuple[bytes, ...]:
        """Those that are good now, as they were given."""
        if not self.path:
            return self._values
        with self._lock:
            seen = fingerprint([self.path])
            if seen != self._seen:
                self._seen = seen
                try:
                    self._values = _read(self.path)
                    logger.info("read the secret file again: it has %d secrets", len(self._values))
                except ValueError as error:
                    logger.warning("the old secret stays in use: %s", error)
            return self._values


_stretching = threading.Lock()
"""Without it, threads that need a key at the same time would make one each, of 32 MiB."""
if hasattr(os, "register_at_fork"):
    # A thread that holds it may exist only in the parent.
    os.register_at_fork(after_in_child=lambda: globals().update(_stretching=threading.Lock()))


def _once_stretched(value: bytes) -> bytes:
    with _stretching:
        return _stretched(value)


@lru_cache(maxsize=8)
def _stretched(value: bytes) -> bytes:
    return hashlib.scrypt(value, salt=b"farcall secret", n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32)


def _read(path: str) -> tuple[bytes, ...]:
    try:
        with open(path, "rb") as file:
            # Others may read it: secrets that are mounted into containers often are readable to all in there.
            if os.fstat(file.fileno()).st_mode & 0o022:
                raise ValueError(f"others may write to {path}: run chmod 600 {path}")
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read the secret file: {error}") from error
    found = tuple(line.rstrip(b"\r") for line in content.split(b"\n") if line.rstrip(b"\r"))
    if not 1 <= len(found) <= _MOST:
        raise ValueError(f"{path} has {len(found)} lines: write one secret, or two while you change it, one to a line")
    for one in found:
        check_secret(path, one)
    return found


def check_secret(where: str, value: object) -> str | bytes:
    """Return a secret; raise ``TypeError`` or ``ValueError`` if it cannot be used. ``where`` names its place."""
    if not isinstance(value, str | bytes):
        raise TypeError(f"{where} must be str or bytes, not {type(value).__name__}")
    size_bytes = len(value.encode() if isinstance(value, str) else value)
    if size_bytes < MIN_SECRET_BYTES:
        # The value stays out of the text: errors end up in logs.
        raise ValueError(
            f"{where}: a secret must be at least {MIN_SECRET_BYTES} bytes long, this one has {size_bytes}: "
            "make one with python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return value
