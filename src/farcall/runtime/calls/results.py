"""What a function may return, or raise, in the place of its answer; and the request that is taken up again then.

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
from typing import TYPE_CHECKING, Any

from farcall.protocol.frames import Frame
from farcall.runtime.calls.executor import UNKNOWN_S
from farcall.runtime.calls.run_inline import QUICK_S
from farcall.runtime.calls.scope import CURRENT
from farcall.serialize import RECORDING

if TYPE_CHECKING:
    from farcall.runtime.calls.serving import Request

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


class Resumption:
    """A request that can be answered now; a task of the executor."""

    __slots__ = ("_finish", "_request")

    expected_s = UNKNOWN_S

    def __init__(self, request: Request, finish: Callable[[], Any]) -> None:
        self._request = request
        self._finish = finish

    def run(self, more: bool) -> None:
        request = self._request
        recording = request.frame.recording
        outside = None if recording is None else recording.enter()
        outer = CURRENT.set(request)
        try:
            profile = request.profile
            outcome = [self._finish() if profile is None else profile.run(self._finish)]
            if answers_later(self._finish, outcome[0]):
                request._answer_later(self._finish, outcome[0])
                return
        except BaseException as error:
            request._fail(error)
            return
        finally:
            if recording is not None:
                RECORDING.set(outside)
            CURRENT.reset(outer)
        request.answer(outcome, more and request.expected_s < QUICK_S)

    def drop(self) -> None:
        self._request.drop()
