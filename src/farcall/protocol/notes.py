"""Notes beside the payload of a request or an answer, readable without unpickling it.

Owns the shape of the frame's notes segment, which is empty for most messages. The forks of references are here and not
in the pickle: a receiver that drops a message unread (its caller timed out) must still account for each of them. Does
not know what a fork means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from farcall.ids import RefId
from farcall.protocol.frames import Frame
from farcall.protocol.references.messages import Fork

KEEP = 1
"""A request's flag: the callee keeps the result, as the value of the reference ``created`` in the notes."""
STREAM = 8
"""A request's flag: the function returns an iterable, whose items are sent one by one."""
REFUSED = 4
"""A failure's flag: the request was refused, and created nothing; its payload is a `Refusal`."""


class ProfileWanted(msgspec.Struct, array_like=True, frozen=True):
    """A profiled caller's request for a profile of its callee. The options are bits of `observe.capture.Detail`."""

    number: int  # of the call, unique in the cluster
    options: int = 0
    home: bool = True  # send the records back with the answer, besides keeping them


class Notes(msgspec.Struct, array_like=True, frozen=True):
    """The notes of one message. New fields go last, with a default."""

    forks: list[Fork] = []
    created: Fork | None = None
    origin: str = ""  # the source line that created it, if the program asked to have that recorded
    context_id: int = 0  # the distributed autograd context of the message
    message_id: int = 0  # names the tensors in the payload that need a gradient, within that context
    profile: ProfileWanted | None = None  # of a request
    profiled: bytes = b""  # of an answer: the records, see observe/spans.py
    telemetry: dict[str, str] = {}  # OpenTelemetry's context of the caller, if its user has opted into that
    time_left_s: float = 0.0  # of a request: how long its caller waits, if the program chose that; else 0
    metadata: dict[str, str] = {}  # of a request: the caller's metadata, and what that had inherited
    serial: RefId | None = None  # of a request: the object whose calls run one at a time


encode_notes: Callable[[Notes], bytes] = msgspec.msgpack.Encoder().encode
decode_notes: Callable[[bytes | memoryview], Notes] = msgspec.msgpack.Decoder(Notes).decode


class Inherited(NamedTuple):
    """The part of a request's notes that its function's own calls inherit."""

    time_left_s: float  # 0: no deadline travels
    metadata: Mapping[str, str]


def write_notes(
    frame: Frame,
    *,
    created: Fork | None = None,
    origin: str = "",
    profile: ProfileWanted | None = None,
    profiled: bytes = b"",
    inherited: Inherited | None = None,
) -> None:
    """Write the notes of ``frame``: the forks in its payload, its autograd context, and the arguments."""
    frame.notes = encode_notes(
        Notes(
            list(frame.forks),
            created,
            origin,
            0 if frame.recording is None else frame.recording.id,
            frame.message_id,
            profile,
            profiled,
            frame.telemetry or {},
            0.0 if inherited is None else inherited.time_left_s,
            {} if inherited is None else dict(inherited.metadata),
            frame.serial,
        )
    )


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """The payload of a failure with the flag REFUSED: the length of the callee's queue, and its limit."""

    queued: int
    limit: int


encode_refusal: Callable[[Refusal], bytes] = msgspec.msgpack.Encoder().encode
decode_refusal: Callable[[bytes | memoryview], Refusal] = msgspec.msgpack.Decoder(Refusal).decode


def without_creation(notes: bytes) -> bytes:
    """The notes of a request whose function does not run, without the creation; empty if nothing is left."""
    if not notes:
        return b""
    left = msgspec.structs.replace(decode_notes(notes), created=None, origin="")
    return encode_notes(left) if left.forks or left.message_id else b""
