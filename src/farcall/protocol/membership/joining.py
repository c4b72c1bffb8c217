"""Coming and going: newcomers that ask for a place, members that give one out, and members that leave.

Names and ranks are given out by one member at a time, the arbiter.

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
    an incarnation that is a member                                      yes, as before
    any, in a group of fixed size that a member has left         no: it is over
    a name and a rank that are free                              yes; both are reserved for a while
    one that is reserved for another                             none: ask again
    one that the arbiter has                                     no
    one that another member has, the first time                  none; the holder is probed
    one that another member has that was heard of since then     no
    one that another member has that was not                     none: perhaps it was killed, and is dead soon;
                                                                 no, once its death would be known

For a moment there may be two arbiters (one is unresponsive, or not known to all yet), and two incarnations with one
name or rank. Then the later admission stays (of equal ones the higher incarnation) and the other one is expelled, by
whoever sees both: ``loser_of``. A name is given out again only by one who knows that its holder has ended, so the later
one also is the right one where word of that end has not come yet. A newcomer has one admission number, so only the
first offer is confirmed; it asks its sponsor again until it answers, or until the driver names another one.

A member that leaves tells a few, and goes when two of them have said that they know: one of them may die before it
tells anybody. Those who do not answer are not waited for: each round tells others, and after the last one this member
goes all the same; then it is found dead instead of gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import (
    Ack,
    Decision,
    Forward,
    Introduction,
    Join,
    JoinAnswer,
    Message,
    Obituary,
    Ping,
    Status,
    Update,
)
from farcall.protocol.membership.news import Shared
from farcall.protocol.membership.probing import Prober

MAX_CONTESTS = 256
RESERVED_ROUNDS = 6  # probe timeouts: so long an offer holds, counted from when it was last asked for
ACKS_NEEDED = 2
FAREWELL_ROUNDS = 5
GROUP_IS_OVER = "the group is over, since a member has left it"
"""Why a group of fixed size lets nobody in any more: its members leave together, or to meet anew."""

NewcomerMessage: TypeAlias = Join | Introduction | Forward | Decision


class Admissions:
    """What one member does for newcomers, as arbiter and as sponsor."""

    def __init__(
        self, shared: Shared, prober: Prober, take_in: Callable[[Member, float], None], *, is_fixed: bool
    ) -> None:
        self._is_fixed = is_fixed
        self._reserved_s = RESERVED_ROUNDS * shared.options.probe_timeout_s
        self._options = shared.options
        self._take_in = take_in
        self._table, self._outbox = shared.table, shared.outbox
        self._prober = prober
        self._offers: dict[int, tuple[Member, float]] = {}  # newcomer -> what it was offered, until when
        self._last_offer = 0
        self._contests: dict[int, float] = {}  # newcomer -> since when it is found out whether the holder lives

    def handle(self, sender: int, message: NewcomerMessage, now: float) -> None:
        """A message from or about a newcomer."""
        match message:
            case Join(member) if member.incarnation == sender:
                self._on_join(member, now)
            case Introduction(member) if member.incarnation == sender:
                self._take_in(member, now)
            case Forward(member):
                decision = self.decide(member, now)
                if decision is not None:
                    self._outbox.send(sender, decision)
            case Decision(member) if member.incarnation != self._table.me:  # the newcomer does not talk to the arbiter
                self._outbox.send(member.incarnation, message)

    def _on_join(self, member: Member, now: float) -> None:
        """As sponsor: pass a request on; take one in who was offered a place."""
        if self._is_fixed and self._table.is_over and self._table.member(member.incarnation) is None:
            self._outbox.send(member.incarnation, Decision(member, GROUP_IS_OVER))
        elif not member.admission and self._table.member(member.incarnation) is None:
            arbiter = self._table.lowest_rank(trusted_only=True).incarnation
            if arbiter != self._table.me:
                self._outbox.send(arbiter, Forward(member))
            elif (decision := self.decide(member, now)) is not None:
                self._outbox.send(member.incarnation, decision)
        elif self._confirm(member, now):
            # With the records of the dead: if they only were cut off, the newcomer, too, finds them again.
            updates = tuple(
                Update(entry.incarnation, entry.status, entry.version, entry.member, entry.why)
                for entry in self._table.entries.values()
            )
            self._outbox.send(member.incarnation, JoinAnswer(updates))

    def _confirm(self, member: Member, now: float) -> bool:
        """Take in one who was offered a place, unless that has been given to another since."""
        if self._table.member(member.incarnation) is None:
            for rival in self._table.rivals(member):
                if rival.admission >= member.admission:
                    self._outbox.send(member.incarnation, Decision(member, _why_not(member, rival)))
                    return False
            self._take_in(member, now)
        return True

    def decide(self, member: Member, now: float) -> Decision | None:
        """As arbiter: yes, no, or nothing yet."""
        entry = self._table.entries.get(member.incarnation)
        if entry is not None:
            known = entry.member or member
            return Decision(known, "" if not entry.ended else "this process was a member before, and its time is over")
        if self._is_fixed and self._table.is_over:
            return Decision(member, GROUP_IS_OVER)
        rivals = self._table.rivals(member)
        if rivals:
            return self._contest(member, rivals, now)
        self._contests.pop(member.incarnation, None)
        return self._offer(member, now)

    def _offer(self, member: Member, now: float) -> Decision | None:
        for incarnation, (offered, until) in list(self._offers.items()):
            if until < now or incarnation in self._table.entries:
                del self._offers[incarnation]
            elif incarnation != member.incarnation and (offered.name == member.name or offered.rank == member.rank):
                return None
        if member.incarnation in self._offers:
            offered = self._offers[member.incarnation][0]
        else:
            self._last_offer = 1 + max(self._last_offer, self._table.highest_admission)
            offered = msgspec.structs.replace(member, admission=self._last_offer)
        self._offers[member.incarnation] = (offered, now + self._reserved_s)
        return Decision(offered, "")

    def _contest(self, member: Member, rivals: list[Member], now: float) -> Decision | None:
        since = self._contests.get(member.incarnation)
        patience_s = self._options.suspicion_s + self._options.death_bound_s(self._table.size)
        if since is not None and now - since > patience_s:
            how = "which does not answer, but has not ended: end it first"
            return Decision(member, _why_not(member, rivals[0], how))
        for rival in rivals:
            if rival.incarnation == self._table.me or (since is not None and self._heard_since(rival, since)):
                self._contests.pop(member.incarnation, None)
                return Decision(member, _why_not(member, rival))
        if since is None:
            if len(self._contests) >= MAX_CONTESTS:  # newcomers that went away unanswered
                del self._contests[next(iter(self._contests))]
            self._contests[member.incarnation] = now
            for rival in rivals:
                self._prober.start(rival.incarnation, now, urgent=True)
        return None

    def _heard_since(self, rival: Member, since: float) -> bool:
        return self._table.entries[rival.incarnation].heard_at > since


def _why_not(member: Member, rival: Member, how: str = "which is alive") -> str:
    if rival.name == member.name:
        return f"the name {member.name!r} is taken: the member of rank {rival.rank} has it, {how}"
    return f"rank {member.rank} is taken: {rival.name!r} has it, {how}; give every process a rank of its own"


def loser_of(one: Member, other: Member) -> tuple[Member, str]:
    """Of two incarnations that were let in with one name or rank, the one that has to go, and why."""
    loser, winner = sorted((one, other), key=lambda member: (member.admission, member.incarnation))
    what = f"the name {loser.name!r}" if loser.name == winner.name else f"rank {loser.rank}"
    return loser, f"{what} was given to another process ({winner.name!r}, rank {winner.rank})"


class Newcomer:
    """The way in of one that is nobody yet; either ``admit`` or ``refuse`` is called at its end."""

    def __init__(
        self, shared: Shared, admit: Callable[[JoinAnswer, float], None], refuse: Callable[[str], None]
    ) -> None:
        self._options, self._table = shared.options, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._admit = admit
        self._refuse = refuse
        self._via = 0
        self._due: float | None = None

    def ask(self, via: int, now: float) -> None:
        """Ask ``via``, from now on, to be let in."""
        self._via = via
        self._outbox.send(via, Join(self._table.myself))
        self._due = now + self._options.probe_timeout_s
        self._timers.set(self._due, self._ask_again)

    def _ask_again(self, due: float, now: float) -> None:
        if due == self._due:
            self.ask(self._via, now)

    def on_message(self, sender: int, message: Message, now: float) -> None:
        """Something came, from whomever."""
        if isinstance(message, JoinAnswer):
            self._due = None
            self._admit(message, now)
        elif isinstance(message, Decision):
            self._on_offer(message)
        elif isinstance(message, Obituary) and not message.alone:
            self._refuse(message.why)  # let in and expelled again, before we knew of either
        elif isinstance(message, Ping | Obituary):
            self._outbox.send(sender, Ack(()))  # the word may be quicker than the answer

    def _on_offer(self, decision: Decision) -> None:
        """Confirm it, the first one only."""
        if decision.why_not:
            self._refuse(decision.why_not)
        elif decision.member.incarnation == self._table.me and not self._table.myself.admission:
            self._table.become(decision.member)
            self._outbox.send(self._via, Join(decision.member))


def end_of(incarnation: int, updates: Iterable[Update]) -> tuple[Update, ...]:
    """Those of ``updates`` that say that ``incarnation`` has ended."""
    return tuple(update for update in updates if update.incarnation == incarnation and update.status >= Status.DEAD)


class Farewell:
    """The way out of one member; ``depart`` is called at its end."""

    def __init__(self, shared: Shared, depart: Callable[[], None]) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._depart = depart
        self._acks: set[int] = set()
        self._rounds = 0

    def begin(self, now: float) -> None:
        """The table says already that we have left."""
        self._tell(now, now)

    def _tell(self, due: float, now: float) -> None:
        others = self._table.others
        if not others or self._rounds == FAREWELL_ROUNDS:
            self._depart()
            return
        self._rounds += 1
        for to in self._random.sample(others, min(ACKS_NEEDED + 1, len(others))):
            self._outbox.send(to, Ping(self._outbox.news(to, self._table.me)))
        self._timers.set(now + self._options.probe_timeout_s, self._tell)

    def on_answer(self, sender: int, updates: Iterable[Update]) -> None:
        """Something came back; it counts if it shows that our leave is known there."""
        if end_of(self._table.me, updates):
            self._acks.add(sender)
            if len(self._acks) >= min(ACKS_NEEDED, len(self._table.others)):
                self._depart()
