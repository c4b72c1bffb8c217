"""Several workers' contexts in one process and one thread, joined by a network that delivers in random order.

What a real node does with threads, this does with a list of things that may happen next: whoever waits
picks one of them at random. If there is none, whoever waits would wait forever, and the test fails there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from queue import Empty
from typing import NamedTuple

import msgspec
import torch

from farcall.autograd.context import Context
from farcall.autograd.contexts import Contexts
from farcall.autograd.passes import Event, Gradient, LocalPass, Message
from farcall.errors import PeerDead


class Hang(AssertionError):
    """Somebody waits for what will never come."""


class Peer(NamedTuple):
    """All that a context asks of a peer."""

    number: int


class Network:
    def __init__(self, world_size: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.possible: list[Callable[[], None]] = []
        self.clock_s = 0.0
        self.dead: set[int] = set()
        self.log: list[tuple[int, int, Message]] = []
        self.workers = [Contexts(Port(self, worker_id)) for worker_id in range(world_size)]

    def step(self) -> bool:
        if not self.possible:
            return False
        self.possible.pop(self.random.randrange(len(self.possible)))()
        return True

    def drain(self) -> None:
        while self.step():
            pass

    def kill(self, worker_id: int) -> None:
        self.dead.add(worker_id)
        for other in self.workers:
            if other.port.worker_id not in self.dead:
                other.worker_lost(worker_id, f"worker{worker_id} died", worker_id << 16)

    def move(self, context_id: int, source: int, target: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a call does with the tensors of a message: record, copy, record."""
        message_id = self.context(context_id, source).record_send(Peer(target), tensors)
        copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        context = self.context(context_id, target)
        if message_id:
            context.record_receive(Peer(source), message_id, copies)
        return copies

    def context(self, context_id: int, worker_id: int) -> Context:
        """A context that was not released, at that worker, made if need be."""
        context = self.workers[worker_id].admit(context_id, 0)
        assert context is not None
        return context


class Port:
    def __init__(self, network: Network, worker_id: int) -> None:
        self._network = network
        self._worker_id = worker_id

    @property
    def worker_id(self) -> int:
        return self._worker_id

    @property
    def origin(self) -> int:
        return self._worker_id << 16

    def send(self, worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        network = self._network
        if worker_id in network.dead:
            raise PeerDead(f"worker{worker_id} died")
        network.log += [(self._worker_id, worker_id, message) for message in messages]
        copies = [_copied(message) for message in messages]

        def arrive() -> None:
            if worker_id not in network.dead:
                for local in network.workers[worker_id].deliver(self._worker_id, copies):
                    network.workers[worker_id].port.submit(local)

        network.possible.append(arrive)

    def send_later(self, worker_id: int, message: Message) -> None:
        if worker_id not in self._network.dead:
            self.send(worker_id, [message])

    def submit(self, local: LocalPass) -> None:
        def run() -> None:
            if self._worker_id not in self._network.dead:
                local.run()

        self._network.possible.append(run)

    def wait(self, local: LocalPass) -> Event | None:
        local.flush()
        while True:
            try:
                return local.inbox.get_nowait()
            except Empty:
                if self._network.step():
                    continue
                deadline = local.machine.next_deadline()
                if deadline is None:
                    raise Hang("nothing can happen any more, and the pass is not over") from None
                self._network.clock_s = deadline
                return None

    def workers(self) -> frozenset[int]:
        return frozenset(range(len(self._network.workers)))

    def info(self, worker_id: int) -> None:
        """Nobody has a name here."""

    def knows(self, peer: object) -> bool:
        return False  # nothing travels as a message here

    def now(self) -> float:
        return self._network.clock_s

    def pass_ended(self) -> None:
        pass

    def profile_call(self, worker_id: int, run: object) -> None:
        """Nobody here wants to know."""

    def profile_run(self, wanted: object) -> None:
        """The same."""


def _copied(message: Message) -> Message:
    if isinstance(message, Gradient):
        copies = {place: None if one is None else one.clone() for place, one in message.gradients.items()}
        return msgspec.structs.replace(message, gradients=copies)
    return message
