"""Gathers at their leader, without sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock

from farcall.errors import PeerDead, RpcError
from farcall.ids import WorkerInfo
from farcall.rpc.gather import Group, _Gathers
from farcall.runtime.node.hooks import Hooks

GROUP: Group = (("w0", 10), ("w1", 11), ("w2", 12))


def node(tasks: list[Any] | None = None, gone: str = "") -> Any:
    return SimpleNamespace(
        me=SimpleNamespace(info=WorkerInfo("w0", 0), incarnation=10),
        timer=Clock().timer,
        hooks=Hooks(),
        executor=SimpleNamespace(submit=[].append if tasks is None else tasks.append),
        is_gone=lambda name, incarnation: name == gone,
    )


def test_a_failed_gather_keeps_no_value_of_those_that_come_late() -> None:
    tasks: list[Any] = []
    gathers = _Gathers(node(tasks, gone="w2"))
    future = gathers.contribute(GROUP, 0, "w0", "a large value", 60.0)
    for task in tasks:
        task.run(False)
    with pytest.raises(PeerDead, match="lost w2"):
        future.wait()
    for _ in range(2):
        with pytest.raises(PeerDead, match="lost w2"):
            gathers.contribute(GROUP, 0, "w1", "a large value", 60.0)
    assert [error.__traceback__ for error in gathers._failed.values()] == [None]


def test_one_member_begins_so_many_gathers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.rpc.gather.MOST_BEGUN", 3)
    gathers = _Gathers(node())
    for number in range(3):
        gathers.contribute(GROUP, number, "w1", None, 60.0)
    with pytest.raises(RpcError, match="w1 has begun 3 gathers"):
        gathers.contribute(GROUP, 3, "w1", None, 60.0)
    for number in range(4):
        gathers.contribute(GROUP, number, "w2", None, 60.0)  # of which it begins one
    gathers.contribute(GROUP, 0, "w0", None, 60.0)  # the last to report
    gathers.contribute(GROUP, 4, "w1", None, 60.0)


def test_who_is_not_of_the_group_completes_no_gather() -> None:
    gathers = _Gathers(node())
    future = gathers.contribute(GROUP, 0, "w0", 0, 60.0)
    with pytest.raises(RpcError, match="w3 is not one of the workers"):
        gathers.contribute(GROUP, 0, "w3", 3, 60.0)
    gathers.contribute(GROUP, 0, "w1", 1, 60.0)
    gathers.contribute(GROUP, 0, "w2", 2, 60.0)
    assert future.value() == {"w0": 0, "w1": 1, "w2": 2}
