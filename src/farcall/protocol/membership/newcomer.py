"""Coming in: asking a sponsor until it answers, and confirming the one offer that is taken.

The other side, sponsor and arbiter, is `joining.py`, with the table of messages. A member has one admission number, so
only the first offer is confirmed. A sponsor that is gone does not answer; then the driver names another (``ask``).
"""

from __future__ import annotations

from collections.abc import Callable

from farcall.protocol.membership.events import MembershipOptions
from farcall.protocol.membership.members import Table
from farcall.protocol.membership.messages import Ack, Decision, Join, JoinAnswer, Message, Obituary, Ping
from farcall.protocol.membership.outbox import Outbox
from farcall.protocol.membership.timers import Timers

__all__ = ["Newcomer"]


class Newcomer:
    """The way in of one that is nobody yet; either ``admit`` or ``refuse`` is called at its end."""

    def __init__(
        self,
        options: MembershipOptions,
        table: Table,
        timers: Timers,
        outbox: Outbox,
        admit: Callable[[JoinAnswer, float], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._options = options
        self._table = table
        self._timers = timers
        self._outbox = outbox
        self._admit = admit
        self._refuse = refuse
        self._via = 0
        self._due: float | None = None

    def ask(self, via: int, now: float) -> None:
        """Ask ``via``, from now on, to be let in."""
        self._via = via
        self._outbox.send(via, Join(self._table.myself))
        self._due = now + self._options.probe_timeout_s
        self._timers.set(self._due, self._ask_again)

    def _ask_again(self, due: float, now: float) -> None:
        if due == self._due:
            self.ask(self._via, now)

    def on_message(self, sender: int, message: Message, now: float) -> None:
        """Something came, from whomever."""
        if isinstance(message, JoinAnswer):
            self._due = None
            self._admit(message, now)
        elif isinstance(message, Decision):
            self._on_offer(message)
        elif isinstance(message, Obituary):
            self._refuse(message.why)  # let in and expelled again, before we knew of either
        elif isinstance(message, Ping):
            self._outbox.send(sender, Ack(()))  # the word may be quicker than the answer

    def _on_offer(self, decision: Decision) -> None:
        """Confirm it, the first one only."""
        if decision.why_not:
            self._refuse(decision.why_not)
        elif decision.member.incarnation == self._table.me and not self._table.myself.admission:
            self._table.become(decision.member)
            self._outbox.send(self._via, Join(decision.member))
