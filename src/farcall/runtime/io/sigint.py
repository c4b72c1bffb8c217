"""Ctrl-C that never tears a frame.

Threads of the user read and write sockets themselves. A ``KeyboardInterrupt`` raised between "the kernel took 700
bytes" and "we noted that 700 bytes are gone" would leave a stream that nobody can continue. So while the main thread
is inside such a section (``enter`` .. ``leave``: microseconds, or a bounded wait) our SIGINT handler keeps the
signal, and ``leave`` passes it to the handler that was there before. Taking a lock is such a section, too: between
the call that takes it and the ``try`` behind it there is room for a signal.

Signal handlers run on the main thread only, so only that thread touches the state below, and it needs no lock.
A handler that the program installs later replaces ours, and takes the risk with it: a torn link is then reported as
broken.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident


class SigintGuard:
    """How deep a thread is inside sections that may not be cut, and the signal that came meanwhile."""

    __slots__ = ("before", "depth", "held", "sealed", "users")

    def __init__(self) -> None:
        self.depth: int = 0
        self.sealed: int = 0
        self.held: tuple[int, FrameType | None] | None = None
        self.users: int = 0
        self.before: Any = None


_state = SigintGuard()
_other_threads = SigintGuard()


def of_thread() -> SigintGuard:
    """The shield of the calling thread; that of other threads than the main one is a dummy.

    To be used without calls, since the interpreter looks for signals at each one: ``depth += 1`` begins a section;
    ``depth -= 1`` and, if something is ``held``, ``deliver()`` end it.
    """
    return _state if _get_ident() == _main_thread else _other_threads


def enter() -> None:
    """Begin a section that SIGINT may not cut."""
    of_thread().depth += 1


def leave() -> None:
    """End the section; a signal that came meanwhile is handled now."""
    guard = of_thread()
    guard.depth -= 1
    if guard.held is not None:
        deliver()


def seal() -> None:
    """Like ``enter``, but even the waits inside cannot be cut: for the end of a node, whose waits are bounded."""
    of_thread().sealed += 1


def unseal() -> None:
    """End what ``seal`` began."""
    guard = of_thread()
    guard.sealed -= 1
    if guard.held is not None:
        deliver()


def deliver() -> None:
    """Handle the signal that is held, unless an outer section is still under way."""
    if _state.depth == _state.sealed == 0 and _state.held is not None and _get_ident() == _main_thread:
        held, _state.held = _state.held, None
        _handle(*held)


def pause(guard: SigintGuard) -> None:
    """Inside a section, at a point where it may be cut: let a held signal through."""
    if guard.held is not None:
        depth, guard.depth = guard.depth, 0
        try:
            deliver()
        finally:
            guard.depth = depth


class Gate:
    """For one thread to wait at until another opens it.

    Not a ``threading.Event``: Ctrl-C in the middle of its ``wait`` can leave its inner lock taken, and whoever
    opens it, our I/O thread, would then wait for good.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let the waiting thread, or the next one to come, through. From any thread; never blocks."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it is open

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until it is open, and close it behind; False after ``timeout_s`` (-1: no bound)."""
        return self._lock.acquire(True, timeout_s)


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.depth or _state.sealed:
        _state.held = (number, frame)
    elif callable(_state.before):
        _state.before(number, frame)


def install() -> bool:
    """Put our handler before the current one, where that can be done; True: ``uninstall`` must follow."""
    if _get_ident() != _main_thread:
        return False  # Python lets no other thread do that
    _state.users += 1
    current = signal.getsignal(signal.SIGINT)
    if current is not _handle and callable(current):
        _state.before = current
        signal.signal(signal.SIGINT, _handle)
    return True


def uninstall() -> None:
    """Put the former handler back once no node needs ours. Off the main thread ours stays: it does no harm."""
    _state.users = max(0, _state.users - 1)
    if _get_ident() == _main_thread and _state.users == 0 and signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, _state.before)
        _state.before = None


def _after_fork() -> None:
    """In a forked child the forking thread is the main thread, and no node needs the handler yet."""
    global _main_thread
    _main_thread = _get_ident()
    _state.depth = _state.sealed = _state.users = 0
    _state.held = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
