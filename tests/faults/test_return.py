"""Ways back into a group: of a worker that was replaced, and of one that was declared dead and lives."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.kit.team import together
from tests.kit.waiting import wait_until

import farcall
from farcall import autograd
from farcall.errors import BadRank, Expelled, PeerDead, ReferenceLost
from farcall.options import MembershipOptions
from farcall.protocol.membership.events import LinkGivenUp
from farcall.runtime.node import Runtime, rejoin, runtime_of
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.testing.cluster import WorkerProcess, start_processes, temporary_file_url

both = pytest.mark.parametrize("size", [3, None], ids=["static", "dynamic"])


def _serve(rank: int, url: str, size: int, report: str) -> None:
    """A worker that stays in its graceful shutdown, or fails if its file appears."""
    node = farcall.Node(f"w{rank + 1}", rank + 1, size, farcall.RpcBackendOptions(init_method=url))
    node.start()
    open(f"{report}/up-{rank + 1}", "w").close()
    node.shutdown()


@contextmanager
def served(size: int, report: str) -> Iterator[tuple[str, farcall.Node, list[WorkerProcess]]]:
    """A group of fixed size: this process is w0, the others serve until all have called shutdown."""
    url = temporary_file_url()
    others = start_processes(size - 1, _serve, url, size, report)
    node = farcall.Node("w0", 0, size, farcall.RpcBackendOptions(init_method=url))
    try:
        node.start()
        wait_until(lambda: all(os.path.exists(f"{report}/up-{rank}") for rank in range(1, size)))
        yield url, node, others
    finally:
        node.shutdown(graceful=False)
        for other in others:
            other.end()


may_end = threading.Event()


def _wait() -> None:
    may_end.wait(60)


def _call(to: str) -> int:
    result: int = farcall.rpc_sync(to, int, ("7",))
    return result


def _reaches(name: str, incarnation: int) -> bool:
    """On a worker: does it know that member of that name, which had another before, and is it connected to it?"""
    return _knows(farcall.api.current_runtime(), name, incarnation)


def _knows(here: Runtime, name: str, incarnation: int) -> bool:
    peer = here.peer(name)
    return peer.incarnation == incarnation and not peer.broken


def wait_until_known(new: farcall.Node, to: farcall.Node, through: tuple[str, ...] = ()) -> None:
    """Until ``to`` knows the successor ``new``, and so do the workers ``through``."""
    name, incarnation = runtime_of(new).info.name, runtime_of(new).me.incarnation
    wait_until(lambda: _knows(runtime_of(to), name, incarnation))
    for other in through:
        wait_until(lambda other=other: to.rpc_sync(other, _reaches, (name, incarnation)))  # type: ignore[misc]


def _successor(rank: int, url: str, size: int | None) -> farcall.Node:
    return farcall.Node(f"w{rank}", rank, size, farcall.RpcBackendOptions(init_method=url))


def test_a_killed_worker_is_replaced_in_a_group_of_fixed_size(tmp_path: Any) -> None:
    """The group goes on with the new one, and nothing of the old one reaches it."""
    with served(3, str(tmp_path)) as (url, node, others):
        old = node.remote("w2", torch.ones, (2,))
        old.to_here()
        others[1].kill(signal.SIGKILL)
        others[1].process.join()
        with _successor(2, url, 3) as new:
            assert [worker.name for worker in new.workers()] == ["w0", "w1", "w2"]
            wait_until_known(new, node)
            assert node.rpc_sync("w2", int, ("7",)) == 7
            assert new.rpc_sync("w1", int, ("8",)) == 8
            wait_until_known(new, node, through=("w1",))
            assert node.rpc_sync("w1", _call, ("w2",)) == 7
            with pytest.raises(ReferenceLost):
                old.to_here()
            held = node.remote("w2", torch.zeros, (2,))
            assert held.to_here().tolist() == [0.0, 0.0]
            assert new.rpc_sync("w1", torch.add, (new.remote("w0", torch.ones, (2,)).to_here(), 1)).tolist() == [2, 2]
            del held
            together([lambda: node.barrier(["w0", "w2"]), lambda: new.barrier(["w0", "w2"])])
            together([node.shutdown, new.shutdown])
        others[0].process.join(60)
        assert others[0].process.exitcode == 0


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _train(callee: str) -> list[float]:
    """On a worker: the gradient of what another one computes."""
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = farcall.rpc_sync(callee, _double, (x,))
        autograd.backward(context_id, [y.sum()])
        gradient: list[float] = autograd.get_gradients(context_id)[x].tolist()
        return gradient


def test_a_backward_pass_goes_through_a_worker_that_was_replaced(tmp_path: Any) -> None:
    with served(3, str(tmp_path)) as (url, node, others):
        others[1].kill(signal.SIGKILL)
        others[1].process.join()
        with _successor(2, url, 3) as new:
            wait_until_known(new, node, through=("w1",))
            assert node.rpc_sync("w1", _train, ("w2",)) == [2.0, 2.0, 2.0]
            assert node.rpc_sync("w2", _train, ("w1",)) == [2.0, 2.0, 2.0]
            together([node.shutdown, new.shutdown])


def test_a_successor_under_another_name_is_one_member_not_two(tmp_path: Any) -> None:
    with served(3, str(tmp_path)) as (url, node, others):
        others[1].kill(signal.SIGKILL)
        others[1].process.join()
        with farcall.Node("another", 2, 3, farcall.RpcBackendOptions(init_method=url)) as new:
            wait_until(lambda: "another" in [worker.name for worker in node.workers()])
            assert [worker.name for worker in node.workers()] == ["w0", "w1", "another"]
            with pytest.raises(PeerDead, match="w2"):
                node.rpc_sync("w2", int, ("7",))
            together([node.shutdown, new.shutdown])


def test_a_successor_without_the_store_names_a_member(tmp_path: Any) -> None:
    with served(2, str(tmp_path)) as (_, node, others):
        others[0].kill(signal.SIGKILL)
        others[0].process.join()
        (address,) = [one for one in runtime_of(node).addresses if one.startswith("tcp")]
        url = "farcall://" + address.partition("://")[2]
        for size in (None, 3):
            with pytest.raises(BadRank, match="world_size"), _successor(1, url, size):
                pass
        with _successor(1, url, 2) as new:
            wait_until_known(new, node)
            assert node.rpc_sync("w1", int, ("7",)) == 7
            together([node.shutdown, new.shutdown])


def test_who_leaves_a_group_of_fixed_size_and_comes_again_meets_the_others_anew() -> None:
    """A leave ends the group, so nobody is let into what is left of it."""
    url = temporary_file_url()
    for _ in range(3):
        nodes = [_successor(rank, url, 3) for rank in range(3)]
        together([node.start for node in nodes])
        assert nodes[0].rpc_sync("w2", int, ("7",)) == 7
        nodes[1].shutdown(graceful=False)
        again = _successor(1, url, 3)
        starts = threading.Thread(target=again.start)
        starts.start()
        nodes[0].shutdown(graceful=False)
        nodes[2].shutdown(graceful=False)
        others = [_successor(rank, url, 3) for rank in (0, 2)]
        together([node.start for node in others])
        starts.join(60)
        assert again.rpc_sync("w2", int, ("7",)) == 7
        together([node.shutdown for node in (again, *others)])


@contextmanager
def group(size: int | None, **options: Any) -> Iterator[list[farcall.Node]]:
    """Three nodes of this process, of a group of either kind."""
    url = temporary_file_url()
    chosen = farcall.RpcBackendOptions(init_method=url, membership=MembershipOptions(**options))
    nodes = [farcall.Node(f"w{rank}", rank, size, chosen) for rank in range(3)]
    together([node.start for node in nodes])
    wait_until(lambda: all(len(node.workers()) == 3 for node in nodes))
    try:
        yield nodes
    finally:
        for node in nodes:
            node.shutdown(graceful=False)


def declare_dead(victim: farcall.Node, by: farcall.Node) -> None:
    """As after a partition: the others hold a member for dead that lives."""
    incarnation, judge = runtime_of(victim).me.incarnation, runtime_of(by)
    judge.call_soon(lambda: judge.watch.feed(LinkGivenUp(incarnation, "for the test")))


def back(node: farcall.Node, before: object) -> Callable[[], bool]:
    return lambda: runtime_of(node) is not before and runtime_of(node).running


@both
def test_who_was_expelled_finds_back_in(size: int | None) -> None:
    with group(size) as nodes:
        seen: list[tuple[str, str]] = []
        nodes[1].on_member(lambda event: seen.append((event.kind, event.worker.name)))
        before = runtime_of(nodes[1])
        handle = nodes[1]["w2"]
        its_own, held_by_it = nodes[0].remote("w1", torch.ones, (2,)), nodes[1].remote("w2", torch.ones, (2,))
        its_own.to_here(), held_by_it.to_here()
        may_end.clear()
        under_way = nodes[1].rpc_async("w2", _wait)
        declare_dead(nodes[1], by=nodes[0])
        with pytest.raises((Expelled, PeerDead)):  # w2 may hear of it, and be gone, before w1 knows why
            under_way.wait()
        may_end.set()
        wait_until(back(nodes[1], before))
        assert re.search("for the test.*joins again", str(before.lifecycle.verdict))
        after = runtime_of(nodes[1])
        assert after.me.incarnation != before.me.incarnation
        wait_until(lambda: ("rejoined", "w1") in seen)
        for other in (0, 2):
            here = runtime_of(nodes[other])
            wait_until(lambda here=here: here.peer("w1").incarnation == after.me.incarnation)  # type: ignore[misc]
            assert nodes[other].rpc_sync("w1", int, ("7",)) == 7
            assert nodes[1].rpc_sync(f"w{other}", int, ("8",)) == 8
        assert handle.call(int, "9") == 9
        with pytest.raises(ReferenceLost):
            its_own.to_here()
        with pytest.raises((Expelled, ReferenceLost)):
            held_by_it.to_here()
        with pytest.raises(Expelled, match="for the test"):
            nodes[1].rpc_sync("w2", len, (held_by_it,))
        assert nodes[0].remote("w1", torch.zeros, (1,)).to_here().tolist() == [0.0]
        together([node.shutdown for node in nodes])


def test_the_node_of_init_rpc_finds_back_in() -> None:
    url = temporary_file_url()
    other = farcall.Node("other", 1, 2, farcall.RpcBackendOptions(init_method=url))
    options = farcall.RpcBackendOptions(init_method=url)
    together([lambda: farcall.init_rpc("me", rank=0, world_size=2, rpc_backend_options=options), other.start])
    before = farcall.api.current_runtime()
    farcall.api._set_rpc_timeout(17.0)
    judge = runtime_of(other)
    judge.call_soon(lambda: judge.watch.feed(LinkGivenUp(before.me.incarnation, "for the test")))
    wait_until(lambda: farcall.api.current_runtime() is not before)
    assert farcall.api.get_rpc_timeout() == 17.0
    assert farcall.rpc_sync("other", int, ("7",)) == 7
    together([farcall.shutdown, other.shutdown])
    with pytest.raises(farcall.errors.NotInitialized):
        farcall.rpc_sync("other", int, ("7",))


def test_who_comes_back_is_expelled_again_and_comes_back_again() -> None:
    with group(3) as nodes:
        for _ in range(3):
            before = runtime_of(nodes[2])
            declare_dead(nodes[2], by=nodes[0])
            wait_until(back(nodes[2], before))
            after = runtime_of(nodes[2]).me.incarnation
            wait_until(lambda after=after: runtime_of(nodes[0]).peer("w2").incarnation == after)  # type: ignore[misc]
            assert nodes[0].rpc_sync("w2", int, ("7",)) == 7
        # Of those that came later nothing is left but the last; references name the first by its rank.
        wait_until(lambda: len(runtime_of(nodes[0]).members()) == 4)
        together([node.shutdown for node in nodes])


def test_a_worker_that_serves_in_shutdown_finds_back_in_and_serves_on() -> None:
    """As most workers spend their lives: its shutdown() returns with that of all, and raises nothing."""
    with group(3) as nodes:
        ends: list[BaseException | None] = []

        def serve() -> None:
            try:
                nodes[1].shutdown()
                ends.append(None)
            except BaseException as error:
                ends.append(error)

        before = runtime_of(nodes[1])
        serving = threading.Thread(target=serve)
        serving.start()
        wait_until(lambda: before.leaving.entered)
        for _ in range(2):
            before = runtime_of(nodes[1])
            declare_dead(nodes[1], by=nodes[0])
            wait_until(back(nodes[1], before))
            after = runtime_of(nodes[1]).me.incarnation
            wait_until(lambda after=after: runtime_of(nodes[0]).peer("w1").incarnation == after)  # type: ignore[misc]
            assert nodes[0].rpc_sync("w1", int, ("7",)) == 7
            wait_until(lambda: runtime_of(nodes[1]).leaving.entered)
        assert not ends
        together([nodes[0].shutdown, nodes[2].shutdown])
        serving.join(60)
        assert ends == [None]


def test_a_worker_that_serves_in_shutdown_raises_where_it_is_to_stay_out() -> None:
    with group(3, rejoin=False) as nodes:
        before = runtime_of(nodes[1])
        ends: list[BaseException] = []

        def serve() -> None:
            with pytest.raises(Expelled) as caught:
                nodes[1].shutdown()
            ends.append(caught.value)

        serving = threading.Thread(target=serve)
        serving.start()
        wait_until(lambda: before.leaving.entered)
        declare_dead(nodes[1], by=nodes[0])
        serving.join(60)
        assert len(ends) == 1


def test_a_shutdown_that_meets_an_expulsion_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that hears of the expulsion first leaves at once: it must not join again to wait for all the others."""
    with group(3) as nodes:
        before = runtime_of(nodes[1])
        end, ends = before.calls.end, []

        def leave() -> None:
            with pytest.raises(Expelled):
                nodes[1].shutdown(graceful=False)
            ends.append(runtime_of(nodes[1]))

        leaves = threading.Thread(target=leave)

        def end_and_leave(verdict: Any) -> None:
            if leaves.ident is None:
                leaves.start()
                wait_until(lambda: before.lifecycle.state != "running")
            end(verdict)

        monkeypatch.setattr(before.calls, "end", end_and_leave)
        declare_dead(nodes[1], by=nodes[0])
        wait_until(lambda: ends)
        leaves.join(60)
        assert ends == [before]


