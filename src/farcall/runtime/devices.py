"""Tensors on devices, between this node and each of its peers: maps, the way that bytes take, and what was lent.

`NodeDevices` is one node's; it exists only where the options, or a peer, say something about devices. `DeviceLink` is
what messages to and from one peer use (`serialize/devices.py`), as ``peer.devices``.

Maps: a call goes by our map to the peer; an answer or a gradient takes the peer's map to us, backwards, and where that
says nothing ours. The peer tells its map (`DevicesMapped`) before anything that needs it.

The way to a peer, for each device of ours:

    unknown   first tensor       -> tried: a piece of memory is offered (DeviceTried); meanwhile through the host
    tried     DeviceOpened       -> shared: tensors are lent, from a pool that the peer has opened
    tried     ... with a reason  -> host: through pinned buffers, for good; logged once

Through the host also go: what the pool has no room for, what is bound for the CPU, and what is small: two processes
that take turns on a device cost more than the copies. (Measured on an H200, bare, 4 KiB one way, received: 78 us
through the host, 319 us shared.) For that the host waits for the stream; so it is done for answers, which nobody
could use earlier, and for calls from a stream that has nothing to do: a caller never waits for its device.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

import torch

from farcall.channel import staging
from farcall.channel.device_api import CudaApi, DeviceApi
from farcall.channel.device_pool import DevicePool, DeviceTicket, PoolStats
from farcall.channel.device_segments import DeviceSegments
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.runtime.device_maps import reversed_map
from farcall.runtime.peers import Peer, RemotePeer
from farcall.runtime.streams import Lane, Lanes
from farcall.serialize import map_cpu_tensors

__all__ = ["DEVICE_MESSAGES", "DeviceLink", "LocalDeviceLink", "NodeDevices"]

logger: logging.Logger = logging.getLogger("farcall")

SMALL_BYTES = 64 * 1024
"""Up to this size a tensor goes through the host, but for calls from a busy stream."""
TRIED_BYTES = 512
URGENT_BYTES = 1 << 20
"""What is as large as this is given back at once; smaller blocks wait for company."""


class NodeDevices:
    """The devices of one node."""

    def __init__(
        self,
        name: str,
        options: RpcBackendOptions,
        on_release: Callable[[bool], None],
        run_later: Callable[[Callable[[], None]], None],
        api: DeviceApi | None = None,
    ) -> None:
        """``on_release(urgent)`` wakes who sends releases; ``run_later`` runs what may take long on a worker."""
        self.name = name
        self.options = options
        self.api: DeviceApi | CudaApi = api or CudaApi()
        self.pool: DevicePool = DevicePool(self.api, options.device_memory_limit_bytes)
        self.lanes: Lanes = Lanes(lambda: self.devices)
        self.answers: Lanes = Lanes(lambda: self.devices, ordered=False)
        """For answers that nobody's stream waits for yet."""
        self.on_release = on_release
        self.run_later = run_later
        self._lock = threading.Lock()
        self._named: set[str] = set(options.devices)
        self.devices: list[torch.device] = []
        """What maps lead from or to; always the same list."""
        for pairs in options.device_maps.values():
            self._named.update(pairs)
            if pairs.get("cpu", "cpu") != "cpu":
                map_cpu_tensors()
        if options.automatic_device_maps:
            self._named.update(f"cuda:{number}" for number in range(torch.cuda.device_count()))
        self._list()

    def add(self, names: Sequence[str]) -> None:
        """A peer's map leads to these devices of ours."""
        with self._lock:
            self._named.update(names)
            self._list()

    def _list(self) -> None:
        count = torch.cuda.device_count()
        found = (torch.device(name) for name in sorted(self._named - {"cpu"}))
        self.devices[:] = sorted((device for device in found if device.index < count), key=lambda device: device.index)

    def meet(self, peer: Peer) -> None:
        """Make ``peer.devices``, if our map or an automatic one leads to it, and tell it so."""
        pairs = self.options.device_maps.get(peer.info.name, {})
        automatic = self.options.automatic_device_maps and not pairs
        if not pairs and not automatic:
            return
        if isinstance(peer, RemotePeer):
            self.link(peer)
            peer.control(messages.DevicesMapped(list(pairs.items()), automatic))
        elif peer.devices is None:
            peer.devices = LocalDeviceLink(self, peer, pairs, automatic)
            self.add(list(pairs.values()))

    def link(self, peer: RemotePeer) -> DeviceLink:
        """What messages to and from ``peer`` use."""
        with self._lock:
            if peer.devices is None:
                pairs = self.options.device_maps.get(peer.info.name, {})
                automatic = self.options.automatic_device_maps and not pairs
                peer.devices = DeviceLink(self, peer, pairs, automatic)
            link: DeviceLink = peer.devices
            return link

    def on_mapped(self, peer: RemotePeer, message: messages.DevicesMapped) -> None:
        """A peer's map to us; on the thread that reads, before anything that came behind it."""
        pairs = dict(message.pairs)
        self.link(peer).learn(pairs, message.automatic)
        if pairs.get("cpu", "cpu") != "cpu" or "cpu" in pairs.values():
            map_cpu_tensors()
        names = list(pairs.values())
        if message.automatic:
            names += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        self.add(names)

    def on_default_streams(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the default stream of each device, behind and before what is on the current ones.

        All of distributed autograd's own work runs so, on whatever thread: that orders it.
        """
        outside = [torch.cuda.current_stream(device) for device in self.devices]
        default = [torch.cuda.default_stream(device) for device in self.devices]
        if outside == default:
            function()
            return
        lane = Lane(default)
        lane.follow(Lane(outside))
        try:
            with lane:
                function()
        finally:
            self.follow_default_streams()

    def follow_default_streams(self) -> None:
        """Have the current streams wait for what is on the default ones."""
        for device in self.devices:
            current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            if current != default:
                current.wait_stream(default)

    def handle(self, peer: RemotePeer, message: messages.Message) -> None:
        """A control message about devices; on the thread that reads, in order."""
        if isinstance(message, messages.DevicesMapped):
            self.on_mapped(peer, message)
        elif isinstance(message, messages.DeviceTried):
            link = self.link(peer)
            self.run_later(lambda: link.on_tried(message))
        elif isinstance(message, messages.DeviceOpened):
            self.link(peer).on_opened(message)
        elif isinstance(message, messages.DeviceBlocksReleased):
            self.link(peer).on_released(message)
        elif isinstance(message, messages.DeviceSegmentRetired):
            self.link(peer).on_retired(message)

    def trim(self, now: float) -> None:
        """Give back what was not used for long."""
        for segment_id, peers in self.pool.trim(now):
            for peer in peers:
                if isinstance(peer, RemotePeer):
                    peer.control(messages.DeviceSegmentRetired(segment_id))

    def stats(self) -> PoolStats:
        """What is held for sending, in bytes."""
        return self.pool.stats()

    def close(self) -> None:
        """The node ends."""
        self.pool.close()


DEVICE_MESSAGES = (
    messages.DevicesMapped,
    messages.DeviceTried,
    messages.DeviceOpened,
    messages.DeviceBlocksReleased,
    messages.DeviceSegmentRetired,
)


class DeviceLink:
    """One peer's devices; see `serialize.PeerDevices`."""

    def __init__(self, node: NodeDevices, peer: Peer, pairs: Mapping[str, str], automatic: bool) -> None:
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
        self._logged = False

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

    def place(self, source: torch.Tensor, target: torch.device, is_request: bool) -> DeviceTicket | None:
        device = source.device.index
        if target.type == "cpu":
            return None
        way = self._ways.get(device)
        if way is not True:
            if way is None:
                self._try(device)
            return None
        size = source.numel() * source.element_size()
        if size <= SMALL_BYTES and not (is_request and self._api.is_busy(device)):
            return None
        pool = self._node.pool
        block = pool.allocate(device, size)
        if block is None:
            return None
        try:
            block.memory[:size].view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
            return pool.lend(block, size, self._peer)
        except BaseException:
            pool.free(block)
            raise

    def take_back(self, ticket: DeviceTicket) -> None:
        self._node.pool.release([(ticket.segment_id, ticket.offset)], self._peer)

    def take(self, ticket: Any, target: torch.device) -> torch.Tensor:
        known = DeviceTicket(*ticket)
        try:
            return self._segments.copy_out(known, target)
        finally:
            self.drop(known)

    def drop(self, ticket: Any) -> None:
        self._released.append((ticket[1], ticket[2]))
        self._node.on_release(ticket[3] >= URGENT_BYTES)

    def to_host(self, source: torch.Tensor) -> memoryview:
        return staging.to_host(source)

    def to_device(self, source: memoryview, target: torch.device) -> torch.Tensor:
        return staging.to_device(source, target, target.index in self._segments.devices.values())

    # ------------------------------------------------------------------ releases

    @property
    def has_releases(self) -> bool:
        """Is there anything to give back?"""
        return bool(self._released)

    def take_releases(self) -> list[tuple[int, int]]:
        """What to give back now."""
        released = []
        while self._released:
            released.append(self._released.popleft())
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

    def close(self) -> None:
        """The peer is gone."""
        self._node.pool.release_all(self._peer, monotonic())
        self._segments.close()

    # ------------------------------------------------------------------ finding the way

    def _try(self, device: int) -> None:
        """Ask the peer whether it can open memory of this device."""
        peer = self._peer
        if not self._node.options.device_sharing or not isinstance(peer, RemotePeer):
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
            if not self._node.options.device_sharing:
                why_not = "it is switched off there"
            elif device is None:
                why_not = "that device is not visible there"
            else:
                export, handle = pickle.loads(message.opener)
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

    def __init__(self, node: NodeDevices, peer: Peer, pairs: Mapping[str, str], automatic: bool) -> None:
        super().__init__(node, peer, pairs, automatic)
        self.learn(pairs, automatic)
        self._held: dict[int, tuple[torch.Tensor, Any]] = {}
        self._next_number = 0
        self._held_lock = threading.Lock()

    def place(self, source: torch.Tensor, target: torch.device, is_request: bool) -> Any | None:
        if target.type == "cpu":
            return None
        copy = torch.empty(source.shape, dtype=source.dtype, device=target)
        copy.copy_(source, non_blocking=True)
        event = torch.cuda.current_stream(target).record_event()
        with self._held_lock:
            self._next_number += 1
            self._held[self._next_number] = copy.view(-1).view(torch.uint8), event
            return (self._next_number,)

    def take_back(self, ticket: Any) -> None:
        self.drop(ticket)

    def take(self, ticket: Any, target: torch.device) -> torch.Tensor:
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
