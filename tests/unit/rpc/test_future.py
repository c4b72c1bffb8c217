"""Futures of calls without sockets: what happens between two events."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.times import LONG_S
from tests.kit.unlinked import UnlinkedPeer, quiet_core

from farcall.core.contract import Core, Piece
from farcall.errors import Cancelled, Delivery, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.frames import RESPONSE, Frame
from farcall.rpc import future as future_module
from farcall.rpc import outcome
from farcall.rpc.call import plain_request, send
from farcall.rpc.combine import gather
from farcall.rpc.future import Future
from farcall.rpc.outcome import DerivedFuture, Outcome
from farcall.rpc.retry import Pauses, Retry, RetryingFuture
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.io.reader import reading
from farcall.runtime.node.hooks import Hooks
from farcall.serialize import RECORDING, write_value


class FakePeer(UnlinkedPeer):
    """A peer that takes requests and cancellations; a test may act while a request is being sent."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.told: list[tuple[str, int]] = []
        self.while_sending: Callable[[], object] = lambda: None

    def encode(self, frame: Frame, deadline: float) -> tuple[bytes, Sequence[Piece]]:
        self.while_sending()
        self.told.append(("request", frame.call_id))
        return super().encode(frame, deadline)

    def cancel(self, call_id: int) -> None:
        self.told.append(("cancelled", call_id))
        super().cancel(call_id)


class FakeNode:
    """The parts of a node that a future needs; a test runs the tasks of its workers."""

    running = True
    timeout_s = 60.0
    devices = None
    device_list: tuple[()] = ()
    info = WorkerInfo("w0", 0)
    options = SimpleNamespace(inherit=True)

    def __init__(self) -> None:
        self.clock = Clock()
        self.timer = self.clock.timer
        self.tasks: list[Any] = []
        self.executor: Any = SimpleNamespace(submit=self.tasks.append, park=lambda: False)
        self.core = quiet_core()
        self.calls = CallTable(self.core, self.clock.timer, self.executor)
        self.target = FakePeer(self.core)
        self.hooks = Hooks()
        self.pauses = Pauses(self)  # type: ignore[arg-type]
        self.something_ended = lambda: None

    def peer(self, to: object) -> FakePeer:
        return self.target

    def part(self, kind: type) -> Any:
        assert kind is Pauses
        return self.pauses

    def run_tasks(self) -> None:
        while self.tasks:
            self.tasks.pop(0).run(False)

    def lose(self, future: Future[Any]) -> None:
        """As the thread that sees the link end."""
        assert self.calls.fail_all(lambda call: PeerDead("gone", Delivery.UNKNOWN)) == 1


@pytest.fixture
def node() -> Iterator[Any]:
    made = FakeNode()
    yield made
    made.core.stop()


def test_a_cancellation_is_told_again_if_the_request_was_being_sent(node: Any) -> None:
    """The core did not know the call yet when it was cancelled."""
    future: Future[int] = Future(node, node.target, len, 60.0)
    node.target.while_sending = future.cancel
    send(node.calls, future, plain_request(node.target, b"f"))
    assert node.target.told == [("cancelled", 1), ("request", 1), ("cancelled", 1)]
    assert future.cancelled()


def test_a_wait_that_was_in_vain_leaves_nothing_behind(node: Any) -> None:
    future: Future[int] = Future(node, node.target, len, 60.0)
    send(node.calls, future, plain_request(node.target, b"f"))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            future.wait(1e-6)
    assert not future._waiters


def test_a_very_long_wait_has_no_limit(node: Any) -> None:
    """On another thread than the main one, Python's own lock refused so many seconds."""
    future: Future[int] = Future(node, node.target, len, 60.0)
    send(node.calls, future, plain_request(node.target, b"f"))
    found: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: found.append(future.exception(float("inf"))))
    thread.start()
    node.lose(future)
    node.run_tasks()
    thread.join(LONG_S)
    assert [type(error) for error in found] == [PeerDead]


