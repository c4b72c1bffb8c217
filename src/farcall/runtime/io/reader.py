"""The role of a link's reader: how a thread gives it up, and how it is taken away.

One thread at a time reads a link. It must not block: the frame that it would wait for may be behind the one that it
handles. So everything in farcall that is about to wait calls ``stop_reading`` first.

A garbage collection may begin anywhere and run destructors of the program's, also amid a read, or where this thread
holds a lock of farcall's. A wait in there would go on with bytes that are half read, or wait for its own thread. So it
raises if the collection interrupts farcall's machinery, once its call is made. (A flag around each such section would
raise less often, and cost every call more.)

A hop to a worker thread costs more than a function that takes microseconds. So the I/O thread itself runs a request
whose function was quick when it last ran, and the thread that read an answer without Python callbacks unpickles it and
completes its future. The rule that control messages never wait for user code still holds: a standby thread checks every
LOOK_S, and when a reader has been busy with one thing for longer than that, another thread reads on. The old reader
finishes what it does, and has lost the role.

A `Watch`, a list with one item, decides who owns the role meanwhile: popping it is atomic. A thread has one watch and
uses it for one frame after the other.

    popped by                               then
    the reader, done with its frames        it goes on
    the standby thread, reader too slow     the link is freed; for an I/O thread a fresh one takes its place
    the reader, about to wait               the same (`stop_reading`), by itself
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Protocol

from farcall.destructors import whole
from farcall.errors import RpcError

logger: logging.Logger = logging.getLogger("farcall")

LOOK_S = 0.005
_LOOKS_BEFORE_SLEEP = 40
_get_ident = threading.get_ident


class Readable(Protocol):
    """A link, as its reader sees it."""

    def end_reading(self) -> None:
        """Let another thread read on."""


class ReadingLoop(Protocol):
    """A loop whose I/O thread reads all links that have no other reader."""

    def on_thread(self) -> bool:
        """Is the caller the loop's I/O thread?"""

    def hand_over(self) -> None:
        """Make a fresh thread the I/O thread."""


class Replaceable(Protocol):
    """A reader's link, as the standby thread sees it."""

    def pass_on(self) -> None:
        """Let another thread read on. Called by the standby thread."""


class Watch(list[Replaceable]):
    """The watch over one thread; empty while that is not busy, and once a thread has claimed the role.

    The thread sets ``since``, then appends. So the standby thread never compares with the time of an earlier frame.
    """

    __slots__ = ("since", "standby")

    since: float
    standby: Standby


def claim(watch: Watch) -> bool:
    """Claim the role for the calling thread; False if another thread has claimed it."""
    try:
        watch.pop()
    except IndexError:
        return False
    return True


class _Reading(threading.local):
    """What the calling thread reads: one link, or, as the I/O thread of a loop, all links without another reader.

    ``watch`` is over the function that the thread runs meanwhile; ``idle_watch`` is the same object, to be used again.
    ``interrupted``: a garbage collection has begun on this thread, amid farcall's own code. It is the mark of the last
    one that had ended before; `is_interrupted` says whether this one still runs.
    """

    interrupted: object = None
    link: Readable | None = None
    watch: Watch | None = None
    idle_watch: Watch | None = None
    loop: ReadingLoop | None = None


reading: _Reading = _Reading()
_INTERRUPTIBLE = ("farcall.api", "farcall.node", "farcall.rpc.call", "farcall.rpc.future", "farcall.serialize")
"""Modules through which a call passes without a lock, and before it is a reader."""


_collections: dict[str, object] = {"stop": object()}
"""How the last garbage collection began and ended. Filled by C code, which no Ctrl-C can cut."""


@whole  # Python drops what a handler raises here
def _on_collection(
    phase: str,
    info: object,
    # Bound here: at the end of the interpreter the names of this module are gone, and collections go on.
    here: _Reading = reading,
    frame_of: Callable[[int], FrameType] = sys._getframe,
    library: frozenset[str] = sys.stdlib_module_names,
    interruptible: tuple[str, ...] = _INTERRUPTIBLE,
    collections: dict[str, object] = _collections,
) -> None:
    """Note whether a collection that begins on this thread interrupts farcall, called by the program or by a thread."""
    if phase != "start":
        return
    here.interrupted = None
    frame = frame_of(0).f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == "farcall" and not module.startswith(interruptible):
            here.interrupted = collections["stop"]
            return
        if package != "farcall" and package not in library:
            return  # the program's own code
        frame = frame.f_back


