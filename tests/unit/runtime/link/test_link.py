"""A link over an in-memory transport: order, large frames, back-pressure, and its end. No sockets."""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Iterator
from queue import Queue
from time import monotonic

import pytest
from tests.kit.memory_transport import MemoryTransport, memory_pair
from tests.kit.waiting import wait_until

from farcall.errors import Delivery, PeerDead, RpcTimeout
from farcall.ids import WorkerInfo
from farcall.protocol import frame_decoder
from farcall.protocol.frame_decoder import FrameDecoder
from farcall.protocol.frames import MAX_SLOTS, REQUEST, Frame, encode_frame, encode_small, numbered
from farcall.runtime.io.loop import Loop
from farcall.runtime.io.reader import Standby
from farcall.runtime.io.timers import NEVER
from farcall.runtime.link.link import Link
from farcall.runtime.link.receive import IO_READS_S, LINGER_AFTER, Incoming
from farcall.runtime.link.send import Outgoing
from farcall.transport.interface import TransportClosed
from farcall.transport.unix import UnixTransport

PATIENCE_S = 60.0
CAPACITY_BYTES = 64 * 1024


class End:
    """One end: its loop, its link, and what came out of it."""

    def __init__(self, name: str, transport: object, start: bool = True, resumes: bool = False) -> None:
        self.frames: Queue[Frame] = Queue()
        self.broken: Queue[str] = Queue()
        self.transport = transport
        self.loop = Loop(name)
        self.link = Link(
            WorkerInfo(name, 0),
            transport,
            self.loop,
            self.frames.put,
            self.broken.put,
            1 << 20,  # type: ignore[arg-type]
            acknowledge=(lambda count, more: None) if resumes else None,
        )
        self.loop.start()
        if start:
            self.link.start()

    def next(self) -> Frame:
        return self.frames.get(timeout=PATIENCE_S)

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


def test_frames_come_in_order_whatever_the_pieces(ends: tuple[End, End]) -> None:
    left, right = ends
    left.transport.largest_send = 7  # type: ignore[attr-defined]
    right.transport.largest_receive = 5  # type: ignore[attr-defined]
    for number in range(200):
        left.link.outgoing.send(small(number), more=number % 3 == 0)
    left.link.outgoing.flush()
    assert [right.next().call_id for _ in range(200)] == list(range(200))


def test_last_words_leave_behind_what_another_thread_writes_and_before_the_end(ends: tuple[End, End]) -> None:
    left, right = ends
    outgoing = left.link.outgoing
    outgoing._write_lock.acquire()  # another thread writes

    def end() -> None:
        outgoing.send(small(1))
        outgoing.flush_behind_others()
        left.link.close()

    ending = threading.Thread(target=end)
    ending.start()
    wait_until(lambda: outgoing._outbox)
    outgoing._write_lock.release()
    assert right.next().call_id == 1
    ending.join(PATIENCE_S)


def test_bytes_behind_the_handshake_are_frames() -> None:
    near, far = memory_pair()
    end = End("late", near, start=False)
    end.link.start(numbered([small(1), small(2)], 0))
    assert [end.next().call_id for _ in range(2)] == [1, 2]
    end.close()
    far.close()


def test_a_descriptor_is_watched_before_anybody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever reads may find that the peer has gone, and close it: then another file may have its number.
    near, far = memory_pair()
    end = End("late", near, start=False)
    done: list[str] = []
    monkeypatch.setattr(type(near), "fileno", lambda _: 99)
    monkeypatch.setattr(end.loop, "watch", lambda *_: done.append("watch"))
    monkeypatch.setattr(end.loop, "call_soon", lambda *_: done.append("read"))
    end.link.start(small(1))
    monkeypatch.undo()
    assert done == ["watch", "read"]
    end.close()
    far.close()


def test_a_dead_link_leaves_the_descriptor_it_had_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another link may have the number since, and whoever silences that one makes it deaf for good.
    near, far = memory_pair()
    end = End("dead", near)
    touched: list[str] = []
    monkeypatch.setattr(end.link.incoming, "_descriptor", 99)
    monkeypatch.setattr(end.link.outgoing, "_descriptor", 99)
    end.link.close()
    for name in ("silence", "listen", "forget", "want_write"):
        monkeypatch.setattr(end.loop, name, lambda *_, name=name: touched.append(name))
    with pytest.raises(PeerDead):
        end.link.incoming.help_until(Never(), NEVER, small(1))
    end.link.incoming.help_until(Never(), NEVER)
    end.link.outgoing.write()
    end.link.close()
    assert touched == []
    monkeypatch.undo()
    end.close()
    far.close()


