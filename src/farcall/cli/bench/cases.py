"""The cases that are measured: a table with a line for each.

A case makes an operation for a system of calls (``setup``), perhaps one for the floor (``floor``), and both are timed
in the same way (``run``). Cases of one shape (team size and transport) share the teams of processes, but for those that
want fresh ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from random import Random
from time import sleep
from typing import Any, Literal

import torch

from farcall.cli.bench import functions
from farcall.cli.bench.contenders import CallSystem, Contender, Farcall, Floor, Route
from farcall.cli.bench.functions import discard, echo, noop
from farcall.cli.bench.measure import (
    Measure,
    Metered,
    Operation,
    Statistics,
    bandwidth,
    count_once,
    from_cold,
    latency_us,
    overhead_us,
    per_second,
    rate,
    typical_us,
    work,
)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation, and how it is measured."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    setup: Setup
    run: Measure
    floor: Callable[[Floor], Operation] | None = None
    size: int = 2
    route: Route = "local"
    only: str | None = None
    """The name of the one contender that can do this."""
    metered: bool = False
    """Is the processor time of an operation counted, too, at both ends?"""
    fresh: bool = False
    """Does each round have processes of its own?"""

    def measure(self, contender: Contender, budget_s: float) -> Statistics:
        """The statistics of ``contender``, which takes part."""
        if isinstance(contender, CallSystem):
            operation = self.setup(contender)
            if self.metered:
                return Metered(operation, contender.used_s).measure(self.run, budget_s)
            return self.run(operation, budget_s)
        assert isinstance(contender, Floor)
        assert self.floor is not None, "the driver asks only contenders that take part"
        return self.run(self.floor(contender), budget_s)


Setup = Callable[[CallSystem], Operation]


def call(function: Callable[..., Any], *arguments: Any) -> Setup:
    """``rpc_sync`` to the one peer."""
    return lambda system: partial(system.rpc_sync, system.peers[0], function, args=arguments)


def call_with_tensor(function: Callable[..., Any], size_bytes: int) -> Setup:
    """``rpc_sync`` with a tensor, which is made in the member and only when it is needed."""
    return lambda system: call(function, torch.ones(size_bytes, dtype=torch.uint8))(system)


def send_from_cold(size_bytes: int) -> Setup:
    """As `call_with_tensor`, over a connection that is there already."""

    def setup(system: CallSystem) -> Operation:
        system.rpc_sync(system.peers[0], noop)
        return call_with_tensor(discard, size_bytes)(system)

    return setup


def issue(function: Callable[..., Any], *arguments: Any) -> Setup:
    """``rpc_async`` to the one peer."""
    return lambda system: partial(system.rpc_async, system.peers[0], function, args=arguments)


def issue_in_turn(calls: Callable[[], Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]]) -> Setup:
    """``rpc_async`` to the one peer, of one call after the other; they are made in the member."""

    def setup(system: CallSystem) -> Operation:
        turns = cycle(calls())

        def operation() -> Any:
            function, arguments = next(turns)
            return system.rpc_async(system.peers[0], function, args=arguments)

        return operation

    return setup


def inputs(kibibytes: Sequence[int]) -> list[torch.Tensor]:
    """Inputs for `functions.layer`, of these sizes, in an order that looks random."""
    tensors = [torch.randn(size * 1024 // (4 * LAYER_WIDTH), LAYER_WIDTH) for size in kibibytes for _ in range(4)]
    Random(0).shuffle(tensors)
    return tensors


def operators() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """``torch.add`` of two tensors, 4 to 256 KiB each."""
    return [(torch.add, (x, x.clone())) for x in inputs(WORK_KIB)]


def layers() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A layer, with inputs of 4 to 256 KiB."""
    return [(functions.layer, (x,)) for x in inputs(WORK_KIB)]


