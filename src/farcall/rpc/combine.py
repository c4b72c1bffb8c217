"""Several futures at once: all of them, each as it completes, and one function over many items on many workers.

Owns no thread: whoever waits is woken by the futures themselves. Public as `farcall.gather`, `farcall.as_completed` and
`farcall.map`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar, overload

from farcall.errors import PeerDead, RpcError, UnknownWorker
from farcall.rpc.call import UNSET_TIMEOUT
from farcall.rpc.future import Future, call_async
from farcall.rpc.handles import Worker, handle_of
from farcall.rpc.outcome import DerivedFuture, LoopGate, Opens, Outcome, waiting_here
from farcall.rpc.retry import Retry, check_retry
from farcall.runtime.calls.pending import name_of
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_runtime

__all__ = ["Completions", "Gathered", "as_completed", "gather", "map"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
F = TypeVar("F", bound=Outcome[Any])
S = TypeVar("S")
T = TypeVar("T")


class Gathered(DerivedFuture[T]):
    """The results of several futures, in their order; done with the last of them, or with the first error."""

    def __init__(self, futures: tuple[Outcome[Any], ...]) -> None:
        super().__init__()
        self._futures = futures
        self._lock = threading.Lock()
        self._left = len(futures)
        if not futures:
            self.set_result(())  # type: ignore[arg-type]
        for future in futures:
            future.when_done(_Tell(self._on_done, future))

    def _on_done(self, future: Outcome[Any]) -> None:
        failure = future.exception()
        with self._lock:
            self._left -= 1
            last = self._left == 0
            if self._left < 0 or not (failure is not None or last):
                return
            self._left = 0  # done: what comes later changes nothing
        if failure is not None:
            self.fail(failure)
        else:
            self.set_result(tuple(future.value() for future in self._futures))  # type: ignore[arg-type]

    def cancel(self) -> bool:
        """Cancel all that are not done."""
        cancelled = [future.cancel() for future in self._futures]  # all of them, not up to the first
        return any(cancelled)


class _Tell:
    """A gate that hands its future to a function."""

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
    """A future of all results, in the order of ``futures``; or of the first error, as soon as there is one.

    ``gather(f, g).result(timeout=2)``, or ``await gather(f, g)``. Cancelling it cancels all of them; an error of one
    leaves the others as they are.
    """
    return Gathered(futures)


class Completions(Generic[F]):
    """Futures in the order in which they complete, for ``for`` and for ``async for``."""

    def __init__(self, futures: Iterable[F], timeout: float | None) -> None:
        self._arrived: SimpleQueue[F] = SimpleQueue()
        self._gate: Opens | None = None
        self._timeout = timeout
        self._deadline = NEVER if timeout is None else monotonic() + timeout
        given = list(dict.fromkeys(futures))
        self._left = len(given)
        for future in given:
            future.when_done(_Tell(self._on_done, future))

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
                try:
                    found = self._arrived.get(timeout=_seconds_until(self._deadline))
                except Empty:
                    raise self._late() from None
        self._left -= 1
        return found

    def __aiter__(self) -> Completions[F]:
        return self

    async def __anext__(self) -> F:
        if not self._left:
            raise StopAsyncIteration
        loop = asyncio.get_running_loop()
        while True:
            gate = self._gate = LoopGate(loop)
            try:
                found = self._arrived.get_nowait()  # after the gate is there: `_on_done` puts first and opens then
            except Empty:
                try:
                    await asyncio.wait_for(gate.passed, _seconds_until(self._deadline))
                except TimeoutError:
                    raise self._late() from None
            else:
                self._left -= 1
                return found

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self._left} futures are not done within {self._timeout:g} s; their calls go on")


def as_completed(futures: Iterable[F], timeout: float | None = None) -> Completions[F]:
    """The same futures, each as soon as it is done: ``for f in as_completed(fs)``, or ``async for``.

    ``timeout`` in seconds is for all of them together; then ``TimeoutError`` is raised, and the calls go on.
    """
    return Completions(futures, timeout)


def map(
    func: Callable[[S], T],
    items: Iterable[S],
    *,
    workers: Iterable[Worker | str],
    in_flight: int = 4,
    ordered: bool = True,
    timeout: float | None = UNSET_TIMEOUT,
    retry: Retry | None = None,
    progress: bool = False,
) -> Generator[T, None, None]:
    """``func(item)`` for each of ``items``, on ``workers``; yields the results.

    Items are taken as workers become free, so ``items`` may be endless. Leaving the loop cancels what is under way.

    Args:
        workers: handles or names; each has at most ``in_flight`` items at a time.
        ordered: results in the order of the items; otherwise as they come.
        timeout: seconds for each item; None for no limit; by default that of the options.
        retry: if ``func`` may run twice for an item: where the network failed it, do the item again, on another worker
            if its own is dead. By default the error is raised.
        progress: show a bar on the terminal (needs ``rich``: ``pip install 'farcall[cli]'``).
    """
    if in_flight < 1:
        raise ValueError(f"in_flight must be at least 1, not {in_flight!r}")
    if retry is not None:
        check_retry(retry)
    handles = [one if isinstance(one, Worker) else handle_of(None, one) for one in workers]
    if not handles:
        raise ValueError("map needs at least one worker")
    return _Map(func, iter(items), handles, in_flight, timeout, retry).results(ordered, progress, _length(items))


class _Map:
    """One `map`, at work. All of it runs on the thread that asks for the next result."""

    def __init__(
        self,
        func: Callable[[Any], Any],
        items: Iterator[Any],
        handles: list[Worker],
        in_flight: int,
        timeout: float | None,
        retry: Retry | None,
    ) -> None:
        self._func = func
        self._items = items
        self._timeout = timeout
        self._retry = retry
        self._free: deque[Worker] = deque(handles * in_flight)  # round robin: one item each, then the second
        self._most_ahead = 2 * len(self._free)
        self._again: deque[tuple[int, Any, int]] = deque()  # number, item, attempt
        self._running: dict[Future[Any], tuple[int, Any, int, Worker]] = {}
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._dead: set[str] = set()
        self._numbers = count()

    def results(self, ordered: bool, progress: bool, total: int | None) -> Generator[Any, None, None]:
        ready: dict[int, Any] = {}
        given = 0
        with ExitStack() as shown:
            advance = shown.enter_context(_bar(self._func, total)) if progress else None
            try:
                while True:
                    # An item that takes long must not have the results of all later ones pile up behind it.
                    while self._free and len(ready) + len(self._running) < self._most_ahead and self._start_one():
                        pass
                    if not self._running:
                        return
                    number, value = self._next_result()
                    if number < 0:
                        continue
                    if advance is not None:
                        advance()
                    if not ordered:
                        yield value
                        continue
                    ready[number] = value
                    while given in ready:
                        yield ready.pop(given)
                        given += 1
            finally:
                for future in self._running:
                    future.cancel()

    def _start_one(self) -> bool:
        """Give an item to a free worker; False: there is none left."""
        if self._again:
            number, item, attempt = self._again.popleft()
        else:
            try:
                item = next(self._items)
            except StopIteration:
                return False
            number, attempt = next(self._numbers), 1
        to = self._free.popleft()
        node = to._node or current_runtime()
        timeout = to._timeout if self._timeout == UNSET_TIMEOUT else self._timeout
        try:
            future = call_async(node, to.name, self._func, (item,), None, timeout)
        except UnknownWorker as error:
            self._failed(error, number, item, attempt, to)
            return True
        self._running[future] = (number, item, attempt, to)
        future.when_done(_Tell(self._done.put, future))
        return True

    def _next_result(self) -> tuple[int, Any]:
        """The number and result of the item that is done next; a negative number: it is to be done again."""
        with waiting_here():
            future = self._done.get()  # bounded by the timeouts of the calls
        number, item, attempt, to = self._running.pop(future)
        try:
            value = future.wait()
        except RpcError as error:
            self._failed(error, number, item, attempt, to)
            return -1, None
        self._free.append(to)
        return number, value

    def _failed(self, error: RpcError, number: int, item: Any, attempt: int, to: Worker) -> None:
        """Have the item done again, or raise ``error``."""
        retry = self._retry
        unknown = isinstance(error, UnknownWorker)  # it was not called at all
        pause_s = None if retry is None else 0.0 if unknown else retry.pause_s(attempt, error, NEVER)
        if retry is None or pause_s is None or attempt >= retry.attempts:
            raise error
        if unknown or isinstance(error, PeerDead):
            self._dead.add(to.name)
            self._free = deque(one for one in self._free if one.name not in self._dead)
            if not self._free and not self._running:
                raise error
        else:
            with waiting_here():
                Gate().wait(pause_s)
            self._free.append(to)
        self._again.append((number, item, attempt + 1))


@contextmanager
def _bar(func: Callable[..., Any], total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; what it gives is called once for each item."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install 'farcall[cli]'") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as shown:
        task = shown.add_task(name_of(func), total=total)
        yield lambda: shown.advance(task)


def _length(items: Iterable[Any]) -> int | None:
    return len(items) if isinstance(items, Sized) else None


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == NEVER else max(0.0, deadline - monotonic())
