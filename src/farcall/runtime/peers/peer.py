"""The targets of messages: `Peer` is any member of the group, `RemotePeer` a member behind a link.

A peer takes whole messages and delivers them; it does not know their meaning. Each out-of-band buffer goes through a
shared segment if one can be had (`shared_memory.py`), else inline. This node itself is a peer, too: `loopback.py`.

Any thread may send; the thread that reads the link handles the replies about shared memory.

Over 400 lines: the requests of a call to a peer, and how a remote peer carries them out, side by side.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import SegmentRefused
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import Cancelled, Delivery, RpcError
from farcall.ids import WorkerInfo
from farcall.protocol import messages
from farcall.protocol.chunks import Instead
from farcall.protocol.frames import (
    CONTROL,
    LARGE_BYTES,
    LETTER,
    REQUEST,
    RESPONSE,
    SHARED,
    YOURS,
    Frame,
    Piece,
    Ticket,
    encode_frame,
    encode_small,
)
from farcall.protocol.member import incarnation_text
from farcall.protocol.messages import LEFT
from farcall.runtime.calls.admission import Fullness
from farcall.runtime.calls.executor import Task
from farcall.runtime.io.reader import in_event_loop, is_interrupted, reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.link import Link, peer_dead
from farcall.runtime.link.receive import Awaited
from farcall.runtime.link.resend import instead_of
from farcall.runtime.observing.counters import FunctionCounters
from farcall.runtime.peers.shared_memory import SharedMemorySender
from farcall.serialize import has_devices, withdraw, withdraw_lent
from farcall.transport.interface import Absent

logger: logging.Logger = logging.getLogger("farcall")

WORTH_RELEASING_BYTES = 512 * 1024
"""From here on, the peer's memory is released ahead of the next message; less waits for more, or for a timer."""


class Peer:
    """A member that messages can be sent to. Mutable: ``devices``, ``full``, and the two tables of counters."""

    __slots__ = (
        "__weakref__",
        "called",
        "devices",
        "full",
        "incarnation",
        "info",
        "number",
        "served",
    )

    devices: Any
    """A `DeviceLink`, if a device map leads to this peer or from it; else None."""
    info: WorkerInfo
    incarnation: int
    """Identifies the process: another one may get its name and rank later."""
    number: int
    """The name of this member in references and gradients.

    For a founding member of a group of fixed size its rank, since programs see it (torch prints it as ``created_on``);
    else its incarnation, since ranks are reused. An incarnation is never as small as a rank.
    """
    full: Fullness | None
    """Set while the peer reports that too many calls wait there."""

    def __init__(self, info: WorkerInfo, incarnation: int, number: int) -> None:
        self.devices = None
        self.info = info
        self.incarnation = incarnation
        self.number = number
        self.full = None
        self.called: FunctionCounters = {}
        """Counts the outcomes of calls to this peer."""
        self.served: FunctionCounters = {}
        """Counts the outcomes of functions that ran for this peer."""

    def send(self, frame: Frame, deadline: float = NEVER, more: bool = False, awaited: Awaited | None = None) -> None:
        """Send one message.

        ``more``: another message or a ``flush`` follows at once. ``awaited``: the caller will wait for this answer, and
        may read the link itself meanwhile.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Send the messages that ``more`` held back."""
        raise NotImplementedError

    def help_until(self, awaited: Awaited, deadline: float) -> None:
        """Read the link on the calling thread, if no other thread does, until ``awaited`` has arrived."""
        raise NotImplementedError

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        """Run ``task`` on the calling thread if that is the I/O thread and, unless ``at_once``, has time.

        None: the task has not run. False: the task was late, and another thread reads on.
        """
        return None

    def cancel(self, call_id: int) -> None:
        """Tell the peer that the caller no longer waits for the answer to this call."""

    def control(self, message: messages.Message, more: bool = False) -> None:
        """Send a control message, if the peer can still be reached; never blocks."""
        raise NotImplementedError

    def watch(self) -> None:
        """The thread that reads this peer's link is about to complete a future, which may take long."""

    def tell_full(self, queued: int, limit: int) -> None:
        """Report to the peer that too many calls wait here; never blocks."""
        raise NotImplementedError

    def tell_room(self) -> None:
        """Report to the peer that there is room again; never blocks."""
        raise NotImplementedError

    def on_queue_full(self, message: messages.QueueFull) -> None:
        """The peer reports that too many calls wait there."""
        if self.full is None:
            self.full = Fullness(message.queued, message.limit)

    def on_queue_has_room(self, message: messages.QueueHasRoom | None = None) -> None:
        """The peer reports room; or it is gone (None), and waiting senders must find that out by sending."""
        full, self.full = self.full, None
        if full is not None:
            full.end()

    @property
    def broken(self) -> bool:
        """Can this peer no longer be reached?"""
        return False

    def lost(self, delivery: Delivery) -> RpcError:
        """The error for a call to a peer that is ``broken``."""
        raise NotImplementedError


