"""The core in Python: the same as the compiled one, without a compiler, and to be read first.

One lock holds everything; whatever a method does, it does in one `Section` of it. No thread waits while it holds the
lock: it sleeps outside (`Core._wait`), and asks for its condition again whenever somebody rings it. The system calls
inside never wait, since the sockets do not block.

    sender       queues its frame and writes what the kernel takes                      `_send`, `_drain`
    reader       the one thread of a core: reads all links, delivers what came, writes
                 what the kernel did not take at first, and looks after the clock       `_read_forever`
    worker       `next`: takes the oldest work of one queue
    event thread `events`: a list, and a descriptor that is readable while it has something

A frame that came goes this way: `_deliver` keeps marked ones in order, `_hand_out` tells whose it is: of a thread that
waits in the core (an answer, a letter), of the event thread, or of a worker.

What the compiled core does to be quick is not here: waiting threads that read, looking for bytes before sleeping, a
limit of functions at a time, memory that is used again.
"""

from __future__ import annotations

import heapq
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import wraps
from math import inf
from time import monotonic
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from farcall.core import contract
from farcall.core.contract import Arrived, Connection, CoreError, Counts, Piece, Pump, Stopped, Traffic
from farcall.core.frames import (
    Assembler,
    Decoder,
    Descriptor,
    Header,
    Message,
    WireError,
    bare_frame,
    whole_frame,
    with_call,
    with_flags,
)
from farcall.core.session import Large, Outgoing
from farcall.core.waiting import Bell, Interrupts, Section, Sleeper

Found = TypeVar("Found")
Arguments = ParamSpec("Arguments")

_LIE_S: Final = 1e-3
"""An answer that nobody asks for is a worker's after this: perhaps somebody waits elsewhere, who never asks."""
_HUNGRY_S: Final = 50e-3
"""Requests wait, and no function ended for so long: more workers are needed."""
_READ_BYTES: Final = 256 * 1024
_MOST_READ: Final = 4 << 20
"""Of one link, before others have their turn."""
_MOST_SEALED: Final = 128 * 1024
"""Bytes of frames that a pump gets at a time."""
_ACKNOWLEDGE_FRAMES: Final = 64
_ACKNOWLEDGE_BYTES: Final = 256 * 1024
_MOST_DESCRIPTORS: Final = 64
_ANSWERS: Final = (contract.RESPONSE, contract.FAILURE)


@dataclass(eq=False, slots=True)
class _Worker:
    """A thread that `next` gave something."""

    running: bool = False
    waits: int = 0
    """It waits in farcall; more than 0: another may run in its place."""


class _State(Enum):
    PENDING = auto()
    ANSWERED = auto()
    """``answer`` is there for whoever waits."""
    HANDED = auto()
    """`next` or `events` gave it to somebody who will `settle` or `cancel`."""
    SETTLED = auto()
    """``value`` is there for whoever waits."""


@dataclass(eq=False, slots=True)
class _Call:
    link: int
    deadline: float
    told: bool = False
    number: int = 0
    state: _State = _State.PENDING
    answer: Message | None = None
    value: object = None
    waiting: list[Sleeper] = field(default_factory=list)
    of_call: bool = False
    """Its sender is in `Core.call`, and will wait."""

    @property
    def is_awaited(self) -> bool:
        return self.of_call or bool(self.waiting)


@dataclass(eq=False, slots=True)
class _Served:
    """A request that came and has no answer yet."""

    running: bool = False
    cancelled: bool = False
    kept: bool = False


@dataclass(eq=False, slots=True)
class _Slot:
    letters: deque[Message] = field(default_factory=deque)
    waiting: list[Sleeper] = field(default_factory=list)
    wakes: int = 0
    unheard: bool = False
    """Was it woken while nobody waited?"""


@dataclass(eq=False, slots=True)
class _Task:
    task: object


class _Link:
    def __init__(self, number: int, to_self: bool = False, ended: bool = False) -> None:
        self.number = number
        self.to_self = to_self
        self.ended = ended
        """Frames for it raise."""
        self.over = False
        """`Core.end` was called."""
        # To the peer:
        self.outgoing = Outgoing()
        self.senders: list[Sleeper] = []
        self.writing = False
        """A destructor inside of `_drain` leaves its frames to that."""
        self.half_closed = False
        self.asleep = False
        """WANTED is to come when something is to be sent."""
        self.sent_bytes = 0
        # The connection:
        self.socket: socket.socket | None = None
        self.pump: Pump | None = None
        self.sealed = memoryview(b"")
        """Of a pump: bytes for the wire."""
        self.blocked = False
        """The kernel takes no more for now."""
        self.readable = False
        """The end of what the peer sends has not come yet."""
        self.why = ""
        """Why we ended the connection."""
        # From the peer:
        self.decoder = Decoder()
        self.descriptors: deque[Descriptor] = deque()
        """That came with bytes of frames which are not whole yet."""
        self.heard = -inf
        self.received_bytes = self.acknowledged_bytes = self.acknowledged = 0
        self.admitted = to_self
        self.paused = False
        self.placing = False
        """A marked frame is between `next` and `placed`."""
        self.order: deque[Message] = deque()
        """Frames that wait for it."""
        self.deferred: list[Message] = []
        self.is_full = False
        """FULL was said, and ROOM was not."""
        self.requests: dict[int, _Served] = {}
        self.slots: dict[int, _Slot] = {}


class _NotSent(CoreError):
    """The link ended before the frame had left."""


