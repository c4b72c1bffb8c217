"""A worker whose queue is full: calls are refused or wait, as their caller chose, and nothing is lost or run twice.

The callee, w1, has one thread and a limit of two. `full` keeps that thread busy and its queue full until `opened`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from tests.kit.team import team, together
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

import farcall
import farcall.autograd as dist_autograd
from farcall.errors import Cancelled, Delivery, NetworkError, Overloaded, PeerDead, ReferenceLost, RpcTimeout
from farcall.options import LimitOptions
from farcall.rpc.owned_values import fetch
from farcall.rpc.references import NodeReferences
from farcall.runtime.calls import executor
from farcall.runtime.node import runtime_of
from farcall.runtime.node.current import work_for
from farcall.runtime.node.dispatcher import Dispatcher
from farcall.testing.faults import Faults

LIMIT = 2
LARGE = 1 << 18
PATIENT = farcall.Retry(attempts=10_000, backoff_s=0.001, longest_backoff_s=0.01)
WAYS = ["sync", "async", "remote"]

ran: Counter[str] = Counter()
opened = threading.Event()


@pytest.fixture(autouse=True)
def _nothing_ran_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ran.clear()
    opened.clear()
    # Or the pool would grow while a function blocks in a way that it cannot see, and take what is to stay queued.
    monkeypatch.setattr(executor, "MOST_EXTRA_THREADS", 0)
    yield
    opened.set()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls were refused."""
    count = [0]
    refuse = Dispatcher._refuse

    def counted(arrivals: Dispatcher, *request: Any) -> None:
        count[0] += 1
        refuse(arrivals, *request)

    monkeypatch.setattr(Dispatcher, "_refuse", counted)
    return count


def block() -> None:
    ran["block"] += 1
    assert opened.wait(LONG_S)


def queue(name: str) -> str:
    """A function of its own, which was never quick: those are run at once, by the thread that reads."""
    ran[name] += 1
    return name


def run(name: str, *_: Any) -> str:
    ran[name] += 1
    return name


def call_on(to: str, name: str) -> str:
    ran[f"through {name}"] += 1
    return farcall.rpc_sync(to, run, (name,))


def double(tensor: torch.Tensor) -> torch.Tensor:
    ran["double"] += 1
    return tensor * 2


def small_team(
    when: str, size: int = 2, faults: Faults | None = None, limit: int = LIMIT, **more: Any
) -> AbstractContextManager[list[farcall.Node]]:
    limits = LimitOptions(max_queued_calls=limit, when_overloaded=when)
    return team([faults] * size, size, **{"num_worker_threads": 1, "limits": limits} | more)


@contextmanager
def full(node: farcall.Node, by: farcall.Node) -> Iterator[None]:
    """Fill the queue of ``node``; at the end its function is let go, and all that was queued has run."""
    futures = [by.rpc_async(runtime_of(node).info, block)]
    wait_until(lambda: ran["block"] == 1)
    futures += [by.rpc_async(runtime_of(node).info, queue, ("queued",)) for _ in range(LIMIT)]
    wait_until(lambda: runtime_of(node).executor.waiting == LIMIT)
    yield
    opened.set()
    assert [future.wait() for future in futures] == [None, *["queued"] * LIMIT]
    assert ran.pop("queued") == LIMIT
    del ran["block"]


def ways(node: farcall.Node, name: str, *more: Any, to: str = "w1", **options: Any) -> dict[str, Callable[[], str]]:
    return {
        "sync": lambda: node.rpc_sync(to, run, (name, *more), **options),
        "async": lambda: node.rpc_async(to, run, (name, *more), **options).wait(),
        "remote": lambda: node.remote(to, run, (name, *more), **options).to_here(),
    }


class Background:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.result = call()
        except BaseException as error:
            self.error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> Any:
        self._thread.join(LONG_S)
        assert not self.running
        if self.error is not None:
            raise self.error
        return self.result


def no_references(node: farcall.Node) -> bool:
    gc.collect()
    counts = runtime_of(node).part(NodeReferences).counts()
    return counts.owned == counts.users == counts.pending_children == 0


