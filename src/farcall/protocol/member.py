"""`Member`: the record of a member, in the store, in the membership protocol and in the handshake.

An *incarnation* identifies a member: one number per start of a node, never reused. A name or a rank may pass to another
member; no claim about one incarnation ever applies to another. The number is an int everywhere; `incarnation_text` is
its form for people and for public values.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from farcall.ids import MAX_NAME_CHARACTERS

MAX_ADDRESSES: Final = 16
PROCESS_ENDED: Final = "its process has ended (its own output may say why)"
"""The reason of a death, for users, if nobody listens at the member's addresses any more. Logs name the addresses."""
REFUSED: Final = "its process has ended, or the network lets nobody connect to it"
"""The same between hosts, where a network may refuse, too."""
HOST_SILENT: Final = "its host does not answer, and nobody has heard from it for long"
"""The reason of a death that may be this node's own: who is cut off from the others finds them all so."""

Incarnation: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Trust: TypeAlias = Literal["code", "calls", "data"]
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A member of a cluster, as all others know it.

    ``addresses`` are in the form of their transports, the preferred one first. ``admission`` numbers the admissions to
    a group without a fixed size; it is 0 for founders and in groups of fixed size. A name or a rank is given out again
    only after its holder died or left, so of two incarnations that share one, the later admission is the true holder.
    ``trust`` says what others may send: code; calls of functions that the program has named (`farcall.allow`); or such
    calls with plain data and tensors only, and no pickle at all.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    incarnation: Incarnation
    addresses: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    host_token: _Text = ""
    admission: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    trust: Trust = "code"


def new_incarnation(random_bits: int) -> int:
    """The incarnation made of 62 random bits.

    Never small, so never equal to a rank: references are counted by incarnation in dynamic groups, else by rank.
    """
    return random_bits & (1 << 62) - 1 | 1 << 62


def incarnation_text(incarnation: int) -> str:
    """The incarnation as people and programs see it."""
    return f"{incarnation:016x}"
