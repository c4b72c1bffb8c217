"""The values that one node owns on behalf of references: ready, still being made, or an error in their place.

Owns the states of a value, the waiters of each, the table of all, and the creating request that fills a place in it.
Knows nothing of who refers to a value: `references.py` removes a value when the reference machine says so.

    a value   event                                becomes
    pending   the creating call returned           ready: ``value``
    pending   the call raised, or will never come  ready: ``failure``
    pending   the node ended                       ready: ``failure``
    ready     anything                             stays as it is

A value has a place in the table from the first word of its reference on: the creating call, a fork, or a question that
overtook both. Each waiter is called once: by the thread that makes the value ready, or at once if the value is ready.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from farcall.errors import Cancelled, ReferenceLost, RpcTimeout
from farcall.ids import RefId, WorkerInfo
from farcall.protocol.frames import FAILURE, RESPONSE, Frame
from farcall.rpc.call import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.results import StoredFailure
from farcall.runtime.calls.run_inline import QUICK_S
from farcall.runtime.calls.serving import Request, Server
from farcall.runtime.calls.turns import Turns
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure, encode_failure

if TYPE_CHECKING:
    from farcall.rpc.rref import RRef

NOT_MADE = "value still being made"
_HARMLESS = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter))
"""Types whose values die without running user code."""

# One lock for all values, held for an instant. Re-entrant: a garbage collection inside may run user code.
_lock = threading.RLock()


class Owned:
    """A value of this node, or its place while the value is still being made."""

    __slots__ = ("_stamp", "_waiting", "failure", "made_by", "origin", "ready", "turns", "type_hint", "value")

    held_by_scripts: type[Any] | None = None
    """The class of values that TorchScript code has changed, or may; see `farcall.torchscript`."""

    def __init__(self, origin: str = "") -> None:
        self.ready: bool = False
        self.value: Any = None
        self.failure: Frame | None = None
        self.origin: str = origin  # the line of the program that created the value, if origins are recorded
        self.made_by: bytes = b""  # the function that made the value, as the call named it
        self.type_hint: Any = None  # the type for TorchScript, if the user named one
        self.turns: Turns | None = None  # where its calls run one at a time
        self._waiting: list[Callable[[], None]] | None = None
        self._stamp: Stamp | None = None  # the device streams that the value was made on, in a node with devices

    def resolve(self, value: Any, devices: Sequence[torch.device] = ()) -> None:
        """The value is here; ``devices`` are the node's."""
        self._settle(value, None, stamp(value, devices) if devices else None)

    def fail(self, failure: Frame) -> None:
        """No value will come; ``failure`` is the encoded error that says why."""
        self._settle(None, failure, None)

    def _settle(self, value: Any, failure: Frame | None, made: Stamp | None) -> None:
        with _lock:
            if self.ready:
                return  # the node ended while the function ran: the waiters were told so, and it stays true
            self.value, self.failure, self._stamp = value, failure, made
            self.ready = True
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            for wake in waiting:
                wake()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, which must not block, once the value is ready; at once if it is."""
        with _lock:
            if not self.ready:
                if self._waiting is None:
                    self._waiting = []
                self._waiting.append(wake)
                return
        wake()

    def wait(self, timeout_s: float) -> bool:
        """Block until the value is ready; False: ``timeout_s`` (-1: no bound) passed first."""
        done = threading.Lock()
        done.acquire()
        self.when_ready(done.release)
        return done.acquire(True, timeout_s)

    def get(self, *, to_send: bool = False) -> Any:
        """The ready value; or the error in its place, raised. ``to_send``: raise the error as it was encoded."""
        if self.failure is not None:
            raise StoredFailure(self.failure) if to_send else decode_failure(self.failure)
        if self._stamp is not None:
            self._stamp.wait()  # blocks the current streams, not this thread
        value = self.value
        return value.to_python() if value.__class__ is Owned.held_by_scripts else value

    def describe(self) -> str:
        """The state of the value, in words."""
        if not self.ready:
            return NOT_MADE
        return "value whose creation failed" if self.failure is not None else type(self.value).__qualname__


def wait_for_value(rref: RRef[Any], owned: Owned, timeout_s: float | None) -> Any:
    """The value itself, at its owner, once it is ready."""
    if timeout_s != UNSET_TIMEOUT:
        check_timeout(timeout_s)
    creation = rref._creation
    if creation is not None and creation.error is not None:
        raise copy.copy(creation.error)  # as for a value elsewhere, even if the value is here by now
    if not owned.ready:
        node = rref._references.node
        if timeout_s == UNSET_TIMEOUT:
            timeout_s = node.timeout_s
        deadline = monotonic() + timeout_s if timeout_s else NEVER
        with node.calls.waiting():
            while not owned.ready:
                now = monotonic()
                until = deadline
                if creation is not None:
                    if creation.error is not None:
                        raise copy.copy(creation.error)
                    # The I/O thread fails an overdue creation, a moment after its deadline.
                    until = min(deadline, max(creation.deadline, now) + 0.01)
                if now >= deadline:
                    raise RpcTimeout(f"the value of {rref!r} was not there after {timeout_s:g} s")
                owned.wait(min(until - now, 3600.0))
    return owned.get()


def shut_down(here: WorkerInfo) -> Frame:
    """The failure of a value that was still being made when its node ended."""
    return encode_failure(Cancelled(f"{here.name} shut down before the value was made"), here)


class OwnedValues:
    """The values that one node owns, by reference.

    Everything here runs under the lock of `NodeReferences`, except that any thread may look up a key of ``places``.
    """

    def __init__(self, here: WorkerInfo) -> None:
        self._here = here
        self._last_created: dict[int, int] = {}  # the newest reference of each creator that was heard of here
        self.places: dict[RefId, Owned] = {}

    def place(self, ref: RefId) -> Owned:
        """The place of a value; a new one at the first word of ``ref``."""
        owned = self.places.get(ref)
        if owned is None:
            owned = self.places[ref] = Owned()
        return owned

    def note_creation(self, ref: RefId) -> None:
        """The call that creates ``ref`` came, or never will."""
        if ref.local_id > self._last_created.get(ref.created_on, -1):
            self._last_created[ref.created_on] = ref.local_id

    def may_come(self, ref: RefId) -> bool:
        """Is the call that creates ``ref`` newer than every creating call heard of from that creator?"""
        return ref.local_id > self._last_created.get(ref.created_on, -1)

    def never_comes(self, ref: RefId, owned: Owned) -> None:
        """Fail the waiters of a value that nobody will make."""
        if not owned.ready:
            why = ReferenceLost(
                f"the call that should have created {ref.created_on}:{ref.local_id} never came: "
                "its caller died or gave up"
            )
            owned.fail(encode_failure(why, self._here))

    def end(self) -> None:
        """The node ended: fail the waiters of every value that is still being made."""
        for owned in list(self.places.values()):
            if not owned.ready:
                owned.fail(shut_down(self._here))

    def abandon(self, creator: int, is_listed: Callable[[RefId], bool]) -> list[Owned]:
        """``creator`` died: remove and fail the values that only it could have made; listed ones are being made."""
        abandoned = []
        for ref, owned in list(self.places.items()):
            if not owned.ready and ref.created_on == creator and not is_listed(ref):
                abandoned.append(self.places.pop(ref))
                self.never_comes(ref, owned)
        return abandoned


class KeptRequest(Request):
    """A creating call at its owner: the outcome stays here, and the answer says only that the function is done."""

    __slots__ = ("_flush_soon", "_owned")

    cancellable = False  # other members may hold the reference, and wait for the value

    def __init__(
        self, server: Server, peer: Peer, frame: Frame, owned: Owned, flush_soon: Callable[[Peer], None]
    ) -> None:
        super().__init__(server, peer, frame)
        self._owned = owned
        self._flush_soon = flush_soon

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """Keep the result and tell the creator."""
        self._owned.made_by = self.frame.function
        self._owned.resolve(outcome.pop(), self.server.devices)
        if self.expected_s < QUICK_S:
            # No thread waits for this answer. It travels with the next message, most likely that of a first use.
            self._send(Frame(RESPONSE), True)
            self._flush_soon(self.peer)
        else:
            self._send(Frame(RESPONSE), False)

    def _fail(self, error: BaseException) -> None:
        # Encoded without a peer, because the member that will ask is not known yet: references inside stay behind.
        failure = error.frame if type(error) is StoredFailure else encode_failure(error, self.server.worker)
        self._owned.fail(failure)
        self._send(Frame(FAILURE, payload=failure.payload, buffers=failure.buffers), False)

    def drop(self) -> None:
        self._owned.fail(shut_down(self.server.worker))
        super().drop()


def dispose(node: Runtime, values: list[Owned]) -> None:
    """Drop ``values``, which nobody else holds: on a worker thread where destructors may be user code.

    Call this outside of every lock.
    """
    for owned in values:
        if type(owned.value) not in _HARMLESS:
            del owned  # or the value would die with this frame, here, if the worker is done first
            doomed = values[:]
            values.clear()
            node.executor.submit(FunctionTask(doomed.clear, doomed.clear))
            return
