"""Two sessions over connections that break at any byte: every frame arrives once, in order, and little is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import CONTROL, LARGE_BYTES, REQUEST, Piece, encode_frame, encode_small, numbered
from farcall.protocol.session import ACKNOWLEDGE_BYTES, ACKNOWLEDGE_FRAMES, Kept, Session

PIPE_BYTES = 32 * 1024
LARGE = LARGE_BYTES + 10


class Large:
    """A frame that is not kept. One that can be repeated is written again; of others a small apology is sent."""

    def __init__(self, number: int, repeatable: bool) -> None:
        self._number = number
        self._repeatable = repeatable

    def lost(self) -> Sequence[Kept]:
        return (self,) if self._repeatable else (encode_small(REQUEST, 1, self._number, b"", b"", b""),)

    def pieces(self, number: int) -> Sequence[Piece]:
        pieces = encode_frame(REQUEST, 0, self._number, b"", b"", b"", [memoryview(bytes(LARGE))])
        return [numbered([b"".join(pieces)], number)]


class End:
    """One end: what it writes, and what came out of it."""

    def __init__(self) -> None:
        self.session = Session()
        self.decoder = FrameDecoder()
        self.unsent: deque[memoryview] = deque()
        self.bytes_received = 0
        self.next_number = 1
        self.arrived: list[tuple[int, int]] = []  # (number, 1 if only an apology came)
        self.apologised: set[int] = set()

    def write(self, size: int) -> None:
        frame = encode_small(REQUEST, 0, self.next_number, b"", b"", bytes(size))
        self.next_number += 1
        self._queue(frame)

    def write_large(self, repeatable: bool) -> None:
        large = Large(self.next_number, repeatable)
        self.next_number += 1
        self._queue(large)

    def _queue(self, kept: Kept) -> None:
        number = self.session.write(kept)
        pieces = [numbered([kept], number)] if isinstance(kept, bytes) else kept.pieces(number)
        self.unsent.extend(memoryview(piece) for piece in pieces)

    def read(self, data: bytes) -> None:
        while data:
            view = self.decoder.writable()
            chunk = data[: len(view)]
            view[: len(chunk)] = chunk
            data = data[len(chunk) :]
            self.bytes_received += len(chunk)
            frames = self.decoder.received(len(chunk))
            session = self.session
            session.received = self.decoder.count
            for frame in frames:
                if frame.kind == CONTROL:
                    session.on_acknowledged(frame.call_id)
                else:
                    self.arrived.append((frame.call_id, frame.flags))
            if frames and (session.received >= session.due_at or self.bytes_received >= session.due_at_bytes):
                count = session.acknowledgement(self.bytes_received)
                told = encode_small(CONTROL, 0, count, b"", b"", b"")
                self._queue(told)


class Pipe:
    """One direction of a connection."""

    def __init__(self, sender: End, receiver: End) -> None:
        self.sender = sender
        self.receiver = receiver
        self.buffer = bytearray()

    def take(self, limit: int) -> None:
        """The sender's kernel takes some bytes."""
        room = min(limit, PIPE_BYTES - len(self.buffer))
        unsent = self.sender.unsent
        while room and unsent:
            part = unsent[0][:room]
            self.buffer += part
            room -= len(part)
            if len(part) == len(unsent[0]):
                unsent.popleft()
            else:
                unsent[0] = unsent[0][len(part) :]

    def give(self, limit: int) -> None:
        """The receiver reads some bytes."""
        data = bytes(self.buffer[:limit])
        del self.buffer[: len(data)]
        self.receiver.read(data)


def reconnect(ends: Sequence[End]) -> list[Pipe]:
    """Break the connection, whatever is on its way, and make a new one."""
    for end in ends:
        end.session.broke()
        end.decoder.restart()
        end.unsent.clear()
    counts = [end.session.resume() for end in ends]
    for end, count in zip(ends, reversed(counts), strict=True):
        end.unsent.extend(map(memoryview, end.session.resumed(count)))
    return [Pipe(ends[0], ends[1]), Pipe(ends[1], ends[0])]


sizes = st.one_of(st.integers(0, 100), st.integers(0, 5000))
amounts = st.one_of(st.integers(1, 200), st.integers(1, PIPE_BYTES))
which = st.integers(0, 1)
steps = st.one_of(
    st.tuples(st.just("write"), which, st.lists(sizes, min_size=1, max_size=30)),
    st.tuples(st.just("large"), which, st.booleans()),
    st.tuples(st.just("take"), which, amounts),
    st.tuples(st.just("give"), which, amounts),
    st.tuples(st.just("break"), which, st.none()),
)


@given(st.lists(steps, max_size=60))
def test_frames_arrive_once_and_in_order_whatever_breaks_where(plan: list[tuple[str, int, object]]) -> None:
    ends = [End(), End()]
    pipes = reconnect(ends)
    for action, index, detail in plan:
        if action == "write":
            for size in detail:  # type: ignore[attr-defined]
                ends[index].write(size)
        elif action == "large":
            ends[index].write_large(bool(detail))
        elif action == "take":
            pipes[index].take(detail)  # type: ignore[arg-type]
        elif action == "give":
            pipes[index].give(detail)  # type: ignore[arg-type]
        else:
            pipes = reconnect(ends)
    while any(end.unsent for end in ends) or any(pipe.buffer for pipe in pipes):
        for pipe in pipes:
            pipe.take(PIPE_BYTES)
            pipe.give(PIPE_BYTES)
    for sender, receiver in (ends, reversed(ends)):
        assert [number for number, _ in receiver.arrived] == list(range(1, sender.next_number))
        # All has arrived: no more is kept than one acknowledgement may leave open.
        assert len(sender.session.kept) < 2 * ACKNOWLEDGE_FRAMES
        small = sum(len(frame) for frame in sender.session.kept if isinstance(frame, bytes))
        assert small < ACKNOWLEDGE_BYTES + PIPE_BYTES + 6000
        assert receiver.session.received == sender.session.acknowledged + len(sender.session.kept)


@given(st.lists(st.integers(0, 2000), min_size=200, max_size=400), st.integers(1, PIPE_BYTES))
def test_a_stream_in_one_direction_keeps_little(stream: list[int], amount: int) -> None:
    """Nothing but acknowledgements goes the other way, and no timer sends them."""
    ends = [End(), End()]
    forth, back = reconnect(ends)
    most = 0
    for size in stream:
        ends[0].write(size)
        forth.take(PIPE_BYTES)
        forth.give(amount + 5000)
        back.take(PIPE_BYTES)
        back.give(PIPE_BYTES)
        most = max(most, len(ends[0].session.kept) - len(ends[0].unsent))
    assert most <= ACKNOWLEDGE_FRAMES + PIPE_BYTES // 40 + 1
