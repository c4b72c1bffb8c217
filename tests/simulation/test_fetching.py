"""Leaders that fetch one version, in memory and seeded: members die, links are cut, answers are late or come twice."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from farcall.protocol.weights.fetching import (
    STALL_S,
    Ask,
    AskRoute,
    Came,
    Done,
    Effect,
    Failed,
    Fetching,
    Refused,
    Routed,
    Routes,
    Unanswered,
)
from farcall.weights.fetching import ANSWER_S

LENDER = 1
SIZES = (5, 0, 3)
CHUNKS = 8
STEP_S = STALL_S / 8
MOST_STEPS = 2_000


class Network:
    """The lender, and one leader on each of several hosts."""

    def __init__(self, seed: int, leaders: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.routes = Routes(LENDER)
        self.members = list(range(10, 10 + leaders))
        self.fetching = {member: Fetching(SIZES, chunk_bytes=1, window=3) for member in self.members}
        self.outcome: dict[int, Effect] = {}
        self.dead: set[int] = set()
        self.cut: set[tuple[int, int]] = set()
        self.asked: list[tuple[int, Ask]] = []
        self.routing: list[tuple[int, AskRoute]] = []
        self.crossed: Counter[int] = Counter()
        for member in self.members:
            self.carry_out(member, self.fetching[member].start())

    def carry_out(self, member: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                assert effect.source != member
                self.asked.append((member, effect))
            elif isinstance(effect, AskRoute):
                self.routing.append((member, effect))
            else:
                assert member not in self.outcome, "it ends once"
                self.outcome[member] = effect

    def has(self, source: int, ask: Ask) -> bool:
        return source == LENDER or self.fetching[source].has(ask.chunk)

    def step(self) -> None:
        self.now += STEP_S
        for member, asked in self.take(self.routing):
            if LENDER in self.dead or (member, LENDER) in self.cut:
                found: list[int] = []
            else:
                route = self.routes.find(member, f"host {member}", asked.avoided)
                assert route.neighbour == 0
                found = route.sources
            self.carry_out(member, self.fetching[member].handle(Routed(found), self.now))
        for member, ask in self.take(self.asked):
            if member in self.dead:
                continue
            if ask.source in self.dead:
                event: Came | Refused = Refused(ask.chunk, ask.source)
            elif (member, ask.source) in self.cut:
                continue  # no answer, ever
            elif not self.has(ask.source, ask):
                if isinstance(self.outcome.get(ask.source), Failed):
                    event = Refused(ask.chunk, ask.source)
                else:
                    self.asked.append((member, ask))  # it answers when it has it
                    continue
            else:
                event = Came(ask.chunk, ask.source)
                self.crossed[member] += 1
            self.carry_out(member, self.fetching[member].handle(event, self.now))
            if self.random.random() < 0.1:
                self.carry_out(member, self.fetching[member].handle(event, self.now))
        for member in self.members:
            if member not in self.dead and self.fetching[member].next_deadline() <= self.now:
                self.carry_out(member, self.fetching[member].handle_deadline(self.now))

    def take(self, waiting: list) -> list:  # type: ignore[type-arg]
        """Some of what waits, in any order."""
        self.random.shuffle(waiting)
        count = self.random.randint(0, len(waiting))
        taken, waiting[:] = waiting[:count], waiting[count:]
        return taken

    def run(self) -> None:
        for _ in range(MOST_STEPS):
            if all(member in self.outcome or member in self.dead for member in self.members):
                return
            self.step()
        raise AssertionError(f"not over: {self.outcome}")


@pytest.mark.parametrize("leaders", [1, 2, 7])
def test_each_host_gets_every_chunk_once(leaders: int) -> None:
    network = Network(leaders, leaders)
    network.take = lambda waiting: [waiting.pop(0) for _ in range(len(waiting))]  # type: ignore[method-assign]
    network.random.random = lambda: 1.0  # type: ignore[method-assign]
    network.run()
    assert set(network.outcome.values()) == {Done()}
    assert set(network.crossed.values()) == {CHUNKS}


@pytest.mark.parametrize("seed", range(300))
def test_deaths_and_cuts_on_the_way(seed: int) -> None:
    network = Network(seed, network_size := 1 + seed % 6)
    troubles = random.Random(seed)
    for _ in range(troubles.randint(0, network_size)):
        for _ in range(troubles.randint(0, 6)):
            network.step()
        victim = troubles.choice(network.members)
        if troubles.random() < 0.5:
            network.dead.add(victim)
            network.routes.forget(victim)
        else:
            network.cut.add((victim, troubles.choice(network.members)))
    network.run()
    # The lender lives and everybody reaches it: nobody ends without the version.
    assert all(network.outcome[member] == Done() for member in network.members if member not in network.dead)


@pytest.mark.parametrize("sources", [[LENDER], [2, LENDER], [3, 2, LENDER]])
@pytest.mark.parametrize("chunk_s", [0.01, 0.9, 1.1, 1.9, 2.1, 3.0, 7.0])
def test_a_slow_link_brings_all_of_it(chunk_s: float, sources: list[int]) -> None:
    """The receiver's link carries one chunk after the other, from whatever source; no call outlives ANSWER_S."""
    count = 24
    fetching = Fetching([count], chunk_bytes=1)
    now, free_at, crossed = 0.0, 0.0, 0
    asked: list[tuple[float, Ask]] = []  # the answers that wait for the link, and when each was asked for
    open_calls: dict[int, tuple[float, Ask]] = {}
    outcome: list[Effect] = []

    def carry_out(effects: list[Effect]) -> None:
        nonlocal free_at
        for effect in effects:
            if isinstance(effect, Ask):
                free_at = free_at if asked else now + chunk_s
                asked.append((now, effect))
                open_calls[id(effect)] = asked[-1]
            elif isinstance(effect, AskRoute):
                carry_out(fetching.handle(Routed(sources), now))
            else:
                outcome.append(effect)

    carry_out(fetching.start())
    while not outcome and crossed < 10 * count:
        times_up = min((at + ANSWER_S for at, _ in open_calls.values()), default=math.inf)
        now = min(free_at if asked else math.inf, times_up, fetching.next_deadline())
        if now == times_up:
            number = next(number for number, (at, _) in open_calls.items() if at + ANSWER_S == now)
            _, ask = open_calls.pop(number)
            carry_out(fetching.handle(Unanswered(ask.chunk, ask.source), now))
        elif asked and now == free_at:
            _, ask = asked.pop(0)
            crossed += 1
            free_at = now + chunk_s
            if open_calls.pop(id(ask), None) is not None:
                carry_out(fetching.handle(Came(ask.chunk, ask.source), now))
        else:
            carry_out(fetching.handle_deadline(now))
    assert outcome == [Done()]
    assert crossed < 3 * count


