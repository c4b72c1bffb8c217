"""The functions that the layers above have a runtime call.

Owns only the tables: the layers fill them while a node starts, or at their first use, and the runtime's parts read
them. All hooks run on the I/O thread unless their line says otherwise, so none may block or run user code. Knows none
of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from farcall.protocol.frames import Frame
from farcall.protocol.notes import Notes
from farcall.runtime.peers.peer import Peer, RemotePeer


class Hooks(msgspec.Struct):
    """The hooks of one runtime. Lists grow by ``append``, and are called from first to last."""

    peer_joined: list[Callable[[Peer], None]] = []
    """A member joined; no message of it has been read yet."""
    peer_gone: list[Callable[[Peer], None]] = []
    """A member left or died."""
    unsettled: list[Callable[[], int]] = []
    """Counts of work under way other than calls: a graceful shutdown waits until all are 0. On any thread."""
    agreed: list[Callable[[float], None]] = []
    """In a graceful shutdown all work everywhere is done, and the links still stand. On the thread that shuts down.

    Each gets the time until which it may wait: the end of the program's timeout, or `NEVER`.
    """
    ended: list[Callable[[], None]] = []
    """The node ends, in whatever way: no message can be sent any more. On the thread that ends it; must not raise."""
    letters: dict[int, Callable[[Peer, Frame], None]] = {}
    """The taker of each subject's letters, on the thread that reads the link."""
    controls: dict[type[Any], Callable[[RemotePeer, Any], None]] = {}
    """The handler of each kind of control message; see `on_control`."""
    find_recording: Callable[[Peer, Frame, Notes], None] = lambda peer, frame, notes: None
    """Gives a frame its distributed autograd context, on the thread that reads the link."""

    def on_control(self, kind: type[Any], handle: Callable[[RemotePeer, Any], None]) -> None:
        """Have ``handle`` called for each control message of this kind.

        By a worker, in order with the frames around it, for those that `protocol.messages.PLACED` names; ``handle``
        must have a lock of its own then. By the I/O thread for all others.
        """
        self.controls[kind] = handle

    def on_first(self, kinds: Iterable[type[Any]], load: Callable[[], object]) -> None:
        """Have ``load`` called before the first message of these kinds is handled; it must add the handler of each.

        For layers that most programs never use. Several threads may call ``load`` at the same time.
        """

        def handle(peer: RemotePeer, message: Any) -> None:
            load()
            self.controls[type(message)](peer, message)

        for kind in kinds:
            self.on_control(kind, handle)
