"""One member's reference machine: whatever a program, a peer or a destructor does to a reference comes here.

Owns numbering, duplicate suppression, batching time and dispatch; what a fork means is decided in ``owner``
and ``user``. Has no clock, thread, socket or value. Not thread-safe: one lock around it, by the caller,
except for ``released.append``. Invariant: no method loses an effect; each leaves through the next
``collect``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from farcall.ids import ForkId, RefId
from farcall.protocol.references.messages import (
    Accept,
    Answer,
    Confirm,
    Counts,
    Effect,
    Fork,
    Inquire,
    Lost,
    Message,
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
    """The references of member ``me`` (an incarnation id) among ``members``.

    Methods that take no ``now`` leave their effects for the next ``collect(now)``; the others return them.
    ``wake`` is called by ``released.append``, on any thread: it must only cause a ``collect`` soon.
    """

    def __init__(
        self,
        me: int,
        members: Iterable[int] = (),
        *,
        linger_s: float = 0.005,
        batch_forks: int = 1024,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.me = me
        self.released: ReleasedForks = ReleasedForks() if wake is None else ReleasedForks(wake)
        self._linger_s = linger_s
        self._batch_forks = batch_forks
        self._linger_until: float | None = None
        self._live = set(members) - {me}
        self._dead: set[int] = set()
        self._outbox = Outbox()
        self._owner = OwnerSide(me, self._live, self._dead, self._outbox)
        self._user = UserSide(me, self._dead, self._outbox)
        self._next_id = 0  # of references and forks alike, so that either can be told from the other in a log
        self._last_number: dict[int, int] = {}  # by receiver
        self._arrivals: dict[int, _Arrivals] = {}  # by sender

    # --- a reference is made -----------------------------------------------------------------------------

    def own_local(self) -> Fork:
        """``RRef(value)``, or ``remote`` to oneself: a new reference, and this member's fork of it."""
        ref = self._new_ref()
        # The creator's own fork is named like the reference: one number for ``RRef(value)``, as programs expect.
        fork = Fork(ref, ForkId(self.me, ref.local_id), self.me, self.me, number=0)
        self._owner.list_created(fork)
        return fork

    def create(self, owner: int) -> Fork:
        """``remote`` to another member: send the result with the request, hold it from now on."""
        if owner == self.me:
            return self.own_local()
        fork = self._new_fork(self._new_ref(), owner, self.me, self._number(owner))
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

    def confirm_created(self, fork: Fork) -> None:
        """The creating call was answered, by a value or an error. Not for timeouts: it may still be."""
        self._user.confirm_created(fork)

    # --- a reference travels -----------------------------------------------------------------------------

    def fork(self, held: Fork, to: int) -> Fork:
        """A fork of ``held``, to be sent to ``to`` now. LookupError if ``held`` is lost or was dropped."""
        if held.owner == self.me:
            if not self._owner.holds(held):
                raise LookupError(f"{held.ref} is not held here any more")
            child = self._new_fork(held.ref, self.me, to, self._number(to))
            if self._reaches(to):
                self._owner.list_fork(child)
            return child
        if not self._user.holds(held):
            raise LookupError(f"{held.ref} is not held here any more: its owner died, or it was dropped")
        child = self._new_fork(held.ref, held.owner, to, self._number(to))
        # What is sent to the dead goes nowhere, so nothing needs to be kept for it.
        if self._reaches(to):
            self._user.add_child(held, child)
        return child

    def receive(self, fork: Fork, sender: int) -> bool:
        """A fork arrived from ``sender``. Each True needs one ``drop`` or ``released.append`` some day.

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

    def withdraw(self, fork: Fork) -> None:
        """A fork was not sent, or its link broke and nobody knows whether it arrived.

        The receiver settles it, so that neither it nor the numbers after it wait for what never comes.
        """
        if fork.holder == self.me:
            self._on_withdraw(self.me, (fork,))
        elif fork.holder in self._live:
            self._outbox.withdraw(fork.holder, fork)

    def withdraw_creation(self, fork: Fork) -> None:
        """The same for a creating request: if it has not arrived it never runs, and its value is an error."""
        if fork.owner in self._live:
            self._outbox.withdraw(fork.owner, fork)

    # --- a reference ends --------------------------------------------------------------------------------

    def drop(self, fork: Fork) -> None:
        """The program has no use for ``fork`` any more. From destructors: ``released.append(fork)``."""
        if fork.owner == self.me:
            self._owner.strike_off(self.me, fork.ref, fork.fork_id)
        else:
            self._user.drop(fork.fork_id)

    def drop_all_users_and_unforked_owners(self) -> list[Effect]:
        """For shutdown: give up every fork held here; values that no other member refers to are freed."""
        self._user.drop_all()
        self._owner.drop_local()
        return self.flush()

    # --- events with effects -----------------------------------------------------------------------------

    def handle(self, sender: int, message: Message, now: float) -> list[Effect]:
        """A message arrived from ``sender``; for the first time or not, in order or not."""
        if sender in self._live:
            self._dispatch(sender, message)
        return self.collect(now)

    def member_joined(self, member: int) -> None:
        """To be told before ``member`` can be sent any fork by anyone."""
        if member != self.me and member not in self._dead and member not in self._live:
            self._live.add(member)
            self._owner.member_joined(member)

    def member_died(self, member: int, now: float) -> list[Effect]:
        """``member`` is gone for good: nothing from it is taken any more. To be told to every live member."""
        self._bury((member,))
        return self.collect(now)

    def collect(self, now: float) -> list[Effect]:
        """What is to be done now. Forks from destructors join when lingering ends, or when they are many."""
        lingering = self._outbox.lazy + len(self.released)
        if not lingering:
            self._linger_until = None  # what lingered was for a member that died
            return self._outbox.take(everything=False)
        if self._linger_until is None:
            self._linger_until = now + self._linger_s
        if now >= self._linger_until or lingering >= self._batch_forks:
            return self.flush()
        return self._outbox.take(everything=False)

    def flush(self) -> list[Effect]:
        """Like ``collect``, and nothing lingers."""
        for fork in self.released.drain():
            self.drop(fork)
        self._linger_until = None
        return self._outbox.take(everything=True)

    @property
    def has_news(self) -> bool:
        """Would ``collect`` return something, or set a deadline?"""
        return self._outbox.waits(lazily=self._linger_until is None)

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` is due, as of the last ``collect``."""
        return self._linger_until

    def handle_deadline(self, now: float) -> list[Effect]:
        return self.collect(now)

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
        owned, used = self.snapshot()
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

    # --- inside ------------------------------------------------------------------------------------------

    def _reaches(self, member: int) -> bool:
        # Not "is not dead": a newcomer was never told of those who died before it came.
        return member in self._live or member == self.me

    def _new_fork(self, ref: RefId, owner: int, holder: int, number: int) -> Fork:
        self._next_id += 1
        return Fork(ref, ForkId(self.me, self._next_id - 1), owner, holder, number)

    def _new_ref(self) -> RefId:
        self._next_id += 1
        return RefId(self.me, self._next_id - 1)

    def _number(self, receiver: int) -> int:
        number = self._last_number[receiver] = self._last_number.get(receiver, 0) + 1
        return number

    def _arrived(self, sender: int, number: int) -> bool:
        arrivals = self._arrivals.get(sender)
        if arrivals is None:
            arrivals = self._arrivals[sender] = _Arrivals()
        return arrivals.add(number)

    def _dispatch(self, sender: int, message: Message) -> None:
        match message:
            case Release(forks):
                self._owner.on_release(sender, forks)
            case Confirm(forks):
                self._user.on_confirm(sender, forks)
            case Accept(forks):
                self._user.on_accept(forks)
            case Register(forks):
                self._owner.on_register(sender, forks)
            case Withdraw(forks):
                self._on_withdraw(sender, forks)
            case Inquire(round_number, dead):
                self._bury(dead)
                answer = Answer(round_number, self._user.unconfirmed_forks(sender))
                self._outbox.effects.append(Send(sender, answer))
            case Answer(round_number, forks):
                self._owner.on_answer(sender, round_number, forks)

    def _on_withdraw(self, sender: int, forks: Iterable[Fork]) -> None:
        for fork in forks:
            first = self._arrived(sender, fork.number)
            if fork.holder != self.me:
                # A creation. If it did arrive, its response may be what was lost: say that it is listed.
                if first:
                    self._owner.list_never_created(fork)
                self._outbox.confirm(sender, fork)
            elif first and fork.owner == sender:
                self._release_unreceived(sender, fork)
            elif first:
                if sender == self.me:
                    self._user.on_accept((fork.fork_id,))
                else:
                    self._outbox.accept(sender, fork.fork_id)

    def _release_unreceived(self, owner: int, fork: Fork) -> None:
        if owner == self.me:
            self._owner.strike_off(owner, fork.ref, fork.fork_id)
        else:
            self._outbox.release(owner, (fork.ref, fork.fork_id))

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
