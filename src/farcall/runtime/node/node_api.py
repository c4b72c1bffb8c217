"""What others see of a node: the questions that anybody may ask it, and what the layers above attach to it.

Owns the hooks and the tables of handlers, which the node's parts call and read; the answers come from its life and its
company. Questions may be asked from any thread. Hooks are added while a node starts, or by a layer's first use; all of
them run on the I/O thread unless said otherwise, so none may block. Knows none of the layers.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, TypeVar

from farcall.errors import RpcError, UnknownWorker
from farcall.ids import WorkerInfo
from farcall.protocol.frames import Frame
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.timers import Callback, Timer
from farcall.runtime.membership.events import MemberChanges, MemberEvent, MemberEvents
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.membership.shutdown import Leaving, Withdrawing
from farcall.runtime.node.cluster_links import ClusterLinks
from farcall.runtime.node.lifecycle import Lifecycle
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.rendezvous import Membership

__all__ = ["NodeApi"]

P = TypeVar("P")


class NodeApi:
    """The side of a node that others see. What is only declared here is made when the node starts."""

    membership: Membership
    _acquaintances: PeerTable
    _changes: MemberEvents
    _company: ClusterLinks
    _leaving: Leaving | Withdrawing
    _loop: Loop
    _myself: LoopbackPeer
    _peers: dict[str | int, Peer]
    """The same as the one in the node's acquaintances: every call asks for its peer."""
    _member_changes: MemberChanges

    def __init__(self, name: str) -> None:
        self._name = name
        self._lifecycle = Lifecycle(name)
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self._joined_hooks: list[Callable[[Peer], None]] = []
        self._gone_hooks: list[Callable[[Peer], None]] = []
        self._agreed_hooks: list[Callable[[], None]] = []
        self._end_hooks: list[Callable[[], None]] = []
        self._unsettled: list[Callable[[], int]] = []
        self._letters: dict[int, Callable[[Peer, Frame], None]] = {}
        self._in_order: set[type[Any]] = set()
        self._controls: dict[type[Any], Callable[[RemotePeer, Any], None]] = {}

    # ------------------------------------------------------------------ questions about the members

    @property
    def state(self) -> str:
        """One of the states in `lifecycle.py`."""
        return self._lifecycle.state

    @property
    def running(self) -> bool:
        """May calls be made?"""
        return self._lifecycle.is_running

    @property
    def why_ended(self) -> RpcError | None:
        """Why no calls can be made; None: they can."""
        return self._lifecycle.why_ended

    @property
    def watch(self) -> FailureDetector:
        """Who is a member, as far as this node knows."""
        return self._company.watch

    @property
    def peers_lost(self) -> int:
        """Members whose link has died although they did not say that they leave."""
        return self._member_changes.peers_lost

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this member can be reached."""
        return self.membership.me.addresses

    def peer(self, to: str | int | WorkerInfo) -> Peer:
        """The member called ``to``, by name, rank or WorkerInfo."""
        try:
            peer = self._peers.get(to.name if isinstance(to, WorkerInfo) else to)
        except TypeError:
            peer = None  # unhashable: the error below says what is wanted
        if peer is None or not self._lifecycle.is_running:
            raise self._no_peer(to)
        return peer

    def _no_peer(self, to: object) -> Exception:
        ended = self.why_ended
        if ended is not None:
            return ended
        if not isinstance(to, str | int | WorkerInfo):
            return TypeError(f"the destination must be a name, a rank or a WorkerInfo, not {type(to).__name__}")
        known = ", ".join(info.name for info in self.workers()[:16])
        return UnknownWorker(f"unknown destination worker {to!r}: the members are {known}")

    def is_peer(self, peer: Peer) -> bool:
        """Whether ``peer`` is how this very node sees a member: several nodes may live in one process."""
        return self._peers.get(peer.info.id) is peer

    def is_gone(self, name: str, incarnation: int) -> bool:
        """Was there that incarnation of a member, and is it there no more? One that is not known may come yet."""
        peer = self._peers.get(name)
        if peer is not None and peer.incarnation == incarnation:
            return peer.broken
        return self._company.is_over(incarnation)

    def numbered(self, member: int) -> Peer | None:
        """The member of this number (``Peer.number``), in whatever state the node and the link to it are.

        None: it is gone; or, while the node starts, not connected yet.
        """
        return self._acquaintances.numbered.get(member)

    def other(self, member: int) -> RemotePeer | None:
        """The same, where it is another member than this one."""
        peer = self._acquaintances.numbered.get(member)
        return peer if isinstance(peer, RemotePeer) else None

    def members(self) -> list[int]:
        """The numbers of all members, one's own too."""
        return list(self._acquaintances.numbered)

    @property
    def me(self) -> Peer:
        """This node, as a peer of itself."""
        return self._myself

    def others(self) -> list[RemotePeer]:
        """All other members, in whatever state the links to them are."""
        return list(self._acquaintances.remotes.values())

    def workers(self) -> list[WorkerInfo]:
        """All members, by rank; where members come and go, those that are there now."""
        return self._acquaintances.workers()

    # ------------------------------------------------------------------ what layers attach

    def part(self, kind: Callable[[Self], P]) -> P:
        """This node's one ``kind(node)``, made at first use: how layers above keep state with a node."""
        part = self._parts.get(kind)
        if part is None:
            with self._parts_lock:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = kind(self)
        return part

    def part_if_made(self, kind: Callable[[Self], P]) -> P | None:
        """The same, or None if it was never used."""
        return self._parts.get(kind)

    def wait_for(self, count: Callable[[], int]) -> None:
        """Have a graceful shutdown wait while ``count()``, of things under way that are no calls, is not 0."""
        self._unsettled.append(count)

    def something_ended(self) -> None:
        """Have a graceful shutdown look again: perhaps it waits for nothing but what just ended. From any thread."""
        self._leaving.poke()

    def on_peer_joined(self, hook: Callable[[Peer], None]) -> None:
        """Call ``hook`` on the I/O thread for every member that joins a running node, before anything of it is read."""
        self._joined_hooks.append(hook)

    def on_member(self, callback: Callable[[MemberEvent], object]) -> Callable[[], None]:
        """Have ``callback`` told, on a worker thread, of members that join, leave, are suspected, recover or die.

        Call what is returned to end that.
        """
        return self._changes.subscribe(callback)

    def member_events(self) -> AsyncIterator[MemberEvent]:
        """The same as an async iterator, from now on until the node ends."""
        return self._changes.iterate()

    def on_peer_gone(self, hook: Callable[[Peer], None]) -> None:
        """Call ``hook`` on the I/O thread whenever a member left or died; it must not run user code."""
        self._gone_hooks.append(hook)

    def on_agreed(self, hook: Callable[[], None]) -> None:
        """In a graceful shutdown call ``hook`` when all work everywhere is done, and the links still stand."""
        self._agreed_hooks.append(hook)

    def on_end(self, hook: Callable[[], None]) -> None:
        """Call ``hook``, which must not raise, when the node ends in whatever way: no message can be sent any more."""
        self._end_hooks.append(hook)

    def on_control(self, kind: type[Any], handle: Callable[[RemotePeer, Any], None], *, in_order: bool = False) -> None:
        """Have ``handle`` called on the I/O thread for each control message of this kind.

        ``in_order``: by whoever reads the link, and so before anything that came behind it; ``handle`` must have a
        lock of its own then.
        """
        self._controls[kind] = handle
        if in_order:
            self._in_order.add(kind)

    def on_letter(self, subject: int, handle: Callable[[Peer, Frame], None]) -> None:
        """Have ``handle`` called for each letter of this subject, on the thread that reads it: it must not block."""
        self._letters[subject] = handle

    def timer(self, callback: Callback) -> Timer:
        """A timer of the I/O thread: ``callback(now)`` must not run user code."""
        return self._loop.timer(callback)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the I/O thread as soon as possible."""
        self._loop.call_soon(function)

    def on_io_thread(self) -> bool:
        """Is the caller the I/O thread?"""
        return self._loop.on_thread()
