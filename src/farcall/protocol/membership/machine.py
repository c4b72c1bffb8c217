"""One member's part in the membership protocol: events in, effects out.

`TRANSITIONS` has the states of this member itself, `table.CHANGES` those of others; the package's docstring has the
rules around them. Longer than other files: it keeps all that members decide about each other in one place.

Owns the composition and this member's own state, and turns the findings of the parts (the outcome of a probe, a change
of the table, an arbiter's decision) into effects and news. No clock, socket or thread: ``now`` never goes
back, and all randomness is passed in. Not thread-safe.

Invariant: only a claim from a member counts. Strangers and the dead may have other tables, and nothing of those enters
this one except through the rule for healed partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final

from farcall.protocol.member import PROCESS_ENDED, REFUSED, Member
from farcall.protocol.membership import events
from farcall.protocol.membership.accusations import Accusations
from farcall.protocol.membership.events import Effect, Event, MembershipOptions, Randomness
from farcall.protocol.membership.joining import Admissions, Farewell, Newcomer, NewcomerMessage, end_of, loser_of
from farcall.protocol.membership.messages import (
    MAX_UPDATES,
    Ack,
    Ask,
    Decision,
    Deny,
    Digest,
    Entries,
    Forward,
    Gossip,
    Introduction,
    Join,
    JoinAnswer,
    JoinRefusal,
    Message,
    Obituary,
    Ping,
    Resurfaced,
    Status,
    Update,
    Vouch,
    WhoAreYou,
    precedence,
)
from farcall.protocol.membership.news import GossipQueue, Outbox, Shared, Spreading, Timers
from farcall.protocol.membership.obituaries import Obituaries
from farcall.protocol.membership.probing import Outcome, Probe, Prober, Suspicions
from farcall.protocol.membership.table import Change, Table


class State(Enum):
    """This node's relation to the cluster."""

    NEW = "new"
    JOINING = "joining"
    MEMBER = "member"
    LEAVING = "leaving"
    REFUSED = "refused"
    DEPARTED = "departed"
    EXPELLED = "expelled"


TRANSITIONS: Final[dict[State, dict[type[Event | Effect], State]]] = {
    State.NEW: {events.LocalJoin: State.JOINING, events.Admitted: State.MEMBER},
    State.JOINING: {
        events.LocalJoin: State.JOINING,  # through another sponsor
        events.Admitted: State.MEMBER,
        events.Refused: State.REFUSED,
    },
    State.MEMBER: {events.LocalLeave: State.LEAVING, events.Expelled: State.EXPELLED},
    State.LEAVING: {
        events.Departed: State.DEPARTED,
        events.Expelled: State.DEPARTED,  # nobody waits for it any more: its aim in leaving
    },
    State.REFUSED: {},
    State.DEPARTED: {},
    State.EXPELLED: {},
}
"""The next state of this node, by the event that causes it or the effect that reports it. No state follows an end."""