@pytest.fixture
def joined() -> Iterator[tuple[End, End]]:
    """Two ends over a real socket: only descriptors can be silenced."""
    near, far = socket.socketpair()
    pair = End("near", UnixTransport(near)), End("far", UnixTransport(far))
    yield pair
    for end in pair:
        end.close()


class Answer:
    """Arrives with the next frame."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._before = end.frames.qsize()

    @property
    def arrived(self) -> bool:
        return self._end.frames.qsize() > self._before


def exchange(near: End, far: End, number: int) -> None:
    """A call and its answer, on this thread."""
    answer = Answer(near)
    # Not before the call has come: this thread reads by then, and not the I/O thread.
    far.link.incoming._on_frame = lambda frame: far.link.outgoing.send(small(frame.call_id))
    near.link.incoming.help_until(answer, monotonic() + PATIENCE_S, small(number))
    assert answer.arrived


def test_who_comes_back_leaves_the_poller_silent_and_who_does_not_is_replaced(
    joined: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = joined
    silenced: list[int] = []
    silence = near.loop.silence
    monkeypatch.setattr(near.loop, "silence", lambda descriptor: (silenced.append(1), silence(descriptor)))
    for name in ("LINGER_S", "LONGEST_LINGER_S", "LONGEST_SILENCE_S"):
        monkeypatch.setattr(f"farcall.runtime.link.receive.{name}", PATIENCE_S)
    incoming = near.link.incoming
    incoming._linger_s = PATIENCE_S
    exchange(near, far, 0)  # nobody came back before
    for number in range(LINGER_AFTER + 10):
        exchange(near, far, number)
        # Whether it waits for the next call or reads at this moment: the timer stays set, and wakes nobody.
        assert incoming._end_lingering(monotonic()) > monotonic()
    assert len(silenced) == LINGER_AFTER + 1
    incoming._linger_s = 0.0
    incoming._linger_timer.at(0.0)
    before = near.frames.qsize()
    far.link.outgoing.send(small(99))
    wait_until(lambda: near.frames.qsize() > before)  # the I/O thread listens again


def test_while_the_poller_listens_no_timer_runs_for_one_who_may_come_back(joined: tuple[End, End]) -> None:
    near, far = joined
    exchange(near, far, 0)  # for the first time: the poller listens again
    near.link.incoming._left_at = monotonic() + PATIENCE_S  # a moment ago, however slow this is
    assert near.link.incoming._end_lingering(monotonic()) == NEVER


def test_a_link_that_two_threads_wait_on_is_never_left_silent(joined: tuple[End, End]) -> None:
    near, far = joined
    incoming = near.link.incoming
    first = threading.Thread(target=incoming.help_until, args=(Answer(near), monotonic() + PATIENCE_S))
    first.start()
    wait_until(lambda: incoming._silenced)
    incoming.help_until(Never(), monotonic() + PATIENCE_S)  # returns at once: another one reads
    incoming._came_back = LINGER_AFTER
    far.link.outgoing.send(small(1))
    first.join(PATIENCE_S)
    assert not incoming._lingering
    far.link.outgoing.send(small(2))
    wait_until(lambda: near.frames.qsize() == 2)


@pytest.fixture
def read_a_moment_ago(joined: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> tuple[End, End]:
    """A link whose frames are answers of futures, and whose last reader was a thread that still makes calls."""
    near, far = joined
    for name in ("LINGER_S", "LONGEST_LINGER_S", "LONGEST_SILENCE_S"):
        monkeypatch.setattr(f"farcall.runtime.link.receive.{name}", PATIENCE_S)
    incoming = near.link.incoming
    incoming._linger_s = PATIENCE_S

    def on_frame(frame: Frame) -> None:
        incoming.answers_futures = True
        near.frames.put(frame)

    incoming._on_frame = on_frame
    exchange(near, far, 0)
    return near, far


def test_the_io_thread_leaves_answers_to_whoever_read_a_moment_ago(read_a_moment_ago: tuple[End, End]) -> None:
    near, far = read_a_moment_ago
    incoming = near.link.incoming
    far.link.outgoing.send(small(1))
    wait_until(lambda: incoming._lingering == [True])  # the I/O thread has read it, and no more
    answer = Answer(near)
    far.link.outgoing.send(small(2))
    incoming.help_until(answer, monotonic() + PATIENCE_S)
    assert answer.arrived
    assert not incoming._lingering


def test_a_thread_that_does_not_come_is_not_relied_on_again(read_a_moment_ago: tuple[End, End]) -> None:
    near, far = read_a_moment_ago
    incoming = near.link.incoming
    far.link.outgoing.send(small(1))
    wait_until(lambda: incoming._lingering == [True])
    incoming._linger_s = 0.0
    incoming._linger_timer.at(0.0)  # it has not come
    wait_until(lambda: incoming._vain_until)
    incoming._vain_until = NEVER
    incoming._left_at = monotonic()  # it makes calls all the same
    for number in range(3):  # the I/O thread reads all of them
        before = near.frames.qsize()
        far.link.outgoing.send(small(number))
        wait_until(lambda before=before: near.frames.qsize() > before)  # type: ignore[misc]


def test_a_thread_that_makes_calls_without_end_does_not_keep_answers_from_others(
    read_a_moment_ago: tuple[End, End],
) -> None:
    near, far = read_a_moment_ago
    incoming = near.link.incoming
    far.link.outgoing.send(small(1))
    wait_until(lambda: incoming._lingering == [True])
    incoming._silent_since -= 2 * PATIENCE_S
    incoming._left_at = monotonic() + 2 * PATIENCE_S  # calls go on all the time
    incoming._linger_timer.at(0.0)
    before = near.frames.qsize()
    far.link.outgoing.send(small(2))
    wait_until(lambda: near.frames.qsize() > before)  # the I/O thread reads


class Leaving:
    """A read lock whose holder lets go when somebody waits for it; the attempts to take it, with their arguments."""

    def __init__(self) -> None:
        self.attempts: list[tuple[object, ...]] = []
        self._held = True

    def acquire(self, *how: object) -> bool:
        self.attempts.append(how)
        self._held = self._held and how == (False,)
        return not self._held

    def release(self) -> None:
        pass


def test_the_io_thread_waits_for_a_reader_that_stops_and_for_no_other(joined: tuple[End, End]) -> None:
    # A reader that stops has the poller listen before it lets go, and may wait for the interpreter in between.
    near, far = joined
    incoming = near.link.incoming
    incoming._read_lock = lock = Leaving()  # type: ignore[assignment]
    incoming._silenced = True
    incoming._read()
    assert lock.attempts == [(False,)], "it reads, and may do so for long"
    incoming._silenced = False
    far.link.outgoing.send(small(1))
    assert near.next().call_id == 1
    assert lock.attempts[:3] == [(False,), (False,), (True, IO_READS_S)]


class Overtaken:
    """A read lock that is given to a helping reader only after its connection has been given up."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._lock = end.link.incoming._read_lock
        self.release = self._lock.release
        self.locked = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._end.link.incoming._read_lock = self._lock  # type: ignore[assignment]
        self._end.link.break_off("for the test")
        return self._lock.acquire(blocking, timeout)


