"""What every implementation of `farcall.core.contract.Core` does; both ends of each test are some implementation."""

from __future__ import annotations

import gc
import os
import random
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.cores import ENTRY, HEADER, VERSION, Pair, Side, connected, frame, request
from tests.kit.times import AT_ONCE_S, LONG_S

from farcall.core.contract import (
    ACKNOWLEDGE,
    CANCELLED,
    CARRIES,
    CONTROL,
    DROPPED,
    ENDED,
    FAILURE,
    LARGE_BYTES,
    LETTER,
    MARKED,
    NOT_SENT,
    OVERDUE,
    OWNER,
    REFUSABLE,
    REQUEST,
    RESPONSE,
    STARVED,
    UNKNOWN,
    CoreError,
    Stopped,
)

MIB = 1 << 20


class Relay:
    """Between the two ends of a connection: it passes bytes on in pieces, holds them back, or cuts."""

    def __init__(self, pair: Pair, pieces: Callable[[], int] = lambda: 1 << 16, cut: int | None = None) -> None:
        self.pieces, self.left = pieces, cut
        self.open = threading.Event()
        self.open.set()
        near, self.near = connected("unix")
        self.far, far = connected("unix")
        self.threads = [
            threading.Thread(target=self._run, args=ends) for ends in ((self.near, self.far), (self.far, self.near))
        ]
        self.ends = 0
        pair.near.core.attach(pair.near.link, near)
        pair.far.core.attach(pair.far.link, far)
        for thread in self.threads:
            thread.start()

    def _run(self, source: int, target: int) -> None:
        try:
            while True:
                ready(source, select.POLLIN)
                self.open.wait()
                data = os.read(source, self.pieces())
                if source == self.near and self.left is not None:
                    data, self.left = data[: self.left], self.left - len(data[: self.left])
                while data:
                    ready(target, select.POLLOUT)
                    data = data[os.write(target, data) :]
                if (source == self.near and self.left == 0) or (not data and source_ended(source)):
                    break
        except OSError:
            pass
        for end in (self.near, self.far):
            with socket.socket(fileno=os.dup(end)) as both:
                try:
                    both.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        self.open.set()
        for thread in self.threads:
            thread.join(LONG_S)
            assert not thread.is_alive()
        for end in (self.near, self.far):
            os.close(end)


def ready(end: int, what: int) -> None:
    wanted = select.poll()
    wanted.register(end, what)
    wanted.poll()


def source_ended(source: int) -> bool:
    with socket.socket(fileno=os.dup(source)) as end:
        try:
            return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False


def large(seed: int, size: int = 300_000) -> bytes:
    return random.Random(seed).randbytes(size)


# ---------------------------------------------------------------------- frames


def test_a_call_is_answered(either: Pair) -> None:
    either.far.serve()
    answer = either.near.call(payload=b"what", notes=b"note", buffers=[b"small", large(1), (5, 6, 7)])
    assert (answer.kind, answer.link, answer.payload) == (RESPONSE, either.near.link, b"what")
    assert [each if isinstance(each, tuple) else bytes(each) for each in answer.buffers] == [
        b"small",
        large(1),
        (5, 6, 7),
    ]
    came = either.far.of_kind(REQUEST)[0]
    assert (came.function, came.notes, came.number, came.handle, came.descriptor) == (b"echo", b"note", 1, None, -1)
    assert not answer.buffers[1].readonly
    assert not isinstance(answer.payload, memoryview)
    assert either.near.call(b"fail").kind == FAILURE
    assert either.near.core.counts() == (0, 0, 0, 2, 0)
    either.far.until(lambda: either.far.core.counts() == (0, 0, 0, 0, 2))


@pytest.mark.parametrize("size", [0, 1, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, MIB + 7, 5 * MIB])
def test_payloads_of_all_sizes(either: Pair, size: int) -> None:
    either.far.serve()
    answer = either.near.call(payload=large(2, size))
    assert answer.payload == large(2, size)
    assert isinstance(answer.payload, memoryview) == (size >= LARGE_BYTES)


def test_frames_arrive_however_they_are_split(make_pair: Callable[..., Pair]) -> None:
    cut = random.Random(1)
    for pieces in (lambda: 1, lambda: 39, lambda: 41, lambda: cut.randrange(1, 3000)):
        pair = make_pair()
        relay = Relay(pair, pieces)
        pair.far.serve()
        for size in (0, 10, 1000) if pieces() == 1 else (0, 10, LARGE_BYTES, 200_000):
            assert pair.near.call(payload=large(size, size), buffers=[b"", b"x" * 100]).payload == large(size, size)
        pair.near.end()
        pair.far.end()
        relay.close()


def test_many_callers_and_workers(either: Pair) -> None:
    either.far.serve(4)
    left: list[int] = []

    def call(seed: int) -> None:
        for i in range(150):
            payload = large(seed * 1000 + i, random.Random(seed + i).choice([0, 20, 3000, 100_000]))
            assert either.near.call(payload=payload).payload == payload
        left.append(seed)

    threads = [either.near.start(call, seed) for seed in range(6)]
    for thread in threads:
        thread.join(LONG_S)
    assert len(left) == 6, either.near.errors


def test_large_messages_both_ways_at_once(either: Pair) -> None:
    """More of them than there are slots, and small calls pass in between."""
    for side in (either.near, either.far):
        side.serve(4)
    sizes = [MIB + 1000 * i for i in range(20)]
    ended: list[int] = []

    def call(side: Side, size: int) -> None:
        assert side.call(payload=large(size, size)).payload == large(size, size)
        ended.append(size)

    threads = [side.start(call, side, size) for size in sizes for side in (either.near, either.far)]
    for i in range(100):
        assert either.near.call(payload=b"%d" % i).payload == b"%d" % i
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(ended) == sorted(sizes * 2)


def test_what_is_no_frame_is_refused(pair: Pair) -> None:
    for head in (
        b"",
        b"fc",
        b"x" * 40,
        request()[0] + b"more",
        request(payload=b"x" * 10)[0][:-1],
        frame(ACKNOWLEDGE)[0],
    ):
        with pytest.raises(ValueError):
            pair.near.core.call(pair.near.link, head)
        with pytest.raises(ValueError):
            pair.near.core.post(pair.near.link, head)
    assert pair.near.core.counts().pending == 0


def test_a_sender_may_number_its_calls(pair: Pair) -> None:
    core, link = pair.near.core, pair.near.link
    pair.far.serve()
    assert core.call(link, *request(number=77)).number == 77
    assert core.post(link, *request(number=90)) == 90
    assert core.wait(90).kind == RESPONSE
    assert core.post(link, *request()) == 91


