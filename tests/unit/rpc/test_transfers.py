"""Ranges of parts, and the end of memory that a transfer engine uses: a node that is a stub, and a clock to turn."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import memory_engine

from farcall.channel.device_memory import REST_S
from farcall.channel.transfer_engine import make_engine
from farcall.errors import ReferenceLost, RpcError, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.options import MemoryOptions, RpcBackendOptions
from farcall.rpc import transfers as module
from farcall.rpc.remote_tensor import region_of
from farcall.rpc.shared_tensor import part_of
from farcall.rpc.transfers import ExportedTensor, OpenedTensor, Transfers, ranges_of
from farcall.runtime.io.timers import NEVER, Timers
from farcall.runtime.node.hooks import Hooks
from farcall.serialize import allowance

FULL = torch.arange(1 << 18, dtype=torch.float32)
"""A tensor that is just worth a transfer."""


@pytest.fixture
def record() -> memory_engine.Record:
    return memory_engine.begin_anew()


class Stub:
    """A node with an engine, whose worker threads are the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self.sleep)
        self.timers = Timers(lambda: None)
        self.hooks = Hooks()
        node: Any = SimpleNamespace(
            options=RpcBackendOptions(encryption="off", memory=MemoryOptions(transfer_engine=memory_engine.NAME)),
            info=WorkerInfo("w0", 0),
            hooks=self.hooks,
            timer=self.timers.timer,
            executor=SimpleNamespace(submit=lambda task: task.run(False)),
        )
        self.transfers = Transfers(node)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pass_time(self, seconds: float = 1.0) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            gc.collect()
            self.timers.run_due(self.now)

    def lose_a_member(self) -> None:
        for hook in self.hooks.peer_gone:
            hook(None)  # type: ignore[arg-type]

    def opened(self, tensor: torch.Tensor) -> tuple[ExportedTensor, OpenedTensor]:
        exported = self.transfers.export(tensor)
        assert exported is not None
        opened = self.transfers.open(exported.description)
        assert opened is not None
        return exported, opened


@pytest.fixture
def stub(record: memory_engine.Record, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(monkeypatch)


# --- ranges


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], list[slice]]:
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    slices = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        start = draw(st.integers(0, extent))
        slices.append(slice(start, draw(st.integers(start, extent)), draw(st.integers(1, 3))))
    return shape, slices