def test_who_gets_the_role_after_the_break_leaves_the_last_words_to_the_io_thread() -> None:
    near, far = socket.socketpair()
    end = End("near", UnixTransport(near))
    readers: Queue[bool] = Queue()
    end.link.incoming._on_frame = lambda frame: readers.put(end.loop.on_thread())
    end.loop.silence(near.fileno())  # what comes is left to the break to read
    far.send(small(1))
    end.link.incoming._read_lock = Overtaken(end)  # type: ignore[assignment]
    end.link.incoming.help_until(Never(), monotonic() + PATIENCE_S)
    assert readers.get(timeout=PATIENCE_S)
    assert end.broken.get(timeout=PATIENCE_S) == "for the test"
    end.close()
    far.close()


def test_who_gets_the_role_just_before_the_link_is_up_does_not_leave_it_deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread looked before the last break; it finds the link down and stops, and nobody else would listen."""
    near, far = socket.socketpair()
    again, far_again = socket.socketpair()
    end = End("near", UnixTransport(near), resumes=True)
    link, incoming, watch = end.link, end.link.incoming, Incoming.watch_connection

    def watch_and_be_helped(incoming: Incoming) -> None:
        watch(incoming)
        assert incoming._read_lock.acquire(False)
        incoming._begin_helping()
        incoming.end_reading()

    def reconnect() -> None:
        link.break_off("for the test")
        link.session.resume()
        link.attach(UnixTransport(again), b"", 0)

    monkeypatch.setattr(Incoming, "watch_connection", watch_and_be_helped)
    try:
        end.loop.call_soon(reconnect)
        far_again.send(small(7))
        wait_until(lambda: link.up and link.transport.fileno() == again.fileno(), "the next connection")
        assert end.next().call_id == 7
        assert not incoming._silenced
    finally:
        end.close()
        for one in (far, far_again):
            one.close()


class Never:
    """An answer that does not come."""

    arrived = False


def test_large_frames_both_ways_at_once(ends: tuple[End, End]) -> None:
    threads = [threading.Thread(target=end.link.outgoing.send_pieces, args=(large(7),)) for end in ends]
    for thread in threads:
        thread.start()
    for end in ends:
        assert bytes(end.next().buffers[0][:3]) == b"\7\7\7"
    for thread in threads:
        thread.join(PATIENCE_S)


def test_io_threads_that_both_write_still_read(ends: tuple[End, End]) -> None:
    """A callback may send from the I/O thread. Two that wait for each other's reading must hand their roles over."""
    for end in ends:
        end.loop.call_soon(lambda end=end: end.link.outgoing.send_pieces(large(3)))
    for end in ends:
        assert end.next().call_id == 3


