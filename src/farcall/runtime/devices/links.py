"""What messages to and from one peer use of its devices, as ``peer.devices``: which way bytes take, what was lent.

Maps: a call goes by our map to the peer; an answer or a gradient takes the peer's map to us, backwards, and where that
says nothing ours. The peer tells its map (`DevicesMapped`) before anything that needs it.

The way to a peer, for each device of ours:

    unknown   first tensor       -> tried: a piece of memory is offered (DeviceTried); meanwhile through the host
    tried     DeviceOpened       -> shared: tensors are lent, from a pool that the peer has opened
    tried     ... with a reason  -> host: through pinned buffers, for good; logged once

Through the host also go: what the pool has no room for, what is bound for the CPU, and what is small: processes that
take turns on a device pay for it, see `channel/staging.py`. For that the host waits for the stream; so it is done for
answers, which nobody could use earlier, and for calls from a stream that has nothing to do: a caller never waits for
its device.

What the peer lent is copied, and given back at once; or, by option, used where it is. Then it is given back after its
death: once a worker has seen that all our streams are done with it (`settle_views`). For each link at most one worker
does so at a time, since it may wait for long:

    resting   a look, and views have died -> settling: a task is queued
    settling  it is done                  -> resting; the I/O thread is woken if more have died meanwhile
    settling  the device fails            -> resting, and not before RETRY_S again; nothing is given back
"""

from __future__ import annotations

import logging
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
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
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize.allowance import loads
from farcall.serialize.devices import Form

logger: logging.Logger = logging.getLogger("farcall")

SMALL_BYTES = 64 * 1024
"""Up to this size a tensor goes through the host, but for calls from a busy stream."""
TRIED_BYTES = 512
WORTH_RELEASING_BYTES = 1 << 20
WORTH_RELEASING_BLOCKS = 32
"""So much is given back ahead of a message to the peer: for each one alone a message would be made, sent and read."""
URGENT_BYTES = 16 << 20
"""So much is given back at once, if no message comes along: the peer may have no other memory of that size."""
VIEWED_BYTES = 1 << 20
"""What is smaller is copied even where views are wanted: it is not worth keeping somebody else's block."""
RETRY_S = 10.0
"""So long dead views are left alone after the device has failed, which it mostly does for good."""


class LinksNode(Protocol):
    """What links need of their node."""

    name: str
    options: RpcBackendOptions
    api: DeviceApi
    pool: DevicePool
    on_release: Callable[[bool], None]
    run_later: Callable[[Callable[[], None]], None]


class Borrower(Protocol):
    """Somebody who has memory of a peer's device open."""

    def close(self) -> None:
        """Let go of it."""


