"""Large messages in chunks over connections that break at any byte: each arrives once and whole, or not and it is told.

Their memory is scribbled over as soon as their sender may change it: whoever looks at it later is found out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol.chunks import LargeMessage
from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import LARGE_BYTES, MAX_SLOTS, REQUEST, Frame, encode_frame, encode_small, numbered
from farcall.protocol.session import Session

PIPE_BYTES = 8 * 1024
APOLOGY = 1


class Message:
    """A large message at its sender."""

    def __init__(self, number: int, slot: int, size: int, repeatable: bool) -> None:
        self.number = number
        self.slot = slot
        self.memory = bytearray([number % 251]) * size
        pieces = encode_frame(REQUEST, 0, number, b"f", b"", b"p", [memoryview(self.memory), memoryview(b"tail")])
        self.repeatable = repeatable
        self.large = LargeMessage(pieces, slot, None if repeatable else self.apologise)
        self.apologies = 0

    def apologise(self) -> Sequence[bytes]:
        self.apologies += 1
        return (encode_small(REQUEST, APOLOGY, self.number, b"", b"", b""),)

    def forget(self) -> None:
        """Its sender has its memory back, and changes it."""
        if not self.repeatable:
            self.memory[:] = bytes(len(self.memory))


class Sender:
    def __init__(self) -> None:
        self.session = Session()
        self.unsent: deque[memoryview] = deque()
        self.open: list[Message] = []
        self.slots = deque(range(MAX_SLOTS))
        self.number = 0
        self.given_up: set[int] = set()
        self.repeatable: set[int] = set()
        self.before: dict[int, set[int]] = {}  # by number: what had been sent before its sending began
        self.done: set[int] = set()

    def _next(self) -> int:
        self.number += 1
        self.before[self.number] = set(self.done)
        return self.number

    def write(self, size: int) -> None:
        number = self._next()
        frame = encode_small(REQUEST, 0, number, b"", b"", bytes(size))
        self.unsent.append(memoryview(numbered([frame], self.session.write(frame))))
        self.done.add(number)

    def begin(self, size: int, repeatable: bool) -> None:
        if self.slots:
            self.open.append(Message(self._next(), self.slots.popleft(), size, repeatable))
            if repeatable:
                self.repeatable.add(self.number)

    def cut(self, which: int, limit: int | None) -> None:
        if self.open:
            large = self.open[which % len(self.open)].large
            if large.cut_bytes < large.size_bytes:
                chunk = large.next_chunk(limit)
                self.unsent.extend(map(memoryview, chunk.pieces(self.session.write(chunk))))

    def settle(self) -> None:
        """All has left: whose message was cut to its end goes on."""
        if not self.unsent:
            for message in list(self.open):
                if message.large.cut_bytes == message.large.size_bytes:
                    message.large.written()
                    self._end(message)
                    self.done.add(message.number)

    def give_up(self, which: int) -> None:
        if self.open:
            message = self.open[which % len(self.open)]
            if message.large.cut_bytes < message.large.size_bytes:
                farewell = message.large.give_up()
                self.unsent = deque(memoryview(bytes(view)) for view in self.unsent)
                if farewell is not None:
                    self.unsent.append(memoryview(numbered([farewell], self.session.write(farewell))))
                self.given_up.add(message.number)
                self._end(message)

    def _end(self, message: Message) -> None:
        self.open.remove(message)
        self.slots.append(message.slot)
        message.forget()

    def resume(self, received: int) -> None:
        self.session.broke()
        self.session.resume()
        self.unsent = deque(map(memoryview, self.session.resumed(received)))


class Receiver:
    def __init__(self) -> None:
        self.decoder = FrameDecoder()
        self.arrived: list[Frame] = []

    def read(self, data: bytes) -> None:
        while data:
            view = self.decoder.writable()
            assert len(view)
            chunk = data[: len(view)]
            view[: len(chunk)] = chunk
            data = data[len(chunk) :]
            self.arrived += self.decoder.received(len(chunk))


amounts = st.one_of(st.integers(1, 100), st.integers(1, PIPE_BYTES))
which = st.integers(0, 5)
limits = st.one_of(st.none(), st.integers(1, 300), st.integers(300, 100_000))
steps = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 500)),
    st.tuples(st.just("begin"), st.sampled_from([1, 500, LARGE_BYTES - 1, LARGE_BYTES + 9]), st.booleans()),
    st.tuples(st.just("cut"), which, limits),
    st.tuples(st.just("cut"), which, limits),
    st.tuples(st.just("give up"), which),
    st.tuples(st.just("acknowledge")),
    st.tuples(st.just("move"), amounts, amounts),
    st.tuples(st.just("move"), amounts, amounts),
    st.tuples(st.just("move"), st.just(LARGE_BYTES), st.just(LARGE_BYTES)),
    st.tuples(st.just("break")),
)


@given(st.lists(steps, max_size=80))
def test_messages_arrive_once_and_whole_whatever_breaks_where(plan: list[tuple[object, ...]]) -> None:
    sender, receiver, pipe = Sender(), Receiver(), bytearray()

    def move(taken: int, given: int) -> None:
        while taken and sender.unsent:
            part = sender.unsent[0][:taken]
            pipe.extend(part)
            taken -= len(part)
            sender.unsent[0] = sender.unsent[0][len(part) :]
            if not len(sender.unsent[0]):
                sender.unsent.popleft()
        sender.settle()
        receiver.read(bytes(pipe[:given]))
        del pipe[:given]

    def finish() -> None:
        while sender.unsent or pipe or sender.open:
            for index in range(len(sender.open)):
                sender.cut(index, 5000)
            move(1 << 20, 1 << 20)

    for action, *details in plan:
        if action == "write":
            sender.write(*details)  # type: ignore[arg-type]
        elif action == "begin":
            sender.begin(*details)  # type: ignore[arg-type]
        elif action == "cut":
            sender.cut(*details)  # type: ignore[arg-type]
        elif action == "give up":
            sender.give_up(*details)  # type: ignore[arg-type]
        elif action == "acknowledge":
            sender.session.on_acknowledged(receiver.decoder.count)
        elif action == "move":
            move(*details)  # type: ignore[arg-type]
        else:
            pipe.clear()
            receiver.decoder.restart()
            sender.resume(receiver.decoder.count)
    finish()

    numbers = [frame.call_id for frame in receiver.arrived]
    assert sorted(numbers) == sorted(set(range(1, sender.number + 1)) - sender.given_up)
    places = {number: place for place, number in enumerate(numbers)}
    for frame in receiver.arrived:
        if frame.flags == APOLOGY:
            assert frame.call_id not in sender.repeatable
        elif frame.buffers:
            content, tail = frame.buffers
            assert bytes(content) == bytes([frame.call_id % 251]) * len(content)
            assert bytes(tail) == b"tail"
        for earlier in sender.before[frame.call_id]:
            assert places[earlier] < places[frame.call_id]
    assert receiver.decoder.count == sender.session.acknowledged + len(sender.session.kept)
    assert not receiver.decoder._assemblies
