"""What the calling thread may not do: wait in a destructor amid farcall's own code, run user code on the I/O thread.

A garbage collection may begin anywhere and run destructors of the program's, also where this thread holds a lock of
farcall's. A wait in there would wait for its own thread. So it raises if the collection interrupts farcall's machinery,
once its call is made. (A flag around each such section would raise less often, and cost every call more.)
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Protocol

from farcall.destructors import whole
from farcall.errors import RpcError


class ReadingLoop(Protocol):
    """The loop of an I/O thread."""


class _Reading(threading.local):
    """``loop``: that whose I/O thread this is. ``interrupted``: a garbage collection has begun on this thread, amid
    farcall's own code. It is the mark of the last one that had ended before; `is_interrupted` says whether this one
    still runs.
    """

    interrupted: object = None
    loop: ReadingLoop | None = None


reading: _Reading = _Reading()
_INTERRUPTIBLE = ("farcall.api", "farcall.node", "farcall.rpc.call", "farcall.rpc.future", "farcall.serialize")
"""Modules through which a call passes without a lock, and before it is a reader."""


_collections: dict[str, object] = {"stop": object()}
"""How the last garbage collection began and ended. Filled by C code, which no Ctrl-C can cut."""


@whole  # Python drops what a handler raises here
def _on_collection(
    phase: str,
    info: object,
    # Bound here: at the end of the interpreter the names of this module are gone, and collections go on.
    here: _Reading = reading,
    frame_of: Callable[[int], FrameType] = sys._getframe,
    library: frozenset[str] = sys.stdlib_module_names,
    interruptible: tuple[str, ...] = _INTERRUPTIBLE,
    collections: dict[str, object] = _collections,
) -> None:
    """Note whether a collection that begins on this thread interrupts farcall, called by the program or by a thread."""
    if phase != "start":
        return
    here.interrupted = None
    frame = frame_of(0).f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package == "farcall" and not module.startswith(interruptible):
            here.interrupted = collections["stop"]
            return
        if package != "farcall" and package not in library:
            return  # the program's own code
        frame = frame.f_back


_CALLBACKS: tuple[Callable[[str, dict[str, int]], object], ...] = (_collections.__setitem__, _on_collection)


def watch_collections() -> Callable[[], None]:
    """Note collections from now on, until what is returned is called; needed while there is a node."""
    gc.callbacks.extend(_CALLBACKS)

    def end() -> None:
        for callback in _CALLBACKS:
            gc.callbacks.remove(callback)

    return end


def in_event_loop() -> bool:
    """Does an asyncio event loop run on this thread? A wait here would hold up all tasks of that loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def may_wait() -> bool:
    """May the calling thread wait for a peer? Not the I/O thread, nor one that an event loop runs on, nor a destructor."""
    if reading.loop is not None or (reading.interrupted is not None and is_interrupted()):
        return False
    return asyncio._get_running_loop() is None


def is_reader() -> bool:
    """Is the calling thread the I/O thread of a node? Then it must run no user code."""
    return reading.loop is not None


def is_interrupted() -> bool:
    """Does a garbage collection run on this thread, amid farcall's own code? The caller is in a destructor, then."""
    if reading.interrupted is _collections["stop"]:
        return True
    reading.interrupted = None  # that collection is over
    return False


def stop_reading() -> None:
    """To be called by a thread about to block. Raises ``RpcError`` in a destructor that interrupts farcall itself."""
    if reading.interrupted is not None and is_interrupted():
        raise RpcError(
            "a destructor cannot wait for another worker here: the garbage collection that runs it interrupts farcall "
            "itself. Its call is made, but nobody gets the answer: use rpc_async in destructors"
        )
