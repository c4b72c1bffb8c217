"""A value that this node owns on behalf of references: there already, still being made, or an error in its place.

Owns the states of one such value and those who wait for it. Knows nothing of who refers to it.

    state     by                              becomes
    pending   the creating call returned      ready: ``value``
    pending   it raised, or will never come   ready: ``failure``

Whoever waits is called once, by whoever makes the value ready, or at once where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farcall.protocol.frames import Frame
from farcall.runtime.calls.serving import StoredFailure
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.node import Node
from farcall.serialize import decode_failure

NOT_MADE = "value still being made"
_HARMLESS = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter))
"""Types whose values die without running anybody's code."""

# One for all: it is held for an instant. Re-entrant, since a garbage collection inside may run user code.
_lock = threading.RLock()


class Owned:
    """One value."""

    __slots__ = ("_stamp", "_waiting", "failure", "made_by", "origin", "ready", "type_hint", "value")

    held_by_scripts: type[Any] | None = None
    """The class of values that TorchScript code has changed, or may; see `farcall.torchscript`."""

    def __init__(self, origin: str = "") -> None:
        self.ready: bool = False
        self.value: Any = None
        self.failure: Frame | None = None
        self.origin: str = origin  # where the program created it, if that is recorded
        self.made_by: bytes = b""  # the function that made it, as it was named in the call
        self.type_hint: Any = None  # its type for TorchScript, if its user said so
        self._waiting: list[Callable[[], None]] | None = None
        self._stamp: Stamp | None = None  # on which streams of which devices it was made, in a node with devices

    @staticmethod
    def of(value: Any, origin: str = "", devices: Sequence[torch.device] = ()) -> Owned:
        """A value that is there; ``devices`` are the node's."""
        owned = Owned(origin)
        if devices:
            owned._stamp = stamp(value, devices)
        owned.value = value
        owned.ready = True
        return owned

    def resolve(self, value: Any, devices: Sequence[torch.device] = ()) -> None:
        """The value is there now; ``devices`` are the node's."""
        if devices:
            self._stamp = stamp(value, devices)
        self.value = value
        self._become_ready()

    def fail(self, failure: Frame) -> None:
        """There will be no value; ``failure`` is the error that says why, as it travels."""
        self.failure = failure
        self._become_ready()

    def _become_ready(self) -> None:
        with _lock:
            self.ready = True
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            for wake in waiting:
                wake()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once the value is there; at once if it is. ``wake`` must not block."""
        with _lock:
            if not self.ready:
                if self._waiting is None:
                    self._waiting = []
                self._waiting.append(wake)
                return
        wake()

    def wait(self, timeout_s: float) -> bool:
        """Block until the value is there; False: ``timeout_s`` (-1: no bound) passed first."""
        done = threading.Lock()
        done.acquire()
        self.when_ready(done.release)
        return done.acquire(True, timeout_s)

    def get(self) -> Any:
        """The value, once ready; or the error in its place, raised."""
        if self.failure is not None:
            raise decode_failure(self.failure)
        return self._in_python()

    def get_to_send(self) -> Any:
        """The same for a request that is to be answered with it: the error keeps its first form."""
        if self.failure is not None:
            raise StoredFailure(self.failure)
        return self._in_python()

    def _in_python(self) -> Any:
        if self._stamp is not None:
            self._stamp.wait()  # the current streams do; this thread does not
        value = self.value
        if value.__class__ is Owned.held_by_scripts:
            return value.to_python()
        return value

    def describe(self) -> str:
        """What is here, in words."""
        if not self.ready:
            return NOT_MADE
        return "value whose creation failed" if self.failure is not None else type(self.value).__qualname__


class TypeTold:
    """Completes a future with a value's type; a task of the executor."""

    __slots__ = ("_future", "_owned")

    quick = False

    def __init__(self, owned: Owned, future: torch.futures.Future[Any]) -> None:
        self._owned = owned
        self._future = future

    def run(self, more: bool) -> None:
        try:
            found = type(self._owned.get())
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(found)

    def drop(self) -> None:
        self.run(False)


class _Disposal:
    """Lets values die, on a worker thread since that may be user code."""

    __slots__ = ("_values",)

    quick = False

    def __init__(self, values: list[Owned]) -> None:
        self._values = values

    def run(self, more: bool) -> None:
        self._values.clear()

    def drop(self) -> None:
        pass


def dispose(node: Node, values: list[Owned]) -> None:
    """The last references to ``values`` are in this list: outside of any lock, let go of them."""
    if values and not all(type(owned.value) in _HARMLESS for owned in values):
        node.executor.submit(_Disposal(values[:]))
        values.clear()
