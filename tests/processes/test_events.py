"""What happens to members and links is counted, and told to whoever asks afterwards."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import pytest
from tests.kit.observing import find_observer
from tests.kit.team import dynamic_team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.errors import RpcTimeout
from farcall.observe.observer import NothingToObserve, Observer
from farcall.options import ObservingOptions, RpcBackendOptions
from farcall.protocol.hello import Resume
from farcall.runtime.link.connector import Connector
from farcall.runtime.node import runtime_of
from farcall.testing.faults import Faults

BOUND_S = 30.0


def fail(text: str) -> None:
    raise ValueError(text)


def test_who_comes_and_goes_is_counted_and_an_observer_sees_those_who_are_there(tmp_path: Path) -> None:
    with dynamic_team(3, tmp_path) as nodes:
        wait_until(lambda: nodes[0].metrics().members["joined"] == 2)
        with find_observer(tmp_path / "run") as eyes:
            assert [one.worker for one in eyes.metrics(BOUND_S).answers] == ["w0", "w1", "w2"]
            nodes[2].shutdown()
            for node in nodes[:2]:
                wait_until(lambda node=node: node.metrics().members["left"] == 1)  # type: ignore[misc]
            heard = eyes.metrics(BOUND_S)
            assert [one.worker for one in heard.answers] == ["w0", "w1"]
            assert heard.silent == []

            def kinds() -> list[tuple[str, str]]:
                return [(event.kind, event.worker) for event in eyes.events(BOUND_S).answers[0].events]

            wait_until(lambda: kinds() == [("joined", "w1"), ("joined", "w2"), ("left", "w2")])
        assert nodes[0].metrics().peers_lost == 0


def test_a_connection_that_broke_and_came_back_is_counted(tmp_path: Path) -> None:
    faults = Faults()
    with faults.installed(), dynamic_team(2, tmp_path) as nodes:
        with faults.cut(sender="w0", to="w1"):
            assert nodes[0].rpc_sync("w1", int, ("7",)) == 7
        wait_until(lambda: all(node.metrics().reconnects == 1 for node in nodes))
        found = [node.metrics() for node in nodes]
        assert sum(one.interruptions for one in found) >= 1  # one of the two may hear of it from the other first
        assert [(one.peers_lost, one.members["dead"]) for one in found] == [(0, 0), (0, 0)]
        assert found[0].frames_sent_again >= 1  # the request was cut
        for node, peer in zip(nodes, ("w1", "w0"), strict=True):
            wait_until(lambda: runtime_of(node).event_log.latest()[-1][1:3] == ("reconnected", peer))  # noqa: B023


def test_errors_and_timeouts_are_told_where_they_happened(tmp_path: Path) -> None:
    with dynamic_team(2, tmp_path) as nodes:
        with pytest.raises(ValueError, match="purpose"):
            nodes[0].rpc_sync("w1", fail, ("on\n purpose",))
        with pytest.raises(RpcTimeout):
            nodes[0].rpc_sync("w1", sleep, (2.0,), timeout=0.05)
        with find_observer(tmp_path / "run") as eyes:
            mine, theirs = (one.events for one in eyes.events(BOUND_S).answers)
        assert mine[-1][1:5] == ("timed out", "w1", "sleep", "after 0.05 s")
        assert theirs[-1][1:5] == ("failed", "w0", "fail", "ValueError: on purpose")


def test_an_observer_that_speaks_of_a_session_is_no_member_that_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no address that it was told by the cluster, and its key proves no member, whatever it says it wants."""
    asked: list[object] = []
    monkeypatch.setattr(Connector, "admit", lambda self, peer, arrived_at: asked.append(peer) or b"")
    monkeypatch.setattr("farcall.observe.observer.DIAL_S", LONG_S)
    monkeypatch.setattr("farcall.observe.observer.Observe", lambda: Resume("00" * 16, 0))
    with dynamic_team(1, tmp_path):
        with pytest.raises(NothingToObserve, match="wrong address"):
            Observer.find(
                options=RpcBackendOptions(observing=ObservingOptions(runtime_directory=str(tmp_path / "run")))
            )
        assert asked == []
