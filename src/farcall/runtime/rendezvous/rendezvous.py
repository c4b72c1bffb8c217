"""From a name, a rank and options to a member of a cluster, over torch's rendezvous and stores.

``find_meeting_place`` says who we are by number and where the store is, ``join`` who the others are. The
rules of the meeting are in ``meeting``, opening the store in ``stores``, choosing an address in
``addresses``.

Invariant: a ``join`` that raises leaves nothing behind, here or in the store, that a later one trips over.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from farcall.ids import check_worker_name
from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member, new_incarnation
from farcall.runtime.io.bounded_call import in_bounded_time
from farcall.runtime.rendezvous.static import Agreement, StaticRendezvous
from farcall.runtime.rendezvous.store import KeyStore, MeetingPlace, find_meeting_place

__all__ = ["MeetingPlace", "Membership", "find_meeting_place", "join"]


@dataclass
class Membership:
    """The agreed table, and what every member shares. Nothing here needs the store any more."""

    me: Member
    members: list[Member]
    """Everybody, oneself included, by rank."""
    cluster_id: str
    secret: bytes = field(repr=False)
    generation: int
    store: KeyStore | None = field(repr=False)

    @property
    def rank(self) -> int:
        """This member's own rank."""
        return self.me.rank

    def close(self) -> None:
        """Let the store go, and with it rank 0's server, unless a process group shares it.

        In a graceful shutdown this belongs before the members' last agreement: whoever comes out of it may
        open a store at the same port at once, and must not find the old server there for a moment more.
        """
        self.store = None


def join(
    name: str,
    rank: int,
    world_size: int | None,
    options: RpcBackendOptions,
    my_addresses: Sequence[str],
    host_token: str = "",
    incarnation: int = 0,
) -> Membership:
    """Meet the others and return the table all agree on, within ``options.start_deadline_s``.

    ``my_addresses`` are told as they are, the preferred one first.
    Raises ``BadRank``, ``DuplicateName`` (at every member), ``MissingPeers`` or another ``InitError``.
    """
    check_worker_name(name)
    place = find_meeting_place(rank, world_size, options.init_method)
    me = Member(name, place.rank, incarnation or new_incarnation(secrets.randbits(62)), tuple(my_addresses), host_token)
    meeting = StaticRendezvous(place, me, options)

    def meet(cancelled: threading.Event) -> Agreement:
        meeting.cancelled = cancelled
        return meeting.run()

    agreement = in_bounded_time(meet, options.start_deadline_s, place.name)
    return Membership(
        me=me,
        members=agreement.members,
        cluster_id=agreement.cluster_id,
        secret=agreement.secret,
        generation=agreement.generation,
        store=agreement.store,
    )
