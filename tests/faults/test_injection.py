"""Injected faults between real nodes: each does what it says, to those it names, and nothing else breaks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd as dist_autograd
from farcall.errors import Delivery, NetworkError, PeerDead, ReferenceLost, RpcTimeout
from farcall.options import MembershipOptions, MemoryOptions
from farcall.protocol.frames import REQUEST, Frame
from farcall.rpc.references import NodeReferences
from farcall.runtime.calls import executor
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import run_cluster
from farcall.testing.faults import Faults

SHORT_S = 0.3
LARGE = 1 << 18  # elements; as floats 1 MiB, so it goes through shared memory
UNWATCHED = replace(PATIENT, probe_interval_s=10 * LONG_S)
"""No probe finds a silent connection, and has it replaced."""

ran: list[Any] = []
may_end = threading.Event()


@pytest.fixture(autouse=True)
def _nothing_ran_before() -> None:
    ran.clear()
    may_end.clear()


def wait_for_the_test() -> None:
    assert may_end.wait(LONG_S)


def run(number: Any) -> Any:
    ran.append(number)
    return number


def total(tensor: torch.Tensor) -> float:
    return float(tensor.sum())


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def keep(rref: farcall.RRef[Any]) -> None:
    ran.append(rref)


def leave_at_once(nodes: list[farcall.Node]) -> None:
    """After a connection was cut there is nobody to agree with."""
    for node in nodes:
        node.shutdown(graceful=False)


# ---------------------------------------------------------------------- with faults in place, and no rule


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_without_rules_all_is_as_ever(transport):
    with team(Faults(), 3, transports=(transport,)) as nodes:
        assert nodes[0].rpc_sync("w1", run, (1,)) == 1
        for _ in range(4):  # inline first, then in a segment, then in one that is known
            assert nodes[0].rpc_sync("w2", total, (torch.ones(LARGE),)) == LARGE
            assert nodes[2].rpc_sync("w0", double, (torch.ones(LARGE),)).sum() == 2 * LARGE
        lending = runtime_of(nodes[0]).other(2).lending
        assert (lending is not None and lending.is_used) == (transport == "unix")  # descriptors passed, too
        rref = nodes[1].remote("w2", torch.full, ((3,), 7.0))
        assert torch.equal(rref.to_here(), torch.full((3,), 7.0))
        with pytest.raises(ZeroDivisionError):
            nodes[1].rpc_sync("w0", divmod, (1, 0))


def test_large_messages_pass_in_pieces():
    with team(Faults(), transports=("tcp",)) as nodes:
        big = torch.arange(4 << 20)
        assert torch.equal(nodes[0].rpc_sync("w1", double, (big,)), big * 2)


# ---------------------------------------------------------------------- messages


def test_a_dropped_request_never_runs_and_the_next_one_does():
    faults = Faults(seed=1)
    with team(faults) as nodes, faults.drop(kind="request", to="w1", count=2) as rule:
        for number in range(2):
            with pytest.raises(RpcTimeout):
                nodes[0].rpc_sync("w1", run, (number,), timeout=SHORT_S)
        assert nodes[0].rpc_sync("w1", run, (2,)) == 2
        assert nodes[1].rpc_sync("w0", run, (3,)) == 3
        assert ran == [2, 3]
        assert rule.hits == 2


def test_a_dropped_answer_leaves_a_call_that_ran():
    faults = Faults()
    with team(faults) as nodes, faults.drop(kind="response", to="w0", count=1) as rule:
        unanswered = nodes[0].rpc_async("w1", run, (1,))
        rule.wait_hits()
        assert ran == [1]
        assert nodes[0].rpc_sync("w1", run, (2,)) == 2
        assert not unanswered.done()
        leave_at_once(nodes)


def test_memory_of_dropped_messages_is_given_back():
    faults = Faults()
    with team(faults) as nodes:
        tensor = torch.ones(LARGE)
        for _ in range(4):
            nodes[0].rpc_sync("w1", double, (tensor,))  # both sides have accepted a segment by then
        for kind in ("request", "response"):
            with faults.drop(kind=kind, count=1) as rule:
                nodes[0].rpc_async("w1", double, (tensor,))
                rule.wait_hits()
        for node in nodes:
            assert runtime_of(node).pool is not None
            wait_until(lambda node=node: runtime_of(node).pool.live_bytes == 0)
        assert nodes[0].rpc_sync("w1", double, (tensor,)).sum() == 2 * LARGE
        leave_at_once(nodes)


@pytest.mark.parametrize("fault", ["drop", "fail"])
def test_references_in_a_lost_message_are_not_held_for_ever(fault):
    faults = Faults()
    with team(faults, 3) as nodes:
        for node in nodes:
            node.checks_leaks = True
        rref = nodes[0].remote("w1", run, (1,))
        rref.to_here()
        with getattr(faults, fault)(kind="call", to="w2"), pytest.raises((RpcTimeout, NetworkError)):
            nodes[0].rpc_sync("w2", keep, (rref,), timeout=SHORT_S)
        references = runtime_of(nodes[0]).part(NodeReferences)
        wait_until(lambda: references.counts().pending_children == 0)
        assert ran == [1]
        del rref
        wait_until(lambda: runtime_of(nodes[1]).part(NodeReferences).counts().owned == 0)


def gradient(node: farcall.Node, tensor: torch.Tensor, disturbed: Callable[[], None] = lambda: None) -> torch.Tensor:
    """The gradient of the sum of twice ``tensor``, doubled by w1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farcall.runtime.node.current.slot.runtime", runtime_of(node))
        with dist_autograd.context() as context_id:
            disturbed()
            loss = node.rpc_sync("w1", double, (tensor,)).sum()
            dist_autograd.backward(context_id, [loss])
            return dist_autograd.get_gradients(context_id)[tensor]


