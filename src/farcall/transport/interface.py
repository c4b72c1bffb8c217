"""The whole I/O contract: the duties of a transport, and nothing about the meaning of its bytes.

A transport is an ordered, connected, duplex stream of bytes between two nodes. It never buffers: bytes that the kernel
does not take stay with the caller, which offers them again. It knows nothing of frames, tensors or threads.

=================  ======================================  ==========================================
method             result                                  would block
=================  ======================================  ==========================================
``send``           bytes taken, maybe fewer than offered   0
``receive_into``   bytes read; 0: the peer ended           None
``look()``         something true                          something false
``wait_readable``  True                                    False, after ``timeout_s``
``wait_writable``  True                                    False, after ``timeout_s``
=================  ======================================  ==========================================

Operating-system errors are translated once, here: ``TransportClosed`` (this side did it) or
``TransportBroken`` (the world did). One thread may receive while another sends. Two threads must not send at
once, nor receive at once; but any number may wait until ``send`` takes something.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

#: A waiting thread wakes up at least this often, to check deadlines and signals.
WAIT_SLICE_S = 0.25

#: The most descriptors one ``send`` may carry, and the most a peer may leave untaken before it is cut off.
MAX_DESCRIPTORS_PER_SEND = 8
MAX_DESCRIPTORS_UNTAKEN = 64


class TransportError(ConnectionError):
    """The root of all errors of transports."""


class TransportClosed(TransportError):
    """This side closed the transport before, or while, the operation ran."""


class TransportBroken(TransportError):
    """The peer, or something between, broke the connection; the message says how."""


class TransportForged(TransportBroken):
    """The received bytes are not those that the peer sent: a third party has tampered with the connection."""


class TlsFailed(TransportBroken):
    """The two ends could not agree on TLS, or one could not authenticate itself; the message says why."""


class NotEncrypted(TransportBroken):
    """The other end does not begin with TLS, as this one does: the connection is over, unless ``first_bytes`` are
    answered in the clear."""

    def __init__(self, first_bytes: bytes) -> None:
        super().__init__("the other end does not encrypt, and this one does")
        self.first_bytes = first_bytes


class DialFailed(TransportError):
    """No connection could be made to an address; the message says which and why."""


class DialUnanswered(DialFailed):
    """The host of an address does not answer, or no route leads to it."""


class DialRefused(DialFailed):
    """The host of an address refuses the connection: nobody listens there."""


class AcceptPostponed(TransportError):
    """This process, or the system, is out of descriptors or memory: the connection waits in the backlog."""


class ListenFailed(TransportError):
    """An address could not be listened on; the message says which and why."""


class Transport(ABC):
    """One end of an ordered, connected, duplex byte stream."""

    __slots__ = ("__weakref__",)

    #: "tcp", "unix" or "memory"
    kind: str
    #: True if ``send`` takes descriptors
    carries_descriptors: bool = False
    #: the numeric address of the peer's host, if a network lies between; else empty
    peer_host: str = ""
    #: True if a network lies between the two ends, on which third parties could read and change what passes
    needs_encryption: bool = False
    #: what only the two ends of an encrypted connection know of it: input to the proof of the handshake
    binding: bytes = b""
    #: the names in the peer's certificate, if the options bind names to certificates; else None
    peer_names: frozenset[str] | None = None
    #: why the peer's certificate is not that of the host that was dialled; empty: it is, or need not be
    wrong_host: str = ""
    #: bytes of a partly sent record: `send` has not counted them as taken, but they can no longer be withdrawn
    pending_bytes: int = 0
    #: bytes of an incomplete record, which cannot be delivered before more arrive
    held_bytes: int = 0
    #: True if ``receive_into`` has bytes that a poll of the descriptor does not report
    buffered: bool = False
    #: the id of the peer's process, if one kernel has both ends; else 0
    peer_process: int = 0
    #: False once a test has lost, repeated or reordered frames: then no later connection can resume this one
    resumable: bool = True

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        """Hand over the bytes of ``buffers`` in order; return how many were taken, 0 if it would block.

        Empty buffers are allowed. Descriptors travel with the first byte taken: if the result is 0 they were not
        sent, and the caller offers them again; if it is positive they were sent. The caller closes its own copies.
        """

    def send_bytes(self, data: bytes) -> int:
        """``send`` for one small message, the usual case."""
        return self.send((data,))

    @abstractmethod
    def receive_into(self, view: memoryview) -> int | None:
        """Fill (some of) ``view``; return how many bytes, 0 if the peer ended, None if it would block."""

    def receive_bytes_into(self, view: memoryview) -> int | None:
        """Like ``receive_into``, from a peer that is not authenticated yet: descriptors are dropped."""
        return self.receive_into(view)

    @abstractmethod
    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until ``receive_into`` has a result; False after ``timeout_s``.

        Reads no byte, so a signal may interrupt it without harm. A wait that also reads could lose bytes.
        """

    @property
    def look(self) -> Callable[[], object]:
        """A function like ``wait_readable(0)``, to be called again and again until something is received.

        That of a socket is compiled: a thread that busy-waits looks some twenty times for each answer. Only for the
        thread that receives. On a transport that this side has closed it returns something true, or raises.
        """
        return partial(self.wait_readable, 0.0)

    @abstractmethod
    def wait_writable(self, timeout_s: float) -> bool:
        """Wait until ``send`` takes something or fails; False after ``timeout_s``."""

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far, oldest first; the caller closes them.

        A descriptor arrives no later than the first byte of the ``send`` that carried it, in the order sent.
        So the decoder of the frame that announces a descriptor finds it here.
        """
        return []

    @abstractmethod
    def fileno(self) -> int | None:
        """The descriptor to poll; None if the hooks of ``watch`` report readiness instead."""

    def watch(self, on_readable: Callable[[], None] | None, on_writable: Callable[[], None] | None) -> None:
        """Set the hooks of a transport without descriptor; each runs on the thread that made the transport ready.

        A hook runs after every change from not ready to ready, and at once if the transport is ready now. Spurious
        runs are allowed.
        """
        raise NotImplementedError(f"a {self.kind} transport is polled by its descriptor")

    def silent_s(self) -> float:
        """How long the peer's host has left bytes unacknowledged, as observed since the first call.

        Its kernel acknowledges even for a stopped process. 0: nothing is unacknowledged, or one kernel has both ends.
        """
        return 0.0

    def connection(self, first_bytes: bytes) -> tuple[Any, bytes]:
        """What the core takes of this transport, whose handshake is over; and the bytes of frames that came already.

        The core has a descriptor of its own; this transport keeps its own, for questions and to end both.
        """
        descriptor = self.fileno()
        assert descriptor is not None
        return os.dup(descriptor), first_bytes

    @abstractmethod
    def end_sending(self) -> None:
        """End the sending direction; receiving goes on. Does nothing on an ended transport."""

    @abstractmethod
    def interrupt(self) -> None:
        """End both directions and wake up every thread that waits in this transport, for ever; ``close`` must follow.

        Bytes that arrived before can still be received, until ``close``; every other operation raises
        ``TransportClosed``. Safe from any thread. The descriptor stays open, so that its number cannot be reused
        under a thread that is about to read from it.
        """

    @abstractmethod
    def close(self) -> None:
        """End both directions and close the descriptor. Idempotent."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once this side called ``interrupt`` or ``close``."""

    @abstractmethod
    def describe(self) -> str:
        """Both ends, for people, as in ``tcp 10.0.0.1:4000 -> 10.0.0.2:5000``."""


class Absent(Transport):
    """The transport of a link that has had no connection yet: it sends and receives nothing.

    So a link can exist from the moment a member is known, and its frames wait as they do while a connection is broken.
    """

    __slots__ = ("_closed", "kind")

    def __init__(self, kind: str = "absent") -> None:
        """``kind``: the kind of the future connection."""
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


class Listener(ABC):
    """An address on which this node accepts connections."""

    __slots__ = ("__weakref__",)

    #: The address for ``dial``, with the real port even if port 0 was requested.
    address: str

    @abstractmethod
    def accept(self) -> Transport | None:
        """Accept the next connection; None if none is waiting. Never blocks."""

    @abstractmethod
    def fileno(self) -> int | None:
        """The descriptor to poll for reading; None if the hook of ``watch`` reports connections instead."""

    def watch(self, on_acceptable: Callable[[], None] | None) -> None:
        """Set the hook of a listener without descriptor."""
        raise NotImplementedError("this listener is polled by its descriptor")

    @abstractmethod
    def close(self) -> None:
        """Stop listening and leave nothing behind. Idempotent."""
