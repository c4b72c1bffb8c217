"""The I/O thread: sockets, timers and everything else that must never wait for user code.

Owns the poller and one thread. Knows nothing of frames, calls or peers: it calls handlers.

Thread rules
- Handlers, ``call_soon`` functions and timers run on the I/O thread, and none of them may block or run user code.
- Any thread may call ``call_soon``, ``timer``, ``watch``, ``silence``, ``listen`` and ``forget``. A function that a
  ``call_soon`` function queues in turn runs after timers and descriptors: long work is cut up that way.
- The links are not polled here: the core reads them (docs/design/CORE.md), and its descriptor says when it has news.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from farcall.runtime.io.log_lines import LogLines
from farcall.runtime.io.log_room import LogRoom
from farcall.runtime.io.reader import reading
from farcall.runtime.io.timers import Callback, Timer, Timers
from farcall.transport.descriptors import close_in_children

logger: logging.Logger = logging.getLogger("farcall")
logger.addFilter(LogLines())
logger.addFilter(LogRoom())

_HAS_EPOLL = hasattr(select, "epoll")
READ = 1
WRITE = 4 if _HAS_EPOLL else 2
"""The poller's own values: EPOLLIN and EPOLLOUT, or those of `selectors`."""
LONGEST_SLEEP_S = 3600.0
"""A bound for the poller, which does not take infinity."""

EventHandler = Callable[[int], None]
_get_ident = threading.get_ident


