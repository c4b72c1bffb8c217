"""The same outcome with cloudpickle and without: code by value is tested in tests/processes/test_code_by_value.py."""

from __future__ import annotations

import pytest

from farcall.serialize import code


@pytest.fixture(autouse=True)
def no_code_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "is_available", lambda: False)
