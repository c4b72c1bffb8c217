"""Connecting to everybody at the start: who dials whom, over what, and who is still missing when time is up.

One connection per pair: each member dials those of lower rank and is dialled by those of higher rank. Runs on the
thread that starts the node; ``admit`` also on the I/O thread, for those who dial us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from farcall.channel.segments import host_token
from farcall.errors import InitError, MissingPeers
from farcall.options import RpcBackendOptions
from farcall.protocol.handshake import Established
from farcall.protocol.hello import Connect, Hello
from farcall.protocol.member import Member
from farcall.runtime.io.sigint import Gate
from farcall.runtime.link.listener import PeerListener, Returning, dial_member
from farcall.runtime.peers.peer import RemotePeer
from farcall.runtime.rendezvous.rendezvous import Membership
from farcall.transport.interface import Transport, TransportError


def usable_ways(addresses: Sequence[str], their_host_token: str, allowed: Sequence[str]) -> list[str]:
    """Those of somebody's ``addresses`` that may work from here over ``allowed`` transports, the best first."""
    same_host = bool(their_host_token) and their_host_token == host_token()
    ways = [address for address in addresses if address.partition(":")[0] != "unix" or same_host]
    ways.sort(key=lambda address: not address.startswith("unix:"))
    return [way for way in ways if way.partition(":")[0] in (*allowed, "memory")]


class Mesh:
    """The connections of one starting member to all others."""

    def __init__(
        self,
        membership: Membership,
        options: RpcBackendOptions,
        connected: Mapping[int, RemotePeer],
        changed: Gate,
        is_over: Callable[[int], bool] = lambda incarnation: False,
    ) -> None:
        """``connected`` grows, and ``changed`` opens, whenever a member was connected, on whatever thread.

        ``is_over``: has that incarnation been declared dead?
        """
        self._membership = membership
        self._options = options
        self._connected = connected
        self._changed = changed
        self._name = membership.me.name
        self._hello = Hello(membership.me, membership.cluster_id)
        self._is_over = is_over

    def connect(
        self,
        door: PeerListener,
        on_member: Callable[[Transport, Established, bool], None],
        returning: Returning,
        deadline: float,
    ) -> None:
        """Return when all members are connected; raise, naming the missing, at ``deadline``.

        ``on_member`` is told whether we dialled; ``returning`` is asked about those who come back later.
        """
        membership = self._membership
        door.open(
            self._hello,
            membership.secret,
            self._why_not_admitted,
            lambda transport, established: on_member(transport, established, False),
            returning,
        )
        failures: dict[int, str] = {}
        me = self._hello.wanting(Connect(is_first=True))
        for member in membership.members:
            if member.rank < membership.me.rank:
                ways = self.ways_to(member)
                try:
                    transport, established = dial_member(member.name, ways, me, membership.secret, deadline)
                except TransportError as error:
                    failures[member.rank] = str(error)
                    continue
                on_member(transport, established, True)
        expected = [member for member in membership.members if member.rank != membership.me.rank]
        while not failures and len(self._connected) < len(expected) and (remaining := deadline - monotonic()) > 0:
            self._changed.wait(remaining)
        missing = [member for member in expected if member.rank not in self._connected]
        if missing:
            raise self._missing(missing, failures, door.refusals)

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
        return MissingPeers(f"{self._name} could not be connected to {', '.join(named)}{advice}", list(whys))

    def ways_to(self, member: Member) -> list[str]:
        """The addresses of ``member`` that may work from here, the best first."""
        allowed = self._options.allowed_transports
        usable = usable_ways(member.addresses, member.host_token, allowed)
        if not usable:
            raise InitError(
                f"{self._name} may use {' and '.join(allowed)} only, and {member.name} (rank {member.rank}) cannot be "
                "reached over that from here: give both the same transports (option `transports`, FARCALL_TRANSPORTS)"
            )
        return usable

    def _why_not_admitted(self, hello: Hello) -> str | None:
        peer = hello.member
        for member in self._membership.members:
            if member.rank == peer.rank and member.name == peer.name:
                if member.incarnation != peer.incarnation:
                    return f"{peer.name} is another process than the one that joined"
                before = self._connected.get(peer.rank)
                if before is not None and (before.broken or self._is_over(peer.incarnation)):
                    return None  # it may come in, to be told so
                if before is None:
                    return None
                is_first = isinstance(hello.purpose, Connect) and hello.purpose.is_first
                # One whose connection broke before it had our proof knows of no session, and comes as a stranger: while
                # we start, and, if it is slow, afterwards. Nobody else may: it would get again what it has got.
                if is_first and not before.link.up and not before.link.session.received:
                    return None
                return f"{peer.name} is connected already"
        return f"{peer.name} (rank {peer.rank}) is not a member of this cluster"
