"""Every control message, one typed struct each, and their encoding.

A control message travels as the payload of a control frame: a msgpack array whose first item is the tag.
The handshake has been passed before any of these is read, so both ends run the same version, and a
message that does not fit its struct exactly is a fault of the link, not something to work around.

    tags    subject                 handled by
    1-9     the link itself         runtime/link
    10-19   shared memory           channel/shared_memory.py
    20-29   calls                   runtime/calls
    30-39   departure               protocol/departure.py
    40-49   references              protocol/references
    50-69   membership              protocol/membership
    70-79   observation             observe/clocks.py, protocol/observing.py
    80-89   devices                 runtime/devices
    90-99   streams                 protocol/streams.py
    100-119 published weights       protocol/weights
    120-    free

To add a message: write its struct with a free tag, add it to ``Message``, and handle it where it belongs.
This module must not know what a message makes anybody do.
"""

from __future__ import annotations

from typing import Final

import msgspec

from farcall.errors import NetworkError
from farcall.protocol import observing, streams
from farcall.protocol.membership import messages as membership
from farcall.protocol.references import messages as references
from farcall.protocol.weights import messages as weights

__all__ = [
    "DEVICE_MESSAGES",
    "BlocksReleased",
    "CallCancelled",
    "ClockAsked",
    "ClockTold",
    "DepartureAcknowledged",
    "DepartureProbe",
    "DepartureReleased",
    "DepartureReport",
    "DepartureStatus",
    "DeviceBlocksReleased",
    "DeviceOpened",
    "DeviceSegmentRetired",
    "DeviceTried",
    "DevicesMapped",
    "FramesReceived",
    "Goodbye",
    "Message",
    "Ping",
    "Pong",
    "ProtocolError",
    "QueueFull",
    "QueueHasRoom",
    "SegmentAccepted",
    "SegmentOffered",
    "SegmentRefused",
    "SegmentRetired",
    "decode_message",
    "encode_message",
]


class ProtocolError(NetworkError):
    """The peer sent something farcall never sends; its link cannot be trusted further."""


