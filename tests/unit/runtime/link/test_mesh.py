"""The start of a group of fixed size, where members do not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from time import monotonic
from typing import Any

import pytest
from tests.kit.times import LONG_S

from farcall.errors import HandshakeRefused, MissingPeers
from farcall.options import RpcBackendOptions
from farcall.protocol.connector import Ended, Outcome, Step
from farcall.protocol.member import Member
from farcall.runtime.link import mesh
from farcall.runtime.link.dialler import Found
from farcall.runtime.link.mesh import Mesh
from farcall.runtime.rendezvous.agreement import Membership


class Deaf:
    """A listener that is opened, and a table of peers that stays empty."""

    def __init__(self) -> None:
        self.remotes: dict[int, Any] = {}
        self.refusals: dict[str, str] = {}
        self.refused_hosts: dict[str, str] = {}
        self.connector = self.watch = self

    def neighbours(self) -> range:
        """Everybody, by incarnation."""
        return range(1, 1000)

    def expect(self, members: Iterable[Member]) -> None:
        assert not list(members)

    def open(self, *args: Any, **named: Any) -> None:
        pass


def test_a_member_whose_time_is_up_does_not_try_a_hundred_others_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these accepts and proves nothing, as on a machine with too much to do: a second each."""
    monkeypatch.setattr(mesh, "LATE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        members = [Member(f"w{rank}", rank, rank + 1, (address,)) for rank in range(100)]
        membership = Membership(members[-1], members, "cluster", b"a secret of the test")
        peers: Any = Deaf()
        since = monotonic()
        with pytest.raises(MissingPeers, match=r"w0 .*before its turn came"):
            Mesh(membership, RpcBackendOptions(), peers).connect(peers, since + 0.5)
        assert monotonic() - since < 50.0


@pytest.mark.parametrize("count", [1, 3])
def test_a_start_that_ran_out_of_time_names_the_missing(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Even if the last answer was a refusal that is worth another attempt."""

    class CrossingDialler:
        def __init__(self, *args: Any, **named: Any) -> None:
            pass

        def run(self) -> tuple[Ended, Found]:
            refused = HandshakeRefused("the peer refused this connection: crossed")
            return Ended(Step.OUT_OF_TIME, Outcome.CROSSED.value), Found(Outcome.CROSSED, error=refused)

    monkeypatch.setattr(mesh, "Dialler", CrossingDialler)
    members = [Member(f"w{rank}", rank, rank + 1, ("tcp://127.0.0.1:9",)) for rank in range(count + 1)]
    membership = Membership(members[-1], members, "cluster", b"a secret of the test")
    peers: Any = Deaf()
    with pytest.raises(MissingPeers, match=r"w0 \(rank 0\): it is about to be let in") as caught:
        Mesh(membership, RpcBackendOptions(), peers).connect(peers, monotonic() + LONG_S)
    assert set(caught.value.missing) >= {f"w{rank}" for rank in range(count)}


def test_slow_members_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are dialled, several are waited for at a time, whoever is slow."""
    together = threading.Barrier(mesh.DIALS_AT_ONCE)

    class SlowDialler:
        def __init__(self, *args: Any, **named: Any) -> None:
            pass

        def run(self) -> tuple[Ended, Found]:
            together.wait(LONG_S)
            return Ended(Step.OUT_OF_TIME, "slow"), Found(Outcome.SILENT)

    monkeypatch.setattr(mesh, "Dialler", SlowDialler)
    members = [Member(f"w{rank}", rank, rank + 1, ("tcp://127.0.0.1:9",)) for rank in range(2 * mesh.DIALS_AT_ONCE + 1)]
    membership = Membership(members[-1], members, "cluster", b"a secret of the test")
    peers: Any = Deaf()
    with pytest.raises(MissingPeers, match="slow"):
        Mesh(membership, RpcBackendOptions(), peers).connect(peers, monotonic() + LONG_S)
