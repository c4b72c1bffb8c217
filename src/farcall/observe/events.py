"""A harvest as events of torch's legacy profiler, with the names that `torch.distributed.rpc` gives them.

    rpc_sync#function(caller -> callee)                             a call, on its caller
    ... #remote_op: aten::add                                       an operator of its run, ``is_remote``
    ... #remote_op: rpc_async#other(callee -> third)                a call made in its run
    ... #remote_op: rpc_async#other(callee -> third)#remote_op: ..  and so on

Each event has the ``node_id`` of the worker on which it happened. Runs themselves are no events, as they are none in
stock: whatever they do would be counted twice.
"""

from __future__ import annotations

from typing import Any, Final

from torch.autograd.profiler_util import FunctionEvent

from farcall.observe.clocks import align, bounds_of_calls
from farcall.observe.spans import CALL, OPERATOR, RUN, Harvest

__all__ = ["REMOTE_OPERATOR", "function_events", "offsets_of"]

REMOTE_OPERATOR: Final = "#remote_op: "
_FIRST_ID: Final = 1 << 40


def offsets_of(harvest: Harvest, origin: int) -> dict[int, int]:
    """How far each worker's clock is ahead of that of ``origin``."""
    return align(origin, [*harvest.bounds, *bounds_of_calls(harvest.spans)])


def function_events(harvest: Harvest, origin: int, base_ns: int, thread: int) -> list[Any]:
    """The calls and operators, by the clock of ``origin``, from ``base_ns`` on; ``thread`` is the profiled one."""
    offsets = offsets_of(harvest, origin)
    keys = _Keys(harvest)
    events = []
    for number, span in enumerate(harvest.spans):
        if span.kind == RUN:
            continue
        details = span.details
        prefix = keys.of(span.inside if span.kind == CALL else span.call)
        name = prefix + REMOTE_OPERATOR + span.name if prefix else span.name
        is_async = bool(details.get("async")) if span.kind == OPERATOR else details.get("kind") != "sync"
        mine = span.kind == CALL and span.worker == origin and not span.inside
        zero_ns = base_ns + offsets.get(span.worker, 0)
        event: Any = FunctionEvent(  # type: ignore[no-untyped-call]
            id=_FIRST_ID + number,
            node_id=span.worker,
            name=name,
            trace_name=None if details.get("timeless") else name,
            thread=thread if mine else span.thread,
            start_us=(span.start_ns - zero_ns) / 1000,
            end_us=(span.end_ns - zero_ns) / 1000,
            fwd_thread=details.get("forward_thread"),
            input_shapes=details.get("shapes", []),
            stack=details.get("stack", []),
            scope=details.get("scope", 0),
            use_device="cuda" if details.get("kernels") else None,
            cpu_memory_usage=details.get("cpu_bytes", 0),
            device_memory_usage=details.get("device_bytes", 0),
            is_async=is_async,
            is_remote=not mine and bool(prefix),
            sequence_nr=details.get("sequence", -1),
            is_legacy=True,
            flops=details.get("flops"),
        )
        for kernel, device, duration_us in details.get("kernels", ()):
            event.append_kernel(kernel, device, duration_us)
        events.append(event)
    return events


class _Keys:
    """The names of calls, with those of the calls in whose runs they were made."""

    def __init__(self, harvest: Harvest) -> None:
        self._calls = {span.call: span for span in harvest.spans if span.kind == CALL}
        self._known: dict[int, str] = {0: ""}

    def of(self, number: int) -> str:
        known = self._known.get(number)
        if known is None:
            call = self._calls.get(number)
            if call is None:
                known = ""  # of a caller that is not in the harvest
            else:
                self._known[number] = ""  # whatever was sent to us: no circle
                outer = self.of(call.inside)
                known = outer + REMOTE_OPERATOR + call.name if outer else call.name
            self._known[number] = known
        return known
