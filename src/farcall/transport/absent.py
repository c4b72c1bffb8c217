"""The transport of a link that has had no connection yet: it takes nothing and brings nothing.

So a link is one thing from the moment a member is known: what is sent to it before it is connected waits, as it does
while a connection is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farcall.transport.interface import Buffer, Transport


class Absent(Transport):
    """No connection."""

    __slots__ = ("_closed", "kind")

    def __init__(self, kind: str = "absent") -> None:
        """``kind``: what it would have been."""
        self.kind: str = kind
        self._closed = False

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        return 0

    def receive_into(self, view: memoryview) -> int | None:
        return None

    def wait_readable(self, timeout_s: float) -> bool:
        return False

    def wait_writable(self, timeout_s: float) -> bool:
        return False

    def fileno(self) -> int | None:
        return None

    def watch(self, on_readable: Callable[[], None] | None, on_writable: Callable[[], None] | None) -> None:
        pass

    def end_sending(self) -> None:
        pass

    def interrupt(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True

    @property
    def closed(self) -> bool:
        return self._closed

    def describe(self) -> str:
        return "not connected yet"
