"""Members on hosts whose links are really cut: one bad link is no death, a host that nobody reaches is."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic, sleep
from typing import Any, NamedTuple

import pytest
from tests.faults.namespaces import Hosts, address, enter, hosts
from tests.kit.waiting import wait_until

import farcall
from farcall.cli.team import Team
from farcall.errors import RpcError
from farcall.options import MembershipOptions
from farcall.protocol.membership.probing import REFUSED_S
from farcall.runtime.node import runtime_of
from farcall.testing.faults import Faults

BOUND_S = 40.0
CALL_S = 30.0
SUSPICION_S = 2.0
QUICK = MembershipOptions(probe_interval_s=0.3, probe_timeout_s=0.6, suspicion_s=SUSPICION_S, reconnect_s=1.0)
CUT_S = 2.5 * SUSPICION_S
"""A cut that outlasts every time above."""

ran: list[str] = []
may_answer = threading.Event()


def execute(call_id: str) -> str:
    ran.append(call_id)
    return call_id


def execute_and_wait(call_id: str) -> str:
    """Answer when the test says so."""
    ran.append(call_id)
    may_answer.wait(CALL_S)
    return call_id


def hold(seconds: int) -> str:
    """Keep the interpreter: no thread of this process runs meanwhile."""
    ctypes.PyDLL(None).sleep(seconds)
    return "held"


class Ended(NamedTuple):
    """How a call ended: its result, or the class of its error and what that says of its delivery; after how long."""

    result: str | None
    error: str
    delivery: str
    took_s: float


class Seat:
    """In a member's process: what the test asks of it."""

    def __init__(self, node: farcall.Node, faults: Faults) -> None:
        self.node = node
        self.faults = faults
        self.seen: list[tuple[str, str]] = []
        self.calls: dict[str, tuple[farcall.Future[str], float]] = {}
        self.ends: list[str] = []
        node.on_member(lambda event: self.seen.append((event.kind, event.worker.name)))

    def begin(self, call_id: str, to: str, timeout_s: float) -> None:
        self.calls[call_id] = (self.node.rpc_async(to, execute, (call_id,), timeout=timeout_s), monotonic())

    def begin_waiting(self, call_id: str, to: str) -> None:
        """As `begin`; the answer leaves after `let_answer` there."""
        self.calls[call_id] = (self.node.rpc_async(to, execute_and_wait, (call_id,), timeout=CALL_S), monotonic())

    def let_answer(self) -> None:
        may_answer.set()

    def begin_holding(self, call_id: str, to: str, seconds: int) -> None:
        """Have ``to`` keep its interpreter, and send it more than kernels take. Only a verdict ends these calls."""
        self.calls[call_id] = (self.node.rpc_async(to, hold, (seconds,), timeout=None), monotonic())
        sent = self.node.rpc_async(to, len, (bytes(64 << 20),), timeout=None)
        self.calls[call_id + " and more"] = (sent.then(lambda done: str(done.wait())), monotonic())

    def end(self, call_id: str) -> Ended:
        future, since = self.calls.pop(call_id)
        try:
            return Ended(future.wait(), "", "", monotonic() - since)
        except RpcError as error:
            return Ended(None, type(error).__name__, getattr(error, "delivery", ""), monotonic() - since)

    def events(self) -> list[tuple[str, str]]:
        return self.seen

    def ran(self) -> list[str]:
        return ran

    def serve(self) -> None:
        """As most workers spend their lives: in a shutdown that waits for the others."""

        def wait() -> None:
            try:
                self.node.shutdown()
                self.ends.append("")
            except RpcError as error:
                self.ends.append(f"{type(error).__name__}: {error}")

        before = runtime_of(self.node)
        threading.Thread(target=wait, daemon=True).start()
        wait_until(lambda: before.leaving.entered)

    def serves_again(self) -> bool:
        return not self.ends and self.node._lifecycle.state == "leaving"

    def how_it_ended(self) -> list[str]:
        return self.ends

    def running(self) -> bool:
        return runtime_of(self.node).running

    def reset(self, to: str) -> None:
        """Have the connection to ``to`` end for both sides; a silent one may have been given up already."""
        link = runtime_of(self.node).peer(to).link
        with self.faults.cut(to=to) as rule:
            wait_until(lambda: rule.hits or not link.up)


