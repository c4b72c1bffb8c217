"""The event loop on which a node runs `async def` functions.

Owns the loop and its thread, both made for the first coroutine. Any thread may hand a coroutine over.

A task's result is taken after its last step, and other code runs in between. `Concluded` is a coroutine whose last step
includes that, such as the encoding of a result that the next call of a serial object changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class CoroutineRunner:
    """One event loop on its own thread; ``_loop`` and ``_thread``, under the lock, are None before and after."""

    def __init__(self, name: str, on_thread_start: Callable[[], None]) -> None:
        """``on_thread_start`` is the first function that runs on the loop's thread."""
        self._name = name
        self._on_thread_start = on_thread_start
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> Callable[[], None]:
        """Run ``coroutine`` and pass its finished task to ``done``; returns what cancels it, from any thread.

        Raises if no loop can take it; then it is closed, and so gives back what it holds, such as a turn.
        """
        try:
            with self._lock:
                loop = self._loop or self._begin()
        except BaseException:
            coroutine.close()
            raise
        tasks: list[asyncio.Task[Any]] = []

        def start() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(done)

        def cancel() -> None:
            try:
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # in order, so ``start`` has made the task
            except RuntimeError:
                pass  # the loop is closed

        try:
            loop.call_soon_threadsafe(start)
        except RuntimeError:  # the loop was closed meanwhile: the node ends
            coroutine.close()
            raise
        return cancel

    def _begin(self) -> asyncio.AbstractEventLoop:
        """Under the lock: start a loop. It is kept only if its thread starts; after a failure the next call retries."""
        loop = asyncio.new_event_loop()
        loop.call_soon(self._on_thread_start)
        thread = threading.Thread(target=loop.run_forever, name=f"farcall-asyncio-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def renew(self) -> None:
        """Call ``on_thread_start`` once more on the loop's thread, if there is one."""
        with self._lock, contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._on_thread_start)

    def stop(self, timeout_s: float) -> None:
        """Cancel the tasks that still run and end the loop; wait at most ``timeout_s``."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_s)
            loop.stop()

        ending = asyncio.run_coroutine_threadsafe(end(), loop)
        thread.join(timeout_s)
        ending.cancel()
        if not thread.is_alive():
            loop.close()


class Outcome:
    """How a coroutine has ended, to be taken once: a kept error would be part of a cycle with its own traceback."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    def result(self) -> Any:
        """Return the result or raise the error, like a task."""
        error, self._error = self._error, None
        value, self._value = self._value, None
        if error is None:
            return value
        try:
            raise error
        finally:
            del error


class Concluded(Coroutine[Any, Any, None]):
    """A coroutine that passes its outcome to ``done`` in its last step; it returns nothing, and raises no error."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
        self._coroutine = coroutine
        self._done = done
        self._is_over = False  # set before ``done`` is called

    def on_task(self, task: asyncio.Task[Any]) -> None:
        """For `CoroutineRunner.run`: a task that was cancelled before its first step has no outcome yet."""
        if not self._is_over:
            self._is_over = True
            self._done(task)

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("it is run as a task")

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        try:
            return step(*given)
        except StopIteration as end:
            outcome = Outcome(end.value)
        except BaseException as error:
            outcome = Outcome(error=error)
        self._is_over = True
        self._done(outcome)
        raise StopIteration
