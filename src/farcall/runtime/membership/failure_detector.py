"""Watching over the members: drives the membership machine with what really happens on this node.

Owns the machine, its clock and who wants to hear of changes. The machine decides; links are made, used and ended by
`table.py`, which carries its effects out. Everything here runs on the I/O thread, but for what says otherwise.

Before the machine looks at the time it is told whose links have brought anything since (``Heard``), every byte counts,
and whether the hosts of those who do not answer do (``HostSeen``): that costs a look at every link each time something
is due, and nothing per frame. No thread of a member's own says that it lives: none could run while the interpreter
is held. Its kernel speaks for it.
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

logger: logging.Logger = logging.getLogger("farcall")


def chosen(options: RpcBackendOptions) -> MembershipOptions:
    """What the user chose about failure detection."""
    return MembershipOptions(
        options.membership.probe_interval_s,
        options.membership.probe_timeout_s,
        options.membership.suspicion_s,
        options.membership.indirect_probes,
        unresponsive_s=options.membership.unresponsive_s,
    )


class Reach(Protocol):
    """Who carries out what the machine says; on the I/O thread, and without waiting."""

    def send_news(self, incarnation: int, message: Message) -> None:
        """Send it if that incarnation can be reached."""

    def links(self) -> Iterator[tuple[int, Link]]:
        """All links, and whose they are."""

    def host_answers(self, incarnation: int) -> bool:
        """Does the kernel of an unresponsive member's host answer, as far as was tried?"""

    def on_joined(self, member: Member) -> None: ...

    def on_admitted(self) -> None: ...

    def on_unresponsive(self, member: Member, unresponsive: bool) -> None: ...

    def on_silent(self, incarnation: int) -> None: ...

    def on_left(self, member: Member) -> None: ...

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
        """``members``: those of the first hour; None: this node has to join. ``is_fixed``: a group of fixed size."""
        self._options = options
        self._machine = MembershipMachine(me, members, options, random.Random(), monotonic(), is_fixed=is_fixed)
        self._loop = loop
        self._timer = loop.timer(self._do_due)
        self._reach = reach
        self._received: dict[int, tuple[Link, int]] = {}
        self._running = False
        self._stopped = False
        self._settled = Gate()
        self.agreed_to_leave: bool = False
        """Have all members agreed to leave? Then nobody is let in."""
        self.why_refused: str | None = None
        self.expelled_by: int = 0
        """Who told this node that it is dead, if that is known."""

    # ------------------------------------------------------------------ from other threads

    def begin(self) -> None:
        """All links stand: look at the time from now on. From any thread."""
        self._running = True
        self._timer.at(0.0)

    def join_through(self, incarnation: int, timeout_s: float, is_lost: Callable[[], bool]) -> bool:
        """Ask ``incarnation``, to which there is a link, to let this node in; False if nothing came of it.

        Raises nothing: see ``why_refused``. From the thread that starts the node.
        """
        deadline = monotonic() + timeout_s
        self.begin()
        self._loop.call_soon(lambda: self.feed(events.LocalJoin(incarnation)))
        while not self.belongs and self.why_refused is None:
            remaining_s = deadline - monotonic()
            if remaining_s <= 0 or is_lost():
                break
            self._settled.wait(min(0.05, remaining_s))
        return self.belongs

    def found(self) -> None:
        """There is nobody to ask: be the first member of a group. From the thread that starts the node."""
        self._running = False  # until `begin`, as for members of the first hour
        me = self.me
        self._machine = MembershipMachine(me, [me], self._options, random.Random(), monotonic())
        self._received = {}

    @property
    def belongs(self) -> bool:
        """Is this node one of those that belong together?"""
        return self._machine.state in (State.MEMBER, State.LEAVING)

    def leave(self, timeout_s: float) -> None:
        """Tell the others that this node leaves, and wait until they know. From the thread that shuts down."""
        self._loop.call_soon(lambda: self.feed(events.LocalLeave()))
        deadline = monotonic() + timeout_s
        while self.belongs and monotonic() < deadline:
            self._settled.wait(0.05)

    def stop(self) -> None:
        """Say and hear no more. From any thread."""
        self._running = False
        self._stopped = True

    def is_member(self, incarnation: int) -> bool:
        """Is that one neither dead nor gone, as far as is known? From any thread."""
        status = self.status_of(incarnation)
        return status is not None and status < Status.DEAD

    def unresponsive(self) -> dict[int, float]:
        """The members that answer nobody, by incarnation, and since how many seconds. From any thread."""
        return self._machine.unresponsive(monotonic())

    # ------------------------------------------------------------------ on the I/O thread

    @property
    def me(self) -> Member:
        """This node; with its admission number, once it has one."""
        return self._machine.table.myself

    @property
    def is_lowest(self) -> bool:
        """Has this node the lowest rank of all members?"""
        return self._machine.table.lowest_rank().incarnation == self._machine.me

    @property
    def is_over(self) -> bool:
        """Does a group of fixed size end, since a member has left? From any thread."""
        return self.agreed_to_leave or self._stopped or self._machine.table.is_over

    def status_of(self, incarnation: int) -> Status | None:
        """What is known of an incarnation; None: nothing."""
        entry = self._machine.table.entries.get(incarnation)
        return None if entry is None else entry.status

    def member_of(self, incarnation: int) -> Member | None:
        """Who an incarnation is or was, if that is known."""
        entry = self._machine.table.entries.get(incarnation)
        return None if entry is None else entry.member

    def members(self) -> list[Member]:
        """All members, oneself included."""
        return self._machine.table.members()

    def acquaintances(self) -> list[Member]:
        """All others that this node knew and that have not left, also the dead: if it was cut off, those live."""
        table = self._machine.table
        entries = [entry for entry in table.entries.values() if entry.status is not Status.LEFT]
        return [entry.member for entry in entries if entry.member is not None and entry.incarnation != table.me]

    def on_message(self, incarnation: int, message: Message) -> None:
        """A membership message came over a link of ``incarnation``."""
        self.feed(events.Received(incarnation, message))

    def on_goodbye(self, incarnation: int, why: str) -> None:
        """``incarnation`` has said itself that it goes; ``why`` is empty where it wants to."""
        self.feed(events.Received(incarnation, Gossip((Update(incarnation, Status.LEFT, 0, None, why),))))

    def feed(self, event: events.Event) -> None:
        """Tell the machine what happened."""
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
        received: dict[int, tuple[Link, int]] = {}
        for incarnation, link in self._reach.links():
            count = link.heard_bytes
            received[incarnation] = (link, count)
            if count and self._received.get(incarnation) != (link, count):
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
                reach.send_news(effect.to, effect.message)  # while there is a link: it should know why it ends
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
                case events.MemberLeft(member):
                    reach.on_left(member)
                case events.MemberDied(member, why):
                    reach.on_died(member, why)
                case events.Admitted(members):
                    for member in members:
                        reach.on_joined(member)
                    reach.on_admitted()
                    self._settled.open()
                case events.Refused(why):
                    self.why_refused = why
                    self._settled.open()
                case events.Departed():
                    self._settled.open()
                case events.Expelled(why, by):
                    self._settled.open()
                    self.expelled_by = by
                    reach.on_expelled(why)
