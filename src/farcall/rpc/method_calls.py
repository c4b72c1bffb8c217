"""Methods of a value, called through a reference: ``rref.call.method(...)`` and its like.

Owns the proxies that programs see, and the request that names a method; `owner_calls.py` sends it. The owner handles
it in `owned_values.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from farcall.protocol.frames import REQUEST, Frame
from farcall.rpc.future import Future
from farcall.rpc.owner_calls import ask, ask_async
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.peers.peer import Peer
from farcall.serialize import write_call

if TYPE_CHECKING:
    from farcall.rpc.rref import RRef

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_PATH = b"pfarcall.rpc.owned_values\0methods.of_"
_known: dict[str, tuple[MethodName, bytes]] = {}


class MethodName:
    """The name of a method, in place of the function that a call's errors name."""

    __slots__ = ("__qualname__",)

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self) -> None:
        raise TypeError("the method lives at the owner")


class Proxy:
    """``rref.rpc_sync()`` and its like: turns an attribute into a call of the value's method of that name.

    It does not know the attributes of the value: for a missing one the owner raises AttributeError.
    """

    __slots__ = ("_call", "_rref", "_timeout_s")

    def __init__(self, call: Callable[..., Any], rref: RRef[Any], timeout_s: float | None) -> None:
        if timeout_s is not UNSET_TIMEOUT:
            check_timeout(timeout_s)  # now: an error after encoding would have to withdraw the arguments' forks
        self._call = call
        self._rref = rref
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, self._rref, name, self._timeout_s)

    def __repr__(self) -> str:
        return f"<methods of {self._rref!r}>"


class Call(Proxy):
    """``rref.call``: calls methods of the value by name, or passed in; with anything else, the value itself."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        home, _, name = getattr(args[0], "__qualname__", "").rpartition(".") if args else ("", "", "")
        if home and not home.endswith("<locals>"):  # it was defined in a class
            return call_method(self._rref, name, self._timeout_s, *args[1:], **kwargs)
        return call_method(self._rref, "__call__", self._timeout_s, *args, **kwargs)


class Start(Proxy, Generic[T]):
    """``rref.start``: calls methods of the value by name, or passed in, which type checkers understand."""

    __slots__ = ()

    @overload
    def __call__(
        self, method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def __call__(
        self, method: Callable[Concatenate[T, P], torch.futures.Future[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def __call__(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return call_method_async(self._rref, method.__name__, self._timeout_s, *args, **kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Future[Any]]: ...


def method_request(
    rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Peer, MethodName, Frame]:
    """Return the owner of ``rref``, the name for errors, and the request that calls the method ``name``."""
    known = _known.get(name)
    if known is None:
        known = _known[name] = (MethodName(name), _PATH + name.encode())
    what, function = known
    ref = rref._fork.ref
    peer = rref._references.peer(rref)
    frame = Frame(REQUEST, 0, 0, function)
    if rref._serial:
        frame.serial = ref
    write_call(frame, ((ref.created_on, ref.local_id, args, kwargs or None), None), peer)
    return peer, what, frame


def call_method(rref: RRef[Any], name: str, timeout_s: float | None, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method and return its result."""
    return ask(rref, *method_request(rref, name, args, kwargs), timeout_s)


def call_method_async(rref: RRef[Any], name: str, timeout_s: float | None, /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Call the method; return a future of its result."""
    return ask_async(rref, *method_request(rref, name, args, kwargs), timeout_s)


def call_method_remote(rref: RRef[Any], name: str, timeout_s: float | None, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    """Call the method; return a reference to its result, which stays at the object's owner."""
    references = rref._references
    timeout_s = references.node.timeout_s if timeout_s is UNSET_TIMEOUT else check_timeout(timeout_s)
    return references.create(*method_request(rref, name, args, kwargs), timeout_s, rref)
