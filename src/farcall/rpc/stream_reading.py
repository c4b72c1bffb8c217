"""The reading end of a stream: it orders the parts that arrive, and the program takes them one by one.

The thread that reads the link only puts parts in order. The program's thread unpickles the items of a part, and grants
credit for them. Two kinds of readers exist: that of a stream call, and that of an outgoing stream, an argument whose
items the caller writes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from farcall.errors import Cancelled, RpcError, RpcTimeout
from farcall.protocol.frames import FAILURE, Frame
from farcall.protocol.notes import REFUSED
from farcall.protocol.streams import Part, ReaderMachine, StreamClosed, StreamCredit
from farcall.rpc.call import refusal
from farcall.rpc.outcome import LoopGate, Opens
from farcall.runtime.calls.pending import PendingCall
from farcall.runtime.calls.scope import CURRENT, Served
from farcall.runtime.calls.serving import Request
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.observing.counters import name_of
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure, discard, read_value

if TYPE_CHECKING:
    from farcall.rpc.node_streams import Streams
    from farcall.rpc.rref import RRef


class Reader:
    """The reading end of one stream.

    Mutable: ``ready``, parts in order, which the link's reader appends and the program's thread takes; ``_last`` and
    ``_error``, why no more come; ``closed``; ``_gate``, where the program waits; ``thread_id`` and ``waits_since``.
    """

    def __init__(self, streams: Streams, peer: Peer, what: str, *, outgoing: bool) -> None:
        self.streams: Streams = streams
        self.node: Runtime = streams.node
        self.peer: Peer = peer
        self.name: str = what
        self._outgoing = outgoing
        self._machine: ReaderMachine[tuple[Part, Frame]] = ReaderMachine(granted=not outgoing)
        self.ready: deque[tuple[Part, Frame]] = deque()
        self._gate: Opens | None = None
        self._last: Frame | None = None
        self._error: BaseException | None = None
        self.closed: bool = False
        self.number: int = 0
        self.thread_id: int = 0
        """The thread that waits for an item; 0: none, or a coroutine."""
        self.waits_since: float = 0.0
        """When the wait for an item began; 0: nobody waits."""

    # --- on the thread that reads the link ------------------------------------------------------------------

    def on_part(self, part: Part, frame: Frame) -> None:
        """Take a letter of the stream: a part, or its end."""
        self.number = part.number
        was_closed = self.closed
        if was_closed:
            discard(frame.payload, self.peer)
            return
        if part.last:
            self._last = frame
            self._machine.on_last(part.first)
        else:
            self.ready.extend(self._machine.on_part(part.first, part.items, (part, frame)))
            if self.closed:
                self._discard_all()  # `close` may have looked before the line above
        self._tell()

    def break_off(self, error: BaseException) -> None:
        """No further part will come."""
        if self._error is None:
            self._error = error
        self._tell()

    def _tell(self) -> None:
        gate = self._gate
        if gate is not None:
            gate.open()

    @property
    def holds_parts(self) -> bool:
        """Have parts come that were not taken?"""
        return bool(self.ready) or self._machine.has_ahead

    @property
    def complete(self) -> bool:
        """Have all parts come?"""
        return self._machine.complete

    # --- on the program's thread ----------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """May `take` be called without a wait?"""
        return bool(self.ready) or self._machine.complete or self._error is not None or self.closed

    def take(self) -> deque[Any]:
        """Return the items of the next part: none at the end of the stream. If it ended with an error, raise it."""
        if self.ready:
            part, frame = self.ready.popleft()
            return self._read(part, frame)
        if self._machine.complete:
            last = self._last
            if last is not None and len(last.payload):
                self._last = None
                raise decode_failure(last, self.peer)
        elif self._error is not None:
            raise self._error
        return deque()

    def _read(self, part: Part, frame: Frame) -> deque[Any]:
        count = part.items
        self.streams.items_read += count
        items: deque[Any] = deque()
        size_bytes = frame.size_bytes
        if len(part.segments) == 1:
            items.extend(read_value(frame, self.peer))
        else:
            payload, buffers = memoryview(frame.payload), frame.buffers
            at = buffer_at = 0
            for _, length, buffer_count in part.segments:
                segment = Frame(frame.kind, payload=payload[at : at + length])
                segment.buffers = list(buffers[buffer_at : buffer_at + buffer_count])
                items.extend(read_value(segment, self.peer))
                at += length
                buffer_at += buffer_count
        told = self._machine.take(count, size_bytes)
        if told is not None:
            self.peer.control(StreamCredit(self.number, self._outgoing, *told))
        return items

    def wait(self) -> None:
        """Block until `take` has something; raise `RpcTimeout` if nothing comes in time."""
        deadline = self.wait_until()
        self.thread_id, self.waits_since = get_ident(), monotonic()
        try:
            with self.node.calls.waiting():
                while not self.over:
                    gate = self._gate = Gate()  # set before ``over`` is checked again: `_tell` changes that first
                    deadline = min(deadline, self.wait_until())  # so does an answer, which brings a deadline
                    if not self.over and not gate.wait(-1 if deadline == NEVER else max(0.0, deadline - monotonic())):
                        raise self._too_late()
                    self._gate = None
        finally:
            self.thread_id, self.waits_since = 0, 0.0

    async def wait_soon(self) -> None:
        """Like `wait`, for a coroutine."""
        deadline = self.wait_until()
        loop = asyncio.get_running_loop()
        self.waits_since = monotonic()
        try:
            while not self.over:
                gate = self._gate = LoopGate(loop)
                if not self.over:
                    deadline = min(deadline, self.wait_until())
                    left_s = None if deadline == NEVER else max(0.0, deadline - monotonic())
                    try:
                        await asyncio.wait_for(gate.passed, left_s)
                    except TimeoutError:
                        raise self._too_late() from None
                self._gate = None
        finally:
            self.waits_since = 0.0

    def wait_until(self) -> float:
        """Return the deadline of a wait for the next item."""
        return monotonic() + self.node.timeout_s if self.node.timeout_s else NEVER

    def _too_late(self) -> RpcTimeout:
        self.close()
        return RpcTimeout(
            f"{self.peer.info.name} sent no item of {self.name}() for {self.node.timeout_s:g} s (rpc_timeout); "
            "options(timeout=...) bounds a stream as a whole instead"
        )

    def close(self) -> None:
        """Close the stream, at the writer too. Not for destructors: it takes locks."""
        if not self.closed:
            self.closed = True
            if not self._machine.complete and self._error is None:
                self._end()
            self._tell()
        self._discard_all()

    def _discard_all(self) -> None:
        """Give back what the parts that nobody will take have brought: blocks of device memory."""
        self.ready.extend(self._machine.drop_ahead())
        while self.ready:
            try:
                _, frame = self.ready.popleft()
            except IndexError:
                return  # another thread took the last one
            discard(frame.payload, self.peer)

    def _end(self) -> None:
        """Tell the writer to stop."""
        raise NotImplementedError


class StreamCall(Reader, PendingCall):
    is_told = True

    """A call whose callee sends items; it holds the reference whose value's method that is until the answer comes."""

    def __init__(
        self, streams: Streams, peer: Peer, what: Callable[..., Any], timeout_s: float, keeps: RRef[Any] | None
    ) -> None:
        super().__init__(streams, peer, name_of(what), outgoing=False)
        self._keeps = keeps
        self.what: Callable[..., Any] = what
        self.timeout_s: float = timeout_s
        now = monotonic()
        self.started_at: float = now
        self.deadline: float = now + timeout_s if timeout_s else NEVER
        self.arrived: bool = False
        self.call_id: int = 0

    def progress(self) -> str:
        return f" (stream, {self._machine.taken_items:,} items)"

    def waited_s(self, now: float) -> float:
        since = self.waits_since
        return now - since if since else 0.0

    def on_answer(self, frame: Frame) -> None:
        """The function, or its generator, is done. The answer may overtake large parts: linger until all have come."""
        self.arrived = True
        self._keeps = None
        if frame.kind == FAILURE:
            self.break_off(refusal(frame, self.peer) if frame.flags & REFUSED else decode_failure(frame, self.peer))
        elif not self.complete:
            self.streams.lingering[self.call_id] = self
            self._tell()  # the wait has a deadline now, if the stream has one

    def on_failure(self, error: RpcError) -> None:
        """No answer will come, and no part."""
        if self.profile is not None:
            self.profile.ended()
        self.arrived = True
        self._keeps = None
        self.break_off(error)

    def wait_until(self) -> float:
        if self.deadline == NEVER:
            return super().wait_until()
        return self.deadline if self.arrived else NEVER  # until the answer comes, the table of calls keeps the deadline

    def _too_late(self) -> RpcTimeout:
        if self.deadline == NEVER:
            return super()._too_late()
        self.close()
        return RpcTimeout(
            f"RPC ran for more than set timeout ({int(self.timeout_s * 1000)} ms): {self.peer.info.name} has answered "
            f"{self.name}(), and not sent all items"
        )

    def _end(self) -> None:
        if not self.node.calls.cancel(self):
            self.streams.lingering.pop(self.call_id, None)


