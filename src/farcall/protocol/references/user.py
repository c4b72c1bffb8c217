"""The user's side: forks held here of values that live elsewhere, and forks sent on to others.

Owns a record per fork held, the children (forks sent from here that nobody has accepted yet), and the forks that
destructors have given up. Knows nothing of the owner's listing. Invariant: a fork is released only when its owner is
known to have listed it and every child of it; so a Release never overtakes a registration, in whatever order
messages arrive.

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

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from farcall.ids import ForkId
from farcall.protocol.references.messages import (
    Accept,
    Confirmed,
    CreationAnswered,
    Fork,
    Held,
    Lost,
    Register,
    Release,
    UsedSnapshot,
)

if TYPE_CHECKING:
    from farcall.protocol.references.machine import Outbox


class _Used(msgspec.Struct, gc=False):
    """One fork held here. Mutable: ``confirmed``, ``dropped``, and the count of unaccepted ``children``."""

    fork: Fork
    parent: int | None  # the member to send Accept to; None: nobody waits for one
    confirmed: bool
    dropped: bool = False
    children: int = 0


class ReleasedForks:
    """Forks whose last Python reference died: ``__del__`` fills it on any thread, the machine drains it.

    ``append`` takes no lock, since a destructor may interrupt anything, the machine itself included. ``wake`` must
    be as harmless (write to an eventfd). It is called for the first fork after a drain, not for each, and again if
    Ctrl-C cut it.
    """

    __slots__ = ("_forks", "_signalled", "_wake")

    def __init__(self, wake: Callable[[], None] | None) -> None:
        self._forks: deque[Fork] = deque()
        self._signalled = False
        self._wake = wake

    def append(self, fork: Fork) -> None:
        self._forks.append(fork)
        if not self._signalled and self._wake is not None:
            try:
                self._signalled = True  # before the wake: else a drain in between would be lost
                self._wake()
            except BaseException:
                self._signalled = False
                raise

    def __len__(self) -> int:
        return len(self._forks)

    def drain(self) -> Iterator[Fork]:
        """Take the forks present now; a fork appended meanwhile calls ``wake`` again and waits for the next drain."""
        # Clear the flag before the first fork is taken: then an append that saw the flag set is counted below.
        self._signalled = False
        forks = self._forks
        for _ in range(len(forks)):
            yield forks.popleft()


class UserSide:
    """All forks held by ``me`` of other members' values. ``dead`` is the machine's set, only read here.

    Mutable: the forks held, the children sent from here, and the count of forks not confirmed yet.
    """

    __slots__ = ("_children", "_dead", "_me", "_outbox", "_used", "unconfirmed")

    def __init__(self, me: int, dead: set[int], outbox: Outbox) -> None:
        self._me = me
        self._dead = dead
        self._outbox = outbox
        self._used: dict[ForkId, _Used] = {}
        self._children: dict[ForkId, tuple[Fork, _Used]] = {}
        self.unconfirmed: int = 0  # the number of forks held that are not confirmed

    # --- forks come and go -------------------------------------------------------------------------------

    def hold_created(self, fork: Fork) -> None:
        """Hold ``fork``, whose creating call is about to be sent."""
        self._used[fork.fork_id] = _Used(fork, parent=None, confirmed=False)
        self.unconfirmed += 1

    def hold_received(self, fork: Fork, sender: int) -> None:
        """Hold ``fork``, which came from ``sender`` for the first time."""
        if sender == fork.owner:
            self._used[fork.fork_id] = _Used(fork, parent=None, confirmed=True)
        else:
            self._used[fork.fork_id] = _Used(fork, parent=sender, confirmed=False)
            self.unconfirmed += 1
            self._outbox.put(Register, fork.owner, fork)

    def holds(self, held: Fork) -> bool:
        """May the program still use ``held``?"""
        used = self._used.get(held.fork_id)
        return used is not None and not used.dropped

    def confirmed(self, held: Fork) -> bool:
        used = self._used.get(held.fork_id)
        return used is not None and used.confirmed

    def add_child(self, held: Fork, child: Fork) -> None:
        """Record ``child``, which is about to be sent: ``held`` must live until it is accepted."""
        used = self._used[held.fork_id]
        used.children += 1
        self._children[child.fork_id] = (child, used)

    def drop(self, fork_id: ForkId) -> None:
        """Mark a fork as unused by the program. Idempotent."""
        used = self._used.get(fork_id)
        if used is not None:
            used.dropped = True
            self._release_if_done(used)

    def _release_if_done(self, used: _Used) -> None:
        if used.dropped and used.confirmed and not used.children:
            fork = used.fork
            del self._used[fork.fork_id]
            self._outbox.put(Release, fork.owner, (fork.ref, fork.fork_id))

    def on_creation_answered(self, event: CreationAnswered) -> None:
        """Confirm the fork of an answered creation: the owner listed it before it answered."""
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
                self.on_accept((fork_id,))  # this member registered it, in the name of a dead receiver
            else:
                # A duplicate Register arrived after the Release, and the owner lists the fork again: release it
                # again. If the fork was a dead receiver's, the owner ignores this Release: we are not its holder.
                self._outbox.put(Release, owner, (ref, fork_id))

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
            self._outbox.put(Accept, used.parent, used.fork.fork_id)

    def unconfirmed_forks(self, owner: int) -> list[Fork]:
        """The forks that ``owner`` may not have heard of. Not creations: their requests arrive, or are refused."""
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
                # The receiver may have sent the fork on before it died. Only the owner can find out: register the
                # fork in the receiver's name, and keep ours until the owner confirms.
                self._outbox.put(Register, child.owner, child)

    # --- the end, and a look inside ----------------------------------------------------------------------

    def drop_all(self, kept: Container[ForkId] = ()) -> None:
        for fork_id in list(self._used):
            if fork_id not in kept:
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
