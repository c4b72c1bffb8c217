"""The streams of one node: routes arriving parts to their readers, and keeps the ends that outlive their calls.

Owns the tables of readers (`stream_reading.py`) and writers (`stream_writing.py`), and the timers that flush and close
them. Must not know the objects that a program iterates over: those are in `streams.py`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable
from contextvars import Context
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from farcall.errors import Cancelled, Delivery, PeerDead, RpcError
from farcall.protocol.frames import Frame
from farcall.protocol.streams import WINDOW_ITEMS, StreamClosed, StreamCredit, decode_part
from farcall.rpc.stream_reading import Incoming, Reader, StreamCall
from farcall.rpc.stream_writing import HOLD_S, STREAMS, Closed, StreamRequest, Writer, pump
from farcall.runtime.calls.executor import FunctionTask
from farcall.runtime.calls.scope import Dependents
from farcall.runtime.calls.serving import Server
from farcall.runtime.io.timers import NEVER
from farcall.runtime.node import Runtime
from farcall.runtime.peers.peer import Peer
from farcall.serialize import Encoding, WithCall, discard, encode_failure

logger: logging.Logger = logging.getLogger("farcall")

RETRY_S = 1.0
"""When a flush that failed is repeated."""
UNREAD_S = 1.0
"""How often a node looks for outgoing streams whose calls ended unread."""


class Streams:
    """The streams of one node, ``node.part(Streams)``.

    Mutable: readers and writers of outgoing streams, by number; ``lingering``, readers whose call was answered before
    all parts came; the ends to flush or close soon. Any thread changes each table, by single atomic operations.
    """

    def __init__(self, node: Runtime) -> None:
        self.node: Runtime = node
        self.lingering: dict[int, StreamCall] = {}
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self._writers: dict[int, tuple[Writer, FunctionTask]] = {}
        self._unread: dict[int, WithCall] = {}  # writers whose reader has not begun, and may never begin
        self._unread_timer = node.timer(self._forget_unread)
        self._next_number = itertools.count(1).__next__
        self.items_read: int = 0  # no lock: two concurrent threads may lose a count, which statistics can bear
        self.items_written: int = 0
        self._to_flush: set[Writer] = set()
        self._flush_timer = node.timer(self._flush)
        self._to_close: deque[Reader] = deque()
        self._close_timer = node.timer(self._close)
        node.hooks.letters[STREAMS] = self.on_letter
        node.hooks.on_control(StreamCredit, self.on_credit)
        node.hooks.on_control(StreamClosed, self.on_closed)
        node.hooks.peer_gone.append(self._on_peer_gone)
        node.hooks.ended.append(self._on_ended)
        node.server.stream_request = self.request

    def request(self, server: Server, peer: Peer, frame: Frame) -> StreamRequest:
        """Make the request of a frame with the flag STREAM."""
        return StreamRequest(self, server, peer, frame)

    def counts(self) -> tuple[int, int, int]:
        """Return the number of streams with an open end here, of items read and of items written."""
        calls = [call for call in self.node.calls.snapshot() if isinstance(call, StreamCall)]
        requests = [request for request in self.node.server.active if isinstance(request, StreamRequest)]
        count = len(calls) + len(requests) + len(self._incoming) + len(self._writers)
        return count, self.items_read, self.items_written

    def waiting_readers(self) -> list[Incoming]:
        """The readers of outgoing streams that wait for an item now."""
        return [reader for reader in list(self._incoming.values()) if reader.waits_since]

    def running_writers(self) -> list[Writer]:
        """The writers of outgoing streams whose items are being made."""
        return [writer for writer, _ in list(self._writers.values()) if writer.thread_id]

    # --- what arrives ---------------------------------------------------------------------------------------

    def on_letter(self, peer: Peer, frame: Frame) -> None:
        """On the thread that reads the link: hand a part to its reader."""
        try:
            part = decode_part(frame.function)
        except (msgspec.DecodeError, ValueError) as error:
            logger.error("%s: cannot read a part of a stream from %s: %s", self.node.info.name, peer.info.name, error)
            return
        reader: Reader | None
        if part.outgoing:
            reader = self._incoming.get((peer.number, part.number))
        else:
            call = self.node.calls.find(part.number) or self.lingering.get(part.number)
            reader = call if isinstance(call, StreamCall) and call.peer is peer else None
        if reader is None:
            discard(frame.payload, peer)  # the stream was closed here
            return
        reader.on_part(part, frame)
        if reader.complete or reader.closed:
            self.lingering.pop(part.number, None)
            if part.outgoing:
                self.forget(reader)

    def on_credit(self, peer: Peer, message: StreamCredit) -> None:
        """The reader grants credit. For an outgoing stream, the first credit starts the writer."""
        if message.outgoing:
            found = self._writers.get(message.number)
            if found is None:
                if message.items <= WINDOW_ITEMS:
                    self._refuse_late_reader(peer, message.number)
            elif found[0].peer is peer:
                found[0].on_credit(message.items, message.size_bytes)
                if self._unread.pop(message.number, None) is not None:
                    self.node.executor.submit(found[1])
        else:
            request = self.node.server.find(peer, message.number)
            if isinstance(request, StreamRequest):
                request.writer.on_credit(message.items, message.size_bytes)

    def _refuse_late_reader(self, peer: Peer, number: int) -> None:
        """``peer`` begins to read an outgoing stream that this node has forgotten: end it there, with an error.

        Its call timed out or was cancelled here while its function ran on. Without an end, the reader would wait.
        """
        error = Cancelled("the call that brought this stream had ended at its caller before the stream was read")
        try:
            Writer(self, peer, number, outgoing=True).finish(encode_failure(error, self.node.info))
        except RpcError:
            pass  # the reader's node is gone

    def on_closed(self, peer: Peer, message: StreamClosed) -> None:
        """The reader of an outgoing stream has closed it."""
        found = self._writers.get(message.number)
        if found is not None and found[0].peer is peer:
            self._close_writer(message.number, found[0])

    def _close_writer(self, number: int, writer: Writer) -> None:
        writer.close()
        if self._unread.pop(number, None) is not None:
            self._writers.pop(number, None)  # a writer that has begun leaves the table when its pump ends

    # --- outgoing streams -----------------------------------------------------------------------------------

    def open_outgoing(self, peer: Peer, source: Iterable[Any], context: Context, encoding: Encoding) -> int:
        """Register a stream of ``source``, which is about to be sent to ``peer`` as an argument; return its number."""
        number = self._next_number()
        writer = Writer(self, peer, number, outgoing=True)

        def ended() -> None:
            self._writers.pop(number, None)
            self._unread.pop(number, None)

        def write() -> None:
            """Write all items of ``source``, in the context of the code that made the stream."""
            writer.begin()
            try:
                error = context.run(pump, writer.put, source)
                if not isinstance(error, Closed):
                    writer.finish(None if error is None else encode_failure(error, self.node.info))
            except RpcError:
                pass  # the reader's node is gone
            finally:
                ended()

        self._writers[number] = (writer, FunctionTask(write, ended))
        self._unread[number] = opened = WithCall(ended)
        encoding.on_failure(opened)
        if self._unread_timer.due == NEVER:
            self._unread_timer.at(monotonic() + UNREAD_S)
        return number

    def _forget_unread(self, now: float) -> float:
        """On the I/O thread: close streams that no reader began before their call ended: refused, cancelled or lost.

        This cannot miss a reader: its first credit precedes the answer to its call, on the same link.
        """
        for opened in list(self._unread.values()):
            if opened.call_id and self.node.calls.find(opened.call_id) is None:
                opened()
        return now + UNREAD_S if self._unread else NEVER

    def incoming(self, peer: Peer, number: int) -> Incoming:
        """Make the reading end of an outgoing stream of ``peer`` that arrived as an argument."""
        reader = self._incoming[peer.number, number] = Incoming(self, peer, number)
        if reader.request is not None:
            # By way of the table: the request must not hold the reader, which holds the request.
            Dependents.watch(reader.request, partial(self._give_up, peer.number, number))
        return reader

    def _give_up(self, peer_number: int, number: int) -> None:
        """The call that brought an outgoing stream is not wanted any more: its function must not wait for items."""
        reader = self._incoming.get((peer_number, number))
        if reader is not None:
            reader.give_up()

    def forget(self, reader: Reader) -> None:
        """Remove ``reader`` of an outgoing stream: no more parts will come."""
        self._incoming.pop((reader.peer.number, reader.number), None)

    # --- soon, on the I/O thread ----------------------------------------------------------------------------

    def flush_later(self, writer: Writer) -> None:
        """Have the I/O thread flush ``writer`` in HOLD_S at most."""
        self._to_flush.add(writer)
        if self._flush_timer.due == NEVER:
            self._flush_timer.at(monotonic() + HOLD_S)

    def _flush(self, now: float) -> float:
        if not self._to_flush:
            return NEVER
        again = []
        try:
            for _ in range(len(self._to_flush)):
                writer = self._to_flush.pop()
                try:
                    if not writer.flush_nowait():
                        again.append(writer)
                except Exception:
                    # There is no memory for its items, perhaps; and its next item, which would send them, may not come.
                    logger.exception("the items of a stream cannot be sent yet; the next attempt is in %s s", RETRY_S)
                    self.node.timer(partial(self._flush_again, writer)).at(now + RETRY_S)
        finally:
            self._to_flush.update(again)
        # Run once more, even with nothing to flush: otherwise each next item of a quick stream would wake this thread
        # only to set the timer.
        return now + HOLD_S

    def _flush_again(self, writer: Writer, now: float) -> float:
        self.flush_later(writer)
        return NEVER

    def close_later(self, reader: Reader) -> None:
        """Have the I/O thread close ``reader``, whose `Stream` was dropped. For destructors: takes no lock."""
        self._to_close.append(reader)
        self._close_timer.at(0.0)

    def _close(self, now: float) -> float:
        while self._to_close:
            self._to_close.popleft().close()
        return NEVER

    # --- ends -----------------------------------------------------------------------------------------------

    def _on_peer_gone(self, peer: Peer) -> None:
        error = PeerDead(f"{peer.info.name}, which wrote the stream, is gone", Delivery.UNKNOWN, peer.info)
        for reader in [*self._incoming.values(), *self.lingering.values()]:
            if reader.peer is peer:
                reader.break_off(error)
                self.forget(reader)
        for number, call in self.lingering.copy().items():  # a copy: threads that read other links change the table
            if call.peer is peer:
                self.lingering.pop(number, None)
        for number, (writer, _) in self._writers.copy().items():
            if writer.peer is peer:
                self._close_writer(number, writer)

    def _on_ended(self) -> None:
        error = Cancelled(f"{self.node.info.name} shut down")
        for reader in [*self._incoming.values(), *self.lingering.values()]:
            reader.break_off(error)
        for number, (writer, _) in self._writers.copy().items():
            self._close_writer(number, writer)
        self._incoming.clear()
        self.lingering.clear()
