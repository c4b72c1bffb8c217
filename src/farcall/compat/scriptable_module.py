"""A `RemoteModule` that TorchScript can compile: made for an interface, whose ``forward`` says what goes and comes.

TorchScript compiles source, and knows no ``*args``; so the methods are written for each interface, as a module of their
own that both workers make (`_written`). Which worker the module lives on, and a reference to it, are attributes.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from farcall.compat.rpc import api
from farcall.nn.remote_device import parse_remote_device
from farcall.rpc.rref import RRef

__all__ = ["ScriptableRemoteModule"]

_SOURCE = """
from typing import *

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import RRef
from torch.futures import Future
from {home} import {interface} as Interface


@torch.jit.script
def run_forward(module: RRef[Interface], device: str, {parameters}) -> {result}:
    made = module.local_value().forward({moved})
    return {brought}


def forward_async(self, {parameters}) -> Future[{result}]:
    return rpc.rpc_async(self.module_rref.owner(), run_forward, (self.module_rref, self.device, {names}))


def forward(self, {parameters}) -> {result}:
    return rpc.rpc_sync(self.module_rref.owner(), run_forward, (self.module_rref, self.device, {names}))
"""


class ScriptableRemoteModule(nn.Module):
    """A module on another worker, for ``torch.jit.script``."""

    def __init__(self, remote_device: Any, module_rref: RRef[nn.Module], interface: type[Any], has_map: bool) -> None:
        super().__init__()
        where = parse_remote_device(remote_device)
        written = _written(interface, where.device.type != "cpu", has_map)
        self.on: str = str(where.worker)
        self.device: str = str(where.device)
        self.is_device_map_set = has_map
        self.is_scriptable = True
        self.generated_methods: tuple[Any, Any] = (written.forward_async, written.forward)
        self.module_rref = module_rref
        for method in self.generated_methods:
            setattr(self, method.__name__, types.MethodType(torch.jit.export(method), self))

    @staticmethod
    def make(
        remote_device: Any,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        interface: type[Any],
        has_map: bool,
    ) -> ScriptableRemoteModule:
        """Have the module made on its worker."""
        where = parse_remote_device(remote_device)
        making = (module_cls, tuple(args or ()), dict(kwargs or {}), where.device, interface, has_map)
        return ScriptableRemoteModule(remote_device, api.rpc_sync(where.worker, _make, making), interface, has_map)

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        raise RuntimeError("Cannot pickle RemoteModule in python pickler. It can only be pickled when using RPC")

    @torch.jit.export
    def __setstate__(self, state):  # type: ignore[no-untyped-def]
        raise RuntimeError("Cannot unpickle RemoteModule in python pickler. It can only be unpickled when using RPC")


def _make(
    module_cls: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    interface: type[Any],
    has_map: bool,
) -> RRef[Any]:
    """At the worker where the module lives."""
    _written(interface, device.type != "cpu", has_map)
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    return RRef(module.to(device), type_hint=interface)


def _written(interface: type[Any], moves: bool, has_map: bool) -> Any:
    """The module with the methods for ``interface``; the same on every worker, and made once."""
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(f"{interface} must be a type object decorated by @torch.jit.interface")
    qualified = torch._jit_internal._qualified_name(interface)
    name = f"_farcall_remote_{qualified.replace('.', '_')}{'_moved' * moves}{'_mapped' * has_map}"
    if name in sys.modules:
        return sys.modules[name]
    forward = torch.jit._state._python_cu.get_interface(qualified).getMethod("forward")
    assert forward is not None
    parameters = forward.arguments[1:]  # without defaults, which interfaces do not keep
    result = forward.returns[0].type
    source = _SOURCE.format(
        home=interface.__module__,
        interface=interface.__name__,
        parameters=", ".join(f"{parameter.name}: {parameter.type.annotation_str}" for parameter in parameters),
        names=", ".join(parameter.name for parameter in parameters),
        moved=", ".join(
            f"{parameter.name}.to(device)" if moves and _is_tensor(parameter.type) else parameter.name
            for parameter in parameters
        ),
        result=result.annotation_str,
        brought=_brought("made", result) if moves and not has_map else "made",
    )
    module = types.ModuleType(name)
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_tensor(kind: Any) -> bool:
    return bool(kind.kind() == "TensorType")


def _brought(name: str, kind: Any) -> str:
    """An expression for the value called ``name``, with its tensors on the CPU."""
    if _is_tensor(kind):
        return f"{name}.cpu()"
    if kind.kind() == "TupleType":
        return "(" + "".join(f"{_brought(f'{name}[{at}]', part)}, " for at, part in enumerate(kind.elements())) + ")"
    return name
