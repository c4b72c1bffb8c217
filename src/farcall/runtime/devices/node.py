"""The devices of one node: which they are, the pool to send from, the streams, and each peer's `DeviceLink`.

`NodeDevices` exists only where the options, or a peer, say something about devices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from farcall.channel.device_api import DEFAULT_STREAM, CudaApi, DeviceApi, current_stream, current_stream_id
from farcall.channel.device_memory import DevicePool, PoolStats
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.runtime.devices.links import DeviceLink, LocalDeviceLink
from farcall.runtime.devices.streams import CallStreams, StreamPool
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize import map_cpu_tensors

logger: logging.Logger = logging.getLogger("farcall")

DEVICE_BUSY_WAIT_S = 500e-6
"""A call with something on a device takes longer than others, and what was asleep meanwhile is slow at first."""


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
        """``on_release(urgent)`` wakes the sender of releases; ``run_later`` runs long work on a worker."""
        self.name = name
        self.options = options
        self.api: DeviceApi | CudaApi = api or CudaApi()
        self.pool: DevicePool = DevicePool(self.api, options.memory.device_memory_limit_bytes)
        self.stream_pool: StreamPool = StreamPool(lambda: self.devices)
        self.answers: StreamPool = StreamPool(lambda: self.devices, ordered=False)
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
                peer.link.incoming.look_for(DEVICE_BUSY_WAIT_S)
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
        if all(current_stream_id(device.index)[0] == DEFAULT_STREAM for device in self.devices):
            function()
            return
        call_streams = CallStreams([torch.cuda.default_stream(device) for device in self.devices])
        call_streams.follow(CallStreams([current_stream(device.index) for device in self.devices]))
        try:
            with call_streams:
                function()
        finally:
            self.follow_default_streams()

    def follow_default_streams(self) -> None:
        """Have the current streams wait for what is on the default ones."""
        for device in self.devices:
            if current_stream_id(device.index)[0] != DEFAULT_STREAM:
                current_stream(device.index).wait_stream(torch.cuda.default_stream(device))

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
