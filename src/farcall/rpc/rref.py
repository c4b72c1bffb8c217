"""`RRef`: a reference to a value that lives on one node and is used from many.

One object is one fork of the reference, held as long as the object lives. What holding, sending and dropping mean is
the business of `references.py`; how a creating call goes, that of `creation.py`. Here is what a program can do with
one.

Invariant: ``__del__`` takes no lock and blocks on nothing, on any thread, at the end of the interpreter too.
"""

from __future__ import annotations

import copy
import copyreg
import pickle
import weakref
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import torch

from farcall.errors import (
    Delivery,
    NotInitialized,
    ReferenceLost,
    RpcError,
    SerializationError,
)
from farcall.ids import ForkId, RefId, WorkerInfo
from farcall.protocol.references.messages import Fork
from farcall.rpc import proxy
from farcall.rpc.call import UNSET_TIMEOUT, plain_request
from farcall.rpc.creation import Creation
from farcall.rpc.owned_value import Owned
from farcall.rpc.owner_calls import ask, ask_async, ask_patiently, wait_for_value
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_node
from farcall.runtime.peers.peer import Peer
from farcall.serialize import Encoding, current_decoding, current_encoding, register_reducer

if TYPE_CHECKING:
    from farcall.rpc.references import NodeReferences

T = TypeVar("T")

_FETCH = b"pfarcall.rpc.owner_methods\0fetch"
_TYPE_OF = b"pfarcall.rpc.owner_methods\0type_of"
_BACKWARD = b"pfarcall.rpc.owner_methods\0backward"
_EXTENSION_CODE = 0x66617272
_LOOK_AGAIN_S = 0.0005


