"""`RRef`: a reference to a value that lives on one node and is used from many.

Owns the operations that a program has on a reference. One object is one fork of the reference, held as long as the
object lives. `references.py` counts forks that are held, sent and dropped; `owner_calls.py` sends questions to the
owner; `method_calls.py` makes the requests for methods of the value.

Invariant: ``__del__`` takes no lock and blocks on nothing, on any thread, at the end of the interpreter too.

Over 400 lines: the operations of one class, with the documentation that users read.
"""

from __future__ import annotations

import copy
import copyreg
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from random import SystemRandom
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import torch

from farcall.destructors import destructor, whole
from farcall.errors import (
    AnswerLost,
    Delivery,
    Expelled,
    NotInitialized,
    Overloaded,
    ReferenceLost,
    RpcError,
    SerializationError,
)
from farcall.html import table
from farcall.ids import WorkerInfo
from farcall.protocol.backoff import Backoff
from farcall.protocol.references.messages import Fork
from farcall.rpc.call import plain_request
from farcall.rpc.method_calls import Call, Proxy, Start, call_method, call_method_async, call_method_remote
from farcall.rpc.outcome import DerivedFuture
from farcall.rpc.owned_values import Owned, run_backward, wait_for_value
from farcall.rpc.owner_calls import Creation, ask, ask_async
from farcall.rpc.timeouts import UNSET_TIMEOUT, check_timeout
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import current_runtime
from farcall.serialize import Encoding, current_decoding, current_encoding, register_reducer, register_references

if TYPE_CHECKING:
    from farcall.protocol.frames import Frame
    from farcall.rpc.references import NodeReferences
    from farcall.rpc.streams import StreamMethods
    from farcall.runtime.peers.peer import Peer

T = TypeVar("T")

_FETCH = b"pfarcall.rpc.owned_values\0fetch"
_TYPE_OF = b"pfarcall.rpc.owned_values\0type_of"
_BACKWARD = b"pfarcall.rpc.owned_values\0backward"
_EXTENSION_CODE = 0x66617272
_LOOK_AGAIN_S = 0.0005
_MOST_ASKED = 8
"""How often a question is repeated when its answers are lost."""
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
"""The first and the longest pause before a question that an overloaded owner refused is repeated."""
_RANDOM = SystemRandom()  # not the global generator: jitter must not disturb a program's seeded sequence


