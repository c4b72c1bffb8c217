"""Calls through handles, and futures as `concurrent.futures` and `asyncio` have them. Nodes of one process."""

from __future__ import annotations

import asyncio
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
from tests.kit.team import team
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import Gate, add, fail, whoami

import farcall
from farcall.errors import Cancelled, Delivery, NotPicklable, RpcTimeout
from farcall.rpc.future import Future


class Model:
    def __init__(self, width: int) -> None:
        self.width = width

    def forward(self, x: int, plus: int = 0) -> int:
        return self.width * x + plus

    async def tell(self, word: str) -> int:
        await asyncio.sleep(0)
        return len(word)

    def call(self) -> str:
        return "a method of that name"


async def doubled(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


def mistaken() -> int:
    return add(1, 2, timeout=3.0)  # type: ignore[call-arg]


@pytest.fixture
def nodes() -> Iterator[list[farcall.Node]]:
    with team([None] * 3, size=3, rpc_timeout=LONG_S) as started:
        yield started
    started.clear()  # pytest holds what a fixture gave, and the first node holds the store


@pytest.fixture
def ps(nodes: list[farcall.Node]) -> farcall.Worker:
    return nodes[0]["w1"]


def test_a_handle_is_a_value(nodes: list[farcall.Node]) -> None:
    assert nodes[0]["w1"] == nodes[0][1] == nodes[0][nodes[0].get_worker_info("w1")] == farcall.worker("w1")
    assert nodes[0]["w1"] != nodes[0]["w2"]
    slow = farcall.worker("w1").options(timeout=2.0)
    assert slow != farcall.worker("w1")
    assert {slow, farcall.worker("w1").options(timeout=2.0)} == {slow}
    assert pickle.loads(pickle.dumps(slow)) == slow
    assert repr(slow) == "farcall.worker('w1', timeout=2.0)"
    with pytest.raises(ValueError, match="more than 0 seconds"):
        farcall.worker("w1").options(timeout=-2)
    with pytest.raises(TypeError, match="named by a str"):
        farcall.worker(1.5)  # type: ignore[arg-type]


def test_a_handle_calls_starts_and_creates(ps: farcall.Worker) -> None:
    assert ps.call(add, 1, right=2) == 3
    assert ps.start(add, 1, right=2).result() == 3
    assert ps.call(doubled, 4) == 8
    model = ps.create(Model, 3)
    assert model.owner_name() == "w1"
    assert model.call.forward(2, plus=1) == 7
    assert model.start.forward(2).result() == 6
    assert model.start(Model.forward, 2, plus=2).result() == 8
    assert model.call.tell("four") == 4
    assert model.call.call() == "a method of that name"
    with pytest.raises(ValueError, match="as you wish"):
        ps.call(fail)
    with pytest.raises(ValueError, match="as you wish"):
        ps.start(fail).result()


def test_a_handle_travels_and_calls_from_where_it_is(ps: farcall.Worker) -> None:
    assert ps.call(call_through, farcall.worker("w2").options(timeout=LONG_S)) == "w2"


def call_through(handle: farcall.Worker) -> str:
    return handle.call(whoami)


def test_a_future_among_the_arguments_is_named(ps: farcall.Worker) -> None:
    pending = ps.start(add, 1, right=2)
    for value, place in ((pending, r"args\[0\]"), ({"sum": [pending]}, r"args\[0\]\['sum'\]\[0\]")):
        with pytest.raises(NotPicklable, match=rf"^cannot send {place}, a [\w.]*Future: .*; send its result"):
            ps.call(whoami, value)


def test_a_call_that_is_no_function_is_told_how_to_write_it(ps: farcall.Worker) -> None:
    with pytest.raises(TypeError, match=r"function should be callable, not int: .*call\(f, x\), not call\(f\(x\)\)"):
        ps.call(add(1, 2))  # type: ignore[call-overload]
    model = ps.create(Model, 3)
    with pytest.raises(TypeError, match=r"function should be callable, not RRef: .*reference\.call\(x\)"):
        ps.call(model, 1)  # type: ignore[call-overload]


def test_an_option_among_the_arguments_is_told_where_it_belongs(ps: farcall.Worker) -> None:
    model = ps.create(Model, 3)
    wrong: list[Any] = [
        lambda: ps.call(add, 1, right=2, timeout=3.0),  # type: ignore[call-arg]
        lambda: ps.start(doubled, 1, timeout=3.0).result(),  # type: ignore[call-arg]
        lambda: model.call.forward(1, timeout=3.0),
        lambda: ps.create(Model, 3, timeout=3.0).to_here(),  # type: ignore[call-arg]
    ]
    for call in wrong:
        with pytest.raises(TypeError, match="unexpected keyword argument 'timeout'") as caught:
            call()
        assert any("options(timeout=...)" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="unexpected keyword argument 'color'") as caught:
        ps.call(add, 1, right=2, color=3)  # type: ignore[call-arg]
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(TypeError, match="unexpected keyword argument 'timeout'") as caught:
        ps.call(mistaken)  # inside the function, which is not about this call's options
    assert not hasattr(caught.value, "__notes__")


def test_options_bound_a_call(ps: farcall.Worker) -> None:
    try:
        with pytest.raises(RpcTimeout):
            ps.options(timeout=0.05).call(Gate.wait, "bounded")
    finally:
        Gate.open("bounded")


def test_a_wait_has_a_bound_and_the_call_goes_on(ps: farcall.Worker) -> None:
    future = ps.start(Gate.wait, "patience")
    with pytest.raises(TimeoutError, match=r"w1 has not answered Gate.wait\(\) within 0.01 s; the call continues"):
        future.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        future.wait(0.001)
    assert not future.done()
    Gate.open("patience")
    assert future.result(timeout=LONG_S) == "patience"
    assert future.exception() is None
    assert isinstance(ps.start(fail).exception(), ValueError)


def test_a_cancelled_call_ends_at_once(ps: farcall.Worker) -> None:
    future = ps.start(Gate.wait, "given up")
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    assert not future.cancel()
    Gate.open("given up")
    with pytest.raises(Cancelled, match=r"Gate.wait\(\) on w1 was cancelled") as caught:
        future.result()
    assert caught.value.delivery is Delivery.UNKNOWN
    done = ps.start(add, 1, 2)
    assert done.result() == 3
    assert not done.cancel()
    assert not done.cancelled()


def test_a_call_that_waits_to_be_made_again_can_be_cancelled(nodes: list[farcall.Node]) -> None:
    nodes[2].shutdown(graceful=False)
    patient = farcall.Retry(9, backoff_s=LONG_S, longest_backoff_s=LONG_S, jitter=0.0)
    future = nodes[0]["w2"].options(retry=patient, timeout=None).start(add, 1, 2)
    wait_until(lambda: future._paused)
    assert future.cancel()
    assert future.cancelled()
    assert not future.cancel()
    for node in nodes[:2]:
        node.shutdown(graceful=False)


def test_gather_gives_results_in_order_and_the_first_error_at_once(ps: farcall.Worker) -> None:
    assert farcall.gather(ps.start(add, 1, 2), ps.start(doubled, 2)).result() == (3, 4)
    assert farcall.gather().result() == ()
    slow = ps.start(Gate.wait, "behind an error")
    began = monotonic()
    with pytest.raises(ValueError, match="as you wish"):
        farcall.gather(slow, ps.start(fail)).result()
    assert monotonic() - began < AT_ONCE_S
    assert not slow.done()
    Gate.open("behind an error")
    assert slow.result() == "behind an error"
    several = farcall.gather(*[ps.start(Gate.wait, f"gathered {index}") for index in range(3)])
    assert several.cancel()
    with pytest.raises(Cancelled):
        several.result()
    for index in range(3):
        Gate.open(f"gathered {index}")


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def times(self, x: int) -> int:
        return self.factor * x

    def __call__(self, x: Any) -> Any:
        return x


def test_a_call_through_a_reference_takes_a_method_as_a_start_does_or_calls_the_value(ps: farcall.Worker) -> None:
    scale: Any = ps.create(Scale, 3)
    assert scale.call(Scale.times, 2) == scale.start(Scale.times, 2).result() == scale.call.times(2) == 6
    assert scale.call(x=4) == scale.call(4) == scale.call.__call__(4) == scale.rpc_sync().__call__(4) == 4
    assert scale.call(add) is add  # a function, and no method: an argument


def numbers() -> Iterator[int]:
    yield 1


def test_a_newcomers_mistakes_are_told_with_the_right_way(ps: farcall.Worker) -> None:
    wrong: Any = farcall
    future = ps.start(add, 1, 2)
    with pytest.raises(TypeError, match=r"not list: write gather\(\*futures\)"):
        wrong.gather([future])
    with pytest.raises(TypeError, match="as_completed takes futures of farcall, not int"):
        wrong.as_completed([3])
    with pytest.raises(TypeError, match=r"not one str: workers=\[...\]"):
        wrong.map(add, [1], workers="w1")
    scale: Any = ps.create(Scale, 3)
    told = r"no attribute 'factor'; a method .* is called by rref.call.factor\(...\), an attribute read by rref.to_here"
    with pytest.raises(AttributeError, match=told):
        assert scale.factor
    told = r"'factor' of a value of type Scale is no method: read it by rref.to_here\(\).factor, or in a function"
    with pytest.raises(TypeError, match=told):
        scale.call.factor()
    with pytest.raises(NotPicklable, match=r"read as a stream: farcall.worker\(name\).stream"):
        ps.call(numbers)
    with pytest.raises(NotPicklable, match=r"travel as a stream: farcall.outgoing"):
        ps.call(sum, numbers())
    assert future.result() == 3


def test_a_future_that_becomes_done_while_it_is_gathered_counts_once(
    ps: farcall.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is held between "done" and the wake, where it may lose its processor."""
    settle, held, go = Future.settle, threading.Event(), threading.Event()

    def late(future: Future[int], value: int) -> None:
        settle(future, value)
        if not held.is_set():
            held.set()
            go.wait(LONG_S)

    never = ps.start(Gate.wait, "counted")
    for combine in (farcall.gather, farcall.as_completed):
        held.clear()
        go.clear()
        monkeypatch.setattr(Future, "settle", staticmethod(late))
        quick = ps.start(add, 1, 2)
        assert held.wait(LONG_S)
        found = combine(quick, never) if combine is farcall.gather else combine([quick, never])  # type: ignore[operator, arg-type]
        go.set()
        wait_until(lambda quick=quick: not quick._waiters)  # type: ignore[misc]
        monkeypatch.undo()
    assert next(found) is quick  # type: ignore[call-overload]
    Gate.open("counted")
    assert next(found) is never  # type: ignore[call-overload]


def test_as_completed_gives_the_quick_ones_first(ps: farcall.Worker) -> None:
    slow = ps.start(Gate.wait, "last")
    quick = ps.start(add, 1, 2)
    found = farcall.as_completed([slow, quick])
    assert next(found) is quick
    Gate.open("last")
    assert [future.result() for future in found] == ["last"]
    never = ps.start(Gate.wait, "too late")
    with pytest.raises(TimeoutError, match=r"1 futures are not done after 0.01 s"):
        next(farcall.as_completed([never], timeout=0.01))
    Gate.open("too late")
    assert never.result() == "too late"


def test_callbacks_can_be_taken_off(ps: farcall.Worker) -> None:
    seen: list[str] = []
    future = ps.start(Gate.wait, "callbacks")

    def first(_: object) -> None:
        seen.append("first")

    def second(_: object) -> None:
        seen.append("second")

    for callback in (first, second, first):
        future.add_done_callback(callback)
    assert future.remove_done_callback(first) == 2
    assert future.remove_done_callback(first) == 0
    Gate.open("callbacks")
    future.result()
    wait_until(lambda: seen == ["second"])


def test_asyncio_waits_for_futures_and_its_timeouts_cancel_them(ps: farcall.Worker) -> None:
    async def program() -> None:
        loop_thread = threading.get_ident()
        slow = ps.start(Gate.wait, "asyncio")
        quick = ps.start(add, 1, 2)
        done, pending = await asyncio.wait([slow, quick], return_when=asyncio.FIRST_COMPLETED)
        assert (done, pending) == ({quick}, {slow})
        threads: list[int] = []
        slow.add_done_callback(lambda _: threads.append(threading.get_ident()))
        Gate.open("asyncio")
        done, pending = await asyncio.wait([slow, quick], timeout=LONG_S)
        assert pending == set()
        give_up_at = monotonic() + LONG_S
        while not threads:  # what was added later may be told first, by a thread that finds the future done
            assert monotonic() < give_up_at
            await asyncio.sleep(0.001)
        assert threads == [loop_thread]
        assert await asyncio.gather(slow, quick) == ["asyncio", 3]
        assert await farcall.gather(ps.start(add, 1, 2), ps.start(doubled, 1)) == (3, 2)
        assert [await future async for future in farcall.as_completed([ps.start(add, 1, 1)], timeout=LONG_S)] == [2]

        late = ps.start(Gate.wait, "asyncio gives up")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late, 0.01)
        assert late.cancelled()
        Gate.open("asyncio gives up")

    asyncio.run(program(), debug=True)


def test_map_keeps_the_order_and_takes_items_as_workers_become_free(nodes: list[farcall.Node]) -> None:
    workers = [nodes[0]["w1"], nodes[0]["w2"]]
    taken: list[int] = []

    def items() -> Iterator[int]:
        for index in range(1000):
            taken.append(index)
            yield index

    results = farcall.map(doubled_here, items(), workers=workers, in_flight=2)
    assert [next(results) for _ in range(10)] == [2 * index for index in range(10)]
    assert len(taken) < 50
    results.close()
    assert sorted(farcall.map(doubled_here, range(50), workers=workers, ordered=False)) == list(range(0, 100, 2))


@pytest.mark.parametrize("wrong", [3, threading.Lock()], ids=["the function raises", "it cannot be sent"])
def test_the_error_of_a_map_names_its_item_and_worker(nodes: list[farcall.Node], wrong: Any) -> None:
    workers = [nodes[0]["w1"], nodes[0]["w2"]]
    with pytest.raises(Exception, match=r"as you wish: 3|cannot send args\[0\]") as caught:
        list(farcall.map(fail_with_three, [0, 1, wrong], workers=workers, in_flight=1))
    assert len(caught.value.__notes__) == 1
    assert re.fullmatch(r"item 2 of map \(the first is 0\), on w[12]", caught.value.__notes__[0])


def test_map_shows_how_far_it_is(nodes: list[farcall.Node], capsys: pytest.CaptureFixture[str]) -> None:
    workers = [nodes[0]["w1"], nodes[0]["w2"]]
    assert list(farcall.map(doubled_here, range(50), workers=workers, progress=True)) == list(range(0, 100, 2))
    assert "doubled_here" in (shown := capsys.readouterr().out)
    assert "50/50" in shown
    assert list(farcall.map(doubled_here, iter(range(5)), workers=workers, progress=True)) == [0, 2, 4, 6, 8]
    assert "5/?" in capsys.readouterr().out  # nobody knows how many there are
    assert list(farcall.map(doubled_here, range(50), workers=workers)) == list(range(0, 100, 2))
    assert capsys.readouterr().out == ""


def test_map_says_what_its_bar_needs(nodes: list[farcall.Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install 'farcall\[cli\]'"):
        list(farcall.map(doubled_here, range(5), workers=[nodes[0]["w1"]], progress=True))


def doubled_here(x: int) -> int:
    return 2 * x


def fail_with_three(x: int) -> int:
    if x == 3:
        raise ValueError(f"as you wish: {x}")
    return x


def test_map_does_the_items_of_a_dead_worker_elsewhere() -> None:
    with team([None] * 3, size=3, rpc_timeout=LONG_S) as (caller, survivor, doomed):
        workers = [caller["w1"], caller["w2"]]
        results = farcall.map(
            hold_first, range(20), workers=workers, ordered=False, retry=farcall.Retry(3, backoff_s=0.0)
        )
        held = threading.Thread(target=lambda: found.extend(results))
        found: list[int] = []
        held.start()
        wait_until(lambda: "w2" in HOLDING)
        doomed.shutdown(graceful=False)
        Gate.open("map")
        held.join(LONG_S)
        assert sorted(found) == list(range(20))
        survivor.shutdown(graceful=False)
        with pytest.raises(farcall.errors.RpcError):
            list(farcall.map(hold_first, range(20), workers=workers, retry=farcall.Retry(3, backoff_s=0.0)))
        caller.shutdown(graceful=False)


HOLDING: list[str] = []


def hold_first(x: int) -> int:
    HOLDING.append(whoami())
    if whoami() == "w2":
        Gate.wait("map")
    return x
