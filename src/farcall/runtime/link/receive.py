"""The reading half of a link: frames in, for one thread at a time; and the count of them.

Owns the decoder, the read lock and the frames that are decoded and not handed out yet; these outlive a connection.
Knows nothing of what frames mean: it gives each one to ``on_frame``. What an error of the connection means, and what
becomes of the link, is `link.py`'s.

Reading, by one thread at a time: the holder of the read lock
- normally the I/O thread; or a thread that waits for its own answer on this link (``help_until``): it silences the
  poller, so that the I/O thread sleeps on, and saves the hop between threads.
- A reader about to block (a future's callback that makes a call) first gives up the role: ``stop_reading``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.protocol.frames import Allocate, Frame, FrameDecoder, FrameError
from farcall.protocol.session import Session
from farcall.runtime.calls.executor import Task
from farcall.runtime.io import sigint
from farcall.runtime.io.busy_wait import BusyWait
from farcall.runtime.io.loop import READ, WRITE, Loop
from farcall.runtime.io.reader import reading
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportError


class Awaited(Protocol):
    """What a helping reader waits for."""

    @property
    def arrived(self) -> bool: ...


class Incoming:
    """What comes over one link."""

    __slots__ = (
        "__weakref__",
        "_acknowledge",
        "_allocate",
        "_decoder",
        "_descriptor",
        "_descriptors",
        "_frames",
        "_loop",
        "_on_frame",
        "_read_lock",
        "_rides_along",
        "_silenced",
        "_spin",
        "_up",
        "bytes_received",
        "outgoing",
        "session",
        "transport",
    )

    outgoing: Outgoing

    def __init__(
        self,
        transport: Transport,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        allocate: Allocate,
        busy_wait_s: float,
        acknowledge: Callable[[int, bool], None] | None,
    ) -> None:
        """``acknowledge(count, more)`` tells the peer how many frames have come; None: nothing is kept, nor resumed."""
        self.transport: Transport = transport
        self.bytes_received: int = 0
        self.session: Session = Session()
        if acknowledge is None:
            self.session.keep_nothing()
        self._acknowledge = acknowledge
        self._rides_along = False
        self._loop = loop
        self._on_frame = on_frame
        self._allocate = allocate
        self._decoder = FrameDecoder(allocate)
        self._frames: deque[Frame] = deque()
        self._descriptor = transport.fileno()
        self._descriptors: deque[int] = deque()
        self._up = True
        self._silenced = False
        self._spin = BusyWait(busy_wait_s)
        self._read_lock = threading.Lock()

    def _broke(self, error: Exception, transport: Transport) -> None:
        """Reading or writing failed."""
        raise NotImplementedError

    def _ended(self, transport: Transport) -> None:
        """The peer ended the stream."""
        raise NotImplementedError

    @property
    def up(self) -> bool:
        """Is there a connection now, as far as is known?"""
        return self._up

    def _decode(self, data: bytes) -> None:
        """As the reader: frames that came with a handshake."""
        while data:
            view = self._decoder.writable()
            chunk = data[: len(view)]
            view[: len(chunk)] = chunk
            data = data[len(chunk) :]
            frames = self._decoder.received(len(chunk))
            self.session.received += len(frames)
            self._frames.extend(frames)

    def _watch(self) -> None:
        if self._descriptor is None:
            self.transport.watch(
                lambda: self._loop.call_soon(self._read), lambda: self._loop.call_soon(self.outgoing.write)
            )
        else:
            self._loop.watch(self._descriptor, self._on_event)
        if self._frames:
            # Not before: where the peer has gone already, reading closes the descriptor.
            self._loop.call_soon(self._read)

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self.outgoing.write()
        if events & READ:
            self._read()

    def _read(self) -> None:
        """On the I/O thread: read what is there, unless somebody else is reading."""
        if not self._read_lock.acquire(False):
            return
        reading.link = self
        transport = self.transport
        try:
            if not self._deliver():
                return
            while self._up:
                view = self._decoder.writable()
                count = transport.receive_into(view)
                if count is None or not self._take(count):
                    return
                if count < len(view) and self._descriptor is not None:
                    return  # most likely that was all; if not, the poller tells again
        except (TransportError, FrameError) as error:
            self._broke(error, transport)
        finally:
            self.end_reading()

    def help_until(self, awaited: Awaited, deadline: float) -> None:
        """Read this link on the calling thread until ``awaited`` has arrived or ``deadline`` has passed.

        Returns early, with nothing arrived, where another thread reads or the role was given up.
        """
        mine = sigint.of_thread()
        mine.depth += 1
        try:
            if self._begin_helping():
                self._read_until(awaited, deadline, mine)
        finally:
            self.end_reading()
            mine.depth -= 1
            if mine.held is not None:
                sigint.deliver()

    def exchange(self, data: bytes, awaited: Awaited, deadline: float) -> None:
        """Send one small frame and read on this thread until ``awaited``, its answer, has arrived: the hot path.

        Like ``send`` and ``help_until``, but the role is taken before the frame goes: otherwise a quick answer would
        wake the I/O thread, too.
        """
        mine = sigint.of_thread()
        mine.depth += 1
        try:
            helping = self._begin_helping()
            self.outgoing.send(data, deadline)
            if helping:
                self._read_until(awaited, deadline, mine)
        finally:
            self.end_reading()
            mine.depth -= 1
            if mine.held is not None:
                sigint.deliver()

    def _begin_helping(self) -> bool:
        """Take the role of the reader if it is free, and tell the poller to leave this link alone."""
        if self._descriptor is None or not self._loop.can_silence or not self._read_lock.acquire(False):
            return False
        reading.link = self
        self._silenced = True
        descriptor = self._descriptor
        if descriptor is not None:
            self._loop.silence(descriptor)
        return True

    def _read_until(self, awaited: Awaited, deadline: float, mine: sigint.SigintGuard) -> None:
        """As the reader, and shielded: read until ``awaited`` has arrived."""
        transport, decoder = self.transport, self._decoder
        try:
            if self._frames and not self._deliver():
                return
            while not awaited.arrived and self._up:
                now = monotonic()
                remaining = deadline - now
                if remaining <= 0:
                    return
                if remaining > WAIT_SLICE_S:
                    remaining = WAIT_SLICE_S
                depth, mine.depth = mine.depth, 0  # Ctrl-C may end the wait, and nothing else in here
                try:
                    if mine.held is not None:
                        sigint.deliver()
                    readable = self._spin.wait(transport.wait_readable, now, remaining)
                finally:
                    mine.depth = depth
                if readable:
                    count = transport.receive_into(decoder.writable())
                    if count is not None and not self._take(count):
                        return
        except (TransportError, FrameError) as error:
            self._broke(error, transport)

    def _take(self, count: int) -> bool:
        """Decode and deliver ``count`` received bytes. False: stop reading."""
        if count == 0:
            self._ended(self.transport)
            return False
        self.bytes_received += count
        frames = self._decoder.received(count)
        if frames:
            self._frames.extend(frames)
            session = self.session
            session.received += len(frames)
            if session.received >= session.due_at or self.bytes_received >= session.due_at_bytes:
                self._tell_received()
        return self._deliver()

    def _tell_received(self) -> None:
        """As the reader: an acknowledgement is due.

        After many small frames every other one waits for a frame to ride along with: in a dialogue it costs nothing.
        """
        session = self.session
        self._rides_along = not self._rides_along and self.bytes_received < session.due_at_bytes
        count = session.acknowledgement(self.bytes_received)
        if self._acknowledge is not None:
            self._acknowledge(count, self._rides_along)

    def _deliver(self) -> bool:
        """Hand out the decoded frames. False: this thread is not the reader any more."""
        frames = self._frames
        while frames:
            self._on_frame(frames.popleft())
            if reading.link is not self:
                self._loop.standby.forget()
                return False
            watch = reading.watch
            if watch is not None and not watch:
                return self._retire()
        watch = reading.watch
        if watch is not None:
            reading.watch = None
            if not self._loop.standby.end(watch):
                return self._retire()
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
                if self._descriptor is not None and self._up:
                    self._loop.listen(self._descriptor)
            self._read_lock.release()
            if self._frames:
                self._loop.call_soon(self._read)

    def look_for(self, limit_s: float) -> None:
        """Have threads that wait for an answer look for so long before they sleep, where looking is allowed at all."""
        self._spin.look_for(limit_s)

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self._loop.on_thread()

    def watch(self) -> None:
        """The reader is about to do something that may take long: if it does, another thread reads on."""
        watch = reading.watch
        if watch is None:
            reading.watch = self._loop.standby.begin(self)
        else:
            watch.since = monotonic()

    def run_inline(self, task: Task) -> bool:
        """As the reader, while it delivers a frame of this link: run a task that is expected to be quick.

        False: it was not, and another thread reads on.
        """
        self.watch()
        watch = reading.watch
        task.run(bool(self._frames))
        return bool(watch)

    def pass_on(self) -> None:
        """The reader is stuck in user code: another thread reads on. Called by the standby thread."""
        was_helping, self._silenced = self._silenced, False
        if was_helping and self._descriptor is not None and self._up:
            self._loop.listen(self._descriptor)
        self._read_lock.release()
        if self._frames:
            self._loop.call_soon(self._read)
        if not was_helping:
            self._loop.hand_over()

    def take_descriptor(self) -> int | None:
        """As the reader, for a frame that came with one: the oldest descriptor that nobody has taken."""
        self._descriptors.extend(self.transport.take_descriptors())
        return self._descriptors.popleft() if self._descriptors else None
