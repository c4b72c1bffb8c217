"""What members tell each other through the store, what of it must agree, and what they come to: a `Membership`.

Plain values and their text form (JSON, so that a store can be looked at). Knows nothing of waiting.
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
    """The agreed table, and what every member shares. Nothing here needs the store any more."""

    me: Member
    members: list[Member]
    """Everybody, oneself included, by rank."""
    cluster_id: str
    secret: Secret = field(repr=False)
    generation: int
    size: int = 0
    """How many members there are for good; 0: members come and go."""
    store: KeyStore | None = field(default=None, repr=False)
    """Where members come and go, where it is a file, or where somebody was slow to read there what all agreed on."""

    @property
    def rank(self) -> int:
        """This member's own rank."""
        return self.me.rank

    def close(self) -> None:
        """Let the store go, and with it rank 0's server, unless a process group shares it.

        In a graceful shutdown this belongs before the members' last agreement: whoever comes out of it may
        open a store at the same port at once, and must not find the old server there for a moment more.
        """
        self.store = None


class Slot(msgspec.Struct, frozen=True):
    """A member as it lies in the store, with what must agree. ``cluster_id`` is rank 0's."""

    member: Member
    world_size: int
    has_secret: bool
    """Told for those who find that they have another one (`records.py`)."""
    cluster_id: str = ""
    devices: DeviceWishes | None = None


class Formed(msgspec.Struct, frozen=True, tag="formed"):
    """Everybody agreed on this table. Without slots: and it is cleared up since."""

    slots: tuple[Slot, ...]


class Abandoned(msgspec.Struct, frozen=True, tag="abandoned"):
    """``member`` gave up."""

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
    """Raise, alike at every member, where records contradict each other."""
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
