"""Owner, users and forks under any order of events that hypothesis can think of.

The judge is the cluster of ``tests/simulation``: it fails on the first effect that breaks an invariant. Each
run ends by letting everything arrive, comparing what owners list with what programs hold, and dropping all.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.simulation.reference_cluster import LINGER_S, Cluster

from farcall.protocol.references.messages import Fork

INDEX = st.integers(0, 1 << 16)


class ReferenceMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(2, 5))
    def start(self, size: int) -> None:
        self.cluster = Cluster(size)
        self.crashes = 0

    def member(self, index: int) -> int:
        alive = sorted(self.cluster.members)
        return alive[index % len(alive)]

    def fork(self, index: int) -> tuple[int, Fork]:
        held = [(me, fork) for me in sorted(self.cluster.members) for fork in self.cluster.members[me].held.values()]
        return held[index % len(held)]

    def somebody_holds(self) -> bool:
        return any(member.held for member in self.cluster.members.values())

    @rule(me=INDEX, owner=INDEX)
    def create(self, me: int, owner: int) -> None:
        self.cluster.create(self.member(me), self.member(owner))

    @rule(me=INDEX)
    def own_local(self, me: int) -> None:
        self.cluster.own_local(self.member(me))

    @precondition(somebody_holds)
    @rule(held=INDEX, to=INDEX)
    def send(self, held: int, to: int) -> None:
        me, fork = self.fork(held)
        self.cluster.send(me, [fork], self.member(to))

    @precondition(somebody_holds)
    @rule(held=INDEX, to=INDEX)
    def send_and_drop(self, held: int, to: int) -> None:
        me, fork = self.fork(held)
        self.cluster.send(me, [fork], self.member(to))
        self.cluster.drop(me, fork, from_destructor=False)

    @precondition(somebody_holds)
    @rule(held=INDEX, from_destructor=st.booleans())
    def drop(self, held: int, from_destructor: bool) -> None:
        me, fork = self.fork(held)
        self.cluster.drop(me, fork, from_destructor)

    @precondition(lambda self: self.cluster.packets)
    @rule(index=INDEX)
    def deliver(self, index: int) -> None:
        self.cluster.deliver(index % len(self.cluster.packets))

    @precondition(lambda self: self.cluster.packets)
    @rule(index=INDEX)
    def deliver_and_duplicate(self, index: int) -> None:
        self.cluster.deliver(index % len(self.cluster.packets), keep=True)

    @precondition(lambda self: self.cluster.packets)
    @rule(index=INDEX, may_arrive=st.booleans())
    def withdraw(self, index: int, may_arrive: bool) -> None:
        self.cluster.withdraw(index % len(self.cluster.packets), may_arrive)

    @rule()
    def let_lingering_end(self) -> None:
        self.cluster.advance(LINGER_S)

    @precondition(lambda self: self.crashes < 3 and len(self.cluster.members) > 1)
    @rule(index=INDEX, survivors=st.integers(0, 1 << 16))
    def crash(self, index: int, survivors: int) -> None:
        self.crashes += 1
        bits = iter(range(1 << 16))
        self.cluster.crash(self.member(index), lambda: bool(survivors >> next(bits) % 16 & 1))

    @precondition(lambda self: self.cluster.untold)
    @rule(index=INDEX)
    def tell_death(self, index: int) -> None:
        self.cluster.tell_death(index % len(self.cluster.untold))

    @precondition(lambda self: self.cluster.newest < 8)
    @rule()
    def join(self) -> None:
        self.cluster.join()

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        # Newest first and oldest first are both orders that a network may choose.
        self.cluster.settle(lambda how_many: how_many - 1)
        self.cluster.check_at_rest()
        for me, member in self.cluster.members.items():
            for fork in list(member.held.values()):
                self.cluster.drop(me, fork, from_destructor=True)
        self.cluster.settle(lambda how_many: 0)
        self.cluster.check_at_rest()
        assert not any(member.values for member in self.cluster.members.values())


TestReferences = ReferenceMachine.TestCase
TestReferences.settings = settings(settings(), max_examples=max(settings().max_examples, 300), stateful_step_count=40)
