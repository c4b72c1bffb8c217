"""Membership under any order of messages that hypothesis can think of, with any of them twice or not at all.

Two promises. An end is an end: whoever was told that a member died or left is never told that it joined, and never
holds it for a member again. And when the network behaves again, all who run hold the same members: those who
run. In between members may well be declared dead wrongly (nothing that was sent may ever arrive): then those learn it.
"""

from __future__ import annotations

import random
from itertools import permutations
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    Departed,
    Effect,
    Event,
    Expelled,
    LinkLost,
    LinkRefused,
    LocalJoin,
    LocalLeave,
    MemberDied,
    MemberJoined,
    MemberLeft,
    MembershipOptions,
    Received,
    Refused,
    Send,
)
from farcall.protocol.membership.machine import MembershipMachine, State
from farcall.protocol.membership.messages import Message, Status, Update
from farcall.protocol.membership.table import Table

INDEX = st.integers(0, 1 << 16)
OPTIONS = MembershipOptions()
ME = Member("me", 0, 1)


def record(incarnation: int) -> Member:
    return Member(f"worker{incarnation}", incarnation, incarnation, ("tcp:host:1",))


# --- the table -----------------------------------------------------------------------------------------


def update(incarnation: int, status: Status, version: int) -> Update:
    return Update(incarnation, status, version, None if status >= Status.DEAD else record(incarnation))


UPDATES = st.lists(
    st.builds(update, st.integers(2, 4), st.sampled_from(Status), st.integers(0, 3)), min_size=1, max_size=5
)


def after(updates: list[Update]) -> tuple[dict[int, int], tuple[int, ...], list[int]]:
    table = Table(ME, 0.0)
    ended: set[int] = set()
    for number, claim in enumerate(updates):
        table.apply(claim, float(number))
        ended |= {incarnation for incarnation, entry in table.entries.items() if entry.ended}
        assert ended.isdisjoint(table.others)
    claims = {incarnation: entry.precedence for incarnation, entry in table.entries.items()}
    return claims, table.digest(), sorted(table.others)


@given(UPDATES)
def test_a_table_does_not_depend_on_the_order_of_claims(updates: list[Update]) -> None:
    expected = after(updates)
    for order in permutations(updates):
        assert after([*order]) == expected
        assert after([*order, *order]) == expected


@given(UPDATES, UPDATES)
def test_tables_that_were_compared_are_equal(ours: list[Update], theirs: list[Update]) -> None:
    one, other = Table(ME, 0.0), Table(ME, 0.0)
    for table, updates in ((one, ours), (other, theirs)):
        for claim in updates:
            table.apply(claim, 0.0)
    buckets = one.differing(other.digest())
    sent = other.updates_in(buckets)
    for claim in sent:
        one.apply(claim, 0.0)
    for claim in one.better_than(buckets, sent):
        other.apply(claim, 0.0)
    assert one.digest() == other.digest()
    assert sorted(one.others) == sorted(other.others)


# --- machines ------------------------------------------------------------------------------------------


class Packet(NamedTuple):
    sender: int
    receiver: int
    message: Message


