"""`Hello`: a node's identity and purpose, before any proof; the handshake's messages as bytes; refusals.

    purpose                        sent by a dialer that
    Connect(is_first)              makes a link; ``is_first``: it knows of no connection before this one
    Resume(session_id, received)   comes back to a session, and has ``received`` frames of the listener
    Remind(session_id)             asks whether the session lives, and reminds the listener to come back to it
    Observe()                      only looks on, and proves itself with the observers' key
    Inspect(facts)                 is `farcall doctor`
    Listen(admits, size)           (sent by a listener) ``admits``: it is a member that can let newcomers in, into a
                                   group of fixed ``size`` (0: it has none)

Both proofs cover the dialer's hello, and a listener acts on it only once the dialer is proven. An admission number in
the dialer's member shows that it was let in; a listener that has not heard of it yet learns it from here.
The hello also names the dialled address, as the listener advertised it: a relay at another address, which no listener
advertises, is found out. Only a dialer that knows nothing but an address from its user (an observer, a newcomer without
a store) omits the address, and the cluster, too.
The id of a session derives from what its first handshake proved: no third party can name it, and it reveals nothing of
the key.

Knows nothing of the order of messages (`handshake.py`).
"""

from __future__ import annotations

import hmac
import struct
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec

from farcall.errors import Delivery, HandshakeRefused
from farcall.ids import check_worker_name
from farcall.protocol.member import Member

PROTOCOL_VERSION: Final = 2
MAX_MESSAGE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 32
MAGIC: Final = b"\x89farcall"
HEADER: Final = struct.Struct(">8sHHI")
VERSION_END: Final = 10
PROOF_BYTES: Final = 32
MAX_REFUSAL_BYTES: Final = 64
TLS_RECORD: Final = b"\x16\x03"
TLS_NAME: Final = b"\x07farcall"
"""How the first record of TLS begins; and what it has in it where a node of farcall dials."""
COUNT: Final = struct.Struct(">Q")

_ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class _Purpose(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of the purposes: immutable, encoded as [tag, field, field ...]."""


class Connect(_Purpose, frozen=True, tag=0):
    is_first: bool = False


class Resume(_Purpose, frozen=True, tag=1):
    session_id: _ShortText
    received: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Remind(_Purpose, frozen=True, tag=2):
    session_id: _ShortText


class Observe(_Purpose, frozen=True, tag=3):
    pass


class Inspect(_Purpose, frozen=True, tag=4):
    facts: Annotated[dict[_ShortText, _ShortText], msgspec.Meta(max_length=64)]


class Listen(_Purpose, frozen=True, tag=5):
    admits: bool = False
    size: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A node's claim of itself, its purpose, and its cluster (empty where the node was given only an address)."""

    member: Member
    cluster_id: _ShortText
    purpose: Connect | Resume | Remind | Observe | Inspect | Listen = Connect()
    dialled: _ShortText = ""
    """The address that the dialer dials, as the listener advertised it."""

    def wanting(self, purpose: Connect | Resume | Remind | Observe | Inspect | Listen) -> Hello:
        """The hello of the same node with another purpose."""
        return Hello(self.member, self.cluster_id, purpose)

    def dialling(self, address: str) -> Hello:
        """The same hello, for a dial of ``address``."""
        return Hello(self.member, self.cluster_id, self.purpose, address)

    @property
    def is_newcomer(self) -> bool:
        """Does this dialer ask to be let in, as far as its hello tells?"""
        return isinstance(self.purpose, Connect) and not self.purpose.is_first and not self.member.admission

    @property
    def may_leave_out(self) -> bool:
        """May this dialer omit cluster and address? Only one that knows nothing but an address from its user may."""
        is_newcomer = isinstance(self.purpose, Connect) and not self.cluster_id
        return is_newcomer or isinstance(self.purpose, Observe | Inspect)


# ---------------------------------------------------------------------- messages


class Side(Enum):
    """The end of a connection that a node is at."""

    DIALER = "dialer"
    LISTENER = "listener"

    @property
    def other(self) -> Side:
        return Side.LISTENER if self is Side.DIALER else Side.DIALER


class Kind(IntEnum):
    """The kinds of messages."""

    DIALER_GREETING = 1
    LISTENER_GREETING = 2
    DIALER_PROOF = 3
    LISTENER_PROOF = 4
    REFUSAL = 5
    RESUMED = 6


class Greeting(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A hello, and the random bytes that the other end's proof must cover."""

    hello: Hello
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


_greeting_decoder = msgspec.msgpack.Decoder(Greeting)
GREETING: Final[dict[Side, Kind]] = {Side.DIALER: Kind.DIALER_GREETING, Side.LISTENER: Kind.LISTENER_GREETING}
PROOF: Final[dict[Side, Kind]] = {Side.DIALER: Kind.DIALER_PROOF, Side.LISTENER: Kind.LISTENER_PROOF}


def message_of(kind: Kind, body: bytes) -> bytes:
    """One whole message."""
    return HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, len(body)) + body


def read_greeting(body: bytes) -> Greeting:
    """The greeting in ``body``, or ``ValueError``."""
    try:
        greeting = _greeting_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    check_worker_name(greeting.hello.member.name)
    return greeting


# ---------------------------------------------------------------------- keys


def observer_key(secret: bytes) -> bytes:
    """The key that observers prove instead of the secret: it admits nobody as a member."""
    return hkdf_expand(hkdf_extract(b"farcall observer", secret), b"key")


def hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """RFC 5869, first step, with SHA-256."""
    return hmac.digest(salt, secret, "sha256")


def hkdf_expand(key: bytes, info: bytes) -> bytes:
    """RFC 5869, second step, with SHA-256, for 32 bytes: its first block."""
    return hmac.digest(key, info + b"\x01", "sha256")


# ---------------------------------------------------------------------- refusals


class RefusalReason(StrEnum):
    """Why a connection was refused; the value goes to the peer."""

    NOT_FARCALL = "not farcall"
    VERSION_MISMATCH = "version mismatch"
    TOO_LARGE = "too large"
    MALFORMED = "malformed"
    OTHER_CLUSTER = "other cluster"
    WRONG_PEER = "wrong peer"
    WRONG_ADDRESS = "wrong address"
    OTHER_TRUST = "other trust"
    WRONG_SECRET = "wrong secret"
    ENCRYPTION = "encryption"
    OTHER_HOST = "other host"
    # The listener dials the dialer at the same moment: one connection is enough. Or it is about to become a member, and
    # lets newcomers ask again.
    CROSSED = "crossed"
    NOT_ADMITTED = "not admitted"  # proven, but the listener has no place for it; the driver decides


class Refused(HandshakeRefused):
    """``HandshakeRefused`` with its ``reason``, and the ``farewell`` (may be empty) to send before closing."""

    def __init__(self, message: str, reason: RefusalReason = RefusalReason.MALFORMED, farewell: bytes = b"") -> None:
        super().__init__(message, Delivery.NOT_SENT)
        self.reason = reason
        self.farewell = farewell


def refuse(reason: RefusalReason, text: str) -> Refused:
    """A refusal whose farewell sends ``reason`` to the peer; ``text`` is for our own log only."""
    return Refused(text, reason, farewell=message_of(Kind.REFUSAL, reason.value.encode("ascii")))


def malformed(what: str) -> Refused:
    """The refusal of a message that no member sends."""
    return refuse(RefusalReason.MALFORMED, f"the peer broke the handshake's rules: {what}")


# The first bytes of common other protocols, so that the log line can name them.
STRANGERS: Final = (
    (TLS_RECORD, "TLS"),
    (b"SSH-", "SSH"),
    (b"GET ", "HTTP"),
    (b"POST ", "HTTP"),
    (b"PUT ", "HTTP"),
    (b"HEAD ", "HTTP"),
    (b"OPTIONS ", "HTTP"),
    (b"CONNECT ", "HTTP"),
    (b"HTTP/", "HTTP"),
)
