"""Streams, as programs use them; and what a node keeps of all its streams.

A stream is a call (`farcall.Worker.stream`) whose callee sends items before its answer; or an argument of a call,
`outgoing`, that the callee reads and the caller writes. `Stream` is what a program iterates over. It holds the reading
end, which the tables hold, too; when the program drops the `Stream`, the stream is closed.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import msgspec

from farcall.errors import Cancelled, Delivery, PeerDead, RpcError, SerializationError
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Frame
from farcall.protocol.notes import STREAM
from farcall.protocol.streams import StreamClosed, StreamCredit, decode_part
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout, encode_request, send
from farcall.rpc.method_calls import Proxy, method_request
from farcall.rpc.owner_calls import Creation
from farcall.rpc.stream_reading import Incoming, Reader, StreamCall
from farcall.rpc.stream_writing import HOLD_S, STREAMS, StreamRequest, Writer, pump_outgoing
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, runtime_of_thread
from farcall.runtime.node.current import STARTED
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import (
    RECORDING,
    Encoding,
    WithCall,
    current_decoding,
    discard,
    register_reducer,
)

if TYPE_CHECKING:
    from farcall.rpc.rref import RRef

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
logger: logging.Logger = logging.getLogger("farcall")

UNREAD_S = 1.0
"""How often a node looks for outgoing streams that nobody will read."""


class Stream(Generic[T]):
    """The items of a stream, for ``for`` and for ``async for``; ``with`` closes it at the end of its block.

    Items come in order, each once. An error of the generator is raised after the last item before it. A stream that is
    closed, or dropped, or whose reader dies, ends the generator at the other side (its ``finally`` runs).
    """

    __slots__ = ("_items", "_reader")

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._items: deque[T] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while not self._items:
            reader = self._reader
            if not reader.over:
                reader.wait()
            if not self._refill():
                raise StopIteration
        return self._items.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            reader = self._reader
            if not reader.over:
                try:
                    await reader.wait_soon()
                except asyncio.CancelledError:
                    reader.close()  # nobody wants the next item any more
                    raise
            if not self._refill():
                raise StopAsyncIteration
        return self._items.popleft()

    def _refill(self) -> bool:
        """Take the next part; False: the stream is at its end."""
        reader = self._reader
        if reader.closed:
            return False
        try:
            self._items = reader.take()
        except BaseException:
            reader.close()
            raise
        return bool(self._items)

    def close(self) -> None:
        """End the stream, here and at the other side."""
        self._items.clear()
        self._reader.close()

    async def aclose(self) -> None:
        """The same; for ``contextlib.aclosing``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            reader = self._reader
            if reader.ready or not reader.over:
                reader.streams.close_later(reader)
        except Exception:
            pass  # never made in full, or the interpreter is all but gone

    def __repr__(self) -> str:
        reader = self._reader
        state = "closed" if reader.closed else "all here" if reader.complete else "open"
        return f"<stream of {reader.name} from {reader.peer.info.name!r}: {state}>"


class Outgoing(Generic[T]):
    """An iterable of the caller's, as an argument; see `outgoing`."""

    __slots__ = ("_context", "_source", "_was_sent")

    def __init__(self, source: Iterable[T]) -> None:
        if not isinstance(source, Iterable):
            raise TypeError(f"outgoing takes an iterable, not a {type(source).__name__}")
        self._source = source
        self._context = contextvars.copy_context()
        self._was_sent = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SerializationError("pass farcall.outgoing(...) as an argument of a call; it cannot travel otherwise")


def outgoing(source: Iterable[T]) -> Stream[T]:
    """``source``, as an argument: the called function iterates over its items as the caller makes them.

    ``source`` is gone through on a thread of the caller's node, ahead of the function by a window of items at most. It
    is closed when the function drops the stream, or returns. An ``async def`` uses ``async for``.
    """
    return Outgoing(source)  # type: ignore[return-value]  # what the function gets is a `Stream`


def _reduce(argument: Outgoing[Any], encoding: Encoding) -> Any:
    peer = encoding.peer
    if peer is None or not encoding.is_request:
        return argument.__reduce_ex__(5)
    if argument._was_sent:
        raise SerializationError("an outgoing stream can be sent once: make another one with farcall.outgoing(...)")
    argument._was_sent = True
    node = _node_of(peer)
    return _arrived, (node.part(Streams).open_outgoing(peer, argument, encoding),)


register_reducer(Outgoing, _reduce)


def _arrived(number: int) -> Stream[Any]:
    """The outgoing stream of that number, of whoever sent the message that is being read."""
    node = runtime_of_thread()
    assert node is not None
    return node.part(Streams).incoming(current_decoding().peer, number)


def _node_of(peer: Peer) -> Runtime:
    """The node that has ``peer`` in its table."""
    found = [node for node in list(STARTED) if node.is_peer(peer)]
    if not found:
        raise SerializationError(f"no node of this process knows {peer.info.name} any more")
    return found[0]


