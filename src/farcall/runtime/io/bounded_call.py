"""Calls that may block for good, deaf to Ctrl-C, run so that their caller does not.

Seen with torch 2.13: connecting to a port where something other than a store listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from farcall.errors import InitError
from farcall.runtime.io.sigint import Gate

GRACE_S = 2.0
"""What a store that has stopped answering may take beyond its time."""
T = TypeVar("T")


class Unanswered(InitError):
    """It took longer than it may."""


def in_bounded_time(function: Callable[[threading.Event], T], timeout_s: float, place: str) -> T:
    """The result of ``function(cancelled)``, run on a thread of its own; raises what it raises, or ``Unanswered``.

    ``cancelled`` is set where nobody waits for it any more. ``place`` is the store's, for the error.
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
        # Ctrl-C: the others should learn it from us, if that takes no time.
        cancelled.set()
        done.wait(GRACE_S)
        raise
    if not answered:
        cancelled.set()
        raise Unanswered(
            f"the store at {place} does not answer. Check that its process is alive. If another program uses that "
            "port, choose another one (MASTER_PORT, or the url) for all workers"
        )
    thread.join()
    if failure:
        raise failure.pop()
    return result.pop()