@contextmanager
def member(
    rank: int, size: int, directory: str, spaces: list[str], is_static: bool, return_s: float
) -> Iterator[Callable[[tuple[Any, ...]], Any]]:
    enter(spaces[rank])
    options = farcall.RpcBackendOptions(
        init_method=f"file://{directory}/store",
        advertise=address(rank),
        transports=("tcp",),
        membership=replace(QUICK, return_s=return_s),
    )
    node = farcall.Node(f"w{rank}", rank, size if is_static else None, options)
    faults = Faults()
    with faults.installed():
        node.start()
    deadline = monotonic() + BOUND_S
    while len(node.workers()) < size:
        assert monotonic() < deadline, f"w{rank} sees only {[worker.name for worker in node.workers()]} of {size}"
        sleep(0.01)
    seat = Seat(node, faults)
    try:
        yield lambda request: getattr(seat, request[0])(*request[1:])
    finally:
        may_answer.set()
        node.shutdown(graceful=False)


class Cluster:
    def __init__(self, team: Team, network: Hosts) -> None:
        self.team = team
        self.network = network

    def ask(self, rank: int, *request: Any) -> Any:
        return self.team.ask(rank, request, BOUND_S)

    def call(self, rank: int, call_id: str, to: str, timeout_s: float = CALL_S) -> Ended:
        self.ask(rank, "begin", call_id, to, timeout_s)
        return Ended(*self.ask(rank, "end", call_id))

    def wait_for(self, rank: int, kind: str, name: str) -> None:
        wait_until(lambda: (kind, name) in self.ask(rank, "events"))

    def deaths(self, size: int) -> list[tuple[int, str]]:
        return [(rank, name) for rank in range(size) for kind, name in self.ask(rank, "events") if kind == "dead"]


def stay_for(seconds: float) -> None:
    """A cut has a length: there is nothing else to wait for."""
    sleep(seconds)


@contextmanager
def cluster(size: int, is_static: bool = False, return_s: float = BOUND_S) -> Iterator[Cluster]:
    with hosts(size) as network:
        team = Team(member, size, network.spaces, is_static, return_s)
        try:
            yield Cluster(team, network)
            network.heal()
            team.stop()
        except BaseException:
            team.kill()
            raise


@pytest.mark.parametrize("is_static", [True, False], ids=["static", "dynamic"])
def test_one_cut_link_is_no_death(is_static: bool) -> None:
    """Though it lasts longer than any verdict takes: a third member reaches both. Calls wait, and then go on."""
    with cluster(3, is_static) as found:
        assert found.call(0, "before", "w1").result == "before"
        found.network.cut(0, 1)
        found.ask(0, "begin", "waits", "w1", CALL_S)
        found.ask(1, "begin", "waits too", "w0", CALL_S)
        timed_out = found.call(0, "times out", "w1", 1.0)
        assert timed_out.error == "RpcTimeout"
        assert timed_out.took_s < CALL_S / 2  # by its own time, not by that of the other calls
        stay_for(CUT_S)
        for rank in (0, 1):
            assert found.call(rank, f"past {rank}", "w2").result == f"past {rank}"
        found.network.heal()
        assert Ended(*found.ask(0, "end", "waits")).result == "waits"
        assert Ended(*found.ask(1, "end", "waits too")).result == "waits too"
        assert found.call(0, "after", "w1").result == "after"
        assert found.deaths(3) == []
        ran_there = found.ask(1, "ran")
        assert all(ran_there.count(call_id) == 1 for call_id in ("before", "waits", "after"))
        assert ran_there.count("times out") <= 1


REFUSED_MOMENT_S = 2.5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ways", ["both", "there", "back"])
def test_a_moment_of_refusals_separates_nobody(size: int, ways: str) -> None:
    """A NAT or a proxy that restarts resets connections and refuses dials, and the process behind it lives."""
    with cluster(size) as found:
        assert found.call(0, "before", "w1").result == "before"
        for moment in range(2):
            if ways != "back":
                found.network.refuse_direction(0, 1)
            if ways != "there":
                found.network.refuse_direction(1, 0)
            found.ask(0, "begin", f"waits {moment}", "w1", CALL_S)
            found.ask(1, "begin", f"waits too {moment}", "w0", CALL_S)
            stay_for(REFUSED_MOMENT_S)
            found.network.heal()
            assert Ended(*found.ask(0, "end", f"waits {moment}")).result == f"waits {moment}"
            assert Ended(*found.ask(1, "end", f"waits too {moment}")).result == f"waits too {moment}"
        assert found.deaths(size) == []
        for rank in range(size):
            assert "rejoined" not in [kind for kind, _ in found.ask(rank, "events")]


