"""What the table of peers needs of its node: memory, the I/O thread, and a listener for changes of members."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from farcall.channel.shared_memory import SegmentPool
from farcall.core.contract import Core
from farcall.ids import WorkerInfo
from farcall.protocol.member import Member
from farcall.runtime.io.loop import Loop
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.transport.interface import Transport


class Resources(Protocol):
    """The memory and the I/O thread of a node."""

    loop: Loop
    pool: SegmentPool | None
    core: Core


class Host(Protocol):
    """The node that owns the table of peers."""

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """The transport that a link uses in the place of ``transport``: tests interpose theirs."""

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker run ``write``, which may block and so must not run on the I/O thread."""

    def on_release(self, urgent: bool) -> None:
        """Memory of a peer is no longer used here; ``urgent``: give it back at once."""

    def on_expelled(self, why: str) -> None:
        """The other members have declared this node dead."""


class Watcher(Protocol):
    """The listener for changes of members. Called on the I/O thread; `fail_unsent` on any thread."""

    def on_entered(self, peer: RemotePeer) -> None:
        """A member joined; none of its frames has been handled yet."""

    def on_change(self, kind: str, member: Member, why: str) -> None:
        """A member joined, left, died, is unresponsive, or recovered."""

    def on_interrupted(self, info: WorkerInfo, why: str) -> None:
        """The connection to a member broke, and the node reconnects."""

    def on_reconnected(self, info: WorkerInfo) -> None:
        """A member is connected again."""

    def on_gone(self, peer: RemotePeer, reason: str) -> None:
        """A member's link is dead. Called once per member."""

    def awaited(self) -> Collection[Peer]:
        """The members that this node awaits answers from. From any thread."""

    def fail_unsent(self, call_id: int, why: str) -> None:
        """Fail a call whose request did not arrive."""
