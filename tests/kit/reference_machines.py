"""Four machines of the reference protocol and no network: a test carries each message itself."""

from __future__ import annotations

from farcall.protocol.references.machine import References
from farcall.protocol.references.messages import (
    AllDropped,
    CreationAnswered,
    CreationWithdrawn,
    Dropped,
    Effect,
    Event,
    Fork,
    ForkWithdrawn,
    MemberDied,
    MemberJoined,
    Message,
    Received,
    Send,
)

OWNER, ANNA, BEN, CARL = 1, 2, 3, 4
EVERYONE = [OWNER, ANNA, BEN, CARL]


class Member(References):
    """A machine, with a word for each thing that happens to it; effects are kept until a test asks for them."""

    kept: tuple[Effect, ...] = ()

    def tell(self, event: Event, now: float = 0.0) -> list[Effect]:
        self.kept += tuple(self.handle(event, now))
        return list(self.kept)

    def hear(self, sender: int, message: Message, now: float) -> list[Effect]:
        self.tell(Received(sender, message), now)
        return self.collect(now)

    def confirm_created(self, fork: Fork) -> None:
        self.tell(CreationAnswered(fork))

    def withdraw(self, fork: Fork) -> None:
        self.tell(ForkWithdrawn(fork))

    def withdraw_creation(self, fork: Fork) -> None:
        self.tell(CreationWithdrawn(fork))

    def drop(self, fork: Fork) -> None:
        self.tell(Dropped(fork))

    def drop_all(self) -> list[Effect]:
        self.tell(AllDropped())
        return self.collect(0.0)

    def member_joined(self, member: int) -> None:
        self.tell(MemberJoined(member))

    def member_died(self, member: int, now: float) -> list[Effect]:
        self.tell(MemberDied(member), now)
        return self.collect(now)

    def collect(self, now: float) -> list[Effect]:
        kept, self.kept = self.kept, ()
        return [*kept, *self.handle_deadline(now)]

    def flush(self) -> list[Effect]:
        return self.collect(float("inf"))


class Trio:
    """Four machines and no network: a test carries each message itself."""

    def __init__(self) -> None:
        self.owner, self.anna, self.ben, self.carl = (Member(me, EVERYONE, linger_s=1.0) for me in EVERYONE)

    def created_by_anna(self) -> Fork:
        fork = self.anna.create(OWNER)
        assert self.owner.own(fork)
        self.anna.confirm_created(fork)
        return fork


def sent(effects: list[Effect]) -> list[tuple[int, Message]]:
    return [(effect.member, effect.message) for effect in effects if isinstance(effect, Send)]


def only(effects: list[Effect], to: int) -> Message:
    [(member, message)] = sent(effects)
    assert member == to
    return message
