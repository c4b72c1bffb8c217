"""What goes into the membership machine and what comes out of it, and what may be chosen about it.

Plain values; no behaviour but the check of the options. Times are seconds on the local monotonic clock: no
time ever travels to another member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import Message

_T = TypeVar("_T")


class Randomness(Protocol):
    """What of ``random.Random`` is used; passed in, so that a seed repeats a run."""

    def random(self) -> float: ...

    def sample(self, population: Sequence[_T], k: int) -> list[_T]: ...

    def shuffle(self, x: list[_T]) -> None: ...


class MembershipOptions(msgspec.Struct, frozen=True):
    """How quickly a death is noticed, against how long a stall is forgiven.

    Args:
        probe_interval_s: every so often a member probes one other that has been quiet.
        probe_timeout_s: how long one round of a probe waits. The first round is a ping, the second a ping and
            questions to others.
        suspicion_s: how long a member that did not answer may go on not answering before it is declared dead, if its
            host does not answer either. Nobody who answers within this time is.
        indirect_probes: how many others are asked whether they can reach the one that does not answer.
        remember_s: how long the dead and those who left are told to others, and the dead tried again in case
            it was only a partition.
        unresponsive_s: how long a member may be unresponsive, though its host answers, before it is declared dead;
            None: for ever.
    """

    probe_interval_s: float = 1.0
    probe_timeout_s: float = 0.5
    suspicion_s: float = 10.0
    indirect_probes: int = 3
    remember_s: float = 3600.0
    unresponsive_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "probe_timeout_s", "suspicion_s", "remember_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a finite number of seconds, more than 0, not {value!r}")
        if self.indirect_probes < 1:
            raise ValueError(f"indirect_probes must be at least 1, not {self.indirect_probes}")

    @property
    def gossip_interval_s(self) -> float:
        """How often news is passed on, while there is any."""
        return self.probe_interval_s / 5

    @property
    def sync_interval_s(self) -> float:
        """How often a whole table is compared with somebody's."""
        return self.probe_interval_s * 30

    @property
    def reconnect_interval_s(self) -> float:
        """How often one of the dead is tried."""
        return self.probe_interval_s * 10

    def death_bound_s(self, size: int) -> float:
        """Within which time all of ``size`` members know that a host is gone: nothing but its silence tells."""
        return (
            self.suspicion_s
            + 4 * self.probe_timeout_s
            + (math.log2(size) + 8) * self.probe_interval_s
            + self.news_bound_s(size)
        )

    def news_bound_s(self, size: int) -> float:
        """Within which time all of ``size`` members know what one of them knows."""
        return (0.5 * math.log2(size) + 2) * self.probe_interval_s


# --- events --------------------------------------------------------------------------------------------


class LocalJoin(msgspec.Struct, frozen=True):
    """Join through ``via``, which answered at an address. Again, with another, where that one is gone."""

    via: int


class LocalLeave(msgspec.Struct, frozen=True):
    """This member leaves."""


class Received(msgspec.Struct, frozen=True):
    """A membership message came from ``sender``, over a link that proved to be its."""

    sender: int
    message: Message


class Heard(msgspec.Struct, frozen=True):
    """Something that is no membership message has come from ``incarnation`` since the last such event."""

    incarnation: int


class LinkLost(msgspec.Struct, frozen=True):
    """The link to ``incarnation`` has ended without its goodbye."""

    incarnation: int


class LinkRefused(msgspec.Struct, frozen=True):
    """Dialling ``incarnation`` showed that it is not there: no one listens at its addresses, or another process does.

    Not for timeouts, unreachable hosts or a full backlog: those are silence.
    """

    incarnation: int


class HostSeen(msgspec.Struct, frozen=True):
    """Whether the host of ``incarnation`` answers, its kernel: the process may be busy or stopped."""

    incarnation: int
    answers: bool


class LinkGivenUp(msgspec.Struct, frozen=True):
    """There will be no link to ``incarnation`` any more, whether it lives or not: that is a verdict, and final."""

    incarnation: int
    why: str


# --- effects -------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to the incarnation ``to``, dialling if there is no link. It may be lost: nobody waits for it."""

    to: int
    message: Message


class Admitted(msgspec.Struct, frozen=True):
    """This node is a member; these are the others."""

    members: tuple[Member, ...]


class Refused(msgspec.Struct, frozen=True):
    """This node may not join; the text says why."""

    why: str


class Departed(msgspec.Struct, frozen=True):
    """This member has left, and others know it (or nobody could be told)."""


class Expelled(msgspec.Struct, frozen=True):
    """The others hold this member for dead, and that is final: end everything, with this reason.

    ``by``: one of the others, who may let this node in again as a new member; 0: it is not known who.
    """

    why: str
    by: int = 0


class MemberJoined(msgspec.Struct, frozen=True):
    member: Member


class MemberUnresponsive(msgspec.Struct, frozen=True):
    """It answers nobody; that alone is no death."""

    member: Member


class MemberRecovered(msgspec.Struct, frozen=True):
    """It was unresponsive, and lives."""

    member: Member


class LinkSilent(msgspec.Struct, frozen=True):
    """Another member hears from ``incarnation``, and we do not: perhaps nothing comes through between us two."""

    incarnation: int


class MemberLeft(msgspec.Struct, frozen=True):
    member: Member


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
