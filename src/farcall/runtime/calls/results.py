"""What a function may return or raise in place of its answer, and the task that resumes a request.

plain value                            the answer
future, from an async_execution func   the answer is its value
coroutine, from an async def           the answer is its result
`Later`, from farcall's own functions  a worker asks it for the answer when it is ready
`Entrusted`, from batched functions    the object that takes the request answers it
`StoredFailure`, raised                a failure that was encoded before
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from farcall.protocol.frames import Frame
from farcall.runtime.calls.scope import CURRENT
from farcall.serialize import RECORDING

if TYPE_CHECKING:
    from farcall.runtime.calls.serving import Request

ASYNC_MARK = "_wrapped_async_rpc_function"
"""The attribute by which `async_execution` marks a function."""


class Later:
    """The result of a function that cannot answer yet.

    ``subscribe(ready)`` has ``ready()`` called when the time has come; from then on ``finish()`` gives the result.
    """

    __slots__ = ("finish", "subscribe")

    def __init__(self, subscribe: Callable[[Callable[[], None]], None], finish: Callable[[], Any]) -> None:
        self.subscribe: Callable[[Callable[[], None]], None] = subscribe
        self.finish: Callable[[], Any] = finish


class Entrusted:
    """The result of a function that does not answer itself: ``take(request)`` answers the request, now or later."""

    __slots__ = ("take",)

    def __init__(self, take: Callable[[Request], None]) -> None:
        self.take: Callable[[Request], None] = take


class MarkedResult:
    """The result of a function marked by `async_execution`, passed on by a function without the mark."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value: Any = value


class StoredFailure(Exception):
    """Raised to answer with a failure that was encoded before; ``frame`` holds it."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame


LATER = frozenset((CoroutineType, Entrusted, Later, MarkedResult))
"""The classes of results that are not answers yet."""


def answers_later(func: Callable[..., Any], result: Any) -> bool:
    """Is the answer of ``func``, which returned ``result``, still to come?"""
    return result.__class__ in LATER or is_async_execution(func)


def is_async_execution(func: Callable[..., Any]) -> bool:
    """Did `async_execution` mark ``func``, or the function that it is a partial of?"""
    return hasattr(func, ASYNC_MARK) or (type(func) is partial and is_async_execution(func.func))


class Resumption:
    """The second half of a deferred request, which can be answered now; a task of the executor."""

    __slots__ = ("_finish", "_request")

    def __init__(self, request: Request, finish: Callable[[], Any]) -> None:
        self._request = request
        self._finish = finish

    def run(self, more: bool) -> None:
        request = self._request
        recording = request.frame.recording
        outside = None if recording is None else recording.enter()
        outer = CURRENT.set(request)
        later = False
        entrusted: Entrusted | None = None
        try:
            profile = request.profile
            outcome = [self._finish() if profile is None else profile.run(self._finish)]
            if answers_later(self._finish, outcome[0]):
                later = True
                entrusted = request._answer_later(self._finish, outcome[0])
        except BaseException as error:
            request.fail(error)
            return
        finally:
            if recording is not None:
                RECORDING.set(outside)
            CURRENT.reset(outer)
        if entrusted is not None:
            request.entrust(entrusted)
        if not later:
            request.answer(outcome)

    def drop(self) -> None:
        self._request.drop()
