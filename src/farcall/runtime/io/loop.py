"""The I/O thread: sockets, timers and everything else that must never wait for user code.

Owns the poller and one thread. Knows nothing of frames, calls or peers: it calls handlers.

Thread rules
- Handlers, ``call_soon`` functions and timers run on the I/O thread, and none of them may block or run user code.
- Any thread may call ``call_soon``, ``timer``, ``watch``, ``silence``, ``listen`` and ``forget``. A function that a
  ``call_soon`` function queues in turn runs after timers and descriptors: long work is cut up that way.
- ``silence`` and ``listen`` change what the poller reports while it sleeps, without waking it up: so a thread that
  waits for its own answer reads the socket itself and leaves the I/O thread asleep. Only epoll can do that; elsewhere
  ``can_silence`` is False and the I/O thread reads everything.
- Timers are called when they are due (`timers.py`). Before each sleep the ``before_sleep`` hooks run: threads that they
  wake up find the interpreter free. Woken up in the middle of our work, they would have to wait for it.
- Code about to block on the I/O thread (a future's callback that makes a blocking call) first gives the role away with
  ``hand_over``: a fresh thread goes on, and the old one ends when it comes back. The standby thread does the same to a
  user function that was expected to be quick and is not (`reader.py`).
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
from functools import partial
from time import monotonic

from farcall.runtime.io.busy_wait import BusyWait
from farcall.runtime.io.log_lines import LogLines
from farcall.runtime.io.log_room import LogRoom
from farcall.runtime.io.reader import Standby, reading
from farcall.runtime.io.timers import Callback, Timer, Timers
from farcall.transport.descriptors import close_in_children

logger: logging.Logger = logging.getLogger("farcall")
logger.addFilter(LogLines())
logger.addFilter(LogRoom())

_HAS_EPOLL = hasattr(select, "epoll")
READ = 1
WRITE = 4 if _HAS_EPOLL else 2
"""The poller's own values: EPOLLIN and EPOLLOUT, or those of `selectors`."""
DEMAND_S = 0.02
"""How long the I/O thread, once in demand, leaves brief functions to other threads."""
HANDED_OVER_S = 30.0
"""The longest that a thread that lost the role waits for the standby thread to hand it over, which takes a moment."""
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
    """One I/O thread with its poller.

    Mutable: the handlers and interests of descriptors, the functions to call soon, and which thread has the role.
    """

    def __init__(self, name: str, busy_wait_s: float = 0.0) -> None:
        self._spin = BusyWait(busy_wait_s)
        self._poller: select.epoll | _Selector = select.epoll() if _HAS_EPOLL else _Selector()
        self.can_silence: bool = _HAS_EPOLL
        self._handlers: dict[int, EventHandler] = {}
        self._interest: dict[int, int] = {}
        self._interest_lock = threading.Lock()
        self._soon: deque[Callable[[], object]] = deque()
        self._before_sleep: list[Callable[[], bool]] = []
        self._timers = Timers(self.wake)
        self._running = True
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, READ)
        self._name = f"farcall-io-{name}"
        self._ident = 0
        self._waited_for = 0  # how often in a row `look_who_waits` found another descriptor waiting
        self.in_demand_until: float = 0.0
        """Until then the I/O thread leaves brief functions to other threads."""
        self._former: list[threading.Thread] = []
        self._role = threading.Condition(threading.Lock())  # guards ``_thread`` and ``_stays``
        self._stays: threading.Thread | None = None  # a thread that could get no successor, and keeps the role
        self._on_thread_start: Callable[[], None] = lambda: None
        self._starts = 0
        self._on_death: Callable[[BaseException], None] = lambda error: None
        self.standby: Standby = Standby(name)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        close_in_children(self)

    def look_who_waits(self, served: int | None) -> None:
        """On the I/O thread, after a task of descriptor ``served`` that took a while: does another descriptor wait now?

        Once may be chance; twice in a row means that the thread is in demand.
        """
        found = self._poller.poll(0.0)
        if not found or (len(found) == 1 and found[0][0] == served):
            self._waited_for = 0
            return
        self._waited_for += 1
        if self._waited_for >= 2:
            self.in_demand_until = monotonic() + DEMAND_S

    def start(
        self,
        on_thread_start: Callable[[], None] = lambda: None,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Start the I/O thread.

        Each thread that takes the role, also later, first calls ``on_thread_start``. A thread that ends with an error
        calls ``on_death``: nothing is read, and no timer runs, from then on.
        """
        self._on_thread_start, self._on_death = on_thread_start, on_death
        self._thread.start()

    def renew(self) -> None:
        """The I/O thread calls ``on_thread_start`` once more, before it handles what arrives from now on."""
        self._starts += 1

    def on_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return _get_ident() == self._ident

    def hand_over(self) -> None:
        """Make a fresh thread the I/O thread; the old one ends when it comes back to the loop.

        If no thread can be started, the old one goes on when it comes back.
        """
        self.retire()
        with self._role:
            self._ident = 0
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.error("nobody can take the place of the I/O thread %s while it waits: %s", self._name, error)
                self._stays = self._thread
            else:
                self._former = [former for former in self._former if former.is_alive()] + [self._thread]
                self._thread = thread
            self._role.notify_all()

    def retire(self) -> None:
        """The calling thread is not the I/O thread any more, even if it has no successor yet."""
        if reading.loop is self:
            reading.loop = None

    def timer(self, callback: Callback) -> Timer:
        """A timer whose ``callback(now)`` runs on the I/O thread, at the time set with ``at``."""
        return self._timers.timer(callback)

    def before_sleep(self, hook: Callable[[], bool]) -> None:
        """Call ``hook`` on the I/O thread before each sleep; it must be quick.

        It returns whether other threads have work now: then the I/O thread leaves them the interpreter at once,
        without busy waiting.
        """
        self._before_sleep.append(hook)

    def watch(self, descriptor: int, handler: EventHandler, events: int = READ) -> None:
        """Call ``handler(events)`` on the I/O thread whenever ``descriptor`` is ready."""
        with self._interest_lock:
            self._handlers[descriptor] = handler
            self._interest[descriptor] = events
            self._poller.register(descriptor, events)
        if not self.can_silence:
            self.wake()

    def forget(self, descriptor: int) -> None:
        """Stop watching. Call this before closing the descriptor: its number may be reused at once."""
        with self._interest_lock:
            if self._handlers.pop(descriptor, None) is not None:
                del self._interest[descriptor]
                if self._wake_read >= 0:
                    self._poller.unregister(descriptor)
        if not self.can_silence:
            self.wake()

    def silence(self, descriptor: int) -> None:
        """Stop reporting readability: the calling thread reads the descriptor itself for a while."""
        with self._interest_lock:
            before = self._interest.get(descriptor)
            if before is not None and before & READ and self._wake_read >= 0:
                self._interest[descriptor] = before & ~READ
                self._poller.modify(descriptor, before & ~READ)
        if not self.can_silence:
            self.wake()

    def listen(self, descriptor: int) -> None:
        """Report readability again."""
        with self._interest_lock:
            before = self._interest.get(descriptor)
            if before is not None and not before & READ and self._wake_read >= 0:
                self._interest[descriptor] = before | READ
                self._poller.modify(descriptor, before | READ)
        if not self.can_silence:
            self.wake()

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
        if not self.can_silence:
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

    def look_for(self, limit_s: float) -> None:
        """Busy-wait for up to ``limit_s`` before sleeping, if busy waiting is on at all."""
        self._spin.look_for(limit_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close the poller. Idempotent."""
        self._running = False
        self.wake()
        with self._role:
            self._role.notify_all()
        self.standby.stop()
        for thread in self._former:
            if thread is not threading.current_thread():
                thread.join(0.5)
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
            while self._goes_on():
                self._serve()
        except BaseException as error:
            # The poller itself fails, for example after a user function closed descriptors that are not its own.
            if self._running:
                logger.error("the I/O thread %s ends: %s", self._name, error)
                self._running = False
                self._on_death(error)
        finally:
            self.standby.forget()

    def _goes_on(self) -> bool:
        """On a thread that lost the role: must it go on, since no other thread could be started?

        Waits for the answer: the standby thread may have taken the role away and not handed it over yet. A thread that
        went on at once would then be one of two I/O threads.
        """
        me = threading.current_thread()
        with self._role:
            self._role.wait_for(lambda: self._thread is not me or self._stays is me or not self._running, HANDED_OVER_S)
            goes_on = self._stays is me and self._running
            if goes_on:
                self._stays = None
        return goes_on

    def _serve(self) -> None:
        self._ident = _get_ident()
        reading.loop = self
        starts = self._starts
        self._on_thread_start()
        timers = self._timers
        look = partial(self._poller.poll, 0.0)
        while self._running and reading.loop is self:
            now = monotonic()
            if timers.named or now >= timers.next_due:
                timers.run_due(now)
                if reading.loop is not self:
                    return  # a timer's callback blocked, and handed over
            others_work = False
            try:
                for hook in self._before_sleep:
                    others_work = hook() or others_work
            except Exception:
                logger.exception("an I/O handler failed; please report this")
            timeout_s = 0.0 if self._soon or timers.named else min(max(0.0, timers.next_due - now), LONGEST_SLEEP_S)
            if others_work or timeout_s == 0.0:
                found = self._poller.poll(timeout_s)
            else:
                found = self._spin.wait(look, self._poller.poll, now, timeout_s)
            if starts != self._starts:
                starts = self._starts
                self._on_thread_start()
            for descriptor, flags in found:
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
                    if reading.loop is not self:
                        return  # handed over: the poller reports the other descriptors again, to the new thread
            for _ in range(len(self._soon)):
                # Only the functions queued now: those that they queue in turn run after timers and sockets.
                try:
                    self._soon.popleft()()
                except Exception:
                    # A bug in farcall must not end the thread that the whole node depends on.
                    logger.exception("an I/O handler failed; please report this")
                if reading.loop is not self:
                    return

    def _drain_wakes(self) -> None:
        try:
            while len(os.read(self._wake_read, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
