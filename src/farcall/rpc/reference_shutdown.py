"""References at a graceful shutdown: the node gives them up when all work is done, and checks for leaks on request.

Owns a node's last messages about references, and the report of leaks: references to its values that other members
still hold after their Farewell. Reaches references only through `NodeReferences`.

    all work everywhere is done          -> give up every reference, send Farewell to all that have a connection, and
                                            where leaks are looked for, to all that ever had one
    a Farewell is here, ours is not out  -> answer it: only one of the two may look for leaks
    a Farewell of each of those is here  -> report the references that are still listed, when the node has ended

Members that never had a connection hold no references to each other's values: every holder registers with the owner.

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
"""How long a shutdown that checks for leaks waits for forks in transit, and for Farewells."""
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

    Its state changes on the I/O thread and on the thread that shuts the node down, by atomic operations.
    """

    def __init__(self, references: NodeReferences) -> None:
        self._references = references
        self.checks_leaks = False
        """Should a graceful shutdown end with `raise_leaks`?"""
        self.give_up: Callable[[], object] = lambda: references.drop_all(0.0)
        self.agreed: bool = False
        """Have all members agreed to leave?"""
        self._settled_by: float | None = None
        self._given_up = False  # has this node given up every reference, so that it may send Farewells?
        self._told: set[int] = set()  # members that were sent our Farewell
        self._parted: set[int] = set()  # members whose Farewell has come
        self._news = threading.Event()  # set when a Farewell comes or a member dies
        self._leaks: list[Held] = []
        references.node.hooks.unsettled.append(self._unsettled)
        references.node.hooks.on_control(Farewell, self._on_farewell)
        references.node.hooks.agreed.append(self._on_agreed)

    def on_peer_gone(self) -> None:
        """A member is gone: its Farewell will not come."""
        self._news.set()

    def _unsettled(self) -> int:
        """Count the forks that a shutdown with a leak check must wait for; 0 after SETTLING_S."""
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
        self._references.node.something_ended()  # have the shutdown ask again: no message marks the end of SETTLING_S
        return unsettled

    def _on_agreed(self, deadline: float) -> None:
        """All work everywhere is done: no member needs references any more."""
        self.agreed = True
        self.give_up()
        self._given_up = True
        for peer in self._linked():
            self._tell(peer)
        if not self.checks_leaks:
            return
        deadline = min(deadline, monotonic() + SETTLING_S)
        while True:
            self._news.clear()  # before the check: an event between the check and the wait then ends the wait at once
            if self._parted.issuperset(peer.number for peer in self._linked()):
                break
            if not self._news.wait(max(0.0, deadline - monotonic())):
                break
        self._find_leaks()

    def _linked(self) -> list[RemotePeer]:
        peers = map(self._references.node.other, self._references.others())
        linked = [peer for peer in peers if peer is not None and peer.was_connected]
        return [peer for peer in linked if self.checks_leaks or not peer.link.asleep]

    def _tell(self, peer: RemotePeer) -> None:
        if peer.number not in self._told:  # two threads may both pass this check; a second Farewell is harmless
            self._told.add(peer.number)
            peer.control(Farewell())

    def _on_farewell(self, peer: RemotePeer, message: Farewell) -> None:
        self._parted.add(peer.number)
        self._news.set()
        if self._given_up:
            self._tell(peer)  # `_linked` skipped it because its link was asleep, and it waits for our Farewell

    def _find_leaks(self) -> None:
        """Record the references of members whose Farewell has come: nobody will release them."""
        snapshot, values = self._references.snapshot()
        for owned in snapshot.owned:
            what, origin = values.get(owned.ref, (NOT_MADE, ""))
            for member, forks in owned.forks_by_holder.items():
                if member in self._parted:
                    holder = self._references.worker(member)
                    self._leaks.append(Held(holder.name, forks, owned.ref, what, origin))

    def raise_leaks(self) -> None:
        """After the node has ended: raise `ReferenceLeak` if `_find_leaks` found any."""
        leaks = self._leaks
        if leaks:
            shown = "\n  ".join(map(str, leaks[:_MOST_SHOWN]))
            more = f"\n  and {len(leaks) - _MOST_SHOWN} more" if len(leaks) > _MOST_SHOWN else ""
            name = self._references.node.info.name
            raise ReferenceLeak(
                f"Leaking RRef: values of {name} were held to the last:\n  {shown}{more}\n"
                "Drop these references before shutdown()."
            )
