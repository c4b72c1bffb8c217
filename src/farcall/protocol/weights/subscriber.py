"""The versions of one name at one member: the arriving ones, the ready ones, and when each is dropped.

    name           event                                      becomes
    unpublished    a claim                                    subscribed: that publisher is asked for versions
    subscribed     a higher claim                             subscribed to that one
    subscribed     its publisher is gone                      orphaned; versions that are ready stay so
    subscribed     its publisher publishes it no more         ended; its last version may yet come
    orphaned       a higher claim                             subscribed
    ended          a higher claim                             subscribed

    version        event                                      becomes
    -              it comes, of the highest claim heard of    arriving; answered as dropped if a newer one is ready
    arriving       a block of it cannot be mapped             arriving: its bytes are fetched
    arriving       all of its blocks are mapped, or fetched   ready; its lender is told
    arriving       its lender dies, or it cannot be had       dropped
    ready          ``keep`` newer ones are ready, no readers  dropped; its lender is told

Invariant: the newest ready version never goes backwards. Programs see the newest version, or one that they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeAlias

import msgspec

from farcall.protocol.weights.messages import Claim, How, Key, VersionsWanted, VersionTaken

Block: TypeAlias = tuple[int, int]
"""The owner's incarnation, and its number for the block."""


class SubscriberState(StrEnum):
    """The states of a name at a subscriber; see the table above."""

    UNPUBLISHED = "unpublished"
    SUBSCRIBED = "subscribed"
    ORPHANED = "orphaned"
    ENDED = "ended"
    CLOSED = "closed"


class Claimed(msgspec.Struct, frozen=True):
    """A publisher claims the name."""

    claim: Claim


class Ended(msgspec.Struct, frozen=True):
    """The publisher stops publishing the name; ``number`` is the last version that will come, 0 if none will."""

    claim: Claim
    number: int


class Gone(msgspec.Struct, frozen=True):
    """A member left or died."""

    member: int


class Arrived(msgspec.Struct, frozen=True):
    """``lender`` lends a version. ``blocks`` are not mapped yet; None: fetch the bytes."""

    key: Key
    lender: int
    keep: int
    blocks: frozenset[Block] | None


class Mapped(msgspec.Struct, frozen=True):
    """A block is mapped."""

    block: Block


class Unmappable(msgspec.Struct, frozen=True):
    """A block was offered, but cannot be mapped."""

    block: Block


class Fetched(msgspec.Struct, frozen=True):
    """All bytes of a version have arrived in this member's own memory, and their checksums match."""

    key: Key


class Failed(msgspec.Struct, frozen=True):
    """A version's bytes cannot be obtained."""

    key: Key


class Held(msgspec.Struct, frozen=True):
    """The program begins to read a ready version."""

    key: Key


class LetGo(msgspec.Struct, frozen=True):
    """The program ends one use of a version."""

    key: Key


class Closed(msgspec.Struct, frozen=True):
    """The program wants no more versions."""


class Tell(msgspec.Struct, frozen=True):
    """Send ``message`` to ``member``."""

    member: int
    message: VersionsWanted | VersionTaken


class Ready(msgspec.Struct, frozen=True):
    """This version is the newest one now."""

    key: Key


class Fetch(msgspec.Struct, frozen=True):
    """Fetch the bytes of this version: `Fetched` or `Failed` follows."""

    key: Key


class Dropped(msgspec.Struct, frozen=True):
    """This member no longer needs this version: forget it, and stop fetching it."""

    key: Key


Event: TypeAlias = Claimed | Ended | Gone | Arrived | Mapped | Unmappable | Fetched | Failed | Held | LetGo | Closed
Effect: TypeAlias = Tell | Fetch | Ready | Dropped


class _Version:
    """One version at this member.

    Mutable: the missing blocks (None: the bytes are fetched), the flags, and the number of uses.
    """

    __slots__ = ("is_lent", "is_ready", "lender", "missing", "readers")

    def __init__(self, lender: int, missing: set[Block] | None) -> None:
        self.lender: int = lender
        self.is_lent: bool = True
        self.missing: set[Block] | None = missing
        self.is_ready: bool = False
        self.readers: int = 0


