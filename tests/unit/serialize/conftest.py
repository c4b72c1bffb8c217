"""The same outcome whether cloudpickle is installed or not: code by value is tests/processes/test_code_by_value.py's."""

from __future__ import annotations

import pytest

from farcall.serialize import code


@pytest.fixture(autouse=True)
def no_code_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "is_available", lambda: False)
