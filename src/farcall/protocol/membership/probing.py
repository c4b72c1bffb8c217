"""Failure detection: probes of quiet members, and the time that suspects are given.

Owns the probes under way, the questions of other members, the health of this member itself, and suspicions. Decides
about no member: each probe ends with an outcome for the machine. Any byte heard from the target ends a probe well.

    probe      by                                   then
    -          a turn, the target was quiet         round 1: a ping
    -          LinkLost                             round 1 at once, and it asks others, too
    any        LinkRefused                          noted as refused: no more pings; it asks others, if it has not yet
    refused    LinkRefused, CONFIRMED_S later       denied, if one of the others was refused, too
    refused    LinkRefused, REFUSED_S later         denied
    refused    timeout                              another round, until REFUSED_S are over
    -          the suspicion's time is over         the same, and it is the last one
    any        heard from the target, or Vouch      answered
    any        its timer is late                    another ping and as much time: this process may have been stopped
    round 1    timeout                              round 2: a ping, and ``indirect_probes`` others are asked
    round 2    timeout, nothing heard from anybody  unsure: we may be cut off, so health sinks (at its lowest: failed)
    round 2    timeout                              failed

A refusal that lasts is a death, a short one is not: a proxy, a NAT or a virtual address that restarts refuses, too. So
a verdict needs refusals for a while, the last of them just now. The driver dials on meanwhile; for a member to which it
has no link a ping makes it dial when the time has come. Whoever hears from the member meanwhile, over a connection that
the member made, ends the probe.

Each turn takes the next of the shuffled neighbours (`neighbours.py`). So all its neighbours probe a member in turn, and
in an interval at least one does with probability 1 - 1/e. A turn skips members heard within the last interval; a turn
that comes late is left out, but not more than two in a row.

Health sinks with late timers, silence from everybody, and being called unresponsive; it rises when others are heard.
Timeouts and the suspicions that start here are longer by the factor (1 + how far health sank).

A member whose own probe failed waits ``suspicion_s`` (more if its health is low); a neighbour that only heard of it
waits at least twice as long, in case the first one is gone. Other members leave the suspect to its neighbours: if these
end, others take their place, and find out for themselves. Then one last probe always follows: a process that was
stopped wakes up with all its timers overdue, and must not declare anybody dead because of that.
A suspect that was heard meanwhile, but has not refuted, is probed again and given the same time again; so is a suspect
whose host answers, for as long as it does, or until ``unresponsive_s`` is over.

Over 400 lines: probes and suspicions share one account of health.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from functools import partial

from farcall.protocol.member import HOST_SILENT
from farcall.protocol.membership.events import LinkSilent
from farcall.protocol.membership.messages import Ask, Deny, Status, Vouch
from farcall.protocol.membership.news import Shared, Turns

CONFIRMED_S = 1.5
REFUSED_S = 5.0
"""For how long a member is refused before it is dead: where another member is refused, too, and where none says so."""
LOWEST_HEALTH = 4
MAX_LATE_ROUNDS = 2  # a member whose timers are always late must come to a verdict, too
MAX_LATE_TURNS = 2  # and must probe
TRIES_PER_TURN = 8


class Outcome(Enum):
    """How a probe ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    DENIED = "denied"
    UNSURE = "unsure"


class Health:
    """How far this member trusts its own observations; ``sunk`` is 0 at its best."""

    __slots__ = ("sunk",)

    def __init__(self) -> None:
        self.sunk: int = 0

    @property
    def factor(self) -> int:
        """The factor by which to lengthen timeouts."""
        return 1 + self.sunk

    def sink(self) -> bool:
        """Sink by one step; False if health is at its lowest."""
        if self.sunk == LOWEST_HEALTH:
            return False
        self.sunk += 1
        return True

    def rise(self) -> None:
        self.sunk = max(0, self.sunk - 1)


class Probe:
    """One question whether ``target`` lives. ``last``: no probe follows, so a failure leads to the verdict."""

    __slots__ = (
        "alone",
        "deniers",
        "due",
        "helpers",
        "last",
        "late_rounds",
        "refused_at",
        "round",
        "started_at",
        "target",
        "why",
    )

    def __init__(self, target: int, now: float, last: bool) -> None:
        self.target: int = target
        self.started_at: float = now
        self.last: bool = last
        self.round: int = 1
        self.due: float = now
        self.refused_at: float | None = None
        self.why: str = ""  # it was refused
        self.alone: bool = False  # set at its end: nobody at all was heard during the probe
        self.late_rounds: int = 0
        self.helpers: set[int] = set()
        self.deniers: set[int] = set()


