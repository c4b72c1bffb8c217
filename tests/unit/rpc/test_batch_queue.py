"""The answers of a batch leave together; and the thread that runs a batch."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from farcall.rpc.batch_queue import CallHere, Item, Queue, Rules
from farcall.runtime.calls.executor import Task
from farcall.runtime.calls.results import Entrusted
from farcall.runtime.calls.run_inline import InlineFunctions
from farcall.runtime.calls.scope import CURRENT
from farcall.runtime.calls.serving import Request, Server
from farcall.runtime.io.reader import reading


class Callers:
    """What callers are told, and when it leaves."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def one(self) -> Any:
        return SimpleNamespace(
            answer=lambda outcome, more: self.told.append((outcome[0], more)),
            fail=lambda error: self.told.append(error),
        )


def node_of(server: Any) -> Any:
    return SimpleNamespace(server=server, device_list=())


def test_answers_leave_in_writes_that_double_in_size() -> None:
    callers = Callers()
    server = SimpleNamespace(flush=lambda: callers.told.append("flush"))
    batches: Any = None
    queue = Queue(node_of(server), batches, Rules(list, 8, 0.0, again_alone=False))
    queue._hand_out([Item(None, number, callers.one(), None, 0.0, None) for number in range(5)], list("abcde"))
    a, b, c, d, e = ((letter, True) for letter in "abcde")
    assert callers.told == [a, "flush", b, c, "flush", d, e, "flush"]


def test_an_error_of_the_batch_is_told_to_each_with_the_place_where_it_was_raised() -> None:
    def fails(numbers: list[int]) -> list[int]:
        raise ValueError("13")

    callers = Callers()
    server = SimpleNamespace(flush=lambda: None, inline=InlineFunctions())
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
    server = SimpleNamespace(flush=lambda: None, inline=InlineFunctions())
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
    server = SimpleNamespace(flush=lambda: None, inline=InlineFunctions())
    batches: Any = SimpleNamespace(count=lambda *_: None, running={}, begin_when_due=lambda queue: None)
    queue = Queue(node_of(server), batches, Rules(lambda numbers: [Sealed(), 3], 2, 0.0, again_alone=False))
    queue._waiting.extend(Item(None, number, callers.one(), None, 0.0, None) for number in range(2))
    queue.run(False)
    first, second = callers.told
    assert "Sealed, which raises SystemExit when shown" in str(first)
    assert second == (3, True)
    assert not batches.running


def test_behind_a_batch_that_was_dropped_a_call_is_not_forgotten() -> None:
    callers = Callers()
    dropped: list[Task] = []
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


# ---------------------------------------------------------------------- the thread that runs a batch


@pytest.fixture
def on_io_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loop: Any = object()
    monkeypatch.setattr(reading, "loop", loop)


class BehindARequest:
    """A server, as far as what runs behind a request is concerned. ``kept`` is what the link says of it."""

    stream_pool = None
    run_behind = Server.run_behind

    def __init__(self, kept: bool | None) -> None:
        self.inline = InlineFunctions()
        self._computing: set[Request] = set()
        self._queue: list[Task] = []
        self.submitted: list[Task] = []
        self.ran: list[Any] = []
        self.request: Any = SimpleNamespace(peer=self, went_on=False)
        self._kept = kept

    def run_inline(self, task: Task, at_once: bool) -> bool | None:
        self.ran.append((task, CURRENT.get()))
        return self._kept

    def submit(self, task: Task) -> None:
        self.submitted.append(task)


TASK: Any = object()


def test_a_brief_batch_runs_behind_the_request_that_filled_it(on_io_thread: None) -> None:
    server: Any = BehindARequest(kept=True)
    server.inline.ran(b"batch", 0.0005)
    scope: Any = object()
    outside = CURRENT.set(scope)
    try:
        server.run_behind(server.request, TASK, b"batch")
    finally:
        CURRENT.reset(outside)
    assert server.ran == [(TASK, None)]  # and inherits nothing from that request
    assert not server.submitted
    assert server.request.went_on


@pytest.mark.parametrize("why", ["unknown", "long", "another computes", "another waits", "no time"])
def test_otherwise_a_worker_runs_it(on_io_thread: None, why: str) -> None:
    server: Any = BehindARequest(kept=None if why == "no time" else True)
    if why != "unknown":
        server.inline.ran(b"batch", 0.5 if why == "long" else 0.0005)
    if why == "another computes":
        server._computing.add(object())
    if why == "another waits":
        server._queue.append(TASK)
    server.run_behind(server.request, TASK, b"batch")
    assert server.submitted == [TASK]
    assert not server.request.went_on, "its thread has done nothing but it"


def test_a_worker_that_filled_a_batch_leaves_it_to_the_pool() -> None:
    server: Any = BehindARequest(kept=True)
    server.inline.ran(b"batch", 0.0005)
    server.run_behind(server.request, TASK, b"batch")
    assert (server.submitted, server.ran) == ([TASK], [])


def test_a_batch_that_was_late_stays_away_for_a_while(on_io_thread: None) -> None:
    server: Any = BehindARequest(kept=False)
    server.inline.ran(b"batch", 0.0005)
    server.run_behind(server.request, TASK, b"batch")
    server.run_behind(server.request, TASK, b"batch")
    assert (len(server.ran), server.submitted) == (1, [TASK])
