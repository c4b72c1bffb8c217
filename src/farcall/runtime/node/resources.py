"""What a node has without anybody else: its I/O thread, its workers, its memory and a door that others may knock at.

Owns these and closes them; knows no peer and no message. Made while Ctrl-C is held back, so that it exists as a whole
or not at all. `write_later` may be called from any thread, the rest by those that start and end the node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from farcall.channel.host_memory import ReceivePool
from farcall.channel.shared_memory import SegmentPool
from farcall.errors import RpcError
from farcall.options import RpcBackendOptions
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.executor import Executor
from farcall.runtime.devices.node import NodeDevices
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.listener import PeerListener
from farcall.runtime.peers.shared_memory import retire_from
from farcall.runtime.rendezvous.addresses import advertised_address, choose_host, listening_addresses

__all__ = ["Resources"]

logger: logging.Logger = logging.getLogger("farcall")

RECEIVE_POOL_BYTES = 1 << 30
TRIM_EVERY_S = 10.0


class Resources:
    """One node's."""

    door: PeerListener
    """From `open_door` on."""

    def __init__(
        self,
        name: str,
        options: RpcBackendOptions,
        before_idle: Callable[[], None],
        on_thread_start: Callable[[], None],
    ) -> None:
        """``before_idle`` is called by a worker that has nothing to do, ``on_thread_start`` by each new worker."""
        self._options = options
        self.loop: Loop = Loop(name, options.busy_wait_s)
        self.pool: SegmentPool | None = (
            SegmentPool(options.shared_memory_limit_bytes) if options.shared_memory else None
        )
        self.memory: ReceivePool = ReceivePool(RECEIVE_POOL_BYTES)
        self.devices: NodeDevices | None = None
        """From the first use of a device on, see `Node.use_devices`."""
        self.executor: Executor = Executor(
            name,
            options.num_worker_threads,
            self.loop.timer,
            self.loop.on_thread,
            before_idle=before_idle,
            on_thread_start=on_thread_start,
        )
        self.admission: Admission = Admission(options.max_queued_calls, lambda: self.executor.waiting, self.loop.timer)
        self.loop.timer(self._trim).at(monotonic() + TRIM_EVERY_S)

    def open_door(self, meeting_host: str | None) -> list[str]:
        """Listen where members can reach us; returns the addresses to tell them. ``meeting_host``: where they meet."""
        host = choose_host(self._options.advertise, meeting_host).host
        self.door = PeerListener(listening_addresses(self._options.allowed_transports, host), self.loop)
        return [advertised_address(address, host) for address in self.door.addresses]

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker write what the I/O thread may not, because it can mean waiting."""
        self.executor.submit(_Write(write))

    def _trim(self, now: float) -> float:
        """On the I/O thread: give back memory that was not used for long."""
        self.memory.trim(now)
        if self.devices is not None:
            self.devices.trim(now)
        if self.pool is not None:
            for segment_id, holders in self.pool.trim(now):
                retire_from(holders, segment_id)
        return now + TRIM_EVERY_S

    def close(self) -> None:
        """Give back what is held, when the I/O thread and the workers have stopped and the links are closed."""
        if hasattr(self, "door"):
            self.door.close()
        if self.pool is not None:
            self.pool.close()
        if self.devices is not None:
            self.devices.close()
        self.memory.close()


class _Write:
    """A message that the I/O thread may not write itself, because that can mean waiting; a task."""

    quick = False

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write

    def run(self, more: bool) -> None:
        try:
            self._write()
        except RpcError as error:
            logger.info("a message was not sent: %s", error)

    def drop(self) -> None:
        pass  # nobody waits for a message to a peer that this node has left
