"""The messages between members about published weights, and the identities in them.

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

A link delivers each message once, but may reorder them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

import msgspec

from farcall.protocol.control import ControlMessage
from farcall.protocol.member import Incarnation

MAX_NAME_CHARACTERS: Final = 256

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
How: TypeAlias = Literal["mapped", "copied", "dropped"]
"""The member reads the lender's memory; it has its own copy; it does not read the version (any more).

A member's last answer for each version that it was sent is "copied" or "dropped", exactly once.
"""


class Claim(msgspec.Struct, array_like=True, frozen=True, order=True, forbid_unknown_fields=True):
    """One publisher's tenure of a name; the higher one of two claims wins."""

    epoch: Count
    publisher: Incarnation


class Key(NamedTuple):
    """The identity of a version of a name, the same at all members; later versions compare greater."""

    claim: Claim
    number: int


class NameClaimed(ControlMessage, frozen=True, tag=100):
    """The sender publishes ``name``; ``number`` is the highest version that it knows of."""

    name: Name
    claim: Claim
    number: Count


class ClaimAnswered(ControlMessage, frozen=True, tag=101):
    """The answer to a ``NameClaimed`` with ``claim``: the highest claim heard before it, or ``claim`` if none was."""

    name: Name
    claim: Claim
    known: Claim
    number: Count


class VersionsWanted(ControlMessage, frozen=True, tag=102):
    """The sender subscribes to ``name``, and wants the newest version at once; or it unsubscribes."""

    name: Name
    wanted: bool
    serial: Count  # the highest serial wins: a link may reorder messages


class OnDevice(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A second copy of one content, in device memory of the sender that the receiver can open."""

    content: Count  # its index in the manifest's list
    device: Count  # as the sender numbers it
    opener: bytes  # equal openers name the same memory


class VersionPushed(ControlMessage, frozen=True, tag=103):
    """A version that the sender lends to the receiver, from this message on."""

    name: Name
    claim: Claim
    number: Count
    keep: Count
    offered: bool  # true: blocks not offered before come as `BlockOffered`; false: fetch the bytes
    manifest: bytes
    on_devices: list[OnDevice] = msgspec.field(default_factory=list)  # a shortcut: host memory has all bytes, too


class VersionTaken(ControlMessage, frozen=True, tag=104):
    """The sender's answer for a version that it was lent."""

    name: Name
    claim: Claim
    number: Count
    how: How


class BlockOffered(ControlMessage, frozen=True, tag=105):
    """A block of the sender's memory that holds versions. Its descriptor rides along, unless ``size_bytes`` is 0.

    0 means that the sender had no descriptor to spare, or that this link carries none: the receiver must fetch the
    bytes in the block.
    """

    block_id: Count
    size_bytes: Count


class BlockRefused(ControlMessage, frozen=True, tag=106):
    """The sender cannot map a block, and needs its bytes instead."""

    block_id: Count
    reason: str


class BlockRetired(ControlMessage, frozen=True, tag=107):
    """The sender gave up a block: no version lies in it any more."""

    block_id: Count


class NameClosed(ControlMessage, frozen=True, tag=108):
    """The sender stops publishing ``name``. ``number`` is the last version that the receiver gets; 0: none."""

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


def check_name(name: str) -> None:
    """Raise unless ``name`` is a valid name for published weights."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"weights are published under a name of 1 to {MAX_NAME_CHARACTERS} characters, not {name!r}")
