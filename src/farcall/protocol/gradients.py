"""A backward pass: its participants, their dependencies, and its end. Sans-I/O, no torch.

A pass is named by its origin and a number. In a pass every recorded *send* of a context hears exactly once:
a gradient, or that there is none. Every recorded *receive* answers exactly once. This makes a walk over the
distributed graph before the pass unnecessary:

- A worker that joins a pass fixes its sources: the sends recorded so far (and the roots, at the origin). A
  receive that no source reaches answers "none" at once. Any other receive answers when all sources that
  reach it have been heard: with a gradient if one of them was alive, else with "none". `Wavefront` decides
  that, edge by edge.
- The pass ends: let the forward events of all workers be ordered by causality (a partial order without cycles).
  What a send hears depends only on sends made causally after the matching receive, so by induction from the
  latest events backwards, each one is heard. Nothing alive is missed: a path from a root to a leaf crosses
  workers through receives, and each receive on it is reached by a live source.
- A receive recorded after its worker joined cannot reach the loss (the roots existed before); it answers
  "none".
- Every worker joins: the origin tells its peers to start, they tell theirs, and `covered` names the workers already
  told. A worker reports done to its parent, the first worker that told it, when its own part and all workers that it
  told are done (a diffusing computation); to any later one it reports done at once. So when all workers that the origin
  told are done, every part is finished, every gradient was consumed (its send would still be waiting), and all leaf
  gradients are in place.

`ORIGIN` and `PARTICIPANT` are the transition tables that `BackwardPass.handle` executes. An event without a row for
the present state changes nothing. A worker that has lost the origin gives up, as if the origin had aborted the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

import msgspec

from farcall.protocol.notes import ProfileWanted


class PassId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name of a backward pass within a context: the worker that started it, and a number there."""

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
    profile: ProfileWanted | None = None  # set if the thread that started the pass is profiled


class PassDone(msgspec.Struct, frozen=True, tag=True):
    """The sender, and every worker that it told to start, has finished its part."""

    context_id: int
    pass_id: PassId
    profiled: bytes = b""  # the records of a profiler, if StartPass asked for them


class PassFailed(msgspec.Struct, frozen=True, tag=True):
    """To the origin: ``worker`` could not do its part."""

    context_id: int
    pass_id: PassId
    worker: int
    reason: str


class AbortPass(msgspec.Struct, frozen=True, tag=True):
    """Forget this pass. Sent down the tree along which StartPass travelled."""

    context_id: int
    pass_id: PassId


PassMessage = StartPass | PassDone | PassFailed | AbortPass


class ReleaseContext(msgspec.Struct, frozen=True, tag=True):
    """Forget the context with all its passes, and pass this on to the workers that learned of the context from you."""

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


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message came from ``sender``."""

    sender: int
    message: PassMessage


class Tell(msgspec.Struct, frozen=True, gc=False):
    worker: int
    message: PassMessage


class Completed(msgspec.Struct, frozen=True, gc=False):
    """At the origin: the whole pass is over. Elsewhere: this worker's subtree is."""


class Failed(msgspec.Struct, frozen=True, gc=False):
    worker: int
    reason: str


Cause = Begin | PartFinished | PartFailed | PassMessage
"""The second key of a row in the tables: what causes the transition."""
Event = Begin | PartFinished | PartFailed | WorkerLost | Received
Effect = Tell | Completed | Failed

# --- one worker's view of a pass --------------------------------------------------------------------------


class PassState(StrEnum):
    NEW = "new"
    RUNNING = "running"  # this worker's part of the graph
    WAITING = "waiting"  # for the workers told to start
    DONE = "done"
    FAILED = "failed"


