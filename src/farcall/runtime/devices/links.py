"""The devices of one peer (``peer.devices``): where tensors go, how their bytes get there, and which memory is lent.

Maps: a call uses our map to the peer; an answer or a gradient uses the peer's map to us, reversed, or ours where that
has no entry. The peer sends its map (`DevicesMapped`) before any message that needs it.

The way to a peer, for each device of ours:

    unknown   first tensor       -> tried: a piece of memory is offered (DeviceTried); meanwhile through the host
    tried     DeviceOpened       -> shared: tensors are lent, from a pool that the peer has opened
    tried     ... with a reason  -> host: through pinned buffers, for ever; logged once

Other tensors go through the host, too: tensors that find no room in the pool, tensors bound for the CPU, and small
ones, since each switch of a device between processes costs time (`channel/staging.py`). The host must then wait for the
stream. So small tensors go this way only in answers, which could not be used earlier anyway, and in calls from an idle
stream: a caller never waits for its device.

Memory that the peer lent is copied and given back at once; or, by option, used in place (a view), and given back after
the view's death, once a worker has seen that all our streams are done with it (`settle_views`). That may block for
long, so at most one worker of a link does it at a time:

    resting   a look, and views have died -> settling: a task is queued
    settling  it is done                  -> resting; the I/O thread is woken up if more have died meanwhile
    settling  the device fails            -> resting, for RETRY_S at least; nothing is given back
"""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from math import prod
from time import monotonic
from typing import Any, Protocol

import torch

from farcall.channel import staging
from farcall.channel.device_api import DeviceApi
from farcall.channel.device_memory import DevicePool, DeviceSegments, DeviceTicket
from farcall.errors import SerializationError
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.runtime.devices.maps import reversed_map
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.host import Host
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize.allowance import loads
from farcall.serialize.devices import Form

logger: logging.Logger = logging.getLogger("farcall")

SMALL_BYTES = 64 * 1024
"""Up to this size a tensor goes through the host, except in calls from a busy stream."""
TRIED_BYTES = 512
WORTH_RELEASING_BYTES = 1 << 20
WORTH_RELEASING_BLOCKS = 32
"""From here on, blocks are given back ahead of the next message; fewer are not worth a message of their own."""
URGENT_BYTES = 16 << 20
"""From here on, blocks are given back at once: the peer may have no other memory of that size."""
VIEWED_BYTES = 1 << 20
"""Smaller tensors are copied even if views are wanted: they are not worth keeping a block of the peer's."""
RETRY_S = 10.0
"""How long to leave dead views alone after the device failed; a failed device seldom recovers."""


class LinksNode(Protocol):
    """The devices of a node, as its links see them."""

    name: str
    options: RpcBackendOptions
    api: DeviceApi
    pool: DevicePool
    host: Host

    def on_shared(self, device: int, peer: str) -> None:
        """A peer computes on this device."""


class Borrower(Protocol):
    """A part of the node that keeps memory of a peer's device open."""

    def close(self) -> None:
        """Close that memory."""


