"""Connections that break between members that live: nothing is lost or happens twice, and deaths are still deaths."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kit.forks import in_a_fork
from tests.kit.stopping import stop
from tests.kit.team import team, together
from tests.kit.times import AT_ONCE_S, PATIENT
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.kit.workload import use_everything

import farcall
import farcall.autograd as dist_autograd
from farcall import api
from farcall.errors import (
    AnswerLost,
    Delivery,
    NetworkError,
    NotInitialized,
    PeerDead,
    ReferenceLost,
    RpcTimeout,
)
from farcall.ids import WorkerInfo
from farcall.options import MembershipOptions, MemoryOptions
from farcall.rpc.references import NodeReferences
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import finish, run_cluster, start_cluster
from farcall.testing.faults import Faults

CUTS = 25
TICKETED = 10_000  # floats: 40 KB, in a shared segment or, over TCP, within one small frame
LARGE = 1 << 18  # floats: 1 MiB
KEPT = ("unix", "tcp")
EVERYTHING = ("request", "response", "failure", "control", "letter")

ran: Counter[int] = Counter()
ran_lock = threading.Lock()
reached = threading.Event()
may_end = threading.Event()


@pytest.fixture(autouse=True)
def _nothing_ran_before() -> None:
    ran.clear()
    reached.clear()
    may_end.clear()


def note(number: int) -> None:
    with ran_lock:
        ran[number] += 1


def run(number: int) -> int:
    note(number)
    return number


def echo(number: int, tensor: torch.Tensor) -> torch.Tensor:
    note(number)
    assert (tensor == number).all()
    return tensor


def make(number: int, elements: int) -> torch.Tensor:
    note(number)
    return torch.full((elements,), float(number))


def total(number: int, tensor: torch.Tensor, keep: object = None) -> float:
    note(number)
    return float(tensor.double().sum())


def wait_for_the_test() -> str:
    reached.set()
    assert may_end.wait(PATIENCE_S)
    return "done"


def cut_often(faults: Faults, nodes: list[farcall.Node]) -> None:
    """Cut the connection of two nodes CUTS times, each time after something has come over it in both directions."""
    source = random.Random(faults.seed)
    links = [next(iter(runtime_of(node).links.peers.remotes.values())).link for node in nodes]
    for _ in range(CUTS):
        before = [link.traffic.frames for link in links]
        wait_until(lambda: all(link.traffic.frames > count for link, count in zip(links, before, strict=True)))  # noqa: B023
        time.sleep(source.uniform(0.0, 0.02))  # a pace, not a wait: the cut may come at any point
        with faults.cut(sender=source.choice(nodes).get_worker_info().name) as rule:
            rule.wait_hits()


def leave(nodes: list[farcall.Node]) -> None:
    for node in nodes:
        node.shutdown(graceful=False)


def under_load(faults: Faults, nodes: list[farcall.Node], work: Callable[[farcall.Node, str, int], None]) -> None:
    """Two threads at each node work while connections are cut."""
    ended = threading.Event()
    numbers = iter(range(1, 1 << 30))
    lock = threading.Lock()

    def go(node: farcall.Node, to: str) -> None:
        while not ended.is_set():
            with lock:
                number = next(numbers)
            work(node, to, number)

    def cut() -> None:
        try:
            cut_often(faults, nodes)
        finally:
            ended.set()

    pairs = [(nodes[0], "w1"), (nodes[0], "w1"), (nodes[1], "w0"), (nodes[1], "w0")]
    together([cut, *(lambda node=node, to=to: go(node, to) for node, to in pairs)])  # type: ignore[misc]


# ---------------------------------------------------------------------- nothing is lost or done twice


@pytest.mark.parametrize("transport", KEPT)
def test_every_small_call_ends_with_its_result_and_runs_once(transport: str) -> None:
    faults = Faults(seed=1)
    asked: list[int] = []

    def work(node: farcall.Node, to: str, number: int) -> None:
        asked.append(number)
        if number % 3 == 0:
            assert node.rpc_sync(to, run, (number,)) == number
        elif number % 3 == 1:
            futures = [node.rpc_async(to, run, (number,)), node.rpc_async(to, abs, (-number,))]
            assert [future.wait() for future in futures] == [number, number]
        else:
            value = torch.full((TICKETED,), float(number))
            assert (node.rpc_sync(to, echo, (number, value)) == value).all()

    with team(faults, transports=(transport,)) as nodes:
        under_load(faults, nodes, work)
        assert dict(ran) == dict.fromkeys(asked, 1)
        for node in nodes:
            if runtime_of(node).pool is not None:
                wait_until(lambda node=node: runtime_of(node).pool.live_bytes == 0)
            (peer,) = runtime_of(node).links.peers.remotes.values()
            assert peer.link.traffic.frames > len(asked) // 4


@pytest.mark.parametrize("transport", KEPT)
def test_a_large_call_ends_with_its_result_or_says_truly_what_became_of_it(transport: str) -> None:
    faults = Faults(seed=2)
    outcomes: dict[int, str] = {}

    def work(node: farcall.Node, to: str, number: int) -> None:
        try:
            if number % 2:
                assert node.rpc_sync(to, total, (number, torch.ones(LARGE))) == LARGE
            else:
                assert (node.rpc_sync(to, make, (number, LARGE)) == number).all()
            outcomes[number] = "result"
        except NetworkError as error:
            outcomes[number] = "dead" if isinstance(error, PeerDead) else error.delivery

    with team(faults, transports=(transport,), memory=MemoryOptions(shared_memory=False)) as nodes:
        under_load(faults, nodes, work)
        for number, outcome in outcomes.items():
            assert ran[number] == (0 if outcome == Delivery.NOT_SENT else 1), (number, outcome)
        assert set(outcomes.values()) <= {"result", Delivery.NOT_SENT, Delivery.EXECUTED}
        assert "result" in outcomes.values()


@pytest.mark.parametrize("transport", KEPT)
def test_a_large_request_that_is_lost_did_not_run_and_what_it_carried_is_given_back(transport: str) -> None:
    faults = Faults()
    with team(faults, transports=(transport,), memory=MemoryOptions(shared_memory=False)) as nodes:
        with faults.cut(kind="request", to="w1"):
            mine = nodes[0].remote("w0", run, (1,))
            assert mine.to_here() == 1  # it has run
            with pytest.raises(NetworkError, match="did not run") as caught:
                nodes[0].rpc_sync("w1", total, (2, torch.ones(LARGE)), {"keep": mine})
        assert caught.value.delivery == Delivery.NOT_SENT
        with faults.cut(kind="create", to="w1"):
            lost = nodes[0].remote("w1", total, (3, torch.ones(LARGE)), {"keep": mine})
            with pytest.raises(ReferenceLost, match="did not run"):
                lost.to_here()
        assert dict(ran) == {1: 1}
        del lost, mine, caught
        nothing_is_held(nodes)


@pytest.mark.parametrize("transport", KEPT)
def test_a_large_answer_that_is_lost_says_that_the_function_ran(transport: str) -> None:
    faults = Faults()
    with (
        team(faults, transports=(transport,), memory=MemoryOptions(shared_memory=False)) as nodes,
        faults.cut(kind="response", to="w0"),
    ):
        with pytest.raises(AnswerLost, match=r"w1 executed") as caught:
            nodes[0].rpc_sync("w1", with_a_reference, (LARGE,))
        assert caught.value.delivery == Delivery.EXECUTED
        del caught
        nothing_is_held(nodes)


def test_a_large_value_that_is_lost_on_its_way_is_fetched_again() -> None:
    faults = Faults()
    with team(faults, transports=("tcp",)) as nodes:
        rref = nodes[0].remote("w1", make, (7, LARGE))
        rref._get_future().wait()  # its answer is there, which may come behind that of the first use
        with faults.cut(kind="response", to="w0", count=3) as rule:
            assert (rref.to_here() == 7).all()
            assert rule.hits == 3
        assert dict(ran) == {7: 1}
        del rref


def with_a_reference(elements: int) -> tuple[torch.Tensor, Any]:
    return torch.ones(elements), farcall.remote(farcall.get_worker_info(), run, (1,))


def nothing_is_held(nodes: list[farcall.Node]) -> None:
    gc.collect()  # errors that a test has caught hold frames, and those hold references
    for node in nodes:
        counts = runtime_of(node).part(NodeReferences).counts
        wait_until(lambda counts=counts: counts().owners == 0 and counts().forks == 0)


def test_references_come_back_to_nothing() -> None:
    faults = Faults(seed=3)

    def work(node: farcall.Node, to: str, number: int) -> None:
        rref = node.remote(to, make, (number, 10 + TICKETED * (number % 2)))
        mine = node.remote(runtime_of(node).info.name, run, (number,))
        assert node.rpc_sync(to, read, (mine,)) == number
        assert float(rref.to_here()[0]) == number

    with team(faults) as nodes:
        under_load(faults, nodes, work)
        nothing_is_held(nodes)


def read(rref: farcall.RRef[int]) -> int:
    return rref.to_here()


def test_memory_is_offered_again_where_the_offer_was_lost() -> None:
    faults = Faults()
    with team(faults) as nodes:
        peer = runtime_of(nodes[0]).other(1)
        assert peer is not None
        for _ in range(30):  # descriptors are on their way when the connection is cut; so are tensors without a segment
            rule = faults.cut(sender="w0")
            again = farcall.Retry(attempts=10, backoff_s=0.001)
            assert nodes[0].rpc_sync("w1", total, (1, torch.ones(LARGE)), retry=again) == LARGE
            rule.wait_hits()
            rule.lift()
        for _ in range(3):
            assert nodes[0].rpc_sync("w1", total, (1, torch.ones(LARGE))) == LARGE
        wait_until(lambda: peer.lending.is_used)
        assert runtime_of(nodes[0]).pool is not None
        wait_until(lambda: runtime_of(nodes[0]).pool.live_bytes == 0)


# ---------------------------------------------------------------------- gradients


def scale(x: torch.Tensor, to: str | None) -> torch.Tensor:
    y = x * 3
    return y if to is None else farcall.rpc_sync(to, scale, (y, None))


def backward_with_cuts(rank: int, elements: int, faults: Faults) -> None:
    if rank:
        return
    x = torch.ones(elements, requires_grad=True)
    for _ in range(4):
        with dist_autograd.context() as context_id:
            y = farcall.rpc_sync("w1", scale, (x, "w2"))
            dist_autograd.backward(context_id, [y.sum()])
            assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full((elements,), 9.0))
    assert len(faults.injections) == 2


@pytest.mark.parametrize("elements", [3, LARGE])
@pytest.mark.parametrize("transport", KEPT)
def test_a_backward_pass_survives_a_cut_in_its_middle(transport: str, elements: int) -> None:
    faults = Faults()
    faults.cut(kind="letter", count=2)  # in each direction the first two letters take their connection with them
    run_cluster(3, backward_with_cuts, elements, faults, faults=faults, transports=(transport,))


def use_everything_and_count_cuts(rank: int, faults: Faults) -> int:
    use_everything(rank)
    return len(faults.injections)


def test_a_program_of_everything_survives_cuts_at_any_message() -> None:
    faults = Faults(seed=5)
    faults.cut(kind=EVERYTHING, probability=0.03, count=None)
    assert sum(run_cluster(3, use_everything_and_count_cuts, faults, faults=faults, timeout_s=240.0)) > 10


# ---------------------------------------------------------------------- while there is no connection


def test_calls_made_meanwhile_wait_and_those_under_way_go_on() -> None:
    faults = Faults()
    with team(faults, 3) as nodes:
        before = nodes[0].rpc_async("w1", wait_for_the_test)
        assert reached.wait(PATIENCE_S)
        with faults.cut(sender="w0", to="w1", count=None) as rule:
            rule.wait_hits(2)  # cut, and again as soon as it was made
            meanwhile = [nodes[0].rpc_async("w1", run, (number,)) for number in range(5)]
            with pytest.raises(RpcTimeout):
                nodes[0].rpc_sync("w1", run, (99,), timeout=0.2)
            with pytest.raises(RpcTimeout) as caught:
                nodes[0].rpc_sync("w1", total, (98, torch.ones(LARGE)), timeout=0.2)
            assert caught.value.delivery in (Delivery.NOT_SENT, Delivery.UNKNOWN)
            assert not runtime_of(nodes[0]).peer("w1").broken
            assert nodes[0].rpc_sync("w2", run, (5,)) == 5
        may_end.set()
        assert before.wait() == "done"
        assert [future.wait() for future in meanwhile] == list(range(5))
        assert max(ran.values()) == 1


def test_a_silent_connection_that_is_given_up_is_replaced() -> None:
    """What a watch over members does when a peer is quiet for too long."""
    faults = Faults()
    heard: list[str] = []
    with team([faults, None]) as nodes:
        changes: Any = runtime_of(nodes[0]).member_changes
        changes.on_interrupted = lambda info, why: heard.append(f"lost {info.name}: {why}")
        changes.on_reconnected = lambda info: heard.append(f"back {info.name}")
        with faults.half_open(sender="w0") as rule:
            rule.wait_hits()
            calls = [nodes[0].rpc_async("w1", run, (1,)), nodes[1].rpc_async("w0", run, (2,))]
            # w1 dialled, and has noticed nothing
            runtime_of(nodes[0]).links.peers.remotes[1].link.interrupt("it is silent")
            assert [call.wait() for call in calls] == [1, 2]
        wait_until(lambda: len(heard) == 2)
        assert heard == ["lost w1: it is silent", "back w1"]


QUICK = MembershipOptions(probe_interval_s=0.2, probe_timeout_s=0.1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("who", [0, 1])
def test_a_connection_that_falls_silent_is_replaced_and_nobody_is_dead(who: int, size: int) -> None:
    """In a group of two nobody else can say that the other one lives."""
    faults = Faults()
    given = [faults if rank == who else None for rank in range(size)]
    with team(given, size, membership=replace(QUICK, suspicion_s=4.0)) as nodes:
        events: list[str] = []
        for node in nodes:
            node.on_member(lambda event: events.append(event.kind))
        with faults.half_open(sender=f"w{who}", to=f"w{1 - who}") as rule:
            rule.wait_hits()
            calls = [nodes[0].rpc_async("w1", run, (1,)), nodes[1].rpc_async("w0", run, (2,))]
            assert [call.wait() for call in calls] == [1, 2]
        assert ran == {1: 1, 2: 1}
        assert "dead" not in events


def test_who_has_no_way_to_ask_waits_to_be_dialled() -> None:
    def no_way(incarnation: int) -> list[str]:
        return []  # not over what it listens on

    with team([None, None]) as nodes:
        runtime_of(nodes[0]).links.peers.ways_to = no_way
        runtime_of(nodes[0]).links.peers.remotes[1].link.interrupt("for the test")
        assert nodes[0].rpc_sync("w1", run, (1,)) == 1


@pytest.mark.parametrize("who", [0, 1])
def test_connections_that_break_one_after_another_are_no_death(who: int) -> None:
    """Nothing comes over them, so it is one trouble; one of the two may hear of each break from the other first."""
    back: list[WorkerInfo] = []
    with team([None, None]) as nodes:
        changes: Any = runtime_of(nodes[who]).member_changes
        changes.on_reconnected = back.append
        for number in range(5):
            runtime_of(nodes[who]).links.peers.remotes[1 - who].link.interrupt("for the test")
            wait_until(lambda: len(back) > number)  # noqa: B023
        assert nodes[0].rpc_sync("w1", run, (1,)) == 1


def test_a_member_that_is_given_up_is_told_so() -> None:
    with team([None, None, None], 3) as nodes:
        pending = nodes[1].rpc_async("w0", wait_for_the_test)
        assert reached.wait(PATIENCE_S)
        here = runtime_of(nodes[0])
        here.call_soon(lambda: here.connector.give_up(here.links.peers.remotes[1], "it was late"))
        wait_until(lambda: runtime_of(nodes[0]).peer("w1").broken)
        with pytest.raises(PeerDead, match="was late"):
            nodes[0].rpc_sync("w1", run, (1,))
        with pytest.raises(PeerDead):  # it dials again, and is refused
            pending.wait()
        may_end.set()
        assert nodes[2].rpc_sync("w1", run, (1,)) == 1
        leave(nodes)


def test_connections_that_break_again_and_again_are_no_death() -> None:
    """The host answers each attempt to connect. Calls wait, for longer than any verdict takes, and then go on."""
    faults = Faults()
    membership = MembershipOptions(reconnect_s=0.5, probe_interval_s=0.2, probe_timeout_s=0.1, suspicion_s=0.5)
    with team(faults, membership=membership) as nodes:
        under_way = nodes[0].rpc_async("w1", wait_for_the_test)
        assert reached.wait(PATIENCE_S)
        rule = faults.cut(count=None)
        wait_until(lambda: not runtime_of(nodes[0]).other(1).link.up)  # type: ignore[union-attr]
        waits = nodes[0].rpc_async("w1", run, (1,))
        wait_until(lambda: (nodes[0].members()[1].unresponsive_s or 0.0) > 3.0)
        assert not under_way.done()
        assert not waits.done()
        rule.lift()
        may_end.set()
        under_way.wait()
        waits.wait()
        leave(nodes)


def test_calls_that_were_never_written_say_so() -> None:
    faults = Faults()
    with (
        team([faults, None], membership=MembershipOptions(reconnect_s=1.0, unresponsive_s=1.0)) as nodes,
        faults.half_open(sender="w0", count=None) as silence,
    ):
        silence.wait_hits()
        # A new connection is silent as well; w1, which has noticed nothing, is not asked: its address leads nowhere.
        runtime_of(nodes[0]).links.peers.ways_to = lambda incarnation: ["tcp://192.0.2.1:9"]  # type: ignore[assignment]
        runtime_of(nodes[1]).connector._stopped = True
        calls: list[Any] = []
        # On the I/O thread, as soon as there is no connection: nobody has been given up by then.
        changes: Any = runtime_of(nodes[0]).member_changes
        changes.on_interrupted = lambda info, why: calls.append(nodes[0].rpc_async("w1", run, (1,)))
        runtime_of(nodes[0]).links.peers.remotes[1].link.interrupt("it is silent")
        wait_until(lambda: calls)
        with pytest.raises(PeerDead, match="not sent") as caught:
            calls[0].wait()
        assert caught.value.delivery == Delivery.NOT_SENT
        leave(nodes)


# ---------------------------------------------------------------------- deaths


def die_while_down(rank: int, path: str, faults: Faults) -> Any:
    if rank == 1:
        time.sleep(300.0)
    if rank == 2:
        return None
    victim = farcall.rpc_sync("w1", os.getpid)
    future = farcall.rpc_async("w1", touch_and_sleep, (path,), timeout=None)
    wait_until(lambda: os.path.exists(path))
    rule = faults.cut(to="w1", count=None)
    rule.wait_hits(2)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    with pytest.raises(PeerDead):
        future.wait()
    took_s = time.monotonic() - killed_at
    assert farcall.rpc_sync("w2", os.getpid) > 0
    return took_s


def touch_and_sleep(path: str) -> None:
    Path(path).touch()
    time.sleep(300.0)


@pytest.mark.parametrize("transport", KEPT)
def test_a_member_killed_while_there_is_no_connection_is_noticed(tmp_path: Path, transport: str) -> None:
    faults = Faults()
    members = start_cluster(
        3, die_while_down, str(tmp_path / "runs"), faults, faults=faults, transports=(transport,), membership=PATIENT
    )
    took_s = finish(members, may_fail=[1])[0]
    assert took_s < AT_ONCE_S  # the pause between two attempts is a second at most


def be_replaced(rank: int, faults: Faults) -> str | None:
    node = api.current_runtime()
    if rank == 1:
        time.sleep(300.0)
    victim = farcall.rpc_sync("w1", os.getpid)
    (address,) = [
        way for member in node.membership.members if member.rank == 1 for way in member.addresses if "tcp:" in way
    ]
    future = farcall.rpc_async("w1", time.sleep, (300.0,), timeout=None)
    rule = faults.cut(to="w1", count=None)
    rule.wait_hits(3)
    os.kill(victim, signal.SIGKILL)
    squatter = socket.socket()
    squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = int(address.rpartition(":")[2])
    wait_until(lambda: binds(squatter, port))
    squatter.listen()
    squatter.settimeout(PATIENCE_S)

    def speak_of_something_else() -> None:
        try:
            while True:
                stream, _ = squatter.accept()
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        except OSError:
            pass

    stranger = threading.Thread(target=speak_of_something_else)
    stranger.start()
    with pytest.raises(PeerDead) as caught:
        future.wait()
    squatter.shutdown(socket.SHUT_RDWR)
    squatter.close()
    stranger.join()
    return str(caught.value)


def binds(squatter: socket.socket, port: int) -> bool:
    try:
        squatter.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def test_another_process_at_the_address_of_a_dead_member_is_not_it() -> None:
    faults = Faults()
    text = finish(start_cluster(2, be_replaced, faults, faults=faults, transports=("tcp",)), may_fail=[1])[0]
    assert "HTTP" in text or "refused" in text


def most_runs() -> int:
    return max(ran.values())


def freeze_and_cut(rank: int, faults: Faults) -> int:
    if rank:
        return 0
    victim = farcall.rpc_sync("w1", os.getpid)
    under_way = farcall.rpc_async("w1", time.sleep, (0.5,))
    stop(victim)
    try:
        rule = faults.cut(to="w1")
        rule.wait_hits()
        calls = [farcall.rpc_async("w1", run, (number,)) for number in range(3)]
        wait_until(lambda: not api.current_runtime().other(1).link.up)  # type: ignore[union-attr]
    finally:
        os.kill(victim, signal.SIGCONT)
    assert [call.wait() for call in calls] == [0, 1, 2]
    assert under_way.wait() is None
    return farcall.rpc_sync("w1", most_runs)


@pytest.mark.parametrize("transport", KEPT)
def test_a_frozen_member_whose_connection_is_cut_goes_on_when_it_thaws(transport: str) -> None:
    faults = Faults()
    assert run_cluster(2, freeze_and_cut, faults, faults=faults, transports=(transport,))[0] == 1


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("transport", KEPT)
def test_shutdown_waits_for_nobody_while_there_is_no_connection(transport: str) -> None:
    faults = Faults()
    with team(faults, transports=(transport,), membership=PATIENT) as nodes:
        call = nodes[0].rpc_async("w1", wait_for_the_test)
        assert reached.wait(PATIENCE_S)
        faults.cut(count=None).wait_hits(2)
        may_end.set()
        began = time.monotonic()
        leave(nodes)
        assert time.monotonic() - began < AT_ONCE_S
        with pytest.raises(RuntimeError, match=r"shut down|gone|left"):
            call.wait()


def test_a_graceful_shutdown_waits_for_the_connection_and_ends() -> None:
    faults = Faults()
    with team(faults):
        rule = faults.cut(count=None)
        rule.wait_hits(2)
        rule.lift()
        # and now both leave gracefully


def fork_while_down(rank: int, faults: Faults) -> list[str]:
    if rank:
        return []
    with faults.cut(to="w1", count=None) as rule:
        rule.wait_hits(2)
        call = farcall.rpc_async("w1", os.getpid)
        outcomes = [in_a_fork(try_to_call) for _ in range(3)]
    assert call.wait() > 0
    assert farcall.rpc_sync("w1", os.getpid) > 0
    return outcomes


def try_to_call() -> str:
    with pytest.raises(NotInitialized) as caught:
        farcall.rpc_sync("w1", os.getpid)
    return str(caught.value)


def test_a_fork_while_there_is_no_connection_disturbs_nobody() -> None:
    faults = Faults()
    outcomes = run_cluster(2, fork_while_down, faults, faults=faults)[0]
    assert all("forked" in text for text in outcomes)


# ---------------------------------------------------------------------- for long


@pytest.mark.skipif(os.environ.get("FARCALL_SOAK") != "full", reason="takes minutes: FARCALL_SOAK=full")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
def test_random_cuts_for_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.faults.test_reconnect.CUTS", 1000)
    source = random.Random(seed)
    for test in (
        test_every_small_call_ends_with_its_result_and_runs_once,
        test_a_large_call_ends_with_its_result_or_says_truly_what_became_of_it,
    ):
        ran.clear()
        test(source.choice(KEPT))
    test_references_come_back_to_nothing()
