"""The messages of the membership protocol: one typed struct per control message, tags 50 to 65.

Owns their shapes and the order of claims about one incarnation (`protocol/member.py`), no behaviour. Every claim is an
``Update``, and ``precedence`` orders the claims about an incarnation:
alive(0) < unresponsive(0) < alive(1) < unresponsive(1) < ... < dead < left. Only the member itself raises its version,
so it alone can refute; nothing follows an end. A table only takes the maximum, so messages in any order, with any
duplicates, lead to the same table.

    message    from -> to               says
    Ping       anybody -> anybody       "say something"
    Ack        the one pinged -> back   "here I am"
    Ask        prober -> helper         "does ``target`` answer you? It does not answer me"
    Vouch      helper -> prober         "it does"
    Deny       helper -> prober         "nobody listens where it was"
    Gossip     anybody -> anybody       nothing but its updates
    Digest     anybody -> anybody       "this is my table, in 64 numbers"
    Entries    both ways                "in these buckets we differ: here is mine"
    Obituary   anybody -> the dead      "in my table you are dead, and this is how many share it"
    Resurfaced the overruled -> its own "this one, dead to us, lives: settle it with it"
    Join       newcomer -> sponsor      "let me in"; with an admission number: "I take the offer"
    Forward    sponsor -> arbiter       "this one wants in"
    Decision   arbiter -> sponsor -> newcomer   an offer, or why not
    JoinAnswer sponsor -> newcomer      "you are in": the table
    WhoAreYou  anybody -> a stranger    "I ignore your news until I know you"
    Introduction  newcomer -> back      "I was let in; perhaps my sponsor died before it told you"
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec

from farcall.protocol.control import ControlMessage
from farcall.protocol.member import Incarnation, Member

BUCKETS = 64
MAX_UPDATES = 32
"""Updates piggybacked on one message: 5 KiB if each carries a member of usual length, else half a KiB."""
MAX_WHY_CHARACTERS = 400

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Bucket: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS)]
_Why: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_WHY_CHARACTERS)]


class Status(IntEnum):
    """The status that a claim gives to an incarnation."""

    ALIVE = 0
    UNRESPONSIVE = 1
    DEAD = 2
    LEFT = 3


class JoinRefusal(IntEnum):
    """Why a newcomer is not let in, for programs; the text is for people."""

    OTHER = 0
    NAME_TAKEN = 1
    RANK_TAKEN = 2
    GROUP_OVER = 3
    """A group of fixed size admits nobody any more: its members leave together, or to meet anew."""


class Update(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One claim about one incarnation. Claims about the living carry the whole ``member``."""

    incarnation: Incarnation
    status: Status
    version: _Count
    member: Member | None = None
    why: _Why = ""
    host_is_silent: bool = False
    """Why it is dead, for programs; ``why`` is for people."""

    def __post_init__(self) -> None:
        if self.member is not None and self.member.incarnation != self.incarnation:
            raise ValueError("a claim about a member with the record of another one")


_DEAD = int(Status.DEAD)
_END = 1 << 62


def precedence(status: Status, version: int) -> int:
    """The place of a claim among all claims about one incarnation: the higher one is the later."""
    return _END + status if status >= _DEAD else 2 * version + status


Updates: TypeAlias = Annotated[tuple[Update, ...], msgspec.Meta(max_length=MAX_UPDATES + 2)]
"""The piggybacked updates, plus what the sender knows of the addressee and of the member in question."""


class Ping(ControlMessage, frozen=True, tag=50):
    updates: Updates


class Ack(ControlMessage, frozen=True, tag=51):
    updates: Updates


class Ask(ControlMessage, frozen=True, tag=52):
    target: Incarnation
    updates: Updates


class Vouch(ControlMessage, frozen=True, tag=53):
    target: Incarnation
    updates: Updates


class Deny(ControlMessage, frozen=True, tag=54):
    target: Incarnation
    updates: Updates


class Gossip(ControlMessage, frozen=True, tag=55):
    updates: Updates


class Digest(ControlMessage, frozen=True, tag=56):
    buckets: Annotated[tuple[int, ...], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]


class Entries(ControlMessage, frozen=True, tag=57):
    """A part of the sender's table. ``answer``: the receiver should send back its later claims in these buckets."""

    buckets: Annotated[tuple[_Bucket, ...], msgspec.Meta(max_length=BUCKETS)]
    updates: tuple[Update, ...]
    answer: bool


class Obituary(ControlMessage, frozen=True, tag=58):
    """The addressee is dead in the sender's table, which has ``size`` members and this ``lowest_rank``.

    ``hinted``: the sender learned from a third member that the addressee lives, and may be a stranger to it.
    ``alone``: the sender heard nobody at all when it gave the addressee up, and is wrong if any member disagrees.
    """

    incarnation: Incarnation
    why: _Why
    size: _Count
    lowest_rank: _Count
    hinted: bool = False
    alone: bool = False
    refusal: JoinRefusal = JoinRefusal.OTHER


class Resurfaced(ControlMessage, frozen=True, tag=59):
    incarnation: Incarnation


class Join(ControlMessage, frozen=True, tag=60):
    member: Member


class Forward(ControlMessage, frozen=True, tag=61):
    member: Member


class Decision(ControlMessage, frozen=True, tag=62):
    """The arbiter's answer: if ``why_not`` is empty, an offer, and ``member`` has its admission number.

    ``latest``: the members that the arbiter heard of last. The sponsor may not have heard of all of them yet.
    """

    member: Member
    why_not: _Why
    latest: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_UPDATES)] = ()
    refusal: JoinRefusal = JoinRefusal.OTHER


class JoinAnswer(ControlMessage, frozen=True, tag=63):
    """The whole table, the newcomer included."""

    updates: tuple[Update, ...]


class WhoAreYou(ControlMessage, frozen=True, tag=64):
    pass


class Introduction(ControlMessage, frozen=True, tag=65):
    member: Member


Message: TypeAlias = (
    Ping
    | Ack
    | Ask
    | Vouch
    | Deny
    | Gossip
    | Digest
    | Entries
    | Obituary
    | Resurfaced
    | Join
    | Forward
    | Decision
    | JoinAnswer
    | WhoAreYou
    | Introduction
)
