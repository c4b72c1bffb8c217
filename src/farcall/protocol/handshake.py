"""Who is there: mutual proof of the shared secret, before anything of the peer is believed or unpickled.

Bytes in, bytes out; the driver owns the socket, the deadline and the randomness (``nonce``). Each message is

    offset  size  field
    0       8     magic, b"\\x89farcall"
    8       2     version   (magic and version stay where they are in every version to come)
    10      2     kind
    12      4     length of the body that follows; the whole message never exceeds 64 KiB

    state               the dialer gets     and sends         the listener gets   and sends
    start()                                 DIALER_GREETING
    awaiting greeting   LISTENER_GREETING   DIALER_PROOF      DIALER_GREETING     LISTENER_GREETING
    awaiting proof      LISTENER_PROOF      (established)     DIALER_PROOF        LISTENER_PROOF (established)
    awaiting count      RESUMED             (established)
    any                 REFUSAL or anything else: refused, for good

The last but one row is for a dialer that resumes a session (session.py): its identity says which, and how many frames
it has (resumption.py), and the listener, once the dialer is proven, says behind its own proof how many it has itself
(``resumed``). A dialer that only asks whether the session lives gets a proof, or a refusal.
A greeting is an identity and a nonce; a proof is an HMAC, under a key made from the secret, of both greetings
as they went over the wire. So either both ends saw the same version, identities, capabilities, cluster and
nonces, or one end refuses. The listener says nothing before a valid greeting, and proves nothing before the
dialer has.
An observer (``is_observer``) proves itself with ``observer_key(secret)`` in the place of the secret: the same key
for both ends of its connection, and no key to any other.
Invariant: a peer's bytes cause no exception but ``HandshakeRefused``, and 64 KiB are kept at most.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Final, NamedTuple

import msgspec

from farcall.errors import Delivery, HandshakeRefused
from farcall.ids import check_worker_name

__all__ = [
    "MAX_MESSAGE_BYTES",
    "NONCE_BYTES",
    "PROTOCOL_VERSION",
    "Established",
    "Handshake",
    "HandshakeState",
    "Identity",
    "RefusalReason",
    "Refused",
    "Role",
    "is_observer",
    "malformed",
    "observer_identity",
    "observer_key",
    "refuse",
    "resumed",
]

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 64 * 1024
NONCE_BYTES: Final = 32

_MAGIC: Final = b"\x89farcall"
_HEADER: Final = struct.Struct(">8sHHI")
_VERSION_END: Final = 10
_PROOF_BYTES: Final = 32
_MAX_REFUSAL_BYTES: Final = 64
_ROLE: Final = "role"
_OBSERVER: Final = "observer"
_COUNT: Final = struct.Struct(">Q")

RECEIVED: Final = "received"
"""The capability of a dialer that resumes a session; see resumption.py."""

_ShortText = Annotated[str, msgspec.Meta(max_length=256)]


class Role(Enum):
    """Which end of the connection this is."""

    DIALER = "dialer"
    LISTENER = "listener"

    @property
    def other(self) -> Role:
        return Role.LISTENER if self is Role.DIALER else Role.DIALER


class HandshakeState(Enum):
    """What this end is waiting for; the driver names it when its deadline passes."""

    AWAITING_GREETING = "awaiting greeting"
    AWAITING_PROOF = "awaiting proof"
    AWAITING_COUNT = "awaiting count"
    ESTABLISHED = "established"
    REFUSED = "refused"


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


class Identity(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Who a node says it is. Not secret: it is sent in the clear."""

    name: _ShortText
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    cluster_id: _ShortText
    process_token: _ShortText  # new for each node object: a restarted member is not mistaken for the old one
    capabilities: Annotated[dict[_ShortText, _ShortText], msgspec.Meta(max_length=64)] = {}


def observer_key(secret: bytes) -> bytes:
    """What stands in for the secret where an observer proves itself: whoever has only this can become no member."""
    return _hkdf_expand(_hkdf_extract(b"farcall observer", secret), b"key")


