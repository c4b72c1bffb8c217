"""How threads wait in the Python core, and what they hold meanwhile: no frames, links or calls.

A signal's handler may raise anywhere in the main thread. So inside of `Interrupts` it is held back, until its end or
until the thread sleeps: what the core holds is whole then.
"""

from __future__ import annotations

import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # 20 ns; that of `signal` looks for an enum's member
from _signal import signal as set_handler
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from farcall.core.contract import Stopped

_in_wait = False
_others: list[Callable[[], bool]] = []


def in_wait() -> bool:
    """For a handler of a signal: is it run by a wait of a core, which it may end by raising?

    Only the first to ask is told so: what a handler then does itself is no wait.
    """
    global _in_wait
    found, _in_wait = _in_wait, False
    return found or any(other() for other in _others)


def look_at(other: Callable[[], bool]) -> None:
    """Ask another implementation, too."""
    _others.append(other)


_SIGNALS: Final = sorted(map(int, signal.valid_signals()))


class Interrupts:
    """While this is entered, no handler of a signal runs in the main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Any] = {}
        """The program's."""
        self._held: deque[tuple[Any, int, FrameType | None]] = deque()

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            try:
                self._depth += 1
                if self._depth == 1:
                    self._hold_back()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self._depth -= 1
            if self._depth == 0:
                self._let_through()

    def sleep(self, sleeper: Sleeper, seconds: float) -> None:
        """A handler that raises ends this."""
        if threading.get_ident() != threading.main_thread().ident:
            sleeper.sleep(seconds)
            return
        global _in_wait
        try:
            _in_wait = True
            self._let_through()
            _in_wait = True
            sleeper.sleep(seconds)
        finally:
            _in_wait = False
            self._hold_back()

    def _hold_back(self) -> None:
        for number in _SIGNALS:
            handler = getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                set_handler(number, self._hold)

    def _let_through(self) -> None:
        try:
            while self._handlers:
                number = min(self._handlers)
                set_handler(number, self._handlers[number])
                del self._handlers[number]
            while self._held:
                handler, number, frame = self._held.popleft()
                handler(number, frame)
        finally:
            if self._handlers:  # one that runs again has raised
                self._let_through()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((self._handlers[number], number, frame))


class Section:
    """The lock of a core. Reentrant: a destructor may run anywhere, and post something, or queue a task."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def __enter__(self) -> None:
        if self.forked:  # a thread of the parent's may have held the lock
            raise Stopped("a forked child has none of its parent's cores")
        self._interrupts.__enter__()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._interrupts.__exit__()


class Bell:
    """Two ends of a pipe: the one is readable after `ring`, until `unring`."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self._rung = False

    def fileno(self) -> int:
        return self._out

    def ring(self) -> None:
        if not self._rung:
            self._rung = True
            os.write(self._in, b"!")

    def unring(self) -> None:
        if self._rung:
            os.read(self._out, 1)
            self._rung = False

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)


class Sleeper:
    """A thread that waits in the core."""

    def __init__(self) -> None:
        self.rung: bool = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        if not self.rung:
            self.rung = True
            self._lock.release()

    def unring(self) -> None:
        """Before it looks for what it was rung for."""
        if self.rung:
            self._lock.acquire(False)  # it may have been rung just after its sleep was over
            self.rung = False

    def sleep(self, seconds: float) -> None:
        self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
