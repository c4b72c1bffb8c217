"""The subscriptions of one node: versions that come, the blocks that they lie in, and what programs hold of them.

Drives the machines of names (`protocol/weights/subscriber.py`). Blocks of other processes of this host are mapped once
each; bytes from elsewhere are fetched into blocks of this node's own (`fetcher.py`).
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
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
from farcall.weights.memory import Block, BorrowedBlock, host_bytes
from farcall.weights.subscription import NameVersions, Subscription
from farcall.weights.version import HeldVersion

if TYPE_CHECKING:
    from farcall.weights.node import Weights

logger: logging.Logger = logging.getLogger("farcall")

ANSWER_AFTER_S = 0.001
"""How long a lender waits for the news that a version is ready here, while the program gets it."""


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
        self._refused: set[tuple[int, int]] = set()  # blocks that cannot be mapped here, and are not offered again
        self._serials = itertools.count()
        self._later: deque[Callable[[], None]] = deque()
        self._later_timer = weights.node.timer(self._on_later)
        hooks = weights.node.hooks
        # On the thread that reads, too: whoever waits for a version waits for one thread less.
        hooks.on_control(VersionPushed, self._on_pushed, in_order=True)
        hooks.on_control(BlockRetired, self._on_retired)
        hooks.on_control(BlockOffered, self._on_offered, in_order=True)

    def on_claim(self, name: str, claim: Claim) -> None:
        """A member publishes ``name``."""
        versions = self.by_name.get(name)
        if versions is not None:
            self.event(versions, subscriber.Claimed(claim))

    def on_end(self, name: str, claim: Claim, number: int) -> None:
        """A member publishes ``name`` no more; ``number`` is the last version that comes."""
        versions = self.by_name.get(name)
        if versions is not None:
            self.event(versions, subscriber.Ended(claim, number))
            versions.tell()

    def on_gone(self, member: int) -> None:
        """A member left or died."""
        for versions in list(self.by_name.values()):
            self.event(versions, subscriber.Gone(member))
            versions.tell()
        # After that: none of its versions becomes ready any more. Those that are ready keep the blocks they lie in.
        with self._weights.lock:
            self._borrowed = {key: block for key, block in self._borrowed.items() if key[0] != member}
            self._refused = {key for key in self._refused if key[0] != member}

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
            claim = self._weights.directory.find_publisher(name)
        if claim is not None and self._weights.peer(claim.publisher) is not None:
            self.event(versions, subscriber.Claimed(claim))
        return Subscription(versions)

    def end(self, versions: NameVersions) -> None:
        """A program wants no more versions through one of its subscriptions."""
        with self._weights.lock:
            versions.users -= 1
            if versions.users or self.by_name.get(versions.name) is not versions:
                return
            del self.by_name[versions.name]
            # In one step: the wish of a subscription made meanwhile must be the later one.
            effects = self._handle(versions, subscriber.Closed())
        self._carry_out(versions, effects)

    def end_later(self, versions: NameVersions) -> None:
        """The same, for destructors: takes no lock."""
        self._later.append(partial(self.end, versions))
        self._later_timer.at(0.0)

    def on_view_death(self, lease: Lease) -> None:
        """The last tensor over a view of a block has died: its version has one reader less. Takes no lock."""
        if self.leases.pop(id(lease), None) is not None:
            versions, key = lease.holder
            self._later.append(partial(self.event, versions, subscriber.LetGo(key)))
            self._later_timer.at(0.0)

    def _on_later(self, now: float) -> float:
        while self._later:
            self._later.popleft()()
        return NEVER

    def event(self, versions: NameVersions, event: subscriber.Event) -> None:
        """Have the machine of ``versions`` told, and do what follows."""
        with self._weights.lock:
            effects = self._handle(versions, event)
        self._carry_out(versions, effects)

    def _handle(self, versions: NameVersions, event: subscriber.Event) -> Sequence[subscriber.Effect]:
        """Tell the machine, and carry out what concerns memory, in the order of events: with the lock held."""
        effects = versions.machine.handle(event)
        # What is ready is seen before what is dropped by it goes.
        for effect in effects:
            if isinstance(effect, subscriber.Dropped):
                # First: its blocks may be filled with others' bytes afterwards.
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
        """Do what else follows: without the lock."""
        if any(isinstance(effect, subscriber.Ready) for effect in effects):
            versions.tell()
            # The program goes first: it needs the interpreter now, and those of other processes the cores that the
            # answers would keep busy at the lender. Nobody waits for the rest.
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
        try:
            if message.claim.publisher != peer.incarnation:
                raise SerializationError("they are another's")
            manifest = decode_manifest(message.manifest)
        except SerializationError as error:
            logger.error(
                "%s: %s sent weights that cannot be read: %s", self._weights.node.info.name, peer.info.name, error
            )
            versions = None
        if versions is None:
            peer.control(VersionTaken(message.name, message.claim, message.number, "dropped"))
            return
        # In one step: a block that another thread maps meanwhile would be waited for in vain.
        with self._weights.lock:
            self._weights.directory.note(message.name, message.claim, message.number)
            blocks = None
            wanted = {(content.owner, content.block_id) for content in manifest.contents}
            if message.offered and not wanted & self._refused:
                blocks = frozenset(block for block in wanted if self._find(*block) is None)
            versions.versions.setdefault(key, HeldVersion(key, manifest))
            effects = self._handle(versions, subscriber.Arrived(key, peer.incarnation, message.keep, blocks))
        self._carry_out(versions, effects)

    def _find(self, owner: int, block_id: int) -> Block | BorrowedBlock | None:
        if owner == self._weights.me:
            return self._weights.blocks.get(block_id)
        return self._borrowed.get((owner, block_id))

    def _resolve(self, held: HeldVersion) -> None:
        """Give a version that is ready its blocks, unless it was fetched and has them. With the lock held."""
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
        """Have the bytes of a version fetched into blocks of this node's own."""
        held = versions.versions.get(key)
        lender = None if held is None else self._weights.peer(key.claim.publisher)
        if held is None or lender is None:
            logger.warning("%s: no way to fetch %r", self._weights.node.info.name, versions.name)
            self.event(versions, subscriber.Failed(key))
            return
        try:
            with self._weights.lock:
                if versions.versions.get(key) is not held:
                    return  # it was dropped this moment
                missing = self._make_room(held)
                # With the lock held: whoever drops the version stops the fetch before its blocks are filled again.
                arriving = Arriving(versions.name, key, lender.incarnation, missing)
                self._weights.fetcher.fetch(arriving, partial(self._on_fetched, versions, held, missing))
        except OSError as error:
            name = self._weights.node.info.name
            versions.why_not = f"no memory for version {held.version}: {error}"
            logger.warning("%s: no memory for version %s of %r: %s", name, held.version, versions.name, error)
            self.event(versions, subscriber.Failed(key))

    def _make_room(self, held: HeldVersion) -> dict[Content, Block]:
        """Blocks for the contents of a version that are to be fetched; what is here is shared. With the lock held."""
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
            with self._weights.lock:
                if versions.versions.get(held.key) is not held:
                    return  # dropped: its blocks may hold something else by now
                versions.why_not = f"version {held.version} did not arrive: {found}"
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
        descriptor = peer.link.incoming.take_descriptor() if message.size_bytes else None
        block = (peer.incarnation, message.block_id)
        event: subscriber.Event = subscriber.Mapped(block)
        try:
            if descriptor is None:
                raise SegmentRefused("its descriptor is missing")
            mapped = BorrowedBlock(descriptor, message.size_bytes)
            with self._weights.lock:
                if not peer.broken:  # else nobody would ever let go of it
                    self._borrowed[block] = mapped
        except (SegmentRefused, OSError) as error:
            with self._weights.lock:
                self._refused.add(block)
            peer.control(BlockRefused(message.block_id, str(error)))
            event = subscriber.Unmappable(block)
        for versions in list(self.by_name.values()):
            self.event(versions, event)

    def _on_retired(self, peer: Peer, message: BlockRetired) -> None:
        with self._weights.lock:
            self._borrowed.pop((peer.incarnation, message.block_id), None)
            self._refused.discard((peer.incarnation, message.block_id))

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
