"""How a request leaves, for every kind of call: what is noted with it, and what is taken back if it does not leave.

Calls (`call.py`), those to the owner of a reference (`owner_calls.py`) and those that are tried again (`retry.py`) come
through here; creating calls, whose notes name the reference, do the same for themselves. Knows nothing of functions
and results.

Invariant: what was noted while the arguments were encoded, forks of references above all, is sent or withdrawn. The
hot path of the caller's side: one plain function each for who waits and who does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from farcall.errors import NetworkError, RpcTimeout
from farcall.protocol.frames import Arrived
from farcall.runtime.calls.notes import request_notes
from farcall.runtime.calls.pending import CallTable, PendingCall, SyncCall
from farcall.runtime.observing.profiling import CallProfile
from farcall.serialize import RECORDING, Annotated

__all__ = ["exchange", "send"]


def exchange(
    calls: CallTable,
    call: SyncCall,
    profile: CallProfile | None,
    function: bytes,
    payload: bytes,
    buffers: Sequence[memoryview],
    refusable: bool = True,
) -> Arrived:
    """Send the request of ``call`` and wait for its answer; raises where none comes."""
    try:
        if profile is not None:
            call.profile = profile
            notes = request_notes(call.peer, buffers, profile=profile.sends(payload, buffers))
        elif buffers.__class__ is not Annotated and RECORDING.get() is None:
            notes = b""
        else:
            notes = request_notes(call.peer, buffers)
        calls.exchange(call, function, notes, payload, buffers, refusable)
    except BaseException:
        if buffers.__class__ is Annotated:
            buffers.withdraw()
        raise
    finally:
        if profile is not None:
            profile.ended()  # if no answer has done so
    if call.error is not None:
        failure, call.error = call.error, None
        try:
            raise failure
        finally:
            del failure  # or the traceback would hold this frame, the frame the error, and both the arguments
    assert call.frame is not None
    return call.frame


def send(
    calls: CallTable,
    call: PendingCall,
    profile: CallProfile | None,
    function: bytes,
    payload: bytes,
    buffers: Sequence[memoryview],
) -> None:
    """Send the request of ``call``, whose outcome somebody else waits for.

    What the network does to it is its outcome, like any other end of the link: a loop over workers is not torn by a
    dead one. Other errors are raised.
    """
    try:
        if profile is not None:
            call.profile = profile
            notes = request_notes(call.peer, buffers, profile=profile.sends(payload, buffers))
        elif buffers.__class__ is not Annotated and RECORDING.get() is None:
            notes = b""
        else:
            notes = request_notes(call.peer, buffers)
        calls.send(call, function, notes, payload, buffers)
    except BaseException as error:
        if buffers.__class__ is Annotated:
            buffers.withdraw()
        if not isinstance(error, NetworkError | RpcTimeout):
            if profile is not None:
                profile.ended()
            raise
        call.on_failure(error)
