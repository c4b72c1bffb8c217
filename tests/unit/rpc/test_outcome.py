"""Gates of event loops: many that are opened at once take one wake of their loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.rpc.outcome import AT_ONCE, DerivedFuture, LoopGate
from farcall.runtime.io.sigint import Gate

PATIENCE_S = 60.0


def elsewhere(act: Callable[[], object]) -> None:
    """Do it on another thread, while the loop of this one does nothing."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_gates_that_are_opened_at_once_take_one_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    async def program() -> list[Any]:
        loop = asyncio.get_running_loop()
        wakes: list[Any] = []
        wake = loop.call_soon_threadsafe

        def counted(*args: Any) -> Any:
            wakes.append(args)
            return wake(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        gates = [LoopGate(loop) for _ in range(3 * AT_ONCE)]
        elsewhere(lambda: [gate.open() for gate in gates])
        await asyncio.wait_for(asyncio.gather(*[gate.passed for gate in gates]), PATIENCE_S)
        found = list(wakes)
        late = LoopGate(loop)  # those that come later wake the loop anew
        elsewhere(late.open)
        await asyncio.wait_for(late.passed, PATIENCE_S)
        return found

    assert len(asyncio.run(program())) == 1


def test_no_gate_is_forgotten_whoever_opens_it_when() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()

        def openers(gates: list[LoopGate]) -> list[threading.Thread]:
            return [threading.Thread(target=lambda some=gates[k::4]: [gate.open() for gate in some]) for k in range(4)]

        for _ in range(20):
            gates = [LoopGate(loop) for _ in range(200)]
            for thread in openers(gates):
                thread.start()
            await asyncio.wait_for(asyncio.gather(*[gate.passed for gate in gates]), PATIENCE_S)

    asyncio.run(program())


def test_a_task_that_no_longer_waits_is_left_alone() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        given_up, other = LoopGate(loop), LoopGate(loop)
        given_up.passed.cancel()
        elsewhere(lambda: (given_up.open(), other.open()))
        await asyncio.wait_for(other.passed, PATIENCE_S)

    asyncio.run(program())


def test_each_loop_of_a_thread_has_its_own_gates() -> None:
    gates: list[LoopGate] = []

    async def wait_for_nothing() -> None:
        gates.append(LoopGate(asyncio.get_running_loop()))

    async def wait() -> None:
        gate = LoopGate(asyncio.get_running_loop())
        elsewhere(gate.open)
        await asyncio.wait_for(gate.passed, PATIENCE_S)

    asyncio.run(wait_for_nothing())
    asyncio.run(wait())
    gates[0].open()  # its loop is closed: nobody waits
    gates[0].open()
    asyncio.run(wait())


def test_waits_that_were_in_vain_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    future: DerivedFuture[int] = DerivedFuture()
    added: list[object] = []
    monkeypatch.setattr(torch.futures.Future, "add_done_callback", lambda _, callback: added.append(callback))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.wait(1e-6)
    assert len(added) == 1
    assert not future._gates


def test_a_very_long_wait_has_no_limit() -> None:
    """On another thread than the main one, Python's own lock refused so many seconds."""
    future: DerivedFuture[int] = DerivedFuture()
    found: list[int] = []
    threads = [threading.Thread(target=lambda s=s: found.append(future.wait(s))) for s in (1e10, float("inf"))]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(future._gates) == 2)
    future.set_result(7)
    for thread in threads:
        thread.join(LONG_S)
    assert found == [7, 7]


def test_every_waiter_is_woken_also_after_one_waited_in_vain() -> None:
    future: DerivedFuture[int] = DerivedFuture()
    with pytest.raises(TimeoutError):
        future.wait(1e-6)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(future.wait(LONG_S))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(future._gates) == 3)
    future.set_result(7)
    for thread in threads:
        thread.join(LONG_S)
    assert found == [7, 7, 7]
    late = Gate()
    future.when_done(late)
    assert late.wait(LONG_S)
