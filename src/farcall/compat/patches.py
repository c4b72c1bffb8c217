"""Single names of torch's modules that change where farcall is installed, and change back.

    torch._jit_internal, torch.jit   references as annotations; functions that scripts know by identity
    torch.nn, torch.distributed      names that a torch without RPC never had
    torch.futures                    collect_all and wait_all that end with the first error
    the environment                  process groups that are complete when they are made
    farcall's RRef                   errors that come at the call, as programs expect
    farcall's timeouts               0 for no limit, and -1 for the default

`apply` patches the modules that are loaded; for later ones the finder of `installation` uses `AFTER_IMPORT`.
`installation` also replaces whole modules.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Undo = Callable[[], object]
_MISSING = object()


def patch(where: Any, name: str, value: object) -> Undo:
    """Set an attribute; the returned function sets it back, unless other code has set it since."""
    before = vars(where).get(name, _MISSING)
    setattr(where, name, value)

    def undo() -> None:
        if vars(where).get(name) is not value:
            return
        if before is _MISSING:
            delattr(where, name)
        else:
            setattr(where, name, before)

    return undo


def apply() -> list[Undo]:
    """Patch torch's modules that are loaded, and farcall's references."""
    undo: list[Undo] = []
    for name, add in AFTER_IMPORT.items():
        module = sys.modules.get(name)
        if module is not None:
            undo.extend(add(module))
    return [*undo, *_barrier(), *_script_builtins(), *_scripts(), *_futures(), *_references(), *_timeouts()]


# ---------------------------------------------------------------------- names that a torch without RPC lacks


def _jit_internal(module: ModuleType) -> list[Undo]:
    from farcall.compat.rpc import RRef

    undo = [patch(module, "RRef", RRef), patch(module, "PyRRef", RRef)]
    if not hasattr(module, "is_rref"):

        def is_rref(annotation: Any) -> bool:
            if annotation is RRef:
                raise RuntimeError("RRef as an annotation in TorchScript needs its contained type, as in RRef[int]")
            return bool(module.get_origin(annotation) is RRef)

        undo.append(patch(module, "is_rref", is_rref))
        undo.append(patch(module, "is_rref_instance", lambda value: isinstance(value, RRef)))
    return undo


def _jit_annotations(module: ModuleType) -> list[Undo]:
    from torch import _C, _jit_internal

    internal: Any = _jit_internal
    undo = []
    if not hasattr(module, "is_rref"):
        undo.append(patch(module, "is_rref", internal.is_rref))
    if not hasattr(module, "RRefType"):
        undo.append(patch(module, "RRefType", _C.RRefType))
    return [*undo, patch(module, "RRef", internal.RRef)]


def _data_parallel(module: ModuleType) -> list[Undo]:
    from farcall.compat.rpc import RRef

    return [patch(module, "RRef", RRef), patch(module, "RPC_AVAILABLE", True)]


def _nn(module: ModuleType) -> list[Undo]:
    from farcall.compat.nn import RemoteModule

    return [patch(module, "RemoteModule", RemoteModule)]


def _optim(module: ModuleType) -> list[Undo]:
    from farcall.compat.optim import DistributedOptimizer

    return [patch(module, "DistributedOptimizer", DistributedOptimizer)]


AFTER_IMPORT: dict[str, Callable[[ModuleType], list[Undo]]] = {
    "torch._jit_internal": _jit_internal,
    "torch.jit.annotations": _jit_annotations,
    "torch.nn.parallel.distributed": _data_parallel,
    "torch.distributed.nn": _nn,
    "torch.distributed.optim": _optim,
}
"""The patches of torch's modules, applied once each is loaded."""

# ---------------------------------------------------------------------- TorchScript


def _script_builtins() -> list[Undo]:
    """Enter farcall's distributed autograd among the functions that scripts know by identity."""
    from torch.jit import _builtins

    from farcall.compat import autograd

    if _builtins._builtin_table is None:  # torch fills it at first use, from the modules in place by then
        return []
    table = _builtins._builtin_table
    keys = {id(autograd.get_gradients): "aten::get_gradients", id(autograd.backward): "aten::dist_backward"}
    table.update(keys)

    def undo() -> None:
        for key in keys:
            table.pop(key, None)

    return [undo]


def _scripts() -> list[Undo]:
    """From now on, prepare the extension wherever TorchScript compiles code that needs it."""
    from farcall.compat import autograd, rpc
    from farcall.torchscript import bridging, extension, need

    if extension.is_loaded():
        bridging.enable()  # for code that was compiled before farcall was uninstalled, and is installed again now
    functions = (rpc.rpc_sync, rpc.rpc_async, rpc.remote, autograd.get_gradients, autograd.backward)
    return [bridging.disable, *need.watch(functions)]


# ---------------------------------------------------------------------- futures