def mixture() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Operators, layers and Python that works for 0 to 200 us, alternating."""
    lengths = Random(1).choices(range(0, 200, 10), k=len(inputs(WORK_KIB)))
    waits: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(work, (length,)) for length in lengths]
    return [call for turn in zip(operators(), layers(), waits, strict=True) for call in turn]


def call_work(lengths_us: Sequence[int]) -> Setup:
    """``rpc_sync`` of a function that works, for one length after the other."""

    def setup(system: CallSystem) -> Operation:
        lengths = cycle(lengths_us)
        return lambda: system.rpc_sync(system.peers[0], work, args=(next(lengths),))

    return setup


@dataclass(frozen=True)
class CallersHere:
    """Every peer calls ``function`` here, with 8 calls in flight each."""

    system: CallSystem
    function: Callable[..., Any]
    width: int
    operands: int

    def __call__(self, budget_s: float = 0.1) -> list[Statistics]:
        arguments = tuple(torch.randn(self.width, self.width) for _ in range(self.operands))
        order = (self.system.own_name, self.function, arguments, 8, budget_s)
        futures = [self.system.rpc_async(peer, functions.call_back, args=order) for peer in self.system.peers]
        return [future.wait() for future in futures]


def all_callers(operation: Operation, budget_s: float) -> Statistics:
    """The sum of all callers' rates, and the worst of their p99s."""
    assert isinstance(operation, CallersHere)
    found = operation(budget_s)
    return {"rate": sum(each["rate"] for each in found), "p99": max(each["p99"] for each in found)}


def issue_script(system: CallSystem) -> Operation:
    """``rpc_async`` of a TorchScript function."""
    system.rpc_sync(system.peers[0], functions.compile_scripts)
    return partial(system.rpc_async, system.peers[0], functions.scripted()[0], args=(torch.ones(1),))


def wait_in_scripts(count: int) -> Setup:
    """``count`` TorchScript functions at a time that take 50 ms each, and no processor time."""

    def setup(system: CallSystem) -> Operation:
        system.rpc_sync(system.peers[0], functions.compile_scripts)

        def operation() -> None:
            waiting = functions.scripted()[1]
            futures = [system.rpc_async(system.peers[0], waiting, args=(torch.ones(1),)) for _ in range(count)]
            for future in futures:
                future.wait()

        return operation

    return setup


def call_oneself(function: Callable[..., Any], *arguments: Any) -> Setup:
    """``rpc_sync`` to the caller itself."""
    return lambda system: partial(system.rpc_sync, system.own_name, function, args=arguments)


def call_by_value(system: CallSystem) -> Operation:
    """``rpc_sync`` of a function that no other worker can import, and that calls another such."""

    def helper() -> None:
        noop()

    def function() -> None:
        helper()

    return call(function)(system)


def call_each_peer_in_turn(system: CallSystem) -> Operation:
    """``rpc_sync`` to all peers, one after another."""
    peers = cycle(system.peers)
    return lambda: system.rpc_sync(next(peers), noop)


def send_shared(size_bytes: int) -> Setup:
    """Send a tensor that lives in a shared segment already."""
    return lambda system: call(discard, system.shared_empty(size_bytes))(system)


def create_and_fetch(system: CallSystem) -> Operation:
    """``remote``, then ``to_here``."""
    return lambda: system.remote(system.peers[0], noop).to_here()


def call_method(system: CallSystem) -> Operation:
    """A method of an object that a reference refers to."""
    service = system.remote(system.peers[0], functions.Service)
    return lambda: service.rpc_sync().noop()


def create_and_drop(count: int) -> Setup:
    """Make references and drop them at once, until their owner has forgotten all of them."""

    def setup(system: CallSystem) -> Operation:
        owner = system.peers[0]
        kept = system.rpc_sync(owner, system.owned)  # of the cases before

        def operation() -> None:
            for _ in range(count):
                system.remote(owner, noop)
            while system.rpc_sync(owner, system.owned) > kept:
                sleep(0.001)

        return operation

    return setup


def open_descriptors(system: CallSystem) -> Operation:
    """The number of the caller's open descriptors, after it has called everyone."""
    for peer in system.peers:
        system.rpc_sync(peer, noop)
    return lambda: len(os.listdir("/proc/self/fd"))


