"""`async_execution`: functions whose answer comes later than their return.

Public as ``farcall.functions``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from farcall.runtime.serving import ASYNC_MARK

P = ParamSpec("P")
R = TypeVar("R")


def async_execution(fn: Callable[P, R]) -> Callable[P, R]:
    """Mark ``fn``, which returns a ``torch.futures.Future``: the caller gets the future's value, when it is there.

    The thread that ran ``fn`` is free meanwhile. Works together with ``@staticmethod`` and ``@classmethod``, in either
    order, and on methods used through a reference.
    """
    if isinstance(fn, staticmethod | classmethod):
        return type(fn)(async_execution(fn.__func__))

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC_MARK, wrapper)
    return wrapper
