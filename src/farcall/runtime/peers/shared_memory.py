"""The shared memory that this node lends to one peer on the same host: buffers placed, segments offered, blocks freed.

Owns what the peer knows of our segments. The states of one segment:

    unknown   first buffer placed in it  -> offered (descriptor sent; a large message waits, another goes inline)
    offered   SegmentAccepted            -> accepted: tickets may name it
    offered   SegmentRefused             -> the peer gets everything inline from now on
    offered   the connection broke first -> unknown, if the peer has not got the offer (`resend.py`)
    unknown   a link without descriptors -> unknown: inline, until one with descriptors takes its place

A broken connection changes nothing else: both processes live, and so do their mappings. Tickets and releases are small
frames, which the session retransmits if they were lost; blocks stay lent meanwhile. Only the peer's death takes them
back (`close`).

The sending thread places buffers; the pool has its own lock, and the set of accepted segments sees only single atomic
operations. Without memory a buffer goes inline: that is never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from farcall.channel.host_memory import address_of, copy_bytes
from farcall.channel.segment_map import SegmentMap
from farcall.channel.shared_memory import Offer, SegmentPool
from farcall.core.contract import OWNER
from farcall.errors import RpcTimeout
from farcall.protocol import messages
from farcall.protocol.frames import CONTROL, LARGE_BYTES, SHARED, YOURS, Ticket, encode_small
from farcall.runtime.io import sigint
from farcall.runtime.io.reader import in_event_loop, stop_reading
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER

if TYPE_CHECKING:
    from farcall.runtime.peers.peer import RemotePeer

logger: logging.Logger = logging.getLogger("farcall")

SHARED_BYTES = LARGE_BYTES
"""Buffers of at least this size go through a shared segment.

A smaller buffer is copied into its frame, and out of it. At this size both ways cost the same CPU time, since Python
code allocates, looks up and releases a block; at four times this size a segment costs half.
"""


WORTH_WAITING_BYTES = 1 << 20
"""A message of this size is copied into a segment while its offer is under way, and waits until the peer has mapped it.