# ---------------------------------------------------------------------- "fail"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", ["w1", "w0"])
def test_a_refused_call_says_so_and_did_not_run(way: str, to: str) -> None:
    with small_team("fail") as nodes:
        callee = nodes[int(to[1])]
        with full(callee, nodes[0]):
            for _ in range(3):
                with pytest.raises(Overloaded, match=rf"{to} is overloaded.* 2 calls wait.*max_queued_calls is 2") as e:
                    ways(nodes[0], "refused", to=to)[way]()
                assert (e.value.worker, e.value.queued, e.value.limit) == (runtime_of(callee).info, 2, LIMIT)
                assert e.value.delivery == Delivery.REFUSED
                assert isinstance(e.value, NetworkError)
                assert not hasattr(e.value, "remote_traceback")
                assert "Retry" in str(e.value)
                del e
            assert runtime_of(callee).executor.waiting == LIMIT
        assert ways(nodes[0], "a", to=to)[way]() == "a"
        assert dict(ran) == {"a": 1}
        wait_until(lambda: all(map(no_references, nodes)))


def test_every_use_of_a_refused_reference_says_why() -> None:
    with small_team("fail", 3) as nodes:
        with full(nodes[1], nodes[0]):
            rref = nodes[0].remote("w1", run, ("a",))
            for use in (rref.to_here, rref.rpc_sync().upper, rref._get_future().wait, rref._serialize):
                with pytest.raises(Overloaded):
                    use()
            with pytest.raises(Overloaded):
                nodes[0].rpc_sync("w2", run, ("b", rref))  # it cannot be sent either
        del rref, use
        assert not ran
        wait_until(lambda: all(map(no_references, nodes)))


def test_whoever_asks_for_what_was_refused_hears_that_there_is_nothing() -> None:
    with small_team("fail") as nodes:
        with full(nodes[1], nodes[0]):
            rref = nodes[0].remote("w1", run, ("a",))
            ref = rref._fork.ref
            with pytest.raises(Overloaded):
                rref.to_here()
            del rref
        wait_until(lambda: all(map(no_references, nodes)))
        with pytest.raises(ReferenceLost, match="w1 has no value"):  # and is not kept waiting for it
            nodes[0].rpc_sync("w1", fetch, (ref.created_on, ref.local_id))
        wait_until(lambda: not runtime_of(nodes[1]).server.unanswered)  # the answer leaves a moment before


def test_who_got_a_reference_before_it_was_refused_hears_that_it_never_came() -> None:
    faults = Faults()
    with team(
        [None, faults, None],
        3,
        num_worker_threads=1,
        limits=LimitOptions(max_queued_calls=LIMIT, when_overloaded="fail"),
    ) as nodes:
        with full(nodes[1], nodes[0]):
            with faults.half_open(kind="failure", to="w0"):  # the refusal is held up until the reference is sent on
                rref = nodes[0].remote("w1", run, ("a",))
                use = nodes[0].rpc_async("w2", to_here, (rref,))
            with pytest.raises(Overloaded):
                rref.to_here()
            del rref
        with pytest.raises((ReferenceLost, Overloaded)):
            use.wait()
        assert not ran


def to_here(rref: farcall.RRef[Any]) -> Any:
    return rref.to_here()


@pytest.mark.parametrize("way", WAYS)
def test_retry_calls_again_until_there_is_room(way: str, refusals: list[int]) -> None:
    with small_team("fail") as nodes:
        with full(nodes[1], nodes[0]):
            call = Background(ways(nodes[0], "a", retry=PATIENT)[way])
            wait_until(lambda: refusals[0] >= 3)
            assert call.running
        assert call.end() == "a"
        assert dict(ran) == {"a": 1}
        del call
        wait_until(lambda: all(map(no_references, nodes)))


def test_a_value_is_waited_for_even_while_its_owner_is_full(refusals: list[int]) -> None:
    with small_team("fail") as nodes:
        rref = nodes[0].remote("w1", run, ("a",))
        assert rref.to_here() == "a"
        with full(nodes[1], nodes[0]):
            fetch = Background(rref.to_here)
            wait_until(lambda: refusals[0] >= 3)  # asking for it is a call, too, but made again within its timeout
            with pytest.raises((Overloaded, RpcTimeout)):  # the last refusal may come too late
                rref.to_here(timeout=0.1)
            with pytest.raises(Overloaded):
                rref.rpc_sync().upper()
            with pytest.raises(Overloaded):
                rref.rpc_async().upper().wait()
        assert fetch.end() == "a"


