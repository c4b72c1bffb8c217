"""Who reads a link: the role of the reader, how a thread gives it up, and how it is taken away.

Reading a link is a role that one thread has at a time. A reader must not block: frames behind the one it handles may be
what it would wait for. So everything in farcall that is about to wait calls ``stop_reading`` first.

A hop to a worker thread costs more than most functions that take microseconds. So a request whose function was quick
when it last ran is run by the I/O thread itself, and an answer without Python callbacks is unpickled, and its future
completed, by the thread that read it. The rule that control messages never wait for user code still holds: a standby
thread looks in every LOOK_S, and when a reader has been busy with one thing for longer than that, another thread reads
on. The old one finishes what it does, and is a reader no more.

Who owns the role meanwhile is decided by a `Watch`, a list with one item: popping it is atomic.

    popped by                               then
    the reader, done with its frames        it goes on
    the standby thread, reader too slow     the link is freed; for an I/O thread a fresh one takes its place
    the reader, about to wait               the same (`stop_reading`), by itself
"""

from __future__ import annotations

import asyncio
import logging
import threading
from time import monotonic
from typing import Protocol

logger: logging.Logger = logging.getLogger("farcall")

LOOK_S = 0.005
_LOOKS_BEFORE_SLEEP = 40
_get_ident = threading.get_ident


class Readable(Protocol):
    """A link, as far as its reader is concerned."""

    def end_reading(self) -> None:
        """Let another thread read on."""


class ReadingLoop(Protocol):
    """A loop whose I/O thread reads all links that nobody else reads."""

    def on_thread(self) -> bool:
        """Is the caller its I/O thread?"""

    def hand_over(self) -> None:
        """Let a fresh thread be the I/O thread from now on."""


class Replaceable(Protocol):
    """A reader's link, as far as the standby thread is concerned."""

    def pass_on(self) -> None:
        """Let another thread read on. Called by the standby thread."""


class Watch(list[Replaceable]):
    """The watch over a reader that is busy with one thing; empty once somebody has claimed the role."""

    __slots__ = ("since",)

    since: float


def claim(watch: Watch) -> bool:
    """Decide who has the role; False if that is decided already."""
    try:
        watch.pop()
    except IndexError:
        return False
    return True


class _Reading(threading.local):
    """What the calling thread reads: one link, or, as the I/O thread of a loop, all that nobody else does.

    ``watch``: over the function that the thread runs meanwhile.
    """

    link: Readable | None = None
    watch: Watch | None = None
    loop: ReadingLoop | None = None


reading: _Reading = _Reading()


def in_event_loop() -> bool:
    """Does an event loop of asyncio's run on this thread? Whoever waits here holds up all that runs on it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def stop_reading() -> None:
    """To be called by a thread about to block: if it reads, somebody else must read on."""
    link = reading.link
    if link is not None:
        # Of this thread, not of the link: another one may be the I/O thread by now and run a function, too.
        watch = reading.watch
        if watch is not None:
            reading.watch = None
            if not claim(watch):
                # Taken away already: another thread reads on, and one that was the I/O thread has a successor.
                reading.link = reading.loop = None
                return
        link.end_reading()
    loop = reading.loop
    if loop is not None and loop.on_thread():
        loop.hand_over()


class Standby:
    """The watch over the readers of one node. Its thread is started at first use and sleeps while nothing runs."""

    def __init__(self, name: str, look_s: float = LOOK_S) -> None:
        self._name = name
        self._look_s = look_s
        self._running: dict[int, Watch] = {}  # by thread
        self._wake = threading.Lock()
        self._wake.acquire()
        self._asleep = True
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self, reader: Replaceable) -> Watch:
        """The calling thread, a reader, begins something that may take long."""
        watch = Watch((reader,))
        watch.since = monotonic()
        self._running[_get_ident()] = watch
        if self._asleep:
            self._rouse()
        return watch

    def end(self, watch: Watch) -> bool:
        """It is done. False: the role was taken away meanwhile."""
        # `forget` and `claim`, without the calls: this is on the way of every request.
        thread = _get_ident()
        if self._running.get(thread) is watch:
            self._running.pop(thread, None)
        try:
            watch.pop()
        except IndexError:
            return False
        return True

    def forget(self) -> None:
        """The calling thread is no reader any more."""
        self._running.pop(_get_ident(), None)

    def _rouse(self) -> None:
        self._asleep = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name=f"farcall-standby-{self._name}", daemon=True)
            self._thread.start()
        else:
            self._release()

    def _release(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            pass  # released before, and not taken yet: it is about to look

    def _look(self) -> None:
        quiet = 0
        while not self._ended:
            watched = [watch for watch in list(self._running.values()) if watch]
            now = monotonic()
            for watch in watched:
                if now - watch.since > self._look_s:
                    self._take_over(watch)
            quiet = 0 if watched else quiet + 1
            if quiet > _LOOKS_BEFORE_SLEEP:
                quiet = 0
                # begin() sets _running before it looks at _asleep, so one of the two sees the other.
                self._asleep = True
                if not any(self._running.values()):
                    self._wake.acquire()
                    continue
                self._asleep = False
            self._wake.acquire(True, self._look_s)

    def _take_over(self, watch: Watch) -> None:
        try:
            reader = watch.pop()
        except IndexError:
            return  # it is done this moment
        try:
            reader.pass_on()
        except Exception:
            logger.exception("cannot pass on the role of the reader; please report this")

    def stop(self) -> None:
        """End the thread."""
        self._ended = True
        thread = self._thread
        if thread is not None:
            self._release()
            if thread is not threading.current_thread():
                thread.join(1.0)
