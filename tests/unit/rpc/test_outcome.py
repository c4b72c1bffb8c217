"""Gates of event loops: many that are opened at once take one wake of their loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farcall.rpc.outcome import AT_ONCE, LoopGate

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