class Incoming(Reader):
    """The reader of an outgoing stream."""

    def __init__(self, streams: Streams, peer: Peer, number: int) -> None:
        super().__init__(streams, peer, "an outgoing stream", outgoing=True)
        self.number = number
        self.began: bool = False
        scope = CURRENT.get()
        self.request: Served | None = None if scope is None else scope.served
        """The request that is being decoded."""

    def begin(self) -> None:
        """Start the writer, by the first credit: at the first wait for an item, not before."""
        if not self.began:
            if isinstance(self.request, Request) and not self.request.is_open:
                raise RpcError(
                    "the call that brought this stream has ended: start to read it inside the called function"
                )
            self.began = True
            told = self._machine.take(0, 0)
            assert told is not None
            self.peer.control(StreamCredit(self.number, True, *told))

    def give_up(self) -> None:
        """The caller no longer waits for the function that reads: raise there, and stop the writer."""
        if not self.complete and not self.peer.broken:  # else `Streams` breaks it off, with a better reason
            name = "the function" if self.request is None else f"{self.request.function_name}()"
            self.break_off(Cancelled(f"the caller of {name} no longer waits for it"))
            self._end()

    def wait(self) -> None:
        self.begin()
        super().wait()

    async def wait_soon(self) -> None:
        self.begin()
        await super().wait_soon()

    def _end(self) -> None:
        self.peer.control(StreamClosed(self.number))
        self.streams.forget(self)
