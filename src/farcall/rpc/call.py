"""Making a call: from a function and its arguments to a request, and from its answer to a result.

The hot path of the caller's side. A request carries its function in a segment of its own where it can be named
(then both sides cache it), else inside the pickled arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from farcall.ids import WorkerInfo
from farcall.rpc.answer import read_answer
from farcall.rpc.future import Future
from farcall.rpc.schemas import name_function
from farcall.rpc.sending import exchange, send
from farcall.runtime.calls.pending import SyncCall
from farcall.runtime.node import Runtime
from farcall.runtime.observing.profiling import PROFILING, is_profiled
from farcall.runtime.peers.peer import Peer
from farcall.serialize import encode_call, encode_function

UNSET_TIMEOUT = -1.0


def call_sync(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout_s: float,
    refusable: bool = True,
) -> Any:
    """Call ``func`` on ``to`` and return its result. ``refusable``: as the node's option ``when_overloaded`` says."""
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s)
    profile = PROFILING.begin_call(node, peer, "sync", func, None) if is_profiled() or PROFILING.everywhere else None
    function, payload, buffers = encode_request(peer, func, args, kwargs)
    call = SyncCall(peer, func, timeout_s)
    return read_answer(exchange(node.calls, call, profile, function, payload, buffers, refusable), peer)


def call_async(
    node: Runtime,
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout_s: float,
    kind: str = "async",
) -> Future[Any]:
    """Call ``func`` on ``to``; the future holds its result, or the error of the network.

    Errors of the arguments are raised here. ``kind`` is how the call is named in profiles.
    """
    peer = node.peer(to)
    timeout_s = node.timeout_s if timeout_s == UNSET_TIMEOUT else check_timeout(timeout_s)
    profile = PROFILING.begin_call(node, peer, kind, func, None) if is_profiled() or PROFILING.everywhere else None
    function, payload, buffers = encode_request(peer, func, args, kwargs)
    future: Future[Any] = Future(node, peer, func, timeout_s)
    send(node.calls, future, profile, function, payload, buffers)
    return future


def check_timeout(seconds: float) -> float:
    """``seconds``, if a call may take so long; 0 means without limit."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(seconds).__name__}")
    if not seconds >= 0:
        raise ValueError(f"timeout must be a number of seconds, at least 0 (0: no limit), not {seconds!r}")
    return seconds


def encode_request(
    peer: Peer, func: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[bytes, bytes, Sequence[memoryview]]:
    """The function segment, payload and buffers of a request."""
    if args.__class__ is not tuple and args is not None and not isinstance(args, list | tuple):
        raise TypeError(f"args must be a tuple or a list, not {type(args).__name__}: for one argument write args=(x,)")
    if kwargs.__class__ is not dict and kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict, not {type(kwargs).__name__}")
    if func.__class__ is FunctionType:
        function = encode_function(func) or b""
    else:
        function = name_function(func, args or (), kwargs) or b""
    if not function and not callable(func):
        raise TypeError(f"func must be callable, not {type(func).__name__}")
    if function and not args and not kwargs:
        return function, b"", ()
    arguments = tuple(args or ())
    keywords = dict(kwargs) if kwargs else None
    value = (arguments, keywords) if function else (func, arguments, keywords)
    return function, *encode_call(value, peer)
