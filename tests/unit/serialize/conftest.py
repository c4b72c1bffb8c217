"""Every road of a value, for tests that hold on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.kit.values import ROADS, on_road


@pytest.fixture(params=ROADS)
def road(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_road(request.param):
        yield request.param
