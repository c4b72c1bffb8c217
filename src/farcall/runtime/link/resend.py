"""What is sent in the place of a large message that a connection has lost: its memory is its sender's again.

    message      in its place
    request      its remains; its call fails, "not_sent" (the core tells)
    answer       a failure, "executed", with its notes and tickets
    letter       nothing is lost: it left as one frame, which the core keeps

What both ends count, in the notes and tickets, must not get lost with the message. Device memory that was lent for it is
free again: only the message named it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farcall.core.contract import MARKED
from farcall.errors import AnswerLost
from farcall.ids import WorkerInfo
from farcall.protocol.frames import BUFFER_ENTRY, FAILURE, HEADER, REQUEST, RESPONSE, Ticket, encode_frame
from farcall.protocol.notes import without_creation
from farcall.serialize import encode_failure, has_devices, withdraw_lent


def instead_of(here: WorkerInfo, peer: Any, head: bytes) -> bytes:
    """What is sent to ``peer`` in the place of the message that begins with ``head``."""
    _, _, kind, _, call_id, size, function_bytes, notes_bytes, count, _ = HEADER.unpack_from(head)
    payload_bytes = size
    at = HEADER.size
    tickets = []
    for _ in range(count):
        buffer_bytes, segment_id, offset = BUFFER_ENTRY.unpack_from(head, at)
        at += BUFFER_ENTRY.size
        size += buffer_bytes
        if segment_id:
            tickets.append(Ticket(buffer_bytes, segment_id, offset))
    at += function_bytes
    notes = head[at : at + notes_bytes]
    at += notes_bytes
    payload = head[at : at + payload_bytes]
    if has_devices(payload):
        withdraw_lent(payload, peer)
    if kind == REQUEST:
        return remains_of(notes, tickets)
    error = AnswerLost(
        f"{here.name} executed the function, but the connection broke before all of its answer, {size} bytes, had "
        "arrived, and it is not kept"
    )
    failure = bytes(encode_failure(error, here).payload)
    return b"".join(encode_frame(FAILURE, MARKED, call_id, b"", without_creation(notes), failure, tickets))


def remains_of(notes: bytes, tickets: Sequence[Ticket]) -> bytes:
    """The frame that replaces a lost message: a response to call 0, which nobody makes.

    Both ends count leases of shared memory, references and recorded gradients, so these must not get lost with the
    message: the receiver of this frame reads no body, runs nothing, and releases what the notes and tickets carry.
    """
    return b"".join(encode_frame(RESPONSE, MARKED, 0, b"", without_creation(notes), b"", tickets))
