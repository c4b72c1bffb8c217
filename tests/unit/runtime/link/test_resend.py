"""Links over successive in-memory connections: what was written goes on, whatever the break lost. No sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue
from time import monotonic

import pytest
from tests.kit.memory_transport import MemoryTransport, memory_pair
from tests.kit.waiting import wait_until

from farcall.errors import Delivery, PeerDead, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol.chunks import LargeMessage
from farcall.protocol.frames import CONTROL, REQUEST, Frame, encode_frame, encode_small, numbered
from farcall.protocol.session import ACKNOWLEDGE_FRAMES, SessionError, State
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import reading
from farcall.runtime.link import send, send_queue
from farcall.runtime.link.link import Link
from farcall.runtime.link.receive import Incoming
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import TransportForged

PATIENCE_S = 60.0
CAPACITY_BYTES = 16 * 1024


class End:
    """One end, with a session."""

    def __init__(self, name: str, transport: MemoryTransport) -> None:
        self.frames: Queue[Frame] = Queue()
        self.broken: Queue[str] = Queue()
        self.interrupted: Queue[str] = Queue()
        self.may_return = True
        self.loop = Loop(name)
        self.link = Link(
            WorkerInfo(name, 0),
            transport,
            self.loop,
            self._on_frame,
            self.broken.put,
            1 << 20,
            acknowledge=self._acknowledge,
            on_interrupted=self._on_interrupted,
        )
        self.loop.start()
        self.link.start()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == CONTROL:
            self.link.session.on_acknowledged(frame.call_id)
        else:
            self.frames.put(frame)

    def _acknowledge(self, count: int, more: bool) -> None:
        self.link.outgoing.send(encode_small(CONTROL, 0, count, b"", b"", b""), more=more, urgent=True)

    def _on_interrupted(self, reason: str) -> bool:
        self.interrupted.put(reason)
        return self.may_return

    def next(self) -> int:
        return self.frames.get(timeout=PATIENCE_S).call_id

    def on_loop(self, action: object) -> None:
        """Run ``action`` on the I/O thread, and wait for it."""
        failures: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                action()  # type: ignore[operator]
            except BaseException as failure:
                failures.append(failure)
            finally:
                done.set()

        self.loop.call_soon(run)
        assert done.wait(PATIENCE_S)
        if failures:
            raise failures[0]

    def close(self) -> None:
        self.link.close()
        self.loop.stop()


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    left, right = memory_pair(CAPACITY_BYTES)
    pair = End("left", left), End("right", right)
    yield pair
    for end in pair:
        end.close()


def small(number: int, size: int = 10) -> bytes:
    return encode_small(REQUEST, 0, number, b"", b"", b"x" * size)


def large(number: int, size: int = 1 << 20) -> list[bytes | memoryview]:
    return encode_frame(REQUEST, 0, number, b"", b"", b"", [memoryview(bytearray([number]) * size)])


def stop_reading(end: End) -> None:
    """The other thread, for which a test took the read lock, stops."""
    reading.link = end.link.incoming
    end.link.incoming.end_reading()


def cut(end: End) -> None:
    """The connection breaks at this end; what is in it is lost."""
    end.link.transport.close()
    end.link.interrupt("for the test")


def lose(ends: tuple[End, End]) -> None:
    for end in ends:
        cut(end)
    for end in ends:
        end.interrupted.get(timeout=PATIENCE_S)


def rejoin(ends: tuple[End, End]) -> None:
    counts = [end.link.session.resume() for end in ends]
    transports = memory_pair(CAPACITY_BYTES)
    for end, transport, count in zip(ends, transports, reversed(counts), strict=True):
        end.on_loop(lambda end=end, transport=transport, count=count: end.link.attach(transport, b"", count))


def test_what_is_sent_meanwhile_comes_after_what_was_sent_before(ends: tuple[End, End]) -> None:
    left, right = ends
    left.link.outgoing.send(small(0))
    assert right.next() == 0
    lose(ends)
    assert not left.link.up
    assert left.link.broken is None
    for number in range(1, 100):
        left.link.outgoing.send(small(number, 1000), more=number % 3 == 0)
    rejoin(ends)
    assert [right.next() for _ in range(99)] == list(range(1, 100))
    assert right.frames.empty()


WHOLE = CAPACITY_BYTES // len(small(0, 200))
"""So many frames the connection holds, and the beginning of one more."""


def test_frames_in_the_connection_are_written_again_once(ends: tuple[End, End]) -> None:
    left, right = ends
    right.link.incoming._read_lock.acquire()  # it does not read: the connection fills up
    for number in range(300):
        left.link.outgoing.send(small(number, 200))
    left.link.interrupt("for the test")
    left.interrupted.get(timeout=PATIENCE_S)
    cut(right)
    stop_reading(right)
    right.interrupted.get(timeout=PATIENCE_S)
    rejoin(ends)
    assert [right.next() for _ in range(300)] == list(range(300))
    assert left.link.session.sent_again == WHOLE + 1  # the last of which went in part


def test_frames_that_came_before_the_break_are_not_written_again(ends: tuple[End, End]) -> None:
    left, right = ends
    right.link.incoming._read_lock.acquire()
    for number in range(300):
        left.link.outgoing.send(small(number, 200))
    left.link.interrupt("for the test")
    left.interrupted.get(timeout=PATIENCE_S)
    right.link.interrupt("for the test")
    stop_reading(right)
    right.interrupted.get(timeout=PATIENCE_S)
    assert right.link.session.received == right.frames.qsize() == WHOLE
    rejoin(ends)
    assert [right.next() for _ in range(300)] == list(range(300))
    assert left.link.session.sent_again == 1  # it came in part


class Alone:
    """One end whose peer is a bare transport, and which reads nothing until `read_on`: so the writer meets the end."""

    def __init__(self, transports: tuple[MemoryTransport, MemoryTransport]) -> None:
        near, self.far = transports
        self.end = End("alone", near)
        self.end.link.incoming._read_lock.acquire()

    def write_to_a_peer_that_ends_with(self, *frames: bytes) -> None:
        for number, frame in enumerate(frames):
            assert self.far.send([numbered([frame], number)]) == len(frame)
        self.far.close()
        self.end.on_loop(lambda: None)  # the I/O thread has seen that somebody else reads
        self.end.link.outgoing.send(small(100))

    def read_on(self) -> None:
        stop_reading(self.end)


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone(memory_pair())
    yield made
    made.end.close()


@pytest.mark.parametrize("may_return", [True, False])
def test_the_last_words_of_a_peer_come_before_the_news_of_the_break(alone: Alone, may_return: bool) -> None:
    end = alone.end
    end.may_return = may_return
    heard_before: Queue[int] = Queue()

    def on_interrupted(reason: str) -> bool:
        heard_before.put(end.frames.qsize())
        return may_return

    end.link._on_interrupted = on_interrupted
    alone.write_to_a_peer_that_ends_with(small(1), small(2), small(3))
    alone.read_on()
    assert heard_before.get(timeout=PATIENCE_S) == 3
    assert [end.next() for _ in range(3)] == [1, 2, 3]
    assert end.link.session.received == 3
    if not may_return:
        assert "the stream has ended" in end.broken.get(timeout=PATIENCE_S)


def test_the_end_of_a_link_that_another_thread_reads_neither_holds_nor_spins_the_io_thread(alone: Alone) -> None:
    end = alone.end
    alone.write_to_a_peer_that_ends_with(small(1))
    left: list[int] = []
    for _ in range(3):
        end.on_loop(lambda: left.append(len(end.loop._soon)))
    assert left == [0, 0, 0]
    assert end.interrupted.empty()
    alone.read_on()
    end.interrupted.get(timeout=PATIENCE_S)
    assert end.next() == 1


class Slow(MemoryTransport):
    """Who interrupts it is slow."""

    def __init__(self, transport: MemoryTransport) -> None:
        super().__init__(transport._incoming, transport._outgoing, "slow")
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def interrupt(self) -> None:
        self.begun.set()
        assert self.goes_on.wait(PATIENCE_S)
        super().interrupt()


def test_a_thread_that_is_slow_to_break_a_connection_does_not_pause_the_next_one() -> None:
    near, far = memory_pair()
    transport = Slow(near)
    end = End("late", transport)
    end.link.incoming._read_lock.acquire()
    slow = threading.Thread(target=end.link.interrupt, args=("for the test",))
    slow.start()
    assert transport.begun.wait(PATIENCE_S)
    stop_reading(end)  # which has the break settled
    assert end.interrupted.empty()
    assert not end.link._detached
    transport.goes_on.set()
    end.interrupted.get(timeout=PATIENCE_S)
    slow.join(PATIENCE_S)
    end.link.session.resume()
    near, other = memory_pair()
    end.on_loop(lambda: end.link.attach(near, b"", 0))
    end.link.outgoing.send(small(1))
    assert other.wait_readable(PATIENCE_S)
    end.close()
    far.close()
    other.close()


def test_last_words_that_are_no_frames_are_an_end(alone: Alone) -> None:
    alone.write_to_a_peer_that_ends_with(small(1), b"this is no frame at all, and it is long enough to see that")
    alone.read_on()
    alone.end.broken.get(timeout=PATIENCE_S)
    assert alone.end.interrupted.empty()


def test_a_function_among_the_last_words_holds_up_nothing(alone: Alone) -> None:
    end = alone.end
    goes_on = threading.Event()

    def take_long(frame: Frame) -> None:
        end.link.incoming.watch_reader()
        goes_on.wait(PATIENCE_S)
        end.frames.put(frame)

    end.link.incoming._on_frame = take_long
    alone.write_to_a_peer_that_ends_with(small(1))
    alone.read_on()
    end.interrupted.get(timeout=PATIENCE_S)
    assert end.frames.empty()
    goes_on.set()
    assert end.next() == 1


class Forged(MemoryTransport):
    """What is read of it first, somebody in between has changed."""

    was_read = False

    def receive_into(self, view: memoryview) -> int | None:
        if not self._incoming.chunks or self.was_read:
            return super().receive_into(view)
        self.was_read = True
        raise TransportForged("somebody in between has changed it")


def test_nothing_is_read_of_a_connection_after_it_was_found_forged() -> None:
    # The layer that found it has counted one record: a second look could let the next one pass.
    near, far = memory_pair()
    end = End("cheated", Forged(near._incoming, near._outgoing, "forged"))
    far.send([small(1)])
    assert "changed" in end.interrupted.get(timeout=PATIENCE_S)
    assert end.link.session.received == 0
    assert end.frames.empty()
    end.close()
    far.close()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_large_message_in_the_middle_goes_on_over_the_next_connection(ends: tuple[End, End], is_lost: bool) -> None:
    left, right = ends
    right.link.incoming._read_lock.acquire()
    writer = threading.Thread(target=left.link.outgoing.send_pieces, args=(large(7),))
    writer.start()
    while left.link.outgoing.bytes_sent < CAPACITY_BYTES:
        assert writer.is_alive()
    left.link.outgoing.send(small(8))
    left.link.interrupt("for the test")
    left.interrupted.get(timeout=PATIENCE_S)
    if is_lost:
        cut(right)
    else:
        right.link.interrupt("for the test")
    stop_reading(right)
    right.interrupted.get(timeout=PATIENCE_S)
    assert writer.is_alive()
    rejoin(ends)
    assert sorted(right.next() for _ in range(2)) == [7, 8]
    writer.join(PATIENCE_S)
    assert not writer.is_alive()


class Impatient:
    """Writes a message that fills the connection, until the test's clock says that its time is up; then changes it."""

    def __init__(self, outgoing: Outgoing, monkeypatch: pytest.MonkeyPatch) -> None:
        self._outgoing = outgoing
        self._late_s = 0.0
        self.delivery: Delivery | None = None
        self.memory = bytearray([7]) * (4 * CAPACITY_BYTES)
        for module in (send, send_queue):
            monkeypatch.setattr(module, "monotonic", lambda: monotonic() + self._late_s)
        self.thread = threading.Thread(target=self._write)
        self.thread.start()
        wait_until(lambda: outgoing.bytes_sent >= CAPACITY_BYTES, "a full connection")

    def _write(self) -> None:
        pieces = encode_frame(REQUEST, 0, 7, b"", b"", b"", [memoryview(self.memory)])
        try:
            self._outgoing.send_pieces(pieces, deadline=monotonic() + 2 * PATIENCE_S)
        except RpcTimeout as error:
            self.delivery = error.delivery
            self.memory[:] = bytearray([8]) * len(self.memory)

    def turn_clock(self) -> None:
        self._late_s = 3 * PATIENCE_S


