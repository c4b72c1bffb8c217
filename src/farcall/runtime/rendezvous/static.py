"""How the members of a group of fixed size agree on one table, through a store that all can reach: `join`.

Members meet in a *generation*, a numbered attempt with its own keys, so records of different attempts never mix:

    generation               the first generation that may still be open
    <g>/slot/<rank>          a member's record; the first process to set it holds the rank
    <g>/contests             how often a rank was found taken; absent: no holder needs to prove that it lives
    <g>/beat/<rank>          a heartbeat, once contested: tells a second live process from a dead one's record
    <g>/table                rank 0's proposal, once every slot is filled; the formed table outlives the clear-up
    <g>/seen/<digest>/<rank> that rank has confirmed exactly that table
    <g>/outcome              set once: formed, with the table; or abandoned, by which member, and which were missing
    <g>/left                 how many have read the outcome; rank 0 stays until all have, then clears up
    <g>/successors           how many processes have come to replace dead members
    <g>/successor/<n>        the record of each: of two that came for one member, it is unknown here which was admitted

All but the counters are proved with the secret (`records.py`). A member with another secret than rank 0's learns that
from rank 0's record, records it and gives up; all others learn it from that. When all have met, nobody needs the store
any more, and rank 0 closes the store that it opened, before it listens. So a member that is connected to rank 0, as all
are before ``init_rpc`` returns, finds the port free for a process group.

The total load on the store does not grow with the square of the group. Only rank 0 reads all slots; the others read
keys that are the same for all, and beyond ``_CROWD`` members less often the more members there are.

A table forms only when each process in it has confirmed that very table, so a dead process's record cannot
take part. A member that gives up abandons the generation; the others go on in the next until their own deadlines.
A ``join`` that raises leaves nothing behind, here or in the store, that a later one trips over.

A formed group may have lost a member, and admit another process in its place. So before a process takes part in a new
generation, it looks for a member of the last group that would admit it (`_running_group`). If it finds one, it adds its
record to the successors, so that later processes find it, and joins through `dynamic.py`.

Over 400 lines: one protocol over one set of keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from farcall.errors import BadRank, InitError, MissingPeers, RpcError, WrongSecret
from farcall.options import RpcBackendOptions
from farcall.protocol.backoff import Backoff
from farcall.protocol.member import Member
from farcall.runtime.devices.maps import wishes_of
from farcall.runtime.io.bounded_call import in_bounded_time
from farcall.runtime.rendezvous.agreement import (
    Abandoned,
    Formed,
    Membership,
    Slot,
    as_text,
    check_agreement,
    read_outcome,
    read_slot,
    read_table,
)
from farcall.runtime.rendezvous.contacts import Contacts
from farcall.runtime.rendezvous.dynamic import Meeting, is_there
from farcall.runtime.rendezvous.meeting_place import MeetingPlace
from farcall.runtime.rendezvous.missing_notice import MissingNotice
from farcall.runtime.rendezvous.records import Proofs, Records, secret_of
from farcall.runtime.rendezvous.store import STORE_ERRORS, KeyStore, StoreLost, open_store

logger: logging.Logger = logging.getLogger("farcall")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_BEAT_S = 0.3
_CROWD = 64  # larger groups poll the store less often: all together as often as this many members would
_LOOKED_AT = 16  # how many of the latest generations to search for a running group; abandoned ones count
_SUCCESSORS = 4  # how many of the latest successors per member to look for
_DEAD_S, _DEAD_BEATS = 2.5, 4  # a holder without a heartbeat for this long, and for this many beats, is gone
_LOOK_S, _LOOK_PART = 5.0, 0.2  # how long to look for members of an earlier group, at most this part of the time left
_FAREWELL_S = 5.0  # how long rank 0 stays for members that have not read the outcome
_TOGETHER_PART = 0.1  # once rank 0 has given up, who has less than this part of its time left gives up, too
_LATE_S = 3.0  # how long it stays past its own deadline: on a busy machine the others may be slow to look


def join(place: MeetingPlace, me: Member, options: RpcBackendOptions, over: str = "") -> Membership | Meeting:
    """Meet the others and return the table that all agree on, within ``options.start_deadline_s``.

    Or, if a running group may let us in, return the members to ask; but never for the cluster with the id ``over``.
    Raises ``BadRank``, ``DuplicateName`` (at every member), ``MissingPeers`` or another ``InitError``.
    """
    meeting = StaticRendezvous(place, me, options, over)

    def meet(cancelled: threading.Event) -> Membership | Meeting:
        meeting.cancelled = cancelled
        return meeting.run()

    return in_bounded_time(meet, options.start_deadline_s + _LATE_S, place.name)


class StaticRendezvous:
    """One member's way to an agreement, possibly over several stores and generations.

    Mutable: the open store, the generation, the table confirmed last, and what is known of the other members.
    """

    def __init__(self, place: MeetingPlace, me: Member, options: RpcBackendOptions, over: str = "") -> None:
        self.place = place
        self._options = options
        self._over = over
        self.cancelled: threading.Event = threading.Event()
        self._me = me
        self._secret = secret_of(options)
        has_secret = options.has_secret
        self._proofs = Proofs(self._secret, has_secret, place.name)
        self._timeout_s = options.start_deadline_s
        self._deadline = time.monotonic() + self._timeout_s
        self._notice = MissingNotice(
            place.name,
            rank=place.rank,
            size=place.world_size,
            deadline=self._deadline,
            launched=place.hosted_by_agent,
        )
        cluster_id = secrets.token_hex(8) if place.rank == 0 else ""
        self._slot = Slot(me, place.world_size, has_secret, cluster_id, wishes_of(options))
        self._slot_text = as_text(self._slot)
        self._records: Records | None = None
        self._heard_first = place.rank == 0
        self._base = f"farcall/{place.attempt}"
        self._beat_s = _beat_s(place.world_size)
        self._generation = 0
        self._table, self._digest, self._next_beat = b"", "", 0.0
        self._names: dict[int, str] = {}
        self._found: dict[str, bytes | WrongSecret] = {}  # the slots, as last read
        self._gave_up: dict[int, str] = {}
        self._missing_elsewhere: set[int] = set()

    def run(self) -> Membership | Meeting:
        """Try stores until a table forms. Keeps no reference to a store afterwards."""
        try:
            while True:
                self._open_store()
                try:
                    return self._meet()
                except RpcError:
                    raise
                except (StoreLost, *STORE_ERRORS) as error:
                    # Rank 0 ended, and its store with it; when rank 0 restarts, it opens another one.
                    self._records = None
                    self._pause_for_another_store(error)
        finally:
            self._records = None

    def _open_store(self) -> None:
        while self._records is None:
            try:
                self._records = Records(open_store(self.place, self._deadline, self.cancelled), self._proofs)
            except StoreLost as error:
                self._pause_for_another_store(error)
            except MissingPeers:
                if not self._gave_up:
                    raise
                self._raise_store_gone("")

    def _pause_for_another_store(self, error: Exception) -> None:
        if time.monotonic() + _LONGEST_PAUSE_S >= self._deadline or self.cancelled.is_set():
            first_line = str(error).partition("\n")[0]
            self._raise_store_gone(f" ({first_line})")
        self.cancelled.wait(_LONGEST_PAUSE_S)

    def _raise_store_gone(self, why: str) -> NoReturn:
        raise self._missing(self._missing_for_others() or [0], f"; the store went away{why}") from None

    @property
    def _open(self) -> Records:
        if self._records is None:
            raise StoreLost("it is closed")
        return self._records

    def _key(self, what: str) -> str:
        return f"{self._base}/{self._generation}/{what}"

    # The meeting itself.

    def _meet(self) -> Membership | Meeting:
        self._generation = self._first_open_generation()
        if (running := self._running_group()) is not None:
            return running
        while True:
            self._table = b""
            self._next_beat = 0.0
            self._claim_rank()
            try:
                outcome = self._wait_for_outcome()
            except BaseException:
                self._withdraw()
                raise
            self._advance()
            self._open.store.add(self._key("left"), 1)
            if isinstance(outcome, Formed) and outcome.slots:
                return self._conclude(outcome)
            if isinstance(outcome, Abandoned):
                self._gave_up[outcome.member.rank] = outcome.member.name
                self._missing_elsewhere.update(outcome.missing)
            self._delete_own()
            if 0 in self._gave_up and self._deadline - time.monotonic() < _TOGETHER_PART * self._timeout_s:
                # All started together: we would give up, too, before anybody could start rank 0 again. And its store
                # ends with it: torch would log a stack, in C++, where we ask once more.
                raise self._missing(self._missing_for_others(), "")
            self._generation += 1

    def _first_open_generation(self) -> int:
        pointer = self._open.read(f"{self._base}/generation")
        self._generation = int(pointer) if pointer else 0
        while self._open.read(self._key("outcome")) is not None:
            self._generation += 1
        return self._generation

    def _running_group(self) -> Meeting | None:
        """How to join the last group that formed here, if a member of it lives that would admit this process."""
        for generation in reversed(range(max(0, self._generation - _LOOKED_AT), self._generation)):
            key = f"{self._base}/{generation}"
            outcome = self._open.read(f"{key}/outcome")
            if outcome is None or not isinstance(read_outcome(outcome), Formed):
                continue
            table = self._open.read(f"{key}/table")
            slots = () if table is None else read_table(table)
            if len(slots) != self.place.world_size or slots[0].cluster_id == self._over:
                return None
            others = [slot.member for slot in slots if slot.member.rank != self._me.rank]
            known: tuple[Member, ...] = tuple(others)
            if self._open.store.check([f"{key}/successors"]):
                count = self._open.store.add(f"{key}/successors", 0)
                numbers = range(count, max(0, count - _SUCCESSORS * len(slots)), -1)
                later = (self._open.read(f"{key}/successor/{number}") for number in numbers)
                known += tuple(read_slot(data).member for data in later if data is not None)
            cluster_id = slots[0].cluster_id
            meeting = Meeting(self.place, None, None, cluster_id, self._secret, known, len(slots))
            now = time.monotonic()
            deadline = now + min(_LOOK_S, _LOOK_PART * (self._deadline - now))
            if not known or not is_there(meeting, self._me, self._options, deadline):
                return None
            check_agreement([self._slot if slot.member.rank == self._me.rank else slot for slot in slots])
            number = self._open.store.add(f"{key}/successors", 1)
            self._open.write(f"{key}/successor/{number}", self._slot_text)
            return meeting
        return None

    def _advance(self) -> None:
        """Point newcomers past this generation, before this member leaves it."""
        key = f"{self._base}/generation"
        before = self._open.read(key)
        if before is None or int(before) <= self._generation:
            self._open.replace(key, before.decode() if before else "", str(self._generation + 1))

    def _claim_rank(self) -> None:
        """Take the slot of our rank, from a dead process if need be; raise if a living one holds it."""
        mine = self._slot_text.encode()
        key, beat_key = self._key(f"slot/{self._me.rank}"), self._key(f"beat/{self._me.rank}")
        holder = self._open.replace(key, "", self._slot_text)
        if holder == mine:
            return
        self._open.store.add(self._key("contests"), 1)
        beat = self._open.store.add(beat_key, 0)
        silent_since = time.monotonic()
        pauses = self._pauses()
        while holder != mine:
            outcome = self._outcome()
            if isinstance(outcome, Abandoned):
                self._generation += 1
                self._claim_rank()
                return
            if isinstance(outcome, Formed) or self._open.store.add(beat_key, 0) != beat:
                other = read_slot(holder).member
                raise BadRank(
                    f"rank {self._me.rank} is taken by another process, {other.name!r}, so {self._me.name!r} cannot "
                    "have it: give every process a rank of its own"
                )
            dead_s = max(_DEAD_S, min(_DEAD_BEATS * _beat_s(read_slot(holder).world_size), self._timeout_s / 2))
            if time.monotonic() - silent_since > dead_s:
                logger.info("rank %d: taking the place of a process that is gone", self._me.rank)
                holder = self._open.replace(key, holder.decode(), self._slot_text)
                silent_since = time.monotonic()
                if holder == mine:
                    return
            self._check_cancelled()
            if time.monotonic() >= self._deadline:
                raise self._missing([], "")
            self.cancelled.wait(pauses.next_s())
            holder = self._open.replace(key, "", self._slot_text)

    def _wait_for_outcome(self) -> Formed | Abandoned:
        pauses = self._pauses()
        while True:
            outcome = self._outcome()
            if outcome is not None:
                return outcome
            # A proposed table changes only if a slot changes hands: check that once per beat, not at every poll.
            if self._beat() or not self._table:
                if self._me.rank == 0:
                    self._propose()
                if self._confirm():
                    pauses = self._pauses()
            if self._me.rank == 0 and self._close_if_confirmed():
                continue
            self._check_cancelled()
            if time.monotonic() >= self._deadline:
                outcome = self._abandon()
                if isinstance(outcome, Formed):
                    return outcome
                self._raise_for_absence(outcome)
            self.cancelled.wait(pauses.next_s())

    def _outcome(self) -> Formed | Abandoned | None:
        data = self._open.read(self._key("outcome"))
        return None if data is None else read_outcome(data)

    def _beat(self) -> bool:
        """Once per beat period: send a heartbeat if a rank is contested, and check that our slot is still ours."""
        if time.monotonic() < self._next_beat:
            return False
        self._notice.look(self._awaited)
        Contacts(self._open, self.place.attempt).check_nobody(self._me.name, self.place.world_size)
        self._next_beat = time.monotonic() + self._beat_s
        if self._open.store.check([self._key("contests")]):
            # Only then: with a FileStore each member reads everything that any other writes.
            self._open.store.add(self._key(f"beat/{self._me.rank}"), 1)
        if not self._heard_first:
            self._heard_first = self._open.read(self._key("slot/0")) is not None
        holder = self._open.read(self._key(f"slot/{self._me.rank}"))
        if holder is None:
            raise StoreLost("our record vanished from it")
        if holder != self._slot_text.encode():
            other = read_slot(holder).member.name
            raise BadRank(
                f"rank {self._me.rank} was taken over by another process, {other!r}, while this one was stopped"
            )
        return True

    def _propose(self) -> None:
        """Rank 0: propose the table once all slots are filled, and again whenever one changed hands."""
        found = self._open.read_all(self._slot_keys())
        if found is None:
            return
        table = as_text([read_slot(data) for data in found])
        if table.encode() != self._table:
            self._open.write(self._key("table"), table)

    def _confirm(self) -> bool:
        """Confirm the table if it is new and we are in it."""
        table = self._open.read(self._key("table"))
        if table is None or table == self._table or self._slot not in read_table(table):
            return False
        self._table, self._digest = table, hashlib.sha256(table).hexdigest()[:32]
        self._open.write(self._seen_key(self._me.rank), "1")
        return True

    def _close_if_confirmed(self) -> bool:
        """Rank 0: form the table once every member in it has confirmed it."""
        if not self._table or self._open.read_all(self._seen_keys()) is None:
            return False
        self._open.replace(self._key("outcome"), "", as_text(Formed(read_table(self._table))))
        return True

    def _seen_keys(self) -> list[str]:
        """Rank 0: the keys that confirm its table."""
        return [self._seen_key(rank) for rank in range(self.place.world_size)]

    def _seen_key(self, rank: int) -> str:
        return self._key(f"seen/{self._digest}/{rank}")

    def _slot_keys(self) -> list[str]:
        return [self._key(f"slot/{rank}") for rank in range(self.place.world_size)]

    def _abandon(self) -> Formed | Abandoned:
        """Close the generation without a table, unless it has just formed."""
        note = as_text(Abandoned(self._me, self._slot.has_secret, tuple(self._absent())))
        return read_outcome(self._open.replace(self._key("outcome"), "", note))

    def _withdraw(self) -> None:
        """After a failure: remove our record, so that nobody counts on us. The store itself may have failed."""
        with contextlib.suppress(Exception):
            if self._open.read(self._key(f"slot/{self._me.rank}")) != self._slot_text.encode():
                return  # the slot is another process's by now
            with contextlib.suppress(WrongSecret):  # the outcome of a member that gave up before us
                if self._outcome() is None:
                    self._abandon()
                self._advance()
            if self._me.rank == 0:
                # The store may end with rank 0: let the others first learn who was missing, or has another secret. A
                # member that has learned it deletes its record.
                self._stay_until(lambda: len(self._open.there(self._slot_keys())) <= 1)
            self._delete_own()

    def _conclude(self, formed: Formed) -> Membership:
        slots = formed.slots
        if self._slot not in slots:
            others = ", ".join(slot.member.name for slot in slots)
            raise BadRank(
                f"a group of {len(slots)} formed without this process ({others}): it asked for rank "
                f"{self._me.rank} of {self.place.world_size}; world_size must be the same everywhere, "
                "and each rank given once"
            )
        store: KeyStore | None = None
        left = self._key("left")
        if self._me.rank == 0 and self._stay_until(lambda: self._open.store.add(left, 0) >= len(slots)):
            self._clear_up(len(slots))
        elif self._me.rank == 0:
            store = self._open.store
        if self.place.scheme == "file":
            store = self._open.store  # keep it: the last FileStore to close deletes the file, which a successor needs
        check_agreement(slots)
        members = [slot.member for slot in slots]
        return Membership(
            self._me,
            members,
            slots[0].cluster_id,
            self._secret,
            len(slots),
            store=store,
            rank_0_serves=self.place.host is not None and not self.place.hosted_by_agent,
        )

    def _stay_until(self, all_know: Callable[[], bool]) -> bool:
        """Rank 0, which may host the store: stay until the others have read the outcome; False: not all did in time."""
        pauses = self._pauses()
        until = min(time.monotonic() + _FAREWELL_S, self._deadline + _LATE_S)
        while not all_know():
            if time.monotonic() >= until or self.cancelled.is_set():
                return False
            self.cancelled.wait(pauses.next_s())
        return True

    def _delete_own(self) -> None:
        for what in ("beat", "slot"):  # the slot last: rank 0 may leave once it sees no other slot
            self._open.store.delete_key(self._key(f"{what}/{self._me.rank}"))

    def _clear_up(self, size: int) -> None:
        """Remove the keys of this generation except its outcome and its table."""
        kinds = ("slot", "beat") if self._open.store.check([self._key("contests")]) else ("slot",)
        keys = [self._key(f"{kind}/{rank}") for rank in range(size) for kind in kinds] + [self._key("contests")]
        for key in [*keys, *self._seen_keys(), self._key("left"), f"{self._base}/{self._generation - 1}/table"]:
            self._open.store.delete_key(key)
        self._open.write(self._key("outcome"), as_text(Formed(())))

    def _pauses(self) -> Backoff:
        """Growing pauses: short for members that start together, long under a long wait, to spare the store."""
        crowd = 1.0 if self._me.rank == 0 else max(1.0, self.place.world_size / _CROWD)
        return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S * crowd, factor=1.5)

    # Failing in words.

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise InitError("joining was interrupted")

    def _awaited(self) -> list[int]:
        """The ranks to name while we wait. In a crowd only rank 0 names all missing ranks; the others name rank 0."""
        if self._me.rank == 0 or self.place.world_size <= _CROWD:
            return self._absent()
        return [] if self._heard_first else [0]

    def _absent(self) -> list[int]:
        """The ranks without a record in this generation; remembers the names of the others."""
        keys = self._slot_keys()
        there = self._found = self._open.look(keys)
        for data in there.values():
            if isinstance(data, bytes):  # else a process with another secret holds the rank
                member = read_slot(data).member
                self._names[member.rank] = member.name
        return [rank for rank, key in enumerate(keys) if key not in there]

    def _raise_for_absence(self, mine: Abandoned) -> NoReturn:
        """At the deadline: raise the error for the most likely cause."""
        # Use the records as read before we gave up: members that see us give up delete theirs.
        for data in self._found.values():
            if isinstance(data, WrongSecret):
                raise data
        check_agreement([read_slot(data) for data in self._found.values() if isinstance(data, bytes)])
        never_seen = self._missing_elsewhere - set(self._names) - set(self._gave_up)
        missing = sorted(never_seen) or [rank for rank in mine.missing if rank not in self._gave_up]
        if missing or self._gave_up:
            raise self._missing(missing or sorted(self._gave_up), "")
        silent = [rank for rank in range(self.place.world_size) if rank != self._me.rank]
        raise self._missing(silent, "; all left a record, but these do not answer")

    def _missing_for_others(self) -> list[int]:
        """The ranks that those who gave up had missed; if all of these came later, those who gave up."""
        missing = self._missing_elsewhere - set(self._names) - set(self._gave_up) - {self._me.rank}
        return sorted(missing) or sorted(self._gave_up)

    def _missing(self, ranks: list[int], why: str) -> MissingPeers:
        known = {**self._gave_up, **self._names}
        named = [f"rank {rank} ({known[rank]})" if rank in known else f"rank {rank}" for rank in ranks]
        gone = [f"rank {rank} ({name})" for rank, name in sorted(self._gave_up.items()) if rank not in ranks]
        earlier = f"; {', '.join(gone)} came and gave up" if gone else ""
        if self._generation and not self._gave_up:
            earlier += f"; {self._generation} earlier groups met there: is this process started a second time?"
        return MissingPeers(
            f"{self._me.name} (rank {self._me.rank} of {self.place.world_size}) waited {self._timeout_s:g} s "
            f"at {self.place.name}; missing: {', '.join(named) or 'nobody known'}{why}{earlier}. "
            "Were they all started, with the same init_method and world_size?",
            [known.get(rank, rank) for rank in ranks],
        )


def _beat_s(size: int) -> float:
    return _BEAT_S * max(1.0, size / _CROWD)
