"""The start of a group of fixed size: who dials whom, who is let in, and who is still missing when time is up.

One connection per pair: each member dials those of lower rank, several at a time, and is dialled by those of higher
rank. One after the other, the slow ones would add up: on a loaded machine each member met enough of them, among 200, to
be too late itself. Runs on threads of its own; members that dial us are let in on the I/O thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from farcall.errors import InitError, MissingPeers
from farcall.options import RpcBackendOptions
from farcall.protocol.backoff import Backoff
from farcall.protocol.connector import FIRST_PAUSE_S, LONGEST_PAUSE_S, Dial, Goal
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Connect, Hello, Listen
from farcall.protocol.member import Member
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.dialler import Dialler, Target, tls_for
from farcall.runtime.link.listener import PeerListener
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.agreement import Membership
from farcall.transport.interface import Transport

DIALS_AT_ONCE = 8
LATE_S = 3.0
"""How long, after time is up, those are tried whose turn had not come: the error should say what is wrong with them."""


class Mesh:
    """The first connections of one starting member to all others."""

    def __init__(self, membership: Membership, options: RpcBackendOptions, peers: PeerTable) -> None:
        self._membership = membership
        self._allowed = options.allowed_transports
        self._tls = tls_for(options, membership.secret)
        self._peers = peers
        self._hello = Hello(membership.me, membership.cluster_id)
        self._diallers: set[Dialler] = set()
        self._stopped = False
        self._lock = threading.Lock()  # of the diallers' threads: one at a time enters a member
        self._changed = Gate()  # opened whenever a member was connected

    def connect(self, listener: PeerListener, deadline: float) -> None:
        """Return when all members are connected; raise, naming the missing, at ``deadline``."""
        membership, connected = self._membership, self._peers.remotes
        listener.open(
            self._hello.wanting(Listen()),
            membership.secret,
            why_not=self._why_not,
            on_member=lambda transport, established: self._on_member(transport, established, dialled=False),
            returning=self._peers.connector,
            tls=self._tls,
        )
        # The nearest first: all would come to rank 0 first, otherwise, and then to rank 1.
        lower = [member for member in reversed(membership.members) if member.rank < membership.rank]
        failures = self._dial_all(lower, deadline)
        expected = [member for member in membership.members if member.rank != membership.rank]
        while not failures and len(connected) < len(expected) and (remaining := deadline - monotonic()) > 0:
            self._changed.wait(remaining)
        missing = [member for member in expected if member.rank not in connected]
        if missing:
            raise self._missing(missing, failures, listener.refusals)
        self._peers.connector.starting = False
        # From now on it lets others in, for members that died.
        listener.become(self._hello.wanting(Listen(admits=True, size=len(membership.members))))

    def _on_member(self, transport: Transport, established: Established, dialled: bool) -> None:
        self._peers.connected(transport, established, dialled)
        self._changed.open()

    def _dial_all(self, members: Sequence[Member], deadline: float) -> dict[int, str]:
        """Be connected to ``members``; why not, by rank. Raises where trying again cannot help."""
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
        """Be connected to ``member``; else why not."""
        membership = self._membership
        if monotonic() >= deadline + LATE_S:
            return "the time was over before its turn came"
        target = Target.of(member, self._allowed)
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
        if found.error is not None:
            raise found.error
        if found.transport is None or found.established is None:
            return ended.why
        with self._lock:
            self._on_member(found.transport, found.established, dialled=True)
        return ""

    def _why_not(self, hello: Hello) -> str | None:
        """Why a proven member, or one that wants to be a member, is not heard; None: it is."""
        peer = hello.member
        for member in self._membership.members:
            if member.rank == peer.rank and member.name == peer.name:
                if member.incarnation != peer.incarnation:
                    break
                before = self._peers.remotes.get(peer.rank)
                if before is None or before.broken or self._peers.is_over(peer.incarnation):
                    return None  # of the last two: it may come in, to be told so
                # One whose connection broke before it had our proof knows of no session, and comes as a stranger: while
                # we start, and, if it is slow, afterwards. Nobody else may: it would get again what it has got.
                is_first = isinstance(hello.purpose, Connect) and hello.purpose.is_first
                if is_first and not before.link.up and not before.link.session.received:
                    return None
                return f"{peer.name} is connected already"
        if isinstance(hello.purpose, Connect) and hello.purpose.is_first:
            return f"{peer.name} (rank {peer.rank}) is another process than the one that joined"
        return self._peers.why_closed(peer.incarnation)

    def _missing(
        self, members: Sequence[Member], failures: Mapping[int, str], refusals: Mapping[str, str]
    ) -> MissingPeers:
        whys = {member.name: failures.get(member.rank) or refusals.get(member.name) for member in members}
        named = [
            f"{member.name} (rank {member.rank})" + (f": {why}" if (why := whys[member.name]) else "")
            for member in members
        ]
        advice = (
            ""
            if all(whys.values())
            else "; check that these workers run, and that the addresses they advertise can be reached from here "
            "(option `advertise`, FARCALL_ADVERTISE)"
        )
        me = self._membership.me.name
        return MissingPeers(f"{me} could not be connected to {', '.join(named)}{advice}", list(whys))
