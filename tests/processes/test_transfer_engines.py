"""Shared tensors through a transfer engine: one in memory, between nodes of this process, and NIXL between processes.

NIXL moves the bytes by TCP on loopback. Its tests are skipped where it is not installed.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from tests.kit import memory_engine
from tests.kit.ports import tcp_url
from tests.kit.stopping import stop
from tests.kit.team import dynamic_team, team, together
from tests.kit.times import AT_ONCE_S, LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.channel.nixl_engine import NixlEngine
from farcall.errors import NetworkError, ReferenceLost, RpcTimeout
from farcall.options import MemoryOptions, RpcBackendOptions
from farcall.rpc.references import NodeReferences
from farcall.rpc.transfers import OpenedTensor, Transfers
from farcall.runtime.node import runtime_of
from farcall.testing.cluster import finish, start_processes, temporary_file_url

ROWS, COLUMNS = 1024, 2048
"""8 MiB; a quarter of the columns is in pieces of 2 KiB, which no engine moves."""
held: dict[str, Any] = {}


def numbers() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS).clone()


def share_numbers(writable: bool = True) -> farcall.RemoteTensor:
    held["tensor"] = numbers()
    return farcall.share(held["tensor"], writable=writable)


def total() -> float:
    return float(held["tensor"].double().sum())


def share_held() -> farcall.RemoteTensor:
    return farcall.share(held["tensor"], writable=True)


def forget() -> None:
    held.clear()


def kept_bytes() -> int:
    pool = api.current_runtime().pool
    assert pool is not None
    return pool.live_bytes


# --- an engine in memory: who uses it, and what follows when it fails


@pytest.fixture
def record() -> memory_engine.Record:
    return memory_engine.begin_anew()


@pytest.fixture
def nodes(record: memory_engine.Record) -> Iterator[list[farcall.Node]]:
    memory = MemoryOptions(transfer_engine=memory_engine.NAME)
    with team([None] * 2, transports=("tcp",), encryption="off", memory=memory, membership=PATIENT) as nodes:
        yield nodes
        held.clear()
        gc.collect()
        wait_until(lambda: not record.exported, "all memory given back: an ended node may keep values for its holders")
    assert record.engines == 0


def test_large_parts_go_through_the_engine_and_the_others_by_calls(
    nodes: list[farcall.Node], record: memory_engine.Record
) -> None:
    tensor: Any = nodes[0].rpc_sync("w1", share_numbers)
    everything = numbers()

    def read(*slices: slice, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        target = torch.empty(everything[slices].shape, dtype=dtype)
        return tensor.read_into(target, slices=slices)

    assert torch.equal(read(), everything)
    assert torch.equal(read(slice(100, 900), dtype=torch.float64), everything[100:900].double())
    assert torch.equal(read(slice(0, 1024, 2), slice(1024, 2048)), everything[0:1024:2, 1024:2048])
    assert record.ranges == [1, 1, 512]
    assert torch.equal(read(slice(None), slice(0, 512)), everything[:, :512])
    assert torch.equal(read(slice(0, 4)), everything[:4])
    assert len(record.ranges) == 3
    tensor.write_from(torch.zeros(512, COLUMNS, dtype=torch.int32), slices=slice(0, 512))
    assert record.ranges[3:] == [1]
    assert nodes[0].rpc_sync("w1", total) == float(everything[512:].double().sum())
    held.clear()
    tensor = None
    gc.collect()
    wait_until(lambda: not record.opened and not record.exported, "all memory closed and given back")


@pytest.mark.parametrize("when", ["refusal", "failure"])
def test_where_the_engine_fails_the_owner_is_called(
    nodes: list[farcall.Node], record: memory_engine.Record, when: str
) -> None:
    tensor = nodes[0].rpc_sync("w1", share_numbers)
    setattr(record, when, OSError("no route"))
    tensor.write_from(torch.ones(ROWS, COLUMNS))
    assert nodes[0].rpc_sync("w1", total) == ROWS * COLUMNS
    setattr(record, when, None)
    before = len(record.ranges)
    assert float(tensor.read_into(torch.empty(ROWS, COLUMNS)).sum()) == ROWS * COLUMNS
    assert len(record.ranges) == before, "it is not tried again for this tensor"


def test_a_transfer_ends_at_the_deadline_of_the_read(nodes: list[farcall.Node], record: memory_engine.Record) -> None:
    tensor = nodes[0].rpc_sync("w1", share_numbers)
    record.may_finish.clear()
    target = torch.zeros(ROWS, COLUMNS)
    with pytest.raises(RpcTimeout, match="8388608 bytes"):
        tensor.read_into(target, timeout=2.0)  # the transfer must begin before that
    held.clear()
    del tensor
    gc.collect()
    assert record.exported, "the transfer may still read it"
    record.may_finish.set()
    wait_until(lambda: not record.opened and not record.exported, "all memory closed and given back")
    assert not target.any(), "what comes late is not written to the program's tensor"


def test_memory_rests_if_a_reader_leaves_before_its_transfer_is_over(
    record: memory_engine.Record, tmp_path: Path
) -> None:
    memory = MemoryOptions(transfer_engine=memory_engine.NAME)
    with dynamic_team(2, tmp_path, transports=("tcp",), encryption="off", memory=memory, membership=PATIENT) as nodes:
        tensor = nodes[0].rpc_sync("w1", share_numbers)
        record.may_finish.clear()
        with pytest.raises(RpcTimeout, match="8388608 bytes"):
            tensor.read_into(torch.empty(ROWS, COLUMNS), timeout=2.0)  # the transfer must begin before that
        held.clear()
        owner = runtime_of(nodes[1])
        nodes[0].shutdown()
        wait_until(lambda: not owner.part(NodeReferences).places, "the owner drops the tensor")
        gc.collect()
        owner.part(Transfers)._tend()
        assert record.exported, "the transfer of the one that left may still read it"
    assert record.engines == 0
    assert not record.exported


def test_the_death_of_the_owner_ends_a_transfer(record: memory_engine.Record) -> None:
    memory = MemoryOptions(transfer_engine=memory_engine.NAME)
    with team([None] * 2, transports=("tcp",), encryption="off", memory=memory) as nodes:
        tensor = nodes[0].rpc_sync("w1", share_numbers)
        record.may_finish.clear()
        told: list[BaseException] = []

        def read() -> None:
            try:
                tensor.read_into(torch.empty(ROWS, COLUMNS), timeout=10 * LONG_S)
            except BaseException as error:
                told.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert record.begun.wait(LONG_S)
        nodes[1].shutdown(graceful=False)
        reader.join(LONG_S)
        assert isinstance(told[0], ReferenceLost)
        assert "w1" in str(told[0])
        held.clear()
        nodes[0].shutdown(graceful=False)
    assert record.engines == 0


def test_who_names_no_engine_calls_the_owner(record: memory_engine.Record) -> None:
    url = tcp_url()
    options = [RpcBackendOptions(init_method=url, transports=("tcp",), encryption="off") for _ in range(2)]
    options[1] = options[1].replace(memory=MemoryOptions(transfer_engine=memory_engine.NAME))
    nodes = [farcall.Node(f"w{rank}", rank=rank, world_size=2, options=options[rank]) for rank in range(2)]
    together([node.start for node in nodes])
    tensor = nodes[0].rpc_sync("w1", share_numbers)
    assert record.exported
    assert torch.equal(tensor.read_into(torch.empty(ROWS, COLUMNS)), numbers())
    assert not record.opened
    held.clear()
    del tensor
    together([node.shutdown for node in nodes])
    assert record.engines == 0


# --- NIXL

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed (pip install nixl)")
NIXL = MemoryOptions(transfer_engine="nixl")
BY_TCP = {
    "UCX_TLS": "tcp",
    "UCX_NET_DEVICES": "lo",
    # The wheels up to 1.5.1 have a library for InfiniBand that crashes when the process ends, where there is none.
    "UCX_MODULES": "^ib",
    "NIXL_LOG_LEVEL": "ERROR",
}


def native() -> tuple[int, int]:
    """Threads of all libraries, and descriptors, once all is freed that an ended node still refers to."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def member(rank: int, size: int, url: str, work: Any) -> Any:
    """A member whose engine is NIXL; after its end nothing is left of that."""
    os.environ.update(BY_TCP)
    NixlEngine().close()
    numbers().t().contiguous().double().sum()  # torch and NIXL have by now what they keep for good
    before = native()
    options = RpcBackendOptions(init_method=url, transports=("tcp",), encryption="off", memory=NIXL, membership=PATIENT)
    farcall.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    with_engine = native()
    result = work(rank)
    farcall.shutdown(graceful=result != "alone")
    held.clear()
    wait_until(lambda: all(now <= then for now, then in zip(native(), before, strict=True)), "all threads ended")
    assert with_engine > before
    return result


