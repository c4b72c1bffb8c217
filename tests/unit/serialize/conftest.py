"""Every road of a value, for tests that hold on each; without code by value (tests/processes/test_code_by_value.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.kit.values import ROADS, on_road

from farcall.serialize import code


@pytest.fixture(autouse=True)
def no_code_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "is_available", lambda: False)


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_road(request.param):
        yield request.param
