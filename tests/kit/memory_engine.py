"""A transfer engine between nodes of one process, whose transfers a test holds up or has fail; a record of its memory.

Its name in options is `NAME`. A test that uses it calls `begin_anew` first.
"""

from __future__ import annotations

import threading

import torch

from farcall.channel.transfer_engine import Exported, OpenedMemory, Ranges, Transfer

NAME = "tests.kit.memory_engine:MemoryEngine"


class Record:
    """What all engines have done, and what transfers do next. Mutable, by the test."""

    def __init__(self) -> None:
        self.exported: dict[bytes, torch.Tensor] = {}
        self.opened: list[bytes] = []
        self.ranges: list[int] = []
        """Of each transfer, in how many pieces it was."""
        self.engines: int = 0
        self.may_finish: threading.Event = threading.Event()
        self.may_finish.set()
        self.begun: threading.Event = threading.Event()
        self.failure: Exception | None = None
        """Raised by transfers that are under way."""
        self.refusal: Exception | None = None
        """Raised by `export`, `open` and `begin`."""


record = Record()


def begin_anew() -> Record:
    global record
    record = Record()
    return record


class MemoryEngine:
    def __init__(self) -> None:
        self._record = record
        self._exported: list[_Memory] = []
        self._record.engines += 1

    def export(self, tensor: torch.Tensor) -> Exported:
        if self._record.refusal is not None:
            raise self._record.refusal
        memory = _Memory(self._record, f"{len(self._record.exported)}".encode(), tensor)
        self._exported.append(memory)
        return memory

    def open(self, description: bytes) -> OpenedMemory:
        if self._record.refusal is not None:
            raise self._record.refusal
        self._record.opened.append(description)
        return _OpenedMemory(self._record, description)

    def close(self) -> None:
        self._record.engines -= 1
        for memory in self._exported:
            memory.close()


class _Memory(Exported):
    def __init__(self, record: Record, description: bytes, tensor: torch.Tensor) -> None:
        self._record = record
        self._description = description
        record.exported[description] = tensor

    @property
    def description(self) -> bytes:
        return self._description

    def close(self) -> None:
        self._record.exported.pop(self._description, None)


class _OpenedMemory(OpenedMemory):
    def __init__(self, record: Record, description: bytes) -> None:
        self._record = record
        self._description = description

    def begin(self, local: torch.Tensor, ranges: Ranges, *, write: bool) -> Transfer:
        if self._record.refusal is not None:
            raise self._record.refusal
        self._record.ranges.append(len(ranges))
        return _Transfer(self._record, self._description, local, ranges, write)

    def close(self) -> None:
        self._record.opened.remove(self._description)


class _Transfer(Transfer):
    def __init__(self, record: Record, description: bytes, local: torch.Tensor, ranges: Ranges, write: bool) -> None:
        self._record = record
        self._description = description
        self._local = local.view(-1).view(torch.uint8)
        self._ranges = ranges
        self._write = write

    def query(self) -> bool:
        self._record.begun.set()
        if self._record.failure is not None:
            raise self._record.failure
        if not self._record.may_finish.is_set():
            return False
        memory, at = self._record.exported[self._description].view(-1).view(torch.uint8), 0
        for first, size in self._ranges:
            ours, theirs = self._local[at : at + size], memory[first : first + size]
            (theirs if self._write else ours).copy_(ours if self._write else theirs)
            at += size
        return True
