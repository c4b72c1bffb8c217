"""The events and effects of the membership machine, and its options.

Plain values; no behaviour but the check of the options. Times are seconds on the local monotonic clock: no
time ever travels to another member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import JoinRefusal, Message
from farcall.protocol.membership.neighbours import FULL_MESH

_T = TypeVar("_T")
SELDOM = 5
"""In a large group a member probes once in this many probe intervals."""


class Randomness(Protocol):
    """The methods of ``random.Random`` in use; passed in, so that a seed reproduces a run."""

    def random(self) -> float: ...

    def sample(self, population: Sequence[_T], k: int) -> list[_T]: ...

    def shuffle(self, x: list[_T]) -> None: ...


class MembershipOptions(msgspec.Struct, frozen=True):
    """The balance between noticing a death quickly and forgiving a stall.

    Args:
        probe_interval_s: how often a member probes another that has been quiet; five times this in a large group.
        probe_timeout_s: how long one round of a probe waits; five times this in a large group. The first round is a
            ping, the second a ping and questions to other members.
        suspicion_s: how long an unresponsive member has before it is declared dead, if its host does not answer
            either. A member that answers within this time is never declared dead.
        indirect_probes: how many other members a prober asks whether they can reach the silent one.
        remember_s: how long to tell others of members that died or left, and to try the dead again in case it was
            only a partition.
        unresponsive_s: how long a member may be unresponsive, though its host answers, before it is declared dead;
            None: for ever.
        full_mesh: up to this many members, each keeps in touch with all others (`neighbours.py`).
        accusers: how many others have to say that a member has ended, where this one has not found so itself.
        name_kept_s: how long nobody gets the name or rank of a member that died.
    """

    probe_interval_s: float = 1.0
    probe_timeout_s: float = 0.5
    suspicion_s: float = 10.0
    indirect_probes: int = 3
    remember_s: float = 3600.0
    unresponsive_s: float | None = None
    full_mesh: int = FULL_MESH
    accusers: int = 1
    name_kept_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "probe_timeout_s", "suspicion_s", "remember_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number of seconds, more than 0, not {value!r}")
        if self.indirect_probes < 1:
            raise ValueError(f"indirect_probes must be at least 1, not {self.indirect_probes}")

    @property
    def is_guarded(self) -> bool:
        """May members be hostile to each other? Then one's word about another is not enough (`accusations.py`)."""
        return self.accusers > 1

    @property
    def gossip_interval_s(self) -> float:
        """How often a member passes news on, while it has any."""
        return self.probe_interval_s / 5

    @property
    def sync_interval_s(self) -> float:
        """How often a member compares its whole table with a neighbour's."""
        return self.probe_interval_s * 30

    @property
    def reconnect_interval_s(self) -> float:
        """How often a member of a small group tries to reach one of the dead."""
        return self.probe_interval_s * 10

    def retry_dead_s(self, size: int) -> float:
        """How often a member of a group of ``size`` tries to reach one of the dead.

        All of a large group try as often together as those of a small one: one that meets the other side of a
        partition suffices, since it tells its neighbours.
        """
        return self.reconnect_interval_s * max(1.0, size / self.full_mesh)

    def turn_s(self, size: int) -> float:
        """How often a member of a group of ``size`` probes another.

        Standing links show the end of a process at once. Probes only find lost hosts and unresponsive members, which
        may take a little longer where a thousand members share a machine.
        """
        return self.probe_interval_s * (1 if size <= self.full_mesh else SELDOM)

    def round_s(self, size: int) -> float:
        """How long one round of a probe waits in a group of ``size``.

        In a large group longer, as a turn is: its members may share processors, and a question about a member that is
        only slow makes three others connect to it.
        """
        return self.probe_timeout_s * (1 if size <= self.full_mesh else SELDOM)

    def death_bound_s(self, size: int) -> float:
        """The time in which all of ``size`` members learn that a host is gone, of which only its silence tells."""
        return (
            self.suspicion_s
            + 4 * self.round_s(size)
            + (math.log2(size) + 8) * self.turn_s(size)
            + self.news_bound_s(size)
        )

    def cut_off_bound_s(self, size: int) -> float:
        """The time in which a member of ``size`` that hears nobody any more holds all others for dead."""
        return 5 * (self.suspicion_s + 4 * self.round_s(size)) + (math.log2(size) + 8) * self.turn_s(size)

    def news_bound_s(self, size: int) -> float:
        """The time in which all of ``size`` members learn what one of them knows."""
        return (0.5 * math.log2(size) + 2) * self.probe_interval_s


