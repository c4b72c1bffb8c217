"""What rides along with a request or an answer: the notes segment of its frame.

Most messages have none. A message that carries references or tensors of a distributed backward pass says so here, beside its
payload, because its receiver must act on that even if it never unpickles the payload (a late answer, say).

To add a companion: give it a field with a default, at the end.
"""

from __future__ import annotations

import msgspec

from farcall.protocol.messages import ProtocolError
from farcall.protocol.references import Fork


class Notes(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """The companions of one message."""

    creates: Fork | None = None
    """In a request: its result becomes the value of this reference instead of an answer."""
    forks: tuple[Fork, ...] = ()
    """The references inside the payload."""
    context_id: int = 0
    """The distributed autograd context that the message belongs to; 0: none."""
    message_id: int = 0
    """Names the tensors of the payload that require grad, within the context; 0: there are none."""


NONE = Notes()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notes)


def encode_notes(notes: Notes) -> bytes:
    """The notes segment; empty where there is nothing to note."""
    return _encoder.encode(notes)


def decode_notes(data: bytes) -> Notes:
    """The notes in a frame's notes segment, or ``ProtocolError``."""
    if not data:
        return NONE
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"cannot read the notes of a message: {error}") from error
