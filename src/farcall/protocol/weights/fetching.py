"""Fetching a version's bytes from other members: the source of each chunk, and the fallback if that source fails.

`Routes`, at the member that lends a version, gives each host one *leader*: the first of its members that asks. Leaders
form a chain in the order in which their hosts asked, with the lender at its head. Each leader asks the leader before
it, which forwards a chunk as soon as it has it. So each host receives a version once and sends it at most once. The
other members of a host map the memory of their leader.

`Fetching`, at a leader, is one version on its way:

    event                                        follows
    a route                                      the first chunks are asked for, at its first source
    a chunk comes                                the next one is asked for; after the last: `Done`
    a chunk comes later than STALL_S             the same, but fewer are asked for at a time
    a request has no answer in time              its chunk is asked for again, later
    a source is gone, or has not got it          the next source of the route is asked for what is missing
    no chunk for STALL_S, or twice the time      the same; the silent source is asked last from now on
    that the last one took
    no source is left                            another route is asked for; `Failed`, if none has come since the last

A chunk may come twice, from two sources, with the same bytes. A leader asks only leaders of hosts that asked earlier,
so the chain has no cycle. Over a slow link requests must not pile up: otherwise each answer would come after the end of
its call, and nothing would ever arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

CHUNK_BYTES: Final = 1 << 20
WINDOW: Final = 8
"""How many chunks are outstanding at a time at most: enough for 10 Gbit/s over 6 ms."""
STALL_S: Final = 2.0
NEVER: Final = float("inf")


# ---------------------------------------------------------------------- at the lender


class Route(msgspec.Struct, array_like=True, frozen=True):
    """Where a member gets a version."""

    neighbour: int  # the leader of the member's host, whose memory it maps; 0: the member is the leader, and fetches
    sources: list[int]  # the members to fetch from, the best one first


class Routes:
    """The hosts that fetch one version, each with its leader, in the order in which they asked.

    Mutable: the leaders. Python's dictionaries keep the order of insertion, which is the order of the chain.
    """

    def __init__(self, lender: int) -> None:
        self._lender = lender
        self._leaders: dict[str, int] = {}

    def find(self, member: int, host: str, avoided: Iterable[int] = ()) -> Route:
        """The route of ``member``, which failed to get the version from ``avoided``."""
        avoided = set(avoided)
        host = host or f"member {member}"  # a member that shares no memory is a host of its own
        for led in [led for led, leader in self._leaders.items() if leader == member and led != host]:
            del self._leaders[led]  # a member has one host, whatever it says
        leader = self._leaders.setdefault(host, member)
        if leader != member and leader not in avoided:
            return Route(leader, [])
        self._leaders[host] = member
        earlier = []
        for other in self._leaders.values():
            if other == member:
                break
            earlier.append(other)
        return Route(0, [source for source in (*reversed(earlier), self._lender) if source not in avoided])

    def forget(self, member: int) -> None:
        """Forget a member that is gone: the next member of its host that asks becomes the leader."""
        for host, leader in list(self._leaders.items()):
            if leader == member:
                del self._leaders[host]


# ---------------------------------------------------------------------- at a leader


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """A range of bytes of one content."""

    content: int  # the content's index in the list of contents to fetch
    offset: int
    size_bytes: int


class Routed(msgspec.Struct, frozen=True):
    """The lender's answer to `AskRoute`; ``sources`` is empty if the lender could not answer."""

    sources: Sequence[int]


class Came(msgspec.Struct, frozen=True):
    """A chunk has arrived."""

    chunk: Chunk
    source: int


class Refused(msgspec.Struct, frozen=True):
    """A source is gone, or does not have the chunk."""

    chunk: Chunk
    source: int


class Unanswered(msgspec.Struct, frozen=True):
    """A source was too busy for the request, or has not answered it in time."""

    chunk: Chunk
    source: int


class Ask(msgspec.Struct, frozen=True):
    """Ask this member for this chunk."""

    chunk: Chunk
    source: int


class AskRoute(msgspec.Struct, frozen=True):
    """Ask the lender for a route without these members."""

    avoided: tuple[int, ...]


class Done(msgspec.Struct, frozen=True):
    """All chunks have arrived."""


class Failed(msgspec.Struct, frozen=True):
    """No source is left."""

    missing_bytes: int


Event: TypeAlias = Routed | Came | Refused | Unanswered
Effect: TypeAlias = Ask | AskRoute | Done | Failed


