"""``torch.distributed.nn.RemoteModule``, served by farcall: farcall's own, in the shape that programs know.

``on`` and ``device`` are text, the methods are in the instance, and a module that arrived with a message has exactly
the attributes that are sent. The module's own methods are asked at the reference's owner, whatever ``on`` says.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from farcall.compat.rpc.agent import current_agent, is_agent_set
from farcall.compat.rpc.unserved import find_unserved
from farcall.compat.scriptable_module import ScriptableRemoteModule
from farcall.nn import remote_module as farcall_module
from farcall.nn.remote_device import parse_remote_device
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


class _RemoteModule(farcall_module.RemoteModule):
    on: Any
    device: Any
    is_device_map_set: bool
    is_scriptable: bool
    generated_methods: tuple[Callable[..., Any], ...]
    training = True
    _signature = farcall_module._ANYTHING

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
        # Not by setattr: one that arrives has nothing else, not even what nn.Module needs for that.
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # it has no hooks, whether it was made here or arrived

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

    def __init__(
        self,
        remote_device: Any,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(remote_device, module_cls, args, kwargs)


def _arrive(cls: type[_RemoteModule], shape: tuple[Any, ...]) -> _RemoteModule:
    made: _RemoteModule = cls.__new__(cls)
    made._set_attributes(shape)
    return made


def _has_device_map(remote_device: Any) -> bool:
    if not is_agent_set():
        raise AssertionError("a RemoteModule needs RPC: call init_rpc first")
    agent = current_agent()
    return bool(agent._get_device_map(agent.get_worker_info(parse_remote_device(remote_device).worker)))


def __getattr__(name: str) -> Any:
    return find_unserved(__name__, name)
