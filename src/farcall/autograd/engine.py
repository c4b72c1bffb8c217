"""One worker's part of the graph of one pass, run on torch's own engine as its sources are heard.

The sources are the roots and the recorded sends; the sinks are leaves and recorded receives. Where all sources have
been heard before the first run, one walk finds the sinks and a single engine call does the rest. Where some are still
to come (and may depend on what this worker sends first), the part that is *ready* runs: the nodes all of whose inputs
have been heard. The engine can stop at a node (it hands out what arrives there, after that tensor's hooks), but it
cannot compute a gradient for an edge without visiting the edge's far end, where hooks would see a partial gradient.
So a node with an edge into the part that is not ready is taken out: the engine stops there, `run_node` calls the node
alone, and its results wait in a buffer.

A node runs if the pass *reaches* it, as in torch: over edges, from a root. The gradient that comes may be undefined: a
function returned None for an input, and the function behind is called nevertheless. The engine follows such edges, but
cannot start with one: a node that only undefined gradients reach from outside an engine call is called alone, too.

Knows nothing of messages or threads. Invariant: within a pass each node that is reached runs once, each hook sees its
whole gradient once, and no `.grad` is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, Reached, is_watched
from farcall.autograd.leaves import add_gradients
from farcall.autograd.nodes import CHECKPOINT, Gradients, Roots, run_node
from farcall.protocol.gradients import Wavefront

__all__ = ["Answers", "LocalGraph"]

Leaves = dict[Node, torch.Tensor]  # by accumulator
Answers = dict[Node, Reached]  # by receive

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def _run_engine(roots: Roots, inputs: Iterable[Edge], keep_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """Gradients that arrive at ``inputs``. torch.autograd.grad does the same and takes 25 us longer."""
    # With `inputs`, the engine runs only nodes on the way to one of them, and captures what arrives there. It does not
    # run the accumulators of leaves, so `.grad` stays as it is; their hooks are called in `LocalPass._finish`.
    wanted = tuple(starmap(GradientEdge, inputs))
    if not wanted or not roots:
        return (None,) * len(wanted)
    result: tuple[torch.Tensor | None, ...] = _run_backward(
        tuple(starmap(GradientEdge, roots)),
        tuple(roots.values()),
        keep_graph,
        False,
        wanted,
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
        "_context_id",
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
        *,
        context_id: int,
        keep_graph: bool,
    ) -> None:
        self.leaves: Leaves = {}
        self.unheard: dict[int, Sequence[Edge]] = dict(sends)
        self.unanswered: dict[Node, None] = dict.fromkeys(receives)
        self._context_id = context_id
        self._keep_graph = keep_graph
        self._buffers: Roots = {}
        self._arrived: Answers = {}  # what the receives that were reached will answer
        self._undefined = False  # whether a source was reached without a gradient
        self._heard: list[tuple[Edge, bool]] = []  # edges of sources, and whether the pass reached them
        self._front: Wavefront[Node] | None = None
        self._edges: dict[Node, tuple[Edge, ...]] = {}
        self._ready: list[Node] = []
        self._leaf_masks: dict[Node, int] = {}
        self._leaf_count = 0
        for edge, gradient in roots.items():
            self._heard.append((edge, True))
            self._feed(edge, gradient)

    def hear(self, message_id: int, gradients: Reached) -> None:
        """Take in the gradients of a send, by the place of the tensor; those that are missing were not reached."""
        for place, edge in enumerate(self.unheard.pop(message_id, ())):
            self._heard.append((edge, place in gradients))
            gradient = gradients.get(place)
            if gradient is not None:
                self._feed(edge, gradient)
            elif place in gradients:
                self._undefined = True

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
        if self._front is None and (self.unheard or not self._run_whole()):
            self._walk(answers)
        if self._front is not None:
            live, dead = self._front.settle([(edge[0], is_reached) for edge, is_reached in self._heard])
            for edge, is_reached in self._heard:
                if is_reached and type(edge[0]) is RECEIVE:
                    self._arrive(edge, None)
            self._heard = []
            for node in dead:
                if node in self.unanswered:
                    answers[node] = {}
            for node in live:
                for edge in self._edges[node]:
                    if type(edge[0]) is RECEIVE:
                        self._arrive(edge, None)
            is_due = not self.unheard
            for node in live:
                # An accumulator without hooks has nothing to run: its gradients are in `leaves` already.
                if type(node) is not ACCUMULATE or node.variable._backward_hooks:
                    self._ready.append(node)
                    is_due = is_due or type(node) is RECEIVE
            # A run that lets no receive answer moves nothing while more is to come: one larger run later is cheaper.
            if is_due and self._ready:
                ready, self._ready = self._ready, []
                self._run_ready(ready)
                for node in ready:
                    if node in self.unanswered:
                        answers[node] = self._arrived.pop(node, {})
        if not self.unheard:
            for node in self.unanswered:
                if node not in answers:
                    answers[node] = self._arrived.pop(node, {})
        for node in answers:
            self.unanswered.pop(node, None)
        return answers

    def _run_whole(self) -> bool:
        """All sources are heard, so no node has to wait. False: a node must be called alone, and nothing was run."""
        if self._undefined:
            return False
        sinks: dict[Edge, None] = {}  # ordered, so that sums come in the same order in each run
        seen: set[Node] = set()
        stack: list[Node] = []
        frontier: Iterable[Edge] = self._buffers
        while True:
            for edge in frontier:
                node = edge[0]
                if node is None or node in seen:
                    continue
                kind = type(node)
                if kind is ACCUMULATE or kind is RECEIVE:
                    sinks[edge] = None  # by edge: the outputs of one receive have gradients of their own
                    continue
                if kind is CHECKPOINT:
                    return False
                seen.add(node)
                stack.append(node)
            if not stack:
                break
            frontier = stack.pop().next_functions
        for edge, gradient in zip(sinks, _run_engine(self._buffers, sinks, self._keep_graph), strict=True):
            self._arrive(edge, gradient)
        return True

    def _arrive(self, edge: Edge, gradient: torch.Tensor | None) -> None:
        """Store what arrived at a leaf or a receive that was reached."""
        node, index = edge
        if type(node) is RECEIVE:
            # A tensor received in another context is a constant here: its sender does not wait for this pass.
            if node in self.unanswered:
                self._arrived.setdefault(node, {})[index] = gradient
        elif gradient is not None:
            known = self.leaves.get(node)
            self.leaves[node] = gradient if known is None else add_gradients(known, gradient)

    # --- some sources are heard later ---------------------------------------------------------------------

    def _walk(self, answers: Answers) -> None:
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
        self._front = Wavefront(targets, following)
        for node in self.unanswered:
            if node not in edges:
                answers[node] = {}

    def _run_ready(self, ready: list[Node]) -> None:
        buffers = self._buffers
        for node in ready:
            if type(node) is not RECEIVE or is_watched(node):
                break
        else:
            # Tensors that were received and sent on as they were: the engine would do nothing.
            here = set(ready)
            for edge in list(buffers):
                if edge[0] in here:
                    self._arrive(edge, buffers.pop(edge))
            return
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
        for node, gradients in arrived.items():
            for edge, result in run_node(node, gradients, self._run_inner):
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
        inner = LocalGraph(roots, {}, (), context_id=self._context_id, keep_graph=False)
        if inner.run():
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True cannot contain remote calls; pass use_reentrant=False"
            )
        found = [inner.leaves.pop(node, None) for node, _ in inputs]
        for node, gradient in inner.leaves.items():
            self.leaves[node] = add_gradients(self.leaves.get(node), gradient)
        return found
