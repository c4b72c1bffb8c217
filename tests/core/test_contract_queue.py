"""The queue of requests in every implementation of `farcall.core.contract.Core`: deferral, limit, a look into it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from tests.core.test_contract import large
from tests.kit.cores import Pair, frame, request
from tests.kit.times import AT_ONCE_S

from farcall.core.contract import (
    CANCELLED,
    CONTROL,
    DROPPED,
    ENDED,
    FULL,
    KEPT,
    LETTER,
    MARKED,
    OWNER,
    REFUSABLE,
    REQUEST,
    RESPONSE,
    ROOM,
    STARVED,
    CoreError,
)


def settle(pair: Pair) -> None:
    """What near sent before this has come."""
    pair.near.control(flags=OWNER)
    pair.far.event(CONTROL)


# ---------------------------------------------------------------------- deferral


def test_what_is_behind_a_deferred_frame_passes_it(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    numbers = [pair.near.post(payload=b"%d" % i, flags=MARKED, buffers=[large(i)]) for i in range(4)]
    pair.near.post(payload=b"plain")
    for i in range(4):
        came = core.next()
        assert came.payload == b"%d" % i
        if i % 2:
            core.placed(came.handle)
        else:
            core.defer(came.handle)
    assert core.next().payload == b"plain"
    settle(pair)
    assert core.traffic(link).held == 2
    assert (core.counts().queued, core.counts().running) == (2, 3)
    core.recall(link)
    pair.near.post(payload=b"later", flags=MARKED)
    for i in (0, 2):
        came = core.next()
        assert (came.number, came.payload, bytes(came.buffers[0])) == (numbers[i], b"%d" % i, large(i))
        assert core.next(monotonic() + 0.01) is None
        core.placed(came.handle)
    came = core.next()
    assert came.payload == b"later"
    core.recall(link)
    core.recall(99)
    with pytest.raises(CoreError):
        core.defer(core.placed(came.handle) or came.handle)


def test_a_frame_is_deferred_again(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    for i in range(3):
        pair.near.letter(i)
    for _ in range(3):
        for i in range(3):
            came = core.next()
            assert (came.kind, came.number) == (LETTER, i)
            core.defer(came.handle)
        assert core.next(monotonic() + 0.01) is None
        core.recall(link)
    came = core.next()
    pair.near.letter(3)
    settle(pair)
    core.recall(link)
    core.defer(came.handle)
    core.recall(link)
    order = []
    for _ in range(4):
        came = core.next()
        order.append(came.number)
        core.placed(came.handle)
    assert sorted(order) == [0, 1, 2, 3]
    assert order[-1] == 3


def test_a_deferred_request_is_cancelled(pair: Pair) -> None:
    core = pair.far.core
    number = pair.near.post(flags=MARKED, payload=b"gone")
    core.defer(core.next().handle)
    pair.near.core.cancel(number)
    settle(pair)
    assert not core.events()
    core.recall(pair.far.link)
    came = core.next()
    assert (came.kind, came.number, came.payload) == (DROPPED, number, b"gone")
    core.placed(came.handle)


def waited_for(pair: Pair) -> Any:
    """A marked answer that came out of `wait`."""
    core = pair.near.core
    while True:
        seen: list[Any] = []
        number = pair.near.post(b"mark", b"what")
        waiter = pair.near.start(lambda seen=seen, number=number: seen.append(core.wait(number)))
        while waiter.is_alive():
            if (early := core.next(monotonic() + 0.005)) is not None:  # it came before anybody waited
                core.placed(early.handle)
                core.settle(number, None)
        if seen[0] is not None:
            return seen[0]


def test_an_answer_whose_handle_dies_is_handed_out_again(pair: Pair) -> None:
    pair.far.serve(1, lambda came: pair.far.answer(came, flags=MARKED))
    answer = waited_for(pair)
    number = answer.number
    del answer
    gc.collect()
    answer = pair.near.core.next()
    assert (answer.kind, answer.number, answer.payload) == (RESPONSE, number, b"what")
    pair.near.core.placed(answer.handle)
    pair.near.core.settle(number, 5)
    assert pair.near.core.wait(number) == 5


@pytest.mark.parametrize("put_back", ["defer", "pause_behind"])
@pytest.mark.parametrize("way", ["call", "wait", "next"])
def test_an_answer_is_put_back(pair: Pair, put_back: str, way: str) -> None:
    pair.far.serve(1, lambda came: pair.far.answer(came, flags=MARKED if came.function == b"mark" else 0))
    core, link = pair.near.core, pair.near.link
    if way == "call":
        answer = pair.near.call(b"mark", b"what")
    elif way == "wait":
        answer = waited_for(pair)
    else:
        pair.near.post(b"mark", b"what")
        answer = core.next()
    number = answer.number
    getattr(core, put_back)(answer.handle)
    assert core.counts().pending == 1
    assert core.wait(number, monotonic() + 0.01).kind != RESPONSE
    if put_back == "defer":
        assert pair.near.call().kind == RESPONSE
        core.recall(link)
    else:
        core.unpause(link)
    again = core.next()  # a marked answer never lies, and nobody waits at this moment
    assert (again.kind, again.number, again.payload) == (RESPONSE, number, b"what")
    core.placed(again.handle)
    core.settle(number, "read")
    assert core.wait(number) == "read"
    assert core.counts().pending == 0


def test_who_waits_for_a_deferred_answer_gets_it(pair: Pair) -> None:
    pair.far.serve(1, lambda came: pair.far.answer(came, flags=MARKED))
    core = pair.near.core
    pair.near.serve()
    for _ in range(20):
        answer = pair.near.call(payload=b"what")
        core.defer(answer.handle)
        seen: list[Any] = []
        waiter = pair.near.start(lambda seen=seen, number=answer.number: seen.append(core.wait(number)))
        core.recall(pair.near.link)
        waiter.join(AT_ONCE_S)
        if seen[0] != ("settled", b"what"):
            assert (seen[0].kind, seen[0].payload) == (RESPONSE, b"what")
            core.placed(seen[0].handle)


def test_an_answer_that_nobody_wants_after_it_was_deferred(pair: Pair) -> None:
    pair.far.serve(1, lambda came: pair.far.answer(came, flags=MARKED))
    core = pair.near.core
    answer = pair.near.call()
    core.defer(answer.handle)
    core.cancel(answer.number)
    core.recall(pair.near.link)
    came = core.next()
    assert (came.kind, came.number) == (DROPPED, answer.number)
    core.placed(came.handle)
    pair.near.post(told=True)
    answer = core.next()
    core.cancel(answer.number)
    core.defer(answer.handle)  # nobody waits for it: it does not enter the table again
    assert core.counts().pending == 0
    core.recall(pair.near.link)
    came = core.next()
    assert (came.kind, came.number) == (DROPPED, answer.number)
    core.placed(came.handle)


def test_deferred_frames_outlive_their_link(pair: Pair) -> None:
    core, link = pair.far.core, pair.far.link
    pair.near.letter(1)
    pair.near.post(flags=MARKED)
    for _ in range(2):
        core.defer(core.next().handle)
    late = pair.near.post(flags=MARKED)
    came = core.next()
    core.end(link)
    assert came.number == late
    core.defer(came.handle)
    core.recall(link)
    for kind in (LETTER, DROPPED, DROPPED):
        came = core.next()
        assert came.kind == kind
        core.placed(came.handle)
    assert core.traffic(link).frames == 0  # nothing is left of it


# ---------------------------------------------------------------------- requests that run in any case


def test_a_kept_request_is_not_cancelled(pair: Pair) -> None:
    core = pair.far.core
    first = pair.near.post(payload=b"first", flags=KEPT | MARKED)
    second = pair.near.post(payload=b"second", flags=KEPT | MARKED)
    came = core.next()
    for number in (first, second):
        pair.near.core.cancel(number)
    settle(pair)
    assert not core.events()
    core.placed(came.handle)
    pair.far.answer(came)
    came = core.next()
    assert (came.kind, came.number) == (REQUEST, second)
    core.placed(came.handle)
    pair.far.answer(came)


@pytest.mark.parametrize("placed", [False, True])
def test_a_kept_request_outlives_its_link(pair: Pair, placed: bool) -> None:
    core, link = pair.far.core, pair.far.link
    for i in range(3):
        pair.near.post(payload=b"%d" % i, flags=MARKED | (KEPT if i != 1 else 0))
    pair.near.post(payload=b"3", flags=KEPT)
    first = core.next()
    if placed:
        core.placed(first.handle)
    settle(pair)
    core.end(link)
    if not placed:
        core.placed(first.handle)
    for kind, payload in ((DROPPED, b"1"), (REQUEST, b"2"), (REQUEST, b"3")):
        came = core.next()
        assert (came.kind, came.payload) == (kind, payload)
        if came.handle is not None:
            core.placed(came.handle)
        if came.kind == REQUEST:
            with pytest.raises(CoreError):
                pair.far.answer(came)
    assert core.counts() == (0, 0, 1, 0, 4)
    core.finished(link, first.number)
    assert core.counts().running == 0
    assert core.traffic(link).frames == 0  # nothing is left of it


# ---------------------------------------------------------------------- the limit


def test_full_and_room(pair: Pair) -> None:
    core = pair.far.core
    core.limit_queue(4)
    other = Pair.__new__(Pair)  # a second link between the same cores
    other.near, other.far, other.family = (type(pair.near)(pair.near.core), type(pair.far)(core), "unix")
    other.admit()
    other.connect()
    numbers = [pair.near.post() for _ in range(7)]
    settle(pair)
    assert [(each.kind, each.link, each.number) for each in core.events() + pair.far.news] == [(FULL, pair.far.link, 4)]
    pair.far.news.clear()
    refused = pair.near.post(flags=REFUSABLE)
    assert pair.far.event(REQUEST).number == refused
    core.finished(pair.far.link, refused)
    numbers += [other.near.post() for _ in range(2)]
    news = pair.far.event(FULL)
    assert (news.link, news.number) == (other.far.link, 7)
    for _ in range(6):
        assert not core.events()
        pair.far.answer(core.next())
    pair.far.answer(core.next())
    pair.far.event(ROOM)
    assert not core.events()
    numbers += [pair.near.post() for _ in range(3)]
    assert pair.far.event(FULL).link == pair.far.link
    for _ in range(5):
        pair.far.answer(core.next())
    pair.far.event(ROOM)
    for number in numbers:
        assert pair.near.core.wait(number).kind == RESPONSE


def test_room_comes_where_the_rest_was_cancelled(pair: Pair) -> None:
    core = pair.far.core
    core.limit_queue(2)
    numbers = [pair.near.post() for _ in range(3)]
    pair.far.event(FULL)
    for number in numbers:
        pair.near.core.cancel(number)
    settle(pair)
    assert core.next(monotonic() + 0.02) is None
    pair.far.event(ROOM)


def test_a_call_is_answered_over_its_own_link_alone(pair: Pair) -> None:
    other = Pair.__new__(Pair)
    other.near, other.far, other.family = (type(pair.near)(pair.near.core), type(pair.far)(pair.far.core), "unix")
    other.admit()
    other.connect()
    number = pair.near.post(payload=b"right")
    came = pair.far.core.next()
    head, _ = frame(RESPONSE, b"", b"forged", number=number)
    pair.far.core.post(other.far.link, head)
    other.far.control(flags=OWNER)
    other.near.event(CONTROL)  # so the forged one has come
    assert not pair.near.core.done(number)
    pair.far.answer(came)
    assert pair.near.core.wait(number).payload == b"right"


def test_what_waits_for_its_turn_counts(pair: Pair) -> None:
    core = pair.far.core
    core.limit_queue(4)
    for _ in range(9):
        pair.near.post(flags=MARKED)
    assert pair.far.event(FULL).number == 4
    settle(pair)
    for _ in range(9):
        came = core.next()
        assert came.kind == REQUEST
        core.placed(came.handle)
    pair.far.event(ROOM)


def test_a_marked_request_is_refused_at_its_turn(pair: Pair) -> None:
    core = pair.far.core
    core.limit_queue(2)
    numbers = [pair.near.post(flags=MARKED | REFUSABLE) for _ in range(5)]
    settle(pair)
    for number in numbers[:2]:
        came = core.next()
        assert came.number == number
        core.placed(came.handle)
    for number in numbers[2:]:
        refused = pair.far.event(REQUEST)
        assert refused.number == number
        core.placed(refused.handle)


def test_the_event_thread_places_what_no_worker_comes_for(pair: Pair) -> None:
    core = pair.far.core
    pair.near.post(b"runs long")
    core.next()
    number = pair.near.post(b"first", flags=MARKED)
    pair.near.post(b"second", flags=MARKED)
    pair.near.post(b"plain")
    pair.near.control(flags=MARKED)
    pair.far.event(STARVED)
    found = []
    while waiting := core.to_place():
        for each in waiting:
            found.append((each.kind, each.function))
            core.placed(each.handle)
    assert found == [(REQUEST, b"first"), (REQUEST, b"second"), (CONTROL, b"")]
    assert (core.counts().queued, core.counts().running) == (1, 3)
    pair.near.core.cancel(number)
    assert pair.far.event(CANCELLED).number == number
    pair.far.event(STARVED)  # the plain one waits still
    assert core.next().function == b"plain"


# ---------------------------------------------------------------------- a look into it


def test_a_look_into_the_queue(pair: Pair) -> None:
    core = pair.far.core
    before = monotonic()
    running = pair.near.post(b"runs")
    assert core.next().number == running
    marked = pair.near.post(b"first", flags=MARKED)
    came = core.next()
    plain = pair.near.post(b"f", notes_payload := b"x" * 10, buffers=[large(1), (1, 2, 3)])
    behind = pair.near.post(b"second", flags=MARKED, buffers=[b"small"])
    gone = pair.near.post(b"gone")
    pair.near.letter(33)
    core.work(object())
    pair.near.core.cancel(gone)
    settle(pair)
    waiting = core.queued()
    assert [(each.kind, each.link, each.number, each.function) for each in waiting] == [
        (REQUEST, pair.far.link, plain, b"f"),
        (REQUEST, pair.far.link, behind, b"second"),
    ]
    for each in waiting:
        assert (each.payload, list(each.buffers), each.handle, each.descriptor) == (b"", [], None, -1)
        assert before <= each.at <= monotonic()
    core.defer(came.handle)
    assert {each.number for each in core.queued()} == {marked, plain, behind}
    core.recall(pair.far.link)
    del waiting
    seen: list[Any] = []
    while len(seen) < 5:
        found = core.next()
        seen.append(found)
        if isinstance(found, tuple) and found.handle is not None:
            core.placed(found.handle)
    assert [each.payload for each in seen if isinstance(each, tuple) and each.number == plain] == [notes_payload]
    assert core.queued() == []


def test_the_look_has_notes(pair: Pair) -> None:
    head, pieces = request(b"named", b"payload", notes=b"whose")
    pair.near.core.post(pair.near.link, head, pieces)
    pair.far.until(lambda: pair.far.core.counts().queued == 1)
    assert [(each.function, each.notes) for each in pair.far.core.queued()] == [(b"named", b"whose")]
    assert pair.far.core.next().payload == b"payload"


def test_stop_with_deferred_frames(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.connect()
    pair.near.letter(1)
    pair.near.post(flags=MARKED | KEPT)
    came = pair.far.core.next()
    pair.far.core.defer(came.handle)
    pair.far.core.defer(pair.far.core.next().handle)
    pair.far.core.stop()
    with pytest.raises(CoreError):
        pair.far.core.recall(pair.far.link)


def test_a_running_request_of_a_kept_kind_gives_no_news(pair: Pair) -> None:
    plain, kept = pair.near.post(), pair.near.post(flags=KEPT)
    for _ in range(2):
        pair.far.core.next()
    for number in (kept, plain):
        pair.near.core.cancel(number)
    assert pair.far.event(CANCELLED).number == plain
    assert not pair.far.core.events()
    assert ENDED not in [each.kind for each in pair.far.news]
    head, pieces = frame(RESPONSE)
    pair.far.core.answer(pair.far.link, kept, head, pieces)
