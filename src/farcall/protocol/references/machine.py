"""One member's reference machine: whatever a program, a peer or a destructor does to a reference comes here.

Owns numbering, duplicate suppression, batching time and dispatch; what a fork means is decided in ``owner`` and
``user``. Has no clock, thread, socket or value. Not thread-safe: one lock around it, by the caller, except for
``released.append``.

Events go in and effects come out, as in every machine here (``handle``, ``next_deadline``, ``handle_deadline``). Where
a fork is made or taken, its caller needs the answer before it can go on: ``create``, ``own_local``, ``own``, ``fork``
and ``receive`` give it at once, and leave their effects, which are few, to ``handle_deadline``; ``has_news`` says
whether there are any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from farcall.ids import ForkId, RefId
from farcall.protocol.references.messages import (
    Accept,
    AllDropped,
    Answer,
    Confirm,
    Counts,
    CreationAnswered,
    CreationWithdrawn,
    Dropped,
    Effect,
    Event,
    Farewell,
    Fork,
    ForkWithdrawn,
    Inquire,
    Lost,
    MemberDied,
    MemberJoined,
    Received,
    Register,
    Release,
    Send,
    Snapshot,
    Withdraw,
)
from farcall.protocol.references.outbox import Outbox, ReleasedForks
from farcall.protocol.references.owner import OwnerSide
from farcall.protocol.references.user import UserSide


class _Arrivals:
    """Which numbers of one way have arrived: a run from 1, and those ahead of it, until gaps fill."""

    __slots__ = ("ahead", "last")

    def __init__(self) -> None:
        self.last = 0
        self.ahead: set[int] = set()

    def add(self, number: int) -> bool:
        """Note ``number``; False if it was noted before."""
        if number == self.last + 1:
            self.last = number
            while self.ahead and self.last + 1 in self.ahead:
                self.last += 1
                self.ahead.remove(self.last)
            return True
        if number <= self.last or number in self.ahead:
            return False
        self.ahead.add(number)
        return True


class References:
    """The references of member ``me`` (an incarnation) among ``members``.

    ``wake`` is called by ``released.append``, on any thread: it must only cause a ``handle_deadline`` soon.
    """

    def __init__(
        self,
        me: int,
        members: Iterable[int] = (),
        *,
        linger_s: float = 0.005,
        batch_forks: int = 1024,
        wake: Callable[[], None] | None = None,
        gap: Callable[[], int] | None = None,
    ) -> None:
        """``gap``: what to leave out before the next reference's number, so that others do not guess it."""
        self.me = me
        self._gap = gap
        self.released: ReleasedForks = ReleasedForks() if wake is None else ReleasedForks(wake)
        self._linger_s = linger_s
        self._batch_forks = batch_forks
        self._linger_until: float | None = None
        self._live = set(members) - {me}
        self._dead: set[int] = set()
        self._outbox = Outbox()
        self._owner = owner = OwnerSide(me, self._live, self._dead, self._outbox)
        self._user = user = UserSide(me, self._dead, self._outbox)
        self._next_id = 0  # of references and forks alike, so that either can be told from the other in a log
        self._last_number: dict[int, int] = {}  # by receiver
        self._arrivals: dict[int, _Arrivals] = {}  # by sender
        self._on_event: dict[type[Event], Callable[[Any], None]] = {
            Received: self._on_received,
            MemberJoined: self._on_joined,
            MemberDied: lambda event: self._bury((event.member,)),
            CreationAnswered: user.on_creation_answered,
            CreationWithdrawn: self._on_creation_withdrawn,
            ForkWithdrawn: self._on_fork_withdrawn,
            Dropped: lambda event: self._drop(event.fork),
            AllDropped: self._on_all_dropped,
        }
        self._on_message: dict[type[Any], Callable[[int, Any], None]] = {
            Release: lambda sender, message: owner.on_release(sender, message.forks),
            Confirm: lambda sender, message: user.on_confirm(sender, message.forks),
            Accept: lambda sender, message: user.on_accept(message.forks),
            Register: lambda sender, message: owner.on_register(sender, message.forks),
            Withdraw: lambda sender, message: self._on_withdraw(sender, message.forks),
            Inquire: self._on_inquire,
            Answer: lambda sender, message: owner.on_answer(sender, message.round, message.forks),
            Farewell: lambda sender, message: None,
        }

    # --- the machine's shape -----------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what to do about it, and about what has lingered long enough."""
        self._on_event[type(event)](event)
        outbox = self._outbox
        return self.handle_deadline(now) if outbox.effects or outbox.urgent or outbox.lazy else []

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due, as far as it is known since the last effects."""
        return self._linger_until

    def handle_deadline(self, now: float) -> list[Effect]:
        """What is to be done now. Forks from destructors join when lingering ends, or when they are many."""
        outbox = self._outbox
        lingering = outbox.lazy + len(self.released)
        if not lingering:
            self._linger_until = None  # what lingered was for a member that died
            return outbox.take(everything=False)
        if self._linger_until is None:
            self._linger_until = now + self._linger_s
        if now < self._linger_until and lingering < self._batch_forks:
            return outbox.take(everything=False)
        for fork in self.released.drain():
            self._drop(fork)
        self._linger_until = None
        return outbox.take(everything=True)

    @property
    def has_news(self) -> bool:
        """Would ``handle_deadline`` return something, or set a deadline?"""
        outbox = self._outbox
        return bool(outbox.effects or outbox.urgent or (outbox.lazy and self._linger_until is None))

    # --- a reference is made -----------------------------------------------------------------------------

    def own_local(self) -> Fork:
        """``RRef(value)``, or ``remote`` to oneself: a new reference, and this member's fork of it."""
        number = self._next_id if self._gap is None else self._next_id + self._gap()
        self._next_id = number + 1
        # The creator's own fork is named like the reference: one number for ``RRef(value)``, as programs expect.
        fork = Fork(RefId(self.me, number), ForkId(self.me, number), self.me, self.me, number=0)
        self._owner.list_created(fork)
        return fork

    def create(self, owner: int) -> Fork:
        """``remote`` to another member: send the result with the request, hold it from now on."""
        if owner == self.me:
            return self.own_local()
        number = self._next_id if self._gap is None else self._next_id + self._gap()
        self._next_id = number + 1
        fork = self._new_fork(RefId(self.me, number), owner, holder=self.me, receiver=owner)
        if owner in self._live:
            self._user.hold_created(fork)
        else:
            self._outbox.effects.append(Lost(fork))
        return fork

    def own(self, fork: Fork) -> bool:
        """At the owner: a creating request came. False: do not run it (a duplicate, or its caller died)."""
        if fork.holder not in self._live or not self._arrived(fork.holder, fork.number):
            return False
        self._owner.list_created(fork)
        return True

    # --- a reference travels -----------------------------------------------------------------------------

    def fork(self, held: Fork, to: int) -> Fork:
        """A fork of ``held``, to be sent to ``to`` now. LookupError if ``held`` is lost or was dropped."""
        owned = held.owner == self.me
        if owned and not self._owner.holds(held):
            raise LookupError(f"{held.ref} is not held here any more")
        if not owned and not self._user.holds(held):
            raise LookupError(f"{held.ref} is no longer held here: its owner died, or it was dropped")
        child = self._new_fork(held.ref, held.owner, holder=to, receiver=to)
        # What is sent to the dead goes nowhere, so nothing needs to be kept for it.
        if to in self._live or to == self.me:
            if owned:
                self._owner.list_fork(child)
            else:
                self._user.add_child(held, child)
        return child

    def receive(self, fork: Fork, sender: int) -> bool:
        """A fork arrived from ``sender``. Each True needs one ``Dropped`` or ``released.append`` some day.

        False: a duplicate; or ``sender`` or the owner is dead, and every use of it is ``ReferenceLost``.
        """
        if not self._reaches(sender) or not self._arrived(sender, fork.number) or not self._reaches(fork.owner):
            return False
        if fork.owner != self.me:
            self._user.hold_received(fork, sender)
        elif sender != self.me:
            self._owner.list_fork(fork)
            self._outbox.accept(sender, fork.fork_id)
        return True

    def _reaches(self, member: int) -> bool:
        # Not "is not dead": a newcomer was never told of members that died before it came.
        return member in self._live or member == self.me

    def _new_fork(self, ref: RefId, owner: int, *, holder: int, receiver: int) -> Fork:
        """The next fork on the way to ``receiver``."""
        fork_id = ForkId(self.me, self._next_id)
        self._next_id += 1
        number = self._last_number[receiver] = self._last_number.get(receiver, 0) + 1
        return Fork(ref, fork_id, owner, holder, number)

    def _arrived(self, sender: int, number: int) -> bool:
        arrivals = self._arrivals.get(sender)
        if arrivals is None:
            arrivals = self._arrivals[sender] = _Arrivals()
        return arrivals.add(number)

    # --- events ------------------------------------------------------------------------------------------

    def _drop(self, fork: Fork) -> None:
        if fork.owner == self.me:
            self._owner.strike_off(self.me, fork.ref, fork.fork_id)
        else:
            self._user.drop(fork.fork_id)

    def _on_all_dropped(self, event: AllDropped) -> None:
        for fork in self.released.drain():
            self._drop(fork)
        self._user.drop_all()
        self._owner.drop_local()
        if self._outbox.lazy:
            self._linger_until = -math.inf  # this node ends: nothing waits for company any more

    def _on_creation_withdrawn(self, event: CreationWithdrawn) -> None:
        if event.fork.owner in self._live:
            self._outbox.withdraw(event.fork.owner, event.fork)

    def _on_fork_withdrawn(self, event: ForkWithdrawn) -> None:
        fork = event.fork
        if fork.holder == self.me:
            self._on_withdraw(self.me, (fork,))
        elif fork.holder in self._live:
            self._outbox.withdraw(fork.holder, fork)

    def _on_joined(self, event: MemberJoined) -> None:
        member = event.member
        if member != self.me and member not in self._dead and member not in self._live:
            self._live.add(member)
            self._owner.member_joined(member)

    def _bury(self, members: Iterable[int]) -> None:
        for member in members:
            if member in self._dead or member == self.me:
                continue
            self._dead.add(member)
            self._live.discard(member)
            self._arrivals.pop(member, None)
            self._last_number.pop(member, None)
            self._outbox.forget_member(member)
            self._user.member_died(member)
            self._owner.member_died(member)

    # --- messages ----------------------------------------------------------------------------------------

    def _on_received(self, event: Received) -> None:
        if event.sender in self._live:
            self._on_message[type(event.message)](event.sender, event.message)

    def _on_inquire(self, sender: int, message: Inquire) -> None:
        self._bury(message.dead)
        answer = Answer(message.round, self._user.unconfirmed_forks(sender))
        self._outbox.effects.append(Send(sender, answer))

    def _on_withdraw(self, sender: int, forks: Iterable[Fork]) -> None:
        for fork in forks:
            first = self._arrived(sender, fork.number)
            if fork.holder != self.me:
                # A creation. If it did arrive, its response may be what was lost: say that it is listed.
                if first:
                    self._owner.list_never_created(fork)
                self._outbox.confirm(sender, fork)
            elif first and fork.owner == sender == self.me:
                self._owner.strike_off(self.me, fork.ref, fork.fork_id)
            elif first and fork.owner == sender:
                self._outbox.release(sender, (fork.ref, fork.fork_id))
            elif first:
                if sender == self.me:
                    self._user.on_accept((fork.fork_id,))
                else:
                    self._outbox.accept(sender, fork.fork_id)

    # --- questions ---------------------------------------------------------------------------------------

    def holds(self, fork: Fork) -> bool:
        """Is ``fork`` held here, and its owner alive?"""
        return self._owner.holds(fork) if fork.owner == self.me else self._user.holds(fork)

    def confirmed_by_owner(self, fork: Fork) -> bool:
        """Does the owner know that ``fork`` is held here?"""
        return self._owner.holds(fork) if fork.owner == self.me else self._user.confirmed(fork)

    def lists(self, ref: RefId) -> bool:
        """Does anybody refer to ``ref``, of which this member is the owner? Its creation may still be on its way."""
        return self._owner.lists(ref)

    @property
    def unsettled(self) -> int:
        """Forks that wait for a message of another member before they can be released."""
        return self._user.unconfirmed + self._user.pending_children

    def counts(self) -> Counts:
        snapshot = self.snapshot()
        owned, used = snapshot.owned, snapshot.used
        elsewhere = [sum(n for holder, n in o.forks_by_holder.items() if holder != self.me) for o in owned]
        return Counts(
            owned=len(owned),
            owners=sum(1 for n in elsewhere if n),
            forks=sum(elsewhere),
            users=len(used),
            pending_users=sum(1 for u in used if not u.confirmed),
            pending_children=self._user.pending_children,
        )

    def snapshot(self) -> Snapshot:
        """Who holds what, as known here."""
        return Snapshot(self._owner.snapshot(), self._user.snapshot())
