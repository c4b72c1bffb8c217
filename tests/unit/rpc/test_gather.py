"""Gathers at their leader, without sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock

from farcall.errors import PeerDead
from farcall.ids import WorkerInfo
from farcall.rpc.gather import Group, _Gathers
from farcall.runtime.node.hooks import Hooks

GROUP: Group = (("w0", 10), ("w1", 11), ("w2", 12))


def test_a_failed_gather_keeps_no_value_of_those_that_come_late() -> None:
    tasks: list[Any] = []
    node: Any = SimpleNamespace(
        me=SimpleNamespace(info=WorkerInfo("w0", 0), incarnation=10),
        timer=Clock().timer,
        hooks=Hooks(),
        executor=SimpleNamespace(submit=tasks.append),
        is_gone=lambda name, incarnation: name == "w2",
    )
    gathers = _Gathers(node)
    future = gathers.contribute(GROUP, 0, "w0", "a large value", 60.0)
    for task in tasks:
        task.run(False)
    with pytest.raises(PeerDead, match="lost w2"):
        future.wait()
    for _ in range(2):
        with pytest.raises(PeerDead, match="lost w2"):
            gathers.contribute(GROUP, 0, "w1", "a large value", 60.0)
    assert [error.__traceback__ for error in gathers._failed.values()] == [None]
