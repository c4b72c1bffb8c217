"""One worker's part of the graph of one pass, run on torch's own engine as its sources are heard.

The sources are the roots and the recorded sends; the sinks are leaves and recorded receives. Where the part behind the
sources that have been heard shares nothing with the part behind the others, one walk finds its sinks and a single
engine call does the rest; that is so in most programs. Otherwise (what is still to come may depend on what this worker
sends first) the part that is *ready* runs: the nodes all of whose inputs have been heard. The engine can stop at a node
(it hands out what arrives there, after that tensor's hooks), but it cannot compute a gradient for an edge without
visiting the edge's far end, where hooks would see a partial gradient. So a node with an edge into the part that is not
ready is taken out: the engine stops there, `run_node` calls the node alone, and its results wait in a buffer.

A node runs if the pass *reaches* it, as in torch: over edges, from a root. The gradient that comes may be undefined: a
function returned None for an input, and the function behind is called nevertheless. The engine follows such edges, but
cannot start with one: a node that only undefined gradients reach from outside an engine call is called alone, too.

Knows nothing of messages or threads. Invariant: within a pass each node that is reached runs once, each hook sees its
whole gradient once, and no `.grad` is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, Reached
from farcall.autograd.leaves import add_gradients
from farcall.autograd.nodes import CHECKPOINT, Gradients, Roots, run_node
from farcall.protocol.gradients import Wavefront

__all__ = ["Answers", "LocalGraph"]

Leaves = dict[Node, torch.Tensor]  # by accumulator
Answers = dict[Node, Reached]  # by receive

_MOST_UNHEARD = 32
"""With more sends than these, looking at all of them in each run costs more than keeping account of each edge."""

_sequence_number = methodcaller("_sequence_nr")
_new_tuple: Any = tuple.__new__  # without GradientEdge's own function
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def _run_engine(roots: Roots, inputs: Iterable[Edge], keep_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """Gradients that arrive at ``inputs``. torch.autograd.grad does the same and takes 25 us longer."""
    # With `inputs`, the engine runs only nodes on the way to one of them, and captures what arrives there. It does not
    # run the accumulators of leaves, so `.grad` stays as it is; their hooks are called in `LocalPass._finish`.
    wanted: list[GradientEdge] = []
    starts: list[GradientEdge] = []
    for node, index in inputs:
        wanted.append(_new_tuple(GradientEdge, (node, index, None)))
    if not wanted or not roots:
        return (None,) * len(wanted)
    for node, index in roots:
        starts.append(_new_tuple(GradientEdge, (node, index, None)))
    result: tuple[torch.Tensor | None, ...] = _run_backward(
        tuple(starts),
        tuple(roots.values()),
        keep_graph,
        False,
        tuple(wanted),
        allow_unreachable=True,  # an input that no root reaches gets None
        accumulate_grad=False,
    )
    return result


class LocalGraph:
    """One worker's part of the graph of one pass.

    Mutable: ``unheard``, the sends that wait for their gradients; ``unanswered``, the receives that owe an answer;
    ``leaves``, the gradients of leaves so far; inside, gradients on their way in ``_buffers``.
    """

    __slots__ = (
        "_arrived",
        "_buffers",
        "_edges",
        "_front",
        "_heard",
        "_keep_graph",
        "_leaf_count",
        "_leaf_masks",
        "_ready",
        "_undefined",
        "leaves",
        "unanswered",
        "unheard",
    )

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
        self._buffers: Roots = roots
        self._arrived: Answers = {}  # what the receives that were reached will answer
        self._undefined = False  # whether a source was reached without a gradient
        self._heard: list[tuple[Edge, bool]] = []  # edges of sources, and whether the pass reached them
        self._front: Wavefront[Node] | None = None
        self._edges: dict[Node, tuple[Edge, ...]] = {}
        self._ready: list[Node] = []
        self._leaf_masks: dict[Node, int] = {}
        self._leaf_count = 0
        for edge in roots:
            self._heard.append((edge, True))

    def hear(self, message_id: int, gradients: Reached) -> None:
        """Take in the gradients of a send, by the place of the tensor; those that are missing were not reached."""
        for place, edge in enumerate(self.unheard.pop(message_id, ())):
            if place in gradients:
                self._heard.append((edge, True))
                gradient = gradients[place]
                if gradient is None:
                    self._undefined = True
                else:
                    self._feed(edge, gradient)
            else:
                self._heard.append((edge, False))

    def _feed(self, edge: Edge, gradient: torch.Tensor) -> None:
        node = edge[0]
        if type(node) is ACCUMULATE and not node.variable._backward_hooks:
            # No hook is to see the sum, so a leaf's gradients need not wait for each other.
            known = self.leaves.get(node)
            self.leaves[node] = gradient if known is None else add_gradients(known, gradient)
        else:
            known = self._buffers.get(edge)
            self._buffers[edge] = gradient if known is None else add_gradients(known, gradient)

    def run(self) -> Answers:
        """Run what is ready; return the answers of the receives that this decides."""
        answers: Answers = {}
        if self._front is None and not self._buffers and not self.unheard and not self._undefined:
            for node in self.unanswered:
                answers[node] = {}  # nothing is left to run: gradients of leaves at most
        elif self._front is not None or self._undefined or not self._run_apart(answers):
            self._run_front(answers)
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
            for edge, gradient in zip(sinks, _run_engine(roots, sinks, self._keep_graph), strict=True):
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

    # --- some sources are heard later ---------------------------------------------------------------------

    def _run_front(self, answers: Answers) -> None:
        """Run the nodes that have become ready, and stop at those that wait for other sources."""
        front = self._walk(answers) if self._front is None else self._front
        live, dead = front.settle([(edge[0], is_reached) for edge, is_reached in self._heard])
        for edge, is_reached in self._heard:
            if is_reached and type(edge[0]) is RECEIVE:
                self._arrive(edge, None)
        self._heard.clear()
        for node in dead:
            if node in self.unanswered:
                answers[node] = {}
        is_due = not self.unheard
        for node in live:
            for edge in self._edges[node]:
                if type(edge[0]) is RECEIVE:
                    self._arrive(edge, None)
            # An accumulator without hooks has nothing to run: its gradients are in `leaves` already.
            if type(node) is not ACCUMULATE or node.variable._backward_hooks:
                self._ready.append(node)
                is_due = is_due or type(node) is RECEIVE
        if is_due and self._ready:  # as in `_run_apart`
            ready, self._ready = self._ready, []
            self._run_ready(ready)
            for node in ready:
                if node in self.unanswered:
                    answers[node] = self._arrived.pop(node, {})
        if not self.unheard:
            for node in self.unanswered:
                if node not in answers:
                    answers[node] = self._arrived.pop(node, {})

    def _arrive(self, edge: Edge, gradient: torch.Tensor | None) -> None:
        """Store what arrived at a leaf or a receive that was reached."""
        node, index = edge
        if type(node) is RECEIVE:
            if node in self.unanswered:  # as in `_run_apart`
                self._arrived.setdefault(node, {})[index] = gradient
        elif gradient is not None:
            known = self.leaves.get(node)
            self.leaves[node] = gradient if known is None else add_gradients(known, gradient)

    def _walk(self, answers: Answers) -> Wavefront[Node]:
        """Find the nodes that the sources reach, and what each waits for; unreached receives answer at once."""
        edges = self._edges
        following: dict[Node, list[Node]] = {}
        targets: list[Node] = []
        for (node, _), _ in self._heard:
            targets.append(node)
        for source in self.unheard.values():
            for node, _ in source:
                targets.append(node)
        stack = list(targets)
        while stack:
            node = stack.pop()
            if node in edges:
                continue
            kind = type(node)
            edges[node] = () if kind is ACCUMULATE or kind is RECEIVE else node.next_functions
            following[node] = after = []
            for child, _ in edges[node]:
                if child is not None:
                    after.append(child)
                    stack.append(child)
        for node in self.unanswered:
            if node not in edges:
                answers[node] = {}
        self._front = Wavefront(targets, following)
        return self._front

    def _run_ready(self, ready: list[Node]) -> None:
        level, alone = self._plan(ready)
        by_level: dict[int, list[Node]] = {}
        for node in ready:
            by_level.setdefault(level[node], []).append(node)
        for number in sorted(by_level):
            self._run_level(by_level[number], level, alone)

    def _plan(self, ready: list[Node]) -> tuple[dict[Node, int], set[Node]]:
        """Which nodes must be called alone, and after how many of those each node comes.

        One engine call per level; it stops at this level's lone nodes. A node joins them when an edge of it
        leads (a) into the part that is not ready, (b) to a later level, or (c) to a leaf that a lone node of
        its level leads to as well: asking the engine for that leaf would make it run through the lone node.
        """
        level = dict.fromkeys(ready, 0)
        alone: set[Node] = set()
        for node in ready:
            if type(node) is CHECKPOINT:
                alone.add(node)
            for child, _ in self._edges[node]:
                is_open = child is not None and child not in level
                if is_open and (type(child) is not ACCUMULATE or child.variable._backward_hooks):
                    alone.add(node)
        if not alone:
            return level, alone
        while True:
            level = dict.fromkeys(ready, 0)
            barred: dict[int, int] = {}
            for node in ready:
                after = level[node] + (node in alone)
                for child, _ in self._edges[node]:
                    if child in level and level[child] < after:
                        level[child] = after
                if node in alone:
                    barred[level[node]] = barred.get(level[node], 0) | self._leaf_mask(node)
            more = {node for node in ready if node not in alone and self._must_be_alone(node, level, barred)}
            if not more:
                return level, alone
            alone |= more

    def _must_be_alone(self, node: Node, level: dict[Node, int], barred: dict[int, int]) -> bool:
        mine = level[node]
        for child, _ in self._edges[node]:
            if child is None:
                continue
            if child in level:
                if level[child] != mine:
                    return True
            elif mine in barred and self._leaf_mask(child) & barred[mine]:
                return True
        return False

    def _leaf_mask(self, start: Node) -> int:
        """The leaves that ``start`` leads to, one bit each."""
        masks = self._leaf_masks
        stack = [start]
        while stack:
            node = stack[-1]
            if node in masks:
                stack.pop()
                continue
            if type(node) is ACCUMULATE:
                masks[node] = 1 << self._leaf_count
                self._leaf_count += 1
                continue
            children = [child for child, _ in self._edges[node] if child is not None]
            missing = [child for child in children if child not in masks]
            if missing:
                stack += missing
                continue
            mask = 0
            for child in children:
                mask |= masks[child]
            masks[node] = mask
        return masks[start]

    def _run_level(self, nodes: list[Node], level: dict[Node, int], alone: set[Node]) -> None:
        nodes = self._call_unstarted(nodes, alone)
        roots: Roots = {}
        wanted: dict[Edge, None] = {}
        here = set(nodes)
        for edge in list(self._buffers):
            if edge[0] in here:
                roots[edge] = self._buffers.pop(edge)
        for node in nodes:
            kind = type(node)
            if kind is ACCUMULATE:
                wanted[node, 0] = None
            elif kind is RECEIVE:
                for index in self._arrived.get(node, ()):
                    wanted[node, index] = None
            elif node in alone:
                for index in range(len(node._input_metadata)):
                    wanted[node, index] = None
            else:
                for edge in self._edges[node]:
                    if edge[0] is not None and edge[0] not in level:
                        wanted[edge] = None
        arrived: dict[Node, Gradients] = {}
        for edge, gradient in zip(wanted, _run_engine(roots, wanted, self._keep_graph), strict=True):
            if edge[0] in alone:
                arrived.setdefault(edge[0], []).append(gradient)
            else:
                self._arrive(edge, gradient)
        for node in sorted(arrived, key=_sequence_number, reverse=True):  # as the engine: the one made last first
            for edge, result in run_node(node, arrived[node], self._run_inner):
                self._feed(edge, result)

    def _call_unstarted(self, nodes: list[Node], alone: set[Node]) -> list[Node]:
        """Call the nodes to which no gradient leads, only undefined ones; return the others."""
        rest: list[Node] = []
        started = {node for node, _ in self._buffers}
        for node in nodes:  # in topological order
            if node in started:
                rest.append(node)
                if node not in alone:
                    started.update(child for child, _ in self._edges[node])
            elif type(node) is not ACCUMULATE and type(node) is not RECEIVE:
                nothing: Gradients = [None] * len(node._input_metadata)
                for edge, result in run_node(node, nothing, self._run_inner):
                    self._feed(edge, result)
                    started.add(edge[0])
        return rest

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
