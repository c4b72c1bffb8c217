"""Every control message, one typed struct each, and their encoding.

A control message travels as the payload of a control frame: a msgpack array whose first item is the tag.
The handshake precedes all of them, so both ends run the same version, and a message that does not fit its
struct exactly is a fault of the link, not something to work around.

    tags    subject                 handled by
    1-9     the link itself         runtime/link
    10-19   shared memory           channel/shared_memory.py
    20-29   calls                   runtime/calls
    30-39   departure               protocol/departure
    40-49   references              protocol/references
    50-69   membership              protocol/membership
    70-79   observation             observe/clocks.py, protocol/observing.py
    80-89   devices                 runtime/devices
    90-99   streams                 protocol/streams.py
    100-119 published weights       protocol/weights
    120-    free

To add a message: write its struct with a free tag, add it to ``Message``, and handle it where it belongs.
This module must not know how a message is handled.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from farcall.errors import NetworkError
from farcall.protocol import observing, streams
from farcall.protocol.control import ControlMessage
from farcall.protocol.membership import messages as membership
from farcall.protocol.references import messages as references
from farcall.protocol.weights import messages as weights


class ProtocolError(NetworkError):
    """The peer sent something that farcall never sends; its link cannot be trusted any more."""


# --- the link itself -----------------------------------------------------------------------------------


class Ping(ControlMessage, frozen=True, tag=1):
    """Answer with a ``Pong`` that carries the same nonce."""

    nonce: int


class Pong(ControlMessage, frozen=True, tag=2):
    """The answer to a ``Ping``."""

    nonce: int


class GoodbyeReason(IntEnum):
    """Why a member says goodbye."""

    LEFT = 1
    FORGOT_SHUTDOWN = 2
    GAVE_UP = 3

    @property
    def text(self) -> str:
        """For people, behind the member's name."""
        return _GOODBYES[self]


LEFT: Final = "has left"
_GOODBYES: Final = {
    GoodbyeReason.LEFT: LEFT,
    GoodbyeReason.FORGOT_SHUTDOWN: "ended without shutdown()",
    GoodbyeReason.GAVE_UP: "gave up: its own log says why",
}


class Goodbye(ControlMessage, frozen=True, tag=3):
    """The sender leaves on purpose: the end of the stream that follows is not a death.

    ``agreed``: all members of a group of fixed size have agreed to leave, the addressee included, which may not have
    heard of the agreement yet.
    """

    reason: GoodbyeReason
    agreed: bool = False


class Part(ControlMessage, frozen=True, tag=5):
    """Proposes to close an idle connection. The sender sends nothing after this until the answer.

    ``received``: the number of frames received so far.
    """

    received: int


class Parted(ControlMessage, frozen=True, tag=6):
    """Accepts a ``Part``: the last frame over this connection, which the addressee closes. The session stays.

    ``received``: the number of frames received, the proposal being the last.
    """

    received: int


class Stay(ControlMessage, frozen=True, tag=7):
    """Declines a ``Part``: the sender has something to send."""


# --- shared memory -------------------------------------------------------------------------------------


class SegmentOffered(ControlMessage, frozen=True, tag=10):
    """Offers a segment that the sender owns; its descriptor rides along as SCM_RIGHTS."""

    segment_id: int
    size_bytes: int


class SegmentAccepted(ControlMessage, frozen=True, tag=11):
    """The sender has mapped the segment: tickets may name it from now on."""

    segment_id: int


class SegmentRefused(ControlMessage, frozen=True, tag=12):
    """The sender could not map the segment: send its bytes inline instead."""

    segment_id: int
    reason: str


class SegmentRetired(ControlMessage, frozen=True, tag=14):
    """The sender has given up its segment: no ticket names it any more."""

    segment_id: int


class BlocksReleased(ControlMessage, frozen=True, tag=13):
    """The sender no longer reads these blocks of the addressee's segments."""

    blocks: list[tuple[int, int]]  # (segment_id, offset_bytes)


# --- calls ---------------------------------------------------------------------------------------------


class QueueFull(ControlMessage, frozen=True, tag=21):
    """The sender's queue of calls is full: send no more; see runtime/calls/admission.py."""

    queued: int
    limit: int


class QueueHasRoom(ControlMessage, frozen=True, tag=22):
    """Ends a ``QueueFull``."""


class CodeWanted(ControlMessage, frozen=True, tag=23):
    """The sender has got a call of a function by value, and does not have the unit of this digest."""

    digest: bytes


