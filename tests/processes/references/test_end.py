"""References between real processes: what is held at a shutdown, leaked, or used after it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.kit.ports import tcp_url
from tests.kit.waiting import PATIENCE_S, wait_until
from tests.processes.calls.callees import Gate
from tests.processes.references.callees import Counter, identity, keep

import farcall
from farcall import api
from farcall.errors import (
    Cancelled,
    NotInitialized,
    ReferenceLeak,
    ReferenceLost,
)
from farcall.rpc.references import NodeReferences
from farcall.testing.cluster import (
    MemberFailed,
    finish,
    run_cluster,
    start_processes,
)

held_to_the_end: list[Any] = []


def hold_to_the_end(rank: int, size: int) -> None:
    api._ignore_rref_leak = False
    held_to_the_end.append(farcall.remote((rank + 1) % size, identity, (1,)))
    held_to_the_end.append(farcall.RRef(2))
    farcall.rpc_sync((rank + 1) % size, keep, ("end", held_to_the_end[:]))
    # Sent on at the last moment: its registration is under way while we leave.
    farcall.rpc_async((rank + 2) % size, keep, ("end too", held_to_the_end[:]))


def test_what_is_held_at_the_end_is_given_up_and_is_no_leak() -> None:
    for _ in range(3):
        run_cluster(3, hold_to_the_end, 3)


def leak(rank: int) -> None:
    api._ignore_rref_leak = False
    farcall.debug.trace_references()
    held_to_the_end.append(farcall.remote(1 - rank, Counter, (1,)))  # this very line is in the report
    held_to_the_end[-1].to_here()
    node = api.current_runtime()
    node.part(NodeReferences).shutdown.give_up = lambda: None


def test_a_leak_says_who_holds_what_created_where() -> None:
    line = leak.__code__.co_firstlineno + 3
    with pytest.raises(MemberFailed) as caught:
        run_cluster(2, leak)
    text = str(caught.value)
    for rank in (0, 1):
        assert f"Leaking RRef: values of w{rank} were held to the last" in text
        assert f"w{1 - rank} holds {1 - rank}:0, a Counter, created at {__file__}:{line} on w{1 - rank}" in text
    assert ReferenceLeak.__name__ in text


def use_after_the_end(rank: int, size: int) -> None:
    rref = farcall.remote((rank + 1) % size, identity, (1,))
    mine = farcall.RRef([rank])
    assert rref.to_here() == 1
    farcall._delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(ReferenceLost):
        farcall.rpc_sync((rank + 1) % size, identity, (rref,))
    held_to_the_end.extend((rref, mine))


def after_the_end() -> None:
    rref, mine = held_to_the_end
    with pytest.raises(NotInitialized):
        rref.to_here()
    with pytest.raises(NotInitialized):
        rref.rpc_sync().anything()
    assert "w" in repr(rref)
    assert mine.local_value() in ([0], [1])
    held_to_the_end.clear()


def live_twice(rank: int, urls: list[str]) -> None:
    for url in urls:
        number = rank
        farcall.init_rpc(
            f"w{number}", rank=number, world_size=2, rpc_backend_options=farcall.RpcBackendOptions(init_method=url)
        )
        use_after_the_end(number, 2)
        farcall.shutdown()
        after_the_end()


def test_references_after_shutdown_and_another_life() -> None:
    urls = [tcp_url() for _ in range(2)]
    finish(start_processes(2, live_twice, urls))


def test_references_left_at_the_end_of_the_interpreter_make_no_noise() -> None:
    script = f"""
        import farcall, threading, operator
        options = farcall.RpcBackendOptions(init_method="{tcp_url()}")
        farcall.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        kept = [farcall.remote("alone", operator.add, (1, 2)) for _ in range(100)]
        more = farcall.RRef(kept)
        assert [one.to_here() for one in kept] == [3] * 100
        class Late:
            def __del__(self): self.rref = None
        late = Late(); late.rref = farcall.RRef(1); late.me = late
        threading.current_thread().late = late
    """
    for ending in ("", "farcall.shutdown()"):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script) + ending], capture_output=True, text=True, timeout=250
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_a_wait_for_a_value_of_ones_own_ends_with_the_node(tmp_path: Path) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    node = farcall.Node("alone", rank=0, world_size=1, options=options)
    node.start()
    try:
        rref = node.remote("alone", Gate.wait, ("the node's end",))
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                rref.to_here(timeout=None)
            except BaseException as error:
                failed.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        owned = rref._owned
        assert owned is not None
        wait_until(lambda: owned._waiting, "the thread that waits for the value")
        node.shutdown(graceful=False)
        waiter.join(PATIENCE_S)
        assert [type(error) for error in failed] == [Cancelled]
        assert "alone shut down before the value was made" in str(failed[0])
    finally:
        Gate.open("the node's end")
