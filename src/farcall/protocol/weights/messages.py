"""What members tell each other about published weights, and the identities in it.

    message           way                         says
    `NameClaimed`     publisher -> all            I publish this name
    `NameClosed`      publisher -> all            I publish it no more
    `ClaimAnswered`   each member -> publisher    the highest claim, and version, that I know of
    `VersionsWanted`  subscriber -> publisher     send me versions, or no more
    `VersionPushed`   lender -> subscriber        a version, and all about it but its bytes
    `VersionTaken`    subscriber -> lender        what became of it: see `How`
    `BlockOffered`    owner -> subscriber         the descriptor of a block rides along (SCM_RIGHTS)
    `BlockRefused`    subscriber -> owner         it cannot be mapped here
    `BlockRetired`    owner -> subscriber         unmap it

A link delivers each once, but they may pass each other.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from farcall.protocol.member import Incarnation

__all__ = [
    "MAX_NAME_CHARACTERS",
    "BlockOffered",
    "BlockRefused",
    "BlockRetired",
    "Claim",
    "ClaimAnswered",
    "How",
    "Key",
    "Message",
    "NameClaimed",
    "NameClosed",
    "VersionPushed",
    "VersionTaken",
    "VersionsWanted",
]

MAX_NAME_CHARACTERS: Final = 256

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
How: TypeAlias = Literal["mapped", "copied", "dropped"]
"""It reads the lender's memory; it has a copy of its own; it reads nothing of it (any more).

For each version that it is sent, a member says one of the latter two once, at last.
"""


class Claim(msgspec.Struct, array_like=True, frozen=True, order=True, forbid_unknown_fields=True):
    """One publisher's tenure of a name; of two, the higher one is right."""

    epoch: Count
    publisher: Incarnation


class Key(NamedTuple):
    """One version of a name, everywhere; a later one is greater."""

    claim: Claim
    number: int


class _Control(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Base of these messages: immutable, and encoded as [tag, field, field ...]."""


class NameClaimed(_Control, frozen=True, tag=100):
    """The sender publishes ``name``; ``number`` is the last version that it knows of."""

    name: Name
    claim: Claim
    number: Count


class ClaimAnswered(_Control, frozen=True, tag=101):
    """The answer to a ``NameClaimed`` with ``claim``: the highest claim that was heard of before it, or that itself."""

    name: Name
    claim: Claim
    known: Claim
    number: Count


class VersionsWanted(_Control, frozen=True, tag=102):
    """Send the versions of ``name`` to the sender, the newest one at once; or no more of them."""

    name: Name
    wanted: bool
    serial: Count  # of two, the one with the higher number counts: they may pass each other


class VersionPushed(_Control, frozen=True, tag=103):
    """A version that the sender lends to the receiver from now on."""

    name: Name
    claim: Claim
    number: Count
    keep: Count
    offered: bool  # its blocks come as `BlockOffered`, if they have not come before; else fetch their bytes
    manifest: bytes


class VersionTaken(_Control, frozen=True, tag=104):
    """What became of a version at the sender."""

    name: Name
    claim: Claim
    number: Count
    how: How


class BlockOffered(_Control, frozen=True, tag=105):
    """Memory of the sender's that versions lie in; its descriptor rides along, unless ``size_bytes`` is 0.

    Then the sender had none to spare: what lies in the block has to be fetched.
    """

    block_id: Count
    size_bytes: Count


class BlockRefused(_Control, frozen=True, tag=106):
    """A block cannot be mapped here: send bytes instead."""

    block_id: Count
    reason: str


class BlockRetired(_Control, frozen=True, tag=107):
    """The sender gave a block up: no version names it any more."""

    block_id: Count


class NameClosed(_Control, frozen=True, tag=108):
    """The sender publishes ``name`` no more; no version after ``number`` comes to the receiver, 0: none at all."""

    name: Name
    claim: Claim
    number: Count


Message = (
    NameClaimed
    | NameClosed
    | ClaimAnswered
    | VersionsWanted
    | VersionPushed
    | VersionTaken
    | BlockOffered
    | BlockRefused
    | BlockRetired
)
