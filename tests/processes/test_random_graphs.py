"""Random programs over real processes give the gradients of the same program in one process.

A program is a list of steps, drawn from a seed: leaves, computations, hooks, and moves of values between workers, as
arguments, as results, through references or by way of the caller. The driver has each worker do its steps; its twin
does them all in one place. ``tests/property/test_gradients.py`` does the same with thousands of programs and no
processes.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch

import farcall
import farcall.autograd as autograd
from farcall.testing.cluster import run_cluster

SHAPE = (2, 2)
Step = tuple[Any, ...]


class Counted(torch.autograd.Function):
    """Counts how often its backward runs, by its number."""

    @staticmethod
    def forward(ctx: Any, place: Place, number: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.place, ctx.number = place, number
        ctx.save_for_backward(first, second)
        return first * second.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        first, second = ctx.saved_tensors
        ctx.place.runs[ctx.number] += 1
        return None, None, gradient * second.sin(), gradient * first * second.cos()


class Ordering(torch.autograd.Function):
    """No gradient for the second input: what made that one must be called nevertheless."""

    @staticmethod
    def forward(ctx: Any, place: Place, number: int, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        ctx.place, ctx.number = place, number
        return first * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.place.runs[ctx.number] += 1
        return None, None, gradient * 3, None


class Place:
    """Where values are: a worker's part of one program, or all of its twin."""

    def __init__(self) -> None:
        self.values: dict[int, torch.Tensor] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.runs: Counter[int] = Counter()
        self.seen: dict[int, list[torch.Tensor]] = {}

    def leaf(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        value = torch.rand(SHAPE, dtype=torch.float64, generator=generator).requires_grad_()
        self.values[number] = self.leaves[number] = value

    def compute(self, kind: int, first: int, second: int, number: int) -> None:
        a, b = self.values[first], self.values[second]
        if kind == 0:
            result = a * b
        elif kind == 1:
            result = torch.addmm(b, a, b.t())
        elif kind == 2:
            result = (a + b).unbind(0)[1].expand(SHAPE)
        elif kind == 3:
            result = Counted.apply(self, number, a, b)
        elif kind == 4:
            result = (a * 1.5).mul_(b)
        elif kind == 5:
            result = a.detach() * b
        elif kind == 6:
            result = Ordering.apply(self, number, a, b)
        else:
            result = a.cos() + b
        self.values[number] = result

    def hook(self, value: int, number: int, factor: float) -> None:
        seen = self.seen.setdefault(number, [])

        def note(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None:
                return None  # of another output of the same node, by torch itself
            seen.append(gradient.clone())
            return gradient * factor

        self.values[value].register_hook(note)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """In the twin: the same value under another number."""
        for old, new in pairs:
            self.values[new] = self.values[old].clone()


class Places:
    """The programs of this process."""

    places: dict[int, Place] = {}  # noqa: RUF012
    lock = threading.Lock()

    @classmethod
    def of(cls, program: int) -> Place:
        with cls.lock:
            return cls.places.setdefault(program, Place())


def do(program: int, name: str, *arguments: Any) -> None:
    getattr(Places.of(program), name)(*arguments)


def take(program: int, numbers: list[int]) -> list[torch.Tensor]:
    values = Places.of(program).values
    return [values[number] for number in numbers]


def put(program: int, numbers: list[int], tensors: list[torch.Tensor]) -> None:
    Places.of(program).values.update(zip(numbers, tensors, strict=True))


def push(program: int, to: str, pairs: list[tuple[int, int]]) -> None:
    tensors = take(program, [old for old, _ in pairs])
    farcall.rpc_sync(to, put, (program, [new for _, new in pairs], tensors))


def pull(program: int, source: str, pairs: list[tuple[int, int]]) -> None:
    tensors = farcall.rpc_sync(source, take, (program, [old for old, _ in pairs]))
    put(program, [new for _, new in pairs], tensors)


def pull_reference(program: int, source: str, pairs: list[tuple[int, int]]) -> None:
    tensors = farcall.remote(source, take, (program, [old for old, _ in pairs])).to_here()
    put(program, [new for _, new in pairs], tensors)


def outcome(program: int, context_id: int) -> Any:
    place = Places.of(program)
    found = autograd.get_gradients(context_id) if autograd._is_valid_context(context_id) else {}
    gradients = {number: found.get(leaf) for number, leaf in place.leaves.items()}
    assert all(leaf.grad is None for leaf in place.leaves.values())
    return gradients, place.runs, place.seen


def forget(program: int) -> None:
    Places.places.pop(program, None)


def draw(rng: random.Random, world_size: int, length: int) -> tuple[list[Step], list[int]]:
    """Steps as (worker, name, arguments) and the values that the roots are made of, at worker 0."""
    steps: list[Step] = []
    home: dict[int, int] = {}
    counted = iter(range(1, 10_000))

    def new(worker: int) -> int:
        number = next(counted)
        home[number] = worker
        return number

    def leaf(worker: int) -> int:
        number = new(worker)
        steps.append((worker, "leaf", number, rng.randrange(2**31)))
        return number

    def move(source: int, target: int, values: list[int]) -> None:
        how = rng.choice(["push", "pull", "pull_reference", "by way of the caller"])
        steps.append((source, "move", target, how, [(value, new(target)) for value in values]))

    for _ in range(rng.randint(1, 4)):
        leaf(rng.randrange(world_size))
    for _ in range(length):
        kind = rng.random()
        worker = home[rng.choice(list(home))]
        near = [value for value, where in home.items() if where == worker]
        if kind < 0.08:
            leaf(rng.randrange(world_size))
        elif kind < 0.45:
            move(worker, rng.randrange(world_size), rng.sample(near, min(len(near), rng.randint(1, 3))))
        else:
            first, second = rng.choice(near), rng.choice(near)
            steps.append((worker, "compute", rng.randrange(8), first, second, new(worker)))
        if rng.random() < 0.3:
            value = rng.choice(list(home)[-4:])
            steps.append((home[value], "hook", value, next(counted), rng.uniform(0.5, 1.5)))
    for value in rng.sample(list(home), min(len(home), rng.randint(1, 3))):
        move(home[value], 0, [value])
    mine = [value for value, where in home.items() if where == 0]
    return steps, rng.sample(mine, min(len(mine), rng.randint(1, 3)))


def run_step(program: int, step: Step) -> None:
    worker, name, *arguments = step
    if name != "move":
        farcall.rpc_sync(worker, do, (program, name, *arguments))
        return
    target, how, pairs = arguments
    if how == "push":
        farcall.rpc_sync(worker, push, (program, f"w{target}", pairs))
    elif how == "by way of the caller":
        tensors = farcall.rpc_sync(worker, take, (program, [old for old, _ in pairs]))
        farcall.rpc_sync(target, put, (program, [new for _, new in pairs], tensors))
    else:
        # At its owner a reference gives the value itself, not a copy with hooks of its own.
        function = pull if how == "pull" or worker == target else pull_reference
        farcall.rpc_sync(target, function, (program, f"w{worker}", pairs))


def check(seed: int, world_size: int) -> None:
    rng = random.Random(seed)
    steps, chosen = draw(rng, world_size, rng.randint(1, 30))
    twin = Place()
    for _, name, *arguments in steps:
        getattr(twin, name)(*(arguments[-1:] if name == "move" else arguments))
    passes = rng.choice([1, 1, 1, 2])
    twin_roots = [(twin.values[number] * 1.5).sum() for number in chosen]
    for last in range(passes):
        torch.autograd.backward(twin_roots, retain_graph=last < passes - 1)
    with autograd.context() as context_id:
        for step in steps:
            run_step(seed, step)
        roots = [(value * 1.5).sum() for value in take(seed, chosen)]
        for last in range(passes):
            autograd.backward(context_id, roots, retain_graph=last < passes - 1)
        runs: Counter[int] = Counter()
        seen: dict[int, list[torch.Tensor]] = {}
        for worker in range(world_size):
            gradients, worker_runs, worker_seen = farcall.rpc_sync(worker, outcome, (seed, context_id))
            runs += worker_runs
            seen.update(worker_seen)
            for number, gradient in gradients.items():
                wanted = twin.leaves[number].grad
                assert (gradient is None) == (wanted is None), f"seed {seed}: leaf {number}"
                if gradient is not None:
                    torch.testing.assert_close(gradient, wanted, msg=lambda text: f"seed {seed}: {text}")
    assert runs == twin.runs, f"seed {seed}"
    assert seen.keys() == twin.seen.keys()
    for number, gradients in twin.seen.items():
        assert len(seen[number]) == len(gradients), f"seed {seed}: hook {number}"
        for got, wanted in zip(seen[number], gradients, strict=True):
            torch.testing.assert_close(got, wanted)
    for worker in range(world_size):
        farcall.rpc_sync(worker, forget, (seed,))


def drive(rank: int, world_size: int, seeds: range) -> None:
    if rank == 0:
        for seed in seeds:
            check(seed, world_size)


def drive_at_once(rank: int, world_size: int, seeds: range) -> None:
    """Several programs at a time."""
    failures: list[BaseException] = []

    def work(mine: range) -> None:
        try:
            for seed in mine:
                check(seed, world_size)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seeds[number::4],)) for number in range(4)] if rank == 0 else []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_equal_those_of_one_process(world_size: int) -> None:
    run_cluster(world_size, drive, world_size, range(100 * world_size, 100 * world_size + 40))


def test_programs_at_the_same_time_do_not_mix() -> None:
    run_cluster(3, drive_at_once, 3, range(1000, 1040))
