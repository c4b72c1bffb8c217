"""The table: what one member holds to be true of every life it ever heard of.

Owns the merge (the later claim about a life stays, see ``messages``), who may be talked to, who holds a name or
a rank, and the numbers by which two tables are compared. Knows nothing of time but what it is told, sends
nothing, and does not judge who is right where two lives claim one name.

Invariant: what has ended stays ended. A life is forgotten after a while, but its number is kept, so no message,
however old, makes it a member again. The dead take no part in the comparison of tables: who has forgotten
them differs from member to member, and nobody minds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum

from farcall.protocol.membership.messages import BUCKETS, Record, Status, Update, precedence

__all__ = ["Change", "Entry", "Table"]

_WORD = (1 << 63) - 1


class Change(Enum):
    """What an update did to a table."""

    NOTHING = "nothing"
    JOINED = "joined"
    SUSPECTED = "suspected"
    RECOVERED = "recovered"
    RENEWED = "renewed"  # alive as before, with a higher version
    DIED = "died"
    LEFT = "left"
    NOTED = "noted"  # the end of one that was no member here (any more)


class Entry:
    """What is known of one life. ``record`` is None where only its end was heard of.

    ``alone``: it was declared dead here, while nobody at all was heard.
    """

    __slots__ = ("alone", "heard_at", "life", "place", "precedence", "record", "since", "status", "version", "why")

    def __init__(self, update: Update, now: float) -> None:
        self.life: int = update.life
        self.record: Record | None = update.record
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
        return Update(self.life, self.status, self.version, None if self.ended else self.record, self.why)


class Table:
    """All lives known to ``me``, one's own too."""

    def __init__(self, me: Record, now: float) -> None:
        self.me: int = me.life
        self.entries: dict[int, Entry] = {}
        self.others: list[int] = []
        """The members, alive or suspected, without oneself, in no order."""
        self.buried: set[int] = set()
        self.highest_admission: int = 0
        self._by_name: dict[str, int] = {}
        self._by_rank: dict[int, int] = {}
        self._digest = [0] * BUCKETS
        self._buckets: list[set[int]] = [set() for _ in range(BUCKETS)]
        self._ended: deque[tuple[float, int]] = deque()
        self.apply(Update(me.life, Status.ALIVE, 0, me), now)

    # --- looking -----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many members there are, oneself included."""
        return len(self.others) + 1

    @property
    def my_record(self) -> Record:
        record = self.entries[self.me].record
        assert record is not None
        return record

    def member(self, life: int) -> Entry | None:
        """The entry of ``life`` if it is a member: alive or suspected."""
        entry = self.entries.get(life)
        return None if entry is None or entry.ended else entry

    def members(self) -> list[Record]:
        """The records of all members, oneself included."""
        lives = [self.me, *self.others]
        return [record for life in lives if (record := self.entries[life].record) is not None]

    def rivals(self, record: Record) -> list[Record]:
        """Members of another life that hold the name or the rank of ``record``."""
        lives = {self._by_name.get(record.name), self._by_rank.get(record.rank)} - {None, record.life}
        return [rival for life in lives if life is not None and (rival := self.entries[life].record) is not None]

    def lowest_rank(self, *, trusted_only: bool = False) -> Record:
        """The member of the lowest rank, oneself included; ``trusted_only`` leaves out who is suspected."""
        best = self.my_record
        for life in self.others:
            entry = self.entries[life]
            assert entry.record is not None
            if entry.record.rank < best.rank and not (trusted_only and entry.status is Status.SUSPECTED):
                best = entry.record
        return best

    # --- changing ----------------------------------------------------------------------------------------

    def apply(self, update: Update, now: float) -> Change:
        """Take ``update`` in if it is later than what is known."""
        entry = self.entries.get(update.life)
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
        if update.status < Status.DEAD:
            self._flip(entry)
            if update.status is Status.SUSPECTED:
                return Change.SUSPECTED
            return Change.RECOVERED if was is Status.SUSPECTED else Change.RENEWED
        if was >= Status.DEAD:
            return Change.NOTED
        self._retire(entry, now)
        return Change.DIED if update.status is Status.DEAD else Change.LEFT

    def _add(self, update: Update, now: float) -> Change:
        if update.life in self.buried:
            return Change.NOTHING
        alive = update.status < Status.DEAD
        if alive and update.record is None:
            return Change.NOTHING  # who it is will be told another time
        entry = self.entries[update.life] = Entry(update, now)
        self._buckets[update.life % BUCKETS].add(update.life)
        if not alive:
            entry.record = None
            self._ended.append((now, update.life))
            return Change.NOTED
        assert entry.record is not None
        self._flip(entry)
        self._by_name[entry.record.name] = self._by_rank[entry.record.rank] = update.life
        self.highest_admission = max(self.highest_admission, entry.record.admission)
        if update.life != self.me:
            entry.place = len(self.others)
            self.others.append(update.life)
        return Change.JOINED

    def _retire(self, entry: Entry, now: float) -> None:
        record, life = entry.record, entry.life
        assert record is not None
        self._ended.append((now, life))
        if self._by_name.get(record.name) == life:
            del self._by_name[record.name]
        if self._by_rank.get(record.rank) == life:
            del self._by_rank[record.rank]
        if entry.place >= 0:
            last = self.others.pop()
            if last != life:
                self.others[entry.place] = last
                self.entries[last].place = entry.place
            entry.place = -1

    def become(self, record: Record) -> None:
        """A newcomer learns its admission number; it has told nobody anything yet."""
        entry = self.entries[self.me]
        entry.record = record
        self.highest_admission = max(self.highest_admission, record.admission)

    def forget(self, ended_before: float) -> None:
        """Keep no more than the number of those who ended before that time."""
        while self._ended and self._ended[0][0] < ended_before:
            _, life = self._ended.popleft()
            del self.entries[life]
            self._buckets[life % BUCKETS].discard(life)
            self.buried.add(life)

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
        return tuple(self.entries[life].as_update() for bucket in buckets for life in sorted(self._buckets[bucket]))

    def better_than(self, buckets: Iterable[int], updates: Iterable[Update]) -> tuple[Update, ...]:
        """What is known here, in these buckets, later than or not among ``updates``."""
        theirs = {update.life: precedence(update.status, update.version) for update in updates}
        better = [
            self.entries[life].as_update()
            for bucket in buckets
            for life in sorted(self._buckets[bucket])
            if self.entries[life].precedence > theirs.get(life, -1)
        ]
        better += [Update(life, Status.DEAD, 0, None, "ended long ago") for life in theirs if life in self.buried]
        return tuple(better)

    def _flip(self, entry: Entry) -> None:
        """Put a member's claim into the digest, or take it out again: the same operation."""
        mixed = (entry.life * 0x9E3779B97F4A7C15 + entry.precedence * 0xC2B2AE3D27D4EB4F) & _WORD
        mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _WORD
        self._digest[entry.life % BUCKETS] ^= mixed ^ (mixed >> 32)
