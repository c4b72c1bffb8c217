"""Groups without a fixed size: members join and leave while the others go on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from time import sleep
from typing import Any

import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.autograd.recorder import Recorder
from farcall.errors import (
    BadRank,
    Delivery,
    DuplicateName,
    Expelled,
    InitError,
    PeerDead,
    ReferenceLost,
    RpcError,
    UnknownWorker,
)
from farcall.options import MemoryOptions
from farcall.protocol.member import new_incarnation
from farcall.rpc.gather import _contribute
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.node import rejoin, runtime_of
from farcall.runtime.peers import table as peer_table
from farcall.runtime.rendezvous.dynamic import Search
from farcall.testing.cluster import finish, start_processes, temporary_file_url

BOUND_S = 30.0


@pytest.fixture
def url() -> str:
    return temporary_file_url()


def member(name: str, rank: int, url: str, **options: Any) -> farcall.Node:
    return farcall.Node(name, rank, options=farcall.RpcBackendOptions(init_method=url, **options))


def names(node: farcall.Node) -> list[str]:
    return [info.name for info in node.workers()]


@contextmanager
def team(size: int, url: str, **options: Any) -> Iterator[list[farcall.Node]]:
    """``size`` members in this process, one after the other."""
    with ExitStack() as stack:
        nodes = [member(f"w{rank}", rank, url, **options) for rank in range(size)]
        for node in nodes:
            node.start()
            stack.callback(node.shutdown, False)
        yield nodes


def test_members_join_call_and_leave(url: str) -> None:
    with team(3, url) as nodes:
        for node in nodes:
            wait_until(lambda node=node: names(node) == ["w0", "w1", "w2"])
            for to in ("w0", "w1", "w2"):
                assert node.rpc_sync(to, torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
        nodes[1].shutdown()
        for node in (nodes[0], nodes[2]):
            wait_until(lambda node=node: names(node) == ["w0", "w2"])
        assert nodes[0].rpc_sync("w2", int, ("7",)) == 7


def test_who_starts_asks_for_its_neighbours_where_they_change(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the I/O thread: elsewhere, an answer that is just out of date would be kept."""
    asked: list[bool] = []
    neighbours = FailureDetector.neighbours

    def noted(self: FailureDetector) -> frozenset[int]:
        asked.append(self._loop.on_thread())
        return neighbours(self)

    monkeypatch.setattr(FailureDetector, "neighbours", noted)
    with team(2, url) as nodes:
        assert nodes[1].rpc_sync("w0", int, ("7",)) == 7
    assert asked
    assert all(asked)


def test_rank_0_leaves_and_the_others_go_on(url: str) -> None:
    with team(3, url) as nodes:
        nodes[0].shutdown()
        wait_until(lambda: names(nodes[1]) == ["w1", "w2"])
        assert nodes[1].rpc_sync("w2", int, ("7",)) == 7
        late = member("late", 7, url)
        with late:
            assert late.rpc_sync("w1", int, ("8",)) == 8
            wait_until(lambda: "late" in names(nodes[2]))
            assert nodes[2].rpc_sync("late", int, ("9",)) == 9


def test_a_taken_name_and_a_taken_rank_are_refused(url: str) -> None:
    with team(2, url) as nodes:
        with pytest.raises(DuplicateName, match="w1"):
            member("w1", 5, url).start()
        with pytest.raises(BadRank, match="rank 1"):
            member("other", 1, url).start()
        assert nodes[0].rpc_sync("w1", int, ("7",)) == 7


def _all_meet(rank: int, url: str, size: int) -> list[str]:
    farcall.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=farcall.RpcBackendOptions(init_method=url))
    node = api.current_runtime()
    wait_until(lambda: len(node.workers()) == size)
    farcall.rpc_sync(f"w{(rank + 1) % size}", int, ("7",))
    farcall.barrier([f"w{other}" for other in range(size)])
    farcall.shutdown()
    return [info.name for info in node.workers()]


