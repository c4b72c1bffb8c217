"""The destination of farcall's log lines.

farcall logs through ``logging``, to the logger ``farcall``: one line per event, with the names of workers. A program
that configures logging configures these lines, too. Other programs set ``FARCALL_LOG=info`` or ``debug``, perhaps with
``:file``, which adds one handler. Without either, only warnings and errors are printed: Python's default.
"""

from __future__ import annotations

import logging
import os

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process)d farcall: %(message)s"
_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_logger = logging.getLogger("farcall")


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that FARCALL_LOG adds."""

    told: str


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def log_as_told(told: str | None) -> None:
    """Log according to ``told`` (a valid FARCALL_LOG) from now on; None changes nothing. The last call counts."""
    if told is None:
        return
    before = next((handler for handler in _logger.handlers if isinstance(handler, _OwnHandler)), None)
    if before is not None:
        if before.told == told:
            return
        _logger.removeHandler(before)
        before.flush()
        if before.told.partition(":")[2]:
            before.stream.close()
    level, _, file = told.partition(":")
    # Append line by line: several workers of one host may share the file. Only its user may read it, since it contains
    # names of functions and texts of errors.
    stream = open(os.path.expanduser(file), "a", buffering=1, opener=_private) if file else None  # noqa: SIM115
    handler = _OwnHandler(stream)
    handler.told = told
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    _logger.addHandler(handler)
    _logger.setLevel(_LEVELS[level])
    _logger.propagate = False  # else a program that has configured logging would print each line twice