class Fetching:
    """The transfer of one version to this member.

    Mutable: the missing chunks, the outstanding chunks with their sources, when each was first asked for, how many may
    be outstanding, how long to wait for one, the sources left and the sources to avoid.
    """

    def __init__(self, sizes_bytes: Sequence[int], *, chunk_bytes: int = CHUNK_BYTES, window: int = WINDOW) -> None:
        """``sizes_bytes``: the sizes of the contents to fetch."""
        self._most = self._window = window
        self._patience_s = STALL_S
        self._missing: dict[Chunk, None] = {
            Chunk(content, offset, min(chunk_bytes, size - offset)): None
            for content, size in enumerate(sizes_bytes)
            for offset in range(0, size, chunk_bytes)
        }
        self._asked: dict[Chunk, int] = {}
        self._asked_at: dict[Chunk, float] = {}
        self._sources: list[int] = []
        self._avoided: dict[int, None] = {}
        self._may_reroute = True
        self._routing = True
        self._deadline = NEVER
        self.is_over: bool = False
        """Has the transfer ended, by success or by failure?"""

    def start(self) -> list[Effect]:
        """Ask for the first route."""
        if not self._missing:
            self.is_over = True
            return [Done()]
        return [AskRoute(())]

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Apply ``event`` and return its effects."""
        return [] if self.is_over else _STEPS[type(event)](self, event, now)

    def next_deadline(self) -> float:
        """When to call `handle_deadline`."""
        return self._deadline

    def handle_deadline(self, now: float) -> list[Effect]:
        """Move the silent source to the end of the list, and ask the next one."""
        if now < self._deadline or self.is_over or not self._sources:
            return []
        if len(self._sources) > 1:  # otherwise the same requests would only queue up behind those that are open
            self._sources.append(self._sources.pop(0))
            self._asked.clear()
        self._window = max(1, self._window // 2)
        return self._go_on(now)

    def has(self, chunk: Chunk) -> bool:
        """Has this chunk arrived? All members cut contents into the same chunks."""
        return chunk not in self._missing

    @property
    def missing_bytes(self) -> int:
        """How many bytes are still missing."""
        return sum(chunk.size_bytes for chunk in self._missing)

    def _routed(self, event: Routed, now: float) -> list[Effect]:
        self._routing = False
        self._sources = [source for source in event.sources if source not in self._avoided]
        return self._go_on(now)

    def _came(self, event: Came, now: float) -> list[Effect]:
        self._asked.pop(event.chunk, None)
        asked_at = self._asked_at.pop(event.chunk, None)
        if asked_at is not None:  # otherwise it is a duplicate, which tells nothing
            took_s = now - asked_at
            self._patience_s = max(STALL_S, 2 * took_s)
            if took_s > STALL_S:
                self._window = max(1, self._window // 2)
            elif took_s < STALL_S / 2:
                self._window = min(self._most, self._window + 1)
        if self._missing.pop(event.chunk, self) is self:  # a duplicate, from a second source
            return self._go_on(now)
        self._may_reroute = True
        if not self._missing:
            self.is_over, self._deadline = True, NEVER
            return [Done()]
        return self._go_on(now)

    def _refused(self, event: Refused, now: float) -> list[Effect]:
        if self._asked.get(event.chunk) == event.source:
            del self._asked[event.chunk]
        self._avoided[event.source] = None
        if event.source in self._sources:
            self._sources.remove(event.source)
            self._asked = {chunk: source for chunk, source in self._asked.items() if source != event.source}
        return self._go_on(now)

    def _unanswered(self, event: Unanswered, now: float) -> list[Effect]:
        if self._asked.get(event.chunk) == event.source:
            del self._asked[event.chunk]  # the next chunk that comes, or the deadline, asks for it again
            self._asked_at.pop(event.chunk, None)
        return []

    def _go_on(self, now: float) -> list[Effect]:
        """Fill the window with requests for chunks; if no source is left, ask for another route.

        A reroute that brought no chunk is the last one: otherwise this would loop for ever.
        """
        if self._routing:
            return []
        if not self._sources:
            self._deadline = NEVER
            if not self._may_reroute:
                self.is_over = True
                return [Failed(self.missing_bytes)]
            self._may_reroute, self._routing = False, True
            return [AskRoute(tuple(self._avoided))]
        self._deadline = now + self._patience_s
        effects: list[Effect] = []
        for chunk in self._missing:
            if len(self._asked) >= self._window:
                break
            if chunk not in self._asked:
                self._asked[chunk] = self._sources[0]
                self._asked_at.setdefault(chunk, now)
                effects.append(Ask(chunk, self._sources[0]))
        return effects


_STEPS: Final[Mapping[type[Event], Callable[..., list[Effect]]]] = {
    Routed: Fetching._routed,
    Came: Fetching._came,
    Refused: Fetching._refused,
    Unanswered: Fetching._unanswered,
}
