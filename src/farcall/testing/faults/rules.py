"""Which messages a fault is for, and what it does to each: the rules, and a direction's account of them.

A *direction* is an ordered pair of workers, sender and receiver. Each counts a rule's messages for itself and draws
from a random sequence of its own, made of the seed, the rule and the two names. So what happens to the n-th message of
a kind in a direction depends on nothing else: not on other links, on threads, or on the process it happens in.

Knows no socket and no clock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from farcall.serialize import encode_function
from farcall.testing.faults.kinds import check_kinds
from farcall.testing.faults.packets import Message

if TYPE_CHECKING:
    from farcall.testing.faults.injection import Faults

__all__ = ["Cut", "Delay", "Direction", "Drop", "Duplicate", "Fail", "Fault", "HalfOpen", "Reorder", "Rule", "Throttle"]


@dataclass(frozen=True)
class Drop:
    """The message is lost."""


@dataclass(frozen=True)
class Fail:
    """Sending fails: a request's caller learns it at once, any other message is sent again, and so comes late."""

    attempts: int
    retry_s: float


@dataclass(frozen=True)
class Delay:
    """The message comes late; ``in_order``: and so does all that follows it on its connection."""

    seconds: float
    jitter_s: float
    in_order: bool


@dataclass(frozen=True)
class Duplicate:
    """The message comes more than once."""

    copies: int
    after_s: float


@dataclass(frozen=True)
class Reorder:
    """The message lets ``behind`` others pass, but waits no longer than ``within_s`` for them."""

    behind: int
    within_s: float


@dataclass(frozen=True)
class Cut:
    """The connection ends, without warning, for both sides."""


@dataclass(frozen=True)
class HalfOpen:
    """Nothing gets through any more, in either direction, and no side is told."""

    seconds: float | None


@dataclass(frozen=True)
class Throttle:
    """Bytes leave no quicker than this."""

    bytes_per_s: float


Fault: TypeAlias = Drop | Fail | Delay | Duplicate | Reorder | Cut | HalfOpen | Throttle
OF_CONNECTIONS = (Cut, HalfOpen, Throttle)


@dataclass(eq=False)
class Rule:
    """One fault and the messages it is for; made by the methods of `Faults`. As a context manager it ends with it."""

    fault: Fault
    number: int
    kinds: frozenset[str]
    at_once: bool
    """For a fault of connections: does it wait for no message?"""
    sender: frozenset[str] | None
    to: frozenset[str] | None
    function: str | bytes | None
    """Of requests: the dotted name of their function, or the bytes that name it in a frame."""
    skip: int
    count: int | None
    probability: float
    where: Callable[[Message], bool] | None = None
    """A further condition; to be pickled, it must be a function of a module."""
    hits: int = 0
    """How often it happened, in this process."""
    lifted: bool = False
    _faults: Faults | None = field(default=None, repr=False)

    def lift(self) -> None:
        """End the fault. Messages that it holds back already come when they were to come."""
        assert self._faults is not None
        self._faults.lift(self)

    def wait_hits(self, hits: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until it happened so often in this process; `TimeoutError` if it does not."""
        assert self._faults is not None
        self._faults.wait_hits(self, hits, timeout_s)

    def __enter__(self) -> Rule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lift()

    def concerns(self, sender: str, receiver: str) -> bool:
        """Is it for messages from one worker to the other?"""
        return (self.sender is None or sender in self.sender) and (self.to is None or receiver in self.to)

    def means(self, message: Message) -> bool:
        """Is it for such messages?"""
        if not self.kinds & message.names or (self.where is not None and not self.where(message)):
            return False
        if isinstance(self.function, str):
            return _name(message.function) == self.function
        return self.function is None or message.function == self.function


def _name(function: bytes) -> str:
    """The dotted name in a function segment."""
    return function[1:].replace(b"\0", b".").decode(errors="replace")


def make_rule(
    fault: Fault,
    number: int,
    kind: str | Iterable[str] | None,
    to: str | Iterable[str] | None,
    sender: str | Iterable[str] | None,
    function: Callable[..., object] | str | None,
    skip: int,
    count: int | None,
    probability: float,
) -> Rule:
    """A checked rule, from what a user gives."""
    if skip < 0 or (count is not None and count < 1):
        raise ValueError(f"skip={skip} must be at least 0 and count={count} at least 1, or None for every one")
    if not 0.0 < probability <= 1.0:
        raise ValueError(f"probability must be more than 0 and at most 1, not {probability!r}")
    at_once = kind is None and function is None and isinstance(fault, OF_CONNECTIONS)
    if at_once and (skip or probability < 1.0):
        raise ValueError("skip and probability count messages: say of which kind")
    named: str | bytes | None = function if isinstance(function, str) else None
    if function is not None and not isinstance(function, str):
        named = encode_function(function)
        if named is None:
            raise ValueError(
                f"{function!r} has no name that travels in a request of its own, so it cannot be told there"
            )
    return Rule(
        fault,
        number,
        check_kinds("request" if kind is None and function is not None else kind),
        at_once,
        _names(sender),
        _names(to),
        named,
        skip,
        count,
        probability,
    )


def _names(workers: str | Iterable[str] | None) -> frozenset[str] | None:
    if workers is None:
        return None
    return frozenset({workers} if isinstance(workers, str) else workers)


class Direction:
    """What has happened to messages from one worker to another; it outlives their connections."""

    def __init__(self, seed: int, sender: str, receiver: str) -> None:
        self.sender = sender
        self.receiver = receiver
        self._seed = seed
        self._seen: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._random: dict[int, random.Random] = {}
        self._lock = threading.Lock()

    def choose(self, rules: Iterable[Rule], message: Message) -> tuple[Rule, float] | None:
        """The first rule that applies to ``message``, with a number from 0 to 1 drawn for it, or None."""
        if not message.names:
            return None
        with self._lock:
            for rule in rules:
                if not rule.at_once and rule.means(message) and rule.concerns(self.sender, self.receiver):
                    drawn = self._draw(rule)
                    if drawn is not None:
                        return rule, drawn
        return None

    def begin(self, rule: Rule) -> bool:
        """May a fault that waits for no message happen here, now? If so it is counted."""
        with self._lock:
            return not rule.lifted and rule.concerns(self.sender, self.receiver) and self._count(rule)

    def _draw(self, rule: Rule) -> float | None:
        source = self._random.get(rule.number)
        if source is None:
            name = f"{self._seed}/{rule.number}/{self.sender}>{self.receiver}"
            source = self._random[rule.number] = random.Random(name)
        chance, drawn = source.random(), source.random()  # two for each message: whatever happens to it
        seen = self._seen.get(rule.number, 0)
        self._seen[rule.number] = seen + 1
        if seen < rule.skip or chance >= rule.probability or not self._count(rule):
            return None
        return drawn

    def _count(self, rule: Rule) -> bool:
        done = self._done.get(rule.number, 0)
        if rule.count is not None and done >= rule.count:
            return False
        self._done[rule.number] = done + 1
        return True
