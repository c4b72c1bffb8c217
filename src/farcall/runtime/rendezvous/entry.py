"""A node's way into a group without a fixed size, and its name on the list there.

Owns the list of contacts, its upkeep and the search for a member that lets this node in (`joining.py`). Links and
members it reaches through the node's acquaintances and its watch. Used by the threads that start and end the node, but
for what says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from farcall.errors import InitError
from farcall.options import RpcBackendOptions
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Hello, Listen
from farcall.protocol.member import Member
from farcall.protocol.membership.messages import Status
from farcall.runtime.io.bounded_call import in_bounded_time
from farcall.runtime.io.loop import Loop
from farcall.runtime.link.listener import PeerListener
from farcall.runtime.link.reconnect import Reconnecting
from farcall.runtime.membership.failure_detector import FailureDetector, chosen
from farcall.runtime.peers.peer import RemotePeer
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.contacts import Contacts
from farcall.runtime.rendezvous.joining import Joining, found_group, refusal, wait_until
from farcall.runtime.rendezvous.rendezvous import Membership
from farcall.runtime.rendezvous.store import MeetingPlace
from farcall.runtime.rendezvous.upkeep import Upkeep
from farcall.transport.interface import Transport

logger: logging.Logger = logging.getLogger("farcall")

__all__ = ["Entry"]

FIRST_CONNECTIONS_S = 5.0
"""How long a newcomer waits for its connections to all others: calls wait for them in any case."""
STORE_S = 2.0


class Entry:
    """One node's; see also `joining.Candidate`, which this is."""

    def __init__(self, place: MeetingPlace, me: Member, options: RpcBackendOptions, deadline: float) -> None:
        """Find out where to ask; this node is on the list afterwards."""
        self._place = place
        self._options = options
        self._deadline = deadline
        found = found_group(place, me, options, deadline)
        self.contacts: Contacts | None = found.contacts
        """The list in the store, until this node leaves; None where there is no store."""
        self._upkeep: Upkeep | None = None
        self.membership: Membership = Membership(me, [me], found.cluster_id, found.secret, 0, found.store)

    def enter(
        self,
        door: PeerListener,
        loop: Loop,
        acquaintances: PeerTable,
        reconnecting: Reconnecting,
        watch: FailureDetector,
        set_watch: Callable[[FailureDetector], None],
    ) -> None:
        """Return when this node is a member, let in or as the first; raises ``InitError``."""
        self._loop = loop
        self._acquaintances = acquaintances
        self._watch = watch
        self._set_watch = set_watch
        membership = self.membership
        hello = Hello(membership.me, membership.cluster_id)
        door.open(
            hello,
            membership.secret,
            lambda peer: None,  # to be heard about membership; all else the watch decides
            self._on_connected,
            reconnecting,
        )
        Joining(self._place, membership.me, self._options, self.contacts, membership.secret, hello, self).run(
            self._deadline
        )
        if self.contacts is not None:
            self._upkeep = Upkeep(self.contacts, self._members, self._is_over)
        me = self._watch.me
        door.become(Hello(me, membership.cluster_id, Listen(admits=True)))
        others = [member.incarnation for member in self._watch.members() if member.incarnation != me.incarnation]
        # So that all know this node before any of them hears its name from a third one.
        bound_s = min(FIRST_CONNECTIONS_S, max(0.0, self._deadline - monotonic()))
        wait_until(lambda: all(acquaintances.knows_us(incarnation) for incarnation in others), bound_s)

    def _on_connected(self, transport: Transport, established: Established) -> None:
        """On the I/O thread: somebody has come in."""
        self._acquaintances.connected(transport, established, False)

    def ask(self, transport: Transport, established: Established, deadline: float) -> bool:
        """Ask who was proven at the other end to let us in; False: it went away. Raises where we are refused."""
        stranger: list[RemotePeer] = []
        self._loop.call_soon(lambda: stranger.append(self._acquaintances.connected(transport, established, True)))
        if not wait_until(lambda: bool(stranger), deadline - monotonic()):
            raise InitError(f"{self.membership.me.name}: the I/O thread does not answer")
        link = stranger[0].link
        if self._watch.join_through(stranger[0].incarnation, deadline - monotonic(), lambda: not link.up):
            return True
        if self._watch.why_refused is not None:
            raise refusal(self.membership.me.name, self._watch.why_refused)
        return False

    def found(self) -> None:
        """There is nobody: be the first member."""
        me = self.membership.me
        self._watch.stop()
        self._watch = FailureDetector(me, [me], chosen(self._options), self._loop, self._acquaintances)
        self._set_watch(self._watch)

    def _members(self) -> list[Member]:
        return self._watch.members()

    def _is_over(self, incarnation: int) -> bool:
        status = self._watch.status_of(incarnation)
        return status is not None and status >= Status.DEAD

    def on_change(self) -> None:
        """On the I/O thread: somebody joined or ended, so the list may be wrong."""
        if self._upkeep is not None and self._watch.is_lowest:
            self._upkeep.poke()

    def withdraw(self) -> None:
        """Take this node off the list, if the store still answers."""
        contacts = self.contacts
        self.close()
        if contacts is not None:
            try:
                in_bounded_time(lambda _: contacts.leave(self.membership.me), STORE_S, self._place.name)
            except Exception as error:
                logger.info("%s: the store does not answer any more: %s", self.membership.me.name, error)

    def close(self) -> None:
        """Let go of the list."""
        self.contacts = None
        if self._upkeep is not None:
            self._upkeep.stop(STORE_S)
            self._upkeep = None
