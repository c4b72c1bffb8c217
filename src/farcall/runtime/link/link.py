"""The link to one peer, over successive connections: bytes out of many threads, frames in for one.

Owns what becomes of a link whose connection breaks; `receive.py` is its reading half, `send.py` its writing half.
Says ``on_broken`` once.

    state  event                                         becomes
    up     an error, or the end of the stream            down: small frames queue up, who has a large one waits
    down   nobody reads any more: `settle`               detached: what had come is read and counted, then handed out
    up     `break_off`: the peer comes back already      detached
    down   after that ``on_interrupted`` says False      dead: ``on_broken`` is told
    down   `attach`: another connection (I/O thread)     up: goes on where the peer's count says (protocol/session.py)
    down   `connect`: the first connection               up
    any    `die`; a frame that is none; `abort`          dead
    any    `close`                                       dead, and nobody is told

A link begins up, or down if its transport is `Absent`. Who writes to a peer that ends may meet the error before the
reader has met the peer's last words, answers and its Goodbye among them: hence the second line.

Thread rules
- Any thread may find that the connection broke. What that changes at once changes under ``_break_lock``: a thread that
  is slow in between must not pause the next connection.
- The I/O thread settles the break, and waits for no reader: whoever gives the reader's role up looks afterwards whether
  the link is up, and has it settled if not (`receive.py`).
- What a reader leaves to the I/O thread is queued before it gives the role up. So what is queued after `_detach`, when
  only the I/O thread hands out frames, comes behind all of it: only from there ``on_interrupted`` is asked.
- A new connection is read by others as soon as `Incoming` has it, and they count acknowledgements: the session has
  taken the peer's count before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Allocate, Frame, FrameError, allocate_plainly
from farcall.protocol.session import Session, SessionError
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.receive import Incoming
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import Absent, Transport


class Link:
    """The way to one peer."""

    __slots__ = (
        "__weakref__",
        "_break_lock",
        "_detached",
        "_final",
        "_loop",
        "_on_broken",
        "_on_interrupted",
        "_reason",
        "_told",
        "broken",
        "incarnation",
        "incoming",
        "never_sent",
        "outgoing",
        "peer",
        "session",
        "transport",
        "up",
    )

    def __init__(
        self,
        peer: WorkerInfo,
        transport: Transport,
        loop: Loop,
        on_frame: Callable[[Frame], None],
        on_broken: Callable[[str], None],
        backlog_limit_bytes: int,
        *,
        allocate: Allocate = allocate_plainly,
        busy_wait_s: float = 0.0,
        acknowledge: Callable[[int, bool], None] | None = None,
        on_interrupted: Callable[[str], bool] = lambda reason: False,
        incarnation: str = "",
    ) -> None:
        """``acknowledge(count, more)`` tells the peer how many frames have come; None: nothing is kept, nor resumed.

        ``on_interrupted(reason)`` is called on the I/O thread when a connection broke: may there be another one?
        """
        self.peer: WorkerInfo = peer
        self.incarnation: str = incarnation
        self.transport: Transport = transport
        self.up: bool = True
        """Is there a connection now, as far as is known?"""
        self.session: Session = Session()
        if acknowledge is None:
            self.session.keep_nothing()
        self._loop = loop
        self._on_broken = on_broken
        self._on_interrupted = on_interrupted
        self.never_sent: frozenset[int] = frozenset()
        """Once it is dead: the calls whose requests were queued and never written."""
        self._reason = ""
        self._final = False
        self._detached = True  # until `start`
        self._break_lock = threading.Lock()  # nobody waits while holding it
        self._told = False
        self.broken: str | None = None
        """Why the link will not work any more, or None."""
        self.outgoing: Outgoing = Outgoing(
            peer.name, transport, loop, backlog_limit_bytes, on_error=self.broke, dead=self.dead, kept=self.session.kept
        )
        self.incoming: Incoming = Incoming(
            self, loop, on_frame, allocate=allocate, busy_wait_s=busy_wait_s, acknowledge=acknowledge
        )
        if isinstance(transport, Absent):
            self.up = False
            self.session.broke()
            self.outgoing.pause()

    @property
    def heard_bytes(self) -> int:
        """Changes with every byte that comes, over whatever connection: the sign of life."""
        return self.incoming.bytes_received + self.transport.held_bytes

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self._loop.on_thread()

    def start(self, first_bytes: bytes = b"") -> None:
        """Begin to read. ``first_bytes`` came behind the handshake and are frames already."""
        try:
            self.incoming.connect(first_bytes)
        except FrameError as error:
            self.broke(error, self.transport)
            return
        self.incoming.watch_connection()
        self._detached = False
        if not self.up:
            self._loop.call_soon(self.settle)  # who wrote was told of an error already

    # ------------------------------------------------------------------ breaking and going on

    def broke(self, error: Exception, transport: Transport) -> None:
        """Reading or writing failed. From any thread; nothing here waits."""
        self._break(transport, str(error), final=isinstance(error, FrameError))

    def ended(self, transport: Transport) -> None:
        """The peer ended the stream."""
        self._break(transport, "the peer closed the connection")

    def _break(self, transport: Transport, reason: str, final: bool = False) -> None:
        """This connection cannot go on. What comes of it is settled on the I/O thread."""
        with self._break_lock:
            if transport is not self.transport or self.broken is not None:
                return
            self._final = self._final or final
            if self.up:
                self.up = False
                self._reason = reason
                transport.interrupt()
                self.outgoing.pause()
            elif not final:
                return
        self._loop.call_soon(self.settle)

    def settle(self) -> None:
        """On the I/O thread, after a break and whenever a reader stops after it: let go of the broken connection."""
        if self.broken is not None:
            return
        if self._final:
            self.die(self._reason)
        elif not self.up and not self._detached:
            self._detach(waits=False)

    def _detach(self, *, waits: bool, reads_rest: bool = True) -> None:
        """On the I/O thread: nobody reads from, or writes to, the broken connection any more.

        Not ``waits``: unless somebody reads; who does has it settled afterwards.
        """
        with self._break_lock:
            transport = self.transport  # and whoever broke it has paused it
        self.incoming.forget_connection()  # or the poller goes on telling that it has ended
        self.outgoing.detach()
        if self.incoming.disconnect(transport, reads_rest, waits):
            self._detached = True
            self.session.broke()
            self._loop.call_soon(lambda: self._hand_out(transport))

    def _hand_out(self, transport: Transport) -> None:
        """On the I/O thread, after `_detach`: the peer's last words. Then: will there be another connection?"""
        if transport is not self.transport or self.broken is not None:
            return  # there is one already, or the link was closed
        if self.incoming.undelivered:
            # First of all queue this again: a function may take so long that another thread is the I/O thread then.
            self._loop.call_soon(lambda: self._hand_out(transport))
            self.incoming.deliver()
            return
        returns = False
        try:
            returns = self._on_interrupted(self._reason)
        finally:
            if not returns:
                self.die(self._reason)  # also where no thread can be had to dial: nobody must wait for good

    def interrupt(self, reason: str) -> None:
        """Give the connection up, not the link: it is silent, or the peer has lost it. From any thread."""
        self._break(self.transport, reason)

    def break_off(self, reason: str, reads_rest: bool = True) -> None:
        """On the I/O thread: like ``interrupt``, and when this returns all that had come is counted.

        ``reads_rest``: also what nobody has read yet.
        """
        if self.broken is None:
            self._break(self.transport, reason)
            if not self._detached:
                self._detach(waits=True, reads_rest=reads_rest)
            self.session.broke()

    def connect(self, transport: Transport, first_bytes: bytes) -> None:
        """On the I/O thread: the first connection, or the first of which the peer knows. Nothing has come before."""
        self.break_off("a first connection took its place", reads_rest=False)  # the peer counts from 0
        self.session.resume()
        try:
            self.attach(transport, first_bytes, 0)
        except SessionError as error:
            why = str(error)
            self._loop.call_soon(lambda: self.die(why))

    def attach(self, transport: Transport, first_bytes: bytes, received: int) -> None:
        """On the I/O thread: go on over another connection to the same member, which has ``received`` frames.

        Raises ``SessionError`` where that cannot be, and closes ``transport``.
        """
        try:
            missing = self.outgoing.resumed(self.session, received)
            with self._break_lock:
                self.transport = transport  # what others find out about the old one does not count any more
            self.incoming.connect(first_bytes)
        except (SessionError, FrameError) as error:
            transport.close()
            raise SessionError(str(error)) from error
        self.incoming.watch_connection()  # before others may read: who does tells the poller to be silent
        self._detached = False
        self.up = True
        self.outgoing.attach(transport, missing)

    # ------------------------------------------------------------------ ending

    def die(self, reason: str) -> None:
        """On the I/O thread: there will be no other connection. ``on_broken`` is told, once."""
        if self._told or self.broken is not None:
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
        self.outgoing.queue.wait_while(lambda: self.up, deadline)

    def dead(self, delivery: Delivery) -> PeerDead:
        """The error for a call over this dead link."""
        why = f"the link to {self.peer.name} is gone: {self.broken}"
        return PeerDead(why, delivery, self.peer, self.incarnation)

    def close(self, reason: str = "this node closed the link") -> None:
        """Close for good. Idempotent; from any thread but one inside this link."""
        if self.broken is None:
            self.broken = reason
        self.up = False
        self.transport.interrupt()  # wakes whoever sits in a system call on it
        self.incoming.forget_connection()
        self.outgoing.close()
        self.outgoing.forget()
        self.session.end()
        self.incoming.close(self.transport)
