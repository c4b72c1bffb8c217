"""OpenTelemetry: a span for each call made and each call served, in one trace over all workers.

Enabled by ``opentelemetry=True``; needs OpenTelemetry's API. The spans go to the program's own tracer provider. Without
the option no call passes through this code: only a node with the option has this table of calls (`TracedCalls`) and a
server that wraps each request (`Telemetry.traced`).

The caller's trace context travels in the notes of a request, in the W3C format. Caller and callee make their spans
independently: either may have the option without the other.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from farcall.core.contract import Core
from farcall.errors import InitError
from farcall.observe.snapshot import function_title
from farcall.protocol.frames import FAILURE, Frame
from farcall.protocol.notes import decode_notes
from farcall.protocol.references.messages import Fork
from farcall.runtime.calls.executor import Executor, Task
from farcall.runtime.calls.pending import CallTable, PendingCall, SyncCall
from farcall.runtime.calls.serving import Request
from farcall.runtime.io.timers import Callback, Timer
from farcall.runtime.observing.counters import name_of
from farcall.serialize import withdraw

_RAISED = "the function raised"


class Telemetry:
    """The tracer of one node; raises `InitError` if OpenTelemetry is not installed."""

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

    def begin_call(self, call: PendingCall, frame: Frame) -> Any:
        """Start the span of an outgoing call: a child of the calling thread's span, and the parent of the callee's."""
        title = function_title(frame.function, name_of(call.what))
        span = self._tracer.start_span(
            f"{call.peer.info.name}/{title}",
            kind=self._trace.SpanKind.CLIENT,
            attributes=self._attributes(title, call.peer.info.name),
        )
        frame.telemetry = {}
        self._propagate.inject(frame.telemetry, self._trace.set_span_in_context(span))
        return span

    def fail(self, span: Any, why: str) -> None:
        """Mark ``span`` as failed."""
        span.set_status(self._trace.StatusCode.ERROR, why)

    def traced(self, request: Request) -> Task:
        """Wrap ``request`` in a task that runs it inside its own span."""
        return _TracedTask(self, request)

    def serving(self, request: Request) -> Any:
        """The span of ``request`` as a context manager for the thread that runs it."""
        frame = request.frame
        carrier = decode_notes(frame.notes).telemetry if frame.notes else {}
        title = function_title(frame.function, "call")
        return self._tracer.start_as_current_span(
            f"{self.worker}/{title}",
            context=self._propagate.extract(carrier) if carrier else None,
            kind=self._trace.SpanKind.SERVER,
            attributes=self._attributes(title, request.peer.info.name),
        )

    def name(self, span: Any, request: Request) -> None:
        """Name the span of ``request``, whose function has been read by now, like that of its caller."""
        title = function_title(request.frame.function, request.function_name or "call")
        span.update_name(f"{self.worker}/{title}")
        span.set_attribute("rpc.method", title)

    def _attributes(self, title: str, peer: str) -> dict[str, str]:
        return {"rpc.system": "farcall", "rpc.method": title, "farcall.worker": self.worker, "farcall.peer": peer}


class TracedCalls(CallTable):
    """A table of calls that makes a span for each. Mutable: the spans of asynchronous calls in progress."""

    def __init__(
        self,
        core: Core,
        timer: Callable[[Callback], Timer],
        executor: Executor,
        when_overloaded: str,
        telemetry: Telemetry,
        **others: Any,
    ) -> None:
        super().__init__(core, timer, executor, when_overloaded, **others)
        self.telemetry: Telemetry = telemetry
        self._spans: dict[int, Any] = {}  # of asynchronous calls, by the identity of the call

    def exchange(self, call: SyncCall, frame: Frame, refusable: bool = True) -> Frame:
        span = self._begin(call, frame)
        try:
            answer = super().exchange(call, frame, refusable)
            if answer.kind == FAILURE:
                self.telemetry.fail(span, _RAISED)
            return answer
        except BaseException as error:
            self.telemetry.fail(span, str(error))
            raise
        finally:
            span.end()

    def send(self, call: PendingCall, frame: Frame, created: Fork | None = None, origin: str = "") -> None:
        span = self._spans[id(call)] = self._begin(call, frame)
        try:
            super().send(call, frame, created, origin)
        except BaseException as error:
            self.telemetry.fail(span, str(error))
            self._end(call)
            raise

    def _begin(self, call: PendingCall, frame: Frame) -> Any:
        """Start a span for ``call`` and add it to the request. If the tracer raises, withdraw the request's forks."""
        try:
            return self.telemetry.begin_call(call, frame)
        except BaseException:
            withdraw(frame)
            if call.profile is not None:
                call.profile.ended()
            raise

    def claim(self, call_id: int) -> PendingCall | None:
        call = super().claim(call_id)
        if call is not None:
            is_late = call.deadline <= monotonic()
            self._end(call, f"no answer within {call.timeout_s:g} s" if is_late else "cancelled, or its worker is lost")
        return call

    def answered(self, frame: Frame) -> PendingCall | None:
        call = super().answered(frame)
        if call is not None:
            self._end(call, _RAISED if frame.kind == FAILURE else "")
        return call

    def _end(self, call: PendingCall, failure: str = "") -> None:
        span = self._spans.pop(id(call), None)
        if span is not None:
            if failure:
                self.telemetry.fail(span, failure)
            span.end()


class _TracedTask:
    """A request inside its span; a task of the executor."""

    __slots__ = ("_telemetry", "served")

    def __init__(self, telemetry: Telemetry, request: Request) -> None:
        self._telemetry = telemetry
        self.served: Request = request

    def run(self, more: bool) -> None:
        with self._telemetry.serving(self.served) as span:
            self.served.run(more)
            self._telemetry.name(span, self.served)

    def drop(self) -> None:
        self.served.drop()
