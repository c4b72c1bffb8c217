"""Who answers: probes of members that have been quiet, and the time that suspects are given.

Owns probes under way, the questions of others, the health of this member itself, and suspicions. Decides nothing about
anybody: each probe ends with an outcome for the machine. Anything heard from the target ends it well.

    probe      by                                   then
    -          a turn, the target was quiet         round 1: a ping
    -          LinkLost                             round 1 at once, and it asks others, too
    -          LinkRefused                          the same, and noted as refused
    -          the suspicion's time is over         the same, and it is the last one
    any        heard from the target, or Vouch      answered
    any        refused, and so to all who were asked denied
    any        its timer is late                    the same round again: it may be we who slept
    round 1    timeout                              round 2: a ping, and ``indirect_probes`` others are asked
    round 2    timeout, refused here and elsewhere  denied
    round 2    timeout, nothing heard from anybody  unsure: we may be cut off, so health sinks (at its lowest: failed)
    round 2    timeout                              failed

Each turn takes the next of the members, shuffled, so each is probed by everyone in turn, and by somebody in
an interval with probability 1 - 1/e. Whoever was heard within the last interval is left out.

Health is worth 1 at its best. Late timers, silence from everybody and being unresponsive make it sink, hearing
from others makes it rise; timeouts and the suspicion that starts here are longer by (1 + how far it sank).

A member that found out that another does not answer waits ``suspicion_s`` (more where its own health is low); one that
only heard of it waits at least twice as long, in case the first one is gone. Then comes one last probe, always: a
process that slept wakes up with all its timers overdue, and must not declare anybody dead on the strength of that.
A suspect that was heard meanwhile, but has not refuted, is asked again and given the same time again; so is one whose
host answers, for as long as it does, or until ``unresponsive_s`` is over.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial

from farcall.protocol.membership.events import LinkSilent
from farcall.protocol.membership.messages import Ask, Deny, Status, Vouch
from farcall.protocol.membership.news import Shared, Turns

LOWEST_HEALTH = 4
MAX_LATE_ROUNDS = 2  # who is always late must come to a verdict some day, too
TRIES_PER_TURN = 8


class Outcome(Enum):
    """How a probe ended."""

    ANSWERED = "answered"
    FAILED = "failed"
    DENIED = "denied"
    UNSURE = "unsure"


class Health:
    """How far this member trusts its own eyes."""

    __slots__ = ("sunk",)

    def __init__(self) -> None:
        self.sunk: int = 0

    @property
    def factor(self) -> int:
        """By how much to be more patient."""
        return 1 + self.sunk

    def sink(self) -> bool:
        """False if it cannot sink any further."""
        if self.sunk == LOWEST_HEALTH:
            return False
        self.sunk += 1
        return True

    def rise(self) -> None:
        self.sunk = max(0, self.sunk - 1)


class Probe:
    """One question whether ``target`` lives. ``last``: nobody will ask again."""

    __slots__ = (
        "alone",
        "deniers",
        "due",
        "helpers",
        "last",
        "late_rounds",
        "refused",
        "round",
        "started_at",
        "target",
    )

    def __init__(self, target: int, now: float, last: bool) -> None:
        self.target: int = target
        self.started_at: float = now
        self.last: bool = last
        self.round: int = 1
        self.due: float = now
        self.refused: bool = False
        self.alone: bool = False  # at its end: nobody at all had been heard
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
        self._probes: dict[int, Probe] = {}
        self._askers: dict[int, set[int]] = {}  # target -> who wants to know
        self._refused_at: dict[int, float] = {}
        self._turns = Turns(shared.random, shared.table)
        self._last_turn_at = 0.0
        self._others_when_heard = 0

    # --- turns -------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Take turns from now on, at a moment of one's own."""
        self.heard_anybody_at = self._last_turn_at = now
        self._others_when_heard = len(self._table.others)
        self._timers.set(now + self._random.random() * self._options.probe_interval_s, self._take_turn)

    def include(self, incarnation: int) -> None:
        """A newcomer."""
        self._turns.include(incarnation)

    def exclude(self, incarnation: int) -> None:
        """``incarnation`` has ended."""
        self._probes.pop(incarnation, None)
        self._refused_at.pop(incarnation, None)
        for asker in sorted(self._askers.pop(incarnation, ())):
            self._outbox.send(asker, Deny(incarnation, self._outbox.news(asker, incarnation)))

    def _take_turn(self, due: float, now: float) -> None:
        if self._is_late(due, now):
            self.health.sink()
        elif self.heard_anybody_at > self._last_turn_at:
            self.health.rise()
        self._last_turn_at = now
        interval_s = self._options.probe_interval_s
        for _ in range(min(TRIES_PER_TURN, len(self._table.others))):
            entry = self._turns.next()
            if entry is not None and now - entry.heard_at >= interval_s and entry.incarnation not in self._probes:
                self.start(entry.incarnation, now)
                break
        # Uneven steps, so that members never fall into step with each other.
        self._timers.set(now + interval_s * (0.9 + 0.2 * self._random.random()), self._take_turn)

    # --- our own probes ----------------------------------------------------------------------------------

    def start(self, target: int, now: float, *, urgent: bool = False, last: bool = False) -> Probe:
        """Probe ``target``; ``urgent`` asks others at once. One that is under way is joined."""
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
        self._outbox.ping(probe.target)
        if ask:
            self._ask_others(probe)
        probe.due = now + self._options.probe_timeout_s * self.health.factor
        self._timers.set(probe.due, partial(self._end_round, probe))

    def _ask_others(self, probe: Probe) -> None:
        others, count = self._table.others, self._options.indirect_probes
        drawn = self._random.sample(others, min(len(others), 2 * count + 2))
        trusted = [
            incarnation
            for incarnation in drawn
            if self._table.entries[incarnation].status is Status.ALIVE and incarnation != probe.target
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
            self._begin_round(probe, now, ask=bool(probe.helpers))
            return
        if probe.round == 1:
            probe.round = 2
            self._begin_round(probe, now, ask=True)
            return
        if probe.refused and probe.deniers:
            self._end(probe, Outcome.DENIED, now)
        elif self._is_alone_since(probe) and self.health.sink():
            self._end(probe, Outcome.UNSURE, now)
        else:
            self._end(probe, Outcome.FAILED, now)

    def _is_late(self, due: float, now: float) -> bool:
        return now - due > self._options.probe_timeout_s / 2

    def _is_alone_since(self, probe: Probe) -> bool:
        """Of two, either has only the other to hear; that says nothing."""
        return self.heard_anybody_at < probe.started_at and self._others_when_heard > 1

    def _end(self, probe: Probe, outcome: Outcome, now: float) -> None:
        del self._probes[probe.target]
        probe.alone = self._is_alone_since(probe)
        self._conclude(probe, outcome, now)

    # --- what is heard -----------------------------------------------------------------------------------

    def on_heard(self, incarnation: int, now: float) -> None:
        """Anything came from ``incarnation``, a member."""
        self.heard_anybody_at = now
        self._others_when_heard = len(self._table.others)
        self._table.entries[incarnation].heard_at = now
        if incarnation in self._refused_at:
            del self._refused_at[incarnation]
        if incarnation in self._askers:
            for asker in sorted(self._askers.pop(incarnation)):
                self._outbox.send(asker, Vouch(incarnation, self._outbox.news(asker, incarnation)))
        if incarnation in self._probes:
            self._end(self._probes[incarnation], Outcome.ANSWERED, now)

    def on_vouch(self, target: int, now: float) -> None:
        """Somebody has heard from ``target``, though we have not."""
        probe = self._probes.get(target)
        if probe is not None:
            self._table.entries[target].heard_at = now
            self._outbox.tell(LinkSilent(target))
            self._end(probe, Outcome.ANSWERED, now)

    def deny(self, target: int, now: float) -> bool:
        """Tell who asked that ``target`` is not there. True if we tried for others only: then it is their affair."""
        self._refused_at[target] = now
        askers = sorted(self._askers.pop(target, ()))
        for asker in askers:
            self._outbox.send(asker, Deny(target, self._outbox.news(asker, target)))
        return bool(askers) and target not in self._probes

    def on_refused(self, target: int, now: float) -> None:
        """Nobody listens where ``target`` was, as seen from here."""
        probe = self.start(target, now, urgent=True)
        probe.refused = True
        self._check_denied(probe, now)
        for other in list(self._probes.values()):
            if target in other.helpers:  # it will not answer our question, either
                other.helpers.discard(target)
                other.deniers.discard(target)
                self._check_denied(other, now)

    def on_deny(self, helper: int, target: int, now: float) -> None:
        """Nor as seen from ``helper``."""
        probe = self._probes.get(target)
        if probe is not None and helper in probe.helpers:
            probe.deniers.add(helper)
            self._check_denied(probe, now)

    def _check_denied(self, probe: Probe, now: float) -> None:
        """Where there is nobody to ask (any more), our own eyes have to do."""
        if probe.refused and probe.helpers == probe.deniers:
            self._end(probe, Outcome.DENIED, now)

    # --- for others --------------------------------------------------------------------------------------

    def on_ask(self, asker: int, target: int, now: float) -> None:
        """``asker`` cannot reach ``target``: try."""
        entry = self._table.entries.get(target)
        if entry is None or target == self._table.me:
            return
        patience_s = 2 * self._options.probe_timeout_s
        if entry.ended or now - self._refused_at.get(target, now - patience_s) < patience_s:
            self._outbox.send(asker, Deny(target, self._outbox.news(asker, target)))
            return
        askers = self._askers.get(target)
        if askers is not None:
            askers.add(asker)  # a ping is under way: many may ask at once about one
            return
        askers = self._askers[target] = {asker}
        self._outbox.ping(target)

        def give_up(due: float, now: float) -> None:
            if self._askers.get(target) is askers:
                del self._askers[target]

        self._timers.set(now + patience_s, give_up)


class Suspicion:
    """One unresponsive member. ``own``: it did not answer us, rather than somebody else."""

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
    """All unresponsive members, as this one sees it."""

    def __init__(self, shared: Shared, prober: Prober) -> None:
        self._options, self._random, self._table = shared.options, shared.random, shared.table
        self._timers = shared.timers
        self._prober = prober
        self._suspicions: dict[int, Suspicion] = {}

    def begin(self, incarnation: int, version: int, own: bool, now: float) -> None:
        """``incarnation`` is unresponsive; told again with ``own``, the shorter time counts, from the beginning."""
        known = self._suspicions.get(incarnation)
        if known is not None and known.version == version:
            if own and not known.own:
                known.own = True
                self._set(known, max(now, known.since + self._patience_s(known)))
            return
        suspicion = self._suspicions[incarnation] = Suspicion(incarnation, version, own, now)
        self._set(suspicion, now + self._patience_s(suspicion))

    def end(self, incarnation: int) -> None:
        """It has refuted, or ended."""
        self._suspicions.pop(incarnation, None)

    def stands(self, incarnation: int) -> bool:
        return incarnation in self._suspicions

    def ages_s(self, now: float) -> dict[int, float]:
        """For how long each has been unresponsive. From any thread."""
        return {suspicion.incarnation: now - suspicion.began_at for suspicion in list(self._suspicions.values())}

    def see_host(self, incarnation: int, answers: bool) -> None:
        """The kernel of its host answers, or does not."""
        suspicion = self._suspicions.get(incarnation)
        if suspicion is not None:
            suspicion.host_is_silent = not answers

    def verdict(self, incarnation: int, now: float) -> str:
        """Why a suspect whose last probe failed is dead; empty: it is not."""
        suspicion, bound_s = self._suspicions[incarnation], self._options.unresponsive_s
        if suspicion.host_is_silent:
            return "its host does not answer, and nobody has heard from it for long"
        if bound_s is not None and now - suspicion.began_at >= bound_s:
            return f"it did not answer for {bound_s:g} s, which the option `unresponsive_s` makes a death"
        return ""

    def renew(self, incarnation: int, now: float) -> None:
        """It was heard, or our own eyes are not to be trusted: all its time again."""
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
        heard_meanwhile = self._table.entries[incarnation].heard_at > suspicion.since
        if heard_meanwhile:
            self.renew(incarnation, now)
        self._prober.start(incarnation, now, urgent=True, last=not heard_meanwhile)
