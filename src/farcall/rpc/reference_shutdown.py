"""References at a graceful shutdown: given up when all work is done, then checked for leaks if that is wanted.

Owns the last messages of a node about references, and the report of leaks: references to its values that other members
still hold after they said goodbye. Looks at references only through `NodeReferences`.

    all work everywhere is done              -> give up every reference, send Farewell to every member
    a Farewell of each other member is here  -> report the references that are still listed, when the node has ended

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
"""How long a shutdown that checks for leaks waits for forks that are on their way, and for farewells."""
_MOST_SHOWN = 32


class Held(NamedTuple):
    """A leak: the references of one member to one value of this node."""

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
    """The shutdown of one node's references.

    Its state changes on the I/O thread, and on the thread that shuts the node down.
    """

    def __init__(self, references: NodeReferences) -> None:
        self._references = references
        self.checks_leaks = False
        """Should a graceful shutdown end with `raise_leaks`?"""
        self.give_up: Callable[[], object] = lambda: references.drop_all(0.0)
        self.agreed: bool = False
        """Have all members agreed to leave?"""
        self._settled_by: float | None = None
        self._parted: set[int] = set()  # members whose Farewell is here
        self._news = threading.Event()  # a Farewell came, or a member is gone
        self._leaks: list[Held] = []
        references.node.hooks.unsettled.append(self._unsettled)
        references.node.hooks.on_control(Farewell, self._on_farewell)
        references.node.hooks.agreed.append(self._on_agreed)

    def on_peer_gone(self) -> None:
        """A member is gone: no Farewell of it will come."""
        self._news.set()

    def _unsettled(self) -> int:
        """How many forks a shutdown that checks for leaks must wait for; 0 once SETTLING_S is over."""
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
        self._references.node.something_ended()  # have the shutdown look again: no message may come that says so
        return unsettled

    def _on_agreed(self) -> None:
        """All work everywhere is done: no member needs references any more."""
        self.agreed = True
        self.give_up()
        for member in self._references.others():
            peer = self._references.node.other(member)
            if peer is not None:
                peer.control(Farewell())
        if not self.checks_leaks:
            return
        deadline = monotonic() + SETTLING_S
        while True:
            self._news.clear()  # before the look: news that come in between end the wait at once
            if self._parted.issuperset(self._references.others()):
                break
            if not self._news.wait(max(0.0, deadline - monotonic())):
                break
        self._find_leaks()

    def _on_farewell(self, peer: RemotePeer, message: Farewell) -> None:
        self._parted.add(peer.number)
        self._news.set()

    def _find_leaks(self) -> None:
        """Note the references of members that have said Farewell: they will never be released."""
        snapshot, values = self._references.snapshot()
        for owned in snapshot.owned:
            what, origin = values.get(owned.ref, (NOT_MADE, ""))
            for member, forks in owned.forks_by_holder.items():
                if member in self._parted:
                    holder = self._references.worker(member)
                    self._leaks.append(Held(holder.name, forks, owned.ref, what, origin))

    def raise_leaks(self) -> None:
        """After the end: raise `ReferenceLeak` if other members held references to the last."""
        leaks = self._leaks
        if leaks:
            shown = "\n  ".join(map(str, leaks[:_MOST_SHOWN]))
            more = f"\n  and {len(leaks) - _MOST_SHOWN} more" if len(leaks) > _MOST_SHOWN else ""
            name = self._references.node.info.name
            raise ReferenceLeak(
                f"Leaking RRef: values of {name} were held to the last:\n  {shown}{more}\n"
                "Drop these references before shutdown()."
            )
