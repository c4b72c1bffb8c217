"""Questions to the owner of a value whose creation fails meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.times import AT_ONCE_S, LONG_S
from tests.kit.unlinked import UnlinkedPeer, quiet_core

from farcall.errors import RpcTimeout
from farcall.ids import ForkId, RefId
from farcall.protocol.references.messages import Fork
from farcall.rpc.call import plain_request
from farcall.rpc.owner_calls import Creation
from farcall.runtime.calls.pending import CallTable, SyncCall


class Interrupted:
    """A core; something happens just before it gets a call."""

    def __init__(self, core: Any, before: Callable[[], None]) -> None:
        self._core, self._before = core, before

    def call(self, *request: Any) -> Any:
        self._before()
        return self._core.call(*request)

    def post(self, *request: Any) -> Any:
        self._before()
        return self._core.post(*request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


def test_a_question_ends_with_the_creation_that_fails_before_the_core_knows_the_question() -> None:
    core = quiet_core()
    try:
        peer = UnlinkedPeer(core)
        unused: Any = None
        between: Any = Interrupted(core, lambda: creation.on_failure(RpcTimeout("late")))
        calls = CallTable(between, Clock().timer, unused)
        references: Any = SimpleNamespace(node=SimpleNamespace(calls=calls), withdraw_creation=lambda fork: None)
        creation = Creation(references, Fork(RefId(0, 1), ForkId(0, 2), 1, 0, 1), peer, len, 60.0, None)
        call, frame = SyncCall(peer, len, LONG_S), plain_request(peer, b"f")
        creation.attach(call, frame)
        started = monotonic()
        with pytest.raises(RpcTimeout, match="RRef creation"):
            calls.exchange(call, frame)
        assert monotonic() - started < AT_ONCE_S, "it has not waited for its own time"
        assert core.counts().pending == 0
    finally:
        core.stop()
