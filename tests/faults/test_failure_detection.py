"""Who is dead, and how soon everybody knows: killed and stopped processes in groups of either kind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from tests.kit.stopping import stop
from tests.kit.times import AT_ONCE_S, LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
import farcall.protocol.connector
from farcall.errors import Delivery, Expelled, NotInitialized, PeerDead
from farcall.options import MembershipOptions
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import WorkerProcess, start_processes, temporary_file_url

BOUND_S = 40.0
QUICK = MembershipOptions(probe_interval_s=0.2, probe_timeout_s=0.1, suspicion_s=1.0, unresponsive_s=1.0, rejoin=False)


def _serve(rank: int, url: str, size: int | None, options: dict[str, Any], report: str) -> None:
    """A worker that serves until its file is gone, or until it is expelled; what became of it is written there."""
    node = farcall.Node(f"w{rank + 1}", rank + 1, size, farcall.RpcBackendOptions(init_method=url, **options))
    node.start()
    with open(f"{report}/{rank + 1}", "w") as file:
        file.write("up")
    while os.path.exists(f"{report}/{rank + 1}"):
        sleep(0.01)
        if not runtime_of(node).running:
            try:
                node.rpc_sync("w0", int, ("1",))
            except Expelled as error:
                with open(f"{report}/expelled-{rank + 1}.part", "w") as file:
                    file.write(str(error))
                os.rename(f"{report}/expelled-{rank + 1}.part", f"{report}/expelled-{rank + 1}")
            return
    node.shutdown(graceful=False)


class Cluster:
    def __init__(self, node: farcall.Node, others: list[WorkerProcess], report: str) -> None:
        self.node = node
        self.others = others
        self.report = report
        self.events: list[tuple[str, str]] = []
        self.node.on_member(lambda event: self.events.append((event.kind, event.worker.name)))

    def signal(self, name: str, number: int) -> None:
        self.others[int(name[1:]) - 1].kill(number)

    def stop(self, name: str) -> None:
        stop(self.others[int(name[1:]) - 1].pid)


@contextmanager
def cluster(
    size: int, is_static: bool, report: str, *, of_others: dict[str, Any] | None = None, **options: Any
) -> Iterator[Cluster]:
    """This process is w0; the others serve, with ``of_others`` for options if they are given."""
    url = temporary_file_url()
    fixed = size if is_static else None
    others = start_processes(size - 1, _serve, url, fixed, options if of_others is None else of_others, report)
    node = farcall.Node("w0", 0, fixed, farcall.RpcBackendOptions(init_method=url, **options))
    try:
        node.start()
        wait_until(lambda: len(node.workers()) == size)
        wait_until(lambda: all(os.path.exists(f"{report}/{rank}") for rank in range(1, size)))
        yield Cluster(node, others, report)
    finally:
        node.shutdown(graceful=False)
        for member in others:
            member.kill(signal.SIGCONT)
            member.end()


both = pytest.mark.parametrize("is_static", [True, False], ids=["static", "dynamic"])


@both
def test_a_killed_member_is_dead_to_all_at_once(is_static: bool, tmp_path: Any) -> None:
    """Though its silence alone would not tell before the test is over: that it was killed shows."""
    with cluster(4, is_static, str(tmp_path), membership=PATIENT) as found:
        pending = found.node.rpc_async("w3", sleep, (60,))
        assert found.node.rpc_sync("w3", int, ("7",)) == 7  # so that the one before it has been sent
        found.node.rpc_sync("w1", _listen)  # before the death: nobody is told of it again
        seen = found.node.rpc_async("w1", _wait_for_death, ("w3",))
        found.signal("w3", signal.SIGKILL)
        with pytest.raises(PeerDead) as caught:
            pending.wait()
        assert caught.value.worker == farcall.WorkerInfo("w3", 3)
        assert caught.value.incarnation
        assert caught.value.delivery is Delivery.UNKNOWN
        assert seen.wait() == "dead"
        wait_until(lambda: ("dead", "w3") in found.events)
        if not is_static:
            assert [info.name for info in found.node.workers()] == ["w0", "w1", "w2"]
        with pytest.raises(PeerDead):
            found.node.rpc_sync("w3", int, ("1",))
        assert found.node.rpc_sync("w2", int, ("7",)) == 7


def test_the_death_of_one_that_dialled_is_known_without_a_pause(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host; the pause that is left to one that lives, to dial again, would outlast the test."""
    monkeypatch.setattr(farcall.protocol.connector, "FIRST_PAUSE_S", 10 * LONG_S)
    with cluster(2, True, str(tmp_path), membership=PATIENT) as found:
        since = monotonic()
        with pytest.raises(PeerDead, match="has ended"):
            found.node.rpc_sync("w1", _die_deaf)
        assert monotonic() - since < AT_ONCE_S


