"""Faults, the rules that select messages for them, and the counts of each direction.

A *direction* is an ordered pair of workers, sender and receiver. Each direction counts a rule's messages and draws from
its own random sequence, seeded with the seed, the rule and the two names. So the fate of the n-th message of a kind in
a direction depends on nothing else: not on other links, threads, or the process.

Knows no socket and no clock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from farcall.serialize import encode_function
from farcall.serialize.functions import path_of
from farcall.testing.faults.messages import Message, check_kinds

if TYPE_CHECKING:
    from farcall.testing.faults.injection import Faults

Workers: TypeAlias = str | Iterable[str] | None


class Selection(TypedDict, total=False):
    """The messages that a rule selects; a key that is left out does not restrict them."""

    kind: str | Iterable[str] | None
    """A name, or several, of `KINDS`; by default the messages of calls: "request", "response", "failure"."""
    to: Workers
    """Names of the receiving workers."""
    sender: Workers
    """Names of the sending workers."""
    function: Callable[..., object] | str | None
    """Only requests that call this function, given as the function or its dotted name."""
    skip: int
    """How many messages pass untouched at first, in each direction."""
    count: int | None
    """After how many messages the rule ends, in each direction."""
    probability: float
    """The probability for each message, more than 0 and at most 1."""


@dataclass(frozen=True)
class Drop:
    """The message is lost."""


@dataclass(frozen=True)
class Fail:
    """Sending fails: a request's caller gets an error at once; any other message is sent again, and so comes late."""

    attempts: int
    retry_s: float


@dataclass(frozen=True)
class Delay:
    """The message comes late; with ``in_order`` so do all later messages of its connection."""

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
    """Nothing gets through, in either direction, and neither side gets an error."""

    seconds: float | None


@dataclass(frozen=True)
class Throttle:
    """Bytes leave no faster than this."""

    bytes_per_s: float


Fault: TypeAlias = Drop | Fail | Delay | Duplicate | Reorder | Cut | HalfOpen | Throttle
OF_CONNECTIONS = (Cut, HalfOpen, Throttle)


class Rule:
    """One fault and the messages that it affects; made by the methods of `Faults`. Mutable: ``hits`` and ``lifted``.

    The end of a ``with`` block lifts it.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        kind: str | Iterable[str] | None = None,
        to: Workers = None,
        sender: Workers = None,
        function: Callable[..., object] | str | None = None,
        skip: int = 0,
        count: int | None = None,
        probability: float = 1.0,
        where: Callable[[Message], bool] | None = None,
    ) -> None:
        """See `Selection`; ``where`` is a further condition (a function of a module, if the rule is to be pickled)."""
        if skip < 0 or (count is not None and count < 1):
            raise ValueError(f"skip={skip} must be at least 0 and count={count} at least 1, or None for every one")
        if not 0.0 < probability <= 1.0:
            raise ValueError(f"probability must be more than 0 and at most 1, not {probability!r}")
        self.at_once: bool = kind is None and function is None and isinstance(fault, OF_CONNECTIONS)
        """Does a fault of connections begin without waiting for a message?"""
        if self.at_once and (skip or probability < 1.0):
            raise ValueError("skip and probability need a kind of message: give kind")
        named = function if function is None or isinstance(function, str) else encode_function(function)
        if named is None and function is not None:
            raise ValueError(f"a rule cannot match {function!r}: requests do not carry its name")
        self.fault = fault
        self.kinds: frozenset[str] = check_kinds("request" if kind is None and function is not None else kind)
        self.to: frozenset[str] | None = _names(to)
        self.sender: frozenset[str] | None = _names(sender)
        self.function: str | bytes | None = named
        """The dotted name of a request's function, or the bytes that name it in a frame."""
        self.skip = skip
        self.count = count
        self.probability = probability
        self.where = where
        self.number: int = -1
        """The index among all rules of its `Faults`."""
        self.hits: int = 0
        """How often the fault happened in this process."""
        self.lifted: bool = False
        self._faults: Faults | None = None

    def __repr__(self) -> str:
        narrowed = {"kinds": sorted(self.kinds), "to": self.to, "sender": self.sender, "function": self.function}
        return f"Rule({self.fault}, {', '.join(f'{name}={value!r}' for name, value in narrowed.items() if value)})"

    def lift(self) -> None:
        """End the fault. Messages already held back still leave when they are due."""
        assert self._faults is not None
        self._faults.lift(self)

    def wait_hits(self, hits: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until the fault has happened ``hits`` times in this process; raise `TimeoutError` if it does not."""
        assert self._faults is not None
        self._faults.wait_hits(self, hits, timeout_s)

    def __enter__(self) -> Rule:
        return self

    def __exit__(self, *_: object) -> None:
        self.lift()

    def concerns(self, sender: str, receiver: str) -> bool:
        """Does the rule select messages from ``sender`` to ``receiver``?"""
        return (self.sender is None or sender in self.sender) and (self.to is None or receiver in self.to)

    def means(self, message: Message) -> bool:
        """Does the rule select messages like this one?"""
        if not self.kinds & message.names or (self.where is not None and not self.where(message)):
            return False
        function = message.frame.function
        if isinstance(self.function, str):
            return path_of(function).replace("\0", ".") == self.function
        return self.function is None or function == self.function


def _names(workers: Workers) -> frozenset[str] | None:
    if workers is None:
        return None
    return frozenset({workers} if isinstance(workers, str) else workers)


class Direction:
    """The counts of one worker's messages to another, by rule; they outlive connections. Mutable: under its lock."""

    def __init__(self, seed: int, sender: str, receiver: str) -> None:
        self.sender = sender
        self.receiver = receiver
        self._seed = seed
        self._seen: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._random: dict[int, random.Random] = {}
        self._lock = threading.Lock()

    def choose(self, rules: Iterable[Rule], message: Message) -> tuple[Rule, float] | None:
        """The first rule that applies to ``message``, with a random number from 0 to 1, or None."""
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
        """May a fault that waits for no message happen here now? If so, count it."""
        with self._lock:
            return not rule.lifted and rule.concerns(self.sender, self.receiver) and self._count(rule)

    def _draw(self, rule: Rule) -> float | None:
        source = self._random.get(rule.number)
        if source is None:
            name = f"{self._seed}/{rule.number}/{self.sender}>{self.receiver}"
            source = self._random[rule.number] = random.Random(name)
        chance, drawn = source.random(), source.random()  # always two per message: its fate must not shift the sequence
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
