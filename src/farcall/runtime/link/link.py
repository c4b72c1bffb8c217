"""The link to one peer, over successive connections: bytes out of many threads, frames in for one.

Owns what becomes of a link whose connection breaks; `receive.py` is its reading half, `send.py` its writing half.
Says ``on_broken`` once.

    state  event                                         becomes
    up     an error, or the end of the stream            down: small frames queue up, who has a large one waits
    up     `break_off`: the peer comes back already      the same
    down   ``on_interrupted`` says False (I/O thread)    dead: ``on_broken`` is told
    down   `attach`: another connection (I/O thread)     up: goes on where the peer's count says (protocol/session.py)
    down   `connect`: the first connection               up
    any    `die`; a frame that is none; `abort`          dead
    any    `close`                                       dead, and nobody is told

A link begins up, or down if its transport is `Absent`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.frames import (
    CARRIES_DESCRIPTOR,
    CONTROL,
    Allocate,
    Frame,
    FrameDecoder,
    FrameError,
    allocate_plainly,
)
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import reading
from farcall.runtime.link.receive import Incoming
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import Absent, Transport

_NOTHING_COMES = FrameDecoder(allocate_plainly)
"""The decoder of all dead links: one may have a quarter of a MiB, and the dead are remembered by who asks for them."""


class Link(Incoming):
    """The way to one peer."""

    __slots__ = (
        "_broken",
        "_detached",
        "_final",
        "_on_broken",
        "_on_interrupted",
        "_reason",
        "_settled",
        "_told",
        "incarnation",
        "never_sent",
        "peer",
    )

    def __init__(
        self,
        peer: WorkerInfo,
        transport: Transport,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        on_broken: Callable[[str], None],
        backlog_limit_bytes: int,
        allocate: Allocate = allocate_plainly,
        busy_wait_s: float = 0.0,
        acknowledge: Callable[[int, bool], None] | None = None,
        on_interrupted: Callable[[str], bool] = lambda reason: False,
        incarnation: str = "",
    ) -> None:
        """``acknowledge(count, more)`` tells the peer how many frames have come; None: nothing is kept, nor resumed.

        ``on_interrupted(reason)`` is called on the I/O thread when a connection broke: may there be another one?
        """
        super().__init__(transport, loop, on_frame, allocate, busy_wait_s, acknowledge)
        self.peer: WorkerInfo = peer
        self.incarnation: str = incarnation
        self._on_broken = on_broken
        self._on_interrupted = on_interrupted
        self.never_sent: frozenset[int] = frozenset()
        """Once it is dead: the calls whose requests were queued and never written."""
        self._reason = ""
        self._final = False
        self._settled = False
        self._detached = False
        self._told = False
        self._broken: str | None = None
        self.outgoing: Outgoing = Outgoing(
            peer.name, transport, loop, backlog_limit_bytes, self._broke, self.dead, self.session.kept
        )
        if isinstance(transport, Absent):
            self._up = False
            self._settled = self._detached = True
            self.session.broke()
            self.outgoing.pause()

    @property
    def broken(self) -> str | None:
        """Why the link will not work any more, or None."""
        return self._broken

    @property
    def progress(self) -> object:
        """Changes as long as anything moves: bytes that come, or that the kernel takes after it was full."""
        outgoing = self.outgoing
        return self.transport, self.bytes_received, outgoing.bytes_sent if outgoing.full else 0

    def start(self, first_bytes: bytes = b"") -> None:
        """Begin to read. ``first_bytes`` came behind the handshake and are frames already."""
        with self._read_lock:
            self._decode(first_bytes)
        self._watch()

    # ------------------------------------------------------------------ breaking and going on

    def _broke(self, error: Exception, transport: Transport) -> None:
        """Reading or writing failed. From any thread; nothing here waits."""
        self._break(transport, str(error), final=isinstance(error, FrameError))

    def _ended(self, transport: Transport) -> None:
        self._break(transport, "the peer closed the connection")

    def _break(self, transport: Transport, reason: str, final: bool = False) -> None:
        """This connection cannot go on. What comes of it is settled on the I/O thread."""
        if transport is not self.transport or self._broken is not None:
            return
        self._final = self._final or final
        if self._up:
            self._up = False
            self._reason = reason
            transport.interrupt()
            self.outgoing.pause()
        elif not final:
            return
        self._loop.call_soon(lambda: self._settle(transport))

    def _settle(self, transport: Transport) -> None:
        """On the I/O thread, after a break: will there be another connection?"""
        if transport is not self.transport or self._broken is not None:
            return  # there is one already, or the link was closed
        if self._final:
            self.die(self._reason)
            return
        if not self._detached:
            self._detach()
        if not self._settled:
            self._settled = True
            returns = False
            try:
                returns = self._on_interrupted(self._reason)
            finally:
                if not returns:
                    self.die(self._reason)  # also where no thread can be had to dial: nobody must wait for good

    def _detach(self) -> None:
        """On the I/O thread: nobody reads from, or writes to, the broken connection any more."""
        self._detached = True
        transport = self.transport
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)
        self.outgoing.detach()
        with self._read_lock:
            self._descriptor = None
            self._descriptors.extend(transport.take_descriptors())
            # A descriptor comes with the first byte of its frame. If the rest did not, the frame will come again, and
            # its descriptor with it: only those of frames that are here are wanted.
            wanted = sum(frame.kind == CONTROL and bool(frame.flags & CARRIES_DESCRIPTOR) for frame in self._frames)
            while len(self._descriptors) > wanted:
                os.close(self._descriptors.pop())
            self._decoder = FrameDecoder(self._allocate)
            transport.close()
        self.session.broke()

    def interrupt(self, reason: str) -> None:
        """Give the connection up, not the link: it is silent, or the peer has lost it. From any thread."""
        self._break(self.transport, reason)

    def break_off(self, reason: str) -> None:
        """On the I/O thread: like ``interrupt``, and when this returns all that had come is counted."""
        if self._broken is None:
            self._break(self.transport, reason)
            if not self._detached:
                self._detach()
            self.session.broke()

    def connect(self, transport: Transport, first_bytes: bytes) -> None:
        """On the I/O thread: the first connection, or the first of which the peer knows. Nothing has come before."""
        self.break_off("a first connection took its place")
        self.session.resume()
        self.attach(transport, first_bytes, 0)

    def attach(self, transport: Transport, first_bytes: bytes, received: int) -> None:
        """On the I/O thread: go on over another connection to the same member, which has ``received`` frames.

        Raises ``SessionError`` where that cannot be; then the transport is the caller's to close.
        """
        with self._read_lock:
            self.transport = transport
            self._descriptor = transport.fileno()
            self._decode(first_bytes)
        self._settled = self._detached = self._final = False
        self._up = True
        self._watch()
        self.outgoing.attach(transport, self.session, received)

    # ------------------------------------------------------------------ ending

    def die(self, reason: str) -> None:
        """On the I/O thread: there will be no other connection. ``on_broken`` is told, once."""
        if self._told or self._broken is not None:
            return
        self._told = True
        self.never_sent = self.outgoing.queued_calls()
        self.close(reason)
        self._on_broken(reason)

    def abort(self, reason: str) -> None:
        """End the link because of what the peer sent."""
        self._break(self.transport, reason, final=True)

    def wait_closed(self, deadline: float) -> None:
        """Wait until the peer ended its side, too: closing before that could destroy what we sent last."""
        self.outgoing.wait_while(lambda: self._up, deadline)

    def dead(self, delivery: Delivery) -> PeerDead:
        """The error for a call over this dead link."""
        why = f"the link to {self.peer.name} is gone: {self._broken}"
        return PeerDead(why, delivery, self.peer, self.incarnation)

    def close(self, reason: str = "this node closed the link") -> None:
        """Close for good. Idempotent; from any thread but one inside this link."""
        if self._broken is None:
            self._broken = reason
        self._up = False
        self.transport.interrupt()  # wakes whoever sits in a system call on it
        if self._descriptor is not None:
            self._loop.forget(self._descriptor)
        self.outgoing.close()
        self.outgoing.forget()
        self.session.end()
        if reading.link is self:
            self._close_transport()
            return
        with self._read_lock:
            self._close_transport()

    def _close_transport(self) -> None:
        """As the reader. From here on the descriptor's number may be that of another link."""
        self._descriptor = None
        self.transport.close()
        self._decoder = _NOTHING_COMES
        while self._descriptors:
            os.close(self._descriptors.popleft())
