"""The ring of pinned memory, with a device that is the CPU: what is uploaded is what was given, half by half."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from farcall.channel import device_api, staging

HOST = torch.device("cpu", 0)


class Log(list[str]):
    """What the device was asked; what ``failing`` names fails."""

    failing = ""

    def note(self, what: str) -> None:
        if what == self.failing:
            raise RuntimeError("out of luck")
        self.append(what)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Log:
    """A log of events recorded and waited for."""
    log = Log()

    class Event:
        def synchronize(self) -> None:
            log.note("wait")

    class Stream:
        def __init__(self, device_index: int, **names: int) -> None:
            self.device_index = device_index

        def record_event(self) -> Event:
            log.note("record")
            return Event()

    class Inner:
        @staticmethod
        def _cuda_getCurrentStream(device: int) -> tuple[int, int, int]:
            return 1, device, 1

    empty = torch.empty

    def without_pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(device_api, "_C", Inner)
    monkeypatch.setattr(device_api, "_streams", {})
    monkeypatch.setattr(staging, "runtime_for", lambda stream: None)
    monkeypatch.setattr(torch, "empty", without_pinning)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    return log


def upload(ring: staging._Ring, data: bytes, size: int | None = None) -> bytes:
    # A copy, as on a device: here ``to`` gives back the pinned memory itself.
    return bytes(ring.upload(memoryview(data), size or len(data), HOST).clone().tolist())


def test_what_is_uploaded_is_what_was_given(waits: list[str]) -> None:
    ring = staging._Ring()
    for number, size in enumerate([1, 63, 64, 65, 4096, 1] * 2):
        data = bytes([number]) * size
        assert upload(ring, data) == data
    assert waits == []


def test_a_half_is_used_again_only_when_it_is_done_with(waits: list[str]) -> None:
    ring = staging._Ring()
    data = memoryview(bytes(10))
    for _ in range(staging.HALF_RING_SLOTS):
        ring.upload(data, 10, HOST)
    assert waits == []
    ring.upload(data, 10, HOST)
    assert waits == ["record"], "the first half is full, the second was never used"
    for _ in range(staging.HALF_RING_SLOTS):
        ring.upload(data, 10, HOST)
    assert waits == ["record", "record", "wait"]


@pytest.mark.parametrize("failing", ["record", "wait"])
def test_a_half_whose_turn_failed_is_still_waited_for(waits: Log, failing: str) -> None:
    ring = staging._Ring()
    data = memoryview(bytes(10))
    for _ in range(2 * staging.HALF_RING_SLOTS):
        ring.upload(data, 10, HOST)
    waits.failing = failing
    with pytest.raises(RuntimeError, match="out of luck"):
        ring.upload(data, 10, HOST)
    waits.failing = ""
    waits.clear()
    for _ in range(staging.HALF_RING_SLOTS):
        ring.upload(data, 10, HOST)
    assert waits == ["record", "wait"], "the first half is waited for before it is used again"
    ring.upload(data, 10, HOST)
    assert waits == ["record", "wait", "record", "wait"], "and so is the second"


def test_a_half_is_waited_for_even_if_nothing_was_copied_from_the_other_one(waits: list[str]) -> None:
    ring = staging._Ring()
    for _ in range(staging.HALF_RING_SLOTS):
        ring.upload(memoryview(bytes(10)), 10, HOST)
    for _ in range(staging.HALF_RING_SLOTS):
        with pytest.raises(ValueError, match="do not fit"):
            ring.upload(memoryview(bytes(staging.SLOT_BYTES + 1)), 10, HOST)
    assert waits == ["record"]
    ring.upload(memoryview(bytes(10)), 10, HOST)
    assert waits == ["record", "wait"]


def test_what_is_made_longer_begins_with_what_was_given(waits: list[str]) -> None:
    assert upload(staging._Ring(), b"abc", 10)[:3] == b"abc"


@pytest.mark.parametrize(("size", "company", "length"), [(100, True, 100), (4096, True, 32768), (4096, False, 4096)])
def test_only_in_company_and_only_what_is_not_tiny_is_made_longer(
    waits: list[str], monkeypatch: pytest.MonkeyPatch, size: int, company: bool, length: int
) -> None:
    monkeypatch.setattr(staging, "_kept", staging._Kept())
    assert staging.to_device(memoryview(bytes(size)), HOST, company).numel() == length


def test_the_memory_of_a_thread_that_ended_is_the_next_ones_and_not_the_allocators(
    waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_kept", staging._Kept())
    monkeypatch.setattr(staging, "_idle_rings", [])
    rings: list[staging._Ring] = []

    def work() -> None:
        staging.upload(memoryview(b"abc"), HOST, False)
        assert staging._kept.loan is not None
        rings.append(staging._kept.loan.ring)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert rings[0] is rings[1]
    assert rings[1]._next == 2, "what the first one uploads is not overwritten"
