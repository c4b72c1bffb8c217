"""Connecting to a member and staying connected: the step that follows each dial attempt, and which end redials.

Owns the decisions, sans I/O: a `Dial` says when to try again and when to stop; a `Bond` is the state that two members
share over all their connections. Deadlines use the ``now`` that is passed in. Must not know transports, threads or
links.

    goal       a dial of
    START      a starting member of a group of fixed size, to the members of lower rank
    JOIN       a newcomer, to members that may let it in; one attempt, its caller decides about the next
    CONNECT    the later of two members, to the earlier one, or of any member that has news for another
    RESUME     the member that dialled first, after a connection broke
    REMIND     the member that was dialled: is the peer alive? The peer should redial, and may not know it yet

STEPS below is the transition table: the outcome of an attempt and the goal give the next step. What an outcome says of
a death:

- *Nobody listens* within the host is certain at once: the local kernel says so. But an ending process may close its
  listener last. So the dialled end knocks before it gives the peer a moment to dial, and the dialling end knocks
  after a connection that was accepted and got no answer.
- A TCP port that another host *refuses*, or where *something else answers*, is news for the members, and never a
  verdict: a NAT, a proxy or a virtual address that restarts refuses, too, while the process behind it lives. The dial
  ends, and its driver begins the next one until the members have decided.
- *No answer* ends nothing by itself: the dial goes on until its deadline, and past it while the peer is a member
  (``Due.is_member``). The members decide together whether the peer is dead, and only if its host does not answer.
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
    "Parting",
    "Step",
    "Tried",
]

REFUSED_PAUSE_S = 0.2
"""The pause before the next dial of a member that was refused a moment ago: its verdict waits for fresh refusals."""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
LONGEST_ATTEMPT_S = 600.0
"""A connection in the backlog of a busy or stopped member is better than a new one: a backlog full of abandoned
connections looks like a host that does not answer."""
KNOCK_PAUSES_S = (0.0005, 0.002, 0.008)
"""An ending process closes its descriptors one by one, perhaps its listener last: knock more than once."""


class Goal(Enum):
    """The purpose of a dial."""

    START = "start"
    JOIN = "join"
    CONNECT = "connect"
    RESUME = "resume"
    REMIND = "remind"


class Outcome(Enum):
    """The result of one attempt, over all addresses of a member."""

    PROVEN = "it answered, and proved itself"
    LISTENS = "somebody listens at its address within this host"
    NOBODY = "nobody listens at its address within this host"
    REFUSED = "its host refuses the port"
    ELSEWHERE = "another process answers at its address on another host"
    ANOTHER = "another process has its address"
    FOREIGN = "what answers does not speak farcall"
    REJECTED = "it answered, and refused us"
    CROSSED = "it is about to be let in by us"
    UNANSWERED = "its host does not answer"
    SILENT = "its host answers, and it does not"


class Step(Enum):
    """The next step after an attempt."""

    DONE = "connected"
    AGAIN = "another attempt, after the next pause"
    REFUSED = "refused, which the members judge"
    VANISHED = "its process is not there any more"
    GIVEN_UP = "it lives, and has given us up"
    LATER = "no answer; the caller decides whether there is another attempt"
    OUT_OF_TIME = "it could not be reached in time"


_DONE, _AGAIN, _LATER = Step.DONE, Step.AGAIN, Step.LATER
_GONE, _ENDS, _NEWS = Step.VANISHED, Step.GIVEN_UP, Step.REFUSED

# fmt: off
STEPS: Final[dict[Outcome, dict[Goal, Step]]] = {
    outcome: dict(zip(Goal, steps, strict=True))
    for outcome, *steps in (
        #                       START    JOIN     CONNECT  RESUME   REMIND
        (Outcome.PROVEN,        _DONE,   _DONE,   _DONE,   _DONE,   _AGAIN),
        (Outcome.LISTENS,       _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
        (Outcome.NOBODY,        _AGAIN,  _GONE,   _GONE,   _GONE,   _GONE),
        (Outcome.REFUSED,       _AGAIN,  _GONE,   _NEWS,   _NEWS,   _NEWS),
        (Outcome.ELSEWHERE,     _ENDS,   _GONE,   _NEWS,   _NEWS,   _NEWS),
        (Outcome.ANOTHER,       _ENDS,   _GONE,   _GONE,   _GONE,   _GONE),
        (Outcome.FOREIGN,       _ENDS,   _GONE,   _NEWS,   _NEWS,   _NEWS),
        (Outcome.REJECTED,      _ENDS,   _ENDS,   _ENDS,   _ENDS,   _ENDS),
        (Outcome.CROSSED,       _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
        (Outcome.UNANSWERED,    _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
        (Outcome.SILENT,        _AGAIN,  _LATER,  _AGAIN,  _AGAIN,  _AGAIN),
    )
}
# fmt: on


class Due(msgspec.Struct, frozen=True):
    """The pause is over. ``is_member``: the members hold the peer neither for dead nor for gone."""

    is_member: bool = False


class Tried(msgspec.Struct, frozen=True):
    """An attempt has ended."""

    outcome: Outcome
    why: str = ""


Event: TypeAlias = Due | Tried


class Attempt(msgspec.Struct, frozen=True):
    """Try every address once, within ``bound_s``, and report the outcome (`Tried`).

    ``knocks``: only test whether a process listens within this host.
    """

    bound_s: float
    knocks: bool = False


class Ended(msgspec.Struct, frozen=True):
    """The dial makes no further attempt: ``step`` is not AGAIN."""

    step: Step
    why: str


Effect: TypeAlias = Attempt | Ended


class Dial:
    """The attempts to reach one member."""

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
        """``until``: when to stop. ``backoff`` outlives this dial: all dials that repair one loss share its pauses.

        ``within_host``: the dialling end can knock.
        """
        # Mutable: the knocks that are left, the latest reason, and the next deadline.
        self.goal: Goal = goal
        self._knock_pauses_s = [*reversed(KNOCK_PAUSES_S)] if within_host else []
        self._knocks = within_host and goal is Goal.REMIND
        self._until = until
        self._backoff = backoff
        self._why = "it breaks again and again"
        # START and JOIN try once, however late they begin: their error has to name a reason.
        self._must_try = goal in (Goal.START, Goal.JOIN)
        self._next: float | None = now
        if pauses_first and not self._knocks:
            self._pause(backoff.next_s(), now)

    def next_deadline(self) -> float | None:
        """When to feed `Due`; None while an attempt is under way, and after the end."""
        return self._next

    def handle(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Due(is_member):
                self._next = None
                if now >= self._until and not is_member and not self._must_try:
                    return [Ended(Step.OUT_OF_TIME, self._why)]
                self._must_try = False
                knocks, self._knocks = self._knocks, False
                past_end_s = LONGEST_ATTEMPT_S if is_member else LONGEST_PAUSE_S
                return [Attempt(self._until - now if self._until > now else past_end_s, knocks)]
            case Tried(outcome, why):
                self._why = why or outcome.value
                step = STEPS[outcome][self.goal]
                if outcome in (Outcome.LISTENS, Outcome.SILENT) and self._knock_pauses_s:
                    self._knocks = True
                    self._pause(self._knock_pauses_s.pop(), now)
                elif step is Step.AGAIN:
                    self._pause(self._backoff.next_s(), now)
                else:
                    return [Ended(step, self._why)]
        return []

    def _pause(self, pause_s: float, now: float) -> None:
        self._next = now + min(pause_s, self._remaining_s(now))

    def _remaining_s(self, now: float) -> float:
        """Seconds until the deadline. Past it the dial goes on only for a member: then the longest pause."""
        return self._until - now if self._until > now else LONGEST_PAUSE_S


# ---------------------------------------------------------------------- members that come back


class Answer(Enum):
    """The answer to a proven peer whose hello names a session."""

    RESUME = "it gets the session, over its new connection"
    DIAL = "we are to dial, and do so now"
    NOT_OURS = "asks for what is its own to do"
    NOT_ITS = "was dialled by us, and does not dial back"
    CROSSED = "does what we are about to do"


ANSWERS: Final[dict[tuple[type[Resume] | type[Remind], bool], Answer]] = {
    # (the purpose of the peer, whether this end dialled first)
    (Resume, False): Answer.RESUME,
    (Resume, True): Answer.NOT_ITS,
    (Remind, False): Answer.NOT_OURS,
    (Remind, True): Answer.DIAL,
}


class Parting(Enum):
    """How far two members have agreed to close an idle connection."""

    NO = "no"
    PROPOSED = "this end has said Part"
    AGREED = "one end has said Parted, and either may dial"


class Bond:
    """The state that two members share over all their connections: the session, the dialling end, the current repair.

    A connection that breaks before it brought a frame counts as the same loss: ``lost_at`` stays, and pauses grow.

    **Parting.** The member of the lower incarnation proposes, so proposals never cross. Part and Parted carry the
    number of frames received. An end writes nothing behind its Part or Parted: later frames wait in the queue.

        parting    event                                                        becomes
        no         the link has been idle for a while (proposer only)           proposed: Part, and no frame behind it
        no         Part, and its count is not all that this end has written,    no: Stay
                   or this end has frames to send, or waits for an answer
        no         Part, else                                                   agreed: Parted, and no frame behind it
        proposed   Stay                                                         no
        proposed   Parted, and its count is all that this end has written       agreed: the connection is closed
        proposed   Parted, else: it answers an older proposal                   no: Stay
        proposed   the connection breaks                                        proposed: the dialling end redials,
                                                                                or the other end, if it had agreed
        no         Parted                                                       no: Stay
        agreed     Stay                                                         no
        agreed     the connection ends                                          agreed; the link sleeps
        agreed     a frame is to be sent, or the other end asks for us          agreed: this end dials from now on
        agreed     the other end comes back                                     no: the other end dials from now on
        agreed     this end was let in                                          no

    **Parting loses no frame.** A link sleeps only after agreement. The proposer agrees when the peer has counted all
    its frames, Part the last of them. The peer agrees when the proposer has all its frames but Parted, which nobody
    misses. From then to the next connection neither end writes. So the unsent frames of a sleeping link are all in its
    queue, and wake it; none is in flight. It does not matter which proposal a message answers: Part, Parted and Stay
    may be retransmitted over a later connection, like all frames, and do no harm, since each end compares counts of
    its own frames. If one end has agreed alone, it sleeps, and lets the other end in, or dials when asked to.

    **Crossing dials lose no frame.** Each end uses one connection, reads it to its end before it reports its count over
    another (`Link.break_off`), and takes a connection only from its current dial. The connection of a withdrawn dial is
    closed; frames written to it are kept and retransmitted. So frames arrive once and in order, whichever connections
    are made. `Dialler.withdraw` keeps the two ends from crossing again and again.

    So the dialling end may change, and after a failed dial the two ends may disagree about it. From the first proposal
    on the member of the lower incarnation has the last word: its dial is let in, and where both wait, it dials.
    """

    __slots__ = ("_has_parted", "_received", "backoff", "dialled", "lost_at", "parting", "session_id", "since")

    def __init__(self, session_id: str, *, dialled: bool, now: float, jitter: Jitter) -> None:
        # Mutable: all but ``session_id``.
        self.session_id: str = session_id
        self.dialled: bool = dialled
        self.since: float = now
        """When the present connection was made."""
        self.lost_at: float = 0.0
        self.backoff: Backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=jitter)
        self.parting: Parting = Parting.NO
        self._has_parted = False
        self._received = -1  # frames received before the present connection

    def lose(self, received: int, now: float, reconnect_s: float) -> None:
        """The connection broke, after ``received`` frames in all. It is a new loss if it brought a frame or lasted."""
        if received > self._received or now - self.since > reconnect_s:
            self.lost_at = now
            # The dialling end redials at once; a reminder at the same moment would only cross with that dial.
            self.backoff.restart(0.0 if self.dialled else FIRST_PAUSE_S)

    def restore(self, received: int, now: float) -> None:
        """A new connection stands; ``received`` frames came before it."""
        self.since = now
        self.parting = Parting.NO
        self._received = received

    def rejoin(self, now: float, reconnect_s: float) -> Dial:
        """The dial of the end that has a frame to send after both parted; it is the dialling end from now on."""
        self.dialled = True
        self.lost_at = now
        self.backoff.restart(0.0)
        return Dial(Goal.RESUME, until=now + reconnect_s, now=now, backoff=self.backoff, pauses_first=True)

    def part(self, parting: Parting) -> None:
        """This end proposes to part, or agrees. Call before the message goes: the peer may agree whatever follows."""
        self.parting = parting
        self._has_parted = True

    def answer(self, purpose: type[Resume] | type[Remind], *, is_lower: bool) -> Answer:
        """The answer to the other end, which names the session; ``is_lower``: its incarnation is the lower one."""
        if not self._has_parted:
            return ANSWERS[purpose, self.dialled]
        if purpose is Resume:
            is_let_in = is_lower or not self.dialled or self.parting is not Parting.NO
            return Answer.RESUME if is_let_in else Answer.CROSSED
        is_ours = self.dialled or not is_lower or self.parting is Parting.AGREED
        return Answer.DIAL if is_ours else Answer.CROSSED

    def redial(self, now: float, reconnect_s: float, *, within_host: bool = False, refused: bool = False) -> Dial:
        """The dial that repairs the loss of a connection; ``within_host``: it was a connection within this host.

        ``refused``: the last dial was. For the first while the next one follows soon.
        """
        if refused and now < self.lost_at + reconnect_s:
            self.backoff.restart(REFUSED_PAUSE_S)
        goal = Goal.RESUME if self.dialled else Goal.REMIND
        until = self.lost_at + reconnect_s
        return Dial(goal, until=until, now=now, backoff=self.backoff, pauses_first=True, within_host=within_host)
