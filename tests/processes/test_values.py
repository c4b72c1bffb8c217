"""Values between real processes: every kind of tensor, by every way, and whose memory is whose."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.kit.ports import tcp_url
from tests.kit.waiting import wait_until
from tests.processes.calls.callees import Gate, live_bytes, whoami

import farcall
from farcall.errors import PeerDead
from farcall.options import MemoryOptions
from farcall.runtime.peers.shared_memory import SHARED_BYTES
from farcall.testing.cluster import finish, run_cluster, start_cluster

MEBIBYTE = 1 << 20
WAYS: dict[str, dict[str, Any]] = {
    "unix and shared memory": {},
    "unix": {"transports": ["unix"], "memory": MemoryOptions(shared_memory=False)},
    "tcp": {"transports": ["tcp"], "memory": MemoryOptions(shared_memory=False)},
    "tcp, small limit": {"transports": ["tcp"], "memory": MemoryOptions(shared_memory_limit_bytes=4 * MEBIBYTE)},
    "small limit": {"memory": MemoryOptions(shared_memory_limit_bytes=4 * MEBIBYTE)},
}
every_way = pytest.mark.parametrize("way", WAYS)


class Named(torch.Tensor):
    """A subclass."""


def echo(value: Any) -> Any:
    return value


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(40, 30)
    parameter = torch.nn.Parameter(torch.randn(5))
    found = {
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "every other": base[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "small view of a large storage": torch.randn(MEBIBYTE)[100:110],
        "complex": torch.randn(6, dtype=torch.complex64),
        "conjugated": torch.randn(6, dtype=torch.complex64).conj(),
        "negated": torch.randn(6, dtype=torch.complex64).conj().imag,
        "requires grad": torch.randn(3, requires_grad=True),
        "parameter": parameter,
        "subclass": torch.randn(4).as_subclass(Named),
        "sparse": torch.eye(5).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.randn(10), 0.1, 3, torch.qint8),
        "meta": torch.empty(7, 8, device="meta"),
        "bool": torch.tensor([True, False]),
        "bfloat16": torch.randn(9).to(torch.bfloat16),
        "uint8": torch.arange(200, dtype=torch.uint8),
    }
    for size in (1, SHARED_BYTES // 4 - 1, SHARED_BYTES // 4, 16 * 1024, 100_000, MEBIBYTE):
        found[f"{size} floats"] = torch.randn(size)
    return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape, type(left)) != (right.dtype, right.shape, type(right)):
        return False
    if (left.requires_grad, left.layout, left.device) != (right.requires_grad, right.layout, right.device):
        return False
    if left.is_meta:
        return True
    if left.is_quantized:
        return torch.equal(left.int_repr(), right.int_repr()) and left.q_scale() == right.q_scale()
    if left.layout != torch.strided:
        return torch.equal(left.to_dense(), right.to_dense())
    return left.is_conj() == right.is_conj() and left.is_neg() == right.is_neg() and torch.equal(left, right)


def echo_everything(rank: int) -> None:
    if rank:
        return
    for to in ("w0", "w1"):
        check_samples(to)
        check_arrays(to)
        check_views(to)
        check_isolation(to)
        check_many(to)
        blob = os.urandom(3 * MEBIBYTE)
        assert farcall.rpc_sync(to, echo, (blob,)) == blob
        assert farcall.rpc_sync(to, echo, (bytearray(blob),)) == blob
    # Nothing of all that stays behind anywhere.
    gc.collect()
    wait_until(lambda: live_bytes() == 0, "the release of what was sent")
    wait_until(lambda: farcall.rpc_sync("w1", live_bytes) == 0, "the release of what was answered")


def check_samples(to: str) -> None:
    everything = samples()
    for name, tensor in everything.items():
        for _ in range(3):  # the first large one introduces its segment, the later ones use it
            assert same(farcall.rpc_sync(to, echo, (tensor,)), tensor), f"{name} to {to}"
    got = farcall.rpc_async(to, echo, (everything,)).wait()
    assert all(same(got[name], tensor) for name, tensor in everything.items())


def check_arrays(to: str) -> None:
    for dtype in ("f8", "i4", "?", "c16", "M8[s]", "U3"):
        for shape in ((), (0,), (3, 4), (300, 1000)):
            array = np.ones(shape, dtype=dtype) if dtype[0] in "fic?" else np.zeros(shape, dtype=dtype)
            got = farcall.rpc_sync(to, echo, (array,))
            assert got.dtype == array.dtype
            assert got.shape == array.shape
            assert (got == array).all()


def check_views(to: str) -> None:
    base = torch.zeros(50_000)
    got = farcall.rpc_sync(to, echo, ({"base": base, "head": base[:10], "deep": [base.view(500, 100)]},))
    got["head"].fill_(7)
    assert got["base"][:11].tolist() == [7] * 10 + [0]
    assert float(got["deep"][0][0, 9]) == 7
    assert float(base.sum()) == 0


def fill(tensor: Any) -> float:
    tensor[...] = 99
    return float(tensor[0])


def hold_then_sum(name: str, tensor: torch.Tensor) -> float:
    Gate.wait(name)
    return float(tensor.sum())


def check_isolation(to: str) -> None:
    for size in (10, 20_000, MEBIBYTE):
        # What the callee does to its argument is its own business.
        mine = torch.ones(size)
        assert farcall.rpc_sync(to, fill, (mine,)) == 99
        assert float(mine.sum()) == size
        # As is what the caller does to its own, as soon as it has it back.
        gate = f"isolation {to} {size}"
        call = farcall.rpc_async(to, hold_then_sum, (gate, mine))
        mine.fill_(-5)
        del mine
        farcall.rpc_sync(to, Gate.open, (gate,))
        assert call.wait() == size
        # Results, too: two of them never share memory.
        first, second = (farcall.rpc_sync(to, torch.ones, (size,)) for _ in range(2))
        first.fill_(3)
        assert float(second.sum()) == size
    array = np.ones(100_000)
    farcall.rpc_sync(to, fill, (array,))
    assert array.sum() == 100_000


def check_many(to: str) -> None:
    many = [torch.full((1 + number % 7,), number) for number in range(10_000)]
    got = farcall.rpc_sync(to, echo, (many,))
    assert len(got) == 10_000
    assert all(torch.equal(left, right) for left, right in zip(got, many, strict=True))
    larger = [torch.full((20_000,), number) for number in range(100)]
    assert all(int(one[-1]) == number for number, one in enumerate(farcall.rpc_sync(to, echo, (larger,))))


@every_way
def test_every_kind_of_value(way: str) -> None:
    run_cluster(2, echo_everything, **WAYS[way])


def checksum(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.numel(), int(tensor[:: 4096 * 4].sum(dtype=torch.int64)), int(tensor[-1])


def send_huge(rank: int) -> None:
    if rank:
        return
    huge = torch.arange(300 * MEBIBYTE // 8)
    for _ in range(2):
        assert farcall.rpc_sync("w1", checksum, (huge,)) == checksum(huge)
    back = farcall.rpc_sync("w1", echo, (huge,))
    assert checksum(back) == checksum(huge)
    assert torch.equal(back, huge)


@pytest.mark.parametrize("way", ["unix and shared memory", "tcp"])
def test_300_mebibytes(way: str) -> None:
    run_cluster(2, send_huge, **WAYS[way])


class CloudLikePickler:
    """A pickler of the user's: it sends a lambda as the name of what it does."""

    def serialize(self, value: Any) -> tuple[bytes, list[torch.Tensor]]:
        _, args, kwargs = value
        return pickle.dumps((double_first, args, kwargs)), []

    def deserialize(self, data: bytes, tensors: Any) -> Any:
        return pickle.loads(data)


