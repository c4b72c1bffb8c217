"""The subscriptions of one node: arriving versions, the blocks that hold them, and the programs' leases on them.

Drives the machines of names (`protocol/weights/subscriber.py`). Each block of another process of this host is mapped
once; bytes from other hosts are fetched into blocks of this node (`fetcher.py`).
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from farcall.channel.host_memory import Lease
from farcall.channel.segments import SegmentRefused
from farcall.destructors import destructor
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
from farcall.weights.memory import Block, BorrowedBlock, host_bytes
from farcall.weights.subscription import NameVersions, Subscription
from farcall.weights.version import HeldVersion

if TYPE_CHECKING:
    from farcall.weights.node import Weights

logger: logging.Logger = logging.getLogger("farcall")

MOST_BLOCKS = 4096
"""How many blocks of one member are mapped, or known not to be."""
ANSWER_AFTER_S = 0.001
"""How long the answer to the lender is delayed when a version becomes ready, so that the program runs first."""


class Subscriptions:
    """The subscriptions of one node, by name.

    Mutable, under the lock of `Weights`: the names, and the mapped and refused blocks of other processes. Without a
    lock: the leases, and the deferred work of ``_later``, which destructors append to.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.by_name: dict[str, NameVersions] = {}
        self.leases: dict[int, Lease] = {}
        """The leases on views that programs hold. Kept here, because the views may outlive their subscription."""
        self.borrowed: dict[tuple[int, int], BorrowedBlock] = {}
        """Blocks of other processes of this host that are mapped here, by their owner and number."""
        self._refused: set[tuple[int, int]] = set()  # blocks that this process cannot map; nobody offers them again
        self._serials = itertools.count()
        self._later: deque[Callable[[], None]] = deque()
        self._later_timer = weights.node.timer(self._on_later)
        hooks = weights.node.hooks
        # In order, on the thread that reads the link: a waiter for a version is woken one thread switch earlier.
        hooks.on_control(VersionPushed, self._on_pushed)
        hooks.on_control(BlockRetired, self._on_retired)
        hooks.on_control(BlockOffered, self._on_offered)

    def on_claim(self, name: str, claim: Claim) -> None:
        """Handle a member's claim on ``name``."""
        versions = self.by_name.get(name)
        if versions is not None:
            self.event(versions, subscriber.Claimed(claim))

    def on_end(self, name: str, claim: Claim, number: int) -> None:
        """Handle the end of a publication of ``name``; ``number`` is its last version."""
        versions = self.by_name.get(name)
        if versions is not None:
            self.event(versions, subscriber.Ended(claim, number))
            versions.tell()

    def on_gone(self, member: int) -> None:
        """Handle the loss of a member that left or died."""
        for versions in list(self.by_name.values()):
            self.event(versions, subscriber.Gone(member))
            versions.tell()
        # After the events: now none of its versions can become ready. Ready versions keep their blocks alive.
        with self._weights.lock:
            self.borrowed = {key: block for key, block in self.borrowed.items() if key[0] != member}
            self._refused = {key for key in self._refused if key[0] != member}
        self._weights.twins.close(member)

    def close(self) -> None:
        """End with the node: forget all versions and wake all waiters, which then see that the node has ended."""
        with self._weights.lock:
            subscribed = list(self.by_name.values())
            self.by_name.clear()
            self.borrowed.clear()
            self.leases.clear()
        for versions in subscribed:
            versions.versions.clear()
            versions.tell()

    def subscribe(self, name: str) -> Subscription:
        """Subscribe to the versions of ``name``, of any publisher."""
        with self._weights.lock:
            versions = self.by_name.get(name)
            if versions is None:
                versions = self.by_name[name] = NameVersions(self._weights, name, self._serials)
            versions.users += 1
            claim = self._weights.directory.find_publisher(name)
        if claim is not None and self._weights.peer(claim.publisher) is not None:
            self.event(versions, subscriber.Claimed(claim))
        return Subscription(versions)

    def end(self, versions: NameVersions) -> None:
        """End one subscription of a program; the last one of a name unsubscribes at the publisher."""
        with self._weights.lock:
            versions.users -= 1
            if versions.users or self.by_name.get(versions.name) is not versions:
                return
            del self.by_name[versions.name]
            # Under one lock: a subscription made meanwhile must get a higher serial than this unsubscription.
            effects = self._handle(versions, subscriber.Closed())
        self._carry_out(versions, effects)

    def end_later(self, versions: NameVersions) -> None:
        """Like `end`, for destructors: takes no lock."""
        self._later.append(partial(self.end, versions))
        self._later_timer.at(0.0)

    @destructor
    def on_view_death(self, lease: Lease) -> None:
        """Count one reader less: the last tensor over a view has died. Takes no lock."""
        if self.leases.pop(id(lease), None) is not None:
            versions, key = lease.holder
            self._later.append(partial(self.event, versions, subscriber.LetGo(key)))
            self._later_timer.at(0.0)

    def _on_later(self, now: float) -> float:
        try:
            while self._later:
                self._later.popleft()()
        finally:
            if self._later:
                self._later_timer.at(0.0)  # one has raised, which the loop logs: run the rest in the next round
        return NEVER

    def event(self, versions: NameVersions, event: subscriber.Event) -> None:
        """Pass an event to the machine of ``versions``, and carry out the effects."""
        with self._weights.lock:
            effects = self._handle(versions, event)
        self._carry_out(versions, effects)

    def _handle(self, versions: NameVersions, event: subscriber.Event) -> Sequence[subscriber.Effect]:
        """Pass an event to the machine, and carry out effects on memory; the caller's lock keeps events in order."""
        effects = versions.machine.handle(event)
        # The machine puts `Ready` before the `Dropped` that follow from it: readers always find a version.
        for effect in effects:
            if isinstance(effect, subscriber.Dropped):
                # Stop the fetch first: once released, the blocks may be filled with other bytes.
                self._weights.fetcher.stop(versions.name, effect.key)
                dropped = versions.versions.pop(effect.key, None)
                if dropped is not None and dropped.own_blocks:
                    self._weights.blocks.release(dropped.own_blocks)
                    self._weights.trim()
            elif isinstance(effect, subscriber.Ready):
                versions.arrived += 1
                versions.why_not = None
                self._resolve(versions.versions[effect.key])
        return effects

    def _carry_out(self, versions: NameVersions, effects: Sequence[subscriber.Effect]) -> None:
        """Carry out all other effects, without the lock."""
        if any(isinstance(effect, subscriber.Ready) for effect in effects):
            versions.tell()
            # The program goes first. It needs the interpreter now; and the answers would keep cores busy at the lender
            # that programs of other processes need. Nobody waits for the other effects.
            self._later.append(partial(self._tell_others, versions, effects))
            self._later_timer.at(monotonic() + ANSWER_AFTER_S)
        else:
            self._tell_others(versions, effects)

    def _tell_others(self, versions: NameVersions, effects: Sequence[subscriber.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, subscriber.Tell):
                self._weights.send(effect.member, effect.message)
            elif isinstance(effect, subscriber.Fetch):
                self._fetch(versions, effect.key)
        self._weights.offers.tell_retired()

    def _on_pushed(self, peer: Peer, message: VersionPushed) -> None:
        key = Key(message.claim, message.number)
        versions = self.by_name.get(message.name)
        if not self._weights.believes(peer, message.name):
            return
        try:
            if message.claim.publisher != peer.incarnation:
                raise SerializationError("they are another's")
            manifest = decode_manifest(message.manifest)
            if any(place.content >= len(manifest.contents) for place in message.on_devices):
                raise SerializationError("a block of it on a device does not exist")
        except SerializationError as error:
            logger.error(
                "%s: %s sent weights that cannot be read: %s", self._weights.node.info.name, peer.info.name, error
            )
            versions = None
        if versions is None:
            peer.control(VersionTaken(message.name, message.claim, message.number, "dropped"))
            return
        # Under one lock: if another thread mapped a block between the look and `Arrived`, the machine would miss the
        # `Mapped` and wait for that block for ever.
        with self._weights.lock:
            self._weights.directory.note(message.name, message.claim, message.number)
            blocks = None
            wanted = {(content.owner, content.block_id) for content in manifest.contents}
            if message.offered and not wanted & self._refused:
                blocks = frozenset(block for block in wanted if self._find(*block) is None)
            held = versions.versions.setdefault(key, HeldVersion(key, manifest))
            held.on_devices = message.on_devices
            effects = self._handle(versions, subscriber.Arrived(key, peer.incarnation, message.keep, blocks))
        self._carry_out(versions, effects)

    def _find(self, owner: int, block_id: int) -> Block | BorrowedBlock | None:
        if owner == self._weights.me:
            return self._weights.blocks.get(block_id)
        return self.borrowed.get((owner, block_id))

    def _resolve(self, held: HeldVersion) -> None:
        """Give a ready version its blocks, unless it was fetched and has them. The caller holds the lock."""
        if held.blocks:
            return
        contents = held.manifest.contents
        found = [self._find(content.owner, content.block_id) for content in contents]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(contents) or any(
            block.size < content.size_bytes for block, content in zip(blocks, contents, strict=True)
        ):
            held.fault = "its publisher took memory back, or lent too little"
        else:
            held.blocks = blocks

    def _fetch(self, versions: NameVersions, key: Key) -> None:
        """Begin to fetch the bytes of a version into blocks of this node."""
        held = versions.versions.get(key)
        lender = None if held is None else self._weights.peer(key.claim.publisher)
        if held is None or lender is None:
            logger.warning("%s: no way to fetch %r", self._weights.node.info.name, versions.name)
            self.event(versions, subscriber.Failed(key))
            return
        try:
            with self._weights.lock:
                if versions.versions.get(key) is not held:
                    return  # dropped meanwhile
                missing = self._make_room(held)
                # Still under the lock: a thread that drops the version then finds the fetch, and stops it before the
                # blocks are filled again.
                arriving = Arriving(versions.name, key, lender.incarnation, missing)
                self._weights.fetcher.fetch(arriving, partial(self._on_fetched, versions, held, missing))
        except OSError as error:
            name = self._weights.node.info.name
            versions.why_not = f"no memory for version {held.version}: {error}"
            logger.warning("%s: no memory for version %s of %r: %s", name, held.version, versions.name, error)
            self.event(versions, subscriber.Failed(key))

    def _make_room(self, held: HeldVersion) -> dict[Content, Block]:
        """Blocks for the missing contents of a version; the other contents are shared. The caller holds the lock."""
        missing = {}
        blocks: list[Block | BorrowedBlock] = []
        size = sum(content.size_bytes for content in held.manifest.contents)
        if size > host_bytes():
            raise OSError(errno.ENOMEM, f"it takes {size} bytes, more than this host has")
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
        return missing

    def _on_fetched(
        self,
        versions: NameVersions,
        held: HeldVersion,
        missing: Mapping[Content, Block],
        error: Exception | None,
        borrowed: Mapping[Content, BorrowedBlock],
    ) -> None:
        """Handle the end of a fetch: the blocks of ``missing`` are filled, or ``borrowed`` replaces them."""
        try:
            if error is not None:
                raise error
            with self._weights.lock:
                if versions.versions.get(held.key) is not held:
                    return  # dropped meanwhile
                unused = [missing[content] for content in borrowed]
                held.own_blocks = [block for block in held.own_blocks if block not in unused]
                held.blocks = [
                    borrowed.get(content, block)
                    for content, block in zip(held.manifest.contents, held.blocks, strict=True)
                ]
                self._weights.blocks.release(unused)
            if len(borrowed) < len(missing):
                held.verify()  # a neighbour has verified the contents that it lends
        except Exception as found:
            with self._weights.lock:
                if versions.versions.get(held.key) is not held:
                    return  # dropped: its blocks may hold other bytes by now, so the error says nothing
                versions.why_not = f"version {held.version} did not arrive: {found}"
            logger.warning(
                "%s: version %s of %r did not arrive: %s",
                self._weights.node.info.name,
                held.version,
                versions.name,
                str(found),  # not the error itself: a kept log record would keep the memory by its traceback
            )
            self.event(versions, subscriber.Failed(held.key))
        else:
            self.event(versions, subscriber.Fetched(held.key))

    def _on_offered(self, peer: RemotePeer, message: BlockOffered) -> None:
        """Map an offered block. On the thread that reads the link: the next descriptor belongs to this very frame."""
        descriptor = peer.take_descriptor() if message.size_bytes else None
        if sum(owner == peer.incarnation for owner, _ in (*self.borrowed, *self._refused)) >= MOST_BLOCKS:
            if descriptor is not None:
                os.close(descriptor)
            raise ValueError(f"it offers more than {MOST_BLOCKS} blocks of weights")
        block = (peer.incarnation, message.block_id)
        event: subscriber.Event = subscriber.Mapped(block)
        try:
            if descriptor is None:
                raise SegmentRefused("its descriptor is missing")
            mapped = BorrowedBlock(descriptor, message.size_bytes)
            with self._weights.lock:
                if not peer.broken:  # after `on_gone` nothing would remove the entry
                    self.borrowed[block] = mapped
        except (SegmentRefused, OSError) as error:
            with self._weights.lock:
                self._refused.add(block)
            peer.control(BlockRefused(message.block_id, str(error)))
            event = subscriber.Unmappable(block)
        for versions in list(self.by_name.values()):
            self.event(versions, event)

    def _on_retired(self, peer: Peer, message: BlockRetired) -> None:
        with self._weights.lock:
            self.borrowed.pop((peer.incarnation, message.block_id), None)
            self._refused.discard((peer.incarnation, message.block_id))
        self._weights.twins.close(peer.incarnation, message.block_id)

    def find_copy(self, content: Content) -> Block | BorrowedBlock | None:
        """The block of a content that was fetched from another host and belongs to a ready version."""
        for versions in self.by_name.values():
            for key in versions.machine.ready:
                held = versions.versions[key]
                if held.was_fetched and content in held.manifest.contents:
                    return held.blocks[held.manifest.contents.index(content)]
        return None
