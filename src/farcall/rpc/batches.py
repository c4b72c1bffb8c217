"""`batched`: a function that many call with one argument each, and that runs once for many of them.

Owns the queue of one batched function, or of one object's batched method. A batch begins when ``max_size`` arguments
are there, or when the first of them has waited ``within_s``; one batch runs at a time, so under load the next one fills
while one runs. No thread waits for a batch on behalf of a remote caller.

    queue     event                          becomes    with
    idle      an argument                    waiting    a timer for ``within_s``
    waiting   max_size are there, or timer   running    a worker runs the function for up to max_size
    running   an argument                    running
    running   the function ends, none left   idle
    running   the function ends, some left   running, if they are due; else waiting
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar, overload
from weakref import ref

import torch

from farcall.errors import Cancelled, NotInitialized, RpcError
from farcall.rpc.outcome import raise_copy
from farcall.runtime.calls.executor import UNKNOWN_S
from farcall.runtime.calls.results import MarkedResult
from farcall.runtime.calls.scope import CURRENT, Served
from farcall.runtime.devices.streams import stamp
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, current_runtime
from farcall.serialize import RECORDING

__all__ = ["BatchCounts", "Batches", "batched"]

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
            raise TypeError(f"{func.__qualname__}() is an async def, for which there is no again_alone")
        rules = _Rules(func, max_size, within_s, again_alone)

        @functools.wraps(func)
        def call(*args: Any) -> Any:
            if len(args) != parameters:
                raise TypeError(f"{func.__qualname__}() takes one argument of its batch, not {len(args)}")
            owner, argument = (None, args[0]) if parameters == 1 else args
            try:
                node = current_runtime()
            except NotInitialized:
                return rules.run(owner, [argument])[0]  # nobody else can call: a program without a cluster, a test
            future = node.part(Batches).queue(rules, owner).put(owner, argument)
            if sys._getframe(1).f_globals.get("__name__", "").startswith("farcall."):
                return MarkedResult(future)  # farcall itself calls, for a remote caller: the answer comes later
            return _wait(node, future)

        return call

    return decorate


def _wait(node: Runtime, future: torch.futures.Future[Any]) -> Any:
    done = Gate()
    future.add_done_callback(lambda _: done.open())
    with node.calls.waiting():
        done.wait()  # bounded by the function, as a direct call of it is
    return future.value()


class _Rules:
    """A batched function and its settings."""

    def __init__(self, func: Callable[..., Any], max_size: int, within_s: float, again_alone: bool) -> None:
        self.func: Callable[..., Any] = func
        self.max_size: int = max_size
        self.within_s: float = within_s
        self.again_alone: bool = again_alone
        self.is_async: bool = inspect.iscoroutinefunction(func)

    def run(self, owner: Any, arguments: list[Any]) -> Any:
        """The function's results for ``arguments``; of an ``async def``, a coroutine of them."""
        return self.func(arguments) if owner is None else self.func(owner, arguments)

    def check(self, results: Any, count: int) -> list[Any]:
        """``results`` as a list of the right length."""
        found = list(results)
        if len(found) != count:
            raise RpcError(f"{self.func.__qualname__}() returned {len(found)} results for a batch of {count}")
        return found


class BatchCounts(NamedTuple):
    """The batches of one function so far."""

    runs: int = 0
    items: int = 0
    largest: int = 0
    waited_s: float = 0.0  # all items together, before their batch began


class _Item(NamedTuple):
    owner: Any  # of a batched method; the same for all items of a queue
    argument: Any
    future: torch.futures.Future[Any]
    came_at: float
    served: Served | None
    ready: Any  # on devices: what its batch must wait for


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
        self._functions: dict[_Rules, _Queue] = {}
        self._methods: dict[_Owner, dict[_Rules, _Queue]] = {}
        self.counts: dict[str, BatchCounts] = {}
        self._due: set[_Queue] = set()  # those whose first item waits for its time
        self._ended = False
        self._timer = node.timer(self._begin_due)
        node.hooks.ended.append(self._end)

    def queue(self, rules: _Rules, owner: Any) -> _Queue:
        """The queue of a function, or of a method of ``owner``."""
        with self._lock:
            queues = self._functions
            if owner is not None:
                queues = self._methods.setdefault(_Owner(owner, self._forget), {})
            found = queues.get(rules)
            if found is None:
                found = queues[rules] = _Queue(self._node, self, rules)
            return found

    def _forget(self, owner: _Owner) -> None:
        self._methods.pop(owner, None)  # inside a garbage collection: no lock

    def begin_when_due(self, queue: _Queue) -> None:
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

    def count(self, rules: _Rules, items: Sequence[_Item], now: float) -> None:
        """A batch begins."""
        name = rules.func.__qualname__
        with self._lock:
            runs, total, largest, waited_s = self.counts.get(name, BatchCounts())
            waited_s += sum(now - item.came_at for item in items)
            self.counts[name] = BatchCounts(runs + 1, total + len(items), max(largest, len(items)), waited_s)


