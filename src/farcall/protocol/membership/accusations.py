"""Whose word counts about the end of a member, in a group with a table of what others may do (`farcall.allow`).

Owns the claims that nobody has confirmed yet. In such a group one hostile member must not end another by its word. So a
member believes that another one has ended if

    the other one says so: it leaves
    its own probe of it failed, or its own dial was refused, as in every group
    ``MembershipOptions.accusers`` members say so, each of which believes it for one of these reasons

One accuser makes a member probe the accused. Its own end a member believes of as many; alone with one other, of that
one. In a group without a table one accuser is enough: its members may run code in each other anyway.
"""

from __future__ import annotations

from farcall.protocol.membership.table import Table


class Accusations:
    """Who has claimed the end of whom. Mutable: the accusers of each member that has not ended here."""

    def __init__(self, table: Table, needed: int) -> None:
        self._table = table
        self._needed = needed
        self._accusers: dict[int, set[int]] = {}

    def convince(self, sender: int, accused: int) -> bool:
        """Note that ``sender`` says that ``accused`` has ended; is that to be believed?"""
        table, needed = self._table, self._needed
        if needed == 1 or sender == accused:
            return True
        accusers = self._accusers.setdefault(accused, set())
        accusers.add(sender)
        if accused == table.me:
            return len(accusers) >= needed or accusers.issuperset(table.others)  # the liar may be none of these
        if table.member(accused) is None:  # nobody need know the end of a stranger: if it comes, a probe shows that
            self.drop(accused)
            return False
        accusers.intersection_update(table.others)
        return len(accusers) >= needed

    def drop(self, accused: int) -> None:
        """``accused`` has answered, or ended."""
        self._accusers.pop(accused, None)
