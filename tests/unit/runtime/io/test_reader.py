"""The watch over the I/O thread: who owns the role, and that every function that runs inline is watched."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import FunctionType

import pytest

from farcall.errors import RpcError
from farcall.runtime.io import reader
from farcall.runtime.io.reader import Standby, claim, reading, stop_reading

PATIENCE_S = 60.0


class Link:
    def __init__(self) -> None:
        self.passed_on = threading.Event()

    def pass_on(self) -> None:
        self.passed_on.set()

    def end_reading(self) -> None:
        raise AssertionError("another thread reads this link")


class Loop:
    def on_thread(self) -> bool:
        return True

    def hand_over(self) -> None:
        raise AssertionError("another thread is the I/O thread")


@pytest.fixture
def standby() -> Iterator[Standby]:
    found = Standby("test")
    yield found
    found.stop()


def test_quick_function_keeps_the_role() -> None:
    standby = Standby("test", look_s=60.0)  # on a busy machine any function may take 5 ms
    role = Link()
    assert claim(standby.begin(role))
    assert not role.passed_on.is_set()
    standby.stop()


def test_slow_function_loses_it(standby: Standby) -> None:
    role = Link()
    watch = standby.begin(role)
    assert role.passed_on.wait(PATIENCE_S)
    assert not claim(watch)


def test_where_there_can_be_no_thread_functions_run_unwatched(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert claim(standby.begin(Link()))
    role = Link()
    standby.begin(role)
    assert role.passed_on.wait(PATIENCE_S)


def test_end_of_a_slow_function_does_not_blind_the_watch_to_the_next(standby: Standby) -> None:
    # The thread that lost the role comes back while its successor runs a function, which may be slow as well.
    first, second = Link(), Link()
    begun, ended = threading.Event(), threading.Event()

    def succeed() -> None:
        standby.begin(second)
        begun.set()
        assert ended.wait(PATIENCE_S)

    slow = standby.begin(first)
    assert first.passed_on.wait(PATIENCE_S)
    successor = threading.Thread(target=succeed)
    successor.start()
    assert begun.wait(PATIENCE_S)
    assert not claim(slow)
    standby.forget()
    assert second.passed_on.wait(PATIENCE_S)
    ended.set()
    successor.join(PATIENCE_S)


def test_a_watch_is_used_again_by_its_thread_and_by_no_other_standby(standby: Standby) -> None:
    lasting = Standby("lasting", look_s=60.0)  # on a busy machine any function may take 5 ms
    watch = lasting.begin(Link())
    assert claim(watch)
    assert lasting.begin(Link()) is watch
    assert claim(watch)
    other = Link()
    assert standby.begin(other) is not watch
    assert other.passed_on.wait(PATIENCE_S)
    standby.forget()
    again = Link()
    assert standby.begin(again) is not watch
    assert again.passed_on.wait(PATIENCE_S)
    lasting.stop()


def test_role_given_away_by_the_function_itself_is_not_taken_again(standby: Standby) -> None:
    role = Link()
    watch = standby.begin(role)
    mine = claim(watch)  # almost always; else the standby thread was faster
    assert not claim(watch)
    after = Link()
    standby.begin(after)
    assert after.passed_on.wait(PATIENCE_S)
    assert role.passed_on.is_set() is not mine


def test_late_reader_that_then_waits_is_the_io_thread_no_more(standby: Standby) -> None:
    """A late function whose answer met a full connection left two I/O threads on one loop, for good."""
    role = Link()

    def be_late() -> None:
        reading.link, reading.loop = role, Loop()
        reading.watch = standby.begin(role)
        assert role.passed_on.wait(PATIENCE_S)
        stop_reading()
        found.append((reading.link, reading.loop, reading.watch))

    found: list[tuple[object, ...]] = []
    thread = threading.Thread(target=be_late)
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [(None, None, None)]


def test_readers_that_find_the_standby_thread_asleep_at_once_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    standby = Standby("test")
    started: list[threading.Thread] = []

    class Thread(threading.Thread):
        def start(self) -> None:
            started.append(self)
            if len(started) == 1:
                standby.rouse()  # as another reader, which has seen it asleep a moment ago
            super().start()

    monkeypatch.setattr(reader.threading, "Thread", Thread)
    standby.rouse()
    standby.stop()
    assert len(started) == 1
    assert not started[0].is_alive()


class Cyclic:
    """Only a garbage collection ends it."""

    def __init__(self, ends: list[Exception | None]) -> None:
        self.itself = self
        self.ends = ends

    def __del__(self) -> None:
        try:
            stop_reading()
        except RpcError as error:
            self.ends.append(error)
        else:
            self.ends.append(None)


def collect() -> None:
    gc.collect()


@pytest.mark.parametrize("interrupted", ["farcall.runtime.link.send", "program"])
def test_a_destructor_may_wait_unless_it_interrupts_farcall(interrupted: str) -> None:
    ends: list[Exception | None] = []
    Cyclic(ends)
    amid = FunctionType(collect.__code__, {"__name__": interrupted, "gc": gc})
    amid()
    (end,) = ends
    assert isinstance(end, RpcError) is (interrupted != "program")
    stop_reading()  # afterwards everybody may


def test_a_collection_whose_end_was_not_noticed_is_over() -> None:
    """Ctrl-C may cut every Python function that is told of the end."""
    reading.interrupted = reader._collections["stop"]
    with pytest.raises(RpcError, match="use rpc_async in destructors"):
        stop_reading()
    gc.callbacks.remove(reader._on_collection)
    try:
        gc.collect()
    finally:
        gc.callbacks.append(reader._on_collection)
    stop_reading()
    assert reading.interrupted is None
