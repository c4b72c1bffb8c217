"""Two members of one host whose unix connection breaks and comes back over TCP: each call runs once, as bytes."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from tests.kit.team import team
from tests.kit.times import LONG_S
from tests.kit.waiting import wait_until

from farcall.channel.segments import segments_work
from farcall.runtime.node import runtime_of
from farcall.testing.faults import Faults
from farcall.transport.address import SCHEMES
from farcall.transport.interface import DialFailed

pytestmark = pytest.mark.skipif(not segments_work(), reason="no sealed memory files on this system")

ran: list[int] = []


def run(number: int, x: torch.Tensor | None = None) -> int:
    ran.append(number)
    return number if x is None else int(x.sum())


def kind(node: Any) -> str:
    (peer,) = runtime_of(node).others()
    return str(peer.link.transport.kind)


def no_way(address: str, timeout_s: float) -> NoReturn:
    raise DialFailed(f"cannot connect to {address}: too many open files")


def test_a_unix_link_that_comes_back_over_tcp_runs_each_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    faults = Faults()
    with faults.installed("w0"), team([None, None], 2) as nodes:
        w0 = nodes[0]
        assert w0.rpc_sync("w1", run, (0, torch.ones(1 << 18))) == 1 << 18
        assert kind(w0) == "unix"
        monkeypatch.setitem(SCHEMES, "unix", SCHEMES["unix"]._replace(dial=no_way))
        for round_ in range(1, 6):
            faults.cut()
            assert w0.rpc_sync("w1", run, (3 * round_ - 2,)) == 3 * round_ - 2
            assert w0.rpc_sync("w1", run, (3 * round_ - 1, torch.ones(1 << (20 + round_)))) == 1 << (20 + round_)
            assert w0.rpc_sync("w1", run, (3 * round_,)) == 3 * round_
            wait_until(lambda: kind(w0) == "tcp")
        assert ran == list(range(16))


def test_a_subscriber_gets_versions_though_its_unix_link_came_back_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes; and through shared memory again, once a unix link has taken the other's place."""
    faults = Faults()
    with faults.installed("w0"), team([None, None], 2) as nodes:
        values = {"x": torch.zeros(1 << 18)}
        publication, subscription = nodes[0].publish("x", values), nodes[1].subscribe("x")
        for step, wanted in enumerate(["unix", "tcp", "unix"]):
            if step:
                scheme = SCHEMES["unix"]
                with monkeypatch.context() as patch:
                    if wanted == "tcp":
                        patch.setitem(SCHEMES, "unix", scheme._replace(dial=no_way))
                    faults.cut()
                    wait_until(lambda wanted=wanted: kind(nodes[0]) == wanted)
            for number in range(3):
                values["x"] = torch.full((1 << (18 + step),), 10.0 * step + number)  # in memory that is new, too
                version = publication.push()
                assert subscription.wait(newer_than=None, timeout=LONG_S) is not None
                wait_until(lambda version=version: subscription.version == version)
                assert subscription.get()["x"].eq(10.0 * step + number).all()
