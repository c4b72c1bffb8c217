"""``rref.rpc_sync().method(...)``: methods of a value called where the value lives.

A proxy turns attribute access into a call of the method of that name. It knows nothing of what the object has: a
missing attribute is the owner's AttributeError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from farcall.protocol.frames import REQUEST, Frame
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout
from farcall.rpc.future import Future
from farcall.rpc.owner_calls import ask, ask_async
from farcall.serialize import write_call

if TYPE_CHECKING:
    from farcall.rpc.rref import RRef

_PATH = b"pfarcall.rpc.owner_methods\0methods.of_"
_known: dict[str, tuple[MethodName, bytes]] = {}


class MethodName:
    """What a call of a method is called in errors."""

    __slots__ = ("__qualname__",)

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self) -> None:
        raise TypeError("the method lives at the owner")


class Proxy:
    """The methods of a reference's value, called in one of the three ways."""

    __slots__ = ("_call", "_rref", "_timeout_s")

    def __init__(self, call: Callable[..., Any], rref: RRef[Any], timeout_s: float) -> None:
        if timeout_s != UNSET_TIMEOUT:
            check_timeout(timeout_s)  # before arguments are encoded, and references among them forked
        self._call = call
        self._rref = rref
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, self._rref, name, self._timeout_s)

    def __repr__(self) -> str:
        return f"<methods of {self._rref!r}>"


def _request(rref: RRef[Any], function: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    ref = rref._fork.ref
    frame = Frame(REQUEST, 0, 0, function)
    write_call(frame, ((ref.created_on, ref.local_id, args, kwargs or None), None), rref._peer())
    return frame


def _named(name: str) -> tuple[MethodName, bytes]:
    known = _known.get(name)
    if known is None:
        known = _known[name] = (MethodName(name), _PATH + name.encode())
    return known


def call_sync(rref: RRef[Any], name: str, timeout_s: float, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method and return its result."""
    what, function = _named(name)
    return ask(rref, what, _request(rref, function, args, kwargs), timeout_s)


def call_async(rref: RRef[Any], name: str, timeout_s: float, /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Call the method; a future of its result."""
    what, function = _named(name)
    return ask_async(rref, what, _request(rref, function, args, kwargs), timeout_s)


def call_remote(rref: RRef[Any], name: str, timeout_s: float, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    """Call the method; a reference to its result, which the owner of the object owns."""
    what, function = _named(name)
    references = rref._references
    if timeout_s == UNSET_TIMEOUT:
        timeout_s = references.node.timeout_s
    return references.create(rref._peer(), what, _request(rref, function, args, kwargs), timeout_s, rref)
