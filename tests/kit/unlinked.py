"""A peer without a connection, over a core of its own: what is sent to it waits there."""

from __future__ import annotations

from typing import Any

from farcall.core import make_core
from farcall.core.contract import Core
from farcall.ids import WorkerInfo
from farcall.runtime.peers.peer import Peer


def quiet_core() -> Core:
    """A core that keeps no memory; whoever makes it stops it."""
    return make_core(0, 1 << 20, 0.0)


class UnlinkedPeer(Peer):
    """Worker w1, whom nothing reaches."""

    def __init__(self, core: Core) -> None:
        unused: Any = None
        super().__init__(WorkerInfo("w1", 1), 0x1F, 1, core, unused)
        self.way = self.back = core.open_link()