class RemotePeer(Peer):
    """Another member, with its link and, on the same host, the shared segments of both sides."""

    __slots__ = (
        "_fail_call",
        "_here",
        "_make_link",
        "_unwritten",
        "_write_later",
        "farewell",
        "gone",
        "held",
        "known",
        "leaving",
        "lending",
        "link",
        "linked",
        "segments",
        "shared_bytes_received",
        "shared_bytes_sent",
    )

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: int,
        number: int,
        write_later: Callable[[Callable[[], None]], None],
        here: WorkerInfo,
        fail_call: Callable[[int, str], None],
        make_link: Callable[[RemotePeer], None],
    ) -> None:
        """``write_later`` has a worker thread run a write that may block.

        ``fail_call(call_id, why)`` fails a call whose request did not arrive. ``here`` is this node. ``make_link``, on
        any thread, makes a link for messages that come before the first connection.
        """
        super().__init__(info, incarnation, number)
        self._write_later = write_later
        self.known: bool = True
        """Is it a member? From a stranger, only messages about membership are handled."""
        self.held: list[Frame] = []
        """Frames of a stranger that may be handled only once it is a member."""
        self.leaving: bool = False
        """Has it announced that it leaves? It may still send answers, but gets no more requests."""
        self.farewell: str = LEFT
        """How it left, in the words of its Goodbye."""
        self.lending: SharedMemorySender | None = None
        """The memory of this node that the peer maps; None: shared memory is not in use."""
        self.segments: SegmentMap | None = None
        """The memory of the peer that this node maps."""
        self.link: Link
        self.linked: bool = False
        """Has the link been made? In a large group most members never need one; reading ``link`` makes it."""
        self.gone: str | None = None
        """Why it is gone, if it went before its link was made."""
        self._make_link = make_link
        self._here = here
        self._fail_call = fail_call
        # Requests that a worker is to write, by call id; the list has an item once the call is cancelled. Any thread.
        self._unwritten: dict[int, list[bool]] = {}
        self.shared_bytes_sent: int = 0  # approximate: counted without a lock
        self.shared_bytes_received: int = 0

    def send(self, frame: Frame, deadline: float = NEVER, more: bool = False, awaited: Awaited | None = None) -> None:
        kind = frame.kind
        if self.leaving and kind == REQUEST:
            raise self.lost(Delivery.NOT_SENT)
        if self.segments is not None and self.segments.owed_bytes >= WORTH_RELEASING_BYTES:
            self.send_releases(more=True)  # ahead of this message: its receiver may need the memory at once
        if self.devices is not None and self.devices.is_worth_releasing:
            self.send_device_releases(more=True)
        if kind == REQUEST and awaited is None:
            self.link.incoming.is_used()
        if not frame.buffers and len(frame.payload) < LARGE_BYTES:
            data = encode_small(kind, frame.flags, frame.call_id, frame.function, frame.notes, bytes(frame.payload))
            frame.handed_over = True
            if awaited is not None:
                self.link.incoming.help_until(awaited, deadline, data)
            else:
                self.link.outgoing.send(data, deadline, more)
            return
        if self.link.broken is not None:
            raise self.lost(Delivery.NOT_SENT)  # before the buffers are copied
        buffers: list[memoryview | Ticket] = []
        lending = self.lending
        # In a destructor, this thread may hold the lock of the shared memory or of the link already.
        interrupts = reading.interrupted is not None and is_interrupted()
        try:
            if lending is None or interrupts:
                buffers.extend(frame.buffers)
            else:
                self.shared_bytes_sent += lending.place(frame.buffers, buffers, deadline, kind == RESPONSE)
            pieces = encode_frame(kind, frame.flags, frame.call_id, frame.function, frame.notes, frame.payload, buffers)
            frame.handed_over = True
            if len(pieces) == 1:
                if awaited is None:
                    self.link.outgoing.send(bytes(pieces[0]), deadline, more)
                else:
                    self.link.incoming.help_until(awaited, deadline, bytes(pieces[0]))
                return
            lent = self.devices is not None and has_devices(frame.payload)
            instead = instead_of(
                frame,
                buffers,
                sum(map(len, pieces)),
                here=self._here,
                fail_call=self._fail_call,
                withdraw=partial(withdraw_lent, frame.payload, self) if lent else _nothing,
            )
            if kind == LETTER and lending is not None:
                # Shared memory has no room, or none yet. A lost letter is retransmitted, perhaps long after this
                # returns, and the producer of a stream's items may change them then, as if shared memory had a copy.
                pieces = [bytes(piece) for piece in pieces]
            # A large write may block. The I/O thread must not wait for a peer, nor an event loop at all, so a worker
            # writes instead; but the calls of an object that is called in order (``serial``) must not overtake each
            # other.
            in_loop = awaited is None and frame.serial is None and in_event_loop()
            if interrupts or self.link.on_io_thread() or in_loop:
                if kind != LETTER:
                    # Once we return, the caller may change its tensors, and so may the next function on this thread, or
                    # the next call of a serial object, change what the last one has returned.
                    pieces = [bytes(piece) for piece in pieces]
                if kind == REQUEST:
                    self._unwritten[frame.call_id] = []
                self._write_later(partial(self._write, frame, pieces, deadline, instead, buffers))
            else:
                self.link.outgoing.send_pieces(pieces, deadline, instead)
        except BaseException as error:
            unsent = not frame.handed_over or getattr(error, "delivery", None) is Delivery.NOT_SENT
            if unsent and lending is not None:
                lending.take_back(buffers)
            raise
        if awaited is not None:
            self.link.incoming.help_until(awaited, deadline)

    def _write(
        self,
        frame: Frame,
        pieces: Sequence[Piece],
        deadline: float,
        instead: Instead | None,
        buffers: Sequence[memoryview | Ticket],
    ) -> None:
        """On a worker: write a frame with large pieces; if that fails, take back the memory and forks sent with it."""
        cancelled = self._unwritten.get(frame.call_id, ()) if frame.kind == REQUEST else ()
        try:
            if cancelled:
                why = f"call {frame.call_id} to {self.info.name} was cancelled before it was sent"
                raise Cancelled(why, Delivery.NOT_SENT)
            self.link.outgoing.send_pieces(pieces, deadline, instead)
        except BaseException as error:
            if getattr(error, "delivery", None) is Delivery.NOT_SENT and self.lending is not None:
                self.lending.take_back(buffers)
            withdraw(frame)
            raise
        finally:
            if frame.kind == REQUEST:
                self._unwritten.pop(frame.call_id, None)
        if cancelled:
            self.cancel(frame.call_id)  # again: control messages overtake large requests

    def flush(self) -> None:
        self.link.outgoing.flush()

    def help_until(self, awaited: Awaited, deadline: float) -> None:
        self.link.incoming.help_until(awaited, deadline)

    def cancel(self, call_id: int) -> None:
        unwritten = self._unwritten.get(call_id)
        if unwritten is not None:
            unwritten.append(True)  # before the message, which follows the request if the worker misses this
        self.control(messages.CallCancelled(call_id))

    def watch(self) -> None:
        incoming = self.link.incoming
        if reading.link is incoming:
            incoming.answers_futures = True
            incoming.watch_reader()

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        return self.link.incoming.run_inline(task, at_once)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Link:
            """Make the link at its first use, while its slot is empty. Later uses find the slot, and cost nothing."""
            if name != "link":
                raise AttributeError(f"a peer has no {name!r}", name=name, obj=self)
            self._make_link(self)
            return self.link

    @property
    def broken(self) -> bool:
        return self.gone is not None or (self.linked and self.link.broken is not None)

    @property
    def was_connected(self) -> bool:
        """Is there a connection, or was there one before?"""
        return self.linked and not isinstance(self.link.transport, Absent)

    def lost(self, delivery: Delivery) -> RpcError:
        if self.leaving:  # its own words say more than the end of its link
            return peer_dead(self.info, self.farewell, delivery, incarnation_text(self.incarnation))
        return self.link.dead(delivery)

    def control(self, message: messages.Message, more: bool = False) -> None:
        """Send a control message, if the link is not broken; never blocks."""
        if self.link.broken is None:
            if self.segments is not None and self.segments.owed_bytes >= WORTH_RELEASING_BYTES:
                self.send_releases(more=True)
            try:
                self.link.outgoing.send(
                    encode_small(CONTROL, 0, 0, b"", b"", messages.encode_message(message)),
                    more=more,
                    urgent=True,
                )
            except RpcError:
                pass  # the link has just broken, and reports that itself

    def tell_full(self, queued: int, limit: int) -> None:
        self.control(messages.QueueFull(queued, limit))

    def tell_room(self) -> None:
        self.control(messages.QueueHasRoom())

    # ------------------------------------------------------------------ shared memory

    def share(self, pool: SegmentPool, segments: SegmentMap) -> None:
        """Use shared memory from now on: the first connection to the peer can carry descriptors."""
        self.segments = segments
        self.lending = SharedMemorySender(self, pool, segments, self._write_later)

    def on_segment_accepted(self, message: messages.SegmentAccepted) -> None:
        """The peer has mapped a segment of ours."""
        if self.lending is not None:
            self.lending.on_accepted(message.segment_id)

    def on_segment_refused(self, message: messages.SegmentRefused) -> None:
        """The peer cannot map a segment of ours."""
        if self.lending is not None:
            self.lending.on_refused(message.reason)

    def on_blocks_released(self, message: messages.BlocksReleased) -> None:
        """The peer no longer uses these blocks of ours."""
        if self.lending is not None:
            self.lending.on_released(message.blocks)

    def on_segment_offered(self, message: messages.SegmentOffered) -> None:
        """Map a segment of the peer's. On the reading thread, in order: descriptors are matched to offers by order."""
        # One read may bring several offers: each takes the oldest descriptor.
        descriptor = self.link.incoming.take_descriptor()
        try:
            if descriptor is None:
                raise SegmentRefused("its descriptor is missing")
            if self.segments is None:
                os.close(descriptor)
                raise SegmentRefused("shared memory is switched off here")
            self.segments.attach(message.segment_id, descriptor, message.size_bytes)
        except (SegmentRefused, OSError) as error:
            self.control(messages.SegmentRefused(message.segment_id, str(error)))
        else:
            self.control(messages.SegmentAccepted(message.segment_id))

    def on_segment_retired(self, message: messages.SegmentRetired) -> None:
        """The peer has given up a segment of its own: unmap it."""
        if self.segments is not None:
            self.segments.detach(message.segment_id)

    def send_releases(self, more: bool = False) -> None:
        """Tell the peer which of its blocks we no longer use."""
        if self.segments is not None:
            released = self.segments.take_releases()
            if released:
                self.control(messages.BlocksReleased(released), more)

    def send_device_releases(self, more: bool = False) -> None:
        """Tell the peer which of its blocks of device memory we no longer need."""
        released = self.devices.take_releases()
        if released:
            self.control(messages.DeviceBlocksReleased(released), more)

    def look_up(self, frame: Frame) -> None:
        """Replace the tickets in ``frame`` by views of the peer's segments."""
        segments = self.segments
        buffers = frame.buffers
        for index, buffer in enumerate(buffers):
            if buffer.__class__ is not Ticket:
                continue
            self.shared_bytes_received += buffer.size_bytes
            if buffer.segment_id & YOURS and self.lending is not None:
                view = self.lending.returned(buffer)
            elif segments is None:
                raise SegmentRefused("the peer sent a ticket although shared memory is switched off")
            else:
                shared = bool(buffer.segment_id & SHARED)
                view = segments.view(buffer.segment_id & ~SHARED, buffer.offset, buffer.size_bytes, shared)
            buffers[index] = view  # type: ignore[index]  # a frame with tickets has a list

    def close(self) -> None:
        """The link is gone: wake up waiting senders, and take back the memory that the peer held."""
        self.on_queue_has_room()
        if self.lending is not None:
            self.lending.close()
        if self.segments is not None:
            self.segments.close()
        if self.devices is not None:
            self.devices.close()


def _nothing() -> None:
    pass
