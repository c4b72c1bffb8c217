"""The reading half of a link: frames in, for one thread at a time, and their count.

Owns the decoder, the read lock and the frames that are decoded and not handed out yet; these outlive a connection.
Knows nothing of what frames mean: each goes to ``on_frame``. What an error of the connection means, and what becomes of
the link, `link.py` decides.

The holder of the read lock is the reader:
- normally the I/O thread; or a *helping reader*, a thread that waits for its own answer on this link (``help_until``).
  It silences the poller, so that the I/O thread sleeps on, and saves the hop between threads.
- A helping reader that keeps coming back within LINGER_S (it has many calls in flight, or makes call after call) leaves
  the poller silent when it stops: the I/O thread would only fight with it for the interpreter. If it does not come
  back, the I/O thread listens again LINGER_S later (up to LONGEST_LINGER_S after a long row of calls). Not where
  several threads wait for answers on this link.
- Once the I/O thread reads answers ahead of such a thread, it would do so for ever, since the thread never has to wait.
  So the I/O thread, too, leaves the link silent for a thread that read a moment ago and still makes calls. If the
  thread does not come (it waits in another way), the I/O thread does not try again for SHARED_S.
- A helping reader may not run requests. One that meets several soon gives the link back to the I/O thread, which may.
- A reader about to block (a future's callback that makes a call) first gives up the role: ``stop_reading``.
- A reader that gives up the role leaves the rest to the I/O thread: more to read, or a broken connection to settle.
  After `disconnect`, only the I/O thread hands out the frames that are left.

Over 400 lines: all of it is one argument about who reads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.protocol.frame_decoder import Allocate, FrameDecoder, FrameError
from farcall.protocol.frames import CARRIES_DESCRIPTOR, CONTROL, Frame
from farcall.protocol.session import Session
from farcall.runtime.calls.executor import Task
from farcall.runtime.io import sigint
from farcall.runtime.io.busy_wait import BusyWait
from farcall.runtime.io.loop import READ, WRITE, Loop
from farcall.runtime.io.reader import claim, reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportClosed, TransportError

READ_BYTES = 1 << 20
"""The most that the I/O thread reads before it looks at other links and timers."""
REST_BYTES = 16 << 20
"""The most that is read of a connection after it broke: more than kernels usually hold."""
LINGER_S = 0.001
LONGEST_LINGER_S = 0.004
"""How long the poller stays silent for a helping reader that has stopped: LINGER_S at first, growing up to this while
the thread keeps coming back, so that the timer runs less and less often."""
LONGEST_SILENCE_S = 0.1
"""The longest silence for a thread that makes calls without waiting: other threads may wait for its answers."""
LINGER_AFTER = 16
"""How many times in a row a thread must come back within LINGER_S before the link is left silent for it."""
SLICE_S = 0.002
"""How long the I/O thread runs functions of one link before it looks at the others."""
IO_READS_S = 0.002
"""How long a thread waits for the I/O thread to finish its read: then it has its answer, or reads itself. Also how long
the I/O thread waits for a helping reader that is about to stop."""
MOST_MISSED = 8
"""After so many requests that the I/O thread would have run itself, a helping reader gives the link back to it."""
SHARED_S = 1.0
"""How long no helping reader is relied on after two threads waited on one link, or after the link was left to a thread
that did not come."""
NO_MEMORY = "there is no memory for a frame that came"

_NOTHING_COMES = FrameDecoder()
"""The decoder of all dead links: a live one may hold a quarter of a MiB, and dead members stay in the peer table."""


class Awaited(Protocol):
    """What a helping reader waits for."""

    @property
    def arrived(self) -> bool: ...


class Connected(Protocol):
    """The link, as its reading half sees it."""

    transport: Transport
    up: bool
    session: Session
    outgoing: Outgoing

    def settle(self) -> None:
        """On the I/O thread: let go of a broken connection that nobody reads any more."""

    def broke(self, error: Exception, transport: Transport) -> None:
        """Reading failed."""

    def ended(self, transport: Transport) -> None:
        """The peer ended the stream."""


class Incoming:
    """The frames that come over one link, and the role of its reader."""

    __slots__ = (
        "_acknowledge",
        "_allocate",
        "_busy_wait",
        "_came_back",
        "_decoder",
        "_descriptor",
        "_descriptors",
        "_ended",
        "_frames",
        "_left_at",
        "_linger_s",
        "_linger_timer",
        "_lingering",
        "_link",
        "_loop",
        "_missed",
        "_on_frame",
        "_read_lock",
        "_rides_along",
        "_shared_until",
        "_silenced",
        "_silent_since",
        "_vain_until",
        "answers_futures",
        "bytes_received",
    )

    def __init__(
        self,
        link: Connected,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        *,
        allocate: Allocate,
        busy_wait_s: float,
        acknowledge: Callable[[int, bool], None] | None,
    ) -> None:
        """``acknowledge(count, more)`` tells the peer how many frames have come; None: nothing is kept, nor resumed."""
        # Mutable. The reader changes the decoder, the frames, the counts and ``_descriptor``. Any thread may change
        # the hints about who reads next (``_left_at``, ``_shared_until``), and pop ``_lingering``.
        self._link = link
        self._loop = loop
        self._on_frame = on_frame
        self._allocate = allocate
        self._acknowledge = acknowledge
        self._rides_along = False
        self._decoder = FrameDecoder(allocate)
        self._frames: deque[Frame] = deque()
        self._descriptor = link.transport.fileno()
        self._descriptors: deque[int] = deque()
        self._silenced = False
        # Has one item while the poller is silent although nobody reads. Popping is atomic: the thread that pops it
        # either reads or listens again. True: the I/O thread left the link to a helping reader that did not ask.
        self._lingering: list[bool] = []
        self._linger_timer = loop.timer(self._end_lingering)
        self._linger_s = LINGER_S
        self._left_at = 0.0  # when a helping reader last stopped, or sent its next request
        self._vain_until = 0.0
        self.answers_futures: bool = False
        """Did this read bring answers that perhaps no thread waits for yet?"""
        self._missed = 0  # requests that the I/O thread would have run itself
        self._came_back = 0  # how often in a row a helping reader was back within LINGER_S
        self._shared_until = 0.0
        self._silent_since = 0.0
        self._busy_wait = BusyWait(busy_wait_s, may_doze=True)
        self._read_lock = threading.Lock()
        self._ended = False  # this connection has no more bytes, or none that can be trusted
        self.bytes_received: int = 0

    # ------------------------------------------------------------------ connections come and go

    def connect(self, first_bytes: bytes) -> None:
        """Read the link's connection from now on; ``first_bytes`` came behind its handshake and are frames already."""
        with self._read_lock:
            self._ended = False
            while first_bytes:
                view = self._decoder.writable()
                chunk = first_bytes[: len(view)]
                view[: len(chunk)] = chunk
                first_bytes = first_bytes[len(chunk) :]
                self._count(len(chunk))
            self._descriptor = self._link.transport.fileno()  # from here on other threads may read

    def _count(self, count: int) -> None:
        """Decode and count ``count`` received bytes; their frames are delivered, and acknowledged, later."""
        self.bytes_received += count
        try:
            frames = self._decoder.received(count)
        except MemoryError as error:
            raise FrameError(NO_MEMORY) from error
        self._link.session.received = self._decoder.count
        self._frames.extend(frames)

    def watch_connection(self) -> None:
        """Have the I/O thread read what comes, and write when the kernel has room."""
        loop, link = self._loop, self._link
        if self._descriptor is None:
            link.transport.watch(lambda: loop.call_soon(self._read), lambda: loop.call_soon(link.outgoing.write))
        else:
            loop.watch(self._descriptor, self._on_event)
        if self._frames or link.transport.buffered:
            # Not before the descriptor is watched: if the peer has gone already, this read leads to its close.
            loop.call_soon(self._read)

    def forget_connection(self) -> None:
        """Have the poller stop reporting the connection."""
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)

    def disconnect(self, transport: Transport, reads_rest: bool, waits: bool) -> bool:
        """On the I/O thread: take the broken connection from its readers, and close it.

        ``reads_rest``: first decode and count all that came over it; `deliver` hands it out. Returns False, unless it
        ``waits``, where another thread is reading.
        """
        if not self._read_lock.acquire(waits):
            return False
        try:
            self._descriptor = None
            self._lingering.clear()
            if reads_rest and not self._ended:
                self._read_rest(transport)
            self._descriptors.extend(transport.take_descriptors())
            # A descriptor comes with the first byte of its frame. If the rest of the frame did not come, the peer
            # offers the descriptor anew: keep only those of complete frames.
            wanted = sum(frame.kind == CONTROL and bool(frame.flags & CARRIES_DESCRIPTOR) for frame in self._frames)
            while len(self._descriptors) > wanted:
                os.close(self._descriptors.pop())
            self._decoder.restart()
            transport.close()
        finally:
            self._read_lock.release()
        return True

    def _read_rest(self, transport: Transport) -> None:
        """Holding the read lock: read what came before the connection broke. Bytes beyond REST_BYTES count as lost."""
        until = self.bytes_received + REST_BYTES
        try:
            while self.bytes_received < until:
                count = transport.receive_into(self._decoder.writable())
                if not count:
                    return
                self._count(count)
        except TransportError:
            pass  # that was all
        except FrameError as error:
            self._link.broke(error, transport)

    @property
    def undelivered(self) -> bool:
        """Are frames left to hand out, after `disconnect`?"""
        return bool(self._frames)

    def deliver(self) -> None:
        """On the I/O thread: hand out decoded frames, as far as time allows; reads nothing while the link is down."""
        self._read()

    def close(self, transport: Transport) -> None:
        """Close the link's last connection, as the reader. From here on another link may get its descriptor."""
        is_reader = reading.link is self
        if not is_reader:
            self._read_lock.acquire()
        try:
            self._descriptor = None
            transport.close()
            self._decoder = _NOTHING_COMES
            while self._descriptors:
                os.close(self._descriptors.popleft())
        finally:
            if not is_reader:
                self._read_lock.release()

    # ------------------------------------------------------------------ reading

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self._link.outgoing.write()
        if events & READ:
            self._read()

    def _read(self) -> None:
        """On the I/O thread: read what has come, unless another thread reads."""
        if not self._read_lock.acquire(False) and (self._silenced or not self._read_lock.acquire(True, IO_READS_S)):
            # A helping reader has the role. If it no longer silences the poller, it is giving the role up: hence the
            # short wait. Without it, the poller would call this again and again, while the helping reader waits for
            # the interpreter.
            return
        reading.link = self
        link = self._link
        transport = link.transport
        self.answers_futures = False
        try:
            if self._frames and not self._deliver():
                return
            until = self.bytes_received + READ_BYTES
            while link.up:
                view = self._decoder.writable()
                count = transport.receive_into(view)
                if count is None or not self._take(count):
                    return
                if (count < len(view) or self.bytes_received >= until) and self._descriptor is not None:
                    if self.answers_futures and count < len(view):
                        self._leave_to_helper()
                    return  # probably that was all, or other links have waited long; the poller reports any rest
        except (TransportError, FrameError) as error:
            self._failed(error, transport)
        finally:
            self.end_reading()

    def _leave_to_helper(self) -> None:
        """As the reader, on the I/O thread, after answers: leave the next ones to the thread that read a moment ago."""
        now = monotonic()
        descriptor = self._descriptor
        if (
            now - self._left_at < LINGER_S
            and now > self._shared_until
            and now > self._vain_until
            and not self._lingering
            and self._loop.can_silence
            and descriptor is not None
            and self._link.up
        ):
            self._loop.silence(descriptor)
            self._silent_since = now
            self._lingering.append(True)
            self._linger_timer.at(now + self._linger_s)

    def help_until(self, awaited: Awaited, deadline: float, request: bytes | None = None) -> None:
        """Read this link on the calling thread until ``awaited`` has arrived or ``deadline`` has passed.

        ``request``: a small frame to send first, whose answer is awaited. This takes the role before it sends, or a
        quick answer would wake the I/O thread, too. Returns early, with nothing arrived, if another thread reads or
        the role was given up.
        """
        link, loop = self._link, self._loop
        guard = sigint.here.guard
        if not guard.depth:
            sigint.look()
        guard.depth += 1
        try:
            may_help = self._descriptor is not None and link.up and loop.can_silence
            helping = may_help and self._read_lock.acquire(False)
            if helping:
                self._begin_helping()
            if request is not None:
                link.outgoing.send(request, deadline)
            if may_help and not helping:
                if self._silenced:
                    self._shared_until = monotonic() + SHARED_S  # another helping reader has the role
                elif self._read_lock.acquire(True, IO_READS_S):
                    self._begin_helping()
                    helping = True
            # A connection that broke before this thread had the role may be closed: the I/O thread hands out the rest.
            if not helping or self._descriptor is None or (self._frames and not self._deliver()):
                return
            transport, decoder = link.transport, self._decoder
            try:
                while not awaited.arrived and link.up:
                    now = monotonic()
                    remaining = deadline - now
                    if remaining <= 0:
                        return
                    if remaining > WAIT_SLICE_S:
                        remaining = WAIT_SLICE_S
                    depth, guard.depth = guard.depth, 0  # Ctrl-C may end the wait, nothing else in here
                    try:
                        if guard.held is not None:
                            sigint.deliver()
                        readable = self._busy_wait.wait(transport.look, transport.wait_readable, now, remaining)
                    finally:
                        guard.depth = depth
                    if readable:
                        count = transport.receive_into(decoder.writable())
                        if count is not None and not self._take(count):
                            return
                        if self._missed >= MOST_MISSED:
                            self._came_back = 0
                            self._linger_s = LINGER_S
                            return
            except (TransportError, FrameError) as error:
                self._failed(error, transport)
        finally:
            self.end_reading()
            guard.depth -= 1
            if guard.held is not None:
                sigint.deliver()

    def _failed(self, error: TransportError | FrameError, transport: Transport) -> None:
        """As the reader: the connection failed. One that this side has closed may still have bytes to read."""
        if not isinstance(error, TransportClosed):
            self._ended = True
        self._link.broke(error, transport)

    def _begin_helping(self) -> None:
        """Holding the read lock: become the reader in place of the I/O thread."""
        reading.link = self
        self._silenced = True
        self._missed = 0
        try:
            self._lingering.pop()  # the poller is still silent
            self._came_back += 1
        except IndexError:
            self._came_back = self._came_back + 1 if monotonic() - self._left_at < LINGER_S else 0
            descriptor = self._descriptor
            # Only of a link that is up. A thread that looked before the last break may get the role when the next
            # connection is watched and the link not up yet: it stops at once, and `end_reading` would leave it silent.
            if descriptor is not None and self._link.up:
                self._loop.silence(descriptor)

    def _take(self, count: int) -> bool:
        """Decode and deliver ``count`` received bytes. False: stop reading."""
        if count == 0:
            self._ended = True
            self._link.ended(self._link.transport)
            return False
        self.bytes_received += count
        decoder = self._decoder
        try:
            frames = decoder.received(count)
        except MemoryError as error:
            # Frames that the decoder had taken already are lost, and nobody could count them.
            raise FrameError(NO_MEMORY) from error
        session = self._link.session
        if decoder.count != session.received:
            self._frames.extend(frames)
            session.received = decoder.count
            if session.received >= session.due_at or (frames and self.bytes_received >= session.due_at_bytes):
                # An acknowledgement is due. After many small frames, every other one waits for a frame to ride along
                # with: in a dialogue that costs nothing.
                self._rides_along = not self._rides_along and self.bytes_received < session.due_at_bytes
                acknowledged = session.acknowledgement(self.bytes_received)
                if self._acknowledge is not None:
                    self._acknowledge(acknowledged, self._rides_along)
        return self._deliver()

    def _deliver(self) -> bool:
        """Hand out the decoded frames. False: this thread lost the reader's role, or has run functions for SLICE_S."""
        frames = self._frames
        began = 0.0
        while frames:
            self._on_frame(frames.popleft())
            if reading.link is not self:
                self._loop.standby.forget()
                return False
            watch = reading.watch
            if watch is not None:
                # End the watch before the next frame: from here on the standby thread must not replace this one.
                reading.watch = None
                try:
                    watch.pop()  # `claim`, inlined: every request comes this way
                except IndexError:
                    return self._retire()
                if not began:
                    began = watch.since
                elif watch.since - began > SLICE_S and frames and reading.loop is self._loop:
                    return False  # other links and timers have waited long enough; the rest follows them
        return True

    def _retire(self) -> bool:
        """Another thread has the role: this one must not touch the link any more, nor go on as the I/O thread."""
        reading.link = reading.watch = None
        self._loop.standby.forget()
        self._loop.retire()
        return False

    def end_reading(self) -> None:
        """Give up the role of the reader, if the calling thread has it."""
        if reading.link is self:
            reading.link = None
            watch, reading.watch = reading.watch, None
            if watch is not None and not claim(watch):
                self._retire()  # after an error of farcall's own: another thread reads on by now
                return
            if reading.idle_watch is not None and reading.loop is not self._loop:
                self._loop.standby.forget()  # this thread may never read again; an I/O thread will
            if self._silenced:
                self._silenced = False
                now = self._left_at = monotonic()
                if self._came_back >= LINGER_AFTER and now > self._shared_until and self._link.up:
                    self._silent_since = now
                    self._lingering.append(False)
                    if self._linger_timer.due == NEVER:
                        self._linger_timer.at(now + self._linger_s)
                elif self._descriptor is not None and self._link.up:
                    self._loop.listen(self._descriptor)
            self._read_lock.release()
            link = self._link
            if self._frames or not link.up or link.transport.buffered:
                self._leave_rest()

    def _leave_rest(self) -> None:
        """After the release of the read lock: have the I/O thread read on, or settle a broken connection."""
        self._loop.call_soon(self._read if self._link.up else self._link.settle)

    def is_used(self) -> None:
        """A request leaves whose answer nobody waits for yet: a helping reader of a moment ago still makes calls."""
        now = monotonic()
        if now - self._left_at < LINGER_S:
            self._left_at = now

    def _end_lingering(self, now: float) -> float:
        """On the I/O thread: listen again, unless the helping reader came back in time."""
        if not self._lingering and not self._silenced:
            return NEVER  # the poller listens already; or a helping reader is stopping, and will set the timer
        if now - self._left_at < self._linger_s and (self._silenced or now - self._silent_since < LONGEST_SILENCE_S):
            # The helping reader was here a moment ago, or is now. The timer stays set: if each stop set it anew, each
            # stop would wake this thread.
            self._linger_s = min(1.1 * self._linger_s, LONGEST_LINGER_S)
            return self._left_at + self._linger_s
        try:
            if self._lingering.pop():
                self._vain_until = now + SHARED_S
        except IndexError:
            return NEVER  # the helping reader has been reading for long; or the connection has ended
        self._came_back = 0
        self._linger_s = LINGER_S
        if self._descriptor is not None and self._link.up:
            self._loop.listen(self._descriptor)
        return NEVER

    def look_for(self, limit_s: float) -> None:
        """Have threads busy-wait for answers for up to ``limit_s`` before they sleep, if busy waiting is on at all."""
        self._busy_wait.look_for(limit_s)

    # ------------------------------------------------------------------ user code on the thread that reads

    def watch_reader(self) -> None:
        """The reader begins something that may take long: if it does, the standby thread passes the role on."""
        watch = reading.watch
        if watch is not None:
            watch.since = monotonic()
            return
        standby = self._loop.standby
        watch = reading.idle_watch
        if watch is None or watch.standby is not standby:
            reading.watch = standby.begin(self)
            return
        # `begin`, inlined: every request comes this way.
        watch.since = monotonic()
        watch.append(self)
        reading.watch = watch
        if standby.asleep:
            standby.rouse()

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        """Run a task if the calling thread is the I/O thread, reads this link, and, unless ``at_once``, has time.

        None: the task has not run. False: the task took long, and another thread reads on.
        """
        # Only as the reader of this very link: a deferred request is delivered later, without that role.
        loop = self._loop
        if reading.link is not self or reading.loop is not loop:
            self._missed += 1
            return None
        if not at_once and (self._frames or monotonic() < loop.in_demand_until):
            return None
        self.watch_reader()
        watch = reading.watch
        task.run(bool(self._frames))
        if not watch:
            return False
        if not at_once:
            loop.look_who_waits(self._descriptor)
        return True

    def pass_on(self) -> None:
        """On the standby thread: the reader is stuck in user code, so another thread reads on."""
        was_helping, self._silenced = self._silenced, False
        try:
            if was_helping and self._descriptor is not None and self._link.up:
                self._loop.listen(self._descriptor)
            self._read_lock.release()
            if self._frames or not self._link.up or self._link.transport.buffered:
                self._leave_rest()
        finally:
            if not was_helping:
                self._loop.hand_over()  # even after an error: the old I/O thread waits for it

    def take_descriptor(self) -> int | None:
        """As the reader, for a frame that came with a descriptor: the oldest one that is not taken yet."""
        self._descriptors.extend(self._link.transport.take_descriptors())
        return self._descriptors.popleft() if self._descriptors else None
