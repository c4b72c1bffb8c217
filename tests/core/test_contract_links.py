"""The life of a link in every implementation of `farcall.core.contract.Core`: handshakes before it, sleep, partings."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

import pytest
from tests.core.test_contract import MIB, Xor, attach_pumps, large, raw
from tests.kit.cores import Pair, connected, frame, request
from tests.kit.times import AT_ONCE_S

from farcall.core.contract import (
    CARRIES,
    CONTROL,
    ENDED,
    LETTER,
    MARKED,
    NOT_SENT,
    OVERDUE,
    OWNER,
    REQUEST,
    RESPONSE,
    UNKNOWN,
    WANTED,
    CoreError,
)

# ---------------------------------------------------------------------- times and bytes


def test_what_arrives_tells_when(pair: Pair) -> None:
    before = monotonic()
    number = pair.near.post(b"hold")
    pair.far.until(lambda: pair.far.core.counts().queued == 1)
    read = monotonic()
    pair.far.serve()
    pair.far.until(lambda: pair.far.of_kind(REQUEST))
    assert before <= pair.far.of_kind(REQUEST)[0].at <= read  # not when a worker took it
    assert before <= pair.near.core.wait(number, monotonic()).at <= monotonic()
    pair.near.core.cancel(number)
    pair.near.control(flags=OWNER)
    assert read <= pair.far.event(CONTROL).at <= monotonic()
    link = pair.near.core.open_link(True)  # type: ignore[call-arg]
    pair.near.core.post(link, request()[0])
    came = pair.near.core.next()
    assert read <= came.at <= monotonic()
    pair.near.answer(came)


def test_traffic_counts_over_all_connections(either: Pair) -> None:
    core, link = either.near.core, either.near.link
    either.far.serve()
    assert core.traffic(link)[:5] == (0, 0, 0, 0, 0)
    assert core.traffic(link).heard == -inf
    for _ in range(2):
        sent, received, frames = core.traffic(link)[:3]
        assert either.near.call(payload=large(1)).payload == large(1)
        now = core.traffic(link)
        assert now.sent_bytes > sent + 300_000
        assert now.received_bytes > received + 300_000
        assert now.frames > frames
        assert now.heard > monotonic() - AT_ONCE_S
        assert core.detach(link) >= now.frames
        either.resume()
    assert 600_000 < either.far.core.traffic(either.far.link).received_bytes <= core.traffic(link).sent_bytes


def test_traffic_of_a_link_that_is_not_there(pair: Pair) -> None:
    assert pair.near.core.traffic(99) == (0, 0, 0, 0, 0, -inf)


# ---------------------------------------------------------------------- attach


@pytest.mark.parametrize("cut", [0, 1, 39, 40, 100, 70_000, -1])
@pytest.mark.parametrize("through", ["socket", "pump"])
def test_bytes_behind_the_handshake_come_first(make_pair: Callable[..., Pair], cut: int, through: str) -> None:
    """A peer that sends at once: the handshake has read a part of its frames, cut anywhere."""
    pair = make_pair()
    made = [frame(CONTROL, payload=large(i, size)) for i, size in enumerate((50, 70_000, 0))]
    frames = [b"".join((head, *pieces)) for head, pieces in made]
    data = b"".join(each[:36] + i.to_bytes(4, "little") + each[40:] for i, each in enumerate(frames))
    cut = len(data) if cut < 0 else cut
    near, far = connected("unix")
    connection = far if through == "socket" else Xor(far)
    rest = data[cut:] if through == "socket" else Xor(near).seal([data[cut:]])
    assert pair.far.core.attach(pair.far.link, connection, first=data[:cut]) == 0
    writer = pair.far.start(write_all, near, rest)
    for i, size in enumerate((50, 70_000, 0)):
        came = pair.far.core.next(monotonic() + AT_ONCE_S)
        assert came.payload == large(i, size)
    writer.join(AT_ONCE_S)
    assert pair.far.core.traffic(pair.far.link).frames == 3
    os.close(near)
    assert pair.far.event(ENDED).function == b""


def write_all(descriptor: int, data: bytes) -> None:
    os.set_blocking(descriptor, True)
    while data:
        data = data[os.write(descriptor, data) :]


def test_no_frames_behind_the_handshake(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    near, far = connected("unix")
    pair.far.core.attach(pair.far.link, far, first=b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\n\r\n")
    news = pair.far.event(ENDED)
    assert (news.number, news.flags) == (0, UNKNOWN)
    os.close(near)
    pair.far.core.end(pair.far.link)
    with pytest.raises(CoreError):
        pair.far.control()


def test_attach_tells_how_many_frames_go_again(pair: Pair) -> None:
    pair.far.serve()
    pair.near.call()
    counts = pair.detach()
    for i in range(5):
        pair.near.control(b"%d" % i, patient=False)
    near, far = connected("unix")
    pair.far.core.attach(pair.far.link, far, counts[0])
    assert pair.near.core.attach(pair.near.link, near, counts[1]) == 0  # they leave for the first time
    near, far = connected("unix")
    pair.near.core.detach(pair.near.link), pair.far.core.detach(pair.far.link)
    pair.far.core.attach(pair.far.link, far, counts[0])
    assert pair.near.core.attach(pair.near.link, near, counts[1]) == 5


def test_bytes_that_are_no_frames_end_the_session(make_pair: Callable[..., Pair]) -> None:
    """A broken connection may be followed by another one; a peer that sent this has nothing to go on with."""
    pair = make_pair()
    with raw(pair) as end:
        end.sendall(bytes(100))
        assert pair.far.event(ENDED).flags == UNKNOWN
    pair = make_pair()
    raw(pair).close()
    assert pair.far.event(ENDED).flags == 0
    pair = make_pair()
    attach_pumps(pair, fails_after=10)  # somebody on the way changed a byte: TLS finds that
    pair.near.control(bytes(100))
    assert pair.far.event(ENDED).flags == 0


# ---------------------------------------------------------------------- links without a connection


@pytest.mark.parametrize("what", ["post", "call", "large", "cancel", "more", "waits already"])
def test_a_sleeping_link_is_wanted_once(make_pair: Callable[..., Pair], what: str) -> None:
    pair = make_pair(backlog_limit=10_000)
    core, link = pair.near.core, pair.near.link
    number = 0
    if what == "cancel":
        pair.connect()
        number = pair.near.post(b"hold")
        pair.far.until(lambda: pair.far.core.counts().queued == 1)
        pair.detach()
    if what == "waits already":
        pair.near.control()
        assert not core.events()
    core.sleep(link)
    if what != "waits already":
        assert not core.events()
    acts: dict[str, Callable[[], Any]] = {
        "post": pair.near.control,
        "call": lambda: pair.near.call(deadline=monotonic() + 0.01),
        "large": lambda: pair.near.call(payload=large(1), deadline=monotonic() + 0.01),
        "cancel": lambda: core.cancel(number),
        "more": lambda: (pair.near.control(more=True), core.flush(link)),
        "waits already": lambda: None,
    }
    acts[what]()
    assert pair.near.event(WANTED).link == link
    pair.near.control()
    assert not core.events()
    pair.resume()
    pair.far.serve()
    assert pair.near.call(payload=large(2)).payload == large(2)
    pair.detach()
    pair.near.control()
    assert not core.events()  # it was not put to sleep again


def test_a_link_that_ended_is_not_wanted(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    core, link = pair.near.core, pair.near.link
    core.sleep(link)
    core.end(link)
    with pytest.raises(CoreError):
        pair.near.control()
    core.sleep(link)
    core.sleep(99)
    assert not core.events()


def test_nothing_leaves_behind_the_last_frame(either: Pair) -> None:
    near, far = either.near, either.far
    last = frame(CONTROL, payload=b"last", flags=OWNER)[0]
    with pytest.raises(ValueError):
        near.core.send_last(near.link, b"last")
    far.serve()
    assert near.call().kind == RESPONSE
    near.until(lambda: near.core.traffic(near.link).unsent_bytes == 0)
    assert not near.core.send_last(near.link, last, far.core.traffic(far.link).frames + 1)
    assert near.core.send_last(near.link, last, far.core.traffic(far.link).frames)
    assert far.event(CONTROL).payload == b"last"
    count = far.core.traffic(far.link).frames
    assert not near.core.send_last(near.link, last)  # once
    near.control(b"behind", flags=OWNER)
    far.control(b"the other way", flags=OWNER)
    near.event(CONTROL)
    assert near.call(payload=large(1), deadline=monotonic() + 0.02).kind == OVERDUE
    assert not far.core.events()
    assert far.core.traffic(far.link).frames == count
    near.core.go_on(near.link)
    assert far.event(CONTROL).payload == b"behind"
    assert near.call(payload=large(1)).payload == large(1)


def test_both_part_and_lose_nothing(either: Pair) -> None:
    """The other end of a pair agrees only where nothing is on its way."""
    near, far = either.near, either.far
    far.serve()
    for i in range(3):
        number = near.post(payload=large(i, MIB))  # its memory goes back to its sender
        near.core.wait(number)
        for side, other in ((near, far), (far, near)):
            side.until(
                lambda side=side, other=other: side.core.send_last(
                    side.link, frame(CONTROL, payload=b"bye", flags=OWNER)[0], other.core.traffic(other.link).frames
                )
            )
            assert other.event(CONTROL).payload == b"bye"
        counts = either.detach()
        near.core.sleep(near.link)
        assert near.core.lost(near.link, counts[1]) == far.core.lost(far.link, counts[0]) == []
        caller = near.start(lambda: near.call(payload=large(9, MIB)))
        assert near.event(WANTED).link == near.link
        near_end, far_end = connected(either.family)
        assert near.core.attach(near.link, near_end, counts[1]) == far.core.attach(far.link, far_end, counts[0]) == 0
        caller.join(AT_ONCE_S)
        assert not caller.is_alive()
    assert not near.errors


def test_there_is_no_last_frame_where_something_waits(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    core, link = pair.near.core, pair.near.link
    last = frame(CONTROL, payload=b"last")[0]
    assert not core.send_last(link, last)  # no connection
    near, far = connected("unix")
    core.attach(link, near)  # nobody reads at the other end
    assert core.send_last(link, last)
    core.go_on(link)
    sender = pair.near.start(lambda: pair.near.control(large(1, 20 * MIB)))
    pair.near.until(lambda: not core.send_last(link, last) or core.go_on(link))
    pair.far.core.attach(pair.far.link, far)
    pair.far.serve()
    sender.join(AT_ONCE_S)
    assert not sender.is_alive()
    core.end(link)
    assert not core.send_last(link, last)
    core.go_on(link)
    core.go_on(99)


def test_another_connection_ends_the_rest(pair: Pair) -> None:
    assert pair.near.core.send_last(pair.near.link, frame(CONTROL, payload=b"last")[0])
    pair.near.control(b"behind")
    pair.resume()
    pair.far.serve()
    pair.far.until(lambda: [each.payload for each in pair.far.of_kind(CONTROL)] == [b"last", b"behind"])


# ---------------------------------------------------------------------- what needs nothing new


def test_a_core_that_is_joined_to_itself(make_pair: Callable[..., Pair]) -> None:
    """Where faults are installed, a node's messages to itself pass a relay: between two links of one core."""
    core = make_pair().near.core
    out, back = core.open_link(), core.open_link()
    for link, end in zip((out, back), connected("unix"), strict=True):
        core.admit(link)
        core.attach(link, end)
    number = core.post(out, *request(payload=large(1)))
    came = core.next()
    assert (came.kind, came.link, came.number) == (REQUEST, back, number)
    core.answer(back, number, *frame(RESPONSE, payload=came.payload))
    assert core.wait(number).payload == large(1)
    number = core.post(out, request()[0])
    assert core.next().number == number
    core.detach(out)
    core.end(out)
    assert core.wait(number).flags == UNKNOWN
    unsent = core.post(back, request()[0])
    core.detach(back)
    later = core.post(back, request()[0])
    core.end(back)
    assert (core.wait(unsent).kind, core.wait(later).flags) == (ENDED, NOT_SENT)


def test_an_offer_keeps_its_descriptor_behind_a_held_frame(make_pair: Callable[..., Pair]) -> None:
    """Before `admit`, a frame that is not for strangers holds up what follows; a descriptor waits with its frame."""
    pair = make_pair()
    core = pair.far.core
    link = core.open_link()
    near, far = connected("unix")
    pair.near.core.attach(pair.near.link, near)
    core.attach(link, far)
    reading, writing = os.pipe()
    pair.near.letter(1)
    pair.near.control(b"offer", descriptor=writing)
    os.close(writing)
    core.pause_behind(core.next().handle)
    pair.near.control(flags=OWNER)
    pair.far.event(CONTROL)
    assert core.traffic(link).held == 2
    core.admit(link)
    core.unpause(link)
    for kind in (LETTER, CONTROL):
        came = core.next()
        assert (came.kind, came.flags & MARKED) == (kind, MARKED)
        core.placed(came.handle)
    assert came.flags & CARRIES
    os.write(came.descriptor, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(came.descriptor), os.close(reading)