class RRef(Generic[T]):
    """A reference to a value of type T, which lives on its owner.

    ``RRef(value)`` makes the calling worker the owner of ``value``; `remote` and methods called through ``remote()``
    return references to values on other workers. A reference can be sent to any worker, as an argument or a result,
    also inside containers and objects. The owner keeps the value as long as any worker holds a reference to it.

    Args:
        value: any object; it is not copied.
        type_hint: the value's type for TorchScript, if TorchScript cannot infer it.
    """

    __slots__ = (
        "__weakref__",
        "_creation",
        "_fork",
        "_owned",
        "_references",
        "_release",
        "_serial",
        "_type",
        "_type_future",
        "origin",
    )

    _fork: Fork
    _references: NodeReferences
    _owned: Owned | None
    """The value, or its place, if this node is the owner."""
    _creation: Creation | None
    """The creating call, if it returned this object."""
    _release: Callable[[Fork], object]
    _serial: bool
    """Do the calls of the value's methods run one at a time?"""
    _type: type[Any] | None
    _type_future: weakref.ref[torch.futures.Future[Any]] | None
    origin: str
    """The line of the program that created the reference, if origins are recorded."""
    script_class: ClassVar[type[Any] | None] = None
    """TorchScript's class of references, where TorchScript is in use; see `farcall.torchscript`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        # isinstance() reads this, in torch's C++ too, if type(object) does not match: so references pass for
        # TorchScript's class.
        return RRef.script_class or RRef

    def __init__(self, value: T, type_hint: Any = None) -> None:
        from farcall.rpc.references import NodeReferences

        current_runtime().part(NodeReferences).own(self, value)
        assert self._owned is not None
        self._owned.type_hint = type_hint

    def _bind(
        self, references: NodeReferences, fork: Fork, owned: Owned | None, creation: Creation | None, origin: str
    ) -> None:
        """Make this object hold ``fork``. ``__init__`` is for programs, which have a value but no fork."""
        self._references = references
        self._owned = owned
        self._creation = creation
        self._serial = False
        self._type = None
        self._type_future = None
        self.origin = origin
        self._fork = fork
        self._release = references.released.append

    @destructor
    def __del__(self) -> None:
        try:
            self._release(self._fork)
        except Exception:
            pass  # never bound, or the interpreter is shutting down

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = (
                f"; a method of its value is called by rref.call.{name}(...), an attribute read by "
                f"rref.to_here().{name}, or by a function that takes the reference"
            )
            told = f"'RRef' object has no attribute {name!r}{'' if name.startswith('_') else hint}"
            raise AttributeError(told, name=name, obj=self)

    # ------------------------------------------------------------------ the owner

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

        For a reference that came from another worker this waits until the owner confirms, within the default timeout:
        a program that received a reference may rely on it.
        """
        confirmed = self._references.confirmed(self._fork)
        if confirmed or self._creation is not None or self._owned is not None:
            return confirmed
        node = self._references.node
        deadline = monotonic() + (node.timeout_s or NEVER)
        with node.calls.waiting():
            while not self._references.confirmed(self._fork):
                if monotonic() >= deadline or not node.running or self._references.is_lost(self._fork):
                    return False
                sleep(_LOOK_AGAIN_S)
        return True

    def __repr__(self) -> str:
        ref = self._fork.ref
        return f"<RRef {ref.created_on}:{ref.local_id} to a value of {self.owner_name()!r}>"

    def _repr_html_(self) -> str:
        ref, owner = self._fork.ref, self.owner()
        rows = [("owner", f"{owner.name} (rank {owner.id})"), ("id", f"{ref.created_on}:{ref.local_id}")]
        return table("RRef", [*rows, ("here", "the value itself" if self.is_owner() else "a reference")])

    # ------------------------------------------------------------------ the value

    def _question(self, function: bytes, *more: object) -> tuple[Peer, Frame]:
        """Return the owner, and the request for a function of `owned_values.py` on the value."""
        ref, peer = self._fork.ref, self._references.peer(self)
        return peer, plain_request(peer, function, pickle.dumps(((ref.created_on, ref.local_id, *more), None), 5))

    def to_here(self, timeout: float | None = UNSET_TIMEOUT) -> T:
        """Return a copy of the value; at the owner, the value itself. Wait until it is made, or raise why it was not.

        Args:
            timeout: seconds; None for no limit; by default the timeout of the options.
        """
        if self._owned is not None:
            return wait_for_value(self, self._owned, timeout)  # type: ignore[no-any-return]
        references = self._references
        began = monotonic()
        bound_s = references.node.timeout_s if timeout is UNSET_TIMEOUT else check_timeout(timeout)
        lost = 0
        pauses: Backoff | None = None
        # A question changes nothing at the owner, so it may be repeated: when a large answer was lost with its
        # connection, or when the owner was overloaded.
        while True:
            try:
                peer, frame = self._question(_FETCH)
                frame.serial = self._fork.ref if self._serial else None  # wait for a turn: no copy during a method
                return ask(self, peer, RRef.to_here, frame, timeout)  # type: ignore[no-any-return]
            except Expelled:
                raise
            except NotInitialized as error:
                raise NotInitialized(
                    f"{self!r} was given up at a shutdown. Cannot call to_here() on it after deletion. ({error})"
                ) from None
            except AnswerLost:
                lost += 1
                if lost > _MOST_ASKED:
                    raise
            except Overloaded as error:
                creation = self._creation
                if hasattr(error, "remote_traceback") or (creation is not None and creation.error is not None):
                    raise  # the owner refused the creation, or a call inside its function was refused: do not repeat
                pauses = pauses or Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, jitter=_RANDOM)
                pause_s = pauses.next_s()
                if bound_s and monotonic() + pause_s > began + bound_s:
                    raise
                with references.node.calls.waiting():
                    Gate().wait(pause_s)
            if bound_s:
                timeout = max(1e-3, began + bound_s - monotonic())

    def local_value(self) -> T:
        """Return the value itself; only at its owner."""
        if self._owned is None:
            ref, fork_id = (
                f"GloballyUniqueId(created_on={one.created_on}, local_id={one.local_id})"
                for one in (self._fork.ref, self._fork.fork_id)
            )
            raise RpcError(
                f"For UserRRef(rref_id={ref}, fork_id={fork_id}), can't call localValue() on user "
                f"{self._references.node.info}. Call it on owner {self.owner()}, or use to_here() for a copy"
            )
        return wait_for_value(self, self._owned, None)  # type: ignore[no-any-return]

    # For a type checker, ``call`` is the value itself: its methods with their arguments and results. No type says
    # "the same methods, each with a Future of its result", so ``start`` takes the method as its first argument.

    @property
    def call(self) -> T:
        """``rref.call.method(...)`` calls a method of the value at its owner, and returns its result.

        ``rref.call(Class.method, ...)`` is the same call; ``rref.call(x)`` calls the value itself.
        """
        return Call(call_method, self, UNSET_TIMEOUT)  # type: ignore[return-value]

    @property
    def start(self) -> Start[T]:
        """``rref.start.method(...)`` calls a method of the value at its owner, and returns a future of its result.

        ``rref.start(Class.method, ...)`` is the same call, and type checkers know its arguments and its result.
        """
        return Start(call_method_async, self, UNSET_TIMEOUT)

    @property
    def stream(self) -> StreamMethods[T]:
        """``rref.stream.method(...)`` calls a generator method of the value at its owner; iterate over its items.

        ``rref.stream(Class.method, ...)`` is the same call, and type checkers know its arguments and its items.
        """
        from farcall.rpc.streams import StreamMethods, stream_method  # most programs have no streams

        return StreamMethods(stream_method, self, UNSET_TIMEOUT)

    def rpc_sync(self, timeout: float | None = UNSET_TIMEOUT) -> T:
        """``rref.rpc_sync().method(...)`` calls a method of the value at its owner, and returns its result."""
        return Proxy(call_method, self, timeout)  # type: ignore[return-value]  # as far as its methods go, it is one

    def rpc_async(self, timeout: float | None = UNSET_TIMEOUT) -> Any:
        """``rref.rpc_async().method(...)`` calls a method of the value at its owner, and returns a future."""
        return Proxy(call_method_async, self, timeout)

    def remote(self, timeout: float | None = UNSET_TIMEOUT) -> Any:
        """``rref.remote().method(...)`` calls a method at the owner, and returns a reference to its result there."""
        return Proxy(call_method_remote, self, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass with the value, a tensor, as its root.

        Args:
            dist_autograd_ctx_id: the distributed autograd context that collects the gradients. Without one, and only
                at the owner, the pass is torch's own, and gradients go to ``.grad``.
            retain_graph: keep the graph for another pass.
        """
        if self._owned is not None:
            run_backward(wait_for_value(self, self._owned, UNSET_TIMEOUT), dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified: gradients go to a context")
        peer, frame = self._question(_BACKWARD, dist_autograd_ctx_id, retain_graph)
        ask(self, peer, RRef.backward, frame, UNSET_TIMEOUT)

    def _get_type(self, timeout: float | None = UNSET_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value; without ``blocking``, a future of it. The owner is asked once."""
        if blocking and self._type is None and self._owned is not None:
            self._type = type(wait_for_value(self, self._owned, timeout))
        if blocking and self._type is not None:
            return self._type
        # A weak reference: a failed future holds its error, and the traceback may hold this object, in a cycle through
        # C++ that no garbage collector sees. Until it is done, the table of calls keeps the future alive.
        future = None if self._type_future is None else self._type_future()
        if future is None or _has_failed(future):
            if self._type is not None:
                future = DerivedFuture(self._references.node)
                future.set_result(self._type)
            elif self._owned is not None:
                future = DerivedFuture(self._references.node)
                tell = partial(_tell_type, self._owned, future)
                if self._owned.ready:
                    tell()
                else:
                    submit = self._references.node.executor.submit
                    self._owned.when_ready(lambda: submit(FunctionTask(tell, tell)))
            else:
                peer, frame = self._question(_TYPE_OF)
                future = ask_async(self, peer, RRef._get_type, frame, timeout)
                future.add_done_callback(partial(_keep_type, weakref.ref(self)))
            self._type_future = weakref.ref(future)
        if not blocking:
            return future
        try:
            self._type = future.wait()
        finally:
            del future  # an error's traceback holds this frame, so this local would close the same cycle
        return self._type

    def _get_future(self) -> torch.futures.Future[None]:
        """Return a future that completes when the creating call is done, with its error if it failed."""
        if self._creation is not None:
            return self._creation.future()
        return self._get_type(blocking=False).then(_without_value)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ on the way

    def _serialize(self) -> NoReturn:
        """Raise: torch sends a reference by hand this way, but farcall must know which member will hold it."""
        if self._creation is not None and self._creation.error is not None:
            raise copy.copy(self._creation.error)
        _refuse_to_pickle()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Other picklers than farcall's come here. One that the user installed for calls may be encoding a call.
        encoding = current_encoding()
        if encoding is None:
            _refuse_to_pickle()
        return _reduce(self, encoding)


def _refuse_to_pickle() -> NoReturn:
    raise SerializationError(
        "Can not pickle rref in python pickler: a reference can only be sent as part of a call's arguments or result, "
        "where farcall keeps account of it"
    )


@whole
def _reduce(rref: RRef[Any], encoding: Encoding) -> Any:
    references = rref._references
    if encoding.peer is None:
        if not references.node.running and not rref.is_owner():
            raise ReferenceLost(f"{rref!r}: Cannot call fork an UserRRef after deletion.", Delivery.NOT_SENT)
        _refuse_to_pickle()
    fork = references.fork(rref, encoding.peer)
    index = encoding.note(fork, lambda: references.withdraw(fork))
    return _arrived, (index, True) if rref._serial else (index,)


def _fork(rref: RRef[Any], peer: Peer | None) -> tuple[Fork, Callable[[], None]] | None:
    """`_reduce` without pickle, for the usual case: a reference to an object without turns, sent to a peer."""
    if peer is None or rref._serial:
        return None
    references = rref._references
    fork = references.fork(rref, peer)
    return fork, lambda: references.withdraw(fork)


def _arrived(index: int, serial: bool = False) -> RRef[Any]:
    """Return the reference at ``index`` in the notes of the message that is being decoded."""
    forks = current_decoding().forks
    if not forks:
        raise SerializationError("a reference came without its entry in the notes of the message")
    found: RRef[Any] = forks[index]
    found._serial = serial
    return found


register_reducer(RRef, _reduce)
register_references(RRef, _fork)
# An extension code in place of a qualified name: the unpickler resolves it by one dict lookup.
copyreg.add_extension(__name__, "_arrived", _EXTENSION_CODE)


def _tell_type(owned: Owned, future: torch.futures.Future[Any]) -> None:
    try:
        found = type(owned.get())
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)


def _keep_type(rref: weakref.ref[RRef[Any]], future: torch.futures.Future[Any]) -> None:
    """Keep the type in the reference, if it still lives: the next question may find the future gone."""
    held = rref()
    if held is not None and not _has_failed(future):
        held._type = future.value()


def _has_failed(future: torch.futures.Future[Any]) -> bool:
    """Is ``future`` done with an error? Then a later question must ask again."""
    if not future.done():
        return False
    try:
        future.value()
    except Exception:
        return True
    return False


def _without_value(done: torch.futures.Future[Any]) -> None:
    done.value()
