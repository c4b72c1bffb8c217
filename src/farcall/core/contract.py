"""The contract of the core: what the compiled one (``_core``) and the Python one (`plain.py`) both do.

The core moves bytes, keeps the table of calls, and waits. What frames mean is Python's. `docs/design/CORE.md` tells who
holds what, who reads, and why; `tests/core` runs one kit over both.

A *link* is a session with one peer over successive connections. A *frame* is one message, in the layout of
`frames.py`; its sender encodes it, and the core fills in its number among the frames of the link (as it leaves, also
again), and that of the call, where it makes one and its sender has not numbered it. Frames with the flag MARKED are
handed out one at a time, in the order in which they were sent: the next one comes after `placed`.

Times are those of ``time.monotonic``; ``math.inf`` is no deadline. All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

# ---------------------------------------------------------------------- what arrives

REQUEST: Final = 1
RESPONSE: Final = 2
FAILURE: Final = 3
CONTROL: Final = 4
LETTER: Final = 5
CHUNK: Final = 6
"""A part of a large message: the core's own, as are the next two."""
ACKNOWLEDGE: Final = 7
"""Its call id is the number of frames that came in full."""
CANCEL: Final = 8
"""Nobody waits for the answer of the call that it names."""

# News of the core's own, never on the wire.
CANCELLED: Final = 16
"""From `events`: the caller of the request ``number`` of ``link``, which runs, has given up."""
OVERDUE: Final = 17
"""The deadline of the call ``number`` has passed; it stays in the table until `cancel`."""
ENDED: Final = 18
"""Of a call: its link ended; ``flags`` is NOT_SENT or UNKNOWN. From `events`, with number 0: the connection of ``link``
broke, ``function`` says why (empty: the peer ended it); with the flag UNKNOWN no other one may follow, and `end` is
due: the peer sent what is no stream of frames."""
DROPPED: Final = 19
"""From `next`: a marked frame, or one with tickets or a descriptor, that nobody wants: to be declined. ``payload`` and
``buffers`` are those of the frame."""
STARVED: Final = 20
"""From `events`: work waits, and all workers wait in farcall for something else, or nothing has ended for 50 ms. Again
after as long, if it still does."""
WANTED: Final = 21
"""From `events`: something is to be sent over ``link``, which was put to `sleep`."""
FULL: Final = 22
"""From `events`: a request of ``link`` came where ``number`` wait already, for a worker or for their turn, as many as
`limit_queue` says, and was queued nevertheless. Once for each link, until ROOM."""
ROOM: Final = 23
"""From `events`, some time after FULL: no more than half as many wait."""

# Flags of frames. The lower 24 bits belong to Python.
MARKED: Final = 1 << 31
"""To be handed out in order with the other marked frames of its link."""
OWNER: Final = 1 << 30
"""For the event thread: it comes out of `events`, and is never marked. A request runs from then on."""
REFUSABLE: Final = 1 << 29
"""A request that may be refused where too many wait; one over the limit comes out of `events`."""
CARRIES: Final = 1 << 28
"""A descriptor leaves with its first byte."""
KEPT: Final = 1 << 27
"""A request that runs in any case: neither a cancellation nor the end of its link takes it out of the queue, since
others may wait for what it creates."""

# Flags of ENDED.
NOT_SENT: Final = 1
"""The peer does not have the request: it can be sent elsewhere."""
UNKNOWN: Final = 2
"""The peer may have run it."""

LARGE_BYTES: Final = 64 * 1024
"""Pieces of at least this size go straight from their memory, and arrive in memory of their own."""


class Handle(Protocol):
    """A marked frame that is being placed. If it dies unplaced, the frame is handed out again: Ctrl-C came before its
    taker had begun. Who has begun holds signals back until `placed`."""


class Arrived(NamedTuple):
    """A frame that came, or news of the core's own."""

    kind: int
    flags: int
    link: int
    number: int
    """Of the call; of a letter, that of its slot."""
    function: bytes
    notes: bytes
    payload: bytes | memoryview
    """A writable memoryview from LARGE_BYTES on."""
    buffers: Sequence[memoryview | tuple[int, int, int]]
    """Writable memory; or a ticket: size, segment and offset."""
    handle: Handle | None
    """Of a marked frame: for `placed` or `pause_behind`."""
    descriptor: int
    """That came with the frame, now the taker's; -1: none."""
    at: float
    """When its last bytes were read; of news: when that was."""


class Counts(NamedTuple):
    """Of one moment."""

    pending: int
    """Calls that are not over."""
    queued: int
    """Requests and tasks that wait for a worker."""
    running: int
    """Requests that `next` handed out, without an answer yet."""
    last_call: int
    """The number of the newest call."""
    last_request: int
    """How many requests have come."""