class Streams:
    """The streams of one node, ``node.part(Streams)``.

    Mutable: readers and writers of streams that are no call's, by number; readers whose call was answered before all
    parts came; what is to be flushed or closed soon. Any thread touches each by one atomic operation at a time.
    """

    def __init__(self, node: Runtime) -> None:
        self.node: Runtime = node
        self.lingering: dict[int, StreamCall] = {}
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self._writers: dict[int, tuple[Writer, FunctionTask]] = {}
        self._unread: dict[int, WithCall] = {}  # writers whose reader has not begun, and may never
        self._unread_timer = node.timer(self._forget_unread)
        self._next_number = itertools.count(1).__next__
        self.items_read: int = 0  # without a lock: two threads at once may lose a count
        self.items_written: int = 0
        self._to_flush: set[Writer] = set()
        self._flush_timer = node.timer(self._flush)
        self._to_close: deque[Reader] = deque()
        self._close_timer = node.timer(self._close)
        node.hooks.letters[STREAMS] = self.on_letter
        node.hooks.on_control(StreamCredit, self.on_credit, in_order=True)
        node.hooks.on_control(StreamClosed, self.on_closed, in_order=True)
        node.hooks.peer_gone.append(self._on_peer_gone)
        node.hooks.ended.append(self._on_ended)
        node.server.stream_request = self.request

    def request(self, server: Server, peer: Peer, frame: Frame) -> StreamRequest:
        """The request of a frame with the flag STREAM."""
        return StreamRequest(self, server, peer, frame)

    def counts(self) -> tuple[int, int, int]:
        """Streams that are open here, at either end; items read, and written, so far."""
        calls = [call for call in self.node.calls.snapshot() if isinstance(call, StreamCall)]
        requests = [request for request in self.node.server.active if isinstance(request, StreamRequest)]
        count = len(calls) + len(requests) + len(self._incoming) + len(self._writers)
        return count, self.items_read, self.items_written

    # --- what arrives ---------------------------------------------------------------------------------------

    def on_letter(self, peer: Peer, frame: Frame) -> None:
        """On the thread that reads the link: hand a part to its reader."""
        try:
            part = decode_part(frame.function)
        except (msgspec.DecodeError, ValueError) as error:
            logger.error("%s: cannot read a part of a stream from %s: %s", self.node.info.name, peer.info.name, error)
            return
        reader: Reader | None
        if part.outgoing:
            reader = self._incoming.get((peer.number, part.number))
        else:
            call = self.node.calls.find(part.number) or self.lingering.get(part.number)
            reader = call if isinstance(call, StreamCall) and call.peer is peer else None
        if reader is None:
            discard(frame.payload, peer)  # nobody reads it any more
            return
        reader.on_part(part, frame)
        if reader.complete or reader.closed:
            self.lingering.pop(part.number, None)
            if part.outgoing:
                self.forget(reader)

    def on_credit(self, peer: Peer, message: StreamCredit) -> None:
        """A reader grants more."""
        if message.outgoing:
            found = self._writers.get(message.number)
            if found is not None and found[0].peer is peer:
                found[0].on_credit(message.items, message.size_bytes)
                if self._unread.pop(message.number, None) is not None:
                    self.node.executor.submit(found[1])
        else:
            request = self.node.server.find(peer, message.number)
            if isinstance(request, StreamRequest):
                request.writer.on_credit(message.items, message.size_bytes)

    def on_closed(self, peer: Peer, message: StreamClosed) -> None:
        """The reader of an outgoing stream wants no more."""
        found = self._writers.get(message.number)
        if found is not None and found[0].peer is peer:
            self._close_writer(message.number, found[0])

    def _close_writer(self, number: int, writer: Writer) -> None:
        writer.close()
        if self._unread.pop(number, None) is not None:
            self._writers.pop(number, None)  # else its pump ends, and does that

    # --- outgoing streams -----------------------------------------------------------------------------------

    def open_outgoing(self, peer: Peer, argument: Outgoing[Any], encoding: Encoding) -> int:
        """Enter a stream that is about to be sent to ``peer`` as an argument; its number."""
        number = self._next_number()
        writer = Writer(self, peer, number, outgoing=True)

        def ended() -> None:
            self._writers.pop(number, None)
            self._unread.pop(number, None)

        here, source, context = self.node.info, argument._source, argument._context
        pump = partial(pump_outgoing, here, writer, source, context=context, on_end=ended)
        self._writers[number] = (writer, FunctionTask(pump, ended))
        self._unread[number] = opened = WithCall(ended)
        encoding.on_failure(opened)
        if self._unread_timer.due == NEVER:
            self._unread_timer.at(monotonic() + UNREAD_S)
        return number

    def _forget_unread(self, now: float) -> float:
        """On the I/O thread: close the streams whose calls have ended and were never read: refused, cancelled or lost.

        A reader says that it begins before its call is answered, and on the same link.
        """
        for opened in list(self._unread.values()):
            if opened.call_id and self.node.calls.find(opened.call_id) is None:
                opened()
        return now + UNREAD_S if self._unread else NEVER

    def incoming(self, peer: Peer, number: int) -> Stream[Any]:
        """An outgoing stream of ``peer``, which has come as an argument."""
        reader = self._incoming[peer.number, number] = Incoming(self, peer, number)
        return Stream(reader)

    def forget(self, reader: Reader) -> None:
        """Nothing more comes for ``reader`` of an outgoing stream."""
        self._incoming.pop((reader.peer.number, reader.number), None)

    # --- soon, on the I/O thread ----------------------------------------------------------------------------

    def flush_later(self, writer: Writer) -> None:
        """Have ``writer`` send what it holds back in HOLD_S at most."""
        self._to_flush.add(writer)
        if self._flush_timer.due == NEVER:
            self._flush_timer.at(monotonic() + HOLD_S)

    def _flush(self, now: float) -> float:
        if not self._to_flush:
            return NEVER
        again = []
        for _ in range(len(self._to_flush)):
            writer = self._to_flush.pop()
            if not writer.flush_nowait():
                again.append(writer)
        self._to_flush.update(again)
        return now + HOLD_S  # once more: the next item of a quick stream would wake this thread only to set the timer

    def close_later(self, reader: Reader) -> None:
        """Close ``reader``, which nobody holds any more. For destructors: takes no lock."""
        self._to_close.append(reader)
        self._close_timer.at(0.0)

    def _close(self, now: float) -> float:
        while self._to_close:
            self._to_close.popleft().close()
        return NEVER

    # --- ends -----------------------------------------------------------------------------------------------

    def _on_peer_gone(self, peer: Peer) -> None:
        error = PeerDead(f"{peer.info.name}, which wrote the stream, is gone", Delivery.UNKNOWN, peer.info)
        for reader in [*self._incoming.values(), *self.lingering.values()]:
            if reader.peer is peer:
                reader.break_off(error)
                self.forget(reader)
        for number, call in list(self.lingering.items()):  # readers of other links add theirs meanwhile
            if call.peer is peer:
                self.lingering.pop(number, None)
        for number, (writer, _) in list(self._writers.items()):
            if writer.peer is peer:
                self._close_writer(number, writer)

    def _on_ended(self) -> None:
        error = Cancelled(f"{self.node.info.name} shut down")
        for reader in [*self._incoming.values(), *self.lingering.values()]:
            reader.break_off(error)
        for number, (writer, _) in list(self._writers.items()):
            self._close_writer(number, writer)
        self._incoming.clear()
        self.lingering.clear()


