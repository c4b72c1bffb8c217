"""What an owner does for those who refer to its values: give a copy, call a method, tell the type, run backward.

Ordinary functions, called over ordinary requests, so they run where calls run and fail as calls fail. Each names its
value by the two numbers of a `RefId`: the caller keeps its own fork until the answer. A value that is still being
made is waited for without a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farcall.autograd.scope import backward as backward_in_context
from farcall.errors import RpcError
from farcall.ids import RefId
from farcall.rpc.owned_value import Owned
from farcall.rpc.references import NodeReferences
from farcall.runtime.calls.serving import Later, MarkedResult, is_async_execution
from farcall.runtime.node import runtime_of_thread


def _find(created_on: int, local_id: int) -> Owned:
    node = runtime_of_thread()
    assert node is not None
    return node.part(NodeReferences).find(RefId(created_on, local_id))


def fetch(created_on: int, local_id: int) -> Any:
    """The value itself."""
    owned = _find(created_on, local_id)
    return owned.get_to_send() if owned.ready else Later(owned.when_ready, owned.get_to_send)


def type_of(created_on: int, local_id: int) -> Any:
    """The type of the value."""
    owned = _find(created_on, local_id)
    return _type(owned) if owned.ready else Later(owned.when_ready, lambda: _type(owned))


def _type(owned: Owned) -> type[Any]:
    return type(owned.get_to_send())


class _Method:
    """Calls one method, whatever the object."""

    __slots__ = ("__qualname__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self.__qualname__ = name

    def __call__(self, created_on: int, local_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        owned = _find(created_on, local_id)
        if owned.ready:
            return self._call(owned, args, kwargs)
        return Later(owned.when_ready, lambda: self._call(owned, args, kwargs))

    def _call(self, owned: Owned, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        method: Callable[..., Any] = getattr(owned.get_to_send(), self._name)
        result = method(*args, **kwargs) if kwargs else method(*args)
        return MarkedResult(result) if is_async_execution(method) else result


class _Methods:
    """``methods.of_NAME`` calls the method NAME of a value.

    By name, so that each method is a function of its own to those who look at functions: is it a quick one, how often
    was it called.
    """

    def __getattr__(self, attribute: str) -> _Method:
        if not attribute.startswith(METHOD_PREFIX):
            raise AttributeError(attribute)
        method = _Method(attribute.removeprefix(METHOD_PREFIX))
        setattr(self, attribute, method)
        return method


METHOD_PREFIX = "of_"
methods: _Methods = _Methods()


def backward(created_on: int, local_id: int, context_id: int, retain_graph: bool) -> Any:
    """Run a backward pass from the value."""
    owned = _find(created_on, local_id)
    if owned.ready:
        return run_backward(owned.get_to_send(), context_id, retain_graph)
    return Later(owned.when_ready, lambda: run_backward(owned.get_to_send(), context_id, retain_graph))


def run_backward(root: Any, context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from ``root``: through torch alone, or in a distributed context."""
    if not isinstance(root, torch.Tensor):
        raise RpcError(f"the RRef should contain a tensor for .backward(), not {type(root).__name__}")
    if context_id == -1:
        torch.autograd.backward([root], retain_graph=retain_graph)
    else:
        backward_in_context(context_id, [root], retain_graph)
