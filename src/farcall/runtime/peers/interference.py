"""The place where tests interpose themselves between a node and its connections.

`farcall.testing.faults` installs an `Interference` here. A node looks for one when it makes its links, and passes every
connection through it, and makes one to itself, which it has no other need of; no other part of the runtime knows of
faults.

A module-level list, not an option: a fault test must not change the options of the program under test.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from farcall.transport.interface import Transport


class Interference(Protocol):
    """A wrapper of transports; `farcall.testing.faults.Faults` is one."""

    def wrap_transport(
        self, transport: Transport, here: str, there: str, fail_call: Callable[[int, str], None]
    ) -> Transport:
        """The transport to use instead. ``fail_call(call_id, why)`` fails a call whose request was not sent."""


_installed: list[tuple[Interference, Collection[str]]] = []


@contextmanager
def interfering(interference: Interference, workers: Collection[str]) -> Iterator[None]:
    """Give ``interference`` to the nodes that start inside the block: those of ``workers``, or all if it is empty."""
    entry = (interference, workers)
    _installed.append(entry)
    try:
        yield
    finally:
        _installed.remove(entry)  # not pop(): blocks on several threads may end in any order


def find_interference(worker: str) -> Interference | None:
    """The interference installed last for a node of this name; None outside of tests."""
    for interference, workers in reversed(_installed):
        if not workers or worker in workers:
            return interference
    return None