def _die_deaf() -> None:
    """On a worker: end at once, the listeners first.

    The kernel may close the connections of a killed process first; a peer that looks just then finds a listener.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=int(name))
        except OSError:
            continue  # no socket
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.close()
        else:
            found.detach()
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_death(name: str) -> str:
    """On a worker: how ``name`` ends, as it learns it."""
    ends: list[str] = []
    wait_until(lambda: ends.extend(kind for kind, who in heard if who == name and kind in ("dead", "left")) or ends)
    return ends[0]


heard: list[tuple[str, str]] = []


def _listen() -> None:
    """On a worker: hear of members from now on."""
    farcall.on_member(lambda event: heard.append((event.kind, event.worker.name)))


@both
def test_a_stopped_member_is_not_dead(is_static: bool, tmp_path: Any) -> None:
    """However long: its suspicion is over twice before it comes back."""
    with cluster(3, is_static, str(tmp_path), membership=replace(QUICK, unresponsive_s=None)) as found:
        found.stop("w2")
        call = found.node.rpc_async("w2", int, ("7",), timeout=BOUND_S)
        wait_until(lambda: ("unresponsive", "w2") in found.events)
        wait_until(lambda: (found.node.members()[2].unresponsive_s or 0.0) > 3 * QUICK.suspicion_s)
        # On a busy machine w1 may be late for a moment.
        wait_until(lambda: [member.unresponsive_s for member in found.node.members()[:2]] == [None, None])
        wait_until(lambda: found.node.metrics().unresponsive.keys() == {"w2"})
        assert not call.done()
        found.signal("w2", signal.SIGCONT)
        assert call.wait() == 7
        wait_until(lambda: ("recovered", "w2") in found.events)
        assert ("dead", "w2") not in found.events


@both
def test_a_stopped_member_is_declared_dead_and_learns_it_where_the_user_wants_that(
    is_static: bool, tmp_path: Any
) -> None:
    # On a busy machine w1 may be silent for a while, too, or hear nobody: it gives nobody up by itself.
    patient = replace(QUICK, suspicion_s=6.0, unresponsive_s=6.0)
    of_others = {"membership": replace(patient, unresponsive_s=None)}
    with cluster(3, is_static, str(tmp_path), membership=patient, of_others=of_others) as found:
        found.stop("w2")
        call = found.node.rpc_async("w2", int, ("7",), timeout=BOUND_S)
        with pytest.raises(PeerDead):
            call.wait()
        wait_until(lambda: ("dead", "w2") in found.events)
        assert found.events.index(("unresponsive", "w2")) < found.events.index(("dead", "w2"))
        assert found.node.rpc_sync("w1", int, ("7",)) == 7
        found.signal("w2", signal.SIGCONT)
        wait_until(lambda: os.path.exists(f"{found.report}/expelled-2"))
        assert found.node.rpc_sync("w1", int, ("7",)) == 7
        assert runtime_of(found.node).running


def test_events_can_be_iterated_over(tmp_path: Any) -> None:
    with cluster(3, False, str(tmp_path)) as found:

        async def first_death() -> str:
            async for event in found.node.member_events():
                if event.kind == "dead":
                    return event.worker.name
            raise AssertionError("the node ended first")

        async def kill_and_hear() -> str:
            task = asyncio.ensure_future(first_death())
            await asyncio.sleep(0)  # it listens from here on
            found.signal("w1", signal.SIGKILL)
            return await asyncio.wait_for(task, BOUND_S)

        assert asyncio.run(kill_and_hear()) == "w1"


def test_a_name_is_free_again_after_a_death(tmp_path: Any) -> None:
    """And what belonged to the dead one never reaches the new one."""
    with cluster(3, False, str(tmp_path)) as found:
        old = found.node.remote("w2", torch.ones, (2,))
        old.to_here()
        found.signal("w2", signal.SIGKILL)
        found.others[1].process.join()
        options = farcall.RpcBackendOptions(init_method=runtime_of(found.node).options.init_method)
        with farcall.Node("w2", 2, options=options) as new:
            wait_until(lambda: found.events.count(("joined", "w2")) == 1)
            assert ("dead", "w2") in found.events
            assert found.node.rpc_sync("w2", int, ("7",)) == 7
            assert found.node.remote("w2", torch.zeros, (2,)).to_here().tolist() == [0.0, 0.0]
            with pytest.raises(farcall.errors.ReferenceLost):
                old.to_here()
            assert new.rpc_sync("w1", int, ("8",)) == 8
        with pytest.raises(NotInitialized):
            new.rpc_sync("w1", int, ("8",))


def test_one_that_recovers_after_its_link_was_given_up_has_to_go() -> None:
    url = temporary_file_url()
    options = farcall.RpcBackendOptions(init_method=url, membership=MembershipOptions(rejoin=False))
    nodes = [farcall.Node(f"w{rank}", rank, options=options) for rank in range(3)]
    for node in nodes:
        node.start()
    wait_until(lambda: all(len(node.workers()) == 3 for node in nodes))
    events: list[tuple[str, str]] = []
    nodes[0].on_member(lambda event: events.append((event.kind, event.worker.name)))
    incarnation = runtime_of(nodes[1]).me.incarnation
    here = runtime_of(nodes[0])
    here.call_soon(lambda: here.connector.give_up(here.links.peers.remotes[1], "for the test"))
    wait_until(lambda: runtime_of(nodes[0]).is_gone("w1", runtime_of(nodes[1]).me.incarnation))
    record = runtime_of(nodes[0]).watch.member_of(incarnation)
    assert record is not None
    runtime_of(nodes[0]).call_soon(lambda: runtime_of(nodes[0]).links.peers.on_unresponsive(record, False))
    wait_until(lambda: ("dead", "w1") in events)
    wait_until(lambda: not runtime_of(nodes[1]).running)
    with pytest.raises(Expelled, match="w0 could not reach it"):
        nodes[1].rpc_sync("w2", int, ("1",))
    assert nodes[0].rpc_sync("w2", int, ("7",)) == 7
    for node in nodes:
        node.shutdown(graceful=False)


def test_who_comes_in_while_a_node_ends_is_shown_out() -> None:
    url = temporary_file_url()
    options = farcall.RpcBackendOptions(init_method=url)
    ends, stays = farcall.Node("ends", 0, options=options), farcall.Node("stays", 1, options=options)
    ends.start()
    stays.start()
    came: list[Any] = []

    def connect() -> None:
        wait_until(lambda: runtime_of(stays).is_gone("ends", runtime_of(ends).me.incarnation))
        runtime_of(stays).call_soon(lambda: runtime_of(stays).connector.dial(runtime_of(ends).membership.me))
        wait_until(lambda: runtime_of(ends).links.peers._strangers)
        came.extend(runtime_of(ends).links.peers._strangers.values())

    runtime_of(ends).hooks.ended.append(connect)
    ends.shutdown(graceful=False)
    assert [peer.link.transport.closed for peer in came] == [True]
    stays.shutdown(graceful=False)


def test_one_that_is_expelled_while_it_shuts_down_says_so() -> None:
    url = temporary_file_url()
    options = farcall.RpcBackendOptions(init_method=url, membership=MembershipOptions(rejoin=False))
    nodes = [farcall.Node(f"w{rank}", rank, 2, options) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(farcall.Node.start, nodes))
        leaves = pool.submit(nodes[0].shutdown)
        wait_until(lambda: runtime_of(nodes[0]).leaving.entered)  # it waits for w1, which stays
        runtime_of(nodes[0]).call_soon(lambda: runtime_of(nodes[0]).ending.on_expelled("for the test"))
        with pytest.raises(Expelled):
            leaves.result(BOUND_S)
        nodes[1].shutdown(graceful=False)


def test_the_shutdown_of_one_that_was_expelled_waits_for_its_end() -> None:
    url = temporary_file_url()
    node = farcall.Node("w0", 0, options=farcall.RpcBackendOptions(init_method=url))
    node.start()
    may_end = threading.Event()
    runtime_of(node).hooks.ended.append(may_end.wait)  # type: ignore[arg-type]
    runtime_of(node).call_soon(lambda: runtime_of(node).ending.on_expelled("for the test"))
    wait_until(lambda: not runtime_of(node).running)
    with pytest.raises(Expelled):
        node.rpc_sync("w0", int, ("1",))
    leaves = threading.Thread(target=node.shutdown)
    leaves.start()
    leaves.join(0.2)
    assert leaves.is_alive()
    may_end.set()
    leaves.join(BOUND_S)
    wait_until(lambda: not any(thread.name.endswith("-w0") for thread in threading.enumerate()))