# ---------------------------------------------------------------------- deadlines and cancellations


def test_a_call_nobody_answers_is_overdue(pair: Pair) -> None:
    before = monotonic()
    overdue = pair.near.call(b"hold", deadline=before + 0.05)
    assert overdue.kind == OVERDUE
    assert monotonic() < before + AT_ONCE_S
    assert pair.near.core.counts().pending == 1  # its callee can be asked about it
    pair.near.core.cancel(overdue.number)
    assert pair.near.core.counts().pending == 0
    pair.near.control(flags=OWNER)
    pair.far.event(CONTROL)  # so the cancellation is there
    pair.far.serve()
    assert pair.near.call().kind == RESPONSE
    assert [each.number for each in pair.far.of_kind(REQUEST)] == [2]  # the first was cancelled in the queue


def test_a_call_before_there_is_a_connection_is_overdue(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    assert pair.near.call(deadline=monotonic() + 0.02).kind == OVERDUE
    assert pair.near.call(payload=large(1), deadline=monotonic() + 0.02).kind == OVERDUE
    pair.connect()
    pair.far.serve()
    assert pair.near.call(payload=large(2)).payload == large(2)


def test_a_running_request_is_cancelled_once(pair: Pair) -> None:
    pair.far.serve()
    number = pair.near.post(b"hold")
    pair.far.until(lambda: pair.far.of_kind(REQUEST))
    pair.near.core.cancel(number)
    pair.near.core.cancel(number)
    pair.near.core.cancel(999)
    news = pair.far.event(CANCELLED)
    assert (news.link, news.number) == (pair.far.link, number)
    pair.far.gate.set()
    assert pair.near.call().kind == RESPONSE
    assert not pair.near.core.events()
    # Its one worker was held: on a busy machine for so long that another one was asked for.
    assert {news.kind for news in pair.far.core.events()} <= {STARVED}
    with pytest.raises(CoreError):
        pair.near.core.wait(number)


def test_a_queued_request_with_belongings_is_dropped(pair: Pair) -> None:
    numbers = [
        pair.near.post(buffers=[(1, 2, 3)]),
        pair.near.post(flags=MARKED),
        pair.near.post(),
        pair.near.post(flags=MARKED),
    ]
    pair.far.until(lambda: pair.far.core.counts().last_request == 4)
    for number in numbers:
        pair.near.core.cancel(number)
    pair.near.control(flags=OWNER)
    pair.far.event(CONTROL)
    pair.far.serve()
    pair.far.until(lambda: len(pair.far.of_kind(DROPPED)) == 3)
    assert [each.number for each in pair.far.of_kind(DROPPED)] == [1, 2, 4]
    assert pair.near.call().kind == RESPONSE


def test_an_answer_that_came_is_cancelled(pair: Pair) -> None:
    pair.far.serve()
    number = pair.near.post()
    pair.near.until(lambda: pair.near.core.done(number))
    pair.near.core.cancel(number)
    with pytest.raises(CoreError):
        pair.near.core.wait(number)
    assert pair.near.core.counts().pending == 0


def test_a_late_answer_with_belongings_is_dropped(pair: Pair) -> None:
    pair.far.serve(2)
    plain, ticket, marked = (
        pair.near.post(b"hold"),
        pair.near.post(b"hold", buffers=[(1, 2, 3)]),
        pair.near.post(b"none"),
    )
    pair.far.until(lambda: len(pair.far.of_kind(REQUEST)) == 2)
    for number in (plain, ticket, marked):
        pair.near.core.cancel(number)
    pair.far.gate.set()
    pair.near.serve()
    pair.near.until(lambda: pair.near.of_kind(DROPPED))
    assert [(each.number, list(each.buffers)) for each in pair.near.of_kind(DROPPED)] == [(ticket, [(1, 2, 3)])]


# ---------------------------------------------------------------------- posts


def test_a_told_answer_comes_out_of_next(pair: Pair) -> None:
    pair.far.serve()
    pair.near.serve()
    number = pair.near.post(payload=b"told", told=True)
    pair.near.until(lambda: pair.near.of_kind(RESPONSE))
    assert (pair.near.of_kind(RESPONSE)[0].number, pair.near.of_kind(RESPONSE)[0].payload) == (number, b"told")
    pair.near.until(lambda: pair.near.core.counts().pending == 0)


def test_a_told_call_is_overdue_and_ends_as_events(pair: Pair) -> None:
    number = pair.near.post(b"hold", told=True, deadline=monotonic() + 0.02)
    assert pair.near.event(OVERDUE).number == number
    assert pair.near.core.counts().pending == 1
    pair.near.core.cancel(number)
    assert pair.near.core.counts().pending == 0
    number = pair.near.post(b"hold", told=True)
    pair.near.core.end(pair.near.link)
    news = pair.near.event(ENDED)
    assert (news.number, news.flags) == (number, UNKNOWN)


def test_an_answer_lies_until_somebody_asks(pair: Pair) -> None:
    """No worker is here: it lies."""
    pair.far.serve()
    number = pair.near.post(payload=b"lies")
    pair.near.until(lambda: pair.near.core.done(number))
    assert pair.near.core.wait(number).payload == b"lies"
    with pytest.raises(CoreError):
        pair.near.core.wait(number)


def test_a_lying_answer_is_handed_to_an_idle_worker(pair: Pair) -> None:
    pair.far.serve()
    pair.near.serve()
    number = pair.near.post(payload=b"lies")
    pair.near.until(lambda: pair.near.of_kind(RESPONSE))
    assert pair.near.core.wait(number) == ("settled", b"lies")


def test_tell_later(pair: Pair) -> None:
    pair.far.serve()
    number = pair.near.post(payload=b"later")
    pair.near.until(lambda: pair.near.core.done(number))
    pair.near.core.tell(number)
    assert not pair.near.core.done(number)
    pair.near.serve()
    pair.near.until(lambda: pair.near.of_kind(RESPONSE))
    before = pair.near.post(b"hold", deadline=monotonic() + 0.05)
    pair.near.core.tell(before)
    assert pair.near.event(OVERDUE).number == before


def test_who_waits_for_a_told_call_gets_what_was_settled(pair: Pair) -> None:
    seen: list[Any] = []
    number = pair.near.post(payload=b"both", told=True)

    def wait() -> None:
        with suppress(CoreError):  # whoever comes after `settle` comes too late: the call is over
            seen.append(pair.near.core.wait(number))

    waiter = pair.near.start(wait)
    pair.far.serve()
    came = pair.near.core.next()
    assert came.number == number
    assert not seen
    pair.near.core.settle(number, "value")
    waiter.join(AT_ONCE_S)
    assert seen in (["value"], [])
    assert not waiter.is_alive()


def test_wait_is_overdue_and_the_call_stays(pair: Pair) -> None:
    number = pair.near.post(b"hold")
    assert pair.near.core.wait(number, monotonic() + 0.02).kind == OVERDUE
    assert not pair.near.core.done(number)
    pair.far.serve()
    pair.far.gate.set()
    assert pair.near.core.wait(number).kind == RESPONSE


def test_work_comes_out_of_next_in_its_turn(pair: Pair) -> None:
    core = pair.near.core
    tasks = [object() for _ in range(50)]
    for task in tasks:
        core.work(task)
    assert core.counts().queued == 50
    assert [core.next() for _ in tasks] == tasks
    assert core.next(monotonic() + 0.01) is None

    class Dying:
        def __del__(self) -> None:
            core.work("from a destructor")

    Dying()
    gc.collect()
    assert core.next() == "from a destructor"
    pair.near.serve(3)
    for task in tasks:
        core.work(task)
    pair.near.until(lambda: len(pair.near.came) == 50)
    assert set(map(id, pair.near.came)) == set(map(id, tasks))


# ---------------------------------------------------------------------- large messages


def test_a_large_call_is_given_up_in_the_middle(either: Pair) -> None:
    """The peer reads nothing; then it does, and what follows is whole."""
    relay_free = either.near
    for side in (either.near, either.far):
        side.core.detach(side.link)
    relay = Relay(either)
    relay.open.clear()
    memory = bytearray(large(1, 8 * MIB))
    before = monotonic()
    assert relay_free.call(payload=memory, deadline=before + 0.1).kind == OVERDUE
    assert monotonic() < before + AT_ONCE_S
    memory[:] = bytes(len(memory))
    memory.append(1)  # nobody holds it any longer
    either.far.serve()
    relay.open.set()
    assert relay_free.call(payload=large(2, 3 * MIB)).payload == large(2, 3 * MIB)
    assert len(either.far.of_kind(REQUEST)) == 1
    either.near.end()
    either.far.end()
    relay.close()


def test_giving_up_while_others_write(either: Pair) -> None:
    """Callers give up at all times, amid a flood: none waits for longer, and what arrives is right."""
    either.far.serve(2)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            payload = large(7, 400_000)
            assert either.near.call(payload=payload).payload == payload

    def hurry(seed: int) -> None:
        choose = random.Random(seed)
        for i in range(60):
            payload = large(i, 700_000)
            answer = either.near.call(payload=payload, deadline=monotonic() + choose.random() * 0.004)
            assert answer.kind == OVERDUE or answer.payload == payload
        stop.set()

    threads = [either.near.start(flood), either.near.start(flood), *(either.near.start(hurry, i) for i in range(3))]
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_an_impatient_post_never_waits(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(backlog_limit=100_000)
    pair.connect()
    sent = bytearray(large(3, MIB))
    for _ in range(20):
        pair.near.letter(5, sent, patient=False)
    sent[:] = bytes(len(sent))
    sent.append(1)
    assert pair.near.core.traffic(pair.near.link).unsent_bytes > 10 * MIB
    pair.far.serve()
    pair.far.until(lambda: len(pair.far.of_kind(LETTER)) == 20)
    assert all(each.payload == large(3, MIB) for each in pair.far.of_kind(LETTER))
    pair.near.until(lambda: pair.near.core.traffic(pair.near.link).unsent_bytes == 0)


def test_a_sender_waits_for_room(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(backlog_limit=100_000)
    sent: list[int] = []

    def send() -> None:
        for i in range(200):
            pair.near.control(b"%06d" % i + bytes(10_000))
            sent.append(i)

    sender = pair.near.start(send)
    pair.near.until(lambda: pair.near.core.traffic(pair.near.link).unsent_bytes > 100_000)
    assert len(sent) < 20
    with pytest.raises(CoreError):
        pair.near.control(deadline=monotonic() + 0.02)
    assert pair.near.call(deadline=monotonic() + 0.02).kind == OVERDUE
    pair.connect()
    pair.far.serve()
    sender.join(LONG_S)
    pair.far.until(lambda: len(pair.far.of_kind(CONTROL)) == 200)
    assert [int(each.payload[:6]) for each in pair.far.of_kind(CONTROL)] == list(range(200))


def test_more_is_held_back_until_flush(pair: Pair) -> None:
    pair.near.control(b"1", flags=OWNER, more=True)
    assert pair.near.core.traffic(pair.near.link).unsent_bytes > 0
    pair.near.core.flush(pair.near.link)
    assert pair.far.event(CONTROL).payload == b"1"


# ---------------------------------------------------------------------- resumption


SESSION = [b"s%d" % i * (i + 1) for i in range(5)] + [large(9, LARGE_BYTES + 5), b"last"]


def test_a_session_survives_a_cut_at_every_byte(make_pair: Callable[..., Pair]) -> None:
    """Every byte of the headers and of small frames, and some of the large one."""
    total = sum(40 + len(each) for each in SESSION)
    start = sum(40 + len(each) for each in SESSION[:5])
    for cut in [*range(1, start + 100), *range(start + 100, total - 60, 9973), *range(total - 60, total)]:
        pair = make_pair()
        relay = Relay(pair, cut=cut)
        for payload in SESSION:
            pair.near.control(payload, patient=False)
        assert pair.far.event(ENDED).number == 0
        assert pair.resume() == 0
        pair.far.serve()
        pair.far.until(lambda pair=pair: len(pair.far.of_kind(CONTROL)) == len(SESSION))
        assert [bytes(each.payload) for each in pair.far.of_kind(CONTROL)] == SESSION
        pair.near.end()
        pair.far.end()
        relay.close()


def test_a_large_call_survives_cuts(make_pair: Callable[..., Pair]) -> None:
    """While its sender waits, its memory is here: nothing is lost."""
    for cut in (1, 100, 262_144, 300_000, 900_000, 1_500_000):
        pair = make_pair()
        pair.far.serve()
        relay = Relay(pair, cut=cut)
        answers: list[Any] = []
        caller = pair.near.start(
            lambda pair=pair, answers=answers: answers.append(pair.near.call(payload=large(4, 6 * MIB)))
        )
        pair.far.event(ENDED)
        assert pair.resume() == 0
        caller.join(LONG_S)
        assert answers[0].payload == large(4, 6 * MIB)
        assert len(pair.far.of_kind(REQUEST)) == 1
        relay.close()


def test_lost_messages_are_replaced(make_pair: Callable[..., Pair]) -> None:
    """They left for the kernel and did not arrive: a call is over with NOT_SENT. A letter comes again."""
    pair = make_pair()
    relay = Relay(pair)
    relay.open.clear()
    number = pair.near.post(payload=large(1, LARGE_BYTES))
    pair.near.letter(7, large(2, LARGE_BYTES), flags=0)
    pair.near.letter(8, b"behind", flags=0)
    pair.near.post(payload=large(1, LARGE_BYTES))
    counts = pair.detach()
    relay.close()
    heads = pair.near.core.lost(pair.near.link, counts[1])
    assert [HEADER.unpack(head[:40])[2:5:2] for head in heads] == [(REQUEST, number), (REQUEST, number + 1)]
    near, far = connected("unix")
    pair.near.core.attach(pair.near.link, near, counts[1], [None, frame(LETTER, payload=b"instead", number=9)[0]])
    pair.far.core.attach(pair.far.link, far, counts[0])
    assert pair.near.core.wait(number).kind == ENDED
    pair.far.serve()
    pair.far.until(lambda: len(pair.far.of_kind(LETTER)) == 3)
    came = [(each.number, each.payload) for each in pair.far.of_kind(LETTER)]
    assert came == [(7, large(2, LARGE_BYTES)), (8, b"behind"), (9, b"instead")]
    assert not pair.far.of_kind(REQUEST)
    assert pair.near.call(payload=large(3)).payload == large(3)


def test_a_large_letter_survives_cuts(make_pair: Callable[..., Pair]) -> None:
    """Wherever: its sender may have it back, and a letter behind it does not pass it."""
    size = 3 * MIB
    for cut in (1, 100, 262_144, 300_000, 900_000, 1_500_000, size - 1, size + 100):
        pair = make_pair()
        pair.far.serve()
        relay = Relay(pair, cut=cut)

        def send(pair: Pair = pair) -> None:
            for number in range(3):
                pair.near.letter(number, large(number, size))
                pair.near.letter(10 + number, b"behind")

        sender = pair.near.start(send)
        pair.far.event(ENDED)
        assert pair.resume() == 0
        sender.join(LONG_S)
        pair.far.until(lambda pair=pair: len(pair.far.of_kind(LETTER)) == 6)
        came = [(each.number, bytes(each.payload)) for each in pair.far.of_kind(LETTER)]
        assert [number for number, _ in came] == [0, 10, 1, 11, 2, 12]
        assert all(payload == large(number, size) for number, payload in came[::2])
        relay.close()


def test_a_large_call_given_up_between_two_connections(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    relay = Relay(pair, cut=MIB)
    ended = threading.Event()

    def call() -> None:
        assert pair.near.call(payload=large(1, 4 * MIB), deadline=monotonic() + 0.3).kind == OVERDUE
        ended.set()

    pair.near.start(call)
    pair.far.event(ENDED)
    pair.detach()
    assert ended.wait(LONG_S), pair.near.errors
    pair.resume()
    relay.close()
    pair.far.serve()
    assert pair.near.call(payload=large(2, 2 * MIB)).payload == large(2, 2 * MIB)
    assert len(pair.far.of_kind(REQUEST)) == 1


def test_counts_that_cannot_be(pair: Pair) -> None:
    pair.far.serve()
    pair.near.call()
    counts = pair.detach()
    for count in (counts[1] + 1, 1 << 40):
        with pytest.raises(CoreError):
            pair.near.core.lost(pair.near.link, count)
        with pytest.raises(CoreError):
            pair.near.core.attach(pair.near.link, connected("unix")[0], count)
    assert pair.near.core.detach(pair.near.link) == counts[0]
    assert pair.resume() == 0
    assert pair.near.call().kind == RESPONSE
    with pytest.raises(CoreError):
        pair.near.core.lost(pair.near.link, counts[1])  # it is connected
    with pytest.raises(CoreError):
        pair.near.core.attach(99, connected("unix")[0])


def test_calls_run_once_over_links_that_break(either: Pair) -> None:
    either.far.serve(3)
    ended: list[int] = []

    def call(seed: int) -> None:
        for i in range(80):
            payload = b"%d/%d" % (seed, i) + bytes(random.Random(seed * 100 + i).choice([0, 100, 90_000, 600_000]))
            answer = either.near.call(payload=payload)
            if answer.kind == RESPONSE:
                assert answer.payload == payload
            else:
                assert answer.kind == FAILURE or (answer.kind, answer.flags) == (ENDED, NOT_SENT)
        ended.append(seed)

    def replace(head: bytes) -> bytes | None:
        kind, number = HEADER.unpack(head[:40])[2], HEADER.unpack(head[:40])[4]
        return frame(FAILURE, number=number)[0] if kind == RESPONSE else None

    threads = [either.near.start(call, seed) for seed in range(4)]
    while any(thread.is_alive() for thread in threads):
        threads[0].join(0.003)
        either.resume(replace)
    assert len(ended) == 4, either.near.errors
    seen = [bytes(each.payload[:12]) for each in either.far.of_kind(REQUEST)]
    assert len(seen) == len(set(seen))


def test_the_end_of_a_link(pair: Pair) -> None:
    pair.far.serve()
    seen: list[Any] = []
    caller = pair.near.start(lambda: seen.append(pair.near.call(b"hold")))
    pair.far.until(lambda: pair.far.of_kind(REQUEST))
    lying = pair.near.post(b"hold")
    pair.near.core.end(pair.near.link)
    caller.join(AT_ONCE_S)
    assert (seen[0].kind, seen[0].flags) == (ENDED, UNKNOWN)
    assert (pair.near.core.wait(lying).kind, pair.near.call().kind, pair.near.call().flags) == (ENDED, ENDED, NOT_SENT)
    for send in (pair.near.post, pair.near.control):
        with pytest.raises(CoreError):
            send()
    pair.far.event(ENDED)
    pair.far.core.end(pair.far.link)
    pair.far.gate.set()
    pair.far.until(lambda: pair.far.core.counts().running == 0)


def test_calls_that_never_left_are_not_sent(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    small = pair.near.post()
    seen: list[Any] = []
    caller = pair.near.start(lambda: seen.append(pair.near.call(payload=large(1))))
    pair.near.until(lambda: pair.near.core.counts().pending == 2)
    pair.near.core.end(pair.near.link)
    caller.join(AT_ONCE_S)
    assert (seen[0].kind, seen[0].flags) == (ENDED, NOT_SENT)
    answer = pair.near.core.wait(small)
    assert (answer.kind, answer.flags) == (ENDED, NOT_SENT)


def test_end_sending_sends_what_waits(either: Pair) -> None:
    for i in range(100):
        either.near.control(b"%d" % i + bytes(20_000), patient=False)
    either.near.core.end_sending(either.near.link)
    either.far.serve()
    news = either.far.event(ENDED)
    assert (news.number, news.function) == (0, b"")
    either.far.until(lambda: len(either.far.of_kind(CONTROL)) == 100)
    assert either.far.core.traffic(either.far.link).heard > 0
    assert either.near.core.traffic(either.near.link).heard in (
        -inf,
        pytest.approx(monotonic(), abs=LONG_S),
    )


# ---------------------------------------------------------------------- descriptors


def test_a_descriptor_comes_with_its_frame(pair: Pair) -> None:
    pair.far.serve()
    for i in range(100):
        reading, writing = os.pipe()
        pair.near.control(b"%d" % i, descriptor=reading)
        os.close(reading)
        pair.near.control(b"bare", flags=OWNER)
        os.write(writing, b"%d" % i)
        os.close(writing)
    pair.far.until(lambda: len(pair.far.of_kind(CONTROL)) == 100)
    for came in pair.far.of_kind(CONTROL):
        assert came.flags & CARRIES
        assert os.read(came.descriptor, 10) == came.payload
        os.close(came.descriptor)


def test_a_descriptor_with_a_large_message(pair: Pair) -> None:
    pair.far.serve()
    reading, writing = os.pipe()
    pair.near.control(large(1), descriptor=reading)
    pair.near.control(b"next", descriptor=writing)
    os.close(reading), os.close(writing)
    pair.far.until(lambda: len(pair.far.of_kind(CONTROL)) == 2)
    first, second = pair.far.of_kind(CONTROL)
    assert first.payload == large(1)
    assert second.payload == b"next"
    os.write(second.descriptor, b"through")
    assert os.read(first.descriptor, 10) == b"through"
    os.close(first.descriptor), os.close(second.descriptor)


def test_a_descriptor_is_refused_over_tcp(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair("tcp")
    pair.connect()
    with pytest.raises(CoreError):
        pair.near.control(descriptor=0)
    pair.far.serve()
    assert pair.near.call().kind == RESPONSE


def test_a_descriptor_comes_again_with_its_frame(make_pair: Callable[..., Pair]) -> None:
    """It was sent before there was a connection, and over one that broke; and over TCP its frame comes without."""
    pair = make_pair()
    reading, writing = os.pipe()
    pair.near.control(b"a", descriptor=reading)
    os.close(reading)
    near, far = connected("unix")
    pair.near.core.attach(pair.near.link, near)
    os.close(far)
    pair.resume()
    pair.far.serve()
    pair.far.until(lambda: pair.far.of_kind(CONTROL))
    os.write(writing, b"x")
    assert os.read(pair.far.of_kind(CONTROL)[0].descriptor, 1) == b"x"
    os.close(pair.far.of_kind(CONTROL)[0].descriptor)
    pair.detach()
    pair.near.control(b"b", descriptor=writing)
    os.close(writing)
    pair.family = "tcp"
    pair.resume()
    pair.far.until(lambda: len(pair.far.of_kind(CONTROL)) == 2)
    assert (pair.far.of_kind(CONTROL)[1].descriptor, pair.far.of_kind(CONTROL)[1].payload) == (-1, b"b")


# ---------------------------------------------------------------------- order


def test_marked_frames_come_in_order_one_at_a_time(either: Pair) -> None:
    """Four workers that pause at random; requests that are not marked do not pass a marked frame before them."""
    choose, placed, inside = random.Random(1), [0], [0]
    lock = threading.Lock()

    def handle(came: Any) -> None:
        if came.handle is not None:
            with lock:
                inside[0] += 1
                assert inside[0] == 1
            if choose.random() < 0.3:
                threading.Event().wait(choose.random() * 0.003)
            with lock:
                inside[0] -= 1
                assert int(came.payload) == placed[0] + 1
                placed[0] += 1
            either.far.core.placed(came.handle)
        else:
            assert int(came.payload) <= placed[0]
        if came.kind == REQUEST:
            either.far.answer(came)

    either.far.serve(4, handle)
    calls: list[int] = []
    for i in range(1, 401):
        kind = choose.choice([REQUEST, LETTER, CONTROL])
        payload = b"%d" % i
        if kind == REQUEST:
            calls.append(either.near.post(payload=payload, flags=MARKED))
        elif kind == LETTER:
            either.near.letter(i, payload)
        else:
            either.near.control(payload, flags=MARKED)
        if choose.random() < 0.5:
            calls.append(either.near.post(payload=payload))
    for number in calls:
        assert either.near.core.wait(number).kind == RESPONSE
    either.far.until(lambda: placed[0] == 400)
    assert not either.far.errors


def test_a_marked_answer_is_placed_by_who_waits_or_a_worker(pair: Pair) -> None:
    pair.far.serve(2, lambda came: pair.far.answer(came, flags=MARKED if came.function == b"mark" else 0))
    answer = pair.near.call(b"mark")
    other = pair.near.post()  # the fence: its answer waits until the marked one is placed
    assert pair.near.core.wait(other, monotonic() + 0.05).kind == OVERDUE
    pair.near.core.placed(answer.handle)
    assert pair.near.core.wait(other).kind == RESPONSE
    with pytest.raises(CoreError):
        pair.near.core.placed(answer.handle)
    number = pair.near.post(b"mark")
    came = pair.near.core.next()
    assert (came.kind, came.number) == (RESPONSE, number)
    pair.near.core.placed(came.handle)
    pair.near.core.settle(number, 5)
    assert pair.near.core.wait(number) == 5


def test_before_admit_every_frame_is_marked(makers: Any, make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    core = pair.far.core
    link = core.open_link()  # not admitted
    near, far = connected("unix")
    pair.near.core.attach(pair.near.link, near)
    core.attach(link, far)
    numbers = [pair.near.post() for _ in range(3)]
    first = core.next()
    assert first.handle is not None
    assert core.next(monotonic() + 0.02) is None
    core.admit(link)
    core.placed(first.handle)
    for number in numbers[1:]:
        came = core.next()
        assert came.number == number
        core.placed(came.handle)
    pair.near.post()
    assert core.next().handle is None


def test_pause_behind_and_unpause(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    first = pair.near.post(payload=b"not yet", flags=MARKED, buffers=[large(1)])
    pair.near.post(payload=b"behind")
    came = core.next()
    core.pause_behind(came.handle)
    assert core.counts().running == 0
    pair.near.control(b"o", flags=OWNER)
    assert pair.far.event(CONTROL).payload == b"o"
    assert core.next(monotonic() + 0.02) is None
    core.unpause(link)
    again = core.next()
    assert (again.number, again.payload, bytes(again.buffers[0])) == (first, b"not yet", large(1))
    assert core.next(monotonic() + 0.02) is None
    core.placed(again.handle)
    assert core.next().payload == b"behind"


def test_a_request_paused_behind_is_cancelled(pair: Pair) -> None:
    core = pair.far.core
    number = pair.near.post(flags=MARKED)
    core.pause_behind(core.next().handle)
    pair.near.core.cancel(number)
    pair.near.control(flags=OWNER)
    pair.far.event(CONTROL)
    core.unpause(pair.far.link)
    came = core.next()
    assert (came.kind, came.number) == (DROPPED, number)
    core.placed(came.handle)


def test_a_frame_whose_handle_dies_is_handed_out_again(pair: Pair) -> None:
    first, second = pair.near.post(b"first", flags=MARKED, payload=large(1)), pair.near.post(b"second", flags=MARKED)
    for _ in range(3):
        came = pair.far.core.next()
        assert (came.number, came.function, bytes(came.payload)) == (first, b"first", large(1))
        del came
        gc.collect()
    came = pair.far.core.next()
    pair.far.core.placed(came.handle)
    assert pair.far.core.next().number == second


def test_frames_before_the_end_are_handed_out_and_requests_dropped(pair: Pair) -> None:
    pair.near.letter(1)
    pair.near.post(flags=MARKED)
    pair.near.post()
    pair.near.letter(2)
    pair.near.control(flags=OWNER)
    pair.far.event(CONTROL)
    came = pair.far.core.next()
    pair.far.core.end(pair.far.link)
    assert came.number == 1
    pair.far.core.placed(came.handle)
    for kind in (DROPPED, LETTER):
        came = pair.far.core.next()
        assert came.kind == kind
        pair.far.core.placed(came.handle)
    assert pair.far.core.next(monotonic() + 0.02) is None


def test_owner_frames_come_out_of_events(pair: Pair) -> None:
    pair.near.letter(1)
    pair.near.control(b"owner", flags=OWNER | MARKED)
    pair.near.post(flags=OWNER)
    news = pair.far.event(CONTROL)
    assert news.payload == b"owner"
    assert news.handle is None
    asked = pair.far.event(REQUEST)
    assert pair.far.core.counts().running == 1
    pair.far.answer(asked)
    assert pair.near.core.wait(1).kind == RESPONSE
    assert pair.far.core.next().kind == LETTER


def test_refusable_requests_over_the_limit(pair: Pair) -> None:
    pair.far.core.limit_queue(2)
    numbers = [pair.near.post(flags=REFUSABLE) for _ in range(3)] + [pair.near.post()]
    refused = pair.far.event(REQUEST)
    assert refused.number == numbers[2]
    pair.far.answer(refused, FAILURE)
    pair.far.serve()
    assert [pair.near.core.wait(number).kind for number in numbers] == [RESPONSE, RESPONSE, FAILURE, RESPONSE]


# ---------------------------------------------------------------------- slots


def test_letters_wake_who_waits_in_their_slot(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    core.open_slot(link, 5)
    seen: list[Any] = []

    def read() -> None:
        while (came := core.take(link, 5)) is not None:
            core.placed(came.handle)
            seen.append(came.payload)

    reader = pair.far.start(read)
    for i in range(50):
        pair.near.letter(5, b"%d" % i)
        if i == 20:
            pair.near.letter(6, b"nobody's")
    others: list[Any] = []
    while len(seen) + len(others) < 51:  # letters that came while it placed one are a worker's
        came = core.next(monotonic() + 0.02)
        if came is not None:
            others.append(came.payload)
            core.placed(came.handle)
    assert sorted(seen + others) == sorted([b"%d" % i for i in range(50)] + [b"nobody's"])
    assert b"nobody's" in others
    core.close_slot(link, 5)
    reader.join(AT_ONCE_S)
    assert not reader.is_alive()


def test_take_returns_when_woken_closed_late_or_ended(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    assert core.take(link, 4, monotonic() + 10) is None  # never opened
    core.open_slot(link, 5)
    assert core.take(link, 5, monotonic() + 0.01) is None
    core.wake(link, 5)
    assert core.take(link, 5) is None
    for let_go in (lambda: core.wake(link, 5), lambda: core.close_slot(link, 5), lambda: core.end(link)):
        core.open_slot(link, 5)
        entered = threading.Barrier(4)

        def read(entered: threading.Barrier = entered) -> None:
            entered.wait(LONG_S)
            assert core.take(link, 5) is None

        readers = [pair.far.start(read) for _ in range(3)]
        entered.wait(LONG_S)
        threading.Event().wait(0.02)  # most are in `take`; `wake` is repeated for others
        while any(reader.is_alive() for reader in readers):
            let_go()
            readers[0].join(0.05), readers[1].join(0.05), readers[2].join(0.05)
    assert core.take(link, 5) is None
    assert not pair.far.errors


def test_wake_lets_all_go(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    core.open_slot(link, 5)
    readers = [pair.far.start(core.take, link, 5) for _ in range(3)]
    threading.Event().wait(0.1)  # they wait; one that does not yet gets the second wake
    core.wake(link, 5)
    readers[0].join(2)
    core.wake(link, 5)
    for reader in readers:
        reader.join(AT_ONCE_S)
    assert sum(reader.is_alive() for reader in readers) == 0


# ---------------------------------------------------------------------- workers


def test_starved_when_all_workers_wait(pair: Pair) -> None:
    """Each time, also where the worker that was added waits, too."""
    core = pair.far.core
    leave = threading.Event()

    def handle(came: Any) -> None:
        core.begin_wait()
        leave.wait(LONG_S)
        core.end_wait()
        pair.far.answer(came)

    calls = [pair.near.post() for _ in range(4)]
    for _ in calls:
        pair.far.serve(1, handle)
        if len(pair.far.threads) < len(calls):
            pair.far.event(STARVED)
    leave.set()
    for number in calls:
        assert pair.near.core.wait(number).kind == RESPONSE


def test_workers_that_call_back_starve_nobody(pair: Pair) -> None:
    def handle(came: Any) -> None:
        if came.kind == REQUEST:
            depth = int(came.payload)
            if depth:
                assert pair.far.call(payload=b"%d" % (depth - 1)).kind == RESPONSE
            pair.far.answer(came)

    def back(came: Any) -> None:
        depth = int(came.payload)
        if depth:
            assert pair.near.call(payload=b"%d" % (depth - 1)).kind == RESPONSE
        pair.near.answer(came)

    pair.far.serve(3, handle)
    pair.near.serve(3, back)
    callers = [pair.near.start(lambda: pair.near.call(payload=b"3")) for _ in range(1)]
    for caller in callers:
        caller.join(LONG_S)
        assert not caller.is_alive()


def test_a_link_to_oneself(pair: Pair) -> None:
    core = pair.near.core
    link = core.open_link(True)  # type: ignore[call-arg]
    pair.near.serve(2)
    head, pieces = request(payload=b"me", buffers=[large(1)])
    answer = core.call(link, head, pieces)
    assert (answer.kind, answer.payload, bytes(answer.buffers[0])) == (RESPONSE, b"me", large(1))
    number = core.post(link, request(b"hold")[0])
    pair.near.until(lambda: len(pair.near.of_kind(REQUEST)) == 2)
    core.cancel(number)
    assert pair.near.event(CANCELLED).number == number
    pair.near.gate.set()
    assert core.call(link, request(b"fail")[0]).kind == FAILURE
    for i in range(100):
        core.post(link, frame(LETTER, payload=b"%d" % i, flags=MARKED, number=i)[0])
    pair.near.until(lambda: len(pair.near.of_kind(LETTER)) == 100)
    with pytest.raises(CoreError):
        core.attach(link, connected("unix")[0])
    core.end(link)
    assert core.call(link, head, pieces).flags == NOT_SENT


# ---------------------------------------------------------------------- the end


def test_stop_ends_every_wait(make_pair: Callable[..., Pair]) -> None:
    for _ in range(5):
        pair = make_pair()
        pair.connect()
        core, link = pair.near.core, pair.near.link
        core.open_slot(link, 1)
        posted = pair.near.post(b"hold")
        inside = threading.Semaphore(0)
        ends: list[Any] = []

        def run(method: Callable[..., Any], *args: Any, inside: Any = inside, ends: Any = ends) -> None:
            inside.release()
            try:
                ends.append(method(*args))
            except Stopped:
                ends.append(Stopped)

        waits: list[Any] = [(core.next,), (core.next,), (core.take, link, 1), (core.wait, posted), (core.wait, posted)]
        waits += [(core.call, link, *request(b"hold")), (core.call, link, *request(payload=large(1, 20 * MIB)))]
        threads = [pair.near.start(run, *each) for each in waits]
        for _ in threads:
            inside.acquire()
        task = object()
        core.stop()
        core.stop()
        for thread in threads:
            thread.join(AT_ONCE_S)
            assert not thread.is_alive()
        assert len(ends) == len(waits), ends
        assert set(ends) <= {None, Stopped}, ends
        for act in (
            partial(core.work, task),
            core.counts,
            core.open_link,
            partial(core.post, link, request()[0]),
            core.events,
        ):
            with pytest.raises(Stopped):
                act()
        assert core.next() is None


def test_stop_lets_go_of_tasks(pair: Pair) -> None:
    class Task:
        pass

    import weakref

    task = Task()
    died = weakref.ref(task)
    pair.near.core.work(task)
    del task
    pair.near.core.stop()
    gc.collect()
    assert died() is None


def test_a_forked_child_has_no_core(pair: Pair) -> None:
    pair.far.serve()
    pair.near.serve()
    assert pair.near.call(payload=large(1)).kind == RESPONSE
    kept = pair.near.call(payload=large(1)).payload
    child = os.fork()
    if not child:
        status = 1
        try:
            for act in (pair.near.core.counts, pair.near.call, pair.near.core.next, lambda: pair.near.core.work(1)):
                try:
                    act()
                    os._exit(2)
                except Stopped:
                    pass
            pair.near.core.close_after_fork()
            pair.far.core.close_after_fork()
            del kept
            gc.collect()
            own = Pair(type(pair.near.core)(), type(pair.far.core)(), "unix")
            own.admit()
            own.connect()
            own.far.serve()
            status = 0 if own.near.call(payload=large(2)).payload == large(2) else 3
            own.near.end()
            own.far.end()
        finally:
            os._exit(status)
    for i in range(50):
        assert pair.near.call(payload=b"%d" % i).payload == b"%d" % i
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pair.near.call(payload=large(3)).payload == large(3)


class Interrupted(Exception):
    pass


@contextmanager
def interrupting() -> Iterator[list[float]]:
    """SIGALRM raises; the list has when it was sent."""
    sent: list[float] = []

    def raise_it(number: int, at: Any) -> None:
        sent.append(monotonic())
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_it)
    try:
        yield sent
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("wait", ["call", "wait", "next", "take", "large", "room"])
def test_ctrl_c_ends_the_main_threads_waits(make_pair: Callable[..., Pair], wait: str) -> None:
    pair = make_pair(backlog_limit=10_000)
    core, link = pair.near.core, pair.near.link
    if wait not in ("large", "room"):
        pair.connect()
    else:
        pair.near.control(bytes(20_000))
    core.open_slot(link, 1)
    number = pair.near.post(b"hold", patient=False)
    waits: dict[str, Callable[[Any], Any]] = {
        "call": lambda _: pair.near.call(b"hold"),
        "wait": lambda _: core.wait(number),
        "next": lambda _: core.next(),
        "take": lambda _: core.take(link, 1),
        "large": lambda _: pair.near.call(payload=large(1)),
        "room": lambda _: pair.near.control(),
    }
    choose = random.Random(5)
    took: list[float] = []
    with interrupting():
        for _ in range(34):
            after = 0.0005 + choose.random() * 0.004
            start = monotonic()
            with pytest.raises(Interrupted):  # the signal may come before its wait
                waits[wait](signal.setitimer(signal.ITIMER_REAL, after))
            took.append(monotonic() - start - after)
    took.sort()
    assert took[len(took) // 2] < 0.05
    assert took[-1] < AT_ONCE_S
    assert core.counts().pending == 1
    if wait in ("large", "room"):
        pair.connect()
    pair.far.serve()
    pair.far.gate.set()
    assert core.wait(number).kind == RESPONSE
    pair.near.serve()
    assert pair.near.call(payload=large(5)).payload == large(5)
    assert pair.far.call(payload=b"back").payload == b"back"


def test_signals_amid_calls_leave_the_core_consistent(pair: Pair) -> None:
    pair.far.serve(2)
    choose = random.Random(6)
    answered = interrupted = 0
    with interrupting():
        while interrupted < 100:
            payload = large(answered, choose.choice([0, 1000, 80_000, 400_000]))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + choose.random() * 0.0006)
                try:
                    assert pair.near.call(payload=payload).payload == payload
                    answered += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
    assert pair.near.core.counts().pending == 0
    for i in range(20):
        assert pair.near.call(payload=large(i)).payload == large(i)
    pair.far.until(lambda: pair.far.core.counts()[1:3] == (0, 0))


# ---------------------------------------------------------------------- pumps


class Xor:
    """A pump whose wire has other bytes, and a few more of them: each piece has its length before it."""

    def __init__(self, end: int, fails_after: int = 1 << 60) -> None:
        self.end, self.left, self.opened = end, fails_after, b""

    def fileno(self) -> int:
        return self.end

    def open(self, data: bytes) -> bytes:
        self.left -= len(data)
        if self.left < 0:
            raise ValueError("these bytes are not the peer's")
        self.opened += data
        plain = []
        while len(self.opened) >= 4 and len(self.opened) >= 4 + (size := int.from_bytes(self.opened[:4], "big")):
            plain.append(self.opened[4 : 4 + size].translate(FLIPPED))
            self.opened = self.opened[4 + size :]
        return b"".join(plain)

    def seal(self, data: Any) -> bytes:
        plain = b"".join(data)
        return len(plain).to_bytes(4, "big") + plain.translate(FLIPPED)


FLIPPED = bytes(each ^ 0x5A for each in range(256))


def attach_pumps(pair: Pair, **options: Any) -> None:
    near, far = connected(pair.family)
    pair.near.core.attach(pair.near.link, Xor(near))
    pair.far.core.attach(pair.far.link, Xor(far, **options))


def test_calls_through_pumps(make_pair: Callable[..., Pair], family: str) -> None:
    pair = make_pair(family)
    attach_pumps(pair)
    for side in (pair.near, pair.far):
        side.serve(2)
    ended: list[int] = []

    def call(side: Side, seed: int) -> None:
        for i in range(20):
            payload = large(seed + i, (0, 100, 100_000, 700_000)[i % 4])
            assert side.call(payload=payload).payload == payload
        ended.append(seed)

    threads = [side.start(call, side, seed) for side in (pair.near, pair.far) for seed in range(3)]
    for thread in threads:
        thread.join(LONG_S)
    assert len(ended) == 6, (pair.near.errors, pair.far.errors)
    counts = pair.detach()  # with the bytes that the pump has, nothing may hang
    assert min(counts) > 0
    pair.resume()
    assert pair.near.call().kind == RESPONSE


def test_a_pump_without_waiting_threads_is_read_by_the_event_thread(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    attach_pumps(pair)
    pair.near.control(b"hello", flags=OWNER)
    assert pair.far.event(CONTROL).payload == b"hello"


def test_a_pump_that_raises_breaks_its_connection(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    attach_pumps(pair, fails_after=1000)
    pair.far.serve()
    sent = 0
    while not pair.far.news:
        pair.near.control(b"x" * 50, patient=False)
        sent += 1
        pair.far.news += pair.far.core.events()
    assert b"not the peer's" in pair.far.event(ENDED).function
    pair.resume()
    pair.far.until(lambda: len(pair.far.of_kind(CONTROL)) == sent)
    assert pair.near.call().kind == RESPONSE


def test_a_pump_ends_while_threads_call(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    attach_pumps(pair)
    pair.far.serve(2)
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            pair.near.call()

    threads = [pair.near.start(call) for _ in range(4)]
    for _ in range(100):
        counts = pair.detach()
        near, far = connected("unix")
        pair.near.core.attach(pair.near.link, Xor(near), counts[1])
        pair.far.core.attach(pair.far.link, Xor(far), counts[0])
    stop.set()
    for thread in threads:
        thread.join(AT_ONCE_S)
        assert not thread.is_alive()


# ---------------------------------------------------------------------- bytes of strangers


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def raw(pair: Pair) -> socket.socket:
    """The other end of far's connection."""
    near, far = connected("unix")
    pair.far.core.attach(pair.far.link, far)
    end = socket.socket(fileno=near)
    end.setblocking(True)
    return end


def test_announcements_take_no_memory(make_pair: Callable[..., Pair]) -> None:
    heads = [
        HEADER.pack(b"fc", VERSION, CONTROL, 0, 0, 1 << 45, 0, 0, 0, 0),
        HEADER.pack(b"fc", VERSION, CONTROL, 0, 0, 0, 0, 16 << 20, 0, 0),
        HEADER.pack(b"fc", VERSION, CONTROL, 0, 0, 0, 0, 0, 1 << 20, 0),
        HEADER.pack(b"fc", VERSION, CONTROL, 0, 0, 1 << 31, 0, 0, 1, 0) + ENTRY.pack(1 << 40, 0, 0),
    ]
    for head in heads:
        pair = make_pair()
        before = memory_bytes()
        with raw(pair) as end:
            end.sendall(head)
            pair.far.until(lambda pair=pair: pair.far.core.traffic(pair.far.link).heard > 0)
            assert memory_bytes() < before + 8 * MIB
    far = pair.far
    far.event(ENDED)


@settings(max_examples=60)
@given(st.binary(min_size=1, max_size=300), st.booleans(), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_malformed_bytes_break_the_connection_and_no_more(data: bytes, has_header: bool, kind: int, flags: int) -> None:
    from tests.kit.cores import implementation

    for name in ("compiled", "plain"):
        try:
            make = implementation(name)
        except pytest.skip.Exception:
            continue
        core = make()
        far = Side(core)
        near, end = connected("unix")
        core.attach(far.link, end)
        with socket.socket(fileno=near) as wire:
            wire.sendall((HEADER.pack(b"fc", VERSION, kind, flags, 5, 3, 2, 1, 0, 0) if has_header else b"") + data)
            wire.shutdown(socket.SHUT_WR)
            news = far.event(ENDED)
            assert news.number == 0
        while (came := core.next(monotonic() + 0.001)) is not None:
            if came.handle is not None:
                core.placed(came.handle)
        far.end()


def test_counts_are_of_one_moment(pair: Pair) -> None:
    pair.far.serve(1)
    first = pair.near.post(b"hold")
    pair.far.until(lambda: pair.far.of_kind(REQUEST))
    rest = [pair.near.post() for _ in range(3)]
    pair.far.until(lambda: pair.far.core.counts().last_request == 4)
    assert pair.far.core.counts() == (0, 3, 1, 0, 4)
    assert pair.near.core.counts() == (4, 0, 0, 4, 0)
    pair.far.gate.set()
    for number in (first, *rest):
        pair.near.core.wait(number)
    assert pair.near.core.counts().pending == 0
