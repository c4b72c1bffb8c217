"""The table: what one member holds to be true of every incarnation it ever heard of.

Owns the merge (the later claim about an incarnation stays, see ``messages``), who may be talked to, who holds a name or
a rank, and the numbers by which two tables are compared. Knows nothing of time but what it is told, sends
nothing, and does not judge who is right where two incarnations claim one name.

Invariant: what has ended stays ended. An incarnation is forgotten after a while, but its number is kept, so no message,
however old, makes it a member again. The dead take no part in the comparison of tables: who has forgotten
them differs from member to member, and nobody minds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import BUCKETS, Status, Update, precedence

_WORD = (1 << 63) - 1


class Change(Enum):
    """What an update did to a table."""

    NOTHING = "nothing"
    JOINED = "joined"
    UNRESPONSIVE = "unresponsive"
    RECOVERED = "recovered"
    RENEWED = "renewed"  # alive as before, with a higher version
    DIED = "died"
    LEFT = "left"
    NOTED = "noted"  # the end of one that was no member here (any more)


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
"""What a later claim makes of an incarnation that was unknown (None), alive, unresponsive or dead. No claim is later
than "left", nor than "dead" but "left" (`messages.precedence`)."""


class Entry:
    """What is known of one incarnation. ``member`` is None where no more than its end was heard of.

    ``alone``: it was declared dead here, while nobody at all was heard.
    """

    __slots__ = (
        "alone",
        "heard_at",
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
        self.since: float = now
        self.heard_at: float = now
        self.place: int = -1
        self.alone: bool = False

    @property
    def ended(self) -> bool:
        return self.status >= Status.DEAD

    def as_update(self) -> Update:
        """The claim that tells others what is known here."""
        return Update(self.incarnation, self.status, self.version, None if self.ended else self.member, self.why)


class Table:
    """All incarnations known to ``me``, one's own too."""

    def __init__(self, me: Member, now: float) -> None:
        self.me: int = me.incarnation
        self.entries: dict[int, Entry] = {}
        self.others: list[int] = []
        """The members, alive or unresponsive, without oneself, in no order."""
        self.buried: set[int] = set()
        self.highest_admission: int = 0
        self.is_over: bool = False
        """Has a member left of its own will? In a group of fixed size all do then."""
        self._by_name: dict[str, int] = {}
        self._by_rank: dict[int, int] = {}
        self._digest = [0] * BUCKETS
        self._buckets: list[set[int]] = [set() for _ in range(BUCKETS)]
        self._ended: deque[tuple[float, int]] = deque()
        self.apply(Update(me.incarnation, Status.ALIVE, 0, me), now)

    # --- looking -----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many members there are, oneself included."""
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
        """The records of all members, oneself included."""
        incarnations = [self.me, *self.others]
        return [member for incarnation in incarnations if (member := self.entries[incarnation].member) is not None]

    def rivals(self, member: Member) -> list[Member]:
        """Members of another incarnation that hold the name or the rank of ``member``."""
        incarnations = {self._by_name.get(member.name), self._by_rank.get(member.rank)} - {None, member.incarnation}
        return [
            rival
            for incarnation in incarnations
            if incarnation is not None and (rival := self.entries[incarnation].member) is not None
        ]

    def lowest_rank(self, *, trusted_only: bool = False) -> Member:
        """The member of the lowest rank, oneself included; ``trusted_only`` leaves out who is unresponsive."""
        best = self.myself
        for incarnation in self.others:
            entry = self.entries[incarnation]
            assert entry.member is not None
            if entry.member.rank < best.rank and not (trusted_only and entry.status is Status.UNRESPONSIVE):
                best = entry.member
        return best

    # --- changing ----------------------------------------------------------------------------------------

    def apply(self, update: Update, now: float) -> Change:
        """Take ``update`` in if it is later than what is known."""
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
        entry.why, entry.since = update.why, now
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
            return Change.NOTHING  # who it is will be told another time
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
        return CHANGES[None, update.status]

    def _note_leave(self, update: Update) -> None:
        if update.status is Status.LEFT and not update.why:  # else it failed, and could still say so
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

    def become(self, member: Member) -> None:
        """A newcomer learns its admission number; it has told nobody anything yet."""
        entry = self.entries[self.me]
        entry.member = member
        self.highest_admission = max(self.highest_admission, member.admission)

    def forget(self, ended_before: float) -> None:
        """Keep no more than the number of those who ended before that time."""
        while self._ended and self._ended[0][0] < ended_before:
            _, incarnation = self._ended.popleft()
            del self.entries[incarnation]
            self._buckets[incarnation % BUCKETS].discard(incarnation)
            self.buried.add(incarnation)

    # --- comparing with another table --------------------------------------------------------------------

    def digest(self) -> tuple[int, ...]:
        """A number for each bucket of members: equal tables have equal ones, others hardly ever."""
        return tuple(self._digest)

    def differing(self, digest: Sequence[int]) -> tuple[int, ...]:
        """The buckets in which the table of that digest is another than this one."""
        return tuple(
            bucket for bucket, (one, other) in enumerate(zip(self._digest, digest, strict=True)) if one != other
        )

    def updates_in(self, buckets: Iterable[int]) -> tuple[Update, ...]:
        """All that is known in these buckets, the dead included."""
        return tuple(
            self.entries[incarnation].as_update() for bucket in buckets for incarnation in sorted(self._buckets[bucket])
        )

    def better_than(self, buckets: Iterable[int], updates: Iterable[Update]) -> tuple[Update, ...]:
        """What is known here, in these buckets, later than or not among ``updates``."""
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
        """Put a member's claim into the digest, or take it out again: the same operation."""
        mixed = (entry.incarnation * 0x9E3779B97F4A7C15 + entry.precedence * 0xC2B2AE3D27D4EB4F) & _WORD
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
        self._digest[entry.incarnation % BUCKETS] ^= mixed ^ (mixed >> 32)