class _Queue:
    """The arguments that wait for a batch of one function.

    Mutable, under the lock: ``_waiting``, and ``_is_running``: does a worker run a batch, or is one asked to?
    """

    def __init__(self, node: Runtime, batches: Batches, rules: _Rules) -> None:
        self._node = node
        self._batches = batches
        self._rules = rules
        self._lock = threading.Lock()
        self._waiting: deque[_Item] = deque()
        self._is_running = False

    def put(self, owner: Any, argument: Any) -> torch.futures.Future[Any]:
        """Have ``argument`` be part of a batch; the future of its result."""
        if RECORDING.get() is not None:
            raise RpcError(
                f"{self._rules.func.__qualname__}() is batched, and carries no gradients: call it outside of a "
                "distributed autograd context"
            )
        scope, devices = CURRENT.get(), self._node.device_list
        future: torch.futures.Future[Any] = torch.futures.Future()
        ready = stamp(argument, devices) if devices else None
        item = _Item(owner, argument, future, monotonic(), None if scope is None else scope.served, ready)
        with self._lock:
            self._waiting.append(item)
            begins = not self._is_running and len(self._waiting) >= self._rules.max_size
            is_first = not self._is_running and len(self._waiting) == 1
            self._is_running = self._is_running or begins
        if begins:
            self._node.server.submit(_Run(self))
        elif is_first:
            self._batches.begin_when_due(self)
        return future

    def begin_if_due(self, now: float) -> float:
        """Begin a batch if the first item has waited long enough; when to ask again. On any thread, never blocks."""
        with self._lock:
            if self._is_running or not self._waiting:
                return NEVER  # the end of the running one, or the next item, sees to it
            due = self._waiting[0].came_at + self._rules.within_s
            if due > now:
                return due
            self._is_running = True
        self._node.server.submit(_Run(self))
        return NEVER

    def take(self) -> list[_Item]:
        """The items of the next batch; what was cancelled meanwhile is left out."""
        now = monotonic()
        with self._lock:
            items = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._rules.max_size))]
        wanted = []
        for item in items:
            if item.served is not None and item.served.cancelled:
                item.future.set_exception(Cancelled("its caller no longer waits for it"))
            else:
                wanted.append(item)
        if wanted:
            self._batches.count(self._rules, wanted, now)
        return wanted

    def run(self) -> None:
        """On a worker: run one batch, then see to the next."""
        items = self.take()
        if not items:
            self.ended()
            return
        for item in items:
            if item.ready is not None:
                item.ready.wait()
        try:
            results = self._rules.run(items[0].owner, [item.argument for item in items])
            if self._rules.is_async:
                self._node.server.coroutines.run(results, functools.partial(self._on_task, items))
                return
            results = self._rules.check(results, len(items))
        except BaseException as error:
            self._fail(items, error)
        else:
            _hand_out(items, results)
        self.ended()

    def _on_task(self, items: list[_Item], task: Any) -> None:
        try:
            _hand_out(items, self._rules.check(task.result(), len(items)))
        except BaseException as error:
            _hand_out(items, [error] * len(items))
        self.ended()

    def _fail(self, items: list[_Item], error: BaseException) -> None:
        """A batch failed: all of it, or those that fail by themselves, too."""
        if len(items) == 1 or not self._rules.again_alone:
            _hand_out(items, [error] * len(items))
            return
        for item in items:
            try:
                result = self._rules.check(self._rules.run(item.owner, [item.argument]), 1)
            except BaseException as alone:
                result = [alone]
            _hand_out([item], result)

    def ended(self) -> None:
        """A batch is done: begin the next one, if it is full or due."""
        with self._lock:
            self._is_running = begins = len(self._waiting) >= self._rules.max_size
        if begins:
            self._node.server.submit(_Run(self))
        else:
            self._batches.begin_when_due(self)

    def drop(self) -> None:
        """The node ended first."""
        with self._lock:
            items = list(self._waiting)
            self._waiting.clear()
        for item in items:
            item.future.set_exception(Cancelled("the node shut down before the batch ran"))


def _hand_out(items: Sequence[_Item], results: Sequence[Any]) -> None:
    """Give each caller its own result, or error."""
    for item, result in zip(items, results, strict=True):
        if isinstance(result, Exception):
            # One error for several callers: each gets a copy, with its own traceback.
            item.future._set_unwrap_func(raise_copy)
            item.future.set_result(result)
        elif isinstance(result, BaseException):
            item.future.set_exception(RpcError(f"{type(result).__name__}: {result}"))
        else:
            item.future.set_result(result)


class _Run:
    """A batch, as a task of the executor."""

    __slots__ = ("_queue",)

    expected_s = UNKNOWN_S

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def run(self, more: bool) -> None:
        self._queue.run()

    def drop(self) -> None:
        self._queue.drop()
