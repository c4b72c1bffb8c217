"""The reading half of a link: frames in, for one thread at a time; and the count of them.

Owns the decoder, the read lock and the frames that are decoded and not handed out yet; these outlive a connection.
Knows nothing of what frames mean: each goes to ``on_frame``. What an error of the connection means, and what becomes of
the link, is `link.py`'s.

One thread at a time reads, the holder of the read lock:
- normally the I/O thread; or a thread that waits for its own answer on this link (``help_until``): it silences the
  poller, so that the I/O thread sleeps on, and saves the hop between threads.
- A thread that has come back within LINGER_S for a while (one with many calls in flight, or call after call) leaves the
  poller silent when it stops: the I/O thread would only fight with it for the interpreter. If it does not come back,
  the I/O thread listens again LINGER_S later (up to LONGEST_LINGER_S after a long row of calls). Not where several
  threads wait for answers on this link.
- One that meets requests while it waits, and may not run them, soon gives the link back to the I/O thread, which may.
- A reader about to block (a future's callback that makes a call) first gives up the role: ``stop_reading``.
- Who gives the role up leaves the rest to the I/O thread: more to read, or a link that is down, to be settled. Of a
  connection that was given up (`disconnect`) nobody but the I/O thread hands out what is left.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.protocol.frames import CARRIES_DESCRIPTOR, CONTROL, Allocate, Frame, FrameDecoder, FrameError
from farcall.protocol.session import Session
from farcall.runtime.calls.executor import Task
from farcall.runtime.io import sigint
from farcall.runtime.io.busy_wait import BusyWait
from farcall.runtime.io.loop import READ, WRITE, Loop
from farcall.runtime.io.reader import reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportClosed, TransportError

READ_BYTES = 1 << 20
"""What the I/O thread reads at most before it looks at other links and timers."""
REST_BYTES = 16 << 20
"""What is read at most of a connection that broke: more than kernels usually hold."""
LINGER_S = 0.001
LONGEST_LINGER_S = 0.004
"""A thread that comes back again and again is looked after less and less often, down to every so many seconds."""
LINGER_AFTER = 16
"""So many times in a row a thread must have come back within LINGER_S before the link is left silent for it."""
SLICE_S = 0.002
"""After so long with functions of one link the I/O thread looks at the others."""
IO_READS_S = 0.002
"""So long a thread waits for the I/O thread, which reads at this moment, to be done: it has its answer then, or reads
itself. So long the I/O thread waits for a thread that stops reading at this moment."""
MOST_MISSED = 8
"""After so many requests that the I/O thread would have served itself, a helping reader gives the link back to it."""
SHARED_S = 1.0
"""So long after two threads were seen waiting on one link, none of them is relied on."""

_NOTHING_COMES = FrameDecoder()
"""The decoder of all dead links: a live one may hold a quarter of a MiB, and dead members stay in the peer table."""


class Awaited(Protocol):
    """What a helping reader waits for."""

    @property
    def arrived(self) -> bool: ...


class Connected(Protocol):
    """The link, as far as its reading half is concerned."""

    transport: Transport
    up: bool
    session: Session
    outgoing: Outgoing

    def settle(self) -> None:
        """On the I/O thread: the link is down, and nobody reads."""

    def broke(self, error: Exception, transport: Transport) -> None:
        """Reading failed."""

    def ended(self, transport: Transport) -> None:
        """The peer ended the stream."""


class Incoming:
    """What comes over one link."""

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
        # Has one item while the poller is silent although nobody reads; who pops it sees to the poller.
        self._lingering: list[None] = []
        self._linger_timer = loop.timer(self._end_lingering)
        self._linger_s = LINGER_S
        self._left_at = 0.0  # when a helping reader last stopped, or went on with a request
        self._missed = 0  # requests that the I/O thread would have served itself
        self._came_back = 0  # how often in a row one was back within LINGER_S
        self._shared_until = 0.0
        self._busy_wait = BusyWait(busy_wait_s, may_doze=True)
        self._read_lock = threading.Lock()
        self._ended = False  # nothing more is to be had from this connection, or nothing that could be trusted
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
            self._descriptor = self._link.transport.fileno()  # from here on others may read

    def _count(self, count: int) -> None:
        """Decode and count ``count`` received bytes; their frames are delivered later, and acknowledged with others."""
        self.bytes_received += count
        frames = self._decoder.received(count)
        self._link.session.received += len(frames) + self._decoder.uncounted
        self._decoder.uncounted = 0
        self._frames.extend(frames)

    def watch_connection(self) -> None:
        """Have the I/O thread read whatever comes, and write when there is room."""
        loop, link = self._loop, self._link
        if self._descriptor is None:
            link.transport.watch(lambda: loop.call_soon(self._read), lambda: loop.call_soon(link.outgoing.write))
        else:
            loop.watch(self._descriptor, self._on_event)
        if self._frames or link.transport.buffered:
            # Not before: where the peer has gone already, reading closes the descriptor.
            loop.call_soon(self._read)

    def forget_connection(self) -> None:
        """Have the I/O thread look at the connection no more."""
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)

    def disconnect(self, transport: Transport, reads_rest: bool, waits: bool) -> bool:
        """On the I/O thread: nobody reads from the broken connection any more, and it is closed.

        ``reads_rest``: after all that came over it is decoded and counted; `deliver` hands it out. False, unless this
        ``waits``: somebody reads at this moment.
        """
        if not self._read_lock.acquire(waits):
            return False
        try:
            self._descriptor = None
            self._lingering.clear()
            if reads_rest and not self._ended:
                self._read_rest(transport)
            self._descriptors.extend(transport.take_descriptors())
            # A descriptor comes with the first byte of its frame. If the rest did not, the frame will come again, and
            # its descriptor with it: only those of frames that are here are wanted.
            wanted = sum(frame.kind == CONTROL and bool(frame.flags & CARRIES_DESCRIPTOR) for frame in self._frames)
            while len(self._descriptors) > wanted:
                os.close(self._descriptors.pop())
            self._decoder.restart()
            transport.close()
        finally:
            self._read_lock.release()
        return True

    def _read_rest(self, transport: Transport) -> None:
        """Holding the read lock: read what came before the connection broke. What is left then counts as lost."""
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
        """Are there frames that nobody has dealt with, after `disconnect`?"""
        return bool(self._frames)

    def deliver(self) -> None:
        """On the I/O thread: hand out what is decoded, as far as time allows; reads nothing where the link is down."""
        self._read()

    def close(self, transport: Transport) -> None:
        """Close the connection for good, as the reader. From here on its descriptor may be that of another link."""
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
        """On the I/O thread: read what is there, unless somebody else is reading."""
        if not self._read_lock.acquire(False) and (self._silenced or not self._read_lock.acquire(True, IO_READS_S)):
            # A helping reader has the role. If it no longer silences the poller it is giving the role up: not to wait
            # for that would mean to be called again and again, while the helping reader waits for the interpreter.
            return
        reading.link = self
        link = self._link
        transport = link.transport
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
                    return  # most likely that was all, or others have waited long; if not, the poller tells again
        except (TransportError, FrameError) as error:
            self._failed(error, transport)
        finally:
            self.end_reading()

    def help_until(self, awaited: Awaited, deadline: float, request: bytes | None = None) -> None:
        """Read this link on the calling thread until ``awaited`` has arrived or ``deadline`` has passed.

        ``request``: one small frame, sent before, whose answer is awaited; the role is taken before that, or a quick
        answer would wake the I/O thread, too. Returns early, with nothing arrived, where another thread reads or the
        role was given up.
        """
        link, loop = self._link, self._loop
        guard = sigint.of_thread()
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
            # A connection that broke before we had the role may be gone: what came over it the I/O thread hands out.
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
                    depth, guard.depth = guard.depth, 0  # Ctrl-C may end the wait, and nothing else in here
                    try:
                        if guard.held is not None:
                            sigint.deliver()
                        readable = self._busy_wait.wait(transport.wait_readable, now, remaining)
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
        """As the reader: the connection cannot be read any more. What this side has ended may still have bytes."""
        if not isinstance(error, TransportClosed):
            self._ended = True
        self._link.broke(error, transport)

    def _begin_helping(self) -> None:
        """Holding the read lock: be the reader in the place of the I/O thread."""
        reading.link = self
        self._silenced = True
        self._missed = 0
        try:
            self._lingering.pop()
            self._came_back += 1
        except IndexError:
            self._came_back = self._came_back + 1 if monotonic() - self._left_at < LINGER_S else 0
            descriptor = self._descriptor
            if descriptor is not None:
                self._loop.silence(descriptor)

    def _take(self, count: int) -> bool:
        """Decode and deliver ``count`` received bytes. False: stop reading."""
        if count == 0:
            self._ended = True
            self._link.ended(self._link.transport)
            return False
        self.bytes_received += count
        decoder = self._decoder
        frames = decoder.received(count)
        if frames or decoder.uncounted:
            self._frames.extend(frames)
            session = self._link.session
            session.received += len(frames) + decoder.uncounted
            decoder.uncounted = 0
            if session.received >= session.due_at or (frames and self.bytes_received >= session.due_at_bytes):
                # An acknowledgement is due. After many small frames every other one waits for a frame to ride along
                # with: in a dialogue it costs nothing.
                self._rides_along = not self._rides_along and self.bytes_received < session.due_at_bytes
                acknowledged = session.acknowledgement(self.bytes_received)
                if self._acknowledge is not None:
                    self._acknowledge(acknowledged, self._rides_along)
        return self._deliver()

    def _deliver(self) -> bool:
        """Hand out the decoded frames. False: this thread is not the reader any more, or has done so for SLICE_S."""
        frames = self._frames
        began = 0.0
        while frames:
            self._on_frame(frames.popleft())
            if reading.link is not self:
                self._loop.standby.forget()
                return False
            watch = reading.watch
            if watch is not None:
                # Before the next frame is looked at: from here on nobody else may take this thread for late.
                reading.watch = None
                if not self._loop.standby.end(watch):
                    return self._retire()
                if not began:
                    began = watch.since
                elif watch.since - began > SLICE_S and frames and reading.loop is self._loop:
                    return False  # other links and timers have waited long enough; the rest comes behind them
        return True

    def _retire(self) -> bool:
        """Another thread reads on: this one must not touch the link any more, nor go on as the I/O thread."""
        reading.link = reading.watch = None
        self._loop.standby.forget()
        self._loop.retire()
        return False

    def end_reading(self) -> None:
        """Give up the role of the reader, if the calling thread has it."""
        if reading.link is self:
            reading.link = None
            watch, reading.watch = reading.watch, None
            if watch is not None and not self._loop.standby.end(watch):
                self._retire()  # an error of ours has brought us here, and another thread reads on by now
                return
            if self._silenced:
                self._silenced = False
                now = self._left_at = monotonic()
                if self._came_back >= LINGER_AFTER and now > self._shared_until and self._link.up:
                    self._lingering.append(None)
                    if self._linger_timer.due == NEVER:
                        self._linger_timer.at(now + self._linger_s)
                elif self._descriptor is not None and self._link.up:
                    self._loop.listen(self._descriptor)
            self._read_lock.release()
            link = self._link
            if self._frames or not link.up or link.transport.buffered:
                self._leave_rest()

    def _leave_rest(self) -> None:
        """After the read lock was given back: the I/O thread reads on, or settles what becomes of a broken link."""
        self._loop.call_soon(self._read if self._link.up else self._link.settle)

    def is_used(self) -> None:
        """A request is sent whose answer nobody waits for yet: the helping reader, if there was one, goes on."""
        now = monotonic()
        if now - self._left_at < LINGER_S:
            self._left_at = now

    def _end_lingering(self, now: float) -> float:
        """On the I/O thread: the helping reader is back in time, or this thread reads from now on."""
        if now - self._left_at < self._linger_s:
            # It was here a moment ago, or is at this moment. The timer stays set meanwhile: to set it anew each time
            # would wake this thread each time.
            self._linger_s = min(1.1 * self._linger_s, LONGEST_LINGER_S)
            return self._left_at + self._linger_s
        try:
            self._lingering.pop()
        except IndexError:
            return NEVER  # it has been reading for long; or the connection has ended
        self._came_back = 0
        self._linger_s = LINGER_S
        if self._descriptor is not None and self._link.up:
            self._loop.listen(self._descriptor)
        return NEVER

    def look_for(self, limit_s: float) -> None:
        """Have threads that wait for an answer look for so long before they sleep, where looking is allowed at all."""
        self._busy_wait.look_for(limit_s)

    # ------------------------------------------------------------------ user code on the thread that reads

    def watch_reader(self) -> None:
        """The reader is about to do something that may take long: if it does, another thread reads on."""
        watch = reading.watch
        if watch is None:
            reading.watch = self._loop.standby.begin(self)
        else:
            watch.since = monotonic()

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        """Run a task if the calling thread is the I/O thread, reads this link, and, unless ``at_once``, has time.

        None: the task has not run. False: the task was late, and another thread reads on.
        """
        # Only while it reads this very link: what was deferred, and is delivered later, comes without that role.
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
        """The reader is stuck in user code: another thread reads on. Called by the standby thread."""
        was_helping, self._silenced = self._silenced, False
        if was_helping and self._descriptor is not None and self._link.up:
            self._loop.listen(self._descriptor)
        self._read_lock.release()
        if self._frames or not self._link.up or self._link.transport.buffered:
            self._leave_rest()
        if not was_helping:
            self._loop.hand_over()

    def take_descriptor(self) -> int | None:
        """As the reader, for a frame that came with one: the oldest descriptor that nobody has taken."""
        self._descriptors.extend(self._link.transport.take_descriptors())
        return self._descriptors.popleft() if self._descriptors else None