def train_step(system: CallSystem) -> Operation:
    """Forward through one remote layer, backward, and a step of the optimizer."""
    layer = system.remote(system.peers[0], functions.Layer, args=(LAYER_WIDTH,))
    weight = system.remote(system.peers[0], functions.weight_of, args=(layer,))
    optimizer = system.optimizer(torch.optim.SGD, [weight], lr=1e-6)
    inputs = torch.ones(1, LAYER_WIDTH)

    def operation() -> None:
        with system.autograd.context() as context_id:
            loss = layer.rpc_sync().forward(inputs).sum()
            system.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    return operation


def chain(length: int) -> Setup:
    """``length`` calls, each with the result of the one before, then backward through all of them."""

    def setup(system: CallSystem) -> Operation:
        layer = system.remote(system.peers[0], functions.Layer, args=(LAYER_WIDTH,))
        inputs = torch.ones(1, LAYER_WIDTH, requires_grad=True)

        def operation() -> None:
            with system.autograd.context() as context_id:
                value = inputs
                for _ in range(length):
                    value = layer.rpc_sync().forward(value)
                system.autograd.backward(context_id, [value.sum()])

        return operation

    return setup


@dataclass(frozen=True)
class Amid:
    """A call to measure, and how to begin and to end the churn around it."""

    system: CallSystem
    where: str | None

    def __call__(self) -> Any:
        return self.system.rpc_sync(self.system.peers[0], noop)

    def begin(self) -> None:
        if self.where is not None:
            init_method = self.system.init_method if self.where == "here" else ""
            self.system.rpc_sync(self.system.peers[1], functions.begin_churn, args=(init_method,))

    def end(self) -> None:
        if self.where is not None:
            self.system.rpc_sync(self.system.peers[1], functions.end_churn)


def latency_amid_us(operation: Operation, budget_s: float) -> Statistics:
    """p50 and p99 of a call amid churn; longer than other cases, so that a few members come and go meanwhile."""
    assert isinstance(operation, Amid)
    operation.begin()
    try:
        return latency_us(operation, 10 * budget_s)
    finally:
        operation.end()


LAYER_WIDTH = 64
WORK_KIB = (4, 16, 64, 256)
WORK_US = (0, 50, 100, 200, 300, 500, 1000)
VARYING_US = tuple(Random(0).choices(range(0, 1001, 10), k=997))
CALLERS = 8
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
COLD_SIZES = {"16 MiB": 16 << 20, "256 MiB": 256 << 20, "1 GiB": 1 << 30}
CHAIN_LENGTHS = (10, 20, 40, 80)
MANY = 5_000
TEAM_SIZES = (2, 4, 8, 16)
# Without a pair: it has sent large tensors before, and descriptors kept for those have nothing to do with the number of
# peers.
COUNTED_TEAM_SIZES = (4, 8, 16)

CHURN: dict[str, str | None] = {
    "no-op, nobody dies or joins": None,
    "no-op, others die and join elsewhere": "elsewhere",
    "no-op, others die and join": "here",
}
"""Where members die and join meanwhile: in the measured group, in groups of their own, or nowhere."""


