"""The base of transports over an inner transport (TLS, seals): it puts bytes into records, and delegates the rest.

A record is made once. While it is partly sent, its bytes are *pending*: `send` has returned 0, and its caller must
offer the same bytes again.
"""

from __future__ import annotations

from collections.abc import Callable

from farcall.transport.interface import Transport


class Layer(Transport):
    """One end of a connection over an inner transport. Mutable: the unsent rest of a record, and its pending bytes."""

    __slots__ = ("_inner", "_unsent", "kind", "peer_host", "pending_bytes")

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.kind: str = inner.kind
        self.peer_host: str = inner.peer_host
        self._unsent = memoryview(b"")
        self.pending_bytes: int = 0

    def _push(self) -> int:
        """Send the rest of the record; once all of it has left, its body counts as taken."""
        if self._unsent:
            self._unsent = self._unsent[self._inner.send((self._unsent,)) :]
            if self._unsent:
                return 0
        gone, self.pending_bytes = self.pending_bytes, 0
        return gone

    def wait_readable(self, timeout_s: float) -> bool:
        # Call the inner transport even with buffered bytes: it raises if this side has closed the connection.
        return self._inner.wait_readable(0.0 if self.buffered else timeout_s) or self.buffered

    @property
    def look(self) -> Callable[[], object]:
        # Bytes are buffered only by the thread that receives, which does not while it looks.
        return super().look if self.buffered else self._inner.look

    def wait_writable(self, timeout_s: float) -> bool:
        return self._inner.wait_writable(timeout_s)

    def silent_s(self) -> float:
        return self._inner.silent_s()

    def fileno(self) -> int | None:
        return self._inner.fileno()

    def end_sending(self) -> None:
        self._inner.end_sending()

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()

    @property
    def closed(self) -> bool:
        return self._inner.closed
