"""The queue of a batched function, or of one object's batched method: waiting arguments and the running batch.

A batch begins when ``max_size`` arguments wait, or when the first of them has waited ``within_s``. One batch runs at a
time, so under load the next batch fills meanwhile. No thread waits for a batch on behalf of a remote caller.

    queue     event                          becomes    with
    idle      an argument                    waiting    a timer for ``within_s``
    waiting   max_size are there, or timer   running    the function is run for up to max_size
    running   an argument                    running
    running   the function ends, none left   idle
    running   the function ends, some left   running, if they are due; else waiting

A worker runs the function. If recent batches were brief, the I/O thread runs it instead, right behind the request that
filled the batch (`Server.run_behind`). The thread that ran a batch answers its requests, in writes that double in size.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farcall.core.contract import REFUSABLE
from farcall.errors import Cancelled, RpcError
from farcall.protocol.frames import FAILURE, Frame
from farcall.protocol.notes import REFUSED, Refusal, encode_refusal
from farcall.rpc.outcome import copied
from farcall.runtime.calls.coroutines import Concluded
from farcall.runtime.calls.results import StoredFailure
from farcall.runtime.calls.serving import Request
from farcall.runtime.calls.turns import Turns
from farcall.runtime.devices.streams import stamp
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime

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
        self.key: bytes = f"batches of {func.__module__}.{func.__qualname__}".encode()
        """The key of this function in the server's run times. No request can name this key."""

    def run(self, owner: Any, arguments: list[Any]) -> Any:
        """Return the function's results for ``arguments``; for an ``async def``, the coroutine."""
        return self.func(arguments) if owner is None else self.func(owner, arguments)

    def check(self, results: Any, count: int) -> list[Any]:
        """Return ``results`` as a list; raise if its length is not ``count``."""
        found = list(results)
        if len(found) != count:
            raise RpcError(f"{self.func.__qualname__}() returned {len(found)} results for a batch of {count}")
        return found

    def run_alone(self, owner: Any, argument: Any) -> Any:
        """Run a batch of one: return its result or raise its error."""
        results = self.run(owner, [argument])
        [result] = self.check(asyncio.run(results) if self.is_async else results, 1)
        if isinstance(result, BaseException):
            raise result
        return result


class RunningBatch(NamedTuple):
    """A batch that runs now, for stacks and debug output."""

    title: str
    callers: list[str]
    began_at: float
    thread_id: int  # 0: an ``async def``, which runs on the event loop


class CallHere:
    """A local call of a batched function; the calling thread waits for the batch."""

    __slots__ = ("_done", "_error", "_outcome")

    def __init__(self) -> None:
        self._done = Gate()
        self._outcome: list[Any] = []
        self._error: BaseException | None = None

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """Like `Request.answer`."""
        self._outcome = outcome
        self._done.open()

    def fail(self, error: BaseException) -> None:
        """Like `Request.fail`."""
        self._error = error
        self._done.open()

    def wait(self, node: Runtime) -> Any:
        """Block until the batch is done; return the result or raise the error."""
        with node.calls.waiting():
            self._done.wait()  # no timeout: a direct call of the function has none either
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class Item(msgspec.Struct):
    owner: Any  # the object of a batched method; all items of a queue share it
    argument: Any
    caller: Request | CallHere
    served: Request | None  # the caller itself, or the request whose function makes the local call
    came_at: float
    ready: Any  # with devices: the stamp that the batch waits for before it uses the argument