class _Control(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of all control messages: immutable, and encoded as [tag, field, field ...]."""


# --- the link itself -----------------------------------------------------------------------------------


class Ping(_Control, frozen=True, tag=1):
    """Answer with a ``Pong`` that carries the same nonce."""

    nonce: int


class Pong(_Control, frozen=True, tag=2):
    """The answer to a ``Ping``."""

    nonce: int


LEFT: Final = "has left"
FORGOT_SHUTDOWN: Final = "ended without shutdown()"
GAVE_UP: Final = "gave up: its own log says why"


class Goodbye(_Control, frozen=True, tag=3):
    """The sender leaves on purpose: the end of the stream that follows is not a death. One of the reasons above."""

    reason: str


class FramesReceived(_Control, frozen=True, tag=4):
    """How many frames of the addressee, of this session, have come in full; see session.py."""

    count: int


# --- shared memory -------------------------------------------------------------------------------------


class SegmentOffered(_Control, frozen=True, tag=10):
    """A segment the sender owns; its descriptor rides along as SCM_RIGHTS."""

    segment_id: int
    size_bytes: int


class SegmentAccepted(_Control, frozen=True, tag=11):
    """The segment is mapped: tickets may name it from now on."""

    segment_id: int


class SegmentRefused(_Control, frozen=True, tag=12):
    """The segment could not be mapped: send those bytes inline instead."""

    segment_id: int
    reason: str


class SegmentRetired(_Control, frozen=True, tag=14):
    """The sender gave a segment up: no ticket names it any more."""

    segment_id: int


class BlocksReleased(_Control, frozen=True, tag=13):
    """The receiver no longer looks at these blocks of the sender's segments."""

    blocks: list[tuple[int, int]]  # (segment_id, offset_bytes)


# --- calls ---------------------------------------------------------------------------------------------


class CallCancelled(_Control, frozen=True, tag=20):
    """The caller gave up: the call need not begin, and is cancelled if it has; see runtime/calls/scope.py."""

    call_id: int


class QueueFull(_Control, frozen=True, tag=21):
    """So many calls wait here, and no more should be sent; see runtime/calls/admission.py."""

    queued: int
    limit: int


class QueueHasRoom(_Control, frozen=True, tag=22):
    """The end of a ``QueueFull``."""


# --- departure: how they are used is told in departure.py ----------------------------------------------


class DepartureReport(_Control, frozen=True, tag=30):
    """What the sender is doing, as far as leaving goes. A higher ``sequence`` replaces a lower one."""

    sequence: int
    round: int  # the latest probe seen from the addressee; 0 before the first
    entered: bool
    calls_in_flight: int  # 0: idle
    activity: int  # calls started or served by the sender so far
    gone: list[int]  # ranks whose link to the sender has ended
    asks_who_is_late: bool


class DepartureProbe(_Control, frozen=True, tag=31):
    """Report at once, and again when ready if you are not ready now."""

    round: int


class DepartureStatus(_Control, frozen=True, tag=32):
    """The answer to ``asks_who_is_late``: some of the late ones and why, and how many more there are."""

    late: list[tuple[int, str]]  # (rank, why)
    unnamed_count: int


class DepartureReleased(_Control, frozen=True, tag=33):
    """All work is done everywhere: leave."""


class DepartureAcknowledged(_Control, frozen=True, tag=34):
    """The sender has been released."""


# --- observation ---------------------------------------------------------------------------------------


class ClockAsked(_Control, frozen=True, tag=70):
    """Answer at once with what your clock says."""

    sent_ns: int  # by the sender's clock; it comes back


class ClockTold(_Control, frozen=True, tag=71):
    """The answer to a ``ClockAsked``."""

    sent_ns: int
    clock_ns: int


# --- devices -------------------------------------------------------------------------------------------


class DevicesMapped(_Control, frozen=True, tag=80):
    """The sender's device map to the receiver: answers take the way back. Sent before anything that needs it."""

    pairs: list[tuple[str, str]]
    automatic: bool  # what is not in the map goes to, and comes from, the device of the same name


class DeviceTried(_Control, frozen=True, tag=81):
    """Can the receiver open memory of the sender's device?"""

    device: int  # as the sender numbers it
    name: str  # the same in all processes of a host
    opener: bytes  # pickled: what opens a piece of memory, and an event


class DeviceOpened(_Control, frozen=True, tag=82):
    """The answer; ``why_not`` is empty where it works."""

    device: int
    why_not: str


class DeviceBlocksReleased(_Control, frozen=True, tag=83):
    """The receiver has copied these blocks of the sender's device memory, or will never want them."""

    blocks: list[tuple[int, int]]  # (segment_id, offset_bytes)


class DeviceSegmentRetired(_Control, frozen=True, tag=84):
    """The sender no longer uses a segment of device memory: close it."""

    segment_id: int


DEVICE_MESSAGES: Final = (DevicesMapped, DeviceTried, DeviceOpened, DeviceBlocksReleased, DeviceSegmentRetired)

Message = (
    Ping
    | Pong
    | Goodbye
    | FramesReceived
    | SegmentOffered
    | SegmentAccepted
    | SegmentRefused
    | SegmentRetired
    | BlocksReleased
    | CallCancelled
    | QueueFull
    | QueueHasRoom
    | DepartureReport
    | DepartureProbe
    | DepartureStatus
    | DepartureReleased
    | DepartureAcknowledged
    | ClockAsked
    | ClockTold
    | DevicesMapped
    | DeviceTried
    | DeviceOpened
    | DeviceBlocksReleased
    | DeviceSegmentRetired
    | references.Message
    | membership.Message
    | observing.Message
    | streams.Message
    | weights.Message
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """The bytes of one control message."""
    return _encoder.encode(message)


def decode_message(data: bytes | bytearray | memoryview) -> Message:
    """The control message in ``data``, or ``ProtocolError``."""
    try:
        return _decoder.decode(data)
    # Bad UTF-8 is a UnicodeDecodeError (a ValueError); deep nesting of unknown content a RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"cannot read a control message of {len(data)} bytes: {error}") from error
