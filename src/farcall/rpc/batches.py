"""`batched`: many callers pass one argument each; the function runs once for a list of their arguments.

Owns the decorator and the table of a node's queues. `batch_queue.py` runs the batches.
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

from farcall.errors import NotInitialized, RpcError
from farcall.made import MADE, Made
from farcall.rpc.batch_queue import CallHere, Item, Queue, Rules, RunningBatch
from farcall.rpc.outcome import running_loop
from farcall.runtime.calls.results import Entrusted
from farcall.runtime.calls.scope import CURRENT, Scope
from farcall.runtime.calls.serving import Request
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, current_runtime
from farcall.serialize import RECORDING

A = TypeVar("A")
R = TypeVar("R")
S = TypeVar("S")


class Decorator(Protocol):
    """The type of ``batched(...)``: turns a function of a list into a function of one item."""

    @overload
    def __call__(self, func: Callable[[list[A]], Coroutine[Any, Any, Sequence[R]]], /) -> Callable[[A], R]: ...
    @overload
    def __call__(self, func: Callable[[list[A]], Sequence[R]], /) -> Callable[[A], R]: ...
    @overload
    def __call__(self, func: Callable[[S, list[A]], Coroutine[Any, Any, Sequence[R]]], /) -> Callable[[S, A], R]: ...
    @overload
    def __call__(self, func: Callable[[S, list[A]], Sequence[R]], /) -> Callable[[S, A], R]: ...


def batched(
    func: None = None, /, *, max_size: int = 64, within_s: float = 0.002, again_alone: bool = False
) -> Decorator:
    """Decorate a function or method that takes a list of arguments: each caller passes one and gets its own result.

    The function returns one result for each argument, in order. An exception among the results is raised to that
    caller alone. An exception that the function raises goes to all callers of the batch.

    Args:
        max_size: the largest number of arguments in one batch.
        within_s: how long the first argument of a batch waits for more.
        again_alone: when a batch of several fails, run the function again for each argument by itself, so that only
            the arguments that cause an error fail. For functions that may run twice.
    """
    if func is not None:
        raise TypeError("batched is called before it decorates: write @farcall.batched()")
    if max_size < 1:
        raise ValueError(f"max_size must be at least 1, not {max_size!r}")
    if not within_s >= 0:
        raise ValueError(f"within_s must be a number of seconds, at least 0, not {within_s!r}")

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        return _batched(func, max_size, within_s, again_alone)

    return decorate


def _batched(func: Callable[..., Any], max_size: int, within_s: float, again_alone: bool) -> Callable[..., Any]:
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
        if rules.is_async and running_loop() is not None:
            raise RpcError(
                f"{func.__qualname__}() is a batched async def, called on an event loop, which it would block: "
                f"await farcall.worker(name).start({func.__qualname__}, ...), with the name of this worker"
            )
        try:
            node = current_runtime()
        except NotInitialized:
            return rules.run_alone(owner, argument)  # no node, no other callers: a plain program, or a test
        queue = node.part(Batches).queue(rules, call if owner is None else owner)
        scope = CURRENT.get()
        served = scope if scope is None or isinstance(scope, Request) else _request_of(scope)
        for_caller = served is not None and sys._getframe(1).f_globals.get("__name__", "").startswith("farcall.")
        if served is not None and not for_caller and queue.turns is not None and served.frame.turns is queue.turns:
            # Another method of the same serial object calls. It has the turn, so a batch would wait for ever.
            return rules.run_alone(owner, argument)
        if RECORDING.get() is not None:
            raise RpcError(
                f"{func.__qualname__}() is batched, and carries no gradients: call it outside of a distributed "
                "autograd context"
            )
        if for_caller:  # farcall calls on behalf of a remote caller: the batch answers it, no thread waits
            return Entrusted(functools.partial(queue.put, owner, argument))
        here = CallHere()
        queue.put(owner, argument, here, served)
        return here.wait(node)

    setattr(call, MADE, Made(call, _batched, (func, max_size, within_s, again_alone), rules))
    return call


def _request_of(scope: Scope) -> Request | None:
    """The request whose function runs in ``scope``, if one does."""
    return scope.served if isinstance(scope.served, Request) else None


class BatchCounts(NamedTuple):
    """Totals of one function's batches."""

    runs: int = 0
    items: int = 0
    largest: int = 0
    waited_s: float = 0.0  # sum over all items, from arrival to the begin of their batch


class _Owner(ref[Any]):
    """A weak reference to an object and the queues of its methods, or to a function and its own: functions by value go.

    By identity: equal objects do not share queues.
    """

    __slots__ = ("number", "queues")

    def __init__(self, owner: Any, forget: Callable[[_Owner], None]) -> None:
        super().__init__(owner, forget)  # type: ignore[call-arg]
        self.number: int = id(owner)
        self.queues: dict[Rules, Queue] = {}


class Batches:
    """The queues of one node, ``node.part(Batches)``.

    Mutable: the tables of queues and ``counts``, under the lock; ``running`` and ``_due``, by single atomic operations.
    """

    def __init__(self, node: Runtime) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._owners: dict[int, _Owner] = {}  # by id(), which Python does not reuse before `_forget` has run
        self.counts: dict[str, BatchCounts] = {}
        self.running: dict[Queue, RunningBatch] = {}
        self._due: set[Queue] = set()  # queues whose first item waits for ``within_s`` to pass
        self._ended = False
        self._timer = node.timer(self._begin_due)
        node.hooks.ended.append(self._end)

    def queue(self, rules: Rules, owner: Any) -> Queue:
        """The queue of a method of ``owner``; of a function, which is its own owner."""
        entry = self._owners.get(id(owner))
        if entry is None:
            with self._lock:
                entry = self._owners.setdefault(id(owner), _Owner(owner, self._forget))
        found = entry.queues.get(rules)
        if found is None:
            with self._lock:
                found = entry.queues.setdefault(rules, Queue(self._node, self, rules))
        return found

    def _forget(self, owner: _Owner) -> None:
        self._owners.pop(owner.number, None)  # runs inside a garbage collection, so it must not take the lock

    def begin_when_due(self, queue: Queue) -> None:
        """Begin the next batch of ``queue`` now, or set the timer for it."""
        due = queue.begin_if_due(monotonic())
        if due != NEVER:
            self._due.add(queue)
            self._timer.at(due)
            if self._ended:  # checked last: either `_end` finds the queue in ``_due``, or this line sees the flag
                queue.drop()

    def _begin_due(self, now: float) -> float:
        """On the I/O thread: begin all batches that are due."""
        nearest = NEVER
        for queue in list(self._due):
            due = queue.begin_if_due(now)
            if due == NEVER:
                self._due.discard(queue)
                due = queue.begin_if_due(now)  # again: another thread may have added an item before the discard
                if due != NEVER:
                    self._due.add(queue)
            nearest = min(nearest, due)
        return nearest

    def _end(self) -> None:
        self._ended = True
        for queue in list(self._due):
            queue.drop()

    def count(self, rules: Rules, items: Sequence[Item], now: float) -> None:
        """Count a batch that begins ``now``."""
        name = rules.func.__qualname__
        with self._lock:
            runs, total, largest, waited_s = self.counts.get(name, BatchCounts())
            waited_s += sum([now - item.came_at for item in items])
            self.counts[name] = BatchCounts(runs + 1, total + len(items), max(largest, len(items)), waited_s)
