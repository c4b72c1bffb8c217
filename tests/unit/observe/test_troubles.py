"""Who waits for whom, from made-up snapshots."""

from __future__ import annotations

import threading
import time

from farcall.observe.snapshot import (
    LATER,
    QUEUED,
    RUNNING,
    OutgoingCall,
    PoolView,
    ServedCall,
    StackLine,
    ThreadView,
    WorkerSnapshot,
    function_title,
    view_threads,
)
from farcall.observe.troubles import find_troubles, long_turns, still_threads

MAIN = 1
WORKER = 2
IDLE_POOL = PoolView(size=16, threads=1, busy=1, parked=0, queued=0)


def thread(number: int, position: int = 0, cpu_s: float = 1.0) -> ThreadView:
    return ThreadView(number, f"thread-{number}", cpu_s, position, [StackLine("app.py", 10 + number, "f")])


def waits(to: str, call_id: int, on: int) -> OutgoingCall:
    return OutgoingCall(call_id, to, "g", 5.0, 60.0, on)


def serves(caller: str, call_id: int, on: int, state: str = RUNNING) -> ServedCall:
    return ServedCall(call_id, caller, "g", state, 5.0, on)


def worker(
    name: str, calls: list[OutgoingCall], served: list[ServedCall], pool: PoolView = IDLE_POOL
) -> WorkerSnapshot:
    numbers = {call.thread_id for call in calls} | {call.thread_id for call in served}
    return WorkerSnapshot(name, 0, 1, "host", "running", pool, calls, served, [thread(one) for one in numbers if one])


def each_waits_for_the_other() -> list[WorkerSnapshot]:
    """Each main thread holds a lock and waits for the other worker, where a function waits for that lock."""
    return [
        worker("a", [waits("b", 7, MAIN)], [serves("b", 9, WORKER)]),
        worker("b", [waits("a", 9, MAIN)], [serves("a", 7, WORKER)]),
    ]


def test_two_workers_that_wait_for_each_other() -> None:
    (trouble,) = find_troubles(each_waits_for_the_other(), {("a", WORKER), ("b", WORKER)})
    assert trouble.kind == "cycle"
    assert sorted(trouble.workers) == ["a", "b"]
    assert trouble.text == "a and b wait for each other"
    assert "a (thread thread-1 at app.py:11) has waited 5.0 s for b g()" in trouble.steps
    assert any("does not go on (thread thread-2 at app.py:12)" in step for step in trouble.steps)


def test_a_function_that_moves_is_no_part_of_a_circle() -> None:
    assert find_troubles(each_waits_for_the_other(), {("a", WORKER)}) == []


def test_without_a_second_look_nobody_is_trusted_to_move() -> None:
    assert [trouble.kind for trouble in find_troubles(each_waits_for_the_other(), None)] == ["cycle"]


def test_calls_back_and_forth_that_end_in_a_moving_thread_are_fine() -> None:
    snapshots = [
        worker("a", [waits("b", 1, MAIN)], [serves("b", 2, WORKER)]),
        worker("b", [waits("a", 2, WORKER)], [serves("a", 1, WORKER)]),
    ]
    assert find_troubles(snapshots, set()) == []


def test_a_worker_that_calls_itself_back_through_another_and_needs_its_own_lock() -> None:
    snapshots = [
        worker("a", [waits("b", 1, MAIN)], [serves("b", 2, WORKER)]),
        worker("b", [waits("a", 2, WORKER)], [serves("a", 1, WORKER)]),
    ]
    (trouble,) = find_troubles(snapshots, {("a", WORKER)})
    assert trouble.kind == "cycle"
    assert sorted(trouble.workers) == ["a", "b"]


def test_a_circle_of_three() -> None:
    names = ["a", "b", "c"]
    snapshots = [
        worker(name, [waits(names[(i + 1) % 3], i, MAIN)], [serves(names[i - 1], (i - 1) % 3, WORKER)])
        for i, name in enumerate(names)
    ]
    (trouble,) = find_troubles(snapshots, {(name, WORKER) for name in names})
    assert trouble.text == "a, b, c wait for each other in a circle"


def test_of_circles_that_share_a_part_the_shortest_is_told() -> None:
    """The main thread of each waits for a function of its own worker, which holds the lock: it is no part of it."""
    snapshots = [
        worker(
            one, [waits(one, 1, MAIN), waits(other, 2, WORKER)], [serves(one, 1, WORKER), serves(other, 2, WORKER + 1)]
        )
        for one, other in (("a", "b"), ("b", "a"))
    ]
    (trouble,) = find_troubles(snapshots, {("a", WORKER + 1), ("b", WORKER + 1)})
    assert trouble.text == "a and b wait for each other"
    assert trouble.steps == [
        "a (thread thread-2 at app.py:12) has waited 5.0 s for b g()",
        "which does not go on (thread thread-3 at app.py:13), perhaps because of what "
        "b (thread thread-2 at app.py:12) holds",
        "b (thread thread-2 at app.py:12) has waited 5.0 s for a g()",
        "which does not go on (thread thread-3 at app.py:13), perhaps because of what "
        "a (thread thread-2 at app.py:12) holds",
    ]


