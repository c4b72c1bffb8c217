"""The functions that an owner runs for the holders of references to its values: copy, method call, type, backward.

Ordinary functions, called by ordinary requests, so they run where calls run and fail as calls fail. Each names its
value by the two numbers of a `RefId`; the caller keeps its own fork until the answer, so the value stays. No thread
waits for a value that is still being made: the request is answered later.

The names of these functions are part of the wire: `rref.py` and `method_calls.py` spell them out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farcall.autograd.scope import backward as backward_in_context
from farcall.errors import RpcError
from farcall.ids import RefId
from farcall.rpc.owned_values import Owned
from farcall.rpc.references import NodeReferences
from farcall.runtime.calls.results import Later, MarkedResult, is_async_execution
from farcall.runtime.node import runtime_of_thread
from farcall.serialize.allowance import INSTALLED


def find_owned(created_on: int, local_id: int) -> Owned:
    """The value that a caller names, or its place."""
    node = runtime_of_thread()
    assert node is not None
    references = node.part(NodeReferences)
    ref = RefId(created_on, local_id)
    return references.places.get(ref) or references.find(ref)


def fetch(created_on: int, local_id: int) -> Any:
    """The value itself."""
    owned = find_owned(created_on, local_id)
    return owned.get(to_send=True) if owned.ready else Later(owned.when_ready, partial(owned.get, to_send=True))


def type_of(created_on: int, local_id: int) -> Any:
    """The type of the value."""
    owned = find_owned(created_on, local_id)
    if owned.ready:
        return type(owned.get(to_send=True))
    return Later(owned.when_ready, lambda: type(owned.get(to_send=True)))


class _Method:
    """Calls the method of one name, whatever the object."""

    __slots__ = ("__qualname__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self.__qualname__ = name

    def __call__(self, created_on: int, local_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        owned = find_owned(created_on, local_id)
        if owned.ready:
            return self._call(owned, args, kwargs)
        return Later(owned.when_ready, lambda: self._call(owned, args, kwargs))

    def _call(self, owned: Owned, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        value = owned.get(to_send=True)
        if INSTALLED.allowance is not None:
            INSTALLED.allowance.check_method(value, self._name)
        method: Callable[..., Any] = getattr(value, self._name)
        del value
        result = method(*args, **kwargs) if kwargs else method(*args)
        return MarkedResult(result) if is_async_execution(method) else result


class _Methods:
    """``methods.of_NAME`` calls the method NAME of a value.

    Each method is a function with a name of its own, because servers and metrics know functions by name: was the
    function quick, how often was it called.
    """

    def __getattr__(self, attribute: str) -> _Method:
        if not attribute.startswith("of_"):
            raise AttributeError(attribute)
        method = _Method(attribute.removeprefix("of_"))
        setattr(self, attribute, method)
        return method


methods: _Methods = _Methods()


def backward(created_on: int, local_id: int, context_id: int, retain_graph: bool) -> Any:
    """Run a backward pass from the value."""
    owned = find_owned(created_on, local_id)
    if owned.ready:
        return run_backward(owned.get(to_send=True), context_id, retain_graph)
    return Later(owned.when_ready, lambda: run_backward(owned.get(to_send=True), context_id, retain_graph))


def run_backward(root: Any, context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from ``root``: in a distributed context, or by torch alone where ``context_id`` is -1."""
    if not isinstance(root, torch.Tensor):
        raise RpcError(f"the RRef should contain a tensor for .backward(), not {type(root).__name__}")
    if context_id == -1:
        torch.autograd.backward([root], retain_graph=retain_graph)
    else:
        backward_in_context(context_id, [root], retain_graph)
