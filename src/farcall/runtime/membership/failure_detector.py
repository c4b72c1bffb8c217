"""Failure detection: drives the membership machine with the events of this node.

Owns the machine and its timer. The machine decides; the peer table (`table.py`) carries out its effects: it makes, uses
and ends links. Everything here runs on the I/O thread, unless a docstring says otherwise.

Before each deadline of the machine this file reports which links have brought bytes since the last one (``Heard``), and
whether the hosts of unresponsive members answer (``HostSeen``). That costs a look at every link per deadline, and
nothing per frame. A heartbeat thread in each member was rejected: it could not run while other code holds the GIL. The
kernel of a member's host speaks for it instead.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Protocol

from farcall.options import RpcBackendOptions
from farcall.protocol.member import Member
from farcall.protocol.membership import events
from farcall.protocol.membership.events import MembershipOptions
from farcall.protocol.membership.machine import MembershipMachine, State
from farcall.protocol.membership.messages import Gossip, Message, Status, Update
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.sigint import Gate
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.link import Link
from farcall.serialize.allowance import INSTALLED

logger: logging.Logger = logging.getLogger("farcall")


ACCUSERS = 2
"""How many members have to say that another is dead, in a group whose members do not trust each other with code."""


def chosen(options: RpcBackendOptions) -> MembershipOptions:
    """The user's options for failure detection."""
    return MembershipOptions(
        options.membership.probe_interval_s,
        options.membership.probe_timeout_s,
        options.membership.suspicion_s,
        options.membership.indirect_probes,
        unresponsive_s=options.membership.unresponsive_s,
        full_mesh=options.membership.full_mesh,
        accusers=1 if INSTALLED.allowance is None else ACCUSERS,
        name_kept_s=0.0 if INSTALLED.allowance is None else options.membership.reconnect_s,
    )


class Reach(Protocol):
    """Carries out the machine's effects; on the I/O thread, without waiting."""

    def send_news(self, incarnation: int, message: Message) -> None:
        """Send ``message`` if that incarnation can be reached."""

    def links(self) -> Iterator[tuple[int, Link]]:
        """All links, each with the incarnation of its peer."""

    def host_answers(self, incarnation: int) -> bool:
        """Did the kernel of an unresponsive member's host answer at the last attempt?"""

    def on_joined(self, member: Member, *, was_there: bool = False) -> None: ...

    def on_admitted(self) -> None: ...

    def on_unresponsive(self, member: Member, unresponsive: bool) -> None: ...

    def on_silent(self, incarnation: int) -> None: ...

    def on_left(self, member: Member, why: str) -> None: ...

    def on_died(self, member: Member, why: str) -> None: ...

    def on_expelled(self, why: str) -> None: ...


