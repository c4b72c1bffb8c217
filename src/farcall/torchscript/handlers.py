"""The Python side of TorchScript's RPC operators: `bridge/` calls the functions here by name.

Two of them, `backward` and `get_gradients`, are those of `farcall.autograd`.

Each runs on the thread that runs the script, with the interpreter locked, and may raise anything: the script sees the
text. After a wait, TorchScript may go on with a function on another thread, which knows no distributed autograd
context; so each call brings the number of its context along.

TorchScript learns the type of a value from the function that made it, from the user's hint, or by inference. A holder
of a reference that made the creating call itself knows the type; any other holder asks the owner.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from farcall import api
from farcall.autograd import backward as backward
from farcall.autograd import get_gradients as get_gradients
from farcall.autograd.recorder import Recorder
from farcall.errors import ReferenceLost, RpcError
from farcall.rpc.future import call_async as issue
from farcall.rpc.owned_values import Owned, wait_for_value
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT, from_torch
from farcall.runtime.io.reader import stop_reading
from farcall.serialize import RECORDING
from farcall.serialize.functions import decode_function
from farcall.torchscript import extension

_NO_CONTEXT = -1

# ---------------------------------------------------------------------- calls


def call_sync(
    to: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, context_id: int
) -> Any:
    """``rpc_sync`` in a script."""
    with _inside(context_id):
        return api.rpc_sync(to, _find(name), args, kwargs, from_torch(timeout_s))


def call_async(
    to: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, context_id: int
) -> Any:
    """``rpc_async`` in a script."""
    stop_reading()  # the script will probably wait in C++, where no other thread can take over reading
    with _inside(context_id):
        return issue(api.current_runtime(), to, _find(name), args, kwargs, from_torch(timeout_s), "async_jit")


def call_remote(
    to: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, context_id: int
) -> Any:
    """``remote`` in a script."""
    with _inside(context_id):
        return api.remote(to, _find(name), args, kwargs, from_torch(timeout_s))


def _find(name: str) -> Any:
    """The script function of that name: always the same object, since caches about functions go by identity."""
    return decode_function(b"s" + name.encode())


@contextmanager
def _inside(context_id: int) -> Iterator[None]:
    """Enter the distributed autograd context of that number, unless this thread is in one, or it is unknown."""
    recording = None
    if context_id != _NO_CONTEXT and RECORDING.get() is None:
        recording = api.current_runtime().part(Recorder).contexts.find(context_id)
    if recording is None:
        yield
        return
    outside = recording.enter()
    try:
        yield
    finally:
        RECORDING.set(outside)


# ---------------------------------------------------------------------- references


def to_here(rref: RRef[Any], timeout_s: float, is_module: bool) -> Any:
    """The value; at its owner, the object that scripts change in place."""
    if rref._owned is not None:
        wait_for_value(rref, rref._owned, from_torch(timeout_s))
        return rref._owned.value
    if is_module:
        raise RpcError(
            f"{rref} is an RRef to a ScriptModule. It can't be sent through RPC from owner, {rref.owner()}, to user, "
            f"{api.get_worker_info()}. Call it there, or fetch it in Python code"
        )
    return rref.to_here(from_torch(timeout_s))


def local_value(rref: RRef[Any]) -> Any:
    """The value itself, at its owner only."""
    if rref._owned is None:
        raise RpcError(
            f"Can't call RRef.local_value() on a non-owner RRef: {rref} belongs to {rref.owner_name()}; use to_here()"
        )
    wait_for_value(rref, rref._owned, None)
    return rref._owned.value


def keep_value(rref: RRef[Any], value: Any) -> None:
    """At the owner: from now on the value is the object that a script may change in place."""
    if rref._owned is not None:
        Owned.held_by_scripts = type(value)
        rref._owned.value = value


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a Python object of a script class; None for anything else."""
    is_script_class = torch.jit._state._get_script_class(type(value)) is not None  # type: ignore[no-untyped-call]
    return vars(value) if is_script_class else None


def numbers_of(rref: RRef[Any]) -> tuple[int, int]:
    """The ranks of this worker and of the owner."""
    return rref._references.node.info.id, rref.owner().id


# ---------------------------------------------------------------------- types


def type_of_result(function: Any) -> Any:
    """The result type of a TorchScript function or of one operator; None for any other function."""
    if isinstance(function, torch.jit.ScriptFunction):
        schema: Any = function.schema  # a property, whatever torch's stubs say
        returns = schema.returns
    elif isinstance(function, torch._ops.OpOverload):
        returns = function._schema.returns
    else:
        return None
    return returns[0].type if len(returns) == 1 else None


def type_of(rref: RRef[Any]) -> Any:
    """The type of a reference's value; None if TorchScript does not know it."""
    if rref._creation is not None:
        known = type_of_result(rref._creation.what)
        if known is not None:
            return known
    if rref._owned is not None:
        wait_for_value(rref, rref._owned, UNSET_TIMEOUT)
        return _type_of_owned(rref._owned)
    text = api.rpc_sync(rref.owner(), _type_as_text, (rref,))
    return None if text is None else extension.load().parse_type(text)


def _type_as_text(rref: RRef[Any]) -> str | None:
    """At the owner."""
    found = type_of(rref)
    return None if found is None else str(found.annotation_str)


def _type_of_owned(owned: Owned) -> Any:
    if owned.type_hint is not None:
        from torch._sources import fake_range
        from torch.jit.annotations import try_ann_to_type

        return try_ann_to_type(owned.type_hint, fake_range())  # type: ignore[no-untyped-call]
    if owned.made_by[:1] in (b"s", b"o", b"b"):
        known = type_of_result(decode_function(owned.made_by))
        if known is not None:
            return known
    inferred = torch._C._jit_try_infer_type(owned.get())
    return inferred.type() if inferred.success() else None


# ---------------------------------------------------------------------- references in files


class _Pickled:
    """The references that a node has written into files, and read from them."""

    def __init__(self, node: Any) -> None:
        self.written: dict[int, RRef[Any]] = {}
        self.read: dict[tuple[int, int], RRef[Any]] = {}
        self.lock = threading.Lock()


def keep_pickled(number: int, rref: RRef[Any]) -> None:
    """Keep ``rref``, which TorchScript writes into a file, for good: readers may come at any time."""
    rref._references.node.part(_Pickled).written[number] = rref


def find_pickled(writer: int, number: int) -> RRef[Any]:
    """The ``number``-th reference that worker ``writer`` wrote, for TorchScript, which read that from a file."""
    pickled = api.current_runtime().part(_Pickled)
    with pickled.lock:
        found = pickled.read.get((writer, number))
    if found is None:
        found = api.rpc_sync(writer, _written, (number,))
        with pickled.lock:
            found = pickled.read.setdefault((writer, number), found)
    return found


def _written(number: int) -> RRef[Any]:
    """At the writer."""
    node = api.current_runtime()
    try:
        return node.part(_Pickled).written[number]
    except KeyError:
        raise ReferenceLost(f"{node.info.name} has not written a reference {number} since it started") from None
