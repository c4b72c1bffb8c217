"""The devices of one node: their list, the memory pool to send from, the streams, and each peer's `DeviceLink`.

A node makes `NodeDevices` only if its options, or a peer, name devices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from farcall.channel import mps
from farcall.channel.device_api import DEFAULT_STREAM, CudaApi, DeviceApi, current_stream, current_stream_id
from farcall.channel.device_memory import DevicePool, PoolStats
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.runtime.devices.links import DeviceLink, LocalDeviceLink
from farcall.runtime.devices.streams import CallStreams, StreamPool
from farcall.runtime.peers.host import Host
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize import map_cpu_tensors

logger: logging.Logger = logging.getLogger("farcall")

DEVICE_BUSY_WAIT_S = 500e-6
"""How long to busy-wait: a call that uses a device takes longer, and a thread that slept meanwhile is slow at first."""


class NodeDevices:
    """The devices of one node. Mutable, under the lock: ``_named`` and ``devices``, which grow with peers' maps."""

    def __init__(self, name: str, options: RpcBackendOptions, host: Host) -> None:
        self.name: str = name
        self.options: RpcBackendOptions = options
        self.host: Host = host
        self.api: DeviceApi = CudaApi()
        self.pool: DevicePool = DevicePool(self.api, options.memory.device_memory_limit_bytes)
        self.devices: list[torch.device] = []
        """The devices that maps lead from or to. Always the same list object: the stream pools hold it, too."""
        self.stream_pool: StreamPool = StreamPool(self.devices)
        self.answers: StreamPool = StreamPool(self.devices, ordered=False)
        """Streams for reading answers that no thread waits for yet."""
        self._lock = threading.Lock()
        self._told = False  # that a device of ours has another process
        self._named: set[str] = set(options.devices)
        for pairs in options.device_maps.values():
            self._named.update(pairs)
            if pairs.get("cpu", "cpu") != "cpu":
                map_cpu_tensors()
        if options.automatic_device_maps:
            self._named.update(f"cuda:{number}" for number in range(torch.cuda.device_count()))
        self._list()

    def add(self, names: Sequence[str]) -> None:
        """Use these devices, too: a peer's map leads to them."""
        with self._lock:
            self._named.update(names)
            self._list()

    def _list(self) -> None:
        """List the named devices that exist here, in place."""
        count = torch.cuda.device_count()
        found = (torch.device(name) for name in sorted(self._named - {"cpu"}))
        self.devices[:] = sorted((device for device in found if device.index < count), key=lambda device: device.index)

    def meet(self, peer: Peer) -> None:
        """If a map of ours leads to ``peer``: make ``peer.devices`` and send the map to the peer."""
        pairs, automatic = self._map_to(peer)
        if not pairs and not automatic:
            return
        if isinstance(peer, RemotePeer):
            self.link(peer)
            peer.control(messages.DevicesMapped(list(pairs.items()), automatic))
        elif peer.devices is None:
            peer.devices = LocalDeviceLink(self, peer, pairs, automatic=automatic)
            self.add(list(pairs.values()))

    def link(self, peer: RemotePeer) -> DeviceLink:
        """The `DeviceLink` of ``peer``, made at first use."""
        with self._lock:
            if peer.devices is None:
                pairs, automatic = self._map_to(peer)
                peer.devices = DeviceLink(self, peer, pairs, automatic=automatic)
            link: DeviceLink = peer.devices
            return link

    def _map_to(self, peer: Peer) -> tuple[Mapping[str, str], bool]:
        pairs = self.options.device_maps.get(peer.info.name, {})
        return pairs, self.options.automatic_device_maps and not pairs

    def on_mapped(self, peer: RemotePeer, message: messages.DevicesMapped) -> None:
        """Use a peer's map to us. On the reading thread, before the messages that need the map are handled."""
        pairs = dict(message.pairs)
        self.link(peer).learn(pairs, message.automatic)
        if pairs.get("cpu", "cpu") != "cpu" or "cpu" in pairs.values():
            map_cpu_tensors()
        names = list(pairs.values())
        if message.automatic:
            names += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        self.add(names)

    def on_shared(self, device: int, peer: str) -> None:
        """A peer computes on this device; told once, if it is one of ours and they take turns."""
        if not self._told and torch.device("cuda", device) in self.devices and not mps.is_served():
            self._told = True
            logger.warning(
                "%s and %s compute on one GPU and take turns there: calls with its tensors take two to three times as "
                "long as with NVIDIA's MPS; %s",
                self.name,
                peer,
                mps.REMEDY,
            )

    def on_default_streams(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the default streams, after the work on the current streams and before their next work.

        Distributed autograd does all of its own work there, on whatever thread, and so in order.
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
        """Make the current streams wait for the work on the default streams."""
        for device in self.devices:
            if current_stream_id(device.index)[0] != DEFAULT_STREAM:
                current_stream(device.index).wait_stream(torch.cuda.default_stream(device))

    def handle(self, peer: RemotePeer, message: messages.Message) -> None:
        """Handle a control message about devices; on the reading thread, in order."""
        if isinstance(message, messages.DevicesMapped):
            self.on_mapped(peer, message)
        elif isinstance(message, messages.DeviceTried):
            link = self.link(peer)
            self.host.write_later(lambda: link.on_tried(message))
        elif isinstance(message, messages.DeviceOpened):
            self.link(peer).on_opened(message)
        elif isinstance(message, messages.DeviceBlocksReleased):
            self.link(peer).on_released(message)
        elif isinstance(message, messages.DeviceSegmentRetired):
            self.link(peer).on_retired(message)

    def trim(self, now: float) -> None:
        """Free memory that has been unused for long, and have the peers that opened it close it."""
        for segment_id, peers in self.pool.trim(now):
            for peer in peers:
                if isinstance(peer, RemotePeer):
                    peer.control(messages.DeviceSegmentRetired(segment_id))

    def stats(self) -> PoolStats:
        """How much memory the node holds for sending."""
        return self.pool.stats()

    def close(self) -> None:
        """The node ends."""
        self.pool.close()