def observer_identity(name: str, process_token: str, cluster_id: str = "") -> Identity:
    """Who an observer says it is; one that was given only an address leaves the cluster out."""
    return Identity(name, 0, cluster_id, process_token, {_ROLE: _OBSERVER})


def is_observer(peer: Identity) -> bool:
    """Does this one want to look on, and be no member?"""
    return peer.capabilities.get(_ROLE) == _OBSERVER


class Established(NamedTuple):
    """The handshake's good end: a proven peer, and whatever it sent right behind its proof."""

    peer: Identity
    session_key: bytes
    leftover: bytes
    peer_received: int = 0  # frames of ours that the listener has, where a session is resumed


def resumed(received: int) -> bytes:
    """What a listener sends behind its proof where a session is resumed."""
    return _message(_Kind.RESUMED, _COUNT.pack(received))


class _Kind(IntEnum):
    DIALER_GREETING = 1
    LISTENER_GREETING = 2
    DIALER_PROOF = 3
    LISTENER_PROOF = 4
    REFUSAL = 5
    RESUMED = 6


class _Greeting(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    identity: Identity
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


_greeting_decoder = msgspec.msgpack.Decoder(_Greeting)
_GREETING: Final = {Role.DIALER: _Kind.DIALER_GREETING, Role.LISTENER: _Kind.LISTENER_GREETING}
_PROOF: Final = {Role.DIALER: _Kind.DIALER_PROOF, Role.LISTENER: _Kind.LISTENER_PROOF}

# What strangers commonly say first, for a log line that helps.
_STRANGERS: Final = (
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


class Handshake:
    """One end of one connection's handshake.

    ``nonce`` must be fresh from a cryptographic source for each connection. ``expected_peer`` is the name
    that must answer (or dial); None lets any member of the cluster in.
    """

    def __init__(self, role: Role, me: Identity, secret: bytes, nonce: bytes, expected_peer: str | None = None) -> None:
        if not secret:
            raise ValueError("the shared secret must not be empty")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"the nonce must be {NONCE_BYTES} bytes, not {len(nonce)}")
        self._role = role
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self._expected_peer = expected_peer
        self._root_key = _hkdf_extract(b"farcall handshake", secret)
        self._my_greeting = _message(_GREETING[role], msgspec.msgpack.encode(_Greeting(me, nonce)))
        # What we would refuse from a peer we must not send to one.
        if len(self._my_greeting) > MAX_MESSAGE_BYTES:
            raise ValueError(f"this identity does not fit a handshake message of {MAX_MESSAGE_BYTES} bytes")
        _read_greeting(self._my_greeting[_HEADER.size :])
        self._state = HandshakeState.AWAITING_GREETING
        self._buffer = bytearray()
        self._peer: Identity | None = None
        self._transcript = b""
        self._refusal: Refused | None = None
        self._session_key = b""
        self._resumes = role is Role.DIALER and RECEIVED in me.capabilities

    @property
    def state(self) -> HandshakeState:
        """What this end is waiting for."""
        return self._state

    @property
    def peer_claim(self) -> Identity | None:
        """Who the peer says it is: unproven, for log lines only, until ``receive`` gave ``Established``."""
        return self._peer

    def start(self) -> bytes:
        """The bytes to send first: the dialer's greeting, nothing for a listener."""
        return self._my_greeting if self._role is Role.DIALER else b""

    def receive(self, data: bytes | bytearray | memoryview) -> tuple[bytes, Established | None]:
        """Take bytes from the peer; return bytes to send, and the result once there is one.

        Raises ``Refused`` (a ``HandshakeRefused``); send its ``farewell``, then close.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._state is HandshakeState.ESTABLISHED:
            raise RuntimeError("this handshake is over: further bytes belong to the frame decoder")
        self._buffer += data
        try:
            return self._advance()
        except Refused as refusal:
            self._refusal = refusal
            self._state = HandshakeState.REFUSED
            self._buffer = bytearray()
            raise

    def _advance(self) -> tuple[bytes, Established | None]:
        """Handle every complete message in the buffer."""
        replies = b""
        while (complete := self._next_message()) is not None:
            kind, message = complete
            body = message[_HEADER.size :]
            if kind is _Kind.REFUSAL:
                raise self._refused_by_peer(body)
            if self._state is HandshakeState.AWAITING_GREETING:
                replies += self._on_greeting(message, body)
                continue
            assert self._peer is not None
            if self._state is HandshakeState.AWAITING_COUNT:
                self._state = HandshakeState.ESTABLISHED
                (received,) = _COUNT.unpack(body)
                return replies, Established(self._peer, self._session_key, self._take_leftover(), received)
            reply, self._session_key = self._on_proof(body)
            if self._resumes:
                self._state = HandshakeState.AWAITING_COUNT
                continue
            return replies + reply, Established(self._peer, self._session_key, self._take_leftover())
        return replies, None

    def _next_message(self) -> tuple[_Kind, bytes] | None:
        """Cut one whole message off the buffer; None if more bytes are needed. Refuses as early as it can."""
        buffer = self._buffer
        if not _MAGIC.startswith(buffer[: len(_MAGIC)]):
            raise self._not_farcall()
        if len(buffer) >= _VERSION_END:
            version = int.from_bytes(buffer[len(_MAGIC) : _VERSION_END], "big")
            if version != PROTOCOL_VERSION:
                raise refuse(
                    RefusalReason.VERSION_MISMATCH,
                    f"the peer speaks farcall protocol version {version}, this node {PROTOCOL_VERSION}: "
                    "install the same farcall everywhere",
                )
        if len(buffer) < _HEADER.size:
            return None
        _, _, kind_number, body_bytes = _HEADER.unpack_from(buffer)
        kind = self._check_header(kind_number, body_bytes)
        message_bytes = _HEADER.size + body_bytes
        if len(buffer) < message_bytes:
            return None
        message = bytes(buffer[:message_bytes])
        del buffer[:message_bytes]
        return kind, message

    def _check_header(self, kind_number: int, body_bytes: int) -> _Kind:
        """The kind announced, if it is due now and of a fitting length."""
        if _HEADER.size + body_bytes > MAX_MESSAGE_BYTES:
            raise refuse(
                RefusalReason.TOO_LARGE,
                f"the peer announced {body_bytes} bytes; the limit before proof is {MAX_MESSAGE_BYTES}",
            )
        if kind_number == _Kind.REFUSAL and body_bytes <= _MAX_REFUSAL_BYTES:
            return _Kind.REFUSAL
        if self._state is HandshakeState.AWAITING_GREETING:
            due, fits = _GREETING[self._role.other], True
        elif self._state is HandshakeState.AWAITING_COUNT:
            due, fits = _Kind.RESUMED, body_bytes == _COUNT.size
        else:
            due, fits = _PROOF[self._role.other], body_bytes == _PROOF_BYTES
        if kind_number != due or not fits:
            raise malformed(f"message kind {kind_number} of {body_bytes} bytes while {self._state.value}")
        return due

    def _on_greeting(self, message: bytes, body: bytes) -> bytes:
        """Learn who the peer claims to be; answer with a proof (dialer) or our greeting (listener)."""
        try:
            greeting = _read_greeting(body)
        except ValueError as error:
            raise malformed(f"an unreadable greeting: {error}") from error
        peer = greeting.identity
        if peer.cluster_id != self._me.cluster_id and not self._may_leave_out_cluster(peer):
            raise refuse(
                RefusalReason.OTHER_CLUSTER,
                f"{peer.name!r} belongs to cluster {peer.cluster_id!r}, this node to {self._me.cluster_id!r}",
            )
        # Checked before the dialer proves anything: who is not wanted gets no proof to guess the secret from.
        if self._expected_peer is not None and peer.name != self._expected_peer:
            raise refuse(
                RefusalReason.WRONG_PEER,
                f"expected {self._expected_peer!r} at this address, but {peer.name!r} answered "
                "(a stale address, or a port used again?)",
            )
        self._peer = peer
        self._state = HandshakeState.AWAITING_PROOF
        if is_observer(peer) and self._role is Role.LISTENER:
            self._root_key = _hkdf_extract(b"farcall handshake", observer_key(self._secret))
        # Both greetings exactly as sent; each carries its length, so the two cannot be split in another way.
        if self._role is Role.DIALER:
            self._transcript = hashlib.sha256(self._my_greeting + message).digest()
            return _message(_Kind.DIALER_PROOF, self._proof_of(Role.DIALER))
        self._transcript = hashlib.sha256(message + self._my_greeting).digest()
        return self._my_greeting

    def _may_leave_out_cluster(self, peer: Identity) -> bool:
        dialer = self._me if self._role is Role.DIALER else peer
        return is_observer(dialer) and not dialer.cluster_id

    def _on_proof(self, body: bytes) -> tuple[bytes, bytes]:
        """Check the peer's proof; return our own if it is still due, and the session key."""
        if not hmac.compare_digest(body, self._proof_of(self._role.other)):
            name = self._peer.name if self._peer is not None else "?"
            raise refuse(
                RefusalReason.WRONG_SECRET,
                f"the peer that calls itself {name!r} could not prove the cluster's secret: "
                "give every node the same FARCALL_SECRET or option `secret`",
            )
        self._state = HandshakeState.ESTABLISHED
        session_key = _hkdf_expand(self._root_key, b"session" + self._transcript)
        if self._role is Role.LISTENER:
            return _message(_Kind.LISTENER_PROOF, self._proof_of(Role.LISTENER)), session_key
        return b"", session_key

    def _proof_of(self, role: Role) -> bytes:
        """The proof that ``role`` owes; its key names the role, so nobody's own proof can be played back."""
        key = _hkdf_expand(self._root_key, b"proof of the " + role.value.encode())
        return hmac.digest(key, self._transcript, "sha256")

    def _take_leftover(self) -> bytes:
        leftover = bytes(self._buffer)
        self._buffer = bytearray()
        return leftover

    def _not_farcall(self) -> Refused:
        for opening, name in _STRANGERS:
            if self._buffer.startswith(opening):
                return Refused(f"the peer speaks {name}, not farcall", RefusalReason.NOT_FARCALL)
        # No farewell in either case: a scanner learns nothing, not even that farcall is here.
        return Refused("the peer does not speak farcall", RefusalReason.NOT_FARCALL)

    def _refused_by_peer(self, body: bytes) -> Refused:
        # Only a reason we know is repeated, never what the peer wrote: it proved nothing, and this is logged.
        try:
            reason = RefusalReason(body.decode("ascii"))
        except ValueError:
            reason = RefusalReason.MALFORMED
        advice = {
            RefusalReason.WRONG_SECRET: "; give every node the same FARCALL_SECRET or option `secret`",
            RefusalReason.OTHER_CLUSTER: f"; this node is in cluster {self._me.cluster_id!r}",
            RefusalReason.WRONG_PEER: f"; this node is {self._me.name!r}",
        }.get(reason, "")
        return Refused(f"the peer refused this connection: {reason.value}{advice}", reason)


def _message(kind: _Kind, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind, len(body)) + body


def refuse(reason: RefusalReason, text: str) -> Refused:
    """A refusal whose farewell tells the peer ``reason``; ``text`` stays here, for our own log."""
    return Refused(text, reason, farewell=_message(_Kind.REFUSAL, reason.value.encode("ascii")))


def malformed(what: str) -> Refused:
    """A refusal of what no member sends."""
    return refuse(RefusalReason.MALFORMED, f"the peer broke the handshake's rules: {what}")


def _read_greeting(body: bytes) -> _Greeting:
    """The greeting in ``body``, or ``ValueError``."""
    try:
        greeting = _greeting_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    check_worker_name(greeting.identity.name)
    return greeting


def _hkdf_extract(salt: bytes, secret: bytes) -> bytes:
    """RFC 5869, first step, with SHA-256."""
    return hmac.digest(salt, secret, "sha256")


def _hkdf_expand(key: bytes, info: bytes) -> bytes:
    """RFC 5869, second step, with SHA-256, for 32 bytes: its first block."""
    return hmac.digest(key, info + b"\x01", "sha256")