class SubscriberMachine:
    """One member's versions of one name. ``state``, ``claim`` and ``newest`` may be read at any time.

    Mutable: these three, the versions, how many ready ones to keep, and the last version that an ended name sends.
    """

    def __init__(self, name: str, serials: Iterator[int]) -> None:
        """``serials``: growing numbers, which go on growing when a later machine of this name uses them."""
        self.name: str = name
        self._serials = serials
        self.state: SubscriberState = SubscriberState.UNPUBLISHED
        self.claim: Claim | None = None
        self.newest: Key | None = None
        """The newest ready version."""
        self._keep = 1
        self._last = 0  # of an ended name: the number of its last version
        self._versions: dict[Key, _Version] = {}

    def handle(self, event: Event) -> list[Effect]:
        """Apply ``event`` and return its effects."""
        step = _STEPS[type(event)].get(self.state)
        return [] if step is None else step(self, event)

    @property
    def is_over(self) -> bool:
        """Has the publisher ended, and has its last version arrived or become unobtainable?"""
        return self.state is SubscriberState.ENDED and (0 if self.newest is None else self.newest.number) >= self._last

    @property
    def ready(self) -> list[Key]:
        """The versions that programs can read, oldest first."""
        return sorted(key for key, version in self._versions.items() if version.is_ready)

    @property
    def arriving(self) -> list[Key]:
        """The versions that are not ready yet, oldest first."""
        return sorted(key for key, version in self._versions.items() if not version.is_ready)

    # ------------------------------------------------------------------ steps

    def _claimed(self, event: Claimed) -> list[Effect]:
        if self.claim is not None and event.claim <= self.claim:
            return []
        before, self.claim = self.claim, event.claim
        effects: list[Effect] = []
        if (
            self.state is SubscriberState.SUBSCRIBED
            and before is not None
            and before.publisher != event.claim.publisher
        ):
            effects.append(Tell(before.publisher, VersionsWanted(self.name, False, next(self._serials))))
        self.state = SubscriberState.SUBSCRIBED
        return [*effects, Tell(event.claim.publisher, VersionsWanted(self.name, True, next(self._serials)))]

    def _ended(self, event: Ended) -> list[Effect]:
        if event.claim != self.claim:
            return []
        self._last = event.number if self.state is SubscriberState.SUBSCRIBED else min(self._last, event.number)
        self.state = SubscriberState.ENDED
        return []

    def _gone(self, event: Gone) -> list[Effect]:
        if self.claim is not None and self.claim.publisher == event.member:
            self._last = 0
            if self.state is SubscriberState.SUBSCRIBED:
                self.state = SubscriberState.ORPHANED
        lost = [
            key
            for key, version in self._versions.items()
            if version.lender == event.member and not version.is_ready and version.missing is not None
        ]
        for key in lost:
            del self._versions[key]
        return [Dropped(key) for key in lost]

    def _arrived(self, event: Arrived) -> list[Effect]:
        key = event.key
        stale = self.claim is None or key.claim < self.claim or (self.newest is not None and key <= self.newest)
        if key in self._versions:  # lent twice: the program closed its subscription and subscribed again
            return [self._taken(event.lender, key, "dropped")]
        if stale:
            return [Dropped(key), self._taken(event.lender, key, "dropped")]
        self._keep = max(1, event.keep)
        version = self._versions[key] = _Version(event.lender, None if event.blocks is None else set(event.blocks))
        return [Fetch(key)] if version.missing is None else self._complete(key, version)

    def _arrived_closed(self, event: Arrived) -> list[Effect]:
        return [Dropped(event.key), self._taken(event.lender, event.key, "dropped")]

    def _mapped(self, event: Mapped) -> list[Effect]:
        effects: list[Effect] = []
        for key, version in sorted(self._versions.items()):
            if version.missing and event.block in version.missing:
                version.missing.discard(event.block)
                if key in self._versions:  # an earlier turn of this loop may have swept it
                    effects += self._complete(key, version)
        return effects

    def _unmappable(self, event: Unmappable) -> list[Effect]:
        fetched: list[Effect] = []
        for key, version in sorted(self._versions.items()):
            if version.missing and event.block in version.missing:
                version.missing = None
                fetched.append(Fetch(key))
        return fetched

    def _fetched(self, event: Fetched) -> list[Effect]:
        version = self._versions.get(event.key)
        return [] if version is None or version.is_ready else self._ready(event.key, version, "copied")

    def _failed(self, event: Failed) -> list[Effect]:
        version = self._versions.get(event.key)
        if version is None or version.is_ready:
            return []
        del self._versions[event.key]
        if event.key.number >= self._last:
            self._last = 0  # no later version follows
        return [Dropped(event.key), self._taken(version.lender, event.key, "dropped")]

    def _held(self, event: Held) -> list[Effect]:
        self._versions[event.key].readers += 1
        return []

    def _let_go(self, event: LetGo) -> list[Effect]:
        version = self._versions.get(event.key)
        if version is not None:
            version.readers -= 1
        return self._sweep()

    def _closed(self, event: Closed) -> list[Effect]:
        was, self.state, self._keep = self.state, SubscriberState.CLOSED, 0
        effects = self._sweep()
        if was in (SubscriberState.SUBSCRIBED, SubscriberState.ENDED) and self.claim is not None:
            effects.append(Tell(self.claim.publisher, VersionsWanted(self.name, False, next(self._serials))))
        return effects

    # ------------------------------------------------------------------ inside

    def _taken(self, lender: int, key: Key, how: How) -> Tell:
        return Tell(lender, VersionTaken(self.name, key.claim, key.number, how))

    def _complete(self, key: Key, version: _Version) -> list[Effect]:
        return [] if version.missing else self._ready(key, version, "mapped")

    def _ready(self, key: Key, version: _Version, how: How) -> list[Effect]:
        version.is_ready = True
        version.is_lent = how == "mapped"
        effects: list[Effect] = [self._taken(version.lender, key, how)]
        if self.newest is None or key > self.newest:
            self.newest = key
            effects.append(Ready(key))
        return effects + self._sweep()

    def _sweep(self) -> list[Effect]:
        """Drop superseded versions without readers, and arriving versions older than the newest ready one."""
        ready = self.ready
        kept = ready[-self._keep :] if self._keep else []
        effects: list[Effect] = []
        for key, version in sorted(self._versions.items()):
            if version.is_ready:
                is_over = key not in kept and version.readers <= 0
            else:
                is_over = not self._keep or (self.newest is not None and key < self.newest)
            if is_over:
                del self._versions[key]
                effects.append(Dropped(key))
                if version.is_lent:
                    effects.append(self._taken(version.lender, key, "dropped"))
        return effects


