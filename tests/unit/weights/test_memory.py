"""Blocks at those who read them, and pinned for devices."""

from __future__ import annotations

import os
import threading
import weakref
from types import SimpleNamespace

import pytest
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.weights import memory
from farcall.weights.memory import Block, BorrowedBlock


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_maps_no_other_file() -> None:
    block = Block(1, 4096, is_shared=True)
    borrowed = BorrowedBlock(os.dup(block.descriptor), 4096)
    child = os.fork()
    if not child:
        # Descriptors were closed after the fork; this file may get the number of one.
        other = os.memfd_create("other")
        os.truncate(other, 4096)
        try:
            borrowed.private_view()
        except OSError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(borrowed.private_view()) == bytes(4096)
    block.close()


class Runtime:
    """Of a device: pins and unpins, and says on which thread."""

    def __init__(self) -> None:
        self.pinned: list[tuple[int, int, bool]] = []
        self.unpinned: list[int] = []
        self.threads: list[int] = []
        self.devices: list[int] = []
        self.is_unpinned = threading.Event()

    def pin(self, address: int, size: int, device: int, *, writable: bool) -> bool:
        self.pinned.append((address, size, writable))
        self.devices.append(device)
        return True

    def unpin(self, address: int, device: int) -> None:
        self.unpinned.append(address)
        self.devices.append(device)
        self.threads.append(threading.get_ident())
        self.is_unpinned.set()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(memory, "loaded_runtime", lambda: runtime)
    return runtime


def test_a_block_is_pinned_once_and_unpinned_by_another_thread(runtime: Runtime) -> None:
    block = Block(1, 4096, is_shared=True)
    block.pin(3)
    block.pin(5)
    assert runtime.pinned == [(block.address, 4096, True)]
    block.close()
    assert runtime.is_unpinned.wait(LONG_S)
    assert runtime.unpinned == [block.address]
    assert runtime.threads != [threading.get_ident()], "the driver waits for the device first"
    assert runtime.devices == [3, 3], "the driver begins on each device that it is used on"
    block.close()
    assert len(runtime.unpinned) == 1


def test_a_borrowed_block_is_unpinned_when_the_last_version_in_it_is_dropped(runtime: Runtime) -> None:
    block = Block(1, 4096, is_shared=True)
    borrowed = BorrowedBlock(os.dup(block.descriptor), 4096)
    borrowed.pin(0)
    [(address, size, writable)] = runtime.pinned
    assert (address, size, writable) == (borrowed.address, 4096, False)
    del borrowed
    assert runtime.is_unpinned.wait(LONG_S)
    assert runtime.unpinned == [address]
    block.close()


def test_a_block_that_goes_while_it_is_being_pinned(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(1, 4096, is_shared=True)

    def pin(address: int, size: int, device: int, *, writable: bool) -> bool:
        block.close()  # another thread ends the node meanwhile
        return True

    monkeypatch.setattr(runtime, "pin", pin)
    block.pin(0)
    assert runtime.is_unpinned.wait(LONG_S)
    assert runtime.unpinned == [block.address]


def test_nothing_is_unpinned_that_was_not_pinned(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "pin", lambda *_, **__: False)
    block = Block(1, 4096, is_shared=True)
    block.pin(0)
    block.close()
    assert not block._pin._pinned
    assert not runtime.unpinned


def test_memory_that_no_thread_can_unpin_stays_mapped_until_one_can(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    first, second = Block(1, 4096, is_shared=True), Block(2, 4096, is_shared=True)
    first.pin(0)
    second.pin(0)
    mapping = weakref.ref(first.view.obj)
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_thread", SimpleNamespace(start_new_thread=refuse))
        first.close()
    assert mapping() is not None, "the device may copy from and to these addresses"
    assert not runtime.unpinned
    second.close()
    wait_until(lambda: sorted(runtime.unpinned) == sorted([first.address, second.address]))
    wait_until(lambda: mapping() is None)
