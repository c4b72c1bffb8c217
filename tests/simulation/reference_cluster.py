"""Many reference machines in one process, a network that duplicates, reorders and loses, and a judge.

The judge keeps its own books of who holds what and what is on its way, and compares: on every effect (nothing
is freed while referred to, nothing is lost while its owner lives) and at rest (nothing is kept that nobody
refers to). It looks at machines only through their public methods. All choices come from the caller, so a
seed repeats a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from farcall.ids import ForkId, RefId
from farcall.protocol.references.machine import References
from farcall.protocol.references.messages import (
    Confirmed,
    CreationAnswered,
    CreationWithdrawn,
    Dropped,
    Effect,
    Fork,
    ForkWithdrawn,
    FreeValue,
    Inquire,
    Lost,
    MemberDied,
    MemberJoined,
    Message,
    NeverCreated,
    Received,
    Send,
)

LINGER_S = 0.005


class Creation(NamedTuple):
    fork: Fork


class Response(NamedTuple):
    fork: Fork


class Payload(NamedTuple):
    forks: tuple[Fork, ...]


class Packet(NamedTuple):
    sender: int
    receiver: int
    content: Creation | Response | Payload | Message


class Member:
    """One incarnation: its machine, and what its program has in its hands."""

    def __init__(self, me: int, members: list[int]) -> None:
        self.machine = References(me, members, linger_s=LINGER_S, batch_forks=64)
        self.held: dict[ForkId, Fork] = {}
        self.values: dict[RefId, str] = {}
        self.knows_dead: set[int] = set()


class Cluster:
    """The members alive, the packets on their way, and the books."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.members: dict[int, Member] = {me: Member(me, list(range(1, size + 1))) for me in range(1, size + 1)}
        self.newest = size
        self.packets: list[Packet] = []
        self.untold: list[tuple[int, int]] = []  # (live member, death it has not heard of)
        self.holders: dict[RefId, dict[ForkId, int]] = {}
        self.travelling: dict[RefId, dict[ForkId, tuple[int, int]]] = {}
        self.created: set[RefId] = set()
        self.freed: set[RefId] = set()
        self.withdrawn: set[RefId] = set()

    # --- what programs do --------------------------------------------------------------------------------

    def create(self, me: int, owner: int) -> None:
        member = self.members[me]
        fork = member.machine.create(owner)
        if owner == me:
            self.own(me, fork)
        elif owner not in member.knows_dead:
            self.post(me, owner, Creation(fork))
        if owner not in member.knows_dead:
            self.hold(me, fork)
        self.carry_out(me, member.machine.handle_deadline(self.now))

    def own_local(self, me: int) -> None:
        fork = self.members[me].machine.own_local()
        self.own(me, fork)
        self.hold(me, fork)

    def send(self, me: int, held: list[Fork], to: int) -> None:
        member = self.members[me]
        forks = tuple(member.machine.fork(fork, to) for fork in held)
        if to not in member.knows_dead and to in self.members:
            self.post(me, to, Payload(forks))
            for fork in forks:
                self.travelling.setdefault(fork.ref, {})[fork.fork_id] = (me, to)

    def drop(self, me: int, fork: Fork, from_destructor: bool) -> None:
        member = self.members[me]
        self.let_go(me, fork)
        if from_destructor:
            member.machine.released.append(fork)
        else:
            self.carry_out(me, member.machine.handle(Dropped(fork), self.now))
        self.carry_out(me, member.machine.handle_deadline(self.now))

    def withdraw(self, packet_index: int, may_arrive: bool) -> None:
        """The sender does not know whether a payload or a creation arrived, or ever will."""
        packet = self.packets[packet_index]
        if packet.sender not in self.members or not isinstance(packet.content, Payload | Creation):
            return
        if not may_arrive:
            self.lose(packet_index)
        machine = self.members[packet.sender].machine
        if isinstance(packet.content, Creation):
            self.withdrawn.add(packet.content.fork.ref)
            self.carry_out(packet.sender, machine.handle(CreationWithdrawn(packet.content.fork), self.now))
        else:
            for fork in packet.content.forks:
                # The judge asks for no more than this: if it does arrive, its value must still be there.
                self.travelling.get(fork.ref, {}).pop(fork.fork_id, None)
                self.carry_out(packet.sender, machine.handle(ForkWithdrawn(fork), self.now))
        self.carry_out(packet.sender, machine.handle_deadline(self.now))

    def post(self, sender: int, receiver: int, content: Creation | Response | Payload | Message) -> None:
        if receiver in self.members:
            self.packets.append(Packet(sender, receiver, content))

    # --- what the world does -----------------------------------------------------------------------------

    def deliver(self, packet_index: int, keep: bool = False) -> None:
        """A packet arrives, from anywhere in the queue; ``keep`` leaves a duplicate behind."""
        packet = self.packets[packet_index]
        if not keep:
            self.packets[packet_index] = self.packets[-1]
            self.packets.pop()
        member = self.members[packet.receiver]
        machine = member.machine
        match packet.content:
            case Creation(fork):
                if machine.own(fork):
                    self.own(packet.receiver, fork)
                    self.post(packet.receiver, packet.sender, Response(fork))
            case Response(fork):
                if packet.sender not in member.knows_dead:
                    self.carry_out(packet.receiver, machine.handle(CreationAnswered(fork), self.now))
            case Payload(forks):
                for fork in forks:
                    known = machine.receive(fork, packet.sender)
                    self.travelling.get(fork.ref, {}).pop(fork.fork_id, None)
                    if known:
                        assert fork.ref not in self.freed or fork.owner not in self.members, f"{fork} came too late"
                        self.hold(packet.receiver, fork)
            case message:
                if isinstance(message, Inquire) and packet.sender not in member.knows_dead:
                    for dead in message.dead:
                        self.note_death(packet.receiver, dead)
                self.carry_out(packet.receiver, machine.handle(Received(packet.sender, message), self.now))
                if isinstance(message, Inquire):
                    self.check_losses(packet.receiver)
                return
        self.carry_out(packet.receiver, machine.handle_deadline(self.now))

    def lose(self, packet_index: int) -> None:
        packet = self.packets[packet_index]
        self.packets[packet_index] = self.packets[-1]
        self.packets.pop()
        if isinstance(packet.content, Payload) and packet not in self.packets:
            for fork in packet.content.forks:
                self.travelling.get(fork.ref, {}).pop(fork.fork_id, None)

    def crash(self, dead: int, survives: Callable[[], bool]) -> None:
        """Gone without a word. Of its packets those that ``survives`` says are still on their way."""
        member = self.members.pop(dead)
        for fork in list(member.held.values()):
            self.holders[fork.ref].pop(fork.fork_id, None)
        self.untold = [(me, other) for me, other in self.untold if me != dead]
        self.untold += [(me, dead) for me in self.members]
        for index in reversed(range(len(self.packets))):
            packet = self.packets[index]
            if packet.receiver == dead or (packet.sender == dead and not survives()):
                self.lose(index)

    def join(self) -> None:
        """A new process; everyone hears of it before anyone sends it anything."""
        self.newest += 1
        effects = {
            me: member.machine.handle(MemberJoined(self.newest), self.now) for me, member in self.members.items()
        }
        self.members[self.newest] = Member(self.newest, list(self.members))
        for me, found in effects.items():
            self.carry_out(me, found)
        for me in self.members:
            self.carry_out(me, self.members[me].machine.handle_deadline(self.now))

    def tell_death(self, index: int) -> None:
        me, dead = self.untold[index]
        self.note_death(me, dead)
        self.carry_out(me, self.members[me].machine.handle(MemberDied(dead), self.now))
        self.check_losses(me)

    def note_death(self, me: int, dead: int) -> None:
        member = self.members[me]
        member.knows_dead.add(dead)
        if (me, dead) in self.untold:
            self.untold.remove((me, dead))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for me, member in self.members.items():
            deadline = member.machine.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.carry_out(me, member.machine.handle_deadline(self.now))

    def settle(self, choose: Callable[[int], int]) -> None:
        """Let everything that is on its way arrive, in the order of ``choose(how_many) -> index``."""
        for _ in range(1_000):
            while self.untold:
                self.tell_death(choose(len(self.untold)))
            while self.packets:
                self.deliver(choose(len(self.packets)))
            self.advance(LINGER_S)
            if not self.packets and all(m.machine.next_deadline() is None for m in self.members.values()):
                return
        raise AssertionError("messages never end")

    # --- the judge ---------------------------------------------------------------------------------------

    def own(self, me: int, fork: Fork) -> None:
        assert fork.ref not in self.created, f"{fork.ref} is created twice"
        self.created.add(fork.ref)
        self.members[me].values[fork.ref] = "value"

    def hold(self, me: int, fork: Fork) -> None:
        assert fork.fork_id not in self.members[me].held, f"{fork} is received twice"
        self.members[me].held[fork.fork_id] = fork
        self.holders.setdefault(fork.ref, {})[fork.fork_id] = me

    def let_go(self, me: int, fork: Fork) -> None:
        del self.members[me].held[fork.fork_id]
        del self.holders[fork.ref][fork.fork_id]

    def carry_out(self, me: int, effects: list[Effect]) -> None:
        member = self.members[me]
        for effect in effects:
            match effect:
                case Send(receiver, message):
                    assert receiver not in member.knows_dead, f"{me} writes to the dead: {effect}"
                    assert receiver != me, f"{me} writes to itself: {effect}"
                    self.post(me, receiver, message)
                case FreeValue(ref):
                    # An error in place of a value that never came is made anew for whoever still asks.
                    assert ref in member.values or ref not in self.created or ref in self.freed, f"{ref} is lost"
                    if member.values.pop(ref, None) == "value":
                        self.check_unused(ref)
                        self.freed.add(ref)
                case NeverCreated(ref):
                    assert ref not in member.values, f"{ref} has a value, and is said to have none"
                    justified = ref.created_on in member.knows_dead or ref in self.withdrawn or ref in self.freed
                    assert justified, f"{ref} is given up though its creator lives"
                    assert ref not in self.created or ref in self.freed, f"{ref} was created"
                    member.values[ref] = "error"
                case Lost(fork):
                    assert fork.owner in member.knows_dead, f"{fork} is lost though its owner lives"
                    if fork.fork_id in member.held:
                        self.let_go(me, fork)
                case Confirmed(fork):
                    assert member.machine.confirmed_by_owner(fork) or fork.fork_id not in member.held

    def check_losses(self, me: int) -> None:
        """Invariant 4, when a member has just heard of deaths."""
        member = self.members[me]
        for fork in member.held.values():
            assert fork.owner not in member.knows_dead, f"{me} was not told at once that {fork} is lost"

    def check_unused(self, ref: RefId) -> None:
        """Invariant 1, when a value is freed."""
        assert not self.holders.get(ref), f"{ref} is freed, held by {self.holders[ref]}"
        for fork_id, (sender, receiver) in self.travelling.get(ref, {}).items():
            member = self.members.get(receiver)
            if member is not None and sender not in member.knows_dead:
                raise AssertionError(f"{ref} is freed, {fork_id} on its way from {sender} to {receiver}")

    def check_at_rest(self) -> None:
        """Invariants 2 and 4, when nothing is on its way: owners list exactly what programs hold."""
        for me, member in self.members.items():
            snapshot = member.machine.snapshot()
            counts = member.machine.counts()
            listed = {owned.ref: owned.forks_by_holder for owned in snapshot.owned}
            held: dict[RefId, dict[int, int]] = {}
            for holder, other in self.members.items():
                for fork in other.held.values():
                    if fork.owner == me:
                        by_holder = held.setdefault(fork.ref, {})
                        by_holder[holder] = by_holder.get(holder, 0) + 1
            assert listed == held, f"{me} lists {listed}, held is {held}"
            assert all(owned.created for owned in snapshot.owned)
            assert set(member.values) == set(held)
            mine = {fork_id for fork_id, fork in member.held.items() if fork.owner != me}
            assert {used.fork.fork_id for used in snapshot.used} == mine
            assert counts.pending_users == 0
            assert counts.pending_children == 0
            for fork in member.held.values():
                assert member.machine.confirmed_by_owner(fork)