class MembershipMachine:
    """The membership of ``me``, and its view of all others.

    ``members`` are the first members, ``me`` among them, as a rendezvous agreed on them; or ``me`` alone, to found a
    cluster. None: this node is no member yet, and needs ``LocalJoin``.
    """

    def __init__(
        self,
        me: Member,
        members: Iterable[Member] | None,
        options: MembershipOptions,
        randomness: Randomness,
        now: float,
        *,
        is_fixed: bool = False,
    ) -> None:
        """``is_fixed``: a group of fixed size, which admits newcomers only in place of dead members."""
        self.me: int = me.incarnation
        self.state: State = State.NEW
        self.table: Table = Table(me, now, options.full_mesh)
        self._options = options
        self._timers = Timers()
        self._gossip = GossipQueue()
        self._outbox = Outbox(self.table, self._gossip)
        shared = Shared(options, randomness, self.table, self._timers, self._outbox)
        self._prober = Prober(shared, self._conclude)
        self._accusations = Accusations(self.table, options.accusers)
        self._suspicions = Suspicions(shared, self._prober)
        self._spreading = Spreading(shared, self._gossip)
        self._obituaries = Obituaries(shared, self._accusations, self._expel)
        self._admissions = Admissions(shared, self._prober, self._take_in, is_fixed=is_fixed)
        self._newcomer = Newcomer(shared, self._admit, self._refuse)
        self._farewell = Farewell(shared, self._depart)
        self._handlers: dict[type[Any], Callable[[int, Any, float], None]] = {
            Ping: self._on_ping,
            Ack: self._on_news,
            Gossip: self._on_news,
            Ask: self._on_inquiry,
            Vouch: self._on_inquiry,
            Deny: self._on_inquiry,
            Digest: lambda sender, message, now: self._spreading.on_digest(sender, message),
            Entries: self._on_entries,
            Obituary: self._on_obituary,
            Resurfaced: lambda sender, message, now: self._obituaries.on_resurfaced(message.incarnation),
            Join: self._on_newcomer,
            Forward: self._on_newcomer,
            Decision: self._on_newcomer,
            JoinAnswer: lambda sender, message, now: None,
            WhoAreYou: self._on_who_are_you,
            Introduction: self._on_newcomer,
        }
        if members is not None:
            for member in members:
                if member.incarnation != self.me:
                    self.table.apply(Update(member.incarnation, Status.ALIVE, 0, member), now)
            self._become_member(now)

    # --- the machine's shape -------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do about it."""
        match event:
            case events.Received(sender, message):
                self._on_message(sender, message, now)
            case events.Heard(incarnation) if self._is_up and self.table.member(incarnation) is not None:
                self._prober.on_heard(incarnation, now)
            # Who leaves accuses nobody: a member that leaves at the same time need not have told it.
            case events.LinkLost() if self.state is State.LEAVING:
                pass
            case events.LinkRefused(incarnation) if self.state is State.LEAVING:
                self._farewell.on_refused(incarnation)
            case events.LinkLost(incarnation) if self._is_up and self.table.member(incarnation) is not None:
                self._prober.start(incarnation, now, urgent=True)
            case events.LinkRefused(incarnation, is_certain, why) if (
                self._is_up and (entry := self.table.member(incarnation)) is not None
            ):
                if is_certain:
                    self._apply(Update(incarnation, Status.DEAD, entry.version, None, PROCESS_ENDED), now)
                elif not self._prober.deny(incarnation, now):
                    self._prober.on_refused(incarnation, why, now)
            case events.HostSeen(incarnation, answers):
                self._suspicions.see_host(incarnation, answers)
            case events.LinkGivenUp(incarnation, why) if (
                self._is_up and (entry := self.table.member(incarnation)) is not None
            ):
                self._apply(Update(incarnation, Status.DEAD, entry.version, None, why), now)
                self._obituaries.tell(incarnation, why)
            case events.LinkRefused(incarnation):
                self._obituaries.missing.pop(incarnation, None)
            case events.LocalJoin(via, former) if self._move(events.LocalJoin):
                self._obituaries.look_for(former, now)
                self._newcomer.ask(via, now)
            case events.LocalLeave() if self._move(events.LocalLeave):
                left = Update(self.me, Status.LEFT, 0)
                self.table.apply(left, now)
                self._spreading.spread(left, now)
                self._farewell.begin(now)
        return self._outbox.collect()

    def next_deadline(self) -> float | None:
        """When to call ``handle_deadline``; None: no deadline is set."""
        return self._timers.next()

    def handle_deadline(self, now: float) -> list[Effect]:
        """Run the timers that are due."""
        self._timers.run_due(now)
        return self._outbox.collect()

    def record_of(self, incarnation: int) -> Member | None:
        """The record of a present or former member, if known."""
        entry = self.table.entries.get(incarnation)
        return self._obituaries.missing.get(incarnation) if entry is None else entry.member

    def known_members(self) -> list[Member]:
        """All other members that have not left, the dead included: if this node was cut off, the dead are alive."""
        entries = self.table.entries.values()
        known = [entry.member for entry in entries if entry.status is not Status.LEFT and entry.incarnation != self.me]
        return [member for member in known if member is not None] + list(self._obituaries.missing.values())

    def unresponsive(self, now: float) -> dict[int, float]:
        """The unresponsive members, and for how many seconds they have been so. Safe from any thread."""
        return self._suspicions.ages_s(now)

    @property
    def _is_up(self) -> bool:
        return self.state is State.MEMBER or self.state is State.LEAVING

    def _move(self, cause: type[Event | Effect]) -> bool:
        """Take the step that `TRANSITIONS` gives; False if the present state has none for ``cause``."""
        after = TRANSITIONS[self.state].get(cause)
        if after is None:
            return False
        self.state = after
        if not TRANSITIONS[after]:
            self._timers.clear()
            self._gossip.clear()
        return True

    # --- messages ------------------------------------------------------------------------------------------

    def _on_message(self, sender: int, message: Message, now: float) -> None:
        """Dispatch by the sender's status: see the package's docstring."""
        if sender == self.me:
            return
        if not self._is_up:
            if self.state is State.JOINING:
                self._newcomer.on_message(sender, message, now)
            return
        entry = self.table.entries.get(sender)
        if entry is None:
            self._on_stranger(sender, message, now)
        elif entry.status < Status.DEAD:
            self._prober.on_heard(sender, now)
            self._handlers[type(message)](sender, message, now)
            if self.state is State.LEAVING:
                self._farewell.look()
        elif entry.status is Status.DEAD and entry.alone:
            self._obituaries.on_given_up_alone(sender, message, entry.why)
        elif entry.status is Status.DEAD:
            self._obituaries.on_dead(sender, message, entry.why)
        elif isinstance(message, Ping):
            self._outbox.send(sender, Ack((entry.as_update(),)))  # acknowledge its leave: it waits for that

    def _on_stranger(self, sender: int, message: Message, now: float) -> None:
        """A message from a newcomer not heard of yet, a member of another partition, or an incarnation long dead."""
        if sender in self.table.buried:
            self._obituaries.tell(sender, "it was declared dead long ago")
        elif isinstance(message, Join | Introduction):
            self._on_newcomer(sender, message, now)
        elif isinstance(message, Obituary) and not message.alone:
            self._obituaries.on_stranger(sender, message)
        else:
            if isinstance(message, Ping):
                ends = end_of(sender, message.updates)
                self._learn(sender, ends, now)
                self._outbox.send(sender, Ack(ends))
            elif isinstance(message, Obituary):
                self._outbox.send(sender, Ack(()))
            if self.table.entries.get(sender) is None:
                self._outbox.send(sender, WhoAreYou())

    def _on_ping(self, sender: int, message: Ping, now: float) -> None:
        about = 0
        if message.updates:
            self._learn(sender, message.updates, now)
            for update in message.updates:
                if update.incarnation == self.me:
                    about = self.me  # send our refutation along
                elif update.incarnation == sender:
                    about = sender  # it leaves: acknowledge that
        if self.state is State.LEAVING:
            # Say so: our word that the sender leaves, too, is worth nothing. What is dropped here counts as not sent.
            news = self._outbox.news(sender, about)
            self._outbox.send(sender, Ack((self.table.entries[self.me].as_update(), *news[-MAX_UPDATES:])))
        elif self._is_up:
            self._outbox.send(sender, Ack(self._outbox.news(sender, about)))

    def _on_news(self, sender: int, message: Ack | Gossip, now: float) -> None:
        if message.updates:
            self._learn(sender, message.updates, now)
            if self.state is State.LEAVING:
                self._farewell.on_answer(sender, message.updates)

    def _on_inquiry(self, sender: int, message: Ask | Vouch | Deny, now: float) -> None:
        self._learn(sender, message.updates, now)
        if not self._is_up:
            return
        if isinstance(message, Ask):
            self._prober.on_ask(sender, message.target, now)
        elif isinstance(message, Vouch):
            self._prober.on_vouch(message.target, now)
        else:
            self._prober.on_deny(sender, message.target, now)

    # --- what becomes of members ---------------------------------------------------------------------------

    def _learn(self, sender: int, updates: Iterable[Update], now: float) -> None:
        entries, heard = self.table.entries, self._gossip.heard
        for update in updates:
            entry, claim = entries.get(update.incarnation), precedence(update.status, update.version)
            if (entry is None or claim > entry.precedence) and not self.table.is_leap(update):
                if update.status >= Status.DEAD and not self._accusations.convince(sender, update.incarnation):
                    self._doubt(update.incarnation, now)
                elif update.incarnation == self.me:
                    self._hear_of_myself(update, now)
                else:
                    self._apply(update, now)
                if not self._is_up:
                    return
            heard(update.incarnation, claim, sender)

    def _doubt(self, incarnation: int, now: float) -> None:
        """Somebody says that ``incarnation`` has ended: find out."""
        if self.table.member(incarnation) is not None and incarnation != self.me:
            self._prober.start(incarnation, now)

    def _hear_of_myself(self, update: Update, now: float) -> None:
        if update.status >= Status.DEAD:
            self._expel(update.why or "it was declared dead")
            return
        if update.status is Status.UNRESPONSIVE:
            self._prober.health.sink()  # others waited for us in vain: our own timers may be late, too
        refutation = Update(self.me, Status.ALIVE, update.version + 1, self.table.myself)
        self.table.apply(refutation, now)
        self._spreading.spread(refutation, now)

    def _apply(self, update: Update, now: float, own: bool = False, alone: bool = False) -> None:
        """Merge a claim about another incarnation into the table, report the change, and spread it.

        ``own``: this member found it out itself. ``alone``: it heard nobody at all meanwhile, so keep it from others.
        """
        if update.status < Status.DEAD and update.member is not None and update.incarnation not in self.table.entries:
            if self._options.is_guarded and not self._admissions.is_free(update.member, now):
                return  # it will be told again, or introduce itself
            update = self._settle_claims(update, update.member, now)
            if not self._is_up:
                return
        change = self.table.apply(update, now)
        if change is Change.NOTHING:
            return
        entry = self.table.entries[update.incarnation]
        member = entry.member
        if member is not None:
            self._report(change, member, update, own, now)
        if not alone:
            self._spreading.spread(entry.as_update(), now)

    def _report(self, change: Change, member: Member, update: Update, own: bool, now: float) -> None:
        tell, incarnation = self._outbox.tell, member.incarnation
        if change is Change.JOINED:
            tell(events.MemberJoined(member))
            self._prober.include(incarnation)
            self._spreading.include(incarnation)
        if change is Change.UNRESPONSIVE or (change is Change.JOINED and update.status is Status.UNRESPONSIVE):
            tell(events.MemberUnresponsive(member))
            self._suspicions.begin(incarnation, update.version, own, now)
        elif change is Change.RECOVERED:
            tell(events.MemberRecovered(member))
            self._suspicions.end(incarnation)
        elif change is Change.DIED or change is Change.LEFT:
            self._suspicions.end(incarnation)
            self._accusations.drop(incarnation)
            self._prober.exclude(incarnation)
            if change is Change.LEFT:
                tell(events.MemberLeft(member, update.why))
            else:
                self._obituaries.note(incarnation)
                tell(events.MemberDied(member, update.why))

    def _settle_claims(self, update: Update, member: Member, now: float) -> Update:
        """Settle who keeps a name or rank that both a new ``member`` and a known one claim; the claim to apply."""
        for rival in self.table.rivals(member):
            loser, why = loser_of(member, rival)
            if loser is member:
                return Update(member.incarnation, Status.DEAD, update.version, None, why)
            if loser.incarnation == self.me:
                self._expel(why)
                return update
            self._apply(Update(loser.incarnation, Status.DEAD, 0, None, why), now)
        return update

    def _suspect(self, incarnation: int, now: float, alone: bool = False) -> None:
        """``incarnation`` did not answer us."""
        entry = self.table.entries[incarnation]
        if entry.status is Status.ALIVE:
            self._apply(
                Update(incarnation, Status.UNRESPONSIVE, entry.version, entry.member), now, own=True, alone=alone
            )
        else:
            self._suspicions.begin(incarnation, entry.version, True, now)

    def _conclude(self, probe: Probe, outcome: Outcome, now: float) -> None:
        incarnation = probe.target
        if self.state is State.LEAVING:
            return
        if outcome is Outcome.DENIED:
            self._declare_dead(probe, f"{REFUSED}: {probe.why}", now, is_there=False)
            return
        if outcome is Outcome.ANSWERED:
            self._accusations.drop(incarnation)
        if outcome is Outcome.FAILED:
            if probe.last and self._suspicions.stands(incarnation):
                why = self._suspicions.verdict(incarnation, now)
                if why:
                    since = self._suspicions.since(incarnation)
                    silent = self._suspicions.host_is_silent(incarnation)
                    self._declare_dead(probe, why, now, host_is_silent=silent)
                    if probe.alone and silent:
                        self._give_up_all_silent_since(since, why, now)
                else:
                    self._suspicions.renew(incarnation, now)
            else:
                self._suspect(incarnation, now, probe.alone)
        elif probe.last:
            self._suspicions.renew(incarnation, now)

    def _declare_dead(
        self, probe: Probe, why: str, now: float, *, is_there: bool = True, host_is_silent: bool = False
    ) -> None:
        """Declare a member dead. If we heard nobody meanwhile, we may be cut off: then the verdict counts only here.

        ``is_there``: perhaps its process was only stopped, and reads its obituary when it goes on.
        """
        entry = self.table.entries[probe.target]
        update = Update(entry.incarnation, Status.DEAD, entry.version, None, why, host_is_silent)
        self._apply(update, now, alone=probe.alone)
        entry.alone = probe.alone
        if is_there and not probe.alone:
            self._obituaries.tell(entry.incarnation, why)

    def _give_up_all_silent_since(self, since: float, why: str, now: float) -> None:
        """We heard nobody for so long that one of them is dead to us: so are all who were silent as long."""
        for incarnation in self.table.others.copy():
            entry = self.table.entries[incarnation]
            if entry.heard_at <= since:
                self._apply(Update(incarnation, Status.DEAD, entry.version, None, why, True), now, alone=True)
                entry.alone = True

    def _on_entries(self, sender: int, message: Entries, now: float) -> None:
        self._learn(sender, message.updates, now)
        if message.answer and self._is_up:
            self._spreading.answer_entries(sender, message)

    # --- being dead to others ------------------------------------------------------------------------------

    def _on_obituary(self, sender: int, message: Obituary, now: float) -> None:
        if message.alone or message.hinted:
            # The sender was cut off, or has not heard of us yet. Our Ack tells it that we live, even where we are dead
            # in its table.
            self._outbox.send(sender, Ack(()))
        elif message.incarnation == self.me and self._accusations.convince(sender, self.me):
            self._expel(message.why, sender)
        elif message.incarnation == self.me:
            # It talks to us no more. If it is right, another one will say so; if it is not, it is the one that goes.
            self._apply(Update(sender, Status.DEAD, 0, None, "it holds this member for dead"), now, alone=True)

    def _expel(self, why: str, by: int = 0) -> None:
        if self._move(events.Expelled):
            self._outbox.tell(events.Expelled(why, by) if self.state is State.EXPELLED else events.Departed())

    # --- coming ----------------------------------------------------------------------------------------------

    def _become_member(self, now: float) -> None:
        self._move(events.Admitted)
        self._prober.begin(now)
        self._spreading.begin(now)
        self._obituaries.begin(now)

    def _admit(self, answer: JoinAnswer, now: float) -> None:
        for update in answer.updates:
            if update.incarnation != self.me:
                self.table.apply(update, now)
                if update.status is Status.DEAD and update.member is not None:
                    self._obituaries.note(update.incarnation)
        self._become_member(now)
        others = [member for member in self.table.members() if member.incarnation != self.me]
        self._outbox.tell(events.Admitted(tuple(others)))
        for member in others:
            entry = self.table.entries[member.incarnation]
            if entry.status is Status.UNRESPONSIVE:
                self._suspicions.begin(member.incarnation, entry.version, False, now)
        self._learn(0, [update for update in answer.updates if update.incarnation == self.me], now)

    def _refuse(self, why: str, kind: JoinRefusal) -> None:
        if self._move(events.Refused):
            self._outbox.tell(events.Refused(why, kind))

    def _on_newcomer(self, sender: int, message: NewcomerMessage, now: float) -> None:
        """Serve newcomers, unless this member leaves: a leaving sponsor or arbiter could not finish the admission."""
        if self.state is State.MEMBER:
            self._admissions.handle(sender, message, now)

    def _take_in(self, member: Member, now: float) -> None:
        self._learn(member.incarnation, [Update(member.incarnation, Status.ALIVE, 0, member)], now)

    def _on_who_are_you(self, sender: int, message: WhoAreYou, now: float) -> None:
        """Introduce ourselves: our sponsor may have gone before it spread the news of us."""
        if self.table.myself.admission:
            self._outbox.send(sender, Introduction(self.table.myself))

    def _depart(self) -> None:
        if self._move(events.Departed):
            self._outbox.tell(events.Departed())