class DeviceLink:
    """One peer's devices, a `serialize.PeerDevices`. Ways, releases and views change without a lock, atomically."""

    def __init__(self, node: LinksNode, peer: Peer, pairs: Mapping[str, str], *, automatic: bool) -> None:
        self._node = node
        self._api = node.api
        self._peer = peer
        self._automatic = automatic
        self._back_automatic = False
        self._to = _as_devices(pairs)
        self._back: dict[torch.device, torch.device] = {}
        self._ways: dict[int, bool | torch.Tensor] = {}  # a tensor: the piece of memory that the peer tries to open
        self._segments = DeviceSegments(node.api)
        self._released: deque[tuple[int, int]] = deque()
        self._owed_bytes = 0  # their size; approximate, since counted without a lock
        self._dead_views: deque[DeviceTicket] = deque()
        self._settling = False  # the I/O thread sets it, the task clears it
        self._settle_from = 0.0
        self._logged = False
        self._borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
        self._borrowers_lock = threading.Lock()
        self._is_over = False
        self.bytes_sent: int = 0  # lent, not through the host; approximate, since counted without a lock
        self.bytes_received: int = 0

    def learn(self, pairs: Mapping[str, str], automatic: bool) -> None:
        """Use the peer's map to us, from now on."""
        self._back = _as_devices(reversed_map(pairs))
        self._back_automatic = automatic

    def leads_back_from(self, device: torch.device) -> bool:
        """Can an answer of the peer carry a tensor from that device of the peer's?"""
        return self._automatic or device in self._to.values()

    # ------------------------------------------------------------------ as PeerDevices

    def target(self, device: torch.device, is_request: bool) -> torch.device | None:
        first, second = (self._to, self._back) if is_request else (self._back, self._to)
        target = first.get(device)
        if target is None and not is_request:
            target = second.get(device)
        if target is None and (self._automatic or (self._back_automatic and not is_request)):
            return device
        return target

    def place(
        self, source: torch.Tensor, size: int, target: torch.device, is_request: bool
    ) -> tuple[Any, ...] | bytearray | memoryview:
        return self._lend(source, size, target, is_request) or staging.to_host(source, size)

    def _lend(self, source: torch.Tensor, size: int, target: torch.device, is_request: bool) -> DeviceTicket | None:
        """A ticket for a copy of ``source``; None: it goes through the host."""
        if target.type == "cpu":
            return None
        device = source.get_device()
        way = self._ways.get(device)
        if way is not True:
            if way is None:
                self._try(device)
            return None
        if size <= SMALL_BYTES and not (is_request and self._api.is_busy(device)):
            return None
        ticket = self._node.pool.lend(device, source, size, self._peer)
        if ticket is not None:
            self.bytes_sent += size
        return ticket

    def take_back(self, ticket: tuple[Any, ...]) -> None:
        known = DeviceTicket(*ticket)
        self._node.pool.release([(known.segment_id, known.offset)], self._peer)

    def take(self, ticket: Any, target: torch.device, form: Form | None = None) -> torch.Tensor:
        known = DeviceTicket(*ticket)
        self.bytes_received += known.size
        views = self._node.options.memory.device_views and known.size >= VIEWED_BYTES
        if not views or self._segments.devices[known.device] != target.index:
            try:
                shape, dtype = form or ((known.size,), torch.uint8)
                if prod(shape) * dtype.itemsize != known.size:
                    raise SerializationError(f"a peer lent {known.size} bytes for a tensor of {shape}, {dtype}")
                self._segments.check(known)  # before memory is taken
                copy = torch.empty(shape, dtype=dtype, device=target)
                self._segments.copy_out(known, copy)
                return copy
            finally:
                self.drop(known)
        try:
            memory = self._segments.opened(known)
        except BaseException:
            self.drop(known)
            raise
        # From here on the view's death gives the block back, whatever happens.
        return self._api.view(memory, known.offset, known.size, partial(self._on_view_death, known))

    def drop(self, ticket: Any) -> None:
        self._released.append((ticket[1], ticket[2]))
        self._owed_bytes += ticket[3]
        self._node.host.on_release(self._owed_bytes >= URGENT_BYTES)

    def to_device(self, source: memoryview, target: torch.device) -> torch.Tensor:
        return staging.to_device(source, target, target.index in self._segments.devices.values())

    # ------------------------------------------------------------------ memory beside messages

    def shares(self, device: int) -> bool:
        """Can the peer open memory of this device of ours? The first call starts the attempt and returns False."""
        way = self._ways.get(device)
        if way is None:
            self._try(device)
        return way is True

    def here(self, device: int) -> int | None:
        """Our index of that device of the peer's; None: we cannot open its memory."""
        return self._segments.devices.get(device)

    # ------------------------------------------------------------------ releases

    def _on_view_death(self, ticket: DeviceTicket) -> None:
        # Perhaps inside a garbage collection: take no lock, touch no device.
        self._dead_views.append(ticket)
        self._node.host.on_release(False)

    def settle_views(self) -> float:
        """On the I/O thread: have a worker give back the blocks of dead views, once no stream uses them.

        Returns when to try again after a device failed, else NEVER: `Host.on_release` asks for the next look.
        """
        if not self._dead_views or self._settling:
            return NEVER
        if monotonic() < self._settle_from:
            return self._settle_from
        self._settling = True
        self._node.host.write_later(self._finish_views)
        return NEVER

    def _finish_views(self) -> None:
        dead = []
        while self._dead_views:  # only this task, one at a time, takes from it
            dead.append(self._dead_views.popleft())
        try:
            for device in {self._segments.devices[ticket.device] for ticket in dead}:
                self._api.finish(device)
        except Exception:
            logger.exception(
                "%s: %d blocks of device memory of %s are not given back yet: the device failed",
                self._node.name,
                len(dead),
                self._peer.info.name,
            )
            self._dead_views.extend(dead)
            self._settle_from = monotonic() + RETRY_S
        else:
            for ticket in dead:
                self.drop(ticket)
        finally:
            self._settling = False
        if self._dead_views:  # they died meanwhile, and the look that they asked for may have found the flag set
            self._node.host.on_release(False)

    @property
    def has_releases(self) -> bool:
        """Is there anything to give back?"""
        return bool(self._released)

    @property
    def is_worth_releasing(self) -> bool:
        """Is there enough to give back ahead of the next message? Less waits for a timer, or for more."""
        return self._owed_bytes >= WORTH_RELEASING_BYTES or len(self._released) >= WORTH_RELEASING_BLOCKS

    def take_releases(self) -> list[tuple[int, int]]:
        """Take the blocks that are to be given back now."""
        self._owed_bytes = 0
        released: list[tuple[int, int]] = []
        try:
            while True:
                released.append(self._released.popleft())
        except IndexError:  # at the end, or another thread took the last one
            return released

    def on_released(self, message: messages.DeviceBlocksReleased) -> None:
        """The peer gives back blocks of ours; on any thread."""
        wrong = self._node.pool.release(message.blocks, self._peer)
        if wrong and not self._logged:
            self._logged = True
            logger.warning("%s released %d blocks of device memory that it does not hold", self._peer.info.name, wrong)

    def on_retired(self, message: messages.DeviceSegmentRetired) -> None:
        """The peer has given up a segment of its own."""
        self._segments.retire(message.segment_id)

    def forget_segments(self) -> None:
        """Close the peer's memory before the peer ends: all work of the group is done."""
        self._segments.close()
        for borrower in self._end_borrowing():
            borrower.close()

    def borrow(self, borrower: Borrower) -> bool:
        """Note that ``borrower`` keeps memory of the peer's open until the peer ends. False: the peer has ended."""
        with self._borrowers_lock:
            if not self._is_over:
                self._borrowers.add(borrower)
            return not self._is_over

    def _end_borrowing(self) -> list[Borrower]:
        with self._borrowers_lock:
            self._is_over = True
            return list(self._borrowers)

    def close(self) -> None:
        """The peer is gone; on the I/O thread."""
        self._node.pool.release_all(self._peer, monotonic())
        self._segments.close()
        # On a worker: torch blocks until a stream's work is done before it closes such memory.
        for borrower in self._end_borrowing():
            self._node.host.write_later(borrower.close)

    # ------------------------------------------------------------------ finding the way

    def _try(self, device: int) -> None:
        """Ask the peer whether it can open memory of this device."""
        peer = self._peer
        if not self._node.options.memory.device_sharing or not isinstance(peer, RemotePeer):
            self._ways[device] = False
            return
        memory = self._api.allocate(device, TRIED_BYTES)
        if memory is None:
            return  # no memory now: the next tensor tries again
        self._ways[device] = memory
        try:
            _, handle = self._api.make_event(device)
            opener = pickle.dumps((self._api.export(memory), handle), 5)
            name = self._api.name_of(device)
        except Exception as error:
            self._refused(device, f"{type(error).__name__}: {error}")
            return
        peer.control(messages.DeviceTried(device, name, opener))

    def on_tried(self, message: messages.DeviceTried) -> None:
        """Try to open memory of the peer's, and answer. On a worker: the first use of a device takes a while."""
        why_not = ""
        try:
            device = self._api.find(message.name)
            if not self._node.options.memory.device_sharing:
                why_not = "it is switched off there"
            elif device is None:
                why_not = "that device is not visible there"
            else:
                export, handle = loads(message.opener)
                self._api.open(export, device)
                self._api.open_event(handle, device)
                self._segments.devices[message.device] = device
                self._node.on_shared(device, self._peer.info.name)
        except Exception as error:
            why_not = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        assert isinstance(self._peer, RemotePeer)
        self._peer.control(messages.DeviceOpened(message.device, why_not))

    def on_opened(self, message: messages.DeviceOpened) -> None:
        """The peer's answer to `DeviceTried`."""
        if message.why_not:
            self._refused(message.device, message.why_not)
        else:
            logger.info("%s: device memory is shared with %s", self._node.name, self._peer.info.name)
            self._ways[message.device] = True

    def _refused(self, device: int, why: str) -> None:
        self._ways[device] = False
        logger.info(
            "%s: tensors on cuda:%d go to %s through the host: %s", self._node.name, device, self._peer.info.name, why
        )


