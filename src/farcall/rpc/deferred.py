"""Messages with a reference to a value of a member that this node has not heard of yet, where members come and go.

Word of that member is on its way, or it is long gone. Meanwhile nobody reads the message: who took it would ask an
unknown owner. It is delivered when all owners in it are known, or UNKNOWN_OWNER_S later: who is unknown then is gone.

Messages are kept by the thread that reads a link, and delivered on the I/O thread. The lock is held for an instant, and
re-entrant, since a garbage collection inside may run user code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic

from farcall.protocol.frames import Frame
from farcall.protocol.notes import decode_notes
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Node
from farcall.runtime.peers.peer import Peer

__all__ = ["DeferredMessages"]

UNKNOWN_OWNER_S = 5.0
"""How long a message waits for word of a member that owns a reference in it."""


class DeferredMessages:
    """One node's."""

    def __init__(self, node: Node, is_known: Callable[[int], bool], give_up: Callable[[Sequence[int]], None]) -> None:
        """``give_up`` is told of members of whom no word has come: they count as known, and as gone, afterwards."""
        self._node = node
        self._is_known = is_known
        self._give_up = give_up
        self._lock = threading.RLock()
        self._kept: list[tuple[float, Peer, Frame]] = []
        self._timer = node.timer(self._deliver_due)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, peer: Peer, message: Frame) -> None:
        """Let nobody read ``message`` for now."""
        deadline = monotonic() + UNKNOWN_OWNER_S
        with self._lock:
            self._kept.append((deadline, peer, message))
        self._timer.at(deadline)

    def _deliver_due(self, now: float) -> float:
        self.deliver(now)
        return min((deadline for deadline, _, _ in self._kept), default=NEVER)

    def deliver(self, now: float | None = None) -> None:
        """On the I/O thread: look at what was kept again; at ``now``, whoever is unknown still is gone."""
        with self._lock:
            kept, self._kept = self._kept, []
        for deadline, peer, message in kept:
            unknown = [fork.owner for fork in decode_notes(message.notes).forks if not self._is_known(fork.owner)]
            if unknown and (now is None or now < deadline):
                with self._lock:
                    self._kept.append((deadline, peer, message))
                continue
            self._give_up(unknown)
            self._node.dispatcher.redeliver(peer, message)
