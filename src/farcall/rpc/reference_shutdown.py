"""References at a graceful shutdown: given up when all work is done, and, where asked, counted afterwards.

Owns the last messages of a node about references, and the report of leaks: what others still hold of its values
although they have said that they gave up all they held. Looks at references only through `NodeReferences`.

    all work everywhere is done        -> give up every reference, tell everybody (Farewell)
    all others have said so, or left   -> what is still listed is a leak, raised when the node has ended

Every wait has a bound: a shutdown never hangs on references.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from farcall.errors import ReferenceLeak
from farcall.ids import RefId
from farcall.protocol.references.messages import Farewell
from farcall.rpc.owned_values import NOT_MADE
from farcall.runtime.peers.peer import RemotePeer

if TYPE_CHECKING:
    from farcall.rpc.references import NodeReferences

SETTLING_S = 5.0
"""How long a shutdown that looks for leaks waits for forks on their way to settle, and for farewells."""
_MOST_SHOWN = 32


class Held(NamedTuple):
    """Some other member's hold on a value of this node."""

    holder: str
    forks: int
    ref: RefId
    what: str
    origin: str

    def __str__(self) -> str:
        times = f" ({self.forks} forks)" if self.forks > 1 else ""
        where = f", created at {self.origin}" if self.origin else ""
        return f"{self.holder} holds {self.ref.created_on}:{self.ref.local_id}, a {self.what}{where}{times}"


class ReferenceShutdown:
    """The end of one node's references."""

    def __init__(self, references: NodeReferences) -> None:
        self._references = references
        self.checks_leaks = False
        """Raise if anybody still holds something after all gave up what they held?"""
        self.give_up: Callable[[], object] = lambda: references.drop_all(0.0)
        self.agreed: bool = False
        """Does everybody leave?"""
        self._settled_by: float | None = None
        self._parted: set[int] = set()
        self._news = threading.Event()
        self._leaks: list[Held] = []
        references.node.hooks.unsettled.append(self._unsettled)
        references.node.hooks.on_control(Farewell, self._on_farewell)
        references.node.hooks.agreed.append(self._on_agreed)

    def on_peer_gone(self) -> None:
        """Somebody will say no more."""
        self._news.set()

    def _unsettled(self) -> int:
        """What a graceful shutdown that looks for leaks must wait for, within a bound."""
        if not self.checks_leaks:
            return 0
        unsettled = self._references.unsettled
        if not unsettled:
            self._settled_by = None
            return 0
        now = monotonic()
        if self._settled_by is None:
            self._settled_by = now + SETTLING_S
        if now > self._settled_by:
            return 0
        self._references.node.something_ended()  # may have, when it looks again
        return unsettled

    def _on_agreed(self) -> None:
        """All work everywhere is done: nobody needs references any more."""
        self.agreed = True
        self.give_up()
        for member in self._references.others():
            peer = self._references.node.other(member)
            if peer is not None:
                peer.control(Farewell())
        if self.checks_leaks:
            self._wait_for_farewells()
            self._find_leaks()

    def _on_farewell(self, peer: RemotePeer, message: Farewell) -> None:
        self._parted.add(peer.number)
        self._news.set()

    def _wait_for_farewells(self) -> None:
        deadline = monotonic() + SETTLING_S
        while True:
            self._news.clear()
            if self._parted.issuperset(self._references.others()):
                return
            if not self._news.wait(max(0.0, deadline - monotonic())):
                return

    def _find_leaks(self) -> None:
        """Who holds something after it has said that it released all, will never let it go."""
        snapshot, values = self._references.snapshot()
        for owned in snapshot.owned:
            what, origin = values.get(owned.ref, (NOT_MADE, ""))
            for member, forks in owned.forks_by_holder.items():
                if member in self._parted:
                    holder = self._references.worker(member)
                    self._leaks.append(Held(holder.name, forks, owned.ref, what, origin))

    def raise_leaks(self) -> None:
        """After the end: raise if somebody held something to the last."""
        leaks = self._leaks
        if leaks:
            shown = "\n  ".join(map(str, leaks[:_MOST_SHOWN]))
            more = f"\n  and {len(leaks) - _MOST_SHOWN} more" if len(leaks) > _MOST_SHOWN else ""
            name = self._references.node.info.name
            raise ReferenceLeak(
                f"Leaking RRef: values of {name} were held to the last:\n  {shown}{more}\n"
                "Drop these references before shutdown()."
            )