def test_processes_that_start_together_found_one_group_at_the_store_of_rank_0() -> None:
    finish(start_processes(4, _all_meet, tcp_url(), 4))


def test_processes_that_start_together_found_one_group_at_a_file(url: str) -> None:
    finish(start_processes(4, _all_meet, url, 4))


# --- newcomers while others leave ------------------------------------------------------------------------------


def test_who_leaves_lets_newcomers_in_until_its_work_is_done(url: str) -> None:
    """Were it off the list by then, newcomers would found a second group beside it."""
    done = threading.Event()
    with ThreadPoolExecutor() as pool, team(1, url) as nodes:
        _events[id(done)] = done
        work = nodes[0].rpc_async("w0", _wait_for, (id(done),))
        leaves = pool.submit(nodes[0].shutdown)
        wait_until(lambda: runtime_of(nodes[0]).leaving.entered)
        with member("late", 1, url) as late:
            assert names(late) == ["w0", "late"]
            done.set()
            leaves.result(BOUND_S)
            assert work.wait()
            wait_until(lambda: names(late) == ["late"])


_events: dict[int, threading.Event] = {}


def _wait_for(event: int) -> bool:
    return _events.pop(event).wait(BOUND_S)


def test_nobody_founds_a_group_beside_one_that_is_being_let_in(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """w0 has let w2 in, which does not say so yet, and leaves. w1 is before w2 on the list."""
    is_listed, may_search, is_in, may_open = (threading.Event() for _ in range(4))
    search, look = Search.run, Search._look

    def run(self: Search, deadline: float) -> None:
        if self._me.name == "w1":
            is_listed.set()
            may_search.wait(BOUND_S)
        search(self, deadline)
        if self._me.name == "w2":
            is_in.set()
            may_open.wait(BOUND_S)

    def looked(self: Search, target: Any, deadline: float) -> bool | None:
        outcome = look(self, target, deadline)
        if (self._me.name, target.name) == ("w1", "w2"):
            may_open.set()
        return outcome

    monkeypatch.setattr(Search, "run", run)
    monkeypatch.setattr(Search, "_look", looked)
    with ThreadPoolExecutor() as pool, team(1, url) as (first,), ExitStack() as stack:
        nodes = [member(f"w{rank}", rank, url) for rank in (1, 2)]
        starts = []
        for node, reached in zip(nodes, (is_listed, is_in), strict=True):
            starts.append(pool.submit(node.start))
            stack.callback(node.shutdown, False)
            assert reached.wait(BOUND_S)
        first.shutdown()
        may_search.set()
        for start in starts:
            start.result(BOUND_S)
        for node in nodes:
            wait_until(lambda node=node: names(node) == ["w1", "w2"])


# --- the store dies ----------------------------------------------------------------------------------------

SECRET = "a secret of this test"


def tcp_address(node: farcall.Node) -> str:
    """The url by which others can join through ``node``."""
    (address,) = [way for way in runtime_of(node).membership.me.addresses if way.startswith("tcp://")]
    return address.replace("tcp://", "farcall://")


def test_a_member_whose_address_is_known_lets_others_in_without_a_store(url: str) -> None:
    with team(2, url, secret=SECRET) as nodes:
        os.unlink(url.removeprefix("file://"))
        with member("late", 2, tcp_address(nodes[1]), secret=SECRET) as late:
            assert late.rpc_sync("w0", int, ("7",)) == 7
            assert nodes[0].rpc_sync("late", int, ("8",)) == 8
        with pytest.raises(InitError, match="secret"):
            member("other", 3, tcp_address(nodes[1])).start()


def _serve_the_store(rank: int, url: str, gone: str) -> None:
    """Rank 0, which has the store, is the first to go."""
    options = farcall.RpcBackendOptions(init_method=url, secret=SECRET)
    node = farcall.Node(f"w{rank}", rank, options=options)
    node.start()
    wait_until(lambda: len(node.workers()) == 3)
    node.barrier(["w0", "w1", "w2"])
    if rank == 0:
        node.shutdown()
        open(gone, "w").close()
        return
    wait_until(lambda: os.path.exists(gone) and len(node.workers()) == 2)
    assert node.rpc_sync(f"w{3 - rank}", int, ("7",)) == 7
    if rank == 1:
        with member("late", 9, tcp_address(node), secret=SECRET) as late:
            assert late.rpc_sync("w2", int, ("8",)) == 8
    node.barrier(["w1", "w2"])
    node.shutdown()


def test_the_members_outlive_the_store(tmp_path: Any) -> None:
    url = tcp_url()
    finish(start_processes(3, _serve_the_store, url, str(tmp_path / "gone")))


# --- everything else works in such groups --------------------------------------------------------------------


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.factor * value


def _train(rank: int, url: str) -> None:
    farcall.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=farcall.RpcBackendOptions(init_method=url))
    wait_until(lambda: len(farcall.members()) == 3)
    farcall.barrier(["w0", "w1", "w2"])
    if rank == 0:
        modules = [farcall.nn.RemoteModule(name, Scale, (2.0,)) for name in ("w1", "w2")]
        references = [parameter for module in modules for parameter in module.remote_parameters()]
        optimizer = farcall.optim.DistributedOptimizer(torch.optim.SGD, references, lr=0.5)
        with farcall.autograd.context() as context_id:
            loss = sum(module.forward(torch.ones(())) for module in modules)
            farcall.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        assert [float(reference.to_here()) for reference in references] == [1.5, 1.5]
        nested = farcall.remote("w1", torch.ones, (2,))
        assert farcall.rpc_sync("w2", _fetch, (nested,)).tolist() == [1.0, 1.0]
        del modules, references, optimizer, nested, loss
    farcall.barrier(["w0", "w1", "w2"])
    farcall.shutdown()


