"""Ctrl-C anywhere: the wait ends with KeyboardInterrupt, and whoever catches that goes on with a link that works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.kit.ports import held_port, tcp_url
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.waiting import wait_until

import farcall
from farcall import api, autograd
from farcall.autograd.recorder import Recorder
from farcall.errors import NotInitialized
from farcall.node import Node
from farcall.protocol.references.messages import Counts
from farcall.rpc.references import NodeReferences
from farcall.testing.cluster import finish, run_cluster, start_processes


def block(path: str) -> str:
    wait_until(lambda: os.path.exists(path))
    return "done"


def interrupt_when(condition: Callable[[], object]) -> threading.Thread:
    """Press Ctrl-C once, from another thread, as soon as ``condition`` holds."""

    def press() -> None:
        wait_until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def interrupted(wait: Callable[[], object], when: Callable[[], object]) -> float:
    """How long it took the wait to end after Ctrl-C was pressed."""
    pressed: list[float] = []

    def note() -> bool:
        if when():
            pressed.append(time.monotonic())
            return True
        return False

    thread = interrupt_when(note)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        thread.join()
    return time.monotonic() - pressed[0]


def no_thread_of_ours() -> bool:
    return not [thread for thread in threading.enumerate() if "farcall" in thread.name]


def calls_pending(count: int) -> bool:
    return len(api.current_runtime().calls) == count


# --- while waiting for an answer


def wait_for_answers(rank: int, path: str) -> list[float]:
    if rank == 1:
        return []
    took = [interrupted(lambda: farcall.rpc_sync("w1", block, (path,)), lambda: calls_pending(1))]
    assert calls_pending(0)
    future = farcall.rpc_async("w1", block, (path,))
    took.append(interrupted(future.wait, lambda: calls_pending(1) and waits_in("wait")))
    chained = future.then(lambda done: done.value())
    with_callback = farcall.rpc_async("w1", block, (path,))
    with_callback.add_done_callback(lambda done: None)
    took.append(interrupted(with_callback.wait, lambda: waits_in("wait")))
    took.append(interrupted(lambda: farcall.rpc_sync("w0", block, (path,)), lambda: calls_pending(3)))
    # The link works as before, and the futures, too.
    assert farcall.rpc_sync("w1", os.getpid) != os.getpid()
    Path(path).touch()
    assert [future.wait(), chained.wait(), with_callback.wait()] == ["done"] * 3
    return took


def waits_in(name: str) -> bool:
    """Is the main thread inside a function called ``name``?"""
    import sys

    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code.co_name == name and "farcall" in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@pytest.mark.parametrize("transports", [("unix", "tcp"), ("tcp",)])
def test_interrupted_waits_end_at_once_and_the_link_goes_on(tmp_path: Path, transports: tuple[str, ...]) -> None:
    took = run_cluster(2, wait_for_answers, str(tmp_path / "go"), transports=transports)[0]
    assert len(took) == 4
    assert max(took) < AT_ONCE_S


# --- while starting and leaving


def wait_for_peers(rank: int, port: int) -> float:
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")

    def init() -> None:
        farcall.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)

    before = signal.getsignal(signal.SIGINT)
    seconds = interrupted(init, lambda: waits_in("join"))
    assert signal.getsignal(signal.SIGINT) is before
    wait_until(no_thread_of_ours)  # one that ended may still be on its last lines
    # And the process can be a worker all the same.
    farcall.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    assert farcall.rpc_sync("w0", os.getpid) == os.getpid()
    farcall.shutdown()
    return seconds


def test_interrupted_start_leaves_nothing_and_can_be_tried_again() -> None:
    assert finish(start_processes(1, wait_for_peers, held_port()))[0] < AT_ONCE_S


def wait_in_shutdown(rank: int, port: int, path: str) -> float:
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        block(path)
        farcall.shutdown()
        return 0.0
    seconds = interrupted(farcall.shutdown, lambda: waits_in("enter"))
    Path(path).touch()
    with pytest.raises(NotInitialized):
        farcall.get_worker_info()
    wait_until(no_thread_of_ours)  # one that ended may still be on its last lines
    farcall.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    farcall.shutdown()
    return seconds


def test_interrupted_shutdown_leaves_at_once_and_the_others_notice(tmp_path: Path) -> None:
    assert max(finish(start_processes(2, wait_in_shutdown, held_port(), str(tmp_path / "go")))) < AT_ONCE_S


# --- a storm


class Storm:
    """SIGINT after SIGINT, from a process of its own: no thread of this one has to run for that.

    Its pauses grow: however slow the machine is, at first no call gets through, and in the end most of them do.
    """

    def __init__(self, pause_s: float) -> None:
        target = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                while os.getppid() == target:
                    os.kill(target, signal.SIGINT)
                    time.sleep(pause_s)
                    pause_s *= 1.005
            finally:
                os._exit(0)

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class Pressed(BaseException):
    """Like KeyboardInterrupt, and nobody else raises it."""


armed = [False]


def press(number: int, frame: object) -> None:
    if armed[0]:
        raise Pressed


def cut_short(call: Callable[[], None]) -> bool:
    """Make ``call`` under fire, and cease fire before anything else is done."""
    try:
        armed[0] = True
        try:
            call()
        finally:
            armed[0] = False
    except Pressed:
        return True
    return False


def one_call(kind: str, number: int, value: torch.Tensor) -> None:
    if kind.endswith("sync"):
        assert farcall.rpc_sync("w1", max, (number, -1)) == number
    elif kind.endswith("self"):
        assert farcall.rpc_sync("w0", max, (number, -1)) == number
    elif kind.endswith("many"):
        futures = [farcall.rpc_async("w1", max, (index, -1)) for index in range(10)]
        assert [future.wait() for future in futures] == list(range(10))
    else:
        assert torch.equal(farcall.rpc_sync("w1", torch.neg, (value,)), -value)


def tight_loop(rank: int, port: int, kind: str, when: str) -> tuple[int, int]:
    options = farcall.RpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", transports=("tcp",) if kind.startswith("tcp") else None
    )
    if rank == 0 and when == "before":
        signal.signal(signal.SIGINT, press)
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    answered = interrupts = 0
    if rank == 0:
        if when == "after":
            signal.signal(signal.SIGINT, press)
        value = torch.arange(1 << 17)
        storm = Storm(0.01 if kind.endswith("tensor") else 0.0004)
        enough_at, give_up_at = time.monotonic() + 4.0, time.monotonic() + 2 * LONG_S
        while time.monotonic() < give_up_at:
            least = min(interrupts, answered)
            if least >= 300 or (least > 20 and time.monotonic() > enough_at):
                break
            if cut_short(partial(one_call, kind, answered, value)):
                interrupts += 1
            else:
                answered += 1
        storm.stop()
        assert [farcall.rpc_sync("w1", max, (number, -1)) for number in range(100)] == list(range(100))
    farcall.shutdown(timeout=3 * LONG_S)
    return answered, interrupts


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        *((kind, "before") for kind in ("sync", "many", "self", "tensor", "tcp sync", "tcp tensor")),
        *((kind, "after") for kind in ("sync", "many", "tensor")),
    ],
)
def test_storm_of_interrupts_tears_no_frame_and_loses_no_lock(kind: str, when: str) -> None:
    """``when``: does the program set its handler before, or after `init_rpc`?"""
    answered, interrupts = finish(start_processes(2, tight_loop, held_port(), kind, when))[0]
    assert answered > 20
    assert interrupts > 20


def make_value(*_: object) -> object:
    return object()


def make_nothing(*_: object) -> None:
    pass


def one_reference(kind: str, sent: list[farcall.RRef[object]]) -> None:
    if kind == "own":
        farcall.RRef(1)
    elif kind == "created":
        farcall.remote("w1", make_value)
    elif kind == "sent":
        farcall.rpc_sync("w1", make_nothing, (sent[0], [farcall.RRef(1)]))
    else:
        farcall.remote("w1", make_value, (sent[0],))


def held_here() -> tuple[Counts, int]:
    """The references of this worker, and how many numbers of forks came ahead of one that has not come."""
    references = api.current_runtime().part(NodeReferences)
    return references.counts(), sum(len(found.ahead) for found in references._machine._arrivals.values())


def make_references(rank: int, port: int, kind: str) -> int:
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    interrupts = 0
    if rank == 0:
        signal.signal(signal.SIGINT, press)
        sent = [farcall.remote("w1", make_value)]
        storm = Storm(0.0003)
        give_up_at = time.monotonic() + 2 * LONG_S
        while interrupts < 200 and time.monotonic() < give_up_at:
            interrupts += cut_short(partial(one_reference, kind, sent))
        storm.stop()
        sent.clear()
        none = (Counts(0, 0, 0, 0, 0, 0), 0)
        wait_until(lambda: held_here() == farcall.rpc_sync("w1", held_here) == none)
    farcall.shutdown(timeout=3 * LONG_S)
    return interrupts


@pytest.mark.parametrize("kind", ["created", "own", "sent", "created with one"])
def test_storm_of_interrupts_loses_no_reference(kind: str) -> None:
    assert finish(start_processes(2, make_references, held_port(), kind))[0] >= 200


WEIGHT = torch.rand(3, 3, requires_grad=True)


def through_weight(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


def contexts_here() -> list[int]:
    return api.current_runtime().part(Recorder).contexts.ids()


def one_pass(route: Sequence[str], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        y = x
        for name in route:
            y = farcall.rpc_sync(name, through_weight, (y,))
        autograd.backward(context_id, [y.sum()])
        assert x in autograd.get_gradients(context_id)


def make_passes(rank: int, port: int, route: Sequence[str]) -> tuple[int, int]:
    """Whatever is cut, an interrupt arrives as itself, and the next context finds all as it was."""
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    answered = interrupts = 0
    if rank == 0:
        signal.signal(signal.SIGINT, press)
        x = torch.rand(2, 3, requires_grad=True)
        storm = Storm(0.0008)
        give_up_at = time.monotonic() + 2 * LONG_S
        while (interrupts < 300 or answered < 20) and time.monotonic() < give_up_at:
            if cut_short(partial(one_pass, route, x)):
                interrupts += 1
            else:
                answered += 1
        storm.stop()
        one_pass(route, x)
        wait_until(lambda: not any(farcall.rpc_sync(f"w{other}", contexts_here) for other in range(3)))
    farcall.shutdown(timeout=3 * LONG_S)
    return answered, interrupts


@pytest.mark.parametrize("route", [["w1"], ["w1", "w2", "w1", "w0"]])
def test_storm_of_interrupts_loses_no_context(route: Sequence[str]) -> None:
    answered, interrupts = finish(start_processes(3, make_passes, held_port(), route))[0]
    assert answered >= 20
    assert interrupts >= 300


def use_two_nodes(rank: int, port: int) -> bool:
    """A node started or ended on another thread must not take the handler from one that needs it."""
    options = farcall.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    before = signal.getsignal(signal.SIGINT)
    first = Node("first", 0, 1, options)
    first.start()
    ours = signal.getsignal(signal.SIGINT)
    second = Node("second", 0, 1, options.replace(init_method=tcp_url()))
    thread = threading.Thread(target=second.start)
    thread.start()
    thread.join()
    second.shutdown()
    assert signal.getsignal(signal.SIGINT) is ours
    first.shutdown()
    return signal.getsignal(signal.SIGINT) is before and ours is not before


def test_handler_stays_as_long_as_one_node_needs_it() -> None:
    assert finish(start_processes(1, use_two_nodes, held_port())) == [True]
