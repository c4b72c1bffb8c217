"""`Faults`: the rules of a test, and the wrappers that carry them into nodes.

Owns the list of rules and the counts of each direction. A node that starts while a `Faults` is installed passes every
connection through `wrap_transport`, after its handshake, and a connection to itself, which it has only then. Otherwise
the node under test is an ordinary one.

Rules may be added and lifted at any time, from any thread; each process has its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Unpack

from farcall.runtime.peers.interference import interfering
from farcall.testing.faults.messages import Message
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
    Selection,
    Throttle,
    Workers,
)
from farcall.transport.interface import Transport

MOST_REMEMBERED = 10_000


class Injection(NamedTuple):
    """A fault that happened."""

    fault: Fault
    sender: str
    receiver: str
    kinds: frozenset[str]
    """The names of the message; empty for a fault that no message triggered."""


class _Woken(Protocol):
    def wake(self) -> None: ...


class Faults:
    """Faults to inject between workers, chosen by rules and repeatable by seed.

    They affect nodes that start inside ``with faults.installed():``. A `Faults` can be pickled, for a spawned process
    to install. Each node applies the rules to the messages that it sends, so install it for every worker
    whose messages are to be disturbed, and only for those.

    Every method that makes a rule takes the keywords of `Selection`: ``kind``, ``to``, ``sender``, ``function``,
    ``skip``, ``count`` and ``probability``; `throttle` only ``to`` and ``sender``. `cut`, `half_open` and `throttle`
    without a kind wait for no message.
    A message meets the first rule that applies, in the order in which they were made. Used as a context manager,
    `Faults` lifts all its rules at the end.

    Args:
        seed: chooses among equally likely outcomes; the same seed makes the same choice for the n-th message.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._injections: deque[Injection] = deque(maxlen=MOST_REMEMBERED)
        self._rules: tuple[Rule, ...] = ()  # replaced, never changed: readers take no lock
        self._made = 0
        self._directions: dict[tuple[str, str], Direction] = {}
        self._relays: set[_Woken] = set()
        self._changed = threading.Condition()

    # ------------------------------------------------------------------ rules

    def drop(self, **selection: Unpack[Selection]) -> Rule:
        """Lose messages. Their receiver still releases the shared memory and references that came with them."""
        return self.add(Rule(Drop(), **selection))

    def fail(self, *, attempts: int = 1, retry_s: float = 0.05, **selection: Unpack[Selection]) -> Rule:
        """Let sending fail.

        The caller of a request gets a `NetworkError` that says "not_sent". farcall must deliver any other message: it
        is sent again, ``retry_s`` later and with growing pauses, until ``attempts`` have failed.
        """
        _check(attempts >= 1 and retry_s >= 0, "attempts must be at least 1, and retry_s not negative")
        return self.add(Rule(Fail(attempts, retry_s), **selection))

    def delay(
        self, seconds: float, *, jitter_s: float = 0.0, in_order: bool = False, **selection: Unpack[Selection]
    ) -> Rule:
        """Delay messages by ``seconds``, and by up to ``jitter_s`` more.

        ``in_order``: later messages of the connection wait, too, as they do behind a packet that TCP retransmits.
        Otherwise they overtake.
        """
        _check(seconds >= 0 and jitter_s >= 0, "a delay cannot be negative")
        return self.add(Rule(Delay(seconds, jitter_s, in_order), **selection))

    def duplicate(self, *, copies: int = 1, after_s: float = 0.0, **selection: Unpack[Selection]) -> Rule:
        """Repeat messages: ``copies`` follow, each ``after_s`` after the previous one.

        Some messages are never repeated: those with tensors in shared memory, since a lease cannot be given twice
        (give the workers ``shared_memory=False`` to have them repeated), and those that distributed autograd has
        recorded, since each is answered exactly once in a backward pass.
        """
        _check(copies >= 1 and after_s >= 0, "copies must be at least 1, and after_s not negative")
        return self.add(Rule(Duplicate(copies, after_s), **selection))

    def reorder(self, *, behind: int = 1, within_s: float = 0.1, **selection: Unpack[Selection]) -> Rule:
        """Let the next ``behind`` messages of the connection overtake, but wait no longer than ``within_s``."""
        _check(behind >= 1 and within_s >= 0, "behind must be at least 1, and within_s not negative")
        return self.add(Rule(Reorder(behind, within_s), **selection))

    def cut(self, **selection: Unpack[Selection]) -> Rule:
        """End connections, as a reset does: both sides see the end, and messages in transit are lost. Once.

        The workers reconnect and resume, unless their ``reconnect_s`` is 0.

        With a kind: cut when such a message is about to leave, instead of sending it. ``count=None``: cut every later
        connection, too.
        """
        selection.setdefault("count", 1)
        return self.add(Rule(Cut(), **selection))

    def half_open(self, seconds: float | None = None, **selection: Unpack[Selection]) -> Rule:
        """Let nothing through, in either direction, without an error, as when a cable is pulled. Once.

        Buffers fill, and then senders wait, as they do for a peer that acknowledges nothing. After ``seconds``, or when
        the rule is lifted, everything leaves, as TCP's retransmissions do. ``count=None``: later connections are
        silent, too.
        """
        _check(seconds is None or seconds >= 0, "a time cannot be negative")
        selection.setdefault("count", 1)
        return self.add(Rule(HalfOpen(seconds), **selection))

    def throttle(self, bytes_per_s: float, to: Workers = None, sender: Workers = None) -> Rule:
        """Limit the rate of bytes over each connection. Tensors in shared memory do not count: they bypass it.

        The slowest rule applies.
        """
        _check(bytes_per_s > 0, "bytes_per_s must be more than 0: for no byte at all use half_open")
        return self.add(Rule(Throttle(bytes_per_s), to=to, sender=sender))

    def add(self, rule: Rule) -> Rule:
        """Put a rule in force, after all others."""
        with self._changed:
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

    def __exit__(self, *_: object) -> None:
        self.lift_all()

    # ------------------------------------------------------------------ what has happened

    @property
    def injections(self) -> list[Injection]:
        """The faults that happened in this process, oldest first; only the latest 10,000."""
        with self._changed:
            return list(self._injections)

    def wait_hits(self, rule: Rule, hits: int, timeout_s: float) -> None:
        """Wait until ``rule`` has happened ``hits`` times in this process; raise `TimeoutError` if it does not."""
        with self._changed:
            if not self._changed.wait_for(lambda: rule.hits >= hits, timeout_s):
                raise TimeoutError(f"{rule} happened {rule.hits} times and not {hits} within {timeout_s:g} s")

    def note(self, rule: Rule, direction: Direction, kinds: frozenset[str]) -> None:
        """Record a fault that happens now."""
        with self._changed:
            rule.hits += 1
            self._injections.append(Injection(rule.fault, direction.sender, direction.receiver, kinds))
            self._changed.notify_all()

    def judge(self, direction: Direction, message: Message) -> tuple[Fault | None, float]:
        """Choose the fault for a message, and draw a random number for it."""
        chosen = direction.choose(self._rules, message) if self._rules else None
        if chosen is None:
            return None, 0.0
        rule, drawn = chosen
        self.note(rule, direction, message.names)
        return rule.fault, drawn

    # ------------------------------------------------------------------ the way into nodes

    @contextmanager
    def installed(self, *workers: str) -> Iterator[Faults]:
        """Apply these faults to nodes that start inside the block in this process: to all, or to the named ``workers``.

        A node keeps them until it ends. If several are installed, a node gets the latest.
        """
        with interfering(self, workers):
            yield self

    def wrap_transport(
        self, transport: Transport, here: str, there: str, fail_call: Callable[[int, str], None]
    ) -> Transport:
        """Wrap the connection of ``here`` to ``there``. ``fail_call`` is for calls whose sending a rule fails.

        To itself, one end of what a node's own messages pass through; faults of connections do not apply there.
        """
        from farcall.testing.faults.relay import connect  # later: it needs POSIX, and rules can be made anywhere

        return connect(self, self.direction(here, there), transport, fail_call)

    def direction(self, sender: str, receiver: str) -> Direction:
        """The counts of one worker's messages to another."""
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
        """Wake ``relay`` no longer."""
        with self._changed:
            self._relays.discard(relay)

    def _wake_relays(self) -> None:
        for relay in self._relays:
            relay.wake()

    def __getstate__(self) -> dict[str, Any]:
        # Counts belong to this process; connections and locks cannot be pickled.
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