class Handle:
    """A marked frame that is being placed."""

    def __init__(self, core: Core, message: Message) -> None:
        self.core = core
        self.message = message
        self.placed = False

    def __del__(self) -> None:
        if not self.placed:
            self.core._abandon(self)


def _entered(
    method: Callable[Concatenate[Core, Arguments], Found],
) -> Callable[Concatenate[Core, Arguments], Found]:
    """A method that is one section."""

    @wraps(method)
    def entered(self: Core, /, *args: Arguments.args, **options: Arguments.kwargs) -> Found:
        with self._section:
            self._alive()
            return method(self, *args, **options)

    return entered


class Core(contract.Core):
    """See `contract.Core`. ``memory_limit`` and ``busy_wait_s`` are for the compiled core."""

    def __init__(self, memory_limit: int = 1 << 30, backlog_limit: int = 4 << 20, busy_wait_s: float = 0.0) -> None:
        if memory_limit < 0 or backlog_limit < 1 or not busy_wait_s >= 0:
            raise ValueError("a core's limits are not negative")
        self._backlog_limit = backlog_limit
        self._interrupts = Interrupts()
        self._section = Section(self._interrupts)
        self._stopped = False
        self._links: dict[int, _Link] = {}
        self._last_link = 0
        self._calls: dict[int, _Call] = {}
        self._last_call = 0
        self._requests = 0
        self._queue: deque[Message | _Call | _Task] = deque()
        """Work. A call: the answer that lies there, unless somebody has asked for it meanwhile."""
        self._queue_limit: float = inf
        self._events: deque[Message] = deque()
        self._events_bell = Bell()
        # Threads that wait, and workers:
        self._asleep: set[Sleeper] = set()
        self._all_left = threading.Event()
        self._idle: list[Sleeper] = []
        self._here = threading.local()
        self._serves = False
        """Was there ever a worker?"""
        self._available = 0
        """Workers in `next`."""
        self._busy = 0
        """Workers that run a function, and do not wait in it."""
        self._starved = False
        # The reader's:
        self._timers: list[tuple[float, int]] = []
        """When to look at a call, by its number."""
        self._hungry_at = inf
        """When too few workers have been there for too long; put off by every function that ends."""
        self._looks_at = inf
        """When the reader returns from the kernel by itself."""
        self._changes: list[tuple[socket.socket, _Link]] = []
        """What it is to watch differently: only the reader touches the selector."""
        self._reader_bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader_bell.fileno(), selectors.EVENT_READ)
        self._reader = threading.Thread(target=self._read_forever, name="farcall-core", daemon=True)
        self._reader.start()

    # ------------------------------------------------------------------ waiting

    def _alive(self) -> None:
        if self._stopped:
            raise Stopped("this core was stopped")

    def _wait(self, sleepers: list[Sleeper], ready: Callable[[], Found | None], deadline: float) -> Found | None:
        """Wait until ``ready``, asked in a section, returns something. None: the deadline passed.

        Rings of ``sleepers`` make it ask again. It is asked before anything else, and last of all.
        """
        with self._section:
            self._alive()
            if (found := ready()) is not None or monotonic() >= deadline:
                return found
        with self._interrupts:
            return self._sleep_until(sleepers, ready, deadline)

    def _sleep_until(self, sleepers: list[Sleeper], ready: Callable[[], Found | None], deadline: float) -> Found | None:
        sleeper = Sleeper()
        with self._section:
            self._alive()
            self._asleep.add(sleeper)
            self._begin_wait()
        try:
            while True:
                with self._section:
                    sleeper.unring()
                    if (found := ready()) is not None:
                        return found
                    self._alive()
                    left = deadline - monotonic()
                    if left <= 0:
                        return None
                    if sleeper not in sleepers:
                        sleepers.append(sleeper)
                self._interrupts.sleep(sleeper, left)
        except BaseException:
            if sleeper.rung:
                self._ring_another(sleeper, sleepers)
            raise
        finally:
            with self._section:
                if sleeper in sleepers:
                    sleepers.remove(sleeper)
                self._end_wait()
                self._asleep.discard(sleeper)
                if self._stopped and not self._asleep:
                    self._all_left.set()

    def _ring_another(self, sleeper: Sleeper, sleepers: list[Sleeper]) -> None:
        """What ``sleeper`` was rung for is there for the next one."""
        with self._section:
            others = [other for other in sleepers if other is not sleeper]
            if others:
                others[-1].ring()

    # ------------------------------------------------------------------ links

    @_entered
    def open_link(self, to_self: bool = False) -> int:
        self._last_link += 1
        self._links[self._last_link] = _Link(self._last_link, to_self)
        return self._last_link

    def _at(self, number: int) -> _Link:
        return self._links.get(number) or _Link(number, ended=True)

    def attach(
        self,
        link: int,
        connection: Connection,
        received: int = 0,
        replacements: Sequence[bytes | None] = (),
        first: bytes = b"",
    ) -> int:
        pump = None if isinstance(connection, int) else connection
        descriptor = connection if isinstance(connection, int) else connection.fileno()
        if descriptor < 0:
            raise ValueError("a connection is the descriptor of a stream socket")
        for instead in replacements:
            if instead is not None:
                whole_frame(instead, len(instead))
        with self._section:
            self._alive()
            own = socket.socket(fileno=descriptor)
            at = self._at(link)
            if at.ended or at.to_self:
                own.close()
                raise CoreError("the link has ended")
            self._close_connection(at)
            if at.outgoing.lost(received) is None:
                own.close()
                raise CoreError("the peer counts frames that cannot be")
            own.setblocking(False)
            at.socket, at.pump = own, pump
            at.outgoing.carries_descriptors = pump is None and own.family == socket.AF_UNIX
            at.asleep = False
            again = at.outgoing.written - received
            for number in at.outgoing.resume(received, replacements):
                call = self._calls.get(number)
                if call is not None and call.state is _State.PENDING:
                    self._fail(call, contract.NOT_SENT)
            at.readable = True
            self._watch(own, at)
            self._drain(at)
            if first:
                at.received_bytes += len(first)
                self._guard(at, own, lambda: self._take_bytes(at, first))
        return again

    @_entered
    def detach(self, link: int) -> int:
        at = self._at(link)
        self._close_connection(at)
        return at.decoder.count

    def _close_connection(self, link: _Link) -> None:
        if link.socket is None:
            return
        self._watch(link.socket, link)
        _shut_down(link.socket, socket.SHUT_RDWR)  # a forked child may have it, too
        link.socket.close()
        link.socket = link.pump = None
        link.sealed = memoryview(b"")
        link.readable, link.blocked, link.why = False, False, ""
        link.outgoing.broke()
        link.decoder.restart()
        link.descriptors.clear()

    @_entered
    def lost(self, link: int, received: int) -> list[bytes]:
        at = self._at(link)
        heads = at.outgoing.lost(received) if at.socket is None else None
        if heads is None:
            raise CoreError("the peer counts frames that cannot be, or is connected")
        return heads

    @_entered
    def admit(self, link: int) -> None:
        self._at(link).admitted = True

    @_entered
    def end_sending(self, link: int) -> None:
        at = self._at(link)
        at.half_closed = True
        self._drain(at)

    @_entered
    def end(self, link: int) -> None:
        self._end(self._at(link))

    def _end(self, link: _Link) -> None:
        link.ended = link.over = True
        self._close_connection(link)
        not_sent = link.outgoing.end()
        for sleeper in link.senders:
            sleeper.ring()
        for number, call in list(self._calls.items()):
            if call.link == link.number and call.state is _State.PENDING:
                self._fail(call, contract.NOT_SENT if number in not_sent else contract.UNKNOWN)
        # What came before the end is still handed out, in its order; requests that nobody has begun are dropped.
        link.requests = {number: served for number, served in link.requests.items() if served.running or served.kept}
        for slot in link.slots.values():
            self._wake(slot)
        self._forget_ended(link)

    def _forget_ended(self, link: _Link) -> None:
        if link.over and not (link.order or link.deferred or link.placing or link.requests or link.slots):
            self._links.pop(link.number, None)

    def _fail(self, call: _Call, how: int) -> None:
        """There will be no answer."""
        ended = _news(contract.ENDED, call.link, call.number, how)
        if call.told:
            call.state = _State.HANDED
            self._put_event(ended)
        else:
            self._answered(call, ended)

    @_entered
    def sleep(self, link: int) -> None:
        at = self._at(link)
        at.asleep = True
        self._drain(at)

    @_entered
    def send_last(self, link: int, frame: bytes, received: int = -1) -> bool:
        whole_frame(frame, len(frame))
        at = self._at(link)
        if at.socket is None or at.sealed or not at.outgoing.put_last(frame, received):
            return False
        self._drain(at)
        return True

    @_entered
    def go_on(self, link: int) -> None:
        at = self._at(link)
        at.outgoing.rests = False
        self._drain(at)

    @_entered
    def traffic(self, link: int) -> Traffic:
        at = self._at(link)
        held = len(at.order) + len(at.deferred)
        return Traffic(at.sent_bytes, at.received_bytes, at.decoder.count, at.outgoing.size, held, at.heard)

    # ------------------------------------------------------------------ sending

    def _send(
        self,
        number: int,
        head: bytes,
        pieces: Sequence[Piece],
        deadline: float,
        *,
        call: _Call | None = None,
        patient: bool = True,
        more: bool = False,
        descriptor: Descriptor | None = None,
    ) -> bool:
        """Enter the call, if it is one, and send the frame. False: the deadline passed. Raises where the link ended."""
        views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
        with self._section:
            self._alive()
            link = self._at(number)
        if views and (not patient or descriptor is not None or link.to_self):
            head, views = b"".join((head, *views)), []  # a descriptor leaves with a frame's first byte, not a chunk's
        large = Large(head, views) if views else None
        room = self._backlog_limit

        def queued() -> bool | None:
            nonlocal room
            if link.ended:
                raise _NotSent("the link has ended: not sent")
            if call is not None and call.number not in self._calls:
                self._enter(call)
            frame = head if call is None else with_call(head, call.number)
            if link.to_self:
                assembler = Assembler()
                assembler.take(memoryview(frame))
                assert assembler.message is not None
                assembler.message.descriptor = descriptor
                link.heard = monotonic()
                self._deliver(link, assembler.message)
                return True
            if descriptor is not None and link.socket is not None and not link.outgoing.carries_descriptors:
                raise CoreError("this connection carries no descriptors")
            if patient and link.outgoing.size > room:
                room = self._backlog_limit // 2  # who once waits goes on when there is a good deal of room
                self._drain(link)
                return None
            if large is None:
                link.outgoing.post(frame, descriptor)
            else:
                large.head = frame
                link.outgoing.post_large(large)
            if large is not None or not more:
                self._drain(link)
            return True

        with self._interrupts:
            if self._wait(link.senders, queued, deadline) is None:
                return False
            if large is None:
                return True
            try:
                self._wait(link.senders, lambda: large.done or None, deadline)
            finally:
                with self._section:
                    link.outgoing.give_up(large)
                    self._drain(link)
        if link.ended and large.failed:
            raise _NotSent("the link has ended: not sent")
        return not large.failed

    def _drain(self, link: _Link) -> None:
        """Write what the kernel takes."""
        if link.asleep and link.socket is None and not link.ended and link.outgoing:
            link.asleep = False
            self._put_event(_news(contract.WANTED, link.number))
        if link.writing or link.blocked or link.socket is None:
            return
        link.writing = True
        try:
            while self._write_once(link, link.socket):
                pass
        finally:
            link.writing = False
        if link.outgoing.size <= self._backlog_limit // 2:
            for sleeper in link.senders:
                sleeper.ring()
        if link.half_closed and not link.outgoing and not link.sealed:
            _shut_down(link.socket, socket.SHUT_WR)

    def _write_once(self, link: _Link, connection: socket.socket) -> bool:
        """One system call, or one turn of the pump. False: nothing is left, or the kernel takes no more."""
        spans, descriptor = ([link.sealed], None) if link.sealed else link.outgoing.next()
        if not spans:
            return False
        try:
            if link.pump is not None and not link.sealed:
                spans = _at_most(spans, _MOST_SEALED)
                link.sealed = memoryview(link.pump.seal(spans))
                self._wrote(link, sum(map(len, spans)))
                return True
            if descriptor is None:
                sent = connection.sendmsg(spans)
            else:
                sent = socket.send_fds(connection, spans, [descriptor.number])
        except BlockingIOError:
            link.blocked = True
            self._watch(connection, link)
            return False
        except Exception as error:  # of the system, or of the pump
            link.why = str(error)
            _shut_down(connection, socket.SHUT_RDWR)  # the reader finds the end, behind what the peer has sent
            return False
        link.sent_bytes += sent
        if link.sealed:
            link.sealed = link.sealed[sent:]
        else:
            self._wrote(link, sent)
        return True

    def _wrote(self, link: _Link, count: int) -> None:
        if link.outgoing.wrote(count):
            for sleeper in link.senders:
                sleeper.ring()

    # ------------------------------------------------------------------ calls

    def _enter(self, call: _Call) -> None:
        call.number = call.number or self._last_call + 1
        self._last_call = max(self._last_call, call.number)
        self._calls[call.number] = call
        if call.told:
            self._look_at(call, call.deadline)

    def call(self, link: int, head: bytes, pieces: Sequence[Piece] = (), deadline: float = inf) -> Arrived:
        call = _Call(link, deadline, of_call=True, number=_checked(head, pieces).call)
        is_late = False
        with self._interrupts:
            try:
                sent = self._send(link, head, pieces, deadline, call=call)
                found = self._wait(call.waiting, lambda: self._outcome(call), deadline) if sent else None
                is_late = sent and found is None
            except _NotSent:
                return self._arrived(_news(contract.ENDED, link, call.number, contract.NOT_SENT))
            finally:
                if not is_late:
                    self._cancel(call)  # unless it is over
        if found is None:
            return self._arrived(_news(contract.OVERDUE, link, call.number, 0 if sent else contract.NOT_SENT))
        arrived: Arrived = found[0]
        return arrived

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
        header = _checked(head, pieces)
        passed = None
        if descriptor >= 0:
            passed = Descriptor(os.dup(descriptor))
            head = with_flags(head, header.flags | contract.CARRIES)
        call = _Call(link, deadline, told, header.call) if header.kind == contract.REQUEST else None
        try:
            if not self._send(link, head, pieces, deadline, call=call, patient=patient, more=more, descriptor=passed):
                raise CoreError("there was no room before the deadline: not sent")
        except BaseException:
            if call is not None:
                self._cancel(call)
            raise
        return 0 if call is None else call.number

    @_entered
    def flush(self, link: int) -> None:
        self._drain(self._at(link))

    def answer(self, link: int, number: int, head: bytes, pieces: Sequence[Piece] = (), *, more: bool = False) -> None:
        _checked(head, pieces)
        self.finished(link, number)
        self._send(link, with_call(head, number), pieces, inf, more=more)

    @_entered
    def finished(self, link: int, number: int) -> None:
        at = self._at(link)
        at.requests.pop(number, None)
        self._forget_ended(at)

    def _outcome(self, call: _Call) -> tuple[Any] | None:
        """What whoever waits for the call gets, as the only item of a tuple: the call is over then."""
        if self._calls.get(call.number) is not call:
            raise CoreError("there is no such call: it is over")
        if call.state is _State.ANSWERED:
            assert call.answer is not None
            call.answer.waited_for = True
            del self._calls[call.number]
            return (self._arrived(call.answer),)
        if call.state is _State.SETTLED:
            del self._calls[call.number]
            return (call.value,)
        return None

    def wait(self, number: int, deadline: float = inf) -> Any:
        with self._section:
            self._alive()
            call = self._calls.get(number)
        if call is None:
            raise CoreError("there is no such call: it is over")
        with self._interrupts:
            try:
                found = self._wait(call.waiting, lambda: self._outcome(call), min(deadline, call.deadline))
            except BaseException:
                with self._section:
                    if call.state is _State.ANSWERED and not call.waiting:
                        self._let_lie(call)
                raise
        return self._arrived(_news(contract.OVERDUE, 0, number)) if found is None else found[0]

    @_entered
    def done(self, number: int) -> bool:
        call = self._calls.get(number)
        return call is None or call.state in (_State.ANSWERED, _State.SETTLED)

    @_entered
    def tell(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None or call.told:
            return
        call.told = True
        if call.state is _State.PENDING:
            self._look_at(call, call.deadline)
        elif call.state is _State.ANSWERED:
            answer, call.answer, call.state = call.answer, None, _State.HANDED
            assert answer is not None
            if answer.kind == contract.ENDED:
                self._put_event(answer)
            else:
                self._put_work(answer)

    @_entered
    def settle(self, number: int, value: object) -> None:
        call = self._calls.get(number)
        if call is None or call.state is not _State.HANDED:
            return
        if call.told and not call.waiting:  # whoever was told has it
            del self._calls[number]
            return
        call.value, call.state = value, _State.SETTLED
        for sleeper in call.waiting:
            sleeper.ring()

    @_entered
    def cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            self._cancel(call)

    def _cancel(self, call: _Call) -> None:
        with self._section:
            if self._stopped or self._calls.get(call.number) is not call:
                return
            del self._calls[call.number]
            for sleeper in call.waiting:
                sleeper.ring()
            if call.state is _State.ANSWERED and call.answer is not None and call.answer.kind != contract.ENDED:
                self._drop(call.answer)
            link = self._links.get(call.link)
            if call.state is not _State.PENDING or link is None or link.ended:
                return
            if link.to_self:
                self._cancel_came(link, call.number)
            else:
                link.outgoing.post(bare_frame(contract.CANCEL, 0, call.number))
                self._drain(link)

    # ------------------------------------------------------------------ what has come

    def _deliver(self, link: _Link, message: Message) -> None:
        message.link, message.at = link.number, link.heard
        if message.kind == contract.ACKNOWLEDGE:
            link.outgoing.acknowledged(message.number)
            return
        if message.kind == contract.CANCEL:
            self._cancel_came(link, message.number)
            return
        if message.kind == contract.REQUEST:
            self._requests += 1
            link.requests[message.number] = _Served(kept=bool(message.flags & contract.KEPT))
            waiting = self._waiting()
            if not message.flags & contract.OWNER and waiting >= self._queue_limit:
                if message.flags & contract.REFUSABLE:
                    message.refused = True
                elif not link.is_full:
                    link.is_full = True
                    self._put_event(_news(contract.FULL, link.number, waiting))
        if message.flags & contract.OWNER:
            if message.kind == contract.REQUEST:
                link.requests[message.number].running = True
            self._put_event(message)
            return
        if not link.admitted:
            message.flags |= contract.MARKED
        # What is not marked does not pass a marked frame that came before it either.
        link.order.append(message)
        self._advance(link)

    def _advance(self, link: _Link) -> None:
        while link.order and not link.paused and not link.placing:
            message = link.order.popleft()
            link.placing = bool(message.flags & contract.MARKED)
            self._hand_out(link, message)
        self._look_for_room()
        self._forget_ended(link)

    def _waiting(self) -> int:
        """Work, and requests that wait for their turn."""
        held = sum(each.kind == contract.REQUEST for link in self._links.values() for each in link.order)
        return len(self._queue) + held

    def _hand_out(self, link: _Link, message: Message) -> None:
        if message.kind == contract.REQUEST:
            served = link.requests.get(message.number)
            if served is None:
                self._drop(message)  # cancelled while it waited for its turn
            elif message.refused:
                served.running = True
                self._put_event(message)
            else:
                self._put_work(message)
        elif message.kind in _ANSWERS:
            self._answer_came(message)
        elif message.kind == contract.LETTER:
            self._letter_came(link, message)
        else:
            self._put_work(message)

    def _answer_came(self, message: Message) -> None:
        call = self._calls.get(message.number)
        if call is None or call.state is not _State.PENDING or call.link != message.link:
            self._drop(message)
        elif call.told or (message.flags & contract.MARKED and not call.is_awaited):  # a marked answer never lies
            call.state = _State.HANDED
            self._put_work(message)
        else:
            self._answered(call, message)
            if not call.is_awaited:
                self._let_lie(call)

    def _answered(self, call: _Call, answer: Message) -> None:
        call.state, call.answer = _State.ANSWERED, answer
        for sleeper in call.waiting:
            sleeper.ring()

    def _let_lie(self, call: _Call) -> None:
        """Nobody waits for the answer in the core."""
        if call.answer is not None and call.answer.flags & contract.MARKED and call.answer.kind != contract.ENDED:
            self._put_work(call)
        else:
            self._look_at(call, monotonic() + _LIE_S)

    def _letter_came(self, link: _Link, message: Message) -> None:
        slot = link.slots.get(message.number)
        if slot is None or not slot.waiting:
            self._put_work(message)
        else:
            slot.letters.append(message)
            slot.waiting[0].ring()

    def _cancel_came(self, link: _Link, number: int) -> None:
        served = link.requests.get(number)
        if served is None or served.kept:
            return  # answered, or never here; or others want it
        if not served.running:
            del link.requests[number]  # it waits in the queue, or for its turn; whoever comes upon it drops it
        elif not served.cancelled:
            served.cancelled = True
            self._put_event(_news(contract.CANCELLED, link.number, number))

    def _drop(self, message: Message) -> None:
        """Nobody wants this frame. If there is something to decline in it, a worker does that."""
        if message.has_belongings:
            message.kind = contract.DROPPED
            self._put_work(message)

    def _put_work(self, work: Message | _Call | _Task) -> None:
        self._queue.append(work)
        self._wake_worker()
        self._look_for_starvation()

    def _put_event(self, message: Message) -> None:
        self._events.append(message)
        self._events_bell.ring()

    def _arrived(self, message: Message) -> Arrived:
        """A message for Python."""
        is_frame = message.kind <= contract.CANCEL or message.kind == contract.DROPPED
        in_order = is_frame and message.flags & contract.MARKED and not message.flags & contract.OWNER
        fields = [getattr(message, name) for name in Arrived._fields[:-3]]
        descriptor = -1 if message.descriptor is None else message.descriptor.release()
        return Arrived._make([*fields, Handle(self, message) if in_order else None, descriptor, message.at])

    # ------------------------------------------------------------------ placing

    def _use(self, handle: contract.Handle) -> _Link | None:
        if not isinstance(handle, Handle):
            raise TypeError("this is no handle of a frame")
        if handle.placed:
            raise CoreError("this frame is placed already")
        self._alive()
        handle.placed = True
        link = self._links.get(handle.message.link)
        if link is not None:
            link.placing = False
        return link

    def placed(self, handle: contract.Handle) -> None:
        with self._section:
            if link := self._use(handle):
                self._advance(link)

    def _put_back(self, handle: contract.Handle) -> tuple[_Link, Message] | None:
        """As if this frame had not been handed out."""
        link = self._use(handle)
        if link is None or not isinstance(handle, Handle):
            return None
        message = handle.message
        if message.kind == contract.REQUEST and (served := link.requests.get(message.number)):
            served.running = False
            if link.over and not served.kept:
                del link.requests[message.number]
        elif message.kind in _ANSWERS:
            if message.waited_for:
                self._calls[message.number] = _Call(link.number, inf, number=message.number)
            elif (call := self._calls.get(message.number)) and call.state is _State.HANDED:
                call.state = _State.PENDING
            message.waited_for = False
        return link, message

    def pause_behind(self, handle: contract.Handle) -> None:
        with self._section:
            if found := self._put_back(handle):
                found[0].order.appendleft(found[1])
                found[0].paused = True

    def defer(self, handle: contract.Handle) -> None:
        with self._section:
            if found := self._put_back(handle):
                found[0].deferred.append(found[1])
                self._advance(found[0])

    @_entered
    def recall(self, link: int) -> None:
        at = self._at(link)
        at.order.extendleft(reversed(at.deferred))
        at.deferred.clear()
        self._advance(at)

    @_entered
    def unpause(self, link: int) -> None:
        at = self._at(link)
        at.paused = False
        self._advance(at)

    def _abandon(self, handle: Handle) -> None:
        """Whoever was to place this frame has not begun."""
        if self._section.forked:
            return
        with self._section:
            if not self._stopped and (found := self._put_back(handle)):
                found[0].order.appendleft(found[1])
                self._advance(found[0])

    # ------------------------------------------------------------------ letters

    @_entered
    def open_slot(self, link: int, number: int) -> None:
        self._at(link).slots.setdefault(number, _Slot())

    def take(self, link: int, number: int, deadline: float = inf) -> Arrived | None:
        with self._section:
            self._alive()
            at = self._at(link)
            slot = at.slots.get(number)
        if slot is None:
            return None
        with self._interrupts:
            return self._take(at, number, slot, deadline)

    def _take(self, link: _Link, number: int, slot: _Slot, deadline: float) -> Arrived | None:
        wakes = slot.wakes - slot.unheard

        def letter() -> tuple[Arrived | None] | None:
            slot.unheard = False
            if slot.letters:
                return (self._arrived(slot.letters.popleft()),)
            is_over = slot.wakes != wakes or link.ended or link.slots.get(number) is not slot
            return (None,) if is_over else None

        found = None
        try:
            found = self._wait(slot.waiting, letter, deadline)
        except Stopped:
            pass
        finally:
            with self._section:
                if found is None and not slot.waiting:  # nobody waits here any more
                    self._pass_on(slot)
        return None if found is None else found[0]

    def _pass_on(self, slot: _Slot) -> None:
        while slot.letters:
            self._put_work(slot.letters.popleft())

    @_entered
    def wake(self, link: int, number: int) -> None:
        if slot := self._at(link).slots.get(number):
            self._wake(slot)

    def _wake(self, slot: _Slot) -> None:
        slot.wakes += 1
        slot.unheard = not slot.waiting
        for sleeper in slot.waiting:
            sleeper.ring()

    @_entered
    def close_slot(self, link: int, number: int) -> None:
        at = self._at(link)
        if slot := at.slots.pop(number, None):
            self._pass_on(slot)
            self._wake(slot)
            self._forget_ended(at)

    # ------------------------------------------------------------------ workers

    def next(self, deadline: float = inf) -> Any:
        try:
            with self._interrupts:
                found = self._next(deadline)
        except Stopped:
            if self._section.forked:
                raise
            return None
        return None if found is None else found[0]

    def _next(self, deadline: float) -> tuple[Any] | None:
        with self._section:
            self._end_run()
            self._serves = True
            self._available += 1
        try:
            return self._wait(self._idle, self._pick, deadline)
        finally:
            with self._section:
                self._available -= 1
                self._look_for_starvation()

    def _pick(self) -> tuple[Any] | None:
        """The oldest work that is still wanted, as the only item of a tuple."""
        while self._queue:
            work = self._queue.popleft()
            self._look_for_room()
            if isinstance(work, _Task):
                found: Any = work.task
            elif isinstance(work, _Call):
                if work.state is not _State.ANSWERED or self._calls.get(work.number) is not work:
                    continue  # somebody has asked
                answer, work.answer, work.state = work.answer, None, _State.HANDED
                assert answer is not None
                found = self._arrived(answer)
            else:
                if not self._start(work):
                    continue
                found = self._arrived(work)
            worker = self._worker()
            worker.running = True
            self._busy += 1
            self._starved = False
            self._wake_worker()
            return (found,)
        return None

    def _start(self, message: Message) -> bool:
        """A worker, or who places it, has it. False: nobody wants it, and there is nothing to decline."""
        if message.kind == contract.REQUEST:
            link = self._links.get(message.link)
            if link is not None and (served := link.requests.get(message.number)):
                served.running = True
            elif not message.has_belongings:
                return False
            else:
                message.kind = contract.DROPPED  # its caller gave up, or is gone
        return True

    def _look_for_room(self) -> None:
        full = [link for link in self._links.values() if link.is_full]
        if full and self._waiting() <= self._queue_limit / 2:
            for link in full:
                link.is_full = False
            self._put_event(_news(contract.ROOM))

    def _worker(self) -> _Worker:
        """That which this thread is."""
        worker: _Worker | None = getattr(self._here, "worker", None)
        if worker is None:
            worker = self._here.worker = _Worker()
        return worker

    def _end_run(self) -> None:
        worker = self._worker()
        if worker.running:
            self._busy -= not worker.waits
            worker.running, worker.waits = False, 0
            self._starved = False
            self._hungry_at = inf

    def _wake_worker(self) -> None:
        """The one that came last has the warmest memory. Whoever takes work wakes the next one."""
        if self._queue and self._idle:
            self._idle.pop().ring()

    @_entered
    def work(self, task: object) -> None:
        self._put_work(_Task(task))

    @_entered
    def to_place(self) -> list[Arrived]:
        queue, self._queue = self._queue, deque()
        found: list[Message] = []
        for work in queue:
            if isinstance(work, Message) and work.flags & contract.MARKED and work.kind not in _ANSWERS:
                found.append(work)
            else:
                self._queue.append(work)
        return [self._arrived(message) for message in found if self._start(message)]

    @_entered
    def begin_wait(self) -> None:
        self._begin_wait()

    def _begin_wait(self) -> None:
        worker = self._worker()
        if worker.running:
            worker.waits += 1
            if worker.waits == 1:
                self._busy -= 1
                self._look_for_starvation()

    @_entered
    def end_wait(self) -> None:
        self._end_wait()

    def _end_wait(self) -> None:
        worker = self._worker()
        if worker.running and worker.waits:
            worker.waits -= 1
            self._busy += not worker.waits

    def _look_for_starvation(self) -> None:
        """Does work wait, and no worker come for it?"""
        if not self._queue or self._available or not self._serves:
            return
        now = monotonic()
        if self._hungry_at <= now or not (self._busy or self._starved):
            self._starved = True
            self._hungry_at = inf
            self._put_event(_news(contract.STARVED))
        if self._hungry_at == inf:
            self._hungry_at = now + _HUNGRY_S
            self._wake_reader(self._hungry_at)

    @_entered
    def limit_queue(self, most: int) -> None:
        self._queue_limit = most
        self._look_for_room()

    @_entered
    def queued(self) -> list[Arrived]:
        held = [message for link in self._links.values() for message in (*link.deferred, *link.order)]
        wanted = [
            work
            for work in (*self._queue, *held)
            if isinstance(work, Message)
            and work.kind == contract.REQUEST
            and work.number in self._at(work.link).requests
        ]
        return [
            self._arrived(replace(each, flags=each.flags & ~contract.MARKED, payload=b"", buffers=[], descriptor=None))
            for each in wanted
        ]

    # ------------------------------------------------------------------ the event thread

    @_entered
    def fileno(self) -> int:
        return self._events_bell.fileno()

    @_entered
    def events(self) -> list[Arrived]:
        self._events_bell.unring()
        news = [self._arrived(message) for message in self._events]
        self._events.clear()
        return news

    @_entered
    def counts(self) -> Counts:
        links = self._links.values()
        return Counts(
            pending=len(self._calls),
            queued=len(self._queue) + sum(len(link.order) + len(link.deferred) for link in links),
            running=sum(served.running for link in links for served in link.requests.values()),
            last_call=self._last_call,
            last_request=self._requests,
        )

    def trim(self) -> None:
        """Nothing is kept here to be used again."""

    # ------------------------------------------------------------------ the reader

    def _read_forever(self) -> None:
        while True:
            with self._section:
                if self._stopped:
                    return
                self._reader_bell.unring()
                self._look_at_clock()
                while self._changes:
                    self._apply(*self._changes.pop(0))
                timeout = None if self._looks_at == inf else max(self._looks_at - monotonic(), 0.0)
            for key, events in self._selector.select(timeout):
                link: _Link | None = key.data
                if link is None:
                    continue  # the bell: something is to be looked at above
                with self._section:
                    connection = link.socket
                    if connection is None or connection is not key.fileobj or self._stopped:
                        continue  # it was closed meanwhile
                    if events & selectors.EVENT_WRITE and link.blocked:
                        link.blocked = False
                        self._watch(connection, link)
                        self._drain(link)
                    if events & selectors.EVENT_READ and link.readable:
                        self._read(link, connection)

    def _watch(self, connection: socket.socket, link: _Link) -> None:
        """What the reader has to look for has changed."""
        self._changes.append((connection, link))
        self._wake_reader(-inf)

    def _wake_reader(self, at: float) -> None:
        """It is to look no later than at this time."""
        if at < self._looks_at and threading.get_ident() != self._reader.ident:
            self._reader_bell.ring()

    def _apply(self, connection: socket.socket, link: _Link) -> None:
        events = 0
        if link.socket is connection:
            events = selectors.EVENT_READ * link.readable | selectors.EVENT_WRITE * link.blocked
        try:
            self._selector.unregister(connection)
        except (KeyError, ValueError):
            pass
        if events:
            self._selector.register(connection, events, link)

    def _look_at(self, call: _Call, at: float) -> None:
        if at < inf:
            heapq.heappush(self._timers, (at, call.number))
            self._wake_reader(at)

    def _look_at_clock(self) -> None:
        now = monotonic()
        while self._timers and self._timers[0][0] <= now:
            call = self._calls.get(heapq.heappop(self._timers)[1])
            if call is None:
                continue
            if call.state is _State.PENDING and call.told:
                self._put_event(_news(contract.OVERDUE, call.link, call.number))
            elif call.state is _State.ANSWERED and not call.is_awaited:
                self._put_work(call)
        if self._hungry_at <= now:
            self._look_for_starvation()
            if self._hungry_at <= now:
                self._hungry_at = inf
        self._looks_at = min(self._hungry_at, self._timers[0][0] if self._timers else inf)

    def _read(self, link: _Link, connection: socket.socket) -> None:
        """Deliver what is there, and acknowledge it."""

        def read() -> str | None:
            for _ in range(_MOST_READ // _READ_BYTES):
                data = self._receive(link, connection)
                if not data:
                    return link.why
                link.received_bytes += len(data)
                self._take_bytes(link, data if link.pump is None else link.pump.open(data))
                if len(link.descriptors) > _MOST_DESCRIPTORS:
                    raise WireError("the peer sent descriptors that no frame is for")
                if len(data) < _READ_BYTES:
                    break
            return None

        self._guard(link, connection, read)

    def _guard(self, link: _Link, connection: socket.socket, read: Callable[[], str | None]) -> None:
        """``read`` the connection, which is over if that returns or raises a reason."""
        why: str | None = None
        how = 0
        try:
            why = read()
        except BlockingIOError:
            pass
        except Exception as error:  # of the system, of the peer, or of the pump
            why = str(error) or type(error).__name__
            how = contract.UNKNOWN if isinstance(error, WireError) else 0
        self._acknowledge(link)
        if why is not None:
            link.readable = False
            self._watch(connection, link)
            self._put_event(_news(contract.ENDED, link.number, 0, how, why))

    def _take_bytes(self, link: _Link, data: bytes) -> None:
        link.heard = monotonic()
        for message in link.decoder.feed(data):
            if message.flags & contract.CARRIES and link.descriptors:  # else it left without
                message.descriptor = link.descriptors.popleft()
            self._deliver(link, message)

    def _receive(self, link: _Link, connection: socket.socket) -> bytes:
        if not link.outgoing.carries_descriptors:
            return connection.recv(_READ_BYTES)
        data, descriptors, *_ = socket.recv_fds(connection, _READ_BYTES, 16, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        link.descriptors.extend(map(Descriptor, descriptors))
        return data

    def _acknowledge(self, link: _Link) -> None:
        count = link.decoder.count
        many = count - link.acknowledged >= _ACKNOWLEDGE_FRAMES
        much = link.received_bytes - link.acknowledged_bytes >= _ACKNOWLEDGE_BYTES
        if count > link.acknowledged and (many or much):
            link.acknowledged, link.acknowledged_bytes = count, link.received_bytes
            link.outgoing.post(bare_frame(contract.ACKNOWLEDGE, 0, count))
            self._drain(link)

    # ------------------------------------------------------------------ the end

    def stop(self) -> None:
        if self._section.forked:
            return
        with self._section:
            if self._stopped:
                return
            self._stopped = True
            for sleeper in self._asleep:
                sleeper.ring()
            if not self._asleep:
                self._all_left.set()
            self._reader_bell.ring()
        try:
            self._all_left.wait()
        finally:
            self._reader.join()
            with self._section:
                for link in list(self._links.values()):
                    self._end(link)
                for held in self._queue, self._calls, self._events, self._links:
                    held.clear()
                self._close()

    def _close(self) -> None:
        self._selector.close()
        self._reader_bell.close()
        self._events_bell.close()

    def close_after_fork(self) -> None:
        if self._section.forked and not self._stopped:
            self._stopped = True
            for link in self._links.values():
                if link.socket is not None:
                    link.socket.close()
            self._close()


def _checked(head: bytes, pieces: Sequence[Piece]) -> Header:
    return whole_frame(head, len(head) + sum(memoryview(piece).nbytes for piece in pieces))


def _news(kind: int, link: int = 0, number: int = 0, flags: int = 0, why: str = "") -> Message:
    return Message(kind, flags, number, link, function=why.encode(errors="replace"), at=monotonic())


def _at_most(spans: list[memoryview], size: int) -> list[memoryview]:
    """The first ``size`` bytes."""
    taken = []
    for span in spans:
        if size > 0:
            taken.append(span[:size])
            size -= len(span)
    return taken


def _shut_down(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        pass  # the peer was quicker