Inline it would wait for the peer to read it, too, and be written to fresh memory there, as the next one here: fresh
memory costs more than anything else.
"""


class SharedMemorySender:
    """The blocks that this node lends to one peer; the pool knows it as their holder.

    Mutable: ``is_wanted``, which only becomes False, and the ids of segments: ``_accepted``, those that the peer has
    mapped, and ``_unanswered``, those whose offer is under way.
    """

    __slots__ = ("_accepted", "_borrowed", "_gates", "_peer", "_pool", "_unanswered", "is_wanted")

    def __init__(
        self,
        peer: RemotePeer,
        pool: SegmentPool,
        borrowed: SegmentMap,
    ) -> None:
        """``borrowed``: the peer's own segments; a result in one of their blocks goes back without a copy."""
        self._peer = peer
        self._pool = pool
        self._borrowed = borrowed
        self._gates: list[Gate] = []
        self.is_wanted: bool = True
        """Does the peer map the segments that it is offered?"""
        self._accepted: set[int] = set()
        self._unanswered: set[int] = set()

    def __repr__(self) -> str:
        return f"<SharedMemorySender to {self._peer.info.name}>"

    @property
    def is_used(self) -> bool:
        """Has the peer accepted any segment?"""
        return bool(self._accepted)

    def place(
        self,
        buffers: Sequence[memoryview],
        placed: list[memoryview | Ticket],
        deadline: float,
        may_give_back: bool,
    ) -> int:
        """Append a ticket to ``placed`` for each buffer, or the buffer itself if it must go inline.

        Returns how many bytes go through segments.
        """
        shared_bytes = 0
        unsure: list[int] = []
        in_use = self._borrowed.in_use  # empty if the function returned a fresh tensor: its arguments have died by now
        guard = sigint.here.guard
        if not guard.depth:
            sigint.look()
        guard.depth += 1  # else Ctrl-C could leak a block
        try:
            for index in range(len(buffers)):
                # Bind the buffer to no local name: its death tells `give_back` that its block may go back.
                size = buffers[index].nbytes
                if size < SHARED_BYTES or not self.is_wanted:
                    placed.append(buffers[index])
                    continue
                found = self._give_back(buffers, index, deadline) if may_give_back and in_use else None
                if found is None:
                    found = self._copy_into_segment(buffers, index, deadline, unsure)
                if found.__class__ is Ticket:
                    shared_bytes += size
                placed.append(found)
            if unsure:
                shared_bytes -= self._settle(buffers, placed, unsure, deadline)
        finally:
            guard.depth -= 1
            if guard.held is not None:
                sigint.deliver()
        return shared_bytes

    def _give_back(self, buffers: Sequence[memoryview], index: int, deadline: float) -> memoryview | Ticket | None:
        """A ticket for a buffer that lies in a block of the peer's own; None: it lies elsewhere."""
        given = self._borrowed.give_back(buffers, index) if isinstance(buffers, list) else None
        if given is None:
            return None
        if given.last_use:
            given.gone()
            return Ticket(buffers[index].nbytes, given.segment_id | YOURS, given.offset)
        # The block has other users here: copy it, and do not let it go back before.
        try:
            copied = self._copy_into_segment(buffers, index, deadline)
            return copied if isinstance(copied, Ticket) else memoryview(bytearray(copied))
        finally:
            given.settled()

    def _settle(
        self, buffers: Sequence[memoryview], placed: list[memoryview | Ticket], unsure: list[int], deadline: float
    ) -> int:
        """Wait until the peer has the segments of these tickets; put the buffer back in the place of any that it lacks.

        Returns how many bytes go inline for that.
        """
        stop_reading()
        inline_bytes = 0
        for index in unsure:
            ticket = placed[index]
            assert isinstance(ticket, Ticket)
            self._wait_for(ticket.segment_id, deadline)
            if ticket.segment_id not in self._accepted:
                placed[index] = buffers[index]
                inline_bytes += ticket.size_bytes
                if self._peer.link.broken is None:  # else `close` has taken all blocks back, or will
                    self._pool.release(ticket.segment_id, ticket.offset, self)
        return inline_bytes

    def _is_under_way(self, segment_id: int) -> bool:
        """May the peer still answer the offer of this segment?"""
        return segment_id in self._unanswered and self.is_wanted and self._peer.link.broken is None

    def _wait_for(self, segment_id: int, deadline: float) -> None:
        """Wait until the offer of a segment is answered."""
        gate = Gate()
        self._gates.append(gate)
        try:
            while self._is_under_way(segment_id) and monotonic() < deadline:
                gate.wait(min(1.0, deadline - monotonic()))
        finally:
            self._gates.remove(gate)

    def _wake(self) -> None:
        for gate in self._gates.copy():
            gate.open()

    def _copy_into_segment(
        self, buffers: Sequence[memoryview], index: int, deadline: float, unsure: list[int] | None = None
    ) -> memoryview | Ticket:
        """A ticket for a copy of the buffer; the buffer itself if there is no room.

        ``unsure`` gets the index of a ticket whose segment the peer has yet to map; None: make no such ticket.
        """
        pool = self._pool
        buffer = buffers[index]
        size = buffer.nbytes
        if pool.addresses:
            found = pool.find(address_of(buffer), size)
            if found is not None:
                segment_id, offset = found
                if segment_id not in self._accepted:
                    self._offer(segment_id, deadline)
                elif pool.lend(segment_id, offset, self):
                    return Ticket(size, segment_id | SHARED, offset)
        if self._borrowed.released:
            owed = self._borrowed.reuse(size)
            if owed is not None:
                segment_id, offset, view = owed
                copy_bytes(view, buffer)
                return Ticket(size, segment_id | YOURS, offset)
        block = pool.allocate(size, self)
        if pool.retired:
            for retired_id, holders in pool.take_retired():
                retire_from(holders, retired_id)
        if block is None:
            return buffer
        segment_id = block.segment_id
        is_filled = False
        try:
            is_accepted = segment_id in self._accepted
            if is_accepted or (self._offer(segment_id, deadline) and unsure is not None and _is_large(buffers)):
                block.fill(buffer)
                is_filled = True
                if not is_accepted and unsure is not None:
                    unsure.append(index)
        except OSError as error:
            logger.info("a tensor for %s goes over the socket: %s", self._peer.info.name, error)
        finally:
            if self._peer.link.broken is not None:
                pool.release_all(self)  # the link broke meanwhile: `close` may have run before this allocation
            elif not is_filled:
                pool.release(segment_id, block.offset, self)
        return Ticket(size, segment_id, block.offset) if is_filled else buffer

    def reaches(self, segment_id: int) -> bool:
        """Has the peer mapped this segment of ours? If not, offer it, so that a later call may return True."""
        if segment_id not in self._accepted and self.is_wanted:
            self._offer(segment_id, NEVER)
        return segment_id in self._accepted

    def _offer(self, segment_id: int, deadline: float) -> bool:
        """Offer the peer a segment, unless that was done before; tickets may name it once it is accepted.

        True: this thread may wait for that.
        """
        link = self._peer.link
        if not link.up or not link.transport.carries_descriptors:
            # Inline, for now: a unix connection that broke may come back over TCP, and the other way round.
            return False
        later = link.on_io_thread() or in_event_loop()
        offer = self._pool.offer(segment_id, self, keep=False)
        if offer is not None:
            self._unanswered.add(segment_id)
            self._send_offer(offer, deadline)
        return not later

    def _send_offer(self, offer: Offer, deadline: float) -> None:
        message = messages.encode_message(messages.SegmentOffered(offer.segment_id, offer.size))
        frame = encode_small(CONTROL, OWNER, 0, b"", b"", message)
        try:
            self._peer.link.post(frame, descriptor=offer.descriptor)
        except RpcTimeout:  # another connection, which carries none
            self._withdraw_offer(offer.segment_id)
        except BaseException:
            self._withdraw_offer(offer.segment_id)
            raise

    def _withdraw_offer(self, segment_id: int) -> None:
        """An offer was not sent, or lost: a later buffer offers the segment again."""
        self._pool.withdraw_offer(segment_id, self)
        self._on_answer(segment_id)

    def _on_answer(self, segment_id: int) -> None:
        self._unanswered.discard(segment_id)
        self._wake()

    def on_accepted(self, segment_id: int) -> None:
        """The peer has mapped a segment of ours."""
        self._accepted.add(segment_id)
        self._on_answer(segment_id)

    def on_refused(self, segment_id: int, reason: str) -> None:
        """The peer cannot map our segments: everything goes inline from now on."""
        if not reason:
            self._withdraw_offer(segment_id)  # it came over a connection without descriptors
            return
        logger.info("%s takes no shared memory (%s): tensors go over the socket", self._peer.info.name, reason)
        self.is_wanted = False  # but it may still hold blocks of other segments
        self._wake()

    def retire(self, segment_id: int) -> None:
        """The pool has given up a segment: tell the peer to unmap it."""
        self._accepted.discard(segment_id)
        self._peer.control(messages.SegmentRetired(segment_id))

    # ------------------------------------------------------------------ what comes back

    def take_back(self, placed: Sequence[memoryview | Ticket]) -> None:
        """A message was not sent: free the blocks that were lent for it."""
        lent = []
        for ticket in placed:
            if isinstance(ticket, Ticket):
                if ticket.segment_id & YOURS:
                    self._borrowed.owe(ticket.segment_id ^ YOURS, ticket.offset, ticket.size_bytes)
                else:
                    lent.append((ticket.segment_id & ~SHARED, ticket.offset))
        if lent:
            self._pool.release_batch(lent, self)

    def on_released(self, blocks: Sequence[tuple[int, int]]) -> None:
        """The peer no longer uses these blocks of ours."""
        self._pool.release_batch(blocks, self)

    def returned(self, ticket: Ticket) -> memoryview:
        """A view of a block of ours that the peer gives back, filled with a buffer of its message."""
        return self._pool.take_back(ticket.segment_id ^ YOURS, ticket.offset, ticket.size_bytes, self)

    def close(self) -> None:
        """The peer is gone: take back all blocks that it held."""
        self._pool.release_all(self)


def _is_large(buffers: Sequence[memoryview]) -> bool:
    return sum(buffer.nbytes for buffer in buffers) >= WORTH_WAITING_BYTES


def retire_from(holders: Iterable[object], segment_id: int) -> None:
    """Tell the peers that know a segment of the pool that it is gone."""
    for holder in holders:
        if isinstance(holder, SharedMemorySender):
            holder.retire(segment_id)
