"""Streams between nodes of one process: order, ends, credit, both directions, both kinds of iteration."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd
from farcall.errors import Cancelled, PeerDead, RpcError, RpcTimeout, SerializationError
from farcall.protocol.frames import FAILURE
from farcall.protocol.streams import WINDOW_BYTES, WINDOW_ITEMS
from farcall.rpc.call import encode_request
from farcall.rpc.node_streams import Streams
from farcall.rpc.references import NodeReferences
from farcall.rpc.stream_writing import MOST_ITEMS, Writer
from farcall.runtime.calls.pending import SyncCall
from farcall.runtime.node import runtime_of
from farcall.serialize import encode_function

SEEN: dict[str, Any] = {}


@pytest.fixture
def nodes() -> Iterator[list[farcall.Node]]:
    SEEN.clear()
    with team([None] * 2, rpc_timeout=LONG_S) as started:
        yield started
        for node in started:
            streams = runtime_of(node).part(Streams) if node._runtime.running else None
            if streams is not None:
                wait_until(lambda streams=streams: not streams._writers and not streams._incoming)  # type: ignore[misc]
    started.clear()


@pytest.fixture
def ps(nodes: list[farcall.Node]) -> farcall.Worker:
    return nodes[0]["w1"]


def count(up_to: int) -> Iterator[int]:
    try:
        for index in range(up_to):
            SEEN["made"] = index
            yield index
    finally:
        SEEN["ended"] = True


async def count_async(up_to: int) -> AsyncIterator[int]:
    try:
        for index in range(up_to):
            SEEN["made"] = index
            if index % 100 == 0:
                await asyncio.sleep(0)
            yield index
    finally:
        SEEN["ended"] = True


def failing_after(items: int) -> Iterator[int]:
    yield from range(items)
    raise ValueError("as you wish")


async def cancelled_after(items: int) -> AsyncIterator[int]:
    """Awaits a task of its own that somebody has cancelled."""
    for index in range(items):
        yield index
    task = asyncio.ensure_future(asyncio.sleep(LONG_S))
    task.cancel()
    await task


def various(size: int) -> Iterator[Any]:
    buffer = torch.zeros(size)
    for index in range(20):
        yield index
        yield {"text": "x" * index, "list": [index]}
        buffer.fill_(index)  # what was yielded must not change with it
        yield buffer
        yield "y" * (index * 1000)


def forever() -> Iterator[int]:
    try:
        SEEN["began"] = True
        index = 0
        while True:
            yield index
            index += 1
    finally:
        SEEN["ended"] = True


def wait_for_leave() -> None:
    assert SEEN["may_run"].wait(LONG_S)


class Model:
    def tokens(self, word: str) -> Iterator[str]:
        yield from word

    async def tokens_async(self, word: str) -> AsyncIterator[str]:
        for letter in word:
            yield letter


@pytest.mark.parametrize("function", [count, count_async])
@pytest.mark.parametrize("items", [0, 1, 5, 5000])
def test_items_come_in_order_each_once(ps: farcall.Worker, function: Any, items: int) -> None:
    assert list(ps.stream(function, items)) == list(range(items))

    async def program() -> list[int]:
        return [item async for item in ps.stream(function, items)]

    assert asyncio.run(program()) == list(range(items))


@pytest.mark.parametrize("size", [4, 5000, 200_000])
def test_items_are_values_of_the_moment_they_were_yielded(ps: farcall.Worker, size: int) -> None:
    items = list(ps.stream(various, size))
    assert len(items) == 80
    for index in range(20):
        assert items[4 * index] == index
        assert items[4 * index + 1] == {"text": "x" * index, "list": [index]}
        assert torch.equal(items[4 * index + 2], torch.full((size,), float(index)))
        assert items[4 * index + 3] == "y" * (index * 1000)


def test_oneself_is_a_worker_like_others(nodes: list[farcall.Node]) -> None:
    assert list(nodes[0]["w0"].stream(count, 3000)) == list(range(3000))
    assert nodes[0]["w0"].call(total, farcall.outgoing(range(3000))) == sum(range(3000))


def test_methods_are_streams_too(ps: farcall.Worker) -> None:
    model = ps.create(Model)
    assert "".join(model.stream.tokens("hello")) == "hello"
    assert "".join(model.stream(Model.tokens_async, "hello")) == "hello"
    assert list(ps.stream(sorted, [3, 1, 2])) == [1, 2, 3]


def test_the_object_of_a_method_stays_until_its_stream_has_ended(nodes: list[farcall.Node]) -> None:
    may_run = SEEN["may_run"] = threading.Event()
    model, other = nodes[0]["w1"].create(Model), nodes[0]["w1"].create(Model)
    wait_until(model.confirmed_by_owner)
    wait_until(other.confirmed_by_owner)
    kept, dropped = model._fork.ref, other._fork.ref
    places = runtime_of(nodes[1]).part(NodeReferences).places
    before = [nodes[0]["w1"].start(wait_for_leave) for _ in range(farcall.RpcBackendOptions().num_worker_threads)]
    stream = model.stream.tokens("hello")  # waits in the owner's queue
    try:
        del model
        del other  # released after the model, so the owner would have heard of both
        wait_until(lambda: dropped not in places)
    finally:
        may_run.set()
    assert "".join(stream) == "hello"
    farcall.gather(*before)
    wait_until(lambda: kept not in places)


@pytest.mark.parametrize("items", [0, 5, 3000])
def test_an_error_comes_after_the_items_before_it(ps: farcall.Worker, items: int) -> None:
    stream = ps.stream(failing_after, items)
    assert [next(stream) for _ in range(items)] == list(range(items))
    with pytest.raises(ValueError, match="as you wish"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_a_generator_that_was_cancelled_from_within_has_not_ended_well(ps: farcall.Worker) -> None:
    stream = ps.stream(cancelled_after, 5)
    assert [next(stream) for _ in range(5)] == list(range(5))
    with pytest.raises(RpcError, match="CancelledError"):
        next(stream)


def who_asks() -> Iterator[tuple[str, str]]:
    call = farcall.current_call()
    assert call.caller is not None
    yield call.caller.name, call.metadata["job"]


async def who_asks_async() -> AsyncIterator[tuple[str, str]]:
    for found in who_asks():
        yield found


@pytest.mark.parametrize("function", [who_asks, who_asks_async])
def test_a_generator_knows_its_call(ps: farcall.Worker, function: Any) -> None:
    assert list(ps.options(metadata={"job": "7"}).stream(function)) == [("w0", "7")]


def test_an_item_that_was_held_back_is_sent_although_no_other_comes(nodes: list[farcall.Node]) -> None:
    stream = nodes[0]["w1"].stream(three_and_silence)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    stream.close()

    # Also if the timer comes at the moment at which another item is put in.
    streams = runtime_of(nodes[0]).part(Streams)
    writer = Writer(streams, runtime_of(nodes[0]).peer("w1"), 1, outgoing=True)
    with writer._lock:
        streams.flush_later(writer)
        wait_until(lambda: streams._flush_timer._calls >= 2, "a second attempt")
    wait_until(lambda: not streams._to_flush)


def three_and_silence() -> Iterator[int]:
    yield from range(3)
    call = farcall.current_call()
    wait_until(lambda: call.cancelled)


def test_what_is_no_stream_says_so(ps: farcall.Worker) -> None:
    with pytest.raises(TypeError, match="was called as a stream, and returned a value of type int: return an iterable"):
        list(ps.stream(abs, -1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without retry"):
        ps.options(retry=farcall.Retry(2)).stream(count, 1)


@pytest.mark.parametrize("function", [count, count_async])
def test_a_slow_reader_holds_the_writer_back(ps: farcall.Worker, function: Any) -> None:
    stream = ps.stream(function, 100_000)
    assert next(stream) == 0
    wait_until(lambda: SEEN["made"] >= WINDOW_ITEMS - 1)
    assert ps.call(abs, -1) == 1  # others use the link meanwhile
    assert SEEN["made"] <= WINDOW_ITEMS
    assert [next(stream) for _ in range(10_000)] == list(range(1, 10_001))
    assert SEEN["made"] <= 10_000 + WINDOW_ITEMS + MOST_ITEMS  # items that came together are granted together
    stream.close()
    wait_until(lambda: SEEN.get("ended"))


def test_bytes_hold_the_writer_back(ps: farcall.Worker) -> None:
    stream = ps.stream(megabytes, 1000)
    next(stream)
    wait_until(lambda: SEEN["made"] >= WINDOW_BYTES // 2**20 - 1)
    assert SEEN["made"] <= WINDOW_BYTES // 2**20 + 1
    stream.close()
    wait_until(lambda: SEEN.get("ended"))


def megabytes(items: int) -> Iterator[torch.Tensor]:
    try:
        for index in range(items):
            SEEN["made"] = index
            yield torch.full((2**18,), float(index))
    finally:
        SEEN["ended"] = True


def test_every_way_out_ends_the_generator(ps: farcall.Worker) -> None:
    def is_ended() -> bool:
        return bool(SEEN.pop("ended", False))

    for item in ps.stream(forever):
        if item == 5:
            break
    del item
    gc.collect()
    wait_until(is_ended, "the end of a dropped stream")
    with ps.stream(forever) as stream:
        next(stream)
    wait_until(is_ended, "the end of a closed stream")
    for timeout_s in has_begun():
        with pytest.raises(RpcTimeout):
            list(ps.options(timeout=timeout_s).stream(forever))
    wait_until(is_ended, "the end at a timeout")

    async def program(timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            async for _ in ps.stream(count_slowly):
                pass

    for timeout_s in has_begun():
        with pytest.raises(TimeoutError):
            asyncio.run(program(timeout_s))
    wait_until(is_ended, "the end of a cancelled task's stream")


def test_a_closed_stream_ends_its_generator_where_nothing_is_cancelled() -> None:
    """Its writer waits for a reader that never reads on: programs written for torch run with that setting."""
    SEEN.clear()
    with team([None] * 2, rpc_timeout=LONG_S, inherit=False) as nodes:
        with nodes[0]["w1"].stream(forever) as stream:
            next(stream)
        wait_until(lambda: "ended" in SEEN, "the end of a closed stream")


def has_begun() -> Iterator[float]:
    """Timeouts until the generator has begun within one: on a busy machine a short one may be over before."""
    SEEN.pop("began", None)
    for timeout_s in (0.2, 2.0, LONG_S / 2):
        yield timeout_s
        if "began" in SEEN:
            return
    raise AssertionError("it never began")


async def count_slowly() -> AsyncIterator[int]:
    try:
        SEEN["began"] = True
        yield 0
        await asyncio.sleep(LONG_S)
    finally:
        SEEN["ended"] = True


def test_a_generator_that_is_silent_is_waited_for_within_the_default_timeout(nodes: list[farcall.Node]) -> None:
    stream = nodes[0]["w1"].stream(count_slowly)
    assert next(stream) == 0
    runtime_of(nodes[0]).timeout_s = 0.2
    with pytest.raises(RpcTimeout, match=r"w1 sent no item of count_slowly\(\) for 0.2 s"):
        next(stream)
    wait_until(lambda: SEEN.get("ended"))


def test_the_death_of_either_side_ends_it() -> None:
    SEEN.clear()
    with team([None] * 2, rpc_timeout=LONG_S) as (reader, writer):
        stream = reader["w1"].stream(forever)
        next(stream)
        writer.shutdown(graceful=False)
        with pytest.raises(PeerDead):
            list(stream)
        wait_until(lambda: SEEN.pop("ended", False))
        reader.shutdown(graceful=False)
    with team([None] * 2, rpc_timeout=LONG_S) as (reader, writer):
        stream = reader["w1"].stream(forever)
        next(stream)
        reader.shutdown(graceful=False)
        wait_until(lambda: SEEN.pop("ended", False))
        writer.shutdown(graceful=False)


# ---------------------------------------------------------------------- outgoing


def total(numbers: Iterable[int]) -> int:
    return sum(numbers)


async def total_async(numbers: farcall.Stream[int]) -> int:
    return sum([number async for number in numbers])


def first(numbers: Iterable[int]) -> int:
    return next(iter(numbers))


def doubled(numbers: Iterable[int]) -> Iterator[int]:
    for number in numbers:
        yield 2 * number


def test_the_callee_reads_what_the_caller_makes(ps: farcall.Worker) -> None:
    assert ps.call(total, farcall.outgoing(count(5000))) == sum(range(5000))
    assert ps.call(total_async, farcall.outgoing(count(5000))) == sum(range(5000))
    assert SEEN.pop("ended")
    assert ps.call(first, farcall.outgoing(forever())) == 0
    wait_until(lambda: SEEN.pop("ended", False))
    with pytest.raises(ValueError, match="as you wish"):
        ps.call(total, farcall.outgoing(failing_after(3)))
    assert list(ps.stream(doubled, farcall.outgoing(count(3000)))) == list(range(0, 6000, 2))
    sent = farcall.outgoing([1, 2])
    assert ps.call(total, sent) == 3
    with pytest.raises(SerializationError, match="can be sent once"):
        ps.call(total, sent)
    with pytest.raises(TypeError, match="takes an iterable"):
        farcall.outgoing(3)  # type: ignore[arg-type]


def keep(numbers: farcall.Stream[int]) -> None:
    SEEN["kept"] = numbers


def read_what_was_kept() -> int:
    return next(SEEN["kept"])  # type: ignore[no-any-return]


def only_here(numbers: Iterable[int]) -> None:
    raise AssertionError("the test takes it away before it is looked up")


def test_an_outgoing_stream_that_nobody_reads_is_forgotten_with_its_call(
    nodes: list[farcall.Node], ps: farcall.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = runtime_of(nodes[0]).part(Streams)._writers
    lookup = encode_function(only_here)
    monkeypatch.delattr(f"{__name__}.only_here")
    request = encode_request(runtime_of(nodes[0]).peer("w1"), total, (farcall.outgoing(forever()),), None)
    assert len(writers) == 1
    assert lookup is not None
    request.function = lookup
    call = SyncCall(runtime_of(nodes[0]).peer("w1"), total, LONG_S)
    assert nodes[0]._runtime.calls.exchange(call, request).kind == FAILURE  # so the arguments were never read
    wait_until(lambda: not writers)
    ps.call(keep, farcall.outgoing(forever()))
    wait_until(lambda: not writers)
    with pytest.raises(RpcError, match="start to read it inside the called function"):
        ps.call(read_what_was_kept)
    del SEEN["kept"]


def wait_for_gate() -> Iterator[int]:
    try:
        assert SEEN["gate"].wait(LONG_S)
        yield 1
    finally:
        SEEN["ended"] = True


def total_noted(numbers: Iterable[int]) -> int:
    try:
        return sum(numbers)
    except BaseException as error:
        SEEN["raised"] = error
        raise


async def total_noted_async(numbers: farcall.Stream[int]) -> int:
    try:
        return sum([number async for number in numbers])
    except BaseException as error:
        SEEN["raised"] = error
        raise


@pytest.mark.parametrize("function", [total_noted, total_noted_async])
def test_an_outgoing_stream_ends_when_its_call_times_out(ps: farcall.Worker, function: Any) -> None:
    """The function waits for an item, and must not go on waiting when nobody wants its result any more."""
    SEEN["gate"] = threading.Event()
    try:
        with pytest.raises(RpcTimeout):
            ps.options(timeout=2.0).call(function, farcall.outgoing(wait_for_gate()))  # it must begin before that
        wait_until(lambda: "raised" in SEEN)
        assert isinstance(SEEN["raised"], Cancelled | asyncio.CancelledError)
        assert "ended" not in SEEN  # the generator is inside the user's code, which nobody can interrupt
    finally:
        SEEN["gate"].set()
    wait_until(lambda: SEEN.pop("ended", False))


def test_an_outgoing_stream_is_made_no_further_ahead_than_it_is_read(ps: farcall.Worker) -> None:
    assert ps.call(first, farcall.outgoing(count(100_000))) == 0
    assert SEEN["made"] <= WINDOW_ITEMS + 1


def test_a_context_of_gradients_is_refused(nodes: list[farcall.Node]) -> None:
    with farcall.autograd.context(node=nodes[0]), pytest.raises(RpcError, match="carries no gradients"):
        nodes[0]["w1"].stream(count, 1)


def test_a_trace_shows_the_stream_as_long_as_it_runs(nodes: list[farcall.Node], tmp_path: Path) -> None:
    with farcall.profile(node=nodes[0]) as profile:
        assert list(nodes[0]["w1"].stream(count, 30)) == list(range(30))
        assert list(nodes[0]["w1"].stream(count_async, 30)) == list(range(30))
        wait_until(lambda: not nodes[1].snapshot().served)
    profile.export_chrome_trace(tmp_path / "trace.json")
    names = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert "count (stream, 30 items)" in names
    assert "count_async (stream, 30 items)" in names
    assert (nodes[0].metrics().streams.items_read, nodes[1].metrics().streams.items_written) == (60, 60)


def test_a_look_at_the_workers_shows_how_far_a_stream_is(nodes: list[farcall.Node]) -> None:
    stream = nodes[0]["w1"].stream(forever)
    assert [next(stream) for _ in range(1)] == [0]

    def shown() -> list[str]:
        return [call.title for call in nodes[1].snapshot().served]

    wait_until(lambda: any("its reader takes no more yet" in name for name in shown()))
    assert any(name.startswith("forever") or "forever (stream, 1,0" in name for name in shown())
    [made] = nodes[0].snapshot().calls
    assert (made.function, made.title.startswith("forever (stream, ")) == ("forever", True)
    assert made.for_s == 0.0  # nobody waits for an item
    stream.close()


def test_a_reader_that_waits_for_an_item_is_seen_to_wait(nodes: list[farcall.Node]) -> None:
    SEEN["gate"] = threading.Event()
    stream = nodes[0]["w1"].stream(wait_for_gate)
    reader = threading.Thread(target=list, args=(stream,))
    reader.start()
    try:
        wait_until(lambda: any(call.for_s for call in nodes[0].snapshot().calls))
    finally:
        SEEN["gate"].set()
        reader.join()


def yield_shared(up_to: int) -> Iterator[torch.Tensor]:
    SEEN["shared"] = torch.zeros(1 << 18)
    for index in range(up_to):
        SEEN["made"] = index
        yield SEEN["shared"]


def test_an_item_that_waits_for_credit_keeps_its_value(nodes: list[farcall.Node], ps: farcall.Worker) -> None:
    """Others may change its memory while it waits: the object's next call, or another coroutine."""
    list(ps.stream(yield_shared, 3))  # introduces the segments
    up_to = 2 * WINDOW_BYTES // (1 << 20)
    stream = iter(ps.stream(yield_shared, up_to))
    items = [next(stream)]
    server = runtime_of(nodes[1]).server
    wait_until(lambda: len(server.active) == 1)  # the first stream's may be there for a moment after its end
    (request,) = server.active
    wait_until(lambda: request.writer._gate is not None)  # type: ignore[attr-defined]
    waiting = SEEN["made"]
    SEEN["shared"] += 1
    items += stream
    assert [item.unique().tolist() for item in items] == [[float(number > waiting)] for number in range(up_to)]
