"""`batched`: a function that many call with one argument each, and that runs once for many of them.

Owns the decorator and the queues of a node. What becomes of the arguments in a queue is in `batch_queue.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar, overload
from weakref import ref

import torch

from farcall.errors import NotInitialized
from farcall.rpc.batch_queue import Item, Queue, Rules, RunningBatch
from farcall.runtime.calls.results import MarkedResult
from farcall.runtime.calls.scope import CURRENT
from farcall.runtime.calls.serving import Request
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, current_runtime

A = TypeVar("A")
R = TypeVar("R")
S = TypeVar("S")


class Decorator(Protocol):
    """What `batched` returns: from a function of a list to a function of one item."""

    @overload
    def __call__(self, func: Callable[[list[A]], Coroutine[Any, Any, Sequence[R]]], /) -> Callable[[A], R]: ...
    @overload
    def __call__(self, func: Callable[[list[A]], Sequence[R]], /) -> Callable[[A], R]: ...
    @overload
    def __call__(self, func: Callable[[S, list[A]], Coroutine[Any, Any, Sequence[R]]], /) -> Callable[[S, A], R]: ...
    @overload
    def __call__(self, func: Callable[[S, list[A]], Sequence[R]], /) -> Callable[[S, A], R]: ...


def batched(*, max_size: int = 64, within_s: float = 0.002, again_alone: bool = False) -> Decorator:
    """Decorate a function, or method, of a list of arguments: callers pass one argument and get its own result.

    The function returns one result for each argument, in order. An exception among the results is raised to that
    caller alone; one that the function raises goes to all callers of the batch.

    Args:
        max_size: the most arguments of one run.
        within_s: how long the first argument of a batch waits for others.
        again_alone: when a batch of several fails, run the function again for each argument by itself, so that only
            those fail that must. For functions that may run twice.
    """
    if max_size < 1:
        raise ValueError(f"max_size must be at least 1, not {max_size!r}")
    if not within_s >= 0:
        raise ValueError(f"within_s must be a number of seconds, at least 0, not {within_s!r}")

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        parameters = len(inspect.signature(func).parameters)
        if parameters not in (1, 2):
            raise TypeError(f"{func.__qualname__}() takes {parameters} parameters: a batched function takes one list")
        if again_alone and inspect.iscoroutinefunction(func):
            raise TypeError(f"{func.__qualname__}() is an async def: leave out again_alone")
        rules = Rules(func, max_size, within_s, again_alone)

        @functools.wraps(func)
        def call(*args: Any) -> Any:
            if len(args) != parameters:
                raise TypeError(f"{func.__qualname__}() is batched and takes one argument, not {len(args)}")
            owner, argument = (None, args[0]) if parameters == 1 else args
            try:
                node = current_runtime()
            except NotInitialized:
                return rules.run(owner, [argument])[0]  # nobody else can call: a program without a cluster, a test
            queue = node.part(Batches).queue(rules, owner)
            served = _served()
            if sys._getframe(1).f_globals.get("__name__", "").startswith("farcall."):
                # farcall itself calls, for a remote caller: the answer comes later.
                return MarkedResult(queue.put(owner, argument, served, None if served is None else served.frame.turns))
            if queue.turns is not None and served is not None and served.frame.turns is queue.turns:
                return rules.run(owner, [argument])[0]  # another method of an object, which has the turn: nobody waits
            return _wait(node, queue.put(owner, argument, served, None))

        return call

    return decorate


def _served() -> Request | None:
    """The request whose function this thread runs, if it runs one."""
    scope = CURRENT.get()
    served = None if scope is None else scope.served
    return served if isinstance(served, Request) else None


def _wait(node: Runtime, future: torch.futures.Future[Any]) -> Any:
    done = Gate()
    future.add_done_callback(lambda _: done.open())
    with node.calls.waiting():
        done.wait()  # bounded by the function, as a direct call of it is
    return future.value()


class BatchCounts(NamedTuple):
    """The batches of one function so far."""

    runs: int = 0
    items: int = 0
    largest: int = 0
    waited_s: float = 0.0  # all items together, before their batch began


class _Owner(ref[Any]):
    """An object by its identity: two that are equal have methods of their own."""

    __slots__ = ("_number",)

    def __init__(self, owner: Any, forget: Callable[[_Owner], None]) -> None:
        super().__init__(owner, forget)  # type: ignore[call-arg]
        self._number = id(owner)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Owner) and self() is not None and self() is other())


class Batches:
    """The queues of one node, ``node.part(Batches)``."""

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._functions: dict[Rules, Queue] = {}
        self._methods: dict[_Owner, dict[Rules, Queue]] = {}
        self.counts: dict[str, BatchCounts] = {}
        self.running: dict[Queue, RunningBatch] = {}
        self._due: set[Queue] = set()  # those whose first item waits for its time
        self._ended = False
        self._timer = node.timer(self._begin_due)
        node.hooks.ended.append(self._end)

    def queue(self, rules: Rules, owner: Any) -> Queue:
        """The queue of a function, or of a method of ``owner``."""
        with self._lock:
            queues = self._functions
            if owner is not None:
                queues = self._methods.setdefault(_Owner(owner, self._forget), {})
            found = queues.get(rules)
            if found is None:
                found = queues[rules] = Queue(self._node, self, rules)
            return found

    def _forget(self, owner: _Owner) -> None:
        self._methods.pop(owner, None)  # inside a garbage collection: no lock

    def begin_when_due(self, queue: Queue) -> None:
        """Have ``queue`` begin its next batch when it is due."""
        due = queue.begin_if_due(monotonic())
        if due != NEVER:
            self._due.add(queue)
            self._timer.at(due)
            if self._ended:  # after the line above: the timer of a node that has ended calls nobody
                queue.drop()

    def _begin_due(self, now: float) -> float:
        """On the I/O thread."""
        nearest = NEVER
        for queue in list(self._due):
            due = queue.begin_if_due(now)
            if due == NEVER:
                self._due.discard(queue)
                due = queue.begin_if_due(now)  # an item may have come before the line above
                if due != NEVER:
                    self._due.add(queue)
            nearest = min(nearest, due)
        return nearest

    def _end(self) -> None:
        self._ended = True
        for queue in list(self._due):
            queue.drop()

    def count(self, rules: Rules, items: Sequence[Item], now: float) -> None:
        """A batch begins."""
        name = rules.func.__qualname__
        with self._lock:
            runs, total, largest, waited_s = self.counts.get(name, BatchCounts())
            waited_s += sum(now - item.came_at for item in items)
            self.counts[name] = BatchCounts(runs + 1, total + len(items), max(largest, len(items)), waited_s)
