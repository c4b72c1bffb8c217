"""A synchronous call: encodes a function and its arguments as a request, and decodes the answer to a result.

The hot path of the caller's side. A request carries a function that has a name in a segment of its own, which both
sides cache; any other function is pickled with the arguments. Asynchronous calls are futures (`future.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import msgspec

from farcall.errors import NetworkError, Overloaded, RemoteError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, REQUEST, Frame
from farcall.protocol.notes import REFUSED, decode_refusal
from farcall.rpc.schemas import name_function
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.pending import CallTable, PendingCall, SyncCall
from farcall.runtime.node import Runtime
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import RECORDING, decode_failure, encode_function, read_value, withdraw, write_call


def call_sync(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout_s: float | None,
    refusable: bool = True,
) -> Any:
    """Call ``func`` on ``to`` and return its result.

    ``refusable``: an overloaded callee may refuse the call, if the node's option ``when_overloaded`` says so.
    """
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    profile = PROFILING.begin_call(node, peer, "sync", func, None) if is_profiled() or PROFILING.everywhere else None
    frame = encode_request(peer, func, args, kwargs)
    try:
        call = SyncCall(peer, func, timeout_s)
        if profile is not None:
            call.profile = profile
        answer = node.calls.exchange(call, frame, refusable)
    except BaseException:
        withdraw(frame)  # Ctrl-C may come before `exchange` can do so
        raise
    return read_answer(answer, peer)


def encode_request(
    peer: Peer, func: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> Frame:
    """Encode the request for ``func(*args, **kwargs)``, in the caller's distributed autograd context."""
    if args.__class__ is not tuple and args is not None and not isinstance(args, list | tuple):
        raise TypeError(f"args must be a tuple or a list, not {type(args).__name__}: for one argument write args=(x,)")
    if kwargs.__class__ is not dict and kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
    values: list[Any] | None = None
    if func.__class__ is FunctionType:
        function = encode_function(func) or b""
        if not function:
            function, values = _splitter()(func) or (b"", None)
    else:
        function = name_function(func, args or (), kwargs) or b""
        if not function and isinstance(func, type):
            function, values = _splitter()(func) or (b"", None)
    if not function and not callable(func):
        raise _not_callable(func)
    if not args and not kwargs and function and values is None:
        return plain_request(peer, function)
    frame = Frame(REQUEST, 0, 0, function)
    arguments = tuple(args or ())
    keywords = dict(kwargs) if kwargs else None
    value = (arguments, keywords) if function else (func, arguments, keywords)
    try:
        write_call(frame, value if values is None else (values, *value), peer)
    except BaseException:
        withdraw(frame)
        raise
    return frame


@cache
def _splitter() -> Callable[[Any], tuple[bytes, list[Any] | None] | None]:
    from farcall.serialize.units import split  # programs whose functions have names need none

    return split


def _not_callable(func: object) -> TypeError:
    hint = "; the value of a reference is called by reference.call(x)" if hasattr(func, "to_here") else ""
    return TypeError(
        f"function should be callable, not {type(func).__name__}: give the function and its arguments apart, "
        f"call(f, x), not call(f(x)){hint}"
    )


def plain_request(peer: Peer, function: bytes, payload: bytes = b"") -> Frame:
    """Make a request whose payload holds no tensor and no reference."""
    frame = Frame(REQUEST, 0, 0, function, b"", payload)
    recording = RECORDING.get()
    if recording is not None and recording.admits(peer):
        # The callee enters the context even without tensors in the request: its result may need a gradient.
        frame.recording = recording
        recording.record_send(peer, [])
    return frame


def send(calls: CallTable, call: PendingCall, frame: Frame) -> None:
    """Send the request of ``call``, an asynchronous call.

    A network error becomes the outcome of the call, as if the link had failed later: a dead worker does not break a
    loop that sends to many. Other errors are raised.
    """
    try:
        calls.send(call, frame)
    except (NetworkError, RpcTimeout) as error:
        call.on_failure(error)
    except BaseException:
        if call.profile is not None:
            call.profile.ended()
        raise


def read_answer(frame: Frame, peer: Peer) -> Any:
    """Return the value in an answer, or raise the failure in it."""
    if frame.kind == FAILURE:
        raise refusal(frame, peer) if frame.flags & REFUSED else decode_failure(frame, peer)
    return read_value(frame, peer)


def refusal(frame: Frame, peer: Peer) -> Overloaded | RemoteError:
    """The error for a call that its callee refused. Raises nothing, whatever came: the call must end."""
    name = peer.info.name
    try:
        found = decode_refusal(frame.payload)
    except msgspec.DecodeError as error:
        return RemoteError(f"{name} refused the call, and its reason cannot be read: {error}")
    return Overloaded(
        f"{name} is overloaded and did not run this call: {found.queued} calls wait there for a thread, and its "
        f"max_queued_calls is {found.limit}. Call again later (retry=farcall.Retry(...)), have calls wait "
        f'(when_overloaded="wait"), or give {name} more num_worker_threads or less to do',
        worker=peer.info,
        queued=found.queued,
        limit=found.limit,
    )
