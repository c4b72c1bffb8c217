"""The identities of members and references, as they cross the wire.

Everything here is immutable and cheap to hash. No torch, no I/O.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from farcall.html import table

MAX_NAME_CHARACTERS = 127
_NAME = re.compile(r"[A-Za-z0-9_:\-]+")


class WorkerInfo(NamedTuple):
    """A member of the cluster: its unique ``name`` and its rank, called ``id``."""

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class MemberInfo(WorkerInfo):
    """A worker as a member, and whether it answers; equal to its `WorkerInfo`."""

    unresponsive_s: float | None = None
    """For how long it has answered nobody, though it is not dead: it is busy, or stopped. None: it answers."""


class MemberList(list[MemberInfo]):
    """The members of a cluster, by rank; a table in a notebook."""

    def _repr_html_(self) -> str:
        head = ("name", "rank", "answers")
        rows = [
            (one.name, one.id, "yes" if one.unresponsive_s is None else f"not for {one.unresponsive_s:.0f} s")
            for one in self
        ]
        return table(f"{len(self)} members", rows, head)


# Structs without garbage collection: there may be a million of these, and none can be part of a cycle.


class RefId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A reference, cluster-wide: its creator, and its number there."""

    created_on: int
    local_id: int


class ForkId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One holder's copy of a reference: the creator of the fork, and its number there."""

    created_on: int
    local_id: int


def check_worker_name(name: object) -> str:
    """Return ``name`` if it may name a worker, else raise saying what is allowed."""
    if not isinstance(name, str):
        raise TypeError(f"a worker name must be a str, not {type(name).__name__}")
    if not name or len(name) > MAX_NAME_CHARACTERS or not _NAME.fullmatch(name):
        raise ValueError(
            f"worker name {name!r} is not valid: names are 1 to {MAX_NAME_CHARACTERS} letters, digits, '_', ':' or '-'"
        )
    return name
