"""Tests that need one GPU: skipped without, never silently passed."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.device_count():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that torch sees, and there is none"))
