"""Who takes part in a backward pass, what waits for what, and when it is over. Sans-I/O, no torch.

A pass is named by its origin and a number. Every recorded *send* of a context hears exactly once in a pass:
a gradient, or that there is none. Every recorded *receive* answers exactly once. That replaces a walk
before the pass:

- A worker that joins a pass fixes its sources: the sends recorded so far (and the roots, at the origin). A
  receive that no source reaches answers "none" at once. Any other receive answers when all sources that
  reach it have been heard: with a gradient if one of them was alive, else with "none". `Wavefront` decides
  that, edge by edge.
- It ends: let the forward events of all workers be ordered by causality (a partial order without cycles).
  What a send hears depends only on sends made causally after the matching receive, so by induction from the
  latest events backwards, each one is heard. Nothing alive is missed: a path from a root to a leaf crosses
  workers through receives, and each receive on it is reached by a live source.
- A receive recorded after its worker joined cannot reach the loss (the roots existed before); it answers
  "none".
- Everybody joins: the origin tells its peers to start, they tell theirs, `covered` naming those already
  told. A worker reports done to whoever told it first when its own part and all those it told are done (a
  diffusing computation), and at once to anyone who tells it again. So when the origin has heard from all it
  told, every part is finished, every gradient message was consumed (its send would still be waiting), and
  all leaf gradients are in place.

| state    | event              | next     | effects                                              |
|----------|--------------------|----------|------------------------------------------------------|
| new      | Begin              | running  | StartPass to each peer not covered                   |
| running  | PartFinished       | waiting  | as for the row below, if nobody is left to wait for  |
| waiting  | last PassDone      | done     | PassDone to the parent; Completed at the origin      |
| any live | StartPass again    | same     | PassDone to that worker                              |
| any live | PartFailed, lost   | same     | PassFailed to the origin; at the origin see below    |
| any live | PassFailed, late   | failed   | (origin) AbortPass to those told; Failed             |
| any live | AbortPass          | failed   | AbortPass to those told; Failed                      |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

import msgspec

from farcall.protocol.notes import ProfileWanted

__all__ = [
    "AbortPass",
    "BackwardPass",
    "Begin",
    "Completed",
    "Effect",
    "Event",
    "Failed",
    "PartFailed",
    "PartFinished",
    "PassDone",
    "PassFailed",
    "PassId",
    "PassState",
    "ReleaseContext",
    "StartPass",
    "Tell",
    "Wavefront",
    "WorkerLost",
]


class PassId(NamedTuple):
    """One backward pass of a context: who called for it, and its number there."""

    origin: int
    number: int


# --- messages between workers -----------------------------------------------------------------------------


class StartPass(msgspec.Struct, frozen=True, tag=True):
    """Join a pass. ``over_below``: passes of this origin with smaller numbers are over everywhere."""

    context_id: int
    pass_id: PassId
    covered: tuple[int, ...]
    retain_graph: bool = False
    over_below: int = 0
    profile: ProfileWanted | None = None  # whoever called for the pass is profiled


class PassDone(msgspec.Struct, frozen=True, tag=True):
    """The sender, and everyone it told to start, has finished its part."""

    context_id: int
    pass_id: PassId
    profiled: bytes = b""  # what was recorded of it, if that was wanted


class PassFailed(msgspec.Struct, frozen=True, tag=True):
    """To the origin: ``worker`` could not do its part."""

    context_id: int
    pass_id: PassId
    worker: int
    reason: str


class AbortPass(msgspec.Struct, frozen=True, tag=True):
    """Down the tree of starts: forget this pass."""

    context_id: int
    pass_id: PassId


PassMessage = StartPass | PassDone | PassFailed | AbortPass


class ReleaseContext(msgspec.Struct, frozen=True, tag=True):
    """Not of a pass: forget the context, and tell those that know it from you."""

    context_id: int


Message = PassMessage | ReleaseContext

# --- events from this worker, and effects -----------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, gc=False):
    """The sources are fixed; ``peers`` are all workers this one exchanged messages with in the context."""

    peers: frozenset[int]
    covered: frozenset[int] = frozenset()
    retain_graph: bool = False
    over_below: int = 0


class PartFinished(msgspec.Struct, frozen=True, gc=False):
    """All sends were heard, all receives answered, all leaf gradients stored."""


class PartFailed(msgspec.Struct, frozen=True, gc=False):
    reason: str


class WorkerLost(msgspec.Struct, frozen=True, gc=False):
    worker: int
    reason: str = "the worker died"


class Tell(msgspec.Struct, frozen=True, gc=False):
    worker: int
    message: PassMessage


class Completed(msgspec.Struct, frozen=True, gc=False):
    """At the origin: the whole pass is over. Elsewhere: this worker's subtree is."""


class Failed(msgspec.Struct, frozen=True, gc=False):
    worker: int
    reason: str


Event = Begin | PartFinished | PartFailed | WorkerLost | PassMessage
Effect = Tell | Completed | Failed


class PassState(StrEnum):
    NEW = "new"
    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