def test_a_backward_pass_does_not_wait_for_a_lost_message():
    faults = Faults()
    tensor = torch.ones(3, requires_grad=True)
    with team(faults) as nodes:

        def lose_one() -> None:
            with faults.drop(kind="call", count=1), pytest.raises(RpcTimeout):
                nodes[0].rpc_sync("w1", double, (tensor,), timeout=SHORT_S)

        assert torch.equal(gradient(nodes[0], tensor, lose_one), torch.full((3,), 2.0))


def test_gradients_are_right_whatever_comes_twice_or_late():
    faults = Faults(seed=2)
    tensor = torch.ones(3, requires_grad=True)
    with team(faults) as nodes:
        faults.delay(0.0, kind="letter", jitter_s=0.01, probability=0.3)
        faults.duplicate(kind=["letter", "response", "failure", "control"])
        for _ in range(20):
            assert torch.equal(gradient(nodes[0], tensor), torch.full((3,), 2.0))


@pytest.mark.parametrize("to", ["w1", "w0"])
def test_a_failed_send_is_an_error_at_once(to):
    faults = Faults()
    with team(faults) as nodes, faults.fail(kind="request", count=2, to=to):
        began = time.monotonic()
        with pytest.raises(NetworkError, match=f"sending to {to} failed") as caught:
            nodes[0].rpc_sync(to, run, (1,))
        future = nodes[0].rpc_async(to, run, (2,))
        with pytest.raises(NetworkError):
            future.wait()
        assert time.monotonic() - began < LONG_S
        assert caught.value.delivery is Delivery.NOT_SENT
        assert nodes[0].rpc_sync(to, run, (3,)) == 3
        assert ran == [3]


@pytest.mark.parametrize("to", ["w1", "w0"])
def test_a_creation_that_is_not_sent_surfaces_at_first_use(to):
    faults = Faults()
    with team(faults) as nodes, faults.fail(kind="create", to=to):
        rref = nodes[0].remote(to, run, (1,))
        with pytest.raises(RuntimeError, match="RRef creation"):
            rref._get_future().wait()
        with pytest.raises(ReferenceLost, match="RRef creation"):
            rref.to_here()
        with pytest.raises(ReferenceLost, match="RRef creation"):
            rref._serialize()
        assert runtime_of(nodes[0]).part(NodeReferences).pending_values() == 0
        assert ran == []


def test_a_creation_that_was_late_is_an_error_at_its_owner_too():
    with team(Faults()) as nodes:
        rref = nodes[0].remote("w0", wait_for_the_test, timeout=0.01)
        with pytest.raises(RpcTimeout):
            rref._get_future().wait()
        may_end.set()
        wait_until(lambda: runtime_of(nodes[0]).part(NodeReferences).pending_values() == 0)
        with pytest.raises(RpcTimeout, match="RRef creation"):
            rref.to_here()


@pytest.mark.parametrize("attempts", [1, 3])
def test_failed_sends_of_control_messages_are_made_good(attempts):
    faults = Faults()
    with team(faults, 3) as nodes:
        for node in nodes:
            node.checks_leaks = True
        faults.fail(kind="control", attempts=attempts, retry_s=0.01)
        rref = nodes[0].remote("w1", run, (5,))
        nodes[0].rpc_sync("w2", keep, (rref,))
        (kept,) = [item for item in ran if isinstance(item, farcall.RRef)]
        assert kept.to_here() == 5
        del rref, kept
        ran.clear()
        wait_until(lambda: runtime_of(nodes[1]).part(NodeReferences).counts().owned == 0)


