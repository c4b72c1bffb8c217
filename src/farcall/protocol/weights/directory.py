"""The publisher of each name, as far as one member has heard: the highest claim, and the highest version.

Entries of dead publishers stay: the next publisher must claim a higher epoch than theirs. There is no central member.
A publisher announces its claim to all members, and each answers with what it knew before (`publisher.py`).
"""

from __future__ import annotations

from farcall.protocol.weights.messages import Claim, ClaimAnswered, NameClaimed, NameClosed


class Directory:
    """The claims on names that one member has heard of.

    Mutable: for each name the highest claim and version, the latest claim of each live claimant, and the highest claim
    that was closed.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Claim, int]] = {}
        self._claimants: dict[str, dict[int, Claim]] = {}
        self._closed: dict[str, Claim] = {}

    def find(self, name: str) -> tuple[Claim | None, int]:
        """The highest claim and version of a name; (None, 0) before the first claim."""
        return self._known.get(name, (None, 0))

    def find_publisher(self, name: str) -> Claim | None:
        """The highest claim of a name, if its publisher lives and has not closed it; else None."""
        known, _ = self.find(name)
        return None if known is None or self._claimants.get(name, {}).get(known.publisher) != known else known

    def note(self, name: str, claim: Claim, number: int) -> None:
        """Record that this claim and this version exist, or have existed."""
        known, highest = self._known.get(name, (claim, number))
        self._known[name] = max(known, claim), max(highest, number)

    def claim(self, message: NameClaimed) -> ClaimAnswered:
        """Record a member's claim and return the answer to it."""
        name, claim = message.name, message.claim
        known, number = self._known.get(name, (claim, 0))
        self.note(name, claim, message.number)
        if self._closed.get(name) != claim:  # `NameClosed` may overtake the `NameClaimed` of the same claim
            claimants = self._claimants.setdefault(name, {})
            claimants[claim.publisher] = max(claim, claimants.get(claim.publisher, claim))
        return ClaimAnswered(name, claim, known, number)

    def close(self, message: NameClosed) -> None:
        """Record that a member has stopped publishing a name."""
        name, claim = message.name, message.claim
        self.note(name, claim, message.number)
        self._closed[name] = max(claim, self._closed.get(name, claim))
        claimants = self._claimants.get(name, {})
        if claimants.get(claim.publisher) == claim:
            del claimants[claim.publisher]

    def lose(self, member: int) -> list[ClaimAnswered]:
        """Forget a member that is gone. Send each returned answer to the publisher of its ``claim``.

        The lost member may have had the highest claim of a name, and the name's previous publisher may live without
        having heard of that claim. The answer makes the previous publisher claim a higher epoch. Otherwise its claim
        would stay below the one known here, and this member would ignore it.
        """
        answers = []
        for name, claimants in self._claimants.items():
            gone = claimants.pop(member, None)
            known, number = self._known[name]
            if gone == known and claimants:
                answers.append(ClaimAnswered(name, max(claimants.values()), known, number))
        return answers
