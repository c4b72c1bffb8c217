"""Random programs cut over several workers give the gradients of the same program in one process."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.autograd.cluster import Network

from farcall.autograd.passes import Gradient
from farcall.errors import RpcError
from farcall.serialize import RECORDING

SHAPE = (2, 2)


class Counted(torch.autograd.Function):
    """A Python function that counts how often its backward runs, by name."""

    runs: ClassVar[Counter[Any]] = Counter()
    """In the order of the first calls."""
    broken: ClassVar[set[Any]] = set()

    @staticmethod
    def note(name: Any) -> None:
        Counted.runs[name] += 1
        if name in Counted.broken:
            raise ValueError("broken on purpose")

    @staticmethod
    def forward(ctx: Any, name: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        ctx.save_for_backward(first, second)
        return first * second.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, second = ctx.saved_tensors
        Counted.note(ctx.name)
        return None, gradient * second.sin(), gradient * first * second.cos()


class Ordering(torch.autograd.Function):
    """Two outputs, and no gradient for the second input: what made that one must be called nevertheless."""

    @staticmethod
    def forward(ctx: Any, name: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.name = name
        return first * 3, second.detach() + 1

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        Counted.note(ctx.name)
        return None, first * 3, None


@dataclass
class Value:
    """The same value twice: on its worker, and in the twin program; and the functions that led to it."""

    worker: int
    here: torch.Tensor
    twin: torch.Tensor
    functions: frozenset[int] = frozenset()


class Program:
    """Builds a random forward program over a network and its single-process twin."""

    def __init__(self, network: Network, rng: random.Random, steps: int, context_id: int, tag: str) -> None:
        self.network, self.rng, self.context_id, self.tag = network, rng, context_id, tag
        self.values: list[Value] = []
        self.leaves: list[Value] = []
        self.hooks: tuple[dict[int, list[Any]], dict[int, list[Any]]] = ({}, {})
        self.kept: list[Value] = []
        self.counted = 0
        self.earlier: dict[int, frozenset[int]] = {}  # by function: those that led to its inputs
        self.world_size = len(network.workers)
        for _ in range(rng.randint(1, 4)):
            self.leaf()
        for _ in range(steps):
            self.step()
        for value in rng.sample(self.values, min(len(self.values), rng.randint(1, 3))):
            self.move([value], 0)
        mine = [v for v in self.values if v.worker == 0 and not v.here.is_leaf] or [self.combine(0)]
        chosen = rng.sample(mine, min(len(mine), rng.randint(1, 3)))
        scale = rng.uniform(0.5, 2.0)
        self.roots = [(v.here * scale).sum() for v in chosen]
        self.twin_roots = [(v.twin * scale).sum() for v in chosen]

    def leaf(self) -> Value:
        twin = torch.rand(SHAPE, dtype=torch.float64).requires_grad_()
        value = Value(self.rng.randrange(self.world_size), twin.detach().clone().requires_grad_(), twin)
        self.values.append(value)
        self.leaves.append(value)
        return value

    def combine(self, worker: int) -> Value:
        leaf = self.leaf()
        leaf.worker = worker
        value = Value(worker, leaf.here * 2, leaf.twin * 2)
        self.values.append(value)
        return value

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.08:
            self.leaf()
        elif kind < 0.45:
            count = min(len(self.values), self.rng.randint(1, 3))
            source = self.rng.choice(self.values).worker
            near = [v for v in self.values if v.worker == source]
            self.move(self.rng.sample(near, min(count, len(near))), self.rng.randrange(self.world_size))
        else:
            first = self.rng.choice(self.values)
            second = self.rng.choice([v for v in self.values if v.worker == first.worker])
            self.compute(first, second)
        if self.rng.random() < 0.3:
            self.hook(self.rng.choice(self.values[-4:]))

    def move(self, values: list[Value], worker: int) -> None:
        moved = self.network.move(self.context_id, values[0].worker, worker, [v.here for v in values])
        self.values += [Value(worker, here, v.twin.clone(), v.functions) for v, here in zip(values, moved, strict=True)]

    def compute(self, first: Value, second: Value) -> None:
        kind = self.rng.randrange(8)
        results: list[list[torch.Tensor]] = []
        self.counted += 1
        self.earlier[self.counted] = first.functions | second.functions
        for side in ("here", "twin"):
            a, b = getattr(first, side), getattr(second, side)
            if kind == 0:
                results.append([a * b])
            elif kind == 1:
                results.append([torch.addmm(b, a, b.t())])
            elif kind == 2:
                results.append(list((a + b).unbind(0)))
            elif kind == 3:
                results.append([Counted.apply((self.tag, side, self.counted), a, b)])
            elif kind == 4:
                results.append([a.cos() + b])
            elif kind == 5:
                changed = a * 1.5
                changed.mul_(b)
                results.append([changed])
            elif kind == 6:
                results.append(list(Ordering.apply((self.tag, side, self.counted), a, b)))
            else:
                results.append([a.detach() * b])
        for here, twin in zip(*results, strict=True):
            if here.shape != torch.Size(SHAPE):
                here, twin = here.expand(SHAPE), twin.expand(SHAPE)
            self.values.append(Value(first.worker, here, twin, self.earlier[self.counted] | {self.counted}))

    def hook(self, value: Value) -> None:
        """A hook of the tensor, one of its node before or after it, or a gradient kept with the tensor."""
        number = len(self.hooks[0])
        factor = self.rng.uniform(0.5, 1.5)
        kind = self.rng.choice(["tensor", "tensor", "before", "after", "kept"])
        outputs = [
            0 if node is None else len(node._input_metadata) for node in (value.here.grad_fn, value.twin.grad_fn)
        ]
        if kind != "kept" and outputs[0] != outputs[1]:
            kind = "tensor"  # it came with others, all of them outputs of one receive
        for log, tensor in zip(self.hooks, (value.here, value.twin), strict=True):
            seen = log.setdefault(number, [])

            def note(gradient: torch.Tensor | None, seen: list[Any] = seen) -> torch.Tensor | None:
                # torch calls with None, too: for another output of the same node, or an undefined gradient. The hooks
                # of a node that is called alone cannot be found.
                if gradient is None:
                    return None
                seen.append(gradient.clone())
                return gradient * factor

            def before(gradients: tuple[torch.Tensor | None, ...], note: Any = note) -> Any:
                return tuple(map(note, gradients))

            def after(results: Any, gradients: tuple[torch.Tensor | None, ...], note: Any = note) -> None:
                for gradient in gradients:
                    note(gradient)

            node: Any = tensor.grad_fn
            if node is None or kind == "tensor":
                tensor.register_hook(note)
            elif kind == "kept":
                tensor.retain_grad()
                self.kept.append(value)
            elif kind == "before":
                node.register_prehook(before)
            else:
                node.register_hook(after)

    def check(self, times: int = 1) -> None:
        for number, seen in self.hooks[0].items():
            expected = self.hooks[1][number]
            assert len(seen) == len(expected), f"hook {number} ran {len(seen)} times, not {len(expected)}"
            for got, wanted in zip(seen, expected, strict=True):
                torch.testing.assert_close(got, wanted)
        for value in self.kept:
            assert (value.here.grad is None) == (value.twin.grad is None)
            torch.testing.assert_close(value.here.grad, value.twin.grad)
        for leaf in self.leaves:
            worker = self.network.workers[leaf.worker]
            found = worker.get_gradients(self.context_id).get(leaf.here) if worker.is_valid(self.context_id) else None
            assert leaf.here.grad is None
            if leaf.twin.grad is None:
                assert found is None
            else:
                torch.testing.assert_close(found, leaf.twin.grad)
        for (tag, side, number), runs in list(Counted.runs.items()):
            if tag == self.tag:
                other = "twin" if side == "here" else "here"
                assert Counted.runs[tag, other, number] == runs
        called = [number for tag, side, number in Counted.runs if (tag, side) == (self.tag, "here")]
        for place, number in enumerate(called):
            assert self.earlier[number].isdisjoint(called[:place])
        self.check_messages(times)

    def check_messages(self, times: int) -> None:
        """Every send heard exactly once in each pass."""
        sends = sum(len(w.retrieve(self.context_id).sends) for w in self.network.workers if w.is_valid(self.context_id))
        heard = Counter(
            (message.pass_id, message.message_id)
            for source, target, message in self.network.log
            if isinstance(message, Gradient) and message.context_id == self.context_id and source != target
        )
        assert all(count == 1 for count in heard.values())
        assert len(heard) <= sends * times


def build(seed: int, world_size: int, steps: int, contexts: int = 1) -> tuple[Network, list[Program]]:
    Counted.runs.clear()
    Counted.broken.clear()
    torch.manual_seed(seed)
    network = Network(world_size, seed)
    programs = []
    for number in range(contexts):
        context = network.workers[0].new_context()
        programs.append(Program(network, random.Random(seed + number), steps, context.id, f"program{number}"))
        RECORDING.set(None)
    return network, programs


seeds = st.integers(0, 2**32)
worlds = st.integers(1, 4)
sizes = st.integers(1, 40)


@settings(max_examples=300)
@given(seeds, worlds, sizes)
def test_gradients_equal_those_of_one_process(seed: int, world_size: int, steps: int) -> None:
    network, (program,) = build(seed, world_size, steps)
    torch.autograd.backward(program.twin_roots)
    network.workers[0].backward(program.context_id, program.roots)
    network.drain()
    program.check()


@settings(max_examples=100)
@given(seeds, worlds, sizes)
def test_a_kept_graph_gives_the_same_again(seed: int, world_size: int, steps: int) -> None:
    network, (program,) = build(seed, world_size, steps)
    for last in (False, False, True):
        torch.autograd.backward(program.twin_roots, retain_graph=not last)
        network.workers[0].backward(program.context_id, program.roots, retain_graph=not last)
    network.drain()
    program.check(times=3)


@settings(max_examples=100)
@given(seeds, worlds, sizes)
def test_contexts_at_the_same_time_do_not_mix(seed: int, world_size: int, steps: int) -> None:
    network, programs = build(seed, world_size, steps, contexts=3)
    for program in programs:
        torch.autograd.backward(program.twin_roots)
    for program in programs[1:]:
        network.possible.append(lambda program=program: network.workers[0].backward(program.context_id, program.roots))
    network.workers[0].backward(programs[0].context_id, programs[0].roots)
    network.drain()
    for program in programs:
        program.check()


@settings(max_examples=100)
@given(seeds, st.integers(2, 4), st.integers(10, 40))
def test_an_error_anywhere_reaches_the_origin_and_leaves_nothing(seed: int, world_size: int, steps: int) -> None:
    network, (program,) = build(seed, world_size, steps)
    torch.autograd.backward(program.twin_roots, retain_graph=True)
    ran = [name for name in Counted.runs if name[1] == "twin"]
    if not ran:
        return
    name = random.Random(seed).choice(ran)
    broken = (name[0], "here", name[2])
    Counted.broken.add(broken)
    with pytest.raises(RpcError, match=r"Error on Node \d+: broken on purpose"):
        network.workers[0].backward(program.context_id, program.roots, retain_graph=True)
    network.drain()
    for worker in network.workers:
        assert worker.debug_info()["num_current_backward_passes"] == "0"
    # The failed pass is forgotten: the next one is right.
    Counted.broken.clear()
    for leaf in program.leaves:
        worker = network.workers[leaf.worker]
        if worker.is_valid(program.context_id):
            worker.retrieve(program.context_id).gradients.clear()
    for log in program.hooks[0].values():
        log.clear()
    for value in program.kept:
        value.here.grad = None
    Counted.runs.clear()
    Counted.runs.update(dict.fromkeys(ran, 1))
    network.workers[0].backward(program.context_id, program.roots)
    network.drain()
    program.check(times=2)


@settings(max_examples=50)
@given(seeds, st.integers(2, 4), st.integers(5, 30), st.integers(0, 30))
def test_a_dead_worker_ends_the_pass(seed: int, world_size: int, steps: int, when: int) -> None:
    network, (program,) = build(seed, world_size, steps)
    victim = random.Random(seed).randrange(1, world_size)

    def kill() -> None:
        network.kill(victim)

    for _ in range(when):
        network.possible.append(lambda: None)
    network.possible.append(kill)
    torch.autograd.backward(program.twin_roots)
    failure = ""
    try:
        network.workers[0].backward(program.context_id, program.roots)
    except RpcError as error:
        failure = str(error)
    assert not failure or f"worker{victim} died" in failure
    network.drain()
    for worker in network.workers:
        if worker.port.worker_id != victim:
            assert worker.debug_info()["num_current_backward_passes"] == "0"
