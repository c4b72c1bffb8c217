"""How a member that comes back says so: what its identity carries when it dials again.

    capability   value                                     meaning
    session      the session's id                          this dialer knows that session
    received     frames it has of the listener, decimal    it resumes it; without this, it only asks whether it lives

Both are in the greeting, so the proof covers them; a listener looks at them only once the dialer is proven. The id is
made from what the first handshake proved: who was not there cannot name it, and it tells nothing of the key.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

import msgspec

from farcall.protocol.handshake import RECEIVED, Established, Identity, malformed

__all__ = ["Resumption", "asking", "resuming", "resumption_of", "session_id_of"]

SESSION: Final = "session"


class Resumption(NamedTuple):
    """What a dialer says of the session that it comes back to."""

    session_id: str
    received: int | None  # frames of the listener that it has; None: it only asks


def session_id_of(established: Established) -> str:
    """The name, at both ends, of the session that begins with this connection."""
    return hashlib.sha256(b"session id" + established.session_key).hexdigest()[:32]


def resuming(me: Identity, session_id: str, received: int) -> Identity:
    """``me``, coming back to a session."""
    return msgspec.structs.replace(me, capabilities={**me.capabilities, SESSION: session_id, RECEIVED: str(received)})


def asking(me: Identity, session_id: str) -> Identity:
    """``me``, asking whether the listener still knows a session, and reminding it to come back to it."""
    return msgspec.structs.replace(me, capabilities={**me.capabilities, SESSION: session_id})


def resumption_of(peer: Identity) -> Resumption | None:
    """What a proven dialer says of a session; None: it comes for the first time."""
    session_id = peer.capabilities.get(SESSION)
    if session_id is None:
        return None
    received = peer.capabilities.get(RECEIVED)
    if received is None:
        return Resumption(session_id, None)
    if not received.isdecimal() or len(received) > 20:
        raise malformed("a count of frames that is no number")
    return Resumption(session_id, int(received))
