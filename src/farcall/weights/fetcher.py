"""Versions in transit between hosts: the fetches of this node, and the chunks and routes that it serves to others.

`subscriptions.py` names the missing contents, `fetching.py` fetches them. Other members call the functions of
`questions.py`. A block that a neighbour has mapped is never filled again, so it needs no lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

import torch

from farcall.errors import NetworkError, RpcError
from farcall.protocol.weights.fetching import Route, Routes
from farcall.protocol.weights.messages import Key
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.results import Later
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer, RemotePeer
from farcall.weights.fetching import AGAIN_S, Arriving, Borrowed, Fetch
from farcall.weights.manifest import Content
from farcall.weights.memory import BorrowedBlock

ROUTES_KEPT = 16


class Contents(Protocol):
    """The contents that this node has, as `weights/node.py` knows them."""

    def peer(self, incarnation: int) -> Peer | None:
        """The member of that incarnation, if it lives."""

    def read_content(self, content: Content, offset: int, size: int) -> bytearray | None:
        """A copy of a part of a content; None unless the whole content lies in a block that this node owns."""

    def lend_block(self, content: Content, peer: RemotePeer) -> int | None:
        """Lend ``peer``, on this host, the block of a content for ever; return the block's number."""

    def borrowed(self, owner: int, block_id: int) -> BorrowedBlock | None:
        """A block that another process of this host has offered to this one."""


class Fetcher:
    """The fetches of one node, and the routes of the versions that it lends.

    Mutable, under the lock: the fetches by name and version, and the routes of the `ROUTES_KEPT` latest versions.
    """

    def __init__(self, node: Runtime, contents: Contents) -> None:
        self.node: Runtime = node
        self.contents: Contents = contents
        self.received_bytes: int = 0
        """The bytes received over links, duplicate chunks included."""
        self.asked_at: dict[int, float] = {}
        """When each other member last asked for a chunk or a route."""
        self._lock = threading.Lock()
        self._fetches: dict[tuple[str, Key], Fetch] = {}
        self._routes: dict[tuple[str, Key], Routes] = {}
        self._timer = node.timer(self._on_timer)
        node.hooks.peer_gone.append(self._on_gone)
        node.hooks.ended.append(self._on_ended)

    def fetch(self, arriving: Arriving, on_end: Callable[[Exception | None, Borrowed], None]) -> None:
        """Begin to fill ``arriving.missing``.

        A worker thread calls ``on_end`` once, with the error, and the contents that were mapped instead of filled.
        """
        fetch = Fetch(self, arriving, on_end)
        with self._lock:
            self._fetches[arriving.name, arriving.key] = fetch
        self.work(fetch.start)

    def stop(self, name: str, key: Key) -> None:
        """Stop fetching a version that nobody wants any more."""
        with self._lock:
            fetch = self._fetches.pop((name, key), None)
        if fetch is not None:
            fetch.stop()

    def count(self, size_bytes: int) -> None:
        """Count received bytes. Runs on any worker thread."""
        with self._lock:
            self.received_bytes += size_bytes

    def forget(self, fetch: Fetch) -> None:
        """Forget a fetch that has ended. `Contents` has its result by now."""
        key = fetch.arriving.name, fetch.arriving.key
        with self._lock:
            if self._fetches.get(key) is fetch:
                del self._fetches[key]

    def work(self, function: Callable[[], object]) -> None:
        """Run ``function`` on a worker thread."""
        self.node.executor.submit(FunctionTask(function, function))

    def wake_at(self, when: float) -> None:
        """Check the deadlines at ``when``, or earlier."""
        if when < self._timer.due:
            self._timer.at(when)

    def _all(self) -> list[Fetch]:
        with self._lock:
            return list(self._fetches.values())

    def _on_timer(self, now: float) -> float:
        nearest = NEVER
        for fetch in self._all():
            deadline = fetch.next_deadline()
            if deadline <= now:
                self.work(fetch.on_deadline)
                deadline = now + AGAIN_S
            nearest = min(nearest, deadline)
        return nearest

    def _on_gone(self, peer: Peer) -> None:
        self.asked_at.pop(peer.incarnation, None)
        with self._lock:
            for routes in self._routes.values():
                routes.forget(peer.incarnation)

    def _on_ended(self) -> None:
        for fetch in self._all():
            fetch.stop()

    # ------------------------------------------------------------------ for other members

    def route(self, name: str, key: Key, member: int, host: str, avoided: Sequence[int]) -> Route:
        """The route by which ``member`` gets a version that this node lends it."""
        self.asked_at[member] = monotonic()
        with self._lock:
            routes = self._routes.get((name, key))
            if routes is None:
                while len(self._routes) >= ROUTES_KEPT:
                    del self._routes[next(iter(self._routes))]
                routes = self._routes[name, key] = Routes(self.node.me.incarnation)
            return routes.find(member, host, avoided)

    def chunk(self, content: Content, offset: int, size: int, member: int) -> torch.Tensor | Later:
        """A range of a content, by value, for ``member``; `Later` while this node still fetches it."""
        self.asked_at[member] = monotonic()
        # Find the fetch before looking for the bytes. A fetch that ends between the two steps has handed its bytes to
        # `Contents` by then; in the other order both steps could miss them.
        fetch = next((fetch for fetch in self._all() if content in fetch.arriving.missing), None)
        found = self._bytes(content, offset, size)
        if found is not None:
            return found
        if fetch is None:
            raise _lacking(self.node, content)
        return Later(partial(fetch.when_here, content, offset, size), partial(self._chunk_now, content, offset, size))

    def _chunk_now(self, content: Content, offset: int, size: int) -> torch.Tensor:
        found = self._bytes(content, offset, size)
        if found is None:
            raise _lacking(self.node, content)
        return found

    def _bytes(self, content: Content, offset: int, size: int) -> torch.Tensor | None:
        if offset < 0 or size <= 0 or offset + size > content.size_bytes:
            raise RpcError(f"{size} bytes at {offset} of a content of {content.size_bytes}")
        data = next(filter(None, (fetch.read(content, offset, size) for fetch in self._all())), None)
        if data is None:
            data = self.contents.read_content(content, offset, size)
        return None if data is None else torch.frombuffer(data, dtype=torch.uint8)

    def lend(self, peer: RemotePeer, contents: Sequence[Content]) -> Later:
        """Have ``peer``, on this host, map the blocks of these contents. The result, their numbers, waits for all."""
        lend = partial(self._lend_now, peer, contents)
        for fetch in self._all():
            if any(content in fetch.arriving.missing for content in contents):
                return Later(fetch.when_over, lend)
        return Later(lambda wake: wake(), lend)  # on a worker thread: `lend` may wait for a link

    def _lend_now(self, peer: RemotePeer, contents: Sequence[Content]) -> list[int]:
        numbers = []
        for content in contents:
            number = self.contents.lend_block(content, peer)
            if number is None:
                raise _lacking(self.node, content)
            numbers.append(number)
        return numbers


def _lacking(node: Runtime, content: Content) -> NetworkError:
    return NetworkError(f"{node.info.name} does not have block {content.block_id}, filling {content.fill}")
