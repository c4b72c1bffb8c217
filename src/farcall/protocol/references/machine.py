"""One member's reference machine: the entry point for everything that programs, peers and destructors do to references.

Owns numbering, duplicate suppression, batching and dispatch; ``owner`` and ``user`` decide what a fork means.
Has no clock, thread, socket or value. Not thread-safe: the caller holds one lock around it, except for
``released.append``.

Events go in and effects come out, as in every machine here (``handle``, ``next_deadline``, ``handle_deadline``). Code
that makes or takes a fork needs the answer before it can go on: ``create``, ``own_local``, ``own``, ``fork`` and
``receive`` return it at once, and leave their effects, which are few, to ``handle_deadline``; ``has_news`` says
whether there are any.

Over 400 lines: every verb and message of one machine.
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
    Held,
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
from farcall.protocol.references.owner import OwnerSide
from farcall.protocol.references.user import ReleasedForks, UserSide

MAX_FORKS_PER_MESSAGE = 1024  # about 40 KiB
_URGENT = (Register, Withdraw, Confirm)
_LAZY = (Accept, Release)
"""Messages that only let something be freed: they linger, to be batched. Urgent ones leave with the next effects."""


class Outbox:
    """Pending effects in order, and messages in batches: many forks for one member travel as one message."""

    __slots__ = ("_waiting", "effects", "lazy", "urgent")

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.lazy: int = 0  # how many forks linger
        self.urgent: bool = False  # do messages wait that must not linger?
        self._waiting: dict[type[Any], dict[int, list[Any]]] = {kind: {} for kind in (*_URGENT, *_LAZY)}

    def put(self, kind: type[Any], member: int, entry: Fork | ForkId | Held) -> None:
        """Add ``entry`` to the next message of that kind to ``member``."""
        self._waiting[kind].setdefault(member, []).append(entry)
        if kind in _LAZY:
            self.lazy += 1
        else:
            self.urgent = True

    def forget_member(self, member: int) -> None:
        """Drop everything that waits for a dead member."""
        for kind, waiting in self._waiting.items():
            forgotten = waiting.pop(member, ())
            if kind in _LAZY:
                self.lazy -= len(forgotten)
        self.effects = [e for e in self.effects if type(e) is not Send or e.member != member]

    def take(self, everything: bool) -> list[Effect]:
        """Take the effects that are due; with ``everything`` also the lingering messages."""
        if self.urgent:
            self.urgent = False
            self._seal(_URGENT)
        if everything and self.lazy:
            self.lazy = 0
            self._seal(_LAZY)
        effects = self.effects
        if effects:
            self.effects = []
        return effects

    def _seal(self, kinds: Iterable[type[Any]]) -> None:
        for kind in kinds:
            for member, forks in self._waiting[kind].items():
                for start in range(0, len(forks), MAX_FORKS_PER_MESSAGE):
                    self.effects.append(Send(member, kind(forks[start : start + MAX_FORKS_PER_MESSAGE])))
            self._waiting[kind].clear()


class _Arrivals:
    """The fork numbers that arrived from one sender: a run from 1, and those ahead of it until gaps close."""

    __slots__ = ("ahead", "last")

    def __init__(self) -> None:
        self.last = 0
        self.ahead: set[int] = set()

    def add(self, number: int) -> bool:
        """Record ``number``; False if it is a duplicate."""
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

    ``released.append`` calls ``wake``, on any thread: it must only schedule a ``handle_deadline``.
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
        """``gap``: how many numbers to skip before the next reference's, so that peers cannot guess it."""
        self.me = me
        self._gap = gap
        self.released: ReleasedForks = ReleasedForks(wake)
        self._linger_s = linger_s
        self._batch_forks = batch_forks
        self._linger_until: float | None = None
        self._live = set(members) - {me}
        self._dead: set[int] = set()
        self._outbox = Outbox()
        self._owner = owner = OwnerSide(me, self._live, self._dead, self._outbox)
        self._user = user = UserSide(me, self._dead, self._outbox)
        self._next_id = 0  # shared by references and forks, so that a number in a log is unambiguous
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
        """Take one event; return its effects, and the messages that have lingered long enough."""
        self._on_event[type(event)](event)
        outbox = self._outbox
        return self.handle_deadline(now) if outbox.effects or outbox.urgent or outbox.lazy else []

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due, as of the last effects."""
        return self._linger_until

    def handle_deadline(self, now: float) -> list[Effect]:
        """Return the effects that are due. Forks from destructors join when lingering ends, or when they are many."""
        outbox = self._outbox
        lingering = outbox.lazy + len(self.released)
        if not lingering:
            self._linger_until = None  # the lingering messages were for a member that died
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
        """``remote`` to another member: a fork to send with the request, held here from now on."""
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
        """At the owner: take a creating request. False: do not run it (a duplicate, or its caller died)."""
        if fork.holder not in self._live or not self._arrived(fork.holder, fork.number):
            return False
        self._owner.list_created(fork)
        return True

    # --- a reference travels -----------------------------------------------------------------------------

    def fork(self, held: Fork, to: int) -> Fork:
        """Fork ``held``, to be sent to ``to`` now. LookupError if ``held`` is lost or was dropped."""
        owned = held.owner == self.me
        if owned and not self._owner.holds(held):
            raise LookupError(f"{held.ref} is not held here any more")
        if not owned and not self._user.holds(held):
            raise LookupError(f"{held.ref} is no longer held here: its owner died, or it was dropped")
        child = self._new_fork(held.ref, held.owner, holder=to, receiver=to)
        # A fork for a dead member never arrives, so nothing is kept for it.
        if to in self._live or to == self.me:
            if owned:
                self._owner.list_fork(child, self.me)
            else:
                self._user.add_child(held, child)
        return child

    def receive(self, fork: Fork, sender: int) -> bool:
        """Take a fork that arrived from ``sender``. Each True needs one ``Dropped`` or ``released.append`` later.

        False: a duplicate; or ``sender`` or the owner is dead or unknown, or too many values are awaited here. Every
        use raises ``ReferenceLost``.
        """
        if not self._reaches(sender) or not self._arrived(sender, fork.number):
            return False
        if not self._reaches(fork.owner):
            # Dead; or alive, and nobody has announced it here: then the sender would keep its own fork for ever.
            if sender != self.me:
                self._outbox.put(Accept, sender, fork.fork_id)
            return False
        if fork.owner != self.me:
            self._user.hold_received(fork, sender)
        elif sender != self.me:
            self._outbox.put(Accept, sender, fork.fork_id)
            return self._owner.list_fork(fork, sender)
        return True

    def _reaches(self, member: int) -> bool:
        # Not "is not dead": a newcomer never hears of members that died before it joined.
        return member in self._live or member == self.me

    def _new_fork(self, ref: RefId, owner: int, *, holder: int, receiver: int) -> Fork:
        """Make a fork with the next number for ``receiver``."""
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
        self._user.drop_all(event.kept)
        self._owner.drop_local()
        if self._outbox.lazy:
            self._linger_until = -math.inf  # this node ends: flush the lingering messages at once

    def _on_creation_withdrawn(self, event: CreationWithdrawn) -> None:
        if event.fork.owner in self._live:
            self._outbox.put(Withdraw, event.fork.owner, event.fork)

    def _on_fork_withdrawn(self, event: ForkWithdrawn) -> None:
        fork = event.fork
        if fork.holder == self.me:
            self._on_withdraw(self.me, (fork,))
        elif fork.holder in self._live:
            self._outbox.put(Withdraw, fork.holder, fork)

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
                # A creation. If it did arrive, its response may have been lost: Confirm says that it is listed.
                if first:
                    self._owner.list_never_created(fork, sender)
                self._outbox.put(Confirm, sender, (fork.ref, fork.fork_id))
            elif first and fork.owner == sender == self.me:
                self._owner.strike_off(self.me, fork.ref, fork.fork_id)
            elif first and fork.owner == sender:
                self._outbox.put(Release, sender, (fork.ref, fork.fork_id))
            elif first:
                if sender == self.me:
                    self._user.on_accept((fork.fork_id,))
                else:
                    self._outbox.put(Accept, sender, fork.fork_id)

    # --- questions ---------------------------------------------------------------------------------------

    def holds(self, fork: Fork) -> bool:
        """Is ``fork`` held here, and its owner alive?"""
        return self._owner.holds(fork) if fork.owner == self.me else self._user.holds(fork)

    def confirmed_by_owner(self, fork: Fork) -> bool:
        """Does the owner know that ``fork`` is held here?"""
        return self._owner.holds(fork) if fork.owner == self.me else self._user.confirmed(fork)

    def lists(self, ref: RefId) -> bool:
        """Does anyone refer to ``ref``, which this member owns? Its creation may still be in transit."""
        return self._owner.lists(ref)

    @property
    def unsettled(self) -> int:
        """Forks that need a message from another member before they can be released."""
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
