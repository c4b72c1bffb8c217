"""Agreement to shut down: when all work everywhere is done, and until then, who is late and why.

Each node runs one machine, events in, effects out. It reports to a coordinator: the smallest rank it still has a link
to. The coordinator releases everybody after two looks at the cluster in a row have shown every member shutting down,
idle, and with the same activity counter. A caller stays busy until its answer came, so at a moment between the two
looks nobody was busy and no call was under way; and nothing can start from nothing. What each state makes of each event
is `ACTIONS`, at the end of this file.

*Ready* is: shutting down, idle, and aware of every death the coordinator knows of. The last matters because a link's
end comes after all that the dead node sent over it: a member that knows of the death has seen its last requests. Two
that merely lost their link to each other must not block the rest, so a member that gets reports coordinates, even with
a smaller rank alive (two coordinators do no harm: each releases only what is truly done), and a death that others still
have not noticed after a long grace is held to be only a lost link. Messages may come twice or out of order.

The driver feeds ``LocalIdle`` or ``LocalBusy`` whenever that changed, *before* it hands in a message, and reads the
counter under the same lock: a stale "idle" is the one thing that could release a busy cluster. A call its caller gave
up on should count as in flight until its answer or its link's end: its request may still be on the way, where only the
caller knows of it.

No clock, socket or thread in here; not thread-safe. Longer than other files: events, effects and the machine are one
thing to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from farcall.protocol.messages import (
    DepartureAcknowledged,
    DepartureProbe,
    DepartureReleased,
    DepartureReport,
    DepartureStatus,
)

STATUS_INTERVAL_S: Final = 5.0
NOT_CALLED: Final = "has not called shutdown"
ACKNOWLEDGE_GRACE_S: Final = 5.0  # the work is done by then: a hung member must not hold up the coordinator
LOST_LINK_GRACE_S: Final = 30.0  # far longer than it takes a kernel to tell all peers of a process's end
MAX_LATE_NAMED: Final = 32  # keeps status messages small in a large cluster

DepartureMessage = DepartureReport | DepartureProbe | DepartureStatus | DepartureReleased | DepartureAcknowledged


class LocalEntered(msgspec.Struct, frozen=True):
    """The user called shutdown here; a ``timeout_s`` of 0 means no bound."""

    timeout_s: float


class LocalIdle(msgspec.Struct, frozen=True):
    """No call is being waited for or served here; ``activity`` counts all that ever were."""

    activity: int


class LocalBusy(msgspec.Struct, frozen=True):
    """``calls_in_flight`` calls are being waited for or served here."""

    calls_in_flight: int


class PeerGone(msgspec.Struct, frozen=True):
    """The link to ``rank`` has ended and everything it brought has been handled: dead or left."""

    rank: int


class PeerCame(msgspec.Struct, frozen=True):
    """There is a link to ``rank``, which has come for one that is gone."""

    rank: int
    name: str


class Received(msgspec.Struct, frozen=True):
    """A departure message came from ``rank``."""

    rank: int
    message: DepartureMessage


class Send(msgspec.Struct, frozen=True):
    """Send ``message`` to ``rank``; if its link has ended, do nothing."""

    rank: int
    message: DepartureMessage


class Finished(msgspec.Struct, frozen=True):
    """This node may close its links, once what it was told to send is written."""


class Late(msgspec.Struct, frozen=True):
    """A member that is waited for, and why."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} {self.why}"


class LogWaiting(msgspec.Struct, frozen=True):
    """Still waiting: tell the user for which members (and for how many more)."""

    late: tuple[Late, ...]
    unnamed_count: int


class TimedOut(msgspec.Struct, frozen=True):
    """The bound given to shutdown has passed; this node gives up on the others."""

    late: tuple[Late, ...]
    unnamed_count: int


Event = LocalEntered | LocalIdle | LocalBusy | PeerGone | PeerCame | Received
Effect = Send | Finished | LogWaiting | TimedOut


class DepartureState(Enum):
    """How far this node has come on its way out."""

    WORKING = "working"
    WAITING = "waiting"
    RELEASING = "releasing"
    FINISHED = "finished"
    TIMED_OUT = "timed out"