class Prober:
    """All probes of one member, and those it carries out for others."""

    def __init__(self, shared: Shared, conclude: Callable[[Probe, Outcome, float], None]) -> None:
        self.health: Health = Health()
        self.heard_anybody_at: float = 0.0
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers, self._outbox = shared.timers, shared.outbox
        self._conclude = conclude
        # Mutable: our own probes by target, those for others, and when anybody was last heard or probed.
        self._probes: dict[int, Probe] = {}
        self._askers: dict[int, set[int]] = {}  # target -> the members that asked about it
        self._denied_at: dict[int, float] = {}  # target -> when we last sent Deny to its askers
        self._denied_to: dict[int, set[int]] = {}  # target -> the members that got it
        self._refused_at: dict[int, float] = {}  # target -> when a dial of ours was last refused
        self._turns = Turns(shared.random, shared.table)
        self._last_turn_at = 0.0
        self._late_turns = 0  # in a row
        self._others_when_heard = 0

    # --- turns -------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start taking turns, after a random delay, so that members do not probe in step."""
        self.heard_anybody_at = self._last_turn_at = now
        self._others_when_heard = len(self._table.others)
        self._timers.set(now + self._random.random() * self._options.turn_s(self._table.size), self._take_turn)

    def include(self, incarnation: int) -> None:
        """Include a newcomer in the turns."""
        self._turns.include(incarnation)

    def exclude(self, incarnation: int) -> None:
        """``incarnation`` has ended: drop its probe, and tell its askers."""
        self._probes.pop(incarnation, None)
        self._refused_at.pop(incarnation, None)
        self._denied_at.pop(incarnation, None)
        self._denied_to.pop(incarnation, None)
        for asker in sorted(self._askers.pop(incarnation, ())):
            self._outbox.send(asker, Deny(incarnation, self._outbox.news(asker, incarnation)))

    def _take_turn(self, due: float, now: float) -> None:
        if self._is_late(due, now):
            self.health.sink()
            self._late_turns += 1
        else:
            self._late_turns = 0
            if self.heard_anybody_at > self._last_turn_at:
                self.health.rise()
        self._last_turn_at = now
        interval_s = self._options.turn_s(self._table.size)
        # A late member would take late answers for silence, and where processors are short, its probes take more time.
        is_fit = not 0 < self._late_turns <= MAX_LATE_TURNS
        for _ in range(min(TRIES_PER_TURN, len(self._table.neighbours())) if is_fit else 0):
            entry = self._turns.next()
            if entry is not None and now - entry.heard_at >= interval_s and entry.incarnation not in self._probes:
                self.start(entry.incarnation, now)
                break
        # Jitter, so that members never fall into step with each other.
        self._timers.set(now + interval_s * (0.9 + 0.2 * self._random.random()), self._take_turn)

    # --- our own probes ----------------------------------------------------------------------------------

    def start(self, target: int, now: float, *, urgent: bool = False, last: bool = False) -> Probe:
        """Probe ``target``, or join the probe under way; ``urgent`` asks other members at once."""
        probe = self._probes.get(target)
        if probe is None:
            probe = self._probes[target] = Probe(target, now, last)
            self._begin_round(probe, now, ask=urgent)
        else:
            probe.last = probe.last or last
            if urgent and not probe.helpers:
                self._ask_others(probe)
        return probe

    def _begin_round(self, probe: Probe, now: float, ask: bool) -> None:
        if probe.refused_at is None:  # else nobody listens there: a ping would be one more dial
            self._outbox.ping(probe.target)
        if ask:
            self._ask_others(probe)
        self._set(probe, now)

    def _set(self, probe: Probe, now: float) -> None:
        """Set the end of the round: soon, if the member's kernel has spoken, and others only have to hear the same."""
        options = self._options
        round_s = options.round_s(self._table.size) if probe.refused_at is None else options.probe_timeout_s
        probe.due = now + round_s * self.health.factor
        self._timers.set(probe.due, partial(self._end_round, probe))

    def _ask_others(self, probe: Probe) -> None:
        neighbours, count = sorted(self._table.neighbours()), self._options.indirect_probes
        drawn = self._random.sample(neighbours, min(len(neighbours), 2 * count + 2))
        trusted = [
            incarnation
            for incarnation in drawn
            if self._table.entries[incarnation].status is Status.ALIVE
            and incarnation != probe.target
            and incarnation not in self._refused_at
        ]
        for helper in trusted[:count]:
            probe.helpers.add(helper)
            self._outbox.send(helper, Ask(probe.target, self._outbox.news(helper, probe.target)))

    def _end_round(self, probe: Probe, due: float, now: float) -> None:
        if self._probes.get(probe.target) is not probe or probe.due != due:
            return
        if self._is_late(due, now) and probe.late_rounds < MAX_LATE_ROUNDS:
            probe.late_rounds += 1
            self.health.sink()
            self._begin_round(probe, now, ask=False)  # those who were asked are asked: they may be late themselves
            return
        if probe.refused_at is not None and now < probe.refused_at + REFUSED_S + self._options.probe_timeout_s:
            self._begin_round(probe, now, ask=not probe.helpers)  # a doubt would be news
            return
        probe.refused_at = None  # the refusals have ended
        if probe.round == 1:
            probe.round = 2
            self._begin_round(probe, now, ask=True)
            return
        if self._is_alone_since(probe) and self.health.sink():
            self._end(probe, Outcome.UNSURE, now)
        else:
            self._end(probe, Outcome.FAILED, now)

    def _is_late(self, due: float, now: float) -> bool:
        return now - due > self._options.probe_timeout_s / 2

    def _is_alone_since(self, probe: Probe) -> bool:
        """Has nobody been heard since the probe began? In a group of two silence says nothing: never alone there."""
        return self.heard_anybody_at < probe.started_at and self._others_when_heard > 1

    def _end(self, probe: Probe, outcome: Outcome, now: float) -> None:
        del self._probes[probe.target]
        probe.alone = self._is_alone_since(probe)
        self._conclude(probe, outcome, now)

    # --- what is heard -----------------------------------------------------------------------------------

    def on_heard(self, incarnation: int, now: float) -> None:
        """A byte or a message came from ``incarnation``, a member."""
        self.heard_anybody_at = now
        self._others_when_heard = len(self._table.others)
        self._table.entries[incarnation].heard_at = now
        if incarnation in self._refused_at:
            del self._refused_at[incarnation]
            self._denied_at.pop(incarnation, None)
        if incarnation in self._askers or incarnation in self._denied_to:
            # Who heard that we were refused, too, may be about to give a verdict.
            for asker in sorted(self._askers.pop(incarnation, set()) | self._denied_to.pop(incarnation, set())):
                self._outbox.send(asker, Vouch(incarnation, self._outbox.news(asker, incarnation)))
        if incarnation in self._probes:
            self._end(self._probes[incarnation], Outcome.ANSWERED, now)

    def on_vouch(self, target: int, now: float) -> None:
        """Another member has heard from ``target``, though we have not."""
        probe = self._probes.get(target)
        if probe is not None:
            self._table.entries[target].heard_at = now
            self._outbox.tell(LinkSilent(target))
            self._end(probe, Outcome.ANSWERED, now)

    def deny(self, target: int, now: float) -> bool:
        """Tell the askers that ``target`` is gone. True if only they wanted to know: then we start no probe of our own.

        That holds for ``suspicion_s``: the driver dials again and again, and if each refusal made a helper ask further
        members in turn, all members would soon dial each of many that died at once.
        """
        self._refused_at[target] = now
        askers = sorted(self._askers.pop(target, ()))
        for asker in askers:
            self._denied_at[target] = now
            self._deny(asker, target)
        is_theirs = now - self._denied_at.get(target, -math.inf) < self._options.suspicion_s
        return is_theirs and target not in self._probes

    def _deny(self, asker: int, target: int) -> None:
        if self._table.member(target) is not None:
            self._denied_to.setdefault(target, set()).add(asker)
        self._outbox.send(asker, Deny(target, self._outbox.news(asker, target)))

    def on_refused(self, target: int, why: str, now: float) -> None:
        """Our dial found nobody at the addresses of ``target``."""
        probe = self.start(target, now, urgent=True)
        probe.why = why
        if probe.refused_at is None:
            probe.refused_at = now
            for wait_s in (CONFIRMED_S, REFUSED_S):
                self._timers.set(now + wait_s, partial(self._dial_once_more, probe))
            self._set(probe, now)
        elif self._may_be_dead(probe, now):
            self._end(probe, Outcome.DENIED, now)
        for other in self._probes.values():
            other.helpers.discard(target)  # it will not answer our question about another member, either

    def on_deny(self, helper: int, target: int, now: float) -> None:
        """The dial of ``helper`` found nobody at the addresses of ``target``."""
        probe = self._probes.get(target)
        if probe is not None and helper in probe.helpers:
            probe.deniers.add(helper)
            self._dial_once_more(probe, now, now)

    def _dial_once_more(self, probe: Probe, due: float, now: float) -> None:
        """Have the driver dial, where a fresh refusal would be a verdict."""
        if self._probes.get(probe.target) is probe and self._may_be_dead(probe, now):
            self._outbox.ping(probe.target)

    def _may_be_dead(self, probe: Probe, now: float) -> bool:
        """Would a refusal now be a verdict?"""
        return probe.refused_at is not None and now - probe.refused_at >= (CONFIRMED_S if probe.deniers else REFUSED_S)

    # --- for others --------------------------------------------------------------------------------------

    def on_ask(self, asker: int, target: int, now: float) -> None:
        """``asker`` cannot reach ``target``: ping it, and answer when something is known."""
        entry = self._table.entries.get(target)
        if entry is None or target == self._table.me:
            return
        patience_s = 2 * self._options.round_s(self._table.size)
        if entry.ended or now - self._refused_at.get(target, now - patience_s) < patience_s:
            self._deny(asker, target)
            return
        askers = self._askers.get(target)
        if askers is not None:
            askers.add(asker)  # a ping is under way: many members may ask about one target at once
            return
        askers = self._askers[target] = {asker}
        self._outbox.ping(target)

        def give_up(due: float, now: float) -> None:
            if self._askers.get(target) is askers:
                del self._askers[target]

        self._timers.set(now + patience_s, give_up)