def run_members(size: int, work: Any, may_fail: Sequence[int] = ()) -> list[Any]:
    # Members meet at a file: a store's server leaves a descriptor behind.
    return finish(start_processes(size, member, size, temporary_file_url(), work), may_fail=may_fail)


def uses_nixl(tensor: farcall.RemoteTensor) -> bool:
    return isinstance(tensor._transferable, OpenedTensor)


def nixl_parts(rank: int) -> None:
    if rank == 0:
        tensor = farcall.rpc_sync("w1", share_numbers)
        again = farcall.rpc_sync("w1", share_held)  # the same memory a second time
        everything = numbers()
        assert torch.equal(tensor.read_into(torch.empty(ROWS, COLUMNS)), everything)
        part = torch.empty(512, 1024, dtype=torch.float64)
        tensor.read_into(part, slices=(slice(0, 1024, 2), slice(1024, 2048)))
        assert torch.equal(part, everything[0:1024:2, 1024:2048].double())
        tensor.write_from(torch.zeros(512, COLUMNS), slices=slice(0, 512))
        assert farcall.rpc_sync("w1", total) == float(everything[512:].double().sum())
        assert torch.equal(again.read_into(torch.empty(512, COLUMNS), slices=slice(512, 1024)), everything[512:])
        assert uses_nixl(tensor)
        assert uses_nixl(again)
        del tensor
        gc.collect()
        for _ in range(5):  # one of the two registrations is gone
            assert torch.equal(again.read_into(torch.empty(512, COLUMNS), slices=slice(512, 1024)), everything[512:])
        assert uses_nixl(again)
        del again
        farcall.rpc_sync("w1", forget)
        gc.collect()
        wait_until(lambda: farcall.rpc_sync("w1", kept_bytes) == 0, "all memory given back")
    farcall.barrier()


