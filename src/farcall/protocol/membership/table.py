"""The table: what one member knows of every incarnation that it ever heard of.

Owns the merge (the later claim about an incarnation stays, see ``messages``), the list of members, the holders of names
and ranks, and the digest by which two tables are compared. Has no clock, sends nothing, and does not judge
which of two incarnations that claim one name is right.

Invariant: an incarnation that has ended stays ended. Its entry is forgotten after a while, but its number is kept, so
no message, however old, makes it a member again. Digests leave the dead out: members forget them at different times,
and need not agree about them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice
from typing import Final

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import BUCKETS, Status, Update, precedence
from farcall.protocol.membership.neighbours import FULL_MESH, Neighbours

_WORD = (1 << 63) - 1
MAX_LEAP = 1 << 20


class Change(Enum):
    """The effect of an update on a table."""

    NOTHING = "nothing"
    JOINED = "joined"
    UNRESPONSIVE = "unresponsive"
    RECOVERED = "recovered"
    RENEWED = "renewed"  # alive as before, with a higher version
    DIED = "died"
    LEFT = "left"
    NOTED = "noted"  # the end of an incarnation that was no member here (any more)


CHANGES: Final[dict[tuple[Status | None, Status], Change]] = {
    (None, Status.ALIVE): Change.JOINED,
    (None, Status.UNRESPONSIVE): Change.JOINED,
    (None, Status.DEAD): Change.NOTED,
    (None, Status.LEFT): Change.NOTED,
    (Status.ALIVE, Status.ALIVE): Change.RENEWED,
    (Status.ALIVE, Status.UNRESPONSIVE): Change.UNRESPONSIVE,
    (Status.ALIVE, Status.DEAD): Change.DIED,
    (Status.ALIVE, Status.LEFT): Change.LEFT,
    (Status.UNRESPONSIVE, Status.ALIVE): Change.RECOVERED,
    (Status.UNRESPONSIVE, Status.UNRESPONSIVE): Change.UNRESPONSIVE,
    (Status.UNRESPONSIVE, Status.DEAD): Change.DIED,
    (Status.UNRESPONSIVE, Status.LEFT): Change.LEFT,
    (Status.DEAD, Status.LEFT): Change.NOTED,
}
"""The effect of a later claim on an incarnation that was unknown (None), alive, unresponsive or dead. Only "left" is
later than "dead", and no claim is later than "left" (`messages.precedence`)."""


class Entry:
    """The latest claim about one incarnation. ``member`` is None if only its end was heard of.

    ``alone``: this member declared it dead while it heard nobody at all.
    """

    __slots__ = (
        "alone",
        "heard_at",
        "host_is_silent",
        "incarnation",
        "member",
        "place",
        "precedence",
        "since",
        "status",
        "version",
        "why",
    )

    def __init__(self, update: Update, now: float) -> None:
        self.incarnation: int = update.incarnation
        self.member: Member | None = update.member
        self.status: Status = update.status
        self.version: int = update.version
        self.precedence: int = precedence(update.status, update.version)
        self.why: str = update.why
        self.host_is_silent: bool = update.host_is_silent
        self.since: float = now
        self.heard_at: float = now
        self.place: int = -1
        self.alone: bool = False

    @property
    def ended(self) -> bool:
        return self.status >= Status.DEAD

    def as_update(self) -> Update:
        """The entry as a claim for other members."""
        member = None if self.ended else self.member
        return Update(self.incarnation, self.status, self.version, member, self.why, self.host_is_silent)


class Table:
    """All incarnations known to ``me``, its own included."""

    def __init__(self, me: Member, now: float, full_mesh: int = FULL_MESH) -> None:
        # Mutable: all but ``me``, through `apply`, `become` and `forget` only.
        self.me: int = me.incarnation
        self.entries: dict[int, Entry] = {}
        self.others: list[int] = []
        """The other members, alive or unresponsive, in no order."""
        self.neighbours: Neighbours = Neighbours(self.me, self.others, full_mesh)
        """The members that this one keeps in touch with; follows ``others``."""
        self.buried: set[int] = set()
        """Incarnations that have ended, and whose entries are forgotten."""
        self.highest_admission: int = 0
        self.is_over: bool = False
        """Has a member left of its own will? Then all members of a group of fixed size do."""
        self._by_name: dict[str, int] = {}
        self._by_rank: dict[int, int] = {}
        self._digest = [0] * BUCKETS
        self._buckets: list[set[int]] = [set() for _ in range(BUCKETS)]
        self._ended: deque[tuple[float, int]] = deque()
        self.apply(Update(me.incarnation, Status.ALIVE, 0, me), now)

    # --- looking -----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of members, this one included."""
        return len(self.others) + 1

    @property
    def myself(self) -> Member:
        member = self.entries[self.me].member
        assert member is not None
        return member

    def member(self, incarnation: int) -> Entry | None:
        """The entry of ``incarnation`` if it is a member: alive or unresponsive."""
        entry = self.entries.get(incarnation)
        return None if entry is None or entry.ended else entry

    def members(self) -> list[Member]:
        """The records of all members, this one included."""
        incarnations = [self.me, *self.others]
        return [member for incarnation in incarnations if (member := self.entries[incarnation].member) is not None]

    def latest(self, count: int) -> tuple[Member, ...]:
        """The members among the ``count`` incarnations that this table heard of last."""
        entries = (self.entries[incarnation] for incarnation in islice(reversed(self.entries), count))
        return tuple(entry.member for entry in entries if entry.member is not None and not entry.ended)

    def rivals(self, member: Member) -> list[Member]:
        """Members of another incarnation that hold the name or the rank of ``member``."""
        incarnations = {self._by_name.get(member.name), self._by_rank.get(member.rank)} - {None, member.incarnation}
        return [
            rival
            for incarnation in incarnations
            if incarnation is not None and (rival := self.entries[incarnation].member) is not None
        ]

    def is_kept(self, member: Member, since: float) -> bool:
        """Has another incarnation with the name or rank of ``member`` died ``since``?"""
        for ended_at, incarnation in reversed(self._ended):
            if ended_at <= since:
                break
            entry = self.entries[incarnation]
            dead = entry.member if entry.status is Status.DEAD else None
            if dead is not None and (dead.name == member.name or dead.rank == member.rank):
                return True
        return False

    def is_leap(self, update: Update) -> bool:
        """Does ``update`` use up numbers that honest members will never reach, so that nobody could go above them?"""
        entry, member = self.entries.get(update.incarnation), update.member
        version = 0 if entry is None else entry.version
        admission = 0 if member is None else member.admission
        return update.version > version + MAX_LEAP or admission > self.highest_admission + MAX_LEAP

    def lowest_rank(self, *, trusted_only: bool = False) -> Member:
        """The member of the lowest rank, perhaps this one; ``trusted_only`` leaves out unresponsive members."""
        best = self.myself
        for incarnation in self.others:
            entry = self.entries[incarnation]
            assert entry.member is not None
            if entry.member.rank < best.rank and not (trusted_only and entry.status is Status.UNRESPONSIVE):
                best = entry.member
        return best

    # --- changing ----------------------------------------------------------------------------------------

    def apply(self, update: Update, now: float) -> Change:
        """Merge ``update`` if it is later than the known claim."""
        entry = self.entries.get(update.incarnation)
        if entry is None:
            return self._add(update, now)
        rank = precedence(update.status, update.version)
        if rank <= entry.precedence:
            return Change.NOTHING
        was = entry.status
        if was < Status.DEAD:
            self._flip(entry)
        entry.status, entry.version, entry.precedence = update.status, update.version, rank
        entry.why, entry.host_is_silent, entry.since = update.why, update.host_is_silent, now
        self._note_leave(update)
        if update.status < Status.DEAD:
            self._flip(entry)
        elif was < Status.DEAD:
            self._retire(entry, now)
        return CHANGES[was, update.status]

    def _add(self, update: Update, now: float) -> Change:
        if update.incarnation in self.buried:
            return Change.NOTHING
        alive = update.status < Status.DEAD
        if alive and update.member is None:
            return Change.NOTHING  # useless without its record; a later update will carry that
        entry = self.entries[update.incarnation] = Entry(update, now)
        self._buckets[update.incarnation % BUCKETS].add(update.incarnation)
        if not alive:
            self._note_leave(update)
            self._ended.append((now, update.incarnation))
            return CHANGES[None, update.status]
        assert entry.member is not None
        self._flip(entry)
        self._by_name[entry.member.name] = self._by_rank[entry.member.rank] = update.incarnation
        self.highest_admission = max(self.highest_admission, entry.member.admission)
        if update.incarnation != self.me:
            entry.place = len(self.others)
            self.others.append(update.incarnation)
            self.neighbours.came(update.incarnation)
        return CHANGES[None, update.status]

    def _note_leave(self, update: Update) -> None:
        if update.status is Status.LEFT and not update.why:  # with a reason, it failed and could still say goodbye
            self.is_over = True

    def _retire(self, entry: Entry, now: float) -> None:
        member, incarnation = entry.member, entry.incarnation
        assert member is not None
        self._ended.append((now, incarnation))
        if self._by_name.get(member.name) == incarnation:
            del self._by_name[member.name]
        if self._by_rank.get(member.rank) == incarnation:
            del self._by_rank[member.rank]
        if entry.place >= 0:
            last = self.others.pop()
            if last != incarnation:
                self.others[entry.place] = last
                self.entries[last].place = entry.place
            entry.place = -1
            self.neighbours.ended(incarnation)

    def become(self, member: Member) -> None:
        """Take the record with our admission number; in place, since a newcomer has spread no claim yet."""
        entry = self.entries[self.me]
        entry.member = member
        self.highest_admission = max(self.highest_admission, member.admission)

    def forget(self, ended_before: float) -> None:
        """Reduce incarnations that ended before that time to their numbers."""
        while self._ended and self._ended[0][0] < ended_before:
            _, incarnation = self._ended.popleft()
            del self.entries[incarnation]
            self._buckets[incarnation % BUCKETS].discard(incarnation)
            self.buried.add(incarnation)

    # --- comparing with another table --------------------------------------------------------------------

    def digest(self) -> tuple[int, ...]:
        """One number per bucket of members: equal for equal tables, and almost never for different ones."""
        return tuple(self._digest)

    def differing(self, digest: Sequence[int]) -> tuple[int, ...]:
        """The buckets in which this table differs from the one of ``digest``."""
        return tuple(
            bucket for bucket, (one, other) in enumerate(zip(self._digest, digest, strict=True)) if one != other
        )

    def updates_in(self, buckets: Iterable[int]) -> tuple[Update, ...]:
        """All claims in these buckets, those about the dead included."""
        return tuple(
            self.entries[incarnation].as_update() for bucket in buckets for incarnation in sorted(self._buckets[bucket])
        )

    def better_than(self, buckets: Iterable[int], updates: Iterable[Update]) -> tuple[Update, ...]:
        """The claims in these buckets that are later than ``updates``, or missing from them."""
        theirs = {update.incarnation: precedence(update.status, update.version) for update in updates}
        better = [
            self.entries[incarnation].as_update()
            for bucket in buckets
            for incarnation in sorted(self._buckets[bucket])
            if self.entries[incarnation].precedence > theirs.get(incarnation, -1)
        ]
        better += [
            Update(incarnation, Status.DEAD, 0, None, "ended long ago")
            for incarnation in theirs
            if incarnation in self.buried
        ]
        return tuple(better)

    def _flip(self, entry: Entry) -> None:
        """Add a member's claim to the digest, or remove it: XOR does both."""
        mixed = (entry.incarnation * 0x9E3779B97F4A7C15 + entry.precedence * 0xC2B2AE3D27D4EB4F) & _WORD
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
        self._digest[entry.incarnation % BUCKETS] ^= mixed ^ (mixed >> 32)