def test_iterators_over_events_end_with_the_node_not_with_a_membership() -> None:
    async def kinds(node: farcall.Node) -> list[str]:
        return [event.kind async for event in node.member_events()]

    with group(None) as nodes:
        before = runtime_of(nodes[1])
        heard: list[str] = []
        listens = threading.Thread(target=lambda: heard.extend(asyncio.run(kinds(nodes[1]))))
        listens.start()
        wait_until(lambda: before.member_events._callbacks)
        told: list[str] = []
        nodes[1].on_member(lambda event: told.append(event.kind))  # after the iterator
        declare_dead(nodes[1], by=nodes[0])
        wait_until(lambda: "rejoined" in told)
        nodes[1].shutdown()
        listens.join(60)
        assert not listens.is_alive()
        assert "rejoined" in heard


def test_shutdown_ends_the_search_for_a_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejoin, "FIRST_RETURN_S", 600.0)
    monkeypatch.setattr(rejoin, "LONGEST_RETURN_S", 600.0)
    with group(3) as nodes:
        declare_dead(nodes[1], by=nodes[0])
        wait_until(lambda: not runtime_of(nodes[1]).running)
        nodes[1].shutdown()
        wait_until(lambda: not any(thread.name.endswith("-w1") for thread in threading.enumerate()))
        with pytest.raises(Expelled):
            nodes[1].rpc_sync("w0", int, ("7",))


def test_a_way_back_that_is_found_after_shutdown_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shutdown waits a while for an expelled node; who becomes a member afterwards must not stay one."""
    with group(3) as nodes:
        joined, goes_on = threading.Event(), threading.Event()
        found: list[Runtime] = []
        start = nodes[1]._start

        def start_late(*args: Any) -> Runtime:
            found.append(start(*args))
            joined.set()
            goes_on.wait(60)
            return found[0]

        monkeypatch.setattr(nodes[1], "_start", start_late)
        monkeypatch.setattr(Lifecycle, "wait_ended", lambda lifecycle, timeout_s: None)
        declare_dead(nodes[1], by=nodes[0])
        assert joined.wait(60)
        nodes[1].shutdown()
        goes_on.set()
        wait_until(lambda: not found[0].running)
        wait_until(lambda: not any(thread.name.endswith("-w1") for thread in threading.enumerate()))


def test_one_whose_user_does_not_want_it_stays_out() -> None:
    with group(3, rejoin=False) as nodes:
        declare_dead(nodes[1], by=nodes[0])
        wait_until(lambda: not runtime_of(nodes[1]).running)
        with pytest.raises(Expelled, match=r"call shutdown\(\)"):
            nodes[1].rpc_sync("w0", int, ("7",))