def _fetch(reference: Any) -> Any:
    return reference.to_here()


def test_autograd_references_optimizer_and_remote_modules(url: str) -> None:
    finish(start_processes(3, _train, url))


def test_a_name_is_free_again_after_a_leave(url: str) -> None:
    """An old reference, an old context and old calls do not reach the new one."""
    with team(2, url) as nodes:
        old = member("again", 5, url)
        old.start()
        held = nodes[0].remote("again", torch.ones, (2,))
        held.to_here()
        mine = old.remote("w0", torch.ones, (3,))
        mine.to_here()
        old.shutdown()
        with member("again", 5, url) as new:
            assert nodes[0].rpc_sync("again", int, ("7",)) == 7
            assert nodes[1].rpc_sync(5, int, ("7",)) == 7
            with pytest.raises(ReferenceLost):
                held.to_here()
            with pytest.raises(ReferenceLost):
                nodes[0].rpc_sync("again", _fetch, (held,))
            fresh = nodes[0].remote("again", torch.zeros, (2,))
            assert nodes[0].rpc_sync("w1", _fetch, (fresh,)).tolist() == [0.0, 0.0]
            assert new.remote("w0", torch.ones, (1,)).to_here().tolist() == [1.0]
            del fresh


def _half(value: torch.Tensor) -> torch.Tensor:
    return value / 2


def test_autograd_with_a_rank_of_any_size(url: str) -> None:
    with team(1, url) as nodes, member("far", 2**31 - 1, url) as far:
        value = torch.ones(2, requires_grad=True)
        contexts = runtime_of(far).part(Recorder).contexts
        context = contexts.new_context()
        contexts.backward(context.id, [far.rpc_sync("w0", _half, (value,)).sum()])
        assert contexts.get_gradients(context.id)[value].tolist() == [0.5, 0.5]
        contexts.release_everywhere(context.id)
        wait_until(lambda: not runtime_of(nodes[0]).part(Recorder).contexts.ids())


