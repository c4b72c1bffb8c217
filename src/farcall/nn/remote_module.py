"""`RemoteModule`: a module on another worker, used like one of this worker.

It holds a reference to the module and the signature of its ``forward``, so that wrong arguments fail before anything is
sent. Parameters, buffers and hooks are the remote module's: methods that would have to pretend otherwise raise, and
name the way to do it instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from farcall.api import current_runtime
from farcall.errors import SerializationError
from farcall.ids import WorkerInfo
from farcall.rpc.call import call_sync
from farcall.rpc.future import Future, call_async
from farcall.rpc.method_calls import call_method, call_method_async
from farcall.rpc.rref import RRef
from farcall.rpc.timeouts import UNSET_TIMEOUT
from farcall.serialize import Encoding, current_encoding, register_reducer

M = TypeVar("M", bound="RemoteModule")

_SENT_DEFAULTS = (int, float, str, bool, type(None), type)  # other workers may not know the types of other defaults
_ANYTHING = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


class RemoteModule(nn.Module):
    """A module that lives on another worker, on a device there.

    ``remote_module(x)`` calls the module there, forward hooks included; so does ``remote_module.forward(x)``. Inside a
    distributed autograd context gradients flow through it. It can itself be sent to other workers, all of which then
    use the one module.

    Args:
        remote_device: ``"worker"``, ``"worker/cpu"``, ``"worker/cuda:0"``, ``"rank:0/cpu"``; the CPU if none is given.
        module_cls: a subclass of ``nn.Module``, or a function that makes a module, to be called there.
        args: for ``module_cls``.
        kwargs: for ``module_cls``, too.
    """

    module_rref: RRef[nn.Module]
    device: torch.device
    on: WorkerInfo
    _method: ClassVar[str] = "__call__"  # of the module, at its owner: with its hooks

    def __init__(
        self,
        remote_device: str | WorkerInfo,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        where = parse_remote_device(remote_device)
        if isinstance(module_cls, nn.Module):
            kind = type(module_cls).__name__
            raise TypeError(
                f"module_cls is a module already, a {kind}: write RemoteModule(worker, {kind}, args=(...)) to make it "
                "there, or RemoteModule.init_from_module_rref(worker, rref) for a module that exists there"
            )
        making = (module_cls, tuple(args or ()), dict(kwargs or {}), where.device)
        rref = call_sync(current_runtime(), where.worker, _make_module, making, None, UNSET_TIMEOUT)
        self._become(rref, where.device, _forward_signature(module_cls))

    @classmethod
    def init_from_module_rref(cls: type[M], remote_device: str | WorkerInfo, module_rref: RRef[nn.Module]) -> M:
        """A `RemoteModule` over a module that exists already; ``remote_device`` says where it lives."""
        where = parse_remote_device(remote_device)
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref must be a reference (farcall.RRef), not {type(module_rref).__name__}")
        owner = module_rref.owner()
        if where.worker not in (owner.name, owner.id):
            raise ValueError(f"the module lives on {owner.name} (rank {owner.id}), not on {where.worker!r}")
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._become(module_rref, where.device, _ANYTHING)
        return made

    def _become(self, rref: RRef[nn.Module], device: torch.device, signature: inspect.Signature) -> None:
        self.module_rref = rref
        self.device = device
        self.on = rref.owner()
        self._signature = signature

    # Properties, since bound methods in the instance would be a cycle, and the reference would outlive its last use.
    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Run the module's forward where it lives, and return its result."""
        return _with_signature(self._forward, "forward", self._signature)

    @property
    def forward_async(self) -> Callable[..., Future[Any]]:
        """Run the module's forward where it lives; a future of its result."""
        return _with_signature(self._forward_async, "forward_async", self._signature)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._signature.bind(*args, **kwargs)
        device = torch.device(self.device)
        if device.type == "cpu":
            return call_method(self.module_rref, self._method, UNSET_TIMEOUT, *args, **kwargs)
        return self._call_owner(_run_forward, *self._request(device, args, kwargs))

    def _forward_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self._signature.bind(*args, **kwargs)
        device = torch.device(self.device)
        if device.type == "cpu":
            return call_method_async(self.module_rref, self._method, UNSET_TIMEOUT, *args, **kwargs)
        request = self._request(device, args, kwargs)
        return call_async(current_runtime(), self.module_rref.owner(), _run_forward, request, None, UNSET_TIMEOUT)

    def _request(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of `_run_forward`."""
        devices = current_runtime().peer(self.module_rref.owner()).devices
        # Results may stay on that device of the owner if our device map brings them from there.
        stays = devices is not None and bool(devices.leads_back_from(device))
        return self.module_rref, self._method, device, args, kwargs, stays

    def _call_owner(self, func: Callable[..., Any], *args: Any) -> Any:
        return call_sync(current_runtime(), self.module_rref.owner(), func, args, None, UNSET_TIMEOUT)

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the module's parameters, for a `DistributedOptimizer`."""
        found: list[RRef[nn.Parameter]] = self._call_owner(_parameters, self.module_rref, recurse)
        return found

    def train(self: M, mode: bool = True) -> M:
        """Put the remote module into training mode, or out of it."""
        self._call_owner(_train, self.module_rref, mode)
        self.training = mode
        return self

    def eval(self: M) -> M:
        """Put the remote module into evaluation mode."""
        return self.train(False)

    def extra_repr(self) -> str:
        return f"on={self.on.name}, device={self.device}"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__reduce_ex__ is RemoteModule.__reduce_ex__ and cls.__reduce__ is object.__reduce__:
            register_reducer(cls, _reduce)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only foreign picklers come here; one that a user installed for calls may be writing a call.
        if current_encoding() is None:
            raise SerializationError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: send "
                "it as an argument or result of a call; to save the module, save its state_dict() at its worker"
            )
        return self._parts()

    def _parts(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and arguments that make it at the other end."""
        parameters = [
            parameter if isinstance(parameter.default, _SENT_DEFAULTS) else parameter.replace(default=...)
            for parameter in self._signature.parameters.values()
        ]
        signature = inspect.Signature(parameters)
        return _arrive, (type(self), self.module_rref, self.device, signature, self.training)


def _reduce(module: RemoteModule, encoding: Encoding) -> Any:
    return module._parts()


register_reducer(RemoteModule, _reduce)


def _with_signature(method: Callable[..., Any], name: str, signature: inspect.Signature) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    forward.__name__ = name
    forward.__qualname__ = f"RemoteModule.{name}"
    forward.__doc__ = method.__doc__
    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward


def _forward_signature(module_cls: Callable[..., nn.Module]) -> inspect.Signature:
    """The parameters of the module's forward, without self; any where they cannot be known."""
    if not (isinstance(module_cls, type) and issubclass(module_cls, nn.Module)):
        return _ANYTHING
    try:
        signature = inspect.signature(module_cls.forward)
    except (TypeError, ValueError):
        return _ANYTHING
    parameters = list(signature.parameters.values())[1:]
    return inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters])


