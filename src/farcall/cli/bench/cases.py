"""The cases that are measured: a table with a line for each.

A case makes an operation for a system of calls (``setup``), perhaps one for the floor (``floor``), and both are timed
in the same way (``run``). Cases of one shape (team size and transport) share the teams of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import sleep
from typing import Any, Literal

import torch

from farcall.cli.bench import functions
from farcall.cli.bench.contenders import CallSystem, Contender, Farcall, Floor, Route
from farcall.cli.bench.functions import discard, echo, noop
from farcall.cli.bench.measure import (
    Measure,
    Operation,
    Statistics,
    bandwidth,
    count_once,
    latency_us,
    per_second,
    rate,
    typical_us,
)


@dataclass(frozen=True, slots=True)
class Case:
    """An operation, and how it is measured."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    setup: Callable[[CallSystem], Operation]
    run: Measure
    floor: Callable[[Floor], Operation] | None = None
    size: int = 2
    route: Route = "local"
    only: str | None = None
    """The name of the one contender that can do this."""

    def operation(self, contender: Contender) -> Operation | None:
        """The operation for ``contender``, or None where it takes no part."""
        if isinstance(contender, CallSystem):
            return self.setup(contender)
        if isinstance(contender, Floor) and self.floor is not None:
            return self.floor(contender)
        return None


def call(function: Callable[..., Any], *arguments: Any) -> Callable[[CallSystem], Operation]:
    """``rpc_sync`` to the one peer."""
    return lambda system: partial(system.rpc_sync, system.peers[0], function, args=arguments)


def call_with_tensor(function: Callable[..., Any], size_bytes: int) -> Callable[[CallSystem], Operation]:
    """``rpc_sync`` with a tensor, which is made in the member and only when it is needed."""
    return lambda system: call(function, torch.ones(size_bytes, dtype=torch.uint8))(system)


def issue(function: Callable[..., Any], *arguments: Any) -> Callable[[CallSystem], Operation]:
    """``rpc_async`` to the one peer."""
    return lambda system: partial(system.rpc_async, system.peers[0], function, args=arguments)


def issue_script(system: CallSystem) -> Operation:
    """``rpc_async`` of a TorchScript function."""
    system.rpc_sync(system.peers[0], functions.compile_scripts)
    return partial(system.rpc_async, system.peers[0], functions.scripted()[0], args=(torch.ones(1),))


def wait_in_scripts(count: int) -> Callable[[CallSystem], Operation]:
    """``count`` TorchScript functions at a time that take 50 ms each, and nobody's core."""

    def setup(system: CallSystem) -> Operation:
        system.rpc_sync(system.peers[0], functions.compile_scripts)

        def operation() -> None:
            waiting = functions.scripted()[1]
            futures = [system.rpc_async(system.peers[0], waiting, args=(torch.ones(1),)) for _ in range(count)]
            for future in futures:
                future.wait()

        return operation

    return setup


def call_oneself(function: Callable[..., Any], *arguments: Any) -> Callable[[CallSystem], Operation]:
    """``rpc_sync`` to the caller itself."""
    return lambda system: partial(system.rpc_sync, system.own_name, function, args=arguments)


def call_each_peer_in_turn(system: CallSystem) -> Operation:
    """``rpc_sync`` to all peers, one after another."""
    peers = cycle(system.peers)
    return lambda: system.rpc_sync(next(peers), noop)


def send_shared(size_bytes: int) -> Callable[[CallSystem], Operation]:
    """Send a tensor that lives in a shared segment already."""
    return lambda system: call(discard, system.shared_empty(size_bytes))(system)


def create_and_fetch(system: CallSystem) -> Operation:
    """``remote``, then ``to_here``."""
    return lambda: system.remote(system.peers[0], noop).to_here()


def call_method(system: CallSystem) -> Operation:
    """A method of an object that a reference refers to."""
    service = system.remote(system.peers[0], functions.Service)
    return lambda: service.rpc_sync().noop()


def create_and_drop(count: int) -> Callable[[CallSystem], Operation]:
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


LAYER_WIDTH = 64


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


def chain(length: int) -> Callable[[CallSystem], Operation]:
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


SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
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
    cases.append(Case("train step", "us", "lower", train_step, typical_us))
    for length in CHAIN_LENGTHS:
        cases.append(Case(f"backward through {length} calls", "us", "lower", chain(length), typical_us))
    big = SIZES["256 MiB"]
    cases += [
        Case("send 256 MiB in a segment", "GiB/s", "higher", send_shared(big), bandwidth(big)),
        Case("no-op over TCP", "us", "lower", call(noop), latency_us, Floor.ping_pong, route="tcp"),
    ]
    setup, floor = call_with_tensor(discard, big), partial(Floor.stream, size_bytes=big)
    cases.append(Case("send 256 MiB over TCP", "GiB/s", "higher", setup, bandwidth(big), floor, route="tcp"))
    for size in TEAM_SIZES:
        cases.append(Case(f"no-op, {size} nodes", "us", "lower", call_each_peer_in_turn, typical_us, size=size))
    for name, where in CHURN.items():
        setup = partial(Amid, where=where)
        cases.append(Case(name, "us", "lower", setup, latency_amid_us, size=3, route="dynamic", only=Farcall.name))
    for size in COUNTED_TEAM_SIZES:
        cases.append(Case(f"descriptors, {size} nodes", "open", "lower", open_descriptors, count_once, size=size))
    return cases


CASES: dict[str, Case] = {case.name: case for case in _cases()}