def test_a_backward_pass_through_one_that_is_gone_names_it(url: str) -> None:
    with team(1, url) as nodes:
        contexts = runtime_of(nodes[0]).part(Recorder).contexts
        with member("far", 7, url) as far:
            value = torch.ones(2, requires_grad=True)
            context = contexts.new_context()
            loss = nodes[0].rpc_sync("far", _half, (value,)).sum()
            far.shutdown(graceful=False)
        wait_until(lambda: names(nodes[0]) == ["w0"])
        with pytest.raises(PeerDead, match=r"^Error on Node 7: far is gone$"):
            contexts.backward(context.id, [loss])
        contexts.release_everywhere(context.id)


def _nap() -> int:
    sleep(0.02)
    return 7


def test_who_is_called_all_the_time_can_leave(url: str) -> None:
    """The others stop when they know; what had begun is answered, and what was not sent says so."""
    with team(2, url) as nodes, ThreadPoolExecutor() as pool:
        called = threading.Semaphore(0)

        def call_until_it_is_gone() -> PeerDead:
            while True:
                try:
                    assert nodes[0].rpc_sync("w1", _nap, timeout=BOUND_S) == 7
                    called.release()
                except PeerDead as error:
                    return error

        callers = [pool.submit(call_until_it_is_gone) for _ in range(4)]
        for _ in callers:
            called.acquire()
        leaves = threading.Thread(target=nodes[1].shutdown, daemon=True)
        leaves.start()
        leaves.join(BOUND_S)
        assert not leaves.is_alive()
        for caller in callers:
            assert caller.result(BOUND_S).delivery is Delivery.NOT_SENT


def test_little_is_kept_of_those_who_came_and_went(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_table, "MAX_GONE", 2)
    with team(1, url) as nodes:
        peers = []
        for number in range(4):
            with member(f"n{number}", 10 + number, url) as guest:
                assert nodes[0].rpc_sync(f"n{number}", int, ("7",)) == 7
                peer = runtime_of(nodes[0]).other(runtime_of(guest).me.number)
            assert peer is not None
            wait_until(lambda peer=peer: peer.broken)
            peers.append(peer)
        wait_until(lambda: len({id(peer.link.incoming._decoder) for peer in peers}) == 1)  # none has one of its own
        for number, error in enumerate((UnknownWorker, UnknownWorker, PeerDead, PeerDead)):
            with pytest.raises(error):
                nodes[0].rpc_sync(f"n{number}", int, ("7",))


# --- the functions of the module ----------------------------------------------------------------------------


@contextmanager
def this_process(url: str) -> Iterator[None]:
    farcall.init_rpc("w0", rank=0, rpc_backend_options=farcall.RpcBackendOptions(init_method=url))
    try:
        yield
    finally:
        farcall.shutdown()


def test_callbacks_and_iterators_tell_who_comes_and_goes(url: str) -> None:
    heard: list[tuple[str, str]] = []

    async def listen() -> list[str]:
        events = farcall.member_events()
        with member("w1", 1, url):
            pass
        return [(await anext(events)).kind, (await anext(events)).kind]

    with this_process(url):
        stop = farcall.on_member(lambda event: heard.append((event.kind, event.worker.name)))
        assert asyncio.run(listen()) == ["joined", "left"]
        assert heard == [("joined", "w1"), ("left", "w1")]
        stop()
        with member("w2", 2, url):
            pass
        assert len(heard) == 2