class CodeTold(ControlMessage, frozen=True, tag=24):
    """The answer to a ``CodeWanted``; ``content`` is empty if the unit is not kept any more."""

    digest: bytes
    content: bytes


# --- departure: protocol/departure explains their use --------------------------------------------------


class DepartureReport(ControlMessage, frozen=True, tag=30):
    """The departure progress of the sender and of all that report to it. A higher ``sequence`` replaces a lower one."""

    sequence: int
    round: int  # the latest probe of the addressee that all of them have answered; 0 before the first
    members: list[int]  # the ranks that have called shutdown
    ready: bool  # are all of these idle, and aware of the deaths that a probe named?
    activity: int  # changes whenever one of them started or served a call, came or went
    late: list[tuple[int, str]]  # (rank, why): some of the members that are not ready
    unnamed_count: int  # how many more are not ready
    asks_who_is_late: bool


class DepartureProbe(ControlMessage, frozen=True, tag=31):
    """Probe the members that report to you, then report: at once if one of you is not ready, and again when all are."""

    round: int
    gone: list[int]  # the ranks that are gone, as far as the root knows


class DepartureStatus(ControlMessage, frozen=True, tag=32):
    """The answer to ``asks_who_is_late``: some late members with reasons, and how many more there are."""

    late: list[tuple[int, str]]  # (rank, why)
    unnamed_count: int


class DepartureReleased(ControlMessage, frozen=True, tag=33):
    """All members have finished their work: leave."""


class DepartureAcknowledged(ControlMessage, frozen=True, tag=34):
    """Acknowledges a ``DepartureReleased``."""


# --- observation ---------------------------------------------------------------------------------------


class ClockAsked(ControlMessage, frozen=True, tag=70):
    """Asks for the addressee's clock; to be answered at once."""

    sent_ns: int  # the sender's clock, echoed in the answer


class ClockTold(ControlMessage, frozen=True, tag=71):
    """The answer to a ``ClockAsked``."""

    sent_ns: int
    clock_ns: int


# --- devices -------------------------------------------------------------------------------------------


class DevicesMapped(ControlMessage, frozen=True, tag=80):
    """The sender's device map to the receiver; answers use its inverse. Sent before any message that needs it."""

    pairs: list[tuple[str, str]]
    automatic: bool  # do devices outside the map correspond to the device of the same name?


class DeviceTried(ControlMessage, frozen=True, tag=81):
    """Asks whether the receiver can open memory of the sender's device."""

    device: int  # as the sender numbers it
    name: str  # the same in all processes of a host
    opener: bytes  # pickled: what opens a piece of memory, and an event


class DeviceOpened(ControlMessage, frozen=True, tag=82):
    """The answer to a ``DeviceTried``; ``why_not`` is empty if it works."""

    device: int
    why_not: str


class DeviceBlocksReleased(ControlMessage, frozen=True, tag=83):
    """The sender has copied these blocks of the addressee's device memory, or will never need them."""

    blocks: list[tuple[int, int]]  # (segment_id, offset_bytes)


class DeviceSegmentRetired(ControlMessage, frozen=True, tag=84):
    """The sender no longer uses its segment of device memory: close it."""

    segment_id: int


DEVICE_MESSAGES: Final = (DevicesMapped, DeviceTried, DeviceOpened, DeviceBlocksReleased, DeviceSegmentRetired)

PLACED: Final = frozenset(
    (
        *DEVICE_MESSAGES,
        BlocksReleased,
        ClockAsked,
        ClockTold,
        QueueFull,
        QueueHasRoom,
        SegmentAccepted,
        SegmentRefused,
        SegmentRetired,
        references.Register,
        streams.StreamClosed,
        streams.StreamCredit,
        weights.BlockOffered,
        weights.VersionPushed,
    )
)
"""Messages that are handled in order with the frames around them, by whatever worker gets them. All others are handled
by the I/O thread, in order among themselves."""

Message = (
    Ping
    | Pong
    | Goodbye
    | Part
    | Parted
    | Stay
    | SegmentOffered
    | SegmentAccepted
    | SegmentRefused
    | SegmentRetired
    | BlocksReleased
    | QueueFull
    | QueueHasRoom
    | CodeWanted
    | CodeTold
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
    """Encode one control message."""
    return _encoder.encode(message)


def decode_message(data: bytes | bytearray | memoryview) -> Message:
    """Decode one control message, or raise ``ProtocolError``."""
    try:
        return _decoder.decode(data)
    # Bad UTF-8 raises UnicodeDecodeError (a ValueError); deep nesting of unknown content raises RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"cannot read a control message of {len(data)} bytes: {error}") from error
