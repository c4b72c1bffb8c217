"""The link to one peer, over successive connections: bytes out of many threads, frames in for one.

Owns what becomes of a link whose connection breaks; `receive.py` is its reading half, `send.py` its writing half.
Calls ``on_broken`` once.

    state  event                                         becomes
    up     an error, or the end of the stream            down: small frames queue up, large messages wait
    down   nobody reads any more: `settle`               detached: the rest is read and counted, then handed out
    up     `break_off`: the peer comes back already      detached
    down   after that ``on_interrupted`` says False      dead: calls ``on_broken``
    down   `attach`: another connection (I/O thread)     up: goes on where the peer's count says (protocol/session.py)
    down   `connect`: the first connection               up
    down   nobody makes a connection (``outgoing.sleep``)    down, and asleep
    down, asleep   something is to be sent                   down: calls ``on_wanted``
    any    `die`; an invalid frame; `abort`              dead
    any    `close`                                       dead, without a call of ``on_broken``

A link begins up, or down if its transport is `Absent`. A thread that writes to an ending peer may meet the error
before the reader has read the peer's last frames, answers and its Goodbye among them: hence the second line.

Thread rules
- Any thread may find that the connection broke. It marks the break under ``_break_lock``: a thread that is slow between
  its check and its ``pause`` must not pause the next connection.
- The I/O thread settles the break, and waits for no reader: a reader that gives up the role looks afterwards whether
  the link is up, and has the break settled if not (`receive.py`).
- A reader queues what it leaves to the I/O thread before it gives up the role. So a function queued after `_detach`,
  when only the I/O thread hands out frames, runs behind all of it: only there may ``on_interrupted`` be called.
- Other threads read a new connection, acknowledgements included, as soon as `Incoming` has it: so the session takes the
  peer's count before that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from farcall.errors import Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.frame_decoder import Allocate, FrameError, allocate_plainly
from farcall.protocol.frames import Frame
from farcall.protocol.session import Session, SessionError
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.receive import Incoming
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import Absent, Transport


def peer_dead(peer: WorkerInfo, how: str, delivery: Delivery, incarnation: str) -> PeerDead:
    """The error for a call to a member that is not there any more; ``how`` follows its name."""
    fate = "the call was not sent" if delivery is Delivery.NOT_SENT else "whether the call ran there is unknown"
    return PeerDead(f"{peer.name} {how}; {fate}", delivery, peer, incarnation)


class Link:
    """The link to one peer: a session, its current connection, and the halves that write and read.

    Mutable: the transport and whether it is up (a break is marked under ``_break_lock``), and why the link died.
    """

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
        on_wanted: Callable[[], None] = lambda: None,
        incarnation: str = "",
    ) -> None:
        """``acknowledge(count, more)`` tells the peer how many frames have come; None: nothing is kept, nor resumed.

        ``on_interrupted(reason)``, called on the I/O thread when a connection broke, says whether another may follow.
        ``on_wanted()`` is called, from any thread, when something is to be sent over a link that is asleep.
        """
        self.peer: WorkerInfo = peer
        self.incarnation: str = incarnation
        self.transport: Transport = transport
        self.up: bool = True
        """Does the connection work, as far as is known?"""
        self.session: Session = Session()
        if acknowledge is None:
            self.session.keep_nothing()
        self._loop = loop
        self._on_broken = on_broken
        self._on_interrupted = on_interrupted
        self.never_sent: frozenset[int] = frozenset()
        """Once the link is dead: the calls whose requests were queued and never written."""
        self._reason = ""
        self._final = False
        self._detached = True  # until `start`
        self._break_lock = threading.Lock()  # no thread waits while it holds this lock
        self._told = False
        self.broken: str | None = None
        """Why the link will not work any more, or None."""
        self.outgoing: Outgoing = Outgoing(
            peer.name,
            transport,
            loop,
            backlog_limit_bytes,
            on_error=self.broke,
            dead=self.dead,
            session=self.session,
            on_wanted=on_wanted,
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
        """Changes with every byte that comes, over any connection: the sign of life."""
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
            self._loop.call_soon(self.settle)  # a writer met an error before reading began

    # ------------------------------------------------------------------ breaking and going on

    def broke(self, error: Exception, transport: Transport) -> None:
        """Reading or writing failed. From any thread; nothing here waits."""
        self._break(transport, str(error), final=isinstance(error, FrameError))

    def ended(self, transport: Transport) -> None:
        """The peer ended the stream."""
        self._break(transport, "the peer closed the connection")

    def _break(self, transport: Transport, reason: str, final: bool = False) -> None:
        """This connection cannot go on: mark the break, and have the I/O thread settle it."""
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
        """On the I/O thread: take the broken connection from its readers and writers.

        Without ``waits``, a thread that still reads keeps it, and has the break settled when it stops.
        """
        with self._break_lock:
            transport = self.transport  # with the lock, after the thread that broke it has paused it
        self.incoming.forget_connection()  # or the poller keeps reporting its end
        self.outgoing.detach()
        if self.incoming.disconnect(transport, reads_rest, waits):
            self._detached = True
            self.session.broke()
            self._loop.call_soon(lambda: self._hand_out(transport))

    def _hand_out(self, transport: Transport) -> None:
        """On the I/O thread, after `_detach`: hand out the peer's last frames, then ask for another connection."""
        if transport is not self.transport or self.broken is not None:
            return  # the next connection is attached already, or the link was closed
        if self.incoming.undelivered:
            # Queue this again first: a function may take so long that another thread becomes the I/O thread.
            self._loop.call_soon(lambda: self._hand_out(transport))
            self.incoming.deliver()
            return
        returns = False
        try:
            returns = self._on_interrupted(self._reason)
        finally:
            if not returns:
                self.die(self._reason)  # also if no thread can be started to dial: no caller may wait for ever

    def interrupt(self, reason: str) -> None:
        """Give up the connection, not the link: it is silent, or the peer has lost it. From any thread."""
        self._break(self.transport, reason)

    def break_off(self, reason: str, reads_rest: bool = True) -> None:
        """On the I/O thread: like ``interrupt``, but on return every frame that came is counted.

        ``reads_rest``: also the frames that no thread has read yet.
        """
        if self.broken is None:
            self._break(self.transport, reason)
            if not self._detached:
                self._detach(waits=True, reads_rest=reads_rest)
            self.session.broke()

    def connect(self, transport: Transport, first_bytes: bytes) -> None:
        """On the I/O thread: the first connection, or the first that the peer knows of. No frame has come before."""
        self.break_off("a first connection took its place", reads_rest=False)  # the peer counts from 0
        try:
            self.session.resume()
            self.attach(transport, first_bytes, 0)
        except SessionError as error:  # also where the node ends, and closes the link, at this very moment
            transport.close()
            why = str(error)
            self._loop.call_soon(lambda: self.die(why))

    def attach(self, transport: Transport, first_bytes: bytes, received: int) -> None:
        """On the I/O thread: go on over another connection to the same member, which has ``received`` frames.

        Closes ``transport`` and raises ``SessionError`` if the session cannot go on.
        """
        try:
            self.outgoing.resumed(received)
            with self._break_lock:
                self.transport = transport  # from here on, `_break` ignores errors of the old one
            self.incoming.connect(first_bytes)
        except (SessionError, FrameError) as error:
            transport.close()
            raise SessionError(str(error)) from error
        self.incoming.watch_connection()  # before ``up``: a helping reader can silence only what is watched
        self._detached = False
        self.up = True
        self.outgoing.attach(transport)

    # ------------------------------------------------------------------ ending

    def die(self, reason: str) -> None:
        """On the I/O thread: no other connection will follow. Calls ``on_broken``, once."""
        if self._told or self.broken is not None:
            return
        self._told = True
        self.never_sent = self.outgoing.stop()
        self.close(reason)
        self._on_broken(reason)

    def abort(self, reason: str) -> None:
        """End the link because of what the peer sent."""
        self._break(self.transport, reason, final=True)

    def wait_closed(self, deadline: float) -> None:
        """Wait until the peer ended its side, too: closing earlier could destroy the bytes that we sent last."""
        self.outgoing.queue.wait_while(lambda: self.up, deadline)

    def dead(self, delivery: Delivery) -> PeerDead:
        """The error for a call over this dead link."""
        return peer_dead(self.peer, f"is gone: {self.broken}", delivery, self.incarnation)

    def close(self, reason: str = "this node closed the link") -> None:
        """Close the link, for ever. Idempotent; from any thread but one inside this link."""
        if self.broken is None:
            self.broken = reason
        self.up = False
        self.transport.interrupt()  # wakes up threads inside a system call on it
        self.incoming.forget_connection()
        self.outgoing.close()
        self.outgoing.forget()
        self.session.end()
        self.incoming.close(self.transport)