def _futures() -> list[Undo]:
    """Let ``torch.futures.collect_all`` and ``wait_all`` end with the first error.

    Torch's C++ takes the error of a future that Python completed for a value like any other: it would wait for all
    futures, and for good if one never completes.
    """
    import torch

    from farcall.rpc.future import Future
    from farcall.rpc.outcome import DerivedFuture

    plain = torch.futures.collect_all

    def collect_all(futures: Sequence[Any]) -> Any:
        """A future of all of them: done when all are, or one has failed."""
        if not any(isinstance(future, Future | DerivedFuture) for future in futures):
            return plain(list(futures))
        futures = list(futures)
        collected: DerivedFuture[list[Any]] = DerivedFuture()
        left = len(futures)
        lock = threading.Lock()

        def on_done(future: Any) -> None:
            nonlocal left
            failure: Exception | None = None
            try:
                future.value()
            except Exception as error:
                failure = error
            with lock:
                left = 0 if failure is not None else left - 1
                if left or collected.done():
                    return
                if failure is None:
                    collected.set_result(futures)
                else:
                    collected.set_exception(failure)  # type: ignore[arg-type]

        for future in futures:
            future.add_done_callback(on_done)
        return collected

    def wait_all(futures: Sequence[Any]) -> list[Any]:
        """The values of all of them; the first error is raised at once."""
        return [future.wait() for future in collect_all(futures).wait()]

    return [patch(torch.futures, "collect_all", collect_all), patch(torch.futures, "wait_all", wait_all)]


# ---------------------------------------------------------------------- process groups


def _barrier() -> list[Undo]:
    """Let ``init_process_group`` return only when every rank has its default group, unless the user has chosen.

    Without torch's own barrier a rank may be called while it has none: stock RPC was mostly too slow for that.
    """
    name = "TORCH_DIST_INIT_BARRIER"
    if name in os.environ:
        return []
    os.environ[name] = "1"
    return [lambda: os.environ.pop(name, None)]


# ---------------------------------------------------------------------- timeouts


def _timeouts() -> list[Undo]:
    """Let 0 and -1 mean what they do in torch, in methods of `RRef`, too: those are farcall's own."""
    from farcall.rpc import timeouts

    return [patch(timeouts, "torchs_numbers", True)]


# ---------------------------------------------------------------------- references


def _references() -> list[Undo]:
    """Let methods of `RRef` fail at the call, as in torch, where farcall's own fail with the result.

    In torch a method called by ``rref.remote()`` asks for the type of the value first: a method that does not exist, or
    a value that does not come in time, is an error of the call itself. That costs a question to the owner, once for
    each reference, so farcall's own `RRef` does without.
    """
    import torch

    from farcall.compat.rpc.constants import UNSET_RPC_TIMEOUT
    from farcall.compat.rpc.unserved import find_unserved
    from farcall.errors import RpcError
    from farcall.rpc.method_calls import Proxy, call_method_remote
    from farcall.rpc.rref import RRef

    make: Callable[..., None] = RRef.__init__

    def init(self: RRef[Any], value: Any, type_hint: Any = None) -> None:
        if type_hint is None and isinstance(value, torch.jit.ScriptModule):
            raise RpcError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint. "
                "Write RRef(module, type_hint=Interface), with a class decorated by torch.jit.interface"
            )
        make(self, value, type_hint)

    def call_remote(rref: RRef[Any], name: str, timeout_s: float, /, *args: Any, **kwargs: Any) -> RRef[Any]:
        kind = rref._get_type(timeout=timeout_s)
        if not issubclass(kind, torch.jit.ScriptModule):  # the methods of those are made with the instance
            getattr(kind, name)
        return call_method_remote(rref, name, timeout_s, *args, **kwargs)

    def remote(self: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.remote().method(...)`` calls a method of the value at its owner; a reference to its result there."""
        return Proxy(call_remote, self, timeout)

    def get_profiling_future(self: RRef[Any]) -> torch.futures.Future[None]:
        """A future that completes when the record of the creating call, if it was profiled, has come here."""
        return self._get_future()

    def set_profiling_future(self: RRef[Any], future: Any) -> None:
        """Do nothing: the creating call itself brings its record home."""

    def to_text(self: RRef[Any]) -> str:
        ref, fork_id = (
            f"GloballyUniqueId(created_on={number.created_on}, local_id={number.local_id})"
            for number in (self._fork.ref, self._fork.fork_id)
        )
        return f"OwnerRRef({ref})" if self.is_owner() else f"UserRRef(RRefId = {ref}, ForkId = {fork_id})"

    methods = {
        "__init__": init,
        "__str__": to_text,
        "remote": remote,
        "_get_profiling_future": get_profiling_future,
        "_set_profiling_future": set_profiling_future,
        "_deserialize": find_unserved(__name__, "_deserialize"),
    }
    return [patch(RRef, name, method) for name, method in methods.items()]
