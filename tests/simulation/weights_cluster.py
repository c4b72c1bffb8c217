"""Members that publish and subscribe, in one process and on one thread; a network that delays and reorders; a judge.

The drivers and machines are the real ones (`farcall.weights.node.Weights`), and so is the memory. What lies between
members is the test's: messages are on their way until the schedule delivers them, in any order; offers of blocks get
lost when a link is cut; members die at any moment, and the others hear of it one by one.

The judge knows what each version was pushed with. Every tensor that anybody holds must be that, whole, at every moment.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from farcall.errors import NotInitialized, Superseded
from farcall.ids import WorkerInfo
from farcall.protocol.frames import HEADER
from farcall.protocol.messages import decode_message, encode_message
from farcall.protocol.weights.messages import Key
from farcall.protocol.weights.publisher import PublisherState
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.weights.node import Weights
from farcall.weights.publication import Publication
from farcall.weights.subscription import Subscription
from farcall.weights.version import Version

NAME = "policy"
SIZES = (3, 700, 5000)
FIRST = 1 << 62
"""Incarnations begin here, as real ones do."""


class Timer:
    """A timer that the schedule runs, when it likes."""

    due = float("inf")

    def __init__(self, callback: Callable[[float], float]) -> None:
        self._callback = callback
        self.is_set = False

    def at(self, when: float) -> None:
        self.is_set = self.is_set or when < 1e9

    def run(self, now: float) -> None:
        self.is_set = False
        self.at(self._callback(now))


class Link(RemotePeer):
    """Another member, as one sees it."""

    __slots__ = ("_owner", "_to")

    def __init__(self, owner: Member, to: Member) -> None:
        Peer.__init__(self, WorkerInfo(to.name, to.number), to.incarnation, to.number)
        self._owner, self._to = owner, to
        self.lending = object()  # type: ignore[assignment]
        outgoing = SimpleNamespace(send_with_descriptor=self._send_with_descriptor)
        transport = SimpleNamespace(carries_descriptors=True)
        self.link = SimpleNamespace(outgoing=outgoing, incoming=self, transport=transport)  # type: ignore[assignment]

    @property
    def broken(self) -> bool:
        return self._to.incarnation in self._owner.heard_dead or not self._owner.alive

    def control(self, message: Any, more: bool = False) -> None:
        if not self.broken:
            self._owner.cluster.send(self._owner, self._to, encode_message(message))

    def _send_with_descriptor(self, frame: bytes, descriptor: int, deadline: float, lost: Any) -> bool:
        if not self.broken:
            self._owner.cluster.send(self._owner, self._to, frame[HEADER.size :], os.dup(descriptor), lost)
        return True  # it carries descriptors

    def take_descriptor(self) -> int | None:
        taken, self._owner.descriptor = self._owner.descriptor, None
        return taken


class Member:
    """One incarnation: its weights, what its program publishes and reads."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = f"w{number}"
        self.incarnation = FIRST + number
        self.alive = True
        self.heard_dead: set[int] = set()
        self.links: dict[int, Link] = {}
        self.descriptor: int | None = None
        self.timers: list[Timer] = []
        self.later: list[Callable[[], None]] = []
        self.hooks = Hooks()
        self.info = WorkerInfo(self.name, number)
        node = SimpleNamespace(
            me=SimpleNamespace(incarnation=self.incarnation, info=self.info, broken=False, control=self._control),
            info=self.info,
            pool=object(),
            devices=None,
            hooks=self.hooks,
            running=True,
            why_ended=None,
            timeout_s=0.0,
            calls=SimpleNamespace(waiting=nullcontext),
            timer=self._timer,
            others=lambda: [link for link in self.links.values() if not link.broken],
            write_later=self.later.append,
        )
        self.node = node
        self.weights = Weights(node)  # type: ignore[arg-type]
        self.publication: Publication | None = None
        self.values = {f"t{size}": torch.zeros(size) for size in SIZES}
        self.subscription: Subscription | None = None
        self.seen: Key | None = None
        self.held: list[tuple[Key, dict[str, torch.Tensor]]] = []

    def _timer(self, callback: Callable[[float], float]) -> Timer:
        timer = Timer(callback)
        self.timers.append(timer)
        return timer

    def _control(self, message: Any) -> None:
        self.cluster.send(self, self, encode_message(message))

    def meet(self, other: Member) -> None:
        self.links[other.incarnation] = Link(self, other)
        for hook in self.hooks.peer_joined:
            hook(self.links[other.incarnation])

    def hear_of_death(self, other: Member) -> None:
        if other.incarnation not in self.heard_dead and self.alive:
            self.heard_dead.add(other.incarnation)
            for hook in self.hooks.peer_gone:
                hook(self.links[other.incarnation])

    def receive(self, sender: Member, data: bytes, descriptor: int | None) -> None:
        peer = self.node.me if sender is self else self.links[sender.incarnation]
        message = decode_message(data)
        self.descriptor = descriptor
        self.hooks.controls[type(message)](peer, message)
        assert self.descriptor is None

    def die(self) -> None:
        """The process is gone, and all of its memory but what others have mapped."""
        self.alive = False
        self.held.clear()
        self.node.why_ended = NotInitialized("dead")
        self.subscription = self.publication = None
        for hook in self.hooks.ended:
            hook()


