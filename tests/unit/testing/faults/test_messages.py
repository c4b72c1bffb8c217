"""Frames on their way: found in any stream, named rightly, and lost without losing what came with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.core.contract import CANCEL, CARRIES, CHUNK, MARKED
from farcall.core.frames import ABANDONED, Decoder, bare_frame, with_number
from farcall.ids import ForkId, RefId
from farcall.protocol import messages
from farcall.protocol.frames import (
    CONTROL,
    FAILURE,
    LETTER,
    REQUEST,
    RESPONSE,
    Frame,
    Ticket,
    encode_frame,
    encode_small,
)
from farcall.protocol.notes import KEEP, Notes, decode_notes, encode_notes
from farcall.protocol.references.messages import Fork, Register
from farcall.testing.faults.messages import CALLS, NO_CALL, Message, SplitError, Splitter, check_kinds

FORK = Fork(RefId(0, 1), ForkId(0, 2), 0, 1, 1)
TICKETS = [Ticket(1 << 20, 7, 4096), Ticket(64, 8 | 1 << 63, 0)]


def frame(kind: int = REQUEST, flags: int = 0, notes: bytes = b"", payload: bytes = b"p", buffers=()) -> bytes:
    return b"".join(encode_frame(kind, flags, 5, b"pm\0f" if kind == REQUEST else b"", notes, payload, buffers))


def control(message: messages.Message) -> bytes:
    return encode_small(CONTROL, 0, 0, b"", b"", messages.encode_message(message))


def only(data: bytes) -> Message:
    (message,) = Splitter().feed(data)
    return message


def decoded(*frames: bytes) -> list:
    stream = b"".join(with_number(frame, number) for number, frame in enumerate(frames))
    return list(Decoder().feed(stream))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.lists(st.integers(0, 3000), max_size=3)), min_size=1, max_size=5),
    steps=st.lists(st.integers(1, 500), min_size=1, max_size=20),
)
def test_any_split_of_a_stream_gives_its_frames(sizes, steps):
    frames = [
        frame(payload=bytes(payload), buffers=[memoryview(bytes(size)) for size in buffers] + TICKETS)
        for payload, buffers in sizes
    ]
    stream = b"".join(frames)
    splitter, found, at = Splitter(), [], 0
    while at < len(stream):
        step = steps[at % len(steps)]
        found += splitter.feed(stream[at : at + step])
        at += step
    assert [message.data for message in found] == frames
    assert all(message.frame.buffers == TICKETS for message in found)


def test_bytes_that_start_no_frame_are_an_error():
    with pytest.raises(SplitError):
        Splitter().feed(b"x" * 40)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (frame(), {"request", "call"}),
        (frame(flags=KEEP), {"request", "create"}),
        (encode_small(REQUEST, 0, 1, b"pfarcall.rpc.owned_values\0fetch", b"", b""), {"request", "fetch"}),
        (frame(RESPONSE), {"response"}),
        (frame(FAILURE), {"failure"}),
        (control(Register([])), {"control", "Register"}),
        (bare_frame(CANCEL, 0, 3), {"control", "CallCancelled"}),
        (control(messages.BlocksReleased([])), set()),
        (control(messages.SegmentOffered(1, 2)), set()),
        (encode_small(LETTER, 1, 1, b"", b"", b"pickled"), {"letter", "Gradient"}),
    ],
)
def test_what_a_message_is_called(data, names):
    assert only(data).names == names


def test_letters_are_called_by_what_is_in_them():
    from farcall.autograd.recorder import encode_messages
    from farcall.protocol.gradients import PassDone, PassId, ReleaseContext

    letters = encode_messages([ReleaseContext(1), PassDone(1, PassId(0, 1))], None)
    assert only(encode_small(LETTER, letters.flags, 1, b"", b"", bytes(letters.payload))).names == {
        "letter",
        "ReleaseContext",
        "PassDone",
    }


def test_only_an_offer_of_memory_has_a_descriptor():
    offer = messages.encode_message(messages.SegmentOffered(1, 2))
    assert only(encode_small(CONTROL, CARRIES, 0, b"", b"", offer)).carries_descriptor
    assert not only(control(messages.SegmentAccepted(1))).carries_descriptor
    assert not only(control(messages.Ping(1))).carries_descriptor


EMPTY = encode_small(RESPONSE, MARKED, NO_CALL, b"", b"", b"")


def test_a_lost_message_that_carries_nothing_leaves_an_empty_frame_to_be_counted():
    assert only(frame(buffers=[memoryview(b"inline")])).remains().data == EMPTY
    assert only(control(Register([FORK]))).remains().data == EMPTY


@pytest.mark.parametrize("kind", [REQUEST, RESPONSE, LETTER])
def test_leases_and_forks_of_a_lost_message_come_as_an_answer_that_nobody_awaits(kind):
    notes = b"" if kind == LETTER else encode_notes(Notes([FORK], FORK, "here", 3, 4))
    flags = 1 if kind == LETTER else 0
    remains = only(frame(kind, flags, notes, b"secret", [memoryview(b"inline"), *TICKETS])).remains()
    (arrived,) = decoded(remains.data)
    assert (arrived.kind, arrived.flags, arrived.number, arrived.payload) == (RESPONSE, MARKED, NO_CALL, b"")
    assert arrived.buffers == [(each.size_bytes, each.segment_id, each.offset) for each in TICKETS]
    if notes:
        assert decode_notes(arrived.notes) == Notes([FORK], None, "", 3, 4)


def test_a_creation_that_is_lost_creates_nothing():
    assert only(frame(flags=KEEP, notes=encode_notes(Notes([], FORK, "here")))).remains().data == EMPTY


def test_a_lease_is_not_given_twice():
    assert only(frame(buffers=[memoryview(b"inline")])).repeatable
    assert not only(frame(buffers=TICKETS)).repeatable


def test_what_autograd_has_recorded_is_not_sent_twice():
    in_context = encode_notes(Notes([], None, "", 3, 0))
    recorded = encode_notes(Notes([], None, "", 3, 4))
    for kind in (REQUEST, RESPONSE):
        assert only(frame(kind, notes=in_context)).repeatable
        assert not only(frame(kind, notes=recorded)).repeatable
        assert not Message(Frame(kind, 0, 5, b"", recorded, b"")).repeatable


def chunks(data: bytes, *ends: int, slot: int = 3) -> list[bytes]:
    starts = [0, *ends]
    return [
        bare_frame(CHUNK, slot, start, end - start) + data[start:end]
        for start, end in zip(starts, [*ends, len(data)], strict=True)
    ]


def test_a_large_message_is_put_together_and_all_frames_keep_their_places():
    large, small = frame(payload=b"0123456789" * 20), frame(payload=b"small")
    first, second, third = chunks(large, 30, 90)
    splitter = Splitter()
    assert splitter.feed(first + small + second) == []
    found = splitter.feed(third + small)
    assert [message.names for message in found] == [set(), {"request", "call"}, set(), *[{"request", "call"}] * 2]
    assert found[3].frame.payload == b"0123456789" * 20
    came = decoded(*(message.data for message in found))
    assert [bytes(message.payload) for message in came] == [b"small", b"0123456789" * 20, b"small"]


def test_a_repeated_large_request_is_a_call_of_its_own():
    _, message = Splitter().feed(b"".join(chunks(frame(payload=b"large"), 30)))
    first, second = decoded(message.data, message.copy(1).data)
    assert first.payload == second.payload == b"large"
    assert first.number == 5 != second.number


def test_what_is_abandoned_holds_up_nothing():
    first, _ = chunks(frame(), 30)
    splitter, small = Splitter(), frame(payload=b"small")
    assert splitter.feed(first + small) == []
    found = splitter.feed(bare_frame(CHUNK, 3 | ABANDONED))
    assert [message.payload for message in decoded(*(message.data for message in found))] == [b"small"]


def test_chunks_pass_as_they_come_where_no_rule_is_about_messages_or_their_beginning_was_not_seen():
    first, second = chunks(frame(), 30)
    assert [message.data for message in Splitter(lambda: False).feed(first + second)] == [first, second]
    assert only(second).data == second


def test_kinds_are_checked():
    assert check_kinds(None) == CALLS
    assert check_kinds("Release") == {"Release"}
    assert check_kinds(["call", "letter"]) == {"call", "letter"}
    with pytest.raises(ValueError, match=r"unknown messages: requests; choose from .*request"):
        check_kinds("requests")
    with pytest.raises(ValueError, match="corrupting memory"):
        check_kinds(["request", "BlocksReleased"])
    with pytest.raises(ValueError, match="kind is empty"):
        check_kinds([])
