"""Whom a call can go to. `Peer` is what every member is to the others, `RemotePeer` one behind a link.

A peer takes whole messages and sees to it that they arrive. What a message means, it does not know. Each out-of-band
buffer travels in a shared segment where that can be had (`shared_memory.py`), else inline. This node itself is a
peer, too: `loopback.py`.

Messages are sent from any thread; what comes back about shared memory is handled on the thread that reads the link.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import SegmentRefused
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import Delivery, PeerDead, RpcError
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
from farcall.runtime.io.reader import in_event_loop, reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.link import Link
from farcall.runtime.link.receive import Awaited
from farcall.runtime.link.resend import instead_of
from farcall.runtime.observing.counters import FunctionCounters
from farcall.runtime.peers.shared_memory import SharedMemorySender
from farcall.serialize import has_devices, withdraw, withdraw_lent

logger: logging.Logger = logging.getLogger("farcall")

WORTH_RELEASING_BYTES = 512 * 1024
"""So much memory of the peer's is given back ahead of any message to it; less waits for more, or for a timer."""


class Peer:
    """A member that messages can be sent to."""

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
    """A `DeviceLink`, where a device map leads to this peer or from it; else None."""
    info: WorkerInfo
    incarnation: int
    """Which start of that worker: another process may have its name and rank some day."""
    number: int
    """What stands for this member in references and gradients.

    The rank of a member of the first hour in a group of fixed size, since programs see it (torch prints it as
    ``created_on``); else the incarnation, since ranks are given away again. An incarnation is never as small as a rank.
    """
    full: Fullness | None
    """Has it said that too many calls wait there?"""

    def __init__(self, info: WorkerInfo, incarnation: int, number: int) -> None:
        self.devices = None
        self.info = info
        self.incarnation = incarnation
        self.number = number
        self.full = None
        self.called: FunctionCounters = {}
        """How calls to this peer ended."""
        self.served: FunctionCounters = {}
        """How functions ended that ran for this peer."""

    def send(self, frame: Frame, deadline: float = NEVER, more: bool = False, awaited: Awaited | None = None) -> None:
        """Send one message.

        ``more``: another one follows at once, or ``flush``. ``awaited``: the caller waits for this, and has nothing
        better to do than to help bring it about.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Send what ``more`` held back."""
        raise NotImplementedError

    def help_until(self, awaited: Awaited, deadline: float) -> None:
        """Do what brings ``awaited`` about, as far as the calling thread can."""
        raise NotImplementedError

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        """Run ``task`` on the calling thread if that is the I/O thread and, unless ``at_once``, has time.

        None: it has not run. False: it was late.
        """
        return None

    def cancel(self, call_id: int) -> None:
        """Nobody waits for the answer to this call any more."""

    def control(self, message: messages.Message, more: bool = False) -> None:
        """Send a control message, if that still can be done; never waits."""
        raise NotImplementedError

    def watch(self) -> None:
        """The thread that reads this peer's link is about to run what may take long."""

    def tell_full(self, queued: int, limit: int) -> None:
        """Tell it that too many calls wait here; never waits."""
        raise NotImplementedError

    def tell_room(self) -> None:
        """Tell it that they no longer do."""
        raise NotImplementedError

    def on_queue_full(self, message: messages.QueueFull) -> None:
        """It says that too many calls wait there."""
        if self.full is None:
            self.full = Fullness(message.queued, message.limit)

    def on_queue_has_room(self, message: messages.QueueHasRoom | None = None) -> None:
        """It says that they no longer do; or it is gone, and those who wait for that are to find out."""
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
    """Another member, with its link and, on one host, the shared segments of both sides."""

    __slots__ = (
        "_fail_call",
        "_here",
        "_write_later",
        "farewell",
        "held",
        "known",
        "leaving",
        "lending",
        "link",
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
    ) -> None:
        """``write_later`` runs a write that may have to wait on some worker thread.

        ``fail_call(call_id, why)`` fails a call whose request did not arrive. ``here`` is this node.
        """
        super().__init__(info, incarnation, number)
        self._write_later = write_later
        self.known: bool = True
        """Is it a member? Others are heard about membership only."""
        self.held: list[Frame] = []
        """What a stranger has sent that may only be read once it is a member."""
        self.leaving: bool = False
        """Has it said that it leaves? It may have answers to send, but gets no requests any more."""
        self.farewell: str = LEFT
        """How it left, in the words of its Goodbye."""
        self.lending: SharedMemorySender | None = None
        """The memory of this node that it may look into; None: shared memory is not in use."""
        self.segments: SegmentMap | None = None
        """The memory of the peer that this node looks into."""
        self.link: Link
        self._here = here
        self._fail_call = fail_call
        self.shared_bytes_sent: int = 0  # about: it is counted without a lock
        self.shared_bytes_received: int = 0

    def send(self, frame: Frame, deadline: float = NEVER, more: bool = False, awaited: Awaited | None = None) -> None:
        kind = frame.kind
        if self.leaving and kind == REQUEST:
            raise PeerDead(
                f"{self.info.name} {self.farewell}", Delivery.NOT_SENT, self.info, incarnation_text(self.incarnation)
            )
        if self.segments is not None and self.segments.owed_bytes >= WORTH_RELEASING_BYTES:
            self.send_releases(more=True)  # ahead of this message: its receiver may want the memory at once
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
            raise self.link.dead(Delivery.NOT_SENT)  # before anything is copied
        buffers: list[memoryview | Ticket] = []
        lending = self.lending
        try:
            if lending is None:
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
                # No room in shared memory, or none yet. A letter goes again if it is lost, perhaps long after this
                # returns, and the maker of a stream's items relies on shared memory's copy.
                pieces = [bytes(piece) for piece in pieces]
            # The I/O thread waits for no peer, and a running event loop for nobody: a worker does. But calls of an
            # object that is called in order must not pass each other.
            if self.link.on_io_thread() or (awaited is None and frame.serial is None and in_event_loop()):
                if kind == REQUEST:
                    pieces = [bytes(piece) for piece in pieces]  # the tensors are their sender's when we return
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
        """On a worker: write a frame with large pieces, or take back what went with it."""
        try:
            self.link.outgoing.send_pieces(pieces, deadline, instead)
        except BaseException as error:
            if getattr(error, "delivery", None) is Delivery.NOT_SENT and self.lending is not None:
                self.lending.take_back(buffers)
            withdraw(frame)
            raise

    def flush(self) -> None:
        self.link.outgoing.flush()

    def help_until(self, awaited: Awaited, deadline: float) -> None:
        self.link.incoming.help_until(awaited, deadline)

    def cancel(self, call_id: int) -> None:
        self.control(messages.CallCancelled(call_id))

    def watch(self) -> None:
        if reading.link is self.link.incoming:
            self.link.incoming.watch_reader()

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        return self.link.incoming.run_inline(task, at_once)

    @property
    def broken(self) -> bool:
        return self.link.broken is not None

    def lost(self, delivery: Delivery) -> RpcError:
        return self.link.dead(delivery)

    def control(self, message: messages.Message, more: bool = False) -> None:
        """Send a control message, if the link still stands; never waits."""
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
                pass  # it broke this moment, and whoever must know is told by the link

    def tell_full(self, queued: int, limit: int) -> None:
        self.control(messages.QueueFull(queued, limit))

    def tell_room(self) -> None:
        self.control(messages.QueueHasRoom())

    # ------------------------------------------------------------------ shared memory

    def share(self, pool: SegmentPool, segments: SegmentMap) -> None:
        """Its first connection can carry descriptors: use shared memory from now on."""
        self.segments = segments
        self.lending = SharedMemorySender(self, pool, segments, self._write_later)

    def on_segment_accepted(self, message: messages.SegmentAccepted) -> None:
        """The peer has mapped a segment of ours."""
        if self.lending is not None:
            self.lending.on_accepted(message.segment_id)

    def on_segment_refused(self, message: messages.SegmentRefused) -> None:
        """The peer cannot map it."""
        if self.lending is not None:
            self.lending.on_refused(message.reason)

    def on_blocks_released(self, message: messages.BlocksReleased) -> None:
        """The peer no longer uses these blocks of ours."""
        if self.lending is not None:
            self.lending.on_released(message.blocks)

    def on_segment_offered(self, message: messages.SegmentOffered) -> None:
        """Map a segment of the peer's. On the thread that reads: its descriptor must go with the frame."""
        # Several offers may have come with one read: each takes the first descriptor, in the order sent.
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
        """The peer no longer uses a segment of its own: unmap it."""
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
        """The link is gone: take back what the peer held."""
        self.on_queue_has_room()
        if self.lending is not None:
            self.lending.close()
        if self.segments is not None:
            self.segments.close()
        if self.devices is not None:
            self.devices.close()


def _nothing() -> None:
    pass