def behind(call_id: int, holder: ServedCall) -> ServedCall:
    return ServedCall(call_id, "a", "h", QUEUED, 4.0, 0, holder, waiting=2)


def test_the_holder_of_a_serial_object_is_waited_for() -> None:
    """b's method has the object and calls a, where a function waits for another method of the object."""
    method = serves("a", 1, WORKER)
    snapshots = [
        worker("a", [waits("b", 1, MAIN), waits("b", 3, WORKER)], [serves("b", 2, WORKER)]),
        worker("b", [waits("a", 2, WORKER)], [method, behind(3, method)]),
    ]
    (trouble,) = find_troubles(snapshots, set())
    assert trouble.text == "a and b wait for each other"
    assert "which has waited 4.0 s for its turn: g() for a has the object" in trouble.steps


def test_calls_that_wait_long_for_their_turn_are_named() -> None:
    method = serves("a", 1, WORKER)
    snapshots = [worker("b", [], [method, behind(3, method), behind(4, method)])]
    assert long_turns(snapshots) == ["b: 2 calls wait for g() for a, which has had its serial object for 5.0 s"]
    quick = ServedCall(3, "a", "h", QUEUED, 0.5, 0, method, waiting=1)
    assert long_turns([worker("b", [], [method, quick])]) == []


def test_coroutines_that_wait_for_each_other() -> None:
    snapshots = [
        worker("a", [waits("b", 1, 0)], [serves("b", 2, 0, LATER)]),
        worker("b", [waits("a", 2, 0)], [serves("a", 1, 0, LATER)]),
    ]
    assert [trouble.kind for trouble in find_troubles(snapshots, set())] == ["cycle"]


def test_a_call_that_the_callee_does_not_know_is_no_circle() -> None:
    assert find_troubles([worker("a", [waits("b", 1, MAIN)], []), worker("b", [], [])], None) == []


def test_a_callee_that_said_nothing_is_no_circle() -> None:
    assert find_troubles([worker("a", [waits("silent", 1, MAIN)], [])], None) == []


def test_an_exhausted_pool() -> None:
    full = PoolView(size=2, threads=2, busy=2, parked=0, queued=3)
    served = [serves("b", 1, WORKER), serves("b", 2, WORKER + 1), serves("b", 3, 0, QUEUED)]
    (trouble,) = find_troubles([worker("a", [], served, full)], set())
    assert (trouble.kind, trouble.workers) == ("exhausted pool", ["a"])
    assert "3 calls wait, the oldest for 5.0 s, while 2 functions hold 2 threads" in trouble.text


def test_threads_that_wait_for_calls_do_not_exhaust_a_pool() -> None:
    parked = PoolView(size=2, threads=3, busy=3, parked=2, queued=1)
    assert find_troubles([worker("a", [], [serves("b", 3, 0, QUEUED)], parked)], set()) == []


def test_who_has_not_moved() -> None:
    def picture(*threads: ThreadView) -> list[WorkerSnapshot]:
        return [WorkerSnapshot("a", 0, 1, "host", "running", IDLE_POOL, [], [], list(threads))]

    before = picture(thread(1, position=5), thread(2, position=5), thread(3, position=5, cpu_s=1.0))
    after = picture(thread(1, position=5), thread(2, position=6), thread(3, position=5, cpu_s=1.3), thread(4))
    assert still_threads(before, after) == {("a", 1)}


def test_a_thread_that_makes_brief_calls_is_seen_to_move() -> None:
    """Both looks may meet it at one place, and some calls take less than a tick of the system's clock."""

    def view() -> ThreadView:
        [found] = view_threads([threading.get_ident()])
        return found

    before = view()
    while time.thread_time() - before.cpu_s < 0.001:
        pass
    assert before.cpu_s + 0.001 <= view().cpu_s <= time.thread_time()


def test_names_of_functions() -> None:
    assert function_title(b"papp.models\0Layer.forward") == "Layer.forward"
    assert function_title(b"pfarcall.rpc.owned_values\0methods.of_push") == "rref.push"
    assert function_title(b"pfarcall.rpc.owned_values\0fetch") == "rref.to_here"
    assert function_title(b"oaten::add.Tensor") == "aten::add.Tensor"
    assert function_title(b"k\x80\x05whatever", "partial") == "partial"
    assert function_title(b"") == "(pickled function)"
