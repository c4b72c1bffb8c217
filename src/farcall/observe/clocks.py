"""One time for all workers: their clock offsets, from questions over the links and from calls.

Every worker's spans are in its own clock. A question and its answer bound the difference of two clocks, as the other
clock was read between the two. So does each call: its run lies inside it. `align` finds one offset per worker that
violates none of these bounds, and is near the middle of the tightest.

`Clocks` asks by control messages, which never queue behind a function; no thread waits for the answers. A peer is asked
a few times at the first call of a profiled caller, and again half a minute later.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from time import monotonic

from farcall.observe.spans import CALL, RUN, Bound, Harvest, Span
from farcall.protocol.messages import ClockAsked, ClockTold
from farcall.runtime.node import Runtime
from farcall.runtime.observing.profiling import PROFILING
from farcall.runtime.peers.peer import Peer, RemotePeer

QUESTIONS = 5
STALE_S = 30.0


class Clocks:
    """The clocks of a node's peers; ``node.part(Clocks)``. Mutable: bounds and outstanding questions, by worker."""

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._best: dict[int, Bound] = {}  # by worker: the tightest bound of the latest questions
        self._asked_at: dict[int, float] = {}
        self._left: dict[int, int] = {}
        # ``in_order`` runs it on the thread that reads the link: a hop to another thread would widen the bound.
        node.hooks.on_control(ClockTold, self._on_told)

    def ask(self, peer: Peer) -> None:
        """Measure the offset of ``peer``'s clock, unless that was done recently."""
        worker, now = peer.info.id, monotonic()
        if not isinstance(peer, RemotePeer) or now - self._asked_at.get(worker, -STALE_S) < STALE_S:
            return
        self._asked_at[worker] = now
        self._left[worker] = QUESTIONS - 1
        self._best.pop(worker, None)
        peer.control(ClockAsked(PROFILING.clock_ns()))

    def bounds(self) -> list[Bound]:
        """The bounds known so far."""
        return list(self._best.values())

    def _on_told(self, peer: RemotePeer, message: ClockTold) -> None:
        heard_ns = PROFILING.clock_ns()
        worker = peer.info.id
        found = Bound(self._node.info.id, worker, message.clock_ns - heard_ns, message.clock_ns - message.sent_ns)
        known = self._best.get(worker)
        if known is None or found.high_ns - found.low_ns < known.high_ns - known.low_ns:
            self._best[worker] = found
        left = self._left.get(worker, 0)
        self._left[worker] = left - 1
        if left > 0:
            peer.control(ClockAsked(PROFILING.clock_ns()))


def bounds_of_calls(spans: Iterable[Span]) -> list[Bound]:
    """The bounds that calls among ``spans`` give: a run lies inside its call."""
    calls: dict[int, Span] = {}
    runs: dict[int, tuple[int, int, int]] = {}
    for span in spans:
        if span.kind == CALL and "unanswered" not in span.details:
            calls[span.call] = span
        elif span.kind == RUN and span.call:
            _, start_ns, end_ns = runs.get(span.call, (0, span.start_ns, span.end_ns))
            runs[span.call] = (span.worker, min(start_ns, span.start_ns), max(end_ns, span.end_ns))
    found = []
    for number, (worker, start_ns, end_ns) in runs.items():
        call = calls.get(number)
        if call is not None and call.worker != worker:
            found.append(Bound(call.worker, worker, end_ns - call.end_ns, start_ns - call.start_ns))
    return found


def offsets_of(harvest: Harvest, origin: int) -> dict[int, int]:
    """How far each worker's clock in ``harvest`` is ahead of ``origin``'s, in nanoseconds."""
    return align(origin, [*harvest.bounds, *bounds_of_calls(harvest.spans)])


def align(origin: int, bounds: Iterable[Bound]) -> dict[int, int]:
    """For each worker named in ``bounds``: how far its clock is ahead of ``origin``'s, in nanoseconds."""
    tightest = _tightest(bounds)
    offsets = _estimates(origin, tightest)
    # Each bound is two inequalities, x <= y + limit. Lower x wherever one is violated (Bellman-Ford): this ends after
    # as many rounds as there are workers, if a solution exists; a clock that was set meanwhile may rule that out.
    limits = []
    for (here, there), (low, high) in tightest.items():
        limits += [(there, here, high), (here, there, -low)]
    for _ in range(len(offsets) + 1):
        changed = False
        for lower, upper, limit in limits:
            if offsets[lower] > offsets[upper] + limit:
                offsets[lower] = offsets[upper] + limit
                changed = True
        if not changed:
            break
    base = offsets.get(origin, 0)
    return {worker: offset - base for worker, offset in offsets.items()}


def _tightest(bounds: Iterable[Bound]) -> dict[tuple[int, int], tuple[int, int]]:
    """One pair of limits for each pair of workers."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for bound in bounds:
        here, there, low, high = bound.here, bound.there, bound.low_ns, bound.high_ns
        if here > there:
            here, there, low, high = there, here, -high, -low
        known = found.get((here, there))
        found[here, there] = (low, high) if known is None else (max(low, known[0]), min(high, known[1]))
    for pair, (low, high) in found.items():
        if low > high:  # the clocks drifted between two measurements
            found[pair] = ((low + high) // 2, (low + high) // 2)
    return found


def _estimates(origin: int, tightest: dict[tuple[int, int], tuple[int, int]]) -> dict[int, int]:
    """The middles of the bounds, added along the narrowest paths from ``origin``; unreachable workers start at 0."""
    ways: dict[int, list[tuple[int, int, int]]] = {}
    for (here, there), (low, high) in tightest.items():
        middle, width = (low + high) // 2, high - low
        ways.setdefault(here, []).append((width, there, middle))
        ways.setdefault(there, []).append((width, here, -middle))
    offsets: dict[int, int] = {}
    for start in (origin, *ways):
        open_ways = [(0, start, 0)]
        while open_ways:
            _, worker, offset = heappop(open_ways)
            if worker not in offsets:
                offsets[worker] = offset
                for width, there, ahead in ways.get(worker, ()):
                    heappush(open_ways, (width, there, offset + ahead))
    return offsets
