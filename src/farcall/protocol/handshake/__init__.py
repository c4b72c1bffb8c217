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

from farcall.protocol.handshake.identity import Identity, is_observer, observer_identity
from farcall.protocol.handshake.keys import observer_key
from farcall.protocol.handshake.machine import RECEIVED, Established, Handshake, HandshakeState
from farcall.protocol.handshake.wire import (
    MAX_MESSAGE_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    RefusalReason,
    Refused,
    Role,
    malformed,
    refuse,
    resumed,
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "NONCE_BYTES",
    "PROTOCOL_VERSION",
    "RECEIVED",
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
