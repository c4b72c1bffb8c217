"""Tensors that stay at their owner: who maps them, who has them sent, and what is true when the owner is gone."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch
from tests.kit.stopping import stop
from tests.kit.times import LONG_S, PATIENT
from tests.kit.waiting import wait_until

import farcall
from farcall import api
from farcall.errors import ReferenceLost, RpcError
from farcall.testing.cluster import finish, run_cluster, start_cluster

ROWS, COLUMNS = 512, 256
WAYS = [("unix", "tcp"), ("tcp",)]
"""On one host, memory is mapped; over TCP the owner sends bytes."""

held: dict[str, Any] = {}
"""What the owner keeps between calls."""
released = threading.Event()


def numbers() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS).clone()


def share_numbers(writable: bool) -> farcall.RemoteTensor:
    held["tensor"] = numbers()
    return farcall.share(held["tensor"], writable=writable)


def share_kept(name: str) -> farcall.RemoteTensor:
    return farcall.share(held[name])


def add(amount: float) -> None:
    held["tensor"] += amount


def read_at(tensor: farcall.RemoteTensor) -> float:
    return float(tensor.read_into(torch.empty(ROWS, COLUMNS)).sum())


def block() -> None:
    released.wait(LONG_S)


def unblock() -> None:
    released.set()


def forget() -> None:
    held.clear()


def owned_blocks() -> int:
    pool = api.current_runtime().pool
    assert pool is not None
    return pool.live_bytes


def mapped(tensor: farcall.RemoteTensor) -> None:
    """Read until this process looks at the owner's memory: an offer of it may come a moment late."""

    def look() -> bool:
        tensor.read_into(torch.empty(1, COLUMNS), slices=slice(0, 1))
        return tensor.is_mapped

    wait_until(look)


# --- reading and writing


def use(rank: int, transports: tuple[str, ...]) -> None:
    if rank:
        return
    everything = numbers()
    tensor = farcall.rpc_sync("w1", share_numbers, (True,))
    assert (tensor.shape, tensor.dtype, tensor.owner.name) == ((ROWS, COLUMNS), torch.float32, "w1")
    assert torch.equal(tensor.read_into(torch.empty(ROWS, COLUMNS)), everything)
    if "unix" in transports:
        mapped(tensor)
    assert tensor.is_mapped == ("unix" in transports)
    part = tensor.read_into(torch.empty(5, 3, dtype=torch.float64), slices=(slice(10, 20, 2), slice(-3, None)))
    assert torch.equal(part, everything[10:20:2, -3:].double())
    farcall.rpc_sync("w1", add, (1.0,))
    assert torch.equal(tensor.read_into(torch.empty(ROWS, COLUMNS)), everything + 1)
    tensor.write_from(torch.zeros(2, COLUMNS), slices=slice(0, 2))
    farcall.rpc_sync("w1", add, (1.0,))
    assert torch.equal(
        tensor.read_into(torch.empty(4, COLUMNS), slices=slice(0, 4))[:, 0], torch.tensor([1, 1, 514, 770.0])
    )
    # Handed on, also to its owner.
    total = read_at(tensor)
    assert farcall.rpc_sync("w2", read_at, (tensor,)) == total
    assert farcall.rpc_sync("w1", read_at, (tensor,)) == total
    with pytest.raises(ValueError, match=r"shape \(2, 2\).*\(3, 256\)"):
        tensor.read_into(torch.empty(2, 2), slices=slice(0, 3))
    read_only = farcall.rpc_sync("w1", share_numbers, (False,))
    with pytest.raises(RpcError, match="read-only"):
        read_only.write_from(torch.zeros(ROWS, COLUMNS))
    read_only.writable = True  # a caller that does not obey
    if "unix" not in transports:
        with pytest.raises(RpcError, match="w1 shares this tensor read-only"):
            read_only.write_from(torch.zeros(ROWS, COLUMNS))


@pytest.mark.parametrize("transports", WAYS)
def test_parts_are_read_and_written_where_the_tensor_is(transports: tuple[str, ...]) -> None:
    run_cluster(3, use, transports, transports=transports)


def read_of_a_stopped_owner(rank: int) -> None:
    if rank:
        return
    tensor = farcall.rpc_sync("w1", share_numbers, (True,))
    mapped(tensor)
    owner = farcall.rpc_sync("w1", os.getpid)
    stop(owner)
    try:
        assert torch.equal(tensor.read_into(torch.empty(ROWS, COLUMNS)), numbers())
        tensor.write_from(torch.ones(ROWS, COLUMNS))
    finally:
        os.kill(owner, signal.SIGCONT)
    assert farcall.rpc_sync("w1", read_at, (tensor,)) == ROWS * COLUMNS


def test_on_one_host_the_owner_does_nothing() -> None:
    run_cluster(2, read_of_a_stopped_owner, membership=PATIENT)


