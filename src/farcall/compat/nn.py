"""``torch.distributed.nn.RemoteModule``, served by farcall."""

from __future__ import annotations

from farcall.nn import RemoteModule

__all__ = ["RemoteModule"]

_RemoteModule = RemoteModule
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "generated_methods",
    "module_rref",
)
