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
from typing import TYPE_CHECKING, Any

from farcall.channel.segment_map import SegmentMap
from farcall.channel.segments import SegmentRefused
from farcall.channel.shared_memory import SegmentPool
from farcall.core.contract import KEPT, MARKED, OWNER, Core, CoreError
from farcall.errors import Delivery, NetworkError, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol import messages
from farcall.protocol.frames import (
    CONTROL,
    FAILURE,
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
from farcall.protocol.messages import LEFT, PLACED
from farcall.protocol.notes import KEEP
from farcall.runtime.calls.admission import Fullness
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import is_interrupted, may_wait, reading
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.link import Link, peer_dead
from farcall.runtime.observing.counters import FunctionCounters
from farcall.runtime.peers.shared_memory import SharedMemorySender
from farcall.transport.interface import Absent

logger: logging.Logger = logging.getLogger("farcall")

WORTH_RELEASING_BYTES = 512 * 1024
"""From here on, the peer's memory is released ahead of the next message; less waits for more, or for a timer."""


class Peer:
    """A member that messages can be sent to. Mutable: ``devices``, ``full``, and the two tables of counters."""

    __slots__ = (
        "__weakref__",
        "back",
        "called",
        "core",
        "devices",
        "full",
        "incarnation",
        "info",
        "loop",
        "number",
        "served",
        "way",
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
    way: int
    """The core's number of the link to this peer."""
    back: int
    """The same for answers and letters."""
    full: Fullness | None
    """Set while the peer reports that too many calls wait there."""

    def __init__(self, info: WorkerInfo, incarnation: int, number: int, core: Core, loop: Loop) -> None:
        self.core: Core = core
        self.loop: Loop = loop
        self.devices = None
        self.info = info
        self.incarnation = incarnation
        self.number = number
        self.full = None
        self.called: FunctionCounters = {}
        """Counts the outcomes of calls to this peer."""
        self.served: FunctionCounters = {}
        """Counts the outcomes of functions that ran for this peer."""

    def encode(self, frame: Frame, deadline: float) -> tuple[bytes, Sequence[Piece]]:
        """The bytes of ``frame``: what comes before the first large part, and the parts from there on."""
        flags, kind, payload = frame.flags, frame.kind, frame.payload
        if frame.buffers and self._place_buffers(frame, deadline):
            flags |= MARKED
        if frame.marked or frame.forks or kind == LETTER:
            flags |= MARKED
        if flags & KEEP and kind == REQUEST:
            flags |= KEPT
        if not frame.buffers and len(payload) < LARGE_BYTES:
            return encode_small(kind, flags, frame.call_id, frame.function, frame.notes, bytes(payload)), ()
        pieces = encode_frame(kind, flags, frame.call_id, frame.function, frame.notes, payload, frame.buffers)
        return bytes(pieces[0]), pieces[1:]

    def _place_buffers(self, frame: Frame, deadline: float) -> bool:
        """Put large buffers into shared memory, where there is some. Returns whether any lies there."""
        return False

    def take_back(self, frame: Frame) -> None:
        """The frame was not sent: free what was lent for it."""

    def send(self, frame: Frame, deadline: float = NEVER, more: bool = False) -> None:
        """Send an answer or a letter. ``more``: another message or a ``flush`` follows at once."""
        core, number = self.core, self.back
        head, pieces = self.encode(frame, deadline)
        if pieces and frame.kind == LETTER:
            # As one frame, which the core keeps until the peer has it: nothing can go in the place of a lost letter.
            head, pieces = b"".join((head, *pieces)), ()
        frame.handed_over = True
        waits = may_wait()  # else what the kernel does not take is copied
        try:
            if frame.kind in (RESPONSE, FAILURE):
                if waits:
                    core.answer(number, frame.call_id, head, pieces, more=more)
                else:
                    core.finished(number, frame.call_id)
                    core.post(number, head, pieces, patient=False, more=more)
            else:
                core.post(number, head, pieces, deadline, patient=waits, more=more)
        except CoreError:
            self.take_back(frame)
            if self.broken:
                raise self.lost(Delivery.NOT_SENT) from None
            raise RpcTimeout(
                f"{self.info.name} does not read: a message of {len(head)} bytes was not sent", Delivery.NOT_SENT
            ) from None
        except BaseException:
            self.take_back(frame)
            raise

    def flush(self) -> None:
        """Send the messages that ``more`` held back."""
        self.core.flush(self.back)

    def cancel(self, call_id: int) -> None:
        """Tell the peer that the caller no longer waits for the answer to this call."""
        try:
            self.core.cancel(call_id)
        except CoreError:
            pass  # it has stopped

    def control(self, message: messages.Message, more: bool = False) -> None:
        """Send a control message, if the peer can still be reached; never blocks."""
        raise NotImplementedError

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
        "_make_link",
        "descriptor",
        "early",
        "farewell",
        "gone",
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
        core: Core,
        loop: Loop,
        make_link: Callable[[RemotePeer], None],
    ) -> None:
        """``make_link``, on any thread, makes a link for messages that come before the first connection."""
        super().__init__(info, incarnation, number, core, loop)
        self.known: bool = True
        """Is it a member? From a stranger, only messages about membership are handled."""
        self.early: list[tuple[Callable[[RemotePeer, Any], None], messages.Message]] = []
        """Control messages of a stranger that may be handled only once it is a member."""
        self.descriptor: int = -1
        """That came with the message that is being handled, until somebody takes it."""
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
        self.shared_bytes_sent: int = 0  # approximate: counted without a lock
        self.shared_bytes_received: int = 0

    def encode(self, frame: Frame, deadline: float) -> tuple[bytes, Sequence[Piece]]:
        if self.leaving and frame.kind == REQUEST:
            raise self.lost(Delivery.NOT_SENT)
        if self.segments is not None and self.segments.owed_bytes >= WORTH_RELEASING_BYTES:
            self.send_releases(more=True)  # ahead of this message: its receiver may need the memory at once
        if self.devices is not None and self.devices.is_worth_releasing:
            self.send_device_releases(more=True)
        return Peer.encode(self, frame, deadline)

    def _place_buffers(self, frame: Frame, deadline: float) -> bool:
        if self.link.broken is not None:
            raise self.lost(Delivery.NOT_SENT)  # before the buffers are copied
        lending = self.lending
        # In a destructor, this thread may hold the lock of the shared memory already.
        if lending is None or (reading.interrupted is not None and is_interrupted()):
            return False
        placed: list[memoryview | Ticket] = []
        try:
            shared_bytes = lending.place(frame.buffers, placed, deadline, frame.kind == RESPONSE)
        except BaseException:
            lending.take_back(placed)
            raise
        self.shared_bytes_sent += shared_bytes
        frame.buffers = placed
        return shared_bytes > 0

    def take_back(self, frame: Frame) -> None:
        if self.lending is not None and frame.buffers:
            self.lending.take_back(frame.buffers)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Make the link at its first use, while its slot is empty. Later uses find the slot, and cost nothing."""
            if name not in ("link", "way", "back"):
                raise AttributeError(f"a peer has no {name!r}", name=name, obj=self)
            self._make_link(self)
            return self.link if name == "link" else self.way

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
        if self.link.broken is None and delivery is Delivery.NOT_SENT:
            return NetworkError(
                f"the connection to {self.info.name} broke before all of the request had arrived: it did not run",
                delivery,
            )
        return self.link.dead(delivery)

    def control(self, message: messages.Message, more: bool = False) -> None:
        """Send a control message, if the link is not broken; never blocks."""
        if self.link.broken is None:
            if self.segments is not None and self.segments.owed_bytes >= WORTH_RELEASING_BYTES:
                self.send_releases(more=True)
            flags = MARKED if type(message) in PLACED else OWNER
            head = encode_small(CONTROL, flags, 0, b"", b"", messages.encode_message(message))
            try:
                self.link.post(head, more=more)
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
        self.lending = SharedMemorySender(self, pool, segments)

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the message that is being handled."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor if descriptor >= 0 else None

    def on_segment_accepted(self, message: messages.SegmentAccepted) -> None:
        """The peer has mapped a segment of ours."""
        if self.lending is not None:
            self.lending.on_accepted(message.segment_id)

    def on_segment_refused(self, message: messages.SegmentRefused) -> None:
        """The peer cannot map a segment of ours."""
        if self.lending is not None:
            self.lending.on_refused(message.segment_id, message.reason)

    def on_blocks_released(self, message: messages.BlocksReleased) -> None:
        """The peer no longer uses these blocks of ours."""
        if self.lending is not None:
            self.lending.on_released(message.blocks)

    def on_segment_offered(self, message: messages.SegmentOffered, descriptor: int | None) -> None:
        """Map a segment of the peer's."""
        try:
            if descriptor is None:
                raise SegmentRefused("")  # the connection that it came over carries none
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