def _arrive(
    cls: type[M], rref: RRef[nn.Module], device: torch.device, signature: inspect.Signature, training: bool
) -> M:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    made._become(rref, device, signature)
    made.training = training
    return made


# ---------------------------------------------------------------------- where a module lives


class RemoteDevice(NamedTuple):
    """A worker, by name or rank, and a device of it."""

    worker: str | int
    device: torch.device


class BadRemoteDevice(ValueError, RuntimeError):
    """A malformed remote device; torch raises a ValueError for some mistakes, a RuntimeError for others."""


def parse_remote_device(text: str | WorkerInfo) -> RemoteDevice:
    """The worker and device of ``worker``, ``worker/device`` or ``rank:N/device``."""
    if isinstance(text, WorkerInfo):
        return RemoteDevice(text.name, torch.device("cpu"))
    if not isinstance(text, str):
        raise TypeError(f"a remote device is a string such as 'worker1/cpu', not {type(text).__name__}")
    place, slash, device_text = text.partition("/")
    if place and slash and not device_text:
        raise BadRemoteDevice(f"could not parse the remote device {text!r}: Device string must not be empty")
    if not place or "/" in device_text:
        # The first sentence is what programs written for torch look for.
        raise BadRemoteDevice(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>': could not parse the "
            "remote device, expected 'worker', 'worker/device' or 'rank:N/device', for example 'worker1/cuda:0'"
        )
    try:
        device = torch.device(device_text or "cpu")
    except RuntimeError as error:
        raise BadRemoteDevice(f"could not parse the remote device {text!r}: {error}") from None
    if not slash and (place == "cpu" or place.partition(":")[0] == "cuda"):
        raise BadRemoteDevice(f"the remote device {text!r} names no worker: write 'worker/{place}'")
    if place.startswith("rank:"):
        number = place.removeprefix("rank:")
        if not number.isdecimal():
            raise BadRemoteDevice(f"could not parse the remote device {text!r}: {number!r} is not a rank")
        return RemoteDevice(int(number), device)
    return RemoteDevice(place, device)


# ---------------------------------------------------------------------- at the worker where the module lives


def _make_module(
    module_cls: Callable[..., nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    type_hint: Any = None,
) -> RRef[nn.Module]:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RuntimeError(
            f"{current_runtime().info.name} has {torch.cuda.device_count()} CUDA devices, and no {device} (CUDA error: "
            "invalid device ordinal)"
        )
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but it returns an instance "
            f"of {type(module)}."
        )
    return RRef(module.to(device), type_hint or type(module))


def _run_forward(
    rref: RRef[nn.Module],
    method: str,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stays: bool,
) -> Any:
    run = getattr(rref.local_value(), method)
    moved = [_moved(value, device) for value in args]
    result = run(*moved, **{key: _moved(value, device) for key, value in kwargs.items()})
    if stays:
        return result
    cpu = torch.device("cpu")
    return tuple(_moved(part, cpu) for part in result) if isinstance(result, tuple) else _moved(result, cpu)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _parameters(rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in rref.local_value().parameters(recurse)]


def _train(rref: RRef[nn.Module], mode: bool) -> None:
    rref.local_value().train(mode)


# ---------------------------------------------------------------------- methods that make no sense

_INSTEAD = {
    "Please use ``remote_parameters`` instead.": (*("parameters", "named_parameters", "requires_grad_", "zero_grad"),),
    "It has no state of its own; call the method on the module itself, at its worker: get_module_rref().": (
        *("buffers", "named_buffers", "children", "named_children", "modules", "named_modules"),
        *("state_dict", "load_state_dict", "apply", "share_memory"),
        *("register_buffer", "register_parameter", "register_module", "add_module", "get_submodule"),
        *("register_backward_hook", "register_full_backward_hook", "register_forward_pre_hook"),
        *("register_forward_hook",),
    ),
    "It is made on the device given as remote_device and stays there.": (
        *("to", "cuda", "cpu", "xpu", "ipu", "type", "float", "double", "half", "bfloat16", "to_empty"),
    ),
}


def _refusing(name: str, why: str) -> Callable[..., NoReturn]:
    def method(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"Method ``{name}`` not supported for RemoteModule. {why}")

    method.__name__ = name
    return method


for _why, _names in _INSTEAD.items():
    for _name in _names:
        setattr(RemoteModule, _name, _refusing(_name, _why))
