"""What rides beside the payload of a request or an answer, to be known without unpickling it.

Owns the shape of the frame's notes segment. A message without notes, as most are, has an empty segment. The forks of
references are here and not in the pickle: whoever drops a message unread (its caller timed out) must still
account for each of them. It does not know what a fork means.
"""

from __future__ import annotations

import msgspec

from farcall.protocol.references.messages import Fork

__all__ = ["KEEP", "Notes", "decode_notes", "encode_notes"]

KEEP = 1
"""A request's flag: the callee keeps the result, as the value of the reference that the notes say is ``created``."""


class Notes(msgspec.Struct, array_like=True, frozen=True):
    """The notes of one message. New fields go last, with a default."""

    forks: list[Fork] = []
    created: Fork | None = None
    origin: str = ""  # where the program created it, if it asked to have that recorded
    context_id: int = 0  # the distributed autograd context of the message
    message_id: int = 0  # names the tensors in the payload that need a gradient, within that context
    telemetry: dict[str, str] = {}  # OpenTelemetry's context of the caller, if its user has opted into that


encode_notes = msgspec.msgpack.Encoder().encode
decode_notes = msgspec.msgpack.Decoder(Notes).decode
