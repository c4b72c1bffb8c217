"""Faults in what a node sends to itself, where there is no connection to disturb.

Such messages are handed over as they are, so what applies to connections does not apply here. One that is held is
delivered later by a timer's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from farcall.errors import Delivery, NetworkError, RpcError
from farcall.protocol.frames import REQUEST, Arrived
from farcall.runtime.peers import Peer
from farcall.testing.faults.injection import Faults
from farcall.testing.faults.lane import Lane
from farcall.testing.faults.packets import OwnMessage
from farcall.testing.faults.rules import OF_CONNECTIONS, Direction, Fail

__all__ = ["OwnDelivery"]


class OwnDelivery:
    """Delivers a node's messages to itself."""

    def __init__(self, faults: Faults, direction: Direction, deliver: Callable[[Peer, Arrived], None]) -> None:
        self._faults = faults
        self._direction = direction
        self._deliver = deliver
        self._lane: Lane[OwnMessage] = Lane(lambda message: None)
        self._lock = threading.Lock()

    def __call__(self, peer: Peer, message: Arrived) -> None:
        own = OwnMessage(message)
        fault, drawn = self._faults.judge(self._direction, own)
        if fault is None or isinstance(fault, OF_CONNECTIONS):
            self._deliver(peer, message)
            return
        if isinstance(fault, Fail) and own.kind == REQUEST:
            raise NetworkError(f"sending to {self._direction.receiver} failed: injected", Delivery.NOT_SENT)
        with self._lock:
            self._lane.add(own, fault, drawn, monotonic())
        self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        with self._lock:
            leaving = self._lane.take(monotonic())
            due = self._lane.next_due
        if due != float("inf"):
            timer = threading.Timer(max(0.0, due - monotonic()), self._pump, (peer,))
            timer.daemon = True
            timer.name = f"farcall-faults-{self._direction.sender}"
            timer.start()
        for own in leaving:
            try:
                self._deliver(peer, own.message)
            except RpcError:
                pass  # the node has ended meanwhile
