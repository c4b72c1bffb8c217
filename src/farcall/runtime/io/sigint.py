"""Ctrl-C that never tears a frame.

User threads read and write sockets themselves. A ``KeyboardInterrupt`` raised between "the kernel took 700 bytes" and
"we noted that 700 bytes are gone" would leave a stream that nobody can continue. So while the main thread is inside
such a section (``enter`` .. ``leave``: microseconds, or a bounded wait) our SIGINT handler holds the signal back, and
``leave`` passes it to the previous handler. Taking a lock is such a section, too: a signal may come between the call
that takes the lock and the ``try`` behind it.

Signal handlers run on the main thread only, so only that thread touches the state below, and it needs no lock.
A handler that the program installs later replaces ours, and takes the risk with it: a torn link is then reported as
broken.
"""

from __future__ import annotations

import os
import signal
import threading
from math import inf
from time import monotonic
from types import FrameType
from typing import Any

SLICE_S = 1.0
"""The longest time for which the main thread may miss a signal."""
_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident


class SigintGuard:
    """How many sections that SIGINT may not cut a thread is inside, and the signal that came meanwhile."""

    __slots__ = ("before", "depth", "held", "sealed", "users")

    def __init__(self) -> None:
        self.depth: int = 0
        self.sealed: int = 0
        self.held: tuple[int, FrameType | None] | None = None
        self.users: int = 0
        self.before: Any = None


_state = SigintGuard()


class _Here(threading.local):
    """The guard of the calling thread; all threads but the main one share a dummy.

    For use without function calls, since the interpreter looks for signals at each call: ``depth += 1`` begins a
    section; ``depth -= 1`` and, if a signal is ``held``, ``deliver()`` end it.
    """

    guard: SigintGuard = SigintGuard()


here: _Here = _Here()
if _get_ident() == _main_thread:
    here.guard = _state  # else `install` does it, on the main thread: before that there is no handler of ours


def enter() -> None:
    """Begin a section that SIGINT may not cut."""
    here.guard.depth += 1


def leave() -> None:
    """End the section, and handle a signal that came meanwhile."""
    guard = here.guard
    guard.depth -= 1
    if guard.held is not None:
        deliver()


def seal() -> None:
    """Like ``enter``, but even the waits inside cannot be cut: for the end of a node, whose waits are bounded."""
    here.guard.sealed += 1


def unseal() -> None:
    """End what ``seal`` began."""
    guard = here.guard
    guard.sealed -= 1
    if guard.held is not None:
        deliver()


def deliver() -> None:
    """Handle the held signal, unless an outer section is still under way."""
    if _state.depth == _state.sealed == 0 and _state.held is not None and _get_ident() == _main_thread:
        held, _state.held = _state.held, None
        _handle(*held)


def pause(guard: SigintGuard) -> None:
    """At a point inside a section where SIGINT may cut it: let a held signal through."""
    if guard.held is not None:
        depth, guard.depth = guard.depth, 0
        try:
            deliver()
        finally:
            guard.depth = depth


class Gate:
    """A gate at which one thread waits until another opens it.

    Not a ``threading.Event``: Ctrl-C in the middle of its ``wait`` can leave its inner lock taken, and the thread that
    sets it, our I/O thread, would then wait for ever.

    The main thread wakes up every SLICE_S. A signal ends a wait only if it interrupts the kernel's part of it. One that
    comes a moment earlier, while the thread passes the interpreter on, or that the kernel gives to another thread, is
    noticed at the next Python instruction.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let one thread through: the waiting one, or the next. From any thread; never blocks."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # already open

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until the gate is open, and close it again; False after ``timeout_s`` (-1: no bound)."""
        acquire = self._lock.acquire
        if _get_ident() != _main_thread or 0 <= timeout_s <= SLICE_S:
            return acquire(True, timeout_s)
        until = monotonic() + timeout_s if timeout_s >= 0 else inf
        while not acquire(True, max(0.0, min(SLICE_S, until - monotonic()))):
            if monotonic() >= until:
                return False
        return True


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.depth or _state.sealed:
        _state.held = (number, frame)
    elif callable(_state.before):
        _state.before(number, frame)


def install() -> bool:
    """Put our handler before the current one, if possible; True: ``uninstall`` must follow."""
    if _get_ident() != _main_thread:
        return False  # Python allows this on the main thread only
    here.guard = _state
    _state.users += 1
    current = signal.getsignal(signal.SIGINT)
    if current is not _handle and callable(current):
        _state.before = current
        signal.signal(signal.SIGINT, _handle)
    return True


def uninstall() -> None:
    """Restore the previous handler once no node needs ours. Off the main thread ours stays: it does no harm."""
    _state.users = max(0, _state.users - 1)
    if _get_ident() == _main_thread and _state.users == 0 and signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, _state.before)
        _state.before = None


def _after_fork() -> None:
    """In a forked child the forking thread is the main thread, and no node needs the handler yet."""
    global _main_thread
    _main_thread = _get_ident()
    here.guard = _state
    _state.depth = _state.sealed = _state.users = 0
    _state.held = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
