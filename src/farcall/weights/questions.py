"""The remote functions by which members transfer a version between hosts.

Ordinary functions, called by ordinary requests; none of them runs user code. Their arguments are plain values, which
travel without pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from farcall.errors import RpcError
from farcall.protocol.weights.messages import Claim, Key
from farcall.runtime.calls.results import Later
from farcall.runtime.calls.serving import asking_peer
from farcall.runtime.node import current_runtime
from farcall.runtime.peers.peer import RemotePeer
from farcall.weights.manifest import Content

if TYPE_CHECKING:
    from farcall.weights.fetcher import Fetcher

PlainContent: TypeAlias = tuple[int, int, int, int]
PlainKey: TypeAlias = tuple[int, int, int]


def plain_content(content: Content) -> PlainContent:
    """``content`` as an argument."""
    return content.owner, content.block_id, content.fill, content.size_bytes


def plain_key(key: Key) -> PlainKey:
    """``key`` as an argument."""
    return key.claim.epoch, key.claim.publisher, key.number


def _fetcher() -> Fetcher:
    from farcall.weights.node import Weights

    return current_runtime().part(Weights).fetcher


def find_route(name: str, key: PlainKey, host: str, avoided: Sequence[int]) -> tuple[int, list[int]]:
    """At the lender of a version: the route by which the caller gets it."""
    epoch, publisher, number = key
    member = asking_peer().incarnation
    route = _fetcher().route(name, Key(Claim(epoch, publisher), number), member, host, avoided)
    return route.neighbour, route.sources


def read_chunk(content: PlainContent, offset: int, size: int) -> torch.Tensor | Later:
    """At a source: a range of a content, by value."""
    return _fetcher().chunk(Content(*content), offset, size, asking_peer().incarnation)


def borrow(contents: Sequence[PlainContent]) -> Later:
    """At the leader of a host: have the caller map these contents; the result is the numbers of their blocks."""
    peer = asking_peer()
    if not isinstance(peer, RemotePeer):
        raise RpcError("a member does not borrow from itself")
    return _fetcher().lend(peer, [Content(*content) for content in contents])
