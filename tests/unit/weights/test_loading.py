"""Versions on their way into tensors of devices, which are stand-ins here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farcall.weights import loading


class OnDevice:
    """A tensor of cuda:3, as far as it is looked at."""

    is_cuda = True
    dtype = torch.float32

    def __init__(self, count: int) -> None:
        self._count = count

    def numel(self) -> int:
        return self._count

    def get_device(self) -> int:
        return 3

    def is_contiguous(self) -> bool:
        return True

    def copy_(self, source: Any, non_blocking: bool) -> None:
        assert source.numel() == self._count


@pytest.mark.parametrize(("sources", "pinned"), [([OnDevice(4), torch.empty(0)], []), ([torch.zeros(4)], [3])])
def test_blocks_are_pinned_only_where_something_is_copied_out_of_them(
    sources: list[Any], pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(loading, "current_stream", lambda device: stream)
    found: list[int] = []
    version: Any = SimpleNamespace(blocks=[SimpleNamespace(pin=found.append)])
    pairs: Any = [(OnDevice(source.numel()), source) for source in sources]
    loading._upload([version], pairs)
    assert found == pinned
