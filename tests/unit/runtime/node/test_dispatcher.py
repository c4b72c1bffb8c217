"""Messages that cannot be handled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farcall.protocol.frames import RESPONSE, Frame
from farcall.runtime.node.dispatcher import Dispatcher


def test_a_message_of_this_node_to_itself_does_not_hold_up_those_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Dispatcher):
        def __init__(self) -> None:
            self._name = "w0"

        def on_message(self, peer: Any, frame: Frame) -> None:
            raise ValueError("a fault")

    myself: Any = SimpleNamespace(info=SimpleNamespace(name="w0"))
    Failing().redeliver(myself, Frame(RESPONSE, 0, 1))
    assert "cannot handle a message from w0" in caplog.text
    assert "a fault" in caplog.text
