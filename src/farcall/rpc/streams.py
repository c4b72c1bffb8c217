"""Streams, as programs use them; `node_streams.py` has the tables of a node's streams.

A stream is a call (`farcall.Worker.stream`) whose callee sends items before its answer; or an argument of a call,
`outgoing`, that the caller writes and the callee reads. A program iterates over a `Stream`, which holds the reader. The
node's tables hold the reader too, but not the `Stream`: so its destructor can close the stream.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from farcall.destructors import destructor
from farcall.errors import RpcError, SerializationError
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Frame
from farcall.protocol.notes import STREAM
from farcall.rpc.call import encode_request, send
from farcall.rpc.method_calls import Proxy, method_request
from farcall.rpc.node_streams import Streams
from farcall.rpc.stream_reading import Reader, StreamCall
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.node import Runtime, runtime_of_thread
from farcall.runtime.node.current import STARTED
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import RECORDING, Encoding, current_decoding, register_reducer

if TYPE_CHECKING:
    from farcall.rpc.rref import RRef

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Stream(Generic[T]):
    """The items of a stream, for ``for`` and for ``async for``; ``with`` closes it at the end of its block.

    Items come in order, each once. An error of the generator is raised after the items before it. When a stream is
    closed or dropped, or its reader dies, the generator at the other side ends (its ``finally`` runs).
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
                    reader.close()  # the task that wanted the next item is gone
                    raise
            if not self._refill():
                raise StopAsyncIteration
        return self._items.popleft()

    def _refill(self) -> bool:
        """Take the next part. False: the stream has ended."""
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
        """Close the stream, here and at the other side."""
        self._items.clear()
        self._reader.close()

    async def aclose(self) -> None:
        """Do the same as `close`; for ``contextlib.aclosing``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @destructor
    def __del__(self) -> None:
        try:
            reader = self._reader
            if reader.holds_parts or not reader.over:
                reader.streams.close_later(reader)
        except Exception:
            pass  # never fully made, or the interpreter is shutting down

    def __repr__(self) -> str:
        reader = self._reader
        state = "closed" if reader.closed else "all here" if reader.complete else "open"
        return f"<stream of {reader.name} from {reader.peer.info.name!r}: {state}>"


class Outgoing(Generic[T]):
    """An iterable of the caller that is passed as an argument; see `outgoing`."""

    __slots__ = ("_context", "_source", "_was_sent")

    def __init__(self, source: Iterable[T]) -> None:
        if not isinstance(source, Iterable):
            raise TypeError(f"outgoing takes an iterable, not {type(source).__name__}")
        self._source = source
        self._context = contextvars.copy_context()
        self._was_sent = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SerializationError("pass farcall.outgoing(...) as an argument of a call; it cannot travel otherwise")


def outgoing(source: Iterable[T]) -> Stream[T]:
    """Pass ``source`` as an argument: the called function iterates over its items as the caller makes them.

    A thread of the caller's node iterates over ``source``, ahead of the function by at most a window of items. The
    stream is closed when the function drops it or returns. An ``async def`` uses ``async for``.
    """
    return Outgoing(source)  # type: ignore[return-value]  # the called function gets a `Stream`


def _reduce(argument: Outgoing[Any], encoding: Encoding) -> Any:
    peer = encoding.peer
    if peer is None or not encoding.is_request:
        return argument.__reduce_ex__(5)
    if argument._was_sent:
        raise SerializationError("an outgoing stream can be sent once: make another one with farcall.outgoing(...)")
    argument._was_sent = True
    streams = _node_of(peer).part(Streams)
    return _arrived, (streams.open_outgoing(peer, argument._source, argument._context, encoding),)


register_reducer(Outgoing, _reduce)


def _arrived(number: int) -> Stream[Any]:
    """Return the outgoing stream ``number`` of the sender of the message that is being decoded."""
    node = runtime_of_thread()
    assert node is not None
    return Stream(node.part(Streams).incoming(current_decoding().peer, number))


def _node_of(peer: Peer) -> Runtime:
    """Return the node of this process that has ``peer`` in its table."""
    found = [node for node in list(STARTED) if node.is_peer(peer)]
    if not found:
        raise SerializationError(f"no node of this process knows {peer.info.name} any more")
    return found[0]


def open_stream(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout_s: float | None,
) -> Stream[Any]:
    """Call ``func``, which returns an iterable, on ``to``; return the stream of its items."""
    check_no_gradients()
    peer = node.peer(to)
    return send_stream_call(node, peer, func, encode_request(peer, func, args, kwargs), timeout_s)


class StreamMethods(Proxy, Generic[T]):
    """``rref.stream``: calls methods of the value by name, or passed in, which type checkers understand."""

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
    """Call a method, which returns an iterable, of a value at its owner; return the stream of its items."""
    check_no_gradients()
    peer, what, frame = method_request(rref, name, args, kwargs)
    return send_stream_call(rref._references.node, peer, what, frame, timeout_s, rref)


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
    rref: RRef[Any] | None = None,
) -> Stream[Any]:
    """Send ``frame`` as the request of a stream. ``rref``: what is called is a method of that reference's value."""
    timeout_s = 0.0 if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    call = StreamCall(node.part(Streams), peer, what, timeout_s, rref)
    creation = None if rref is None else rref._creation
    if creation is not None and not (creation.arrived and creation.error is None):
        creation.attach(call, frame)  # if the creation fails, no object exists to call
    if is_profiled() or PROFILING.everywhere:
        call.profile = PROFILING.begin_call(node, peer, "async", what, None)
    frame.flags |= STREAM
    send(node.calls, call, frame)
    return Stream(call)
