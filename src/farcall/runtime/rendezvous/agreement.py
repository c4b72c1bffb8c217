"""The records that members exchange through the store, the checks that they agree, and the result: a `Membership`.

Plain values and their text form (JSON, so that people can read a store). Knows nothing of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from farcall.errors import BadRank, DuplicateName, InitError
from farcall.protocol.member import Member
from farcall.runtime.devices.maps import DeviceWishes, check_device_maps
from farcall.runtime.rendezvous.store import KeyStore
from farcall.secret import Secret


@dataclass
class Membership:
    """The agreed table, and what all members share. Using it does not need the store any more."""

    me: Member
    members: list[Member]
    """All members, this one included, by rank."""
    cluster_id: str
    secret: Secret = field(repr=False)
    size: int = 0
    """The fixed number of members; 0: members come and go."""
    store: KeyStore | None = field(default=None, repr=False)
    """Kept open if members come and go, if it is a file, or if a member was slow to read the outcome."""
    rank_0_serves: bool = False
    """Did rank 0 open the store? Then it closes the store before it listens."""

    @property
    def rank(self) -> int:
        """This member's own rank."""
        return self.me.rank

    def close(self) -> None:
        """Drop the store, and with it rank 0's server, unless a process group shares it.

        A graceful shutdown calls this before the members' last agreement: after that any member may open a store at
        the same port at once, and must not find the old server there.
        """
        self.store = None


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A member's record in the store, with the values that must agree. ``cluster_id``: only in rank 0's."""

    member: Member
    world_size: int
    has_secret: bool
    """For the error of a member with another secret (`records.py`)."""
    cluster_id: str = ""
    devices: DeviceWishes | None = None


class Formed(msgspec.Struct, frozen=True, tag="formed"):
    """All members agreed on this table. Without slots: the generation has been cleared up since."""

    slots: tuple[Slot, ...]


class Abandoned(msgspec.Struct, frozen=True, tag="abandoned"):
    """``member`` gave up, since the ranks in ``missing`` had not come."""

    member: Member
    has_secret: bool
    missing: tuple[int, ...]


read_slot: Callable[[bytes], Slot] = msgspec.json.Decoder(Slot).decode
read_table: Callable[[bytes], tuple[Slot, ...]] = msgspec.json.Decoder(tuple[Slot, ...]).decode
_OUTCOME: msgspec.json.Decoder[Formed | Abandoned] = msgspec.json.Decoder(Formed | Abandoned)
read_outcome: Callable[[bytes], Formed | Abandoned] = _OUTCOME.decode


def as_text(value: object) -> str:
    """The text that goes into the store."""
    return msgspec.json.encode(value).decode()


def check_agreement(slots: Sequence[Slot]) -> None:
    """Raise, with the same error at every member, if records contradict each other."""
    by_name: dict[str, int] = {}
    for slot in slots:
        member = slot.member
        if member.name in by_name:
            raise DuplicateName(
                f"worker name {member.name!r} is not unique: ranks {by_name[member.name]} and {member.rank} both use it"
            )
        by_name[member.name] = member.rank
    _check_same(slots, lambda slot: f"world_size={slot.world_size}", BadRank, "give every process the same world_size")
    _check_same(
        slots,
        lambda slot: f"trust in {slot.member.trust}",
        InitError,
        "have every process call farcall.allow before init_rpc, or none",
    )
    check_device_maps({slot.member.name: slot.devices for slot in slots})


def _check_same(slots: Sequence[Slot], say: Callable[[Slot], str], error: type[InitError], remedy: str) -> None:
    for slot in slots:
        if say(slot) != say(slots[0]):
            one, other = slots[0].member, slot.member
            raise error(
                f"rank {one.rank} ({one.name}) was given {say(slots[0])}, "
                f"rank {other.rank} ({other.name}) {say(slot)}: {remedy}"
            )
