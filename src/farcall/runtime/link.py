"""The connection to one peer: bytes out of many threads, frames in for one.

Owns a transport, its decoder, and the two locks around them. Knows nothing of what frames mean: it gives each one to
``on_frame``, and says ``on_broken`` once.

Writing, from any thread
- Small frames go through ``_outbox``; whoever gets the write lock sends all of them with one system call.
  Whoever does not get it leaves: the holder looks again after letting go, so nothing stays behind.
- A frame with large pieces is written by its own thread, piece by piece, under the lock, until the kernel has all of
  it: no copy is made, and the caller may change its tensors as soon as the call returns. That is also the
  back-pressure.
- What the kernel does not take of small frames is left to the I/O thread; senders wait while more than
  ``backlog_limit_bytes`` are left. The I/O thread itself never waits.

Reading, by one thread at a time: the holder of the read lock
- normally the I/O thread; or a thread that waits for its own answer on this link (``help_until``): it silences the
  poller, so that the I/O thread sleeps on, and saves the hop between threads.
- A reader about to block (a future's callback that makes a call) first gives up the role: ``abdicate``.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from farcall.errors import Delivery, PeerDead, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Allocate, Frame, FrameDecoder, FrameError, Piece, allocate_plainly
from farcall.runtime import shield
from farcall.runtime.executor import Task
from farcall.runtime.inline import Ticket, claim
from farcall.runtime.loop import NEVER, READ, WRITE, Loop, loop_of_thread
from farcall.runtime.spin import Spin
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportError

logger = logging.getLogger("farcall")

_reading = threading.local()


class Awaited(Protocol):
    """What a helping reader waits for."""

    @property
    def arrived(self) -> bool: ...


class Link:
    """One peer's connection."""

    __slots__ = (
        "__weakref__",
        "_backlog_limit",
        "_blocked",
        "_broken",
        "_decoder",
        "_descriptor",
        "_frames",
        "_full",
        "_loop",
        "_on_broken",
        "_on_frame",
        "_outbox",
        "_queued_bytes",
        "_read_lock",
        "_silenced",
        "_spin",
        "_told",
        "_unsent",
        "_waiting",
        "_write_lock",
        "bytes_received",
        "bytes_sent",
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
        self.bytes_sent = 0
        self.bytes_received = 0
        self._loop = loop
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._backlog_limit = backlog_limit_bytes
        self._decoder = FrameDecoder(allocate)
        self._frames: deque[Frame] = deque()
        self._descriptor = transport.fileno()
        self._outbox: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._blocked = False  # the I/O thread is to write what the kernel did not take
        self._full = False  # the kernel takes no more at the moment, whoever writes
        self._queued_bytes = 0
        self._silenced = False
        self._spin = Spin(busy_wait_s)
        self._told = False
        self._broken: str | None = None
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

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
            self._loop.call_soon(self._read)
        if self._descriptor is None:
            self.transport.watch(lambda: self._loop.call_soon(self._read), lambda: self._loop.call_soon(self._write))
        else:
            self._loop.watch(self._descriptor, self._on_event)

    # ------------------------------------------------------------------ writing

    def send(self, data: bytes, deadline: float = NEVER, more: bool = False, urgent: bool = False) -> None:
        """Send one small frame.

        ``more``: another one follows at once from this thread; it, or ``flush``, sends both.
        ``urgent``: never wait for room (control messages).
        """
        if self._broken is not None:
            raise self.dead(Delivery.NOT_SENT)
        self._outbox.append(data)
        if not more:
            self.flush()
            if self._full and not urgent:
                self._wait_for_room(len(data), deadline)

    def flush(self) -> None:
        """Send what is in the outbox; never waits."""
        mine = shield.of_thread()
        mine.depth += 1
        try:
            while self._outbox and not self._blocked:
                if not self._write_lock.acquire(False):
                    return  # the holder looks at the outbox again after it let go
                try:
                    self._drain()
                finally:
                    self._write_lock.release()
        finally:
            mine.depth -= 1
            if mine.held is not None:
                shield.deliver()

    def send_pieces(self, pieces: Sequence[Piece], deadline: float = NEVER) -> None:
        """Send one frame of large pieces, waiting until the kernel has all of it."""
        mine = [memoryview(piece) for piece in pieces if len(piece)]
        self._lock_for_writing(deadline)
        try:
            self._unsent.extend(map(memoryview, self._take_outbox()))
            self._unsent.extend(mine)
            try:
                if not self._write_out(deadline):
                    raise RpcTimeout(f"{self.peer.name} did not take a message of {_size(mine)} bytes in time")
            except BaseException:
                self._take_back(mine)
                raise
        finally:
            self._unlock_after_writing()

    def send_with_descriptor(self, data: bytes, descriptor: int, deadline: float) -> None:
        """Send one small frame and, with its first byte, a descriptor."""
        self._lock_for_writing(deadline)
        try:
            self._unsent.extend(map(memoryview, self._take_outbox()))
            taken = 0
            while not taken and self._write_out(deadline):
                taken = self.transport.send((data,), (descriptor,))
                self.bytes_sent += taken
                if 0 < taken < len(data):
                    self._unsent.append(memoryview(data)[taken:])
                if not taken:
                    if monotonic() >= deadline:
                        break
                    self._wait_writable(WAIT_SLICE_S)
            if not taken:
                raise RpcTimeout(f"{self.peer.name} took no bytes in time")
        except TransportError as error:
            raise self._broke(error) from error
        finally:
            self._unlock_after_writing()

    def _lock_for_writing(self, deadline: float) -> None:
        """Take the write lock. From here to ``_unlock_after_writing`` Ctrl-C comes through only where we wait."""
        mine = shield.of_thread()
        mine.depth += 1
        try:
            if not self._write_lock.acquire(False):
                abdicate()  # a reader that waits for a writer: the peer may be waiting for us to read
                while not self._write_lock.acquire(True, _bounded(min(WAIT_SLICE_S, deadline - monotonic()))):
                    if monotonic() >= deadline:
                        raise RpcTimeout(f"{self.peer.name} did not take the bytes queued before this message in time")
                    shield.pause(mine)
            if self._broken is not None:
                self._write_lock.release()
                raise self.dead(Delivery.NOT_SENT)
        except BaseException:
            shield.leave()
            raise
        if self._blocked:
            self._set_blocked(False)  # this thread goes on with what the I/O thread was to send

    def _unlock_after_writing(self) -> None:
        if self._unsent and self._broken is None:
            self._set_blocked(True)  # interrupted or out of time in the middle of a frame: the I/O thread goes on
        else:
            self._has_room()
        self._write_lock.release()
        self.flush()
        shield.leave()

    def _write_out(self, deadline: float) -> bool:
        """Under the write lock: send all that is unsent, waiting for room. False: the deadline came first."""
        try:
            while self._unsent:
                if not self._send_some():
                    remaining = deadline - monotonic()
                    if remaining <= 0:
                        return False
                    self._full = True  # who queues small frames meanwhile must not do so without bound
                    self._wait_writable(min(WAIT_SLICE_S, remaining))
        except TransportError as error:
            raise self._broke(error) from error
        return True

    def _wait_writable(self, timeout_s: float) -> None:
        """Inside a shielded section: wait for the kernel; Ctrl-C may end this wait."""
        abdicate()
        mine = shield.of_thread()
        depth, mine.depth = mine.depth, 0
        try:
            if mine.held is not None:
                shield.deliver()
            self.transport.wait_writable(timeout_s)
        finally:
            mine.depth = depth

    def _take_back(self, mine: list[memoryview]) -> None:
        """Forget a frame of which no byte has gone; one that is partly gone must be finished by the I/O thread."""
        if len(self._unsent) >= len(mine) and _size(self._unsent) >= _size(mine):
            for _ in mine:
                self._unsent.pop()

    def _send_some(self) -> bool:
        """Under the write lock, and shielded: one system call. False: the kernel takes nothing now."""
        unsent = self._unsent
        taken = self.transport.send([unsent[index] for index in range(min(len(unsent), 64))])
        self.bytes_sent += taken
        if not taken:
            return False
        while unsent and taken >= len(unsent[0]):
            taken -= len(unsent.popleft())
        if taken:
            unsent[0] = unsent[0][taken:]
        return True

    def _drain(self) -> None:
        """Under the write lock, and shielded: send the outbox as far as the kernel takes it now."""
        try:
            before = self.bytes_sent
            fresh = False
            while self._outbox or self._unsent:
                if not self._unsent:
                    fresh = True
                    outbox = self._outbox
                    data = outbox.popleft() if len(outbox) == 1 else b"".join(self._take_outbox())
                    taken = self.transport.send_bytes(data)
                    self.bytes_sent += taken
                    if taken == len(data):
                        continue
                    self._unsent.append(memoryview(data)[taken:])
                if not self._send_some():
                    self._set_blocked(True)
                    self._count_queued(None if fresh else self.bytes_sent - before)
                    return
            if self._full:
                self._has_room()
        except TransportError as error:
            self._broke(error)

    def _take_outbox(self) -> list[bytes]:
        outbox = self._outbox
        return [outbox.popleft() for _ in range(len(outbox))]

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        if blocked:
            self._full = True
        if self._descriptor is not None:
            self._loop.want_write(self._descriptor, blocked)

    def _count_queued(self, sent_bytes: int | None) -> None:
        """The kernel is full: how much is queued now, after ``sent_bytes`` of it went (None: count anew)."""
        if sent_bytes is None:
            self._queued_bytes = _size(self._unsent) + sum(map(len, tuple(self._outbox)))
        else:
            self._queued_bytes = max(0, self._queued_bytes - sent_bytes)
        if self._queued_bytes <= self._backlog_limit:
            self._wake_waiting()

    def _has_room(self) -> None:
        """Nothing waits for the kernel any more."""
        if self._full:
            self._full = False
            self._queued_bytes = 0
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        waiting = self._waiting
        while waiting:
            try:
                waiting.popleft().release()
            except IndexError:
                return  # another thread was faster

    def _wait_for_room(self, size_bytes: int, deadline: float) -> None:
        """After a small frame was queued behind a full kernel: wait if too much is queued already."""
        if self._loop.on_thread() or getattr(_reading, "link", None) is not None:
            return  # readers never wait for room: the peer may be waiting for them to read
        self._queued_bytes += size_bytes
        self._wait_while(
            lambda: self._full and self._queued_bytes > self._backlog_limit and self._broken is None, deadline
        )
        if monotonic() >= deadline and self._full and self._queued_bytes > self._backlog_limit:
            raise RpcTimeout(f"{self.peer.name} does not read: {self._queued_bytes} bytes wait to be sent")

    def _wait_while(self, condition: Callable[[], bool], deadline: float) -> None:
        """Sleep while ``condition`` holds, looking again at each ``_wake_waiting``, until ``deadline`` at most.

        Not a Condition: Ctrl-C in the middle of that would leave its lock behind.
        """
        mine = shield.of_thread()
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        while condition():  # after the line above: whoever changes it from now on opens the gate
            remaining = deadline - monotonic()
            if remaining <= 0:
                return
            depth, mine.depth = mine.depth, 0
            try:
                if mine.held is not None:
                    shield.deliver()
                opened = gate.acquire(True, _bounded(min(WAIT_SLICE_S, remaining)))
            finally:
                mine.depth = depth
            if opened:
                self._waiting.append(gate)

    def _write(self) -> None:
        """On the I/O thread: the kernel has room again."""
        if self._blocked and self._write_lock.acquire(False):
            try:
                # Unblocked first: who appends to the outbox from now on will try to flush.
                self._set_blocked(False)
                self._drain()
            finally:
                self._write_lock.release()
            self.flush()

    # ------------------------------------------------------------------ reading

    def _on_event(self, events: int) -> None:
        if events & WRITE:
            self._write()
        if events & READ:
            self._read()

    def _read(self) -> None:
        """On the I/O thread: read what is there, unless somebody else is reading."""
        if not self._read_lock.acquire(False):
            return
        _reading.link = self
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
            self._end_reading()

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
            self._end_reading()
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
            self.send(data, deadline)
            if helping:
                self._read_until(awaited, deadline, mine)
        finally:
            self._end_reading()
            mine.depth -= 1
            if mine.held is not None:
                shield.deliver()

    def _begin_helping(self) -> bool:
        """Take the role of the reader if it is free, and tell the poller to leave this link alone."""
        if self._descriptor is None or not self._loop.can_silence or not self._read_lock.acquire(False):
            return False
        _reading.link = self
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
        """Hand out the decoded frames. False: this thread gave up reading meanwhile."""
        frames = self._frames
        while frames:
            self._on_frame(frames.popleft())
            if _reading.link is not self:
                return False
        return True

    def _end_reading(self) -> None:
        if getattr(_reading, "link", None) is self:
            _reading.link = None
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

    def run_inline(self, task: Task) -> bool:
        """On the I/O thread, while it delivers a frame of this link: run a task that is expected to be quick.

        False: it was not, and another thread is the I/O thread now.
        """
        _reading.ticket = ticket = self._loop.standby.begin(self)
        try:
            task.run(bool(self._frames))
        finally:
            kept = self._loop.standby.end(ticket)
            _reading.ticket = None
            if not kept:
                _reading.link = None  # another thread reads on: do not touch the link any more
        return kept

    def pass_on(self) -> None:
        """The I/O thread is stuck in a function that runs inline: another one reads on. By the standby thread."""
        self._read_lock.release()
        if self._frames:
            self._loop.call_soon(self._read)
        self._loop.hand_over()

    # ------------------------------------------------------------------ ending

    def _break(self, reason: str) -> None:
        """The connection cannot go on. Told once, on the I/O thread, which then closes the link."""
        if self._broken is None:
            self._broken = reason
            self.transport.interrupt()
            self._wake_waiting()
            self._loop.call_soon(self._tell_broken)

    def _broke(self, error: Exception) -> PeerDead:
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

    def end_sending(self, deadline: float) -> None:
        """Write out what is queued, then tell the peer that nothing follows; reading goes on."""
        if self._write_lock.acquire(True, _bounded(deadline - monotonic())):
            try:
                self._unsent.extend(map(memoryview, self._take_outbox()))
                if self._broken is None and self._write_out(deadline):
                    self.transport.end_sending()
            except PeerDead:
                pass  # it was faster
            finally:
                self._write_lock.release()

    def wait_closed(self, deadline: float) -> None:
        """Wait until the peer ended its side, too: closing before that could destroy what we sent last."""
        self._wait_while(lambda: self._broken is None, deadline)

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
        self._wake_waiting()
        with self._write_lock:
            self._unsent.clear()
            self._outbox.clear()
        if getattr(_reading, "link", None) is self:
            self.transport.close()
            return
        with self._read_lock:
            self.transport.close()

    def close_after_fork(self) -> None:
        """In a forked child: let go of the descriptor without telling the peer."""
        self._broken = "this process was forked"
        self.transport.close_after_fork()


def abdicate() -> None:
    """To be called by a thread about to block: if it is reading a link, somebody else must read on."""
    link: Link | None = getattr(_reading, "link", None)
    if link is not None:
        # Of this thread, not of the link: another one may be the I/O thread by now and run a function, too.
        ticket: Ticket | None = getattr(_reading, "ticket", None)
        if ticket is not None:
            _reading.ticket = None
            if not claim(ticket):
                _reading.link = None  # taken away already
                return
        link._end_reading()
    loop = loop_of_thread()
    if loop is not None:
        loop.hand_over()


def _bounded(seconds: float) -> float:
    """Seconds as ``Lock.acquire`` wants them: -1 for no bound, never negative otherwise."""
    if seconds == NEVER:
        return -1
    return min(max(0.0, seconds), threading.TIMEOUT_MAX)


def _size(pieces: Sequence[memoryview] | deque[memoryview]) -> int:
    return sum(len(piece) for piece in pieces)
