"""One member's part in the agreement to shut down: events in, effects out.

The package's docstring has the rules; `ACTIONS`, at the end, is the table of states. No clock, socket or thread in
here; not thread-safe. Longer than other files: looks and reports of late members use the same few tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, Final

from farcall.protocol.departure.events import (
    Effect,
    Event,
    Finished,
    Late,
    LocalBusy,
    LocalEntered,
    LocalIdle,
    LogWaiting,
    PeerCame,
    PeerGone,
    Received,
    Send,
    TimedOut,
)
from farcall.protocol.messages import (
    DepartureAcknowledged,
    DepartureProbe,
    DepartureReleased,
    DepartureReport,
    DepartureStatus,
)

STATUS_INTERVAL_S: Final = 5.0
NOT_CALLED: Final = "has not called shutdown"
NO_ANSWER: Final = "does not answer"
SILENT: Final = "does not answer, nor does its host"
ACKNOWLEDGE_GRACE_S: Final = 5.0  # all work is done by now: a hung member must not hold up its parent
LOST_LINK_GRACE_S: Final = 30.0  # far longer than a kernel takes to close the connections of a dead process
MAX_LATE_NAMED: Final = 32  # keeps messages small in a large cluster
FALLBACK_FANOUT: Final = 8


class DepartureState(Enum):
    """How far this node's shutdown has come."""

    WORKING = "working"
    WAITING = "waiting"
    RELEASING = "releasing"
    FINISHED = "finished"
    TIMED_OUT = "timed out"


