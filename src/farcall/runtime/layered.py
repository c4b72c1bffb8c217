"""What the layers above a node attach to it: their state, what they want to hear of, and what they want to be done.

Owns the hooks and the tables of handlers; `node.py` calls them. Hooks are added while a node starts, or by a layer's
first use; all of them run on the I/O thread unless said otherwise, so none may block. Knows none of the layers.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, TypeVar

from farcall.protocol.frames import Arrived
from farcall.runtime.changes import Changes, MemberEvent
from farcall.runtime.leaving import Leaving, Withdrawing
from farcall.runtime.loop import Loop, Ticker
from farcall.runtime.peers import Peer, RemotePeer

__all__ = ["Layered"]

P = TypeVar("P")


class Layered:
    """The side of a node that other layers see when they attach to it."""

    _changes: Changes
    _leaving: Leaving | Withdrawing
    _loop: Loop

    def __init__(self) -> None:
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self._joined_hooks: list[Callable[[Peer], None]] = []
        self._gone_hooks: list[Callable[[Peer], None]] = []
        self._agreed_hooks: list[Callable[[], None]] = []
        self._end_hooks: list[Callable[[], None]] = []
        self._unsettled: list[Callable[[], int]] = []
        self._letters: dict[int, Callable[[Peer, Arrived], None]] = {}
        self._in_order: set[type[Any]] = set()
        self._controls: dict[type[Any], Callable[[RemotePeer, Any], None]] = {}

    def part(self, kind: Callable[[Self], P]) -> P:
        """This node's one ``kind(node)``, made at first use: how layers above keep state with a node."""
        part = self._parts.get(kind)
        if part is None:
            with self._parts_lock:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = kind(self)
        return part

    def wait_for(self, count: Callable[[], int]) -> None:
        """Have a graceful shutdown wait while ``count()``, of things under way that are no calls, is not 0."""
        self._unsettled.append(count)

    def something_ended(self) -> None:
        """One of those things came to its end: a graceful shutdown may be waiting for nothing else."""
        self._leaving.poke()

    def on_peer_joined(self, hook: Callable[[Peer], None]) -> None:
        """Call ``hook`` on the I/O thread for every member that joins a running node, before anything of it is read."""
        self._joined_hooks.append(hook)

    def on_member(self, callback: Callable[[MemberEvent], object]) -> Callable[[], None]:
        """Have ``callback`` told, on a worker thread, of members that join, leave, are suspected, recover or die.

        Call what is returned to end that.
        """
        return self._changes.subscribe(callback)

    def member_events(self) -> AsyncIterator[MemberEvent]:
        """The same as an async iterator, from now on until the node ends."""
        return self._changes.iterate()

    def on_peer_gone(self, hook: Callable[[Peer], None]) -> None:
        """Call ``hook`` on the I/O thread whenever a member left or died; it must not run user code."""
        self._gone_hooks.append(hook)

    def on_agreed(self, hook: Callable[[], None]) -> None:
        """In a graceful shutdown call ``hook`` when all work everywhere is done, and the links still stand."""
        self._agreed_hooks.append(hook)

    def on_end(self, hook: Callable[[], None]) -> None:
        """Call ``hook``, which must not raise, when the node ends in whatever way: no message can be sent any more."""
        self._end_hooks.append(hook)

    def on_control(self, kind: type[Any], handle: Callable[[RemotePeer, Any], None], *, in_order: bool = False) -> None:
        """Have ``handle`` called on the I/O thread for each control message of this kind.

        ``in_order``: by whoever reads the link, and so before anything that came behind it; ``handle`` must have a
        lock of its own then.
        """
        self._controls[kind] = handle
        if in_order:
            self._in_order.add(kind)

    def on_letter(self, subject: int, handle: Callable[[Peer, Arrived], None]) -> None:
        """Have ``handle`` called for each letter of this subject, on the thread that reads it: it must not block."""
        self._letters[subject] = handle

    def add_ticker(self, ticker: Ticker) -> None:
        """Have the I/O thread ask ``ticker`` before each sleep; it must not run user code."""
        self._loop.add_ticker(ticker)
        self._loop.wake()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the I/O thread as soon as possible."""
        self._loop.call_soon(function)

    def attend_by(self, when: float) -> None:
        """Make sure that tickers are asked no later than ``when``."""
        self._loop.attend_by(when)