def double_first(value: int) -> int:
    return 2 * value


def use_a_pickler(rank: int) -> None:
    if rank == 0:
        with farcall._use_rpc_pickler(CloudLikePickler()):
            assert farcall.rpc_sync("w1", lambda value: None, (21,)) == 42
        assert farcall.rpc_sync("w1", echo, (21,)) == 21


def test_a_pickler_of_the_users() -> None:
    run_cluster(2, use_a_pickler)


# ---------------------------------------------------------------------- memory that outlives


class Kept:
    """What a worker keeps between calls."""

    tensors: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def keep(cls, tensor: torch.Tensor) -> int:
        cls.tensors.append(tensor)
        return len(cls.tensors)

    @classmethod
    def fill(cls, value: float) -> None:
        cls.tensors[0].fill_(value)

    @classmethod
    def forget(cls) -> None:
        cls.tensors.clear()

    @classmethod
    def sums(cls) -> list[float]:
        return [float(tensor.sum()) for tensor in cls.tensors]


def outlive_the_sender(rank: int) -> list[float]:
    size = 100_000
    if rank == 1:
        for _ in range(4):
            farcall.rpc_sync("w0", Kept.keep, (torch.ones(size),))
        answers = farcall.rpc_async("w0", Gate.wait, ("answers",))
        farcall.rpc_sync("w0", Gate.open, ("sent",))
        answers.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    Gate.wait("sent")
    results = [farcall.rpc_sync("w1", torch.ones, (size,)) for _ in range(4)]
    Gate.open("answers")
    with contextlib.suppress(PeerDead):
        farcall.rpc_sync("w1", Gate.wait, ("never",))
    with pytest.raises(PeerDead):
        farcall.rpc_sync("w1", whoami)
    for tensor in (*results, *Kept.tensors):
        assert float(tensor.sum()) == size
        tensor.add_(1)
        assert float(tensor.sum()) == 2 * size
    farcall.shutdown()
    assert Kept.sums() == [2 * size] * 4
    with pytest.raises(farcall.errors.NotInitialized):
        farcall.rpc_sync("w1", whoami)
    farcall.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=_alone())
    return Kept.sums()


