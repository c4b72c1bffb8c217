"""Snapshots: the calls and threads of a worker at one moment.

Owns the shapes, and how a snapshot is taken: on the I/O thread, in some hundred microseconds, without a lock that a
user function could hold. So it works even if every thread is busy, blocked or in a deadlock. It runs no user code
either (no ``repr``), and reads no source file. `answering.py` sends snapshots, `troubles.py` reads them.

The two ends of a call can be matched: the caller's `OutgoingCall` and the callee's `ServedCall` share the caller's
name and the call's number.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from time import monotonic, perf_counter
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from farcall.core.contract import CoreError
from farcall.imports import current_frames
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.calls.serving import Request
from farcall.runtime.calls.turns import Turns
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import UNNAMED, name_of
from farcall.serialize.functions import BY_VALUE, path_of

if TYPE_CHECKING:
    from farcall.rpc.batch_queue import RunningBatch
    from farcall.rpc.stream_reading import Incoming
    from farcall.rpc.stream_writing import Writer

MOST_CALLS = 1000
MOST_FRAMES = 40
MOST_MEMBERS = 100
_MOST_CALLERS = 3
_OUTGOING = "farcall.outgoing"
_OURS = str(Path(__file__).parent.parent) + os.sep

QUEUED = "queued"
RUNNING = "running"
LATER = "answers later"
STARTING = "starting"
"""The state of a worker that queues calls until it is connected to all members."""


class StackLine(msgspec.Struct, frozen=True, array_like=True):
    """One line of a stack."""

    file: str
    line: int
    function: str


class ThreadView(msgspec.Struct, frozen=True, array_like=True):
    """A thread that serves or awaits a call; or the main thread."""

    id: int
    name: str
    cpu_s: float
    """Its processor time in all; less than 0: not known."""
    position: int
    """Its place in the code as a number: equal in two snapshots if the thread has not moved."""
    stack: list[StackLine]
    """Innermost first, without farcall's own frames at either end."""


class OutgoingCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of this worker that has not been answered yet."""

    call_id: int
    to: str
    function: str
    for_s: float
    """How long its answer has been waited for; of a stream, its next item."""
    timeout_s: float
    """0: none."""
    thread_id: int
    """The thread that waits for the answer; 0: none."""
    progress: str = ""
    """Of a stream, in words."""

    @property
    def title(self) -> str:
        """The function, and how far it is."""
        return self.function + self.progress


class ServedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that this worker has not answered yet."""

    call_id: int
    caller: str
    function: str
    state: str
    """"queued", "running" or "answers later"."""
    for_s: float
    """How long it has been in that state."""
    thread_id: int
    """The thread that runs it; 0: none."""
    behind: ServedCall | None = None
    """A queued call of a serial object: the call that has the turn. Without a function if no call has it."""
    waiting: int = 0
    """How many calls of its object wait for the turn, if this one does."""
    progress: str = ""
    """Of a stream, in words."""

    @property
    def title(self) -> str:
        """The function, and how far it is."""
        return self.function + self.progress


class PoolView(msgspec.Struct, frozen=True, array_like=True):
    """The thread pool that runs the functions of one worker."""

    size: int
    threads: int
    busy: int
    """Threads inside functions, including those that wait for calls."""
    parked: int
    """Threads inside functions that wait for calls."""
    queued: int
    """Requests that no thread has taken yet."""


class WorkerSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The calls and threads of one worker at one moment."""

    worker: str
    rank: int
    process_id: int
    host: str
    state: str
    pool: PoolView
    calls: list[OutgoingCall]
    served: list[ServedCall]
    threads: list[ThreadView]
    calls_left_out: int = 0
    """The number of calls that are not listed; the listed calls are the oldest."""
    served_left_out: int = 0
    unconnected: list[str] = []
    """While the worker starts: members to which it has no connection yet."""

    def thread(self, thread_id: int) -> ThreadView | None:
        """The thread with that id, if it is in the snapshot."""
        return next((thread for thread in self.threads if thread.id == thread_id), None)


_OWNERS = "farcall.rpc.owned_values"
_OF_OWNERS = {"fetch": "to_here"}
"""Internal functions of owners, and the method of references that each implements."""


def function_title(function: bytes, otherwise: str = "") -> str:
    """The name of a function as its caller wrote it; for a pickled function, ``otherwise``."""
    kind, name = function[:1], function[1:]
    if kind in (b"p", BY_VALUE):
        module, _, path = path_of(function).partition("\0")
        return f"rref.{_OF_OWNERS.get(path, path).removeprefix('methods.of_')}" if module == _OWNERS else path
    if kind in (b"o", b"b", b"s", UNNAMED):
        return name.decode(errors="replace")
    return otherwise or "(pickled function)"


def take_snapshot(node: Runtime) -> WorkerSnapshot:
    """Take a snapshot of ``node``."""
    from farcall.rpc.batches import Batches  # nodes start without these: loaded by the first snapshot
    from farcall.rpc.node_streams import Streams

    pending = node.calls.snapshot()
    active = node.server.active
    calls = [outgoing_call(call) for call in pending[:MOST_CALLS]]
    everything = [*map(served_call, active[:MOST_CALLS]), *queued_calls(node)]
    served = everything[:MOST_CALLS]
    calls_left_out = len(pending) - len(calls)
    served_left_out = max(0, len(active) - MOST_CALLS) + len(everything) - len(served)
    batches = node.part_if_made(Batches)
    if batches is not None:
        served += [_running_batch(batch) for batch in list(batches.running.values())]
    streams = node.part_if_made(Streams)
    if streams is not None:
        calls += [_read_stream(reader) for reader in streams.waiting_readers()]
        served += [_written_stream(writer) for writer in streams.running_writers()]
    involved = {call.thread_id for call in calls} | {call.thread_id for call in served}
    main = threading.main_thread().ident
    if main is not None:
        involved.add(main)
    return WorkerSnapshot(
        worker=node.info.name,
        rank=node.info.id,
        process_id=os.getpid(),
        host=socket.gethostname(),
        state=node.state,
        pool=pool_view(node),
        calls=calls,
        served=served,
        threads=view_threads(involved),
        calls_left_out=calls_left_out,
        served_left_out=served_left_out,
        unconnected=_unconnected(node) if node.state == STARTING else [],
    )


def pool_view(node: Runtime) -> PoolView:
    """The state of the thread pool of ``node``."""
    executor = node.executor
    return PoolView(executor.size, executor.threads, executor.busy, executor.parked, executor.waiting)


def _unconnected(node: Runtime) -> list[str]:
    connected = {peer.info.id for peer in node.others()} | {node.info.id}
    return [member.name for member in node.membership.members if member.rank not in connected][:MOST_MEMBERS]


def outgoing_call(call: PendingCall) -> OutgoingCall:
    """The view of a call that this node makes."""
    name, timeout_s = name_of(call.what), 0.0 if call.timeout_s == NEVER else call.timeout_s
    peer, thread_id, progress = call.peer.info.name, call.thread_id, call.progress()
    return OutgoingCall(call.call_id, peer, name, call.waited_s(monotonic()), timeout_s, thread_id, progress)


def served_call(request: Request) -> ServedCall:
    """The view of a call that this node serves."""
    now = perf_counter()
    if request.deferred:
        state, since = LATER, request.started_at
    elif request.thread_id:
        state, since = RUNNING, request.started_at or now
    else:
        state, since = QUEUED, request.queued_at or now
    frame = request.frame
    turns: Turns | None = frame.turns if state == QUEUED else None
    behind: ServedCall | None = None
    if turns is not None and (holder := turns.holder) is not request:
        behind = served_call(holder) if isinstance(holder, Request) else ServedCall(0, "", "", RUNNING, 0.0, 0)
    return ServedCall(
        call_id=frame.call_id,
        caller=request.peer.info.name,
        function=function_title(frame.function, request.function_name),
        state=state,
        for_s=max(0.0, now - since),
        thread_id=request.thread_id if state == RUNNING else 0,
        behind=behind,
        waiting=0 if turns is None or behind is None else turns.waiting,
        progress=request.progress(),
    )


def queued_calls(node: Runtime) -> list[ServedCall]:
    """The calls that no worker has taken yet: of them only the core knows."""
    peers, now = node.dispatcher.peers, monotonic()
    try:
        queued = node.executor.core.queued()
    except CoreError:
        return []  # the node has ended
    return [
        ServedCall(one.number, peers[one.link].info.name, function_title(one.function), QUEUED, now - one.at, 0)
        for one in queued
        if one.link in peers
    ]


def _running_batch(batch: RunningBatch) -> ServedCall:
    """The view of a batch, which belongs to several callers; the calls in it are listed as answered later."""
    callers = ", ".join(batch.callers[:_MOST_CALLERS]) + (" and others" if len(batch.callers) > _MOST_CALLERS else "")
    state = RUNNING if batch.thread_id else LATER
    return ServedCall(0, callers, batch.title, state, monotonic() - batch.began_at, batch.thread_id)


# The two ends of an outgoing stream, as a call and its callee. Streams have numbers of their own: negative, they differ
# from those of calls.


def _read_stream(reader: Incoming) -> OutgoingCall:
    """The view of a function's wait for the next item of an outgoing stream."""
    now, timeout_s = monotonic(), reader.node.timeout_s
    for_s = now - (reader.waits_since or now)  # the wait may have just ended
    return OutgoingCall(-reader.number, reader.peer.info.name, _OUTGOING, for_s, timeout_s, reader.thread_id)


def _written_stream(writer: Writer) -> ServedCall:
    """The view of the thread that makes the items of an outgoing stream."""
    for_s, progress = monotonic() - writer.began_at, f" (stream, {writer.describe()})"
    peer = writer.peer.info.name
    return ServedCall(-writer.number, peer, _OUTGOING, RUNNING, for_s, writer.thread_id, progress=progress)


def view_threads(wanted: Collection[int]) -> list[ThreadView]:
    """The live threads among ``wanted``."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    views = []
    for thread_id, frame in current_frames().items():
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
    """A number that changes when the thread moves; small enough for msgpack."""
    places: list[tuple[int, int]] = []
    while frame is not None and len(places) < MOST_FRAMES:
        places.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places)) & 0x7FFF_FFFF_FFFF_FFFF


def _stack(frame: FrameType | None) -> list[StackLine]:
    frames: list[StackLine] = []
    while frame is not None and len(frames) < 2 * MOST_FRAMES:
        code = frame.f_code
        frames.append(StackLine(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    # The outer end of every stack is the same: farcall's executor, called by threading.
    while frames and (frames[-1].file.startswith(_OURS) or frames[-1].file == threading.__file__):
        frames.pop()
    inner = 0
    while inner < len(frames) and frames[inner].file.startswith(_OURS):
        inner += 1
    # If a stack has only farcall's own frames (the thread fetches a value, say), show those.
    return (frames[inner:] or frames)[:MOST_FRAMES]


def _cpu_s(native_id: int | None) -> float:
    if native_id is None or sys.platform != "linux":
        return -1.0
    try:
        # The kernel's number for the clock of a thread. /proc counts in ticks of 10 ms: hundreds of calls fit into one.
        return time.clock_gettime((~native_id << 3) | 6)
    except OSError:
        return -1.0  # the thread has just ended
