"""Who is let in: names and ranks are given out by one member at a time, the arbiter.

The arbiter is the trusted member of the lowest rank, as far as one knows. Whoever is asked to let a newcomer in,
its *sponsor*, asks the arbiter. So of two who want one name at the same time, the arbiter offers it to the first
and tells the second who has it. An offer binds nobody: the newcomer becomes a member when it has confirmed it to
a sponsor, who spreads the word. Were it taken in before, one who has long given up could drive a living member
from its name: an arbiter that slept answers questions of yesterday.

    newcomer              sponsor                  arbiter
    Join(record) ------>  Forward(record) ------>  decides
                <------  Decision         <------  Decision(record with an admission number, or why not)
    Join(record) ------>  takes it in, spreads it
                <------  JoinAnswer(table)

    arbiter: a request for                                       decision
    a life that is a member                                      yes, as before
    a name and a rank that are free                              yes; both are reserved for a while
    one that is reserved for another                             none: ask again
    one that the arbiter has                                     no
    one that another member has, the first time                  none; the holder is probed
    one that another member has that was heard of since then     no
    one that another member has that was not                     none: perhaps it was killed, and is dead soon

For a moment there may be two arbiters (one is suspected, or not known to all yet), and two lives with one name
or rank. Then the later admission stays (of equal ones the higher life) and the other one is expelled, by whoever
sees both: ``loser_of``. A name is given out again only by one who knows that its holder has ended, so the later
one also is the right one where word of that end has not come yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from farcall.protocol.membership.events import MembershipOptions
from farcall.protocol.membership.members import Table
from farcall.protocol.membership.messages import Decision, Forward, Introduction, Join, JoinAnswer, Record
from farcall.protocol.membership.outbox import Outbox
from farcall.protocol.membership.probing import Prober

__all__ = ["Admissions", "NewcomerMessage", "loser_of"]

MAX_CONTESTS = 256
RESERVED_ROUNDS = 6  # probe timeouts: so long an offer holds, counted from when it was last asked for


NewcomerMessage: TypeAlias = Join | Introduction | Forward | Decision


class Admissions:
    """What one member does for newcomers, as arbiter and as sponsor."""

    def __init__(
        self,
        options: MembershipOptions,
        table: Table,
        outbox: Outbox,
        prober: Prober,
        take_in: Callable[[Record, float], None],
    ) -> None:
        self._reserved_s = RESERVED_ROUNDS * options.probe_timeout_s
        self._take_in = take_in
        self._table = table
        self._outbox = outbox
        self._prober = prober
        self._offers: dict[int, tuple[Record, float]] = {}  # newcomer -> what it was offered, until when
        self._last_offer = 0
        self._contests: dict[int, float] = {}  # newcomer -> since when it is found out whether the holder lives

    def handle(self, sender: int, message: NewcomerMessage, now: float) -> None:
        """A message from or about a newcomer."""
        match message:
            case Join(record) if record.life == sender:
                self._on_join(record, now)
            case Introduction(record) if record.life == sender:
                self._take_in(record, now)
            case Forward(record):
                decision = self.decide(record, now)
                if decision is not None:
                    self._outbox.send(sender, decision)
            case Decision(record) if record.life != self._table.me:  # the newcomer does not talk to the arbiter
                self._outbox.send(record.life, message)

    def _on_join(self, record: Record, now: float) -> None:
        """As sponsor: pass a request on; take one in who was offered a place."""
        if not record.admission and self._table.member(record.life) is None:
            arbiter = self._table.lowest_rank(trusted_only=True).life
            if arbiter != self._table.me:
                self._outbox.send(arbiter, Forward(record))
            elif (decision := self.decide(record, now)) is not None:
                self._outbox.send(record.life, decision)
        elif self._confirm(record, now):
            updates = tuple(entry.as_update() for entry in self._table.entries.values())
            self._outbox.send(record.life, JoinAnswer(updates))

    def _confirm(self, record: Record, now: float) -> bool:
        """Take in one who was offered a place, unless that has been given to another since."""
        if self._table.member(record.life) is None:
            for rival in self._table.rivals(record):
                if rival.admission >= record.admission:
                    self._outbox.send(record.life, Decision(record, _why_not(record, rival)))
                    return False
            self._take_in(record, now)
        return True

    def decide(self, record: Record, now: float) -> Decision | None:
        """As arbiter: yes, no, or nothing yet."""
        entry = self._table.entries.get(record.life)
        if entry is not None:
            known = entry.record or record
            return Decision(known, "" if not entry.ended else "this process was a member before, and its time is over")
        rivals = self._table.rivals(record)
        if rivals:
            return self._contest(record, rivals, now)
        self._contests.pop(record.life, None)
        return self._offer(record, now)

    def _offer(self, record: Record, now: float) -> Decision | None:
        for life, (offered, until) in list(self._offers.items()):
            if until < now or life in self._table.entries:
                del self._offers[life]
            elif life != record.life and (offered.name == record.name or offered.rank == record.rank):
                return None
        if record.life in self._offers:
            offered = self._offers[record.life][0]
        else:
            self._last_offer = 1 + max(self._last_offer, self._table.highest_admission)
            offered = msgspec.structs.replace(record, admission=self._last_offer)
        self._offers[record.life] = (offered, now + self._reserved_s)
        return Decision(offered, "")

    def _contest(self, record: Record, rivals: list[Record], now: float) -> Decision | None:
        since = self._contests.get(record.life)
        for rival in rivals:
            if rival.life == self._table.me or (since is not None and self._heard_since(rival, since)):
                self._contests.pop(record.life, None)
                return Decision(record, _why_not(record, rival))
        if since is None:
            if len(self._contests) >= MAX_CONTESTS:  # newcomers that went away unanswered
                del self._contests[next(iter(self._contests))]
            self._contests[record.life] = now
            for rival in rivals:
                self._prober.start(rival.life, now, urgent=True)
        return None

    def _heard_since(self, rival: Record, since: float) -> bool:
        return self._table.entries[rival.life].heard_at > since


def _why_not(record: Record, rival: Record) -> str:
    if rival.name == record.name:
        return f"the name {record.name!r} is taken: the member of rank {rival.rank} has it, and it is alive"
    return f"rank {record.rank} is taken: {rival.name!r} has it, and it is alive; give every process a rank of its own"


def loser_of(one: Record, other: Record) -> tuple[Record, str]:
    """Of two lives that were let in with one name or rank, the one that has to go, and why."""
    loser, winner = sorted((one, other), key=lambda record: (record.admission, record.life))
    what = f"the name {loser.name!r}" if loser.name == winner.name else f"rank {loser.rank}"
    return loser, f"{what} was given to another process ({winner.name!r}, rank {winner.rank})"
