"""The weights of one node, ``node.part(Weights)``: what it publishes, what it subscribes to, whose memory it reads.

Drives the machines of `protocol/weights`: each message and each change of members becomes an event, and their effects
are carried out here. Made while a node starts, so that no claim is missed.

One lock guards all machines and tables. It is never held while something is sent, copied or waited for; so effects of
two events may be carried out in another order than they came about, which the machines bear. Messages are handled on
the I/O thread, but offers of blocks, whose descriptors must be taken in their order, on the thread that reads the link.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from farcall.channel.host_memory import Lease
from farcall.channel.segments import SegmentRefused
from farcall.errors import RpcError, RpcTimeout, SerializationError
from farcall.protocol.frames import CARRIES_DESCRIPTOR, CONTROL, encode_small
from farcall.protocol.messages import encode_message
from farcall.protocol.weights import publisher, subscriber
from farcall.protocol.weights.lending import Freed, Lend, Stranded
from farcall.protocol.weights.messages import (
    MAX_NAME_CHARACTERS,
    BlockOffered,
    BlockRefused,
    BlockRetired,
    Claim,
    ClaimAnswered,
    Key,
    NameClaimed,
    VersionPushed,
    VersionsWanted,
    VersionTaken,
)
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.resend import LostOffer
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.weights.fetcher import Fetcher
from farcall.weights.fetching import Arriving
from farcall.weights.manifest import Content, decode_manifest
from farcall.weights.memory import Block, BlockStore, BorrowedBlock
from farcall.weights.publication import Publication, PublishedVersion
from farcall.weights.subscription import NameVersions, Subscription
from farcall.weights.version import HeldVersion, Version

__all__ = ["Weights"]

logger: logging.Logger = logging.getLogger("farcall")

OFFER_S = 30.0
"""How long an offer may wait for a link that is down, before it is tried again."""


class Weights:
    """Published weights, at one node."""

    def __init__(self, node: Runtime) -> None:
        self.node: Runtime = node
        self.me: int = node.me.incarnation
        self.lock: threading.RLock = threading.RLock()
        self.blocks: BlockStore = BlockStore(is_shared=node.pool is not None)
        self.fetcher: Fetcher = Fetcher(node, self)
        self._known: dict[str, tuple[Claim, int]] = {}
        self._claimants: dict[str, dict[int, Claim]] = {}  # the members that live, and what they claimed last
        self._publications: dict[str, Publication] = {}
        self._past: list[Publication] = []  # of the same names, with versions that somebody may read yet
        self._subscribed: dict[str, NameVersions] = {}
        self._borrowed: dict[tuple[int, int], BorrowedBlock] = {}
        self._peers: dict[int, Peer] = {}
        self.leases: dict[int, Lease] = {}
        """On views that programs hold: kept here, since a subscription may end before them."""
        self._serials = itertools.count()
        self._claims_settled: dict[Gate, None] = {}
        self._later: deque[tuple[NameVersions, subscriber.Event | None]] = deque()
        self._later_timer = node.timer(self._on_later)
        self._deadline_timer = node.timer(self._on_deadline)
        handlers: dict[type[Any], Callable[[Any, Any], None]] = {
            NameClaimed: self._on_claimed,
            ClaimAnswered: self._on_answered,
            VersionsWanted: self._on_wanted,
            VersionPushed: self._on_pushed,
            VersionTaken: self._on_taken,
            BlockRefused: self._on_refused,
            BlockRetired: self._on_retired,
        }
        for kind, handle in handlers.items():
            node.hooks.on_control(kind, handle)
        node.hooks.on_control(BlockOffered, self._on_offered, in_order=True)
        node.hooks.peer_joined.append(self._on_joined)
        node.hooks.peer_gone.append(self._on_gone)
        node.hooks.ended.append(self._on_ended)

    # ------------------------------------------------------------------ what programs do

    def publish(self, name: str, source: Any, keep: int) -> Publication:
        """Become the publisher of ``name``; returns within `publisher.CLAIM_S`, whoever does not answer."""
        publication = self.claim(name, source, keep)
        gate = Gate()
        self._claims_settled[gate] = None
        try:
            with self.node.calls.waiting():
                while publication.machine.state is publisher.PublisherState.CLAIMING and self.node.running:
                    gate.wait(publisher.CLAIM_S)
                    self._on_deadline(monotonic())
        finally:
            del self._claims_settled[gate]
        publication.check()
        return publication

    def claim(self, name: str, source: Any, keep: int) -> Publication:
        """Begin to be the publisher of ``name``."""
        check_name(name)
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep says how many versions stay readable, at least 1, not {keep!r}")
        self.check_running()
        with self.lock:
            known, number = self._known.get(name, (None, 0))
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
            if before is not None:
                self._past.append(before)
            self._publications[name] = publication
            effects = machine.start(monotonic())
        if before is not None:
            before.close()
        self._carry_out_publisher(publication, effects)
        return publication

    def subscribe(self, name: str) -> Subscription:
        """Want the versions of ``name``, of whoever publishes it."""
        check_name(name)
        self.check_running()
        with self.lock:
            versions = self._subscribed.get(name)
            if versions is None:
                versions = self._subscribed[name] = NameVersions(self, name, self._serials)
            versions.users += 1
            known = self._known.get(name)
        if known is not None and self.peer(known[0].publisher) is not None:
            self.subscriber_event(versions, subscriber.Claimed(known[0]))
        return Subscription(versions)

    def end_subscription(self, versions: NameVersions) -> None:
        """A program wants no more versions through one of its subscriptions."""
        with self.lock:
            versions.users -= 1
            if versions.users or self._subscribed.get(versions.name) is not versions:
                return
            del self._subscribed[versions.name]
        self.subscriber_event(versions, subscriber.Closed())

    def end_subscription_later(self, versions: NameVersions) -> None:
        """The same, for destructors: takes no lock."""
        self._later.append((versions, None))
        self._later_timer.at(0.0)

    def on_view_death(self, lease: Lease) -> None:
        """The last tensor over a view of a block has died: its version has one reader less. Takes no lock."""
        if self.leases.pop(id(lease), None) is not None:
            versions, key = lease.holder
            self._later.append((versions, subscriber.LetGo(key)))
            self._later_timer.at(0.0)

    def _on_later(self, now: float) -> float:
        while self._later:
            versions, event = self._later.popleft()
            if event is None:
                self.end_subscription(versions)
            else:
                self.subscriber_event(versions, event)
        return NEVER

    def check_running(self) -> None:
        """Raise if this node has ended."""
        if self.node.why_ended is not None:
            raise self.node.why_ended

    def announce(self, publication: Publication, made: PublishedVersion) -> Version:
        """A version is complete: lend it to all subscribers."""
        with self.lock:
            machine = publication.machine
            try:
                publication.check()
            except BaseException:
                self.blocks.release(made.blocks)
                raise
            number = machine.number + 1
            publication.versions[number] = made
            self._note(publication.name, machine.claim, number)
            version = Version(machine.claim.epoch, number)
            effects = self._free(publication, machine.handle(publisher.Pushed(number), monotonic()))
        self._carry_out_publisher(publication, effects)
        # Blocks that were filled for versions of another size are not worth keeping.
        self.blocks.trim(max(made.manifest.size_bytes, 1) * 2)
        self._tell_retired()
        return version

    # ------------------------------------------------------------------ for the fetchers of other members

    def read_content(self, content: Content, offset: int, size: int) -> bytearray | None:
        """A copy of a part of a content that lies, all of it, in a block of this node's own."""
        with self.lock:
            block = self._find_block(content)
            if block is None:
                return None
            self.blocks.share(block)  # or it may be filled again while it is copied
        try:
            return bytearray(block.view[offset : offset + size])
        finally:
            self.blocks.release([block])

    def lend_block(self, content: Content, peer: RemotePeer) -> int | None:
        """Have ``peer``, on this host, get the block of a content, for good: its number. Waits while a link is down."""
        with self.lock:
            block = self._find_block(content)
            if block is None or block.descriptor < 0:
                return None
            block.is_stranded = True  # no lease says how long it is read
            is_new = peer.incarnation not in block.offered_to
            block.offered_to.add(peer.incarnation)
        if is_new:
            self._send_offer(block, peer)
        return block.block_id

    def borrowed(self, owner: int, block_id: int) -> BorrowedBlock | None:
        """A block of another process of this host that has been offered to this one."""
        return self._borrowed.get((owner, block_id))

    def _find_block(self, content: Content) -> Block | None:
        """The block of this node's own that a content lies in, if all of it is there. With the lock held."""
        for publication in (*self._publications.values(), *self._past):
            for made in publication.versions.values():
                if content in made.manifest.contents:
                    return made.blocks[made.manifest.contents.index(content)]
        found = self._find_copy(content)
        return found if isinstance(found, Block) else None

    def _find_copy(self, content: Content) -> Block | BorrowedBlock | None:
        """Where a content lies that has come from another host, with a version that is ready."""
        for versions in self._subscribed.values():
            for key in versions.machine.ready:
                held = versions.versions[key]
                if held.was_fetched and content in held.manifest.contents:
                    return held.blocks[held.manifest.contents.index(content)]
        return None

    # ------------------------------------------------------------------ members

    def peer(self, incarnation: int) -> Peer | None:
        """The member of that incarnation."""
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
        for publication in [*self._publications.values(), *self._past]:
            self.publisher_event(publication, publisher.Gone(peer.incarnation))
        for name in list(self._claimants):
            self._on_claimant_gone(name, peer.incarnation)
        with self.lock:
            # Versions that lie in its blocks keep these.
            for key in [key for key in self._borrowed if key[0] == peer.incarnation]:
                del self._borrowed[key]
        for versions in list(self._subscribed.values()):
            self.subscriber_event(versions, subscriber.Gone(peer.incarnation))
            versions.tell()

    def _on_ended(self) -> None:
        with self.lock:
            subscribed = list(self._subscribed.values())
            self._subscribed.clear()
            self._publications.clear()
            self._borrowed.clear()
            self.leases.clear()
            self.blocks.close()
        for versions in subscribed:
            versions.versions.clear()
            versions.tell()
        for gate in list(self._claims_settled):
            gate.open()

    # ------------------------------------------------------------------ claims

    def _note(self, name: str, claim: Claim, number: int) -> tuple[Claim, int]:
        """Remember the highest claim and version; return them. With the lock held."""
        known, highest = self._known.get(name, (claim, number))
        self._known[name] = max(known, claim), max(highest, number)
        return self._known[name]

    def _on_claimed(self, peer: Peer, message: NameClaimed) -> None:
        if message.claim.publisher != peer.incarnation:
            raise SerializationError(f"{peer.info.name} claims {message.name!r} in another's name")
        with self.lock:
            known, number = self._known.get(message.name, (message.claim, 0))
            self._note(message.name, message.claim, message.number)
            self._claimants.setdefault(message.name, {})[peer.incarnation] = message.claim
            publication = self._publications.get(message.name)
            versions = self._subscribed.get(message.name)
        if publication is not None:
            self.publisher_event(publication, publisher.Claimed(message.claim))
        if versions is not None:
            self.subscriber_event(versions, subscriber.Claimed(message.claim))
        peer.control(ClaimAnswered(message.name, message.claim, known, number))

    def _on_claimant_gone(self, name: str, member: int) -> None:
        """A publisher is gone. Whoever published the name before may not have heard of it, and lives: tell it.

        Else its claim would stay below the one that is known here, and nobody would listen to it.
        """
        with self.lock:
            claimants = self._claimants[name]
            gone = claimants.pop(member, None)
            known, number = self._known[name]
            if gone != known or not claimants:
                return
            claim = max(claimants.values())
        self._send(claim.publisher, ClaimAnswered(name, claim, known, number))

    def _on_answered(self, peer: Peer, message: ClaimAnswered) -> None:
        with self.lock:
            self._note(message.name, message.known, message.number)
            publication = self._publications.get(message.name)
        if publication is not None:
            alive = self.peer(message.known.publisher) is not None
            event = publisher.Answered(peer.incarnation, message.claim, message.known, message.number, alive)
            self.publisher_event(publication, event)

    # ------------------------------------------------------------------ the publisher's side

    def publisher_event(self, publication: Publication, event: publisher.Event) -> None:
        """Have the machine of ``publication`` told, and do what follows."""
        with self.lock:
            effects = self._free(publication, publication.machine.handle(event, monotonic()))
        self._carry_out_publisher(publication, effects)

    def _free(self, publication: Publication, effects: Iterable[publisher.Effect]) -> Sequence[publisher.Effect]:
        """Carry out what concerns memory, in the order of events: with the lock held. Return the rest."""
        rest = []
        for effect in effects:
            if isinstance(effect, Stranded):
                for block in publication.versions[effect.number].blocks:
                    block.is_stranded = True
            elif isinstance(effect, Freed):
                self.blocks.release(publication.versions.pop(effect.number).blocks)
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
                self._tell_claim(effect)
            elif isinstance(effect, Lend):
                self._lend(publication, effect.member, effect.number)
        self._tell_retired()
        if machine.state is not publisher.PublisherState.CLAIMING:
            for gate in list(self._claims_settled):
                gate.open()
        elif machine.next_deadline() != NEVER:
            self._deadline_timer.at(machine.next_deadline())

    def _tell_claim(self, effect: publisher.Tell) -> None:
        message = effect.message
        if effect.member is not None:
            self._send(effect.member, message)
            return
        with self.lock:
            self._note(message.name, message.claim, message.number)
            self._claimants.setdefault(message.name, {})[self.me] = message.claim
            versions = self._subscribed.get(message.name)
        if versions is not None:
            self.subscriber_event(versions, subscriber.Claimed(message.claim))
        for peer in self.node.others():
            peer.control(message)

    def _lend(self, publication: Publication, member: int, number: int) -> None:
        peer = self.peer(member)
        with self.lock:
            made = publication.versions.get(number)
            claim = publication.machine.claim
        if peer is None or made is None:
            return  # it is gone, and the machine hears of that
        offered = not isinstance(peer, RemotePeer) or peer.lending is not None
        if isinstance(peer, RemotePeer) and offered:
            for block in made.blocks:
                self._offer(block, peer)
        peer.control(VersionPushed(publication.name, claim, number, publication.keep, offered, made.data))

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

    # ------------------------------------------------------------------ blocks, at their owner

    def _offer(self, block: Block, peer: RemotePeer) -> None:
        """Have ``peer`` get the descriptor of ``block``, once."""
        with self.lock:
            if peer.incarnation in block.offered_to or block.descriptor < 0:
                return
            block.offered_to.add(peer.incarnation)
        self.node.write_later(partial(self._send_offer, block, peer))  # a link that is down makes its senders wait

    def _send_offer(self, block: Block, peer: RemotePeer) -> None:
        """On a worker."""
        with self.lock:
            if block.descriptor < 0:
                return
            descriptor = os.dup(block.descriptor)
        frame = encode_small(
            CONTROL, CARRIES_DESCRIPTOR, 0, b"", b"", encode_message(BlockOffered(block.block_id, block.size))
        )
        lost = LostOffer(partial(self._on_offer_lost, block, peer))
        try:
            peer.link.outgoing.send_with_descriptor(frame, descriptor, monotonic() + OFFER_S, lost)
        except RpcTimeout:
            self._on_offer_lost(block, peer)
        finally:
            os.close(descriptor)

    def _on_offer_lost(self, block: Block, peer: RemotePeer) -> None:
        """The connection broke before the offer had arrived: make it again."""
        with self.lock:
            block.offered_to.discard(peer.incarnation)
        if not peer.broken:
            self._offer(block, peer)

    def _on_refused(self, peer: Peer, message: BlockRefused) -> None:
        logger.info("%s cannot map weights of %s: %s", peer.info.name, self.node.info.name, message.reason)

    def _tell_retired(self) -> None:
        for block in self.blocks.take_retired():
            for member in block.offered_to:
                self._send(member, BlockRetired(block.block_id))

    # ------------------------------------------------------------------ the subscriber's side

    def subscriber_event(self, versions: NameVersions, event: subscriber.Event) -> None:
        """Have the machine of ``versions`` told, and do what follows."""
        with self.lock:
            effects = versions.machine.handle(event)
            # In the order of events: what is ready is seen before what is dropped by it goes.
            for effect in effects:
                if isinstance(effect, subscriber.Dropped):
                    self.fetcher.stop(versions.name, effect.key)  # before its blocks may be filled with others' bytes
                    dropped = versions.versions.pop(effect.key, None)
                    if dropped is not None:
                        self.blocks.release(dropped.own_blocks)
                elif isinstance(effect, subscriber.Ready):
                    self._resolve(versions.versions[effect.key])
        for effect in effects:
            if isinstance(effect, subscriber.Tell):
                self._send(effect.member, effect.message)
            elif isinstance(effect, subscriber.Fetch):
                self._fetch(versions, effect.key)
            elif isinstance(effect, subscriber.Ready):
                versions.tell()

    def _on_pushed(self, peer: Peer, message: VersionPushed) -> None:
        key = Key(message.claim, message.number)
        try:
            manifest = decode_manifest(message.manifest)
            versions = self._subscribed.get(message.name)
        except SerializationError as error:
            logger.error("%s: %s sent weights that cannot be read: %s", self.node.info.name, peer.info.name, error)
            versions = None
        if versions is None:
            peer.control(VersionTaken(message.name, message.claim, message.number, "dropped"))
            return
        with self.lock:
            self._note(message.name, message.claim, message.number)
            blocks = None
            if message.offered:
                wanted = {(content.owner, content.block_id) for content in manifest.contents}
                blocks = frozenset(block for block in wanted if not self._has(block))
            versions.versions.setdefault(key, HeldVersion(key, manifest))
        self.subscriber_event(versions, subscriber.Arrived(key, peer.incarnation, message.keep, blocks))

    def _has(self, block: tuple[int, int]) -> bool:
        return block in self._borrowed or (block[0] == self.me and self.blocks.get(block[1]) is not None)

    def _resolve(self, held: HeldVersion) -> None:
        """Give a version that is ready its blocks, unless it was fetched and has them. With the lock held."""
        if not held.blocks:
            held.blocks = [
                self._borrowed[content.owner, content.block_id] if content.owner != self.me else self._own(content)
                for content in held.manifest.contents
            ]

    def _own(self, content: Content) -> Block:
        block = self.blocks.get(content.block_id)
        assert block is not None
        return block

    def _fetch(self, versions: NameVersions, key: Key) -> None:
        """Have the bytes of a version fetched into blocks of this node's own."""
        held = versions.versions.get(key)
        lender = None if held is None else self.peer(key.claim.publisher)
        if held is None or lender is None:
            logger.warning("%s: no way to fetch %r", self.node.info.name, versions.name)
            self.subscriber_event(versions, subscriber.Failed(key))
            return
        missing = {}
        with self.lock:
            blocks: list[Block | BorrowedBlock] = []
            for content in held.manifest.contents:
                block = self._find_copy(content)
                if block is None:
                    block = missing[content] = self.blocks.take(content.size_bytes)
                    held.own_blocks.append(block)
                elif isinstance(block, Block):
                    self.blocks.share(block)
                    held.own_blocks.append(block)
                blocks.append(block)
            held.blocks, held.was_fetched = blocks, True
        arriving = Arriving(versions.name, key, lender.incarnation, missing)
        self.fetcher.fetch(arriving, partial(self._on_fetched, versions, held, missing))

    def _on_fetched(
        self,
        versions: NameVersions,
        held: HeldVersion,
        missing: Mapping[Content, Block],
        error: Exception | None,
        borrowed: Mapping[Content, BorrowedBlock],
    ) -> None:
        """All bytes have come, into the blocks of ``missing``; or, but for ``borrowed``, a neighbour had them."""
        try:
            if error is not None:
                raise error
            with self.lock:
                if versions.versions.get(held.key) is not held:
                    return  # it was dropped meanwhile
                unused = [missing[content] for content in borrowed]
                held.own_blocks = [block for block in held.own_blocks if block not in unused]
                held.blocks = [
                    borrowed.get(content, block)
                    for content, block in zip(held.manifest.contents, held.blocks, strict=True)
                ]
                self.blocks.release(unused)
            if len(borrowed) < len(missing):
                held.verify()  # a neighbour has done that
        except Exception as found:
            logger.warning(
                "%s: version %s of %r did not arrive: %s", self.node.info.name, held.version, versions.name, found
            )
            self.subscriber_event(versions, subscriber.Failed(held.key))
        else:
            self.subscriber_event(versions, subscriber.Fetched(held.key))

    def _on_offered(self, peer: RemotePeer, message: BlockOffered) -> None:
        """On the thread that reads: the descriptor must go with the frame."""
        descriptor = peer.link.incoming.take_descriptor()
        block = (peer.incarnation, message.block_id)
        event: subscriber.Event = subscriber.Mapped(block)
        try:
            if descriptor is None:
                raise SegmentRefused("its descriptor did not come along")
            mapped = BorrowedBlock(descriptor, message.size_bytes)
            with self.lock:
                self._borrowed[block] = mapped
        except (SegmentRefused, OSError) as error:
            peer.control(BlockRefused(message.block_id, str(error)))
            event = subscriber.Unmappable(block)
        for versions in list(self._subscribed.values()):
            self.subscriber_event(versions, event)

    def _on_retired(self, peer: Peer, message: BlockRetired) -> None:
        with self.lock:
            self._borrowed.pop((peer.incarnation, message.block_id), None)

    def _send(self, member: int, message: Any) -> None:
        peer = self.peer(member)
        if peer is not None:
            try:
                peer.control(message)
            except RpcError:
                pass  # it is gone, and the machines hear of that


def check_name(name: str) -> str:
    """``name``, if something can be published under it."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(f"weights are published under a name of 1 to {MAX_NAME_CHARACTERS} characters, not {name!r}")
    return name
