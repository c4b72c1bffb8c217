"""Members that come and go: who is told of it, and what becomes of the calls to those who are gone.

Told by the node's acquaintances, on the I/O thread; only `fail_unsent` may be called from any. Decides nothing about
who is a member (`failure_detector.py` does), and keeps no peer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from farcall.errors import Delivery, NetworkError, PeerDead
from farcall.ids import WorkerInfo
from farcall.protocol.member import Member, incarnation_text
from farcall.runtime.calls.admission import Admission
from farcall.runtime.calls.pending import CallTable, PendingCall
from farcall.runtime.io.loop import Loop
from farcall.runtime.membership.events import MemberEvent, MemberEvents
from farcall.runtime.membership.shutdown import Leaving, Withdrawing
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.observing.counters import LOST
from farcall.runtime.observing.event_log import INTERRUPTED, RECONNECTED, EventLog
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.rendezvous.dynamic import DynamicRendezvous

__all__ = ["Turnover"]

logger: logging.Logger = logging.getLogger("farcall")


class Turnover:
    """Of one node's members."""

    def __init__(
        self,
        name: str,
        life: Lifecycle,
        loop: Loop,
        admission: Admission,
        calls: CallTable,
        leaving: Leaving | Withdrawing,
        changes: MemberEvents,
        chronicle: EventLog,
        entry: DynamicRendezvous | None,
        joined_hooks: Sequence[Callable[[Peer], None]],
        gone_hooks: Sequence[Callable[[Peer], None]],
    ) -> None:
        """``entry``: in a group without a fixed size. The hooks may become more later."""
        self._name = name
        self._lifecycle = life
        self._loop = loop
        self._admission = admission
        self._calls = calls
        self._leaving = leaving
        self._changes = changes
        self._chronicle = chronicle
        self._entry = entry
        self._joined_hooks = joined_hooks
        self._gone_hooks = gone_hooks
        self.peers_lost: int = 0
        """Members whose link has died although they did not say that they leave."""

    def on_entered(self, peer: RemotePeer) -> None:
        """A member joined; nothing of it has been read yet."""
        for hook in self._joined_hooks:
            hook(peer)

    def on_change(self, kind: str, member: Member, why: str) -> None:
        """A member joined, left, died, is suspected, or recovered."""
        level = logging.WARNING if kind in ("suspected", "dead") else logging.INFO
        logger.log(level, "%s: %s (rank %d) %s%s", self._name, member.name, member.rank, kind, f": {why}" * bool(why))
        self._chronicle.note(kind, member.name, text=why)
        if self._entry is not None and kind in ("joined", "left", "dead"):
            self._entry.on_change()
        self._changes.tell(
            MemberEvent(kind, WorkerInfo(member.name, member.rank), incarnation_text(member.incarnation), why)
        )

    def on_interrupted(self, info: WorkerInfo, why: str) -> None:
        """The connection to a member broke."""
        self._chronicle.note(INTERRUPTED, info.name, text=why)

    def on_reconnected(self, info: WorkerInfo) -> None:
        """A member is connected again."""
        self._chronicle.note(RECONNECTED, info.name)

    def on_gone(self, peer: RemotePeer, reason: str) -> None:
        """Once: a member's link is dead. Whoever waits for it learns it now."""
        peer.close()
        self._admission.forget(peer)
        if peer.leaving:
            logger.info("%s: %s has left", self._name, peer.info.name)
        elif not self._lifecycle.is_over():
            self.peers_lost += 1
            logger.warning("%s: lost %s: %s", self._name, peer.info.name, reason)
        how = "has left" if peer.leaving else f"is gone: {reason}"

        def lost(call: PendingCall) -> PeerDead:
            sent = call.call_id not in peer.link.never_sent
            what = "whether the call ran there is unknown" if sent else "the call was not sent"
            delivery = Delivery.UNKNOWN if sent else Delivery.NOT_SENT
            return PeerDead(f"{peer.info.name} {how}; {what}", delivery, peer.info, incarnation_text(peer.incarnation))

        self._calls.fail_all(lost, peer)
        for hook in self._gone_hooks:
            hook(peer)
        self._leaving.on_peer_gone(peer.info.id)

    def fail_unsent(self, call_id: int, why: str) -> None:
        """A request was not sent after all: have its caller told, from any thread."""

        def fail() -> None:
            call = self._calls.claim(call_id)
            if call is not None:
                call.counters[LOST] += 1
                call.on_failure(NetworkError(why, Delivery.NOT_SENT))

        self._loop.call_soon(fail)
