"""One worker's part of the graph of one pass, run on torch's own engine as gradients arrive at its sources.

The sources are the roots and the recorded sends; the sinks are leaves and recorded receives. A source is *heard* when
its gradients have arrived. In most programs the part behind the heard sources shares nothing with the part behind the
others: one walk finds its sinks, and a single engine call runs it. Otherwise it runs in phases (`phases.py`).

A node runs if the pass *reaches* it, as in torch: over edges, from a root. The gradient that arrives may be undefined:
when a function returns None for an input, torch still calls the function behind that input.

Must not know messages or threads. Invariant: within a pass each reached node runs once, each hook sees its whole
gradient once, and no `.grad` changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, Reached
from farcall.autograd.leaves import Leaves, add_gradients, feed, is_watched
from farcall.autograd.nodes import Gradients, Roots, is_checkpoint, run_engine
from farcall.autograd.phases import Answers, Heard, Phases

_MOST_UNHEARD = 32
"""With more unheard sends, a walk over all of them in each run costs more than the bookkeeping of `Phases`."""


class LocalGraph:
    """One worker's part of the graph of one pass.

    Mutable: ``unheard``, the sends that wait for their gradients; ``unanswered``, the receives that owe an answer;
    ``leaves``, the gradients of leaves so far; ``_buffers``, gradients at edges whose nodes have not run yet.
    """

    __slots__ = ("_buffers", "_heard", "_keep_graph", "_phases", "_undefined", "leaves", "unanswered", "unheard")

    def __init__(
        self,
        roots: Roots,
        sends: Mapping[int, Sequence[Edge]],
        receives: Iterable[Node],
        keep_graph: bool,
    ) -> None:
        self.leaves: Leaves = {}
        self.unheard: dict[int, Sequence[Edge]] = dict(sends)
        self.unanswered: dict[Node, None] = dict.fromkeys(receives)
        self._keep_graph = keep_graph
        self._buffers: Roots = {}
        self._undefined = False  # has the pass reached a source with an undefined gradient?
        self._heard: Heard = []
        self._phases: Phases | None = None
        for edge, gradient in roots.items():
            self._heard.append((edge, True))
            feed(edge, gradient, self._buffers, self.leaves)

    def hear(self, message_id: int, gradients: Reached) -> None:
        """Take the gradients of a send, by the place of the tensor. The pass did not reach tensors that are missing."""
        for place, edge in enumerate(self.unheard.pop(message_id, ())):
            if place in gradients:
                self._heard.append((edge, True))
                gradient = gradients[place]
                if gradient is None:
                    self._undefined = True
                else:
                    feed(edge, gradient, self._buffers, self.leaves)
            else:
                self._heard.append((edge, False))

    def run(self) -> Answers:
        """Run the ready part; return the answers of the receives that it decides."""
        answers: Answers = {}
        if self._phases is None:
            if not self._buffers and not self.unheard and not self._undefined:
                for node in self.unanswered:
                    answers[node] = {}  # no node is left to run; at most leaves got gradients
            elif self._undefined or not self._run_apart(answers):
                self._phases = Phases(
                    self._heard,
                    self.unheard.values(),
                    buffers=self._buffers,
                    leaves=self.leaves,
                    unanswered=self.unanswered,
                    keep_graph=self._keep_graph,
                )
        if self._phases is not None:
            answers = self._phases.run(self._heard, self._run_inner, is_last=not self.unheard)
            self._heard.clear()
        for node in answers:
            del self.unanswered[node]
        return answers

    def _run_apart(self, answers: Answers) -> bool:
        """Run the part behind the heard sources if no node of it waits for another source. False: nothing ran."""
        unheard, unanswered = self.unheard, self.unanswered
        if len(unheard) > _MOST_UNHEARD:
            return False
        sinks: dict[Edge, None] = {}  # ordered, so that sums have the same order in each run
        seen: set[Node] = set()
        stack: list[Node] = []
        frontier: Iterable[Edge] = self._buffers
        is_due = not unheard
        while True:
            for edge in frontier:
                node = edge[0]
                if node is None or node in seen:
                    continue
                kind = type(node)
                if kind is ACCUMULATE:
                    sinks[edge] = None
                elif kind is RECEIVE:
                    sinks[edge] = None  # by edge: each output of a receive has its own gradient
                    is_due = True
                elif is_checkpoint(kind):
                    return False
                else:
                    seen.add(node)
                    stack.append(node)
            if not stack:
                break
            frontier = stack.pop().next_functions
        is_relayed = not seen
        waiting: set[Node] = set()
        if unheard:
            for node, _ in sinks:
                if type(node) is RECEIVE or node.variable._backward_hooks:
                    seen.add(node)  # leaves without hooks are exempt: nothing sees their sum before it is complete
            for edges in unheard.values():
                frontier = edges
                while True:
                    for node, _ in frontier:
                        if node is not None and node not in waiting:
                            if node in seen:
                                return False
                            waiting.add(node)
                            if type(node) is not RECEIVE:
                                stack.append(node)
                    if not stack:
                        break
                    frontier = stack.pop().next_functions
        # While sends are unheard, a run after which no receive can answer helps no other worker: one larger run later
        # is cheaper.
        if is_due and sinks:
            roots, self._buffers = self._buffers, {}
            self._heard.clear()
            for node, _ in sinks:
                is_relayed = is_relayed and type(node) is RECEIVE and not is_watched(node)
            # Tensors were received and sent on unchanged: the engine would do nothing.
            found = roots.values() if is_relayed else run_engine(roots, sinks, self._keep_graph)
            for edge, gradient in zip(sinks, found, strict=True):
                node = edge[0]
                if type(node) is not RECEIVE:
                    if gradient is not None:
                        known = self.leaves.get(node)
                        self.leaves[node] = gradient if known is None else add_gradients(known, gradient)
                elif node in unanswered:
                    # A tensor received in another context is a constant here: its sender does not wait for this pass.
                    answers.setdefault(node, {})[edge[1]] = gradient
        for node in unanswered:
            if node not in answers and node not in waiting:
                answers[node] = {}
        return True

    def _run_inner(self, roots: Roots, inputs: Sequence[Edge]) -> Gradients:
        """Run a temporary graph, recomputed by a checkpoint; add the gradients of its other leaves to the pass."""
        inner = LocalGraph(roots, {}, (), keep_graph=False)
        if inner.run():
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True cannot contain remote calls; pass use_reentrant=False"
            )
        found = [inner.leaves.pop(node, None) for node, _ in inputs]
        for node, gradient in inner.leaves.items():
            self.leaves[node] = add_gradients(self.leaves.get(node), gradient)
        return found
