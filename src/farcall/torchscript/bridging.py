"""Putting the extension to work: TorchScript's operators call farcall, and TorchScript knows farcall's references.

TorchScript gives Python an object of torch's own class, around the reference: that class hands every question on to the
reference, and passes for an `RRef`. The other way round, `RRef` passes for torch's class, and the extension makes an
object of it where TorchScript wants one.

Invariant: after `disable` torch's classes are what they were, and its operators do what they did.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

import torch

from farcall.rpc import rref as reference
from farcall.rpc.future import Future
from farcall.rpc.rref import RRef
from farcall.runtime.node.ending import leave_at_exit
from farcall.serialize import RECORDING, Encoding, register_reducer
from farcall.serialize.policy import REDUCERS
from farcall.serialize.recording import Recording
from farcall.torchscript import extension, handlers
from farcall.torchscript.handlers import type_of_result

LEAVE_S = 2.0
"""How long the end of the process waits for scripts inside the interpreter."""

_lock = threading.Lock()
_undo: list[Callable[[], object]] = []


def is_enabled() -> bool:
    """Is the extension at work in this process?"""
    return bool(_undo)


def enable() -> None:
    """Let farcall serve RPC in TorchScript code; builds the extension if need be. A second call changes nothing.

    Raises:
        RpcError: the extension is not there, and cannot be built here; the text says what to do.
    """
    with _lock:
        if _undo:
            return
        bridge = extension.load()
        wrapper = bridge.enable(handlers, RRef)
        atexit.unregister(_let_scripts_out)
        atexit.register(_let_scripts_out)
        _undo.append(bridge.disable)
        _undo.extend(_patch(wrapper, bridge.unwrap))
        RRef.script_class = wrapper
        _undo.append(lambda: setattr(RRef, "script_class", None))
        plain = Future.settle
        Future.settle = staticmethod(_settling(bridge.set_result))
        _undo.append(lambda: setattr(Future, "settle", staticmethod(plain)))
        enter = bridge.enter_context

        def on_set(recording: Recording | None) -> None:
            enter(-1 if recording is None else recording.id)

        RECORDING.watch(on_set)
        on_set(RECORDING.get())
        _undo.append(lambda: RECORDING.watch(None))


def disable() -> None:
    """Put TorchScript back as it was."""
    with _lock:
        while _undo:
            _undo.pop()()


def _let_scripts_out() -> None:
    """At exit: have every script fail at its next call, and wait until all have left the interpreter."""
    leave_at_exit()
    extension.load().shut(LEAVE_S)


def allow_pickling(allowed: bool) -> None:
    """Let TorchScript write references into files, or no longer. A worker keeps those that it wrote for life."""
    if allowed:
        enable()
    if is_enabled():
        extension.load().allow_pickling(allowed)


def _patch(wrapper: type[Any], unwrap: Callable[[Any], RRef[Any]]) -> list[Callable[[], object]]:
    """Let torch's class hand every question on to the reference."""

    def describe(self: Any) -> str:
        return repr(unwrap(self))

    def print_(self: Any) -> str:
        return str(unwrap(self))

    def get(self: Any, name: str) -> Any:
        return RRef if name == "__class__" else getattr(unwrap(self), name)

    def reduce(self: Any, encoding: Encoding) -> Any:
        return reference._reduce(unwrap(self), encoding)

    before = {name: vars(wrapper).get(name) for name in ("__getattribute__", "__repr__", "__str__")}
    for name, method in zip(before, (get, describe, print_), strict=True):
        setattr(wrapper, name, method)
    register_reducer(wrapper, reduce)

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                delattr(wrapper, name)
            else:
                setattr(wrapper, name, value)
        REDUCERS.pop(wrapper, None)

    return [undo]


def _settling(set_result: Callable[..., None]) -> Callable[[Any, Any], None]:
    """A function that gives a future its value; where its type is known, as a value that scripts can wait for."""
    tensor = torch._C.TensorType.get()
    plain = torch._C.Future.set_result

    def settle(future: Any, value: Any) -> None:
        kind = tensor if isinstance(value, torch.Tensor) else type_of_result(future.what)
        if kind is not None:
            try:
                set_result(future, value, kind)
                return
            except RuntimeError:
                pass  # of another type after all: Python gets it as it is, and a script that waits for it says so
        plain(future, value)

    return settle
