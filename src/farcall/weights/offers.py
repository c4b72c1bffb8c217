"""Offers of blocks: descriptors sent from a block's owner to its readers, and the notice that a block was given up."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from farcall.core.contract import MARKED
from farcall.errors import RpcTimeout
from farcall.protocol.frames import CONTROL, encode_small
from farcall.protocol.messages import encode_message
from farcall.protocol.weights.messages import BlockOffered, BlockRefused, BlockRetired
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.weights.memory import Block

if TYPE_CHECKING:
    from farcall.weights.node import Weights

logger: logging.Logger = logging.getLogger("farcall")

OFFER_S = 30.0
"""How long an offer waits for a link that is down before it is made again."""


class Offers:
    """The offers of one node's blocks to others. Each member gets each descriptor once (``Block.offered_to``)."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        weights.node.hooks.on_control(BlockRefused, self._on_refused)

    def may_offer(self, blocks: Iterable[Block], peer: RemotePeer) -> bool:
        """Can ``peer`` read these blocks: has it their descriptors, or can it get them over its connection?"""
        if peer.lending is None:
            return False
        return peer.link.transport.carries_descriptors or all(peer.incarnation in block.offered_to for block in blocks)

    def offer(self, block: Block, peer: RemotePeer) -> None:
        """Send ``peer`` the descriptor of ``block``, unless it has that. Never waits."""
        if self._begin(block, peer):
            # On a worker thread: a sender waits while the link is down.
            self._weights.node.write_later(partial(self._send, block, peer))

    def offer_and_wait(self, block: Block, peer: RemotePeer) -> None:
        """Like `offer`, but on this thread, which waits while the link is down."""
        if self._begin(block, peer):
            self._send(block, peer)

    def tell_retired(self) -> None:
        """Notify members of the blocks that they were offered and that this node has given up."""
        for block in self._weights.blocks.take_retired():
            self._weights.twins.give_up(block)
            for member in list(block.offered_to):  # a copy: an offer may be reported as lost meanwhile
                self._weights.send(member, BlockRetired(block.block_id))

    def _begin(self, block: Block, peer: RemotePeer) -> bool:
        with self._weights.lock:
            if peer.incarnation in block.offered_to or block.descriptor < 0:
                return False
            block.offered_to.add(peer.incarnation)
            return True

    def _send(self, block: Block, peer: RemotePeer) -> None:
        try:
            with self._weights.lock:
                if block.descriptor < 0:
                    return
                descriptor = os.dup(block.descriptor)
        except OSError as error:
            names = self._weights.node.info.name, peer.info.name
            logger.warning("%s sends weights to %s as bytes: %s; allow more open files (ulimit -n)", *names, error)
            peer.control(BlockOffered(block.block_id, 0))
            return
        message = encode_message(BlockOffered(block.block_id, block.size))
        frame = encode_small(CONTROL, MARKED, 0, b"", b"", message)
        try:
            if peer.link.transport.carries_descriptors:
                peer.link.post(frame, descriptor=descriptor)
            else:
                peer.control(BlockOffered(block.block_id, 0))  # the link came back over TCP: as bytes
        except RpcTimeout:
            self._on_lost(block, peer)
        finally:
            os.close(descriptor)
        if block.descriptor < 0:
            # The block was given up meanwhile, and its notice may have overtaken the offer. Send another behind it:
            # otherwise the receiver would keep the memory mapped as long as this node lives.
            self._weights.send(peer.incarnation, BlockRetired(block.block_id))

    def _on_lost(self, block: Block, peer: RemotePeer) -> None:
        """Make an offer again: the connection broke before it arrived."""
        with self._weights.lock:
            block.offered_to.discard(peer.incarnation)
        if not peer.broken:
            self.offer(block, peer)

    def _on_refused(self, peer: Peer, message: BlockRefused) -> None:
        logger.info("%s cannot map weights of %s: %s", peer.info.name, self._weights.node.info.name, message.reason)