def test_one_that_was_expelled_can_join_again_in_the_same_process(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its user, who is quicker than it is itself."""
    monkeypatch.setattr(rejoin, "FIRST_RETURN_S", 600.0)
    monkeypatch.setattr(rejoin, "LONGEST_RETURN_S", 600.0)
    with member("stays", 7, url) as stays:
        with this_process(url):
            node = api.current_runtime()
            node.call_soon(lambda: node.ending.on_expelled("for the test"))
            wait_until(lambda: not node.running)
            with pytest.raises(Expelled, match="for the test"):
                farcall.rpc_sync("stays", int, ("7",))
        with this_process(url):
            assert farcall.rpc_sync("stays", int, ("7",)) == 7
            assert stays.rpc_sync("w0", int, ("8",)) == 8


# --- many at once --------------------------------------------------------------------------------------------


def _come_and_go(rank: int, url: str, rounds: int) -> int:
    done = 0
    for _ in range(rounds):
        options = farcall.RpcBackendOptions(init_method=url, memory=MemoryOptions(shared_memory=False))
        with farcall.Node(f"w{rank}", rank, options=options) as node:
            for info in node.workers():
                try:
                    assert node.rpc_sync(info, int, ("7",), timeout=BOUND_S) == 7
                    done += 1
                except (PeerDead, UnknownWorker):
                    pass  # it has left meanwhile
    return done


def test_many_come_and_go_at_once(url: str) -> None:
    with member("stays", 100, url) as stays:
        assert all(done >= 5 for done in finish(start_processes(6, _come_and_go, url, 5)))
        wait_until(lambda: names(stays) == ["stays"])
        for rank in range(6):
            with pytest.raises(PeerDead):
                stays.rpc_sync(f"w{rank}", int, ("7",))


def test_the_list_of_contacts_is_kept_up_by_those_who_are_there(url: str) -> None:
    with team(3, url) as nodes:
        entry, me = runtime_of(nodes[1]).entry, runtime_of(nodes[1]).membership.me
        assert entry is not None
        contacts = entry.contacts
        assert contacts is not None
        nodes[0].shutdown(graceful=False)  # without taking itself off the list
        wait_until(lambda: [contact.name for contact in contacts.enter(me).contacts] == ["w1", "w2"])


def test_a_barrier_waits_for_one_that_its_leader_does_not_know_yet(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with team(1, url) as nodes, ThreadPoolExecutor() as pool:
        late, incarnation = member("w1", 1, url), new_incarnation(7)
        monkeypatch.setattr("farcall.runtime.node.start.new_incarnation", lambda random_bits: incarnation)
        group = (("w0", runtime_of(nodes[0]).me.incarnation), ("w1", incarnation))
        future = nodes[0].rpc_async("w0", _contribute, (group, 0, "w0", 1, BOUND_S))
        assert not future.done()
        with late:
            given = pool.submit(late.rpc_sync, "w0", _contribute, (group, 0, "w1", 2, BOUND_S))
            assert given.result(BOUND_S) == {"w0": 1, "w1": 2}
            assert future.wait() == {"w0": 1, "w1": 2}


@pytest.mark.parametrize("again", ["w0", "w1"], ids=["the leader", "another one"])
def test_barriers_go_on_with_one_that_left_and_came_back(again: str, url: str) -> None:
    with team(2, url) as nodes, ThreadPoolExecutor() as pool:
        for _ in range(3):
            for done in [pool.submit(node.barrier, ["w0", "w1"], BOUND_S) for node in nodes]:
                done.result()
        rank = int(again[1:])
        stays = nodes[1 - rank]
        old = runtime_of(stays).peer(again)
        nodes[rank].shutdown()
        with member(again, rank, url) as new:
            wait_until(lambda: runtime_of(stays).peer(again) is not old)
            for _ in range(2):
                for done in [pool.submit(node.barrier, ["w0", "w1"], BOUND_S) for node in (stays, new)]:
                    done.result()


def test_a_gather_with_a_former_life_of_its_leader_is_told_so(url: str) -> None:
    with team(2, url) as nodes:
        group = (("w0", 1), ("w1", runtime_of(nodes[1]).me.incarnation))
        with pytest.raises(PeerDead, match="restarted"):
            nodes[1].rpc_sync("w0", _contribute, (group, 0, "w1", 1, BOUND_S))


def test_nobody_reports_to_a_gather_in_the_name_of_another(url: str) -> None:
    with team(3, url) as nodes:
        group = tuple((f"w{rank}", runtime_of(nodes[rank]).me.incarnation) for rank in (0, 2))
        with pytest.raises(RpcError, match="w1 cannot report to a gather as w2"):
            nodes[1].rpc_sync("w0", _contribute, (group, 0, "w2", "forged", BOUND_S))
