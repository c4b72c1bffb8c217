"""The start of a group of fixed size: who dials whom, who is let in, and who is still missing when time is up.

Makes one connection for each pair of neighbours (`protocol/membership/neighbours.py`; in a small group, every pair),
and, where rank 0 has served the store, for now one to rank 0. Each member dials those of lower rank, several at a time;
members of higher rank dial it. If it dialled one after the other, delays would add up: on a loaded machine, each of 200
members met so many slow ones that it was too late itself. Runs on threads of its own; the I/O thread lets in the
members that dial us.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from farcall.errors import InitError, MissingPeers
from farcall.options import RpcBackendOptions
from farcall.protocol.backoff import Backoff
from farcall.protocol.connector import FIRST_PAUSE_S, LONGEST_PAUSE_S, Dial, Goal, Step
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Connect, Hello, Listen, RefusalReason, refuse
from farcall.protocol.member import Member
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.dialler import Dialler, Target
from farcall.runtime.link.listener import PeerListener
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.agreement import Membership
from farcall.transport.interface import Transport
from farcall.transport.tls import tls_for

DIALS_AT_ONCE = 8
LATE_S = 3.0
"""How long after the deadline members are still dialled whose turn had not come: the error should say what is wrong."""


class Mesh:
    """The first connections of one starting member to its neighbours. Mutable: the diallers under way."""

    def __init__(self, membership: Membership, options: RpcBackendOptions, peers: PeerTable) -> None:
        self._membership = membership
        self._allowed = options.allowed_transports
        self._tls = tls_for(options)
        self._peers = peers
        self._hello = Hello(membership.me, membership.cluster_id)
        self._diallers: set[Dialler] = set()
        self._stopped = False
        self._lock = threading.Lock()  # the diallers' threads enter members one at a time
        self._changed = Gate()  # opened whenever a member was connected

    def connect(self, listener: PeerListener, deadline: float) -> None:
        """Return when all neighbours are connected; raise, naming the missing, at ``deadline``."""
        membership, connected = self._membership, self._peers.remotes
        near = set(self._peers.watch.neighbours())
        if membership.rank_0_serves:
            # A member connected to rank 0 knows that the store's port is free again: a process group may use it next.
            # Rank 0 waits for all members: it must not dial those that are about to dial it.
            near.update(member.incarnation for member in membership.members[: None if membership.rank == 0 else 1])
            near.discard(membership.me.incarnation)
        near_or_me = near | {membership.me.incarnation}
        self._peers.expect(member for member in membership.members if member.incarnation not in near_or_me)
        listener.open(
            self._hello.wanting(Listen()),
            membership.secret,
            why_not=self._why_not,
            on_member=lambda transport, established: self._on_member(transport, established, dialled=False),
            returning=self._peers.connector,
            tls=self._tls,
        )
        # The nearest rank first: otherwise all members would dial rank 0 at once, and then rank 1.
        expected = [member for member in membership.members if member.incarnation in near]
        lower = [member for member in reversed(expected) if member.rank < membership.rank]
        failures = self._dial_all(lower, deadline)
        everyone = len(membership.members) - 1
        while not failures and len(connected) < everyone and (remaining := deadline - monotonic()) > 0:
            self._changed.wait(remaining)
        missing = [member for member in expected if member.rank not in connected]
        if missing:
            raise self._missing(missing, failures, listener)
        self._peers.connector.starting = False
        # From now on this node admits newcomers, in the place of members that died.
        listener.become(self._hello.wanting(Listen(admits=True, size=len(membership.members))))

    def _on_member(self, transport: Transport, established: Established, dialled: bool) -> None:
        self._peers.connected(transport, established, dialled)
        self._changed.open()

    def _dial_all(self, members: Sequence[Member], deadline: float) -> dict[int, str]:
        """Connect to ``members``; returns why not, by rank. Raises where trying again cannot help."""
        if len(members) < 2:
            return {member.rank: why for member in members if (why := self._dial(member, deadline))}
        pool = ThreadPoolExecutor(min(DIALS_AT_ONCE, len(members)), f"farcall-start-{self._membership.me.name}")
        try:
            whys = list(pool.map(lambda member: self._dial(member, deadline), members))
        except BaseException:
            self._stopped = True
            for dialler in list(self._diallers):
                dialler.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return {member.rank: why for member, why in zip(members, whys, strict=True) if why}

    def _dial(self, member: Member, deadline: float) -> str:
        """Connect to ``member``; returns why that failed, or ""."""
        membership = self._membership
        if monotonic() >= deadline + LATE_S:
            return "the time was over before its turn came"
        target = Target.of(member, self._allowed, membership.me.host_token)
        if not target.ways:
            raise InitError(
                f"{membership.me.name} may use {' and '.join(self._allowed)} only, which does not reach {member.name} "
                f"(rank {member.rank}): give both the same transports (option `transports`, FARCALL_TRANSPORTS)"
            )
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        dial = Dial(Goal.START, until=deadline, now=monotonic(), backoff=backoff)
        me = self._hello.wanting(Connect(is_first=True))
        dialler = Dialler(dial, target, me, membership.secret, tls=self._tls)
        self._diallers.add(dialler)
        if self._stopped:
            return "the start was given up"
        ended, found = dialler.run()
        self._diallers.discard(dialler)
        if found.error is not None and ended.step is Step.GIVEN_UP:
            raise found.error  # else the time was over between two attempts: the error at the end names who is missing
        if found.transport is None or found.established is None:
            return ended.why
        with self._lock:
            self._on_member(found.transport, found.established, dialled=True)
        return ""

    def _why_not(self, hello: Hello) -> str | None:
        """Why a proven member, or a newcomer, is not let in; None: it is. Or raises ``Refused``."""
        peer = hello.member
        for member in self._membership.members:
            if member.rank == peer.rank and member.name == peer.name:
                if member.incarnation != peer.incarnation:
                    break
                before = self._peers.remotes.get(peer.rank)
                if before is None or before.broken or self._peers.is_over(peer.incarnation):
                    return None  # in the last two cases, let in to be told that it is out
                # A member whose connection broke before it had our proof knows of no session, and comes as if for the
                # first time: while we start or, if it is slow, later. No other member may: it would get frames twice.
                is_first = isinstance(hello.purpose, Connect) and hello.purpose.is_first
                if is_first and not before.link.up and not before.link.has_heard:
                    return None
                if is_first and self._peers.connector.dialled(before):
                    raise refuse(RefusalReason.CROSSED, f"{peer.name} has let us in")  # both dialled at once
                return f"{peer.name} is connected already"
        if isinstance(hello.purpose, Connect) and hello.purpose.is_first and not peer.admission:
            return f"{peer.name} (rank {peer.rank}) is another process than the one that joined"
        return self._peers.why_closed(peer.incarnation)

    def _missing(self, members: Sequence[Member], failures: Mapping[int, str], listener: PeerListener) -> MissingPeers:
        whys = {member.name: failures.get(member.rank) or listener.refusals.get(member.name) for member in members}
        named = [
            f"{member.name} (rank {member.rank})" + (f": {why}" if (why := whys[member.name]) else "")
            for member in members
        ]
        advice = (
            ""
            if all(whys.values())
            else "; check that these workers run, and that the addresses they advertise can be reached from here "
            "(option `advertise`, FARCALL_ADVERTISE)"
            + "".join(f"; connections from {host} were refused: {why}" for host, why in listener.refused_hosts.items())
        )
        me = self._membership.me.name
        return MissingPeers(f"{me} could not be connected to {', '.join(named)}{advice}", list(whys))