class MembershipMachines(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 5), seed=st.integers(0, 1 << 16))
    def start(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.newest = size
        records = [record(incarnation) for incarnation in range(1, size + 1)]
        self.running: dict[int, MembershipMachine] = {
            one.incarnation: MembershipMachine(one, records, OPTIONS, self.random, 0.0) for one in records
        }
        self.ended: dict[int, set[int]] = {one.incarnation: set() for one in records}
        self.packets: list[Packet] = []

    # --- what carries effects out, and judges them -----------------------------------------------------

    def feed(self, incarnation: int, event: Event) -> None:
        if incarnation in self.running:
            self.carry_out(incarnation, self.running[incarnation].handle(event, self.now))

    def carry_out(self, incarnation: int, effects: list[Effect]) -> None:
        ended = self.ended[incarnation]
        for effect in effects:
            if isinstance(effect, Send):
                self.packets.append(Packet(incarnation, effect.to, effect.message))
            elif isinstance(effect, MemberDied | MemberLeft):
                ended.add(effect.member.incarnation)
            elif isinstance(effect, MemberJoined):
                assert effect.member.incarnation not in ended, f"{incarnation}: {effect.member.name} rose from the dead"
            elif isinstance(effect, Departed | Expelled | Refused):
                self.running.pop(incarnation, None)
        if incarnation in self.running:
            assert ended.isdisjoint(self.running[incarnation].table.others)

    def deliver(self, packet: Packet) -> None:
        if packet.receiver in self.running:
            self.feed(packet.receiver, Received(packet.sender, packet.message))
        else:
            self.feed(packet.sender, LinkRefused(packet.receiver))

    def run_timers(self) -> None:
        for incarnation in list(self.running):
            machine = self.running.get(incarnation)
            deadline = machine.next_deadline() if machine is not None else None
            if machine is not None and deadline is not None and deadline <= self.now:
                self.carry_out(incarnation, machine.handle_deadline(self.now))

    def some(self, index: int) -> int:
        alive = sorted(self.running)
        return alive[index % len(alive)]

    def take(self, index: int) -> Packet:
        """Any packet, from anywhere in the queue."""
        place = index % len(self.packets)
        self.packets[place], self.packets[-1] = self.packets[-1], self.packets[place]
        return self.packets.pop()

    # --- what hypothesis may do ------------------------------------------------------------------------

    @precondition(lambda self: self.packets)
    @rule(index=INDEX, twice=st.booleans())
    def arrive(self, index: int, twice: bool) -> None:
        packet = self.take(index)
        if twice:
            self.packets.append(packet)
        self.deliver(packet)

    @precondition(lambda self: self.packets)
    @rule(index=INDEX)
    def lose(self, index: int) -> None:
        self.take(index)

    @rule(seconds=st.sampled_from((0.1, 0.6, 1.0, 4.0, 15.0)))
    def advance(self, seconds: float) -> None:
        """At once: all deadlines in between come late."""
        self.now += seconds
        self.run_timers()

    @rule(rounds=st.integers(1, 20))
    def flow(self, rounds: int) -> None:
        """A while in which nothing is lost."""
        for _ in range(rounds):
            self.step(0.25)

    @precondition(lambda self: len(self.running) > 1)
    @rule(index=INDEX, peer=INDEX)
    def crash(self, index: int, peer: int) -> None:
        incarnation = self.some(index)
        del self.running[incarnation]
        self.feed(self.some(peer), LinkLost(incarnation))

    @precondition(lambda self: self.running)
    @rule(index=INDEX, peer=INDEX)
    def lose_link(self, index: int, peer: int) -> None:
        self.feed(self.some(index), LinkLost(self.some(peer)))

    @precondition(lambda self: len(self.running) > 1)
    @rule(index=INDEX)
    def leave(self, index: int) -> None:
        self.feed(self.some(index), LocalLeave())

    @precondition(lambda self: 0 < len(self.running) < 7)
    @rule(via=INDEX, like=INDEX, reuse=st.booleans())
    def join(self, via: int, like: int, reuse: bool) -> None:
        """Under a new name, or under one that was used before (or is in use)."""
        self.newest += 1
        model = 1 + like % (self.newest - 1) if reuse else self.newest
        newcomer = Member(f"worker{model}", model, self.newest)
        sponsor = self.some(via)
        machine = MembershipMachine(newcomer, None, OPTIONS, self.random, self.now)
        self.running[newcomer.incarnation] = machine
        self.ended[newcomer.incarnation] = set()
        self.feed(newcomer.incarnation, LocalJoin(sponsor))

    # --- the end ---------------------------------------------------------------------------------------

    def step(self, seconds: float) -> None:
        self.now += seconds
        self.run_timers()
        for _ in range(50):
            if not self.packets:
                break
            packets, self.packets = self.packets, []
            self.random.shuffle(packets)
            for packet in packets:
                self.deliver(packet)

    def teardown(self) -> None:
        if not hasattr(self, "running"):
            return
        for number in range(800):
            self.step(0.25)
            if number % 40 == 0:  # a newcomer whose sponsor is gone asks another member
                members = [
                    incarnation for incarnation, machine in self.running.items() if machine.state is State.MEMBER
                ]
                for incarnation in [
                    incarnation for incarnation, machine in self.running.items() if machine.state is State.JOINING
                ]:
                    if members:
                        self.feed(incarnation, LocalJoin(self.random.choice(members)))
        members = {
            incarnation: machine for incarnation, machine in self.running.items() if machine.state is State.MEMBER
        }
        for incarnation, machine in members.items():
            assert {incarnation, *machine.table.others} == set(members), (
                f"{incarnation}: {machine.table.others}, not {set(members)}"
            )
        for held in (lambda one: one.name, lambda one: one.rank):
            holders = [held(machine.table.myself) for machine in members.values()]
            assert len(set(holders)) == len(holders), "two members share a name or a rank"


MembershipMachines.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestMachines = MembershipMachines.TestCase