def test_retry_gives_up_with_the_last_refusal() -> None:
    with small_team("fail") as nodes, full(nodes[1], nodes[0]):
        for way in WAYS:
            with pytest.raises(Overloaded):
                ways(nodes[0], "a", retry=farcall.Retry(attempts=3, backoff_s=0.001))[way]()


def test_a_refusal_that_the_function_met_is_not_that_of_ours() -> None:
    with small_team("fail", 3) as nodes:
        with full(nodes[1], nodes[0]):
            with pytest.raises(Overloaded, match="w1 is overloaded") as caught:
                nodes[0].rpc_sync("w2", call_on, ("w1", "a"), retry=PATIENT)
            assert hasattr(caught.value, "remote_traceback")
            assert (caught.value.queued, caught.value.limit) == (LIMIT, LIMIT)
            del caught
        assert dict(ran) == {"through a": 1}


def test_what_came_with_a_refused_call_is_given_back() -> None:
    with small_team("fail") as nodes:
        mine = nodes[0].remote("w0", run, ("mine",))
        assert mine.to_here() == "mine"
        with full(nodes[1], nodes[0]):
            for _ in range(4):  # offered first, then in a segment
                with pytest.raises(Overloaded):
                    nodes[0].rpc_sync("w1", run, ("a", torch.ones(LARGE), mine))
                with pytest.raises(Overloaded):
                    nodes[0].remote("w1", run, ("a", torch.ones(LARGE), mine)).to_here()
            pool = runtime_of(nodes[0]).pool
            assert pool is not None
            wait_until(
                lambda: runtime_of(nodes[0]).part(NodeReferences).counts().forks == 0
            )  # while w1 is full: control passes
            wait_until(lambda: not any(pool._lent.values()))
        del mine
        wait_until(lambda: all(map(no_references, nodes)))
        assert "a" not in ran


@pytest.mark.parametrize("creating", [False, True])
def test_a_backward_pass_goes_round_what_was_refused(creating: bool) -> None:
    with small_team("fail") as nodes:
        leaf = torch.ones(3, requires_grad=True)
        with dist_autograd_context(nodes[0]) as context_id:
            through = nodes[0].rpc_sync("w1", double, (leaf,))
            call = (lambda *call: nodes[0].remote(*call).to_here()) if creating else nodes[0].rpc_sync
            with full(nodes[1], nodes[0]), pytest.raises(Overloaded):
                call("w1", double, (leaf * 3,))
            dist_autograd.backward(context_id, [through.sum()])
            assert torch.equal(dist_autograd.get_gradients(context_id)[leaf], torch.full((3,), 2.0))
        assert ran["double"] == 1


@contextmanager
def dist_autograd_context(node: farcall.Node) -> Iterator[int]:
    work_for(runtime_of(node))  # which node's contexts these are
    try:
        with dist_autograd.context() as context_id:
            yield context_id
    finally:
        work_for(None)


def test_barriers_are_not_refused() -> None:
    with small_team("fail") as nodes:
        with full(nodes[0], nodes[1]):
            barriers = [Background(node.barrier) for node in nodes]
            wait_until(lambda: runtime_of(nodes[0]).executor.waiting == LIMIT + 2)
        for barrier in barriers:
            barrier.end()


def test_a_refused_call_with_a_reference_leaves_the_link_as_it_is() -> None:
    with small_team("fail") as nodes:
        mine = nodes[0].remote("w0", run, ("mine",))
        with full(nodes[1], nodes[0]):
            for _ in range(2):
                with pytest.raises(Overloaded):
                    nodes[0].rpc_sync("w1", run, ("a", mine))
        assert "a" not in ran
        nodes[0].rpc_sync("w1", run, ("b", mine))
        del mine


# ---------------------------------------------------------------------- "wait"


def told(caller: farcall.Node, callee: farcall.Node) -> Any:
    """Has the callee said to the caller that it is full?"""
    return runtime_of(caller).peer(runtime_of(callee).info).full


def held(caller: farcall.Node) -> int:
    return len(runtime_of(caller).calls._held)


