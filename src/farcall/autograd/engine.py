"""One worker's part of the graph of one pass, run on torch's own engine as its sources are heard.

The sources are the roots and the recorded sends; the sinks are leaves and recorded receives. Where the part behind the
sources that have been heard shares nothing with the part behind the others, one walk finds its sinks and a single
engine call does the rest; that is so in most programs. Otherwise it runs in phases (`phases.py`).

A node runs if the pass *reaches* it, as in torch: over edges, from a root. The gradient that comes may be undefined: a
function returned None for an input, and the function behind is called nevertheless.

Knows nothing of messages or threads. Invariant: within a pass each node that is reached runs once, each hook sees its
whole gradient once, and no `.grad` is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, Reached
from farcall.autograd.leaves import Leaves, add_gradients, feed, is_watched
from farcall.autograd.nodes import CHECKPOINT, Gradients, Roots, run_engine
from farcall.autograd.phases import Answers, Heard, Phases

_MOST_UNHEARD = 32
"""With more sends than these, looking at all of them in each run costs more than keeping account of each edge."""


class LocalGraph:
    """One worker's part of the graph of one pass.

    Mutable: ``unheard``, the sends that wait for their gradients; ``unanswered``, the receives that owe an answer;
    ``leaves``, the gradients of leaves so far; inside, gradients on their way in ``_buffers``.
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
        self._undefined = False  # whether a source was reached without a gradient
        self._heard: Heard = []
        self._phases: Phases | None = None
        for edge, gradient in roots.items():
            self._heard.append((edge, True))
            feed(edge, gradient, self._buffers, self.leaves)

    def hear(self, message_id: int, gradients: Reached) -> None:
        """Take in the gradients of a send, by the place of the tensor; those that are missing were not reached."""
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
                    answers[node] = {}  # nothing is left to run: gradients of leaves at most
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
        """Run the part that has been heard if no node of it waits for another source; False: nothing was run."""
        unheard, unanswered = self.unheard, self.unanswered
        if len(unheard) > _MOST_UNHEARD:
            return False
        sinks: dict[Edge, None] = {}  # ordered, so that sums come in the same order in each run
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
                    sinks[edge] = None  # by edge: the outputs of one receive have gradients of their own
                    is_due = True
                elif kind is CHECKPOINT:
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
                    seen.add(node)  # where nobody looks at the sum, gradients of a leaf need not wait for each other
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
        # A run that lets no receive answer moves nothing while more is to come: one larger run later is cheaper.
        if is_due and sinks:
            roots, self._buffers = self._buffers, {}
            self._heard.clear()
            for node, _ in sinks:
                is_relayed = is_relayed and type(node) is RECEIVE and not is_watched(node)
            # Tensors that were received and sent on as they were: the engine would do nothing.
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
        """Run a graph that exists only for the moment (a recomputed one); its other leaves are the pass's."""
        inner = LocalGraph(roots, {}, (), keep_graph=False)
        if inner.run():
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True cannot contain remote calls; pass use_reentrant=False"
            )
        found = [inner.leaves.pop(node, None) for node, _ in inputs]
        for node, gradient in inner.leaves.items():
            self.leaves[node] = add_gradients(self.leaves.get(node), gradient)
        return found
