"""Groups with a table of what others may do: what one hostile member tries against another, over real connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
from tests.kit.team import dynamic_team
from tests.kit.waiting import wait_until

import farcall
from farcall.errors import DuplicateName
from farcall.options import MembershipOptions, ObservingOptions, RpcBackendOptions
from farcall.protocol.membership.events import LinkGivenUp
from farcall.protocol.membership.messages import Gossip, Obituary, Status, Update
from farcall.runtime.node import Runtime
from farcall.serialize.allowance import Allowance
from farcall.serialize.pickler import restrict

KEPT_S = 1.0


def name_of_callee() -> str:
    return "it was called"


@pytest.fixture(autouse=True)
def _table() -> Iterator[None]:
    restrict(Allowance([name_of_callee], (), "data"))
    yield
    restrict(None)


def runtime(node: farcall.Node) -> Runtime:
    found = node._runtime
    assert found is not None
    return found


def tell(hostile: farcall.Node, to: farcall.Node, message: Any) -> None:
    """Have ``hostile`` send a message about membership that its own machine would not."""
    peers = runtime(hostile).links.peers
    runtime(hostile).call_soon(lambda: peers.send_news(runtime(to).me.incarnation, message))


def test_one_lie_ends_no_member_and_its_name_is_not_to_be_had(tmp_path: Path) -> None:
    with dynamic_team(3, tmp_path, membership=MembershipOptions(reconnect_s=KEPT_S)) as (hostile, caller, victim):
        seen: list[str] = []
        for node in (caller, victim):
            node.on_member(lambda event: seen.append(event.kind))
        accused = runtime(victim).me.incarnation
        for status in (Status.DEAD, Status.LEFT):
            tell(hostile, caller, Gossip((Update(accused, status, 0, None, "so I say"),)))
            tell(hostile, victim, Gossip((Update(accused, status, 0, None, "so I say"),)))
        record = msgspec.structs.replace(runtime(victim).membership.me, incarnation=accused ^ 1, admission=1000)
        tell(hostile, caller, Gossip((Update(record.incarnation, Status.ALIVE, 0, record),)))
        observing = ObservingOptions(runtime_directory=str(tmp_path / "run"))
        options = RpcBackendOptions(init_method=f"file://{tmp_path}/meet", observing=observing)
        with pytest.raises(DuplicateName):
            farcall.Node("w2", 7, options=options).start()
        assert caller.rpc_sync("w2", name_of_callee) == "it was called"
        assert victim.rpc_sync("w1", name_of_callee) == "it was called"
        assert not {"dead", "left"} & set(seen)


def test_who_is_declared_dead_by_one_loses_that_one_alone(tmp_path: Path) -> None:
    with dynamic_team(3, tmp_path, membership=MembershipOptions(reconnect_s=KEPT_S)) as (hostile, other, victim):
        tell(hostile, victim, Obituary(runtime(victim).me.incarnation, "so I say", 2**53, 0))
        wait_until(lambda: [worker.name for worker in victim.members()] == ["w1", "w2"])
        assert other.rpc_sync("w2", name_of_callee) == "it was called"
        assert victim.rpc_sync("w1", name_of_callee) == "it was called"


def test_a_name_is_to_be_had_again_a_while_after_the_death(tmp_path: Path) -> None:
    """Also by the very process that was declared dead: nobody can tell it from others."""
    with dynamic_team(3, tmp_path, membership=MembershipOptions(reconnect_s=KEPT_S)) as (first, second, victim):
        seen: dict[str, float] = {}
        first.on_member(lambda event: seen.setdefault(event.kind, monotonic()))
        dead = runtime(victim).me.incarnation
        for node in (first, second):
            watch = runtime(node).watch
            runtime(node).call_soon(lambda watch=watch: watch.feed(LinkGivenUp(dead, "a test")))
        wait_until(lambda: "joined" in seen)
        assert seen["joined"] - seen["dead"] >= KEPT_S
        wait_until(lambda: len(second.members()) == 3)
        assert second.rpc_sync("w2", name_of_callee) == "it was called"
