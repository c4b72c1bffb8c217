"""The link to one peer, over successive connections: bytes out of many threads, frames in for one.

Owns a transport, its decoder, the read lock and the session; `outgoing.py` is its writing half. Knows nothing of what
frames mean: it gives each one to ``on_frame``, and says ``on_broken`` once.

    state  event                                         becomes
    up     an error, or the end of the stream            down: small frames queue up, who has a large one waits
    up     `break_off`: the peer comes back already      the same
    down   ``on_interrupted`` says False (I/O thread)    dead: ``on_broken`` is told
    down   `attach`: another connection (I/O thread)     up: goes on where the peer's count says (protocol/session.py)
    any    `die`; a frame that is none; `abort`          dead
    any    `close`                                       dead, and nobody is told

Reading, by one thread at a time: the holder of the read lock
- normally the I/O thread; or a thread that waits for its own answer on this link (``help_until``): it silences the
  poller, so that the I/O thread sleeps on, and saves the hop between threads.
- A reader about to block (a future's callback that makes a call) first gives up the role: ``abdicate``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.frames import (
    CARRIES_DESCRIPTOR,
    CONTROL,
    Allocate,
    Frame,
    FrameDecoder,
    FrameError,
    allocate_plainly,
)
from farcall.protocol.session import Session
from farcall.runtime import shield
from farcall.runtime.executor import Task
from farcall.runtime.loop import READ, WRITE, Loop
from farcall.runtime.outgoing import Outgoing
from farcall.runtime.role import role
from farcall.runtime.spin import Spin
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportError

logger = logging.getLogger("farcall")


class Awaited(Protocol):
    """What a helping reader waits for."""

    @property
    def arrived(self) -> bool: ...


class Link:
    """One peer's connection."""

    __slots__ = (
        "__weakref__",
        "_acknowledge",
        "_allocate",
        "_broken",
        "_decoder",
        "_descriptor",
        "_descriptors",
        "_detached",
        "_final",
        "_frames",
        "_loop",
        "_on_broken",
        "_on_frame",
        "_on_interrupted",
        "_read_lock",
        "_reason",
        "_rides_along",
        "_settled",
        "_silenced",
        "_spin",
        "_told",
        "_up",
        "bytes_received",
        "never_sent",
        "outgoing",
        "peer",
        "session",
        "transport",
    )

    def __init__(
        self,
        peer: WorkerInfo,
        transport: Transport,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        on_broken: Callable[[str], None],
        backlog_limit_bytes: int,
        allocate: Allocate = allocate_plainly,
        busy_wait_s: float = 0.0,
        acknowledge: Callable[[int, bool], None] | None = None,
        on_interrupted: Callable[[str], bool] = lambda reason: False,
    ) -> None:
        """``acknowledge(count, more)`` tells the peer how many frames have come; None: nothing is kept, nor resumed.

        ``on_interrupted(reason)`` is called on the I/O thread when a connection broke: may there be another one?
        """
        self.peer = peer
        self.transport = transport
        self.bytes_received = 0
        self._loop = loop
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._on_interrupted = on_interrupted
        self._acknowledge = acknowledge
        self._rides_along = False
        self.session = Session()
        if acknowledge is None:
            self.session.keep_nothing()
        self.never_sent: frozenset[int] = frozenset()
        """Once it is dead: the calls whose requests were queued and never written."""
        self._allocate = allocate
        self._decoder = FrameDecoder(allocate)
        self._descriptors: deque[int] = deque()
        self._up = True
        self._reason = ""
        self._final = False
        self._settled = False
        self._detached = False
        self._frames: deque[Frame] = deque()
        self._descriptor = transport.fileno()
        self._silenced = False
        self._spin = Spin(busy_wait_s)
        self._told = False
        self._broken: str | None = None
        self._read_lock = threading.Lock()
        self.outgoing = Outgoing(
            peer.name, transport, loop, backlog_limit_bytes, self._broke, self.dead, self.session.kept
        )

    @property
    def broken(self) -> str | None:
        """Why the link will not work any more, or None."""
        return self._broken

    @property
    def up(self) -> bool:
        """Is there a connection now, as far as is known?"""
        return self._up

    def start(self, first_bytes: bytes = b"") -> None:
        """Begin to read. ``first_bytes`` came behind the handshake and are frames already."""
        with self._read_lock:
            self._decode(first_bytes)
        self._watch()

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

    # ------------------------------------------------------------------ reading

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self.outgoing.write()
        if events & READ:
            self._read()

    def _read(self) -> None:
        """On the I/O thread: read what is there, unless somebody else is reading."""
        if not self._read_lock.acquire(False):
            return
        role.link = self
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
        mine = shield.of_thread()
        mine.depth += 1
        try:
            if self._begin_helping():
                self._read_until(awaited, deadline, mine)
        finally:
            self.end_reading()
            mine.depth -= 1
            if mine.held is not None:
                shield.deliver()

    def exchange(self, data: bytes, awaited: Awaited, deadline: float) -> None:
        """Send one small frame and read on this thread until ``awaited``, its answer, has arrived: the hot path.

        Like ``send`` and ``help_until``, but the role is taken before the frame goes: otherwise a quick answer would
        wake the I/O thread, too.
        """
        mine = shield.of_thread()
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
                shield.deliver()

    def _begin_helping(self) -> bool:
        """Take the role of the reader if it is free, and tell the poller to leave this link alone."""
        if self._descriptor is None or not self._loop.can_silence or not self._read_lock.acquire(False):
            return False
        role.link = self
        self._silenced = True
        descriptor = self._descriptor
        if descriptor is not None:
            self._loop.silence(descriptor)
        return True

    def _read_until(self, awaited: Awaited, deadline: float, mine: shield.Shield) -> None:
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
                        shield.deliver()
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
            self._break(self.transport, "the peer closed the connection")
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
            if role.link is not self:
                self._loop.standby.forget()
                return False
            ticket = role.ticket
            if ticket is not None and not ticket:
                return self._retire()
        ticket = role.ticket
        if ticket is not None:
            role.ticket = None
            if not self._loop.standby.end(ticket):
                return self._retire()
        return True

    def _retire(self) -> bool:
        """Another thread reads on: this one must not touch the link any more, nor go on as the I/O thread."""
        role.link = role.ticket = None
        self._loop.standby.forget()
        self._loop.retire()
        return False

    def end_reading(self) -> None:
        """Give up the role of the reader, if the calling thread has it."""
        if role.link is self:
            role.link = None
            ticket, role.ticket = role.ticket, None
            if ticket is not None and not self._loop.standby.end(ticket):
                self._retire()  # an error of ours has brought us here, and another thread reads on by now
                return
            if self._silenced:
                self._silenced = False
                if self._descriptor is not None and self._up:
                    self._loop.listen(self._descriptor)
            self._read_lock.release()
            if self._frames:
                self._loop.call_soon(self._read)

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self._loop.on_thread()

    def watch(self) -> None:
        """The reader is about to do something that may take long: if it does, another thread reads on."""
        ticket = role.ticket
        if ticket is None:
            role.ticket = self._loop.standby.begin(self)
        else:
            ticket.since = monotonic()

    def run_inline(self, task: Task) -> bool:
        """As the reader, while it delivers a frame of this link: run a task that is expected to be quick.

        False: it was not, and another thread reads on.
        """
        self.watch()
        ticket = role.ticket
        task.run(bool(self._frames))
        return bool(ticket)

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

    # ------------------------------------------------------------------ breaking and going on

    def _broke(self, error: Exception, transport: Transport) -> None:
        """Reading or writing failed. From any thread; nothing here waits."""
        self._break(transport, str(error), final=isinstance(error, FrameError))

    def _break(self, transport: Transport, reason: str, final: bool = False) -> None:
        """This connection cannot go on. What comes of it is settled on the I/O thread."""
        if transport is not self.transport or self._broken is not None:
            return
        self._final = self._final or final
        if self._up:
            self._up = False
            self._reason = reason
            transport.interrupt()
            self.outgoing.pause()
        elif not final:
            return
        self._loop.call_soon(lambda: self._settle(transport))

    def _settle(self, transport: Transport) -> None:
        """On the I/O thread, after a break: will there be another connection?"""
        if transport is not self.transport or self._broken is not None:
            return  # there is one already, or the link was closed
        if self._final:
            self.die(self._reason)
            return
        if not self._detached:
            self._detach()
        if not self._settled:
            self._settled = True
            if not self._on_interrupted(self._reason):
                self.die(self._reason)

    def _detach(self) -> None:
        """On the I/O thread: nobody reads from, or writes to, the broken connection any more."""
        self._detached = True
        transport = self.transport
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)
        self.outgoing.detach()
        with self._read_lock:
            self._descriptor = None
            self._descriptors.extend(transport.take_descriptors())
            # A descriptor comes with the first byte of its frame. If the rest did not, the frame will come again, and
            # its descriptor with it: only those of frames that are here are wanted.
            wanted = sum(frame[0] == CONTROL and bool(frame[1] & CARRIES_DESCRIPTOR) for frame in self._frames)
            while len(self._descriptors) > wanted:
                os.close(self._descriptors.pop())
            self._decoder = FrameDecoder(self._allocate)
            transport.close()
        self.session.broke()

    def interrupt(self, reason: str) -> None:
        """Give the connection up, not the link: it is silent, or the peer has lost it. From any thread."""
        self._break(self.transport, reason)

    def break_off(self, reason: str) -> None:
        """On the I/O thread: like ``interrupt``, and when this returns all that had come is counted."""
        if self._broken is None:
            self._break(self.transport, reason)
            if not self._detached:
                self._detach()
            self.session.broke()

    def attach(self, transport: Transport, first_bytes: bytes, received: int) -> None:
        """On the I/O thread: go on over another connection to the same member, which has ``received`` frames.

        Raises ``SessionError`` where that cannot be; then the transport is the caller's to close.
        """
        with self._read_lock:
            self.transport = transport
            self._descriptor = transport.fileno()
            self._decode(first_bytes)
        self._settled = self._detached = self._final = False
        self._up = True
        self._watch()
        self.outgoing.attach(transport, self.session, received)

    # ------------------------------------------------------------------ ending

    def die(self, reason: str) -> None:
        """On the I/O thread: there will be no other connection. ``on_broken`` is told, once."""
        if self._told or self._broken is not None:
            return
        self._told = True
        self.never_sent = self.outgoing.queued_calls()
        self.close(reason)
        self._on_broken(reason)

    def abort(self, reason: str) -> None:
        """End the link because of what the peer sent."""
        self._break(self.transport, reason, final=True)

    def wait_closed(self, deadline: float) -> None:
        """Wait until the peer ended its side, too: closing before that could destroy what we sent last."""
        self.outgoing.wait_while(lambda: self._up, deadline)

    def dead(self, delivery: Delivery) -> PeerDead:
        """The error for a call over this dead link."""
        return PeerDead(f"the link to {self.peer.name} is gone: {self._broken}", delivery)

    def close(self, reason: str = "this node closed the link") -> None:
        """Close for good. Idempotent; from any thread but one inside this link."""
        if self._broken is None:
            self._broken = reason
        self._up = False
        self.transport.interrupt()  # wakes whoever sits in a system call on it
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)
        self.outgoing.close()
        self.outgoing.forget()
        self.session.end()
        if role.link is self:
            self._close_transport()
            return
        with self._read_lock:
            self._close_transport()

    def _close_transport(self) -> None:
        self.transport.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def close_after_fork(self) -> None:
        """In a forked child: let go of the descriptor without telling the peer."""
        self._broken = "this process was forked"
        self._up = False
        if not self._detached:
            self.transport.close_after_fork()
