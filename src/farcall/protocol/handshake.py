"""The handshake: mutual proof of the shared secret, before a node believes or unpickles anything from its peer.

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
    any                 REFUSAL or anything else: refused for ever

The last but one row is for a dialer that resumes a session (`session.py`): its hello names the session and the number
of frames it has (`hello.py`). Once the dialer is proven, the listener sends its own number behind its proof
(``resumed``). A dialer that only asks whether the session lives gets a proof, or a refusal.
A greeting is a `Hello` and a nonce. A proof is an HMAC, under a key derived from the secret, of both greetings as they
went over the wire, and of the TLS channel that they went through (`transport/pump.py`). So either both ends saw the
same version, members, purposes, cluster, dialled address, certificates and nonces, and are the two ends of one channel,
or one end refuses: somebody who ends TLS towards both has two channels. `Established.session_key` derives from all
that. The listener sends nothing before a valid greeting, and proves nothing before the dialer has.
An observer proves ``observer_key(secret)`` instead of the secret. Both ends of its connection derive their keys from
it, and it opens no other connection.
Invariant: a peer's bytes raise no exception but ``HandshakeRefused``, and the buffer holds at most 64 KiB.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from farcall.protocol.hello import (
    COUNT,
    GREETING,
    HEADER,
    MAGIC,
    MAX_MESSAGE_BYTES,
    MAX_REFUSAL_BYTES,
    NONCE_BYTES,
    PROOF,
    PROOF_BYTES,
    PROTOCOL_VERSION,
    STRANGERS,
    TLS_NAME,
    TLS_RECORD,
    VERSION_END,
    Greeting,
    Hello,
    Inspect,
    Kind,
    Observe,
    RefusalReason,
    Refused,
    Resume,
    Side,
    hkdf_expand,
    hkdf_extract,
    malformed,
    message_of,
    observer_key,
    read_greeting,
    refuse,
)

_SAME_ENCRYPTION = 'give every member encryption="off" (FARCALL_ENCRYPTION=off), or none'
_OBSERVERS_SECRET = "; observers prove FARCALL_OBSERVERS_SECRET where workers have that, or a table of farcall.allow"
_SAME_TRUST = ": have every process call farcall.allow before it starts, with the same trust, or none"


class HandshakeState(Enum):
    """The message that this end waits for; the driver reports it when its deadline passes."""

    AWAITING_GREETING = "awaiting greeting"
    AWAITING_PROOF = "awaiting proof"
    AWAITING_COUNT = "awaiting count"
    ESTABLISHED = "established"
    REFUSED = "refused"


class Established(NamedTuple):
    """The result of a successful handshake: a proven peer, and the bytes that followed its proof."""

    peer: Hello
    session_key: bytes
    leftover: bytes
    peer_received: int = 0  # for a dialer that resumes a session: how many of its frames the listener has

    @property
    def session_id(self) -> str:
        """The name that both ends give to the session that begins with this connection."""
        return hashlib.sha256(b"session id" + self.session_key).hexdigest()[:32]


class Handshake:
    """One end of one connection's handshake.

    ``nonce`` must be fresh from a cryptographic source for each connection. ``expected_peer`` is the name
    that must answer (or dial); None lets any member of the cluster in. ``also``: other secrets that a dialer may prove;
    the listener answers with the same one. ``observers``: the secrets whose keys observers prove, if they differ.
    ``binding`` returns what only the ends of the channel below know of it, once a message has come; proofs cover it.
    """

    def __init__(
        self,
        side: Side,
        me: Hello,
        secret: bytes,
        nonce: bytes,
        expected_peer: str | None = None,
        *,
        also: Sequence[bytes] = (),
        observers: Sequence[bytes] = (),
        binding: Callable[[], bytes] = bytes,
    ) -> None:
        if not secret:
            raise ValueError("the shared secret must not be empty")
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"the nonce must be {NONCE_BYTES} bytes, not {len(nonce)}")
        self._side = side
        self._me = me
        self._secrets = (secret, *also)
        self._observers = observers or self._secrets
        self._expected_peer = expected_peer
        self._binding = binding
        self._root_keys = [_root_key(one) for one in self._secrets]
        self._my_greeting = message_of(GREETING[side], msgspec.msgpack.encode(Greeting(me, nonce)))
        # Fail here, with a clear error, instead of sending a greeting that every peer refuses.
        if len(self._my_greeting) > MAX_MESSAGE_BYTES:
            raise ValueError(f"this hello does not fit a handshake message of {MAX_MESSAGE_BYTES} bytes")
        read_greeting(self._my_greeting[HEADER.size :])
        # Mutable from here on, as are ``_root_keys`` (narrowed to the proved one).
        self._state = HandshakeState.AWAITING_GREETING
        self._buffer = bytearray()
        self._peer: Hello | None = None
        self._transcript = b""
        self._refusal: Refused | None = None
        self._session_key = b""
        self._resumes = side is Side.DIALER and isinstance(me.purpose, Resume)

    @property
    def state(self) -> HandshakeState:
        """The message that this end waits for."""
        return self._state

    @property
    def peer_claim(self) -> Hello | None:
        """The peer's claim of itself: unproven, for log lines only, until ``receive`` returns ``Established``."""
        return self._peer

    def start(self) -> bytes:
        """The bytes to send first: the dialer's greeting, nothing for a listener."""
        return self._my_greeting if self._side is Side.DIALER else b""

    def receive(self, data: bytes | bytearray | memoryview) -> tuple[bytes, Established | None]:
        """Take bytes from the peer; return bytes to send, and the result at the end.

        Raises ``Refused`` (a ``HandshakeRefused``): send its ``farewell``, then close.
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

    def unencrypted(self, first_bytes: bytes) -> Refused:
        """The refusal of a peer that began with ``first_bytes``, where TLS was due; notes what it claims."""
        self._buffer += first_bytes
        try:
            complete = self._next_message()
            if complete is not None and complete[0] is Kind.REFUSAL:
                return self._refused_by_peer(complete[1][HEADER.size :])
            if complete is not None:
                self._peer = read_greeting(complete[1][HEADER.size :]).hello
        except Refused as refusal:
            return refusal
        except ValueError:
            pass  # refused in any case
        return refuse(RefusalReason.ENCRYPTION, f"the peer does not encrypt, and this node does: {_SAME_ENCRYPTION}")

    def _advance(self) -> tuple[bytes, Established | None]:
        """Handle every complete message in the buffer."""
        replies = b""
        while (complete := self._next_message()) is not None:
            kind, message = complete
            body = message[HEADER.size :]
            if kind is Kind.REFUSAL:
                raise self._refused_by_peer(body)
            if self._state is HandshakeState.AWAITING_GREETING:
                replies += self._on_greeting(message, body)
                continue
            assert self._peer is not None
            if self._state is HandshakeState.AWAITING_COUNT:
                self._state = HandshakeState.ESTABLISHED
                received = self._on_count(body)
                return replies, self._established(self._peer, received)
            reply, self._session_key = self._on_proof(body)
            if self._resumes:
                self._state = HandshakeState.AWAITING_COUNT
                continue
            return replies + reply, self._established(self._peer)
        return replies, None

    def _next_message(self) -> tuple[Kind, bytes] | None:
        """Cut one whole message off the buffer; None if it needs more bytes. Refuses as early as possible."""
        buffer = self._buffer
        if not MAGIC.startswith(buffer[: len(MAGIC)]):
            if TLS_RECORD.startswith(buffer[: len(TLS_RECORD)]) and len(buffer) < _tls_record_bytes(buffer):
                return None  # its end may say whether it is farcall's
            raise self._not_farcall()
        if len(buffer) >= VERSION_END:
            version = int.from_bytes(buffer[len(MAGIC) : VERSION_END], "big")
            if version != PROTOCOL_VERSION:
                raise refuse(
                    RefusalReason.VERSION_MISMATCH,
                    f"the peer speaks farcall protocol version {version}, this node {PROTOCOL_VERSION}: "
                    "install the same farcall everywhere",
                )
        if len(buffer) < HEADER.size:
            return None
        _, _, kind_number, body_bytes = HEADER.unpack_from(buffer)
        kind = self._check_header(kind_number, body_bytes)
        message_bytes = HEADER.size + body_bytes
        if len(buffer) < message_bytes:
            return None
        message = bytes(buffer[:message_bytes])
        del buffer[:message_bytes]
        return kind, message

    def _check_header(self, kind_number: int, body_bytes: int) -> Kind:
        """The announced kind, if it is due now and its length fits; else refuse."""
        if HEADER.size + body_bytes > MAX_MESSAGE_BYTES:
            raise refuse(
                RefusalReason.TOO_LARGE,
                f"the peer announced {body_bytes} bytes; the limit before proof is {MAX_MESSAGE_BYTES}",
            )
        if kind_number == Kind.REFUSAL and body_bytes <= MAX_REFUSAL_BYTES:
            return Kind.REFUSAL
        if self._state is HandshakeState.AWAITING_GREETING:
            due, fits = GREETING[self._side.other], True
        elif self._state is HandshakeState.AWAITING_COUNT:
            due, fits = Kind.RESUMED, body_bytes == COUNT.size + PROOF_BYTES
        else:
            due, fits = PROOF[self._side.other], body_bytes == PROOF_BYTES
        if kind_number != due or not fits:
            raise malformed(f"message kind {kind_number} of {body_bytes} bytes while {self._state.value}")
        return due

    def _on_greeting(self, message: bytes, body: bytes) -> bytes:
        """Read the peer's claim of itself; answer with a proof (dialer) or our greeting (listener)."""
        try:
            greeting = read_greeting(body)
        except ValueError as error:
            raise malformed(f"an unreadable greeting: {error}") from error
        peer = greeting.hello
        dialer = self._me if self._side is Side.DIALER else peer
        if peer.cluster_id != self._me.cluster_id and (dialer.cluster_id or not dialer.may_leave_out):
            raise refuse(
                RefusalReason.OTHER_CLUSTER,
                f"{peer.member.name!r} belongs to cluster {peer.cluster_id!r}, this node to {self._me.cluster_id!r}",
            )
        if peer.member.trust != self._me.member.trust and not isinstance(dialer.purpose, Observe | Inspect):
            raise refuse(
                RefusalReason.OTHER_TRUST,
                f"{peer.member.name!r} trusts members with {peer.member.trust}, this node with "
                f"{self._me.member.trust}{_SAME_TRUST}",
            )
        if self._side is Side.LISTENER and not self._is_meant(peer):
            raise refuse(
                RefusalReason.WRONG_ADDRESS,
                f"{peer.member.name!r} dialled {peer.dialled!r}, which is not an address of this node: somebody relays "
                "the connection, or the address is stale",
            )
        # Checked before the dialer proves anything: an unwanted peer gets no proof to guess the secret from.
        if self._expected_peer is not None and peer.member.name != self._expected_peer:
            raise refuse(
                RefusalReason.WRONG_PEER,
                f"expected {self._expected_peer!r} at this address, but {peer.member.name!r} answered "
                "(a stale address, or a port used again?)",
            )
        self._peer = peer
        self._state = HandshakeState.AWAITING_PROOF
        if isinstance(peer.purpose, Observe) and self._side is Side.LISTENER:
            self._root_keys = [_root_key(observer_key(one)) for one in self._observers]
        # Both greetings exactly as sent; each carries its length, so the two cannot be split in another way.
        if self._side is Side.DIALER:
            self._transcript = hashlib.sha256(self._my_greeting + message + self._binding()).digest()
            return message_of(Kind.DIALER_PROOF, self._proof_of(Side.DIALER))
        self._transcript = hashlib.sha256(message + self._my_greeting + self._binding()).digest()
        return self._my_greeting

    def _is_meant(self, dialer: Hello) -> bool:
        """Did ``dialer`` dial an address that this node advertises? A node that advertises none accepts any."""
        mine = self._me.member.addresses
        return not mine or (dialer.dialled in mine if dialer.dialled else dialer.may_leave_out)

    def _on_proof(self, body: bytes) -> tuple[bytes, bytes]:
        """Check the peer's proof; return our own (empty at a dialer, which has sent it) and the session key."""
        self._root_keys = [
            key for key in self._root_keys if hmac.compare_digest(body, _proof(key, self._side.other, self._transcript))
        ]
        if not self._root_keys:
            name = self._peer.member.name if self._peer is not None else "?"
            raise refuse(
                RefusalReason.WRONG_SECRET,
                f"the peer that calls itself {name!r} could not prove the cluster's secret: "
                "give every node the same FARCALL_SECRET or option `secret` (if they have it, somebody in between ends "
                "the encryption of both)",
            )
        self._state = HandshakeState.ESTABLISHED
        session_key = hkdf_expand(self._root_keys[0], b"session" + self._transcript)
        if self._side is Side.LISTENER:
            return message_of(Kind.LISTENER_PROOF, self._proof_of(Side.LISTENER)), session_key
        return b"", session_key

    def resumed(self, received: int) -> bytes:
        """The message that follows a listener's proof when a session resumes: how many frames it has of the dialer."""
        count = COUNT.pack(received)
        return message_of(Kind.RESUMED, count + self._proof_of_count(count))

    def _on_count(self, body: bytes) -> int:
        count, proof = body[: COUNT.size], body[COUNT.size :]
        if not hmac.compare_digest(proof, self._proof_of_count(count)):
            raise malformed("a count of frames that the listener did not send")
        (received,) = COUNT.unpack(count)
        return int(received)

    def _proof_of_count(self, count: bytes) -> bytes:
        # The transcript does not cover the count: unauthenticated, an attacker could change it to have frames repeated.
        return hmac.digest(hkdf_expand(self._session_key, b"count"), count, "sha256")

    def _proof_of(self, side: Side) -> bytes:
        return _proof(self._root_keys[0], side, self._transcript)

    def _established(self, peer: Hello, received: int = 0) -> Established:
        leftover, self._buffer = bytes(self._buffer), bytearray()
        return Established(peer, self._session_key, leftover, received)

    def _not_farcall(self) -> Refused:
        if self._buffer.startswith(TLS_RECORD) and TLS_NAME in self._buffer:
            return refuse(RefusalReason.ENCRYPTION, f"the peer encrypts, and this node does not: {_SAME_ENCRYPTION}")
        for opening, name in STRANGERS:
            if self._buffer.startswith(opening):
                return Refused(f"the peer speaks {name}, not farcall", RefusalReason.NOT_FARCALL)
        # No farewell in either case: a port scanner must not even learn that farcall runs here.
        return Refused("the peer does not speak farcall", RefusalReason.NOT_FARCALL)

    def _refused_by_peer(self, body: bytes) -> Refused:
        # Repeat only a known reason, never the peer's own text: it proved nothing, and this goes into the log.
        try:
            reason = RefusalReason(body.decode("ascii"))
        except ValueError:
            reason = RefusalReason.MALFORMED
        advice = {
            RefusalReason.WRONG_SECRET: _OBSERVERS_SECRET
            if isinstance(self._me.purpose, Observe)
            else "; give every node the same FARCALL_SECRET or option `secret`",
            RefusalReason.OTHER_CLUSTER: f"; this node is in cluster {self._me.cluster_id!r}",
            RefusalReason.OTHER_TRUST: _SAME_TRUST,
            RefusalReason.ENCRYPTION: f", which only one end has: {_SAME_ENCRYPTION}",
            RefusalReason.OTHER_HOST: "; the certificate of this node does not name what was dialled",
            RefusalReason.WRONG_PEER: f"; this node is {self._me.member.name!r}",
        }.get(reason, "")
        return Refused(f"the peer refused this connection: {reason.value}{advice}", reason)


def _tls_record_bytes(buffer: bytearray) -> int:
    """How long the record of TLS is that begins ``buffer``: bytes 3 and 4 of it tell the length of the rest."""
    return min(5 + int.from_bytes(buffer[3:5], "big"), MAX_MESSAGE_BYTES)


def _root_key(secret: bytes) -> bytes:
    return hkdf_extract(b"farcall handshake", secret)


def _proof(root_key: bytes, side: Side, transcript: bytes) -> bytes:
    """The proof that ``side`` owes; its key names the side, so that no end's proof can be reflected back to it."""
    key = hkdf_expand(root_key, b"proof of the " + side.value.encode())
    return hmac.digest(key, transcript, "sha256")
