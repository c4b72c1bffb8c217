"""One publisher's tenure of a name: it claims the name, lends versions, and ends when another publisher takes over.

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

A publisher claims an epoch above all that it has heard of. Two concurrent claims of a name may take the same epoch;
the answers reveal that to both publishers. So no epoch has two publishers, unless a member does not answer within
CLAIM_S; then the higher incarnation wins. Versions are lent until the tenure ends (`lending.py`); borrowers may read on
after its end.
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
MAX_LEAP: Final = 1 << 20
MAX_HEARD: Final = 1 << 48
"""The highest version that is believed of an answer: those that follow it must have numbers, too."""
NEVER: Final = float("inf")


class PublisherState(StrEnum):
    """The states of a publisher; see the table above."""

    CLAIMING = "claiming"
    PUBLISHED = "published"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


class Answered(msgspec.Struct, frozen=True):
    """A member answers ``claim`` with the highest claim it knows; ``alive``: is that claim's publisher a member?"""

    member: int
    claim: Claim
    known: Claim
    number: int
    alive: bool = True


class Claimed(msgspec.Struct, frozen=True):
    """Another publisher claims the name."""

    claim: Claim


class Joined(msgspec.Struct, frozen=True):
    """A member joined."""

    member: int


class Gone(msgspec.Struct, frozen=True):
    """A member left or died."""

    member: int


class Wanted(msgspec.Struct, frozen=True):
    """A member subscribes or unsubscribes."""

    member: int
    wanted: bool
    serial: int


class Pushed(msgspec.Struct, frozen=True):
    """Version ``number`` is complete."""

    number: int


class Taken(msgspec.Struct, frozen=True):
    """A member answers for a version."""

    member: int
    number: int
    how: How


class Closed(msgspec.Struct, frozen=True):
    """The program stops publishing the name."""


class Tell(msgspec.Struct, frozen=True):
    """Send ``message`` to ``member``; None: to all other members."""

    member: int | None
    message: NameClaimed | NameClosed


Event: TypeAlias = Answered | Claimed | Joined | Gone | Wanted | Pushed | Taken | Closed
Effect: TypeAlias = Tell | Lend | Freed | Stranded


class PublisherMachine:
    """The tenure of one publisher. ``state``, ``claim`` and ``number`` may be read at any time.

    Mutable: these three, the lender, the members that have not answered the claim, and the deadline for their answers.
    """

    def __init__(
        self, name: str, me: int, *, known: Claim | None, number: int, keep: int, members: Iterable[int]
    ) -> None:
        """``known`` and ``number`` are the highest claim and version that this member has heard of."""
        self.name: str = name
        self.state: PublisherState = PublisherState.CLAIMING
        self.claim: Claim = Claim(1 if known is None else known.epoch + 1, me)
        self.number: int = number
        """The highest version of the name, of any publisher."""
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
        """Apply ``event`` and return its effects."""
        step = _STEPS[type(event)].get(self.state)
        return [] if step is None else step(self, event, now)

    def next_deadline(self) -> float:
        """When to call `handle_deadline`."""
        return self._deadline

    def handle_deadline(self, now: float) -> list[Effect]:
        """Publish without the answers that are still missing."""
        if now >= self._deadline and self.state is PublisherState.CLAIMING:
            self._publish()
        return []

    def is_leap(self, known: Claim) -> bool:
        """Does an answer use up epochs that honest members never reach, so that nobody could go above them?"""
        return known.epoch > self.claim.epoch + MAX_LEAP

    def _announcement(self) -> NameClaimed:
        return NameClaimed(self.name, self.claim, self.number)

    def _publish(self) -> None:
        self.state = PublisherState.PUBLISHED
        self._deadline = NEVER
        self._waits_for.clear()

    def _reclaim(self, known: Claim, now: float) -> list[Effect]:
        """Claim an epoch above ``known``. From now on only answers to the new claim count."""
        self.claim = Claim(known.epoch + 1, self.claim.publisher)
        if self.state is PublisherState.PUBLISHED:
            # Versions pushed before continue under the higher claim; version numbers only grow.
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
        """Does ``known`` give another publisher this claim's epoch, or a higher one?"""
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
