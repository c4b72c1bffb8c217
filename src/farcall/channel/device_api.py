"""What the device channel needs from a device: memory that another process can open, events, current streams.

`CudaApi` is torch's, and works with CUDA and, as far as torch names both the same, with HIP (untested). Tests put a
fake in its place, so the pool and its bookkeeping are tested without a device. Nothing here is called before there is
a tensor on a device: importing this initialises nothing.

An interprocess event may be recorded and waited for by both processes; a wait is for the last record that
was made before it (seen on an H200 with torch 2.11: 60 rounds each way under slow kernels). Opening memory that
the same process exported is an error of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from farcall.channel.device_runtime import runtime_for

_C: Any = torch._C
StreamId = tuple[int, int, int]
"""Of a stream, its device, and the type of that: what tells streams apart."""
DEFAULT_STREAM = 0
"""The number of each device's default stream."""
_MOST_STREAMS = 1024
_streams: dict[StreamId, torch.cuda.Stream] = {}

Export = tuple[Any, ...]
"""How torch describes shared device memory: device, handles, sizes; numbers, bytes and bools."""


def current_stream_id(device: int) -> StreamId:
    """Which stream of ``device`` the calling thread puts its work onto."""
    found: StreamId = _C._cuda_getCurrentStream(device)
    return found


def current_stream(device: int) -> torch.cuda.Stream:
    """The same as ``torch.cuda.current_stream``, which takes ten times as long; devices must be initialised."""
    named = current_stream_id(device)
    stream = _streams.get(named)
    if stream is None:
        if len(_streams) >= _MOST_STREAMS:
            _streams.clear()
        stream_id, index, kind = named
        made = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        stream = _streams[named] = made
    return stream


class DeviceApi(Protocol):
    """Devices are named by their index here. What goes onto a stream goes onto the device's current one."""

    def allocate(self, device: int, size_bytes: int) -> torch.Tensor | None:
        """Uninitialised bytes; None: there is no memory left."""

    def export(self, memory: torch.Tensor) -> Export:
        """What another process opens ``memory`` with, once."""

    def alias(self, memory: torch.Tensor) -> torch.Tensor:
        """The same storage as another one, which does not keep the memory; to export what a program owns.

        torch wraps a storage that it exports: streams can no longer be recorded on it, and it is kept for a reader that
        was killed.
        """

    def open(self, export: Export, device: int) -> torch.Tensor:
        """The bytes that another process exported, on ``device`` as this process numbers it."""

    def view(self, memory: torch.Tensor, offset: int, size: int, on_death: Callable[[], None]) -> torch.Tensor:
        """These bytes of what ``open`` gave, as a storage of its own, which keeps ``memory``.

        ``on_death`` is called when its last use has ended, on any thread, perhaps inside a garbage collection.
        """

    def fill(self, event: Any, memory: torch.Tensor, source: torch.Tensor, size: int) -> None:
        """Copy ``source`` (any strides, ``size`` bytes), row by row, to the beginning of ``memory``.

        The copy waits for ``event``, which stands for it afterwards.
        """

    def copy_out(self, event: Any, memory: torch.Tensor, offset: int, size: int, target: torch.Tensor) -> None:
        """Copy these bytes of what ``open`` gave into ``target``, contiguous and as large. ``event`` as above."""

    def make_event(self, device: int) -> tuple[Any, bytes]:
        """An event that others can open, and its handle."""

    def open_event(self, handle: bytes, device: int) -> Any:
        """An event of another process."""

    def wait(self, event: Any, device: int) -> None:
        """Have later work on the stream wait for ``event``. The host does not wait."""

    def is_busy(self, device: int) -> bool:
        """Is there anything on the stream that is not done?"""

    def finish(self, device: int) -> None:
        """Wait, on the host, until all work of this process, on any stream, is done."""

    def name_of(self, device: int) -> str:
        """The same in all processes of a host, whichever devices they see."""

    def find(self, name: str) -> int | None:
        """The device of that name, if this process sees it."""


class _Range:
    """Device memory as torch takes it from others; the storage made of it owns this object."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}


class _KeptRange(_Range):
    """The same, which keeps the memory and tells of its own end."""

    def __init__(self, memory: torch.Tensor, offset: int, size: int, on_death: Callable[[], None]) -> None:
        super().__init__(memory.data_ptr() + offset, size)
        self._memory = memory
        self._on_death = on_death

    def __del__(self) -> None:
        self._on_death()


class CudaApi:
    """torch.cuda."""

    def allocate(self, device: int, size_bytes: int) -> torch.Tensor | None:
        try:
            with torch.inference_mode(False):  # tensors made in that mode cannot be written outside of it
                return torch.empty(size_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
        except torch.cuda.OutOfMemoryError:
            return None

    def export(self, memory: torch.Tensor) -> Export:
        storage: Any = memory.untyped_storage()
        return cast("Export", storage._share_cuda_())

    def alias(self, memory: torch.Tensor) -> torch.Tensor:
        storage = memory.untyped_storage()
        return torch.as_tensor(_Range(storage.data_ptr(), storage.nbytes()), device=memory.device)

    def open(self, export: Export, device: int) -> torch.Tensor:
        opened: Any = torch.UntypedStorage
        storage = opened._new_shared_cuda(device, *export[1:])
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)

    def view(self, memory: torch.Tensor, offset: int, size: int, on_death: Callable[[], None]) -> torch.Tensor:
        return torch.as_tensor(_KeptRange(memory, offset, size, on_death), device=memory.device)

    def fill(self, event: Any, memory: torch.Tensor, source: torch.Tensor, size: int) -> None:
        stream = current_stream(source.get_device())
        own = runtime_for(stream) if source.is_contiguous() else None
        if own is None:
            stream.wait_event(event)
            memory[:size].view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
            event.record(stream)
        else:
            own.copy_behind(event.cuda_event, memory.data_ptr(), source.data_ptr(), size, stream.cuda_stream)

    def copy_out(self, event: Any, memory: torch.Tensor, offset: int, size: int, target: torch.Tensor) -> None:
        stream = current_stream(memory.get_device())
        own = runtime_for(stream) if target.get_device() == stream.device_index else None
        if own is None:
            stream.wait_event(event)
            target.view(-1).view(torch.uint8).copy_(memory[offset : offset + size], non_blocking=True)
            event.record(stream)
        else:
            source = memory.data_ptr() + offset
            own.copy_behind(event.cuda_event, target.data_ptr(), source, size, stream.cuda_stream)

    def make_event(self, device: int) -> tuple[Any, bytes]:
        with torch.cuda.device(device):
            event: Any = torch.cuda.Event(enable_timing=False, interprocess=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))  # it exists once it is recorded
            return event, event.ipc_handle()

    def open_event(self, handle: bytes, device: int) -> Any:
        event: Any = torch.cuda.Event
        return event.from_ipc_handle(torch.device("cuda", device), handle)

    def wait(self, event: Any, device: int) -> None:
        current_stream(device).wait_event(event)

    def is_busy(self, device: int) -> bool:
        stream = current_stream(device)
        own = runtime_for(stream)
        return not (stream.query() if own is None else own.is_done(stream.cuda_stream))

    def finish(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def name_of(self, device: int) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def find(self, name: str) -> int | None:
        for device in range(torch.cuda.device_count()):
            if self.name_of(device) == name:
                return device
        return None
