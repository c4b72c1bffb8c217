"""What is measured: a table with a line for each case.

A case makes an operation for a system of calls (``setup``), perhaps one for the floor (``floor``), and both
are timed in the same way (``run``). Cases of the same shape (team size and transport) share the teams of
processes.
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

from farcall.cli.bench.churn import amid, latency_amid_us
from farcall.cli.bench.contenders import CallSystem, Contender, Farcall, Transport
from farcall.cli.bench.floor import Floor
from farcall.cli.bench.functions import Layer, Service, compile_scripts, discard, echo, noop, scripted, weight_of
from farcall.cli.bench.measure import (
    Measure,
    Operation,
    bandwidth,
    count_once,
    latency_us,
    rate,
    throughput,
    typical_us,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    setup: Callable[[CallSystem], Operation]
    run: Measure
    floor: Callable[[Floor], Operation] | None = None
    size: int = 2
    transport: Transport = "local"
    only: str | None = None
    """The name of the one contender that can do this."""

    def operation(self, contender: Contender) -> Operation | None:
        """What ``contender`` has to do, or None where the case says nothing about it."""
        if isinstance(contender, CallSystem):
            return self.setup(contender)
        if isinstance(contender, Floor) and self.floor is not None:
            return self.floor(contender)
        return None


def call(function: Callable[..., Any], *arguments: Any) -> Callable[[CallSystem], Operation]:
    """``rpc_sync`` to the one peer."""
    return lambda system: partial(system.rpc_sync, system.peers[0], function, args=arguments)


def call_with_tensor(function: Callable[..., Any], size_bytes: int) -> Callable[[CallSystem], Operation]:
    """The same with a tensor, which is made in the member and only when it is needed."""
    return lambda system: call(function, torch.ones(size_bytes, dtype=torch.uint8))(system)


def issue(function: Callable[..., Any], *arguments: Any) -> Callable[[CallSystem], Operation]:
    """``rpc_async`` to the one peer."""
    return lambda system: partial(system.rpc_async, system.peers[0], function, args=arguments)


def issue_script(system: CallSystem) -> Operation:
    """``rpc_async`` of a TorchScript function."""
    system.rpc_sync(system.peers[0], compile_scripts)
    return partial(system.rpc_async, system.peers[0], scripted()[0], args=(torch.ones(1),))


def wait_in_scripts(count: int) -> Callable[[CallSystem], Operation]:
    """So many TorchScript functions at a time that take 50 ms each, and nobody's core."""

    def setup(system: CallSystem) -> Operation:
        system.rpc_sync(system.peers[0], compile_scripts)

        def operation() -> None:
            futures = [system.rpc_async(system.peers[0], scripted()[1], args=(torch.ones(1),)) for _ in range(count)]
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
    service = system.remote(system.peers[0], Service)
    return lambda: service.rpc_sync().noop()


def create_and_drop(count: int) -> Callable[[CallSystem], Operation]:
    """Make references and drop them at once, until their owner has forgotten all of them."""

    def setup(system: CallSystem) -> Operation:
        owner = system.peers[0]
        kept = system.rpc_sync(owner, system.owned)  # by whoever ran before

        def operation() -> None:
            for _ in range(count):
                system.remote(owner, noop)
            while system.rpc_sync(owner, system.owned) > kept:
                sleep(0.001)

        return operation

    return setup


def open_descriptors(system: CallSystem) -> Operation:
    """How many descriptors the caller has open, after it has called everyone."""
    for peer in system.peers:
        system.rpc_sync(peer, noop)
    return lambda: len(os.listdir("/proc/self/fd"))


LAYER_WIDTH = 64


def train_step(system: CallSystem) -> Operation:
    """Forward through one remote layer, backward, and a step of the optimizer."""
    layer = system.remote(system.peers[0], Layer, args=(LAYER_WIDTH,))
    weight = system.remote(system.peers[0], weight_of, args=(layer,))
    optimizer = system.optimizer(torch.optim.SGD, [weight], lr=1e-6)
    inputs = torch.ones(1, LAYER_WIDTH)

    def operation() -> None:
        with system.autograd.context() as context_id:
            loss = layer.rpc_sync().forward(inputs).sum()
            system.autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    return operation