class _Selector:
    """The methods of ``select.epoll`` that the loop uses, for systems without it.

    A change of interest takes effect at the next sleep only, so the loop must be woken up after it.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._interest: dict[int, int] = {}
        self._lock = threading.Lock()

    def register(self, descriptor: int, events: int) -> None:
        with self._lock:
            self._interest[descriptor] = events

    modify = register

    def unregister(self, descriptor: int) -> None:
        with self._lock:
            self._interest.pop(descriptor, None)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        with self._lock:
            wanted = {fd: events for fd, events in self._interest.items() if events}
        registered = self._selector.get_map()
        for fd in [key.fd for key in list(registered.values()) if key.fd not in wanted]:
            self._selector.unregister(fd)
        for fd, events in wanted.items():
            if fd not in registered:
                self._selector.register(fd, events)
            elif registered[fd].events != events:
                self._selector.modify(fd, events)
        return [(key.fd, events) for key, events in self._selector.select(timeout_s)]

    def close(self) -> None:
        self._selector.close()


class Loop:
    """One I/O thread with its poller. Mutable: the handlers and interests of descriptors, the functions to call soon."""

    def __init__(self, name: str) -> None:
        self._poller: select.epoll | _Selector = select.epoll() if _HAS_EPOLL else _Selector()
        self._handlers: dict[int, EventHandler] = {}
        self._interest: dict[int, int] = {}
        self._interest_lock = threading.Lock()
        self._soon: deque[Callable[[], object]] = deque()
        self._timers = Timers(self.wake)
        self._running = True
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, READ)
        self._ident = 0
        self._on_thread_start: Callable[[], None] = lambda: None
        self._on_death: Callable[[BaseException], None] = lambda error: None
        self._thread = threading.Thread(target=self._run, name=f"farcall-io-{name}", daemon=True)
        close_in_children(self)

    def start(
        self,
        on_thread_start: Callable[[], None] = lambda: None,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start the I/O thread, which first calls ``on_thread_start``. If it ends with an error, it calls ``on_death``."""
        self._on_thread_start, self._on_death = on_thread_start, on_death
        self._thread.start()

    def on_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return _get_ident() == self._ident

    def timer(self, callback: Callback) -> Timer:
        """A timer whose ``callback(now)`` runs on the I/O thread, at the time set with ``at``."""
        return self._timers.timer(callback)

    def watch(self, descriptor: int, handler: EventHandler, events: int = READ) -> None:
        """Call ``handler(events)`` on the I/O thread whenever ``descriptor`` is ready."""
        with self._interest_lock:
            self._handlers[descriptor] = handler
            self._interest[descriptor] = events
            self._poller.register(descriptor, events)
        self._changed()

    def forget(self, descriptor: int) -> None:
        """Stop watching. Call this before closing the descriptor: its number may be reused at once."""
        with self._interest_lock:
            if self._handlers.pop(descriptor, None) is not None:
                del self._interest[descriptor]
                if self._wake_read >= 0:
                    self._poller.unregister(descriptor)
        self._changed()

    def silence(self, descriptor: int) -> None:
        """Stop reporting readability."""
        self._change(descriptor, 0, READ)

    def listen(self, descriptor: int) -> None:
        """Report readability again."""
        self._change(descriptor, READ, 0)

    def want_write(self, descriptor: int, wanted: bool) -> None:
        """Report, or stop reporting, that the descriptor takes more bytes."""
        self._change(descriptor, WRITE if wanted else 0, 0 if wanted else WRITE)

    def _change(self, descriptor: int, add: int, drop: int) -> None:
        with self._interest_lock:
            before = self._interest.get(descriptor)
            if before is None or self._wake_read < 0:
                return
            after = (before | add) & ~drop
            if after != before:
                self._interest[descriptor] = after
                self._poller.modify(descriptor, after)
        self._changed()

    def _changed(self) -> None:
        if not _HAS_EPOLL:
            self.wake()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the I/O thread as soon as possible."""
        self._soon.append(function)
        self.wake()

    def wake(self) -> None:
        """End the loop's sleep. Takes no lock, so destructors and signal handlers may call it."""
        if _get_ident() == self._ident:
            return  # the I/O thread itself: it looks at ``_soon`` and its timers before it sleeps
        try:
            os.write(self._wake_write, b"\0")
        except (BlockingIOError, OSError):
            pass  # a full pipe ends the sleep as well, and behind a closed one nobody sleeps

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close the poller. Idempotent."""
        self._running = False
        self.wake()
        if self._thread.is_alive() and not self.on_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.error("the I/O thread %s did not end within %s s", self._thread.name, timeout_s)
                return
        self._close()

    def _close(self) -> None:
        if self._wake_read >= 0:
            with contextlib.suppress(OSError):  # user code may have closed descriptors that are not its own
                self._poller.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
            self._wake_read = self._wake_write = -1

    def close_after_fork(self) -> None:
        """In a forked child: let go of the descriptors; the thread exists in the parent only."""
        self._running = False
        self._close()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # The poller itself fails, for example after a user function closed descriptors that are not its own.
            if self._running:
                logger.error("the I/O thread %s ends: %s", self._thread.name, error)
                self._running = False
                self._on_death(error)

    def _serve(self) -> None:
        self._ident = _get_ident()
        reading.loop = self
        self._on_thread_start()
        timers = self._timers
        while self._running:
            now = monotonic()
            if timers.named or now >= timers.next_due:
                timers.run_due(now)
            timeout_s = 0.0 if self._soon or timers.named else min(max(0.0, timers.next_due - now), LONGEST_SLEEP_S)
            for descriptor, flags in self._poller.poll(timeout_s):
                if descriptor == self._wake_read:
                    self._drain_wakes()
                    continue
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    try:
                        # Report errors and the peer's end as readable: the read finds out what they are.
                        handler(flags & WRITE | (READ if flags & ~WRITE else 0))
                    except Exception:
                        logger.exception("an I/O handler failed; please report this")
            for _ in range(len(self._soon)):
                # Only the functions queued now: those that they queue in turn run after timers and sockets.
                try:
                    self._soon.popleft()()
                except Exception:
                    # A bug in farcall must not end the thread that the whole node depends on.
                    logger.exception("an I/O handler failed; please report this")

    def _drain_wakes(self) -> None:
        try:
            while len(os.read(self._wake_read, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
