"""``torch.distributed.nn.RemoteModule``: farcall's own, in the shape that programs know.

``on`` and ``device`` are text, the methods are in the instance, and a module that arrived with a message has exactly
the attributes that are sent. Calls go to the reference's owner, whatever ``on`` says, and run the module's ``forward``,
without its hooks.

TorchScript can compile a `ScriptableRemoteModule`, made for an interface whose ``forward`` gives the types. TorchScript
compiles source, and knows no ``*args``; so both workers write the methods for each interface, into a Python module of
their own. Its worker and a reference to the remote module are attributes.
"""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from farcall.compat.rpc import api
from farcall.compat.rpc.agent import current_agent, is_agent_set
from farcall.compat.rpc.unserved import find_unserved
from farcall.nn import remote_module as farcall_module
from farcall.nn.remote_module import parse_remote_device
from farcall.rpc.rref import RRef

__all__ = ["RemoteModule"]

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)


_NO_HOOKS: Any = types.MappingProxyType({})


class _RemoteModule(farcall_module.RemoteModule):
    on: Any
    device: Any
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[Callable[..., Any], ...]
    training = True
    _signature = farcall_module._ANYTHING
    _method = "forward"
    # `nn.Module.__call__` reads these, and a module that arrived has none of them in its instance. A `__call__` of our
    # own would not need them, but torch.fx replaces the one of nn.Module, and global hooks hang there.
    _backward_hooks = _backward_pre_hooks = _forward_hooks = _forward_pre_hooks = _NO_HOOKS
    _forward_hooks_with_kwargs = _forward_hooks_always_called = _forward_pre_hooks_with_kwargs = _NO_HOOKS
    _is_full_backward_hook = None

    def __new__(
        cls,
        remote_device: Any = None,
        module_cls: Any = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> Any:
        if _module_interface_cls is None:
            return super().__new__(cls)
        has_map = _has_device_map(remote_device)
        return ScriptableRemoteModule.make(remote_device, module_cls, args, kwargs, _module_interface_cls, has_map)

    def __init__(
        self,
        remote_device: Any,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)
        signature = self._signature
        self._take_shape(remote_device, self.module_rref)
        self._signature = signature

    @staticmethod
    def init_from_module_rref(
        remote_device: Any, module_rref: RRef[nn.Module], _module_interface_cls: Any = None
    ) -> Any:
        """A `RemoteModule` over a module that exists already."""
        if _module_interface_cls is not None:
            has_map = _has_device_map(remote_device)
            return ScriptableRemoteModule(remote_device, module_rref, _module_interface_cls, has_map)
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made._take_shape(remote_device, module_rref)
        return made

    def _take_shape(self, remote_device: Any, module_rref: RRef[nn.Module]) -> None:
        has_map = _has_device_map(remote_device)
        where = parse_remote_device(remote_device)
        methods = (_RemoteModule.forward_async, _RemoteModule.forward)
        shape = (where.worker, str(where.device), has_map, False, methods, module_rref)
        self._set_attributes(shape)

    def _set_attributes(self, shape: tuple[Any, ...]) -> None:
        # Not by setattr: a module that arrives lacks the attributes that nn.Module's setattr needs.
        attributes = self.__dict__
        attributes.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, shape, strict=True))
        for method in self.generated_methods:
            attributes[method.__name__] = types.MethodType(method, self)

    def forward_async(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward where it lives; a future of its result."""
        return self._forward_async(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward where it lives, and return its result."""
        return self._forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Put the remote module into training mode, or out of it."""
        self._call_owner(farcall_module._train, self.module_rref, mode)
        self.__dict__["training"] = mode
        return self

    def extra_repr(self) -> NoReturn:
        raise ValueError("Method ``extra_repr`` not supported for RemoteModule. repr() says where it is")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on}, device={self.device})"

    def _parts(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrive, (type(self), tuple(self.__dict__[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES))


class RemoteModule(_RemoteModule):
    """A module that lives on another worker; see `farcall.nn.RemoteModule`."""


def _arrive(cls: type[_RemoteModule], shape: tuple[Any, ...]) -> _RemoteModule:
    made: _RemoteModule = cls.__new__(cls)
    made._set_attributes(shape)
    return made


def _has_device_map(remote_device: Any) -> bool:
    if not is_agent_set():
        raise AssertionError("a RemoteModule needs RPC: call init_rpc first")
    agent = current_agent()
    return bool(agent._get_device_map(agent.get_worker_info(parse_remote_device(remote_device).worker)))


# ---------------------------------------------------------------------- for TorchScript

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
    """A module on another worker that ``torch.jit.script`` can compile."""

    def __init__(self, remote_device: Any, module_rref: RRef[nn.Module], interface: type[Any], has_map: bool) -> None:
        super().__init__()
        where = parse_remote_device(remote_device)
        written = _write_methods(interface, where.device.type != "cpu", has_map)
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
        """Make the module on its worker."""
        where = parse_remote_device(remote_device)
        making = (module_cls, tuple(args or ()), dict(kwargs or {}), where.device, interface, has_map)
        rref = api.rpc_sync(where.worker, _make_scriptable, making)
        return ScriptableRemoteModule(remote_device, rref, interface, has_map)

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        raise RuntimeError("Cannot pickle RemoteModule in python pickler. It can only be pickled when using RPC")

    @torch.jit.export
    def __setstate__(self, state):  # type: ignore[no-untyped-def]
        raise RuntimeError("Cannot unpickle RemoteModule in python pickler. It can only be unpickled when using RPC")


def _make_scriptable(
    module_cls: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    interface: type[Any],
    has_map: bool,
) -> RRef[Any]:
    """At the worker where the module lives."""
    _write_methods(interface, device.type != "cpu", has_map)
    return farcall_module._make_module(module_cls, args, kwargs, device, interface)


def _write_methods(interface: type[Any], moves: bool, has_map: bool) -> Any:
    """The Python module with the methods for ``interface``; equal on every worker, and made once."""
    if not getattr(interface, "__torch_script_interface__", False):
        raise ValueError(f"{interface} must be a type object decorated by @torch.jit.interface")
    qualified = torch._jit_internal._qualified_name(interface)
    name = f"_farcall_remote_{qualified.replace('.', '_')}{'_moved' * moves}{'_mapped' * has_map}"
    if name in sys.modules:
        return sys.modules[name]
    forward = torch.jit._state._python_cu.get_interface(qualified).getMethod("forward")
    assert forward is not None
    parameters = forward.arguments[1:]  # without defaults: interfaces do not keep them
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


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
