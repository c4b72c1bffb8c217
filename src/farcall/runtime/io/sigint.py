"""Ctrl-C that never tears a frame.

User threads read and write sockets themselves. A ``KeyboardInterrupt`` raised between "the kernel took 700 bytes" and
"we noted that 700 bytes are gone" would leave a stream that nobody can continue. So while the main thread is inside
such a section (``enter`` .. ``leave``: microseconds, or a bounded wait) our SIGINT handler holds the signal back, and
``leave`` passes it to the previous handler. Only a wait of the core inside lets it through: it may be cut, and what it
has received cannot be lost behind it. Taking a lock is such a section, too: a signal may come between the call
that takes the lock and the ``try`` behind it.

A program may set a handler of its own at any time (a notebook does so before each cell), and may set an earlier one
again. So each section that begins while none is under way looks, and puts ours before the program's (``look``). Each
of ours knows its own predecessor: a handler of the program's that calls the one before it, which is ours, must reach
the one before that.

Signal handlers run on the main thread only, so only that thread touches the state below, and it needs no lock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

# Takes 20 ns; `signal.getsignal`, which looks for a member of an enum, 2 us.
from _signal import getsignal  # type: ignore[import-not-found]
from _thread import start_new_thread
from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from types import FrameType

from farcall.core import in_wait
from farcall.destructors import DESTRUCTORS

SLICE_S = 1.0
"""The longest time for which the main thread may miss a signal."""
_AGAIN_S = 0.001
"""How long after a signal inside a destructor the main thread gets it again."""
_main_thread = threading.main_thread().ident
_get_ident = threading.get_ident


class SigintGuard:
    """How many sections that SIGINT may not cut a thread is inside, and the signal that came meanwhile."""

    __slots__ = ("again", "depth", "held", "pressing", "sealed")

    def __init__(self, depth: int = 0) -> None:
        self.depth: int = depth
        self.sealed: int = 0
        self.held: tuple[Callable[..., object], int, FrameType | None] | None = None
        """The program's handler, and what to call it with."""
        self.again: bool = False
        """Is the next signal ours, to have the held one handled?"""
        self.pressing: bool = False
        """Is there a thread that will send it?"""


_state = SigintGuard()
_users = 0
"""How many nodes need our handler. Any thread starts or ends a node."""


class _Here(threading.local):
    """The guard of the calling thread.

    For use without function calls: ``if not depth: look()`` and ``depth += 1`` begin a section; ``depth -= 1`` and, if
    a signal is ``held``, ``deliver()`` end it.
    """

    def __init__(self) -> None:
        # Python calls no handler on other threads: they count as inside a section, so they never look.
        self.guard: SigintGuard = _state if _get_ident() == _main_thread else SigintGuard(1)


here: _Here = _Here()


class _SigintHandler:
    """Our handler of SIGINT, before ``before``."""

    __slots__ = ("before",)

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, _state.again = _state.again, False
        may_cut = not _state.sealed and (in_wait() or not _state.depth)
        if again:
            if _state.held is None:
                return  # the end of a section was quicker
            if may_cut and not _in_destructor(frame):
                held, _state.held = _state.held, None
                _call(*held)
            else:
                _press_again_soon()
        elif _state.sealed:
            _state.held = (self.before, number, frame)
        elif not may_cut:
            _state.held = (self.before, number, frame)
            _press_again_soon()  # a wait may begin inside of the section
        elif _in_destructor(frame) and not _event_loop_listens():
            _state.held = (self.before, number, frame)
            _press_again_soon()
        else:
            _call(self.before, number, frame)


def _in_destructor(frame: FrameType | None) -> bool:
    """Is one of `destructors.py` on the stack? Then the signal is held, and sent again a moment later.

    A destructor is a section from before its first instruction: there Python looks for signals, and drops what the
    handler raises. A program would miss its Ctrl-C, and somebody might wait for ever for what it gives back.
    """
    while frame is not None:
        if frame.f_code in DESTRUCTORS:
            return True
        frame = frame.f_back
    return False


