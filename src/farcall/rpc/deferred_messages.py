"""Deferred messages: they carry a reference whose owner is not yet a known member of this node.

Such an owner has only just joined; another member will announce it. Owns which messages wait, for how long, and in
which order they are delivered. Calls of one serial object keep the order in which their caller sent them, so a call
waits behind an earlier one, even while the earlier one is being redelivered. No lock, no clock: `references.py` has
those.

    a message        becomes
    new              waiting, if an owner in it is unknown, or another one from its sender to its object is not read yet
    waiting          ready, when all owners are known or its time is up, and none is before it
    ready            gone, when its reader says so
    waiting, a call  the same, but refused when it is read: its caller gave up, or is gone
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from farcall.ids import RefId
from farcall.protocol.frames import REQUEST, Frame
from farcall.protocol.notes import KEEP, REFUSED, decode_notes
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import Peer

UNKNOWN_OWNER_S = 5.0
"""How long a message waits for the announcement of a member that owns a reference in it."""


class DeferredMessage(msgspec.Struct, eq=False):
    """A message, and until when it waits for unknown owners."""

    peer: Peer
    frame: Frame
    deadline: float

    @property
    def queue(self) -> tuple[Peer, RefId | None]:
        """The message's sender, and the serial object that the message calls, if it does."""
        return self.peer, self.frame.serial


class DeferredMessages:
    """The deferred messages of one node.

    Mutable: ``_waiting``, and ``_ready``: messages that are being redelivered now.
    """

    def __init__(self) -> None:
        self._waiting: list[DeferredMessage] = []
        self._ready: list[DeferredMessage] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, peer: Peer, frame: Frame, now: float) -> float:
        """Defer ``frame``; return its deadline."""
        deadline = now + UNKNOWN_OWNER_S
        self._waiting.append(DeferredMessage(peer, frame, deadline))
        return deadline

    def cancel(self, peer: Peer, call_id: int | None) -> None:
        """The caller of a deferred call no longer waits. None: no call of ``peer``, which is gone, is wanted."""
        for message in self._waiting:
            frame = message.frame
            is_meant = message.peer is peer and (call_id is None or frame.call_id == call_id)
            # Not a creating call: other members may hold the reference and wait for the value.
            if is_meant and frame.kind == REQUEST and not frame.flags & KEEP:
                frame.flags = REFUSED

    def is_behind(self, peer: Peer, frame: Frame) -> bool:
        """Must ``frame``, a call of a serial object, wait for an earlier one? Not while it is redelivered itself."""
        if any(message.frame is frame for message in self._ready):
            return False
        queue = (peer, frame.serial)
        return any(message.queue == queue for message in (*self._ready, *self._waiting))

    def take_ready(self, known: Set[int], now: float) -> tuple[list[DeferredMessage], set[int]]:
        """Return the messages to redeliver now, in order, and the owners in them that nobody announced in time."""
        found: list[DeferredMessage] = []
        unheard: set[int] = set()
        blocked = {message.queue for message in self._ready}
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            unknown = {fork.owner for fork in decode_notes(message.frame.notes).forks} - known
            is_blocked = message.frame.serial is not None and message.queue in blocked
            if is_blocked or (unknown and now < message.deadline):
                self._waiting.append(message)
                blocked.add(message.queue)
            else:
                found.append(message)
                unheard |= unknown
        self._ready += found
        return found, unheard

    def read(self, message: DeferredMessage) -> None:
        """A ready message has been redelivered: the messages behind it may follow."""
        self._ready.remove(message)

    def next_deadline(self, now: float) -> float:
        """When to look again. A message past its deadline waits only for earlier ones, which are being redelivered."""
        return min((message.deadline for message in list(self._waiting) if message.deadline > now), default=NEVER)
