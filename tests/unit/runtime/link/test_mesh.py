"""The start of a group of fixed size, where members do not answer."""

from __future__ import annotations

import socket
from time import monotonic
from typing import Any

import pytest

from farcall.errors import MissingPeers
from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member
from farcall.runtime.link import mesh
from farcall.runtime.link.mesh import Mesh
from farcall.runtime.rendezvous.agreement import Membership


class Deaf:
    """A listener that is opened, and a table of peers that stays empty."""

    def __init__(self) -> None:
        self.remotes: dict[int, Any] = {}
        self.refusals: dict[str, str] = {}
        self.connector = self

    def open(self, *args: Any, **named: Any) -> None:
        pass


def test_a_member_whose_time_is_up_does_not_try_a_hundred_others_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these accepts and proves nothing, as on a machine with too much to do: a second each."""
    monkeypatch.setattr(mesh, "LATE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0), backlog=256) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        members = [Member(f"w{rank}", rank, rank + 1, (address,)) for rank in range(100)]
        membership = Membership(members[-1], members, "cluster", b"a secret of the test", 0, None)
        peers: Any = Deaf()
        since = monotonic()
        with pytest.raises(MissingPeers, match=r"w0 .*w98 .*before its turn came"):
            Mesh(membership, RpcBackendOptions(), peers).connect(peers, since + 0.5)
        assert monotonic() - since < 50.0
