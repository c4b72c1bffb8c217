"""Ctrl-C that never tears a frame.

Threads of the user read and write sockets themselves. A ``KeyboardInterrupt`` raised between "the kernel took 700
bytes" and "we noted that 700 bytes are gone" would leave a stream that nobody can continue. So while the main thread is inside
such a section (``enter`` .. ``leave``: microseconds, never a wait) our SIGINT handler keeps the signal, and
``leave`` passes it to the handler that was there before.

Signal handlers run on the main thread only, so only that thread touches the state below, and it needs no lock.
A handler that the program installs later replaces ours, and takes the risk with it: a torn link is then reported as broken.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident


class _Shield:
    __slots__ = ("before", "depth", "held", "users")

    def __init__(self) -> None:
        self.depth = 0
        self.held: tuple[int, FrameType | None] | None = None
        self.users = 0
        self.before: Any = None


_state = _Shield()


def enter() -> None:
    """Begin a section that SIGINT may not cut. On other threads than the main one it costs a comparison."""
    if _get_ident() == _main_thread:
        _state.depth += 1


def leave() -> None:
    """End the section; a signal that came meanwhile is handled now."""
    if _get_ident() == _main_thread:
        # Never below 0: an interrupt between two lines of a caller may have skipped an enter().
        _state.depth = max(0, _state.depth - 1)
        if _state.held is not None and _state.depth == 0:
            held, _state.held = _state.held, None
            _handle(*held)


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.depth:
        _state.held = (number, frame)
    elif callable(_state.before):
        _state.before(number, frame)


def install() -> None:
    """Put our handler before the current one; a no-op off the main thread, or where SIGINT is ignored."""
    if _get_ident() != _main_thread:
        return
    _state.users += 1
    current = signal.getsignal(signal.SIGINT)
    if current is not _handle and callable(current):
        _state.before = current
        signal.signal(signal.SIGINT, _handle)


def uninstall() -> None:
    """Put the former handler back once no node needs ours."""
    if _get_ident() != _main_thread or _state.users == 0:
        return
    _state.users -= 1
    if _state.users == 0 and signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, _state.before)
        _state.before = None