def chain(length: int) -> Callable[[CallSystem], Operation]:
    """So many calls, each with the result of the one before, then backward through all of them."""

    def setup(system: CallSystem) -> Operation:
        layer = system.remote(system.peers[0], Layer, args=(LAYER_WIDTH,))
        inputs = torch.ones(1, LAYER_WIDTH, requires_grad=True)

        def operation() -> None:
            with system.autograd.context() as context_id:
                value = inputs
                for _ in range(length):
                    value = layer.rpc_sync().forward(value)
                system.autograd.backward(context_id, [value.sum()])

        return operation

    return setup


SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
CHAIN_LENGTHS = (10, 20, 40, 80)
MANY = 5_000
TEAM_SIZES = (2, 4, 8, 16)
# A pair has sent large tensors before, and what it keeps open for those has nothing to do with the number of
# peers.
COUNTED_TEAM_SIZES = (4, 8, 16)

CHURN: dict[str, str | None] = {
    "no-op, nobody dies or joins": None,
    "no-op, others die and join elsewhere": "elsewhere",
    "no-op, others die and join": "here",
}


def _cases() -> list[Case]:
    cases = [
        Case("no-op", "us", "lower", call(noop), latency_us, Floor.ping_pong),
        Case("no-op, 64 in flight", "calls/s", "higher", issue(noop), rate(64)),
        Case("torch.add, 64 in flight", "calls/s", "higher", issue(torch.add, torch.ones(1), 1), rate(64)),
        Case("script function, 64 in flight", "calls/s", "higher", issue_script, rate(64)),
        Case("8 script functions of 50 ms", "us", "lower", wait_in_scripts(8), typical_us),
        Case("no-op to oneself", "us", "lower", call_oneself(noop), latency_us),
        Case("echo tensor(1)", "us", "lower", call(echo, torch.ones(1)), latency_us, Floor.ping_pong),
    ]
    cases += [
        Case("remote, to_here", "us", "lower", create_and_fetch, latency_us),
        Case("method of a reference", "us", "lower", call_method, latency_us),
        Case("create and drop", "refs/s", "higher", create_and_drop(MANY), throughput(MANY)),
    ]
    for label, size_bytes in SIZES.items():
        send, back = (
            (lambda f, n=size_bytes: f.copy_in(n)),
            (lambda f, n=size_bytes: f.copy_there_and_back(n)),
        )
        measure = bandwidth(size_bytes)
        cases += [
            Case(f"send {label}", "GiB/s", "higher", call_with_tensor(discard, size_bytes), measure, send),
            Case(f"echo {label}", "GiB/s", "higher", call_with_tensor(echo, size_bytes), measure, back),
        ]
    cases.append(Case("train step", "us", "lower", train_step, typical_us))
    for length in CHAIN_LENGTHS:
        cases.append(Case(f"backward through {length} calls", "us", "lower", chain(length), typical_us))
    big = SIZES["256 MiB"]
    cases += [
        Case("send 256 MiB in a segment", "GiB/s", "higher", send_shared(big), bandwidth(big)),
        Case("no-op over TCP", "us", "lower", call(noop), latency_us, Floor.ping_pong, transport="tcp"),
        Case(
            "send 256 MiB over TCP",
            "GiB/s",
            "higher",
            call_with_tensor(discard, big),
            bandwidth(big),
            lambda floor: floor.stream(big),
            transport="tcp",
        ),
    ]
    for size in TEAM_SIZES:
        cases.append(Case(f"no-op, {size} nodes", "us", "lower", call_each_peer_in_turn, typical_us, size=size))
    for name, where in CHURN.items():
        measure = latency_amid_us
        cases.append(Case(name, "us", "lower", amid(where), measure, size=3, transport="dynamic", only=Farcall.name))
    for size in COUNTED_TEAM_SIZES:
        cases.append(Case(f"descriptors, {size} nodes", "open", "lower", open_descriptors, count_once, size=size))
    return cases


CASES: dict[str, Case] = {case.name: case for case in _cases()}