class DeviceLink:
    """One peer's devices; see `serialize.PeerDevices`."""

    def __init__(self, node: LinksNode, peer: Peer, pairs: Mapping[str, str], automatic: bool) -> None:
        self._node = node
        self._api = node.api
        self._peer = peer
        self._automatic = automatic
        self._back_automatic = False
        self._to = _as_devices(pairs)
        self._back: dict[torch.device, torch.device] = {}
        self._ways: dict[int, bool | torch.Tensor] = {}  # a tensor: tried with it
        self._segments = DeviceSegments(node.api)
        self._released: deque[tuple[int, int]] = deque()
        self._owed_bytes = 0  # of these; about: counted without a lock
        self._dead_views: deque[DeviceTicket] = deque()
        self._settling = False  # set by the I/O thread, cleared by the task
        self._settle_from = 0.0
        self._logged = False
        self._borrowers: weakref.WeakSet[Borrower] = weakref.WeakSet()
        self._borrowers_lock = threading.Lock()
        self._is_over = False
        self.bytes_sent: int = 0  # lent and taken, not through the host; about: counted without a lock
        self.bytes_received: int = 0

    def learn(self, pairs: Mapping[str, str], automatic: bool) -> None:
        """The peer's map to us."""
        self._back = _as_devices(reversed_map(pairs))
        self._back_automatic = automatic

    def leads_back_from(self, device: torch.device) -> bool:
        """Can an answer of the peer bring a tensor from that device of its own?"""
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
        # From here on its death gives it back, whatever happens.
        return self._api.view(memory, known.offset, known.size, partial(self._on_view_death, known))

    def drop(self, ticket: Any) -> None:
        self._released.append((ticket[1], ticket[2]))
        self._owed_bytes += ticket[3]
        self._node.on_release(self._owed_bytes >= URGENT_BYTES)

    def to_device(self, source: memoryview, target: torch.device) -> torch.Tensor:
        return staging.to_device(source, target, target.index in self._segments.devices.values())

    # ------------------------------------------------------------------ memory that is no message's

    def shares(self, device: int) -> bool:
        """Can the peer open memory of this device of ours? If that was never tried, it is now, and the answer is no."""
        way = self._ways.get(device)
        if way is None:
            self._try(device)
        return way is True

    def here(self, device: int) -> int | None:
        """How we number that device of the peer's, whose memory we can open; None: we cannot."""
        return self._segments.devices.get(device)

    # ------------------------------------------------------------------ releases

    def _on_view_death(self, ticket: DeviceTicket) -> None:
        # Perhaps inside a garbage collection: no lock, no device.
        self._dead_views.append(ticket)
        self._node.on_release(False)

    def settle_views(self) -> float:
        """On the I/O thread: have those that have died given back, when no stream uses them any more.

        Returns when to try again, after a device failed; ``on_release`` tells of everything else.
        """
        if not self._dead_views or self._settling:
            return NEVER
        if monotonic() < self._settle_from:
            return self._settle_from
        self._settling = True
        self._node.run_later(self._finish_views)
        return NEVER

    def _finish_views(self) -> None:
        dead = []
        while self._dead_views:  # nobody else takes from it
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
        if self._dead_views:  # looked at last: the ticks that they asked for may have found the flag set
            self._node.on_release(False)

    @property
    def has_releases(self) -> bool:
        """Is there anything to give back?"""
        return bool(self._released)

    @property
    def is_worth_releasing(self) -> bool:
        """Is there so much to give back that a message should take it along? Less waits for a timer, or for more."""
        return self._owed_bytes >= WORTH_RELEASING_BYTES or len(self._released) >= WORTH_RELEASING_BLOCKS

    def take_releases(self) -> list[tuple[int, int]]:
        """What to give back now."""
        self._owed_bytes = 0
        released: list[tuple[int, int]] = []
        try:
            while True:
                released.append(self._released.popleft())
        except IndexError:  # perhaps another thread took the last one
            return released

    def on_released(self, message: messages.DeviceBlocksReleased) -> None:
        """The peer gives back what we lent; on any thread."""
        wrong = self._node.pool.release(message.blocks, self._peer)
        if wrong and not self._logged:
            self._logged = True
            logger.warning("%s released %d blocks of device memory that it does not hold", self._peer.info.name, wrong)

    def on_retired(self, message: messages.DeviceSegmentRetired) -> None:
        """The peer gave up a segment of its own."""
        self._segments.retire(message.segment_id)

    def forget_segments(self) -> None:
        """All work everywhere is done: let the peer have its memory back before it ends."""
        self._segments.close()
        with self._borrowers_lock:
            self._is_over = True
            borrowers = list(self._borrowers)
        for borrower in borrowers:
            borrower.close()

    def borrow(self, borrower: Borrower) -> bool:
        """``borrower`` has memory of the peer's open beside messages, until the peer ends. False: it has ended."""
        with self._borrowers_lock:
            if not self._is_over:
                self._borrowers.add(borrower)
            return not self._is_over

    def close(self) -> None:
        """The peer is gone."""
        self._node.pool.release_all(self._peer, monotonic())
        self.forget_segments()

    # ------------------------------------------------------------------ finding the way

    def _try(self, device: int) -> None:
        """Ask the peer whether it can open memory of this device."""
        peer = self._peer
        if not self._node.options.memory.device_sharing or not isinstance(peer, RemotePeer):
            self._ways[device] = False
            return
        memory = self._api.allocate(device, TRIED_BYTES)
        if memory is None:
            return  # to be tried again
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
        """The peer asks. On a worker: the first look at a device takes a moment."""
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
        except Exception as error:
            why_not = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        assert isinstance(self._peer, RemotePeer)
        self._peer.control(messages.DeviceOpened(message.device, why_not))

    def on_opened(self, message: messages.DeviceOpened) -> None:
        """The peer's answer."""
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
    """This node's own devices, for calls to itself: what is sent is cloned on the device and fetched by a number."""

    def __init__(self, node: LinksNode, peer: Peer, pairs: Mapping[str, str], automatic: bool) -> None:
        super().__init__(node, peer, pairs, automatic)
        self.learn(pairs, automatic)
        self._held: dict[int, tuple[torch.Tensor, Any]] = {}
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
    return {torch.device(source): torch.device(target) for source, target in pairs.items()}
