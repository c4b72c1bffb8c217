"""What leaves the machine: its effects in order, and the news that ride along with each message.

A message to a suspected member always tells it so, and one about a third member always tells what is known of
that one: a refutation then comes back with the very answer. Knows nothing of why anything is sent.
"""

from __future__ import annotations

from farcall.protocol.membership.events import Effect, Send
from farcall.protocol.membership.gossip import GossipQueue
from farcall.protocol.membership.members import Table
from farcall.protocol.membership.messages import Gossip, Message, Ping, Status, Update


class Outbox:
    """The effects since they were last collected."""

    __slots__ = ("_effects", "_gossip", "_table")

    def __init__(self, table: Table, gossip: GossipQueue) -> None:
        self._table = table
        self._gossip = gossip
        self._effects: list[Effect] = []

    def collect(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def tell(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, to: int, message: Message) -> None:
        self._effects.append(Send(to, message))

    def ping(self, to: int) -> None:
        self._effects.append(Send(to, Ping(self.news(to))))

    def gossip(self, to: int) -> None:
        """Pass news on to one whose turn it is."""
        self._effects.append(Send(to, Gossip(self._with_what_concerns(to, 0, self._gossip.take()))))

    def news(self, to: int, about: int = 0) -> tuple[Update, ...]:
        """The updates for a message to ``to``, which may be about another."""
        return self._with_what_concerns(to, about, self._gossip.peek())

    def _with_what_concerns(self, to: int, about: int, news: tuple[Update, ...]) -> tuple[Update, ...]:
        entries = self._table.entries
        addressee = entries.get(to)
        if addressee is not None and addressee.status is Status.SUSPECTED:
            news = (*news, addressee.as_update())
        if about and (subject := entries.get(about)) is not None and subject.precedence > 0:
            news = (*news, subject.as_update())
        return news