class LocalDeviceLink(DeviceLink):
    """This node's own devices, for calls to itself: a tensor is copied on the device, and its ticket is a number."""

    def __init__(self, node: LinksNode, peer: Peer, pairs: Mapping[str, str], *, automatic: bool) -> None:
        super().__init__(node, peer, pairs, automatic=automatic)
        self.learn(pairs, automatic)
        self._held: dict[int, tuple[torch.Tensor, Any]] = {}  # under the lock: copies, each with the event of its copy
        self._next_number = 0
        self._held_lock = threading.Lock()

    def place(
        self, source: torch.Tensor, size: int, target: torch.device, is_request: bool
    ) -> tuple[Any, ...] | bytearray | memoryview:
        if target.type == "cpu":
            return staging.to_host(source, size)
        copy = torch.empty(source.shape, dtype=source.dtype, device=target)
        copy.copy_(source, non_blocking=True)
        event = torch.cuda.current_stream(target).record_event()
        with self._held_lock:
            self._next_number += 1
            self._held[self._next_number] = copy.view(-1).view(torch.uint8), event
            return (self._next_number,)

    def take_back(self, ticket: Any) -> None:
        self.drop(ticket)

    def take(self, ticket: Any, target: torch.device, form: Form | None = None) -> torch.Tensor:
        with self._held_lock:
            copy, event = self._held.pop(ticket[0])
        stream = torch.cuda.current_stream(target)
        stream.wait_event(event)
        copy.record_stream(stream)
        return copy

    def drop(self, ticket: Any) -> None:
        with self._held_lock:
            self._held.pop(ticket[0], None)

    def close(self) -> None:
        self._held.clear()


def _as_devices(pairs: Mapping[str, str]) -> dict[torch.device, torch.device]:
    try:
        return {torch.device(source): torch.device(target) for source, target in pairs.items()}
    except RuntimeError as error:  # a peer's map: malformed, like any other message
        raise ValueError(f"it maps what is no device: {str(error).splitlines()[0]}") from None
