"""Getting connected to a member, and staying so: the next step after each outcome of an attempt, and every return.

Owns the decisions, sans I/O: a `Dial` says when to try again and when to stop, a `Bond` what joins two members over all
their connections. Deadlines go by the ``now`` that is passed in. Must not know transports, threads or links.

    goal       a dial of
    START      a starting member of a group of fixed size, to those of lower rank
    JOIN       a newcomer, to members that may let it in; one attempt, its caller decides about the next
    CONNECT    the later of two members, to the earlier one, or of any member that has news for another
    RESUME     the member that dialled at first, after a connection broke
    REMIND     the member that was dialled: does the other one live? It is to dial again, and may not know it yet

STEPS below is the transition table: the outcome of an attempt and the goal name the next step. Three of its cells
decide deaths. *Nobody listens* within the host is certain at once, since the kernel speaks; so the end that was dialled
knocks there before it leaves the other a moment to dial, and the end that dials knocks where it was accepted and got no
answer: the listener of a process that ends may be the last of it to go. A *refused* TCP port is
believed the second time in a row, 50 ms later: its host answers, and a process that is being restarted in place gets
those. *No answer* ends nothing by itself: the dial goes on until its time is up, and longer while the peer is a member
(``Due.is_member``): whether it is dead is decided among the members, and only where its host does not answer.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, TypeAlias

import msgspec

from farcall.protocol.backoff import Backoff, Jitter
from farcall.protocol.hello import Remind, Resume

__all__ = [
    "ANSWERS",
    "STEPS",
    "Answer",
    "Attempt",
    "Bond",
    "Dial",
    "Due",
    "Effect",
    "Ended",
    "Event",
    "Goal",
    "Outcome",
    "Step",
    "Tried",
]

REFUSED_PAUSE_S = 0.05
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
KNOCK_PAUSES_S = (0.0005, 0.002, 0.008)
"""A process that ends closes its descriptors one after the other, and perhaps its listener last."""


class Goal(Enum):
    """What a dial is for."""

    START = "start"
    JOIN = "join"
    CONNECT = "connect"
    RESUME = "resume"
    REMIND = "remind"


class Outcome(Enum):
    """What one attempt, over all addresses of a member, came to."""

    PROVEN = "it answered, and proved itself"
    LISTENS = "somebody listens at its address within this host"
    NOBODY = "nobody listens at its address within this host"
    REFUSED = "its host refuses the port"
    REFUSED_AGAIN = "its host refuses the port, twice in a row"
    ANOTHER = "another process has its address"
    FOREIGN = "what answers does not speak farcall"
    REJECTED = "it answered, and refused us"
    UNANSWERED = "its host does not answer"
    SILENT = "its host answers, and it does not"


class Step(Enum):
    """What follows an attempt."""

    DONE = "connected"
    AGAIN = "another attempt, after the next pause"
    SOON = "another attempt, almost at once"
    VANISHED = "its process is not there any more"
    GIVEN_UP = "it lives, and has given us up"
    LATER = "no answer; the caller decides whether there is another attempt"
    OUT_OF_TIME = "it could not be reached in time"


_DONE, _AGAIN, _SOON, _LATER = Step.DONE, Step.AGAIN, Step.SOON, Step.LATER
_GONE, _ENDS = Step.VANISHED, Step.GIVEN_UP

# fmt: off
STEPS: Final[dict[Outcome, dict[Goal, Step]]] = {
    outcome: dict(zip(Goal, steps, strict=True))
    for outcome, *steps in (
        #                       START    JOIN     CONNECT  RESUME   REMIND
        (Outcome.PROVEN,        _DONE,   _DONE,   _DONE,   _DONE,   _AGAIN),
        (Outcome.LISTENS,       _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
        (Outcome.NOBODY,        _AGAIN,  _GONE,   _GONE,   _GONE,   _GONE),
        (Outcome.REFUSED,       _AGAIN,  _GONE,   _SOON,   _SOON,   _SOON),
        (Outcome.REFUSED_AGAIN, _AGAIN,  _GONE,   _GONE,   _GONE,   _GONE),
        (Outcome.ANOTHER,       _ENDS,   _GONE,   _GONE,   _GONE,   _GONE),
        (Outcome.FOREIGN,       _ENDS,   _GONE,   _ENDS,   _ENDS,   _ENDS),
        (Outcome.REJECTED,      _ENDS,   _ENDS,   _ENDS,   _ENDS,   _ENDS),
        (Outcome.UNANSWERED,    _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
        (Outcome.SILENT,        _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
    )
}
# fmt: on


class Due(msgspec.Struct, frozen=True):
    """The pause is over. ``is_member``: the peer is neither dead nor gone, as far as the members know."""

    is_member: bool = False


class Tried(msgspec.Struct, frozen=True):
    """An attempt has ended."""

    outcome: Outcome
    why: str = ""


Event: TypeAlias = Due | Tried


class Attempt(msgspec.Struct, frozen=True):
    """Try every address once, within ``bound_s``, and tell the outcome (`Tried`).

    ``knocks``: only look whether anybody listens within this host.
    """

    bound_s: float
    knocks: bool = False


class Ended(msgspec.Struct, frozen=True):
    """There will be no further attempt: ``step`` is none of AGAIN and SOON."""

    step: Step
    why: str


Effect: TypeAlias = Attempt | Ended


class Dial:
    """The attempts to get through to one member."""

    def __init__(
        self,
        goal: Goal,
        *,
        until: float,
        now: float,
        backoff: Backoff,
        pauses_first: bool = False,
        within_host: bool = False,
    ) -> None:
        """``until``: when to stop; ``backoff`` outlives this dial where one trouble leads to several.

        ``within_host``: who dials can knock.
        """
        self.goal: Goal = goal
        self._knock_pauses_s = [*reversed(KNOCK_PAUSES_S)] if within_host else []
        self._knocks = within_host and goal is Goal.REMIND
        self._until = until
        self._backoff = backoff
        self._refusals = 0
        self._why = "it breaks again and again"
        # Both name a reason in the end, however late the turn of this member comes.
        self._must_try = goal in (Goal.START, Goal.JOIN)
        self._next: float | None = now
        if pauses_first and not self._knocks:
            self._pause(backoff.next_s(), now)

    def next_deadline(self) -> float | None:
        """When to say `Due`; None: while an attempt is under way, and at the end."""
        return self._next

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Due(is_member):
                self._next = None
                if now >= self._until and not is_member and not self._must_try:
                    return [Ended(Step.OUT_OF_TIME, self._why)]
                self._must_try = False
                knocks, self._knocks = self._knocks, False
                return [Attempt(self._remaining_s(now), knocks)]
            case Tried(outcome, why):
                self._why = why or outcome.value
                self._refusals = self._refusals + 1 if outcome is Outcome.REFUSED else 0
                if self._refusals > 1:
                    outcome = Outcome.REFUSED_AGAIN
                step = STEPS[outcome][self.goal]
                if outcome in (Outcome.LISTENS, Outcome.SILENT) and self._knock_pauses_s:
                    self._knocks = True
                    self._pause(self._knock_pauses_s.pop(), now)
                elif step is Step.AGAIN:
                    self._pause(self._backoff.next_s(), now)
                elif step is Step.SOON:
                    self._backoff.restart(REFUSED_PAUSE_S)
                    self._pause(self._backoff.next_s(), now)
                else:
                    return [Ended(step, self._why)]
        return []

    def _pause(self, pause_s: float, now: float) -> None:
        self._next = now + min(pause_s, self._remaining_s(now))

    def _remaining_s(self, now: float) -> float:
        """Until the end; past it, as long as the peer is a member, the longest pause."""
        return self._until - now if self._until > now else LONGEST_PAUSE_S


# ---------------------------------------------------------------------- members that come back


class Answer(Enum):
    """What becomes of a proven member that speaks of a session."""

    RESUME = "it gets the session, over its new connection"
    DIAL = "we are to dial, and do so now"
    NOT_OURS = "asks for what is its own to do"
    NOT_ITS = "was dialled by us, and does not dial back"


ANSWERS: Final[dict[tuple[type[Resume] | type[Remind], bool], Answer]] = {
    # what it wants, and whether we dialled at first
    (Resume, False): Answer.RESUME,
    (Resume, True): Answer.NOT_ITS,
    (Remind, False): Answer.NOT_OURS,
    (Remind, True): Answer.DIAL,
}


class Bond:
    """What joins two members over all their connections: the session, who dials, and the trouble being repaired.

    A connection that breaks before a frame has come over it is no news: time runs on from ``lost_at``, and pauses grow.
    """

    __slots__ = ("_received", "backoff", "dialled", "lost_at", "session_id", "since")

    def __init__(self, session_id: str, *, dialled: bool, now: float, jitter: Jitter) -> None:
        self.session_id: str = session_id
        self.dialled: bool = dialled
        self.since: float = now
        """When the present connection was made."""
        self.lost_at: float = 0.0
        self.backoff: Backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=jitter)
        self._received = -1  # frames that had come before the present connection

    def lose(self, received: int, now: float, reconnect_s: float) -> None:
        """The connection broke, and ``received`` frames have come over the session: is that a new trouble?"""
        if received > self._received or now - self.since > reconnect_s:
            self.lost_at = now
            # The end that dials does so at once, and needs no reminder at the same moment.
            self.backoff.restart(0.0 if self.dialled else FIRST_PAUSE_S)

    def restore(self, received: int, now: float) -> None:
        """There is another connection; ``received`` frames have come before it."""
        self.since = now
        self._received = received

    def redial(self, now: float, reconnect_s: float, *, within_host: bool = False) -> Dial:
        """The dial that repairs the loss of a connection, perhaps one ``within_host``."""
        goal = Goal.RESUME if self.dialled else Goal.REMIND
        until = self.lost_at + reconnect_s
        return Dial(goal, until=until, now=now, backoff=self.backoff, pauses_first=True, within_host=within_host)
