"""A look inside a running node: for people, and for tests.

Public as ``farcall.debug``. Every function gives a picture of one moment, but `trace_references`, which sets how much
is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from farcall.ids import ForkId, RefId
from farcall.rpc.references import NodeReferences
from farcall.runtime.node import HasRuntime, runtime_of

__all__ = ["OwnedValue", "References", "UsedReference", "references", "trace_references"]


@dataclass(frozen=True)
class OwnedValue:
    """A value that lives here, and the holders of references to it."""

    ref: RefId
    what: str
    """The name of its type, or the state of a value that is not there."""
    origin: str
    """The place in the program that created it, if `trace_references` was on there."""
    holders: dict[str, int]
    """The number of references of each worker."""

    def __str__(self) -> str:
        held = ", ".join(f"{name} {count}" for name, count in self.holders.items()) or "nobody"
        where = f", created at {self.origin}" if self.origin else ""
        return f"{_id(self.ref)}  {self.what}{where}; held by {held}"


@dataclass(frozen=True)
class UsedReference:
    """A reference held here to a value that lives elsewhere."""

    ref: RefId
    fork: ForkId
    owner: str
    confirmed: bool
    """The owner knows of it."""
    given_up: bool
    """The program has dropped it; only messages that took it to other workers keep it."""
    on_the_way_to: list[str]
    """Workers that it was sent to, and that have not registered it yet."""

    def __str__(self) -> str:
        state = ("" if self.confirmed else ", not confirmed yet") + (", given up" if self.given_up else "")
        sent = f", on the way to {', '.join(self.on_the_way_to)}" if self.on_the_way_to else ""
        return f"{_id(self.ref)}  of {self.owner}, fork {_id(self.fork)}{state}{sent}"


@dataclass(frozen=True)
class References:
    """Every reference that a worker knows of."""

    worker: str
    owned: list[OwnedValue]
    used: list[UsedReference]

    def __str__(self) -> str:
        lines = [f"{self.worker} owns {len(self.owned)} and uses {len(self.used)} references"]
        lines += [f"  owned  {value}" for value in self.owned]
        lines += [f"  used   {reference}" for reference in self.used]
        return "\n".join(lines)


def references(node: HasRuntime | None = None) -> References:
    """The references of ``node``, by default the current one; ``print`` shows them in words."""
    runtime = runtime_of(node)
    part = runtime.part(NodeReferences)
    snapshot, values = part.snapshot()
    owned = []
    for entry in snapshot.owned:
        what, origin = values.get(entry.ref, ("value still being made", ""))
        holders = {part.worker(member).name: count for member, count in entry.forks_by_holder.items()}
        owned.append(OwnedValue(entry.ref, what, origin, holders))
    used = [
        UsedReference(
            ref=entry.fork.ref,
            fork=entry.fork.fork_id,
            owner=part.worker(entry.fork.owner).name,
            confirmed=entry.confirmed,
            given_up=entry.dropped,
            on_the_way_to=[part.worker(member).name for member in entry.children_sent_to],
        )
        for entry in snapshot.used
    ]
    return References(runtime.info.name, owned, used)


def trace_references(enabled: bool = True, node: HasRuntime | None = None) -> None:
    """Record the place in the program that creates each reference, from now on (about a microsecond for each)."""
    runtime_of(node).part(NodeReferences).traced = enabled


def _id(number: RefId | ForkId) -> str:
    return f"{number.created_on}:{number.local_id}"