class BackwardPass:
    """One worker's view of one pass. ``parent`` is the worker that told it to start, None at the origin.

    Mutable: ``state``, ``ended`` (derived from it), and ``unfinished``, the workers told that are not done yet.
    """

    __slots__ = (
        "_table",
        "context_id",
        "deadline",
        "ended",
        "me",
        "parent",
        "pass_id",
        "peers",
        "state",
        "told",
        "unfinished",
    )

    def __init__(
        self, context_id: int, pass_id: PassId, me: int, parent: int | None, deadline: float | None = None
    ) -> None:
        self.context_id: int = context_id
        self.pass_id: PassId = pass_id
        self.me: int = me
        self.parent: int | None = parent
        self.deadline: float | None = deadline
        self.state: PassState = PassState.NEW
        self.ended: bool = False
        self.peers: frozenset[int] = frozenset()
        self.told: list[int] = []
        self.unfinished: set[int] = set()
        self._table = ORIGIN if parent is None else PARTICIPANT

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do about it."""
        cause: Cause
        sender = self.me
        if isinstance(event, Received):
            sender, cause = event.sender, event.message
        elif not isinstance(event, WorkerLost):
            cause = event
        elif event.worker == self.pass_id.origin:
            cause = AbortPass(self.context_id, self.pass_id)
        elif event.worker in self.peers or event.worker == self.parent:
            cause = PassFailed(self.context_id, self.pass_id, event.worker, event.reason)
        else:
            return []
        row = self._table.get((self.state, type(cause)))
        if row is None:
            return []
        self.state, act = row
        effects: list[Effect] = [] if act is None else act(self, cause, sender)
        if self.state is PassState.WAITING and not self.unfinished:
            self.state = PassState.DONE
            effects += self._report()
        self.ended = self.state in _ENDED
        return effects

    def next_deadline(self) -> float | None:
        return None if self.ended else self.deadline

    def handle_deadline(self, now: float) -> list[Effect]:
        if self.ended or self.deadline is None or now < self.deadline:
            return []
        late = sorted(self.unfinished) or [self.me]
        return self.handle(PartFailed(f"the backward pass timed out waiting for worker(s) {late}"), now)

    # --- the actions of the tables ------------------------------------------------------------------------

    def _tell_peers(self, event: Begin, sender: int) -> list[Effect]:
        self.peers = event.peers
        self.told = sorted(event.peers - event.covered - {self.me})
        self.unfinished = set(self.told)
        effects: list[Effect] = []
        if self.told:
            covered = tuple(sorted(event.covered | event.peers | {self.me}))
            start = StartPass(self.context_id, self.pass_id, covered, event.retain_graph, event.over_below)
            for worker in self.told:
                effects.append(Tell(worker, start))
        return effects

    def _note_done(self, event: PassDone, sender: int) -> list[Effect]:
        self.unfinished.discard(sender)
        return []

    def _answer_done(self, event: StartPass, sender: int) -> list[Effect]:
        # A second StartPass: the sender of the first one waits for this worker, so this sender need not.
        return [Tell(sender, PassDone(self.context_id, self.pass_id))]

    def _report(self) -> list[Effect]:
        if self.parent is None:
            return [Completed()]
        return [Tell(self.parent, PassDone(self.context_id, self.pass_id)), Completed()]

    def _tell_origin(self, event: PartFailed | PassFailed, sender: int) -> list[Effect]:
        worker = event.worker if isinstance(event, PassFailed) else self.me
        return [Tell(self.pass_id.origin, PassFailed(self.context_id, self.pass_id, worker, event.reason))]

    def _give_up(self, event: PartFailed | PassFailed | AbortPass, sender: int) -> list[Effect]:
        abort = AbortPass(self.context_id, self.pass_id)
        effects: list[Effect] = [Tell(child, abort) for child in self.told]
        if isinstance(event, AbortPass):
            return [*effects, Failed(self.pass_id.origin, "the backward pass was given up at its origin")]
        return [*effects, Failed(event.worker if isinstance(event, PassFailed) else self.me, event.reason)]


_NEW, _RUNNING, _WAITING, _DONE, _FAILED = PassState
_ENDED: Final = frozenset((_DONE, _FAILED))
_Act = Callable[[BackwardPass, Any, int], list[Effect]]
Table = dict[tuple[PassState, type[Cause]], tuple[PassState, _Act | None]]
"""By state and event: the next state, and the action that makes the effects, if there is one.

A waiting pass with no unfinished worker left is done, and reports so: the only transition without an event.
"""

_EVERYWHERE: Final[Table] = {
    (_NEW, Begin): (_RUNNING, BackwardPass._tell_peers),
    (_RUNNING, PassDone): (_RUNNING, BackwardPass._note_done),
    (_RUNNING, PartFinished): (_WAITING, None),
    (_WAITING, PassDone): (_WAITING, BackwardPass._note_done),
    (_RUNNING, StartPass): (_RUNNING, BackwardPass._answer_done),
    (_WAITING, StartPass): (_WAITING, BackwardPass._answer_done),
    (_DONE, StartPass): (_DONE, BackwardPass._answer_done),
}
ORIGIN: Final[Table] = {
    **_EVERYWHERE,
    (_RUNNING, PartFailed): (_FAILED, BackwardPass._give_up),
    (_RUNNING, PassFailed): (_FAILED, BackwardPass._give_up),
    (_WAITING, PartFailed): (_FAILED, BackwardPass._give_up),
    (_WAITING, PassFailed): (_FAILED, BackwardPass._give_up),
}
PARTICIPANT: Final[Table] = {
    **_EVERYWHERE,
    # A failure does not end the pass here: the abort with which the origin answers must still reach the workers told.
    (_RUNNING, PartFailed): (_RUNNING, BackwardPass._tell_origin),
    (_RUNNING, PassFailed): (_RUNNING, BackwardPass._tell_origin),
    (_RUNNING, AbortPass): (_FAILED, BackwardPass._give_up),
    (_WAITING, PartFailed): (_WAITING, BackwardPass._tell_origin),
    (_WAITING, PassFailed): (_WAITING, BackwardPass._tell_origin),
    (_WAITING, AbortPass): (_FAILED, BackwardPass._give_up),
    (_DONE, PartFailed): (_DONE, BackwardPass._tell_origin),  # what it had to tell, "done" perhaps, could not be sent
}

# --- readiness of the local graph -------------------------------------------------------------------------

Node = TypeVar("Node", bound=Hashable)


class Wavefront(Generic[Node]):
    """Readiness of a graph whose sources are heard one by one, in any order.

    A node is settled once every edge into it is, and live if one of those edges is live. Each edge is visited
    once, so the work over a whole pass is linear in the graph. Mutable: the edges still waited for, and the live nodes.
    """

    __slots__ = ("_following", "_live", "_waiting")

    def __init__(self, targets: Iterable[Node], following: Mapping[Node, Sequence[Node]]) -> None:
        """``targets`` are the far ends of all source edges; ``following`` has the nodes that they reach, and no other.

        Both name a node once for each edge into it.
        """
        waiting = dict.fromkeys(following, 0)
        for node in targets:
            waiting[node] += 1
        for children in following.values():
            for child in children:
                waiting[child] += 1
        self._waiting = waiting
        self._following = following
        self._live: set[Node] = set()

    def settle(self, edges: Iterable[tuple[Node, bool]]) -> tuple[list[Node], list[Node]]:
        """Settle source edges given as (target, live); return the newly settled nodes as (live, dead).

        Both lists are in topological order: a node comes after all its predecessors.
        """
        live: list[Node] = []
        dead: list[Node] = []
        queue: list[tuple[Node, bool]] = list(edges)
        queue.reverse()
        waiting, marked, following = self._waiting, self._live, self._following
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
