"""The peers and links of a node, and its failure detector.

Made when the members are known, or a member to ask; the I/O thread does not run yet then. Owns the part of the start
and the end that concerns the others: connections, the farewell, the end of the links. Hands messages on without looking
at them. Used by the threads that start and end the node; methods that run elsewhere say so.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from farcall.errors import RpcError
from farcall.ids import WorkerInfo
from farcall.options import RpcBackendOptions
from farcall.protocol import messages
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.connector import Connector
from farcall.runtime.link.mesh import Mesh
from farcall.runtime.membership.events import MemberChanges
from farcall.runtime.membership.failure_detector import FailureDetector
from farcall.runtime.node.dispatcher import Dispatcher
from farcall.runtime.node.resources import Resources
from farcall.runtime.peers.interference import find_interference
from farcall.runtime.peers.loopback import LoopbackPeer
from farcall.runtime.peers.peer import RemotePeer
from farcall.runtime.peers.table import PeerTable
from farcall.runtime.rendezvous.agreement import Membership
from farcall.runtime.rendezvous.dynamic import DynamicRendezvous
from farcall.transport.interface import Transport
from farcall.transport.unix import UnixTransport

RELEASE_DELAY_S = 0.01
"""How long a release waits for a message to the peer that takes it along."""


class LinkedNode(Protocol):
    """The node, as its links see it."""

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker write a message that the I/O thread may not, because writing can mean waiting."""

    def on_expelled(self, why: str) -> None:
        """On the I/O thread: the others have declared this node dead."""


class ClusterLinks:
    """The peers and links of one node; the `Host` of its peers."""

    def __init__(
        self,
        node: LinkedNode,
        membership: Membership,
        options: RpcBackendOptions,
        *,
        resources: Resources,
        is_static: bool,
        is_founder: bool,
        dispatcher: Dispatcher,
        changes: MemberChanges,
    ) -> None:
        me = membership.me
        self._name = me.name
        self._membership = membership
        self._options = options
        self._resources = resources
        self._fail_unsent = changes.fail_unsent
        self._left: list[RemotePeer] = []  # peers that were told goodbye
        self._node = node
        self._releases = resources.loop.timer(self._send_releases)
        self._interference = find_interference(me.name)
        info = WorkerInfo(me.name, me.rank)
        self.myself: LoopbackPeer = LoopbackPeer(
            info,
            me.incarnation,
            me.rank if is_founder else me.incarnation,
            resources.core,
            resources.loop,
            dispatcher.on_own_control,
            self._own_connection(info),
        )
        self.peers: PeerTable = PeerTable(
            self.myself,
            membership,
            options,
            resources,
            is_static=is_static,
            is_founder=is_founder,
            host=self,
            watcher=changes,
            dispatcher=dispatcher,
        )
        self.connector: Connector = self.peers.connector
        self.watch: FailureDetector = self.peers.watch

    def wrap(self, transport: Transport, info: WorkerInfo) -> Transport:
        """The transport for a link to ``info``: with the faults that a test has installed, if any."""
        if self._interference is None:
            return transport
        return self._interference.wrap_transport(transport, self._name, info.name, self._fail_unsent)

    def _own_connection(self, info: WorkerInfo) -> list[Transport]:
        """Both ends of a connection of this node to itself, where a test disturbs its messages; else none."""
        if self._interference is None:
            return []
        return [self.wrap(UnixTransport(end), info) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)]

    def on_expelled(self, why: str) -> None:
        """The others have declared this node dead."""
        self._node.on_expelled(why)

    def write_later(self, write: Callable[[], None]) -> None:
        """Have a worker write what the I/O thread may not, because it can mean waiting."""
        self._node.write_later(write)

    # ------------------------------------------------------------------ memory of others

    def on_release(self, urgent: bool) -> None:
        """A tensor in a peer's memory died; on any thread, perhaps inside a garbage collection: takes no lock."""
        self._releases.at(monotonic() + (0.0 if urgent else RELEASE_DELAY_S))

    def _send_releases(self, now: float) -> float:
        """On the I/O thread: give back memory of peers, if no message has taken the release along."""
        again = NEVER
        for peer in self.peers.everyone():
            if peer.segments is not None and peer.segments.released:
                peer.send_releases()
            if peer.devices is not None:
                again = min(again, peer.devices.settle_views())
                if peer.devices.has_releases:
                    peer.send_device_releases()
        return again

    # ------------------------------------------------------------------ the start

    def connect_all(self, deadline: float) -> None:
        """In a group of fixed size: connect to the neighbours."""
        Mesh(self._membership, self._options, self.peers).connect(self._resources.listener, deadline)

    def join(self, rendezvous: DynamicRendezvous) -> None:
        """In a group whose members come and go: join it, or found it."""
        rendezvous.enter(self._resources.listener, self._resources.loop, self.peers)

    # ------------------------------------------------------------------ the end

    def forget_device_segments(self) -> None:
        """Let go of the memory of others' devices: all work is done everywhere, and they still wait for us."""
        for peer in self.peers.everyone():
            if peer.devices is not None:
                peer.devices.forget_segments()

    def say_goodbye(self, reason: messages.GoodbyeReason, linger_s: float, *, agreed: bool) -> None:
        """Tell all peers that this is no accident, and give them ``linger_s`` to read the last messages.

        ``agreed``: all members leave.
        """
        self._left = self.peers.everyone()
        for peer in self._left:
            peer.leaving = True
        self.connector.stop()
        for peer in self._left:
            if peer.link.asleep:
                continue  # a sleeping peer hears of it from the others
            if peer.link.up:
                peer.link.go_on()  # where a parting is under way
            peer.control(messages.Goodbye(reason, agreed))
        if linger_s:
            deadline = monotonic() + linger_s
            for peer in self._left:
                peer.link.end_sending()
            for peer in self._left:
                peer.link.wait_closed(deadline)

    def cut(self, why: RpcError) -> None:
        """End the links, and free the threads that wait for room in a peer's queue."""
        for peer in self._left:
            peer.link.close()
            peer.on_queue_has_room()
        self.myself.ended = why
        self.myself.on_queue_has_room()

    def close(self) -> None:
        """Free the resources of all peers. After the I/O thread has stopped."""
        for peer in self.peers.everyone():
            peer.link.close()  # some may have joined since `say_goodbye`
            peer.close()
        for peer in self._left:
            peer.close()
        self.myself.close()
