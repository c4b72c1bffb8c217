"""`async_execution`: functions that return a future, whose value is the answer to the call.

Public as ``farcall.functions``. Owns the mark on such functions; `runtime/calls/serving.py` reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import torch

from farcall.runtime.calls.results import ASYNC_MARK
from farcall.serialize.rebuild import find_script_function

P = ParamSpec("P")
R = TypeVar("R")
Awaited = Coroutine[Any, Any, R] | torch.futures.Future[R]
"""A result that the callee awaits before it answers; the caller gets an R."""


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark ``fn``, which returns a ``torch.futures.Future``: the caller gets the value of the future.

    No thread waits for the future. Combines with ``@staticmethod`` and ``@classmethod``, in either order, and works
    for methods that are called through a reference.
    """
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(async_execution(fn.__func__))
    if isinstance(fn, torch.jit.ScriptFunction):
        return AsyncScriptFunction(fn)

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper


class AsyncScriptFunction:
    """A marked TorchScript function. It is pickled as the qualified name of the function inside."""

    def __init__(self, function: Any) -> None:
        self.function = function
        setattr(self, ASYNC_MARK, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        if not isinstance(result, torch._C.Future):
            raise RuntimeError(
                f"Async functions must return an IValue of Future type, but got {type(result).__name__} from "
                f"{self.function.qualified_name}"
            )
        return result

    def __reduce__(self) -> Any:
        return _find, (str(self.function.qualified_name),)


def _find(qualified_name: str) -> AsyncScriptFunction:
    return AsyncScriptFunction(find_script_function(qualified_name))
