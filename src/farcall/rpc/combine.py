"""Waiting for several futures: for all of them, or for each as it completes.

Owns no thread: the futures themselves wake the waiters. Public as `farcall.gather` and `farcall.as_completed`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar, overload

from farcall.rpc.outcome import DerivedFuture, LoopGate, Opens, Outcome, waiting_here
from farcall.rpc.timeouts import check_wait
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.io.reader import is_reader
from farcall.runtime.io.sigint import SLICE_S
from farcall.runtime.io.timers import NEVER

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
F = TypeVar("F", bound=Outcome[Any])
T = TypeVar("T")


class Gathered(DerivedFuture[T]):
    """The results of several futures, in their order; done when the last of them is done, or at the first error.

    Mutable, under the lock: ``_left``, the number of futures that are not done; 0 once this one is done.
    """

    def __init__(self, futures: tuple[Outcome[Any], ...]) -> None:
        super().__init__(next((future._node for future in futures if future._node is not None), None))
        self._futures = futures
        self._lock = threading.Lock()
        self._left = len(futures)
        if not futures:
            self.set_result(())  # type: ignore[arg-type]
        for future in futures:
            future.when_done(Tell(self._on_done, future))

    def __repr__(self) -> str:
        return f"<Gathered of {len(self._futures)} futures: {self._state()}>"

    def _on_done(self, future: Outcome[Any]) -> None:
        failure = future.exception()
        with self._lock:
            self._left -= 1
            last = self._left == 0
            if self._left < 0 or not (failure is not None or last):
                return
            self._left = 0  # done: futures that complete later find a negative count and change nothing
        finish = self._succeed if failure is None else partial(self.fail, failure)
        if self._has_callbacks and self._node is not None and is_reader():
            self._node.executor.submit(FunctionTask(finish, finish))  # callbacks are user code
        else:
            finish()

    def _succeed(self) -> None:
        self.set_result(tuple(future.value() for future in self._futures))  # type: ignore[arg-type]

    def cancel(self) -> bool:
        """Cancel all futures that are not done."""
        cancelled = [future.cancel() for future in self._futures]  # a list: any() alone would stop at the first
        return any(cancelled)


class Tell:
    """A gate that calls a function with its future."""

    __slots__ = ("_future", "_tell")

    def __init__(self, tell: Callable[[Any], None], future: Any) -> None:
        self._tell = tell
        self._future = future

    def open(self) -> None:
        self._tell(self._future)


@overload
def gather(first: Outcome[A], second: Outcome[B], /) -> Gathered[tuple[A, B]]: ...
@overload
def gather(first: Outcome[A], second: Outcome[B], third: Outcome[C], /) -> Gathered[tuple[A, B, C]]: ...
@overload
def gather(
    first: Outcome[A], second: Outcome[B], third: Outcome[C], fourth: Outcome[D], /
) -> Gathered[tuple[A, B, C, D]]: ...
@overload
def gather(*futures: Outcome[T]) -> Gathered[tuple[T, ...]]: ...
def gather(*futures: Outcome[Any]) -> Gathered[Any]:
    """Return a future of all results, in the order of ``futures``. The first error completes it at once.

    ``gather(f, g).result(timeout=2)``, or ``await gather(f, g)``. Cancelling it cancels all of ``futures``; an error
    of one does not affect the others.
    """
    _check_futures("gather", futures)
    return Gathered(futures)


class Completions(Generic[F]):
    """Futures in the order in which they complete, for ``for`` and for ``async for``.

    Mutable: ``_arrived``, to which any thread puts completed futures; ``_left``, the number not yet given out;
    ``_gate``, where a coroutine waits.
    """

    def __init__(self, futures: list[F], timeout: float | None) -> None:
        self._arrived: SimpleQueue[F] = SimpleQueue()
        self._gate: Opens | None = None
        self._timeout = timeout
        self._deadline = monotonic() + check_wait(timeout)
        self._left = len(futures)
        for future in futures:
            future.when_done(Tell(self._on_done, future))

    def _on_done(self, future: F) -> None:
        self._arrived.put(future)
        gate = self._gate
        if gate is not None:
            gate.open()

    def __iter__(self) -> Iterator[F]:
        return self

    def __next__(self) -> F:
        if not self._left:
            raise StopIteration
        try:
            found = self._arrived.get_nowait()
        except Empty:
            with waiting_here():
                found = self._wait()
        self._left -= 1
        return found

    def _wait(self) -> F:
        while True:
            try:
                # In slices, as `Gate`: the main thread notices a signal that came just before its sleep only then.
                return self._arrived.get(timeout=max(0.0, min(SLICE_S, self._deadline - monotonic())))
            except Empty:
                if monotonic() >= self._deadline:
                    raise self._late() from None

    def __aiter__(self) -> Completions[F]:
        return self

    async def __anext__(self) -> F:
        if not self._left:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        while True:
            gate = self._gate = LoopGate(loop)
            try:
                # Only after the gate is set: `_on_done` puts first and opens then, so no completion is missed.
                found = self._arrived.get_nowait()
            except Empty:
                try:
                    await asyncio.wait_for(gate.passed, _seconds_until(self._deadline))
                except TimeoutError:
                    raise self._late() from None
            else:
                self._left -= 1
                return found

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self._left} futures are not done after {self._timeout:g} s; their calls continue")


def as_completed(futures: Iterable[F], timeout: float | None = None) -> Completions[F]:
    """Iterate over ``futures``, each as soon as it is done: ``for f in as_completed(fs)``, or ``async for``.

    ``timeout``: seconds for all of them together. After that the iterator raises ``TimeoutError``; the calls go on.
    """
    given = list(dict.fromkeys(futures))
    _check_futures("as_completed", given)
    return Completions(given, timeout)


def _check_futures(name: str, given: Iterable[object]) -> None:
    for one in given:
        if not isinstance(one, Outcome):
            hint = f": write {name}(*futures)" if isinstance(one, list | tuple) else ""
            raise TypeError(f"{name} takes futures of farcall, not {type(one).__name__}{hint}")


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == NEVER else max(0.0, deadline - monotonic())
