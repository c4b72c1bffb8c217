"""docs/migration.md speaks of every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed.autograd
import torch.distributed.rpc

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
NAMES = {
    *torch.distributed.rpc.__all__,
    *(
        "context",
        "backward",
        "get_gradients",
        "DistributedOptimizer",
        "RemoteModule",
        "async_execution",
        "RpcBackendOptions",
    ),
    *("to_here", "local_value", "owner", "owner_name", "is_owner", "confirmed_by_owner", "WorkerInfo"),
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"`[^`]*\b{name}\b", PAGE)
