"""Snapshots: the picture that each worker gives of its calls and threads.

Owns the shapes. `threads.py` takes snapshots, `answering.py` sends them, `troubles.py` reads them. A call looks alike
at both of its ends: the caller's `OutgoingCall` and the callee's `ServedCall` share the caller's name and the call's
number.
"""

from __future__ import annotations

import msgspec

__all__ = ["Frame", "OutgoingCall", "PoolView", "ServedCall", "ThreadView", "WorkerSnapshot", "function_title"]

QUEUED = "queued"
RUNNING = "running"
LATER = "answers later"
STARTING = "starting"
"""The state of a worker: calls wait until it is connected to everybody."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One line of a stack."""

    file: str
    line: int
    function: str


class ThreadView(msgspec.Struct, frozen=True, array_like=True):
    """A thread that serves a call or waits for one; or the main thread."""

    id: int
    name: str
    cpu_s: float
    """The time that it has computed in all; less than 0: not known."""
    position: int
    """Its place as a number: the same in two snapshots if it has not moved."""
    stack: list[Frame]
    """Innermost first, farcall's own frames at either end left out."""


class OutgoingCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of this worker that has not been answered yet."""

    call_id: int
    to: str
    function: str
    for_s: float
    timeout_s: float
    """0: none."""
    thread_id: int
    """The thread that waits for it now; 0: none."""


class ServedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call that this worker has not answered yet."""

    call_id: int
    caller: str
    function: str
    state: str
    """"queued", "running" or "answers later"."""
    for_s: float
    """The time in that state."""
    thread_id: int
    """The thread that runs it; 0: none."""


class PoolView(msgspec.Struct, frozen=True, array_like=True):
    """The threads for functions of one worker."""

    size: int
    threads: int
    busy: int
    """Inside functions, those that wait for calls included."""
    parked: int
    """Waiting for calls."""
    queued: int
    """Requests that no thread has taken."""


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
    """The number of calls that are not listed; the listed ones are the oldest."""
    served_left_out: int = 0
    unconnected: list[str] = []
    """While it starts: members that it has no connection to yet."""

    def thread(self, thread_id: int) -> ThreadView | None:
        """The thread of that number."""
        return next((thread for thread in self.threads if thread.id == thread_id), None)


def function_title(function: bytes, otherwise: str = "") -> str:
    """The name of a function as it travels; of pickled ones, ``otherwise``."""
    kind, name = function[:1], function[1:]
    if kind == b"p":
        return name.partition(b"\0")[2].decode(errors="replace")
    if kind in (b"o", b"b", b"s"):
        return name.decode(errors="replace")
    return otherwise or "(pickled function)"