def _alone() -> farcall.RpcBackendOptions:

    return farcall.RpcBackendOptions(init_method=tcp_url())


@pytest.mark.parametrize("way", ["unix and shared memory", "tcp"])
def test_received_tensors_outlive_the_sender_and_the_node(way: str) -> None:
    members = start_cluster(2, outlive_the_sender, **WAYS[way])
    assert finish(members, may_fail=[1])[0] == [200_000] * 4


def outlive_the_link(rank: int, done: str) -> list[float] | None:
    """w0 leaves and keeps what it got; w1 goes on to send other things to w2. Nothing of w0's may change."""
    size = 100_000
    if rank == 0:
        Gate.wait("kept")
        farcall.shutdown(graceful=False)
        before = Kept.sums()
        farcall.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=_alone())
        wait_until(lambda: os.path.exists(done), "the end of the others")
        assert Kept.sums() == before == [size] * 8
        return Kept.sums()
    if rank == 1:
        for _ in range(8):
            farcall.rpc_sync("w0", Kept.keep, (torch.ones(size),))
        with contextlib.suppress(PeerDead):
            farcall.rpc_sync("w0", Gate.open, ("kept",))
        with contextlib.suppress(PeerDead):
            farcall.rpc_sync("w0", Gate.wait, ("never",))
        for _ in range(30):
            farcall.rpc_sync("w2", Kept.keep, (torch.full((size,), 5.0),))
        Path(done).touch()
    return None


def test_received_tensors_are_not_overwritten_after_the_link_ended(tmp_path: Path) -> None:
    members = start_cluster(3, outlive_the_link, str(tmp_path / "done"))
    assert finish(members)[0] == [100_000] * 8


def share(rank: int) -> None:
    if rank:
        return
    shared = farcall.shared_empty(300, 1000)
    assert shared.shape == (300, 1000)
    shared.zero_()
    farcall.rpc_sync("w1", Kept.keep, (shared,))  # the first time, its segment is only introduced
    wait_until(lambda: _sees(shared), "the sharing")
    # By reference: both look at the same memory, also at a part of it.
    shared.fill_(2)
    assert farcall.rpc_sync("w1", Kept.sums)[0] == 2 * shared.numel()
    farcall.rpc_sync("w1", Kept.fill, (4,))
    assert float(shared.sum()) == 4 * shared.numel()
    assert farcall.rpc_sync("w1", torch.sum, (shared[100:200],)).item() == 4 * 100_000
    # What comes back of it is a copy like any other value.
    back = farcall.rpc_sync("w1", echo, (shared,))
    back.fill_(1)
    assert float(shared.sum()) == 4 * shared.numel()
    integers = farcall.shared_empty(4, dtype=torch.int32)
    assert integers.dtype == torch.int32


def _sees(shared: torch.Tensor) -> bool:
    """Send it again and see whether a write of ours is seen there."""
    farcall.rpc_sync("w1", Kept.forget)
    shared.fill_(0)
    farcall.rpc_sync("w1", Kept.keep, (shared,))
    shared.fill_(1)
    return farcall.rpc_sync("w1", Kept.sums) == [shared.numel()]


def test_shared_empty_goes_by_reference() -> None:
    run_cluster(2, share)


def share_without_memory(rank: int) -> None:
    tensor = farcall.shared_empty(10, 10)
    tensor.fill_(rank)
    assert farcall.rpc_sync(1 - rank, torch.sum, (tensor,)).item() == 100 * rank


def test_shared_empty_without_shared_memory() -> None:
    run_cluster(2, share_without_memory, memory=MemoryOptions(shared_memory=False))
