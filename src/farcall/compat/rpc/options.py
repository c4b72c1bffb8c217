"""``TensorPipeRpcBackendOptions`` and its bases: settable, as torch's are.

`to_farcall` turns them into farcall's own options, which are frozen and checked. Transports and channels have the names
of the old agent: a restriction to TCP is kept, the rest is farcall's choice.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farcall import options as farcall_options
from farcall.compat.rpc import constants
from farcall.errors import RpcError

__all__ = ["TensorPipeRpcBackendOptions"]

DeviceType = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]


class RpcBackendOptions:
    """Options of all backends: the default timeout, and where members meet."""

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        _check("rpc_timeout", rpc_timeout, int | float)
        _check("init_method", init_method, str)
        if rpc_timeout < 0:
            raise RpcError(f"rpc_timeout must not be negative, got {rpc_timeout}")
        self.rpc_timeout: float = float(rpc_timeout)
        self.init_method = init_method


def _check(name: str, value: object, kind: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(
            f"incompatible constructor arguments: {name} must be "
            f"{'a number of seconds' if name == 'rpc_timeout' else 'of another type'}, not {type(value).__name__}"
        )


class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    def __init__(
        self,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, DeviceMap] | None = None,
        devices: Sequence[torch.device] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        _check("num_worker_threads", num_worker_threads, int)
        if num_worker_threads < 1:
            raise RpcError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, DeviceMap] = {name: dict(map_) for name, map_ in (device_maps or {}).items()}
        self.devices: list[torch.device] = list(devices or ())
        self._transports = None if _transports is None else list(_transports)
        self._channels = None if _channels is None else list(_channels)

    def _set_device_map(self, to: str, device_map: Mapping[torch.device, torch.device]) -> None:
        for source, target in device_map.items():
            for device in (source, target):
                if device.index is not None and device.index < 0:
                    raise RuntimeError(f"Device index must not be negative, got {device.index}")
        self.device_maps.setdefault(to, {}).update(device_map)


class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """How a worker finds its peers, how long calls may take, and where tensors of which device go.

    Args:
        num_worker_threads: threads kept ready for user functions; farcall starts more when all wait for nested calls.
        rpc_timeout: seconds a call may take unless it says otherwise; 0 means without limit.
        init_method: where members meet; as for ``init_process_group``.
        device_maps: for each callee, from devices here to devices there.
        devices: the devices that calls use here.
        _transports, _channels: names of the old agent; see `to_farcall`.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Sequence[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads,
            _transports,
            _channels,
            rpc_timeout,
            init_method,
            {to: _to_device_map(device_map) for to, device_map in (device_maps or {}).items()},
            _to_device_list(devices or ()),
        )

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Add to the map of devices for calls to ``to``; each device has one partner."""
        added = _to_device_map(device_map)
        known = self.device_maps.get(to, {})
        for source, target in added.items():
            if known.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{known[source]}"
                )
        self._set_device_map(to, added)

    def set_devices(self, devices: Sequence[DeviceType]) -> None:
        """Say which devices calls use here."""
        self.devices: list[torch.device] = _to_device_list(devices)


def _to_device(device: DeviceType) -> torch.device:
    found = torch.device(device)
    if found.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {found.type}.")
    return found


def _to_device_list(devices: Sequence[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    found: DeviceMap = {}
    sources: DeviceMap = {}
    for source, target in device_map.items():
        source, target = torch.device(source), torch.device(target)
        if target in sources:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {sources[target]} to {target}"
            )
        found[source] = target
        sources[target] = source
    return found


_SAME_HOST = {"shm"}
_told: set[str] = set()


def to_farcall(options: _TensorPipeRpcBackendOptionsBase, init_method: str) -> farcall_options.RpcBackendOptions:
    """Farcall's options for torch's.

    ``_transports`` that name only those between hosts become TCP; ``_channels`` mean nothing. Warns of either once.
    """
    chosen: dict[str, Any] = {}
    if options._transports:
        if not _SAME_HOST & set(options._transports):
            chosen["transports"] = ("tcp",)
        _tell_once(
            f"_transports={options._transports} names transports of the old agent; this worker therefore uses "
            f"{'TCP only' if chosen else 'unix sockets on one host and TCP between hosts'}"
        )
    if options._channels:
        _tell_once(f"_channels={options._channels} names channels of the old agent; farcall chooses by itself")
    return farcall_options.RpcBackendOptions(
        rpc_timeout=options.rpc_timeout or None,
        init_method=init_method,
        num_worker_threads=options.num_worker_threads,
        device_maps=options.device_maps,
        devices=options.devices,
        inherit=False,
        **chosen,
    )


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        frame, level = sys._getframe(1), 2
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("farcall.", "torch.")):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, UserWarning, stacklevel=level)  # at the program's line
