"""The destination of farcall's log lines.

farcall logs through ``logging``, to the logger ``farcall``, one line for each event, with the names of workers in it; a
program that configures logging configures that. ``FARCALL_LOG=info`` or ``debug``, perhaps with ``:file``, is for other
programs: it adds one handler. Without either nothing below a warning is printed: Python's default.
"""

from __future__ import annotations

import logging
import os

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process)d farcall: %(message)s"
_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_logger = logging.getLogger("farcall")


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler that FARCALL_LOG asks for."""

    told: str


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def log_as_told(told: str | None) -> None:
    """Log as ``told`` (a valid option) from now on; None changes nothing. The last call counts."""
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
    # Opened by us and appended to: several workers on one host may share a file, and a line is one write.
    # For its user's eyes: names of functions and errors are in it.
    stream = open(os.path.expanduser(file), "a", buffering=1, opener=_private) if file else None  # noqa: SIM115
    handler = _OwnHandler(stream)
    handler.told = told
    handler.setFormatter(logging.Formatter(_FORMAT, "%Y-%m-%d %H:%M:%S"))
    _logger.addHandler(handler)
    _logger.setLevel(_LEVELS[level])
    _logger.propagate = False  # or a program that has configured logging would print each line twice
