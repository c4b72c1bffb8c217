"""This node as the target of its own calls: no socket, but still a copy.

Values are serialized and buffers copied, so that a function called on its own node gets its own copy of the arguments,
exactly as a remote function does. The sender's thread handles each message at once.
"""

from __future__ import annotations

from collections.abc import Callable

from farcall.channel.host_memory import ReceivePool, copy_bytes
from farcall.errors import Delivery, RpcError
from farcall.ids import WorkerInfo
from farcall.protocol import messages
from farcall.protocol.frames import LARGE_BYTES, Frame
from farcall.runtime.io import sigint
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.receive import Awaited
from farcall.runtime.peers.peer import Peer


class LoopbackPeer(Peer):
    """This node, as the target of its own calls. ``ended``, set when the node ends, is the error of later calls."""

    __slots__ = ("_memory", "_on_control", "_on_message", "ended")

    def __init__(
        self,
        info: WorkerInfo,
        incarnation: int,
        number: int,
        on_message: Callable[[Peer, Frame], None],
        memory: ReceivePool,
        on_control: Callable[[Peer, messages.Message], None],
    ) -> None:
        super().__init__(info, incarnation, number)
        self._on_message = on_message
        self._memory = memory
        self._on_control = on_control
        self.ended: RpcError | None = None

    def send(self, frame: Frame, deadline: float = NEVER, more: bool = False, awaited: Awaited | None = None) -> None:
        copy = Frame(
            frame.kind,
            frame.flags,
            frame.call_id,
            frame.function,
            frame.notes,
            frame.payload,
            [self._copy(buffer) for buffer in frame.buffers],
        )
        frame.handed_over = True
        sigint.enter()  # else Ctrl-C could leave a request that counts as accepted and never runs
        try:
            self._on_message(self, copy)
        finally:
            sigint.leave()

    def _copy(self, buffer: memoryview) -> memoryview:
        if buffer.nbytes < LARGE_BYTES:
            return memoryview(bytearray(buffer))
        copy = self._memory.take(buffer.nbytes)
        copy_bytes(copy, buffer)
        return copy

    def flush(self) -> None:
        pass

    def cancel(self, call_id: int) -> None:
        self.control(messages.CallCancelled(call_id))

    def control(self, message: messages.Message, more: bool = False) -> None:
        self._on_control(self, message)

    def tell_full(self, queued: int, limit: int) -> None:
        self.on_queue_full(messages.QueueFull(queued, limit))

    def tell_room(self) -> None:
        self.on_queue_has_room()

    def help_until(self, awaited: Awaited, deadline: float) -> None:
        pass

    @property
    def broken(self) -> bool:
        return self.ended is not None

    def lost(self, delivery: Delivery) -> RpcError:
        assert self.ended is not None
        return self.ended
