"""Cancellation and deadlines reach the callee, and whom it calls. Nodes of one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import Cancelled, Delivery, RpcTimeout
from farcall.rpc.timeouts import UNSET_TIMEOUT
from farcall.runtime.node import runtime_of

SEEN: dict[str, Any] = {}
RELEASED = threading.Event()


@pytest.fixture
def nodes() -> Iterator[list[farcall.Node]]:
    SEEN.clear()
    RELEASED.clear()
    with team([None] * 3, size=3, rpc_timeout=LONG_S) as started:
        yield started
    started.clear()


def until_cancelled(name: str) -> None:
    """Computes until nobody wants the result any more."""
    SEEN[name] = "began"
    call = farcall.current_call()
    call.on_cancel(lambda: SEEN.update({f"{name} told": True}))
    wait_until(lambda: call.cancelled, "the cancellation")
    SEEN[name] = "cancelled"
    call.check()


async def asleep(name: str) -> None:
    SEEN[name] = "began"
    try:
        await asyncio.sleep(LONG_S)
    except asyncio.CancelledError:
        SEEN[name] = "cancelled"
        raise


def nested(to: str, how: Callable[[str], Any], name: str) -> Any:
    """Waits for another worker."""
    try:
        return farcall.worker(to).call(how, name)
    except Cancelled as error:
        SEEN[f"{name} caller"] = error
        raise


def nested_async(to: str, how: Callable[[str], Any], name: str) -> Any:
    """Waits for another worker, in a way that cannot be seen."""
    future = farcall.worker(to).start(how, name)
    wait_until(future.done, "the nested call's end")
    return future.result()


async def nested_await(to: str, how: Callable[[str], Any], name: str) -> Any:
    return await farcall.worker(to).start(how, name)


def has_begun(name: str) -> Iterator[float]:
    """Timeouts until ``name`` has begun within one: on a busy machine a short one may be over before."""
    for timeout_s in (0.2, 2.0, LONG_S / 2):
        yield timeout_s
        if name in SEEN:
            return
    raise AssertionError(f"{name} never began")


def ended(name: str) -> bool:
    return SEEN.get(name) == "cancelled"


@pytest.mark.parametrize("function", [until_cancelled, asleep])
def test_what_runs_is_told(nodes: list[farcall.Node], function: Callable[[str], Any]) -> None:
    future = nodes[0]["w1"].start(function, "it")
    wait_until(lambda: SEEN.get("it") == "began")
    assert future.cancel()
    wait_until(lambda: ended("it"))
    if function is until_cancelled:
        wait_until(lambda: SEEN.get("it told"))
    wait_until(lambda: not runtime_of(nodes[1]).server.active)


@pytest.mark.parametrize("function", [until_cancelled, asleep])
@pytest.mark.parametrize("way", [nested, nested_async, nested_await])
def test_what_it_called_is_cancelled_with_it(
    nodes: list[farcall.Node], way: Callable[..., Any], function: Callable[[str], Any]
) -> None:
    future = nodes[0]["w1"].start(way, "w2", function, "it")
    wait_until(lambda: SEEN.get("it") == "began")
    assert future.cancel()
    wait_until(lambda: ended("it"))
    if way is nested:
        wait_until(lambda: isinstance(SEEN.get("it caller"), Cancelled))


def test_a_timeout_cancels_and_so_does_one_of_the_default(nodes: list[farcall.Node]) -> None:
    for timeout_s in has_begun("chosen"):
        with pytest.raises(RpcTimeout):
            nodes[0]["w1"].options(timeout=timeout_s).call(nested, "w2", until_cancelled, "chosen")
    wait_until(lambda: ended("chosen"))
    for timeout_s in has_begun("default"):
        runtime_of(nodes[0]).timeout_s = timeout_s
        with pytest.raises(RpcTimeout):
            nodes[0]["w1"].start(asleep, "default").result()
    wait_until(lambda: ended("default"))


def test_a_cancelled_task_cancels_its_call(nodes: list[farcall.Node]) -> None:
    async def program(timeout_s: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await nodes[0]["w1"].start(asleep, "it")

    for timeout_s in has_begun("it"):
        asyncio.run(program(timeout_s))
    wait_until(lambda: ended("it"))


def test_calls_to_oneself_are_cancelled_too(nodes: list[farcall.Node]) -> None:
    future = nodes[0]["w0"].start(nested, "w0", until_cancelled, "it")
    wait_until(lambda: SEEN.get("it") == "began")
    assert future.cancel()
    wait_until(lambda: ended("it"))


def test_the_death_of_a_caller_cancels(nodes: list[farcall.Node]) -> None:
    nodes[0]["w1"].start(nested, "w2", until_cancelled, "plain")
    nodes[0]["w1"].start(asleep, "async")
    wait_until(lambda: {"plain", "async"} <= SEEN.keys())
    nodes[0].shutdown(graceful=False)
    wait_until(lambda: ended("plain") and ended("async"))
    for node in nodes[1:]:
        node.shutdown(graceful=False)


def test_a_shielded_call_goes_on(nodes: list[farcall.Node]) -> None:
    future = nodes[0]["w1"].options(timeout=LONG_S).start(shielded, "w2")
    wait_until(lambda: SEEN.get("inner") == "began")
    assert future.cancel()
    wait_until(lambda: SEEN.get("outer cancelled"))
    RELEASED.set()
    wait_until(lambda: SEEN.get("inner") == ("done", None, {}))


def shielded(to: str) -> None:
    call = farcall.current_call()
    future = farcall.worker(to).options(timeout=None).start(waits)
    wait_until(lambda: call.cancelled)
    SEEN["outer cancelled"] = True
    future.result()


def waits() -> None:
    SEEN["inner"] = "began"
    assert RELEASED.wait(LONG_S)
    call = farcall.current_call()
    assert not call.cancelled
    SEEN["inner"] = ("done", call.time_left_s, call.metadata)


def inside() -> tuple[str, str, float | None, dict[str, str]]:
    call = farcall.current_call()
    assert call.caller is not None
    assert "inside() by 'w" in repr(call)
    return call.caller.name, call.function, call.time_left_s, dict(call.metadata)


def pass_on(to: str, timeout: float | None = UNSET_TIMEOUT, **metadata: str) -> Any:
    return farcall.worker(to).options(timeout=timeout, metadata=metadata).call(inside)


def test_deadlines_and_metadata_are_inherited(nodes: list[farcall.Node]) -> None:
    w1 = nodes[0]["w1"]
    assert w1.call(inside) == ("w0", "inside", None, {})
    assert w1.call(pass_on, "w2")[2:] == (None, {})
    job = w1.options(timeout=LONG_S / 2, metadata={"job": "7"})
    caller, function, left_s, metadata = job.call(pass_on, "w2", part="a")
    assert (caller, function, metadata) == ("w1", "inside", {"job": "7", "part": "a"})
    assert 0 < left_s < LONG_S / 2
    assert 0 < job.call(pass_on, "w2", timeout=LONG_S)[2] < LONG_S / 2
    assert 0 < job.call(pass_on, "w2", timeout=LONG_S / 4)[2] < LONG_S / 4
    assert job.call(pass_on, "w2", timeout=None)[2:] == (None, {"job": "7"})
    assert farcall.current_call().caller is None
    assert not farcall.current_call().cancelled
    farcall.current_call().check()
    with pytest.raises(TypeError, match="str to str"):
        w1.options(metadata={"job": 7})  # type: ignore[dict-item]


def test_no_call_is_made_for_a_caller_that_has_given_up(nodes: list[farcall.Node]) -> None:
    future = nodes[0]["w1"].start(calls_too_late, "w2")
    wait_until(lambda: SEEN.get("late") == "began")
    assert future.cancel()
    wait_until(lambda: isinstance(SEEN.get("late"), Cancelled))
    assert SEEN["late"].delivery is Delivery.NOT_SENT


def calls_too_late(to: str) -> None:
    SEEN["late"] = "began"
    call = farcall.current_call()
    wait_until(lambda: call.cancelled)
    try:
        farcall.worker(to).call(inside)
    except Cancelled as error:
        SEEN["late"] = error


def test_without_inheritance_what_has_begun_goes_on() -> None:
    """As in `torch.distributed.rpc`: `farcall.compat` starts nodes so."""
    SEEN.clear()
    RELEASED.clear()
    with team([None] * 2, inherit=False, rpc_timeout=LONG_S) as nodes:
        for timeout_s in has_begun("plod"):
            with pytest.raises(RpcTimeout):
                nodes[0].rpc_sync("w1", plod_through, ("w1",), timeout=timeout_s)
        RELEASED.set()
        wait_until(lambda: SEEN.get("plod") == "done")


def plod_through(to: str) -> None:
    SEEN["plod"] = "began"
    farcall.rpc_sync(to, plod)
    SEEN["plod"] = "done"


async def plod() -> None:
    while not RELEASED.is_set():
        await asyncio.sleep(0.01)


def deeper(depth: int) -> None:
    """A chain of calls of a worker to itself."""
    if depth == 0:
        until_cancelled("the innermost")
    else:
        farcall.worker("w1").call(deeper, depth - 1)


def test_a_long_chain_of_calls_to_oneself_is_cancelled_to_its_end(nodes: list[farcall.Node]) -> None:
    """One after the other: each inside the one before would take more of the stack than there is."""
    future = nodes[0]["w1"].start(deeper, 120)
    wait_until(lambda: SEEN.get("the innermost") == "began")
    assert future.cancel()
    wait_until(lambda: ended("the innermost"))
    wait_until(lambda: not runtime_of(nodes[1]).server.active)
    assert nodes[0]["w1"].call(len, "abc") == 3
