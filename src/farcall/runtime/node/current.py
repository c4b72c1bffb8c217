"""The runtimes of this process: that of each thread, that of `init_rpc`, and all that a forked child closes.

A thread that runs a function for a node, or an I/O thread, works for that node; every other thread works for the one in
`slot`, which `farcall.api` fills. Each thread sets and reads its own entry; the slot changes under its lock; threads
that start and end runtimes change the set of started ones.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from farcall.errors import NotInitialized

if TYPE_CHECKING:
    from farcall.runtime.node.runtime import Runtime


class Slot:
    """The runtime that `init_rpc` made, if any."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.runtime: Runtime | None = None
        self.was_filled: bool = False
        self.why_none: str = "init_rpc has not been called in this process"

    def succeed(self, expelled: Runtime, successor: Runtime) -> None:
        """Hold ``successor`` if this slot held ``expelled``."""
        with self.lock:
            if self.runtime is expelled:
                self.runtime = successor

    def clear(self, why: str) -> None:
        """Hold no runtime from now on; errors tell ``why``."""
        self.runtime, self.was_filled, self.why_none = None, True, why


class _Thread(threading.local):
    runtime: Runtime | None = None


class HasRuntime(Protocol):
    """A `farcall.Node`, as the layers below it see it."""

    @property
    def _runtime(self) -> Runtime: ...


slot: Slot = Slot()
_thread = _Thread()
STARTED: weakref.WeakSet[Runtime] = weakref.WeakSet()
"""The runtimes of this process that have not ended; in a forked child they are the parent's."""


_Begin = Callable[[], Callable[[], object]]
"""Makes a change of the process itself (a hook of Python's, a method of torch's), and returns what takes it back."""
_begins: list[_Begin] = []
_ends: list[Callable[[], object]] = []
"""Of the changes in force: from the start of the first node to the end of the last."""
_first_and_last = threading.Lock()


def while_there_are_nodes(begin: _Begin) -> None:
    """Call ``begin`` when this process has its first node, perhaps now; and what that returns when it has none."""
    with _first_and_last:
        _begins.append(begin)
        if STARTED:
            _ends.append(begin())


def has_started(runtime: Runtime) -> None:
    """A forked child closes ``runtime`` from now on."""
    with _first_and_last:
        is_first = not STARTED
        STARTED.add(runtime)
        if is_first:
            for begin in _begins:
                _ends.append(begin())


def has_ended(runtime: Runtime) -> None:
    """The opposite of `has_started`; again is no error."""
    with _first_and_last:
        was_there = runtime in STARTED
        STARTED.discard(runtime)
        if was_there and not STARTED:
            while _ends:
                _ends.pop()()


def current_runtime() -> Runtime:
    """The runtime of the node that `init_rpc` made; inside a function that a node serves, of that node."""
    runtime = _thread.runtime or slot.runtime
    if runtime is None:
        raise NotInitialized(
            "RPC has not been initialized. Current RPC agent is not set! Did you initialize the RPC framework by "
            f"init_rpc? ({slot.why_none})"
        )
    return runtime


def runtime_of(node: HasRuntime | None) -> Runtime:
    """The runtime of ``node``; None: the current one."""
    return current_runtime() if node is None else node._runtime


def runtime_of_thread() -> Runtime | None:
    """The runtime of the node that the calling thread works for, if it works for one."""
    return _thread.runtime


def work_for(runtime: Runtime | None) -> None:
    """The calling thread works for this node from now on; None: for none."""
    _thread.runtime = runtime


def _after_fork() -> None:
    """A forked child is no member: threads and connections belong to the parent."""
    global _first_and_last
    _first_and_last = threading.Lock()
    work_for(None)
    for started in list(STARTED):
        started.ending.close_after_fork()
        has_ended(started)
    slot.lock = threading.Lock()
    if slot.runtime is not None:
        slot.clear("this process was forked from a worker; call init_rpc here to make it a worker of its own")
        slot.was_filled = False  # by the parent: the child itself has shut nothing down


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
