"""The messages of a handshake as bytes, and refusals: the layout is in the package's docstring."""

from __future__ import annotations

import struct
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Final

import msgspec

from farcall.errors import Delivery, HandshakeRefused
from farcall.ids import check_worker_name
from farcall.protocol.handshake.identity import Identity

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 32
MAGIC: Final = b"\x89farcall"
HEADER: Final = struct.Struct(">8sHHI")
VERSION_END: Final = 10
PROOF_BYTES: Final = 32
MAX_REFUSAL_BYTES: Final = 64
COUNT: Final = struct.Struct(">Q")


class Role(Enum):
    """Which end of the connection this is."""

    DIALER = "dialer"
    LISTENER = "listener"

    @property
    def other(self) -> Role:
        return Role.LISTENER if self is Role.DIALER else Role.DIALER


class Kind(IntEnum):
    """What a message is."""

    DIALER_GREETING = 1
    LISTENER_GREETING = 2
    DIALER_PROOF = 3
    LISTENER_PROOF = 4
    REFUSAL = 5
    RESUMED = 6


class Greeting(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Who its sender says it is, and what the other's proof must cover."""

    identity: Identity
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


_greeting_decoder = msgspec.msgpack.Decoder(Greeting)
GREETING: Final[dict[Role, Kind]] = {Role.DIALER: Kind.DIALER_GREETING, Role.LISTENER: Kind.LISTENER_GREETING}
PROOF: Final[dict[Role, Kind]] = {Role.DIALER: Kind.DIALER_PROOF, Role.LISTENER: Kind.LISTENER_PROOF}


def message_of(kind: Kind, body: bytes) -> bytes:
    """One whole message."""
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, len(body)) + body


def read_greeting(body: bytes) -> Greeting:
    """The greeting in ``body``, or ``ValueError``."""
    try:
        greeting = _greeting_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    check_worker_name(greeting.identity.name)
    return greeting


def resumed(received: int) -> bytes:
    """What a listener sends behind its proof where a session is resumed."""
    return message_of(Kind.RESUMED, COUNT.pack(received))


# ---------------------------------------------------------------------- refusals


class RefusalReason(StrEnum):
    """Why a connection was refused; the value is what the peer is told."""

    NOT_FARCALL = "not farcall"
    VERSION_MISMATCH = "version mismatch"
    TOO_LARGE = "too large"
    MALFORMED = "malformed"
    OTHER_CLUSTER = "other cluster"
    WRONG_PEER = "wrong peer"
    WRONG_SECRET = "wrong secret"
    NOT_ADMITTED = "not admitted"  # proven, but the listener has no place for it; decided by the driver


class Refused(HandshakeRefused):
    """``HandshakeRefused`` with its ``reason``, and the ``farewell`` (or nothing) to send before closing."""

    def __init__(self, message: str, reason: RefusalReason = RefusalReason.MALFORMED, farewell: bytes = b"") -> None:
        super().__init__(message, Delivery.NOT_SENT)
        self.reason = reason
        self.farewell = farewell


def refuse(reason: RefusalReason, text: str) -> Refused:
    """A refusal whose farewell tells the peer ``reason``; ``text`` stays here, for our own log."""
    return Refused(text, reason, farewell=message_of(Kind.REFUSAL, reason.value.encode("ascii")))


def malformed(what: str) -> Refused:
    """A refusal of what no member sends."""
    return refuse(RefusalReason.MALFORMED, f"the peer broke the handshake's rules: {what}")


# What strangers commonly say first, for a log line that helps.
STRANGERS: Final = (
    (b"\x16\x03", "TLS"),
    (b"SSH-", "SSH"),
    (b"GET ", "HTTP"),
    (b"POST ", "HTTP"),
    (b"PUT ", "HTTP"),
    (b"HEAD ", "HTTP"),
    (b"OPTIONS ", "HTTP"),
    (b"CONNECT ", "HTTP"),
    (b"HTTP/", "HTTP"),
)
