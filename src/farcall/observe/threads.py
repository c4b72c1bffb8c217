"""A snapshot of this process's node: what its threads are doing at this moment.

Runs on the I/O thread, in some hundred microseconds, and takes no lock that a user function could hold: so it works
when every worker is busy, blocked or in a deadlock. It runs no code of the user's either (no ``repr``), and reads no
source file.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from time import monotonic, perf_counter
from types import FrameType

from farcall.observe.snapshot import (
    LATER,
    QUEUED,
    RUNNING,
    STARTING,
    Frame,
    OutgoingCall,
    PoolView,
    ServedCall,
    ThreadView,
    WorkerSnapshot,
    function_title,
)
from farcall.runtime.calls.pending import PendingCall, name_of
from farcall.runtime.calls.serving import Request
from farcall.runtime.node import Node

__all__ = ["outgoing_call", "served_call", "take_snapshot", "view_threads"]

MOST_CALLS = 1000
MOST_FRAMES = 40
MOST_MEMBERS = 100
_OURS = str(Path(__file__).parent.parent) + os.sep
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def take_snapshot(node: Node) -> WorkerSnapshot:
    """What ``node`` is doing now."""
    pending = node.calls.snapshot()
    active = node.server.active
    calls = [outgoing_call(call) for call in pending[:MOST_CALLS]]
    served = [served_call(request) for request in active[:MOST_CALLS]]
    involved = {call.thread_id for call in calls} | {call.thread_id for call in served}
    main = threading.main_thread().ident
    if main is not None:
        involved.add(main)
    executor = node.executor
    return WorkerSnapshot(
        worker=node.info.name,
        rank=node.info.id,
        process_id=os.getpid(),
        host=socket.gethostname(),
        state=node.state,
        pool=PoolView(executor.size, executor.threads, executor.busy, executor.parked, executor.waiting),
        calls=calls,
        served=served,
        threads=view_threads(involved),
        calls_left_out=len(pending) - len(calls),
        served_left_out=len(active) - len(served),
        unconnected=_unconnected(node) if node.state == STARTING else [],
    )


def _unconnected(node: Node) -> list[str]:
    connected = {peer.info.id for peer in node.others()} | {node.info.id}
    return [member.name for member in node.membership.members if member.rank not in connected][:MOST_MEMBERS]


def outgoing_call(call: PendingCall) -> OutgoingCall:
    """A call of ours, in words."""
    for_s = monotonic() - call.started_at
    return OutgoingCall(call.call_id, call.peer.info.name, name_of(call.what), for_s, call.timeout_s, call.thread_id)


def served_call(request: Request) -> ServedCall:
    """A call that we serve, in words."""
    now = perf_counter()
    if request.deferred:
        state, since = LATER, request.started_at
    elif request.thread_id:
        state, since = RUNNING, request.started_at or now
    else:
        state, since = QUEUED, request.queued_at or now
    frame = request.frame
    return ServedCall(
        call_id=frame.call_id,
        caller=request.peer.info.name,
        function=function_title(frame.function, request.function_name),
        state=state,
        for_s=max(0.0, now - since),
        thread_id=request.thread_id if state == RUNNING else 0,
    )


def view_threads(wanted: Collection[int]) -> list[ThreadView]:
    """The live threads among ``wanted``."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    views = []
    for thread_id, frame in sys._current_frames().items():
        if thread_id in wanted:
            thread = threads.get(thread_id)
            views.append(
                ThreadView(
                    id=thread_id,
                    name=thread.name if thread is not None else f"thread {thread_id}",
                    cpu_s=_cpu_s(thread.native_id if thread is not None else None),
                    position=_position(frame),
                    stack=_stack(frame),
                )
            )
    return views


def _position(frame: FrameType | None) -> int:
    """A number that changes when the thread goes on; small enough for msgpack."""
    places: list[tuple[int, int]] = []
    while frame is not None and len(places) < MOST_FRAMES:
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places)) & 0x7FFF_FFFF_FFFF_FFFF


def _stack(frame: FrameType | None) -> list[Frame]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < 2 * MOST_FRAMES:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    while frames and _is_plumbing(frames[-1]):
        frames.pop()
    inner = 0
    while inner < len(frames) and frames[inner].file.startswith(_OURS):
        inner += 1
    # A thread that is in nothing but farcall's own code (fetching a value, say) is there, all the same.
    return (frames[inner:] or frames)[:MOST_FRAMES]


def _is_plumbing(frame: Frame) -> bool:
    """The outer end of a worker's stack: what every one of them has."""
    return frame.file.startswith(_OURS) or frame.file == threading.__file__


def _cpu_s(native_id: int | None) -> float:
    if native_id is None:
        return -1.0
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_bytes()
        fields = stat.rpartition(b") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return -1.0  # no such file here, or it ended this moment