def open_stream(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float | None,
) -> Stream[Any]:
    """Call ``func``, whose result is something to iterate over, on ``to``; the items, as they come."""
    check_no_gradients()
    peer = node.peer(to)
    return send_stream_call(node, peer, func, encode_request(peer, func, args, kwargs), timeout_s)


class StreamMethods(Proxy, Generic[T]):
    """``rref.stream``: methods of the owner by name, or passed in, which type checkers understand."""

    __slots__ = ()

    @overload
    def __call__(
        self, method: Callable[Concatenate[T, P], AsyncIterable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[T, P], Iterable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Stream[R]: ...
    def __call__(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Stream[Any]:
        return stream_method(self._rref, method.__name__, self._timeout_s, *args, **kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Stream[Any]]: ...


def stream_method(rref: RRef[Any], name: str, timeout_s: float | None, /, *args: Any, **kwargs: Any) -> Stream[Any]:
    """Call a method, whose result is something to iterate over, of a value at its owner; the items, as they come."""
    check_no_gradients()
    peer, what, frame = method_request(rref, name, args, kwargs)
    return send_stream_call(rref._references.node, peer, what, frame, timeout_s, rref._creation)


def check_no_gradients() -> None:
    """Raise inside a distributed autograd context."""
    if RECORDING.get() is not None:
        raise RpcError(
            "a stream carries no gradients: use it outside the distributed autograd context, or make one call per item"
        )


def send_stream_call(
    node: Runtime,
    peer: Peer,
    what: Callable[..., Any],
    frame: Frame,
    timeout_s: float | None,
    creation: Creation | None = None,
) -> Stream[Any]:
    """Send the request ``frame`` as a stream's. ``creation``: of the value that the function is a method of."""
    call = StreamCall(node.part(Streams), peer, what, 0.0 if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s))
    if creation is not None and not (creation.arrived and creation.error is None):
        creation.attach(call, frame)  # there may be no value to call a method of
    if is_profiled() or PROFILING.everywhere:
        call.profile = PROFILING.begin_call(node, peer, "async", what, None)
    frame.flags |= STREAM
    send(node.calls, call, frame)
    return Stream(call)
