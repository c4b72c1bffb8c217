"""`map`: one function over many items on many workers, which may join and leave meanwhile.

Owns no thread: everything runs on the thread that asks for the next result, and the calls' futures wake that thread.
Public as `farcall.map`; `farcall.launch` maps over the workers that it watches (`Roster`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol, TypeVar

from farcall.errors import PeerDead, RpcError, UnknownWorker
from farcall.rpc.combine import Tell
from farcall.rpc.future import Future, call_async
from farcall.rpc.handles import Worker, handle_of
from farcall.rpc.outcome import waiting_here
from farcall.rpc.retry import Retry, check_retry
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.io.sigint import SLICE_S
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_runtime
from farcall.runtime.observing.counters import name_of

S = TypeVar("S")
T = TypeVar("T")


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
    """Call ``func(item)`` for each of ``items``, on ``workers``; yield the results.

    ``map`` takes an item when a worker becomes free, so ``items`` may be endless. Leaving the loop cancels the calls
    under way.

    Args:
        workers: handles or names; each has at most ``in_flight`` items at a time.
        ordered: yield results in the order of the items; otherwise as they arrive.
        timeout: seconds for each item; None for no limit; by default the timeout of the options.
        retry: if ``func`` may run twice for an item: when the network fails a call, do the item again, on another
            worker if the first is dead. By default the error is raised; a note of it names the item.
        progress: show a bar on the terminal (needs ``rich``: ``pip install 'farcall[cli]'``).
    """
    if retry is not None:
        check_retry(retry)
    if isinstance(workers, str | Worker):
        raise TypeError(f"workers are several handles or names, not one {type(workers).__name__}: workers=[...]")
    handles = [one if isinstance(one, Worker) else handle_of(None, one) for one in workers]
    if not handles:
        raise ValueError("map needs at least one worker")
    roster = _Fixed(handles)
    return map_over(
        roster, func, items, in_flight=in_flight, ordered=ordered, timeout=timeout, retry=retry, progress=progress
    )


def map_over(
    roster: Roster,
    func: Callable[[S], T],
    items: Iterable[S],
    *,
    in_flight: int,
    ordered: bool,
    timeout: float | None,
    retry: Retry | None,
    progress: bool,
) -> Generator[T, None, None]:
    """`map` over workers that join and leave while it runs."""
    if timeout is not UNSET_TIMEOUT:
        check_timeout(timeout)
    if in_flight < 1:
        raise ValueError(f"in_flight must be at least 1, not {in_flight!r}")
    found = _Map(func, iter(items), roster, in_flight=in_flight, timeout=timeout, retry=retry)
    return found.results(ordered, progress, len(items) if isinstance(items, Sized) else None)


class Roster(Protocol):
    """The workers of a `map`."""

    look_s: float | None
    """How long a map waits for results before it looks for new workers; None: the roster is fixed."""

    def now(self) -> Mapping[Hashable, Worker]:
        """Return the workers that can be called. A worker that comes back has a new key."""

    def wait(self) -> bool:
        """No worker runs: wait a moment for one. False: none will come."""


class _Fixed:
    look_s: float | None = None

    def __init__(self, handles: list[Worker]) -> None:
        self._handles: dict[Hashable, Worker] = dict(enumerate(handles))

    def now(self) -> Mapping[Hashable, Worker]:
        return self._handles

    def wait(self) -> bool:
        return False


class _Map:
    """One `map` under way. All of its state changes on the thread that asks for the next result, except ``_done``."""

    def __init__(
        self,
        func: Callable[[Any], Any],
        items: Iterator[Any],
        roster: Roster,
        *,
        in_flight: int,
        timeout: float | None,
        retry: Retry | None,
    ) -> None:
        self._func = func
        self._items = items
        self._timeout = timeout
        self._retry = retry
        self._roster = roster
        self._in_flight = in_flight
        self._known: dict[Hashable, Worker] = {}
        self._free: deque[Hashable] = deque()
        self._again: deque[tuple[int, Any, int]] = deque()  # number, item, attempt
        # Until when an item rests before its next attempt, and with it the place at the worker that failed it: others
        # would fail there in its stead. A heap; followed by number, item, attempt, worker.
        self._resting: list[tuple[float, int, Any, int, Hashable]] = []
        self._running: dict[Future[Any], tuple[int, Any, int, Hashable]] = {}
        self._done: SimpleQueue[Future[Any]] = SimpleQueue()
        self._dead: set[Hashable] = set()
        self._numbers = count()
        self._exhausted = False
        self._last_error: RpcError | None = None
        self._recruit()

    def _recruit(self) -> None:
        """Add the workers that have joined."""
        if self._known and self._roster.look_s is None:
            return
        present = self._roster.now()
        fresh = [key for key in present if key not in self._known]
        self._known.update((key, present[key]) for key in fresh)
        self._free.extend(fresh * self._in_flight)  # round robin: each worker gets one item before any gets a second

    @property
    def _most_ahead(self) -> int:
        return 2 * self._in_flight * max(1, len(self._known) - len(self._dead))

    def results(self, ordered: bool, progress: bool, total: int | None) -> Generator[Any, None, None]:
        ready: dict[int, Any] = {}
        given = 0
        with ExitStack() as shown:
            advance = shown.enter_context(_bar(self._func, total)) if progress else None
            try:
                while True:
                    self._recruit()
                    self._end_rests()
                    # Bound the results that pile up behind a slow item. A retried item is exempt: the others may be
                    # waiting for exactly that one.
                    while self._free and (self._again or len(ready) + len(self._running) < self._most_ahead):
                        if not self._start_one():
                            break
                    if not self._running and not self._resting:
                        if self._exhausted and not self._again:
                            return
                        self._wait_for_workers()
                        continue
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
        """Give an item to a free worker; False: no item is left."""
        if self._again:
            number, item, attempt = self._again.popleft()
        else:
            try:
                item = next(self._items)
            except StopIteration:
                self._exhausted = True
                return False
            number, attempt = next(self._numbers), 1
        key = self._free.popleft()
        to = self._known[key]
        node = to._node or current_runtime()
        timeout = to._timeout if self._timeout is UNSET_TIMEOUT else self._timeout
        try:
            future = call_async(node, to.name, self._func, (item,), None, timeout)
        except Exception as error:  # of pickling the item, for one
            self._failed(error, number, item, attempt, key)
            return True
        self._running[future] = (number, item, attempt, key)
        future.when_done(Tell(self._done.put, future))
        return True

    def _next_result(self) -> tuple[int, Any]:
        """Wait for the next completed item; return its number and result. A negative number: nothing to yield."""
        # Without look_s, the calls' timeouts bound it; in slices, as the waits of a `Gate`.
        limit_s = self._roster.look_s or SLICE_S
        if self._resting:
            limit_s = max(0.0, min(limit_s, self._resting[0][0] - monotonic()))
        with waiting_here():
            try:
                future = self._done.get(timeout=limit_s)
            except Empty:
                return -1, None
        number, item, attempt, key = self._running.pop(future)
        try:
            value = future.wait()
        except Exception as error:
            self._failed(error, number, item, attempt, key)
            return -1, None
        if key not in self._dead:
            self._free.append(key)
        return number, value

    def _failed(self, error: Exception, number: int, item: Any, attempt: int, key: Hashable) -> None:
        """Queue the item for another attempt, or raise ``error``, with a note that names the item."""
        with suppress(Exception):  # a class of the user's that forbids attributes
            error.add_note(f"item {number} of map (the first is 0), on {self._known[key].name}")
        if not isinstance(error, RpcError):
            raise error
        retry = self._retry
        unknown = isinstance(error, UnknownWorker)  # the call was not sent, so it costs no attempt
        pause_s = None if retry is None else 0.0 if unknown else retry.pause_s(attempt, error, NEVER)
        if retry is None or pause_s is None or attempt >= retry.attempts:
            raise error
        if unknown or isinstance(error, PeerDead):
            self._dead.add(key)
            self._free = deque(one for one in self._free if one not in self._dead)
            self._last_error = error
            self._again.append((number, item, attempt if unknown else attempt + 1))
        else:
            heappush(self._resting, (monotonic() + pause_s, number, item, attempt + 1, key))

    def _end_rests(self) -> None:
        """Take up the items whose pause is over."""
        while self._resting and self._resting[0][0] <= monotonic():
            _, number, item, attempt, key = heappop(self._resting)
            self._again.append((number, item, attempt))
            if key not in self._dead:
                self._free.append(key)

    def _wait_for_workers(self) -> None:
        """Wait for a worker: none is free, none is busy, and items may be left."""
        with waiting_here():
            more = self._roster.wait()
        self._recruit()
        if not self._free and not more:
            raise self._last_error or UnknownWorker("map found no running worker")


@contextmanager
def _bar(func: Callable[..., Any], total: int | None) -> Iterator[Callable[[], None]]:
    """Show a progress bar on the terminal; yield the function that advances it by one item."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install 'farcall[cli]'") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as shown:
        task = shown.add_task(name_of(func), total=total)
        yield lambda: shown.advance(task)
