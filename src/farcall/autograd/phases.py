"""A graph whose sources depend on each other: each node runs when all sources that lead to it are heard.

Gradients that have not arrived may depend on gradients that this worker must send first. So the *ready* part runs: the
nodes all of whose inputs have been heard. The engine can stop at a node (it returns the gradient that arrives there,
after the tensor's hooks), but it cannot compute a gradient for an edge without visiting the edge's far end, where hooks
would see a partial gradient. So a node with an edge into the part that is not ready is a *lone* node: the engine stops
there, `run_node` calls the node alone, and its results wait in a buffer. A node that only undefined gradients reach
from outside an engine call is called alone too: the engine follows undefined gradients, but cannot start with one.

Used by `LocalGraph` alone, whose invariant it keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import methodcaller

import torch

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, Reached
from farcall.autograd.leaves import Leaves, add_gradients, feed
from farcall.autograd.nodes import Gradients, Roots, RunInner, is_checkpoint, run_engine, run_node
from farcall.protocol.gradients import Wavefront

Answers = dict[Node, Reached]
"""The gradients with which each receive answers."""
Heard = list[tuple[Edge, bool]]
"""Edges of heard sources, and whether the pass reached them."""

_sequence_number = methodcaller("_sequence_nr")


class Phases:
    """One worker's part of the graph of one pass, once its sources are known to depend on each other.

    Mutable: ``_buffers``, ``_leaves`` and ``_unanswered``, shared with the `LocalGraph`; ``_ready``, nodes that wait
    for a run to become worthwhile; ``_arrived``, gradients at receives.
    """

    __slots__ = (
        "_arrived",
        "_buffers",
        "_edges",
        "_front",
        "_keep_graph",
        "_leaf_count",
        "_leaf_masks",
        "_leaves",
        "_ready",
        "_unanswered",
    )

    def __init__(
        self,
        heard: Heard,
        unheard: Iterable[Sequence[Edge]],
        *,
        buffers: Roots,
        leaves: Leaves,
        unanswered: dict[Node, None],
        keep_graph: bool,
    ) -> None:
        """Find the nodes behind the sources, and the inputs that each waits for."""
        self._buffers = buffers
        self._leaves = leaves
        self._unanswered = unanswered
        self._keep_graph = keep_graph
        self._arrived: Answers = {}  # the answers of reached receives, until they are complete
        self._ready: list[Node] = []
        self._leaf_masks: dict[Node, int] = {}
        self._leaf_count = 0
        self._edges: dict[Node, tuple[Edge, ...]] = {}
        edges = self._edges
        following: dict[Node, list[Node]] = {}
        targets: list[Node] = []
        for (node, _), _ in heard:
            targets.append(node)
        for source in unheard:
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
        self._front: Wavefront[Node] = Wavefront(targets, following)

    def run(self, heard: Heard, run_inner: RunInner, *, is_last: bool) -> Answers:
        """Run the nodes that have become ready; return the answers of the receives that are now decided."""
        answers: Answers = {}
        unanswered = self._unanswered
        for node in unanswered:
            if node not in self._edges:
                answers[node] = {}  # no source leads there
        live, dead = self._front.settle([(edge[0], is_reached) for edge, is_reached in heard])
        for edge, is_reached in heard:
            if is_reached:
                self._reach(edge)
        for node in dead:
            if node in unanswered:
                answers[node] = {}
        is_due = is_last
        for node in live:
            for edge in self._edges[node]:
                self._reach(edge)
            # An accumulator without hooks has nothing to run: its gradients are in `leaves` already.
            if type(node) is not ACCUMULATE or node.variable._backward_hooks:
                self._ready.append(node)
                is_due = is_due or type(node) is RECEIVE
        # While sends are unheard, a run after which no receive can answer helps no other worker: one larger run later
        # is cheaper.
        if is_due and self._ready:
            ready, self._ready = self._ready, []
            level, alone = self._plan(ready)
            by_level: dict[int, list[Node]] = {}
            for node in ready:
                by_level.setdefault(level[node], []).append(node)
            for number in sorted(by_level):
                self._run_level(by_level[number], level, alone, run_inner)
            for node in ready:
                if node in unanswered:
                    answers[node] = self._arrived.pop(node, {})
        if is_last:
            for node in unanswered:
                if node not in answers:
                    answers[node] = self._arrived.pop(node, {})
        return answers

    def _reach(self, edge: Edge) -> None:
        """Record that the pass has reached an edge. A receive answers for its reached tensors only."""
        if edge[0] in self._unanswered:
            self._arrived.setdefault(edge[0], {}).setdefault(edge[1], None)

    def _arrive(self, edge: Edge, gradient: torch.Tensor | None) -> None:
        """Store a gradient that arrived at a leaf or a receive."""
        node, index = edge
        if type(node) is RECEIVE:
            if node in self._unanswered:  # a receive of another context is a constant here: its sender does not wait
                self._arrived.setdefault(node, {})[index] = gradient
        elif gradient is not None:
            known = self._leaves.get(node)
            self._leaves[node] = gradient if known is None else add_gradients(known, gradient)

    def _plan(self, ready: list[Node]) -> tuple[dict[Node, int], set[Node]]:
        """Return the level of each node (how many lone nodes lie before it on a path), and the set of lone nodes.

        Each level is one engine call, which stops at the lone nodes of the level. A node is lone when an edge of it
        leads (a) into the part that is not ready, (b) to a later level, or (c) to a leaf to which a lone node of its
        level leads as well: asking the engine for that leaf would make it run through the lone node.
        """
        level = dict.fromkeys(ready, 0)
        alone: set[Node] = set()
        for node in ready:
            if is_checkpoint(type(node)):
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
        """Return the leaves to which ``start`` leads, one bit each."""
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

    def _run_level(self, nodes: list[Node], level: dict[Node, int], alone: set[Node], run_inner: RunInner) -> None:
        nodes = self._call_unstarted(nodes, alone, run_inner)
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
        for edge, gradient in zip(wanted, run_engine(roots, wanted, self._keep_graph), strict=True):
            if edge[0] in alone:
                arrived.setdefault(edge[0], []).append(gradient)
            else:
                self._arrive(edge, gradient)
        for node in sorted(arrived, key=_sequence_number, reverse=True):  # like the engine: newest node first
            for edge, result in run_node(node, arrived[node], run_inner):
                feed(edge, result, self._buffers, self._leaves)

    def _call_unstarted(self, nodes: list[Node], alone: set[Node], run_inner: RunInner) -> list[Node]:
        """Call the nodes that only undefined gradients reach; return the others."""
        rest: list[Node] = []
        started = {node for node, _ in self._buffers}
        for node in nodes:  # in topological order
            if node in started:
                rest.append(node)
                if node not in alone:
                    started.update(child for child, _ in self._edges[node])
            elif type(node) is not ACCUMULATE and type(node) is not RECEIVE:
                nothing: Gradients = [None] * len(node._input_metadata)
                for edge, result in run_node(node, nothing, run_inner):
                    feed(edge, result, self._buffers, self._leaves)
                    started.add(edge[0])
        return rest
