"""Who somebody says it is: a member, or an observer. Nothing in here is secret, and nothing of it is proven."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from farcall.protocol.member import Incarnation

__all__ = ["Identity", "is_observer", "observer_identity"]

_ROLE: Final = "role"
_OBSERVER: Final = "observer"

_ShortText = Annotated[str, msgspec.Meta(max_length=256)]


class Identity(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Who a node says it is. Not secret: it is sent in the clear."""

    name: _ShortText
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    cluster_id: _ShortText
    incarnation: Incarnation  # a restarted member is not mistaken for the old one
    capabilities: Annotated[dict[_ShortText, _ShortText], msgspec.Meta(max_length=64)] = {}


def observer_identity(name: str, incarnation: int, cluster_id: str = "") -> Identity:
    """Who an observer says it is; one that was given only an address leaves the cluster out."""
    return Identity(name, 0, cluster_id, incarnation, {_ROLE: _OBSERVER})


def is_observer(peer: Identity) -> bool:
    """Does this one want to look on, and be no member?"""
    return peer.capabilities.get(_ROLE) == _OBSERVER
