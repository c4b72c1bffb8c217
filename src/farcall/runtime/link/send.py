"""The writing half of a link: bytes out of many threads, in order, without a hop.

Owns the write lock, the queued frames and the bytes that the kernel did not take; `send_queue.py` has the threads that
wait. Knows nothing of what frames mean. Over 400 lines, since all of it is one argument about one lock.

- Small frames go through ``_outbox``; whoever gets the write lock sends all of them with one system call.
  Whoever does not get it leaves: the holder looks again after letting go, so nothing stays behind.
- A large message is written by its own thread, chunk by chunk (`protocol/chunks.py`), until the kernel has all of it:
  no copy is made, and the caller may change its tensors as soon as the call returns. That is also the back-pressure.
  Before each chunk, small frames leave; after each, it is the next large message's turn.
- Nobody waits while holding the lock. ``_unsent`` has the bytes in their order, so whoever gets it may go on with them.
- What the kernel does not take of small frames is left to the I/O thread; senders wait while more than
  ``backlog_limit_bytes`` are left. The I/O thread itself never waits.
- An error of the transport breaks the connection: ``on_error`` is told. Until there is another one (``attach``) the
  link is *down*, which to senders looks like a kernel that takes nothing: small frames queue up, and who has a large
  one waits. One that was being written when the connection broke goes on with the first chunk that the peer lacks.
- Every frame goes to ``kept`` of the session, in the order of the wire and before its first byte leaves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from farcall.errors import Delivery, PeerDead, RpcTimeout
from farcall.protocol.chunks import Chunk, ChunkSize, Instead, LargeMessage
from farcall.protocol.frames import HEADER, MAX_SLOTS, REQUEST, Piece
from farcall.protocol.session import Kept, Session, Unkept
from farcall.runtime.io import sigint
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import stop_reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.resend import NOBODYS, nothing_instead
from farcall.runtime.link.send_queue import SendQueue, bounded
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportError


class _Interrupted(Exception):
    """The connection broke, and there may be another one."""


class Outgoing:
    """What one link has to send."""

    __slots__ = (
        "_blocked",
        "_chunk_size",
        "_dead",
        "_descriptor",
        "_free_slots",
        "_kept",
        "_large",
        "_loop",
        "_name",
        "_on_error",
        "_outbox",
        "_transport",
        "_unsent",
        "_waiting",
        "_write_lock",
        "bytes_sent",
        "queue",
    )

    def __init__(
        self,
        name: str,
        transport: Transport,
        loop: Loop,
        backlog_limit_bytes: int,
        *,
        on_error: Callable[[Exception, Transport], None],
        dead: Callable[[Delivery], PeerDead],
        kept: deque[Kept],
    ) -> None:
        """``dead`` gives the error for what is sent after the end."""
        self._name = name
        self._loop = loop
        self.queue: SendQueue = SendQueue(name, loop, backlog_limit_bytes)
        """The senders that wait, and why."""
        self.bytes_sent: int = 0
        self._transport = transport
        self._descriptor = transport.fileno()
        self._on_error = on_error
        self._dead = dead
        self._kept = kept
        self._outbox: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._blocked = False  # the I/O thread is to write what the kernel did not take
        self._waiting = 0  # so many threads wait for the kernel, and go on then
        self._large: deque[LargeMessage] = deque()  # under way; the first one's turn it is
        self._free_slots = deque(range(MAX_SLOTS))
        self._chunk_size = ChunkSize()
        self._write_lock = threading.Lock()

    def send(self, data: bytes, deadline: float = NEVER, more: bool = False, urgent: bool = False) -> None:
        """Send one small frame.

        ``more``: another one follows at once from this thread; it, or ``flush``, sends both.
        ``urgent``: never wait for room (control messages).
        """
        queue = self.queue
        if queue.closed:
            raise self._dead(Delivery.NOT_SENT)
        if queue.full and not urgent:
            queue.wait_for_room(len(data), deadline)  # before it is queued: a call that is given up leaves nothing
        self._outbox.append(data)
        if not more:
            self.flush()

    def flush(self) -> None:
        """Send what is in the outbox; never waits."""
        mine = sigint.of_thread()
        mine.depth += 1
        try:
            while self._outbox and not self._blocked and not self._waiting:
                if not self._write_lock.acquire(False):
                    return  # the holder looks at the outbox again after it let go
                try:
                    self._drain()
                finally:
                    self._write_lock.release()
        finally:
            mine.depth -= 1
            if mine.held is not None:
                sigint.deliver()

    def flush_behind_others(self) -> None:
        """Like ``flush``, before the link is closed: whoever writes now would look at the outbox again too late."""
        if self._outbox:
            sigint.enter()
            try:
                with self._write_lock:  # its holder does not wait
                    self._drain()
            finally:
                sigint.leave()

    def send_pieces(
        self, pieces: Sequence[Piece], deadline: float = NEVER, instead: Instead | None = nothing_instead
    ) -> None:
        """Send one large message, waiting until the kernel has all of it.

        ``instead`` gives what is sent if it is lost later; None: it is sent again.
        """
        sigint.enter()  # Ctrl-C comes through only where we wait, and between chunks
        try:
            slot = self._take_slot(deadline)
            message = LargeMessage(pieces, slot, instead)
            self._large.append(message)
            try:
                while self._send_chunk(message, deadline):
                    sigint.pause(sigint.of_thread())
            except BaseException as error:
                # Also of Ctrl-C: who catches it takes back what was to go with the message.
                delivery = Delivery.NOT_SENT if self._give_up(message) else Delivery.UNKNOWN
                error.delivery = delivery  # type: ignore[attr-defined]
                raise
            finally:
                self._large.remove(message)
                self._free_slots.append(slot)
                self.queue.wake_waiting()
        finally:
            sigint.leave()

    def _take_slot(self, deadline: float) -> int:
        while True:
            try:
                return self._free_slots.popleft()
            except IndexError:
                stop_reading()
                self.queue.wait_while(lambda: not self._free_slots and not self.queue.closed, deadline)
            if self.queue.closed:
                raise self._dead(Delivery.NOT_SENT)
            self._check_time(deadline)

    def _check_time(self, deadline: float) -> None:
        if monotonic() >= deadline:
            raise RpcTimeout(
                f"{self._name} did not read the bytes queued before this message in time: it is stopped, or too busy",
                Delivery.NOT_SENT,
            )

    def _send_chunk(self, message: LargeMessage, deadline: float) -> bool:
        """Write the next chunk once it is this message's turn. False: that was the last."""
        if self._large[0] is not message:
            stop_reading()
            self.queue.wait_while(lambda: self._large[0] is not message and not self.queue.closed, deadline)
            if self._large[0] is not message and not self.queue.closed:
                self._check_time(deadline)
        self._lock_for_writing(deadline)
        try:
            self._unsent.extend(map(memoryview, self._take_outbox()))
            began, before = monotonic(), message.cut_bytes
            if before < message.size_bytes:
                chunk = message.next_chunk(self._chunk_size.size_bytes if self._transport.takes_chunks else None)
                self._kept.append(chunk)
                self._unsent.extend(map(memoryview, chunk.pieces()))
            try:
                in_time = self._write_out(deadline)
            except _Interrupted:
                return True  # the next connection begins with what the peer lacks of it
            except BaseException:
                self._return_chunk(message)
                raise
            if not in_time:
                self._return_chunk(message)
                raise RpcTimeout(
                    f"{self._name} did not read a message of {message.size_bytes} bytes in time: it is stopped, or "
                    "too busy"
                )
            self._chunk_size.took(message.cut_bytes - before, monotonic() - began)
            if message.cut_bytes == message.size_bytes:
                message.written()
                return False
            return True
        finally:
            self._unlock_after_writing()
            if len(self._large) > 1 and self._large[0] is message:
                self._large.rotate(-1)
                self.queue.wake_waiting()

    def _return_chunk(self, message: LargeMessage) -> None:
        """Under the write lock: nobody waits for the end of the last chunk any more. Forget it if no byte has gone.

        One that is partly gone is finished by the I/O thread. That needs a copy of what is left: the caller, told of a
        timeout, may change its tensors.
        """
        last = self._kept[-1] if self._kept else None
        if isinstance(last, Chunk) and last.message is message:
            pieces = last.pieces()
            count = len(pieces)
            gone_or_going = self._transport.pending_bytes
            if len(self._unsent) >= count and _size(self._unsent) >= sum(map(len, pieces)) + gone_or_going:
                for _ in range(count):
                    self._unsent.pop()
                self._kept.pop()
                message.return_chunk(last)
        self._unsent = deque(memoryview(bytes(piece)) for piece in self._unsent)

    def _give_up(self, message: LargeMessage) -> bool:
        """Its sender wants the message back. False: all of it has gone, or will."""
        with self._write_lock:
            if message.cut_bytes == message.size_bytes:
                message.written()
                return False
            farewell = message.give_up()
        if farewell is not None:
            self._outbox.append(farewell)
            self.flush()
        return True

    def send_with_descriptor(self, data: bytes, descriptor: int, deadline: float, unkept: Unkept = NOBODYS) -> None:
        """Send one small frame and, with its first byte, a descriptor.

        If the connection breaks it is lost, and ``unkept`` told so, even before its first byte: the descriptor is the
        caller's, who may close it.
        """
        self._lock_for_writing(deadline)
        taken = 0
        try:
            self._unsent.extend(map(memoryview, self._take_outbox()))
            while self._write_out(deadline):
                self._kept.append(unkept)
                taken = self._transport.send((data,), (descriptor,))
                self.bytes_sent += taken
                if taken:
                    if taken < len(data):
                        self._unsent.append(memoryview(data)[taken:])
                    return
                self._kept.pop()
                if monotonic() >= deadline:
                    break
                self._wait_writable(WAIT_SLICE_S)
            raise RpcTimeout(f"{self._name} read no bytes in time: it is stopped, or too busy", Delivery.NOT_SENT)
        except TransportError as error:
            self._on_error(error, self._transport)
        except _Interrupted:
            unkept.lost()  # nothing of it has left, and nobody else knows of it
        finally:
            self._unlock_after_writing()

    def _lock_for_writing(self, deadline: float) -> None:
        """Take the write lock. From here to ``_unlock_after_writing`` Ctrl-C comes through only where we wait."""
        sigint.enter()
        try:
            while True:
                self._write_lock.acquire()
                if self.queue.closed:
                    self._write_lock.release()
                    raise self._dead(Delivery.NOT_SENT)
                if not self.queue.down:
                    break
                self._write_lock.release()
                self._wait_for_connection(deadline)
        except BaseException:
            sigint.leave()
            raise
        if self._blocked:
            self._set_blocked(False)  # this thread goes on with what the I/O thread was to send

    def _wait_for_connection(self, deadline: float) -> None:
        stop_reading()
        self.queue.wait_while(lambda: self.queue.down and not self.queue.closed, deadline)
        if self.queue.down and not self.queue.closed and monotonic() >= deadline:
            raise RpcTimeout(f"{self._name} could not be reached again in time", Delivery.NOT_SENT)

    def _unlock_after_writing(self) -> None:
        if self.queue.down:
            pass  # what is unsent was kept; the next connection begins with it
        elif self._unsent and not self.queue.closed:
            self._set_blocked(True)  # interrupted or out of time in the middle of a frame: the I/O thread goes on
        else:
            self.queue.has_room()
        self._write_lock.release()
        self.flush()
        sigint.leave()

    def _write_out(self, deadline: float) -> bool:
        """Under the write lock: send all that is unsent, waiting for room. False: the deadline came first."""
        try:
            while self._unsent:
                if not self._send_some():
                    remaining = deadline - monotonic()
                    if remaining <= 0:
                        return False
                    self._wait_writable(min(WAIT_SLICE_S, remaining))
        except TransportError as error:
            self._on_error(error, self._transport)
            raise _Interrupted from error
        return True

    def _wait_writable(self, timeout_s: float) -> None:
        """Under the write lock, and shielded: wait for the kernel, without the lock; Ctrl-C may end this wait."""
        stop_reading()
        transport = self._transport
        self.queue.full = True  # who queues small frames meanwhile must not do so without bound
        self._waiting += 1  # and leaves them to us: we take them along
        self._write_lock.release()
        mine = sigint.of_thread()
        depth, mine.depth = mine.depth, 0
        try:
            if mine.held is not None:
                sigint.deliver()
            transport.wait_writable(timeout_s)
        except TransportError as error:
            self._on_error(error, transport)  # of this one: there may be another by now
            raise _Interrupted from error
        finally:
            mine.depth = depth
            self._write_lock.acquire()
            self._waiting -= 1
        if self._transport is not transport or self.queue.down:
            raise _Interrupted

    def _send_some(self) -> bool:
        """Under the write lock, and shielded: one system call. False: the kernel takes nothing now."""
        unsent = self._unsent
        taken = self._transport.send([unsent[index] for index in range(min(len(unsent), 64))])
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
        if self.queue.down:
            self._blocked = True  # it broke before we had the lock: what counts as written may be settled already
            return
        try:
            before = self.bytes_sent
            fresh = False
            while self._outbox or self._unsent:
                if not self._unsent:
                    fresh = True
                    outbox = self._outbox
                    if len(outbox) == 1:
                        data = outbox.popleft()
                        self._kept.append(data)
                    else:
                        data = b"".join(self._take_outbox())
                    taken = self._transport.send_bytes(data)
                    self.bytes_sent += taken
                    if taken == len(data):
                        continue
                    self._unsent.append(memoryview(data)[taken:])
                if not self._send_some():
                    self._set_blocked(True)
                    # Without a poller that reports "writable" as long as it is true, room made before the line above
                    # was reported to nobody: look once more.
                    if self._descriptor is None and self._send_some():
                        self._set_blocked(False)
                        continue
                    self._count_queued(None if fresh else self.bytes_sent - before)
                    return
            if self.queue.full:
                self.queue.has_room()
        except TransportError as error:
            self._on_error(error, self._transport)

    def _take_outbox(self) -> list[bytes]:
        """Under the write lock: what is queued, which from now on counts as written."""
        outbox = self._outbox
        taken = [outbox.popleft() for _ in range(len(outbox))]
        self._kept.extend(taken)
        return taken

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        if blocked:
            self.queue.full = True
        if self._descriptor is not None:
            self._loop.want_write(self._descriptor, blocked)

    def _count_queued(self, sent_bytes: int | None) -> None:
        """The kernel is full: how much is queued now, after ``sent_bytes`` of it went (None: count anew)."""
        if sent_bytes is None:
            self.queue.set_queued(_size(self._unsent) + sum(map(len, tuple(self._outbox))))
        else:
            self.queue.set_queued(max(0, self.queue.queued_bytes - sent_bytes))

    def write(self) -> None:
        """On the I/O thread: the kernel has room again."""
        if self._blocked and not self.queue.down and self._write_lock.acquire(False):
            try:
                # Unblocked first: who appends to the outbox from now on will try to flush.
                self._set_blocked(False)
                self._drain()
            finally:
                self._write_lock.release()
            self.flush()

    def pause(self) -> None:
        """The connection is broken: nothing is written until there is another one. From any thread, without a lock."""
        self._blocked = True
        self.queue.down = True
        self.queue.full = True
        self.queue.wake_waiting()  # some of them wait for the end

    def detach(self) -> None:
        """On the I/O thread: the broken connection is nobody's business any more."""
        with self._write_lock:
            self.pause()
            self._descriptor = None
            self._unsent.clear()
            self.queue.queued_bytes = sum(map(len, tuple(self._outbox)))

    def resumed(self, session: Session, received: int) -> list[Piece]:
        """On the I/O thread, after `detach`: what the peer, which has ``received`` frames, lacks.

        From here to `attach` nothing is written, nor counts as written.
        """
        with self._write_lock:
            return session.resumed(received)

    def attach(self, transport: Transport, missing: Sequence[Piece]) -> None:
        """On the I/O thread: go on over ``transport``, beginning with what ``resumed`` gave."""
        with self._write_lock:
            self._unsent = deque(memoryview(piece) for piece in missing)
            self.queue.queued_bytes += _size(self._unsent)
            self._transport = transport
            self._descriptor = transport.fileno()
            self.queue.down = False
            self._set_blocked(False)
            sigint.enter()
            try:
                self._drain()
            finally:
                sigint.leave()
        self.flush()
        self.queue.wake_waiting()

    def queued_calls(self) -> frozenset[int]:
        """The calls whose requests wait here and were never written."""
        heads = (HEADER.unpack_from(data) for data in tuple(self._outbox))
        return frozenset(head[4] for head in heads if head[2] == REQUEST)

    def end_sending(self, deadline: float) -> None:
        """Write out what is queued, then tell the peer that nothing follows; reading goes on."""
        self.queue.wait_while(lambda: bool(self._large) and not self.queue.down and not self.queue.closed, deadline)
        if not self.queue.down and self._write_lock.acquire(True, bounded(deadline - monotonic())):
            try:
                if not self.queue.down and not self.queue.closed:
                    self._unsent.extend(map(memoryview, self._take_outbox()))
                    if self._write_out(deadline):
                        self._transport.end_sending()
            except _Interrupted:
                pass  # the peer was faster
            finally:
                self._write_lock.release()

    def close(self) -> None:
        """Nothing is sent any more; whoever waits for room learns it."""
        self.queue.closed = True
        self.queue.wake_waiting()

    def forget(self) -> None:
        """After ``close``: drop what is queued, once nobody writes."""
        with self._write_lock:
            self._descriptor = None
            self._unsent.clear()
            self._outbox.clear()


def _size(pieces: Sequence[memoryview] | deque[memoryview]) -> int:
    return sum(len(piece) for piece in pieces)
