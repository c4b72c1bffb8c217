"""What members tell each other about members: one typed struct per control message, tags 50 to 65.

Owns shapes and the order of claims about one incarnation (`protocol/member.py`), no behaviour. Every claim is an
``Update``, and claims about an incarnation are ordered by their
``precedence``: alive(0) < unresponsive(0) < alive(1) < unresponsive(1) < ... < dead < left. Only the member itself
raises its version, so it alone can refute; nothing follows an end. Taking the maximum is all a table does, so
any order of messages, with any of them twice, comes to the same table.

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
    WhoAreYou  anybody -> a stranger    "your news is none for me before I know you"
    Introduction  newcomer -> back      "I was let in; whoever should have told you cannot, perhaps"
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec

from farcall.protocol.member import Incarnation, Member

BUCKETS = 64
MAX_UPDATES = 32
"""Updates that ride along with one message: 5 KiB where each carries a member of usual length, else half a KiB."""
MAX_WHY_CHARACTERS = 400

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Why: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_WHY_CHARACTERS)]


class Status(IntEnum):
    """What is claimed of an incarnation."""

    ALIVE = 0
    UNRESPONSIVE = 1
    DEAD = 2
    LEFT = 3


class Update(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One claim about one incarnation. Claims about the living carry the whole ``member``."""

    incarnation: Incarnation
    status: Status
    version: _Count
    member: Member | None = None
    why: _Why = ""


_DEAD = int(Status.DEAD)
_END = 1 << 62


def precedence(status: Status, version: int) -> int:
    """The place of a claim among all about one incarnation: the higher one is the later one."""
    return _END + status if status >= _DEAD else 2 * version + status


Updates: TypeAlias = Annotated[tuple[Update, ...], msgspec.Meta(max_length=MAX_UPDATES + 2)]
"""Those taken along, and what is known of the two that a message is to and about."""


class _Control(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of the messages: immutable, and encoded as [tag, field, field ...]."""


class Ping(_Control, frozen=True, tag=50):
    updates: Updates


class Ack(_Control, frozen=True, tag=51):
    updates: Updates


class Ask(_Control, frozen=True, tag=52):
    target: Incarnation
    updates: Updates


class Vouch(_Control, frozen=True, tag=53):
    target: Incarnation
    updates: Updates


class Deny(_Control, frozen=True, tag=54):
    target: Incarnation
    updates: Updates


class Gossip(_Control, frozen=True, tag=55):
    updates: Updates


class Digest(_Control, frozen=True, tag=56):
    buckets: Annotated[tuple[int, ...], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]


class Entries(_Control, frozen=True, tag=57):
    """``answer`` asks for what the receiver knows better in these buckets."""

    buckets: Annotated[tuple[int, ...], msgspec.Meta(max_length=BUCKETS)]
    updates: tuple[Update, ...]
    answer: bool


class Obituary(_Control, frozen=True, tag=58):
    """``size`` members share the sender's table, and ``lowest_rank`` is the lowest of theirs.

    ``hinted``: the sender heard from a third one that the addressee lives; it may be a stranger to it. ``alone``: the
    sender heard nobody at all when it gave the addressee up, and is wrong if that one, or anybody, thinks otherwise.
    """

    incarnation: Incarnation
    why: _Why
    size: _Count
    lowest_rank: _Count
    hinted: bool = False
    alone: bool = False


class Resurfaced(_Control, frozen=True, tag=59):
    incarnation: Incarnation


class Join(_Control, frozen=True, tag=60):
    member: Member


class Forward(_Control, frozen=True, tag=61):
    member: Member


class Decision(_Control, frozen=True, tag=62):
    """Where ``why_not`` is empty, ``member`` has its admission number."""

    member: Member
    why_not: _Why


class JoinAnswer(_Control, frozen=True, tag=63):
    """The whole table, the newcomer in it."""

    updates: tuple[Update, ...]


class WhoAreYou(_Control, frozen=True, tag=64):
    pass


class Introduction(_Control, frozen=True, tag=65):
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