@contextmanager
def full_and_told(nodes: list[farcall.Node]) -> Iterator[None]:
    """As `full`, after a call that was on its way meanwhile."""
    with full(nodes[1], nodes[0]):
        late = nodes[0].rpc_async("w1", queue, ("late",))
        wait_until(lambda: told(nodes[0], nodes[1]))
        wait_until(
            lambda: runtime_of(nodes[1]).executor.waiting == LIMIT + 1
        )  # what the word was sent for is queued behind it
        yield
    assert late.wait() == "late"
    wait_until(lambda: not told(nodes[0], nodes[1]))
    assert ran.pop("late") == 1


@pytest.mark.parametrize("way", WAYS)
def test_calls_wait_unsent_until_there_is_room(way: str) -> None:
    with small_team("wait") as nodes:
        with full_and_told(nodes):
            calls = [Background(ways(nodes[0], f"a{i}", torch.ones(8), timeout=None)[way]) for i in range(4)]
            wait_until(lambda: held(nodes[0]) == 4)
            assert all(call.running for call in calls)
            assert runtime_of(nodes[1]).executor.waiting == LIMIT + 1
        assert [call.end() for call in calls] == ["a0", "a1", "a2", "a3"]
        assert dict(ran) == {f"a{i}": 1 for i in range(4)}
        assert held(nodes[0]) == 0


def test_others_than_the_full_one_are_called_as_ever() -> None:
    with small_team("wait", 3) as nodes, full_and_told(nodes):
        assert nodes[0].rpc_sync("w2", run, ("a",)) == "a"
        assert nodes[0].rpc_sync("w0", run, ("a",)) == "a"
        assert nodes[1].rpc_sync("w0", run, ("a",)) == "a"
        del ran["a"]


@pytest.mark.parametrize("way", WAYS)
def test_waiting_ends_with_the_timeout_which_says_what_for(way: str) -> None:
    with small_team("wait") as nodes:
        with full_and_told(nodes):
            with pytest.raises(
                RpcTimeout, match=r"run\(\) was not sent to w1, which is overloaded: 2 calls were waiting"
            ) as e:
                ways(nodes[0], "a", timeout=0.5)[way]()
            if way != "remote":
                assert e.value.delivery == Delivery.NOT_SENT
            assert runtime_of(nodes[1]).executor.waiting == LIMIT + 1
            del e
        assert not ran
        assert ways(nodes[0], "b")[way]() == "b"
        wait_until(lambda: all(map(no_references, nodes)))


def test_oneself_may_be_full_too() -> None:
    with small_team("wait", num_worker_threads=1) as nodes:
        with full(nodes[1], nodes[0]):
            late = nodes[1].rpc_async("w1", queue, ("late",))  # taken in: oneself is told by that
            wait_until(lambda: told(nodes[1], nodes[1]))
            call = Background(ways(nodes[1], "a", to="w1")["sync"])
            wait_until(lambda: held(nodes[1]) == 1)
        assert late.wait() == "late"
        assert call.end() == "a"
        assert dict(ran) == {"late": 1, "a": 1}


def fill_and_be_told(nodes: list[farcall.Node]) -> None:
    """The same where w1 may not live to run what is queued."""
    nodes[0].rpc_async("w1", block)
    wait_until(lambda: ran["block"] == 1)
    for _ in range(LIMIT + 1):
        nodes[0].rpc_async("w1", queue, ("queued",))
    wait_until(lambda: told(nodes[0], nodes[1]))


def test_the_death_of_the_full_one_ends_the_wait() -> None:
    with small_team("wait") as nodes:
        fill_and_be_told(nodes)
        calls = [Background(ways(nodes[0], "a", timeout=None)[way]) for way in WAYS]
        wait_until(lambda: held(nodes[0]) == len(WAYS))
        nodes[1].shutdown(graceful=False)
        for call, error in zip(calls, (PeerDead, PeerDead, ReferenceLost), strict=True):
            with pytest.raises(error) as caught:
                call.end()
            if error is PeerDead:
                assert caught.value.delivery == Delivery.NOT_SENT
        opened.set()
        nodes[0].shutdown(graceful=False)
        assert set(ran) == {"block"}


