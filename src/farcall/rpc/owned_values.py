"""The values that one node owns, and the places of those that are still to come.

A place exists from the first word of a reference on: the creating call, a fork of it, or a question that overtook both.
Decides nothing about when a value may go: `references.py` takes it out when the machine says so. Everything here runs
under the lock of `NodeReferences`; only ``places`` may be looked into without it.
"""

from __future__ import annotations

from collections.abc import Callable

from farcall.errors import ReferenceLost
from farcall.ids import RefId, WorkerInfo
from farcall.rpc.owned_value import Owned
from farcall.serialize import encode_failure

__all__ = ["Values"]


class Values:
    """One node's."""

    def __init__(self, here: WorkerInfo) -> None:
        self._here = here
        self._last_created: dict[int, int] = {}  # of each creator, the last reference that it made here
        self.places: dict[RefId, Owned] = {}

    def place(self, ref: RefId) -> Owned:
        """Where the value is, or will be."""
        owned = self.places.get(ref)
        if owned is None:
            owned = self.places[ref] = Owned()
        return owned

    def count_created(self, ref: RefId) -> None:
        """``ref`` has come to be, or never will."""
        if ref.local_id > self._last_created.get(ref.created_on, -1):
            self._last_created[ref.created_on] = ref.local_id

    def may_come(self, ref: RefId) -> bool:
        """Has nothing yet been heard of the call that creates ``ref``, nor of a later one of that creator's?"""
        return ref.local_id > self._last_created.get(ref.created_on, -1)

    def never_comes(self, ref: RefId, owned: Owned) -> None:
        """Fail whoever waits for a value that nobody will make."""
        if not owned.ready:
            why = ReferenceLost(
                f"the call that should have created {ref.created_on}:{ref.local_id} never came: "
                "its caller died or gave up"
            )
            owned.fail(encode_failure(why, self._here))

    def abandon(self, creator: int, is_listed: Callable[[RefId], bool]) -> list[Owned]:
        """A creator is dead: fail, and take out, what only it could have made; ``is_listed`` is being made already."""
        abandoned = []
        for ref, owned in list(self.places.items()):
            if not owned.ready and ref.created_on == creator and not is_listed(ref):
                abandoned.append(self.places.pop(ref))
                self.never_comes(ref, owned)
        return abandoned

    def pending(self) -> int:
        """How many are still being made. From any thread."""
        return sum(1 for owned in list(self.places.values()) if not owned.ready)

    def describe(self) -> dict[RefId, tuple[str, str]]:
        """What each value is, and where it was created."""
        return {ref: (owned.describe(), owned.origin) for ref, owned in self.places.items()}
