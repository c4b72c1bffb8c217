"""Where the bytes of a version come from, for a subscriber that cannot map the memory of who lends it.

A seam: `Weights` makes a block of this node's own for each content that is missing, has a `Transfer` fill them, and
verifies checksums afterwards. A serving member finds what it is asked for by `Weights.find_content`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from farcall.protocol.weights.messages import Key
from farcall.weights.manifest import Content, Manifest
from farcall.weights.memory import Block

__all__ = ["Arriving", "Transfer"]


@dataclass(frozen=True)
class Arriving:
    """A version whose bytes are to be fetched into ``missing``."""

    name: str
    key: Key
    lender: int
    """The incarnation of the member that sent the manifest; it has the bytes for as long as it lives."""
    manifest: Manifest
    missing: Mapping[Content, Block]


class Transfer(Protocol):
    """Fetches bytes from other members."""

    def fetch(self, arriving: Arriving, on_end: Callable[[Exception | None], None]) -> None:
        """Begin to fill ``arriving.missing``; ``on_end`` is called once, from any thread, with what went wrong."""

    def stop(self, name: str, key: Key) -> None:
        """Nobody wants that version any more: fetch no more of it. ``on_end`` need not be called."""
