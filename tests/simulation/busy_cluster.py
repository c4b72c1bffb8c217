"""Members that share few processors: whatever one of them does takes time, and the others wait.

A cluster as in `membership_cluster.py`. Each message sent or taken, each dial and each change of a member costs some
processor time, about what it costs a real node; work that finds all processors busy waits its turn. So messages and
timers come late when there is much to do, which makes members look unresponsive to each other, and that is news again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.simulation.membership_cluster import Cluster, Node, Process

from farcall.protocol.membership.events import Effect, Send
from farcall.protocol.membership.messages import Message

STEP_S = 100e-6
SEND_S = 60e-6
UPDATE_S = 2e-6
CHANGE_S = 60e-6
DIAL_S = 1.5e-3
STARVED_S = 1.8


class BusyCluster(Cluster):
    """A cluster on ``processors`` processors, and an account of its work."""

    def __init__(self, seed: int, count: int, processors: int, *, one_host: bool = False) -> None:
        self.free_at = [0.0] * processors
        self.worked_s = 0.0
        self.sent: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.dials: Counter[tuple[int, int]] = Counter()
        self.starved: set[int] = set()
        """Members whose work waits for STARVED_S before it gets a processor."""
        super().__init__(seed, count, one_host=one_host)

    def forget_account(self) -> None:
        """Begin the account anew."""
        self.worked_s = 0.0
        for node in self.nodes.values():
            node.sent = 0
        for account in (self.sent, self.told, self.dials):
            account.clear()

    def work_at(self, node: Node, seconds: float, action: Callable[[], None]) -> None:
        """Have ``node`` work for so long, and then do ``action``."""
        if node.incarnation in self.starved:
            self.at(self.now + STARVED_S, lambda: self.work(seconds, action))
        else:
            self.work(seconds, action)

    def work(self, seconds: float, action: Callable[[], None] = lambda: None) -> None:
        """Take a processor for so long, as soon as one is free, and then do ``action``."""
        begins_at = max(heapq.heappop(self.free_at), self.now)
        heapq.heappush(self.free_at, begins_at + seconds)
        self.worked_s += seconds
        self.at(begins_at, action)

    def on_deadline(self, node: Node, deadline: float) -> None:
        if node.wakes_at == deadline and node.process is Process.RUNNING:
            self.work_at(node, STEP_S, partial(super().on_deadline, node, deadline))

    def arrive(self, sender: Node, receiver: Node, message: Message) -> None:
        if receiver.process is Process.RUNNING:
            cost_s = STEP_S + UPDATE_S * len(getattr(message, "updates", ()))
        else:
            cost_s = DIAL_S
            self.dials[sender.incarnation, receiver.incarnation] += 1
        self.work_at(receiver, cost_s, partial(super().arrive, sender, receiver, message))

    def carry_out(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.sent[type(effect.message).__name__] += 1
                self.work(SEND_S + UPDATE_S * len(getattr(effect.message, "updates", ())) / 2)
            else:
                self.told[type(effect).__name__] += 1
                self.work(CHANGE_S)
        super().carry_out(node, effects)
