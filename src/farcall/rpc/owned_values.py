"""The values that one node owns on behalf of references: ready, still being made, or an error in their place.

Owns the states of a value, its waiters, the table of all values, the creating request that fills a place in the table,
and the functions that the owner runs for holders of references: copy, method call, type, backward. Must not know the
holders of a value: `references.py` removes a value when the reference machine says so.

    a value   event                                becomes
    pending   the creating call returned           ready: ``value``
    pending   the call raised, or will never come  ready: ``failure``
    pending   the node ended                       ready: ``failure``
    ready     anything                             stays as it is

A value has a place in the table from the first message about its reference on: the creating call, a fork, or a question
that overtook both. Each waiter is called once: by the thread that makes the value ready, or at once if it is ready.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from farcall.autograd.scope import backward as backward_in_context
from farcall.errors import Cancelled, ReferenceLost, RpcError, RpcTimeout
from farcall.ids import RefId, WorkerInfo
from farcall.protocol.frames import FAILURE, RESPONSE, Frame
from farcall.protocol.references.owner import MOST_AWAITED
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.results import Later, MarkedResult, StoredFailure, is_async_execution
from farcall.runtime.calls.serving import Request, Server, asking_peer
from farcall.runtime.calls.turns import Turns
from farcall.runtime.devices.streams import Stamp, stamp
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime, runtime_of_thread
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure, encode_failure
from farcall.serialize.allowance import INSTALLED

if TYPE_CHECKING:
    from farcall.rpc.references import NodeReferences
    from farcall.rpc.rref import RRef

NOT_MADE = "value still being made"
_HARMLESS = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor, torch.nn.Parameter))
"""Types whose values die without running user code."""

# One lock for all values, held for an instant. Re-entrant: a garbage collection under the lock may run user code.
_lock = threading.RLock()


class Owned:
    """A value of this node, or its place while the value is still being made.

    Mutable, under the module's lock: the value or failure, once, and the waiters.
    """

    __slots__ = ("_stamp", "_waiting", "failure", "made_by", "origin", "ready", "turns", "type_hint", "value")

    held_by_scripts: type[Any] | None = None
    """The class of values that TorchScript code may have changed; see `farcall.torchscript`."""

    def __init__(self, origin: str = "") -> None:
        self.ready: bool = False
        self.value: Any = None
        self.failure: Frame | None = None
        self.origin: str = origin  # the line of the program that created the value, if origins are recorded
        self.made_by: bytes = b""  # the function that made the value, as the call named it
        self.type_hint: Any = None  # the type for TorchScript, if the user named one
        self.turns: Turns | None = None  # the mailbox of a serial object, whose calls run one at a time
        self._waiting: list[Callable[[], None]] | None = None
        self._stamp: Stamp | None = None  # the device streams that the value was made on, in a node with devices

    def resolve(self, value: Any, devices: Sequence[torch.device] = ()) -> None:
        """Make the place ready with ``value``; ``devices`` are the node's."""
        self._settle(value, None, stamp(value, devices) if devices else None)

    def fail(self, failure: Frame) -> None:
        """Make the place ready with ``failure``, the encoded error that says why no value will come."""
        self._settle(None, failure, None)

    def _settle(self, value: Any, failure: Frame | None, made: Stamp | None) -> None:
        with _lock:
            if self.ready:
                return  # the node ended while the function ran: waiters have that failure, and it must not change
            self.value, self.failure, self._stamp = value, failure, made
            self.ready = True
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            for wake in waiting:
                wake()

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, which must not block, when the value becomes ready; at once if it is."""
        with _lock:
            if not self.ready:
                if self._waiting is None:
                    self._waiting = []
                self._waiting.append(wake)
                return
        wake()

    def wait(self, timeout_s: float) -> bool:
        """Block until the value is ready. False: ``timeout_s`` (-1: no limit) passed first."""
        done = Gate()
        self.when_ready(done.open)
        return done.wait(timeout_s)

    def get(self, *, to_send: bool = False) -> Any:
        """Return the ready value, or raise the error in its place. ``to_send``: raise the error in its encoded form."""
        if self.failure is not None:
            raise StoredFailure(self.failure) if to_send else decode_failure(self.failure)
        if self._stamp is not None:
            self._stamp.wait()  # blocks the current device streams, not this thread
        value = self.value
        return value.to_python() if value.__class__ is Owned.held_by_scripts else value

    def describe(self) -> str:
        """Return the state of the value, or its type, in words."""
        if not self.ready:
            return NOT_MADE
        return "value whose creation failed" if self.failure is not None else type(self.value).__qualname__


def wait_for_value(rref: RRef[Any], owned: Owned, timeout_s: float | None) -> Any:
    """At the owner: wait until the value is ready and return the value itself."""
    if timeout_s is not UNSET_TIMEOUT:
        timeout_s = check_timeout(timeout_s)
    creation = rref._creation
    if creation is not None and creation.error is not None:
        raise copy.copy(creation.error)  # as on any other node, even if the value has become ready since
    if not owned.ready:
        node = rref._references.node
        if timeout_s is UNSET_TIMEOUT:
            timeout_s = node.timeout_s
        deadline = monotonic() + timeout_s if timeout_s else NEVER
        with node.calls.waiting():
            while not owned.ready:
                now = monotonic()
                until = deadline
                if creation is not None:
                    if creation.error is not None:
                        raise copy.copy(creation.error)
                    # The I/O thread fails an overdue creation a moment after its deadline: wake up then and look.
                    until = min(deadline, max(creation.deadline, now) + 0.01)
                if now >= deadline:
                    raise RpcTimeout(f"the value of {rref!r} was not there after {timeout_s:g} s")
                owned.wait(min(until - now, 3600.0))
    return owned.get()


def shut_down(here: WorkerInfo) -> Frame:
    """Encode the failure of a value that was still being made when its node ended."""
    return encode_failure(Cancelled(f"{here.name} shut down before the value was made"), here)


class OwnedValues:
    """The values that one node owns, by reference.

    Mutable: both tables, under the lock of `NodeReferences`. Any thread may look up a key of ``places`` without it.
    """

    def __init__(self, here: WorkerInfo) -> None:
        self._here = here
        self._asked: dict[RefId, int] = {}  # references asked for before they were created, and the first who asked
        self._askers: Counter[int] = Counter()  # by member: how many of these
        self._last_created: dict[int, int] = {}  # by creator: the newest reference whose creating call is accounted for
        self.places: dict[RefId, Owned] = {}

    def place(self, ref: RefId) -> Owned:
        """Return the place of a value; make it if this is the first message about ``ref``."""
        owned = self.places.get(ref)
        if owned is None:
            owned = self.places[ref] = Owned()
        return owned

    def note_creation(self, ref: RefId) -> None:
        """The call that creates ``ref`` has come, or will never come."""
        if ref.local_id > self._last_created.get(ref.created_on, -1):
            self._last_created[ref.created_on] = ref.local_id
        if self._asked:
            self._no_more_asked(ref)

    def await_creation(self, ref: RefId, asker: int) -> None:
        """``asker`` asks for ``ref``, whose creating call has not come; raises where it has asked for too many."""
        if self._askers[asker] >= MOST_AWAITED:
            raise ReferenceLost(f"you ask for more than {MOST_AWAITED} values that nobody has created")
        if ref not in self._asked:
            self._asked[ref] = asker
            self._askers[asker] += 1

    def take(self, ref: RefId) -> Owned | None:
        """Remove a value to which nobody refers. None: it has no place; or somebody waits for its creation."""
        return None if ref in self._asked else self.places.pop(ref, None)

    def _no_more_asked(self, ref: RefId) -> None:
        asker = self._asked.pop(ref, None)
        if asker is not None:
            self._askers[asker] -= 1

    def may_come(self, ref: RefId) -> bool:
        """May the call that creates ``ref`` still come? It is newer than every call accounted for from its creator."""
        return ref.local_id > self._last_created.get(ref.created_on, -1)

    def never_comes(self, ref: RefId, owned: Owned) -> None:
        """Fail the waiters of a value whose creating call will never come."""
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
        """``creator`` died: remove and fail values whose creating call never came. Listed values are being made."""
        abandoned = []
        for ref in [ref for ref in self._asked if ref.created_on == creator]:
            self._no_more_asked(ref)
        for ref, owned in self.places.copy().items():
            if not owned.ready and ref.created_on == creator and not is_listed(ref):
                abandoned.append(self.places.pop(ref))
                self.never_comes(ref, owned)
        return abandoned


class KeptRequest(Request):
    """A creating call, at the owner: the outcome stays here, and the answer says only that the function is done."""

    __slots__ = ("_flush_soon", "_owned")

    cancellable = False  # other members may hold the reference and wait for the value

    def __init__(
        self, server: Server, peer: Peer, frame: Frame, owned: Owned, flush_soon: Callable[[Peer], None]
    ) -> None:
        super().__init__(server, peer, frame)
        self._owned = owned
        self._flush_soon = flush_soon

    def answer(self, outcome: list[Any], more: bool = False) -> None:
        """Keep the result and answer the creator."""
        self._owned.made_by = self.frame.function
        try:
            self._owned.resolve(outcome.pop(), self.server.devices)
        except BaseException as error:  # a look for device tensors in the value may raise anything
            self.fail(error)
            return
        # No thread waits for this answer, so hold it back: it travels with the next message to the creator, most
        # likely the answer to a first use.
        self._send(Frame(RESPONSE), True)
        self._flush_soon(self.peer)

    def _wanted_failure(self, error: BaseException) -> Frame:
        # Encoded without a peer: the member that will ask is not known yet, so the error cannot carry references.
        failure = error.frame if type(error) is StoredFailure else encode_failure(error, self.server.worker)
        self._owned.fail(failure)
        return Frame(FAILURE, payload=failure.payload, buffers=failure.buffers)

    def drop(self) -> None:
        self._owned.fail(shut_down(self.server.worker))
        super().drop()


def dispose(node: Runtime, values: list[Owned]) -> None:
    """Drop ``values``, the last references to them: on a worker thread if their destructors may be user code.

    Call this outside of every lock.
    """
    for owned in values:
        if type(owned.value) not in _HARMLESS:
            del owned  # if the worker finishes first, this local would be the last holder, and the value die here
            doomed = values[:]
            values.clear()
            node.executor.submit(FunctionTask(doomed.clear, doomed.clear))
            return


# ---------------------------------------------------------------------- functions that holders of references call
#
# Ordinary functions, called by ordinary requests, so they run where calls run and fail as calls fail. Each names its
# value by the two numbers of a `RefId`. The caller keeps its own fork until the answer, so the value stays alive. No
# thread waits for a value that is still being made: `Later` answers the request when it is ready. The names of these
# functions are part of the wire format: `rref.py`, `method_calls.py` and `serialize/allowance.py` spell them out.


def find_owned(created_on: int, local_id: int) -> Owned:
    """Return the value that a caller names, or its place."""
    node = runtime_of_thread()
    assert node is not None
    references: NodeReferences = node.server.references  # type: ignore[assignment]  # which knows a part of it
    ref = RefId(created_on, local_id)
    owned = references.places.get(ref)
    return owned if owned is not None and owned.ready else references.find(ref, asking_peer().number)


def fetch(created_on: int, local_id: int) -> Any:
    """Return the value itself; the caller gets a copy."""
    owned = find_owned(created_on, local_id)
    return owned.get(to_send=True) if owned.ready else Later(owned.when_ready, partial(owned.get, to_send=True))


def type_of(created_on: int, local_id: int) -> Any:
    """Return the type of the value."""
    owned = find_owned(created_on, local_id)
    if owned.ready:
        return type(owned.get(to_send=True))
    return Later(owned.when_ready, lambda: type(owned.get(to_send=True)))


class _Method:
    """A function that calls the method of one name on any value."""

    __slots__ = ("__qualname__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self.__qualname__ = name

    def __call__(self, created_on: int, local_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        owned = find_owned(created_on, local_id)
        if owned.ready:
            return self._call(owned, args, kwargs)
        return Later(owned.when_ready, lambda: self._call(owned, args, kwargs))

    def _call(self, owned: Owned, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        value = owned.get(to_send=True)
        if INSTALLED.allowance is not None:
            INSTALLED.allowance.check_method(value, self._name)
        method: Callable[..., Any] = getattr(value, self._name)
        if not callable(method):
            raise TypeError(
                f"{self._name!r} of a value of type {type(value).__name__} is no method: read it by "
                f"rref.to_here().{self._name}, or in a function that takes the reference"
            )
        del value
        result = method(*args, **kwargs) if kwargs else method(*args)
        return MarkedResult(result) if is_async_execution(method) else result


class _Methods:
    """``methods.of_NAME`` calls the method NAME of a value.

    Each method name is a function of its own, because servers and metrics keep run times and counts per function.
    """

    def __getattr__(self, attribute: str) -> _Method:
        if not attribute.startswith("of_"):
            raise AttributeError(attribute)
        method = _Method(attribute.removeprefix("of_"))
        setattr(self, attribute, method)
        return method


methods: _Methods = _Methods()


def backward(created_on: int, local_id: int, context_id: int, retain_graph: bool) -> Any:
    """Run a backward pass from the value."""
    owned = find_owned(created_on, local_id)
    if owned.ready:
        return run_backward(owned.get(to_send=True), context_id, retain_graph)
    return Later(owned.when_ready, lambda: run_backward(owned.get(to_send=True), context_id, retain_graph))


def run_backward(root: Any, context_id: int, retain_graph: bool) -> None:
    """Run a backward pass from ``root``: in a distributed context, or by torch alone where ``context_id`` is -1."""
    if not isinstance(root, torch.Tensor):
        raise RpcError(f"the RRef should contain a tensor for .backward(), not {type(root).__name__}")
    if context_id == -1:
        torch.autograd.backward([root], retain_graph=retain_graph)
    else:
        backward_in_context(context_id, [root], retain_graph)
