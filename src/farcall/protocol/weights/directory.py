"""Who publishes what, as far as one member has heard: the highest claim of each name, and the highest version.

Also of publishers that are gone: a later one has to go above them. There is no central member. A publisher tells all,
and all answer what they knew before (`publisher.py`).
"""

from __future__ import annotations

from farcall.protocol.weights.messages import Claim, ClaimAnswered, NameClaimed, NameClosed


class Directory:
    """Mutable: of each name, the highest claim and version; what members that live claimed last; what they closed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Claim, int]] = {}
        self._claimants: dict[str, dict[int, Claim]] = {}
        self._closed: dict[str, Claim] = {}

    def find(self, name: str) -> tuple[Claim | None, int]:
        """The highest claim and version; (None, 0) if nobody was heard of."""
        return self._known.get(name, (None, 0))

    def find_publisher(self, name: str) -> Claim | None:
        """The claim of the member that publishes a name, as far as is known."""
        known, _ = self.find(name)
        return None if known is None or self._claimants.get(name, {}).get(known.publisher) != known else known

    def note(self, name: str, claim: Claim, number: int) -> None:
        """There is, or was, such a claim and such a version."""
        known, highest = self._known.get(name, (claim, number))
        self._known[name] = max(known, claim), max(highest, number)

    def claim(self, message: NameClaimed) -> ClaimAnswered:
        """A member claims a name: the answer."""
        name, claim = message.name, message.claim
        known, number = self._known.get(name, (claim, 0))
        self.note(name, claim, message.number)
        if self._closed.get(name) != claim:  # unless the end was heard of first
            claimants = self._claimants.setdefault(name, {})
            claimants[claim.publisher] = max(claim, claimants.get(claim.publisher, claim))
        return ClaimAnswered(name, claim, known, number)

    def close(self, message: NameClosed) -> None:
        """A member publishes a name no more."""
        name, claim = message.name, message.claim
        self.note(name, claim, message.number)
        self._closed[name] = max(claim, self._closed.get(name, claim))
        claimants = self._claimants.get(name, {})
        if claimants.get(claim.publisher) == claim:
            del claimants[claim.publisher]

    def lose(self, member: int) -> list[ClaimAnswered]:
        """A member is gone: what is to be told to the publisher of each answer's ``claim``.

        If it had the highest claim of a name, the one that published the name before may live, and may never have heard
        of that. Its claim would stay below the one that is known here, and nobody here would listen to it.
        """
        answers = []
        for name, claimants in self._claimants.items():
            gone = claimants.pop(member, None)
            known, number = self._known[name]
            if gone == known and claimants:
                answers.append(ClaimAnswered(name, max(claimants.values()), known, number))
        return answers
