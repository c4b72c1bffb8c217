"""What an answer frame means to its caller: a value, or an exception to raise."""

from __future__ import annotations

from typing import Any

from farcall.protocol.frames import FAILURE, Arrived
from farcall.runtime.peers import Peer
from farcall.serialize import decode, decode_failure


def read_answer(frame: Arrived, peer: Peer) -> Any:
    """The value in a response, or the failure in it, raised."""
    kind, _, _, _, _, payload, buffers = frame
    if kind == FAILURE:
        raise decode_failure(payload, buffers, peer)
    return decode(payload, buffers, peer)
