"""The event loop of a node, where it cannot be had."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from farcall.ids import WorkerInfo
from farcall.protocol.frames import FAILURE, REQUEST, Frame
from farcall.rpc.stream_writing import StreamRequest
from farcall.runtime.calls.coroutines import CoroutineRunner
from farcall.runtime.calls.executor import Executor
from farcall.runtime.calls.serving import Server
from farcall.runtime.calls.turns import Turns
from farcall.runtime.observing.event_log import EventLog
from farcall.runtime.peers.peer import Peer


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


class Task:
    def __init__(self, act: Any) -> None:
        self.act = act

    def run(self, more: bool) -> None:
        self.act()

    def drop(self) -> None: ...


@pytest.mark.usefixtures("starved")
def test_a_coroutine_that_no_loop_can_run_gives_back_its_turn() -> None:
    """Otherwise no call of its object would ever run again."""
    turns = Turns(lambda task: task.run(False))
    turns.begin()
    runner = CoroutineRunner("w0", lambda: None)
    ran: list[str] = []

    async def method() -> None: ...

    def first() -> None:
        with pytest.raises(RuntimeError):
            runner.run(turns.steps(method(), within=True), ran.append)

    assert turns.enter(Task(first))
    turns.run(False)
    assert turns.enter(Task(lambda: ran.append("second")))
    turns.run(False)
    assert ran == ["second"]


@pytest.mark.usefixtures("starved")
def test_a_stream_that_no_loop_can_write_is_answered() -> None:
    class Caller(Peer):
        def send(self, frame: Frame, *_: Any, **__: Any) -> None:
            sent.append(frame)

    async def items() -> Any:
        yield 1

    sent: list[Frame] = []
    unused: Any = None
    server = Server(WorkerInfo("w0", 0), Executor("w0", 1, unused), log=EventLog())
    request = StreamRequest(unused, server, Caller(WorkerInfo("w1", 1), 0x1F, 1, unused, unused), Frame(REQUEST, 0, 7))
    request.answer([items()])
    assert [frame.kind for frame in sent] == [FAILURE]