def test_of_two_that_are_refused_for_long_one_stays_and_the_other_comes_back() -> None:
    with cluster(2) as found:
        for rank in (0, 1):
            found.ask(rank, "begin_waiting", f"to {1 - rank}", f"w{1 - rank}")
        found.network.refuse(0, 1)
        for rank in (0, 1):
            found.wait_for(rank, "dead", f"w{1 - rank}")
            assert Ended(*found.ask(rank, "end", f"to {1 - rank}")).error == "PeerDead"
        found.network.heal()
        found.wait_for(1, "rejoined", "w1")
        assert ("rejoined", "w0") not in found.ask(0, "events")
        assert found.call(1, "back", "w0").result == "back"


@pytest.mark.parametrize("size", [2, 3])
def test_a_process_that_was_killed_on_another_host_is_dead_soon(size: int) -> None:
    """Nobody but its host's kernel knows: with a third member's word for it soon, else after more refusals."""
    with cluster(size) as found:
        found.ask(0, "begin_waiting", "to the killed", "w1")
        wait_until(lambda: "to the killed" in found.ask(1, "ran"))
        since = monotonic()
        found.team.kill_member(1)
        ended = Ended(*found.ask(0, "end", "to the killed"))
        assert ended.error == "PeerDead"
        assert (monotonic() - since > REFUSED_S) is (size == 2)
        found.wait_for(0, "dead", "w1")
        found.team.restart(1, BOUND_S)
        found.wait_for(0, "joined", "w1")


def test_a_connection_that_ends_while_its_link_is_cut_is_made_again_when_it_heals() -> None:
    """It cannot be made again for longer than ``reconnect_s``, but a third member hears from both."""
    with cluster(3) as found:
        assert found.call(1, "before", "w0").result == "before"
        found.network.cut(0, 1)
        for rank in (0, 1):
            found.ask(rank, "reset", f"w{1 - rank}")
            found.ask(rank, "begin", f"waits {rank}", f"w{1 - rank}", CALL_S)
        stay_for(CUT_S)
        found.network.heal()
        for rank in (0, 1):
            assert Ended(*found.ask(rank, "end", f"waits {rank}")).result == f"waits {rank}"
        assert found.deaths(3) == []
        assert found.ask(1, "ran") == ["waits 0"]
        assert found.ask(0, "ran") == ["before", "waits 1"]


def test_a_half_open_link_is_no_death() -> None:
    """What one sends is lost, what the other sends arrives: both wait, nobody is dead, and nothing runs twice."""
    with cluster(3) as found:
        assert found.call(0, "before", "w1").result == "before"
        found.ask(1, "begin_waiting", "answer lost", "w0")
        wait_until(lambda: "answer lost" in found.ask(0, "ran"))
        found.network.cut_direction(0, 1)
        found.ask(0, "begin", "lost on its way", "w1", CALL_S)
        found.ask(0, "let_answer")
        stay_for(CUT_S)
        assert "lost on its way" not in found.ask(1, "ran")
        found.network.heal()
        assert Ended(*found.ask(0, "end", "lost on its way")).result == "lost on its way"
        assert Ended(*found.ask(1, "end", "answer lost")).result == "answer lost"
        assert found.deaths(3) == []
        assert found.ask(0, "ran").count("answer lost") == 1
        assert found.ask(1, "ran").count("lost on its way") == 1


@pytest.mark.parametrize("is_static", [True, False], ids=["static", "dynamic"])
def test_a_host_that_nobody_reaches_is_dead_learns_it_and_finds_back_in(is_static: bool) -> None:
    with cluster(3, is_static) as found:
        since = monotonic()
        found.network.cut(0, 2)
        # Before the other cut: as long as w1 reaches it, nobody is dead.
        found.ask(0, "begin", "to the lost", "w2", CALL_S)
        found.ask(2, "begin", "from the lost", "w0", CALL_S)
        found.network.cut(1, 2)
        for rank in (0, 1):
            found.wait_for(rank, "dead", "w2")
        assert monotonic() - since >= SUSPICION_S
        to_the_lost = Ended(*found.ask(0, "end", "to the lost"))
        # If it was written it may yet arrive: the kernel goes on trying, also for one who has given up. It was not
        # where the silent connection had been given up before.
        assert to_the_lost.error == "PeerDead"
        assert to_the_lost.delivery in ("unknown", "not_sent")
        assert found.call(0, "goes on", "w1").result == "goes on"
        found.network.heal()
        found.wait_for(2, "rejoined", "w2")
        ended = Ended(*found.ask(2, "end", "from the lost"))
        assert ended.error in ("Expelled", "PeerDead")
        for rank in (0, 1):
            found.wait_for(rank, "joined", "w2")
            assert ("rejoined", f"w{rank}") not in found.ask(rank, "events")
            assert found.call(rank, f"to the new one from {rank}", "w2").result
            assert found.call(2, f"from the new one to {rank}", f"w{rank}").result
        assert found.ask(2, "ran").count("to the lost") <= (to_the_lost.delivery == "unknown")
        assert "from the lost" not in found.ask(0, "ran")