def test_many_threads_tear_no_frame(ends: tuple[End, End]) -> None:
    left, right = ends

    def work(first: int) -> None:
        for number in range(first, first + 20):
            if number % 5:
                left.link.outgoing.send(small(number, number))
            else:
                left.link.outgoing.send_pieces(large(number % 256, 100_000))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 160, 20)]
    for thread in threads:
        thread.start()
    assert sorted(right.next().call_id for _ in range(160)) == list(range(160))
    for thread in threads:
        thread.join(PATIENCE_S)


def test_a_handler_that_fails_after_its_role_was_taken_away_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The reader is slow, another thread reads on, and only then the reader's handler raises: a bug of ours."""
    left, right = memory_pair(CAPACITY_BYTES)
    sender, receiver = End("left", left), End("right", right, start=False)
    read_on = threading.Event()
    readers: set[int] = set()

    def on_frame(frame: Frame) -> None:
        readers.add(threading.get_ident())
        if frame.call_id == 0:
            receiver.link.incoming.watch_reader()
            assert read_on.wait(PATIENCE_S)
            raise RuntimeError("a bug")
        receiver.frames.put(frame)
        read_on.set()

    receiver.link.incoming._on_frame = on_frame
    receiver.link.start()
    try:
        for number in range(20):
            sender.link.outgoing.send(small(number))
        assert [receiver.next().call_id for _ in range(19)] == list(range(1, 20))
        while "a bug" not in caplog.text:
            read_on.wait(0.01)
        for number in range(20, 40):
            sender.link.outgoing.send(small(number))
        assert [receiver.next().call_id for _ in range(20)] == list(range(20, 40))
        assert len(readers) == 2
        assert len([line for line in caplog.records if line.levelname == "ERROR"]) == 1
        assert "unlocked" not in caplog.text
        while [thread.name for thread in threading.enumerate()].count("farcall-io-right") > 1:
            threading.Event().wait(0.01)  # the old reader ends; if not, the test's time does
    finally:
        sender.close()
        receiver.close()


def test_a_peer_that_does_not_read_costs_a_timeout() -> None:
    near, far = memory_pair(1024)
    end = End("stuck", near)
    with pytest.raises(RpcTimeout, match="stuck"):
        end.link.outgoing.send_pieces(large(1), deadline=0.0)
    end.close()
    far.close()