BEFORE, ONCE = "before the connection is used", "once the connection is used"


def give_up_in_between(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, knows: str, capacity_bytes: int = CAPACITY_BYTES
) -> Impatient:
    """Have a sender's time be up while another connection is made; it ``knows`` that then. Nobody has read by now."""
    left, right = ends
    attached, given_up = threading.Event(), threading.Event()
    right.link.incoming._read_lock.acquire()
    sender = Impatient(left.link.outgoing, monkeypatch)
    for end in ends:
        cut(end)
    stop_reading(right)
    for end in ends:
        end.interrupted.get(timeout=PATIENCE_S)
    connect, attach, give_up = Incoming.connect, Outgoing.attach, Outgoing._give_up

    def connect_while_time_is_up(incoming: Incoming, first_bytes: bytes) -> None:
        if incoming is left.link.incoming:
            sender.turn_clock()
            if knows == BEFORE:
                sender.thread.join(PATIENCE_S)
            else:
                assert given_up.wait(PATIENCE_S)
        connect(incoming, first_bytes)

    def attach_and_tell(outgoing: Outgoing, transport: MemoryTransport) -> None:
        attach(outgoing, transport)
        if outgoing is left.link.outgoing:
            attached.set()

    def give_up_late(outgoing: Outgoing, message: LargeMessage) -> bool:
        given_up.set()
        if knows == ONCE:
            assert attached.wait(PATIENCE_S)
        return give_up(outgoing, message)

    monkeypatch.setattr(Incoming, "connect", connect_while_time_is_up)
    monkeypatch.setattr(Outgoing, "attach", attach_and_tell)
    monkeypatch.setattr(Outgoing, "_give_up", give_up_late)
    counts = [end.link.session.resume() for end in ends]
    transports = memory_pair(capacity_bytes)
    left.on_loop(lambda: left.link.attach(transports[0], b"", counts[1]))
    sender.thread.join(PATIENCE_S)
    right.on_loop(lambda: right.link.attach(transports[1], b"", counts[0]))
    return sender