class FailureDetector:
    """This node's part in the membership protocol."""

    def __init__(
        self,
        me: Member,
        members: Iterable[Member] | None,
        options: MembershipOptions,
        loop: Loop,
        reach: Reach,
        *,
        is_fixed: bool,
    ) -> None:
        """``members``: the first members; None: this node has to join. ``is_fixed``: a group of fixed size."""
        # Mutable: the machine (replaced by `found`), bytes heard per link, the two flags, and the public fields.
        self._options = options
        self._machine = MembershipMachine(me, members, options, random.Random(), monotonic(), is_fixed=is_fixed)
        self._loop = loop
        self._timer = loop.timer(self._do_due)
        self._reach = reach
        self._received: dict[int, tuple[Link, float]] = {}
        self._running = False
        self._stopped = False
        self._settled = Gate()
        self.agreed_to_leave: bool = False
        """Have all members agreed to leave? Then the group admits nobody."""
        self.refused: events.Refused | None = None
        self.expelled_by: int = 0
        """The incarnation that told this node of its death; 0: unknown."""

    # ------------------------------------------------------------------ from other threads

    def begin(self) -> None:
        """All links stand: start the machine's timer. From any thread."""
        self._running = True
        self._timer.at(0.0)

    def join_through(
        self, incarnation: int, former: tuple[Member, ...], timeout_s: float, is_lost: Callable[[], bool]
    ) -> bool:
        """Ask ``incarnation``, over an existing link, to let this node in; False: not admitted in time, or refused.

        ``former``: members that this node knew in its former membership. Raises nothing: see ``refused``. From the
        thread that starts the node.
        """
        deadline = monotonic() + timeout_s
        self.begin()
        self._loop.call_soon(lambda: self.feed(events.LocalJoin(incarnation, former)))
        while not self.belongs and self.refused is None:
            remaining_s = deadline - monotonic()
            if remaining_s <= 0 or is_lost():
                break
            self._settled.wait(min(0.05, remaining_s))
        return self.belongs

    def found(self) -> None:
        """No member exists to ask: become the first member of a group. On the I/O thread."""
        self._running = False  # until `begin`, as for the first members of any group
        me = self.me
        self._machine = MembershipMachine(me, [me], self._options, random.Random(), monotonic())
        self._received = {}

    @property
    def belongs(self) -> bool:
        """Is this node a member, perhaps a leaving one?"""
        return self._machine.state in (State.MEMBER, State.LEAVING)

    @property
    def is_leaving(self) -> bool:
        """Does this node leave, and tell the others so?"""
        return self._machine.state is State.LEAVING

    def leave(self, timeout_s: float) -> None:
        """Tell the others that this node leaves, and wait until they know. From the thread that shuts down."""
        self._loop.call_soon(lambda: self.feed(events.LocalLeave()))
        deadline = monotonic() + timeout_s
        while self.belongs and monotonic() < deadline:
            self._settled.wait(0.05)

    def stop(self) -> None:
        """Feed the machine no more events and deadlines. From any thread."""
        self._running = False
        self._stopped = True

    def is_member(self, incarnation: int) -> bool:
        """Is ``incarnation`` a known member, neither dead nor gone? From any thread."""
        status = self.status_of(incarnation)
        return status is not None and status < Status.DEAD

    @property
    def is_guarded(self) -> bool:
        """May members be hostile to each other? From any thread."""
        return self._options.is_guarded

    def neighbours(self) -> frozenset[int]:
        """The members that this one keeps in touch with. On the I/O thread, or before that hears of members."""
        return self._machine.table.neighbours()

    @property
    def is_near_all(self) -> bool:
        """Is the group so small that this member keeps in touch with all others? From any thread."""
        return self._machine.table.neighbours.are_all

    def is_neighbour(self, incarnation: int) -> bool:
        """Is ``incarnation`` a neighbour? On the I/O thread."""
        return incarnation in self._machine.table.neighbours()

    def unresponsive(self) -> dict[int, float]:
        """The unresponsive members, by incarnation, and for how many seconds they have been so. From any thread."""
        return self._machine.unresponsive(monotonic())

    # ------------------------------------------------------------------ on the I/O thread

    @property
    def me(self) -> Member:
        """The record of this node, with its admission number once it has one."""
        return self._machine.table.myself

    @property
    def is_lowest(self) -> bool:
        """Does this node have the lowest rank of all members?"""
        return self._machine.table.lowest_rank().incarnation == self._machine.me

    @property
    def is_over(self) -> bool:
        """Is a group of fixed size over, since a member leaves or has left? From any thread."""
        return self.agreed_to_leave or self._stopped or self._machine.table.is_over

    def status_of(self, incarnation: int) -> Status | None:
        """The status of an incarnation; None: unknown."""
        entry = self._machine.table.entries.get(incarnation)
        return None if entry is None else entry.status

    def fell_silent(self, incarnation: int) -> bool:
        """Is an incarnation dead because its host fell silent?"""
        entry = self._machine.table.entries.get(incarnation)
        return entry is not None and entry.status is Status.DEAD and entry.host_is_silent

    def member_of(self, incarnation: int) -> Member | None:
        """The record of a present or former member, if known."""
        return self._machine.record_of(incarnation)

    def members(self) -> list[Member]:
        """All members, this node included."""
        return self._machine.table.members()

    def known_members(self) -> list[Member]:
        """All other members that have not left, the dead included: if this node was cut off, the dead are alive."""
        return self._machine.known_members()

    def on_message(self, incarnation: int, message: Message) -> None:
        """A membership message came over a link of ``incarnation``."""
        self.feed(events.Received(incarnation, message))

    def on_goodbye(self, incarnation: int, why: str) -> None:
        """``incarnation`` said goodbye; ``why`` is empty if it leaves of its own will."""
        self.feed(events.Received(incarnation, Gossip((Update(incarnation, Status.LEFT, 0, None, why),))))

    def feed(self, event: events.Event) -> None:
        """Feed ``event`` to the machine, and carry out its effects."""
        if self._stopped:
            return
        self._carry_out(self._machine.handle(event, monotonic()))
        deadline = self._machine.next_deadline()
        if deadline is not None and self._running:
            self._timer.at(deadline)

    def _do_due(self, now: float) -> float:
        if not self._running:
            return NEVER
        deadline = self._machine.next_deadline()
        if deadline is not None and deadline <= now:
            self._tell_links()
            self._carry_out(self._machine.handle_deadline(now))
            deadline = self._machine.next_deadline()
        return NEVER if deadline is None else deadline

    def _tell_links(self) -> None:
        received: dict[int, tuple[Link, float]] = {}
        for incarnation, link in self._reach.links():
            count = link.heard
            received[incarnation] = (link, count)
            if count > 0 and self._received.get(incarnation) != (link, count):
                self._carry_out(self._machine.handle(events.Heard(incarnation), monotonic()))
        self._received = received
        for incarnation in self.unresponsive():
            seen = events.HostSeen(incarnation, self._reach.host_answers(incarnation))
            self._carry_out(self._machine.handle(seen, monotonic()))

    def _carry_out(self, effects: list[events.Effect]) -> None:
        reach = self._reach
        dying = {effect.member.incarnation for effect in effects if isinstance(effect, events.MemberDied)}
        for effect in effects:
            if isinstance(effect, events.Send) and effect.to in dying:
                reach.send_news(effect.to, effect.message)  # first: `on_died` below ends the link that carries it
        for effect in effects:
            match effect:
                case events.Send(incarnation, message):
                    if incarnation not in dying:
                        reach.send_news(incarnation, message)
                case events.MemberJoined(member):
                    reach.on_joined(member)
                case events.MemberUnresponsive(member):
                    reach.on_unresponsive(member, True)
                case events.MemberRecovered(member):
                    reach.on_unresponsive(member, False)
                case events.LinkSilent(incarnation):
                    reach.on_silent(incarnation)
                case events.MemberLeft(member, why):
                    reach.on_left(member, why)
                case events.MemberDied(member, why):
                    reach.on_died(member, why)
                case events.Admitted(members):
                    for member in members:
                        reach.on_joined(member, was_there=True)
                    reach.on_admitted()
                    self._settled.open()
                case events.Refused():
                    self.refused = effect
                    self._settled.open()
                case events.Departed():
                    self._settled.open()
                case events.Expelled(why, by):
                    self._settled.open()
                    self.expelled_by = by
                    reach.on_expelled(why)