_CALLBACKS: tuple[Callable[[str, dict[str, int]], object], ...] = (_collections.__setitem__, _on_collection)


def watch_collections() -> Callable[[], None]:
    """Note collections from now on, until what is returned is called; needed while there is a node."""
    gc.callbacks.extend(_CALLBACKS)

    def end() -> None:
        for callback in _CALLBACKS:
            gc.callbacks.remove(callback)

    return end


def in_event_loop() -> bool:
    """Does an asyncio event loop run on this thread? A wait here would hold up all tasks of that loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_reader() -> bool:
    """Does the calling thread read a link, or all that nobody else reads? Then it must run no user code."""
    loop = reading.loop
    return reading.link is not None or (loop is not None and loop.on_thread())


def is_interrupted() -> bool:
    """Does a garbage collection run on this thread, amid farcall's own code? The caller is in a destructor, then."""
    if reading.interrupted is _collections["stop"]:
        return True
    reading.interrupted = None  # that collection is over
    return False


def stop_reading() -> None:
    """To be called by a thread about to block: if it is a reader, another thread must read on.

    Raises ``RpcError`` in a destructor that interrupts farcall itself.
    """
    if reading.interrupted is not None and is_interrupted():
        raise RpcError(
            "a destructor cannot wait for another worker here: the garbage collection that runs it interrupts farcall "
            "itself. Its call is made, but nobody gets the answer: use rpc_async in destructors"
        )
    link = reading.link
    if link is not None:
        # The watch of this thread, not of the link: another thread may read the link by now, under a watch of its own.
        watch = reading.watch
        if watch is not None:
            reading.watch = None
            if not claim(watch):
                # The role was taken away: another thread reads on, and if this was the I/O thread, it has a successor.
                reading.link = reading.loop = None
                return
        link.end_reading()
    loop = reading.loop
    if loop is not None and loop.on_thread():
        loop.hand_over()


class Standby:
    """The watch over the readers of one node. Its thread starts at first use and sleeps while no reader is busy.

    Mutable: the watches of busy readers, and whether the standby thread sleeps.
    """

    def __init__(self, name: str, look_s: float = LOOK_S) -> None:
        self._name = name
        self._look_s = look_s
        self._running: dict[int, Watch] = {}  # by thread
        self._wake = threading.Lock()
        self._wake.acquire()
        self.asleep: bool = True
        # Two readers may find the thread asleep at once, and none must start a second one, which nobody would end. Held
        # for a moment; re-entrant, since a garbage collection inside may run user code that reads a link.
        self._rousing = threading.RLock()
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self, reader: Replaceable) -> Watch:
        """The calling thread, a reader, begins something that may take long."""
        watch = reading.idle_watch
        if watch is None or watch.standby is not self:
            watch = reading.idle_watch = Watch()
            watch.standby = self
            self._running[_get_ident()] = watch
        watch.since = monotonic()
        watch.append(reader)
        if self.asleep:
            self.rouse()
        return watch

    def forget(self) -> None:
        """The calling thread is not a reader any more: drop its watch."""
        reading.idle_watch = None
        self._running.pop(_get_ident(), None)

    def rouse(self) -> None:
        """Wake the standby thread, which is asleep: a reader is busy."""
        with self._rousing:
            if not self.asleep:
                return  # another reader was faster; the standby thread sees the watches of both
            self.asleep = False
            if self._thread is not None:
                self._release()
                return
            thread = threading.Thread(target=self._look, name=f"farcall-standby-{self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # No thread can be started, so none could read on either. The next reader tries again.
                self.asleep = True
            else:
                self._thread = thread

    def _release(self) -> None:
        try:
            self._wake.release()
        except RuntimeError:
            pass  # already released, and not taken yet: the thread is about to look

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
                # A reader appends to its watch, then looks at ``asleep``; here the order is reversed. So one of the two
                # sees the other.
                self.asleep = True
                if not any(self._running.values()):
                    self._wake.acquire()
                    continue
                self.asleep = False
            self._wake.acquire(True, self._look_s)

    def _take_over(self, watch: Watch) -> None:
        try:
            reader = watch.pop()
        except IndexError:
            return  # the reader has just finished
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
