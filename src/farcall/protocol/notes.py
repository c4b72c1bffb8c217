"""What rides beside the payload of a request or an answer, to be known without unpickling it.

Owns the shape of the frame's notes segment. A message without notes, as most are, has an empty segment. The forks of
references are here and not in the pickle: whoever drops a message unread (its caller timed out) must still
account for each of them. It does not know what a fork means.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from farcall.ids import RefId
from farcall.protocol.references.messages import Fork

KEEP = 1
"""A request's flag: the callee keeps the result, as the value of the reference that the notes say is ``created``."""
REFUSABLE = 2
"""A request's flag: if too many calls wait at the callee, refuse this one."""
STREAM = 8
"""A request's flag: what the function returns is something to iterate over, and its items are sent one by one."""
REFUSED = 4
"""A failure's flag: the request was refused, and created nothing; its payload is a `Refusal`."""


class ProfileWanted(msgspec.Struct, array_like=True, frozen=True):
    """A profiled caller's wish: to know what its callee does. The bits are those of `observe.capture.Detail`."""

    number: int  # of the call, unique in the cluster
    options: int = 0
    home: bool = True  # send what was recorded home with the answer, and do not only keep it


class Notes(msgspec.Struct, array_like=True, frozen=True):
    """The notes of one message. New fields go last, with a default."""

    forks: list[Fork] = []
    created: Fork | None = None
    origin: str = ""  # where the program created it, if it asked to have that recorded
    context_id: int = 0  # the distributed autograd context of the message
    message_id: int = 0  # names the tensors in the payload that need a gradient, within that context
    profile: ProfileWanted | None = None  # of a request
    profiled: bytes = b""  # of an answer: what was recorded, see observe/spans.py
    telemetry: dict[str, str] = {}  # OpenTelemetry's context of the caller, if its user has opted into that
    time_left_s: float = 0.0  # of a request: how long its caller waits, where that was chosen; else 0
    metadata: dict[str, str] = {}  # of a request: what its caller, and its callers, sent along
    serial: RefId | None = None  # of a request: the object whose calls run one at a time


encode_notes: Callable[[Notes], bytes] = msgspec.msgpack.Encoder().encode
decode_notes: Callable[[bytes | memoryview], Notes] = msgspec.msgpack.Decoder(Notes).decode


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """The payload of a failure with the flag REFUSED: how many calls wait at the callee, and how many may."""

    queued: int
    limit: int


encode_refusal: Callable[[Refusal], bytes] = msgspec.msgpack.Encoder().encode
decode_refusal: Callable[[bytes | memoryview], Refusal] = msgspec.msgpack.Decoder(Refusal).decode


def without_creation(notes: bytes) -> bytes:
    """The notes of a message whose function does not run, so that it creates nothing; empty if nothing is left."""
    if not notes:
        return b""
    left = msgspec.structs.replace(decode_notes(notes), created=None, origin="")
    return encode_notes(left) if left.forks or left.message_id else b""
