"""One worker's part of the graph of one pass, run on torch's own engine as its sources are heard.

The sources are the roots and the recorded sends; the sinks are leaves and recorded receives. Where all sources have
been heard before the first run, one walk finds the sinks and a single engine call does the rest. Where some are still
to come (and may depend on what this worker sends first), the part that is *ready* runs: the nodes all of whose inputs
have been heard. The engine can stop at a node (it hands out what arrives there, after that tensor's hooks), but it
cannot compute a gradient for an edge without visiting the edge's far end, where hooks would see a partial gradient.
So a node with an edge into the part that is not ready is taken out: the engine stops there, `run_node` calls the node
alone, and its results wait in a buffer.

Knows nothing of messages or threads. Invariant: within a pass each node runs once, each hook sees its whole gradient
once, and no `.grad` is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat, starmap
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from farcall.autograd.functions import ACCUMULATE, RECEIVE, Edge, Node, is_watched
from farcall.autograd.nodes import CHECKPOINT, Gradients, Roots, run_node
from farcall.protocol.gradients import Wavefront

__all__ = ["Answers", "LocalGraph", "add_gradients", "in_own_memory"]

Leaves = dict[Node, torch.Tensor]  # by accumulator
Answers = dict[Node, Gradients | None]  # by receive; None: no gradient will come

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def add_gradients(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    """The sum, never in place: either tensor may be in use elsewhere."""
    if first is None:
        return second
    if first.layout is not second.layout and second.layout is torch.strided:
        return second + first  # torch adds a sparse tensor to a dense one, not the other way round
    return first + second


def in_own_memory(gradients: dict[torch.Tensor, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
    """``gradients``, dense, of which none shares memory with another; as torch does for ``.grad``."""
    found: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    uses: dict[int, int] = {}
    for leaf, gradient in gradients.items():
        parts: tuple[torch.Tensor, ...] = ()
        if gradient.layout is torch.strided:
            parts = (gradient,)
        elif gradient.layout is torch.sparse_coo:
            parts = (gradient._values(), gradient._indices())
        is_dense = bool(parts) and all(map(torch.Tensor.is_contiguous, parts))
        address = parts[0].data_ptr() if is_dense else -1
        uses[address] = uses.get(address, 0) + 1
        found.append((leaf, gradient, address))
    for leaf, gradient, address in found:
        # Of several that share memory all are copied: a backward function may have kept that memory.
        if address != -1 and uses[address] == 1:
            continue
        if gradient.layout is torch.strided:
            gradients[leaf] = gradient.clone(memory_format=torch.contiguous_format)
        else:
            gradients[leaf] = gradient.clone()  # the other layouts take no format; their parts are copied densely
    return gradients


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
        "_buffers",
        "_context_id",
        "_edges",
        "_front",
        "_heard",
        "_keep_graph",
        "_leaf_count",
        "_leaf_masks",
        "_ready",
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
        self._heard: list[tuple[Node, bool]] = []  # far ends of source edges, and whether a gradient came
        self._front: Wavefront[Node] | None = None
        self._edges: dict[Node, tuple[Edge, ...]] = {}
        self._ready: list[Node] = []
        self._leaf_masks: dict[Node, int] = {}
        self._leaf_count = 0
        if roots:
            self._feed(roots, roots.values())

    def hear(self, message_id: int, gradients: Gradients | None) -> None:
        """Take in the gradients of a send; None stands for no gradient at all."""
        edges = self.unheard.pop(message_id, None)
        if edges is not None:
            self._feed(edges, repeat(None, len(edges)) if gradients is None else gradients)

    def _feed(
        self, edges: Iterable[Edge], gradients: Iterable[torch.Tensor | None], *, are_sources: bool = True
    ) -> None:
        for edge, gradient in zip(edges, gradients, strict=True):
            node = edge[0]
            if are_sources:
                self._heard.append((node, gradient is not None))
            if gradient is None:
                continue
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
        if self._front is None and (self.unheard or not self._run_whole(answers)):
            self._walk(answers)
        if self._front is not None:
            live, dead = self._front.settle(self._heard)
            self._heard = []
            for node in dead:
                if node in self.unanswered:
                    answers[node] = None
            is_due = not self.unheard
            for node in live:
                # An accumulator without hooks has nothing to run: its gradients are in `leaves` already.
                if type(node) is not ACCUMULATE or node.variable._backward_hooks:
                    self._ready.append(node)
                    is_due = is_due or type(node) is RECEIVE
            # A run that lets no receive answer moves nothing while more is to come: one larger run later is cheaper.
            if is_due and self._ready:
                ready, self._ready = self._ready, []
                self._run_ready(ready, answers)
                for node in ready:
                    # Reached by a live source, and yet without a gradient: some function returned None for it.
                    if node in self.unanswered:
                        answers.setdefault(node, None)
        if not self.unheard:
            for node in self.unanswered:
                answers.setdefault(node, None)
        for node in answers:
            self.unanswered.pop(node, None)
        return answers

    def _run_whole(self, answers: Answers) -> bool:
        """All sources are heard, so no node has to wait. False: a node must be called alone, and nothing was run."""
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
        for (node, index), gradient in zip(sinks, _run_engine(self._buffers, sinks, self._keep_graph), strict=True):
            if gradient is not None:
                self._hand_over(node, index, gradient, answers)
        return True

    def _hand_over(self, node: Node, index: int, gradient: torch.Tensor, answers: Answers) -> None:
        """Store what arrived at a leaf or a receive."""
        if type(node) is ACCUMULATE:
            known = self.leaves.get(node)
            self.leaves[node] = gradient if known is None else add_gradients(known, gradient)
        elif node.context_id == self._context_id:
            # A tensor received in another context is a constant here: its sender does not wait for this pass.
            gradients = answers.get(node)
            if gradients is None:
                gradients = answers[node] = [None] * node.output_count
            gradients[index] = gradient

    # --- some sources are heard later ---------------------------------------------------------------------

    def _walk(self, answers: Answers) -> None:
        """Find the nodes that the sources reach, and what each waits for; unreached receives answer at once."""
        edges = self._edges
        following: dict[Node, list[Node]] = {}
        targets: list[Node] = []
        for source in (self._heard, *self.unheard.values()):
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
                answers[node] = None

    def _run_ready(self, ready: list[Node], answers: Answers) -> None:
        buffers = self._buffers
        for node in ready:
            if type(node) is not RECEIVE or is_watched(node):
                break
        else:
            # Tensors that were received and sent on as they were: the engine would do nothing.
            here = set(ready)
            for edge in list(buffers):
                if edge[0] in here:
                    self._hand_over(*edge, buffers.pop(edge), answers)
            return
        level, alone = self._plan(ready)
        by_level: dict[int, list[Node]] = {}
        for node in ready:
            by_level.setdefault(level[node], []).append(node)
        for number in sorted(by_level):
            self._run_level(by_level[number], level, alone, answers)

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

    def _run_level(self, nodes: list[Node], level: dict[Node, int], alone: set[Node], answers: Answers) -> None:
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
            elif kind is RECEIVE or node in alone:
                for index in range(node.output_count if kind is RECEIVE else len(node._input_metadata)):
                    wanted[node, index] = None
            else:
                for edge in self._edges[node]:
                    if edge[0] is not None and edge[0] not in level:
                        wanted[edge] = None
        arrived: dict[Node, Gradients] = {}
        for (node, index), gradient in zip(wanted, _run_engine(roots, wanted, self._keep_graph), strict=True):
            if node in alone:
                arrived.setdefault(node, []).append(gradient)
            elif gradient is not None:
                self._hand_over(node, index, gradient, answers)
        for node in nodes:
            if node in alone and any(gradient is not None for gradient in arrived[node]):
                for edge, result in run_node(node, arrived[node], self._run_inner):
                    self._feed((edge,), (result,), are_sources=False)

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
