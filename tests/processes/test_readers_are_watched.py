"""User code that a reading thread runs unseen (chains that torch makes in C++, unpickling) stops nobody else."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import torch

import farcall
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import run_cluster, temporary_file_url

released = threading.Event()
let_go = threading.Event()


def nothing() -> None:
    pass


def wait_until_let_go() -> None:
    assert let_go.wait(60)


def let_all_go() -> None:
    let_go.set()


class SlowToRebuild:
    """Rebuilding it takes until another call was answered."""

    def __reduce__(self) -> Any:
        return _rebuild, ()


def _rebuild() -> str:
    assert released.wait(60)
    return "rebuilt"


def make_slow() -> SlowToRebuild:
    return SlowToRebuild()


def chains(rank: int) -> None:
    if rank:
        return
    farcall.rpc_sync("w1", nothing)
    entered = threading.Event()
    go_on = threading.Event()

    def block(_: Any) -> None:
        entered.set()
        assert go_on.wait(60)

    # The answers come when both callbacks are there: on this thread, and not on one that reads, they would run before.
    answers = [farcall.rpc_async("w1", wait_until_let_go) for _ in range(2)]
    blocked = torch.futures.collect_all(answers[:1]).then(block)
    # A callback that waits the way torch does it, deaf to us.
    chained = torch.futures.collect_all(answers[1:]).then(
        lambda _: torch.futures.wait_all([farcall.rpc_async("w1", nothing, timeout=60)])
    )
    farcall.rpc_async("w1", let_all_go)  # and no wait, which could make this thread read the answers
    assert entered.wait(60)
    farcall.rpc_sync("w1", nothing, timeout=60)  # while the callback sits on the thread that read the answer
    go_on.set()
    blocked.wait()
    chained.wait()


def test_callbacks_behind_chains_of_torch_block_nobody() -> None:
    run_cluster(2, chains)


def rebuild_slowly(rank: int) -> Any:
    if rank:
        return None
    slow = farcall.rpc_async("w1", make_slow, timeout=60)
    farcall.rpc_sync("w1", nothing, timeout=60)
    released.set()
    return slow.wait()


def test_a_result_that_is_slow_to_rebuild_blocks_nobody() -> None:
    assert run_cluster(2, rebuild_slowly)[0] == "rebuilt"


may_be_slow = threading.Event()
go_on = threading.Event()
entered = threading.Event()


def quick_at_first() -> None:
    if may_be_slow.is_set():
        entered.set()
        assert go_on.wait(60)


def test_a_request_that_was_kept_back_blocks_nobody() -> None:
    """It is delivered by the I/O thread, which reads nothing at that moment."""
    url = temporary_file_url()
    options = farcall.RpcBackendOptions(init_method=url)
    with farcall.Node("w0", 0, options=options) as callee, farcall.Node("w1", 1, options=options) as caller:
        seen: list[Any] = []
        accept_now = runtime_of(callee).server.accept

        def accept(peer: Any, frame: Any) -> None:
            seen.append((peer, frame))
            accept_now(peer, frame)

        runtime_of(callee).server.accept = accept  # type: ignore[method-assign]
        for _ in range(20):
            caller.rpc_sync("w0", quick_at_first)
        may_be_slow.set()
        peer, frame = seen[-1]
        again = msgspec.structs.replace(frame, call_id=1 << 40)
        runtime_of(callee).call_soon(lambda: runtime_of(callee).dispatcher.redeliver(peer, again))
        assert entered.wait(60)
        try:
            assert caller.rpc_sync("w0", int, ("7",), timeout=30) == 7
        finally:
            go_on.set()


def thread_name() -> str:
    return threading.current_thread().name


def names_of_threads_at(worker: str) -> set[str]:
    return {farcall.rpc_sync(worker, thread_name) for _ in range(200)}


def be_called_while_waiting(rank: int) -> Any:
    return None if rank else farcall.rpc_sync("w1", names_of_threads_at, args=("w0",))


def test_who_waits_for_an_answer_and_meets_requests_leaves_reading_to_the_thread_that_may_serve_them() -> None:
    names = run_cluster(2, be_called_while_waiting)[0]
    assert any(name.startswith("farcall-io") for name in names), names
