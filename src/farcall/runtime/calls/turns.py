"""The mailbox of an actor: the calls of one object run one at a time.

Owns the turn: its holder, and the queue for it. Each link delivers requests in order, so the calls of one caller run in
the order in which they were made. A mailbox is a task of the executor: it runs the request that has the turn.

    the turn is   event                                  becomes
    free          a request arrives                      its: the mailbox is to be run
    free          a coroutine or an iterator wants it    its, at once
    taken         either arrives                         taken, and it waits
    taken         ends, and the queue is empty           free
    taken         ends, and a request is first           its: the mailbox is submitted
    taken         ends, and another one is first         its: it is told
    taken         an iterator's call is cancelled, or    taken, and its generator is closed in a later turn
                  its time is over, and it still waits

A plain method has the turn until it returns. A coroutine has one turn per step, so that other calls run while it
awaits, and a generator one per item. A turn lasts until what its holder returns or yields is encoded: the next call may
change it. The first step of a coroutine is part of its call's turn: no later call of the
same caller begins before that step. A holder names itself when it ends its turn: the next holder may have ended already
before the thread that handed the turn over returns.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from time import monotonic
from typing import Any

from farcall.errors import Cancelled, RpcTimeout
from farcall.runtime.calls.executor import FunctionTask, Task
from farcall.runtime.calls.scope import CURRENT, Served
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER

logger: logging.Logger = logging.getLogger("farcall")


class _Place:
    """The place of a coroutine or an iterator in the queue; ``tell`` reports that its turn has come."""

    __slots__ = ("served", "tell")

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell: Callable[[], None] = tell  # from any thread; never blocks
        scope = CURRENT.get()
        self.served: Served | None = None if scope is None else scope.served  # the request that it belongs to


class Turns:
    """The mailbox of one object.

    Mutable, under the lock: ``_holder``, which has the turn (None: it is free); ``_waiting``, the queue; ``_next``, the
    request that `run` will run.
    """

    __slots__ = ("_holder", "_lock", "_next", "_submit", "_waiting")

    def __init__(self, submit: Callable[[Task], None]) -> None:
        """``submit`` has a worker run a task. The turn is taken until `begin`: the object may not be made yet."""
        self._submit = submit
        # Re-entrant: a garbage collection under it may run a destructor that calls the object or closes a generator.
        # Under the lock, no call comes between the look at an empty queue, or at a free turn, and the change that
        # follows: no collection begins there. While one is taken from the queue the turn counts as taken.
        self._lock = threading.RLock()
        self._holder: object = self
        self._waiting: deque[Task | _Place] = deque()
        self._next: Task | None = None

    def begin(self) -> None:
        """The object has been made, or its making has failed: let the first request run."""
        self._leave(self)

    @property
    def holder(self) -> Served | None:
        """The request that has the turn; None: no request has it (it is free, or a batch's, or the object is not made).

        For reports: it may have changed by the time that the caller looks.
        """
        found: Served | None = getattr(self._holder, "served", None)
        return found

    @property
    def waiting(self) -> int:
        """How many wait for the turn."""
        return len(self._waiting)

    def _leave(self, holder: object) -> None:
        """End the turn of ``holder``; does nothing if another holder has it by now."""
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
        """``task``, a request, has arrived. True: it has the turn, and the caller must run or submit this mailbox."""
        with self._lock:
            if self._holder is not None:
                self._waiting.append(task)
                return False
            self._holder = self._next = task
        return True

    def run(self, more: bool) -> None:
        """Run the request that has the turn."""
        task, self._next = self._next, None
        assert task is not None
        try:
            task.run(more or bool(self._waiting))
        finally:
            self._leave(task)  # no effect if a coroutine has taken the turn over (`steps`)

    def drop(self) -> None:
        """The node ends: drop the waiting requests. Coroutines get their turns, to end by themselves.

        Iterators do not wait any more: their calls have been cancelled.
        """
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
        """Take the turn for ``place``, or queue it; ``place.tell`` reports the turn in both cases."""
        with self._lock:
            if self._holder is not None:
                self._waiting.append(place)
                return
            self._holder = place
        place.tell()

    def _withdraw(self, place: _Place) -> None:
        """Remove ``place`` from the queue, or end its turn."""
        with self._lock:
            try:
                self._waiting.remove(place)
                return
            except ValueError:
                pass  # it has the turn, or had it
        self._leave(place)

    def steps(self, coroutine: Coroutine[Any, Any, Any], *, within: bool) -> Coroutine[Any, Any, Any]:
        """Wrap ``coroutine``: each step takes a turn. ``within``: the first step uses the running request's turn."""
        place = None
        if within:
            place = _Place(_nothing)
            with self._lock:
                self._holder = place
        return _Steps(self, coroutine, place)

    def items(
        self,
        source: Iterable[Any],
        take: Callable[[Any], Any],
        waiting: Callable[[], AbstractContextManager[None]],
        gate: Gate,
    ) -> Iterator[Any]:
        """What ``take`` makes of the items of ``source``; each item is made and taken in one turn.

        So no other call changes an item before it is encoded. Each wait for a turn is inside the context ``waiting()``.

        A wait ends with an error at the deadline of the call that is being served, or when that is cancelled: whoever
        cancels it opens ``gate``, where it waits.
        """

        def in_turn(step: Callable[[], Any]) -> Any:
            place = _Place(gate.open)
            self._want(place)
            try:
                with waiting():
                    self._wait(place, gate)
                return step()
            finally:
                self._withdraw(place)

        iterator: Iterator[Any] = in_turn(lambda: iter(source))
        end = object()

        def take_next() -> Any:
            item = next(iterator, end)
            return end if item is end else take(item)

        try:
            while (taken := in_turn(take_next)) is not end:
                yield taken
        except BaseException:
            if getattr(iterator, "gi_frame", None) is not None:  # a generator that has not ended
                self._close(iterator)  # type: ignore[arg-type]
            raise

    def _wait(self, place: _Place, gate: Gate) -> None:
        """Wait until ``place`` has the turn."""
        served = place.served
        deadline = NEVER if served is None else served.deadline
        while self._holder is not place:
            if served is not None and served.cancelled:
                raise Cancelled(f"{served.function_name}() was cancelled while it waited for its turn")
            if not gate.wait(-1 if deadline == NEVER else max(0.0, deadline - monotonic())) and served is not None:
                holder = self.holder
                who = "the object is being made, or serves a batch"
                if holder is not None:
                    who = f"{holder.function_name}() for {holder.caller.name} has the object"
                raise RpcTimeout(f"{served.function_name}() waited for its turn until the end of its time: {who}")

    def _close(self, generator: Generator[Any, Any, Any]) -> None:
        """Close ``generator`` in a turn, now or when that comes: nobody waits for it, so it needs no bound."""

        def close() -> None:
            try:
                generator.close()
            except BaseException as error:
                logger.warning("cannot close the generator of a stream: %s: %s", type(error).__name__, error)

        closing = partial(copy_context().run, close)
        task = FunctionTask(closing, closing)
        if self.enter(task):
            self.run(False)


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine, each step of which takes a turn.

    Not an ``async def``: cancelled before its first step, that runs no code, and would keep its turn for ever.
    """

    __slots__ = ("_begun", "_coroutine", "_place", "_steps", "_turns")

    def __init__(self, turns: Turns, coroutine: Coroutine[Any, Any, Any], place: _Place | None) -> None:
        """``place``: the place that already has the turn, for the first step; None: the first step must wait, too."""
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
                        step, given = coroutine.throw, error  # raised in the coroutine once it has the turn
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
    """A turn that a task on an event loop waits for."""

    __slots__ = ("_future", "_loop", "has_come")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] | None = None
        self.has_come: bool = False

    def wait(self) -> asyncio.Future[None]:
        """A future for one wait; a new one each time, since cancelling a task cancels the future that it awaits."""
        self._future = self._loop.create_future()
        return self._future

    def come(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the loop is closed, and its tasks with it

    def _wake(self) -> None:
        self.has_come = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


def _nothing() -> None:
    pass