def test_the_end_of_the_caller_ends_the_wait() -> None:
    with small_team("wait") as nodes:
        fill_and_be_told(nodes)
        call = Background(ways(nodes[0], "a", timeout=None)["sync"])
        wait_until(lambda: held(nodes[0]) == 1)
        nodes[0].shutdown(graceful=False)
        with pytest.raises(Cancelled, match="w0 shut down"):
            call.end()
        opened.set()
        nodes[1].shutdown(graceful=False)
        assert "a" not in ran


def test_a_graceful_shutdown_waits_for_those_who_wait() -> None:
    with small_team("wait") as nodes:
        fill_and_be_told(nodes)
        call = Background(ways(nodes[0], "a")["sync"])
        wait_until(lambda: held(nodes[0]) == 1)
        assert (
            runtime_of(nodes[0]).leaving._local_state()[0] == len(runtime_of(nodes[0]).calls.pending) + 1
        )  # it counts, although it is not sent
        leaving = [Background(node.shutdown) for node in nodes]
        wait_until(lambda: all(runtime_of(node).leaving.entered for node in nodes))
        opened.set()
        assert call.end() == "a"
        for left in leaving:
            left.end()
        assert dict(ran) == {"block": 1, "queued": LIMIT + 1, "a": 1}


def test_room_is_told_over_the_next_connection_where_one_broke() -> None:
    faults = Faults()
    with small_team("wait", faults=faults, transports=("tcp",)) as nodes:
        with full_and_told(nodes):
            call = Background(ways(nodes[0], "a")["sync"])
            wait_until(lambda: held(nodes[0]) == 1)
            rule = faults.cut(kind="QueueHasRoom", sender="w1", to="w0", count=1)
        assert call.end() == "a"
        assert rule.hits == 1
        assert dict(ran) == {"a": 1}


def test_a_coroutine_is_never_held() -> None:
    async def call(node: farcall.Node) -> str:
        future = node.rpc_async("w1", run, ("a",))
        opened.set()  # reached although w1 is full
        return await future

    with small_team("wait") as nodes:
        with full_and_told(nodes):
            assert asyncio.run(call(nodes[0])) == "a"
        assert dict(ran) == {"a": 1}


def run_backward(node: farcall.Node, context_id: int, value: torch.Tensor) -> None:
    work_for(runtime_of(node))
    dist_autograd.backward(context_id, [value.sum()])


def test_control_messages_and_gradients_pass_a_full_queue() -> None:
    with small_team("wait") as nodes:
        leaf = torch.ones(3, requires_grad=True)
        theirs = nodes[0].remote("w1", run, ("theirs",))
        assert theirs.to_here() == "theirs"
        with dist_autograd_context(nodes[0]) as context_id:
            through = nodes[0].rpc_sync("w1", double, (leaf,))
            with full_and_told(nodes):
                del theirs
                wait_until(lambda: no_references(nodes[1]))
                # Its part of the graph needs a thread of w1's; the letter is there, though.
                backward = Background(lambda: run_backward(nodes[0], context_id, through))
            backward.end()
            assert torch.equal(dist_autograd.get_gradients(context_id)[leaf], torch.full((3,), 2.0))


# ---------------------------------------------------------------------- nested


def ping(to: str, back: str, depth: int, name: str) -> str:
    if depth:
        farcall.rpc_sync(to, ping, (back, to, depth - 1, name))
    ran[name] += 1
    return name


def test_two_full_ones_that_call_each_other_get_on() -> None:
    """Each function waits for the other worker's, and both queues are full all the time."""
    with small_team("wait", limit=1, rpc_timeout=4 * LONG_S) as nodes:

        def flood(node: farcall.Node, to: str) -> None:
            me = runtime_of(node).info.name
            futures = [node.rpc_async(to, ping, (me, to, 3, f"{me}-{i}")) for i in range(25)]
            assert [future.wait() for future in futures] == [f"{me}-{i}" for i in range(25)]

        together([lambda: flood(nodes[0], "w1"), lambda: flood(nodes[1], "w0"), lambda: flood(nodes[0], "w0")])
        assert all(count in (4, 8) for count in ran.values())
        assert sum(ran.values()) == 3 * 25 * 4