@pytest.mark.parametrize("knows", [BEFORE, ONCE])
def test_what_goes_again_is_as_it_was_when_its_sender_gave_up(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch, knows: str
) -> None:
    sender = give_up_in_between(ends, monkeypatch, knows)
    assert sender.delivery == Delivery.UNKNOWN
    assert sender.memory[0] == sender.memory[-1] == 8
    frame = ends[1].frames.get(timeout=PATIENCE_S)
    assert set(bytes(frame.buffers[0])) == {7}


def test_what_another_thread_left_to_a_sender_that_gives_up_is_sent(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = ends
    written = LargeMessage.written

    def meanwhile(message: LargeMessage) -> None:
        other = threading.Thread(target=left.link.outgoing.send, args=(small(9),))
        other.start()
        other.join(PATIENCE_S)  # it found the write lock taken
        written(message)

    monkeypatch.setattr(LargeMessage, "written", meanwhile)
    give_up_in_between(ends, monkeypatch, ONCE, capacity_bytes=1 << 20)
    assert [right.next(), right.next()] == [7, 9]


def test_who_waits_for_a_connection_waits_no_longer_than_asked(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    with pytest.raises(RpcTimeout, match="reached again") as caught:
        left.link.outgoing.send_pieces(large(1), deadline=0.0)
    assert caught.value.delivery == Delivery.NOT_SENT
    assert not left.link.session.kept


def test_what_finds_no_room_in_time_was_not_sent(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    for number in range(2):
        left.link.outgoing.send(small(number, 1 << 19))  # as much as may wait, and a little more
    with pytest.raises(RpcTimeout, match="cannot be reached") as caught:
        left.link.outgoing.send(small(99), deadline=0.0)
    assert caught.value.delivery == Delivery.NOT_SENT


def test_an_end_while_there_is_no_connection_tells_everybody(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    left.link.outgoing.send(small(41))
    failures: Queue[PeerDead] = Queue()

    def write() -> None:
        try:
            left.link.outgoing.send_pieces(large(1))
        except PeerDead as failure:
            failures.put(failure)

    writer = threading.Thread(target=write)
    writer.start()
    left.on_loop(lambda: left.link.die("it was late"))
    assert failures.get(timeout=PATIENCE_S).delivery == Delivery.NOT_SENT
    writer.join(PATIENCE_S)
    assert left.broken.get(timeout=PATIENCE_S) == "it was late"
    assert left.link.never_sent == {41}
    with pytest.raises(PeerDead, match="late"):
        left.link.outgoing.send(small(42))


def test_who_may_not_return_is_dead_at_once(ends: tuple[End, End]) -> None:
    left, right = ends
    left.may_return = False
    right.link.close()
    assert "closed" in left.broken.get(timeout=PATIENCE_S)
    assert left.link.broken is not None


def test_an_error_while_that_is_found_out_is_an_end_too(ends: tuple[End, End]) -> None:
    left, right = ends

    def fail(reason: str) -> bool:
        raise RuntimeError("can't start new thread")

    left.link._on_interrupted = fail
    right.link.close()
    assert "closed" in left.broken.get(timeout=PATIENCE_S)


def test_garbage_is_no_break_but_an_end(ends: tuple[End, End]) -> None:
    left, right = ends
    left.link.outgoing.send(b"this is no frame at all, and it is long enough to see that")
    assert "not the start of a frame" in right.broken.get(timeout=PATIENCE_S)
    assert right.interrupted.empty()


def test_an_offer_over_a_connection_without_descriptors_is_refused_and_not_counted(ends: tuple[End, End]) -> None:
    left, right = ends
    left.link.outgoing.send(small(1))
    assert right.next() == 1
    assert not left.link.outgoing.send_with_descriptor(small(2), 0, monotonic() + PATIENCE_S)
    left.link.outgoing.send(small(3))
    assert right.next() == 3
    lose(ends)
    rejoin(ends)
    left.link.outgoing.send(small(4))
    assert right.next() == 4
    assert right.link.session.received == left.link.session.written == 3


def test_a_frame_that_is_repeated_ends_the_link_and_is_not_handed_out(ends: tuple[End, End]) -> None:
    left, right = ends
    left.link.outgoing.send(small(1))
    assert right.next() == 1
    left.link.transport.send([small(1)])
    assert "frame 0 in the place of frame 1" in right.broken.get(timeout=PATIENCE_S)
    assert right.frames.empty()


def test_a_count_that_cannot_be_is_refused(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    left.link.session.resume()
    transport, other = memory_pair()
    with pytest.raises(SessionError, match="5 frames"):
        left.on_loop(lambda: left.link.attach(transport, b"", 5))
    assert transport.closed
    assert left.link.transport is not transport
    other.close()


def test_garbage_behind_the_handshake_is_refused(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    left.link.session.resume()
    transport, other = memory_pair()
    with pytest.raises(SessionError, match="start of a frame"):
        left.on_loop(lambda: left.link.attach(transport, b"this is no frame at all, and it is long enough", 0))
    assert transport.closed
    other.close()


def test_garbage_behind_the_first_handshake_is_the_end_of_the_link(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    transport, other = memory_pair()
    left.on_loop(lambda: left.link.connect(transport, b"this is no frame at all, and it is long enough"))
    wait_until(lambda: left.link.broken is not None, "the end of the link")
    assert transport.closed
    other.close()


def test_nobody_reads_a_new_connection_before_the_session_has_taken_the_count(ends: tuple[End, End]) -> None:
    left, _ = ends
    lose(ends)
    left.link.session.resume()
    states: list[State] = []

    class Asked(MemoryTransport):
        def fileno(self) -> int | None:
            states.append(left.link.session.state)  # asked by those who are about to read, or to write
            return None

    transport, other = memory_pair()
    left.on_loop(lambda: left.link.attach(Asked(transport._incoming, transport._outgoing, "asked"), b"", 0))
    assert set(states) == {State.CONNECTED}
    other.close()


def test_nothing_counts_as_written_between_two_connections(ends: tuple[End, End]) -> None:
    left, right = ends
    lose(ends)
    left.link.outgoing._blocked = False  # as a thread has it that looked before the break
    left.link.outgoing.send(small(1))
    left.link.outgoing.flush_behind_others()
    left.link.outgoing.end_sending(monotonic() + PATIENCE_S)
    assert not left.link.session.kept
    rejoin(ends)
    assert right.next() == 1


def test_little_is_kept_in_a_dialogue_and_in_a_stream(ends: tuple[End, End]) -> None:
    left, right = ends
    for number in range(1000):
        left.link.outgoing.send(small(number))
        assert right.next() == number
        if number < 500:
            right.link.outgoing.send(small(number))
            assert left.next() == number
    # Half of the acknowledgements wait for company: two may be under way. The last may not have been read yet.
    wait_until(lambda: len(left.link.session.kept) <= 3 * ACKNOWLEDGE_FRAMES)
    wait_until(lambda: len(right.link.session.kept) <= 3 * ACKNOWLEDGE_FRAMES)


def test_what_came_with_the_handshake_is_read_and_counted(ends: tuple[End, End]) -> None:
    left, right = ends
    lose(ends)
    left.link.session.resume()
    transport, other = memory_pair()
    left.on_loop(lambda: left.link.attach(transport, numbered([small(1), small(2)], 0), 0))
    assert [left.next(), left.next()] == [1, 2]
    assert left.link.session.received == 2
    other.close()
    assert right.broken.empty()
