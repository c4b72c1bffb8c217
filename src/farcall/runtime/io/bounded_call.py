"""Calls that may block for ever, deaf to Ctrl-C, run on another thread so that their caller does not.

Seen with torch 2.13: a store's client connects to a port where something other than a store listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from farcall.errors import InitError
from farcall.runtime.io.sigint import Gate

GRACE_S = 2.0
"""How much longer than its timeout a store that has stopped answering may take."""
T = TypeVar("T")


class Unanswered(InitError):
    """The store at ``place`` did not answer in time."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"the store at {place} does not answer. Check that its process is alive; if another program uses that "
            "port, choose another one (MASTER_PORT, or the url) for all workers. A very busy machine or file system "
            "needs a longer start_timeout_s"
        )


def in_bounded_time(function: Callable[[threading.Event], T], timeout_s: float, place: str) -> T:
    """The result of ``function(cancelled)``, run on its own thread; raises the function's error, or ``Unanswered``.

    ``cancelled`` is set once nobody waits for the result. ``place`` is the store's address, for the error.
    """
    cancelled = threading.Event()
    done = Gate()
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function(cancelled))
        except BaseException as error:
            failure.append(error)
        finally:
            done.open()

    thread = threading.Thread(target=run, name="farcall-rendezvous", daemon=True)
    try:
        thread.start()
        answered = done.wait(max(0.0, timeout_s) + GRACE_S)
    except BaseException:
        # Ctrl-C: give the function a moment to tell the other members.
        cancelled.set()
        done.wait(GRACE_S)
        raise
    if not answered:
        cancelled.set()
        raise Unanswered(place)
    thread.join()
    if failure:
        raise failure.pop()
    return result.pop()
