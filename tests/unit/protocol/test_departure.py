"""Leaving together, one rule at a time: machines joined by a list of messages, and a clock to turn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pytest

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
from farcall.protocol.departure.machine import (
    ACKNOWLEDGE_GRACE_S,
    LOST_LINK_GRACE_S,
    MAX_LATE_NAMED,
    SILENT,
    STATUS_INTERVAL_S,
    Departure,
    DepartureState,
    still_busy,
)
from farcall.protocol.messages import (
    DepartureAcknowledged,
    DepartureProbe,
    DepartureReleased,
    DepartureReport,
)

RETURN_S = 60.0


class Cluster:
    """Some machines, the messages between them, and what else they asked for."""

    def __init__(self, count: int, neighbours: Mapping[int, Collection[int]] | None = None) -> None:
        """``neighbours``: by rank; None: all are each other's."""
        self.now = 100.0
        members = {rank: f"worker{rank}" for rank in range(count)}
        self.nodes = {rank: Departure(rank, members, return_s=RETURN_S) for rank in members}
        for rank, near in (neighbours or {}).items():
            self.nodes[rank] = Departure(rank, members, lambda near=near: near)  # type: ignore[misc]
        self.wire: list[tuple[int, Send]] = []
        self.asked: dict[int, list[Effect]] = {rank: [] for rank in members}
        self.cut: set[frozenset[int]] = set()

    def feed(self, rank: int, event: Event) -> None:
        self.carry_out(rank, self.nodes[rank].handle(event, self.now))

    def carry_out(self, rank: int, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.wire.append((rank, effect))
            else:
                self.asked[rank].append(effect)

    def deliver(self) -> None:
        """Until nobody has anything left to say."""
        while self.wire:
            sender, send = self.wire.pop(0)
            if send.rank in self.nodes and frozenset((sender, send.rank)) not in self.cut:
                self.feed(send.rank, Received(sender, send.message))

    def enter(self, *ranks: int, timeout_s: float = 0, activity: int = 0) -> None:
        for rank in ranks:
            self.feed(rank, LocalIdle(activity))
            self.feed(rank, LocalEntered(timeout_s))
        self.deliver()

    def kill(self, rank: int) -> None:
        """As all others see it, at once."""
        del self.nodes[rank]
        for other in self.nodes:
            self.feed(other, PeerGone(rank))

    def split(self, *parts: Collection[int]) -> None:
        """Each part finds the hosts of all others silent."""
        for part in parts:
            for other in self.nodes.keys() - part:
                for rank in part:
                    self.cut.add(frozenset((rank, other)))
                    self.feed(rank, PeerGone(other, is_silent=True))
        self.deliver()

    def come_back(self, rank: int, *others: int) -> None:
        """As a new process, to ``others``."""
        self.cut = {pair for pair in self.cut if rank not in pair}
        self.nodes[rank] = Departure(rank, {rank: f"worker{rank}"}, return_s=RETURN_S)
        for other in others:
            self.feed(rank, PeerCame(other, f"worker{other}"))
            self.feed(other, PeerCame(rank, f"worker{rank}"))
        self.deliver()

    def advance(self, seconds: float) -> None:
        """Turn the clock, stopping at each deadline on the way."""
        end = self.now + seconds
        while True:
            due = {rank: at for rank, node in self.nodes.items() if (at := node.next_deadline()) is not None}
            first = min(due, key=due.__getitem__, default=None)
            if first is None or due[first] > end:
                break
            self.now = due[first]
            self.carry_out(first, self.nodes[first].handle_deadline(self.now))
            self.deliver()
        self.now = end

    def finished(self) -> set[int]:
        return {rank for rank, effects in self.asked.items() if Finished() in effects}


def test_all_leave_once_all_have_entered() -> None:
    cluster = Cluster(4)
    cluster.enter(0, 1, 3)
    assert cluster.finished() == set()
    cluster.enter(2)
    assert cluster.finished() == {0, 1, 2, 3}
    assert {node.state for node in cluster.nodes.values()} == {DepartureState.FINISHED}
    assert all(node.next_deadline() is None for node in cluster.nodes.values())
    assert all(effects == [Finished()] for effects in cluster.asked.values())


def test_one_alone_leaves_at_once() -> None:
    cluster = Cluster(1)
    cluster.enter(0)
    assert cluster.finished() == {0}


def test_nobody_is_idle_before_it_was_said() -> None:
    cluster = Cluster(1)
    cluster.feed(0, LocalEntered(0))
    assert cluster.finished() == set()
    cluster.feed(0, LocalIdle(0))
    assert cluster.finished() == {0}


@pytest.mark.parametrize("busy", [0, 2])
def test_a_busy_member_is_waited_for(busy: int) -> None:
    cluster = Cluster(3)
    cluster.feed(busy, LocalBusy(2))
    cluster.feed(busy, LocalEntered(0))
    cluster.enter(*({0, 1, 2} - {busy}))
    assert cluster.finished() == set()
    cluster.feed(busy, LocalIdle(2))
    cluster.deliver()
    assert cluster.finished() == {0, 1, 2}


def test_work_between_the_two_looks_needs_a_third() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.feed(1, LocalIdle(5))
    cluster.feed(1, LocalEntered(0))
    sender, report = cluster.wire.pop()
    cluster.feed(0, Received(sender, report.message))
    assert [send.message for _, send in cluster.wire] == [DepartureProbe(1, [])]
    cluster.feed(1, LocalBusy(1))
    cluster.feed(1, LocalIdle(6))  # idle at both looks, but not in between
    cluster.feed(1, Received(0, cluster.wire.pop()[1].message))
    cluster.feed(0, Received(1, cluster.wire.pop()[1].message))
    assert cluster.nodes[0].state is DepartureState.WAITING
    assert [send.message for _, send in cluster.wire] == [DepartureProbe(2, [])]
    cluster.deliver()
    assert cluster.finished() == {0, 1}


def test_who_was_busy_when_probed_reports_once_idle() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.feed(1, LocalIdle(5))
    cluster.feed(1, LocalEntered(0))
    cluster.feed(1, LocalBusy(1))
    cluster.deliver()
    assert cluster.finished() == set()
    cluster.feed(1, LocalIdle(6))
    assert len(cluster.wire) == 1
    cluster.deliver()
    assert cluster.finished() == {0, 1}


def test_becoming_idle_again_costs_no_message_while_nobody_asked() -> None:
    cluster = Cluster(3)
    cluster.enter(1)
    for activity in range(10):
        cluster.feed(1, LocalBusy(1))
        cluster.feed(1, LocalIdle(activity))
    assert cluster.wire == []


def test_the_coordinators_own_work_stops_the_round() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.feed(1, LocalIdle(0))
    cluster.feed(1, LocalEntered(0))
    sender, report = cluster.wire.pop()
    cluster.feed(0, Received(sender, report.message))
    cluster.feed(0, LocalBusy(1))
    cluster.deliver()
    assert cluster.finished() == set()
    cluster.feed(0, LocalIdle(1))
    cluster.deliver()
    assert cluster.finished() == {0, 1}


# --- duplicates and disorder ---------------------------------------------------------------------------


def report(sequence: int, round_number: int = 0, calls: int = 0, activity: int = 0, rank: int = 1) -> DepartureReport:
    late = [(rank, still_busy(calls))] if calls else []
    return DepartureReport(sequence, round_number, [rank], not calls, activity, late, 0, False)


def test_an_old_report_does_not_replace_a_newer_one() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.feed(0, Received(1, report(2, calls=3)))
    cluster.feed(0, Received(1, report(1)))
    assert cluster.wire == []
    cluster.feed(0, Received(1, report(3)))
    assert [send.message for _, send in cluster.wire] == [DepartureProbe(1, [])]


def test_an_answer_to_an_old_round_does_not_end_the_new_one() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.feed(0, Received(1, report(1)))
    cluster.feed(0, Received(1, report(2, round_number=1, activity=1)))
    cluster.feed(0, Received(1, report(3, round_number=1, activity=1)))
    assert cluster.nodes[0].state is DepartureState.WAITING
    cluster.feed(0, Received(1, report(4, round_number=2, activity=1)))
    assert cluster.nodes[0].state is DepartureState.RELEASING


def test_who_is_released_stays_so_and_passes_it_on() -> None:
    cluster = Cluster(3)
    cluster.enter(0, 1, 2)
    for message in (DepartureProbe(7, []), report(9)):
        assert cluster.nodes[2].handle(Received(1, message), 0) == [Send(1, DepartureReleased())]
    again = cluster.nodes[2].handle(Received(0, DepartureReleased()), 0)
    assert again == [Send(0, DepartureAcknowledged())]
    assert cluster.nodes[2].handle(LocalEntered(1), 0) == []
    assert cluster.finished() == {0, 1, 2}


def test_a_release_means_nothing_to_one_that_never_entered() -> None:
    cluster = Cluster(2)
    cluster.feed(1, Received(0, DepartureReleased()))
    assert cluster.nodes[1].state is DepartureState.WORKING
    assert cluster.wire == []


# --- the dead ------------------------------------------------------------------------------------------


def test_a_dead_member_is_not_waited_for() -> None:
    cluster = Cluster(3)
    cluster.enter(0, 1)
    cluster.kill(2)
    cluster.deliver()
    assert cluster.finished() == {0, 1}


def test_a_death_before_shutdown_counts_too() -> None:
    cluster = Cluster(3)
    cluster.kill(0)
    cluster.enter(1, 2)
    assert cluster.finished() == {1, 2}


def test_nobody_is_released_before_all_know_of_a_death() -> None:
    """Requests of the dead may still lie in the link of one that has not noticed."""
    cluster = Cluster(3)
    cluster.enter(0, 1)
    del cluster.nodes[2]
    cluster.feed(0, PeerGone(2))
    cluster.deliver()
    assert cluster.finished() == set()
    cluster.advance(STATUS_INTERVAL_S)
    assert LogWaiting((Late("worker1", "has not noticed yet that worker2 is gone"),), 0) in cluster.asked[0]
    cluster.feed(1, PeerGone(2))
    cluster.deliver()
    assert cluster.finished() == {0, 1}


def test_who_came_after_a_death_need_not_notice_it() -> None:
    root = Departure(0, {rank: f"w{rank}" for rank in range(4)})
    root.handle(PeerGone(2), 1.0)
    root.handle(PeerGone(3), 1.0)
    root.handle(PeerCame(2, "w2"), 2.0)
    root.handle(LocalIdle(0), 3.0)
    root.handle(LocalEntered(0.0), 3.0)
    assert root.handle(Received(1, report(1)), 3.0) == []
    probes = [Send(rank, DepartureProbe(1, [3])) for rank in (1, 2)]
    assert root.handle(Received(2, report(1, rank=2)), 3.0) == probes
    late_comer = Departure(2, {2: "w2"})
    for rank in (0, 1):
        late_comer.handle(PeerCame(rank, f"w{rank}"), 2.0)
    late_comer.handle(LocalIdle(0), 3.0)
    late_comer.handle(LocalEntered(0.0), 3.0)
    (answer,) = late_comer.handle(Received(0, DepartureProbe(1, [3])), 3.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, DepartureReport)
    assert answer.message.ready
    (answer,) = late_comer.handle(Received(0, DepartureProbe(2, [1, 3])), 3.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, DepartureReport)
    assert answer.message.late == [(2, "has not noticed yet that w1 is gone")]


@pytest.mark.parametrize("is_before", [True, False])
def test_who_seems_cut_off_waits_for_a_way_back_and_then_says_whom_it_missed(is_before: bool) -> None:
    cluster = Cluster(2)
    if not is_before:
        cluster.enter(1)
    cluster.split({0}, {1})
    if is_before:
        cluster.enter(1)
    cluster.advance(RETURN_S - 0.1)
    silent = (Late("worker0", SILENT),)
    assert LogWaiting(silent, 0) in cluster.asked[1]
    assert cluster.nodes[1].state is DepartureState.WAITING
    cluster.advance(0.1)
    assert TimedOut(silent, 0) in cluster.asked[1]
    assert cluster.nodes[1].state is DepartureState.TIMED_OUT


def test_who_waits_for_a_way_back_leaves_with_one_that_has_come_back() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.split({0}, {1})
    cluster.advance(RETURN_S / 2)
    cluster.come_back(1, 0)
    cluster.advance(RETURN_S)
    assert cluster.nodes[0].state is DepartureState.WAITING
    cluster.enter(1)
    assert cluster.finished() == {0, 1}


def test_most_of_the_members_leave_without_the_rest_which_waits() -> None:
    cluster = Cluster(3)
    cluster.enter(2)
    cluster.split({0, 1}, {2})
    cluster.enter(0, 1)
    assert cluster.finished() == {0, 1}
    cluster.advance(RETURN_S)
    assert TimedOut((Late("worker0", SILENT), Late("worker1", SILENT)), 0) in cluster.asked[2]


def test_those_that_are_cut_off_together_wait_together() -> None:
    cluster = Cluster(4)
    cluster.enter(2, 3)
    cluster.split({0, 1}, {2, 3})
    silent = (Late("worker0", SILENT), Late("worker1", SILENT))
    cluster.advance(STATUS_INTERVAL_S)
    assert LogWaiting(silent, 0) in cluster.asked[2]
    cluster.advance(RETURN_S)
    assert TimedOut(silent, 0) in cluster.asked[2]
    assert cluster.nodes[3].state is DepartureState.TIMED_OUT


def test_who_waited_for_a_way_back_goes_on_with_those_that_came() -> None:
    """The rest may be a moment behind, and gets the same time."""
    cluster = Cluster(4)
    cluster.enter(0, 1)
    cluster.split({0, 1}, {2}, {3})
    cluster.come_back(2, 0, 1)
    cluster.enter(2)
    assert cluster.finished() == set()
    cluster.advance(RETURN_S)
    assert cluster.finished() == {0, 1, 2}


def test_the_last_one_left_leaves() -> None:
    cluster = Cluster(2)
    cluster.enter(0)
    cluster.feed(0, Received(1, report(1)))
    assert cluster.nodes[0].state is DepartureState.WAITING
    cluster.kill(1)  # between the two looks
    assert cluster.finished() == {0}


def test_the_next_smallest_takes_over() -> None:
    cluster = Cluster(4)
    cluster.enter(0, 1, 2)
    cluster.kill(0)
    cluster.deliver()
    assert cluster.nodes[3].parent == 1
    cluster.enter(3)
    assert cluster.finished() == {1, 2, 3}


def test_a_coordinator_that_dies_while_releasing() -> None:
    cluster = Cluster(3)
    cluster.enter(0, 1)
    cluster.feed(2, LocalIdle(0))
    cluster.feed(2, LocalEntered(0))
    while cluster.nodes[0].state is not DepartureState.RELEASING:
        sender, send = cluster.wire.pop(0)
        cluster.feed(send.rank, Received(sender, send.message))
    cluster.wire = [(0, Send(2, DepartureReleased()))]  # worker1 never hears it from worker0
    cluster.kill(0)
    cluster.deliver()
    assert cluster.finished() == {1, 2}


def test_two_that_lost_their_link_do_not_block_the_rest() -> None:
    cluster = Cluster(4)
    cluster.cut.add(frozenset((0, 3)))
    cluster.feed(0, PeerGone(3))
    cluster.feed(3, PeerGone(0))
    cluster.enter(0, 1, 3)
    assert cluster.finished() == set()
    cluster.enter(2)
    assert cluster.finished() == {0, 1, 2, 3}


def test_lost_links_that_leave_no_coordinator_are_waited_for_only_so_long() -> None:
    cluster = Cluster(4)
    for one, other in ((0, 3), (1, 2)):
        cluster.cut.add(frozenset((one, other)))
        cluster.feed(one, PeerGone(other))
        cluster.feed(other, PeerGone(one))
    cluster.enter(0, 1, 2, 3)
    cluster.advance(LOST_LINK_GRACE_S - 0.1)
    assert cluster.finished() == set()
    cluster.advance(STATUS_INTERVAL_S)
    assert cluster.finished() == {0, 1, 2, 3}


def test_a_member_that_hangs_after_its_last_answer_holds_nobody_up_for_long() -> None:
    cluster = Cluster(3)
    cluster.enter(0, 1)
    cluster.feed(2, LocalIdle(0))
    cluster.feed(2, LocalEntered(0))
    while cluster.nodes[0].state is not DepartureState.RELEASING:
        sender, send = cluster.wire.pop(0)
        cluster.feed(send.rank, Received(sender, send.message))
    cluster.cut.add(frozenset((0, 2)))
    cluster.deliver()
    assert cluster.finished() == {1}
    cluster.advance(ACKNOWLEDGE_GRACE_S)
    assert cluster.finished() == {0, 1}


# --- who is late ---------------------------------------------------------------------------------------


def test_the_bound_names_who_is_late_and_why_on_every_node() -> None:
    cluster = Cluster(4)
    cluster.feed(2, LocalBusy(3))
    cluster.feed(2, LocalEntered(0))
    cluster.enter(0, 1, timeout_s=2)
    cluster.advance(1.9)
    assert not any(isinstance(effect, TimedOut) for effect in cluster.asked[0] + cluster.asked[1])
    cluster.advance(0.1)
    late = (Late("worker2", "still has 3 calls or callbacks under way"), Late("worker3", "has not called shutdown"))
    for rank in (0, 1):
        assert cluster.asked[rank][-1] == TimedOut(late, 0)
        assert cluster.nodes[rank].state is DepartureState.TIMED_OUT
        assert cluster.nodes[rank].next_deadline() is None
    assert str(late[1]) == "worker3 has not called shutdown"


def test_who_gave_up_says_nothing_more_and_is_excluded_once_gone() -> None:
    cluster = Cluster(3)
    cluster.enter(1, timeout_s=1)
    cluster.advance(1)
    cluster.enter(0, 2)
    assert cluster.finished() == set()
    cluster.kill(1)
    cluster.deliver()
    assert cluster.finished() == {0, 2}


def test_without_a_bound_the_user_is_told_every_few_seconds() -> None:
    cluster = Cluster(3)
    cluster.enter(0, 1)
    cluster.advance(10 * STATUS_INTERVAL_S)
    for rank in (0, 1):
        assert cluster.asked[rank] == [LogWaiting((Late("worker2", "has not called shutdown"),), 0)] * 10


def test_a_coordinator_that_has_not_entered_is_named() -> None:
    cluster = Cluster(2)
    cluster.enter(1, timeout_s=1)
    cluster.advance(1)
    assert cluster.asked[1][-1] == TimedOut((Late("worker0", "has not called shutdown"),), 0)


def test_a_coordinator_that_hangs_is_named() -> None:
    cluster = Cluster(2)
    cluster.cut.add(frozenset((0, 1)))
    cluster.enter(1)
    cluster.advance(2 * STATUS_INTERVAL_S)
    assert cluster.asked[1] == [LogWaiting((Late("worker0", "does not answer"),), 0)]


def test_a_member_that_hangs_before_its_last_answer_is_named() -> None:
    cluster = Cluster(3)
    cluster.enter(0, 1)
    cluster.feed(0, Received(2, report(1, rank=2)))
    cluster.cut.add(frozenset((0, 2)))
    cluster.deliver()
    cluster.advance(STATUS_INTERVAL_S)
    assert cluster.asked[0] == [LogWaiting((Late("worker2", "does not answer"),), 0)]


def test_a_fresh_count_of_calls_is_told() -> None:
    cluster = Cluster(3)
    cluster.feed(2, LocalBusy(5))
    cluster.feed(2, LocalEntered(0))
    cluster.enter(0, 1)
    cluster.feed(2, LocalBusy(1, "f() for worker1", cluster.now - 3.0))
    cluster.advance(2 * STATUS_INTERVAL_S)
    why = "still has 1 call or callback under way (f() for worker1, for 8 s)"  # reports are up to 5 s old
    assert cluster.asked[1][-1] == LogWaiting((Late("worker2", why),), 0)


def test_a_large_cluster_names_some_and_counts_the_rest() -> None:
    cluster = Cluster(MAX_LATE_NAMED + 12)
    cluster.enter(0, 1, timeout_s=1)
    cluster.advance(1)
    for rank in (0, 1):
        last = cluster.asked[rank][-1]
        assert isinstance(last, TimedOut)
        assert (len(last.late), last.unnamed_count) == (MAX_LATE_NAMED, 10)


# --- trees ---------------------------------------------------------------------------------------------

CHAIN = {rank: [near for near in (rank - 1, rank + 1) if 0 <= near < 5] for rank in range(5)}


def test_reports_and_releases_go_over_standing_links() -> None:
    cluster = Cluster(5, CHAIN)
    said: set[tuple[int, int]] = set()
    deliver = cluster.feed

    def feed(rank: int, event: Event) -> None:
        if isinstance(event, Received):
            said.add((event.rank, rank))
        deliver(rank, event)

    cluster.feed = feed  # type: ignore[method-assign]
    cluster.enter(4, 2, 0, 3)
    assert cluster.finished() == set()
    cluster.enter(1)
    assert cluster.finished() == set(range(5))
    assert said == {(rank, near) for rank, nears in CHAIN.items() for near in nears}


def test_who_has_no_neighbour_of_a_lower_rank_takes_one_of_the_few_or_the_lowest() -> None:
    members = {rank: f"w{rank}" for rank in range(200)}
    lonely = Departure(150, members, lambda: [160, 170])
    assert lonely.parent == 18
    for gone, parent in ((18, 2), (2, 0), (0, 1)):
        lonely.handle(PeerGone(gone), 1.0)
        assert lonely.parent == parent
    near = Departure(150, members, lambda: [160, 149])
    assert near.parent == 149
    near.handle(PeerGone(149), 1.0)
    assert near.parent == 18
    assert Departure(0, members, lambda: [160]).parent is None


def test_work_anywhere_below_between_the_two_looks_needs_a_third() -> None:
    cluster = Cluster(3, {0: [1], 1: [0, 2], 2: [1]})
    cluster.enter(0, 1)
    cluster.feed(2, LocalIdle(5))
    cluster.feed(2, LocalEntered(0))
    while not any(send.rank == 2 for _, send in cluster.wire):  # its first report goes up, the first probe comes down
        sender, send = cluster.wire.pop(0)
        cluster.feed(send.rank, Received(sender, send.message))
    cluster.feed(2, LocalBusy(1))
    cluster.feed(2, LocalIdle(6))  # idle at both looks, but not in between
    for _ in range(3):
        sender, send = cluster.wire.pop(0)
        cluster.feed(send.rank, Received(sender, send.message))
    assert cluster.nodes[0].state is DepartureState.WAITING
    assert [send.message for _, send in cluster.wire] == [DepartureProbe(2, [])]
    cluster.deliver()
    assert cluster.finished() == {0, 1, 2}


def test_whoever_is_busy_below_is_named_to_all_and_so_is_who_has_not_called() -> None:
    cluster = Cluster(5, CHAIN)
    cluster.feed(3, LocalBusy(2))
    cluster.feed(3, LocalEntered(0))
    cluster.enter(0, 2, 4, timeout_s=2)
    cluster.advance(2)
    late = (Late("worker1", "has not called shutdown"), Late("worker3", "still has 2 calls or callbacks under way"))
    assert [cluster.asked[rank][-1] for rank in (0, 2, 4)] == [TimedOut(late, 0)] * 3


def test_a_parent_that_has_not_called_shutdown_passes_questions_on_and_says_who_does_not_answer() -> None:
    cluster = Cluster(3, {0: [1], 1: [0, 2], 2: [1]})
    cluster.cut.add(frozenset((0, 1)))
    cluster.enter(2)
    cluster.advance(3 * STATUS_INTERVAL_S)
    assert cluster.asked[2][0] == LogWaiting((Late("worker0", "does not answer"),), 0)


def test_the_death_of_a_parent_moves_its_children_elsewhere() -> None:
    cluster = Cluster(5, CHAIN)
    cluster.enter(0, 1, 3, 4)
    cluster.kill(2)
    cluster.deliver()
    assert cluster.finished() == {0, 1, 3, 4}


def test_a_parent_that_dies_while_it_releases() -> None:
    cluster = Cluster(5, CHAIN)
    cluster.enter(0, 1, 2, 3)
    cluster.feed(4, LocalIdle(0))
    cluster.feed(4, LocalEntered(0))
    while cluster.nodes[2].state is not DepartureState.RELEASING:
        sender, send = cluster.wire.pop(0)
        cluster.feed(send.rank, Received(sender, send.message))
    cluster.wire = [(sender, send) for sender, send in cluster.wire if sender != 2]
    cluster.kill(2)
    cluster.deliver()
    assert cluster.finished() == {0, 1, 2, 3, 4} - {2}
