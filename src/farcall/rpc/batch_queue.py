"""The arguments that wait for one batched function, or for one object's batched method; and the batch that runs.

A batch begins when ``max_size`` arguments are there, or when the first of them has waited ``within_s``; one batch runs
at a time, so under load the next one fills while one runs. No thread waits for a batch on behalf of a remote caller.

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
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from farcall.errors import Cancelled, RpcError
from farcall.rpc.outcome import raise_copy
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.serving import Request
from farcall.runtime.calls.turns import Turns
from farcall.runtime.devices.streams import stamp
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.serialize import RECORDING

if TYPE_CHECKING:
    from farcall.rpc.batches import Batches


class Rules:
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


class RunningBatch(NamedTuple):
    """A batch that runs now."""

    title: str
    callers: list[str]
    began_at: float
    thread_id: int  # 0: an ``async def``, which has none


class Result(torch.futures.Future[Any]):
    """The result of one argument. Those of a batch are answered together."""

    completing_thread = 0  # see `results.py`


class Item(NamedTuple):
    owner: Any  # of a batched method; the same for all items of a queue
    argument: Any
    future: Result
    came_at: float
    served: Request | None
    ready: Any  # on devices: what its batch must wait for


class Queue:
    """The arguments that wait for a batch of one function.

    Mutable, under the lock: ``_waiting``, and ``_is_running``: does a worker run a batch, or is one asked to?
    ``turns`` is the mailbox of an object whose calls run one at a time: a batch is one of them.
    """

    def __init__(self, node: Runtime, batches: Batches, rules: Rules) -> None:
        self._node = node
        self._batches = batches
        self._rules = rules
        self._lock = threading.Lock()
        self._waiting: deque[Item] = deque()
        self._is_running = False
        self.turns: Turns | None = None

    def put(self, owner: Any, argument: Any, served: Request | None, turns: Turns | None) -> torch.futures.Future[Any]:
        """Have ``argument`` be part of a batch; the future of its result."""
        if RECORDING.get() is not None:
            raise RpcError(
                f"{self._rules.func.__qualname__}() is batched, and carries no gradients: call it outside of a "
                "distributed autograd context"
            )
        devices = self._node.device_list
        future = Result()
        ready = stamp(argument, devices) if devices else None
        item = Item(owner, argument, future, monotonic(), served, ready)
        with self._lock:
            self.turns = self.turns or turns
            self._waiting.append(item)
            begins = not self._is_running and len(self._waiting) >= self._rules.max_size
            is_first = not self._is_running and len(self._waiting) == 1
            self._is_running = self._is_running or begins
        if begins:
            self._submit()
        elif is_first:
            self._batches.begin_when_due(self)
        return future

    def _submit(self) -> None:
        """Have a worker run a batch, in its turn."""
        run = FunctionTask(self.run, self.drop)
        if self.turns is None:
            self._node.server.submit(run)
        elif self.turns.enter(run):
            self._node.server.submit(self.turns)

    def begin_if_due(self, now: float) -> float:
        """Begin a batch if the first item has waited long enough; when to ask again. On any thread, never blocks."""
        with self._lock:
            if self._is_running or not self._waiting:
                return NEVER  # the end of the running one, or the next item, sees to it
            due = self._waiting[0].came_at + self._rules.within_s
            if due > now:
                return due
            self._is_running = True
        self._submit()
        return NEVER

    def take(self) -> list[Item]:
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
        self._show(items)
        try:
            arguments = [item.argument for item in items]
            profile = next((item.served.profile for item in items if item.served and item.served.profile), None)
            if profile is None or self._rules.is_async:
                results = self._rules.run(items[0].owner, arguments)
            else:
                results = profile.run(self._rules.run, (items[0].owner, arguments))
            if self._rules.is_async:
                if profile is not None:
                    results = profile.steps(results)
                if self.turns is not None:
                    results = self.turns.steps(results, within=True)
                self._node.server.coroutines.run(results, functools.partial(self._on_task, items))
                return
            results = self._rules.check(results, len(items))
        except BaseException as error:
            self._fail(items, error)
        else:
            self._hand_out(items, results)
        self.ended()

    def _show(self, items: list[Item]) -> None:
        """Let others see what runs: in stacks the batch, in traces each call with the size of its batch."""
        title = f"{self._rules.func.__qualname__} (batch of {len(items)})"
        requests = [item.served for item in items if item.served is not None]
        for request in requests:
            request.function_name = title
        callers = sorted({request.caller.name for request in requests})
        thread_id = 0 if self._rules.is_async else threading.get_ident()
        self._batches.running[self] = RunningBatch(title, callers, monotonic(), thread_id)

    def _on_task(self, items: list[Item], task: Any) -> None:
        try:
            results = self._rules.check(task.result(), len(items))
        except BaseException as error:
            results = [error] * len(items)
        self._hand_out(items, results)
        self.ended()

    def _fail(self, items: list[Item], error: BaseException) -> None:
        """A batch failed: all of it, or those that fail by themselves, too."""
        if len(items) == 1 or not self._rules.again_alone:
            self._hand_out(items, [error] * len(items))
            return
        for item in items:
            try:
                result = self._rules.check(self._rules.run(item.owner, [item.argument]), 1)
            except BaseException as alone:
                result = [alone]
            self._hand_out([item], result)

    def _hand_out(self, items: Sequence[Item], results: Sequence[Any]) -> None:
        """Give each caller its own result, or error."""
        here = threading.get_ident()
        for item, result in zip(items, results, strict=True):
            item.future.completing_thread = here
            if isinstance(result, Exception):
                # One error for several callers: each gets a copy, with its own traceback.
                item.future._set_unwrap_func(raise_copy)
                item.future.set_result(result)
            elif isinstance(result, BaseException):
                item.future.set_exception(RpcError(f"{type(result).__name__}: {result}"))
            else:
                item.future.set_result(result)
        self._node.server.flush()

    def ended(self) -> None:
        """A batch is done: begin the next one, if it is full or due."""
        self._batches.running.pop(self, None)
        with self._lock:
            self._is_running = begins = len(self._waiting) >= self._rules.max_size
        if begins:
            self._submit()
        else:
            self._batches.begin_when_due(self)

    def drop(self) -> None:
        """The node ended first."""
        with self._lock:
            items = list(self._waiting)
            self._waiting.clear()
        for item in items:
            item.future.set_exception(Cancelled("the node shut down before the batch ran"))