@pytest.mark.parametrize("size", [2, 3])
def test_one_that_serves_in_shutdown_and_is_cut_off_comes_back_and_serves_on(size: int) -> None:
    """It finds all others dead, and so nobody to wait for: to leave now would be the end of it, as if all were done."""
    with cluster(size, is_static=True) as found:
        lost, others = size - 1, range(size - 1)
        found.ask(lost, "serve")
        for rank in others:
            found.network.cut(rank, lost)
        for rank in others:
            found.wait_for(rank, "dead", f"w{lost}")
            found.wait_for(lost, "dead", f"w{rank}")
        found.network.heal()
        found.wait_for(lost, "rejoined", f"w{lost}")
        wait_until(lambda: found.ask(lost, "serves_again"))
        for rank in others:
            found.wait_for(rank, "joined", f"w{lost}")
            assert found.call(rank, f"after from {rank}", f"w{lost}").result == f"after from {rank}"
        for rank in others:
            found.ask(rank, "serve")
        for rank in range(size):
            wait_until(lambda rank=rank: found.ask(rank, "how_it_ended"))  # type: ignore[misc]
            assert found.ask(rank, "how_it_ended") == [""]


def test_one_that_serves_in_shutdown_and_finds_no_way_back_raises() -> None:
    """So its exit code tells who started it that this is not the end that was wanted."""
    with cluster(3, is_static=True, return_s=1.0) as found:
        found.ask(2, "serve")
        for rank in (0, 1):
            found.network.cut(rank, 2)
        wait_until(lambda: found.ask(2, "how_it_ended"))
        (end,) = found.ask(2, "how_it_ended")
        assert end.startswith("ShutdownTimeout: w2 left after waiting ")
        assert end.endswith("for: w0 does not answer, nor does its host; w1 does not answer, nor does its host")
        assert found.call(0, "goes on", "w1").result == "goes on"
        for rank in (0, 1):
            found.ask(rank, "serve")
        for rank in (0, 1):
            wait_until(lambda rank=rank: found.ask(rank, "how_it_ended"))  # type: ignore[misc]
            assert found.ask(rank, "how_it_ended") == [""]


def test_a_busy_member_on_another_host_is_not_dead() -> None:
    """Its kernel answers, also when it has no room for more: for longer than any verdict takes."""
    with cluster(3) as found:
        found.ask(0, "begin_holding", "busy", "w1", round(2.5 * CUT_S))
        for rank in (0, 2):
            found.wait_for(rank, "unresponsive", "w1")
        assert Ended(*found.ask(0, "end", "busy")).result == "held"
        assert Ended(*found.ask(0, "end", "busy and more")).result == str(64 << 20)
        for rank in (0, 2):
            found.wait_for(rank, "recovered", "w1")
        assert found.deaths(3) == []
        assert not any(kind == "interrupted" for kind, _ in found.ask(0, "events"))


def test_of_two_that_lost_each_other_one_stays() -> None:
    """Each was alone, so each doubts itself longer; the one of lower rank lets the other in again."""
    with cluster(2) as found:
        for rank in (0, 1):  # before the cut: later the other one may be dead
            found.ask(rank, "begin_waiting", f"to {1 - rank}", f"w{1 - rank}")
        found.network.cut(0, 1)
        for rank in (0, 1):
            found.wait_for(rank, "dead", f"w{1 - rank}")
            assert Ended(*found.ask(rank, "end", f"to {1 - rank}")).error == "PeerDead"
        found.network.heal()
        found.wait_for(1, "rejoined", "w1")
        assert ("rejoined", "w0") not in found.ask(0, "events")
        assert len(found.ask(0, "ran")) <= 1
        assert len(found.ask(1, "ran")) <= 1
        assert found.call(1, "back", "w0").result == "back"
