"""Troubles: deadlocks and exhausted pools, found in the snapshots of all workers.

Pure functions. The snapshots of all workers form one wait graph of threads:

    from                                          to
    a thread that waits for a call                the thread that serves it there
    a thread that waits for an item of an         the thread that makes its items (in snapshots, a call and its callee)
    outgoing stream
    a call that waits for its turn at a serial    the call that has the turn
    object
    a thread that serves, waits for no call,      every other thread of its worker that waits for a call: one of
    and does not move                             those may hold its lock (Python's locks do not name their owners)
    a call that is answered later (a coroutine)   every call of its worker that no thread waits for

A cycle in it is a deadlock, or looks like one. Two snapshots show whether a thread moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from farcall.observe.snapshot import LATER, QUEUED, RUNNING, OutgoingCall, ServedCall, WorkerSnapshot

_STILL_CPU_S = 0.0002
"""A thread that sleeps in slices uses less between two looks; one that makes calls uses more for each."""
_LONG_TURN_S = 2.0
_MOST_TROUBLES = 20
_THREAD = "thread"
_CALL = "call"

ThreadKey: TypeAlias = tuple[str, int]
"""A worker's name, and the id of one of its threads."""


class _Node(NamedTuple):
    """A thread, an outgoing call that no thread waits for, or a served call that is answered later."""

    worker: str
    kind: str
    number: int
    caller: str = ""


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """A cycle of waiting threads, or a pool without a free thread."""

    kind: str
    """"cycle" or "exhausted pool"."""
    workers: list[str]
    text: str
    """The trouble in one sentence."""
    steps: list[str] = []
    """The waits of a cycle, in order."""


def still_threads(before: Iterable[WorkerSnapshot], after: Iterable[WorkerSnapshot]) -> set[ThreadKey]:
    """The threads that neither moved nor used processor time between two snapshots of their workers."""
    earlier = {(one.worker, thread.id): thread for one in before for thread in one.threads}
    still = set()
    for one in after:
        for thread in one.threads:
            then = earlier.get((one.worker, thread.id))
            if then is None or then.position != thread.position:
                continue
            if thread.cpu_s < 0 or thread.cpu_s - then.cpu_s < _STILL_CPU_S:
                still.add((one.worker, thread.id))
    return still


def find_troubles(snapshots: Sequence[WorkerSnapshot], still: set[ThreadKey] | None = None) -> list[Trouble]:
    """Find stuck calls. ``still``: threads known not to move; None: any thread may be still."""
    return [*_cycles(snapshots, still), *_exhausted_pools(snapshots)][:_MOST_TROUBLES]


def _exhausted_pools(snapshots: Sequence[WorkerSnapshot]) -> list[Trouble]:
    found = []
    for one in snapshots:
        pool = one.pool
        computing = pool.busy - pool.parked
        if pool.queued and computing >= pool.size:
            oldest_s = max((served.for_s for served in one.served if served.state == QUEUED), default=0.0)
            text = (
                f"{one.worker}: its pool is exhausted: {pool.queued} calls wait, the oldest for {oldest_s:.1f} s, "
                f"while {computing} functions hold {pool.size} threads without waiting for a call (num_worker_threads)"
            )
            found.append(Trouble("exhausted pool", [one.worker], text))
    return found


def long_turns(snapshots: Sequence[WorkerSnapshot]) -> list[str]:
    """The serial objects that calls have waited for for seconds. That may be a long computation, or a deadlock."""
    found: dict[tuple[str, str, int], str] = {}
    for one in snapshots:
        for call in one.served:
            holder = call.behind
            if holder is not None and holder.function and call.for_s >= _LONG_TURN_S:
                wait = "1 call waits" if call.waiting == 1 else f"{call.waiting} calls wait"
                found[one.worker, holder.caller, holder.call_id] = (
                    f"{one.worker}: {wait} for {holder.function}() for {holder.caller}, which has had its serial "
                    f"object for {holder.for_s:.1f} s"
                )
    return list(found.values())[:_MOST_TROUBLES]