class Departure:
    """One node's part in the agreement. ``members`` maps every rank, one's own too, to its name."""

    def __init__(self, my_rank: int, members: Mapping[int, str]) -> None:
        self._my_rank = my_rank
        self._names = dict(members)
        self._peers = set(members) - {my_rank}  # those with a link still up
        self._gone: dict[int, float] = {}  # rank -> when its link ended
        self._came: dict[int, float] = {}  # rank -> when it came, for one that was gone
        self._now = 0.0
        self._state = DepartureState.WORKING
        # Busy until told otherwise: a driver that forgets to tell delays a shutdown instead of breaking work.
        self._calls_in_flight = 1
        self._activity = 0
        self._effects: list[Effect] = []

        # As a member that reports.
        self._sequence = 0
        self._rounds_seen: dict[int, int] = {}  # coordinator -> its latest probe
        self._expect_my_report: set[int] = set()  # told "not ready": they get a report once we are
        self._status: DepartureStatus | None = None  # the coordinator's latest word
        self._question_open = False
        self._deadline: float | None = None
        self._next_tick: float | None = None

        # As coordinator.
        self._reports: dict[int, DepartureReport] = {}
        self._asked: set[int] = set()  # those probed because their reports go elsewhere
        self._round = 0
        self._first_look: dict[int, int] | None = None  # rank -> activity when the round began
        self._unacknowledged: set[int] = set()

    @property
    def state(self) -> DepartureState:
        """How far this node has come."""
        return self._state

    @property
    def coordinator(self) -> int:
        """The rank this node reports to; its own if it coordinates."""
        return min(self._peers | {self._my_rank})

    # --- the machine's shape ---------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do about it."""
        self._now = now
        if not isinstance(event, Received):
            action = ACTIONS[self._state].get(type(event))
        elif event.rank in self._peers:
            action = ACTIONS[self._state].get(type(event.message))
        else:
            action = None
        if action is not None:
            action(self, event)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` wants to be called; None: not by itself."""
        deadlines = [time for time in (self._deadline, self._next_tick) if time is not None]
        return min(deadlines, default=None)

    def handle_deadline(self, now: float) -> list[Effect]:
        """Do the work that has become due."""
        self._now = now
        if self._deadline is not None and now >= self._deadline:
            if self._state is DepartureState.RELEASING:
                self._finish()
            else:
                self._effects.append(TimedOut(*self._who_is_late_as_known()))
                self._stop(DepartureState.TIMED_OUT)
        elif self._next_tick is not None and now >= self._next_tick:
            self._on_tick()
        effects, self._effects = self._effects, []
        return effects

    # --- events ----------------------------------------------------------------------------------------

    def _on_local(self, event: LocalIdle | LocalBusy) -> None:
        """This node became idle or busy."""
        if isinstance(event, LocalIdle):
            self._calls_in_flight, self._activity = 0, event.activity
        else:
            self._calls_in_flight = max(1, event.calls_in_flight)
        self._settle()

    def _on_entered(self, event: LocalEntered) -> None:
        """Shut down: report to the coordinator."""
        self._state = DepartureState.WAITING
        self._deadline = self._now + event.timeout_s if event.timeout_s > 0 else None
        # The first question early enough that a short timeout can name the late ones, too.
        self._next_tick = self._now + min(STATUS_INTERVAL_S, event.timeout_s / 2 or STATUS_INTERVAL_S)
        self._report_to(self.coordinator)
        self._settle()

    def _on_peer_gone(self, event: PeerGone) -> None:
        """Report to the coordinator, which may be a new one."""
        rank = event.rank
        if rank not in self._peers:
            return
        self._peers.discard(rank)
        self._gone[rank] = self._now
        self._reports.pop(rank, None)
        self._expect_my_report.discard(rank)
        self._unacknowledged.discard(rank)
        self._first_look = None  # it looked at a member that is gone
        if self._state is DepartureState.WAITING:
            self._report_to(self.coordinator)
        self._settle()

    def _on_peer_came(self, event: PeerCame) -> None:
        """Wait for it as for all others. Nothing that was said by, or of, the one before it counts."""
        rank = event.rank
        self._names[rank] = event.name
        self._peers.add(rank)
        self._came[rank] = self._now
        for known in (self._gone, self._reports, self._rounds_seen):
            known.pop(rank, None)
        self._asked.discard(rank)
        self._first_look = None
        if self._state is DepartureState.WAITING:
            self._report_to(self.coordinator)

    def _on_probe(self, event: Received) -> None:
        """Report to the one that asks."""
        number: int = event.message.round  # type: ignore[union-attr]
        self._rounds_seen[event.rank] = max(number, self._rounds_seen.get(event.rank, 0))
        self._report_to(event.rank)

    def _on_report(self, event: Received) -> None:
        """Note it, answer its question, and take the next step if one is due."""
        rank, report = event.rank, event.message
        assert isinstance(report, DepartureReport)
        known = self._reports.get(rank)
        if known is None or report.sequence > known.sequence:
            self._reports[rank] = report
        if self.coordinator != self._my_rank:
            # The sender has lost the one we report to. The others' reports go there and not here: ask them.
            silent = self._peers - self._reports.keys() - self._asked
            self._asked |= silent
            self._effects += [Send(other, DepartureProbe(self._round)) for other in sorted(silent)]
        if report.asks_who_is_late:
            self._effects.append(Send(rank, self._named_status()))
        self._settle()

    def _on_status(self, event: Received) -> None:
        """Tell the user what the coordinator says."""
        if self._question_open and event.rank == self.coordinator:
            assert isinstance(event.message, DepartureStatus)
            self._status, self._question_open = event.message, False
            self._effects.append(LogWaiting(*self._who_is_late_as_known()))

    def _on_released(self, event: Received) -> None:
        """Acknowledge it, and go."""
        self._acknowledge(event)
        self._finish()

    def _acknowledge(self, event: Received) -> None:
        """Acknowledge it."""
        self._effects.append(Send(event.rank, DepartureAcknowledged()))

    def _release_sender(self, event: Received) -> None:
        """Release the sender: perhaps the coordinator that released us died before it told that one."""
        self._effects.append(Send(event.rank, DepartureReleased()))

    def _on_acknowledged(self, event: Received) -> None:
        """Go, if that was the last one."""
        self._unacknowledged.discard(event.rank)
        self._settle()

    def _on_tick(self) -> None:
        self._next_tick = self._now + STATUS_INTERVAL_S
        self._settle()  # a grace may have passed
        if self._state is not DepartureState.WAITING:
            return
        if self.coordinator == self._my_rank:
            self._effects.append(LogWaiting(*self._who_is_late_as_known()))
            return
        if self._question_open:  # since the last question: the coordinator itself is stuck
            self._status = None
            self._effects.append(LogWaiting(*self._who_is_late_as_known()))
        self._question_open = True
        self._report_to(self.coordinator)

    # --- reporting -------------------------------------------------------------------------------------

    def _report_to(self, rank: int) -> None:
        if rank == self._my_rank:
            return
        if self._ready():
            self._expect_my_report.discard(rank)
        else:
            self._expect_my_report.add(rank)
        self._sequence += 1
        report = DepartureReport(
            sequence=self._sequence,
            round=self._rounds_seen.get(rank, 0),
            entered=self._state is not DepartureState.WORKING,
            calls_in_flight=self._calls_in_flight,
            activity=self._activity,
            gone=sorted(self._gone),
            asks_who_is_late=self._question_open,
        )
        self._effects.append(Send(rank, report))

    def _ready(self) -> bool:
        return self._state is DepartureState.WAITING and self._calls_in_flight == 0

    # --- coordinating ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After any change: report if that is owed, and as coordinator take the next step if one is due."""
        if self._state is DepartureState.RELEASING and not self._unacknowledged:
            self._finish()
        if not self._ready():
            self._first_look = None
            return
        for rank in sorted(self._expect_my_report):
            self._report_to(rank)
        if self.coordinator != self._my_rank and not self._reports:
            return  # nobody looks to us
        if any(self._why_not_ready(rank) for rank in self._peers):
            self._first_look = None
            return
        if self._first_look is None:
            self._begin_round()
        if all(self._reports[rank].round == self._round for rank in self._peers):
            if self._look() == self._first_look:
                self._release()
            else:
                self._begin_round()

    def _look(self) -> dict[int, int]:
        return {rank: self._reports[rank].activity for rank in self._peers} | {self._my_rank: self._activity}

    def _begin_round(self) -> None:
        self._first_look = self._look()
        self._round += 1
        self._effects += [Send(rank, DepartureProbe(self._round)) for rank in sorted(self._peers)]

    def _release(self) -> None:
        self._stop(DepartureState.RELEASING)
        self._deadline = self._now + ACKNOWLEDGE_GRACE_S
        self._unacknowledged = set(self._peers)
        self._effects += [Send(rank, DepartureReleased()) for rank in sorted(self._peers)]
        if not self._unacknowledged:
            self._finish()

    def _finish(self) -> None:
        self._stop(DepartureState.FINISHED)
        self._effects.append(Finished())

    def _stop(self, state: DepartureState) -> None:
        self._state = state
        self._deadline = self._next_tick = None

    # --- late members ----------------------------------------------------------------------------------

    def _why_not_ready(self, rank: int) -> str | None:
        """As far as this node knows; None if the peer is ready."""
        report = self._reports.get(rank)
        if report is None or not report.entered:
            return NOT_CALLED
        if report.calls_in_flight:
            return _still_busy(report.calls_in_flight)
        # Who came after a death has never had a link to the dead one.
        came = self._came.get(rank)
        deaths = [gone for gone, at in self._gone.items() if came is None or at > came]
        unnoticed = [gone for gone in deaths if gone not in report.gone]
        if any(self._now < self._gone[gone] + LOST_LINK_GRACE_S for gone in unnoticed):
            return f"has not noticed yet that {self._names[min(unnoticed)]} is gone"
        return None

    def _why_late(self, rank: int) -> str | None:
        if rank == self._my_rank:
            if self._state is DepartureState.WORKING:
                return NOT_CALLED
            return _still_busy(self._calls_in_flight) if self._calls_in_flight else None
        if why := self._why_not_ready(rank):
            return why
        if self._first_look is not None and self._reports[rank].round != self._round:
            return "does not answer"
        return None

    def _named_status(self) -> DepartureStatus:
        """What the coordinator knows, in a form that can be sent."""
        ranks = sorted(self._peers | {self._my_rank})
        late = [(rank, why) for rank in ranks if (why := self._why_late(rank))]
        return DepartureStatus(late[:MAX_LATE_NAMED], max(0, len(late) - MAX_LATE_NAMED))

    def _who_is_late_as_known(self) -> tuple[tuple[Late, ...], int]:
        """What this node can tell its user: its own knowledge, or else the coordinator's last word."""
        coordinator = self.coordinator
        if coordinator == self._my_rank:
            status = self._named_status()
        elif self._status is not None:
            status = self._status
        else:
            status = DepartureStatus([(coordinator, "does not answer")], 0)
        late = tuple(Late(self._names.get(rank, f"rank {rank}"), why) for rank, why in status.late)
        return late, status.unnamed_count


def _still_busy(calls_in_flight: int) -> str:
    if calls_in_flight == 1:
        return "still has 1 call in flight"
    return f"still has {calls_in_flight} calls in flight"


_ANYWHERE: Final[dict[type, Callable[[Departure, Any], None]]] = {
    LocalIdle: Departure._on_local,
    LocalBusy: Departure._on_local,
    PeerGone: Departure._on_peer_gone,
}
_BEFORE_ALL_AGREE: Final[dict[type, Callable[[Departure, Any], None]]] = _ANYWHERE | {
    PeerCame: Departure._on_peer_came,
}
ACTIONS: Final[dict[DepartureState, dict[type, Callable[[Departure, Any], None]]]] = {
    DepartureState.WORKING: _BEFORE_ALL_AGREE
    | {
        LocalEntered: Departure._on_entered,  # -> waiting
        DepartureProbe: Departure._on_probe,
        DepartureReport: Departure._on_report,
    },
    # Also: -> releasing when two looks at ready members agree (_settle), -> timed out at the deadline.
    DepartureState.WAITING: _BEFORE_ALL_AGREE
    | {
        DepartureProbe: Departure._on_probe,
        DepartureReport: Departure._on_report,
        DepartureStatus: Departure._on_status,
        DepartureReleased: Departure._on_released,  # -> finished
    },
    # -> finished when everybody has acknowledged or is gone (_settle), or a grace is over.
    DepartureState.RELEASING: _ANYWHERE
    | {
        DepartureProbe: Departure._release_sender,
        DepartureReport: Departure._release_sender,
        DepartureReleased: Departure._acknowledge,
        DepartureAcknowledged: Departure._on_acknowledged,
    },
    DepartureState.FINISHED: {
        DepartureProbe: Departure._release_sender,
        DepartureReport: Departure._release_sender,
        DepartureReleased: Departure._acknowledge,
    },
    DepartureState.TIMED_OUT: {},
}
"""What each state makes of each event, and of each message in a `Received`; what is not here is ignored."""
