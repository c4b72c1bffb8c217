"""``torch.futures.collect_all`` and ``wait_all``, which end with the first error that comes.

torch does this in C++, where the error of a future that was completed by Python is a value like any other: it would
wait for all of them, and for good if one never completes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall.rpc.future import DerivedFuture, Future

__all__ = ["replacements"]


def replacements() -> dict[str, Callable[..., Any]]:
    """What takes the place of functions of ``torch.futures``."""
    collect_all_of_torch = torch.futures.collect_all

    def collect_all(futures: Sequence[Any]) -> Any:
        """A future of all of them, done when all are, or when one has failed."""
        if not any(isinstance(future, Future | DerivedFuture) for future in futures):
            return collect_all_of_torch(list(futures))
        return _Collection(futures).future

    def wait_all(futures: Sequence[Any]) -> list[Any]:
        """The values of all of them; the first error that comes is raised at once."""
        return [future.wait() for future in collect_all(futures).wait()]

    return {"collect_all": collect_all, "wait_all": wait_all}


class _Collection:
    """Futures that are waited for together."""

    def __init__(self, futures: Sequence[Any]) -> None:
        self.future: DerivedFuture[list[Any]] = DerivedFuture()
        self._futures = list(futures)
        self._open = len(self._futures)
        self._lock = threading.Lock()
        for future in self._futures:
            future.add_done_callback(self._on_done)

    def _on_done(self, future: Any) -> None:
        failure: Exception | None = None
        try:
            future.value()
        except Exception as error:
            failure = error
        with self._lock:
            self._open = 0 if failure is not None else self._open - 1
            if self._open or self.future.done():
                return
            if failure is None:
                self.future.set_result(self._futures)
            else:
                self.future.set_exception(failure)  # type: ignore[arg-type]
