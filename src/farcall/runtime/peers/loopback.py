"""This node as the target of its own calls: a link of the core to itself, without a socket, but still a copy.

Values are serialized and buffers copied, so that a function called on its own node gets its own copy of the arguments,
exactly as a remote function does.

Where a test disturbs its messages to itself there are two links, joined by a connection: requests come in over the one,
and answers and letters over the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farcall.core.contract import Core
from farcall.errors import Delivery, RpcError
from farcall.ids import WorkerInfo
from farcall.protocol import messages
from farcall.runtime.io.loop import Loop
from farcall.runtime.peers.peer import Peer
from farcall.transport.interface import Transport


class LoopbackPeer(Peer):
    """This node, as the target of its own calls. ``ended``, set when the node ends, is the error of later calls."""

    __slots__ = ("_connection", "_on_control", "ended")

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: int,
        number: int,
        core: Core,
        loop: Loop,
        on_control: Callable[[Peer, messages.Message], None],
        connection: Sequence[Transport] = (),
    ) -> None:
        """``connection``: both ends of the one that its messages pass through; empty: they need none."""
        super().__init__(info, incarnation, number, core, loop)
        self._on_control = on_control
        self.ended: RpcError | None = None
        self._connection = connection
        self.way = core.open_link(not connection)
        self.back = core.open_link() if connection else self.way
        for link, end in zip((self.way, self.back), connection, strict=False):
            core.admit(link)
            core.attach(link, end.connection(b"")[0])

    def close(self) -> None:
        """The node has ended."""
        for link, end in zip((self.way, self.back), self._connection, strict=False):
            self.core.end(link)
            end.close()

    def control(self, message: messages.Message, more: bool = False) -> None:
        self._on_control(self, message)

    def tell_full(self, queued: int, limit: int) -> None:
        self.on_queue_full(messages.QueueFull(queued, limit))

    def tell_room(self) -> None:
        self.on_queue_has_room()

    @property
    def broken(self) -> bool:
        return self.ended is not None

    def lost(self, delivery: Delivery) -> RpcError:
        assert self.ended is not None
        return self.ended
