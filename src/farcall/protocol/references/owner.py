"""The owner's side: which member holds which fork of the values that live here.

Owns the listing (reference -> fork -> holder) and the round of questions that must end before a dead
member's forks may be dropped. Knows nothing of forks of other members' values, of values themselves, or of
how a message travels. Invariant: every fork alive or in transit anywhere is listed here, or descends from a
listed fork through forks that are not listed yet; so an empty listing means that nobody refers to the
value. (If the creation itself never came, there is no value to keep: the error in its place may be freed,
and is made anew for a holder that registers later.)

    a reference   event                                      becomes    with
    (unknown)     created here, or its creation arrives      created    its first fork listed
    (unknown)     Register, or a fork of it comes home       awaited    the fork listed; or, if its creator
                                                                        is dead: created, NeverCreated
    awaited       its creation arrives                       created    its first fork listed
    awaited       its creator dies, withdraws the creation   created    NeverCreated: the value is an error
    any           forked, Register, a fork comes home        the same   fork listed, Confirm to the registrar
    any           Release by its holder, or dropped here     the same   fork struck off
    any           the round about a dead holder is over      the same   its forks struck off
    any           no fork is listed                          (unknown)  FreeValue; if it never came, of its place
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from farcall.ids import ForkId, RefId
from farcall.protocol.references.messages import (
    Confirm,
    Fork,
    FreeValue,
    Held,
    Inquire,
    NeverCreated,
    OwnedSnapshot,
    Send,
)

if TYPE_CHECKING:
    from farcall.protocol.references.machine import Outbox


MOST_AWAITED = 1 << 16
"""How many values one member may have listed that are not created: it can make up the names of as many as it likes."""
_NOBODY = -1


class _Owned(msgspec.Struct, gc=False):
    """The listing of one value: which fork is held by which member. Mutable: all fields.

    ``listed_by``: the member whose message listed it before it was created, or that withdrew its creation.
    """

    created: bool
    listed_by: int = _NOBODY
    holders: dict[ForkId, int] = msgspec.field(default_factory=dict)


class OwnerSide:
    """All values owned by ``me``. ``live`` (without ``me``) and ``dead`` are the machine's sets, only read here.

    Mutable: the listing, the settled members, and the round in progress.
    """

    __slots__ = (
        "_asked_about",
        "_awaited",
        "_dead",
        "_live",
        "_me",
        "_outbox",
        "_owned",
        "_round",
        "_settled",
        "_unanswered",
    )

    def __init__(self, me: int, live: set[int], dead: set[int], outbox: Outbox) -> None:
        self._me = me
        self._live = live
        self._dead = dead
        self._outbox = outbox
        self._owned: dict[RefId, _Owned] = {}
        self._awaited: Counter[int] = Counter()  # by member: how many it listed that are not created
        self._settled: set[int] = set()  # dead members whose forks can have no unlisted descendants any more
        self._round = 0
        self._asked_about: list[int] = []  # the dead members of the current round; empty between rounds
        self._unanswered: set[int] = set()

    # --- forks come and go -------------------------------------------------------------------------------

    def list_created(self, fork: Fork) -> None:
        """List the first fork of a value that is created here, on behalf of ``fork.holder``."""
        owned = self._owned.get(fork.ref)
        if owned is None:
            owned = self._owned[fork.ref] = _Owned(created=True)
        self._count_as_made(owned)
        owned.created = True
        owned.holders[fork.fork_id] = fork.holder

    def list_never_created(self, fork: Fork, sender: int) -> None:
        """List ``fork``, whose creation ``sender`` has withdrawn: its value is an error, held like any other value."""
        if self._awaited[sender] >= MOST_AWAITED:
            return  # it makes them up, too
        self.list_created(fork)
        self._awaited[sender] += 1
        self._owned[fork.ref].listed_by = sender
        self._outbox.effects.append(NeverCreated(fork.ref))

    def _count_as_made(self, owned: _Owned) -> None:
        if owned.listed_by != _NOBODY:
            self._awaited[owned.listed_by] -= 1
            owned.listed_by = _NOBODY

    def list_fork(self, fork: Fork, sender: int) -> bool:
        """List a fork that ``fork.holder`` holds or will receive; the creation itself may still be in transit.

        ``sender``: the member that says so. False: it has listed too many that nobody created, and this one is not
        kept. No error, which would end its link: it may only pass on what a third member made up.
        """
        owned = self._owned.get(fork.ref)
        if owned is None:
            if self._awaited[sender] >= MOST_AWAITED:
                return False
            self._awaited[sender] += 1
            owned = self._owned[fork.ref] = _Owned(created=False, listed_by=sender)
            creator = fork.ref.created_on
            # This member lists its own creations before anyone can hear of them: so the value was freed, and `fork`
            # is a late duplicate that its holder will release again. A dead creator's request is refused by now.
            if creator == self._me or creator in self._dead:
                owned.created = True
                self._outbox.effects.append(NeverCreated(fork.ref))
        owned.holders.setdefault(fork.fork_id, fork.holder)
        return True

    def holds(self, held: Fork) -> bool:
        """Is ``held`` listed here as held by this very member?"""
        owned = self._owned.get(held.ref)
        return owned is not None and owned.holders.get(held.fork_id) == self._me

    def lists(self, ref: RefId) -> bool:
        return ref in self._owned

    def strike_off(self, holder: int, ref: RefId, fork_id: ForkId) -> None:
        """Strike off a fork that ``holder`` gave up. Only a fork's own holder can: see ``UserSide.on_confirm``."""
        owned = self._owned.get(ref)
        if owned is not None and owned.holders.get(fork_id) == holder:
            del owned.holders[fork_id]
            if not owned.holders:
                self._forget(ref, owned)

    def _forget(self, ref: RefId, owned: _Owned) -> None:
        del self._owned[ref]
        self._count_as_made(owned)
        self._outbox.effects.append(FreeValue(ref))

    # --- messages ----------------------------------------------------------------------------------------

    def on_register(self, sender: int, forks: Iterable[Fork]) -> None:
        ask = False
        for fork in forks:
            # A settled member's forks have no unlisted descendants, so they protect nothing and are not listed.
            if fork.holder not in self._settled:
                self.list_fork(fork, sender)
                ask |= fork.holder in self._dead and fork.holder not in self._asked_about
            self._outbox.put(Confirm, sender, (fork.ref, fork.fork_id))
        if ask:
            self._begin_round()

    def on_release(self, sender: int, forks: Iterable[Held]) -> None:
        for ref, fork_id in forks:
            self.strike_off(sender, ref, fork_id)

    def on_answer(self, sender: int, round_number: int, forks: Iterable[Fork]) -> None:
        self.on_register(sender, forks)
        if round_number == self._round and self._asked_about:
            self._unanswered.discard(sender)
            self._end_round_if_answered()

    # --- members -----------------------------------------------------------------------------------------

    def member_joined(self, member: int) -> None:
        if self._asked_about:
            self._unanswered.add(member)
            self._outbox.effects.append(Send(member, Inquire(self._round, self._asked_about)))

    def member_died(self, member: int) -> None:
        """Begin a round about ``member``, if needed. Call it once ``member`` is in ``dead`` and not in ``live``."""
        concerned = bool(self._asked_about)
        for ref, owned in self._owned.items():
            if not owned.created and ref.created_on == member:
                owned.created = True
                self._outbox.effects.append(NeverCreated(ref))
            if not concerned and member in owned.holders.values():
                concerned = True
        # A death in the middle of a round starts it anew, even if that member has answered: other members may have
        # received forks from it after their own answers.
        if concerned:
            self._begin_round()

    def _begin_round(self) -> None:
        self._round += 1
        self._asked_about = sorted(self._dead - self._settled)
        self._unanswered = set(self._live)
        for member in self._unanswered:
            self._outbox.effects.append(Send(member, Inquire(self._round, self._asked_about)))
        self._end_round_if_answered()

    def _end_round_if_answered(self) -> None:
        if self._unanswered:
            return
        self._settled.update(self._asked_about)
        self._asked_about = []
        for ref, owned in list(self._owned.items()):
            gone = [fork_id for fork_id, holder in owned.holders.items() if holder in self._settled]
            for fork_id in gone:
                del owned.holders[fork_id]
            if not owned.holders:
                self._forget(ref, owned)

    # --- the end, and a look inside ----------------------------------------------------------------------

    def drop_local(self) -> None:
        """Strike off every fork held by this member itself."""
        for ref, owned in list(self._owned.items()):
            for fork_id in [fork_id for fork_id, holder in owned.holders.items() if holder == self._me]:
                self.strike_off(self._me, ref, fork_id)

    def snapshot(self) -> list[OwnedSnapshot]:
        return [
            OwnedSnapshot(ref, owned.created, dict(Counter(owned.holders.values())))
            for ref, owned in self._owned.items()
        ]
