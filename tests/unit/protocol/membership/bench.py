"""A machine of membership by itself, on a bench: its clock is turned, what it does is looked at."""

from __future__ import annotations

import random
from typing import TypeVar

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    Effect,
    Heard,
    HostSeen,
    MembershipOptions,
    Received,
    Send,
)
from farcall.protocol.membership.machine import MembershipMachine
from farcall.protocol.membership.messages import (
    Gossip,
    Message,
    Status,
    Update,
)

T = TypeVar("T", bound=Effect)
OPTIONS = MembershipOptions()
RECORDS = [Member(f"worker{incarnation}", incarnation, incarnation) for incarnation in range(1, 7)]


class Bench:
    """A machine, its clock, and what it has done."""

    def __init__(self, machine: MembershipMachine) -> None:
        self.machine = machine
        self.now = 0.0
        self.effects: list[Effect] = []
        self.silent_hosts: set[int] = set()

    def feed(self, event: object) -> None:
        self.effects += self.machine.handle(event, self.now)  # type: ignore[arg-type]

    def receive(self, sender: int, message: Message) -> None:
        self.feed(Received(sender, message))

    def advance(self, seconds: float) -> None:
        """Each deadline at its time."""
        until = self.now + seconds
        while (deadline := self.machine.next_deadline()) is not None and deadline <= until:
            self.now = deadline
            for incarnation in self.machine.unresponsive(self.now):
                self.feed(HostSeen(incarnation, incarnation not in self.silent_hosts))
            self.effects += self.machine.handle_deadline(self.now)
        self.now = until

    def take(self, kind: type[T]) -> list[T]:
        """The effects of this kind since they were last taken; forget all others."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = []
        return found

    def sent(self, kind: type[Message], to: int | None = None) -> list[Send]:
        return [
            effect for effect in self.take(Send) if isinstance(effect.message, kind) and (to is None or effect.to == to)
        ]

    def hear_all_but(self, silent: int, seconds: float) -> None:
        """Let time pass while everybody else talks."""
        for _ in range(round(seconds / 0.1)):
            self.advance(0.1)
            for incarnation in self.machine.table.others:
                if incarnation != silent:
                    self.feed(Heard(incarnation))


def member(me: int = 1, size: int = 6, options: MembershipOptions = OPTIONS, is_fixed: bool = False) -> Bench:
    machine = MembershipMachine(RECORDS[me - 1], RECORDS[:size], options, random.Random(0), 0.0, is_fixed=is_fixed)
    return Bench(machine)


def newcomer(record: Member) -> Bench:
    return Bench(MembershipMachine(record, None, OPTIONS, random.Random(0), 0.0))


def status(bench: Bench, incarnation: int) -> Status:
    return bench.machine.table.entries[incarnation].status


def suspect(incarnation: int, version: int = 0) -> Gossip:
    return Gossip((Update(incarnation, Status.UNRESPONSIVE, version, RECORDS[incarnation - 1]),))
