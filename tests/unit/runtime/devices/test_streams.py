"""Lanes, with streams that only keep a record; and what of a value may be on a device."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from farcall.channel import device_api
from farcall.runtime.devices import streams
from farcall.runtime.devices.streams import Stamp, StreamCoroutine, StreamPool, StreamTask, stamp

DEVICE = torch.device("cuda", 0)


class FakeStream:
    made = 0

    def __init__(self, device: Any = None, stream_id: int = 0, device_index: int = 0, device_type: int = 1) -> None:
        if not stream_id:
            FakeStream.made += 1
        self.stream_id = stream_id or FakeStream.made
        self.device_index = 0
        self.device_type = 1
        self.busy = True
        self.waits: list[int] = []

    def query(self) -> bool:
        return not self.busy

    def record_event(self) -> int:
        return self.stream_id

    def wait_event(self, event: int) -> None:
        self.waits.append(event)


class FakeInner:
    current = (0, 0, 1)

    def _cuda_getDevice(self) -> int:
        return 0

    def _cuda_getCurrentStream(self, device: int) -> tuple[int, int, int]:
        return self.current

    def _cuda_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:
        self.current = (stream_id, device_index, device_type)


@pytest.fixture
def inner(monkeypatch: pytest.MonkeyPatch) -> FakeInner:
    inner = FakeInner()
    FakeStream.made = 0
    monkeypatch.setattr(streams, "_C", inner)
    monkeypatch.setattr(device_api, "_C", inner)
    monkeypatch.setattr(device_api, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return inner


@pytest.fixture
def stream_pool(inner: FakeInner) -> StreamPool:
    return StreamPool([DEVICE])


def test_calls_one_after_the_other_share_a_lane_and_wait_for_nothing(stream_pool: StreamPool, inner: FakeInner) -> None:
    seen = [stream_pool.run(lambda: inner.current[0]) for _ in range(5)]
    assert seen == [1] * 5
    assert inner.current == (0, 0, 1)
    assert stream_pool.take().streams[0].waits == []  # type: ignore[attr-defined]


def test_overlapping_calls_have_lanes_of_their_own(stream_pool: StreamPool, inner: FakeInner) -> None:
    assert stream_pool.run(lambda: (inner.current[0], stream_pool.run(lambda: inner.current[0]), inner.current[0])) == (
        1,
        2,
        1,
    )


def test_a_call_sees_those_that_have_ended_wherever_they_ran(stream_pool: StreamPool) -> None:
    first, second = stream_pool.take(), stream_pool.take()
    stream_pool.leave(first)
    stream_pool.leave(second)
    assert second.streams[0].waits == [1]  # type: ignore[attr-defined]
    third = stream_pool.take()
    assert third is second, "the warmest"
    fourth = stream_pool.take()
    assert fourth is first
    assert first.streams[0].waits == [2]  # type: ignore[attr-defined]


def test_what_is_done_is_not_waited_for(stream_pool: StreamPool) -> None:
    first, second = stream_pool.take(), stream_pool.take()
    first.streams[0].busy = False  # type: ignore[attr-defined]
    stream_pool.leave(first)
    stream_pool.leave(second)
    assert second.streams[0].waits == []  # type: ignore[attr-defined]


def test_a_failing_call_leaves_its_lane(stream_pool: StreamPool, inner: FakeInner) -> None:
    with pytest.raises(ZeroDivisionError):
        stream_pool.run(lambda: 1 // 0)
    assert inner.current == (0, 0, 1)
    assert stream_pool.run(lambda: inner.current[0]) == 1


def test_without_a_device_or_one_that_works_calls_run_all_the_same(
    stream_pool: StreamPool, inner: FakeInner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert StreamPool([]).run(lambda: 7) == 7

    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert stream_pool.run(lambda: inner.current[0]) == 0


def test_a_task_runs_on_a_lane(stream_pool: StreamPool, inner: FakeInner) -> None:
    class Task:
        log: tuple[Any, ...] = ()

        def run(self, more: bool) -> None:
            self.log = (more, inner.current[0])

        def drop(self) -> None:
            self.log = ("dropped",)

    task = Task()
    StreamTask(task, stream_pool).run(True)
    assert task.log == (True, 1)
    StreamTask(task, stream_pool).drop()
    assert task.log == ("dropped",)


def test_a_coroutine_stays_on_the_lane_of_its_call(stream_pool: StreamPool, inner: FakeInner) -> None:
    async def function() -> list[int]:
        before = inner.current[0]
        await asyncio.sleep(0)
        return [before, inner.current[0]]

    kept = stream_pool.run(stream_pool.keep)
    assert kept is not None
    other = stream_pool.take()
    assert other is not kept, "it is in use until it is left"

    async def main() -> list[int]:
        return await asyncio.ensure_future(StreamCoroutine(function(), kept))

    assert asyncio.run(main()) == [1, 1]
    assert inner.current == (0, 0, 1)
    stream_pool.leave(kept)
    assert stream_pool.take() is kept


def test_values_without_anything_on_a_device_have_no_stamp() -> None:
    for value in (None, 3, "x", torch.ones(2), [torch.ones(2), {"a": (1, torch.ones(1))}]):
        assert stamp(value, []) is None


def test_objects_are_not_looked_into() -> None:
    class Thing:
        pass

    assert stamp([Thing()], []) is not None, "who knows what it holds"


def test_whoever_waits_on_the_stream_that_a_value_was_made_on_waits_for_nothing(inner: FakeInner) -> None:
    class Value:
        recorded: list[int]

        def __init__(self) -> None:
            self.recorded = []

        def get_device(self) -> int:
            return 0

        def record_stream(self, stream: FakeStream) -> None:
            self.recorded.append(stream.stream_id)

    value = Value()
    inner.current = (7, 0, 1)
    made = Stamp([0], [value])  # type: ignore[list-item]
    made.wait()
    here: Any = device_api.current_stream(0)
    assert here.waits == []
    inner.current = (8, 0, 1)
    made.wait()
    elsewhere: Any = device_api.current_stream(0)
    assert elsewhere.waits == [7]
    assert value.recorded == [7, 8], "its memory is kept in any case: it may have come from a third stream"
    inner.current = (7, 0, 1)
    fresh = Stamp([0], [value], fresh=True)  # type: ignore[list-item]
    fresh.wait()
    assert value.recorded == [7, 8], "that of what was read here just now has come from this one"
    inner.current = (8, 0, 1)
    fresh.wait()
    assert value.recorded == [7, 8, 8]


def test_a_container_may_hold_itself() -> None:
    held: list[Any] = [1]
    held.append(held)
    named: dict[str, Any] = {"held": held}
    named["self"] = named
    assert stamp(named, [DEVICE]) is None


def test_each_of_several_modules_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Any] = []
    find = streams._find
    monkeypatch.setattr(streams, "_find", lambda value, *more: looked_at.append(value) or find(value, *more))
    modules = [torch.nn.Linear(1, 1) for _ in range(3)]
    found: list[torch.Tensor] = []
    assert not streams._find(modules, found, set())
    assert sum(isinstance(value, torch.nn.Parameter) for value in looked_at) == 6
