"""Partings: in a large group, two members give up a connection that neither uses.

Drives `Bond.parting` (`protocol/connector.py`, which has the table). Of two members, the one with the lower incarnation
checks every ``PART_AFTER_S`` whether bytes have passed since its last check, and proposes to part if not. Neighbours
stay connected, and so do pairs of which one end waits for an answer: the kernel should tell it of a death. The
`Connector` makes the connection again. Everything here runs on the I/O thread.
"""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic
from typing import Protocol

from farcall.protocol.connector import Parting
from farcall.protocol.frames import CONTROL, encode_small
from farcall.protocol.messages import Part, Parted, Stay, encode_message
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.connector import Connector
from farcall.runtime.peers.host import Watcher
from farcall.runtime.peers.peer import Peer, RemotePeer

__all__ = ["Neighbourhood", "Partings"]

PART_AFTER_S = 30.0
"""How long, and up to twice as long, an unused connection to a member that is no neighbour stays."""


class Neighbourhood(Protocol):
    """The failure detector."""

    @property
    def is_near_all(self) -> bool:
        """Is the group so small that all other members are neighbours?"""

    def neighbours(self) -> frozenset[int]:
        """The incarnations that this node stays connected to."""


class Partings:
    """The partings of one node. Mutable: the byte count of each connection that may part, at the last check."""

    def __init__(
        self, me: int, connector: Connector, watch: Neighbourhood, watcher: Watcher, *, loop: Loop, reconnect_s: float
    ) -> None:
        """``reconnect_s``: 0 means that a connection is never made again, so none is given up."""
        self._me = me
        self._connector = connector
        self._watch = watch
        self._watcher = watcher
        self._is_possible = reconnect_s > 0
        self._bytes: dict[int, tuple[int, ...]] = {}
        self._timer = loop.timer(self._look)

    def look_from_now_on(self) -> None:
        """The group has members that are no neighbours: begin to check for unused connections."""
        self._timer.at(monotonic() + PART_AFTER_S)

    def _look(self, now: float) -> float:
        """Propose to part from peers of higher incarnation with which no byte has passed since the last check."""
        before, self._bytes = self._bytes, {}
        neighbours = self._watch.neighbours()
        idle: list[RemotePeer] = []
        for incarnation, peer in self._connector.awake.copy().items():
            if incarnation > self._me and incarnation not in neighbours and peer.known:
                count = self._bytes[incarnation] = peer.link.traffic[:2]
                if before.get(incarnation) == count:
                    idle.append(peer)
        if idle:
            awaited = self._watcher.awaited()  # once for all peers: it may go through many calls
            for peer in idle:
                self._propose(peer, awaited)
        return NEVER if self._watch.is_near_all else now + PART_AFTER_S

    def _propose(self, peer: RemotePeer, awaited: Collection[Peer]) -> None:
        bond, link = self._connector.bond_of(peer), peer.link
        if bond is None or bond.parting is not Parting.NO or not self._may_part(peer, awaited):
            return
        bond.part(Parting.PROPOSED)
        if not link.send_last(_encoded(Part(link.traffic.frames))):
            bond.parting = Parting.NO

    def _may_part(self, peer: RemotePeer, awaited: Collection[Peer]) -> bool:
        can = self._is_possible and peer.link.up and peer.link.transport.resumable
        return can and peer.devices is None and peer not in awaited

    def on_part(self, peer: RemotePeer, message: Part) -> None:
        """The member proposes to part: agree, or answer ``Stay``."""
        bond, link = self._connector.bond_of(peer), peer.link
        if bond is not None and bond.parting is Parting.NO and self._may_part(peer, self._watcher.awaited()):
            bond.part(Parting.AGREED)
            parted = _encoded(Parted(link.traffic.frames))
            if link.send_last(parted, message.received):
                return
            bond.parting = Parting.NO
        if link.up:
            peer.control(Stay())

    def on_parted(self, peer: RemotePeer, message: Parted) -> None:
        """The member agrees, and writes nothing any more over this connection."""
        bond, link = self._connector.bond_of(peer), peer.link
        if bond is not None and bond.parting is Parting.PROPOSED:
            bond.part(Parting.AGREED)
            link.interrupt("both ends had nothing to say")
            return
        self.on_stay(peer)
        if link.up:
            peer.control(Stay())

    def on_stay(self, peer: RemotePeer) -> None:
        """The member does not agree, or our answer belonged to a proposal over another connection: go on."""
        bond = self._connector.bond_of(peer)
        if bond is not None and bond.parting is not Parting.NO and peer.link.up:
            bond.parting = Parting.NO
            peer.link.go_on()


def _encoded(message: Part | Parted) -> bytes:
    return encode_small(CONTROL, 0, 0, b"", b"", encode_message(message))
