"""The writing end of a stream: items become letters, as fast as the reader's credit allows.

The writer pickles an item when it is yielded, so the producer may change it at once. Small items share one letter. A
large item, or one with references or on a device, is a letter of its own; such letters share one write. The writer
holds back items and letters only while the next item comes quickly, HOLD_S at most.

Thread rules: one thread, or one coroutine, puts items. The I/O thread flushes items that were held back for too long,
and delivers credit and the close. It never waits for the lock, but tries again later.

Over 400 lines: one stream, from the generator to the letters.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from farcall.errors import RpcError
from farcall.protocol.frames import LARGE_BYTES, LETTER, REQUEST, RESPONSE, Frame
from farcall.protocol.notes import write_notes
from farcall.protocol.streams import WINDOW_BYTES, WINDOW_ITEMS, Part, WriterMachine, encode_part
from farcall.rpc.outcome import LoopGate, Opens
from farcall.runtime.calls.coroutines import Concluded
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.pending import Waiting
from farcall.runtime.calls.scope import CURRENT, Dependents
from farcall.runtime.calls.serving import Request, Server
from farcall.runtime.io.sigint import Gate
from farcall.runtime.peers.peer import Peer
from farcall.serialize import has_devices, withdraw, write_value

if TYPE_CHECKING:
    from farcall.rpc.node_streams import Streams

logger: logging.Logger = logging.getLogger("farcall")

STREAMS = 2
"""The subject of these letters, in place of the call id."""
HOLD_S = 0.001
"""The longest time that an item is held back, to share a letter with the next."""
QUICK_S = 0.0001
"""A stream is quick if its last item came within this time; only then are items held back, and letters no longer.

