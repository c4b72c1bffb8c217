"""Contexts end everywhere: told onward, past the dead, and for good."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.unit.autograd.cluster import Network, Peer

from farcall.errors import PeerDead, RpcTimeout
from farcall.protocol.gradients import ReleaseContext
from farcall.serialize import RECORDING


def chain(network: Network, route: list[int]) -> tuple[int, torch.Tensor]:
    """A value that wanders from worker to worker; the context, and the value at the end."""
    context = network.workers[route[0]].new_context()
    RECORDING.set(None)
    value = torch.rand(2, requires_grad=True)
    for source, target in pairwise(route):
        (value,) = network.move(context.id, source, target, [value * 2])
    return context.id, value


def knowing(network: Network, context_id: int) -> list[int]:
    return [worker.port.worker_id for worker in network.workers if worker.is_valid(context_id)]


def test_those_that_know_it_from_others_are_told_by_them() -> None:
    network = Network(5)
    context_id, _ = chain(network, [0, 1, 2, 3, 1, 0])
    assert knowing(network, context_id) == [0, 1, 2, 3]
    network.workers[0].release_everywhere(context_id)
    network.drain()
    assert knowing(network, context_id) == []
    told = [target for _, target, message in network.log if isinstance(message, ReleaseContext)]
    assert 4 not in told


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_the_dead_do_not_keep_others_from_hearing_of_it(victim: int) -> None:
    network = Network(5)
    context_id, _ = chain(network, [0, 1, 2, 3, 4])
    network.kill(victim)
    network.workers[0].release_everywhere(context_id)
    network.drain()
    assert knowing(network, context_id) == [victim]


def test_what_a_dead_worker_opened_is_released() -> None:
    network = Network(3)
    context_id, _ = chain(network, [0, 1, 2])
    network.kill(0)
    assert knowing(network, context_id) == [0]
    assert network.workers[1].admit(context_id, 0) is None


def test_a_released_context_does_not_come_back() -> None:
    network = Network(2)
    here, there = network.workers
    context_id, value = chain(network, [0, 1, 0])
    context = here.retrieve(context_id)
    # The release overtakes a call that names the context for the first time.
    there.release(context_id)
    assert there.admit(context_id, 0) is None
    here.release_everywhere(context_id)
    assert not context.record_send(Peer(1), [value])
    assert not context.sends
    assert here.admit(context_id, 0) is None


def test_a_message_that_was_not_sent_is_not_waited_for() -> None:
    network = Network(2)
    here = network.workers[0]
    context_id, value = chain(network, [0, 1, 0])
    context = here.retrieve(context_id)
    unsent = context.record_send(Peer(1), [value])
    assert unsent
    context.withdraw_send(unsent)
    here.backward(context_id, [value.sum()])
    # The same, found out while a pass waits for it.
    context_id, value = chain(network, [0, 1, 0])
    context = here.retrieve(context_id)
    unsent = context.record_send(Peer(1), [value])
    assert unsent
    network.possible.append(lambda: context.withdraw_send(unsent))
    here.backward(context_id, [value.sum()])
    network.drain()


def test_the_error_says_what_kind_of_failure_it_was() -> None:
    network = Network(2)
    here = network.workers[0]
    context_id, value = chain(network, [0, 1, 0])
    lost = here.retrieve(context_id).record_send(Peer(1), [value])  # never arrives
    assert lost
    with pytest.raises(RpcTimeout, match="timed out"):
        here.backward(context_id, [value.sum()], timeout_s=5.0, retain_graph=True)
    network.possible.append(lambda: network.kill(1))
    with pytest.raises(PeerDead, match="worker1 died"):
        here.backward(context_id, [value.sum()])
