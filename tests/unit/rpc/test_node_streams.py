"""The streams of a node, without sockets: ends that miss each other."""

from __future__ import annotations

import contextvars
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from tests.kit.clock import Clock
from tests.kit.unlinked import UnlinkedPeer

from farcall.errors import Cancelled
from farcall.ids import WorkerInfo
from farcall.protocol.frames import LETTER, Frame
from farcall.protocol.streams import WINDOW_BYTES, WINDOW_ITEMS, Part, StreamCredit, decode_part, encode_part
from farcall.rpc import node_streams, stream_reading, stream_writing
from farcall.rpc.node_streams import RETRY_S, Streams
from farcall.rpc.stream_reading import Reader
from farcall.rpc.stream_writing import HOLD_S, STREAMS, StreamRequest, Writer
from farcall.runtime.calls.pending import CallTable
from farcall.runtime.node.hooks import Hooks
from farcall.runtime.peers.peer import Peer
from farcall.serialize import decode_failure

FIRST_CREDIT = (True, WINDOW_ITEMS, WINDOW_BYTES)


class FakePeer(UnlinkedPeer):
    def __init__(self) -> None:
        unused: Any = SimpleNamespace(open_link=lambda: 1)
        super().__init__(unused)
        self.letters: list[Frame] = []

    def send(self, frame: Frame, *_: Any, **__: Any) -> None:
        self.letters.append(frame)


class FakeNode:
    info = WorkerInfo("w0", 0)
    timeout_s = 60.0

    def __init__(self) -> None:
        self.clock = Clock()
        self.timer = self.clock.timer
        unused: Any = None
        self.calls = CallTable(unused, self.clock.timer, unused)
        self.server = SimpleNamespace()
        self.hooks = Hooks()
        self.tasks: list[Any] = []
        self.executor = SimpleNamespace(submit=self.tasks.append)


@pytest.fixture
def node() -> Any:
    return FakeNode()


def open_outgoing(streams: Streams, peer: Peer) -> int:
    encoding: Any = SimpleNamespace(on_failure=lambda opened: None)
    return streams.open_outgoing(peer, [1, 2], contextvars.copy_context(), encoding)


def test_a_reader_that_begins_after_the_end_of_its_call_is_told(node: Any) -> None:
    """The caller has timed out, and forgotten the stream; the function runs on, and then wants the first item."""
    streams, peer = Streams(node), FakePeer()
    number = open_outgoing(streams, peer)
    streams._unread[number].call_id = 7  # of a call that is not in the table any more
    streams._forget_unread(0.0)
    streams.on_credit(peer, StreamCredit(number, *FIRST_CREDIT))
    [end] = peer.letters
    part = decode_part(end.function)
    assert (part.number, part.outgoing, part.first, part.last) == (number, True, 0, True)
    assert isinstance(decode_failure(end, peer), Cancelled)


def test_a_late_credit_for_a_stream_that_was_read_is_not_answered(node: Any) -> None:
    streams, peer = Streams(node), FakePeer()
    streams.on_credit(peer, StreamCredit(1, True, WINDOW_ITEMS + 600, WINDOW_BYTES))
    assert peer.letters == []


# ---------------------------------------------------------------------- items that cannot be sent now


@pytest.mark.parametrize("where", ["encode_part", "send"])
def test_items_for_which_there_was_no_memory_are_sent_later(
    node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Also if no other item comes: the function may wait for something that its reader does with this one."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(node_streams, "monotonic", lambda: clock.now)
    streams, peers = Streams(node), (FakePeer(), FakePeer())
    for peer in peers:
        monkeypatch.setattr(peer, "flush", lambda: None)
        writer = Writer(streams, peer, 7, outgoing=False)
        writer._last_at = perf_counter() + 60.0  # the next item comes quickly, so it is held back
        writer.put(1)
    with monkeypatch.context() as patch:
        patch.setattr(*((stream_writing, where) if where == "encode_part" else (FakePeer, where)), no_memory)
        node.clock.turn_to(HOLD_S)
    assert [peer.letters for peer in peers] == [[], []]
    assert caplog.text.count("cannot be sent yet") == 2
    for clock.now in (RETRY_S + HOLD_S, RETRY_S + 2 * HOLD_S):
        node.clock.turn_to(clock.now)
    parts = [[decode_part(letter.function) for letter in peer.letters] for peer in peers]
    assert [[(part.first, part.items) for part in of_peer] for of_peer in parts] == [[(0, 1)], [(0, 1)]]


def test_a_stream_whose_end_cannot_be_sent_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request had no answer, and the reader waited for ever."""
    failures: list[BaseException] = []
    monkeypatch.setattr(StreamRequest, "fail", lambda _, error: failures.append(error))
    request = StreamRequest.__new__(StreamRequest)
    request.cancelled = False
    request.writer = SimpleNamespace(finish=no_memory)  # type: ignore[assignment]
    request.end(None)
    assert [type(error) for error in failures] == [MemoryError]


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


# ---------------------------------------------------------------------- parts that nobody takes


class Pieces:
    """A reader, and the payloads that were given back."""

    def __init__(self, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.discarded: list[bytes] = []
        monkeypatch.setattr(stream_reading, "discard", lambda payload, peer: self.discarded.append(payload))

        class Ending(Reader):
            def _end(self) -> None: ...

        self.reader = Ending(Streams(node), FakePeer(), "f", outgoing=False)

    def come(self, first: int, payload: bytes) -> None:
        part = Part(1, False, first, [(1, len(payload), 0)])
        self.reader.on_part(part, Frame(LETTER, 0, STREAMS, encode_part(part), payload=payload))


def test_parts_that_wait_for_others_are_given_back_with_their_stream(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = Pieces(node, monkeypatch)
    pieces.come(0, b"first")
    pieces.come(2, b"third")  # the second is large, and still on its way
    assert pieces.reader.holds_parts
    pieces.reader.close()
    assert sorted(pieces.discarded) == [b"first", b"third"]
    assert not pieces.reader.holds_parts


def test_a_part_that_comes_while_the_stream_is_closed_is_given_back(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(node, monkeypatch)
    machine = pieces.reader._machine

    class Closing:
        """Closes the stream, as another thread may, after the reader of the link has looked whether it is open."""

        def on_part(self, *part: Any) -> Any:
            pieces.reader.close()
            return machine.on_part(*part)

        def __getattr__(self, name: str) -> Any:
            return getattr(machine, name)

    pieces.reader._machine = Closing()  # type: ignore[assignment]
    pieces.come(0, b"first")
    assert pieces.discarded == [b"first"]
