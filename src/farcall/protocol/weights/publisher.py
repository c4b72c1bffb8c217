"""One publisher's tenure of a name: it claims the name, lends versions, and ends when another one takes the name over.

    claiming     a member answers: it is another's           claiming, with an epoch above that; all are told again
    claiming     the last member that lives answers alike    published
    claiming     CLAIM_S have passed                         published: whoever knows better may say so later
    claiming     another claims it, with a higher claim      superseded
    published    another claims it, with a higher claim      superseded
    published    a member answers: a higher claim            superseded; claiming, if that publisher is dead
    claiming     the program closes it                       closed; all are told, and get the newest version
    published    the program closes it                       closed; all are told, and get the newest version
    closed       a member that has not heard wants versions  closed; it is told
    any          a member joins                              the same; it is told, unless this has ended

An epoch is above all that were heard of. Two that claim a name at one time may take the same epoch, and find out by the
answers to both: no epoch has two publishers, unless a member does not answer for CLAIM_S; incarnations decide then.
Versions are lent until the tenure ends (`lending.py`); those who have them by then read on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from farcall.protocol.weights.lending import Freed, Lend, Lender, Stranded
from farcall.protocol.weights.messages import Claim, How, NameClaimed, NameClosed

CLAIM_S: Final = 2.0
"""How long a publisher waits for members that do not answer."""
NEVER: Final = float("inf")


class PublisherState(StrEnum):
    """What a publisher is."""

    CLAIMING = "claiming"
    PUBLISHED = "published"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


class Answered(msgspec.Struct, frozen=True):
    """A member answers ``claim`` with what it knows; ``alive``: is the publisher of that a member?"""

    member: int
    claim: Claim
    known: Claim
    number: int
    alive: bool = True


class Claimed(msgspec.Struct, frozen=True):
    """Another one claims the name."""

    claim: Claim


class Joined(msgspec.Struct, frozen=True):
    """A member has come."""

    member: int


class Gone(msgspec.Struct, frozen=True):
    """A member left or died."""

    member: int


class Wanted(msgspec.Struct, frozen=True):
    """A member wants versions, or no more."""

    member: int
    wanted: bool
    serial: int


class Pushed(msgspec.Struct, frozen=True):
    """Version ``number`` is complete."""

    number: int


class Taken(msgspec.Struct, frozen=True):
    """A member says what became of a version."""

    member: int
    number: int
    how: How


class Closed(msgspec.Struct, frozen=True):
    """The program publishes this no more."""


class Tell(msgspec.Struct, frozen=True):
    """Send this to a member; to all others if it is None."""

    member: int | None
    message: NameClaimed | NameClosed


Event: TypeAlias = Answered | Claimed | Joined | Gone | Wanted | Pushed | Taken | Closed
Effect: TypeAlias = Tell | Lend | Freed | Stranded


class PublisherMachine:
    """The tenure of one publisher. ``state``, ``claim`` and ``number`` may be read at any time."""

    def __init__(
        self, name: str, me: int, *, known: Claim | None, number: int, keep: int, members: Iterable[int]
    ) -> None:
        """``known``, ``number``: the highest claim and version that this member has heard of."""
        self.name: str = name
        self.state: PublisherState = PublisherState.CLAIMING
        self.claim: Claim = Claim(1 if known is None else known.epoch + 1, me)
        self.number: int = number
        """The highest version of the name, of whichever publisher."""
        self.superseded_by: Claim | None = None
        self.lender: Lender = Lender(keep)
        self._waits_for = set(members)
        self._deadline = NEVER

    def start(self, now: float) -> list[Effect]:
        """Claim the name."""
        self._deadline = now + CLAIM_S
        if not self._waits_for:
            self._publish()
        return [Tell(None, self._announcement())]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What follows from ``event``."""
        step = _STEPS[type(event)].get(self.state)
        return [] if step is None else step(self, event, now)

    def next_deadline(self) -> float:
        """When to call `handle_deadline`."""
        return self._deadline

    def handle_deadline(self, now: float) -> list[Effect]:
        """Members that have not answered are waited for no longer."""
        if now >= self._deadline and self.state is PublisherState.CLAIMING:
            self._publish()
        return []

    @property
    def waits_for(self) -> list[int]:
        """The members that have not answered yet."""
        return list(self._waits_for)

    def _announcement(self) -> NameClaimed:
        return NameClaimed(self.name, self.claim, self.number)

    def _publish(self) -> None:
        self.state = PublisherState.PUBLISHED
        self._deadline = NEVER
        self._waits_for.clear()

    def _reclaim(self, known: Claim, now: float) -> list[Effect]:
        """Claim the name above ``known``. Only answers to this very claim count from now on."""
        self.claim = Claim(known.epoch + 1, self.claim.publisher)
        if self.state is PublisherState.PUBLISHED:
            # Versions pushed before this go on under the higher claim; numbers only grow.
            self.state = PublisherState.CLAIMING
        self._deadline = now + CLAIM_S
        return [Tell(None, self._announcement())]

    def _answered_while_claiming(self, event: Answered, now: float) -> list[Effect]:
        self.number = max(self.number, event.number)
        if self._is_taken(event.known):
            return self._reclaim(event.known, now)
        if event.claim == self.claim:
            self._answered_by(event.member)
        return []

    def _is_taken(self, known: Claim) -> bool:
        """Has somebody else an epoch that this one would have to be above?"""
        return known.epoch >= self.claim.epoch and known.publisher != self.claim.publisher

    def _answered_by(self, member: int) -> None:
        self._waits_for.discard(member)
        if not self._waits_for and self.state is PublisherState.CLAIMING:
            self._publish()

    def _answered_late(self, event: Answered, now: float) -> list[Effect]:
        self.number = max(self.number, event.number)
        if event.known <= self.claim:
            return []
        if event.alive:
            return self._supersede(event.known)
        return self._reclaim(event.known, now)

    def _claimed(self, event: Claimed, now: float) -> list[Effect]:
        return self._supersede(event.claim) if event.claim > self.claim else []

    def _supersede(self, claim: Claim) -> list[Effect]:
        self.state, self.superseded_by = PublisherState.SUPERSEDED, claim
        self._deadline = NEVER
        return [*self.lender.close()]

    def _joined(self, event: Joined, now: float) -> list[Effect]:
        return [Tell(event.member, self._announcement())]

    def _gone(self, event: Gone, now: float) -> list[Effect]:
        self._answered_by(event.member)
        return [*self.lender.lose(event.member)]

    def _wanted(self, event: Wanted, now: float) -> list[Effect]:
        return [*self.lender.want(event.member, event.wanted, event.serial)]

    def _pushed(self, event: Pushed, now: float) -> list[Effect]:
        self.number = max(self.number, event.number)
        return [*self.lender.push(event.number)]

    def _taken(self, event: Taken, now: float) -> list[Effect]:
        return [*self.lender.take(event.member, event.number, event.how)]

    def _wanted_late(self, event: Wanted, now: float) -> list[Effect]:
        if event.wanted:
            return [Tell(event.member, NameClosed(self.name, self.claim, 0))]
        return self._wanted(event, now)

    def _closed(self, event: Closed, now: float) -> list[Effect]:
        self.state, self._deadline = PublisherState.CLOSED, NEVER
        return [Tell(None, NameClosed(self.name, self.claim, self.lender.newest)), *self.lender.end()]


_Step: TypeAlias = Callable[..., list[Effect]]
_S: Final = PublisherState
_ALIVE: Final = (_S.CLAIMING, _S.PUBLISHED)

_STEPS: Final[Mapping[type[Event], Mapping[PublisherState, _Step]]] = {
    Answered: {
        _S.CLAIMING: PublisherMachine._answered_while_claiming,
        _S.PUBLISHED: PublisherMachine._answered_late,
    },
    Claimed: dict.fromkeys(_ALIVE, PublisherMachine._claimed),
    Joined: dict.fromkeys(_ALIVE, PublisherMachine._joined),
    Gone: dict.fromkeys(_S, PublisherMachine._gone),
    Wanted: {**dict.fromkeys(_ALIVE, PublisherMachine._wanted), _S.CLOSED: PublisherMachine._wanted_late},
    Pushed: dict.fromkeys(_ALIVE, PublisherMachine._pushed),
    Taken: dict.fromkeys(_S, PublisherMachine._taken),
    Closed: dict.fromkeys(_ALIVE, PublisherMachine._closed),
}
