"""The connection to one peer: bytes out of many threads, frames in for one.

Owns a transport, its decoder and the read lock; `outgoing.py` is its writing half. Knows nothing of what frames mean:
it gives each one to ``on_frame``, and says ``on_broken`` once.

Reading, by one thread at a time: the holder of the read lock
- normally the I/O thread; or a thread that waits for its own answer on this link (``help_until``): it silences the
  poller, so that the I/O thread sleeps on, and saves the hop between threads.
- A reader about to block (a future's callback that makes a call) first gives up the role: ``abdicate``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Allocate, Frame, FrameDecoder, FrameError, allocate_plainly
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
        "_broken",
        "_decoder",
        "_descriptor",
        "_frames",
        "_loop",
        "_on_broken",
        "_on_frame",
        "_read_lock",
        "_silenced",
        "_spin",
        "_told",
        "bytes_received",
        "outgoing",
        "peer",
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
    ) -> None:
        self.peer = peer
        self.transport = transport
        self.bytes_received = 0
        self._loop = loop
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._decoder = FrameDecoder(allocate)
        self._frames: deque[Frame] = deque()
        self._descriptor = transport.fileno()
        self._silenced = False
        self._spin = Spin(busy_wait_s)
        self._told = False
        self._broken: str | None = None
        self._read_lock = threading.Lock()
        self.outgoing = Outgoing(peer.name, transport, loop, backlog_limit_bytes, self._broke)

    @property
    def broken(self) -> str | None:
        """Why the link no longer works, or None."""
        return self._broken

    def start(self, first_bytes: bytes = b"") -> None:
        """Begin to read. ``first_bytes`` came behind the handshake and are frames already."""
        if first_bytes:
            with self._read_lock:
                while first_bytes:
                    view = self._decoder.writable()
                    chunk = first_bytes[: len(view)]
                    view[: len(chunk)] = chunk
                    first_bytes = first_bytes[len(chunk) :]
                    self._frames.extend(self._decoder.received(len(chunk)))
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
        try:
            if not self._deliver():
                return
            while True:
                view = self._decoder.writable()
                count = self.transport.receive_into(view)
                if count is None or not self._take(count):
                    return
                if count < len(view) and self._descriptor is not None:
                    return  # most likely that was all; if not, the poller tells again
        except (TransportError, FrameError) as error:
            self._broke(error)
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
        self._loop.silence(self._descriptor)
        return True

    def _read_until(self, awaited: Awaited, deadline: float, mine: shield.Shield) -> None:
        """As the reader, and shielded: read until ``awaited`` has arrived."""
        transport, decoder = self.transport, self._decoder
        try:
            if self._frames and not self._deliver():
                return
            while not awaited.arrived and self._broken is None:
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
            self._broke(error)

    def _take(self, count: int) -> bool:
        """Decode and deliver ``count`` received bytes. False: stop reading."""
        if count == 0:
            self._break("the peer closed the connection")
            return False
        self.bytes_received += count
        self._frames.extend(self._decoder.received(count))
        return self._deliver()

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
                if self._descriptor is not None and self._broken is None:
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
        if was_helping and self._descriptor is not None and self._broken is None:
            self._loop.listen(self._descriptor)
        self._read_lock.release()
        if self._frames:
            self._loop.call_soon(self._read)
        if not was_helping:
            self._loop.hand_over()

    # ------------------------------------------------------------------ ending

    def _break(self, reason: str) -> None:
        """The connection cannot go on. Told once, on the I/O thread, which then closes the link."""
        if self._broken is None:
            self._broken = reason
            self.transport.interrupt()
            self.outgoing.close()
            self._loop.call_soon(self._tell_broken)

    def _broke(self, error: Exception | None) -> PeerDead:
        """The error to raise for what was being sent; None: the link was broken before."""
        if error is None:
            return self.dead(Delivery.NOT_SENT)
        self._break(str(error))
        return self.dead(Delivery.UNKNOWN)

    def _tell_broken(self) -> None:
        if self._told:
            return  # two threads found out at the same moment
        self._told = True
        self.close()
        self._on_broken(self._broken or "closed")

    def abort(self, reason: str) -> None:
        """End the connection because of what the peer sent."""
        self._break(reason)

    def wait_closed(self, deadline: float) -> None:
        """Wait until the peer ended its side, too: closing before that could destroy what we sent last."""
        self.outgoing.wait_while(lambda: self._broken is None, deadline)

    def dead(self, delivery: Delivery) -> PeerDead:
        """The error for a call over this broken link."""
        return PeerDead(f"the link to {self.peer.name} is gone: {self._broken}", delivery)

    def close(self, reason: str = "this node closed the link") -> None:
        """Close for good. Idempotent; from any thread but one inside this link."""
        if self._broken is None:
            self._broken = reason
        self.transport.interrupt()  # wakes whoever sits in a system call on it
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)
        self.outgoing.close()
        self.outgoing.forget()
        if role.link is self:
            self.transport.close()
            return
        with self._read_lock:
            self.transport.close()

    def close_after_fork(self) -> None:
        """In a forked child: let go of the descriptor without telling the peer."""
        self._broken = "this process was forked"
        self.transport.close_after_fork()
