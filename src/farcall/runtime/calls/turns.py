"""The calls of one object, one at a time: the mailbox of an actor.

Owns who has the turn, and who waits for it. Requests come in the order of their links, so those of one caller run in
the order in which they were made. A mailbox is a task of the executor: run, it runs the request whose turn it is.

    the turn is   event                                  becomes
    free          a request comes                        its: the mailbox is to be run
    free          a coroutine or an iterator wants it    its, at once
    taken         either comes                           taken, and it waits
    taken         the end, and nobody waits              free
    taken         the end, and a request is first        its: the mailbox is submitted
    taken         the end, and another one is first      its: that is told

A plain method has its turn until it returns. A coroutine has one for each step, so that others run while it awaits
something, and a generator one for each item. The first step of a coroutine is part of its call's turn: no later call
of the same caller begins before it. Whoever ends a turn names it, because a turn that was handed on may be over before
whoever handed it on returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from farcall.runtime.calls.executor import UNKNOWN_S, Task
from farcall.runtime.io.sigint import Gate


class _Place:
    """In the queue: of a coroutine or an iterator."""

    __slots__ = ("tell",)

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell: Callable[[], None] = tell  # from any thread; never blocks


class Turns:
    """The mailbox of one object.

    Mutable, under the lock: ``_holder``, whose turn it is (None: nobody's); ``_waiting``, who comes next; ``_next``,
    the request that `run` is to run.
    """

    __slots__ = ("_holder", "_lock", "_next", "_submit", "_waiting")

    def __init__(self, submit: Callable[[Task], None]) -> None:
        """``submit`` has a worker run a task. The turn is taken until `begin`: the object may still be being made."""
        self._submit = submit
        self._lock = threading.Lock()
        self._holder: object = self
        self._waiting: deque[Task | _Place] = deque()
        self._next: Task | None = None

    def begin(self) -> None:
        """The object is there, or never will be."""
        self._leave(self)

    def _leave(self, holder: object) -> None:
        """``holder`` has had its turn; nothing happens if it is another's by now."""
        with self._lock:
            if self._holder is not holder:
                return
            found = self._holder = self._waiting.popleft() if self._waiting else None
            if found is not None and not isinstance(found, _Place):
                self._next = found
        if isinstance(found, _Place):
            found.tell()
        elif found is not None:
            self._submit(self)

    # --- requests -------------------------------------------------------------------------------------------

    def enter(self, task: Task) -> bool:
        """``task``, a request, has come. True: it has its turn, and this mailbox is to be run, by whatever thread."""
        with self._lock:
            if self._holder is not None:
                self._waiting.append(task)
                return False
            self._holder = self._next = task
        return True

    @property
    def expected_s(self) -> float:
        """See `Task`."""
        task = self._next
        return UNKNOWN_S if task is None else task.expected_s

    def run(self, more: bool) -> None:
        """Run the request whose turn it is."""
        task, self._next = self._next, None
        assert task is not None
        try:
            task.run(more or bool(self._waiting))
        finally:
            self._leave(task)  # unless a coroutine has taken it over

    def drop(self) -> None:
        """The node ended first: no request that waits will run. Coroutines and iterators are told to go on, and end."""
        while True:
            task, self._next = self._next, None
            if task is not None:
                task.drop()
            with self._lock:
                found = self._holder = self._waiting.popleft() if self._waiting else None
            if found is None:
                return
            if isinstance(found, _Place):
                found.tell()
            else:
                self._next = found

    # --- coroutines and iterators ---------------------------------------------------------------------------

    def _want(self, place: _Place) -> None:
        with self._lock:
            if self._holder is not None:
                self._waiting.append(place)
                return
            self._holder = place
        place.tell()

    def _withdraw(self, place: _Place) -> None:
        """``place`` does not want a turn any more, or has had it."""
        with self._lock:
            if place in self._waiting:
                self._waiting.remove(place)
                return
        self._leave(place)

    def steps(self, coroutine: Coroutine[Any, Any, Any], *, within: bool) -> Coroutine[Any, Any, Any]:
        """``coroutine``, each step of which has a turn. ``within``: the first step has that of the running request."""
        place = None
        if within:
            place = _Place(_nothing)
            with self._lock:
                self._holder = place
        return _Steps(self, coroutine, place)

    def items(self, source: Iterable[Any], waiting: Callable[[], AbstractContextManager[None]]) -> Iterator[Any]:
        """The items of ``source``, each made in a turn. ``waiting`` is entered around each wait for one."""

        def in_turn(step: Callable[[], Any]) -> Any:
            gate = Gate()
            place = _Place(gate.open)
            self._want(place)
            try:
                with waiting():
                    gate.wait()
                return step()
            finally:
                self._withdraw(place)

        iterator: Iterator[Any] = in_turn(lambda: iter(source))
        end = object()
        try:
            while (item := in_turn(lambda: next(iterator, end))) is not end:
                yield item
        except GeneratorExit:
            if hasattr(iterator, "gi_frame"):
                in_turn(iterator.close)  # type: ignore[attr-defined]
            raise


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine, each step of which has a turn.

    Not an ``async def``: one that is cancelled before its first step runs no code, and would keep its turn for good.
    """

    __slots__ = ("_begun", "_coroutine", "_place", "_steps", "_turns")

    def __init__(self, turns: Turns, coroutine: Coroutine[Any, Any, Any], place: _Place | None) -> None:
        """``place``: of a turn that the first step has already."""
        self._turns = turns
        self._coroutine = coroutine
        self._place = place
        self._begun = False
        self._steps = self._go()

    def send(self, value: Any) -> Any:
        self._begun = True
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        if not self._begun:
            self.close()
        return self._steps.throw(*error)

    def close(self) -> None:
        if not self._begun:
            self._coroutine.close()
            if self._place is not None:
                self._turns._leave(self._place)
        self._steps.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise TypeError("it is run as a task")

    def _go(self) -> Generator[Any, Any, Any]:
        turns, coroutine, place = self._turns, self._coroutine, self._place
        step: Callable[[Any], Any] = coroutine.send
        given: Any = None
        while True:
            if place is None:
                turn = _LoopTurn()
                place = _Place(turn.come)
                turns._want(place)
                while not turn.has_come:
                    try:
                        yield from turn.wait().__await__()
                    except asyncio.CancelledError as error:
                        step, given = coroutine.throw, error  # the coroutine hears of it in its turn
                    except GeneratorExit:
                        turns._withdraw(place)
                        coroutine.close()
                        raise
            try:
                awaited = step(given)
            except StopIteration as done:
                return done.value
            finally:
                turns._leave(place)
                place = None
            step = coroutine.send
            try:
                given = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                step, given = coroutine.throw, error


class _LoopTurn:
    """A turn that a task of an event loop waits for."""

    __slots__ = ("_future", "_loop", "has_come")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self.has_come: bool = False

    def wait(self) -> asyncio.Future[None]:
        """A new future each time: who cancels a task cancels what it awaits."""
        self._future = self._loop.create_future()
        return self._future

    def come(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop was closed: nobody waits any more

    def _wake(self) -> None:
        self.has_come = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


def _nothing() -> None:
    pass
