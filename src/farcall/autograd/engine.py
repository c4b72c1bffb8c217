"""One worker's part of the graph, run on torch's own engine as its sources are heard.

Where all sources have been heard, `run_whole` walks the graph once and makes a single engine call. Where
some are still to come (and may depend on what this worker sends first), `Phases` runs the part that is
ready: the nodes all of whose inputs have been heard. The engine can stop at a node (it hands out what
arrives there, after that tensor's hooks), but it cannot compute a gradient for an edge without visiting the
edge's far end, where hooks would see a partial gradient. So a node with an edge into the part that is not
ready is taken out: the engine stops at it, `run_node` calls it by itself, and what leaves it waits in a
buffer.

It knows nothing of messages or threads. Invariant: within a pass each node runs once, each hook sees its
whole gradient once, and no `.grad` is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, is_watched
from farcall.autograd.nodes import CHECKPOINT, Gradients, Roots, run_node
from farcall.protocol.gradients import Wavefront

__all__ = ["Gradients", "Leaves", "Phases", "add_gradients", "run_whole"]

Leaves = dict[Node, torch.Tensor]  # what arrived at each leaf's accumulator

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def add_gradients(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    """The sum, never in place: either may be somebody else's tensor too."""
    if first is None:
        return second
    if first.layout is not second.layout and second.layout is torch.strided:
        return second + first  # torch adds a sparse tensor to a dense one, not the other way round
    return first + second


