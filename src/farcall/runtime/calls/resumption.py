"""The task of the executor for a request that has begun: its answer, once it can be given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farcall.runtime.calls.executor import UNKNOWN_S
from farcall.runtime.calls.results import answers_later
from farcall.runtime.calls.run_inline import QUICK_S
from farcall.runtime.calls.scope import CURRENT
from farcall.serialize import RECORDING

if TYPE_CHECKING:
    from farcall.runtime.calls.serving import Request


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