@given(parts())
def test_ranges_are_the_bytes_of_the_part_in_order(part: tuple[list[int], list[slice]]) -> None:
    shape, slices = part
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).view(shape)
    region = region_of(slices, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST_RANGE_BYTES", 1)
        patch.setattr(module, "WORTH_BYTES", 1)
        ranges = ranges_of(region, shape, 8)
    there = tensor.view(-1).view(torch.uint8)
    found = [there[first : first + size] for first, size in ranges or ()]
    expected = part_of(tensor, region).flatten().tolist()
    assert (torch.cat(found).view(torch.int64).tolist() if found else []) == expected


def test_neighbours_are_one_range_and_small_pieces_are_none() -> None:
    shape = (1024, 4096)
    assert ranges_of(region_of(None, shape), shape, 4) == [(0, 16 << 20)]
    assert ranges_of(region_of(slice(256, 768), shape), shape, 4) == [(4 << 20, 8 << 20)]
    columns = ranges_of(region_of([slice(None), slice(1024, 2048)], shape), shape, 4)
    assert columns is not None
    assert columns[:2] == [(4096, 4096), (4096 + 4 * 4096, 4096)]
    assert ranges_of(region_of([slice(None), slice(0, 1000)], shape), shape, 4) is None, "pieces below 4 KiB"
    assert ranges_of(region_of(slice(0, 8), shape), shape, 4) is None, "128 KiB"
    assert ranges_of(region_of(slice(8, 8), shape), shape, 4) is None


# --- which engine


def test_an_engine_is_found_by_its_name(record: memory_engine.Record) -> None:
    assert isinstance(make_engine(memory_engine.NAME), memory_engine.MemoryEngine)
    with pytest.raises(RpcError, match="no transfer engine 'mooncake': name 'nixl', or a function"):
        make_engine("mooncake")


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(RpcError, match="pip install nixl"):
        make_engine("nixl")


def test_no_engine_beside_encryption_or_a_table_of_allowed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryOptions(transfer_engine=memory_engine.NAME)
    with pytest.raises(ValueError, match="does not encrypt"):
        RpcBackendOptions(memory=memory)
    with pytest.raises(TypeError, match="transfer_engine must be a str"):
        MemoryOptions(transfer_engine=7)  # type: ignore[arg-type]
    monkeypatch.setattr(allowance.INSTALLED, "allowance", allowance.Allowance((), ()))
    with pytest.raises(RpcError, match=r"farcall\.allow"):
        Stub(monkeypatch)


def test_small_tensors_and_memory_that_the_engine_refuses_are_not_exported(
    stub: Stub, record: memory_engine.Record, caplog: pytest.LogCaptureFixture
) -> None:
    assert stub.transfers.export(torch.ones(3)) is None
    record.refusal = OSError("cannot pin")
    assert stub.transfers.export(FULL) is None
    assert stub.transfers.open(b"0") is None
    assert "cannot pin" in caplog.text


# --- transfers


def copy(stub: Stub, opened: OpenedTensor, local: torch.Tensor, *, keeps: object = None, **changes: Any) -> bool:
    given = {"write": False, "deadline": stub.now + 5.0, "check": lambda: None, **changes}
    return stub.transfers.copy(opened, local, [(0, FULL.nbytes)], keeps=keeps, **given)


def test_a_transfer_copies_in_both_directions(stub: Stub) -> None:
    tensor = FULL.clone()
    _exported, opened = stub.opened(tensor)
    local = torch.empty_like(FULL)
    assert copy(stub, opened, local)
    assert torch.equal(local, FULL)
    assert copy(stub, opened, torch.ones_like(FULL), write=True)
    assert float(tensor.sum()) == FULL.numel()


@pytest.mark.parametrize("when", ["refusal", "failure"])
def test_a_failure_is_told_and_leaves_the_rest_to_a_call(
    stub: Stub, record: memory_engine.Record, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    _exported, opened = stub.opened(FULL)
    setattr(record, when, OSError("no route"))
    assert not copy(stub, opened, torch.empty_like(FULL))
    assert "no route" in caplog.text


class Reference:
    """Stands for the reference that keeps the owner's tensor."""


@pytest.mark.parametrize("end", ["done", "failed"])
def test_after_its_deadline_a_transfer_keeps_both_memories_until_it_is_over(
    stub: Stub, record: memory_engine.Record, end: str
) -> None:
    exported, opened = stub.opened(FULL)
    record.may_finish.clear()
    reference, local = Reference(), torch.empty_like(FULL)
    kept = [weakref.ref(reference), weakref.ref(local)]
    began = stub.now
    with pytest.raises(RpcTimeout, match="1048576 bytes"):
        copy(stub, opened, local, keeps=reference)
    assert 5.0 <= stub.now - began < 5.1
    del reference, local, opened
    stub.pass_time()
    assert all(one() is not None for one in kept)
    assert record.opened
    if end == "done":
        record.may_finish.set()
    else:
        record.failure = OSError("the peer is gone")
    stub.pass_time(2.0)
    record.failure = None  # its traceback holds the frames that it went through
    stub.pass_time()
    assert [one() for one in kept] == [None, None]
    assert not record.opened
    del exported


def test_the_loss_of_the_owner_ends_the_wait(stub: Stub, record: memory_engine.Record) -> None:
    def check() -> None:
        raise ReferenceLost("w1 is gone")

    _exported, opened = stub.opened(FULL)
    record.may_finish.clear()
    with pytest.raises(ReferenceLost, match="w1 is gone"):
        copy(stub, opened, torch.empty_like(FULL), deadline=NEVER, check=check)


# --- memory


def test_memory_goes_with_the_last_reference(stub: Stub, record: memory_engine.Record) -> None:
    exported, opened = stub.opened(FULL)
    del exported
    stub.pass_time()
    assert not record.exported
    del opened
    stub.pass_time()
    assert not record.opened


def test_memory_that_a_lost_reader_may_still_read_rests(stub: Stub, record: memory_engine.Record) -> None:
    exported, _opened = stub.opened(FULL)
    stub.lose_a_member()
    del exported
    stub.pass_time(REST_S - 5)
    assert record.exported
    stub.pass_time(10)
    assert not record.exported


def test_with_the_node_ends_the_engine(stub: Stub, record: memory_engine.Record) -> None:
    exported, opened = stub.opened(FULL)
    for hook in stub.hooks.ended:
        hook()
    assert record.engines == 0
    assert stub.transfers.export(FULL) is None
    assert stub.transfers.open(exported.description) is None
    del exported, opened
    stub.pass_time()


def test_nothing_is_kept_by_a_node_that_ends_while_it_tends_its_memory(
    stub: Stub, record: memory_engine.Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported, _opened = stub.opened(torch.ones_like(FULL))
    memory = weakref.ref(exported._tensor)
    stub.lose_a_member()
    del exported

    def end() -> float:
        for hook in stub.hooks.ended:
            hook()
        return stub.now

    monkeypatch.setattr(module, "monotonic", end)
    stub.timers.run_due(stub.now + 1.0)
    assert record.engines == 0
    assert memory() is None