class Cluster:
    """The members, the messages on their way, and the judge's books."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.members: list[Member] = []
        self.packets: list[tuple[Member, Member, bytes, int | None, Any]] = []
        self.cut: set[tuple[int, int]] = set()
        self.pushed: dict[tuple[int, int], float] = {}  # by publisher and number: its epoch may grow
        self.stamp = 0.0
        self.untold: list[tuple[Member, Member]] = []

    @property
    def alive(self) -> list[Member]:
        return [member for member in self.members if member.alive]

    # ------------------------------------------------------------------ the network

    def send(
        self, sender: Member, receiver: Member, data: bytes, descriptor: int | None = None, lost: Any = None
    ) -> None:
        self.packets.append((sender, receiver, data, descriptor, lost))

    def deliver(self, index: int) -> None:
        sender, receiver, data, descriptor, _ = self.packets.pop(index)
        dead_to = sender.incarnation in receiver.heard_dead
        if not receiver.alive or dead_to or (sender is not receiver and sender.incarnation not in receiver.links):
            if descriptor is not None:
                os.close(descriptor)
            return
        receiver.receive(sender, data, descriptor)

    def cut_links(self, one: Member, other: Member) -> None:
        """The connection breaks: small messages are sent again, offers of blocks are told as lost."""
        for packet in list(self.packets):
            if {packet[0], packet[1]} == {one, other} and packet[3] is not None:
                self.packets.remove(packet)
                os.close(packet[3])
                if packet[0].alive:
                    packet[4].lost()

    # ------------------------------------------------------------------ the schedule

    def join(self) -> Member:
        member = Member(self, len(self.members))
        for other in self.alive:
            member.links[other.incarnation] = Link(member, other)
        for other in self.alive:
            other.meet(member)
        self.members.append(member)
        return member

    def kill(self, member: Member) -> None:
        member.die()
        self.untold += [(other, member) for other in self.alive]

    def publish(self, member: Member) -> None:
        member.publication = member.weights.claim(NAME, member.values, keep=self.random.choice([1, 2, 3]))

    def push(self, member: Member) -> None:
        publication = member.publication
        if publication is None or publication.machine.state in (PublisherState.CLAIMING, PublisherState.CLOSED):
            return
        self.stamp += 1.0
        for tensor in member.values.values():
            tensor.fill_(self.stamp)
        try:
            version = publication.push()
        except Superseded:
            return
        pushed = (member.incarnation, version.number)
        assert self.pushed.setdefault(pushed, self.stamp) == self.stamp, f"two versions {pushed}"

    def close_publication(self, member: Member) -> None:
        if member.publication is not None:
            member.publication.close()

    def subscribe(self, member: Member) -> None:
        if member.subscription is None:
            member.subscription = member.weights.subscribe(NAME)
            member.seen = None

    def unsubscribe(self, member: Member) -> None:
        if member.subscription is not None:
            member.subscription.close()
            member.subscription = None

    def read(self, member: Member) -> None:
        subscription = member.subscription
        if subscription is None or subscription.version is None:
            return
        key = subscription._versions.machine.newest
        assert key is not None
        assert member.seen is None or key >= member.seen, f"{member.name} went back"
        member.seen = key
        target = {name: torch.empty_like(tensor) for name, tensor in member.values.items()}
        assert subscription.load_into(target) == Version(key.claim.epoch, key.number)
        self.judge(key, target)
        member.held.append((key, subscription.get()))

    def let_go(self, member: Member) -> None:
        if member.held:
            member.held.pop(self.random.randrange(len(member.held)))

    def judge(self, key: Key, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            assert tensor.eq(self.pushed[key.claim.publisher, key.number]).all(), f"{name} of {key} is torn, or mixed"

    def judge_all(self) -> None:
        for member in self.alive:
            for key, tensors in member.held:
                self.judge(key, tensors)

    def background(self) -> bool:
        """One thing that happens by itself; False: nothing is left to happen."""
        choices: list[Callable[[], None]] = []
        if self.packets:
            choices += [lambda: self.deliver(self.random.randrange(len(self.packets)))] * 6
        if self.untold:
            choices.append(lambda: self._tell_of_death(self.random.randrange(len(self.untold))))
        for member in self.alive:
            if member.later:
                choices.append(lambda member=member: member.later.pop(0)())
            choices += [lambda timer=timer: timer.run(0.0) for timer in member.timers if timer.is_set]
        if choices:
            self.random.choice(choices)()
        return bool(choices)

    def _tell_of_death(self, index: int) -> None:
        member, dead = self.untold.pop(index)
        member.hear_of_death(dead)

    def settle(self) -> None:
        """Let everything happen that is to happen by itself, claims that wait for nobody any more included."""
        for _ in range(200_000):
            if not self._settle_once():
                return
        raise AssertionError("it never comes to rest")

    def _settle_once(self) -> bool:
        if self.packets or self.untold or any(member.later for member in self.alive):
            while self.packets or self.untold or any(member.later for member in self.alive):
                self.background()
            return True
        waiting = [timer for member in self.alive for timer in member.timers if timer.is_set]
        for timer in waiting:
            timer.run(1e8)  # long after every deadline
        return bool(waiting)

    def close(self) -> None:
        for packet in self.packets:
            if packet[3] is not None:
                os.close(packet[3])
        for member in self.alive:
            member.die()