def test_ctrl_c_before_the_first_byte_says_that_nothing_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, other = memory_pair(1024)
    end = End("stuck", transport)
    try:
        while transport.send((b"x",)):
            pass  # until it is full

        def interrupted(_: object, timeout_s: float) -> bool:
            raise KeyboardInterrupt

        monkeypatch.setattr(type(transport), "wait_writable", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            end.link.outgoing.send_pieces(large(1))
        assert getattr(caught.value, "delivery", None) is Delivery.NOT_SENT
    finally:
        end.close()
        other.close()


def test_the_end_of_the_peer_is_told_once(ends: tuple[End, End]) -> None:
    left, right = ends
    right.link.close()
    assert "closed" in left.broken.get(timeout=PATIENCE_S)
    with pytest.raises(PeerDead, match="left") as refused:
        left.link.outgoing.send(small(1))
    assert refused.value.delivery == Delivery.NOT_SENT
    told = threading.Event()
    left.loop.call_soon(told.set)
    assert told.wait(PATIENCE_S)
    assert left.broken.empty()


def test_what_counts_as_never_sent_does_not_leave_meanwhile(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member may be given up while its connection works, and a thread about to flush."""
    left, right = ends
    interrupt, told = MemoryTransport.interrupt, threading.Event()

    def flush_first(transport: MemoryTransport) -> None:
        left.link.outgoing.flush()
        interrupt(transport)

    monkeypatch.setattr(MemoryTransport, "interrupt", flush_first)
    left.link.outgoing.send(small(7), more=True)
    left.loop.call_soon(lambda: left.link.die("the others gave it up"))
    left.loop.call_soon(told.set)
    assert told.wait(PATIENCE_S)
    assert left.link.never_sent == {7}
    assert right.broken.get(timeout=PATIENCE_S)
    assert right.frames.empty()


def test_garbage_breaks_the_link(ends: tuple[End, End]) -> None:
    left, right = ends
    left.link.outgoing.send(b"this is no frame at all, and it is long enough to see that")
    assert "not the start of a frame" in right.broken.get(timeout=PATIENCE_S)


def test_a_frame_that_there_is_no_memory_for_breaks_the_link(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be read once more: those who wait for an answer must learn that none comes."""

    def fail(*_: object) -> Frame:
        raise MemoryError

    left, right = ends
    monkeypatch.setattr(frame_decoder, "Frame", fail)
    left.link.outgoing.send(small(1))
    assert "no memory" in right.broken.get(timeout=PATIENCE_S)


class Late(deque[Frame]):
    """Decoded frames whose reader is found to be late whenever it looks whether there is another one."""

    def __init__(self, standby: Standby) -> None:
        super().__init__()
        self.standby = standby

    def __len__(self) -> int:
        for watch in list(self.standby._running.values()):
            self.standby._take_over(watch)
        return super().__len__()


def test_a_reader_found_late_between_two_frames_has_the_role_or_has_it_not(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = ends
    incoming = right.link.incoming
    readers: list[int] = []
    passed_on: list[int] = []
    monkeypatch.setattr(type(incoming), "pass_on", lambda _: passed_on.append(len(readers)))
    done = threading.Event()

    def on_frame(frame: Frame) -> None:
        readers.append(threading.get_ident())
        incoming.watch_reader()
        if frame.call_id == 3:
            done.set()

    incoming._on_frame = on_frame
    incoming._frames = Late(right.loop.standby)
    for number in (1, 2, 3):
        left.link.outgoing.send(small(number), more=number < 3)
    assert done.wait(PATIENCE_S)
    assert len(set(readers)) == 1
    assert passed_on == []


def stuck_writer(left: End, right: End, number: int) -> threading.Thread:
    """A thread that has begun to write a large message, which the other end does not read."""
    right.link.incoming._read_lock.acquire()
    writer = threading.Thread(target=left.link.outgoing.send_pieces, args=(large(number, 4 << 20),))
    writer.start()
    while left.link.outgoing.bytes_sent < CAPACITY_BYTES:
        assert writer.is_alive()
    return writer


def read_on(right: End) -> None:
    right.link.incoming._read_lock.release()
    right.loop.call_soon(right.link.incoming._read)


def test_small_messages_pass_between_the_chunks_of_a_large_one(ends: tuple[End, End]) -> None:
    left, right = ends
    writer = stuck_writer(left, right, 7)
    for number in range(100, 110):
        left.link.outgoing.send(small(number))
    read_on(right)
    assert [right.next().call_id for _ in range(11)] == [*range(100, 110), 7]
    writer.join(PATIENCE_S)


def test_large_messages_take_turns(ends: tuple[End, End]) -> None:
    left, right = ends
    writer = stuck_writer(left, right, 7)
    other = threading.Thread(target=left.link.outgoing.send_pieces, args=(large(8, 1 << 20),))
    other.start()
    while len(left.link.outgoing._large) < 2:
        assert other.is_alive()
    read_on(right)
    assert [right.next().call_id for _ in range(2)] == [8, 7]  # a quarter of the size, begun later, there first
    for thread in (writer, other):
        thread.join(PATIENCE_S)
    assert not left.link.outgoing._large


def test_more_large_messages_than_slots_wait_for_one(ends: tuple[End, End]) -> None:
    left, right = ends
    count = MAX_SLOTS + 5
    writers = [
        threading.Thread(target=left.link.outgoing.send_pieces, args=(large(number, 1 << 20),))
        for number in range(count)
    ]
    for writer in writers:
        writer.start()
    assert sorted(right.next().call_id for _ in range(count)) == list(range(count))
    for writer in writers:
        writer.join(PATIENCE_S)


def test_a_message_given_up_half_way_was_not_sent_and_leaves_nothing(ends: tuple[End, End]) -> None:
    left, right = ends
    right.link.incoming._read_lock.acquire()
    with pytest.raises(RpcTimeout) as caught:
        left.link.outgoing.send_pieces(large(1, 4 << 20), deadline=monotonic() + 0.05)
    assert left.link.outgoing.bytes_sent == CAPACITY_BYTES
    assert caught.value.delivery == Delivery.NOT_SENT
    read_on(right)
    left.link.outgoing.send_pieces(large(2, 1 << 20))
    assert right.next().call_id == 2
    assert right.frames.empty()
    assert not right.link.incoming._decoder._assemblies


def test_ctrl_c_before_a_chunk_goes_again_tells_the_peer_which_may_have_some_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next message in its slot would begin with its bytes."""
    first, first_far = memory_pair(1024)
    second, second_far = memory_pair(64 << 20)
    end = End("peer", first, start=False, resumes=True)
    outgoing, session, decoder = end.link.outgoing, end.link.session, FrameDecoder()

    def break_and_be_interrupted(_: object, timeout_s: float) -> bool:
        outgoing.detach()
        session.broke()
        session.resume()
        outgoing.resumed(0)
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryTransport, "wait_writable", break_and_be_interrupted)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            outgoing.send_pieces(large(1))
        assert getattr(caught.value, "delivery", None) is Delivery.NOT_SENT
        assert received(first_far, decoder) == []
        decoder.restart()
        outgoing.attach(second)
        for number in range(2, 2 + MAX_SLOTS):
            outgoing.send_pieces(large(number))
            [frame] = received(second_far, decoder)
            assert frame.call_id == number
            assert bytes(frame.buffers[0]) == bytes([number]) * (1 << 20)
    finally:
        end.close()
        for transport in (first_far, second, second_far):
            transport.close()


def received(transport: MemoryTransport, decoder: FrameDecoder) -> list[Frame]:
    """The frames that have come over ``transport``."""
    frames: list[Frame] = []
    while count := transport.receive_into(decoder.writable()):
        frames += decoder.received(count)
    return frames


def test_a_connection_that_breaks_while_it_is_attached_does_not_hold_up_the_io_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A helping reader may find the break before the writing half has the connection."""
    first, first_far = memory_pair()
    second, second_far = memory_pair()
    end = End("peer", first, start=False, resumes=True)
    link, attach, tried = end.link, Outgoing.attach, Counter[object]()

    def attach_behind_the_break(outgoing: Outgoing, transport: MemoryTransport) -> None:
        link.ended(transport)
        attach(outgoing, transport)

    def send(transport: MemoryTransport, buffers: object, descriptors: object = ()) -> int:
        tried[transport] += 1
        assert tried[transport] < 10, "it tries again and again"
        raise TransportClosed("this side closed the connection")

    try:
        end.loop.stop()  # from here on this thread plays it
        link.outgoing.send(small(1))
        link.break_off("a test")
        link.outgoing.send(small(2))
        link.session.resume()
        monkeypatch.setattr(MemoryTransport, "send", send)
        monkeypatch.setattr(Outgoing, "attach", attach_behind_the_break)
        link.attach(second, b"", 0)
        assert not link.up
        assert link.outgoing.queue.down
    finally:
        end.close()
        for transport in (first_far, second_far):
            transport.close()
