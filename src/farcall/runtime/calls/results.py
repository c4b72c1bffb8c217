"""What a function may return, or raise, in the place of its answer.

plain value                            the answer
future, from an async_execution func   the answer is its value
coroutine, from an async def           the answer is its result
`Later`, from farcall's own functions  asked again, on a worker, when it says so
`StoredFailure`, raised                a failure that was written before
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import Any

from farcall.protocol.frames import Frame

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute by which `async_execution` marks a function."""
COMPLETING = "completing_thread"
"""The attribute of a future that one thread completes together with others: its number. That thread flushes then."""


class Later:
    """The result of a function that cannot answer yet: ``finish()`` can, once ``subscribe``'s argument was called."""

    __slots__ = ("finish", "subscribe")

    def __init__(self, subscribe: Callable[[Callable[[], None]], None], finish: Callable[[], Any]) -> None:
        self.subscribe: Callable[[Callable[[], None]], None] = subscribe
        self.finish: Callable[[], Any] = finish


class MarkedResult:
    """What a function marked by `async_execution` returned, passed on by a function that is not."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: Any = value


class StoredFailure(Exception):
    """Raised to answer with a failure that was encoded before."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame


LATER = frozenset((CoroutineType, Later, MarkedResult))
"""The classes of results that are no answers yet."""


def answers_later(func: Callable[..., Any], result: Any) -> bool:
    """Is the answer of ``func``, which returned ``result``, still to come?"""
    return result.__class__ in LATER or is_async_execution(func)


def is_async_execution(func: Callable[..., Any]) -> bool:
    """Did `async_execution` mark ``func``, or what it is a partial of?"""
    return hasattr(func, ASYNC_MARK) or (type(func) is partial and is_async_execution(func.func))