def read_of_a_busy_owner(rank: int) -> None:
    if rank:
        return
    tensor = farcall.rpc_sync("w1", share_numbers, (True,))
    blocked = [farcall.rpc_async("w1", block, timeout=LONG_S) for _ in range(2)]
    assert torch.equal(tensor.read_into(torch.empty(4, 4), slices=(slice(0, 4), slice(0, 4))), numbers()[:4, :4])
    assert not any(future.done() for future in blocked)
    farcall.rpc_sync("w1", unblock)
    for future in blocked:
        future.wait()


def test_an_owner_whose_threads_are_all_busy_answers() -> None:
    run_cluster(2, read_of_a_busy_owner, transports=("tcp",), num_worker_threads=1)


# --- where the tensor's memory is


def places(rank: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
    shared = farcall.share(parameter)
    assert shared.in_shared_memory
    assert parameter.requires_grad
    (parameter * 3).sum().backward()
    assert float(parameter.grad.sum()) == 3 * ROWS * COLUMNS  # type: ignore[union-attr]
    assert float(shared.read_into(torch.empty(ROWS, COLUMNS))[0, 0]) == 1.0
    before = parameter.data_ptr()
    assert farcall.share(parameter).in_shared_memory
    assert parameter.data_ptr() == before, "it was there already"
    assert farcall.share(farcall.shared_empty(ROWS, COLUMNS)).in_shared_memory
    whole = numbers()
    view = whole[:256]
    assert not farcall.share(view).in_shared_memory
    assert not farcall.share(whole).in_shared_memory, "its view would look at other memory"
    array = numbers()
    assert array.numpy()[0, 1] == 1.0
    assert not farcall.share(array).in_shared_memory
    assert not farcall.share(torch.ones(3)).in_shared_memory, "small ones are quicker inside a message"
    with pytest.raises(ValueError, match="contiguous"):
        farcall.share(numbers().T)


def test_a_tensor_moves_into_shared_memory_if_nobody_else_looks_at_its_own() -> None:
    run_cluster(1, places)


def views_are_served(rank: int) -> None:
    held["whole"] = numbers()
    held["view"] = held["whole"][256:]
    farcall.barrier()
    if rank:
        farcall.barrier()
        return
    tensor = farcall.rpc_sync("w1", share_kept, ("view",))
    assert not tensor.in_shared_memory
    assert torch.equal(tensor.read_into(torch.empty(256, COLUMNS)), numbers()[256:])
    assert not tensor.is_mapped
    farcall.barrier()


def test_what_stays_where_it_is_is_sent() -> None:
    run_cluster(2, views_are_served)


def give_back(rank: int) -> None:
    if rank:
        return
    tensor = farcall.rpc_sync("w1", share_numbers, (True,))
    mapped(tensor)
    farcall.rpc_sync("w1", forget)
    assert float(tensor.read_into(torch.empty(ROWS, COLUMNS))[0, 1]) == 1.0, "the owner keeps what others refer to"
    assert farcall.rpc_sync("w1", owned_blocks) > 0
    del tensor
    gc.collect()
    wait_until(lambda: farcall.rpc_sync("w1", owned_blocks) == 0, "all memory given back")


def test_memory_is_given_back_with_the_last_remote_tensor() -> None:
    run_cluster(2, give_back)


# --- the owner dies


def outlive_the_owner(rank: int, transports: tuple[str, ...]) -> list[str]:
    if rank == 1:
        threading.Event().wait(10 * LONG_S)
    if rank:
        return []
    tensor = farcall.rpc_sync("w1", share_numbers, (True,))
    if "unix" in transports:
        mapped(tensor)
    else:
        tensor.read_into(torch.empty(ROWS, COLUMNS))
    os.kill(farcall.rpc_sync("w1", os.getpid), signal.SIGKILL)
    told: list[str] = []

    def is_told() -> bool:
        try:
            tensor.read_into(torch.empty(ROWS, COLUMNS), timeout=LONG_S)
        except ReferenceLost as error:
            told.append(str(error))
        return bool(told)

    wait_until(is_told)
    with pytest.raises(ReferenceLost, match="w1"):
        tensor.write_from(torch.ones(ROWS, COLUMNS))
    return told


@pytest.mark.parametrize("transports", WAYS)
def test_a_tensor_dies_with_its_owner(transports: tuple[str, ...]) -> None:
    members = start_cluster(2, outlive_the_owner, transports, transports=transports, membership=PATIENT)
    told = finish(members, may_fail=[1])[0]
    assert "w1" in told[0]


def test_slices_are_checked() -> None:
    from farcall.rpc.remote_tensor import region_of

    assert region_of(None, (3, 4)) == ()
    assert region_of(slice(-2, None), (3, 4)) == ((1, 3, 1),)
    assert region_of([slice(0, 99), slice(None, None, 2)], (3, 4)) == ((0, 3, 1), (0, 4, 2))
    with pytest.raises(ValueError, match="step"):
        region_of(slice(None, None, -1), (3,))
    with pytest.raises(ValueError, match="3 slices for a tensor of 2 dimensions"):
        region_of([slice(None)] * 3, (3, 4))
    with pytest.raises(TypeError, match="slice objects"):
        region_of([0], (3, 4))  # type: ignore[list-item]
    with pytest.raises(TypeError, match="slice objects"):
        region_of(2, (3, 4))  # type: ignore[arg-type]
