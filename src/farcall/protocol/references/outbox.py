"""What is on its way out of the machine (messages, effects) and what destructors leave for it to pick up.

Owns batching: many forks for one member travel as one message. Register and Confirm leave at the next
collection; Accept and Release only ever let something be freed, so they linger for company. Knows nothing
of what the messages mean, and has no clock: the machine says when lingering ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from farcall.ids import ForkId
from farcall.protocol.references.messages import (
    Accept,
    Confirm,
    Effect,
    Fork,
    Held,
    Message,
    Register,
    Release,
    Send,
    Withdraw,
)

MAX_FORKS_PER_MESSAGE = 1024  # about 40 KiB
T = TypeVar("T")


def _nothing() -> None:
    """The wake of a machine that nobody needs to wake."""


class ReleasedForks:
    """Forks whose last Python reference died: filled by ``__del__`` on any thread, emptied by the machine.

    ``append`` takes no lock and may interrupt anything, the machine itself included. ``wake`` must be as
    harmless (write to an eventfd): it is called for the first fork after a drain, not for each.
    """

    __slots__ = ("_forks", "_signalled", "_wake")

    def __init__(self, wake: Callable[[], None] = _nothing) -> None:
        self._forks: deque[Fork] = deque()
        self._signalled = False
        self._wake = wake

    def append(self, fork: Fork) -> None:
        self._forks.append(fork)
        if not self._signalled:
            self._signalled = True
            self._wake()

    def __len__(self) -> int:
        return len(self._forks)

    def drain(self) -> Iterator[Fork]:
        """Take out what is there now; what is appended meanwhile raises a new wake and waits its turn."""
        # The flag falls before the first fork is taken: an append that saw it up is therefore seen below.
        self._signalled = False
        forks = self._forks
        for _ in range(len(forks)):
            yield forks.popleft()


class Outbox:
    """Messages grouped by destination, and effects in order."""

    __slots__ = ("_accept", "_confirm", "_register", "_release", "_withdraw", "effects", "lazy", "urgent")

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.lazy: int = 0  # how many forks linger
        self.urgent: bool = False  # are there messages that do not?
        self._register: dict[int, list[Fork]] = {}
        self._withdraw: dict[int, list[Fork]] = {}
        self._confirm: dict[int, list[Held]] = {}
        self._accept: dict[int, list[ForkId]] = {}
        self._release: dict[int, list[Held]] = {}

    def register(self, owner: int, fork: Fork) -> None:
        self._register.setdefault(owner, []).append(fork)
        self.urgent = True

    def withdraw(self, receiver: int, fork: Fork) -> None:
        self._withdraw.setdefault(receiver, []).append(fork)
        self.urgent = True

    def confirm(self, registrar: int, fork: Fork) -> None:
        self._confirm.setdefault(registrar, []).append((fork.ref, fork.fork_id))
        self.urgent = True

    def accept(self, parent: int, fork_id: ForkId) -> None:
        self._accept.setdefault(parent, []).append(fork_id)
        self.lazy += 1

    def release(self, owner: int, held: Held) -> None:
        # The hottest line of the protocol: one per reference ever dropped.
        waiting = self._release.get(owner)
        if waiting is None:
            self._release[owner] = [held]
        else:
            waiting.append(held)
        self.lazy += 1

    def forget_member(self, member: int) -> None:
        """Nothing is said to the dead."""
        for waiting in (self._register, self._withdraw, self._confirm):
            waiting.pop(member, None)
        self.lazy -= len(self._accept.pop(member, ())) + len(self._release.pop(member, ()))
        self.effects = [e for e in self.effects if type(e) is not Send or e.member != member]

    def take(self, everything: bool) -> list[Effect]:
        """Everything to be done now; what lingers only if ``everything`` is wanted."""
        if self.urgent:
            self.urgent = False
            self._seal(self._register, Register)
            self._seal(self._withdraw, Withdraw)
            self._seal(self._confirm, Confirm)
        if everything and self.lazy:
            self._seal(self._accept, Accept)
            self._seal(self._release, Release)
            self.lazy = 0
        effects = self.effects
        if effects:
            self.effects = []
        return effects

    def _seal(self, waiting: dict[int, list[T]], message: Callable[[list[T]], Message]) -> None:
        for member, forks in waiting.items():
            for start in range(0, len(forks), MAX_FORKS_PER_MESSAGE):
                self.effects.append(Send(member, message(forks[start : start + MAX_FORKS_PER_MESSAGE])))
        waiting.clear()
