"""The inputs and outputs of the reference machine: events, effects, and messages between members.

Owns their shape, no behaviour. A member is named by its incarnation: one integer per process start, never
reused, so a restarted process is a new member, and old messages cannot be mistaken for new ones.

    message    from -> to           says
    Register   holder -> owner      "I hold these forks" (for a dead holder, by whoever sent it the fork)
    Confirm    owner -> registrar   "these forks are listed" (the answer for one not held any more: Release)
    Accept     child -> parent      "the fork you sent me is listed, or of no use: you need not keep yours for it"
    Release    holder -> owner      "these forks are gone for ever"
    Withdraw   sender -> receiver   "this fork may never come: if it has not, take it as dropped"
    Inquire    owner -> everyone    "these are dead: take nothing more from them, and tell what you hold"
    Answer     member -> owner      "done; these forks of yours are not confirmed yet"
    Farewell   member -> everyone   "I leave, and have released what I held": for the runtime, not the machine
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from farcall.ids import ForkId, RefId
from farcall.protocol.control import ControlMessage


class Fork(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One holder's copy of a reference, as it travels in requests, results and messages.

    ``number`` counts the forks from one maker to one receiver, without gaps: so a receiver recognises a
    duplicate without remembering every fork it ever saw.
    """

    ref: RefId
    fork_id: ForkId
    owner: int
    holder: int
    number: int


Held: TypeAlias = tuple[RefId, ForkId]


class Register(ControlMessage, frozen=True, tag=40):
    forks: list[Fork]


class Confirm(ControlMessage, frozen=True, tag=41):
    forks: list[Held]


class Accept(ControlMessage, frozen=True, tag=42):
    forks: list[ForkId]


class Release(ControlMessage, frozen=True, tag=43):
    forks: list[Held]


class Withdraw(ControlMessage, frozen=True, tag=44):
    forks: list[Fork]


class Inquire(ControlMessage, frozen=True, tag=45):
    round: int
    dead: list[int]


class Answer(ControlMessage, frozen=True, tag=46):
    round: int
    forks: list[Fork]


class Farewell(ControlMessage, frozen=True, tag=47):
    """Frees nothing. After it, a fork still listed is a leak, and not a Release in transit."""


Message: TypeAlias = Register | Confirm | Accept | Release | Withdraw | Inquire | Answer | Farewell


# --- events ------------------------------------------------------------------------------------------------


class Received(msgspec.Struct, frozen=True):
    """A message arrived from ``sender``; it may be a duplicate or out of order."""

    sender: int
    message: Message


class MemberJoined(msgspec.Struct, frozen=True):
    """``member`` joined. Must precede any fork that anyone sends to it."""

    member: int


class MemberDied(msgspec.Struct, frozen=True):
    """``member`` is gone for ever: nothing more is accepted from it. Every live member must get this event."""

    member: int


class CreationAnswered(msgspec.Struct, frozen=True):
    """The creating call of ``fork`` was answered, by a value or an error. Not for timeouts: the call may still run."""

    fork: Fork


class CreationWithdrawn(msgspec.Struct, frozen=True):
    """The creating call of ``fork`` may not have been sent: if it has not arrived, it must never run."""

    fork: Fork


class ForkWithdrawn(msgspec.Struct, frozen=True):
    """``fork`` was not sent, or its link broke and it may not have arrived.

    The receiver settles it, so that neither the fork nor the numbers after it wait for ever.
    """

    fork: Fork


class Dropped(msgspec.Struct, frozen=True):
    """The program dropped ``fork``. Destructors call ``released.append(fork)`` instead."""

    fork: Fork


class AllDropped(msgspec.Struct, frozen=True):
    """The program ends: release every fork held here but ``kept``, and free values that no other member refers to."""

    kept: frozenset[ForkId] = frozenset()


Event: TypeAlias = (
    Received | MemberJoined | MemberDied | CreationAnswered | CreationWithdrawn | ForkWithdrawn | Dropped | AllDropped
)

# --- effects -----------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to ``member``, at least once while both live."""

    member: int
    message: Message


class FreeValue(msgspec.Struct, frozen=True):
    """Nobody refers to ``ref`` any more: free its value, or its place, or drop it when the creating call ends."""

    ref: RefId


class NeverCreated(msgspec.Struct, frozen=True):
    """The call that should create ``ref`` here will never come: its value is an error from now on."""

    ref: RefId


class Lost(msgspec.Struct, frozen=True):
    """The owner of a fork held here is dead: every use of it, waiting ones too, raises ``ReferenceLost``."""

    fork: Fork


class Confirmed(msgspec.Struct, frozen=True):
    """The owner has listed a fork held here. (Not for creations: their response implies it.)"""

    fork: Fork


Effect: TypeAlias = Send | FreeValue | NeverCreated | Lost | Confirmed

# --- a look inside -----------------------------------------------------------------------------------------


class Counts(msgspec.Struct, frozen=True):
    """Sizes for debug information."""

    owned: int  # values owned here, local-only ones included
    owners: int  # values owned here that some other member refers to
    forks: int  # forks of values owned here, held by other members
    users: int  # forks held here of values owned elsewhere
    pending_users: int  # of these, not yet confirmed by their owner
    pending_children: int  # forks sent from here to others, not yet accepted


class OwnedSnapshot(msgspec.Struct, frozen=True):
    """A value owned here, and how many forks of it each member holds."""

    ref: RefId
    created: bool
    forks_by_holder: dict[int, int]


class UsedSnapshot(msgspec.Struct, frozen=True):
    """A fork held here of a value owned elsewhere."""

    fork: Fork
    confirmed: bool
    dropped: bool
    children_sent_to: list[int]


class Snapshot(msgspec.Struct, frozen=True):
    """The forks that this member lists and holds."""

    owned: list[OwnedSnapshot]
    used: list[UsedSnapshot]