def _run_engine(roots: Roots, inputs: Iterable[Edge], keep_graph: bool) -> tuple[torch.Tensor | None, ...]:
    """Gradients that arrive at ``inputs``. torch.autograd.grad does the same and takes 25 us longer."""
    outputs = tuple(GradientEdge(node, index) for node, index in roots)
    wanted = tuple(GradientEdge(node, index) for node, index in inputs)
    if not wanted:
        return ()
    result: tuple[torch.Tensor | None, ...] = _run_backward(
        outputs,
        tuple(roots.values()),
        keep_graph,
        False,
        wanted,
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return result


def _is_hooked(leaf: Node) -> bool:
    return bool(leaf.variable._backward_hooks)


def run_whole(roots: Roots, context_id: int, keep_graph: bool, leaves: Leaves) -> dict[Node, Gradients]:
    """Run everything that ``roots`` reach, add to ``leaves``, and return the gradients by receive."""
    reached: dict[Edge, None] = {}  # ordered, so that sums come in the same order in each run
    seen: set[Node] = set()
    stack: list[Node] = []
    frontier: Iterable[Edge] = roots
    while True:
        for edge in frontier:
            node = edge[0]
            if node is None or node in seen:
                continue
            kind = type(node)
            if kind is ACCUMULATE or kind is RECEIVE:
                reached[edge] = None
                continue
            if kind is CHECKPOINT:
                phases = Phases([list(roots)], context_id, keep_graph, leaves)
                phases.hear(list(roots), list(roots.values()))
                return phases.run()
            seen.add(node)
            stack.append(node)
        if not stack:
            break
        frontier = stack.pop().next_functions
    answers: dict[Node, Gradients] = {}
    for (node, index), gradient in zip(reached, _run_engine(roots, reached, keep_graph), strict=True):
        _hand_over(node, index, gradient, context_id, leaves, answers)
    return answers


def _hand_over(
    node: Node,
    index: int,
    gradient: torch.Tensor | None,
    context_id: int,
    leaves: Leaves,
    answers: dict[Node, Gradients],
) -> None:
    """Store what arrived at a leaf or a receive."""
    if gradient is None:
        return
    if type(node) is ACCUMULATE:
        leaves[node] = add_gradients(leaves.get(node), gradient)
    elif node.context_id == context_id:
        # A tensor received in another context is a constant here: its sender does not wait for this pass.
        if node not in answers:
            answers[node] = _none_of(node)
        answers[node][index] = gradient


def _none_of(receive: Node) -> Gradients:
    return [None] * receive.output_count


class Phases:
    """The local graph of a pass whose sources are heard one after the other."""

    __slots__ = (
        "_buffers",
        "_context_id",
        "_edges",
        "_keep_graph",
        "_leaf_count",
        "_leaf_masks",
        "_leaves",
        "_ready",
        "_wavefront",
        "dead",
        "unheard",
    )

    def __init__(self, sources: Iterable[Sequence[Edge]], context_id: int, keep_graph: bool, leaves: Leaves) -> None:
        self._context_id = context_id
        self._keep_graph = keep_graph
        self._leaves = leaves
        self._edges: dict[Node, tuple[Edge, ...]] = {}
        self._buffers: Roots = {}
        self._ready: list[Node] = []
        self._leaf_masks: dict[Node, int] = {}
        self._leaf_count = 0
        self.dead: list[Node] = []  # receives that will see no gradient, since last taken
        everything = list(sources)
        self.unheard: int = len(everything)
        targets = [edge[0] for source in everything for edge in source]
        self._wavefront: Wavefront[Node] = Wavefront(targets, self._next_nodes)

    def _next_nodes(self, node: Node) -> list[Node]:
        kind = type(node)
        edges: tuple[Edge, ...] = () if kind is ACCUMULATE or kind is RECEIVE else node.next_functions
        self._edges[node] = edges
        return [child for child, _ in edges if child is not None]

    def __contains__(self, node: Node) -> bool:
        """Whether any source reaches ``node``."""
        return node in self._edges

    def hear(self, edges: Sequence[Edge], gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Take in what a source was given; None stands for no gradient at all."""
        self.unheard -= 1
        if gradients is None:
            gradients = [None] * len(edges)
        settled: list[tuple[Node, bool]] = []
        for edge, gradient in zip(edges, gradients, strict=True):
            settled.append((edge[0], gradient is not None))
            if gradient is not None:
                self._feed(edge, gradient)
        live, dead = self._wavefront.settle(settled)
        self._ready += live
        self.dead += [node for node in dead if type(node) is RECEIVE]

    def _feed(self, edge: Edge, gradient: torch.Tensor) -> None:
        node = edge[0]
        if type(node) is ACCUMULATE and not _is_hooked(node):
            self._leaves[node] = add_gradients(self._leaves.get(node), gradient)
        else:
            self._buffers[edge] = add_gradients(self._buffers.get(edge), gradient)

    def is_due(self) -> bool:
        """Whether running now moves something: a receive can answer, or nothing more will be heard."""
        if not self._ready:
            return False
        return not self.unheard or any(type(node) is RECEIVE for node in self._ready)

    def run(self) -> dict[Node, Gradients]:
        """Run what is ready; return the gradients of the receives among it."""
        ready: list[Node] = [n for n in self._ready if type(n) is not ACCUMULATE or _is_hooked(n)]
        self._ready = []
        if all(type(node) is RECEIVE and not is_watched(node) for node in ready):
            return self._pass_on(ready)
        level, alone = self._plan(ready)
        answers: dict[Node, Gradients] = {}
        for node in ready:
            if type(node) is RECEIVE:
                answers[node] = _none_of(node)
        by_level: dict[int, list[Node]] = {}
        for node in ready:
            by_level.setdefault(level[node], []).append(node)
        for number in sorted(by_level):
            self._run_level(by_level[number], level, alone, answers)
        return {node: found for node, found in answers.items() if node.context_id == self._context_id}

    def _pass_on(self, receives: list[Node]) -> dict[Node, Gradients]:
        """Of tensors that were received and sent on as they were: the engine would do nothing."""
        answers = {node: _none_of(node) for node in receives if node.context_id == self._context_id}
        for edge in list(self._buffers):
            if edge[0] in answers:
                answers[edge[0]][edge[1]] = self._buffers.pop(edge)
        return answers

    def _plan(self, ready: list[Node]) -> tuple[dict[Node, int], set[Node]]:
        """Which nodes must be called alone, and after how many of those each node comes.

        One engine call per level; it stops at this level's lone nodes. A node joins them when an edge of it
        leads (a) into the part that is not ready, (b) to a later level, or (c) to a leaf that a lone node of
        its level leads to as well: asking the engine for that leaf would make it run through the lone node.
        """
        level = dict.fromkeys(ready, 0)
        alone = {node for node in ready if type(node) is CHECKPOINT}
        for node in ready:
            for child, _ in self._edges[node]:
                if child is not None and child not in level and not self._is_plain_leaf(child):
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

    @staticmethod
    def _is_plain_leaf(node: Node) -> bool:
        return type(node) is ACCUMULATE and not _is_hooked(node)

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

    def _run_level(
        self, nodes: list[Node], level: dict[Node, int], alone: set[Node], answers: dict[Node, Gradients]
    ) -> None:
        roots: Roots = {}
        wanted: dict[Edge, None] = {}
        here = set(nodes)
        for edge in [edge for edge in self._buffers if edge[0] in here]:
            roots[edge] = self._buffers.pop(edge)
        for node in nodes:
            kind = type(node)
            if kind is RECEIVE:
                wanted.update(((node, index), None) for index in range(node.output_count))
            elif kind is ACCUMULATE:
                wanted[node, 0] = None
            elif node in alone:
                wanted.update(((node, index), None) for index in range(len(node._input_metadata)))
            else:
                for edge in self._edges[node]:
                    if edge[0] is not None and edge[0] not in level:
                        wanted[edge] = None
        if not roots:
            return
        arrived: dict[Node, Gradients] = {}
        for (node, index), gradient in zip(wanted, _run_engine(roots, wanted, self._keep_graph), strict=True):
            if node in alone:
                arrived.setdefault(node, []).append(gradient)
            else:
                _hand_over(node, index, gradient, self._context_id, self._leaves, answers)
        for node in nodes:
            if node in alone and any(gradient is not None for gradient in arrived[node]):
                for edge, gradient in run_node(node, arrived[node], self._run_inner):
                    self._feed(edge, gradient)

    def _run_inner(self, roots: Roots, inputs: Sequence[Edge]) -> Gradients:
        """Run a graph that exists only for the moment (a recomputed one); its other leaves are the pass's."""
        inner: Leaves = {}
        if run_whole(roots, self._context_id, False, inner):
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True cannot contain remote calls; pass use_reentrant=False"
            )
        found = [inner.pop(node, None) for node, _ in inputs]
        for node, gradient in inner.items():
            self._leaves[node] = add_gradients(self._leaves.get(node), gradient)
        return found