class Traffic(NamedTuple):
    """Of one link, over all of its connections."""

    sent_bytes: int
    received_bytes: int
    frames: int
    """That came in full: the count for the peer."""
    unsent_bytes: int
    """That wait to be sent, but for those of large messages."""
    held: int
    """Frames that came and wait for their turn, deferred ones included."""
    heard: float
    """When bytes came last; minus infinity: never."""


class CoreError(Exception):
    """The core refuses: a link that ended, a call that is not in the table, a descriptor over TCP."""


class Stopped(CoreError):
    """`Core.stop` was called, or this is a forked child."""


class Pump(Protocol):
    """A connection whose bytes pass through Python, as TLS does. Whoever reads or writes calls it, one at a time."""

    def fileno(self) -> int:
        """The descriptor of its stream socket, which the core reads and writes."""

    def open(self, data: bytes) -> bytes:
        """Bytes from the wire to bytes of frames. Raises where they are not the peer's."""

    def seal(self, data: Sequence[memoryview]) -> bytes:
        """Bytes of frames to bytes for the wire."""


Connection: TypeAlias = "int | Pump"
"""The descriptor of a connected, authenticated stream socket, which becomes the core's; or a pump."""
Piece: TypeAlias = "bytes | memoryview"


class Core(Protocol):
    """What the layers above see of the core. One for each node."""

    # ------------------------------------------------------------------ links

    def open_link(self, to_self: bool = False) -> int:
        """Make a link, without a connection. What is sent meanwhile waits. ``to_self``: it leads to this core."""

    def attach(
        self,
        link: int,
        connection: Connection,
        received: int = 0,
        replacements: Sequence[bytes | None] = (),
        first: bytes = b"",
    ) -> int:
        """Give ``link`` its first or next connection. Returns how many frames are sent again.

        ``received``: the peer's count; what it lacks is sent again before anything else. ``replacements``: what is
        sent in the place of each message of `lost`, encoded; None: nothing. The calls of such messages are over, with
        NOT_SENT. ``first``: bytes of frames that came behind the handshake; of a pump, opened already.
        """

    def detach(self, link: int) -> int:
        """Close the connection of ``link``, if it has one. Returns the count for the peer: frames that came in full.

        The same count as long as there is no other connection.
        """

    def lost(self, link: int, received: int) -> list[bytes]:
        """The heads of the large messages that a peer lacks which counts ``received`` frames: their memory is gone.

        Not of letters, which are kept as small frames are.

        Raises `CoreError` where that count cannot be. ``link`` has no connection.
        """

    def admit(self, link: int) -> None:
        """The peer is a member: from now on only its marked frames are in order. Before, all are."""

    def pause_behind(self, handle: Handle) -> None:
        """Not now: hand this frame out again after `unpause`, and nothing else of its link before, but for OWNER's.

        Its descriptor stays with whoever got it first. The call of an answer that came out of `call` or `wait` is in
        the table again, without its deadline: `wait` for it.
        """

    def unpause(self, link: int) -> None: ...

    def defer(self, handle: Handle) -> None:
        """Not yet: like `pause_behind`, but what is behind this frame passes it. It comes again after `recall`."""

    def recall(self, link: int) -> None:
        """Hand out what was deferred, in the order of `defer`, before anything else of ``link``."""

    def end_sending(self, link: int) -> None:
        """Send what waits, then end this direction of the connection."""

    def end(self, link: int) -> None:
        """The peer is gone: its calls are over, frames for it raise, its requests that nobody has begun are dropped."""

    def sleep(self, link: int) -> None:
        """``link`` has no connection, and nobody makes one: WANTED comes, once, when something waits to be sent."""

    def send_last(self, link: int, frame: bytes, received: int = -1) -> bool:
        """Send this frame, and nothing behind it until `go_on` or another connection: both ends may give this one up.

        False, and nothing is sent: there is no connection, or something else waits to be sent, or the peer, which
        counts ``received`` frames, lacks one. -1: it may.
        """

    def go_on(self, link: int) -> None:
        """Send what has waited behind `send_last`."""

    def traffic(self, link: int) -> Traffic: ...

    # ------------------------------------------------------------------ calls

    def call(self, link: int, head: bytes, pieces: Sequence[Piece] = (), deadline: float = inf) -> Arrived:
        """Send the request ``head`` + ``pieces`` and wait. Returns RESPONSE, FAILURE, OVERDUE or ENDED.

        ENDED: the call is over. OVERDUE: it stays, until `cancel`, so that its callee can be asked about it; unless it
        is over with NOT_SENT, before all of it left. When a signal's handler raises, it is over, and the peer knows.

        ``head`` and ``pieces`` joined are the frame (`ValueError` where they are not one whole frame): ``head`` has
        what comes before the first part of LARGE_BYTES or more, ``pieces`` the parts from there on. Their memory is the
        caller's again when this returns, however it returns. A large message whose deadline passes while it leaves is
        given up, and nobody gets it, unless its last chunk was cut: then it goes whole.
        """

    def post(
        self,
        link: int,
        head: bytes,
        pieces: Sequence[Piece] = (),
        deadline: float = inf,
        *,
        told: bool = False,
        more: bool = False,
        patient: bool = True,
        descriptor: int = -1,
    ) -> int:
        """Send any frame. Returns the number of the call, where it is a request; else 0.

        ``told``: somebody is to be told of the answer, which comes out of `next`; OVERDUE and ENDED come out of
        `events`. Else it lies until `wait`, `done` or `tell`. ``more``: another frame or `flush` follows at once.
        ``patient``: wait for room, and until the kernel has the pieces; else they are copied. ``descriptor`` is
        duplicated, and refused with `CoreError` where the connection cannot carry it; its pieces are copied. A frame
        whose descriptor finds another connection than it was meant for leaves without. Where this raises, the call is
        over; news of it with ``told`` may come all the same.
        """

    def flush(self, link: int) -> None:
        """Send what ``more`` held back."""

    def answer(self, link: int, number: int, head: bytes, pieces: Sequence[Piece] = (), *, more: bool = False) -> None:
        """Send the answer of a request that `next` handed out, which is finished by that. Waits as `post` does."""

    def finished(self, link: int, number: int) -> None:
        """A request is finished without an answer."""

    def wait(self, number: int, deadline: float = inf) -> Any:
        """Wait for the answer of a posted call: an `Arrived` as of `call`, or what `settle` gave. It is over then.

        OVERDUE: ``deadline`` passed, or its own; the call stays. Raises `CoreError` where there is no such call.
        """

    def done(self, number: int) -> bool:
        """Would `wait` return or raise at once?"""

    def tell(self, number: int) -> None:
        """From now on somebody is to be told, as with ``told``."""

    def settle(self, number: int, value: object) -> None:
        """`next` handed out the answer of this call, and ``value`` is what became of it, for whoever waits.

        Every answer out of `next`, and ENDED out of `events`, needs this or `cancel`: the call is in the table until
        then. Where somebody is told and nobody waits, the call is over, and ``value`` is dropped.
        """

    def cancel(self, number: int) -> None:
        """Nobody wants the answer: the peer is told, and the call is over. Unknown numbers are ignored."""

    # ------------------------------------------------------------------ letters

    def open_slot(self, link: int, number: int) -> None:
        """Letters of ``link`` with this number are for `take`, while a thread waits there; else for `next`."""

    def take(self, link: int, number: int, deadline: float = inf) -> Arrived | None:
        """Wait for a letter. None: the deadline passed, the slot is closed or was woken, or its link ended."""

    def wake(self, link: int, number: int) -> None:
        """Let all threads that wait in `take` return, or, where none waits, the next one that comes."""

    def close_slot(self, link: int, number: int) -> None: ...

    # ------------------------------------------------------------------ workers and the event thread

    def next(self, deadline: float = inf) -> Any:
        """Wait for work: an `Arrived` (REQUEST, CONTROL, LETTER, RESPONSE, FAILURE, DROPPED) or an object of `work`.

        None: the deadline passed, or the core stopped.
        """

    def work(self, task: object) -> None:
        """Queue ``task`` for a worker, behind the requests that came before. Never waits; destructors may call it."""

    def placed(self, handle: Handle) -> None:
        """The marked frame is placed: the next one may come."""

    def to_place(self) -> list[Arrived]:
        """The marked frames that wait for a worker, but for answers: the event thread may place them when STARVED.

        What waits behind them would wait for a free worker, too. Their requests run from then on.
        """

    def begin_wait(self) -> None:
        """This worker waits for something else than the core: another may run in its place."""

    def end_wait(self) -> None: ...

    def limit_queue(self, most: int) -> None:
        """How many requests may wait before REFUSABLE ones are handed to `events`, and others announced as FULL."""

    def queued(self) -> list[Arrived]:
        """The requests that wait for a worker, then those that wait for their turn, oldest first: for reports.

        Only with their names, notes and times. One that is on its way out of `next` is in no list for an instant.
        """

    def fileno(self) -> int:
        """Readable while `events` has something."""

    def events(self) -> list[Arrived]:
        """What has come for the event thread, at once."""

    def counts(self) -> Counts: ...

    def trim(self) -> None:
        """Return memory to the system that was not used for a while."""

    def stop(self) -> None:
        """End all links and waits; every thread that is in the core leaves it before this returns. Again: nothing."""

    def close_after_fork(self) -> None:
        """In a forked child: close the descriptors. Everything else raises `Stopped` there."""
