"""What a callee says of one call whose caller has waited long enough, and how that reads at the end of an error.

The callee describes the call (`CallState`, on its I/O thread); the caller puts it into words. Neither waits here.
"""

from __future__ import annotations

import msgspec

from farcall.observe.snapshot import LATER, QUEUED, STARTING, Frame, OutgoingCall, PoolView, ServedCall
from farcall.observe.threads import outgoing_call, served_call, view_threads
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer

__all__ = ["CallState", "bound_s", "describe_call", "say"]

LONGEST_S = 0.3
_SHORTEST_S = 0.02


class CallState(msgspec.Struct, frozen=True, array_like=True):
    """One call, as its callee sees it."""

    served: ServedCall | None
    """None: it is not here; it never came, or it has been answered."""
    pool: PoolView
    thread: str = ""
    at: Frame | None = None
    waits_for: OutgoingCall | None = None
    """The call that its thread waits for in turn."""
    worker_state: str = ""


_read = msgspec.msgpack.Decoder(CallState)
_read_number = msgspec.msgpack.Decoder(int)


def bound_s(timeout_s: float) -> float:
    """How long an error may be held up to say more: little, where the caller had little patience."""
    return min(LONGEST_S, max(_SHORTEST_S, timeout_s / 4))


def describe_call(node: Runtime, peer: Peer | None, argument: bytes) -> bytes:
    """At the callee: what becomes of call number ``argument`` of ``peer``."""
    call_id = _read_number.decode(argument)
    executor = node.executor
    pool = PoolView(executor.size, executor.threads, executor.busy, executor.parked, executor.waiting)
    request = None if peer is None else node.server.find(peer, call_id)
    if request is None:
        return msgspec.msgpack.encode(CallState(None, pool))
    served = served_call(request)
    thread, at, waits_for = "", None, None
    if served.thread_id:
        for view in view_threads({served.thread_id}):
            thread, at = view.name, view.stack[0] if view.stack else None
        for call in node.calls.snapshot():
            if call.thread_id == served.thread_id:
                waits_for = outgoing_call(call)
    return msgspec.msgpack.encode(CallState(served, pool, thread, at, waits_for, node.state))


def say(worker: str, data: bytes, asked_s: float) -> str:
    """At the caller: what to add to the error."""
    if not data:
        return (
            f"{worker} did not say within {asked_s:.2g} s what it does with it: its process may be stopped, or busy in "
            "native code, or the network may be slow"
        )
    try:
        state = _read.decode(data)
    except (msgspec.DecodeError, ValueError):
        return ""
    served = state.served
    if served is None:
        return f"{worker} does not have it: either it never arrived there, or its answer is on the way"
    pool = state.pool
    if served.state == QUEUED and state.worker_state == STARTING:
        return (
            f"it has been waiting there for {served.for_s:.2f} s: {worker} is still starting, and serves calls when it "
            "is connected to everybody (`farcall stacks` says who is missing)"
        )
    if served.state == QUEUED:
        return (
            f"it has been waiting on {worker} for a thread for {served.for_s:.2f} s: {pool.busy - pool.parked} "
            f"functions hold the {pool.size} threads there, and {pool.queued} calls wait (num_worker_threads)"
        )
    if served.state == LATER:
        return (
            f"on {worker} the function has returned a future or coroutine, which is not done after {served.for_s:.2f} s"
        )
    text = f"{worker} has been running it for {served.for_s:.2f} s, on thread {state.thread}"
    if state.at is not None:
        text += f", now at {state.at.file}:{state.at.line} in {state.at.function}"
    if state.waits_for is not None:
        call = state.waits_for
        text += f", where it has waited {call.for_s:.2f} s for {call.to} to answer {call.function}()"
    return text + " (`farcall stacks` shows all workers)"
