"""What an answer frame means to its caller: a value, or an exception to raise."""

from __future__ import annotations

from typing import Any

from farcall.errors import Overloaded
from farcall.protocol.frames import FAILURE, Arrived
from farcall.protocol.notes import REFUSED, decode_refusal
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode, decode_failure


def read_answer(frame: Arrived, peer: Peer) -> Any:
    """The value in a response, or the failure in it, raised."""
    kind, flags, _, _, _, payload, buffers = frame
    if kind == FAILURE:
        if flags & REFUSED:
            raise refusal(frame, peer)
        raise decode_failure(payload, buffers, peer)
    return decode(payload, buffers, peer)


def refusal(frame: Arrived, peer: Peer) -> Overloaded:
    """The error for a call that its callee refused."""
    name = peer.info.name
    found = decode_refusal(frame[5])
    return Overloaded(
        f"{name} is overloaded and did not run this call: {found.queued} calls wait there for a thread, and its "
        f"max_queued_calls is {found.limit}. Call again later (retry=farcall.Retry(...)), have calls wait "
        f'(when_overloaded="wait"), or give {name} more num_worker_threads or less to do',
        worker=peer.info,
        queued=found.queued,
        limit=found.limit,
    )
