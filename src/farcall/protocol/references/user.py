"""The user's side: forks held here of values that live elsewhere, and forks sent on to others.

Owns a record per fork held, and the children: forks sent from here that nobody has accepted yet. Knows
nothing of the owner's listing. Invariant: a fork is released only when its owner is known to have listed
it, and every child of it too; so a Release never overtakes what it must follow, whatever order messages
arrive in.

    a fork held   event                                     becomes     with
    (none)        created by a call, sent to its owner      pending     (the request registers it)
    (none)        received from its owner                   confirmed   (listed before it was sent)
    (none)        received from another user                pending     Register to the owner
    pending       Confirm                                   confirmed   Confirmed, Accept to its sender
    pending       the creation's response                   confirmed
    pending       Inquire by the owner                      pending     named in the Answer if received
    any           forked to another member                  the same    one more child
    any           dropped by the program                    leaving
    leaving       confirmed, and the last child is gone     (none)      Release to the owner
    any           the owner dies                            (none)      Lost, its children forgotten

    a child       event                                     becomes     with
    (none)        a fork is sent to somebody                pending
    pending       Accept by its receiver                    (none)
    pending       its receiver dies                         pending     Register in the receiver's name
    pending       Confirm by the owner                      (none)
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from farcall.ids import ForkId
from farcall.protocol.references.messages import Confirmed, CreationAnswered, Fork, Held, Lost, UsedSnapshot
from farcall.protocol.references.outbox import Outbox


class _Used(msgspec.Struct, gc=False):
    """One fork held here."""

    fork: Fork
    parent: int | None  # the member to send Accept to; None: nobody waits for one
    confirmed: bool
    dropped: bool = False
    children: int = 0


class UserSide:
    """All forks held by ``me`` of other members' values. ``dead`` is the machine's own set, read here."""

    __slots__ = ("_children", "_dead", "_me", "_outbox", "_used", "unconfirmed")

    def __init__(self, me: int, dead: set[int], outbox: Outbox) -> None:
        self._me = me
        self._dead = dead
        self._outbox = outbox
        self._used: dict[ForkId, _Used] = {}
        self._children: dict[ForkId, tuple[Fork, _Used]] = {}
        self.unconfirmed: int = 0  # how many of the forks held

    # --- forks come and go -------------------------------------------------------------------------------

    def hold_created(self, fork: Fork) -> None:
        """A call that creates ``fork.ref`` is about to be sent."""
        self._used[fork.fork_id] = _Used(fork, parent=None, confirmed=False)
        self.unconfirmed += 1

    def hold_received(self, fork: Fork, sender: int) -> None:
        """A fork came from ``sender``, for the first time."""
        if sender == fork.owner:
            self._used[fork.fork_id] = _Used(fork, parent=None, confirmed=True)
        else:
            self._used[fork.fork_id] = _Used(fork, parent=sender, confirmed=False)
            self.unconfirmed += 1
            self._outbox.register(fork.owner, fork)

    def holds(self, held: Fork) -> bool:
        """May the program still use ``held``?"""
        used = self._used.get(held.fork_id)
        return used is not None and not used.dropped

    def confirmed(self, held: Fork) -> bool:
        used = self._used.get(held.fork_id)
        return used is not None and used.confirmed

    def add_child(self, held: Fork, child: Fork) -> None:
        """``child`` is about to be sent: ``held`` must outlive its journey."""
        used = self._used[held.fork_id]
        used.children += 1
        self._children[child.fork_id] = (child, used)

    def drop(self, fork_id: ForkId) -> None:
        """The program has no use for this fork any more; twice is once."""
        used = self._used.get(fork_id)
        if used is not None:
            used.dropped = True
            self._release_if_done(used)

    def _release_if_done(self, used: _Used) -> None:
        if used.dropped and used.confirmed and not used.children:
            fork = used.fork
            del self._used[fork.fork_id]
            self._outbox.release(fork.owner, (fork.ref, fork.fork_id))

    def on_creation_answered(self, event: CreationAnswered) -> None:
        """The owner has listed the fork before it answered."""
        used = self._used.get(event.fork.fork_id)
        if used is not None and not used.confirmed:
            used.confirmed = True
            self.unconfirmed -= 1
            if used.dropped:
                self._release_if_done(used)

    # --- messages ----------------------------------------------------------------------------------------

    def on_confirm(self, owner: int, forks: Iterable[Held]) -> None:
        for ref, fork_id in forks:
            used = self._used.get(fork_id)
            if used is not None:
                if not used.confirmed:
                    used.confirmed = True
                    self.unconfirmed -= 1
                    self._outbox.effects.append(Confirmed(used.fork))
                    self._accept(used)
                    self._release_if_done(used)
            elif fork_id in self._children:
                self.on_accept((fork_id,))  # registered from here, in the name of a dead receiver
            else:
                # A duplicate of Register came after the Release, and the owner lists the fork again: release
                # it again. If it was a dead receiver's it is not ours to release: the owner will not listen.
                self._outbox.release(owner, (ref, fork_id))

    def on_accept(self, forks: Iterable[ForkId]) -> None:
        for fork_id in forks:
            child = self._children.pop(fork_id, None)
            if child is not None:
                parent = child[1]
                parent.children -= 1
                self._release_if_done(parent)

    def _accept(self, used: _Used) -> None:
        if used.parent == self._me:
            self.on_accept((used.fork.fork_id,))
        elif used.parent is not None and used.parent not in self._dead:
            self._outbox.accept(used.parent, used.fork.fork_id)

    def unconfirmed_forks(self, owner: int) -> list[Fork]:
        """What ``owner`` may not have heard of. Not creations: those arrive by themselves, or are refused."""
        return [
            used.fork
            for used in self._used.values()
            if not used.confirmed and used.fork.owner == owner and used.parent is not None
        ]

    # --- members -----------------------------------------------------------------------------------------

    def member_died(self, member: int) -> None:
        for used in [used for used in self._used.values() if used.fork.owner == member]:
            del self._used[used.fork.fork_id]
            if not used.confirmed:
                self.unconfirmed -= 1
            if not used.dropped:
                self._outbox.effects.append(Lost(used.fork))
        for child, _ in list(self._children.values()):
            if child.owner == member:
                del self._children[child.fork_id]
            elif child.holder == member:
                # The receiver may have sent it on before it died. Only the owner can find out, so it gets the
                # fork to list, and ours is kept until it has.
                self._outbox.register(child.owner, child)

    # --- the end, and a look inside ----------------------------------------------------------------------

    def drop_all(self) -> None:
        for fork_id in list(self._used):
            self.drop(fork_id)

    @property
    def pending_children(self) -> int:
        return len(self._children)

    def snapshot(self) -> list[UsedSnapshot]:
        sent_to: dict[ForkId, list[int]] = {}
        for child, parent in self._children.values():
            sent_to.setdefault(parent.fork.fork_id, []).append(child.holder)
        return [
            UsedSnapshot(used.fork, used.confirmed, used.dropped, sent_to.get(fork_id, []))
            for fork_id, used in self._used.items()
        ]
