"""The whole I/O contract: what a way for bytes must do, and nothing about what the bytes mean.

A transport is an ordered, connected, duplex stream of bytes between two nodes. It never buffers: what the
kernel (or the in-memory pipe) does not take stays with the caller, who offers the same bytes again. It knows nothing of
frames, tensors or threads.

=================  ======================================  ==========================================
method             result                                  would block
=================  ======================================  ==========================================
``send``           bytes taken, maybe fewer than offered   0
``receive_into``   bytes read; 0: the peer ended           None
``wait_readable``  True                                    False, after ``timeout_s``
``wait_writable``  True                                    False, after ``timeout_s``
=================  ======================================  ==========================================

Operating-system errors are translated once, here: ``TransportClosed`` (this side did it) or
``TransportBroken`` (the world did). One thread may receive while another sends; two threads must not do the
same of these at once, but any number may wait until ``send`` takes something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

#: A waiting thread comes back at least this often, to look at deadlines and signals.
WAIT_SLICE_S = 0.25

#: The most descriptors one ``send`` may carry, and the most a peer may leave untaken before it is cut off.
MAX_DESCRIPTORS_PER_SEND = 8
MAX_DESCRIPTORS_UNTAKEN = 64


class TransportError(ConnectionError):
    """Root of what a transport raises."""


class TransportClosed(TransportError):
    """This side closed the transport before, or while, the operation ran."""


class TransportBroken(TransportError):
    """The peer, or something between, broke the connection; the message says how."""


class TransportForged(TransportBroken):
    """Bytes came that the other end did not send like this: a third party is in between."""


class DialFailed(TransportError):
    """No connection could be made to an address; the message says which and why."""


class DialUnanswered(DialFailed):
    """The host of an address does not answer, or no way leads there."""


class DialRefused(DialFailed):
    """The host of an address says that nobody listens there."""


class AcceptPostponed(TransportError):
    """This process, or the system, is out of descriptors or memory: a connection waits to be accepted, and must."""


class ListenFailed(TransportError):
    """An address could not be listened on; the message says which and why."""


class Transport(ABC):
    """One end of an ordered, connected, duplex byte stream."""

    __slots__ = ("__weakref__",)

    #: "tcp", "unix" or "memory"
    kind: str
    #: True where ``send`` takes descriptors
    carries_descriptors: bool = False
    #: the numeric address of the other end's host, where there is a network between; else empty
    peer_host: str = ""
    #: True where a network is between the two ends, and others may write to the connection
    needs_sealing: bool = False
    #: what both ends have seen of each other, where they have, to be part of what they prove
    binding: bytes = b""
    #: the names that the other end may have, where it has shown them in a certificate and that is asked for
    peer_names: frozenset[str] | None = None
    #: bytes that were offered, not taken, and will leave all the same: they are part of something that has begun
    pending_bytes: int = 0
    #: bytes that came and cannot be given out before more do
    held_bytes: int = 0
    #: True where ``receive_into`` has bytes of which a poll of the descriptor says nothing
    buffered: bool = False
    #: False where a test looks at whole messages: then large ones do not travel in chunks
    takes_chunks: bool = True
    #: the id of the process at the other end, where one kernel has both ends; else 0
    peer_process: int = 0
    #: False once frames were lost, repeated or reordered on their way, as tests do: then both ends cannot go on where
    #: this connection breaks off
    resumable: bool = True

    @abstractmethod
    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        """Hand over the bytes of ``buffers`` in order; return how many were taken, 0 if it would block.

        Empty buffers are allowed. Descriptors travel with the first byte taken: when the result is 0 they did
        not go, and the caller offers them again; when it is positive they went and stay the caller's to
        close.
        """

    def send_bytes(self, data: bytes) -> int:
        """``send`` for one small message: what most calls are."""
        return self.send((data,))

    @abstractmethod
    def receive_into(self, view: memoryview) -> int | None:
        """Fill (some of) ``view``; return how many bytes, 0 if the peer ended, None if it would block."""

    def receive_bytes_into(self, view: memoryview) -> int | None:
        """Like ``receive_into``, from a peer that has proved nothing: descriptors that come along are dropped."""
        return self.receive_into(view)

    @abstractmethod
    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until ``receive_into`` has something to say; False after ``timeout_s``. Takes no byte.

        A signal may interrupt this wait without harm, which cannot be said of a wait that also reads.
        """

    @abstractmethod
    def wait_writable(self, timeout_s: float) -> bool:
        """Wait until ``send`` takes something or fails; False after ``timeout_s``."""

    def take_descriptors(self) -> list[int]:
        """Descriptors received so far, oldest first; they become the caller's to close.

        A descriptor is here no later than the first byte of the ``send`` that carried it, in the order sent.
        So the decoder of the frame that announces a descriptor finds it here.
        """
        return []

    @abstractmethod
    def fileno(self) -> int | None:
        """The descriptor to poll, or None: then ``on_readable`` and ``on_writable`` tell."""

    def watch(self, on_readable: Callable[[], None] | None, on_writable: Callable[[], None] | None) -> None:
        """Set the hooks of a transport without descriptor; each runs on the thread that made it ready.

        A hook runs after every change from not ready to ready, and at once if it is ready now. Spurious runs
        are allowed.
        """
        raise NotImplementedError(f"a {self.kind} transport is polled by its descriptor")

    def silent_s(self) -> float:
        """How long the host at the other end has left unanswered what was sent to it, as seen since the first look.

        Its kernel answers, whatever its processes do. 0 where it has nothing to answer, or one kernel has both ends.
        """
        return 0.0

    @abstractmethod
    def end_sending(self) -> None:
        """Tell the peer that no more bytes come; receiving goes on. Does nothing on an ended transport."""

    @abstractmethod
    def interrupt(self) -> None:
        """Wake every thread inside this transport for good, and end both directions; ``close`` must follow.

        What came before can still be received, until ``close``: then ``receive_into`` raises ``TransportClosed``, as
        every other operation does at once. Safe from any thread. The descriptor stays reserved, so its number cannot
        be reused under a thread that is about to read from it.
        """

    @abstractmethod
    def close(self) -> None:
        """End both directions and give back the descriptor. Idempotent."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once this side called ``interrupt`` or ``close``."""

    @abstractmethod
    def describe(self) -> str:
        """For people: both ends, as in ``tcp 10.0.0.1:4000 -> 10.0.0.2:5000``."""


class Absent(Transport):
    """The transport of a link that has had no connection yet: it takes nothing and brings nothing.

    So a link is one thing from the moment a member is known: what is sent to it before it is connected waits, as it
    does while a connection is broken.
    """

    __slots__ = ("_closed", "kind")

    def __init__(self, kind: str = "absent") -> None:
        """``kind``: that of the connection to be."""
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
    """A place others can dial."""

    __slots__ = ("__weakref__",)

    #: What to give to ``dial``; the port is the real one even if any port was asked for.
    address: str

    @abstractmethod
    def accept(self) -> Transport | None:
        """The next connection, or None if there is none now; never blocks."""

    @abstractmethod
    def fileno(self) -> int | None:
        """The descriptor to poll for reading, or None: then ``watch`` tells."""

    def watch(self, on_acceptable: Callable[[], None] | None) -> None:
        """Set the hook of a listener without descriptor."""
        raise NotImplementedError("this listener is polled by its descriptor")

    @abstractmethod
    def close(self) -> None:
        """Stop listening and leave nothing behind. Idempotent."""
