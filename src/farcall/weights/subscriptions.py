"""The subscriptions of one node: versions that come, the blocks that they lie in, and what programs hold of them.

Drives the machines of names (`protocol/weights/subscriber.py`). Blocks of other processes of this host are mapped once
each; bytes from elsewhere are fetched into blocks of this node's own (`fetcher.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from farcall.channel.host_memory import Lease
from farcall.channel.segments import SegmentRefused
from farcall.errors import SerializationError
from farcall.protocol.weights import subscriber
from farcall.protocol.weights.messages import (
    BlockOffered,
    BlockRefused,
    BlockRetired,
    Claim,
    Key,
    VersionPushed,
    VersionTaken,
)
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.weights.fetching import Arriving
from farcall.weights.manifest import Content, decode_manifest
from farcall.weights.memory import Block, BorrowedBlock
from farcall.weights.subscription import NameVersions, Subscription
from farcall.weights.version import HeldVersion

if TYPE_CHECKING:
    from farcall.weights.node import Weights

__all__ = ["Subscriptions"]

logger: logging.Logger = logging.getLogger("farcall")


class Subscriptions:
    """What one node subscribes to.

    Mutable, under the lock of `Weights`: the names, and the blocks of others that are mapped here.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.by_name: dict[str, NameVersions] = {}
        self.leases: dict[int, Lease] = {}
        """On views that programs hold: kept here, since a subscription may end before them."""
        self._borrowed: dict[tuple[int, int], BorrowedBlock] = {}
        self._serials = itertools.count()
        self._later: deque[tuple[NameVersions, subscriber.Event | None]] = deque()
        self._later_timer = weights.node.timer(self._on_later)
        hooks = weights.node.hooks
        hooks.on_control(VersionPushed, self._on_pushed)
        hooks.on_control(BlockRetired, self._on_retired)
        hooks.on_control(BlockOffered, self._on_offered, in_order=True)

    def on_claim(self, name: str, claim: Claim) -> None:
        """A member publishes ``name``."""
        versions = self.by_name.get(name)
        if versions is not None:
            self.event(versions, subscriber.Claimed(claim))

    def on_gone(self, member: int) -> None:
        """A member left or died."""
        for versions in list(self.by_name.values()):
            self.event(versions, subscriber.Gone(member))
            versions.tell()
        # After that: none of its versions becomes ready any more. Those that are ready keep the blocks they lie in.
        with self._weights.lock:
            for key in [key for key in self._borrowed if key[0] == member]:
                del self._borrowed[key]

    def close(self) -> None:
        """The node ends: whoever waits is to find out."""
        with self._weights.lock:
            subscribed = list(self.by_name.values())
            self.by_name.clear()
            self._borrowed.clear()
            self.leases.clear()
        for versions in subscribed:
            versions.versions.clear()
            versions.tell()

    def subscribe(self, name: str) -> Subscription:
        """Want the versions of ``name``, of whoever publishes it."""
        with self._weights.lock:
            versions = self.by_name.get(name)
            if versions is None:
                versions = self.by_name[name] = NameVersions(self._weights, name, self._serials)
            versions.users += 1
            known, _ = self._weights.directory.find(name)
        if known is not None and self._weights.peer(known.publisher) is not None:
            self.event(versions, subscriber.Claimed(known))
        return Subscription(versions)

    def end(self, versions: NameVersions) -> None:
        """A program wants no more versions through one of its subscriptions."""
        with self._weights.lock:
            versions.users -= 1
            if versions.users or self.by_name.get(versions.name) is not versions:
                return
            del self.by_name[versions.name]
        self.event(versions, subscriber.Closed())

    def end_later(self, versions: NameVersions) -> None:
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
                self.end(versions)
            else:
                self.event(versions, event)
        return NEVER

    def event(self, versions: NameVersions, event: subscriber.Event) -> None:
        """Have the machine of ``versions`` told, and do what follows."""
        with self._weights.lock:
            effects = versions.machine.handle(event)
            # In the order of events: what is ready is seen before what is dropped by it goes.
            for effect in effects:
                if isinstance(effect, subscriber.Dropped):
                    self._weights.fetcher.stop(
                        versions.name, effect.key
                    )  # before its blocks may be filled with others' bytes
                    dropped = versions.versions.pop(effect.key, None)
                    if dropped is not None:
                        self._weights.blocks.release(dropped.own_blocks)
                elif isinstance(effect, subscriber.Ready):
                    versions.arrived += 1
                    self._resolve(versions.versions[effect.key])
        for effect in effects:
            if isinstance(effect, subscriber.Tell):
                self._weights.send(effect.member, effect.message)
            elif isinstance(effect, subscriber.Fetch):
                self._fetch(versions, effect.key)
            elif isinstance(effect, subscriber.Ready):
                versions.tell()

    def _on_pushed(self, peer: Peer, message: VersionPushed) -> None:
        key = Key(message.claim, message.number)
        versions = self.by_name.get(message.name)
        newest = None if versions is None else versions.newest()
        try:
            manifest = decode_manifest(message.manifest, None if newest is None else newest.manifest)
        except SerializationError as error:
            logger.error(
                "%s: %s sent weights that cannot be read: %s", self._weights.node.info.name, peer.info.name, error
            )
            versions = None
        if versions is None:
            peer.control(VersionTaken(message.name, message.claim, message.number, "dropped"))
            return
        with self._weights.lock:
            self._weights.directory.note(message.name, message.claim, message.number)
            blocks = None
            if message.offered:
                wanted = {(content.owner, content.block_id) for content in manifest.contents}
                blocks = frozenset(block for block in wanted if self._find(*block) is None)
            versions.versions.setdefault(key, HeldVersion(key, manifest))
        self.event(versions, subscriber.Arrived(key, peer.incarnation, message.keep, blocks))

    def _find(self, owner: int, block_id: int) -> Block | BorrowedBlock | None:
        if owner == self._weights.me:
            return self._weights.blocks.get(block_id)
        return self._borrowed.get((owner, block_id))

    def _resolve(self, held: HeldVersion) -> None:
        """Give a version that is ready its blocks, unless it was fetched and has them. With the lock held."""
        if not held.blocks:
            found = [self._find(content.owner, content.block_id) for content in held.manifest.contents]
            held.blocks = [block for block in found if block is not None]
            assert len(held.blocks) == len(found), "a version was ready before its blocks were here"

    def _fetch(self, versions: NameVersions, key: Key) -> None:
        """Have the bytes of a version fetched into blocks of this node's own."""
        held = versions.versions.get(key)
        lender = None if held is None else self._weights.peer(key.claim.publisher)
        if held is None or lender is None:
            logger.warning("%s: no way to fetch %r", self._weights.node.info.name, versions.name)
            self.event(versions, subscriber.Failed(key))
            return
        missing = {}
        with self._weights.lock:
            if versions.versions.get(key) is not held:
                return  # it was dropped this moment
            blocks: list[Block | BorrowedBlock] = []
            for content in held.manifest.contents:
                block = self.find_copy(content)
                if block is None:
                    block = missing[content] = self._weights.blocks.take(content.size_bytes)
                    held.own_blocks.append(block)
                elif isinstance(block, Block):
                    self._weights.blocks.share(block)
                    held.own_blocks.append(block)
                blocks.append(block)
            held.blocks, held.was_fetched = blocks, True
            # With the lock held: whoever drops the version stops the fetch before its blocks are filled with others.
            arriving = Arriving(versions.name, key, lender.incarnation, missing)
            self._weights.fetcher.fetch(arriving, partial(self._on_fetched, versions, held, missing))

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
            with self._weights.lock:
                if versions.versions.get(held.key) is not held:
                    return  # it was dropped meanwhile
                unused = [missing[content] for content in borrowed]
                held.own_blocks = [block for block in held.own_blocks if block not in unused]
                held.blocks = [
                    borrowed.get(content, block)
                    for content, block in zip(held.manifest.contents, held.blocks, strict=True)
                ]
                self._weights.blocks.release(unused)
            if len(borrowed) < len(missing):
                held.verify()  # what a neighbour lends it has verified
        except Exception as found:
            logger.warning(
                "%s: version %s of %r did not arrive: %s",
                self._weights.node.info.name,
                held.version,
                versions.name,
                str(found),  # not the error itself: its traceback holds the memory for as long as the log does
            )
            self.event(versions, subscriber.Failed(held.key))
        else:
            self.event(versions, subscriber.Fetched(held.key))

    def _on_offered(self, peer: RemotePeer, message: BlockOffered) -> None:
        """On the thread that reads: the descriptor must go with the frame."""
        descriptor = peer.link.incoming.take_descriptor()
        block = (peer.incarnation, message.block_id)
        event: subscriber.Event = subscriber.Mapped(block)
        try:
            if descriptor is None:
                raise SegmentRefused("its descriptor did not come along")
            mapped = BorrowedBlock(descriptor, message.size_bytes)
            with self._weights.lock:
                self._borrowed[block] = mapped
        except (SegmentRefused, OSError) as error:
            peer.control(BlockRefused(message.block_id, str(error)))
            event = subscriber.Unmappable(block)
        for versions in list(self.by_name.values()):
            self.event(versions, event)

    def _on_retired(self, peer: Peer, message: BlockRetired) -> None:
        with self._weights.lock:
            self._borrowed.pop((peer.incarnation, message.block_id), None)

    def borrowed(self, owner: int, block_id: int) -> BorrowedBlock | None:
        """A block of another process of this host that has been offered to this one."""
        return self._borrowed.get((owner, block_id))

    def find_copy(self, content: Content) -> Block | BorrowedBlock | None:
        """Where a content lies that has come from another host, with a version that is ready."""
        for versions in self.by_name.values():
            for key in versions.machine.ready:
                held = versions.versions[key]
                if held.was_fetched and content in held.manifest.contents:
                    return held.blocks[held.manifest.contents.index(content)]
        return None
