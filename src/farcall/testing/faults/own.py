"""Faults in what a node sends to itself, where there is no connection to disturb.

Such messages are handed over as they are, so what applies to connections does not apply here. One that is held is
delivered later by a thread that lives as long as something is held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from farcall.errors import Delivery, NetworkError, RpcError
from farcall.protocol.frames import REQUEST, Frame
from farcall.runtime.peers.peer import Peer
from farcall.testing.faults.delay_line import Lane
from farcall.testing.faults.injection import Faults
from farcall.testing.faults.packets import OwnMessage
from farcall.testing.faults.rules import OF_CONNECTIONS, Direction, Fail
from farcall.transport.interface import WAIT_SLICE_S

__all__ = ["OwnDelivery"]


class OwnDelivery:
    """Delivers a node's messages to itself."""

    def __init__(self, faults: Faults, direction: Direction, deliver: Callable[[Peer, Frame], None]) -> None:
        self._faults = faults
        self._direction = direction
        self._deliver = deliver
        self._lane: Lane[OwnMessage] = Lane(lambda message: None)
        self._changed = threading.Condition()
        self._holding = False

    def __call__(self, peer: Peer, message: Frame) -> None:
        own = OwnMessage(message)
        fault, drawn = self._faults.judge(self._direction, own)
        if isinstance(fault, Fail) and own.kind == REQUEST:
            raise NetworkError(f"sending to {self._direction.receiver} failed: injected", Delivery.NOT_SENT)
        with self._changed:
            now = monotonic()
            self._lane.add(own, None if isinstance(fault, OF_CONNECTIONS) else fault, drawn, now)
            leaving = self._lane.take(now)
            if len(self._lane) and not self._holding:
                self._holding = True
                name = f"farcall-faults-{self._direction.sender}"
                threading.Thread(target=self._deliver_held, args=(peer,), name=name, daemon=True).start()
            self._changed.notify_all()
        for own in leaving:
            self._deliver(peer, own.message)

    def _deliver_held(self, peer: Peer) -> None:
        while True:
            with self._changed:
                now = monotonic()
                leaving = self._lane.take(now)
                if not leaving:
                    if not len(self._lane) or peer.broken:
                        self._holding = False
                        return
                    # The end of the node is told to nobody: look for it now and then.
                    self._changed.wait(min(WAIT_SLICE_S, max(0.0, self._lane.next_due - now)))
            for own in leaving:
                try:
                    self._deliver(peer, own.message)
                except RpcError:
                    pass  # the node has ended meanwhile