@needs_nixl
def test_nixl_reads_and_writes_parts() -> None:
    run_members(2, nixl_parts)


def nixl_stopped(rank: int) -> None:
    if rank == 0:
        tensor = farcall.rpc_sync("w1", share_numbers)
        tensor.read_into(torch.empty(ROWS, COLUMNS))
        assert uses_nixl(tensor)
        owner = farcall.rpc_sync("w1", os.getpid)
        stop(owner)
        try:
            began = monotonic()
            with pytest.raises(RpcTimeout):
                tensor.read_into(torch.empty(ROWS, COLUMNS), timeout=0.5)
            assert monotonic() - began < AT_ONCE_S
        finally:
            os.kill(owner, signal.SIGCONT)
        assert torch.equal(tensor.read_into(torch.empty(ROWS, COLUMNS)), numbers())
        assert uses_nixl(tensor)
    farcall.barrier()


@needs_nixl
def test_nixl_waits_for_a_stopped_owner_until_the_deadline() -> None:
    run_members(2, nixl_stopped)


def nixl_killed(rank: int) -> str:
    if rank == 1:
        threading.Event().wait(10 * LONG_S)
    tensor = farcall.rpc_sync("w1", share_numbers)
    tensor.read_into(torch.empty(ROWS, COLUMNS))
    assert uses_nixl(tensor)
    owner = farcall.rpc_sync("w1", os.getpid)
    stop(owner)
    killing = threading.Timer(0.5, os.kill, (owner, signal.SIGKILL))
    killing.start()
    began = monotonic()
    with pytest.raises(ReferenceLost, match="w1"):
        tensor.read_into(torch.empty(ROWS, COLUMNS), timeout=10 * LONG_S)
    with pytest.raises(ReferenceLost, match="w1"):
        tensor.write_from(torch.ones(ROWS, COLUMNS), timeout=10 * LONG_S)
    assert monotonic() - began < 2 * LONG_S
    killing.join()
    return "alone"


@needs_nixl
def test_nixl_tells_of_a_dead_owner() -> None:
    assert run_members(2, nixl_killed, may_fail=[1])[0] == "alone"


def read_for_ever(tensor: farcall.RemoteTensor) -> None:
    target = torch.empty(ROWS, COLUMNS)
    while True:
        tensor.read_into(target)


def nixl_reader_killed(rank: int) -> str:
    if rank == 1:
        threading.Event().wait(10 * LONG_S)
    reader = farcall.rpc_sync("w1", os.getpid)
    tensor = share_numbers()
    reading = farcall.rpc_async("w1", read_for_ever, (tensor,), timeout=10 * LONG_S)
    sleep(0.5)  # some transfers; how far the last one came does not matter
    del tensor
    held.clear()
    os.kill(reader, signal.SIGKILL)
    with pytest.raises(NetworkError):
        reading.wait()
    gc.collect()
    sleep(0.5)
    assert kept_bytes() > 0, "a transfer of the dead reader may still be under way"
    return "alone"


@needs_nixl
def test_nixl_owner_outlives_a_reader_that_dies_at_work() -> None:
    assert run_members(2, nixl_reader_killed, may_fail=[1])[0] == "alone"
