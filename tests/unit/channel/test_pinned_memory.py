"""Memory of the host that two processes share, with a device that only keeps a record of what was pinned."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from farcall.channel import pinned_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no files in memory here")


class Runtime:
    """Pins nothing; fails if it is told to."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.fails = False

    def pin(self, address: int, size: int) -> None:
        if self.fails:
            raise RuntimeError("the device could not pin: out of luck")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(pinned_memory, "loaded_runtime", lambda: runtime)
    return runtime


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_both_ends_see_the_same_bytes_until_the_last_use_of_each(runtime: Runtime) -> None:
    before = descriptors()
    memory = pinned_memory.allocate(8192)
    assert memory is not None
    export = pinned_memory.export(memory)
    assert pinned_memory.is_export(export)
    opened = pinned_memory.open_export(export)
    memory[5000] = 7
    assert opened[5000] == 7
    assert runtime.pinned == {memory.data_ptr(): 8192, opened.data_ptr(): 8192}
    part = opened[4096:]
    address = memory.data_ptr()
    del opened, memory
    gc.collect()
    assert list(runtime.pinned.values()) == [8192], "the owner has let go"
    assert address not in runtime.pinned
    assert part[904] == 7, "the other end has not"
    del part
    gc.collect()
    assert runtime.pinned == {}
    assert descriptors() == before


def test_what_cannot_be_pinned_is_not_to_be_had(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    runtime.fails = True
    assert pinned_memory.allocate(4096) is None
    monkeypatch.setattr(pinned_memory, "loaded_runtime", lambda: None)
    assert pinned_memory.allocate(4096) is None
    gc.collect()
    assert descriptors() == before


def test_other_files_are_not_opened(runtime: Runtime, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(4096))
        file.flush()
        with pytest.raises(OSError, match=r"no sealed file|Invalid argument"):
            pinned_memory.open_export((pinned_memory.HOST, os.getpid(), file.fileno(), 4096))
    memory = pinned_memory.allocate(4096)
    assert memory is not None
    with pytest.raises(OSError, match="no sealed file of 8192 bytes"):
        pinned_memory.open_export((*pinned_memory.export(memory)[:3], 8192))
    assert torch.equal(memory, torch.zeros(4096, dtype=torch.uint8))
