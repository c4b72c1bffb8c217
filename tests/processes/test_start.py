"""A program pays at its start for what it uses: modules beyond plain calls are not loaded."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import pytest
from tests.kit.team import team
from tests.kit.times import LONG_S

import farcall
from farcall.errors import NotInitialized, PeerDead
from farcall.node import weights_of
from farcall.protocol.streams import StreamClosed, StreamCredit
from farcall.protocol.weights.messages import Message
from farcall.rpc.node_streams import Streams
from farcall.runtime.calls.executor import Executor
from farcall.runtime.node import current_runtime, runtime_of

MOST_MODULES = 190
"""What a plain call needs, and hardly more. A module that only some programs use is imported where they use it."""
NOT_LOADED = (
    "farcall.children",
    "farcall.channel.device_memory",
    "farcall.cli",
    "farcall.launcher",
    "farcall.observe.capture",
    "farcall.observe.cluster",
    "farcall.observe.dashboard",
    "farcall.observe.metrics",
    "farcall.observe.observer",
    "farcall.observe.profile",
    "farcall.observe.telemetry",
    "farcall.observe.trace",
    "farcall.rpc.batches",
    "farcall.rpc.gather",
    "farcall.rpc.handles",
    "farcall.rpc.node_streams",
    "farcall.rpc.retry",
    "farcall.rpc.streams",
    "farcall.rpc.transfers",
    "farcall.runtime.calls.arriving_code",
    "farcall.runtime.devices.node",
    "farcall.serialize.units",
    "farcall.weights",
)
PLAIN = """
import sys, tempfile
import farcall

with tempfile.TemporaryDirectory() as directory:
    options = farcall.RpcBackendOptions(init_method=f"file://{directory}/store")
    farcall.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert farcall.rpc_sync("alone", divmod, args=(7, 2)) == (3, 1)
    farcall.shutdown()
print(*(name for name in sys.modules if name.partition(".")[0] == "farcall"))
"""


def test_a_plain_call_loads_what_it_needs() -> None:
    child = subprocess.run(
        [sys.executable, "-c", PLAIN], capture_output=True, text=True, timeout=4 * LONG_S, check=True
    )
    loaded = child.stdout.split()
    assert [name for name in loaded if any(f"{name}.".startswith(f"{part}.") for part in NOT_LOADED)] == []
    assert len(loaded) <= MOST_MODULES


@pytest.mark.parametrize("first", ["weights", "streams"])
def test_a_layer_that_is_loaded_late_handles_all_its_messages(first: str, tmp_path: Path) -> None:
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with farcall.Node("alone", rank=0, world_size=1, options=options) as node:
        runtime = runtime_of(node)
        kinds = get_args(Message) if first == "weights" else (StreamCredit, StreamClosed)
        before = {kind: runtime.hooks.controls[kind] for kind in kinds}
        if first == "weights":
            weights_of(runtime)
        else:
            runtime.part(Streams)
        assert [kind for kind in kinds if runtime.hooks.controls[kind] is before[kind]] == []


def test_a_function_finds_its_node_from_any_thread_as_soon_as_one_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member may call when this one's init_rpc has not returned yet."""
    found: list[farcall.WorkerInfo] = []
    start = Executor.start

    def start_and_ask(executor: Executor) -> None:
        thread = threading.Thread(target=lambda: found.append(farcall.get_worker_info()))
        thread.start()
        thread.join(LONG_S)
        start(executor)

    monkeypatch.setattr(Executor, "start", start_and_ask)
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    farcall.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    farcall.shutdown()
    assert [info.name for info in found] == ["alone"]


def test_a_node_that_is_expelled_while_it_starts_is_nobodys_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Executor.start

    def start_expelled(executor: Executor) -> None:
        start(executor)
        current_runtime().lifecycle.verdict = PeerDead("expelled meanwhile")

    monkeypatch.setattr(Executor, "start", start_expelled)
    options = farcall.RpcBackendOptions(init_method=f"file://{tmp_path}/store")
    with pytest.raises(PeerDead, match="expelled meanwhile"):
        farcall.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(NotInitialized):
        farcall.get_worker_info()


class Malloc(ctypes.Structure):
    """What glibc's ``mallinfo2`` says of the memory of C code."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"abc", "mapped", *"de", "used", *"fg")]


counts_malloc = getattr(ctypes.CDLL(None), "mallinfo2", None)


def memory_in_use() -> tuple[int, int]:
    """Python's blocks, and the bytes of C code."""
    assert counts_malloc is not None
    counts_malloc.restype = Malloc
    gc.collect()
    found = counts_malloc()
    return sys.getallocatedblocks(), found.used + found.mapped


@pytest.mark.skipif(counts_malloc is None, reason="no glibc that counts its memory")
def test_starts_and_shutdowns_of_a_fixed_group_leave_nothing_behind() -> None:
    cycles = 40
    for number in range(2 * cycles):
        if number == cycles:
            blocks_before, bytes_before = memory_in_use()
        with team([None, None], 2) as nodes:
            assert nodes[0].rpc_sync("w1", len, ("one",)) == 3
    blocks, size_bytes = memory_in_use()
    # Usually 10 blocks and 300 bytes each time: tables that grow.
    assert blocks - blocks_before < 40 * cycles
    assert size_bytes - bytes_before < 2000 * cycles
