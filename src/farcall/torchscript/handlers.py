"""What the operators of TorchScript do that `bridge/` has put in place: it calls the functions here by name.

Each runs on the thread that runs the script, with the interpreter locked, and may raise anything: the script sees its
text. TorchScript goes on with a function on other threads after it has waited for something; those know no distributed
autograd context, so the number of the context comes along with each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farcall import api, autograd
from farcall.autograd.recorder import Recorder
from farcall.errors import ReferenceLost, RpcError
from farcall.rpc.future import call_async as issue
from farcall.rpc.owned_values import Owned, wait_for_value
from farcall.rpc.rref import RRef
from farcall.runtime.io.reader import stop_reading
from farcall.serialize import RECORDING
from farcall.serialize.functions import decode_function
from farcall.torchscript.types import type_of as type_of

T = TypeVar("T")
_NO_CONTEXT = -1

# ---------------------------------------------------------------------- calls


def call_sync(
    to: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, context_id: int
) -> Any:
    """``rpc_sync`` in a script."""
    function = _find(name)
    return _in_context(context_id, lambda: api.rpc_sync(to, function, args, kwargs, timeout_s))


def call_async(
    to: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, context_id: int
) -> Any:
    """``rpc_async`` in a script."""
    stop_reading()  # the script is likely to wait for the result, which it does where nobody sees it
    function = _find(name)
    return _in_context(
        context_id, lambda: issue(api.current_runtime(), to, function, args, kwargs, timeout_s, "async_jit")
    )


def call_remote(
    to: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, context_id: int
) -> Any:
    """``remote`` in a script."""
    function = _find(name)
    return _in_context(context_id, lambda: api.remote(to, function, args, kwargs, timeout_s))


def _find(name: str) -> Any:
    """The script function of that name: the same object each time, which is what is known of functions is kept by."""
    return decode_function(b"s" + name.encode())


def _in_context(context_id: int, do: Callable[[], T]) -> T:
    if context_id == _NO_CONTEXT or RECORDING.get() is not None:
        return do()
    recording = api.current_runtime().part(Recorder).contexts.find(context_id)
    if recording is None:
        return do()
    outside = recording.enter()
    try:
        return do()
    finally:
        RECORDING.set(outside)


# ---------------------------------------------------------------------- references


def to_here(rref: RRef[Any], timeout_s: float, is_module: bool) -> Any:
    """The value; at its owner in the form in which scripts change it in place."""
    if rref._owned is not None:
        wait_for_value(rref, rref._owned, timeout_s)
        return rref._owned.value
    if is_module:
        raise RpcError(
            f"{rref} is an RRef to a ScriptModule. It can't be sent through RPC from owner, {rref.owner()}, to user, "
            f"{api.get_worker_info()}. Call it there, or fetch it in Python code"
        )
    return rref.to_here(timeout_s)


def local_value(rref: RRef[Any]) -> Any:
    """The same without a copy, only at the owner."""
    if rref._owned is None:
        raise RpcError(
            f"Can't call RRef.local_value() on a non-owner RRef: {rref} belongs to {rref.owner_name()}; use to_here()"
        )
    wait_for_value(rref, rref._owned, 0.0)
    return rref._owned.value


def keep_value(rref: RRef[Any], value: Any) -> None:
    """A script has, at the owner, what it may change in place: that is the value from now on."""
    if rref._owned is not None:
        Owned.held_by_scripts = type(value)
        rref._owned.value = value


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Of an object of a script class that is Python's; None: it is something else."""
    is_script_class = torch.jit._state._get_script_class(type(value)) is not None  # type: ignore[no-untyped-call]
    return vars(value) if is_script_class else None


def numbers_of(rref: RRef[Any]) -> tuple[int, int]:
    """Who we are, and who its owner is, by rank."""
    return rref._references.node.info.id, rref.owner().id


# ---------------------------------------------------------------------- references in files


class _Pickled:
    """A part of a node: the references that it has written into files, as long as it lives."""

    def __init__(self, node: Any) -> None:
        self.written: dict[int, RRef[Any]] = {}
        self.read: dict[tuple[int, int], RRef[Any]] = {}
        self.lock = threading.Lock()


def keep_pickled(number: int, rref: RRef[Any]) -> None:
    """TorchScript writes ``rref`` into a file. Nobody knows who will read it, nor how often: it is kept."""
    rref._references.node.part(_Pickled).written[number] = rref


def find_pickled(writer: int, number: int) -> RRef[Any]:
    """TorchScript has read a reference that worker ``writer`` wrote as its ``number``-th."""
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


# ---------------------------------------------------------------------- distributed autograd


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """``dist_autograd.get_gradients`` in a script."""
    return autograd.get_gradients(context_id)


def backward(context_id: int, roots: list[torch.Tensor], retain_graph: bool) -> None:
    """``dist_autograd.backward`` in a script."""
    autograd.backward(context_id, roots, retain_graph)
