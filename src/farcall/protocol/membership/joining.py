"""Coming and going: newcomers that ask for a place, members that give one out, and members that leave.

One member at a time gives out names and ranks: the *arbiter*, in each member's view the trusted member of the lowest
rank. The *sponsor*, the member that a newcomer asks, forwards the request to the arbiter. So of two newcomers that want
one name at the same time, the arbiter offers it to the first and tells the second who has it.

An offer binds nobody: the newcomer becomes a member when it has confirmed the offer to a sponsor, which spreads the
news. If the offer alone admitted it, a newcomer that gave up long ago could drive a living member from its name: an
arbiter that was stopped for a while answers old requests.

    newcomer              sponsor                  arbiter
    Join(record) ------>  Forward(record) ------>  decides
                <------  Decision         <------  Decision(record with an admission number, or why not;
                                                            the members it heard of last)
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
name or rank. Then the later admission stays (of equal ones the higher incarnation), and any member that sees both
expels the other: ``loser_of``. An arbiter gives a name out again only if it knows that the holder has ended, so the
later admission is also right where news of that end has not arrived yet. A newcomer has one admission number, so it
confirms only the first offer; it repeats its request until the sponsor answers, or until the driver names another.

A newcomer knows every member that was there before it asked: a member's start ends when its neighbours know it, the
arbiter among them in a full mesh; and the arbiter's latest members reach the sponsor, whose table the newcomer gets.

A leaving member tells all its neighbours, and goes when all of them have acknowledged, at least two: who was not told
would find nobody there, and report a death. Two, since one may die before it tells anybody; and an acknowledgement by a
member that is leaving itself does not count, since it may be gone before it passes anything on (all nodes of one
process leave together). Whoever takes the place of such a neighbour is told, too. After two rounds the leaving member
waits for nobody silent, if two have acknowledged, and after the last round it goes all the same; the others then find
it dead instead of gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import (
    MAX_UPDATES,
    Ack,
    Decision,
    Forward,
    Introduction,
    Join,
    JoinAnswer,
    JoinRefusal,
    Message,
    Obituary,
    Ping,
    Status,
    Update,
)
from farcall.protocol.membership.news import Shared
from farcall.protocol.membership.probing import Prober

MAX_CONTESTS = 256
RESERVED_ROUNDS = 6  # probe timeouts for which an offer holds, counted from the newcomer's latest request
ACKS_NEEDED = 2
PATIENT_ROUNDS = 2
FAREWELL_ROUNDS = 5
GROUP_IS_OVER = "the group is over, since a member has left it"

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
        # Mutable, as arbiter:
        self._offers: dict[int, tuple[Member, float]] = {}  # newcomer -> its offer, and until when it holds
        self._last_offer = 0  # the latest admission number
        self._contests: dict[int, float] = {}  # newcomer -> when probing of the holder of its name or rank began

    def handle(self, sender: int, message: NewcomerMessage, now: float) -> None:
        """A message from or about a newcomer."""
        match message:
            case Join(member) if member.incarnation == sender:
                self._on_join(member, now)
            case Introduction(member) if member.incarnation == sender:
                self._take_in(member, now)
                rivals = self._table.rivals(member) if self._options.is_guarded else []
                if rivals and (decision := self._contest(member, rivals, now)) is not None:
                    # Two arbiters gave out one name. Whom two members refuse joins again.
                    lowest = self._table.lowest_rank().rank
                    why, refusal = decision.why_not, decision.refusal
                    self._outbox.send(sender, Obituary(sender, why, self._table.size, lowest, refusal=refusal))
            case Forward(member):
                decision = self.decide(member, now)
                if decision is not None:
                    latest = self._table.latest(MAX_UPDATES)
                    self._outbox.send(sender, msgspec.structs.replace(decision, latest=latest))
            case Decision(member, _, latest) if member.incarnation != self._table.me:  # as sponsor: pass it on
                for other in latest:
                    self._take_in(other, now)
                self._outbox.send(member.incarnation, msgspec.structs.replace(message, latest=()))

    def _on_join(self, member: Member, now: float) -> None:
        """As sponsor: forward a request to the arbiter; take in a newcomer that confirms its offer."""
        if self._is_fixed and self._table.is_over and self._table.member(member.incarnation) is None:
            self._outbox.send(member.incarnation, Decision(member, GROUP_IS_OVER, refusal=JoinRefusal.GROUP_OVER))
        elif not member.admission and self._table.member(member.incarnation) is None:
            arbiter = self._table.lowest_rank(trusted_only=True).incarnation
            if arbiter != self._table.me:
                self._outbox.send(arbiter, Forward(member))
            elif (decision := self.decide(member, now)) is not None:
                self._outbox.send(member.incarnation, decision)
        elif self._confirm(member, now):
            # Include the dead: if they were only cut off, the newcomer can find them again, too.
            updates = tuple(
                Update(entry.incarnation, entry.status, entry.version, entry.member, entry.why, entry.host_is_silent)
                for entry in self._table.entries.values()
            )
            self._outbox.send(member.incarnation, JoinAnswer(updates))

    def is_free(self, member: Member, now: float) -> bool:
        """Has nobody the name or rank of ``member``, nor had it until lately? Probe whoever has it."""
        rivals = self._table.rivals(member)
        for rival in rivals:
            if rival.incarnation != self._table.me:
                self._prober.start(rival.incarnation, now)
        return not rivals and not self._table.is_kept(member, now - self._options.name_kept_s)

    def _confirm(self, member: Member, now: float) -> bool:
        """Take in a newcomer with an offer, unless its place has been given to another since."""
        if self._table.member(member.incarnation) is None:
            for rival in self._table.rivals(member):
                if rival.admission >= member.admission:
                    self._outbox.send(member.incarnation, _taken(member, rival))
                    return False
            if self._options.is_guarded and not self.is_free(member, now):
                return False
            self._take_in(member, now)
        return True

    def decide(self, member: Member, now: float) -> Decision | None:
        """As arbiter: an offer, a refusal, or None: undecided, the newcomer asks again."""
        entry = self._table.entries.get(member.incarnation)
        if entry is not None:
            known = entry.member or member
            return Decision(known, "" if not entry.ended else "this process was a member before, and its time is over")
        if self._is_fixed and self._table.is_over:
            return Decision(member, GROUP_IS_OVER, refusal=JoinRefusal.GROUP_OVER)
        rivals = self._table.rivals(member)
        if rivals:
            return self._contest(member, rivals, now)
        if self._table.is_kept(member, now - self._options.name_kept_s):
            return None
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
            return _taken(member, rivals[0], how)
        for rival in rivals:
            if rival.incarnation == self._table.me or (since is not None and self._heard_since(rival, since)):
                self._contests.pop(member.incarnation, None)
                return _taken(member, rival)
        if since is None:
            if len(self._contests) >= MAX_CONTESTS:  # newcomers that went away unanswered
                del self._contests[next(iter(self._contests))]
            self._contests[member.incarnation] = now
            for rival in rivals:
                self._prober.start(rival.incarnation, now, urgent=True)
        return None

    def _heard_since(self, rival: Member, since: float) -> bool:
        return self._table.entries[rival.incarnation].heard_at > since


def _taken(member: Member, rival: Member, how: str = "which is alive") -> Decision:
    if rival.name == member.name:
        why = f"the name {member.name!r} is taken: the member of rank {rival.rank} has it, {how}"
        return Decision(member, why, refusal=JoinRefusal.NAME_TAKEN)
    why = f"rank {member.rank} is taken: {rival.name!r} has it, {how}; give every process a rank of its own"
    return Decision(member, why, refusal=JoinRefusal.RANK_TAKEN)


def loser_of(one: Member, other: Member) -> tuple[Member, str]:
    """Of two incarnations admitted with one name or rank, the one that has to go, and why."""
    loser, winner = sorted((one, other), key=lambda member: (member.admission, member.incarnation))
    what = f"the name {loser.name!r}" if loser.name == winner.name else f"rank {loser.rank}"
    return loser, f"{what} was given to another process ({winner.name!r}, rank {winner.rank})"


class Newcomer:
    """The joining of a node that is no member yet; ends with a call of ``admit`` or ``refuse``."""

    def __init__(
        self, shared: Shared, admit: Callable[[JoinAnswer, float], None], refuse: Callable[[str, JoinRefusal], None]
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
        """A message came; before admission, any sender's counts."""
        if isinstance(message, JoinAnswer):
            self._due = None
            self._admit(message, now)
        elif isinstance(message, Decision):
            self._on_offer(message)
        elif isinstance(message, Obituary) and not message.alone:
            self._refuse(message.why, message.refusal)  # admitted and expelled again, before we heard of either
        elif isinstance(message, Ping | Obituary):
            self._outbox.send(sender, Ack(()))  # news of our admission may overtake the JoinAnswer

    def _on_offer(self, decision: Decision) -> None:
        """Confirm the first offer only."""
        if decision.why_not:
            self._refuse(decision.why_not, decision.refusal)
        elif decision.member.incarnation == self._table.me and not self._table.myself.admission:
            self._table.become(decision.member)
            self._outbox.send(self._via, Join(decision.member))


