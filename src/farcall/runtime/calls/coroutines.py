"""The event loop on which a node runs `async def` functions.

Owns the loop and its thread, both made when the first coroutine comes. Coroutines are handed over from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class CoroutineRunner:
    """One event loop, on a thread of its own."""

    def __init__(self, name: str, on_thread_start: Callable[[], None]) -> None:
        """``on_thread_start`` is called first on the loop's thread."""
        self._name = name
        self._on_thread_start = on_thread_start
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> Callable[[], None]:
        """Run ``coroutine`` and give its finished task to ``done``; what is returned cancels it, from any thread."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.call_soon(self._on_thread_start)
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=f"farcall-asyncio-{self._name}", daemon=True
                )
                self._thread.start()
            loop = self._loop
        tasks: list[asyncio.Task[Any]] = []

        def start() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(done)

        def cancel() -> None:
            try:
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())  # behind ``start``
            except RuntimeError:
                pass  # the loop was closed

        loop.call_soon_threadsafe(start)
        return cancel

    def stop(self, timeout_s: float) -> None:
        """End the loop, cancelling what still runs on it; wait at most ``timeout_s``."""
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
