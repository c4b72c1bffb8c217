"""The transfer of one version from other hosts to this node. Drives `protocol/weights/fetching.py`.

The outcome of each call (`questions.py`) becomes an event of the machine: an answer, a lost member, or silence. A
member that is not the leader of its host copies nothing: it maps the blocks of its leader.

Runs on worker threads, under a lock of its own. No thread holds that lock while it sends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from farcall.channel.host_memory import copy_bytes
from farcall.errors import AnswerLost, Overloaded, RpcError, RpcTimeout, UnknownWorker
from farcall.protocol.weights.fetching import (
    STALL_S,
    Ask,
    AskRoute,
    Came,
    Chunk,
    Done,
    Effect,
    Event,
    Failed,
    Fetching,
    Refused,
    Routed,
    Unanswered,
)
from farcall.protocol.weights.messages import Key
from farcall.rpc.future import Future, call_async
from farcall.runtime.io.timers import NEVER
from farcall.runtime.peers.peer import RemotePeer
from farcall.serialize.allowance import INSTALLED
from farcall.weights.manifest import Content
from farcall.weights.memory import Block, BorrowedBlock
from farcall.weights.questions import borrow, find_route, plain_content, plain_key, read_chunk

if TYPE_CHECKING:
    from farcall.weights.fetcher import Fetcher

ANSWER_S = 4 * STALL_S
"""How long one call may take: a source answers only when it has received the chunk itself."""
AGAIN_S = 0.25
"""The pause before a call is repeated that its receiver was too busy to take."""

Borrowed: TypeAlias = Mapping[Content, BorrowedBlock]
"""Contents that were not fetched, but mapped in the memory of a neighbour."""


@dataclass(frozen=True)
class Arriving:
    """A version to fetch. ``missing`` has a block of this node for each content that the node lacks."""

    name: str
    key: Key
    lender: int
    """The incarnation of the member that sent the manifest. It has the bytes as long as it lives."""
    missing: Mapping[Content, Block]


class Fetch:
    """The transfer of one version to this node.

    Mutable, under the lock: the machine, the callbacks that wait for chunks, the time of the next request for a route,
    the contents that were mapped instead, and the two flags of the end.
    """

    def __init__(
        self, fetcher: Fetcher, arriving: Arriving, on_end: Callable[[Exception | None, Borrowed], None]
    ) -> None:
        self._fetcher = fetcher
        self.arriving: Arriving = arriving
        self._contents = list(arriving.missing)
        self._on_end = on_end
        self._lock = threading.Lock()
        self._machine = Fetching([content.size_bytes for content in self._contents])
        self._waiting: list[tuple[Chunk | None, Callable[[], None]]] = []
        self._avoided: tuple[int, ...] = ()
        self._again_at = NEVER  # when to ask for a route again
        self._borrowed: Borrowed = {}  # whose own blocks are given back when the fetch ends
        self._is_over = False  # no further request or write
        self._is_settled = False  # and `Contents` has the result, or the fetch was stopped

    # --- the machine

    def start(self) -> None:
        with self._lock:
            effects = self._machine.start()
        self._carry_out(effects)

    def on_deadline(self) -> None:
        now = monotonic()
        with self._lock:
            asks_again = self._again_at <= now
            if asks_again:
                self._again_at = NEVER
            effects = self._machine.handle_deadline(now)
        if asks_again:
            self._ask_route()
        self._carry_out(effects)

    def next_deadline(self) -> float:
        with self._lock:
            return NEVER if self._is_over else min(self._machine.next_deadline(), self._again_at)

    def _handle(self, event: Event) -> None:
        with self._lock:
            if self._is_over:
                return
            effects = self._machine.handle(event, monotonic())
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                self._ask(effect)
            elif isinstance(effect, AskRoute):
                self._avoided = (*self._avoided, *(one for one in effect.avoided if one not in self._avoided))
                self._ask_route()
            elif isinstance(effect, Done):
                self._end(None)
            elif isinstance(effect, Failed):
                self._end(RpcError(f"no member has the missing {effect.missing_bytes} bytes of this version any more"))
        self._fetcher.wake_at(self.next_deadline())

    # --- calls

    def _call(self, member: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any] | None:
        peer = self._fetcher.contents.peer(member)
        if peer is None or self._is_over:
            return None
        try:
            return call_async(self._fetcher.node, peer.info, function, args, None, ANSWER_S)
        except (UnknownWorker, RpcError):
            return None  # the member, or this node, has just gone

    def _ask_route(self) -> None:
        arriving = self.arriving
        me = self._fetcher.node.membership.me
        args = (arriving.name, plain_key(arriving.key), me.host_token, list(self._avoided))
        future = self._call(arriving.lender, find_route, args)
        if future is None:
            self._handle(Routed(()))
        else:
            future.add_done_callback(self._on_route)

    def _on_route(self, future: torch.futures.Future[Any]) -> None:
        try:
            neighbour, sources = future.value()
        except (RpcTimeout, AnswerLost, Overloaded):
            with self._lock:
                self._again_at = monotonic() + AGAIN_S  # the lender is still a member, and may answer later
            self._fetcher.wake_at(self._again_at)
        except Exception:
            self._handle(Routed(()))  # the lender is gone
        else:
            if neighbour:
                self._borrow_from(neighbour)
            else:
                self._handle(Routed(self._trusted(sources)))

    def _trusted(self, sources: Sequence[int]) -> Sequence[int]:
        """With a table, the lender alone: others could change the bytes and keep the checksums."""
        return sources if INSTALLED.allowance is None else [one for one in sources if one == self.arriving.lender]

    def _borrow_from(self, neighbour: int) -> None:
        peer = self._fetcher.contents.peer(neighbour)
        if not isinstance(peer, RemotePeer) or peer.lending is None:
            # This link shares no memory: fetch the bytes.
            self._handle(Routed(self._trusted((neighbour, self.arriving.lender))))
            return
        future = self._call(neighbour, borrow, ([plain_content(content) for content in self._contents],))
        if future is None:
            self._avoid(neighbour)
        else:
            future.add_done_callback(partial(self._on_borrowed, neighbour))

    def _on_borrowed(self, neighbour: int, future: torch.futures.Future[Any]) -> None:
        try:
            block_ids = future.value()
        except RpcTimeout:
            # The neighbour is still fetching, or is unresponsive. Either way ask the lender for this host's leader.
            if self._answers(neighbour):
                self._ask_route()
            else:
                self._avoid(neighbour)
            return
        except Exception:
            self._avoid(neighbour)
            return
        blocks = {}
        for content, block_id in zip(self._contents, block_ids if isinstance(block_ids, list) else (), strict=False):
            block = self._fetcher.contents.borrowed(neighbour, block_id) if isinstance(block_id, int) else None
            if block is not None and block.size >= content.size_bytes:
                blocks[content] = block
        if len(blocks) == len(self._contents):
            self._end(None, blocks)
        else:
            self._avoid(neighbour)

    def _answers(self, member: int) -> bool:
        peer = self._fetcher.contents.peer(member)
        silent = {found.name for found in self._fetcher.node.members_now() if found.unresponsive_s is not None}
        return peer is not None and peer.info.name not in silent

    def _avoid(self, neighbour: int) -> None:
        self._avoided = (*self._avoided, neighbour)
        self._ask_route()

    def _ask(self, ask: Ask) -> None:
        chunk = ask.chunk
        content = plain_content(self._contents[chunk.content])
        future = self._call(ask.source, read_chunk, (content, chunk.offset, chunk.size_bytes))
        if future is None:
            self._handle(Refused(chunk, ask.source))
        else:
            future.add_done_callback(partial(self._on_chunk, ask))

    def _on_chunk(self, ask: Ask, future: torch.futures.Future[Any]) -> None:
        chunk = ask.chunk
        try:
            found: torch.Tensor = future.value()
        except AnswerLost:
            self._ask(ask)  # the connection broke and was replaced
            return
        except (RpcTimeout, Overloaded):
            self._handle(Unanswered(chunk, ask.source))
            return
        except Exception:
            self._handle(Refused(chunk, ask.source))
            return
        if not isinstance(found, torch.Tensor) or found.dtype != torch.uint8 or found.numel() != chunk.size_bytes:
            self._handle(Refused(chunk, ask.source))
            return
        with self._lock:
            if self._is_over:
                return  # another version may use the block by now
            if not self._machine.has(chunk):
                copy_bytes(
                    self.arriving.missing[self._contents[chunk.content]].view[chunk.offset :],
                    memoryview(found.numpy()),  # type: ignore[arg-type]
                )
        self._fetcher.count(chunk.size_bytes)
        self._handle(Came(chunk, ask.source))
        self._wake(chunk)

    # --- the end

    def stop(self) -> None:
        """Give the transfer up. Chunks that still arrive are not written."""
        with self._lock:
            self._is_over = self._is_settled = True
        self._wake(None)

    def _end(self, error: Exception | None, borrowed: Borrowed | None = None) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._borrowed = borrowed or {}
        try:
            self._on_end(error, self._borrowed)
        finally:
            # `_on_end` has handed the bytes to `Contents` before this fetch stops serving them: readers see no gap.
            self._fetcher.forget(self)
            with self._lock:
                self._is_settled = True
            self._wake(None)

    # --- members that wait for chunks of this fetch

    def read(self, content: Content, offset: int, size: int) -> bytearray | None:
        """A copy of a chunk that has arrived already."""
        with self._lock:
            if self._is_settled or content not in self.arriving.missing or content in self._borrowed:
                return None
            if not self._machine.has(Chunk(self._contents.index(content), offset, size)):
                return None
            return bytearray(self.arriving.missing[content].view[offset : offset + size])

    def when_here(self, content: Content, offset: int, size: int, wake: Callable[[], None]) -> None:
        """Call ``wake`` once the chunk has arrived, or never will."""
        chunk = Chunk(self._contents.index(content), offset, size)
        with self._lock:
            waits = not self._is_settled and not self._machine.has(chunk)
            if waits:
                self._waiting.append((chunk, wake))
        if not waits:
            wake()

    def when_over(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once the fetch has ended, by success or by failure."""
        with self._lock:
            waits = not self._is_settled
            if waits:
                self._waiting.append((None, wake))
        if not waits:
            wake()

    def _wake(self, chunk: Chunk | None) -> None:
        """Wake the waiters for ``chunk``; None: all waiters."""
        with self._lock:
            woken = [wake for awaited, wake in self._waiting if chunk is None or awaited == chunk]
            self._waiting = [
                (awaited, wake) for awaited, wake in self._waiting if chunk is not None and awaited != chunk
            ]
        for wake in woken:
            wake()