def end_of(incarnation: int, updates: Iterable[Update]) -> tuple[Update, ...]:
    """Those of ``updates`` that say that ``incarnation`` has ended."""
    return tuple(update for update in updates if update.incarnation == incarnation and update.status >= Status.DEAD)


class Farewell:
    """The leaving of one member; ends with a call of ``depart``."""

    def __init__(self, shared: Shared, depart: Callable[[], None]) -> None:
        self._options, self._table = shared.options, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._depart = depart
        # Mutable: who has acknowledged, who is not there any more, who was told in this round; the rounds.
        self._acks: set[int] = set()
        self._refused: set[int] = set()
        self._told: set[int] = set()
        self._rounds = 0

    def begin(self, now: float) -> None:
        """Tell the neighbours. The table must say already that we have left."""
        self._tell(now, now)

    def _tell(self, due: float, now: float) -> None:
        self._told.clear()
        if self._rounds == FAREWELL_ROUNDS:
            self._depart()
            return
        self._rounds += 1
        self._timers.set(now + self._options.probe_timeout_s, self._tell)
        self.look()

    def on_answer(self, sender: int, updates: Iterable[Update]) -> None:
        """Updates came from ``sender``; they acknowledge our leave if they contain it."""
        if end_of(self._table.me, updates):
            self._acks.add(sender)

    def on_refused(self, incarnation: int) -> None:
        """Nobody listens at the addresses of ``incarnation``: it has left without telling us, or is dead."""
        self._refused.add(incarnation)
        self.look()

    def look(self) -> None:
        """Something was heard, perhaps that a neighbour leaves, too: depart, or tell those who were not told yet."""
        members = self._table
        unheard = members.neighbours() - self._acks - self._refused
        awaited = [one for one in unheard if members.entries[one].status is Status.ALIVE]
        witnesses = sum(members.member(one) is not None for one in self._acks)
        others = len(members.others) - sum(members.member(one) is not None for one in self._refused)
        if witnesses >= min(ACKS_NEEDED, others) and (not awaited or self._rounds > PATIENT_ROUNDS):
            self._depart()
            return
        for to in sorted(unheard - self._told):
            self._told.add(to)
            self._outbox.send(to, Ping(self._outbox.news(to, members.me)))
