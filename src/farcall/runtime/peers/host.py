"""What the table of peers needs of its node: memory, the I/O thread, and somebody to tell what becomes of members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from farcall.channel.host_memory import ReceivePool
from farcall.channel.shared_memory import SegmentPool
from farcall.ids import WorkerInfo
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.peers.peer import RemotePeer
from farcall.transport.interface import Transport


class Resources(Protocol):
    """The memory and the I/O thread of a node."""

    loop: Loop
    pool: SegmentPool | None
    memory: ReceivePool


class Host(Protocol):
    """The node that the peers are of."""

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """What a link uses instead of a transport."""

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker write what the I/O thread may not, because it can mean waiting."""

    def on_release(self, urgent: bool) -> None:
        """Memory of a peer is not needed here any more."""

    def on_expelled(self, why: str) -> None:
        """The others hold this node for dead."""


class Watcher(Protocol):
    """Told of what becomes of members, on the I/O thread; `fail_unsent` from any."""

    def on_entered(self, peer: RemotePeer) -> None:
        """A member joined; nothing of it has been read yet."""

    def on_change(self, kind: str, member: Member, why: str) -> None:
        """A member joined, left, died, is unresponsive, or recovered."""

    def on_interrupted(self, info: WorkerInfo, why: str) -> None:
        """The connection to a member broke, and another one is being made."""

    def on_reconnected(self, info: WorkerInfo) -> None:
        """A member is connected again."""

    def on_gone(self, peer: RemotePeer, reason: str) -> None:
        """Once: a member's link is dead."""

    def fail_unsent(self, call_id: int, why: str) -> None:
        """A request did not arrive."""
