"""What the callers of a batch are told."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.rpc.batch_queue import CallHere, Item, Queue, Rules
from farcall.runtime.calls.results import Entrusted
from farcall.runtime.calls.serving import Request


class Callers:
    """What callers are told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def one(self) -> Any:
        return SimpleNamespace(
            answer=lambda outcome: self.told.append(outcome[0]),
            fail=lambda error: self.told.append(error),
        )


def node_of(server: Any) -> Any:
    return SimpleNamespace(server=server, device_list=())


def test_an_error_of_the_batch_is_told_to_each_with_the_place_where_it_was_raised() -> None:
    def fails(numbers: list[int]) -> list[int]:
        raise ValueError("13")

    callers = Callers()
    server = SimpleNamespace()
    batches: Any = SimpleNamespace(count=lambda *_: None, running={}, begin_when_due=lambda queue: None)
    queue = Queue(node_of(server), batches, Rules(fails, 4, 0.0, again_alone=False))
    queue._waiting.extend(Item(None, number, callers.one(), None, 0.0, None) for number in range(2))
    queue.run(False)
    first, second = callers.told
    assert first is not second
    for error in (first, second):
        assert isinstance(error, ValueError)
        innermost = error.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        assert innermost is not None
        assert innermost.tb_frame.f_code is fails.__code__


@pytest.mark.parametrize("again_alone", [False, True])
def test_a_device_that_fails_ends_the_batch_not_the_queue(again_alone: bool) -> None:
    def fail() -> None:
        raise RuntimeError("the device has failed")

    callers = Callers()
    server = SimpleNamespace()
    batches: Any = SimpleNamespace(count=lambda *_: None, running={}, begin_when_due=lambda queue: None)
    queue = Queue(node_of(server), batches, Rules(list, 4, 0.0, again_alone=again_alone))
    for number in range(2):  # none runs alone, either: nobody has waited for their arguments
        queue._waiting.append(Item(None, number, callers.one(), None, 0.0, SimpleNamespace(wait=fail)))
    queue.run(False)
    assert [str(told) for told in callers.told] == ["the device has failed"] * 2
    assert not batches.running


def test_an_error_that_cannot_be_shown_ends_neither_the_batch_nor_the_queue() -> None:
    class Sealed(Exception):
        def __str__(self) -> str:
            raise SystemExit("sealed")

    callers = Callers()
    server = SimpleNamespace()
    batches: Any = SimpleNamespace(count=lambda *_: None, running={}, begin_when_due=lambda queue: None)
    queue = Queue(node_of(server), batches, Rules(lambda numbers: [Sealed(), 3], 2, 0.0, again_alone=False))
    queue._waiting.extend(Item(None, number, callers.one(), None, 0.0, None) for number in range(2))
    queue.run(False)
    first, second = callers.told
    assert "Sealed, which raises SystemExit when shown" in str(first)
    assert second == 3
    assert not batches.running


def test_behind_a_batch_that_was_dropped_a_call_is_not_forgotten() -> None:
    callers = Callers()
    dropped: list[Queue] = []
    server = SimpleNamespace(submit=dropped.append)
    queue = Queue(node_of(server), Any, Rules(list, 1, 0.0, again_alone=False))  # type: ignore[arg-type]
    queue.put(None, 1, callers.one())
    queue.drop()  # the executor has stopped
    queue.put(None, 2, callers.one())
    assert dropped == [queue, queue], "who waits for a batch that never runs waits for good"


def test_an_argument_that_cannot_be_queued_is_answered_for() -> None:
    def take(request: Any) -> None:
        raise RuntimeError("the device has failed")

    class Refused(Request):
        def __init__(self) -> None:
            self.failed: list[BaseException] = []

        def fail(self, error: BaseException) -> None:
            self.failed.append(error)

    request = Refused()
    request.entrust(Entrusted(take))
    assert "the device has failed" in str(request.failed)


def test_a_call_of_this_worker_waits_for_its_result_or_error() -> None:
    node: Any = SimpleNamespace(calls=SimpleNamespace(waiting=nullcontext))
    call = CallHere()
    call.answer([3])
    assert call.wait(node) == 3
    call = CallHere()
    call.fail(ValueError("13"))
    with pytest.raises(ValueError, match="13"):
        call.wait(node)
