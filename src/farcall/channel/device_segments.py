"""A peer's device memory, opened: the receiver's side of `device_pool.py`.

Bytes are copied out (`copy_out`), or used where they are (`opened`); then it is the business of whoever gives the block
back that no stream of ours uses it any more.

Segments and events are opened when a ticket first names them and kept until the peer retires the segment or is gone.
``devices`` says which of our devices is which of the peer's, as found out when it asked whether this way works.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from farcall.channel.device_api import DeviceApi
from farcall.channel.device_pool import DeviceTicket

__all__ = ["DeviceSegments"]


class DeviceSegments:
    """The segments of one peer."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._memory: dict[int, torch.Tensor] = {}
        self._events: dict[tuple[int, int], tuple[bytes, Any]] = {}
        self.devices: dict[int, int] = {}

    def copy_out(self, ticket: DeviceTicket, target: torch.device) -> torch.Tensor:
        """The bytes of a ticket in memory of our own on ``target``; then the block may be released."""
        device = self.devices[ticket.device]
        memory, event = self._open(ticket, device)
        copy = torch.empty(ticket.size, dtype=torch.uint8, device=target)
        self._api.wait(event, device)
        copy.copy_(memory[ticket.offset : ticket.offset + ticket.size], non_blocking=True)
        self._api.record(event, device)
        return copy

    def opened(self, ticket: DeviceTicket) -> torch.Tensor:
        """The whole segment of a ticket, whose bytes are there for what is put onto the current stream from now on.

        It stays open as long as the result lives, also when the peer is gone.
        """
        device = self.devices[ticket.device]
        memory, event = self._open(ticket, device)
        self._api.wait(event, device)
        return memory

    def retire(self, segment_id: int) -> None:
        """The peer gave that segment up."""
        with self._lock:
            self._memory.pop(segment_id, None)
            for key in [key for key in self._events if key[0] == segment_id]:
                del self._events[key]

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            self._memory.clear()
            self._events.clear()

    def _open(self, ticket: DeviceTicket, device: int) -> tuple[torch.Tensor, Any]:
        key = ticket.segment_id, ticket.offset
        with self._lock:
            memory = self._memory.get(ticket.segment_id)
            if memory is None:
                memory = self._memory[ticket.segment_id] = self._api.open(ticket.export, device)
            handle, event = self._events.get(key, (b"", None))
            if handle != ticket.event_handle:
                event = self._api.open_event(ticket.event_handle, device)
                self._events[key] = (ticket.event_handle, event)
            return memory, event