def _cases() -> list[Case]:
    cases = [
        Case("no-op", "us", "lower", call(noop), latency_us, Floor.ping_pong),
        Case("no-op, 64 in flight", "calls/s", "higher", issue(noop), rate(64)),
        Case("torch.add, 64 in flight", "calls/s", "higher", issue(torch.add, torch.ones(1), 1), rate(64)),
        Case("script function, 64 in flight", "calls/s", "higher", issue_script, rate(64)),
        Case("8 script functions of 50 ms", "us", "lower", wait_in_scripts(8), typical_us),
        Case("function of the script", "us", "lower", call_by_value, latency_us, only=Farcall.name),
        Case("no-op to oneself", "us", "lower", call_oneself(noop), latency_us),
        Case("echo tensor(1)", "us", "lower", call(echo, torch.ones(1)), latency_us, Floor.ping_pong),
        Case("remote, to_here", "us", "lower", create_and_fetch, latency_us),
        Case("method of a reference", "us", "lower", call_method, latency_us),
        Case("create and drop", "refs/s", "higher", create_and_drop(MANY), per_second(MANY, "rate")),
    ]
    for label, size_bytes in SIZES.items():
        for verb, function, copy in (("send", discard, Floor.copy_in), ("echo", echo, Floor.copy_there_and_back)):
            setup, floor = call_with_tensor(function, size_bytes), partial(copy, size_bytes=size_bytes)
            cases.append(Case(f"{verb} {label}", "GiB/s", "higher", setup, bandwidth(size_bytes), floor))
    cases.append(Case("train step", "us", "lower", train_step, typical_us, metered=True))
    for length in CHAIN_LENGTHS:
        cases.append(Case(f"backward through {length} calls", "us", "lower", chain(length), typical_us, metered=True))
    for name, calls in (("operators", operators), ("layers", layers), ("functions that alternate", mixture)):
        setup = issue_in_turn(calls)
        cases.append(Case(f"{name}, 4 to 256 KiB", "calls/s", "higher", setup, rate(32), metered=True))
    setup = issue_in_turn(lambda: [(torch.add, (x, x.clone())) for x in inputs([16])])
    cases.append(Case("torch.add of 16 KiB, 64 in flight", "calls/s", "higher", setup, rate(64), metered=True))
    for name, lengths_us in ((f"work of {us} us", (us,)) for us in WORK_US):
        floor = partial(Floor.work, lengths_us=lengths_us)
        cases.append(Case(name, "us beyond it", "lower", call_work(lengths_us), overhead_us, floor, metered=True))
    floor = partial(Floor.work, lengths_us=VARYING_US)
    name = "work of 0 to 1,000 us, varying"
    cases.append(Case(name, "us beyond it", "lower", call_work(VARYING_US), overhead_us, floor, metered=True))
    for name, computes, width, operands in (
        ("torch.add 64x64", torch.add, 64, 2),
        ("layer 64x64", functions.layer, 64, 1),
        ("layer 512x512", functions.layer, 512, 1),
    ):
        setup = partial(CallersHere, function=computes, width=width, operands=operands)
        name, size = f"{CALLERS} callers, {name}", CALLERS + 1
        cases.append(Case(name, "calls/s", "higher", setup, all_callers, size=size))
    big = SIZES["256 MiB"]
    cases += [
        Case("send 256 MiB in a segment", "GiB/s", "higher", send_shared(big), bandwidth(big)),
        Case("no-op over TCP", "us", "lower", call(noop), latency_us, Floor.ping_pong, route="tcp"),
    ]
    setup, floor = call_with_tensor(discard, big), partial(Floor.stream, size_bytes=big)
    cases.append(Case("send 256 MiB over TCP", "GiB/s", "higher", setup, bandwidth(big), floor, route="tcp"))
    cases += [
        Case("no-op over TCP, encrypted", "us", "lower", call(noop), latency_us, route="encrypted"),
        Case("send 256 MiB over TCP, encrypted", "GiB/s", "higher", setup, bandwidth(big), route="encrypted"),
    ]
    for label, size_bytes in COLD_SIZES.items():
        setup, floor = send_from_cold(size_bytes), partial(Floor.copy_into_fresh_memory, size_bytes=size_bytes)
        cases.append(Case(f"send {label} from cold", "us", "lower", setup, from_cold, floor, fresh=True))
    for size in TEAM_SIZES:
        cases.append(Case(f"no-op, {size} nodes", "us", "lower", call_each_peer_in_turn, typical_us, size=size))
    for name, where in CHURN.items():
        setup = partial(Amid, where=where)
        cases.append(Case(name, "us", "lower", setup, latency_amid_us, size=3, route="dynamic", only=Farcall.name))
    for size in COUNTED_TEAM_SIZES:
        cases.append(Case(f"descriptors, {size} nodes", "open", "lower", open_descriptors, count_once, size=size))
    return cases


CASES: dict[str, Case] = {case.name: case for case in _cases()}