class BackwardPass:
    """One worker's view of one pass. ``parent`` is the worker that told it to start, None at the origin."""

    __slots__ = ("context_id", "deadline", "me", "parent", "pass_id", "peers", "state", "told", "unfinished")

    def __init__(
        self, context_id: int, pass_id: PassId, me: int, parent: int | None, deadline: float | None = None
    ) -> None:
        self.context_id: int = context_id
        self.pass_id: PassId = pass_id
        self.me: int = me
        self.parent: int | None = parent
        self.deadline: float | None = deadline
        self.state: PassState = PassState.NEW
        self.peers: frozenset[int] = frozenset()
        self.told: list[int] = []
        self.unfinished: set[int] = set()

    @property
    def ended(self) -> bool:
        return self.state is PassState.DONE or self.state is PassState.FAILED

    def handle(self, event: Event, now: float = 0.0, sender: int = -1) -> list[Effect]:
        """Advance by one event; ``sender`` is the worker a message came from."""
        if isinstance(event, StartPass):
            # Told twice: the first to tell waits for us, the second need not. After a failure nobody waits.
            done = PassDone(self.context_id, self.pass_id)
            return [] if self.state is PassState.FAILED else [Tell(sender, done)]
        if self.ended:
            return []
        if isinstance(event, PassDone):
            self.unfinished.discard(sender)
            return self._maybe_done()
        if isinstance(event, PartFinished):
            self.state = PassState.WAITING
            return self._maybe_done()
        if isinstance(event, Begin):
            return self._begin(event)
        if isinstance(event, PartFailed):
            return self._fail(self.me, event.reason)
        if isinstance(event, PassFailed):
            return self._fail(event.worker, event.reason)
        if isinstance(event, AbortPass):
            return self._abort(self.pass_id.origin, "the backward pass was given up at its origin")
        return self._lost(event)

    def next_deadline(self) -> float | None:
        return None if self.ended else self.deadline

    def handle_deadline(self, now: float) -> list[Effect]:
        if self.ended or self.deadline is None or now < self.deadline:
            return []
        late = sorted(self.unfinished) or [self.me]
        return self._fail(self.me, f"the backward pass timed out waiting for worker(s) {late}")

    def _begin(self, event: Begin) -> list[Effect]:
        self.state = PassState.RUNNING
        self.peers = event.peers
        self.told = sorted(event.peers - event.covered - {self.me})
        self.unfinished = set(self.told)
        if not self.told:
            return []
        covered = tuple(sorted(event.covered | event.peers | {self.me}))
        start = StartPass(self.context_id, self.pass_id, covered, event.retain_graph, event.over_below)
        return [Tell(worker, start) for worker in self.told]

    def _maybe_done(self) -> list[Effect]:
        if self.state is not PassState.WAITING or self.unfinished:
            return []
        self.state = PassState.DONE
        if self.parent is None:
            return [Completed()]
        return [Tell(self.parent, PassDone(self.context_id, self.pass_id)), Completed()]

    def _fail(self, worker: int, reason: str) -> list[Effect]:
        if self.parent is None:
            return self._abort(worker, reason)
        # Not ended yet: the abort that the origin answers with must still be passed on to those told.
        return [Tell(self.pass_id.origin, PassFailed(self.context_id, self.pass_id, worker, reason))]

    def _abort(self, worker: int, reason: str) -> list[Effect]:
        self.state = PassState.FAILED
        abort = AbortPass(self.context_id, self.pass_id)
        effects: list[Effect] = [Tell(child, abort) for child in self.told]
        return [*effects, Failed(worker, reason)]

    def _lost(self, event: WorkerLost) -> list[Effect]:
        if event.worker == self.pass_id.origin:
            return self._abort(event.worker, event.reason)
        if event.worker in self.peers or event.worker in self.unfinished or event.worker == self.parent:
            return self._fail(event.worker, event.reason)
        return []


# --- readiness of the local graph -------------------------------------------------------------------------

Node = TypeVar("Node", bound=Hashable)


class Wavefront(Generic[Node]):
    """Readiness of a graph whose sources are heard one by one, in any order.

    A node is settled once every edge into it is; live if one of those edges is live. Each edge is looked at
    once, so the work over a whole pass is linear in the graph.
    """

    __slots__ = ("_live", "_next_nodes", "_waiting")

    def __init__(self, targets: Iterable[Node], next_nodes: Callable[[Node], Sequence[Node]]) -> None:
        """``targets`` are the far ends of all source edges, with repetitions, as are ``next_nodes``."""
        waiting: dict[Node, int] = {}
        following: dict[Node, Sequence[Node]] = {}
        stack: list[Node] = []
        for node in targets:
            if node in waiting:
                waiting[node] += 1
            else:
                waiting[node] = 1
                stack.append(node)
        while stack:
            node = stack.pop()
            following[node] = after = next_nodes(node)
            for child in after:
                if child in waiting:
                    waiting[child] += 1
                else:
                    waiting[child] = 1
                    stack.append(child)
        self._waiting = waiting
        self._next_nodes = following
        self._live: set[Node] = set()

    def __contains__(self, node: Node) -> bool:
        return node in self._next_nodes

    @property
    def unsettled(self) -> int:
        """How many nodes still wait."""
        return len(self._waiting)

    def settle(self, edges: Iterable[tuple[Node, bool]]) -> tuple[list[Node], list[Node]]:
        """Settle source edges given as (target, live); return nodes newly settled as (live, dead).

        Both lists are in topological order: a node comes after everything that leads to it.
        """
        live: list[Node] = []
        dead: list[Node] = []
        queue: list[tuple[Node, bool]] = list(edges)
        queue.reverse()
        waiting, marked, following = self._waiting, self._live, self._next_nodes
        while queue:
            node, is_live = queue.pop()
            if is_live:
                marked.add(node)
            left = waiting[node] - 1
            if left:
                waiting[node] = left
                continue
            del waiting[node]
            is_live = node in marked
            (live if is_live else dead).append(node)
            for child in following[node]:
                queue.append((child, is_live))
        return live, dead