@pytest.mark.parametrize("to", ["w1", "w0"])
def test_a_delayed_message_comes_late(to):
    faults = Faults()
    with team(faults) as nodes, faults.delay(SHORT_S, kind="request", to=to, count=1):
        began = time.monotonic()
        assert nodes[0].rpc_sync(to, run, (1,)) == 1
        assert time.monotonic() - began >= SHORT_S


@pytest.mark.parametrize("to", ["w1", "w0"])
def test_a_delayed_message_is_overtaken(to):
    faults = Faults()
    with team(faults) as nodes, faults.delay(10 * LONG_S, kind="request", count=1) as rule:
        late = nodes[0].rpc_async(to, run, (1,))
        rule.wait_hits()
        assert nodes[0].rpc_sync(to, run, (2,)) == 2
        assert ran == [2]
        assert not late.done()
        leave_at_once(nodes)


def test_a_delay_in_order_holds_what_follows():
    faults = Faults()
    with team(faults) as nodes, faults.delay(SHORT_S, kind="request", to="w1", count=1, in_order=True):
        began = time.monotonic()
        first = nodes[0].rpc_async("w1", run, (1,))
        assert nodes[0].rpc_sync("w1", run, (2,)) == 2
        assert time.monotonic() - began >= SHORT_S
        assert first.wait() == 1


def test_reordered_requests_swap(monkeypatch):
    faults = Faults()
    # One thread runs calls as they come in: no other is added if that one is late. And no probe passes the held request
    # before the second one does.
    monkeypatch.setattr(executor, "MOST_EXTRA_THREADS", 0)
    silent = MembershipOptions(probe_interval_s=LONG_S)
    with (
        team(faults, num_worker_threads=1, membership=silent) as nodes,
        faults.reorder(kind="request", to="w1", count=1, within_s=LONG_S),
    ):
        first = nodes[0].rpc_async("w1", run, (1,))
        assert nodes[0].rpc_sync("w1", run, (2,)) == 2
        assert first.wait() == 1
        assert ran == [2, 1]


def test_a_duplicate_is_told_apart_where_farcall_promises_that():
    faults = Faults()
    with team(faults, 3) as nodes:
        for node in nodes:
            node.checks_leaks = True
        with faults.duplicate(kind=["create", "response", "failure", "control"]) as rule:
            rref = nodes[0].remote("w1", run, (1,))
            assert rref.to_here() == 1
            nodes[0].rpc_sync("w2", keep, (rref,))
            del rref
            ran.remove(1)
            assert len(ran) == 1  # the creation ran once
            assert ran.pop().to_here() == 1
            wait_until(lambda: runtime_of(nodes[1]).part(NodeReferences).counts().owned == 0)
            assert rule.hits > 4


def test_a_duplicated_request_runs_twice():
    faults = Faults()
    with team(faults) as nodes, faults.duplicate(kind="call", to="w1"):
        assert nodes[0].rpc_sync("w1", run, (1,)) == 1
        wait_until(lambda: ran == [1, 1])


def test_leases_are_not_duplicated():
    faults = Faults()
    with team(faults) as nodes, faults.duplicate():
        for _ in range(8):
            assert nodes[0].rpc_sync("w1", double, (torch.ones(LARGE),)).sum() == 2 * LARGE
        for node in nodes:
            assert runtime_of(node).pool is not None
            wait_until(lambda node=node: runtime_of(node).pool.live_bytes == 0)


# ---------------------------------------------------------------------- connections


def test_a_cut_is_seen_by_both_sides_at_once_and_by_nobody_else():
    faults = Faults()
    with team(faults, 3, membership=MembershipOptions(reconnect_s=0)) as nodes:
        call = nodes[0].rpc_async("w1", wait_for_the_test)
        faults.cut(sender="w0", to="w1")
        with pytest.raises(PeerDead):
            call.wait()
        may_end.set()
        wait_until(lambda: runtime_of(nodes[1]).peer("w0").broken)
        with pytest.raises(PeerDead):
            nodes[1].rpc_sync("w0", run, (1,))
        assert nodes[0].rpc_sync("w2", run, (2,)) == 2
        assert nodes[1].rpc_sync("w2", run, (3,)) == 3
        leave_at_once(nodes)


