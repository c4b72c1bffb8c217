"""A thousand membership machines in one process and in simulated time, a network that loses, and a judge.

The network delays each message, loses some, and can be cut in two. Processes die with their host (silence) or
without it (links break, dialling is refused), sleep and wake with everything overdue, come and leave. The judge knows
what is true: every ``MemberDied`` is compared with it at once, and what all should know by some time is
looked up then, in the table of everyone. All choices come from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable
from enum import Enum

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    Admitted,
    Departed,
    Effect,
    Event,
    Expelled,
    Heard,
    HostSeen,
    LinkLost,
    LinkRefused,
    LocalJoin,
    LocalLeave,
    MemberDied,
    MembershipOptions,
    MemberUnresponsive,
    Received,
    Refused,
    Send,
)
from farcall.protocol.membership.machine import MembershipMachine, State
from farcall.protocol.membership.messages import Entries, JoinAnswer, Message

NEVER = math.inf


class Process(Enum):
    RUNNING = "running"
    CRASHED = "crashed"  # its host answers: dialling it is refused
    SILENT = "silent"  # its host is gone, too
    ENDED = "ended"  # by itself: it left, was refused, or was expelled


class Node:
    """One process."""

    def __init__(self, record: Member, machine: MembershipMachine) -> None:
        self.member = record
        self.incarnation = record.incarnation
        self.machine = machine
        self.process = Process.RUNNING
        self.side = 0
        self.wakes_at = NEVER  # the deadline that is on the agenda
        self.sleeps_until = 0.0
        self.longest_sleep_s = 0.0
        self.missed: list[Event] = []
        self.sent = 0
        self.admitted_at = NEVER
        self.knows: set[int] = set()  # whom it may ask, where it was a member before
        self.refused: str | None = None
        self.expelled: str | None = None
        self.expelled_by = 0
        self.ended_at = NEVER

    @property
    def is_member(self) -> bool:
        return self.process is Process.RUNNING and self.machine.state is State.MEMBER


class Cluster:
    """The processes, the network between them, and the judge."""

    def __init__(
        self,
        seed: int,
        count: int,
        options: MembershipOptions | None = None,
        loss: float = 0.0,
        *,
        returns: bool = False,
        is_fixed: bool = False,
        one_host: bool = False,
    ) -> None:
        """``returns``: who is expelled joins again, as another incarnation. ``is_fixed``: a group of fixed size.

        ``one_host``: one kernel has all processes, and knows which of them are gone.
        """
        self.one_host = one_host
        self.returns = returns
        self.is_fixed = is_fixed
        self.random = random.Random(seed)
        self.options = options or MembershipOptions()
        self.loss = loss
        self.now = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.incarnations = itertools.count(1)
        self.cut_pairs: set[frozenset[int]] = set()
        self.deaf: set[int] = set()
        self.mute: set[int] = set()
        self.messages = 0
        self.most_updates = 0
        self.unresponsive = 0
        self.false_deaths: list[str] = []
        self.deaths: list[tuple[str, int]] = []
        """Who declared whom dead, or heard of it: a name and an incarnation."""
        records = [self.new_member(f"worker{rank}", rank) for rank in range(count)]
        self.nodes: dict[int, Node] = {}
        for record in records:
            machine = MembershipMachine(record, records, self.options, self.random, 0.0, is_fixed=is_fixed)
            node = self.nodes[record.incarnation] = Node(record, machine)
            node.admitted_at = 0.0
            self.schedule(node)

    def new_member(self, name: str, rank: int) -> Member:
        # Lives are as good as random: nothing may depend on who was first.
        return Member(
            name, rank, next(self.incarnations) * 0x9E3779B97F4A7C15 % (2**61 - 1) + 1, (f"tcp:10.0.0.1:{rank}",)
        )

    # --- time ------------------------------------------------------------------------------------------

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (time, next(self.numbers), action))

    def run_until(self, time: float) -> None:
        agenda = self.agenda
        while agenda and agenda[0][0] <= time:
            self.now, _, action = heapq.heappop(agenda)
            action()
        self.now = time

    def schedule(self, node: Node) -> None:
        deadline = node.machine.next_deadline()
        if deadline is not None and deadline < node.wakes_at:
            node.wakes_at = deadline
            self.at(deadline, lambda: self.on_deadline(node, deadline))

    def on_deadline(self, node: Node, deadline: float) -> None:
        if node.wakes_at != deadline or node.process is not Process.RUNNING:
            return
        if self.now < node.sleeps_until:
            return  # ``wake`` sees to it
        node.wakes_at = NEVER
        self.look_at_hosts(node)
        self.carry_out(node, node.machine.handle_deadline(self.now))

    def look_at_hosts(self, node: Node) -> None:
        """What the driver tells of those who do not answer: do their kernels?"""
        for incarnation in node.machine.unresponsive(self.now):
            self.carry_out(
                node, node.machine.handle(HostSeen(incarnation, self.host_answers(node, incarnation)), self.now)
            )

    def host_answers(self, node: Node, incarnation: int) -> bool:
        other = self.nodes[incarnation]
        if other.process is Process.SILENT or other.side != node.side:
            return False
        if frozenset((node.incarnation, incarnation)) in self.cut_pairs:
            return False
        return not {node.incarnation, incarnation} & (self.deaf | self.mute)

    # --- the network -----------------------------------------------------------------------------------

    def feed(self, node: Node, event: Event) -> None:
        if node.process is not Process.RUNNING:
            return
        if self.now < node.sleeps_until:
            node.missed.append(event)
            return
        self.carry_out(node, node.machine.handle(event, self.now))

    def carry_out(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.send(node, effect.to, effect.message)
            elif isinstance(effect, MemberDied):
                self.judge_death(node, effect)
            elif isinstance(effect, MemberUnresponsive):
                self.unresponsive += 1
            elif isinstance(effect, Admitted):
                node.admitted_at = self.now
                if not self.returns:  # else the network may be split meanwhile
                    self.at(self.now + self.options.news_bound_s(len(self.nodes)), lambda: self.check_known(node))
            elif isinstance(effect, Refused | Departed | Expelled):
                if isinstance(effect, Refused):
                    node.refused = effect.why
                elif isinstance(effect, Expelled):
                    node.expelled = effect.why
                    node.expelled_by = effect.by
                self.end(node, Process.ENDED)
                if self.returns and (isinstance(effect, Expelled) or node.knows):
                    self.at(self.now + self.random.uniform(0.01, 2.0), lambda: self.come_back(node))
        self.schedule(node)

    def send(self, sender: Node, to: int, message: Message) -> None:
        sender.sent += 1
        self.messages += 1
        if not isinstance(message, Entries | JoinAnswer):
            self.most_updates = max(self.most_updates, len(getattr(message, "updates", ())))
        receiver = self.nodes[to]
        if sender.side != receiver.side or (self.loss and self.random.random() < self.loss):
            return
        if self.cut_pairs and frozenset((sender.incarnation, to)) in self.cut_pairs:
            return
        if sender.incarnation in self.mute or to in self.deaf:
            return
        # Mostly a millisecond, sometimes much more: messages overtake each other.
        draw = self.random.random()
        delay_s = 0.0005 + 0.004 * draw if draw < 0.9 else 0.1 * self.random.random()
        self.at(self.now + delay_s, lambda: self.arrive(sender, receiver, message))

    def arrive(self, sender: Node, receiver: Node, message: Message) -> None:
        if receiver.process is Process.RUNNING:
            self.feed(receiver, Received(sender.incarnation, message))
        elif receiver.process is not Process.SILENT:
            self.at(self.now + 0.001, lambda: self.refuse(sender, receiver))

    def refuse(self, sender: Node, receiver: Node) -> None:
        if sender.machine.state is State.JOINING:
            self.ask_to_join(sender)
        else:
            self.feed(sender, LinkRefused(receiver.incarnation, self.one_host))

    def refuse_for(self, one: Node, other: Node, seconds: float, *, one_way: bool = False) -> None:
        """The network resets what the two say to each other, and refuses their dials; then they find each other again.

        ``one_way``: only the dials of ``one``. What ``other`` asks of it in vain tells that ``other`` lives.
        """
        pair = frozenset((one.incarnation, other.incarnation))
        until = self.now + seconds
        self.cut_pairs.add(pair)
        self.feed(one, LinkLost(other.incarnation))
        self.feed(other, LinkLost(one.incarnation))

        def dial() -> None:
            if self.now >= until:
                self.cut_pairs.discard(pair)
                self.feed(one, Heard(other.incarnation))
                self.feed(other, Heard(one.incarnation))
                return
            self.feed(one, LinkRefused(other.incarnation))
            if one_way:
                self.feed(one, Heard(other.incarnation))
            else:
                self.feed(other, LinkRefused(one.incarnation))
            self.at(min(until, self.now + 0.2), dial)

        dial()

    # --- what processes do -----------------------------------------------------------------------------

    def members(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_member]

    def have_met(self, one: Node, other: Node) -> bool:
        """Does either know where to find the other?"""
        pairs = ((one, other), (other, one))
        return any(knower.machine.record_of(known.incarnation) is not None for knower, known in pairs)

    def end(self, node: Node, how: Process) -> None:
        node.process = how
        node.ended_at = self.now
        if how is not Process.SILENT:
            # Its neighbours have links to it, and see it end.
            for peer in [peer for peer in self.members() if node.incarnation in peer.machine.table.neighbours()]:
                self.at(self.now + 0.01 * self.random.random(), lambda peer=peer: self.lose_link(peer, node))

    def lose_link(self, peer: Node, node: Node) -> None:
        if peer.side == node.side:
            self.feed(peer, LinkLost(node.incarnation))

    def sample(self, nodes: list[Node], count: int) -> list[Node]:
        return self.random.sample(nodes, min(count, len(nodes)))

    def come_back(self, expelled: Node) -> None:
        """The same process joins again, through those whom it knew."""
        if self.now < expelled.sleeps_until:
            self.at(expelled.sleeps_until, lambda: self.come_back(expelled))
            return
        knows = expelled.knows | set(expelled.machine.table.entries) - {expelled.incarnation}
        self.join(expelled.member.name, expelled.member.rank, expelled.side, knows, expelled.expelled_by)

    def join(self, name: str, rank: int, side: int = 0, knows: set[int] | None = None, expelled_by: int = 0) -> Node:
        record = self.new_member(name, rank)
        machine = MembershipMachine(record, None, self.options, self.random, self.now, is_fixed=self.is_fixed)
        node = self.nodes[record.incarnation] = Node(record, machine)
        node.side = side
        node.knows = (knows or set()) | ({expelled_by} - {0})
        node.expelled_by = expelled_by
        self.ask_to_join(node)
        return node

    def ask_to_join(self, node: Node) -> None:
        """Through any member on its side of the network; through another if that takes long."""
        if node.process is not Process.RUNNING or node.machine.state not in (State.NEW, State.JOINING):
            return
        sponsors = [other for other in self.members() if other.side == node.side]
        if node.knows:  # else it found somebody in a store
            sponsors = [other for other in sponsors if other.incarnation in node.knows]
            sponsors.sort(key=lambda other: (other.incarnation != node.expelled_by, other.member.rank))
            del sponsors[1:]
        if sponsors:
            former = tuple(self.nodes[incarnation].member for incarnation in sorted(node.knows))
            sponsor = self.random.choice(sponsors).incarnation
            self.carry_out(node, node.machine.handle(LocalJoin(sponsor, former), self.now))
        self.at(self.now + 5.0, lambda: self.ask_to_join(node))

    def leave(self, node: Node) -> None:
        self.feed(node, LocalLeave())

    def sleep(self, node: Node, seconds: float) -> None:
        """Stop the process, as SIGSTOP does: what arrives waits for it."""
        node.sleeps_until = self.now + seconds
        node.longest_sleep_s = max(node.longest_sleep_s, seconds)
        self.at(node.sleeps_until, lambda: self.wake(node))

    def wake(self, node: Node) -> None:
        if node.process is not Process.RUNNING or self.now < node.sleeps_until:
            return
        missed, node.missed = node.missed, []
        timers_first = self.random.random() < 0.5
        if timers_first:
            self.run_overdue(node)
        for event in missed:
            self.feed(node, event)
        if not timers_first:
            self.run_overdue(node)

    def run_overdue(self, node: Node) -> None:
        if node.process is Process.RUNNING:
            node.wakes_at = NEVER
            self.look_at_hosts(node)
            self.carry_out(node, node.machine.handle_deadline(self.now))

    def split(self, minority: Iterable[Node]) -> None:
        for node in minority:
            node.side = 1

    def heal(self) -> None:
        for node in self.nodes.values():
            node.side = 0

    # --- the judge -------------------------------------------------------------------------------------

    def judge_death(self, node: Node, death: MemberDied) -> None:
        victim = self.nodes[death.member.incarnation]
        self.deaths.append((node.member.name, victim.incarnation))
        if victim.is_member and victim.longest_sleep_s < (self.options.unresponsive_s or NEVER):
            self.false_deaths.append(
                f"at {self.now:.2f} s {node.member.name} declared {victim.member.name} dead: {death.why}"
            )

    def awake(self) -> list[Node]:
        return [node for node in self.members() if self.now >= node.sleeps_until]

    def who_does_not_know_the_end_of(self, gone: Node) -> list[str]:
        return [node.member.name for node in self.awake() if node.machine.table.member(gone.incarnation) is not None]

    def who_does_not_know(self, newcomer: Node) -> list[str]:
        """Nobody has to know one that is not, or no longer, a member."""
        if not newcomer.is_member:
            return []
        peers = [node for node in self.awake() if node.side == newcomer.side]
        return [node.member.name for node in peers if node.machine.table.member(newcomer.incarnation) is None]

    def expect_end_known(self, gone: Node, within_s: float) -> None:
        """Fail if by then anybody awake does not know of it."""

        def check() -> None:
            late = self.who_does_not_know_the_end_of(gone)
            assert not late, f"{within_s:.1f} s after {gone.member.name} ended, {len(late)} do not know: {late[:5]}"

        self.at(self.now + within_s, check)

    def check_known(self, newcomer: Node) -> None:
        late = self.who_does_not_know(newcomer)
        assert not late, f"{len(late)} do not know in time that {newcomer.member.name} came: {late[:5]}"

    def check_converged(self) -> None:
        """All members have the same members in their tables: those that are."""
        members = self.members()
        true = {node.incarnation for node in members}
        for node in members:
            table = node.machine.table
            assert {*table.others, table.me} == true, (
                f"{node.member.name}: {len(true - {*table.others, table.me})} missing, "
                f"{len({*table.others, table.me} - true)} too many"
            )
