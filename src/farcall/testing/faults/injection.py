"""`Faults`: what a user says shall go wrong, and where it is plugged into nodes.

Owns the list of rules and the account of each direction. A node that was given one in its options passes every
connection through `wrap_transport`, after its handshake, and messages to itself through `wrap_delivery`. The node,
and all that is under test, is otherwise the ordinary one.

Rules may be added and lifted at any time, from any thread; those of another process are its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from farcall.options import faults_by_default
from farcall.protocol.frames import Frame
from farcall.runtime.peers.peer import Peer
from farcall.testing.faults.packets import Message
from farcall.testing.faults.rules import (
    Cut,
    Delay,
    Direction,
    Drop,
    Duplicate,
    Fail,
    Fault,
    HalfOpen,
    Reorder,
    Rule,
    Throttle,
    make_rule,
)
from farcall.transport.interface import Transport

__all__ = ["Event", "Faults"]

Kinds = str | Iterable[str] | None
Workers = str | Iterable[str] | None
Function = Callable[..., object] | str | None

MOST_EVENTS = 10_000


class Event(NamedTuple):
    """One thing that was done."""

    fault: Fault
    sender: str
    receiver: str
    kinds: frozenset[str]
    """What the message was called; empty for a fault that waited for no message."""


class _Woken(Protocol):
    def wake(self) -> None: ...


class Faults:
    """Faults to inject between workers, chosen by rules and repeatable by seed.

    Give it to a node with ``RpcBackendOptions(faults=faults)``; it can be pickled, so options may go to spawned
    processes. Each node applies the rules to what it sends itself, so give it to every worker whose messages are to be
    disturbed, and only to those.

    Every method that makes a rule takes these, which say to what it applies:

    - ``kind``: a name, or several, of `KINDS`; by default the messages of calls ("request", "response", "failure").
      ``cut``, ``half_open`` and ``throttle`` without a kind wait for no message.
    - ``to``, ``sender``: names of workers; by default any.
    - ``function``: of requests, only those that call it (a function, or its dotted name).
    - ``skip``, ``count``: leave the first ones alone; stop after so many. Counted in each direction of each pair.
    - ``probability``: of the rest, how many.

    A message meets the first rule that applies, in the order in which they were made. As a context manager, `Faults`
    lifts all its rules at the end.

    Args:
        seed: chooses among equally likely outcomes; the same seed makes the same choice for the n-th message.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._rules: tuple[Rule, ...] = ()  # replaced, never changed: readers take no lock
        self._made = 0
        self._directions: dict[tuple[str, str], Direction] = {}
        self._relays: set[_Woken] = set()
        self._changed = threading.Condition()

    # ------------------------------------------------------------------ rules

    def drop(
        self,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = None,
        probability: float = 1.0,
    ) -> Rule:
        """Lose messages. Shared memory and references that came with them are given up by their receiver."""
        return self._add(Drop(), kind, to, sender, function, skip, count, probability)

    def fail(
        self,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = None,
        probability: float = 1.0,
        attempts: int = 1,
        retry_s: float = 0.05,
    ) -> Rule:
        """Let sending fail.

        The caller of a request gets a `NetworkError` that says "not_sent". Any other message is what farcall has to
        deliver: it is sent again, ``retry_s`` later and with growing pauses, until ``attempts`` have failed.
        """
        _check(attempts >= 1 and retry_s >= 0, "attempts must be at least 1, and retry_s not negative")
        return self._add(Fail(attempts, retry_s), kind, to, sender, function, skip, count, probability)

    def delay(
        self,
        seconds: float,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = None,
        probability: float = 1.0,
        jitter_s: float = 0.0,
        in_order: bool = False,
    ) -> Rule:
        """Let messages come late, by ``seconds`` and up to ``jitter_s`` more.

        ``in_order``: what follows on the same connection waits, too, as it does behind a packet that TCP sends
        again. Otherwise later messages overtake.
        """
        _check(seconds >= 0 and jitter_s >= 0, "a delay cannot be negative")
        return self._add(Delay(seconds, jitter_s, in_order), kind, to, sender, function, skip, count, probability)

    def duplicate(
        self,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = None,
        probability: float = 1.0,
        copies: int = 1,
        after_s: float = 0.0,
    ) -> Rule:
        """Let messages come more than once: ``copies`` follow, each ``after_s`` after the one before.

        Some come once all the same: those whose tensors lie in shared memory, since a lease cannot be given twice
        (give the workers ``shared_memory=False`` to have them repeated), and those that distributed autograd has
        recorded, since each is answered for once in a backward pass.
        """
        _check(copies >= 1 and after_s >= 0, "copies must be at least 1, and after_s not negative")
        return self._add(Duplicate(copies, after_s), kind, to, sender, function, skip, count, probability)

    def reorder(
        self,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = None,
        probability: float = 1.0,
        behind: int = 1,
        within_s: float = 0.1,
    ) -> Rule:
        """Let the next ``behind`` messages of the same connection overtake; without them, go after ``within_s``."""
        _check(behind >= 1 and within_s >= 0, "behind must be at least 1, and within_s not negative")
        return self._add(Reorder(behind, within_s), kind, to, sender, function, skip, count, probability)

    def cut(
        self,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = 1,
        probability: float = 1.0,
    ) -> Rule:
        """End connections, as a reset does: both sides see the end, and what was on its way is lost.

        The workers make another one and go on, unless their ``reconnect_s`` is 0.

        With a kind: when such a message is about to leave, instead of it. ``count=None``: and every connection that
        is made later.
        """
        return self._add(Cut(), kind, to, sender, function, skip, count, probability)

    def half_open(
        self,
        seconds: float | None = None,
        kind: Kinds = None,
        to: Workers = None,
        sender: Workers = None,
        function: Function = None,
        skip: int = 0,
        count: int | None = 1,
        probability: float = 1.0,
    ) -> Rule:
        """Let nothing through, in either direction, without telling anybody, as when a cable is pulled.

        Buffers fill, and then senders wait, as they do for a peer that acknowledges nothing. After ``seconds``, or when
        the rule is lifted, all of it goes on its way, as TCP's retransmissions do. ``count=None``: connections made
        later are silent, too.
        """
        _check(seconds is None or seconds >= 0, "a time cannot be negative")
        return self._add(HalfOpen(seconds), kind, to, sender, function, skip, count, probability)

    def throttle(self, bytes_per_s: float, to: Workers = None, sender: Workers = None) -> Rule:
        """Let bytes leave no quicker than this, over each connection; what lies in shared memory is not sent there.

        The slowest rule counts.
        """
        _check(bytes_per_s > 0, "bytes_per_s must be more than 0: for no byte at all use half_open")
        return self._add(Throttle(bytes_per_s), None, to, sender, None, 0, None, 1.0)

    def _add(
        self,
        fault: Fault,
        kind: Kinds,
        to: Workers,
        sender: Workers,
        function: Function,
        skip: int,
        count: int | None,
        probability: float,
    ) -> Rule:
        with self._changed:
            rule = make_rule(fault, self._made, kind, to, sender, function, skip, count, probability)
            return self._take(rule)

    def add(self, rule: Rule) -> Rule:
        """Take a rule that was made by hand; it gets the next number."""
        with self._changed:
            return self._take(rule)

    def _take(self, rule: Rule) -> Rule:
        rule.number = self._made
        rule._faults = self
        self._made += 1
        self._rules = (*self._rules, rule)
        self._wake_relays()
        return rule

    def lift(self, rule: Rule) -> None:
        """End one rule."""
        with self._changed:
            rule.lifted = True
            self._rules = tuple(other for other in self._rules if other is not rule)
            self._wake_relays()

    def lift_all(self) -> None:
        """End every rule."""
        for rule in self._rules:
            self.lift(rule)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in force, oldest first."""
        return self._rules

    def __enter__(self) -> Faults:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.lift_all()

    @contextmanager
    def everywhere(self) -> Iterator[Faults]:
        """Give this to every node whose options are made inside the block and name no faults, in this process.

        For a program under test that makes its own options.
        """
        with faults_by_default(self):
            yield self

    # ------------------------------------------------------------------ what has happened

    @property
    def events(self) -> list[Event]:
        """What was done in this process, oldest first; only the latest 10,000."""
        with self._changed:
            return list(self._events)

    def wait_hits(self, rule: Rule, hits: int, timeout_s: float) -> None:
        """Wait until ``rule`` happened so often in this process; `TimeoutError` if it does not."""
        with self._changed:
            if not self._changed.wait_for(lambda: rule.hits >= hits, timeout_s):
                raise TimeoutError(f"{rule} happened {rule.hits} times and not {hits} within {timeout_s:g} s")

    def note(self, rule: Rule, direction: Direction, kinds: frozenset[str]) -> None:
        """Something was done."""
        with self._changed:
            rule.hits += 1
            self._events.append(Event(rule.fault, direction.sender, direction.receiver, kinds))
            self._changed.notify_all()

    def judge(self, direction: Direction, message: Message) -> tuple[Fault | None, float]:
        """What is to happen to a message, and a random number for it."""
        if not self._rules:
            return None, 0.0
        chosen = direction.choose(self._rules, message)
        if chosen is None:
            return None, 0.0
        rule, drawn = chosen
        self.note(rule, direction, message.names)
        return rule.fault, drawn

    # ------------------------------------------------------------------ where it is plugged in

    def wrap_transport(
        self, transport: Transport, here: str, there: str, fail_call: Callable[[int, str], None]
    ) -> Transport:
        """A connection of ``here`` to ``there`` that has these faults. ``fail_call`` fails a call that was not sent."""
        from farcall.testing.faults.relay import connect

        return connect(self, self.direction(here, there), transport, fail_call)

    def wrap_delivery(self, deliver: Callable[[Peer, Frame], None], here: str) -> Callable[[Peer, Frame], None]:
        """What hands messages of ``here`` to itself, with these faults."""
        from farcall.testing.faults.own import OwnDelivery

        return OwnDelivery(self, self.direction(here, here), deliver)

    def direction(self, sender: str, receiver: str) -> Direction:
        """The account of what one worker sends to another."""
        with self._changed:
            found = self._directions.get((sender, receiver))
            if found is None:
                found = self._directions[sender, receiver] = Direction(self.seed, sender, receiver)
            return found

    def add_relay(self, relay: _Woken) -> None:
        """Wake ``relay`` whenever rules change."""
        with self._changed:
            self._relays.add(relay)

    def forget_relay(self, relay: _Woken) -> None:
        with self._changed:
            self._relays.discard(relay)

    def _wake_relays(self) -> None:
        for relay in self._relays:
            relay.wake()

    def __getstate__(self) -> dict[str, Any]:
        # What has happened so far is of this process; connections and locks do not travel.
        return {"seed": self.seed, "rules": self._rules, "made": self._made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["seed"])  # type: ignore[misc]
        self._made = state["made"]
        self._rules = state["rules"]
        for rule in self._rules:
            rule.hits = 0

    def __repr__(self) -> str:
        return f"Faults(seed={self.seed}, rules={len(self._rules)})"


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