def _event_loop_listens() -> bool:
    """Has an event loop heard of the signal by itself? Then the handler does nothing, and it must not hear twice."""
    descriptor = signal.set_wakeup_fd(-1)  # there is no other way to ask
    if descriptor == -1:
        return False
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return True


def _press_again_soon() -> None:
    if not _state.pressing:
        _state.pressing = True
        try:
            start_new_thread(_press_again, ())  # not a `Thread`, whose locks the interrupted code may hold
        except RuntimeError:
            _state.pressing = False  # no thread: the end of the next section delivers the signal


def _press_again() -> None:
    sleep(_AGAIN_S)
    _state.pressing = False
    if _state.held is not None and _main_thread is not None:
        _state.again = True
        signal.pthread_kill(_main_thread, signal.SIGINT)


def _call(handler: Callable[..., object], number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    finally:
        look()  # it may have set another one ("the next Ctrl-C kills") while a section waits


def look() -> None:
    """On the main thread: put our handler before the program's, if it has set one."""
    current = getsignal(signal.SIGINT)
    # Not callable: ignored, the system's own, or set by code that is not Python. None of these raises.
    if current.__class__ is not _SigintHandler and _users and callable(current):
        if not _state.depth:
            _state.held, _state.again = None, False  # left by a destructor, for a handler that the program has replaced
        signal.signal(signal.SIGINT, _SigintHandler(current))


def enter() -> None:
    """Begin a section that SIGINT may not cut."""
    guard = here.guard
    if not guard.depth:
        look()
    guard.depth += 1


def leave() -> None:
    """End the section, and handle a signal that came meanwhile."""
    guard = here.guard
    guard.depth -= 1
    if guard.held is not None:
        deliver()


class WholeLock:
    """A re-entrant lock, and a section that SIGINT may not cut: what changes under it changes as a whole, or not."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        guard = here.guard  # `enter`, inlined: each use of a reference passes here
        if not guard.depth:
            look()
        guard.depth += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        guard = here.guard
        guard.depth -= 1
        if guard.held is not None:
            deliver()


def seal() -> None:
    """Like ``enter``, but even the waits inside cannot be cut: for the end of a node, whose waits are bounded."""
    guard = here.guard
    if not guard.depth:
        look()
    guard.sealed += 1


def unseal() -> None:
    """End what ``seal`` began."""
    guard = here.guard
    guard.sealed -= 1
    if guard.held is not None:
        deliver()


def deliver() -> None:
    """Handle the held signal, unless an outer section is still under way."""
    if _state.depth == _state.sealed == 0 and _state.held is not None and _get_ident() == _main_thread:
        if _in_destructor(sys._getframe()):
            _press_again_soon()
        else:
            held, _state.held = _state.held, None
            _call(*held)


def pause(guard: SigintGuard) -> None:
    """At a point inside a section where SIGINT may cut it: let a held signal through."""
    if guard.held is not None:
        depth, guard.depth = guard.depth, 0
        try:
            deliver()
        finally:
            guard.depth = depth


def exposed(wait: Callable[..., bool], *arguments: object) -> bool:
    """Inside a section, do ``wait(*arguments)``, which Ctrl-C may cut."""
    guard = here.guard
    depth, guard.depth = guard.depth, 0
    try:
        if guard.held is not None:
            deliver()
        return wait(*arguments)
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


def install() -> None:
    """A node needs our handler from now on, until `uninstall`."""
    global _users
    _users += 1
    if _get_ident() == _main_thread:
        look()  # a node started on another thread: the next section of the main thread does so


def uninstall() -> None:
    """Restore the program's handler once no node needs ours. Off the main thread ours stays: it does no harm."""
    global _users
    if _users:
        _users -= 1
    if not _users and _get_ident() == _main_thread:
        current = getsignal(signal.SIGINT)
        if isinstance(current, _SigintHandler):
            signal.signal(signal.SIGINT, current.before)


def _after_fork() -> None:
    """In a forked child the forking thread is the main thread, and no node needs the handler yet."""
    global _main_thread, _users
    _main_thread = _get_ident()
    here.guard = _state
    _state.depth = _state.sealed = _users = 0
    _state.held = None
    _state.again = _state.pressing = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