# --- events --------------------------------------------------------------------------------------------


class LocalJoin(msgspec.Struct, frozen=True):
    """Join through ``via``, which answered at an address. Repeat with another member if ``via`` is gone.

    ``former``: the members that this node knew in its former membership.
    """

    via: int
    former: tuple[Member, ...] = ()


class LocalLeave(msgspec.Struct, frozen=True):
    """This member leaves."""


class Received(msgspec.Struct, frozen=True):
    """A membership message came from ``sender``, over a link that the handshake proved to be its own."""

    sender: int
    message: Message


class Heard(msgspec.Struct, frozen=True):
    """Bytes other than a membership message have come from ``incarnation`` since the last such event."""

    incarnation: int


class LinkLost(msgspec.Struct, frozen=True):
    """The link to ``incarnation`` has ended without a goodbye."""

    incarnation: int


class LinkRefused(msgspec.Struct, frozen=True):
    """A dial was refused: nobody listens at the addresses of ``incarnation``, or something else does.

    Not for timeouts, unreachable hosts or a full backlog: those are silence. ``is_certain``: the kernel of this host
    says so, which has the member, too. Between hosts it may only be the network that refuses. ``why``: what was seen.
    """

    incarnation: int
    is_certain: bool = False
    why: str = ""


class HostSeen(msgspec.Struct, frozen=True):
    """Whether the kernel of ``incarnation``'s host answers, though the process may be busy or stopped."""

    incarnation: int
    answers: bool


class LinkGivenUp(msgspec.Struct, frozen=True):
    """This node will never again link to ``incarnation``, alive or not: a verdict, and final."""

    incarnation: int
    why: str


# --- effects -------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to the incarnation ``to``; dial if no link exists. The message may be lost: nobody waits."""

    to: int
    message: Message


class Admitted(msgspec.Struct, frozen=True):
    """This node is a member; these are the others."""

    members: tuple[Member, ...]


class Refused(msgspec.Struct, frozen=True):
    """This node may not join; the text says why."""

    why: str
    kind: JoinRefusal


class Departed(msgspec.Struct, frozen=True):
    """This member has left, and others know it (or none could be reached)."""


class Expelled(msgspec.Struct, frozen=True):
    """The others hold this member for dead, and that is final: end everything, with this reason.

    ``by``: the member that said so, which may let this node in again as a new member; 0: unknown.
    """

    why: str
    by: int = 0


class MemberJoined(msgspec.Struct, frozen=True):
    member: Member


class MemberUnresponsive(msgspec.Struct, frozen=True):
    """The member answers nobody; that alone is no death."""

    member: Member


class MemberRecovered(msgspec.Struct, frozen=True):
    """An unresponsive member answers again."""

    member: Member


class LinkSilent(msgspec.Struct, frozen=True):
    """Another member hears from ``incarnation``, and we do not: the network between us two may be cut."""

    incarnation: int


class MemberLeft(msgspec.Struct, frozen=True):
    """The member announced that it leaves; ``why`` is empty if it left of its own will."""

    member: Member
    why: str = ""


class MemberDied(msgspec.Struct, frozen=True):
    member: Member
    why: str


Event: TypeAlias = LocalJoin | LocalLeave | Received | Heard | LinkLost | LinkRefused | HostSeen | LinkGivenUp
Effect: TypeAlias = (
    Send
    | Admitted
    | Refused
    | Departed
    | Expelled
    | MemberJoined
    | MemberUnresponsive
    | MemberRecovered
    | LinkSilent
    | MemberLeft
    | MemberDied
)
