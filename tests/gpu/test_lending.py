"""Device memory that is lent for a message: until it was copied, or its last view has died; and what if it is lost."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from tests.gpu.callees import CUDA, MAPS, MEBIBYTE, SLOW_CYCLES, echo, lent, share, total
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import AnswerLost, Delivery, NetworkError, RpcTimeout
from farcall.options import MemoryOptions
from farcall.testing.cluster import finish, run_cluster, start_processes, temporary_file_url
from farcall.testing.faults import Faults

KEPT: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> None:
    KEPT.append(x)


def sum_of_kept(on_other_stream: bool) -> torch.Tensor:
    if not on_other_stream:
        return KEPT[-1].double().sum()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = KEPT[-1].double().sum()
    torch.cuda.current_stream().wait_stream(stream)
    return result


def drop_while_in_use() -> torch.Tensor:
    """The last one, dropped on the host while a stream is still to read it."""
    torch.cuda._sleep(SLOW_CYCLES)
    result = KEPT[-1].double().sum()
    KEPT.pop()
    return result


def views(rank: int) -> None:
    if rank:
        return
    share("w1")
    wait_until(lambda: lent() == 0)
    x = torch.zeros(MEBIBYTE, device=CUDA)
    for number in range(3):
        torch.cuda._sleep(SLOW_CYCLES // 20)
        x.fill_(number)
        farcall.rpc_sync("w1", keep, args=(x,))
        x.fill_(-1)  # values stay values
        for elsewhere in (False, True):
            assert farcall.rpc_sync("w1", sum_of_kept, args=(elsewhere,)).item() == number * MEBIBYTE
    assert lent() == 3 * 4 * MEBIBYTE, "they lie in our memory"
    for number in (2, 1, 0):
        future = farcall.rpc_async("w1", drop_while_in_use)
        for _ in range(5):  # it must not come back before it was read
            farcall.rpc_async("w1", echo, args=(torch.full((MEBIBYTE,), -7, device=CUDA),)).wait()
        assert future.wait().item() == number * MEBIBYTE
    gc.collect()
    wait_until(lambda: lent() == 0)
    back = farcall.rpc_sync("w1", echo, args=(x[: MEBIBYTE // 2],))
    assert (back[0] == -1).all()


def test_large_tensors_are_used_where_they_lie_by_option() -> None:
    run_cluster(2, views, memory=MemoryOptions(device_views=True), **MAPS)


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def total_later(x: torch.Tensor) -> float:
    return x.double().sum().item()


def times_out(rank: int) -> None:
    if rank:
        return
    share("w1")
    wait_until(lambda: lent() == 0)
    busy = farcall.rpc_async("w1", compute, args=(1.0,))
    with pytest.raises(RpcTimeout):
        farcall.rpc_sync("w1", total_later, args=(torch.ones(MEBIBYTE, device=CUDA),), timeout=0.3)
    assert lent() == 4 * MEBIBYTE, "it was sent, and may be read"
    assert not busy.done()
    busy.wait()
    wait_until(lambda: lent() == 0)


def test_a_call_that_times_out_has_its_memory_lent_until_the_callee_gives_it_back() -> None:
    run_cluster(2, times_out, num_worker_threads=1, **MAPS)


def in_inference_mode(rank: int) -> None:
    if rank:
        return
    for size in (100, MEBIBYTE):
        x = torch.arange(size, device=CUDA)
        for _ in range(3):  # the first ones make what the others use
            with torch.inference_mode():
                assert torch.equal(farcall.rpc_sync("w1", echo, args=(x,))[0], x)
            assert torch.equal(farcall.rpc_sync("w1", echo, args=(x,))[0], x)
            time.sleep(0.1)


def test_first_uses_in_inference_mode_spoil_nothing() -> None:
    run_cluster(2, in_inference_mode, **MAPS)


FAULTS = Faults()


def lose_next_answer() -> None:
    FAULTS.cut(kind="response", to="w0", count=1, skip=1).__enter__()  # not that of this call


def large_answer() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(MEBIBYTE, device=CUDA), torch.ones(MEBIBYTE)


def loses(rank: int, url: str) -> None:
    options = farcall.RpcBackendOptions(
        init_method=url, memory=MemoryOptions(shared_memory=False), transports=["unix"], **MAPS
    )
    with FAULTS.installed():
        farcall.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        share("w1")
        wait_until(lambda: lent() == 0)
        request: list[Any] = [torch.ones(MEBIBYTE, device=CUDA), torch.ones(MEBIBYTE)]
        with FAULTS.cut(kind="request", to="w1", count=1), pytest.raises(NetworkError) as caught:
            farcall.rpc_sync("w1", echo, args=request)
        assert caught.value.delivery is Delivery.NOT_SENT
        wait_until(lambda: lent() == 0)
        farcall.rpc_sync("w1", lose_next_answer)
        with pytest.raises(AnswerLost):
            farcall.rpc_sync("w1", large_answer)
        wait_until(lambda: farcall.rpc_sync("w1", lent) == 0)
        assert farcall.rpc_sync("w1", total, args=(request[0],)) == MEBIBYTE
    farcall.shutdown()


def test_what_was_lent_for_a_message_that_a_break_has_lost_is_free_again() -> None:
    finish(start_processes(2, loses, temporary_file_url()))