def test_a_cut_at_a_message_takes_the_message_with_it():
    faults = Faults()
    with team(faults, membership=MembershipOptions(reconnect_s=0)) as nodes:
        faults.cut(kind="request", to="w1", skip=1)
        assert nodes[0].rpc_sync("w1", run, (1,)) == 1
        with pytest.raises(PeerDead):
            nodes[0].rpc_sync("w1", run, (2,))
        assert ran == [1]
        leave_at_once(nodes)


def test_a_half_open_connection_is_silent_until_it_heals():
    faults = Faults()
    with team(faults, membership=UNWATCHED) as nodes:
        with faults.half_open(sender="w0", to="w1") as rule:
            rule.wait_hits()
            there = nodes[0].rpc_async("w1", run, (1,))
            back = nodes[1].rpc_async("w0", run, (2,))
            with pytest.raises(RpcTimeout):
                nodes[0].rpc_sync("w1", run, (3,), timeout=SHORT_S)
            assert ran == []
            assert not there.done()
            assert not back.done()
            assert not runtime_of(nodes[0]).peer("w1").broken
            assert not runtime_of(nodes[1]).peer("w0").broken
        assert (there.wait(), back.wait()) == (1, 2)


def test_a_half_open_connection_heals_by_itself():
    faults = Faults()
    with team(faults) as nodes:
        faults.half_open(SHORT_S, kind="request", to="w1")
        began = time.monotonic()
        assert nodes[0].rpc_sync("w1", run, (1,)) == 1
        assert time.monotonic() - began >= SHORT_S


def test_who_sends_into_silence_has_to_wait_at_last():
    faults = Faults()
    with (
        team(faults, transports=("tcp",), membership=UNWATCHED) as nodes,
        faults.half_open(sender="w0", to="w1") as rule,
    ):
        rule.wait_hits()
        big = torch.ones(16 << 20)
        with pytest.raises(RpcTimeout, match="did not read"):
            nodes[0].rpc_sync("w1", total, (big,), timeout=1.0)
        leave_at_once(nodes)


def test_a_throttled_connection_takes_its_time():
    faults = Faults()
    with team(faults, memory=MemoryOptions(shared_memory=False)) as nodes, faults.throttle(10e6, to="w1"):
        big = torch.ones(1 << 20)
        began = time.monotonic()
        assert nodes[0].rpc_sync("w1", total, (big,)) == 1 << 20
        assert time.monotonic() - began > 0.9 * 4 * (1 << 20) / 10e6


def test_a_node_without_faults_is_disturbed_by_nobody():
    faults = Faults()
    with team([faults, None]) as nodes, faults.drop(kind="request"):
        assert nodes[1].rpc_sync("w0", run, (1,)) == 1
        with pytest.raises(RpcTimeout):
            nodes[0].rpc_sync("w1", run, (2,), timeout=SHORT_S)


def test_a_node_that_leaves_while_messages_are_held_ends_in_time():
    faults = Faults()
    began = time.monotonic()
    with team(faults) as nodes:
        with faults.delay(10 * LONG_S, kind="call"):
            nodes[0].rpc_async("w1", run, (1,))
        leave_at_once(nodes)
    assert time.monotonic() - began < LONG_S


# ---------------------------------------------------------------------- processes


def failed_numbers(rank: int) -> list[int]:
    """Which of many calls to the next worker failed."""
    failed = []
    for number in range(64 if rank == 0 else 0):
        try:
            farcall.rpc_sync("w1", run, (number,))
        except NetworkError:
            failed.append(number)
    return failed


def test_in_other_processes_the_seed_makes_the_same_choices():
    faults = Faults(seed=5)
    rule = faults.fail(kind="request", function=run, probability=0.4)
    found = run_cluster(2, failed_numbers, faults=faults)[0]

    class Call:
        names = frozenset({"request", "call"})
        frame = Frame(REQUEST, function=rule.function)

    direction = Faults(seed=5).direction("w0", "w1")
    assert found == [number for number in range(64) if direction.choose([rule], Call()) is not None]
    assert 8 < len(found) < 56


def die_in_a_fork(rank: int) -> int:
    child = os.fork()
    if child == 0:
        os._exit(7)
    _, status = os.waitpid(child, 0)
    # The child had copies of every descriptor, and the connections live on without it.
    assert farcall.rpc_sync(f"w{1 - rank}", run, (rank,)) == rank
    return os.waitstatus_to_exitcode(status)


def test_a_fork_leaves_the_connections_to_its_parent():
    assert run_cluster(2, die_in_a_fork, faults=Faults()) == [7, 7]
