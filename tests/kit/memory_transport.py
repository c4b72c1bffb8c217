"""A transport with both ends in this process, without sockets or descriptors; ``memory:`` is its scheme.

Each direction is a bounded pipe, so a slow reader pushes back just as a kernel buffer does. Knobs make the
awkward cases common: ``largest_send`` and ``largest_receive`` force partial writes and reads. Hooks stand in
for polling; they run after the pipe's lock is released, on the thread that made the other end ready, so they
may call back in.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence

from farcall.transport.address import SCHEMES, Scheme
from farcall.transport.interface import (
    Buffer,
    DialRefused,
    Listener,
    ListenFailed,
    Transport,
    TransportBroken,
    TransportClosed,
)

DEFAULT_CAPACITY_BYTES = 256 * 1024
FRESH = "memory:"
"""The address of a listener that is given a name of its own."""


class _Pipe:
    """One direction. ``lock`` guards everything but the hooks, which are called without it."""

    __slots__ = (
        "capacity_bytes",
        "chunks",
        "filled_bytes",
        "lock",
        "on_readable",
        "on_writable",
        "reader_gone",
        "writer_done",
    )

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes: int = capacity_bytes
        self.lock: threading.Condition = threading.Condition()
        self.chunks: deque[memoryview] = deque()
        self.filled_bytes: int = 0
        self.writer_done: bool = False
        self.reader_gone: bool = False
        self.on_readable: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    def write(self, buffers: Sequence[Buffer], largest: int) -> int:
        """Copy in what there is room for; the caller holds ``lock``."""
        room = min(self.capacity_bytes - self.filled_bytes, largest)
        taken = 0
        for buffer in buffers:
            if taken == room:
                break
            part = memoryview(buffer).cast("B")[: room - taken]
            if len(part):
                self.chunks.append(memoryview(bytes(part)))
                taken += len(part)
        self.filled_bytes += taken
        return taken

    def read(self, view: memoryview, largest: int) -> int:
        """Copy out the bytes at hand; the caller holds ``lock``."""
        room = min(len(view), largest)
        taken = 0
        while taken < room and self.chunks:
            chunk = self.chunks[0]
            part = chunk[: room - taken]
            view[taken : taken + len(part)] = part
            taken += len(part)
            if len(part) == len(chunk):
                self.chunks.popleft()
            else:
                self.chunks[0] = chunk[len(part) :]
        self.filled_bytes -= taken
        return taken


class MemoryTransport(Transport):
    """One end of an in-memory pair; make both with ``memory_pair``."""

    __slots__ = ("_closed", "_incoming", "_name", "_outgoing", "largest_receive", "largest_send")

    kind = "memory"

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, name: str) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False
        self._name = name
        self.largest_send: int = 1 << 62
        self.largest_receive: int = 1 << 62

    def send(self, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> int:
        if descriptors:
            raise ValueError("a memory transport cannot carry descriptors")
        pipe = self._outgoing
        hook = None
        with pipe.lock:
            if self._closed:
                raise TransportClosed("cannot send: this side closed the memory connection")
            if pipe.reader_gone or pipe.writer_done:
                raise TransportBroken(f"cannot send over {self._name}: the stream has ended")
            was_empty = pipe.filled_bytes == 0
            taken = pipe.write(buffers, self.largest_send)
            if taken:
                pipe.lock.notify_all()
                hook = pipe.on_readable if was_empty else None
        if hook is not None:
            hook()
        return taken

    def receive_into(self, view: memoryview) -> int | None:
        pipe = self._incoming
        hook = None
        with pipe.lock:
            if self._closed and not pipe.chunks:
                raise TransportClosed("this side closed the memory connection")
            was_full = pipe.filled_bytes == pipe.capacity_bytes
            taken = pipe.read(view, self.largest_receive)
            if not taken and not pipe.writer_done:
                return None
            if taken:
                pipe.lock.notify_all()
                hook = pipe.on_writable if was_full else None
        if hook is not None:
            hook()
        return taken

    def wait_readable(self, timeout_s: float) -> bool:
        pipe = self._incoming
        with pipe.lock:
            return pipe.lock.wait_for(lambda: bool(pipe.chunks) or pipe.writer_done or self._closed, timeout_s)

    def wait_writable(self, timeout_s: float) -> bool:
        pipe = self._outgoing
        with pipe.lock:
            return pipe.lock.wait_for(
                lambda: pipe.filled_bytes < pipe.capacity_bytes or pipe.reader_gone or self._closed, timeout_s
            )

    def fileno(self) -> int | None:
        return None

    def watch(self, on_readable: Callable[[], None] | None, on_writable: Callable[[], None] | None) -> None:
        with self._incoming.lock:
            self._incoming.on_readable = on_readable
            readable = bool(self._incoming.filled_bytes) or self._incoming.writer_done
        with self._outgoing.lock:
            self._outgoing.on_writable = on_writable
            writable = self._outgoing.filled_bytes < self._outgoing.capacity_bytes
        if readable and on_readable is not None:
            on_readable()
        if writable and on_writable is not None:
            on_writable()

    def end_sending(self) -> None:
        pipe = self._outgoing
        with pipe.lock:
            pipe.writer_done = True
            pipe.lock.notify_all()
            hook = pipe.on_readable
        if hook is not None:
            hook()

    def interrupt(self) -> None:
        self._closed = True
        self.end_sending()
        pipe = self._incoming
        with pipe.lock:
            pipe.reader_gone = True
            pipe.lock.notify_all()
            hook = pipe.on_writable
            pipe.on_readable = None
        with self._outgoing.lock:
            self._outgoing.on_writable = None
        if hook is not None:
            hook()

    def close(self) -> None:
        pipe = self._incoming
        with pipe.lock:
            self._closed = True
            pipe.chunks.clear()
            pipe.filled_bytes = 0
            pipe.reader_gone = True
        self.interrupt()

    @property
    def closed(self) -> bool:
        return self._closed

    def describe(self) -> str:
        return self._name


def memory_pair(
    capacity_bytes: int = DEFAULT_CAPACITY_BYTES, name: str = "pair"
) -> tuple[MemoryTransport, MemoryTransport]:
    """Two connected ends; each direction holds at most ``capacity_bytes``."""
    if capacity_bytes < 1:
        raise ValueError("a pipe needs room for at least one byte")
    forth, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    return (
        MemoryTransport(back, forth, f"memory {name} (first end)"),
        MemoryTransport(forth, back, f"memory {name} (second end)"),
    )


# Names are process-wide, as ports are host-wide: the one table here plays the part of the kernel's.
_listeners: dict[str, MemoryListener] = {}
_listeners_lock = threading.Lock()


class MemoryListener(Listener):
    """A name in this process; ``memory:`` alone asks for a fresh one."""

    __slots__ = ("_on_acceptable", "_waiting", "address", "capacity_bytes")

    def __init__(self, address: str = FRESH, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        if address == FRESH:
            address += secrets.token_hex(8)
        self.address: str = address
        self.capacity_bytes: int = capacity_bytes
        self._waiting: deque[MemoryTransport] = deque()
        self._on_acceptable: Callable[[], None] | None = None
        with _listeners_lock:
            if address in _listeners:
                raise ListenFailed(f"cannot listen on {address}: the name is taken")
            _listeners[address] = self

    def accept(self) -> Transport | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def offer(self, transport: MemoryTransport) -> None:
        """Queue the far end of a new connection; called by the dialler."""
        self._waiting.append(transport)
        hook = self._on_acceptable
        if hook is not None:
            hook()

    def fileno(self) -> int | None:
        return None

    def watch(self, on_acceptable: Callable[[], None] | None) -> None:
        self._on_acceptable = on_acceptable
        if on_acceptable is not None and self._waiting:
            on_acceptable()

    def close(self) -> None:
        with _listeners_lock:
            if _listeners.get(self.address) is self:
                del _listeners[self.address]
        while self._waiting:
            self._waiting.popleft().close()


def dial_memory(address: str, timeout_s: float) -> MemoryTransport:
    """Connect to a listener of this process; there is nothing to wait for, so ``timeout_s`` is not used."""
    with _listeners_lock:
        listener = _listeners.get(address)
        if listener is None:
            raise DialRefused(f"cannot connect to {address}: nobody listens there")
        near, far = memory_pair(listener.capacity_bytes, address.removeprefix("memory:"))
    listener.offer(far)
    return near


SCHEMES["memory"] = Scheme(dial_memory, MemoryListener)