def test_a_value_that_cannot_be_looked_into_fails_its_future(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a node with devices, each value is searched for tensors on them, which runs code of the value's class."""

    def stamp(*_: Any, **__: Any) -> None:
        raise RecursionError("a value that holds itself")

    monkeypatch.setattr(future_module, "stamp", stamp)
    monkeypatch.setattr(outcome, "stamp", stamp)
    monkeypatch.setattr(future_module, "has_devices", lambda payload: True)
    node.device_list = ("cuda:0",)
    future: Future[int] = Future(node, node.target, len, 60.0)
    answer = Frame(RESPONSE)
    write_value(answer, [1], node.target)
    future._complete(answer)
    assert isinstance(future.exception(), RecursionError)
    derived: DerivedFuture[int] = DerivedFuture(node)
    derived.completing(lambda done: 1)(None)
    assert isinstance(derived.exception(), RecursionError)


# ---------------------------------------------------------------------- callbacks


class Recorded:
    """As much of an autograd context as a callback can see."""

    def enter(self) -> Any:
        previous = RECORDING.get()
        RECORDING.set(self)  # type: ignore[arg-type]
        return previous


def called(node: Any) -> Future[Any]:
    future: Future[Any] = Future(node, node.target, len, 60.0)
    send(node.calls, future, plain_request(node.target, b"f"))
    return future


def answer(node: Any, *futures: Future[Any]) -> None:
    """As a worker that takes the answers."""
    for future in futures:
        frame = Frame(RESPONSE)
        write_value(frame, [7], node.target)
        future.on_answer(frame)


@contextmanager
def on_io_thread() -> Iterator[None]:
    reading.loop = SimpleNamespace()
    try:
        yield
    finally:
        reading.loop = None


MAKING: dict[str, Callable[[Future[Any]], Outcome[Any]]] = {
    "a call": lambda call: call,
    "what then gives": lambda call: call.then(lambda done: done.value()),  # type: ignore[dict-item, return-value]
    "gather": gather,
    "gather of gather": lambda call: gather(gather(call)),
    "what then of gather gives": lambda call: gather(call).then(lambda done: done.value()),  # type: ignore[dict-item]
}
ADDING: dict[str, Callable[[Any, Callable[[Any], Any]], object]] = {
    "then": lambda future, callback: future.then(callback),
    "add_done_callback": lambda future, callback: future.add_done_callback(callback),
}
ways = pytest.mark.parametrize(
    ("make", "add"), [pytest.param(m, a, id=f"{a_} of {m_}") for m_, m in MAKING.items() for a_, a in ADDING.items()]
)


@ways
def test_every_callback_runs_in_the_context_in_which_it_was_added(node: Any, make: Any, add: Any) -> None:
    first, second = Recorded(), Recorded()
    seen: list[object] = []
    call = called(node)
    RECORDING.set(first)  # type: ignore[arg-type]
    try:
        future = make(call)
        add(future, lambda _: seen.append(RECORDING.get()))
        RECORDING.set(None)
        add(future, lambda _: seen.append(RECORDING.get()))
        RECORDING.set(second)  # type: ignore[arg-type]
        add(future, lambda _: seen.append(RECORDING.get()))
        answer(node, call)
        node.run_tasks()  # on a thread that is in a context of its own
        assert seen == [first, None, second]
        assert RECORDING.get() is second
        add(future, lambda _: seen.append(RECORDING.get()))
        assert seen[3:] == [second]
    finally:
        RECORDING.set(None)


@ways
def test_no_callback_runs_on_the_io_thread(node: Any, make: Any, add: Any) -> None:
    seen: list[int] = []
    call = called(node)
    future = make(call)
    for number in range(3):
        add(future, lambda _, number=number: seen.append(number))
    with on_io_thread():
        answer(node, call)
        assert not seen
    node.run_tasks()
    assert seen == [0, 1, 2]
    add(future, lambda _: seen.append(3))
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("add", ADDING.values(), ids=list(ADDING))
def test_no_callback_that_comes_late_runs_on_the_io_thread(
    node: Any, add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added by another thread while the I/O thread, which has seen no callback, reads the value."""
    call = called(node)
    gathered = gather(call)
    seen: list[int] = []

    def read_value(*given: Any) -> Any:
        for future in (call, gathered):
            add(future, lambda _: seen.append(1))
        return read_at_once(*given)

    read_at_once = future_module.read_value
    monkeypatch.setattr(future_module, "read_value", read_value)
    with on_io_thread():
        answer(node, call)
        assert not seen
    node.run_tasks()
    assert seen == [1, 1]


def test_a_callback_that_fails_on_a_worker_is_reported(
    node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = called(node)
    read_at_once = future_module.read_value

    def read_value(*given: Any) -> Any:
        call.add_done_callback(lambda _: {}["missing"])
        return read_at_once(*given)

    monkeypatch.setattr(future_module, "read_value", read_value)
    with on_io_thread():
        answer(node, call)
    node.run_tasks()
    assert "a callback of a future failed" in caplog.text
    assert "KeyError: 'missing'" in caplog.text


@pytest.mark.parametrize("add", ADDING.values(), ids=list(ADDING))
def test_ctrl_c_at_a_callback_of_a_future_that_is_done_reaches_the_program(node: Any, add: Any) -> None:
    """torch would drop it, and nobody would complete what `then` gives. Here it comes before the first instruction."""
    call = called(node)
    answer(node, call)

    def press(frame: Any, event: str, _: object) -> None:
        if frame.f_code.co_name == "run" and "torch" not in frame.f_code.co_filename:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            add(call, lambda done: done.value())
    finally:
        sys.settrace(before)


def test_a_callback_that_fails_at_once_is_reported(node: Any, caplog: pytest.LogCaptureFixture) -> None:
    call = called(node)
    answer(node, call)
    call.add_done_callback(lambda _: {}["missing"])
    assert "KeyError: 'missing'" in caplog.text


# ---------------------------------------------------------------------- calls that are made again


def retrying(node: Any) -> RetryingFuture:
    future = RetryingFuture(Retry(attempts=3, backoff_s=0.01), node, "w1", len, ((),), None, 60.0)
    future.send()
    return future


def requests(node: Any) -> int:
    return sum(what == "request" for what, _ in node.target.told)


def end_all_pauses(node: Any) -> None:
    node.clock.turn_to(float("1e12"))
    node.run_tasks()


def test_a_call_is_made_again(node: Any) -> None:
    future = retrying(node)
    node.lose(future)
    node.run_tasks()
    end_all_pauses(node)
    assert requests(node) == 2
    assert not future.done()
    assert future.cancel()
    assert future.cancelled()


def test_a_call_that_is_cancelled_between_its_failure_and_its_pause_is_not_made_again(node: Any) -> None:
    future = retrying(node)
    node.lose(future)  # by now a worker is to enter the pause
    assert not future.cancel()
    node.run_tasks()
    end_all_pauses(node)
    assert requests(node) == 1
    assert isinstance(future.exception(), PeerDead)


def test_a_call_that_is_cancelled_while_it_enters_its_pause_ends_once(node: Any) -> None:
    future = retrying(node)
    node.lose(future)

    class Cancelling(list[BaseException]):
        def append(self, error: BaseException) -> None:
            super().append(error)
            assert future.cancel()

    future._paused = Cancelling()
    node.run_tasks()
    end_all_pauses(node)
    assert requests(node) == 1
    assert future.cancelled()


def test_a_call_that_is_cancelled_between_its_pause_and_its_next_attempt_ends(node: Any) -> None:
    future = retrying(node)
    node.lose(future)
    node.run_tasks()
    plain = node.peer

    def peer(to: object) -> FakePeer:
        assert not future.cancel()  # its thread has left the pause, and is not in the table of calls yet
        return plain(to)

    node.peer = peer
    end_all_pauses(node)
    assert node.target.told == [("request", 1), ("cancelled", 1), ("request", 2), ("cancelled", 2)]
    assert isinstance(future.exception(), Cancelled)
