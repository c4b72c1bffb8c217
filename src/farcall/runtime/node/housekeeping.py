"""What a node looks after from time to time: memory that others wait to have back, and memory unused for long.

A ticker of the loop: everything here runs on the I/O thread, before it sleeps. Owns nothing but the time of the next
look at unused memory.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from farcall.runtime.devices.node import NodeDevices
from farcall.runtime.node.cluster_links import ClusterLinks
from farcall.runtime.node.resources import Resources
from farcall.runtime.peers.shared_memory import retire_from

__all__ = ["Housekeeping"]

TRIM_EVERY_S = 10.0


class Housekeeping:
    """One node's."""

    def __init__(self, resources: Resources, links: ClusterLinks, devices: Callable[[], NodeDevices | None]) -> None:
        self._resources = resources
        self._links = links
        self._devices = devices
        self._next_trim = monotonic() + TRIM_EVERY_S

    def tick(self, now: float) -> float:
        """Send releases that nobody took along, give back memory unused for long, and watch."""
        for peer in self._links.acquaintances.everyone():  # a copy: members may still be connecting
            if peer.segments is not None and peer.segments.has_releases:
                peer.send_releases()
            if peer.devices is not None:
                peer.devices.settle_views()
                if peer.devices.has_releases:
                    peer.send_device_releases()
        if now >= self._next_trim:
            self._next_trim = now + TRIM_EVERY_S
            self._trim(now)
        return min(self._next_trim, self._links.watch.tick(now))

    def _trim(self, now: float) -> None:
        resources, devices = self._resources, self._devices()
        resources.memory.trim(now)
        if devices is not None:
            devices.trim(now)
        if resources.pool is not None:
            for segment_id, holders in resources.pool.trim(now):
                retire_from(holders, segment_id)
