"""The writing half of a link: many threads send frames, in order, without a hop to another thread.

Owns the write lock, the queued frames and the bytes that the kernel did not take; `send_queue.py` has the waiting
threads. Knows nothing of what frames mean. Over 400 lines, since all of it is one argument about one lock.

- Small frames go through ``_outbox``. The thread that gets the write lock sends all of them with one system call. A
  thread that does not get the lock returns: the holder looks again after its release, so no frame stays behind.
- The sender of a large message writes it itself, chunk by chunk (`protocol/chunks.py`), until the kernel has all of it:
  no copy is made, and the caller may change its tensors as soon as the call returns. That is also the back-pressure.
  Before each chunk, small frames leave; after each chunk, the next large message has its turn.
- No thread waits while it holds the lock. ``_unsent`` has the bytes in wire order, so any holder can go on with them.
- The I/O thread writes what the kernel did not take of small frames; senders wait while this backlog exceeds
  ``backlog_limit_bytes``. The I/O thread itself never waits.
- A transport error breaks the connection; ``on_error`` gets it. Until the next connection (``attach``) the link is
  *down*. To senders, that looks like a kernel that takes nothing: small frames queue up, senders of large messages
  wait. A large message that was being written goes on, over the next connection, with the first chunk the peer lacks.
- A link that is down, and for which nobody dials, is *asleep*. A sender queues its frame, then looks whether the link
  is asleep, and if so calls ``on_wanted``. The I/O thread marks the link asleep, then looks at the queue. So one of
  the two always sees the other.
- Every frame goes to ``kept`` of the session, in wire order and before its first byte leaves, and gets its number then.
- An error that no transport should raise (no memory, a defect) breaks the connection like any other: nobody knows which
  bytes have left, and the next connection's count tells.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from farcall.errors import Delivery, PeerDead, RpcTimeout
from farcall.protocol.chunks import Chunk, ChunkSize, Instead, LargeMessage
from farcall.protocol.frames import HEADER, MAX_SLOTS, REQUEST, Piece, numbered
from farcall.protocol.session import Session, Unkept
from farcall.runtime.io import sigint
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import is_interrupted, stop_reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.resend import NOBODYS, nothing_instead
from farcall.runtime.link.send_queue import SendQueue, bounded
from farcall.transport.interface import WAIT_SLICE_S, Transport, TransportBroken, TransportError

COPIED_BYTES = 32 * 1024
"""A frame of up to this size is copied to get its number; of a larger one only the header."""


class _Interrupted(Exception):
    """The connection broke while this thread was writing; another one may follow."""


class Outgoing:
    """The frames and large messages that one link has to send."""

    __slots__ = (
        "_blocked",
        "_chunk_size",
        "_dead",
        "_descriptor",
        "_free_slots",
        "_large",
        "_loop",
        "_name",
        "_on_error",
        "_on_wanted",
        "_outbox",
        "_session",
        "_stays",
        "_transport",
        "_unsent",
        "_waiting",
        "_write_lock",
        "asleep",
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
        session: Session,
        on_wanted: Callable[[], None],
    ) -> None:
        """``dead`` makes the error for frames sent after the end.

        ``on_wanted`` is called, from any thread, when something is to be sent over a link that is asleep.
        """
        self._name = name
        self._loop = loop
        self.queue: SendQueue = SendQueue(name, loop, backlog_limit_bytes)
        """The waiting senders, and why they wait."""
        self.bytes_sent: int = 0
        self._transport = transport
        self._descriptor = transport.fileno()
        self._on_error = on_error
        self._dead = dead
        self._session = session
        self._on_wanted = on_wanted
        # Mutable. Any thread changes ``_large`` and ``_free_slots``, appends to ``_outbox`` (deques: atomic) and may
        # `pause`. All else, and taking frames out of ``_outbox``, needs the write lock.
        self.asleep: bool = False
        """Is the link down, with nobody dialling? Set by the I/O thread, cleared by any sender."""
        self._outbox: deque[bytes] = deque()
        self._unsent: deque[memoryview] = deque()
        self._stays = False  # once True, `pause_behind` refuses
        self._blocked = False  # the I/O thread is to write what the kernel did not take
        self._waiting = 0  # how many threads wait for the kernel; they will write the outbox, too
        self._large: deque[LargeMessage] = deque()  # under way; the first has its turn
        self._free_slots = deque(range(MAX_SLOTS))
        self._chunk_size = ChunkSize()
        self._write_lock = threading.Lock()

    def send(self, data: bytes, deadline: float = NEVER, more: bool = False, urgent: bool = False) -> None:
        """Send one small frame.

        ``more``: this thread sends another frame at once; that one, or ``flush``, takes this one along.
        ``urgent``: never wait for room (control messages).
        """
        queue = self.queue
        if queue.closed:
            raise self._dead(Delivery.NOT_SENT)
        if queue.full and not urgent:
            if self.asleep:
                self.flush()  # asks for a connection: without one there may never be room
            queue.wait_for_room(len(data), deadline)  # before queueing: a call that times out here leaves no frame
        self._outbox.append(data)
        if not more:
            self.flush()

    def flush(self) -> None:
        """Send the outbox, or leave it to the thread that writes now. Never waits."""
        mine = sigint.here.guard
        if not mine.depth:
            sigint.look()
        mine.depth += 1
        try:
            while self._outbox and not self._blocked and not self._waiting:
                if not self._write_lock.acquire(False):
                    return  # the holder looks at the outbox again after its release
                try:
                    self._drain()
                finally:
                    self._write_lock.release()
            if self.asleep and self._outbox:
                self._wake()
        finally:
            mine.depth -= 1
            if mine.held is not None:
                sigint.deliver()

    def flush_behind_others(self) -> None:
        """Like ``flush``, before the link is closed; waits for the lock, since its holder might look again too late."""
        if self._outbox:
            sigint.enter()
            try:
                with self._write_lock:  # a moment: no holder waits for the kernel
                    self._drain()
            finally:
                sigint.leave()

    def send_pieces(
        self, pieces: Sequence[Piece], deadline: float = NEVER, instead: Instead | None = nothing_instead
    ) -> None:
        """Send one large message, and return when the kernel has all of it.

        ``instead`` gives the frames to send if the message is lost later; None: the message itself is sent again.
        """
        if is_interrupted():
            stop_reading()  # raises: this thread may hold the write lock
        sigint.enter()  # Ctrl-C comes through only while this thread waits, and between chunks
        try:
            slot = self._take_slot(deadline)
            message = LargeMessage(pieces, slot, instead)
            self._large.append(message)
            try:
                while self._send_chunk(message, deadline):
                    sigint.pause(sigint.here.guard)
            except BaseException as error:
                # Ctrl-C included: the handler must know whether to take back what was to go with the message.
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
        """Write the next chunk once it is this message's turn. False: that was the last chunk."""
        if self._large[0] is not message:
            stop_reading()
            self.queue.wait_while(lambda: self._large[0] is not message and not self.queue.closed, deadline)
            if self._large[0] is not message and not self.queue.closed:
                self._check_time(deadline)
        self._lock_for_writing(deadline)
        try:
            self._write_outbox()
            began, before = monotonic(), message.cut_bytes
            if before < message.size_bytes:
                self._write_chunk(message)
            try:
                in_time = self._write_out(deadline)
            except _Interrupted:
                return True  # the next connection begins with the chunks that the peer lacks
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

    def _write_chunk(self, message: LargeMessage) -> None:
        """Under the write lock: cut the next chunk, which counts as written from now on."""
        chunk = message.next_chunk(self._chunk_size.size_bytes if self._transport.takes_chunks else None)
        try:
            pieces = [memoryview(piece) for piece in chunk.pieces(self._session.written)]
        except BaseException:
            message.return_chunk(chunk)
            raise
        self._session.write(chunk)
        self._unsent.extend(pieces)

    def _return_chunk(self, message: LargeMessage) -> None:
        """Under the write lock, for a sender that stops waiting: forget its last chunk if no byte of it has left.

        The I/O thread finishes a chunk that has left in part; also one of which an earlier connection took some: a peer
        that is not told would begin the next message in this slot with those bytes.
        """
        kept = self._session.kept
        last = kept[-1] if kept else None
        if isinstance(last, Chunk) and last.message is message and not last.may_be_there:
            pieces = last.pieces(0)
            count = len(pieces)
            gone_or_going = self._transport.pending_bytes  # of a record begun: they leave, though still unsent here
            if len(self._unsent) >= count and _size(self._unsent) >= sum(map(len, pieces)) + gone_or_going:
                for _ in range(count):
                    self._unsent.pop()
                self._session.unwrite()
                message.return_chunk(last)

    def _give_up(self, message: LargeMessage) -> bool:
        """Take the message back for its sender. False: all of it has left, or will."""
        with self._write_lock:
            # Copy the unsent bytes: another thread writes them, perhaps over the next connection, while the caller,
            # which has its error by then, may change its tensors.
            self._unsent = deque(memoryview(bytes(piece)) for piece in self._unsent)
            is_whole = message.cut_bytes == message.size_bytes
            if is_whole:
                message.written()
            elif (farewell := message.give_up()) is not None:
                self._outbox.append(farewell)
        self.flush()  # also the frames that other threads left to the holder of the lock
        return not is_whole

    def send_with_descriptor(self, data: bytes, descriptor: int, deadline: float, unkept: Unkept = NOBODYS) -> bool:
        """Send one small frame and, with its first byte, a descriptor.

        False: this connection carries no descriptors, and nothing was sent. If the connection breaks, even before the
        first byte, the frame is lost, and ``unkept.lost`` is called: the caller owns the descriptor and may close it,
        so the frame cannot be sent again.
        """
        self._lock_for_writing(deadline)
        session = self._session
        try:
            # Another one than the last, perhaps: a link of two members of one host may come back over TCP.
            if not self._transport.carries_descriptors:
                return False
            self._write_outbox()
            while self._write_out(deadline):
                number = session.write(unkept)  # before its first byte leaves: an acknowledgement may overtake `send`
                try:
                    data = numbered(data, number)
                    taken = self._transport.send((data,), (descriptor,))
                except Exception:
                    session.unwrite()  # no byte has left
                    raise
                except BaseException as error:  # Ctrl-C: perhaps behind the system call
                    self._failed(error)
                    raise
                self.bytes_sent += taken
                if taken:
                    if taken < len(data):
                        self._unsent.append(memoryview(data)[taken:])
                    return True
                session.unwrite()
                if monotonic() >= deadline:
                    break
                self._wait_writable(WAIT_SLICE_S)
            raise RpcTimeout(f"{self._name} read no bytes in time: it is stopped, or too busy", Delivery.NOT_SENT)
        except TransportError as error:
            self._failed(error)
            unkept.lost()  # no byte has left, and ``kept`` does not have it: the session will not call this
            return True
        except _Interrupted:
            unkept.lost()  # likewise
            return True
        finally:
            self._unlock_after_writing()

    def _lock_for_writing(self, deadline: float) -> None:
        """Wait for a connection and take the write lock. Until ``_unlock_after_writing``, Ctrl-C ends only waits."""
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
            self._set_blocked(False)  # this thread writes what was left to the I/O thread

    def _wait_for_connection(self, deadline: float) -> None:
        stop_reading()
        self.queue.wait_while(self._waits_for_connection, deadline)
        if self.queue.down and not self.queue.closed and monotonic() >= deadline:
            raise RpcTimeout(f"{self._name} could not be reached again in time", Delivery.NOT_SENT)

    def _waits_for_connection(self) -> bool:
        if self.asleep:
            self._wake()
        return self.queue.down and not self.queue.closed

    def _wake(self) -> None:
        self.asleep = False
        self._on_wanted()

    def _unlock_after_writing(self) -> None:
        if self.queue.down:
            pass  # ``kept`` has the unsent frames; the next connection begins with them
        elif self._unsent and not self.queue.closed:
            self._set_blocked(True)  # interrupted or out of time in the middle of a frame: the I/O thread ends it
        else:
            self.queue.has_room()
        self._write_lock.release()
        self.flush()
        sigint.leave()

    def _write_out(self, deadline: float) -> bool:
        """Under the write lock: send all unsent bytes, waiting for the kernel. False: the deadline came first."""
        while self._unsent:
            try:
                has_sent = self._send_some()
            except BaseException as error:
                self._failed(error)
                raise _Interrupted from error
            if not has_sent:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    return False
                self._wait_writable(min(WAIT_SLICE_S, remaining))
        return True

    def _wait_writable(self, timeout_s: float) -> None:
        """Under the write lock, shielded: release it, wait for the kernel, take it again. Ctrl-C may end the wait."""
        stop_reading()
        transport = self._transport
        self.queue.full = True  # bounds the small frames that other threads queue meanwhile
        self._waiting += 1  # and makes them leave those frames to this thread
        self._write_lock.release()
        try:
            sigint.exposed(transport.wait_writable, timeout_s)
        except TransportError as error:
            self._on_error(error, transport)  # of this transport: the link may have another by now
            raise _Interrupted from error
        finally:
            self._write_lock.acquire()
            self._waiting -= 1
        if self._transport is not transport or self.queue.down:
            raise _Interrupted

    def _send_some(self) -> bool:
        """Under the write lock, shielded: one system call. False: the kernel takes nothing now."""
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
        """Under the write lock, shielded: send as much of the outbox as the kernel takes now."""
        if self.queue.down:
            # The connection broke before this thread had the lock. `resumed` may have settled which frames count as
            # written, so take none out of the outbox.
            self._blocked = True
            return
        try:
            before = self.bytes_sent
            fresh = False
            while self._outbox or self._unsent:
                if not self._unsent:
                    fresh = True
                    outbox = self._outbox
                    if len(outbox) == 1:
                        frame = outbox[0]
                        if len(frame) > COPIED_BYTES:
                            self._write_outbox()
                            continue
                        session = self._session
                        data = numbered(frame, session.written)
                        session.kept.append(frame)  # `write`, inlined: every call comes this way
                        session.written += 1
                        outbox.popleft()
                    else:
                        data = self._take_outbox()
                    taken = self._transport.send_bytes(data)
                    self.bytes_sent += taken
                    if taken == len(data):
                        continue
                    self._unsent.append(memoryview(data)[taken:])
                if not self._send_some():
                    self._set_blocked(True)
                    # A transport without a descriptor reports "writable" once, not for as long as it is true. Room
                    # made before the line above was reported to nobody: try once more.
                    if self._descriptor is None and self._send_some():
                        self._set_blocked(False)
                        continue
                    self._count_queued(None if fresh else self.bytes_sent - before)
                    return
            if self.queue.full:
                self.queue.has_room()
        except BaseException as error:
            self._failed(error)

    def _take_outbox(self) -> bytes:
        """Under the write lock: take the queued frames, which count as written from now on."""
        session, outbox = self._session, self._outbox
        frames = list(outbox)
        data = numbered(frames, session.written)
        session.kept.extend(frames)
        session.written += len(frames)
        for _ in frames:
            outbox.popleft()
        return data

    def _write_outbox(self) -> None:
        """Under the write lock: have the queued frames leave behind all else, and count as written from now on."""
        if len(self._outbox) == 1 and len(self._outbox[0]) > COPIED_BYTES:
            frame = self._outbox[0]
            head = numbered(frame[: HEADER.size], self._session.written)
            self._unsent.extend((memoryview(head), memoryview(frame)[HEADER.size :]))
            self._session.write(frame)
            self._outbox.popleft()
        elif self._outbox:
            self._unsent.append(memoryview(self._take_outbox()))

    def _set_blocked(self, blocked: bool) -> None:
        self._blocked = blocked
        if blocked:
            self.queue.full = True
        if self._descriptor is not None:
            self._loop.want_write(self._descriptor, blocked)

    def _count_queued(self, sent_bytes: int | None) -> None:
        """The kernel is full: subtract ``sent_bytes`` from the count of queued bytes (None: count anew)."""
        if sent_bytes is None:
            self.queue.set_queued(_size(self._unsent) + sum(map(len, tuple(self._outbox))))
        else:
            self.queue.set_queued(max(0, self.queue.queued_bytes - sent_bytes))

    def write(self) -> None:
        """On the I/O thread: the kernel has room again."""
        if self._blocked and not self.queue.down and self._write_lock.acquire(False):
            try:
                # Unblock first: a thread that appends to the outbox from now on will try to flush.
                self._set_blocked(False)
                self._drain()
            finally:
                self._write_lock.release()
            self.flush()

    def pause(self) -> None:
        """The connection is broken: write nothing until the next one. From any thread, without the lock."""
        self._blocked = True
        self.queue.down = True
        self.queue.full = True
        self.queue.wake_waiting()  # `end_sending` and `Link.wait_closed` wait for this, too

    def _failed(self, error: BaseException) -> None:
        """Under the write lock: the connection takes no bytes any more. Raises Ctrl-C and its like again.

        Pauses by itself. A helping reader may have met the break while `_go_on` was about to begin: the link knows it
        already, its pause was undone, and whoever flushes would try without end. The next `attach` ends the pause.
        """
        known = error if isinstance(error, TransportError) else TransportBroken(f"cannot send: {error!r}")
        self._on_error(known, self._transport)
        self.pause()
        if not isinstance(error, Exception):
            self._unsent.clear()  # nobody knows which of it has left: the next connection begins with what is lost
            raise error

    def detach(self) -> None:
        """On the I/O thread: let go of the broken connection, and of the bytes that it did not take."""
        with self._write_lock:
            self.pause()
            self._descriptor = None
            self._unsent.clear()
            self.queue.queued_bytes = sum(map(len, tuple(self._outbox)))

    def resumed(self, received: int) -> None:
        """On the I/O thread, after `detach`: the peer has ``received`` frames; those it lacks become unsent again.

        Until `attach`, nothing is written, nor counts as written. Senders that give up meanwhile copy the unsent bytes.
        """
        with self._write_lock:
            self._unsent = deque(memoryview(piece) for piece in self._session.resumed(received))

    def attach(self, transport: Transport) -> None:
        """On the I/O thread: go on over ``transport``, beginning with the frames that `resumed` found."""
        with self._write_lock:
            self.queue.queued_bytes += _size(self._unsent)
            self._transport = transport
            self._descriptor = transport.fileno()
            self._go_on()
        self.flush()
        self.queue.wake_waiting()

    def _go_on(self) -> None:
        """Under the write lock: mark the link up and write what is queued."""
        self.asleep = self.queue.down = False
        self._set_blocked(False)
        sigint.enter()
        try:
            self._drain()
        finally:
            sigint.leave()

    def pause_behind(self, last: bytes, received: int | None = None) -> bool:
        """On the I/O thread: write ``last``, and nothing behind it until `unpause` or another connection.

        ``received``: how many frames the peer has. False: it lacks some, or there is more to write; not paused, though
        ``last`` may have left.
        """
        if not self._write_lock.acquire(False):
            return False
        sigint.enter()
        try:
            if self._outbox or self._unsent or self._large or self._blocked or self._waiting or self.queue.down:
                return False
            if self._stays:
                return False
            if received is not None and not self._session.has_all(received):
                return False
            # Not through the outbox: a drain would send frames that other threads append meanwhile behind ``last``.
            data = numbered(last, self._session.write(last))
            taken = self._transport.send_bytes(data)
            self.bytes_sent += taken
            if taken < len(data):
                self._unsent.append(memoryview(data)[taken:])  # the kernel is full: ``last`` goes, others behind it
                self._drain()
                return False
            self.pause()
            return True
        except BaseException as error:
            self._failed(error)
            return False
        finally:
            sigint.leave()
            self._write_lock.release()
            self.flush()

    def unpause(self, *, for_good: bool = False) -> None:
        """Go on over the connection after `pause_behind`. ``for_good``: and refuse every later `pause_behind`."""
        with self._write_lock:
            self._stays = self._stays or for_good
            if self.queue.down and not self.queue.closed:
                self._go_on()
        self.flush()
        self.queue.wake_waiting()

    def sleep(self) -> None:
        """On the I/O thread: nobody dials before something is to be sent."""
        self.asleep = True
        self.queue.wake_waiting()  # a thread that waits for a connection asks for one (`_waits_for_connection`)
        self.flush()  # and so does a frame that was queued before the first line

    def stop(self) -> frozenset[int]:
        """Before ``close``: write nothing any more. Returns the calls whose requests are queued and were never written.

        Under the lock: a thread that is about to flush must not write one of them behind our back.
        """
        with self._write_lock:
            self.pause()
        heads = (HEADER.unpack_from(data) for data in tuple(self._outbox))
        return frozenset(head[4] for head in heads if head[2] == REQUEST)

    def end_sending(self, deadline: float) -> None:
        """Write out the queue, then end this direction of the stream; reading goes on."""
        self.queue.wait_while(lambda: bool(self._large) and not self.queue.down and not self.queue.closed, deadline)
        if not self.queue.down and self._write_lock.acquire(True, bounded(deadline - monotonic())):
            try:
                if not self.queue.down and not self.queue.closed:
                    self._write_outbox()
                    if self._write_out(deadline):
                        self._transport.end_sending()
            except _Interrupted:
                pass  # the peer ended the connection first
            finally:
                self._write_lock.release()

    def close(self) -> None:
        """Send nothing any more, and wake up the waiting senders."""
        self.queue.closed = True
        self.queue.wake_waiting()

    def forget(self) -> None:
        """After ``close``: drop what is queued, once no thread writes."""
        with self._write_lock:
            self._descriptor = None
            self._unsent.clear()
            self._outbox.clear()


def _size(pieces: Sequence[memoryview] | deque[memoryview]) -> int:
    return sum(len(piece) for piece in pieces)