class _WaitGraph:
    """The wait graph of the module's docstring."""

    def __init__(self, snapshots: Sequence[WorkerSnapshot], still: set[ThreadKey] | None) -> None:
        self.by_name = {one.worker: one for one in snapshots}
        self.edges: dict[_Node, list[_Node]] = {}
        self.outgoing: dict[_Node, OutgoingCall] = {}
        self.serving: dict[_Node, ServedCall] = {}
        served = {(one.worker, call.caller, call.call_id): call for one in snapshots for call in one.served}
        for one in snapshots:
            for call in one.calls:
                thread_id = call.thread_id
                node = _Node(one.worker, _THREAD, thread_id) if thread_id else _Node(one.worker, _CALL, call.call_id)
                self.outgoing[node] = call
                there = served.get((call.to, one.worker, call.call_id))
                self.edges[node] = [] if there is None else [_served_node(call.to, there)]
        for one in snapshots:
            here = [node for node in self.outgoing if node.worker == one.worker]
            waiting = [node for node in here if node.kind == _THREAD]
            loose = [node for node in here if node.kind == _CALL]
            for serves in one.served:
                node = _served_node(one.worker, serves)
                self.serving[node] = serves
                if node in self.edges:
                    continue  # it waits for an outgoing call, not for a lock of this worker
                if serves.state == RUNNING and (still is None or (one.worker, serves.thread_id) in still):
                    self.edges[node] = [other for other in waiting if other != node]
                elif serves.state == LATER:
                    self.edges[node] = loose
                elif serves.behind is not None:
                    self.edges[node] = [_served_node(one.worker, serves.behind)]

    def shortest_circle(self, start: _Node) -> list[_Node]:
        """The shortest cycle through ``start``; empty if there is none."""
        before: dict[_Node, _Node] = {}
        queue = deque([start])
        while queue:
            node = queue.popleft()
            for following in self.edges.get(node, ()):
                if following == start:
                    way = [node]
                    while way[-1] != start:
                        way.append(before[way[-1]])
                    return way[::-1]
                if following not in before:
                    before[following] = node
                    queue.append(following)
        return []

    def trouble(self, way: Sequence[_Node]) -> Trouble:
        """Describe a cycle."""
        workers = list(dict.fromkeys(node.worker for node in way))
        if len(workers) == 1:
            head = f"{workers[0]} waits for itself"
        elif len(workers) == 2:
            head = f"{workers[0]} and {workers[1]} wait for each other"
        else:
            head = f"{', '.join(workers)} wait for each other in a circle"
        steps = []
        for index, node in enumerate(way):
            following = way[(index + 1) % len(way)]
            call, serves = self.outgoing.get(node), self.serving.get(node)
            if call is None and serves is not None and (holder := serves.behind) is not None:
                steps.append(
                    f"which has waited {serves.for_s:.1f} s for its turn: {holder.function}() for {holder.caller} has "
                    "the object"
                )
            elif call is not None:
                steps.append(
                    f"{node.worker}{self._at(node)} has waited {call.for_s:.1f} s for {call.to} {call.title}()"
                )
            else:
                steps.append(
                    f"which does not go on{self._at(node)}, perhaps because of what "
                    f"{node.worker}{self._at(following)} holds"
                )
        return Trouble("cycle", workers, head, steps)

    def _at(self, node: _Node) -> str:
        thread = self.by_name[node.worker].thread(node.number) if node.kind == _THREAD else None
        if thread is None:
            return ""
        where = f" at {thread.stack[0].file}:{thread.stack[0].line}" if thread.stack else ""
        return f" (thread {thread.name}{where})"


def _served_node(worker: str, served: ServedCall) -> _Node:
    if served.state == RUNNING:
        return _Node(worker, _THREAD, served.thread_id)
    return _Node(worker, served.state, served.call_id, served.caller)


def _cycles(snapshots: Sequence[WorkerSnapshot], still: set[ThreadKey] | None) -> list[Trouble]:
    """Find cycles. Of cycles that share a node, report only the shortest: it blocks the others."""
    graph = _WaitGraph(snapshots, still)
    ways = [way for start in graph.outgoing if (way := graph.shortest_circle(start))]
    found: list[Trouble] = []
    told: set[_Node] = set()
    for way in sorted(ways, key=len):
        if told.isdisjoint(way):
            found.append(graph.trouble(way))
            told.update(way)
    return found
