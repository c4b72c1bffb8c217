"""Memory of the host that two processes and their devices share: a file in memory, mapped and pinned by both.

Processes that compute on one device take turns, and a turn costs 0.15 ms (one H200, without MPS). Copies on the device
are computing, too; copies to the host or from it are not, from 32 KiB on: they have engines of their own. So a tensor
of medium size gets to a process on the same device sooner by way of the host (18 us each way for 256 KiB, 32 for 1 MiB)
than by a copy on the device that must wait for its turn.

Owns files, mappings and pins, and lets go of them with the last tensor over them. The other process opens the file
through ``/proc``, so it must be of the same user and see our processes; where it does not, it says so when it is asked
the first time (`runtime/devices/links.py`).
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import torch

from farcall.channel.device_runtime import loaded_runtime
from farcall.channel.segment_map import map_file

try:
    import fcntl
except ImportError:  # not POSIX: nothing of this works
    pass

HOST = "host"
Export = tuple[Any, ...]
_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: who cut it short would kill the other
logger: logging.Logger = logging.getLogger("farcall")

_files: dict[int, int] = {}
"""The descriptors of the files made here, by the addresses of their memory."""


def allocate(size: int) -> torch.Tensor | None:
    """Bytes that another process can open; None: there is no such memory here."""
    try:
        descriptor = os.memfd_create("farcall-pinned", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory = _pinned(descriptor, size, owned=True)
    except (OSError, RuntimeError) as error:
        os.close(descriptor)
        logger.info("no pinned memory can be shared: %s", error)
        return None
    return memory


def export(memory: torch.Tensor) -> Export:
    """What another process opens ``memory`` with, which `allocate` made."""
    return HOST, os.getpid(), _files[memory.data_ptr()], memory.numel()


def is_export(given: Export) -> bool:
    """Is it memory of the host that this opens?"""
    return bool(given[0] == HOST)


def open_export(given: Export) -> torch.Tensor:
    """The bytes that another process exported."""
    _, process_id, descriptor, size = given
    opened = os.open(f"/proc/{int(process_id)}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(opened).st_size != size or not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
            raise OSError(f"that is no sealed file of {size} bytes")
        return _pinned(opened, size, owned=False)
    finally:
        os.close(opened)


def _pinned(descriptor: int, size: int, owned: bool) -> torch.Tensor:
    view = map_file(descriptor, size)
    memory = torch.frombuffer(view, dtype=torch.uint8)
    address = memory.data_ptr()
    own = loaded_runtime()
    if own is None:
        raise RuntimeError("the device's own runtime was not found")
    own.pin(address, size)
    if owned:
        _files[address] = descriptor
    # Made after the one that unmaps it, so it runs before that.
    weakref.finalize(view.obj, _let_go, address, os.getpid()).atexit = False
    return memory


def _let_go(address: int, process_id: int) -> None:
    if os.getpid() != process_id:
        return  # a forked child has neither the device nor the pin
    own = loaded_runtime()
    if own is not None:
        own.unpin(address)
    descriptor = _files.pop(address, None)
    if descriptor is not None:
        os.close(descriptor)
