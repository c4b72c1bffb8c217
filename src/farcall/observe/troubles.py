"""Troubles: calls that will not come to a good end, found in the snapshots of all workers.

Pure functions. Snapshots of all workers make one graph of threads:

    from                                          to
    a thread that waits for a call                the thread that serves it there
    a thread that serves, waits for no call,      every other thread of its worker that waits for a call: one of
    and does not move                             those may hold what it waits for (Python's locks do not name owners)
    a call that is answered later (a coroutine)   every call of its worker that no thread waits for

A circle in it is a deadlock, or looks like one. Two snapshots show whether a thread moves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from farcall.observe.snapshot import LATER, QUEUED, RUNNING, OutgoingCall, ServedCall, WorkerSnapshot

_STILL_CPU_S = 0.005
_MOST_TROUBLES = 20

ThreadKey: TypeAlias = tuple[str, int]
"""A worker's name and the number of a thread there."""
_Node: TypeAlias = tuple[str, str, int, str]
"""A thread (worker, "thread", id, ""), an outgoing call nobody waits for, or a served call that is answered later."""


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """A circle of waiting threads, or a pool without a free one."""

    kind: str
    """"cycle" or "exhausted pool"."""
    workers: list[str]
    text: str
    """In one sentence."""
    steps: list[str] = []
    """Of a cycle: its waits, one after the other."""


def still_threads(before: Iterable[WorkerSnapshot], after: Iterable[WorkerSnapshot]) -> set[ThreadKey]:
    """The threads that neither moved nor computed between two snapshots of their workers."""
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
    """The calls that are stuck. ``still``: threads known not to move; None: any may be still."""
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


class _WaitGraph:
    """The graph of the module's docstring."""

    def __init__(self, snapshots: Sequence[WorkerSnapshot], still: set[ThreadKey] | None) -> None:
        self.by_name = {one.worker: one for one in snapshots}
        self.edges: dict[_Node, list[_Node]] = {}
        self.outgoing: dict[_Node, OutgoingCall] = {}
        self.serving: dict[_Node, ServedCall] = {}
        served = {(one.worker, call.caller, call.call_id): call for one in snapshots for call in one.served}
        for one in snapshots:
            for call in one.calls:
                node = _thread(one.worker, call.thread_id) if call.thread_id else (one.worker, "call", call.call_id, "")
                self.outgoing[node] = call
                there = served.get((call.to, one.worker, call.call_id))
                self.edges[node] = [] if there is None else [_served_node(call.to, there)]
        for one in snapshots:
            waiting = [node for node in self.outgoing if node[0] == one.worker and node[1] == "thread"]
            loose = [node for node in self.outgoing if node[0] == one.worker and node[1] == "call"]
            for serves in one.served:
                node = _served_node(one.worker, serves)
                self.serving[node] = serves
                if node in self.edges:
                    continue  # it waits for a call elsewhere, and for nothing here
                if serves.state == RUNNING and (still is None or (one.worker, serves.thread_id) in still):
                    self.edges[node] = [other for other in waiting if other != node]
                elif serves.state == LATER:
                    self.edges[node] = loose

    def shortest_circle(self, start: _Node) -> list[_Node]:
        """The shortest way from ``start`` back to it; empty if there is none."""
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
        """A circle, in words."""
        workers = list(dict.fromkeys(node[0] for node in way))
        if len(workers) == 1:
            head = f"{workers[0]} waits for itself"
        elif len(workers) == 2:
            head = f"{workers[0]} and {workers[1]} wait for each other"
        else:
            head = f"{', '.join(workers)} wait for each other in a circle"
        steps = []
        for index, node in enumerate(way):
            following = way[(index + 1) % len(way)]
            call = self.outgoing.get(node)
            if call is not None:
                steps.append(f"{node[0]}{self._at(node)} has waited {call.for_s:.1f} s for {call.to} {call.function}()")
            else:
                steps.append(
                    f"which does not go on{self._at(node)}, perhaps because of what "
                    f"{node[0]}{self._at(following)} holds"
                )
        return Trouble("cycle", workers, head, steps)

    def _at(self, node: _Node) -> str:
        thread = self.by_name[node[0]].thread(node[2]) if node[1] == "thread" else None
        if thread is None:
            return ""
        where = f" at {thread.stack[0].file}:{thread.stack[0].line}" if thread.stack else ""
        return f" (thread {thread.name}{where})"


def _thread(worker: str, thread_id: int) -> _Node:
    return (worker, "thread", thread_id, "")


def _served_node(worker: str, served: ServedCall) -> _Node:
    if served.state == RUNNING:
        return _thread(worker, served.thread_id)
    return (worker, served.state, served.call_id, served.caller)


def _cycles(snapshots: Sequence[WorkerSnapshot], still: set[ThreadKey] | None) -> list[Trouble]:
    """Of circles that share a part only the shortest is told: the others are blocked by it."""
    graph = _WaitGraph(snapshots, still)
    ways = [way for start in graph.outgoing if (way := graph.shortest_circle(start))]
    found: list[Trouble] = []
    told: set[_Node] = set()
    for way in sorted(ways, key=len):
        if told.isdisjoint(way):
            found.append(graph.trouble(way))
            told.update(way)
    return found