Letters of 1 MiB that were held back for 200 us kept the reader waiting, and so its credit: 0.85 of the rate.
"""
MOST_ITEMS = 256
MOST_BYTES = LARGE_BYTES // 2
"""The most items, and bytes, that share a letter."""
_PLAIN = frozenset((int, float, bool, type(None)))
_TEXTS = frozenset((str, bytes))
_SMALL = 1024


class Closed(Exception):
    """The reader has closed the stream, or is gone."""


class _Segment(msgspec.Struct):
    """Items that were pickled together, in one frame."""

    items: int
    frame: Frame
    size_bytes: int
    alone: bool
    """Is it a letter of its own?"""
    copied: bool
    """Are its buffers copies, which nobody changes?"""


_Unsent: TypeAlias = tuple[Any, _Segment | None]


class Writer:
    """The writing end of one stream.

    Mutable: under the lock, items that are not sent yet (``_plain``, ``_segments``), and ``_held_since``, the time of
    the oldest held-back item or letter (0: none); the machine, whose credit only grows; ``closed``, once; ``_gate``,
    where the producer of items waits for credit; ``thread_id`` and ``began_at``, once.
    """

    def __init__(self, streams: Streams, peer: Peer, number: int, *, outgoing: bool) -> None:
        self._streams = streams
        self.peer: Peer = peer
        self.number: int = number
        self._outgoing = outgoing
        # The reader of an outgoing stream grants its first credit when it begins; a stream call grants it by calling.
        self._machine = WriterMachine() if outgoing else WriterMachine(WINDOW_ITEMS, WINDOW_BYTES)
        self._lock = threading.Lock()
        self._plain: list[Any] = []
        self._segments: list[_Segment] = []
        self._waiting_bytes = 0
        self._held_since = 0.0
        self._flushed = 0
        self._last_at = 0.0
        self._gate: Opens | None = None
        self.closed: bool = False
        self.thread_id: int = 0
        """The thread that makes the items of an outgoing stream; 0: it has not begun."""
        self.began_at: float = 0.0

    def begin(self) -> None:
        """The calling thread begins to make the items of an outgoing stream."""
        self.began_at = monotonic()
        self.thread_id = threading.get_ident()

    # --- from the reader, on any thread; never blocks -------------------------------------------------------

    def on_credit(self, items: int, size_bytes: int) -> None:
        """The reader has granted these totals."""
        self._machine.on_credit(items, size_bytes)
        self._open_gate()

    def close(self) -> None:
        """Stop: the reader wants no more items."""
        self.closed = True
        self._open_gate()

    def _open_gate(self) -> None:
        gate = self._gate
        if gate is not None:
            gate.open()

    def describe(self) -> str:
        """Return the progress, in words."""
        waits = ", its reader takes no more yet" if self._gate is not None else ""
        return f"{self._machine.sent_items:,} items{waits}"

    # --- by the maker of the items --------------------------------------------------------------------------

    def put(self, item: Any) -> None:
        """Send ``item`` soon; wait while the reader grants no credit. Raise `Closed` if the stream is closed."""
        self.put_rest(self.put_in_turn(item))

    def put_in_turn(self, item: Any) -> _Unsent | None:
        """Like `put`, but return the item if the reader grants no credit: pickled, nothing changes it any more."""
        segment = self._segment(item)
        try:
            if self._must_wait():
                _keep(segment)
                return item, segment
        except BaseException:
            _withdraw(segment)
            raise
        self._add(item, segment)
        return None

    def put_rest(self, unsent: _Unsent | None) -> None:
        """Do what `put_in_turn` has left to do: wait for credit, and send the item."""
        if unsent is None:
            return
        item, segment = unsent
        try:
            while self._must_wait():
                gate = Gate()
                if self._waits_at(gate):
                    with self.waiting():
                        gate.wait()
                self._gate = None
        except BaseException:
            _withdraw(segment)
            raise
        self._add(item, segment)

    def waiting(self) -> Waiting:
        """Enter this around every wait of the producer."""
        return self._streams.node.calls.waiting()

    async def put_soon(self, item: Any) -> None:
        """Like `put`, for a coroutine."""
        segment = self._segment(item)
        try:
            while self._must_wait():
                _keep(segment)
                gate = LoopGate(asyncio.get_running_loop())
                if self._waits_at(gate):
                    await gate.passed
                self._gate = None
        except BaseException:
            _withdraw(segment)
            raise
        self._add(item, segment)

    def _must_wait(self) -> bool:
        if self.closed:
            raise Closed
        if self._machine.has_room:
            return False
        with self._lock:
            self._flush()  # the reader may be waiting for exactly the items that are held back
        return True

    def _waits_at(self, gate: Opens) -> bool:
        self._gate = gate  # before the check: `on_credit` and `close` change the state first and read the gate then
        return not self._machine.has_room and not self.closed

    def _segment(self, item: Any) -> _Segment | None:
        """Pickle ``item``. None: its type is immutable, so it can be pickled later, together with others."""
        kind = item.__class__
        if kind in _PLAIN or (kind in _TEXTS and len(item) < _SMALL):
            return None
        frame = Frame(REQUEST if self._outgoing else RESPONSE)  # the kind decides how devices are mapped
        write_value(frame, [item], self.peer)
        frame.kind, frame.call_id = LETTER, STREAMS
        size_bytes = frame.size_bytes
        alone = bool(frame.undo) or size_bytes >= MOST_BYTES or has_devices(frame.payload)
        segment = _Segment(1, frame, size_bytes, alone, not frame.buffers)
        if not alone or getattr(self.peer, "lending", None) is None:
            _keep(segment)  # shared memory gets its own copy, in `put`
        return segment

    def _add(self, item: Any, segment: _Segment | None) -> None:
        now = perf_counter()
        quick = now - self._last_at < QUICK_S
        self._last_at = now
        with self._lock:
            if segment is None:
                self._machine.send(1, 0)  # `_pack` counts the bytes
                self._plain.append(item)
                late = False
            else:
                if self._plain:
                    self._pack()
                if segment.alone and self._segments:
                    self._put_out()
                self._machine.send(1, segment.size_bytes)
                self._segments.append(segment)
                self._waiting_bytes += segment.size_bytes
                if segment.alone:
                    self._put_out()
                late = segment.alone and now - (self._held_since or now) >= QUICK_S
            count = len(self._plain) + len(self._segments)
            if late or not quick or count >= MOST_ITEMS or self._waiting_bytes >= MOST_BYTES:
                self._flush()
                return
            if self._held_since:
                return
            self._held_since = now
        self._streams.flush_later(self)

    def finish(self, failure: Frame | None) -> None:
        """Send the end of the stream; with ``failure``, if an error ended it."""
        part = Part(self.number, self._outgoing, self._machine.sent_items, [], True)
        frame = Frame(LETTER, 0, STREAMS, encode_part(part))
        if failure is not None:
            frame.payload, frame.buffers = failure.payload, failure.buffers
        with self._lock:
            self._put_out_all()
            self.peer.send(frame)

    # --- letters --------------------------------------------------------------------------------------------

    def flush_nowait(self) -> bool:
        """On the I/O thread: send held-back items. False: the producer holds the lock; try again."""
        if not self._lock.acquire(False):
            return False
        try:
            self._flush()
        except RpcError:
            self.close()  # the reader's node is gone
        finally:
            self._lock.release()
        return True

    def _pack(self) -> None:
        """Make one segment of the plain items. The caller holds the lock."""
        frame = Frame(LETTER)
        write_value(frame, self._plain, self.peer)
        segment = _Segment(len(self._plain), frame, frame.size_bytes, False, True)
        self._machine.send(0, segment.size_bytes)
        self._waiting_bytes += segment.size_bytes
        self._segments.append(segment)
        self._plain = []

    def _flush(self) -> None:
        """Send everything that is held back. The caller holds the lock."""
        self._held_since = 0.0
        self._put_out_all()
        self.peer.flush()

    def _put_out_all(self) -> None:
        if self._plain:
            self._pack()
        if self._segments:
            self._put_out()

    def _put_out(self) -> None:
        """Queue one letter of all segments; the next letter or a flush sends it. The caller holds the lock.

        Without the memory for the letter, the segments stay: a later flush sends them.
        """
        segments = self._segments
        frame = segments[0].frame
        if len(segments) > 1:
            payload = b"".join([segment.frame.payload for segment in segments])
            buffers = [buffer for segment in segments for buffer in segment.frame.buffers]
            frame = Frame(LETTER, payload=payload, buffers=buffers)
        counts = []
        items = 0
        for segment in segments:
            counts.append((segment.items, len(segment.frame.payload), len(segment.frame.buffers)))
            items += segment.items
        part = encode_part(Part(self.number, self._outgoing, self._flushed, counts))
        frame.call_id, frame.function = STREAMS, part
        if frame.forks:
            write_notes(frame)
        stays = False
        try:
            self.peer.send(frame, more=True)
        except BaseException as error:
            stays = not frame.handed_over and not isinstance(error, RpcError)
            if not stays:
                withdraw(frame)
            raise
        finally:
            if not stays:
                self._segments = []
                self._waiting_bytes = 0
                self._flushed += items
                self._streams.items_written += items


def _keep(segment: _Segment | None) -> None:
    """Copy the memory of an item: it keeps the value that it had when it was put, whoever changes it from now on."""
    if segment is not None and not segment.copied:
        segment.frame.buffers = [memoryview(bytearray(buffer)) for buffer in segment.frame.buffers]
        segment.copied = True


def _withdraw(segment: _Segment | None) -> None:
    """Undo the pickling of an item that is not sent: give back its references and blocks of shared memory."""
    if segment is not None:
        withdraw(segment.frame)


class StreamRequest(Request):
    """A request whose function returns an iterable or async iterable; it sends the items, and then the answer."""

    __slots__ = ("_turn_comes", "writer")

    is_ordered = True  # a failure must not pass the items before it

    def __init__(self, streams: Streams, server: Server, peer: Peer, frame: Frame) -> None:
        super().__init__(server, peer, frame)
        self.writer: Writer = Writer(streams, peer, frame.call_id, outgoing=False)
        self._turn_comes = Gate()  # of a serial object

    def stop_writing(self) -> None:
        self.writer.close()
        self._turn_comes.open()

    def progress(self) -> str:
        return f" (stream, {self.writer.describe()})"

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """The function has returned: write the items of its result, on another worker or on the event loop."""
        source = outcome.pop()
        if self.cancelled:
            self.server.ended(self)  # the generator has not begun: there is nothing to close
            return
        Dependents.watch(self, self.stop_writing)
        turns = self.frame.turns
        if isinstance(source, Iterable):
            if turns is not None:
                source = turns.items(source, self.writer.put_in_turn, self.writer.waiting, self._turn_comes)
            self.server.submit(FunctionTask(partial(self._pump, source), self.drop))
        elif isinstance(source, AsyncIterable):
            self.deferred = True
            outer = CURRENT.set(self)  # an asyncio task copies the context at its creation
            try:
                writing: Coroutine[Any, Any, None] = _go_through(self.writer, source)
                if self.profile is not None:
                    writing = self.profile.steps(writing)
                done: Callable[[Any], None] = self._on_written
                if turns is not None:
                    concluded = Concluded(writing, done)  # an error may carry what the next call changes
                    writing, done = turns.steps(concluded, within=False), concluded.on_task
                cancel = self.server.coroutines.run(writing, done)
            except RuntimeError as error:  # no thread can be started for the event loop, or the node ends
                self.fail(error)
                return
            finally:
                CURRENT.reset(outer)
            Dependents.watch(self, cancel)
        else:
            self.fail(
                TypeError(
                    f"{self.function_name}() was called as a stream, and returned a value of type "
                    f"{type(source).__name__}: return an iterable, or make it a generator or an async generator"
                )
            )

    def _pump(self, source: Iterable[Any]) -> None:
        """On a worker: write the items of ``source``."""
        self.thread_id: int = threading.get_ident()
        outer = CURRENT.set(self)
        put = self.writer.put if self.frame.turns is None else self.writer.put_rest
        try:
            arguments = (put, source)
            error = pump(*arguments) if self.profile is None else self.profile.run(pump, arguments)
        finally:
            CURRENT.reset(outer)
        self.end(error)

    def _on_written(self, task: Any) -> None:
        # A task can be cancelled although the request is not: from within, or because the loop ends. Then the stream
        # is incomplete, and must end with an error.
        error: BaseException | None = None
        try:
            task.result()
        except BaseException as raised:
            error = raised
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """All items were put, or ``error`` ended the iteration."""
        try:
            if isinstance(error, Closed) or self.cancelled:
                self.server.ended(self)
                return
            # The error follows the last item. In the answer it could overtake large items in transit.
            self.writer.finish(None if error is None else self.failure(error))
            self.function_name: str = f"{self.function_name} (stream, {self.writer.describe()})"  # in traces
        except RpcError:
            self.server.ended(self)  # the reader's node is gone
        except Exception as unsent:
            self.fail(unsent)  # there is no memory for the last items or the end, perhaps: the reader waits for them
        else:
            super().answer([None])


async def _go_through(writer: Writer, source: AsyncIterable[Any]) -> None:
    try:
        async for item in source:
            await writer.put_soon(item)
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


def pump(put: Callable[[Any], None], source: Iterable[Any]) -> BaseException | None:
    """``put`` all items of ``source``; return the error that ended the iteration, if one did."""
    error: BaseException | None = None
    try:
        for item in source:
            put(item)
    except BaseException as raised:
        error = raised
    close = getattr(source, "close", None)
    if error is not None and close is not None and hasattr(source, "gi_frame"):
        try:
            close()  # run a generator's ``finally`` now, not at some garbage collection
        except BaseException as raised:
            error = raised if not isinstance(error, Closed) else error
            logger.warning("cannot close the generator of a stream: %s: %s", type(raised).__name__, raised)
    return error
