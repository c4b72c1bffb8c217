"""A unit of code is asked for once, loaded once, by a worker, and forgotten when newer ones need its place."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from farcall.errors import NotAllowed, PeerDead, SerializationError
from farcall.ids import WorkerInfo
from farcall.protocol.frames import REQUEST, Frame
from farcall.protocol.messages import CodeTold, CodeWanted
from farcall.runtime.calls import arriving_code
from farcall.runtime.calls.arriving_code import ArrivingCode
from farcall.runtime.peers.peer import Peer
from farcall.serialize import units
from farcall.serialize.allowance import Allowance, install

pytest.importorskip("cloudpickle")


class Caller(Peer):
    def __init__(self) -> None:
        unused: Any = None
        super().__init__(WorkerInfo("caller", 1), 1, 1, unused, unused)
        self.asked: list[bytes] = []

    def control(self, message: Any, more: bool = False) -> None:
        assert isinstance(message, CodeWanted)
        self.asked.append(message.digest)


class Request:
    def __init__(self, peer: Peer, function: bytes) -> None:
        self.peer = peer
        self.frame = Frame(REQUEST, function=function)


class Server:
    """Notes the tasks for workers, and the requests that go on."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []
        self.went_on: list[Request] = []

    def submit(self, task: Any) -> None:
        self.tasks.append(task)

    def accept_again(self, request: Request) -> None:
        self.went_on.append(request)

    def work(self) -> None:
        while self.tasks:
            self.tasks.pop(0).run(False)


class Node:
    def __init__(self) -> None:
        self.server = Server()
        self.code = ArrivingCode(self.server)  # type: ignore[arg-type]
        self.caller = Caller()

    def call(self, function: bytes, caller: Caller | None = None) -> Request:
        request = Request(caller or self.caller, function)
        if self.code.is_here(request):  # type: ignore[arg-type]
            self.server.went_on.append(request)
        return request

    def tell(self, function: bytes, content: bytes | None = None) -> None:
        digest = function[1:33]
        self.code.on_told(self.caller, CodeTold(digest, units.content_of(digest) if content is None else content))
        self.server.work()


@pytest.fixture
def node() -> Node:
    return Node()


def segment_of(function: Any) -> bytes:
    found = units.split(function)
    assert found is not None
    return found[0]


def test_calls_wait_for_one_question_and_then_go_on_in_order(node: Node) -> None:
    segment = segment_of(lambda x: x + 1)
    calls = [node.call(segment) for _ in range(3)]
    assert node.caller.asked == [segment[1:33]]
    assert node.server.went_on == []
    node.tell(segment)
    assert node.server.went_on == calls
    assert {id(call.frame.code) for call in calls} == {id(calls[0].frame.code)}  # loaded once
    assert calls[0].frame.code.function(1) == 2
    later = node.call(segment)
    assert later.frame.code is calls[0].frame.code
    assert len(node.caller.asked) == 1


def test_a_unit_is_loaded_by_a_worker(node: Node) -> None:
    segment = segment_of(lambda: 1)
    node.call(segment)
    node.code.on_told(node.caller, CodeTold(segment[1:33], units.content_of(segment[1:33])))
    assert len(node.server.tasks) == 1
    assert node.server.went_on == []


def test_each_caller_sends_its_own(node: Node) -> None:
    segment = segment_of(lambda: 2)
    node.call(segment)
    node.tell(segment)
    other = Caller()
    node.call(segment, other)
    assert other.asked == [segment[1:33]]


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_the_receiver_looks_at_the_digest_itself(node: Node, content: bytes) -> None:
    segment = segment_of(lambda: 3)
    call = node.call(segment)
    node.tell(segment, content)
    assert node.server.went_on == [call]
    assert isinstance(call.frame.code, SerializationError)


def test_what_nobody_asked_for_is_not_loaded(node: Node) -> None:
    segment = segment_of(lambda: 4)
    node.tell(segment)
    node.call(segment)
    assert node.caller.asked == [segment[1:33]]


def test_a_failure_to_load_is_not_remembered(node: Node) -> None:
    content = units.content_of(segment_of(lambda: 5)[1:33])
    broken = content[:4] + b"3.0\0not a pickle"
    segment = b"v" + hashlib.sha256(broken).digest() + b"m\0f"
    first = node.call(segment)
    node.tell(segment, broken)
    assert isinstance(first.frame.code, Exception)
    node.call(segment)
    assert len(node.caller.asked) == 2


def test_the_units_used_longest_ago_make_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [segment_of(eval(f"lambda: {number}")) for number in range(3)]
    size_bytes = len(units.content_of(segments[0][1:33]))
    monkeypatch.setattr(arriving_code, "KEPT_BYTES", 2 * size_bytes)
    for segment in segments[:2]:
        node.call(segment)
        node.tell(segment)
    node.call(segments[0])
    node.call(segments[2])
    node.tell(segments[2])
    asked = len(node.caller.asked)
    node.call(segments[0])
    assert len(node.caller.asked) == asked
    node.call(segments[1])
    assert len(node.caller.asked) == asked + 1


@pytest.fixture
def table() -> Iterator[None]:
    install(Allowance((), ()))
    yield
    install(None)


@pytest.mark.usefixtures("table")
def test_a_table_refuses_it_without_a_question(node: Node) -> None:
    digest = hashlib.sha256(b"").digest()
    call = node.call(b"v" + digest + b"__main__\0train")
    assert isinstance(call.frame.code, NotAllowed)
    assert "__main__.train was sent by value" in str(call.frame.code)
    assert node.caller.asked == []


@pytest.mark.parametrize("is_end", [False, True])
def test_calls_of_a_caller_that_is_gone_go_on_without_code(node: Node, is_end: bool) -> None:
    segment = segment_of(lambda: 6)
    other = Caller()
    mine, others = node.call(segment), node.call(segment, other)
    node.code.forget(None if is_end else node.caller)
    assert node.server.went_on == ([mine, others] if is_end else [mine])
    assert isinstance(mine.frame.code, PeerDead)
    node.tell(segment)
    assert len(node.server.went_on) == (2 if is_end else 1)


def test_a_caller_that_goes_while_its_unit_is_loaded_leaves_nothing_behind(node: Node) -> None:
    segment = segment_of(lambda: 8)
    node.call(segment)
    node.code.on_told(node.caller, CodeTold(segment[1:33], units.content_of(segment[1:33])))
    node.code.forget(node.caller)
    node.server.work()
    assert node.code._known == {}


def test_a_call_that_comes_while_the_unit_is_loaded_runs_once(node: Node) -> None:
    """The answer to the question arrives while other threads accept calls."""
    segment = segment_of(lambda: 7)
    for _ in range(200):
        node = Node()
        node.call(segment)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=node.tell, args=(segment,))]
            threads += [threading.Thread(target=node.call, args=(segment,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        node.server.work()
        if len(node.server.went_on) < 3:  # came after the look at who waits: asked again
            node.tell(segment)
        assert len({id(call) for call in node.server.went_on}) == len(node.server.went_on) == 3


@pytest.mark.parametrize("values", [[], [1, 2]])
def test_a_call_with_other_values_than_its_code_uses_is_refused(values: list[int]) -> None:
    scale = 3
    segment, sent = units.split(lambda: scale) or (b"", None)
    unit = units.LoadedUnit(units.content_of(segment[1:33]))
    assert sent == [3]
    assert unit.make(sent)() == 3
    with pytest.raises(ValueError, match="values came for the 1 that the code uses"):
        unit.make(values)