@pytest.mark.parametrize("seed", range(100))
def test_the_lender_dies_on_the_way(seed: int) -> None:
    network = Network(seed, 4)
    for _ in range(seed % 20):
        network.step()
    network.dead.add(LENDER)
    network.run()
    for member in network.members:
        missing = network.fetching[member].missing_bytes
        assert network.outcome[member] == (Failed(missing) if missing else Done())


def test_a_source_of_which_others_are_in_front_is_never_asked() -> None:
    routes = Routes(LENDER)
    assert routes.find(10, "a").sources == [LENDER]
    assert routes.find(20, "b").sources == [10, LENDER]
    assert routes.find(21, "b").neighbour == 20
    assert routes.find(30, "c").sources == [20, 10, LENDER]
    # The leader of b is gone: its neighbour takes its place in the chain.
    assert routes.find(21, "b", [20]).sources == [10, LENDER]
    assert routes.find(30, "c", [20]).sources == [21, 10, LENDER]
    assert routes.find(10, "a", []).sources == [LENDER]
    routes.forget(21)
    assert routes.find(22, "b").sources == [30, 10, LENDER]
    # Members that share no memory with anybody are hosts of their own.
    assert routes.find(40, "").sources == [22, 30, 10, LENDER]
    assert routes.find(41, "").neighbour == 0


def test_a_member_has_one_host_whatever_it_says() -> None:
    routes = Routes(LENDER)
    for host in range(100):
        assert routes.find(7, f"host {host}").sources == [LENDER]
    assert routes.find(8, "another").sources == [7, LENDER]
    assert len(routes._leaders) == 2
