"""Several workers' contexts in one process and one thread, joined by a network that delivers in random order.

What a real node does with threads, this does with a list of things that may happen next: whoever waits
picks one of them at random. If there is none, whoever waits would wait forever, and the test fails there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

from farcall.autograd.contexts import Contexts
from farcall.autograd.passes import Gradient, Letter, Task
from farcall.errors import PeerDead


class Hang(AssertionError):
    """Somebody waits for what will never come."""


class Network:
    def __init__(self, world_size: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.possible: list[Callable[[], None]] = []
        self.clock_s = 0.0
        self.dead: set[int] = set()
        self.log: list[tuple[int, int, Letter]] = []
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
        sender, receiver = self.workers[source], self.workers[target]
        message_id = sender.attach_send(sender.find_or_create(context_id), target, tensors)
        copies = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        context = receiver.find_or_create(context_id)
        if message_id is not None:
            receiver.attach_receive(context, source, message_id, copies)
        return copies


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

    def send(self, worker_id: int, letters: Sequence[Letter]) -> None:
        network = self._network
        if worker_id in network.dead:
            raise PeerDead(f"worker{worker_id} died")
        network.log += [(self._worker_id, worker_id, letter) for letter in letters]
        copies = [_copied(letter) for letter in letters]

        def arrive() -> None:
            if worker_id not in network.dead:
                network.workers[worker_id].deliver(self._worker_id, copies)

        network.possible.append(arrive)

    def submit(self, task: Task) -> None:
        def run() -> None:
            if self._worker_id not in self._network.dead:
                task()

        self._network.possible.append(run)

    def take(self, tasks: SimpleQueue[Task], timeout_s: float | None, workers: frozenset[int]) -> Task:
        while True:
            try:
                return tasks.get_nowait()
            except Empty:
                if self._network.step():
                    continue
                if timeout_s is None:
                    raise Hang("nothing can happen any more, and the pass is not over") from None
                self._network.clock_s += timeout_s
                raise

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


def _copied(letter: Letter) -> Letter:
    if isinstance(letter, Gradient) and letter.gradients is not None:
        return letter._replace(gradients=[None if g is None else g.clone() for g in letter.gradients])
    return letter
