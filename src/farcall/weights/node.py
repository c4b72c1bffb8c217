"""The weights of one node, ``node.part(Weights)``: its publications, its subscriptions, and the memory of both.

Drives the machines of publishers (`protocol/weights/publisher.py`) and the directory of claims; `subscriptions.py`
drives the machines of subscribers. Each message and each change of membership becomes an event, whose effects are then
carried out. Created at its first use, or by the first message (`Hooks.on_first`), so it misses no claim.

One lock guards all machines and tables. No thread sends, copies or waits while it holds the lock. So the effects of two
events may be carried out in another order than the events; the machines tolerate that. The I/O thread handles messages,
except for offers of blocks: the thread that reads the link handles those, to take descriptors in their order.

Over 400 lines: one lock guards all of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from farcall.errors import NotAllowed, RpcError, SerializationError
from farcall.protocol.weights import publisher
from farcall.protocol.weights.directory import Directory
from farcall.protocol.weights.lending import Freed, Lend, Stranded
from farcall.protocol.weights.messages import (
    ClaimAnswered,
    Message,
    NameClaimed,
    NameClosed,
    OnDevice,
    VersionPushed,
    VersionsWanted,
    VersionTaken,
    check_name,
)
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.serialize.allowance import INSTALLED
from farcall.weights.fetcher import Fetcher
from farcall.weights.manifest import Content
from farcall.weights.memory import Block, BlockStore, BorrowedBlock
from farcall.weights.offers import Offers
from farcall.weights.publication import Publication, PublishedVersion
from farcall.weights.subscription import Subscription
from farcall.weights.subscriptions import Subscriptions
from farcall.weights.twins import Twins
from farcall.weights.version import Version, WeightsMetrics

logger: logging.Logger = logging.getLogger("farcall")

LAST_VERSION_S = 10.0
"""How long a leaving publisher waits for subscribers that lack its newest version and do not ask for it."""


class Weights:
    """The published weights of one node. Mutable, under ``lock``: the publications, the directory and the tables."""

    def __init__(self, node: Runtime) -> None:
        self.node: Runtime = node
        self.me: int = node.me.incarnation
        self.lock: threading.RLock = threading.RLock()
        self.blocks: BlockStore = BlockStore(is_shared=node.pool is not None)
        self.twins: Twins = Twins(self)
        self.fetcher: Fetcher = Fetcher(node, self)
        self.directory: Directory = Directory()
        self._publications: dict[str, Publication] = {}
        self._past: list[Publication] = []  # earlier ones of the same names, with versions still lent
        self._peers: dict[int, Peer] = {}
        self._told: set[int] = set()  # members of which the log says that they publish what they may not
        self._waiting: dict[Gate, None] = {}  # of threads that wait for publications to change
        self._deadline_timer = node.timer(self._on_deadline)
        self._all_end = False  # do all members leave together, with all work done?
        # Register handlers last: other threads already read links, and call a handler as soon as it exists.
        self.offers: Offers = Offers(self)
        self.subscriptions: Subscriptions = Subscriptions(self)
        node.hooks.on_control(NameClaimed, self._on_claimed)
        node.hooks.on_control(ClaimAnswered, self._on_answered)
        node.hooks.on_control(NameClosed, self._on_closed)
        node.hooks.on_control(VersionsWanted, self._on_wanted)
        node.hooks.on_control(VersionTaken, self._on_taken)
        node.hooks.peer_joined.append(self._on_joined)
        node.hooks.peer_gone.append(self._on_gone)
        node.hooks.agreed.append(self._on_agreed)
        node.hooks.ended.append(self._on_ended)

    # ------------------------------------------------------------------ called by programs

    def publish(self, name: str, source: Any, keep: int) -> Publication:
        """Become the publisher of ``name``; waits at most `publisher.CLAIM_S` for members that do not answer."""
        publication = self.claim(name, source, keep)
        gate = Gate()
        self._waiting[gate] = None
        try:
            with self.node.calls.waiting():
                while publication.machine.state is publisher.PublisherState.CLAIMING and self.node.running:
                    gate.wait(publisher.CLAIM_S)
                    self._on_deadline(monotonic())
        finally:
            del self._waiting[gate]
        publication.check()
        return publication

    def claim(self, name: str, source: Any, keep: int) -> Publication:
        """Claim ``name`` without waiting for answers."""
        check_name(name)
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep, the number of versions that stay readable, must be at least 1, not {keep!r}")
        self.check_running()
        with self.lock:
            known, number = self.directory.find(name)
            machine = publisher.PublisherMachine(
                name,
                self.me,
                known=known,
                number=number,
                keep=keep,
                members=[peer.incarnation for peer in self.node.others() if not peer.broken],
            )
            publication = Publication(self, machine, source, keep)
            before = self._publications.get(name)
            self._publications[name] = publication
            # Under one lock: otherwise another publication of this node could take the same claim and numbers.
            self.directory.note(name, machine.claim, number)
            effects = machine.start(monotonic())
            if before is not None:
                self._past.append(before)
                self._free(before, before.machine.handle(publisher.Claimed(machine.claim), monotonic()))
        self._carry_out_publisher(publication, effects)
        return publication

    def subscribe(self, name: str) -> Subscription:
        """Subscribe to the versions of ``name``, of any publisher."""
        check_name(name)
        self.check_running()
        if INSTALLED.allowance is not None and not INSTALLED.allowance.publishers(name):
            raise NotAllowed(
                f"nobody may publish {name!r} for this worker: name the publisher in its table, "
                f"farcall.allow(..., publishers={{{name!r}: 'NAME OF A WORKER'}})"
            )
        return self.subscriptions.subscribe(name)

    def believes(self, peer: Peer, name: str) -> bool:
        """May ``peer`` publish ``name``, as far as the table of this process tells?"""
        allowance = INSTALLED.allowance
        if allowance is None or peer is self.node.me or peer.info.name in allowance.publishers(name):
            return True
        if peer.incarnation not in self._told:
            self._told.add(peer.incarnation)
            logger.warning(
                "%s: the table of farcall.allow does not let %s publish %r; what it publishes is ignored",
                *(self.node.info.name, peer.info.name, name),
            )
        return False

    def check_running(self) -> None:
        """Raise if this node has ended."""
        if self.node.why_ended is not None:
            raise self.node.why_ended

    def announce(self, publication: Publication, made: PublishedVersion) -> Version:
        """Number a complete version, and lend it to all subscribers."""
        with self.lock:
            machine = publication.machine
            try:
                publication.check()
            except BaseException:
                self.blocks.release(made.blocks)
                raise
            number = machine.number + 1
            publication.pushes += 1
            publication.versions[number] = made
            self.directory.note(publication.name, machine.claim, number)
            version = Version(machine.claim.epoch, number)
            effects = self._free(publication, machine.handle(publisher.Pushed(number), monotonic()))
        self._carry_out_publisher(publication, effects)
        return version

    def take_block(self, size: int, device: int) -> Block:
        """A block to fill; raises if this node has ended.

        Check and take under one lock: `_on_ended` has closed all blocks, and nobody would close one that is made later.
        """
        with self.lock:
            self.check_running()
            return self.blocks.take(size, device)

    def trim(self) -> None:
        """Give up free blocks beyond twice the size of the newest versions. The caller holds the lock.

        It calls `Offers.tell_retired` after it has released the lock.
        """
        made = [one.versions.get(one.machine.lender.newest) for one in self._publications.values()]
        taken = [block for one in made if one is not None for block in one.blocks]
        held = [versions.newest() for versions in self.subscriptions.by_name.values()]
        taken += [block for one in held if one is not None for block in one.own_blocks]
        self.blocks.trim(2 * sum(block.size for block in taken))

    # ------------------------------------------------------------------ for the fetchers of other members

    def read_content(self, content: Content, offset: int, size: int) -> bytearray | None:
        """A copy of a part of a content; None unless the whole content lies in a block that this node owns."""
        with self.lock:
            block = self._find_block(content)
            if block is None:
                return None
            self.blocks.share(block)  # keeps the block from being refilled during the copy
        try:
            return bytearray(block.view[offset : offset + size])
        finally:
            self.blocks.release([block])

    def lend_block(self, content: Content, peer: RemotePeer) -> int | None:
        """Lend ``peer``, on this host, the block of a content for ever; return its number. Waits for a broken link."""
        with self.lock:
            block = self._find_block(content)
            if block is None or block.descriptor < 0:
                return None
            block.is_stranded = True  # no lease will report the end of the loan
        self.offers.offer_and_wait(block, peer)
        return block.block_id

    def borrowed(self, owner: int, block_id: int) -> BorrowedBlock | None:
        """A block that another process of this host has offered to this one."""
        return self.subscriptions.borrowed.get((owner, block_id))

    def _find_block(self, content: Content) -> Block | None:
        """The own block that holds a complete content. The caller holds the lock."""
        for publication in (*self._publications.values(), *self._past):
            for made in publication.versions.values():
                if content in made.manifest.contents:
                    return made.blocks[made.manifest.contents.index(content)]
        found = self.subscriptions.find_copy(content)
        return found if isinstance(found, Block) else None

    def metrics(self) -> list[WeightsMetrics]:
        """Metrics of all names that this node publishes or subscribes to."""
        with self.lock:
            published = [publication.metrics() for publication in self._publications.values()]
            return published + [versions.metrics() for versions in self.subscriptions.by_name.values()]

    # ------------------------------------------------------------------ members

    def peer(self, incarnation: int) -> Peer | None:
        """The member of that incarnation, if it lives."""
        found = self._peers.get(incarnation)
        if found is None:
            self._peers = {peer.incarnation: peer for peer in (self.node.me, *self.node.others())}
            found = self._peers.get(incarnation)
        return None if found is None or found.broken else found

    def _on_joined(self, peer: Peer) -> None:
        self._peers[peer.incarnation] = peer
        for publication in list(self._publications.values()):
            self.publisher_event(publication, publisher.Joined(peer.incarnation))

    def _on_gone(self, peer: Peer) -> None:
        self._peers.pop(peer.incarnation, None)
        self._told.discard(peer.incarnation)
        for publication in [*self._publications.values(), *self._past]:
            self.publisher_event(publication, publisher.Gone(peer.incarnation))
        with self.lock:
            answers = self.directory.lose(peer.incarnation)
        for answer in answers:
            self.send(answer.claim.publisher, answer)
        self.subscriptions.on_gone(peer.incarnation)

    def _on_agreed(self, deadline: float) -> None:
        """Before this node leaves with its versions: wait until others have the newest ones, or until ``deadline``."""
        if self.node.is_static:
            self._all_end = True
            return
        gate = Gate()
        self._waiting[gate] = None
        began = monotonic()
        try:
            while (late := self._late()) and self.node.lifecycle.verdict is None:
                # Only requests of late members extend the wait: other members may ask for older versions.
                asked_at = max(self.fetcher.asked_at.get(peer.incarnation, 0.0) for peer in late)
                remaining = min(deadline, max(began, asked_at) + LAST_VERSION_S) - monotonic()
                if remaining <= 0:
                    names = ", ".join(peer.info.name for peer in late)
                    logger.warning("%s leaves; these lack its last versions: %s", self.node.info.name, names)
                    return
                gate.wait(min(1.0, remaining))
        finally:
            del self._waiting[gate]

    def _late(self) -> list[Peer]:
        """The members that want the newest version of a publication here, and have not answered for it."""
        with self.lock:
            awaited = {one for made in self._publications.values() for one in made.machine.lender.awaited} - {self.me}
        return [peer for peer in map(self.peer, sorted(awaited)) if peer is not None]

    def _on_ended(self) -> None:
        self.subscriptions.close()
        with self.lock:
            self._publications.clear()
            blocks = self.blocks.close()
        for gate in list(self._waiting):
            gate.open()
        self.twins.end(blocks, all_end=self._all_end)

    # ------------------------------------------------------------------ claims

    def _on_claimed(self, peer: Peer, message: NameClaimed) -> None:
        if message.claim.publisher != peer.incarnation:
            raise SerializationError(f"{peer.info.name} claims {message.name!r} for another worker")
        if not self.believes(peer, message.name):
            peer.control(ClaimAnswered(message.name, message.claim, message.claim, 0))
            return
        with self.lock:
            answer = self.directory.claim(message)
            is_open = self.directory.find_publisher(message.name) == message.claim
            publication = self._publications.get(message.name)
        if publication is not None:
            self.publisher_event(publication, publisher.Claimed(message.claim))
        if is_open:
            self.subscriptions.on_claim(message.name, message.claim)
        peer.control(answer)

    def _on_closed(self, peer: Peer, message: NameClosed) -> None:
        if message.claim.publisher != peer.incarnation:
            raise SerializationError(f"{peer.info.name} closes {message.name!r} for another worker")
        if not self.believes(peer, message.name):
            return
        with self.lock:
            self.directory.close(message)
        self.subscriptions.on_end(message.name, message.claim, message.number)

    def _on_answered(self, peer: Peer, message: ClaimAnswered) -> None:
        is_guarded = INSTALLED.allowance is not None
        with self.lock:
            publication = self._publications.get(message.name)
            if is_guarded and (publication is None or publication.machine.is_leap(message.known)):
                return
            number = min(message.number, publisher.MAX_HEARD)
            self.directory.note(message.name, message.known, number)
        if publication is not None:
            # With a table, only a publisher's own claim ends another's tenure.
            alive = self.peer(message.known.publisher) is not None and not is_guarded
            event = publisher.Answered(peer.incarnation, message.claim, message.known, number, alive)
            self.publisher_event(publication, event)

    # ------------------------------------------------------------------ the publisher's side

    def publisher_event(self, publication: Publication, event: publisher.Event) -> None:
        """Pass an event to the machine of ``publication``, and carry out the effects."""
        with self.lock:
            effects = self._free(publication, publication.machine.handle(event, monotonic()))
        self._carry_out_publisher(publication, effects)

    def _free(self, publication: Publication, effects: Iterable[publisher.Effect]) -> Sequence[publisher.Effect]:
        """Carry out effects on memory, and return the others. The caller still holds the lock: events stay in order."""
        rest = []
        for effect in effects:
            if isinstance(effect, Stranded):
                for block in publication.versions[effect.number].blocks:
                    block.is_stranded = True
            elif isinstance(effect, Freed):
                self.blocks.release(publication.versions.pop(effect.number).blocks)
                self.trim()
            else:
                rest.append(effect)
        if publication in self._past and not publication.versions:
            self._past.remove(publication)
        return rest

    def _on_deadline(self, now: float) -> float:
        nearest = NEVER
        for publication in list(self._publications.values()):
            with self.lock:
                effects = publication.machine.handle_deadline(now)
                nearest = min(nearest, publication.machine.next_deadline())
            self._carry_out_publisher(publication, effects)
        return nearest

    def _carry_out_publisher(self, publication: Publication, effects: Iterable[publisher.Effect]) -> None:
        machine = publication.machine
        for effect in effects:
            if isinstance(effect, publisher.Tell):
                self._tell(effect)
            elif isinstance(effect, Lend):
                self._lend(publication, effect.member, effect.number)
        self.offers.tell_retired()
        if machine.state is not publisher.PublisherState.CLAIMING:
            for gate in list(self._waiting):
                gate.open()
        elif machine.next_deadline() != NEVER:
            self._deadline_timer.at(machine.next_deadline())

    def _tell(self, effect: publisher.Tell) -> None:
        message = effect.message
        if effect.member is not None:
            self.send(effect.member, message)
        elif isinstance(message, NameClosed):
            self._on_closed(self.node.me, message)
        else:
            with self.lock:
                self.directory.claim(message)
            self.subscriptions.on_claim(message.name, message.claim)
        if effect.member is None:
            for peer in self.node.others():
                peer.control(message)

    def _lend(self, publication: Publication, member: int, number: int) -> None:
        peer = self.peer(member)
        with self.lock:
            made = publication.versions.get(number)
            claim = publication.machine.claim
        if peer is None or made is None:
            return  # the member is gone, and the machine hears of that
        offered = not isinstance(peer, RemotePeer) or self.offers.may_offer(made.blocks, peer)
        on_devices: list[OnDevice] = []
        if isinstance(peer, RemotePeer) and offered:
            on_devices = self.twins.openers(made.blocks, peer)
            for block in made.blocks:
                self.offers.offer(block, peer)
        keep = publication.keep
        peer.control(VersionPushed(publication.name, claim, number, keep, offered, made.data, on_devices))

    def _on_wanted(self, peer: Peer, message: VersionsWanted) -> None:
        publication = self._publications.get(message.name)
        if publication is not None:
            self.publisher_event(publication, publisher.Wanted(peer.incarnation, message.wanted, message.serial))

    def _on_taken(self, peer: Peer, message: VersionTaken) -> None:
        current = self._publications.get(message.name)
        for publication in [*self._past, *([] if current is None else [current])]:
            if publication.name == message.name and message.number in publication.versions:
                self.publisher_event(publication, publisher.Taken(peer.incarnation, message.number, message.how))
                return

    def send(self, member: int, message: Message) -> None:
        """Send a message to a member, if it lives; never waits."""
        peer = self.peer(member)
        if peer is not None:
            try:
                peer.control(message)
            except RpcError:
                pass  # the member is gone, and the machines hear of that
