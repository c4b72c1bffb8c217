"""A device for tests without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farcall.channel.device_api import Export
from farcall.channel.host_memory import Lease, leased


class FakeApi:
    """CPU memory for a device's. An event is its number; what is done with it is noted."""

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self.free_bytes = free_bytes
        self.memory: dict[int, torch.Tensor] = {}
        self.log: list[tuple[str, Any]] = []
        self.events = 0
        self.exports = 0
        self.opened = 0
        self.leases: list[Lease] = []

    def allocate(self, device: int, size_bytes: int) -> torch.Tensor | None:
        if size_bytes > self.free_bytes:
            return None
        self.free_bytes -= size_bytes
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def export(self, memory: torch.Tensor) -> Export:
        self.exports += 1
        self.memory[self.exports] = memory
        return 0, self.exports

    def alias(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def open(self, export: Export, device: int) -> torch.Tensor:
        self.opened += 1
        return self.memory[export[1]]

    def view(self, memory: torch.Tensor, offset: int, size: int, on_death: Callable[[], None]) -> torch.Tensor:
        given, lease = leased(memoryview(memory.numpy())[offset : offset + size], lambda _: on_death(), None)
        self.leases.append(lease)
        return torch.frombuffer(given, dtype=torch.uint8)

    def fill(self, event: Any, memory: torch.Tensor, source: torch.Tensor, size: int) -> None:
        self.wait(event, 0)
        memory[:size].view(source.dtype).view(source.shape).copy_(source)
        self.record(event)

    def copy_out(self, event: Any, memory: torch.Tensor, offset: int, size: int, target: torch.Tensor) -> None:
        self.wait(event, 0)
        target.view(-1).view(torch.uint8).copy_(memory[offset : offset + size])
        self.record(event)

    def finish(self, device: int) -> None:
        self.log.append(("finish", device))

    def make_event(self, device: int) -> tuple[Any, bytes]:
        self.events += 1
        return self.events, b"%d" % self.events

    def open_event(self, handle: bytes, device: int) -> Any:
        return int(handle)

    def record(self, event: Any) -> None:
        self.log.append(("record", event))

    def wait(self, event: Any, device: int) -> None:
        self.log.append(("wait", event))

    def is_busy(self, device: int) -> bool:
        return False

    def name_of(self, device: int) -> str:
        return "GPU-1"

    def find(self, name: str) -> int | None:
        return 0