class Suspicion:
    """One unresponsive member. ``own``: our own probe of it failed, rather than another member's."""

    __slots__ = ("began_at", "due", "host_is_silent", "incarnation", "own", "since", "version")

    def __init__(self, incarnation: int, version: int, own: bool, now: float) -> None:
        self.began_at: float = now
        self.host_is_silent: bool = False
        self.incarnation: int = incarnation
        self.version: int = version
        self.own: bool = own
        self.since: float = now
        self.due: float = now


class Suspicions:
    """All unresponsive members in the view of this one."""

    def __init__(self, shared: Shared, prober: Prober) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers = shared.timers
        self._prober = prober
        self._suspicions: dict[int, Suspicion] = {}

    def begin(self, incarnation: int, version: int, own: bool, now: float) -> None:
        """``incarnation`` is unresponsive. A second call with ``own`` shortens its time, counted from the beginning."""
        known = self._suspicions.get(incarnation)
        if known is not None and known.version == version:
            if own and not known.own:
                known.own = True
                self._set(known, max(now, known.since + self._patience_s(known)))
            return
        suspicion = self._suspicions[incarnation] = Suspicion(incarnation, version, own, now)
        self._set(suspicion, now + self._patience_s(suspicion))

    def end(self, incarnation: int) -> None:
        """``incarnation`` has refuted, or ended."""
        self._suspicions.pop(incarnation, None)

    def stands(self, incarnation: int) -> bool:
        return incarnation in self._suspicions

    def ages_s(self, now: float) -> dict[int, float]:
        """For how long each has been unresponsive. Safe from any thread."""
        return {suspicion.incarnation: now - suspicion.began_at for suspicion in list(self._suspicions.values())}

    def see_host(self, incarnation: int, answers: bool) -> None:
        """Record whether the kernel of its host answers."""
        suspicion = self._suspicions.get(incarnation)
        if suspicion is not None:
            suspicion.host_is_silent = not answers

    def host_is_silent(self, incarnation: int) -> bool:
        """Did the kernel of its host not answer either, when last asked?"""
        return self._suspicions[incarnation].host_is_silent

    def verdict(self, incarnation: int, now: float) -> str:
        """Why a suspect whose last probe failed is dead; empty: it stays a member."""
        suspicion, bound_s = self._suspicions[incarnation], self._options.unresponsive_s
        if suspicion.host_is_silent:
            return HOST_SILENT
        if bound_s is not None and now - suspicion.began_at >= bound_s:
            return f"it did not answer for {bound_s:g} s, which the option `unresponsive_s` makes a death"
        return ""

    def since(self, incarnation: int) -> float:
        """Since when a suspect has had its present time."""
        return self._suspicions[incarnation].since

    def renew(self, incarnation: int, now: float) -> None:
        """Give it all its time again: it was heard, its host answers, or our own observation is doubtful."""
        suspicion = self._suspicions.get(incarnation)
        if suspicion is not None:
            suspicion.since = now
            self._set(suspicion, now + self._patience_s(suspicion))

    def _patience_s(self, suspicion: Suspicion) -> float:
        if suspicion.own:
            return self._options.suspicion_s * self._prober.health.factor
        return self._options.suspicion_s * (2 + self._random.random())

    def _set(self, suspicion: Suspicion, due: float) -> None:
        bound_s = self._options.unresponsive_s
        if bound_s is not None and suspicion.since < suspicion.began_at + bound_s:
            due = min(due, suspicion.began_at + bound_s)
        suspicion.due = due
        self._timers.set(due, partial(self._is_over, suspicion))

    def _is_over(self, suspicion: Suspicion, due: float, now: float) -> None:
        incarnation = suspicion.incarnation
        if self._suspicions.get(incarnation) is not suspicion or suspicion.due != due:
            return
        if not suspicion.own and incarnation not in self._table.neighbours():
            self.renew(incarnation, now)
            return
        heard_meanwhile = self._table.entries[incarnation].heard_at > suspicion.since
        if heard_meanwhile:
            self.renew(incarnation, now)
        self._prober.start(incarnation, now, urgent=True, last=not heard_meanwhile)
