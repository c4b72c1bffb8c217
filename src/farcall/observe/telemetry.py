"""OpenTelemetry: a span for each call made and each call served, in one trace over all workers.

Opted into with ``opentelemetry=True``; needs OpenTelemetry's API. What becomes of spans is the business of the tracer
provider that the program has set up. Where it is not opted into, no call passes here: a node with spans has another
table of calls (`TracedCalls`), and its server wraps each request (`Telemetry.traced`).

The caller's trace context rides in the notes of a request, as W3C names it. Caller and callee need not both have opted
in: whoever has makes spans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farcall.errors import InitError
from farcall.observe.snapshot import function_title
from farcall.protocol.frames import FAILURE, Frame
from farcall.protocol.notes import decode_notes
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.executor import Executor, Task
from farcall.runtime.calls.pending import CallTable, PendingCall, SyncCall
from farcall.runtime.calls.serving import Request
from farcall.runtime.io.timers import Callback, Timer

__all__ = ["Telemetry", "TracedCalls"]


class Telemetry:
    """What is needed of OpenTelemetry; raises `InitError` where it is not installed."""

    def __init__(self, worker: str) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            raise InitError(
                "opentelemetry=True needs OpenTelemetry: pip install 'farcall[opentelemetry]', or leave the option out"
            ) from None
        self._propagate = propagate
        self._trace = trace
        self._tracer = trace.get_tracer("farcall")
        self.worker = worker

    def begin_call(self, call: PendingCall, function: bytes) -> Any:
        """A span for a call that is about to be made, a child of the calling thread's."""
        title = function_title(function, getattr(call.what, "__qualname__", None) or "call")
        return self._tracer.start_span(
            f"{call.peer.info.name}/{title}",
            kind=self._trace.SpanKind.CLIENT,
            attributes=self._attributes(title, call.peer.info.name),
        )

    def carrier(self, span: Any) -> dict[str, str]:
        """What a request tells its callee, whose span is to be a child of ``span``."""
        carrier: dict[str, str] = {}
        self._propagate.inject(carrier, self._trace.set_span_in_context(span))
        return carrier

    def fail(self, span: Any, why: str) -> None:
        """The call of ``span`` did not end well."""
        span.set_status(self._trace.StatusCode.ERROR, why)

    def traced(self, request: Request) -> Task:
        """``request``, to be run inside a span of its own."""
        return _TracedTask(self, request)

    def serving(self, request: Request) -> Any:
        """A context manager: the calling thread is in the span of ``request``."""
        frame = request.frame
        carrier = decode_notes(frame.notes).telemetry if frame.notes else {}
        title = function_title(frame.function, "call")
        return self._tracer.start_as_current_span(
            f"{self.worker}/{title}",
            context=self._propagate.extract(carrier) if carrier else None,
            kind=self._trace.SpanKind.SERVER,
            attributes=self._attributes(title, request.peer.info.name),
        )

    def _attributes(self, title: str, peer: str) -> dict[str, str]:
        return {"rpc.system": "farcall", "rpc.method": title, "farcall.worker": self.worker, "farcall.peer": peer}


class TracedCalls(CallTable):
    """A table of calls that makes a span of each."""

    def __init__(
        self,
        timer: Callable[[Callback], Timer],
        executor: Executor,
        when_overloaded: str,
        telemetry: Telemetry,
        *,
        on_given_up: Callable[[], None],
    ) -> None:
        super().__init__(timer, executor, when_overloaded, on_given_up=on_given_up)
        self.telemetry: Telemetry = telemetry
        self._spans: dict[int, Any] = {}  # by the identity of its call, of those that nobody waits for

    def exchange(self, call: SyncCall, frame: Frame, refusable: bool = True) -> Frame:
        span = self.telemetry.begin_call(call, frame.function)
        frame.telemetry = self.telemetry.carrier(span)
        try:
            answer = super().exchange(call, frame, refusable)
            if answer.kind == FAILURE:
                self.telemetry.fail(span, "the function raised")
            return answer
        except BaseException as error:
            self.telemetry.fail(span, str(error))
            raise
        finally:
            span.end()

    def send(self, call: PendingCall, frame: Frame, created: Fork | None = None, origin: str = "") -> None:
        span = self._spans[id(call)] = self.telemetry.begin_call(call, frame.function)
        frame.telemetry = self.telemetry.carrier(span)
        try:
            super().send(call, frame, created, origin)
        except BaseException as error:
            self.telemetry.fail(span, str(error))
            self._end(call)
            raise

    def claim(self, call_id: int) -> PendingCall | None:
        call = super().claim(call_id)
        if call is not None:
            self._end(call)
        return call

    def _end(self, call: PendingCall) -> None:
        span = self._spans.pop(id(call), None)
        if span is not None:
            span.end()


class _TracedTask:
    """A request inside its span; a task of the executor."""

    __slots__ = ("_request", "_telemetry")

    def __init__(self, telemetry: Telemetry, request: Request) -> None:
        self._telemetry = telemetry
        self._request = request

    @property
    def quick(self) -> bool:
        return self._request.quick

    def run(self, more: bool) -> None:
        with self._telemetry.serving(self._request):
            self._request.run(more)

    def drop(self) -> None:
        self._request.drop()