class RRef(Generic[T]):
    """A reference to a value of type T, which lives on its owner.

    ``RRef(value)`` makes the calling worker the owner of ``value``; `remote` and methods called through ``remote()``
    give references to values on other workers. A reference can be sent to any worker, as an argument or a result,
    also inside containers and objects; the owner keeps the value as long as anybody holds one.

    Args:
        value: any object; it is not copied.
        type_hint: its type for TorchScript, where that cannot be seen from the value.
    """

    __slots__ = (
        "__weakref__",
        "_creation",
        "_fork",
        "_owned",
        "_references",
        "_release",
        "_type",
        "_type_future",
        "origin",
    )

    _fork: Fork
    _references: NodeReferences
    _owned: Owned | None
    """Where the value is, if this node is its owner."""
    _creation: Creation | None
    """The creating call, if it was made through this very object."""
    _release: Callable[[Fork], object]
    _type: type[Any] | None
    _type_future: weakref.ref[torch.futures.Future[Any]] | None
    origin: str
    """Where in the program the reference was created, if that is recorded."""
    script_class: ClassVar[type[Any] | None] = None
    """What TorchScript knows references as, where that is in use; see `farcall.torchscript`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        # Asked by isinstance, also by that of torch's C++, where an object's own type is not the one looked for.
        return RRef.script_class or RRef

    def __init__(self, value: T, type_hint: Any = None) -> None:
        from farcall.rpc.references import NodeReferences

        current_node().part(NodeReferences).own(self, value)
        assert self._owned is not None
        self._owned.type_hint = type_hint

    @staticmethod
    def _of(
        references: NodeReferences, fork: Fork, owned: Owned | None, creation: Creation | None, origin: str = ""
    ) -> RRef[Any]:
        rref: RRef[Any] = RRef.__new__(RRef)
        rref._become(references, fork, owned, creation, origin)
        return rref

    def _become(
        self, references: NodeReferences, fork: Fork, owned: Owned | None, creation: Creation | None, origin: str
    ) -> None:
        self._references = references
        self._owned = owned
        self._creation = creation
        self._type = None
        self._type_future = None
        self.origin = origin
        self._fork = fork
        self._release = references.released.append

    def __del__(self) -> None:
        try:
            self._release(self._fork)
        except Exception:
            pass  # never made, or the interpreter is all but gone

    # ------------------------------------------------------------------ whose it is

    def is_owner(self) -> bool:
        """Does the value live on this worker?"""
        return self._owned is not None

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        return self._references.worker(self._fork.owner)

    def owner_name(self) -> str:
        """The name of the worker on which the value lives."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Does the owner know of this reference yet?

        For one that came from another worker this waits for the owner to say so, within the default timeout: a program
        that was handed a reference may count on it.
        """
        if self._references.confirmed(self._fork) or self._creation is not None or self._owned is not None:
            return self._references.confirmed(self._fork)
        return self._wait_until_confirmed()

    def _wait_until_confirmed(self) -> bool:
        node = self._references.node
        deadline = monotonic() + (node.timeout_s or NEVER)
        with node.calls.waiting():
            while not self._references.confirmed(self._fork):
                if monotonic() >= deadline or not node.running or self._references.is_lost(self._fork):
                    return False
                sleep(_LOOK_AGAIN_S)
        return True

    def __repr__(self) -> str:
        ref, fork_id = self._fork.ref, self._fork.fork_id
        name = "OwnerRRef" if self.is_owner() else "UserRRef"
        return (
            f"{name}(owner={self.owner_name()}, id={ref.created_on}:{ref.local_id}, "
            f"fork={fork_id.created_on}:{fork_id.local_id})"
        )

    def __str__(self) -> str:
        # As programs that were written for torch.distributed.rpc know it.
        ref, fork_id = (f"GloballyUniqueId({_numbers(number)})" for number in (self._fork.ref, self._fork.fork_id))
        return f"OwnerRRef({ref})" if self.is_owner() else f"UserRRef(RRefId = {ref}, ForkId = {fork_id})"

    # ------------------------------------------------------------------ the value

    def to_here(self, timeout: float = UNSET_TIMEOUT) -> T:
        """A copy of the value; at the owner the value itself. Waits until it is there; raises what its creation raised.

        Args:
            timeout: seconds; 0 for none; by default that of the options.
        """
        if self._owned is not None:
            return wait_for_value(self, self._owned, timeout)  # type: ignore[no-any-return]
        ref = self._fork.ref
        payload = pickle.dumps(((ref.created_on, ref.local_id), None), 5)
        try:
            return ask_patiently(self, RRef.to_here, _FETCH, payload, timeout)  # type: ignore[no-any-return]
        except NotInitialized as error:
            raise NotInitialized(
                f"{self!r} was given up at a shutdown. Cannot call to_here() on it after deletion. ({error})"
            ) from None

    def local_value(self) -> T:
        """The value itself; only at its owner."""
        if self._owned is None:
            ref, fork_id = (f"GloballyUniqueId({_numbers(number)})" for number in (self._fork.ref, self._fork.fork_id))
            raise RpcError(
                f"For UserRRef(rref_id={ref}, fork_id={fork_id}), can't call localValue() on user "
                f"{self._references.node.info}. Call it on owner {self.owner()}, or use to_here() for a copy"
            )
        return wait_for_value(self, self._owned, 0.0)  # type: ignore[no-any-return]

    def rpc_sync(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """``rref.rpc_sync().method(...)`` calls a method of the value at its owner, and returns its result."""
        return proxy.Proxy(proxy.call_sync, self, timeout)

    def rpc_async(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """``rref.rpc_async().method(...)`` calls a method of the value at its owner; a future of its result."""
        return proxy.Proxy(proxy.call_async, self, timeout)

    def remote(self, timeout: float = UNSET_TIMEOUT) -> Any:
        """``rref.remote().method(...)`` calls a method of the value at its owner; a reference to its result there."""
        return proxy.Proxy(proxy.call_remote, self, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass with the value, a tensor, as its root.

        Args:
            dist_autograd_ctx_id: the distributed autograd context that gradients go to. Without one, and only at the
                owner, the pass is torch's own, and gradients go to ``.grad``.
            retain_graph: keep the graph for another pass.
        """
        if self._owned is not None:
            from farcall.rpc.owner_methods import run_backward

            run_backward(wait_for_value(self, self._owned, UNSET_TIMEOUT), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified: gradients go to a context")
        ref = self._fork.ref
        payload = pickle.dumps(((ref.created_on, ref.local_id, dist_autograd_ctx_id, retain_graph), None), 5)
        ask(self, RRef.backward, plain_request(self._peer(), _BACKWARD, payload), UNSET_TIMEOUT)

    def _get_type(self, timeout: float = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value; without ``blocking`` a future of it. Asked once."""
        if blocking and self._type is None and self._owned is not None:
            self._type = type(wait_for_value(self, self._owned, timeout))
        if blocking and self._type is not None:
            return self._type
        # Weakly: a future that failed holds its error, whose traceback may hold us, in ways that no garbage collector
        # sees. One that is still to come is held by the table of calls.
        future = None if self._type_future is None else self._type_future()
        if future is None or _has_failed(future):
            if self._type is not None:
                future = torch.futures.Future()
                future.set_result(self._type)
            elif self._owned is not None:
                future = torch.futures.Future()
                self._references.tell_type(self._owned, future)
            else:
                ref = self._fork.ref
                payload = pickle.dumps(((ref.created_on, ref.local_id), None), 5)
                future = ask_async(self, RRef._get_type, plain_request(self._peer(), _TYPE_OF, payload), timeout)
                future.add_done_callback(_keeping_type(weakref.ref(self)))
            self._type_future = weakref.ref(future)
        if not blocking:
            return future
        try:
            self._type = future.wait()
        finally:
            del future  # as above
        return self._type

    def _get_future(self) -> torch.futures.Future[None]:
        """A future that completes when the call that creates the value is done, with its error if it failed."""
        if self._creation is not None:
            return self._creation.future()
        return self._get_type(blocking=False).then(_without_value)  # type: ignore[no-any-return]

    def _peer(self) -> Peer:
        return self._references.peer(self._fork)

    # ------------------------------------------------------------------ how it travels

    def _serialize(self) -> NoReturn:
        """Stock's way to send a reference by hand: an error, since nobody could say who will hold it."""
        if self._creation is not None and self._creation.error is not None:
            raise copy.copy(self._creation.error)
        _refuse_to_pickle()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Reached by picklers that are not ours; one that a user installed for calls may be at work on a call.
        encoding = current_encoding()
        if encoding is None:
            _refuse_to_pickle()
        return _reduce(self, encoding)


def _refuse_to_pickle() -> NoReturn:
    raise SerializationError(
        "Can not pickle rref in python pickler: a reference can only be sent as part of a call's arguments or result, "
        "where farcall keeps account of it"
    )


def _reduce(rref: RRef[Any], encoding: Encoding) -> Any:
    references = rref._references
    if encoding.peer is None:
        if not references.node.running and not rref.is_owner():
            raise ReferenceLost(f"{rref!r}: Cannot call fork an UserRRef after deletion.", Delivery.NOT_SENT)
        _refuse_to_pickle()
    fork = references.fork(rref, encoding.peer)
    return _arrived, (encoding.note(fork, lambda: references.withdraw(fork)),)


def _arrived(index: int) -> RRef[Any]:
    """The reference at this place among the notes of the message being read."""
    forks = current_decoding().forks
    if not forks:
        raise SerializationError("a reference came without its entry in the notes of the message")
    found: RRef[Any] = forks[index]
    return found


register_reducer(RRef, _reduce)
# By a number instead of a name: reading it is a dict lookup.
copyreg.add_extension(__name__, "_arrived", _EXTENSION_CODE)

__all__ = ["RRef"]


def _numbers(number: RefId | ForkId) -> str:
    return f"created_on={number.created_on}, local_id={number.local_id}"


def _keeping_type(rref: weakref.ref[RRef[Any]]) -> Callable[[torch.futures.Future[Any]], None]:
    """Have the answer kept by the reference, if that is still there: its future may be gone when it is asked again."""

    def keep(future: torch.futures.Future[Any]) -> None:
        held = rref()
        if held is not None and not _has_failed(future):
            held._type = future.value()

    return keep


def _has_failed(future: torch.futures.Future[Any]) -> bool:
    """Is it done, with an error? Then it is no answer for whoever asks later."""
    if not future.done():
        return False
    try:
        future.value()
    except Exception:
        return True
    return False


def _without_value(done: torch.futures.Future[Any]) -> None:
    done.value()