class Queue:
    """The arguments that wait for a batch of one function. As a task of the executor, it runs one batch.

    Mutable, under the lock: ``_waiting``, and ``_is_running``: does a batch run, or has one been submitted?
    ``turns`` is the mailbox of an object whose calls run one at a time; a batch takes one turn, like a call.
    """

    def __init__(self, node: Runtime, batches: Batches, rules: Rules) -> None:
        self._node = node
        self._batches = batches
        self._rules = rules
        self._lock = threading.Lock()
        self._waiting: deque[Item] = deque()
        self._is_running = False
        self.turns: Turns | None = None

    def put(self, owner: Any, argument: Any, caller: Request | CallHere, served: Request | None = None) -> None:
        """Queue ``argument`` for a batch, which answers ``caller``. ``served``: see `Item`."""
        devices = self._node.device_list
        request = caller if isinstance(caller, Request) else None
        ready = stamp(argument, devices) if devices else None
        item = Item(owner, argument, caller, request or served, monotonic(), ready)
        with self._lock:
            if self._is_running and type(caller) is Request and caller.frame.flags & REFUSABLE:
                limit = self._node.admission.limit  # what waits behind a batch waits for a thread, as other calls do
                if len(self._waiting) >= limit:
                    refusal = encode_refusal(Refusal(len(self._waiting), limit))
                    raise StoredFailure(Frame(FAILURE, REFUSED, payload=refusal))
            if request is not None and self.turns is None:
                self.turns = request.frame.turns
            self._waiting.append(item)
            begins = not self._is_running and len(self._waiting) >= self._rules.max_size
            is_first = not self._is_running and len(self._waiting) == 1
            self._is_running = self._is_running or begins
        if begins:
            self._submit()
        elif is_first:
            self._batches.begin_when_due(self)

    def _submit(self) -> None:
        """Have a worker run a batch; for a serial object, when the batch has its turn."""
        if self.turns is None:
            self._node.server.submit(self)
        elif self.turns.enter(self):
            self._node.server.submit(self.turns)

    def begin_if_due(self, now: float) -> float:
        """Begin a batch if the first item has waited ``within_s``; return when to ask again. Never blocks."""
        with self._lock:
            if self._is_running or not self._waiting:
                return NEVER  # `ended`, or the next `put`, asks again
            due = self._waiting[0].came_at + self._rules.within_s
            if due > now:
                return due
            self._is_running = True
        self._submit()
        return NEVER

    def take(self) -> list[Item]:
        """Take the items of the next batch. Cancelled items fail here and are left out."""
        now = monotonic()
        with self._lock:
            items = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._rules.max_size))]
        wanted = []
        for item in items:
            if item.served is not None and item.served.cancelled:
                item.caller.fail(Cancelled("its caller no longer waits for it"))
            else:
                wanted.append(item)
        if wanted:
            self._batches.count(self._rules, wanted, now)
        return wanted

    def run(self, more: bool) -> None:
        """Run one batch, then begin the next if it is due. On a worker, or on the I/O thread if batches are brief."""
        items = self.take()
        if not items:
            self.ended()
            return
        requests = [item.served for item in items if item.served is not None]
        self._show(requests, len(items))
        have_arrived = False
        try:
            for item in items:
                if item.ready is not None:
                    item.ready.wait()
            have_arrived = True
            arguments = [item.argument for item in items]
            profile = next((request.profile for request in requests if request.profile is not None), None)
            if profile is None or self._rules.is_async:
                results = self._rules.run(items[0].owner, arguments)
            else:
                results = profile.run(self._rules.run, (items[0].owner, arguments))
            if self._rules.is_async:
                if profile is not None:
                    results = profile.steps(results)
                done: Callable[[Any], None] = functools.partial(self._on_task, items)
                if self.turns is not None:
                    concluded = Concluded(results, done)  # the results are encoded in the batch's last turn
                    results, done = self.turns.steps(concluded, within=True), concluded.on_task
                self._node.server.coroutines.run(results, done)
                return
            results = self._rules.check(results, len(items))
        except BaseException as error:
            if have_arrived and self._rules.again_alone and len(items) > 1:
                self._run_each(items)
            else:
                self._hand_out(items, [error] * len(items))
        else:
            self._hand_out(items, results)
        self.ended()

    def _show(self, requests: list[Request], count: int) -> None:
        """Publish the running batch: stacks show the batch, traces show each call with the size of its batch."""
        title = f"{self._rules.func.__qualname__} (batch of {count})"
        for request in requests:
            request.function_name = title
        callers = sorted({request.peer.info.name for request in requests})
        thread_id = 0 if self._rules.is_async else threading.get_ident()
        self._batches.running[self] = RunningBatch(title, callers, monotonic(), thread_id)

    def _on_task(self, items: list[Item], task: Any) -> None:
        try:
            results = self._rules.check(task.result(), len(items))
        except BaseException as error:
            results = [error] * len(items)
        self._hand_out(items, results)
        self.ended()

    def _run_each(self, items: list[Item]) -> None:
        """Run the items of a failed batch one by one, so that an error reaches only the callers that cause it."""
        for item in items:
            try:
                result = self._rules.run_alone(item.owner, item.argument)
            except BaseException as error:
                result = error
            self._hand_out([item], [result])

    def _hand_out(self, items: Sequence[Item], results: Sequence[Any]) -> None:
        """Give each caller its own result, or error."""
        for item, result in zip(items, results, strict=True):
            try:
                if isinstance(result, Exception):
                    # One error for several callers: each gets a copy.
                    item.caller.fail(copied(result).with_traceback(result.__traceback__))
                elif isinstance(result, BaseException):
                    item.caller.fail(RpcError(f"{type(result).__name__}: {result}"))
                else:
                    item.caller.answer([result])
            except BaseException as error:  # the class of an error may raise anything when it is copied or shown
                item.caller.fail(RpcError(f"{type(result).__name__}, which raises {type(error).__name__} when shown"))

    def ended(self) -> None:
        """A batch is done: begin the next one if it is full; otherwise when it is due."""
        self._batches.running.pop(self, None)
        with self._lock:
            self._is_running = begins = len(self._waiting) >= self._rules.max_size
        if begins:
            self._submit()
        else:
            self._batches.begin_when_due(self)

    def drop(self) -> None:
        """Fail all waiting items: the node ended before their batch ran."""
        with self._lock:
            items = list(self._waiting)
            self._waiting.clear()
            self._is_running = False  # a later item must reach `begin_when_due`, which drops it; no batch will end
        for item in items:
            item.caller.fail(Cancelled("the node shut down before the batch ran"))
