"""Many contexts at once, each in a thread of its own, over workers that share a pool of threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty

import pytest
import torch
from tests.unit.autograd.cluster import Network

from farcall.autograd.contexts import Contexts
from farcall.autograd.passes import Event, LocalPass, Message
from farcall.errors import RpcError

GIVE_UP_S = 30.0


class ThreadPort:
    def __init__(self, workers: list[Contexts], worker_id: int, pool: ThreadPoolExecutor) -> None:
        self._workers, self.worker_id, self._pool = workers, worker_id, pool
        self.origin = worker_id << 16

    def send(self, worker_id: int, messages: Sequence[Message], awaited: LocalPass | None = None) -> None:
        self._pool.submit(self._arrive, self._workers[worker_id], list(messages))

    def _arrive(self, contexts: Contexts, messages: list[Message]) -> None:
        for local in contexts.deliver(self.worker_id, messages):
            contexts.port.submit(local)

    def send_later(self, worker_id: int, message: Message) -> None:
        self.send(worker_id, [message])

    def submit(self, local: LocalPass) -> None:
        self._pool.submit(local.run)

    def wait(self, local: LocalPass) -> Event | None:
        local.flush()
        deadline = local.machine.next_deadline()
        try:
            return local.inbox.get(timeout=None if deadline is None else max(0.0, deadline - self.now()))
        except Empty:
            return None

    def workers(self) -> frozenset[int]:
        return frozenset(range(len(self._workers)))

    def info(self, worker_id: int) -> None:
        """Nobody has a name here."""

    def knows(self, peer: object) -> bool:
        return False  # nothing travels as a message here

    def now(self) -> float:
        return time.monotonic()

    def pass_ended(self) -> None:
        pass

    def profile_call(self, worker_id: int, run: object) -> None:
        """Nobody here wants to know."""

    def profile_run(self, wanted: object) -> None:
        """The same."""


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(0)
    with ThreadPoolExecutor(8) as pool:
        network.workers += [Contexts(ThreadPort(network.workers, number, pool)) for number in range(3)]
        yield network


def test_threads_do_not_disturb_each_other(network: Network) -> None:
    shared = torch.rand(4, 4, requires_grad=True)

    def train(number: int) -> None:
        origin = network.workers[number % 3]
        for turn in range(10):
            context = origin.new_context()
            mine = torch.rand(4, 4, requires_grad=True)
            twin = mine.detach().clone().requires_grad_()
            value, expected = mine, twin
            for hop in range(4):
                (there,) = network.move(context.id, number % 3, (number + hop) % 3, [value])
                network.move(context.id, (number + hop) % 3, number % 3, [there.exp()])  # not used
                (back,) = network.move(context.id, (number + hop) % 3, number % 3, [(there @ shared).sin()])
                value, expected = back + value * turn, (expected @ shared).sin() + expected * turn
            origin.backward(context.id, [value.sum()], timeout_s=GIVE_UP_S)
            (wanted,) = torch.autograd.grad(expected.sum(), [twin])
            torch.testing.assert_close(origin.get_gradients(context.id)[mine], wanted)
            for peer in network.workers:
                peer.release(context.id)
            with pytest.raises(RpcError, match="no autograd context"):
                origin.current()

    with ThreadPoolExecutor(9) as trainers:
        for outcome in [trainers.submit(train, number) for number in range(9)]:
            outcome.result(timeout=2 * GIVE_UP_S)
    assert shared.grad is None
    assert all(w.debug_info()["num_autograd_contexts"] == "0" for w in network.workers)