_Step: TypeAlias = Callable[..., list[Effect]]
_S: Final = SubscriberState
_OPEN: Final = (_S.UNPUBLISHED, _S.SUBSCRIBED, _S.ORPHANED, _S.ENDED)

_STEPS: Final[Mapping[type[Event], Mapping[SubscriberState, _Step]]] = {
    Claimed: dict.fromkeys(_OPEN, SubscriberMachine._claimed),
    Ended: dict.fromkeys((_S.SUBSCRIBED, _S.ENDED), SubscriberMachine._ended),
    Gone: dict.fromkeys(_OPEN, SubscriberMachine._gone),
    Arrived: {
        **dict.fromkeys(_OPEN, SubscriberMachine._arrived),
        _S.CLOSED: SubscriberMachine._arrived_closed,
    },
    Mapped: dict.fromkeys(_OPEN, SubscriberMachine._mapped),
    Unmappable: dict.fromkeys(_OPEN, SubscriberMachine._unmappable),
    Fetched: dict.fromkeys(_OPEN, SubscriberMachine._fetched),
    Failed: dict.fromkeys(_OPEN, SubscriberMachine._failed),
    Held: dict.fromkeys(_S, SubscriberMachine._held),
    LetGo: dict.fromkeys(_S, SubscriberMachine._let_go),
    Closed: dict.fromkeys(_OPEN, SubscriberMachine._closed),
}
