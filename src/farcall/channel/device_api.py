"""The device operations that the device channel needs: memory that another process can open, events, current streams.

`CudaApi` calls torch. It works with CUDA and, as far as torch uses the same names, with HIP (untested). Tests replace
it by a fake, to test the pool and its bookkeeping without a device. Nothing here is called before a tensor exists on a
device, and importing this module initialises nothing.

Both processes may record an interprocess event and wait for it; a wait refers to the last record before it (seen on an
H200 with torch 2.11: 60 rounds each way under slow kernels). The driver refuses to open memory that the same process
exported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from farcall.channel.device_runtime import runtime_for
from farcall.destructors import destructor

_C: Any = torch._C
StreamId = tuple[int, int, int]
"""The identity of a stream: its number, the index of its device, and the device's type."""
DEFAULT_STREAM = 0
"""The number of each device's default stream."""
_MOST_STREAMS = 1024
_streams: dict[StreamId, torch.cuda.Stream] = {}

Export = tuple[Any, ...]
"""Torch's description of shared device memory: device, handles and sizes, as numbers, bytes and bools."""


def current_stream_id(device: int) -> StreamId:
    """The identity of the calling thread's current stream of ``device``."""
    found: StreamId = _C._cuda_getCurrentStream(device)
    return found


def current_stream(device: int) -> torch.cuda.Stream:
    """Like ``torch.cuda.current_stream``, which takes ten times as long; devices must be initialised."""
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
    """The operations of a device, named by its index. Work goes onto the device's current stream."""

    def allocate(self, device: int, size_bytes: int) -> torch.Tensor | None:
        """Uninitialised bytes; None: the device has no memory left."""

    def export(self, memory: torch.Tensor) -> Export:
        """The description by which one other process opens ``memory``, once."""

    def alias(self, memory: torch.Tensor) -> torch.Tensor:
        """A second storage over the same memory, which does not keep it alive; for exporting a program's tensor.

        Torch wraps a storage that it exports: streams can no longer be recorded on it, and a killed reader keeps it
        alive. The alias takes both effects instead of the program's storage.
        """

    def open(self, export: Export, device: int) -> torch.Tensor:
        """The bytes that another process exported; ``device`` is this process's index of their device."""

    def view(self, memory: torch.Tensor, offset: int, size: int, on_death: Callable[[], None]) -> torch.Tensor:
        """A range of opened memory as a separate storage, which keeps ``memory`` open.

        ``on_death`` is called when the last use of that storage ends, on any thread, perhaps in a garbage collection.
        """

    def fill(self, event: Any, memory: torch.Tensor, source: torch.Tensor, size: int) -> None:
        """Copy ``source`` (any strides, ``size`` bytes), row by row, to the beginning of ``memory``.

        The copy waits for ``event``; afterwards ``event`` is recorded behind it.
        """

    def copy_out(self, event: Any, memory: torch.Tensor, offset: int, size: int, target: torch.Tensor) -> None:
        """Copy a range of opened memory into ``target``, contiguous and of that size. ``event`` as for `fill`."""

    def make_event(self, device: int) -> tuple[Any, bytes]:
        """An event that other processes can open, and its handle."""

    def open_event(self, handle: bytes, device: int) -> Any:
        """Open an event of another process."""

    def wait(self, event: Any, device: int) -> None:
        """Make later work on the stream wait for ``event``. The host does not wait."""

    def is_busy(self, device: int) -> bool:
        """Does the stream have unfinished work?"""

    def finish(self, device: int) -> None:
        """Block the host until all work of this process, on any stream, is done."""

    def name_of(self, device: int) -> str:
        """A name for the device that is the same in all processes of the host, whichever devices they see."""

    def find(self, name: str) -> int | None:
        """The device of that name, if this process sees it."""


class _Range:
    """A range of device memory for `torch.as_tensor`. The storage that torch makes of it owns this object."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}


class _KeptRange(_Range):
    """A range that keeps its memory alive and reports its own end."""

    def __init__(self, memory: torch.Tensor, offset: int, size: int, on_death: Callable[[], None]) -> None:
        super().__init__(memory.data_ptr() + offset, size)
        self._memory = memory
        self._on_death = on_death

    @destructor
    def __del__(self) -> None:
        self._on_death()


class CudaApi:
    """The device operations by torch.cuda, and where possible by the device's own runtime (`device_runtime.py`)."""

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
            event.record(torch.cuda.current_stream(device))  # torch creates the event only when it is first recorded
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