class Departure:
    """One node's part in the agreement.

    ``members`` maps every rank, its own included, to a name. ``neighbours`` returns the ranks with a standing link to
    this node; None: all of them.
    """

    def __init__(
        self,
        my_rank: int,
        members: Mapping[int, str],
        neighbours: Callable[[], Collection[int]] | None = None,
        return_s: float = 0.0,
    ) -> None:
        """``return_s``: how long to wait for a way back to those whose hosts fell silent, if they are half or more."""
        # Mutable: all but the rank, ``_neighbours`` and ``_return_s``; only events and deadlines change it.
        self._my_rank = my_rank
        self._names = dict(members)
        self._peers = set(members) - {my_rank}  # the ranks not known to be gone
        self._neighbours = neighbours or (lambda: self._peers)
        self._gone: set[int] = set()
        self._return_s = return_s
        self._silent: set[int] = set()  # of the gone, those whose hosts fell silent
        self._return_by: float | None = None  # this node seems cut off: how long it waits for a way back
        self._last_loss_at = 0.0
        self._now = 0.0
        self._state = DepartureState.WORKING
        # Busy until the driver says otherwise: if it forgets, the shutdown is late, but no work is lost.
        self._calls_in_flight = 1
        self._oldest, self._oldest_since = "", 0.0
        self._own_activity = 0
        self._effects: list[Effect] = []
        self._deadline: float | None = None
        self._next_tick: float | None = None

        # Towards the ranks that rely on this node's reports: its parent, former parents, and ranks that probed it.
        self._sequence = 0
        self._told: dict[int, tuple[frozenset[int], bool]] = {}  # rank -> the members in our last report; all ready?
        self._asked: dict[int, int] = {}  # rank -> its unanswered probe
        self._answered: dict[int, int] = {}  # rank -> its last probe that was answered in full
        self._named_gone: dict[int, list[int]] = {}  # rank -> the gone ranks that its last probe named
        self._named_at: dict[int, float] = {}  # gone rank -> when a probe first named it
        self._askers: set[int] = set()  # ranks that asked which members are late; our own rank for our user
        self._status: DepartureStatus | None = None  # the root's latest answer to that

        # Towards its children.
        self._reports: dict[int, DepartureReport] = {}
        self._round = 0
        self._looked_at: set[int] | None = None  # the children probed in this round; None: no look is under way
        self._first_look = 0  # as root: the activity before the look
        self._activity = 0  # grows whenever ``_seen`` changes
        self._seen: object = None  # this node's own activity, and its children's
        self._entered: frozenset[int] = frozenset()  # the members that called shutdown, from here down
        self._sought: set[int] = set()  # as root: ranks probed because their reports may go elsewhere
        self._unacknowledged: set[int] = set()

    @property
    def state(self) -> DepartureState:
        """How far this node's shutdown has come."""
        return self._state

    @property
    def parent(self) -> int | None:
        """The rank that this node reports to; None: this node is the root."""
        lowest = min((rank for rank in self._neighbours() if rank in self._peers), default=self._my_rank)
        if lowest < self._my_rank:
            return lowest
        ancestor = self._my_rank
        while ancestor:
            ancestor = (ancestor - 1) // FALLBACK_FANOUT
            if ancestor in self._peers:
                return ancestor
        lowest = min(self._peers, default=self._my_rank)
        return lowest if lowest < self._my_rank else None

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
        """When to call ``handle_deadline``; None: no deadline is set."""
        deadlines = [time for time in (self._deadline, self._return_by, self._next_tick) if time is not None]
        return min(deadlines, default=None)

    def handle_deadline(self, now: float) -> list[Effect]:
        """Do the work that has become due."""
        self._now = now
        if self._deadline is not None and now >= self._deadline:
            if self._state is DepartureState.RELEASING:
                self._finish()
            else:
                self._give_up()
        elif self._return_by is not None and now >= self._return_by:
            if self._is_cut_off():
                self._give_up()
            else:  # the others are back: go on without the rest
                self._return_by = None
                self._silent.clear()
                self._settle()
        elif self._next_tick is not None and now >= self._next_tick:
            self._on_tick()
        effects, self._effects = self._effects, []
        return effects

    # --- events ----------------------------------------------------------------------------------------

    def _on_local(self, event: LocalIdle | LocalBusy) -> None:
        """This node became idle or busy."""
        if isinstance(event, LocalIdle):
            self._calls_in_flight, self._own_activity = 0, event.activity
        else:
            self._calls_in_flight = max(1, event.calls_in_flight)
            self._oldest, self._oldest_since = event.oldest, event.oldest_since
        self._settle()

    def _on_entered(self, event: LocalEntered) -> None:
        """Shut down: report to the parent."""
        self._state = DepartureState.WAITING
        self._deadline = self._now + event.timeout_s if event.timeout_s > 0 else None
        # Ask early enough that an error after a short timeout can name the late members, too.
        self._next_tick = self._now + min(STATUS_INTERVAL_S, event.timeout_s / 2 or STATUS_INTERVAL_S)
        self._look_for_a_way_back()
        self._count_entered()
        self._settle()

    def _on_peer_gone(self, event: PeerGone) -> None:
        """Stop waiting for it. Its children, perhaps this node among them, report elsewhere."""
        if event.rank in self._peers:
            self._peers.discard(event.rank)
            self._gone.add(event.rank)
            if event.is_silent:
                self._silent.add(event.rank)
                self._look_for_a_way_back()
            self._last_loss_at = self._now
            self._forget(event.rank)
            self._settle()

    def _on_peer_came(self, event: PeerCame) -> None:
        """Wait for it as for all others. No message from, to or about its predecessor counts any more."""
        self._names[event.rank] = event.name
        self._peers.add(event.rank)
        self._gone.discard(event.rank)
        self._silent.discard(event.rank)
        if not self._silent:
            self._return_by = None
        self._forget(event.rank)
        self._settle()

    def _is_cut_off(self) -> bool:
        """Did the hosts of half the members or more fall silent? Then the others may go on without this node."""
        return len(self._silent) > len(self._peers)

    def _look_for_a_way_back(self) -> None:
        """If this node seems cut off, wait a while: it may be a member again, and serve those that go on."""
        if self._state is DepartureState.WAITING and self._return_by is None and self._is_cut_off():
            self._return_by = self._now + self._return_s

    def _forget(self, rank: int) -> None:
        if self._reports.pop(rank, None) is not None:
            self._count_entered()
            self._seen = None  # a successor's report may be equal, and must still count as a change
        for known in (self._told, self._asked, self._answered, self._named_gone, self._named_at):
            known.pop(rank, None)
        self._askers.discard(rank)
        self._sought.discard(rank)
        self._unacknowledged.discard(rank)
        self._looked_at = None  # the current look includes a member that is gone, or misses one that came

    def _on_probe(self, event: Received) -> None:
        """Look at the children, and answer."""
        probe, rank = event.message, event.rank
        assert isinstance(probe, DepartureProbe)
        if probe.round > max(self._asked.get(rank, 0), self._answered.get(rank, 0)):
            self._asked[rank] = probe.round
            self._named_gone[rank] = probe.gone
            for gone in probe.gone:
                self._named_at.setdefault(gone, self._now)
            self._looked_at = None  # a look that began before this probe does not answer it
        self._settle()

    def _on_report(self, event: Received) -> None:
        """Record the report, answer its question, and take the next step if one is due."""
        rank, report = event.rank, event.message
        assert isinstance(report, DepartureReport)
        known = self._reports.get(rank)
        if known is None or report.sequence > known.sequence:
            self._reports[rank] = report
            if known is None or known.members != report.members:
                self._count_entered()
        if report.asks_who_is_late:
            self._ask_for(rank)
        self._settle()

    def _on_status(self, event: Received) -> None:
        """Pass the root's answer on to the ranks that asked."""
        if self._askers and event.rank == self.parent:
            assert isinstance(event.message, DepartureStatus)
            self._status = event.message
            self._answer_askers()

    def _on_released(self, event: Received) -> None:
        """Acknowledge the release, release the children, and leave."""
        self._acknowledge(event)
        self._release()

    def _acknowledge(self, event: Received) -> None:
        """Acknowledge a release."""
        self._effects.append(Send(event.rank, DepartureAcknowledged()))

    def _release_sender(self, event: Received) -> None:
        """Release the sender: its own parent may have died before it passed the release on."""
        self._effects.append(Send(event.rank, DepartureReleased()))

    def _on_acknowledged(self, event: Received) -> None:
        """Leave, if that was the last acknowledgement."""
        self._unacknowledged.discard(event.rank)
        self._settle()

    def _on_tick(self) -> None:
        self._next_tick = self._now + STATUS_INTERVAL_S if self._state is DepartureState.WAITING else None
        self._settle()  # a grace may have passed
        self._seek_lost()
        if self.parent is not None and (self._my_rank in self._askers or self._state is DepartureState.WORKING):
            self._status = None  # no answer since the last question: the parent itself is stuck
            self._answer_askers()
        if self._state is DepartureState.WAITING:
            self._ask_for(self._my_rank)

    def _seek_lost(self) -> None:
        """As root: probe missing members. They may report to a member that has lost its link to this node.

        Wait until everybody must have noticed the last death: that alone moves reports, and a probe may cost a dial.
        """
        missing = self._peers - self._entered - self._sought
        is_time = self._gone and self._now >= self._last_loss_at + LOST_LINK_GRACE_S
        if missing and is_time and self.parent is None:
            self._sought |= missing
            self._round += 1
            self._looked_at = None
            self._effects += [Send(rank, DepartureProbe(self._round, [])) for rank in sorted(missing)]

    # --- after any change ------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Send the reports that are due, begin a look if one is due, and as root release once two looks agree."""
        if self._state is DepartureState.RELEASING:
            if not self._unacknowledged:
                self._finish()
            return
        if not (self._entered or self._asked):
            return  # nobody shuts down yet: keep events cheap while members come and go
        parent, ready = self.parent, self._is_ready()
        is_root = parent is None and ready and self._entered.issuperset(self._peers)
        if not ready or not (is_root or self._asked):
            self._looked_at = None
        elif self._looked_at != self._reports.keys():
            self._begin_look()
        complete = self._looked_at is not None and self._all_answered()
        addressees = self._told.keys() | self._asked.keys()
        if parent is not None:
            addressees.add(parent)
        for rank in sorted(addressees):
            self._tell(rank, ready, complete)
        if complete and is_root:
            if self._see() == self._first_look:
                self._release()
            else:
                self._begin_look()

    def _is_ready(self) -> bool:
        is_idle = self._state is DepartureState.WAITING and self._calls_in_flight == 0 and self._return_by is None
        return is_idle and not self._unnoticed() and all(report.ready for report in self._reports.values())

    def _unnoticed(self) -> list[int]:
        """The ranks that a probe named as gone, and that this node still holds for alive."""
        named = self._gone_by_word() & self._peers
        return sorted(rank for rank in named if self._now < self._named_at.get(rank, -math.inf) + LOST_LINK_GRACE_S)

    def _gone_by_word(self) -> set[int]:
        return set().union(*self._named_gone.values())

    def _begin_look(self) -> None:
        self._first_look = self._see()
        self._round += 1
        self._looked_at = set(self._reports)
        named = self._gone if self.parent is None else self._gone_by_word()
        gone = sorted(named - self._entered)
        self._effects += [Send(rank, DepartureProbe(self._round, gone)) for rank in sorted(self._looked_at)]

    def _all_answered(self) -> bool:
        return all(report.round == self._round for report in self._reports.values())

    def _see(self) -> int:
        """The activity of this node and its subtree: a number that changes whenever anything happened there."""
        seen = self._own_activity, {rank: (report.activity, report.members) for rank, report in self._reports.items()}
        if seen != self._seen:
            self._seen = seen
            self._activity += 1
        return self._activity

    def _tell(self, rank: int, ready: bool, complete: bool) -> None:
        """Report to ``rank`` if it asked, or if our last report to it is out of date."""
        entered, was_ready = self._told.get(rank, (frozenset(), False))
        is_asked = rank in self._asked
        if is_asked and complete:
            self._answered[rank] = self._asked.pop(rank)
            self._report_to(rank)
        elif entered != self._entered or (was_ready and not ready if is_asked else ready and not was_ready):
            self._report_to(rank)

    def _report_to(self, rank: int) -> None:
        ready = self._is_ready()
        self._told[rank] = self._entered, ready
        late, unnamed_count = self._late_below()
        self._sequence += 1
        report = DepartureReport(
            sequence=self._sequence,
            round=self._answered.get(rank, 0),
            members=sorted(self._entered),
            ready=ready,
            activity=self._see(),
            late=late,
            unnamed_count=unnamed_count,
            asks_who_is_late=bool(self._askers) and rank == self.parent,
        )
        self._effects.append(Send(rank, report))

    def _count_entered(self) -> None:
        own = () if self._state is DepartureState.WORKING else (self._my_rank,)
        self._entered = frozenset(own).union(*(report.members for report in self._reports.values()))

    def _release(self) -> None:
        self._stop(DepartureState.RELEASING)
        self._deadline = self._now + ACKNOWLEDGE_GRACE_S
        self._unacknowledged = set(self._reports)
        self._effects += [Send(rank, DepartureReleased()) for rank in sorted(self._reports)]
        self._settle()

    def _finish(self) -> None:
        self._stop(DepartureState.FINISHED)
        self._effects.append(Finished())

    def _give_up(self) -> None:
        self._effects.append(TimedOut(*self._who_is_late_as_known()))
        self._stop(DepartureState.TIMED_OUT)

    def _stop(self, state: DepartureState) -> None:
        self._state = state
        self._deadline = self._return_by = self._next_tick = None

    # --- late members ----------------------------------------------------------------------------------

    def _ask_for(self, asker: int) -> None:
        """Find out which members are late, for ``asker``: a child, or this node itself."""
        parent, is_first = self.parent, not self._askers
        self._askers.add(asker)
        if parent is None:
            self._answer_askers()
        elif is_first or asker == self._my_rank:
            if self._next_tick is None:
                self._next_tick = self._now + STATUS_INTERVAL_S
            self._report_to(parent)

    def _answer_askers(self) -> None:
        late, unnamed_count = self._who_is_late_as_known()
        askers, self._askers = self._askers, set()
        for rank in sorted(askers):
            if rank == self._my_rank:
                self._effects.append(LogWaiting(late, unnamed_count))
            else:
                self._effects.append(Send(rank, self._known_status()))

    def _late_below(self) -> tuple[list[tuple[int, str]], int]:
        """The late members among those that called shutdown, from here down; and how many more there are."""
        late: list[tuple[int, str]] = []
        more = 0
        if self._state is DepartureState.WAITING and self._calls_in_flight:
            age_s = self._now - self._oldest_since
            late.append((self._my_rank, still_busy(self._calls_in_flight, self._oldest, age_s)))
        elif self._state is DepartureState.WAITING and (unnoticed := self._unnoticed()):
            name = self._names.get(min(unnoticed), f"rank {min(unnoticed)}")
            late.append((self._my_rank, f"has not noticed yet that {name} is gone"))
        if self._return_by is not None:
            late += [(rank, SILENT) for rank in self._silent]
        for rank, report in self._reports.items():
            late += report.late
            more += report.unnamed_count
            if self._looked_at is not None and report.round != self._round and not report.late:
                late.append((rank, NO_ANSWER))
        late = sorted(set(late))  # several may wait for one that is silent
        return late[:MAX_LATE_NAMED], more + max(0, len(late) - MAX_LATE_NAMED)

    def _known_status(self) -> DepartureStatus:
        """The best answer now: the root's own knowledge, else its latest answer, else that the parent is silent."""
        parent = self.parent
        if parent is not None:
            return self._status or DepartureStatus([(parent, NO_ANSWER)], 0)
        late, more = self._late_below()
        late += [(rank, NOT_CALLED) for rank in (self._peers | {self._my_rank}) - self._entered]
        late.sort()
        return DepartureStatus(late[:MAX_LATE_NAMED], more + max(0, len(late) - MAX_LATE_NAMED))

    def _who_is_late_as_known(self) -> tuple[tuple[Late, ...], int]:
        status = self._known_status()
        late = tuple(Late(self._names.get(rank, f"rank {rank}"), why) for rank, why in status.late)
        return late, status.unnamed_count


def still_busy(calls_in_flight: int, oldest: str = "", age_s: float = 0.0) -> str:
    """Why a member cannot leave, in words."""
    count = "1 call or callback" if calls_in_flight == 1 else f"{calls_in_flight} calls or callbacks"
    named = f" ({'' if calls_in_flight == 1 else 'the oldest: '}{oldest}, for {age_s:.0f} s)" if oldest else ""
    return f"still has {count} under way{named}"


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
        DepartureStatus: Departure._on_status,
    },
    # Also: -> releasing when two looks at ready members agree (_settle), -> timed out at the deadline, or without a way
    # back from those that are silent.
    DepartureState.WAITING: _BEFORE_ALL_AGREE
    | {
        DepartureProbe: Departure._on_probe,
        DepartureReport: Departure._on_report,
        DepartureStatus: Departure._on_status,
        DepartureReleased: Departure._on_released,  # -> releasing
    },
    # -> finished when every child has acknowledged or is gone (_settle), or the grace is over.
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
"""What each state makes of each event, and of each message in a `Received`; all others are ignored."""
