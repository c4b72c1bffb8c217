"""What a link sends, keeps and sends again, against the decoder of its peer."""

from __future__ import annotations

import os

import pytest

from farcall.core.contract import CARRIES, CONTROL, LARGE_BYTES, REQUEST
from farcall.core.frames import ABANDONED, HEADER, VERSION, Decoder, Descriptor, Header, bare_frame
from farcall.core.session import Large, Outgoing

PIECE = bytes(range(256)) * 512  # two large buffers


def small(call: int) -> bytes:
    return HEADER.pack(b"fc", VERSION, REQUEST, 0, call, 4, 0, 0, 0, 0) + b"tiny"


def large(call: int, piece: bytes = PIECE) -> Large:
    return Large(HEADER.pack(b"fc", VERSION, REQUEST, 0, call, len(piece), 0, 0, 0, 0), [memoryview(piece)])


def written(outgoing: Outgoing, limit: int = 1 << 30, at_once: int = 1 << 30) -> bytes:
    """Up to ``limit`` bytes of the wire."""
    stream = b""
    while len(stream) < limit:
        spans, _ = outgoing.next()
        part = b"".join(spans)[: min(limit - len(stream), at_once)]
        if not part:
            break
        outgoing.wrote(len(part))
        stream += part
    return stream


def calls(decoder: Decoder, stream: bytes) -> list[int]:
    came = []
    for message in decoder.feed(stream):
        assert bytes(message.payload) in (b"tiny", PIECE, b"")
        came.append(message.number)
    return came


def filled() -> tuple[Outgoing, list[Large]]:
    outgoing = Outgoing()
    messages = [large(10), large(11)]
    outgoing.post(small(1))
    outgoing.post_large(messages[0])
    outgoing.post(small(2))
    outgoing.post_large(messages[1])
    return outgoing, messages


@pytest.mark.parametrize("at_once", [37, 1000, 1 << 30])
def test_everything_leaves_once_and_small_frames_first(at_once: int) -> None:
    outgoing, messages = filled()
    assert calls(Decoder(), written(outgoing, at_once=at_once)) == [1, 2, 10, 11]
    assert not outgoing
    assert outgoing.size == 0
    assert all(message.done and not message.failed and not message.pieces for message in messages)


def test_small_frames_pass_between_the_chunks_of_a_large_message() -> None:
    outgoing = Outgoing()
    outgoing.post_large(large(10, PIECE * 4))
    stream = written(outgoing, 1)
    outgoing.post(small(1))
    came = [message.number for message in Decoder().feed(stream + written(outgoing))]
    assert came == [1, 10]


def sizes() -> list[int]:
    outgoing, _ = filled()
    stream = written(outgoing)
    edges = [0, 44, 88]
    while edges[-1] < len(stream):
        at = edges[-1]
        edges.append(at + HEADER.size + Header.of(stream[at:]).payload_bytes)
    return sorted({min(max(edge + off, 0), len(stream)) for edge in edges for off in (-1, 0, 1, 39, 40, 41, 5000)})


@pytest.mark.parametrize("cut", sizes())
@pytest.mark.parametrize("unread", [0, 1, 100, LARGE_BYTES])
def test_a_link_resumes_wherever_its_connection_breaks(cut: int, unread: int) -> None:
    """The peer has read all but ``unread`` bytes of the ``cut`` that the kernel took."""
    outgoing, messages = filled()
    decoder = Decoder()
    came = calls(decoder, written(outgoing, cut)[: max(cut - unread, 0)])
    outgoing.broke()
    assert outgoing.size == sum(len(frame) for frame, _ in outgoing._small)
    decoder.restart()
    lost = outgoing.lost(decoder.count)
    assert lost is not None
    gone = [Header.of(head).call for head in lost]
    assert all(message.done for message in messages if Header.of(message.head).call in gone)
    replaced = outgoing.resume(decoder.count, [small(100 + call) for call in gone])
    assert replaced == gone
    came += calls(decoder, written(outgoing))
    instead = [call + 100 if call in gone else call for call in (1, 2, 10, 11)]
    assert sorted(came) == sorted(instead)
    assert not outgoing
    assert outgoing.size == 0
    outgoing.acknowledged(decoder.count)
    assert not outgoing._kept


def test_a_link_resumes_at_every_count_that_a_peer_may_have() -> None:
    for count in range(7):
        outgoing = Outgoing()
        for call in range(1, 7):
            outgoing.post(small(call))
        written(outgoing)
        outgoing.broke()
        decoder = Decoder()
        decoder.count = count
        assert outgoing.lost(count) == []
        assert outgoing.resume(count) == []
        assert calls(decoder, written(outgoing)) == list(range(count + 1, 7))


def test_counts_that_cannot_be_are_refused() -> None:
    outgoing = Outgoing()
    for call in range(1, 5):
        outgoing.post(small(call))
    written(outgoing)
    outgoing.acknowledged(2)
    outgoing.broke()
    assert [outgoing.lost(count) for count in range(6)] == [None, None, [], [], [], None]


def test_a_lost_message_is_replaced_by_nothing_too() -> None:
    outgoing, _ = filled()
    written(outgoing)
    outgoing.broke()
    assert outgoing.lost(0) is not None
    assert outgoing.resume(0, [None]) == [10, 11]
    assert calls(Decoder(), written(outgoing)) == [1, 2]


def test_a_message_that_is_given_up_before_it_leaves_leaves_nothing() -> None:
    outgoing, messages = filled()
    outgoing.give_up(messages[1])
    assert (messages[1].done, messages[1].failed) == (True, True)
    assert calls(Decoder(), written(outgoing)) == [1, 2, 10]


def test_a_message_that_is_given_up_amid_does_not_come_and_frees_its_slot() -> None:
    outgoing, decoder = Outgoing(), Decoder()
    message = large(10, PIECE * 4)
    outgoing.post_large(message)
    stream = written(outgoing, 100)
    outgoing.give_up(message)
    assert message.failed
    assert not message.pieces
    outgoing.post_large(large(11))
    assert calls(decoder, stream + written(outgoing)) == [11]


def test_a_message_whose_last_chunk_is_leaving_comes_whole_though_it_is_given_up() -> None:
    outgoing, decoder = Outgoing(), Decoder()
    message = large(10)
    outgoing.post_large(message)
    stream = written(outgoing, 100)
    outgoing.give_up(message)
    assert (message.done, message.failed, message.pieces) == (True, False, [])
    assert calls(decoder, stream + written(outgoing)) == [10]


def test_what_was_given_up_is_abandoned_over_the_next_connection_too() -> None:
    outgoing, decoder = Outgoing(), Decoder()
    message = large(10, PIECE * 4)
    outgoing.post_large(message)
    stream = written(outgoing, 5000)
    assert calls(decoder, stream) == []
    outgoing.give_up(message)
    outgoing.broke()
    decoder.restart()
    assert outgoing.lost(decoder.count) == []
    assert outgoing.resume(decoder.count) == []
    outgoing.post_large(large(11))
    assert calls(decoder, written(outgoing)) == [11]


@pytest.mark.parametrize("size", [1, 4])
def test_what_is_given_up_between_two_connections_is_abandoned(size: int) -> None:
    outgoing, decoder = Outgoing(), Decoder()
    message = large(10, PIECE * size)
    outgoing.post_large(message)
    assert calls(decoder, written(outgoing, 100_000)) == []
    outgoing.broke()
    decoder.restart()
    outgoing.give_up(message)
    assert message.failed
    assert outgoing.resume(decoder.count) == []
    outgoing.post_large(large(11))
    assert calls(decoder, written(outgoing)) == [11]


def test_chunks_that_come_again_may_be_cut_otherwise() -> None:
    outgoing, decoder = Outgoing(), Decoder()
    outgoing.post_large(large(10, PIECE * 40))
    stream = written(outgoing, 2_000_000)
    assert list(decoder.feed(stream)) == []
    outgoing.broke()  # the next chunks are small again, and the peer has much of the last one
    decoder.restart()
    outgoing.resume(decoder.count)
    assert [message.payload for message in decoder.feed(written(outgoing))] == [PIECE * 40]


def test_more_large_messages_than_slots_wait_for_one() -> None:
    outgoing = Outgoing()
    for call in range(20):
        outgoing.post_large(large(call))
    assert calls(Decoder(), written(outgoing)) == list(range(20))


def test_the_end_tells_what_the_peer_cannot_have() -> None:
    outgoing, messages = filled()
    assert outgoing.end() == {1, 2, 10, 11}
    outgoing, messages = filled()
    written(outgoing, 500)
    outgoing.post(small(3))
    assert outgoing.end() == {3, 11}
    assert all(message.done and message.failed for message in messages)
    assert not outgoing
    assert outgoing.size == 0


def test_nothing_leaves_behind_the_last_frame() -> None:
    outgoing, _ = filled()
    assert not outgoing.put_last(small(3), -1)  # others wait
    decoder = Decoder()
    assert calls(decoder, written(outgoing)) == [1, 2, 10, 11]
    assert not outgoing.put_last(small(3), decoder.count - 1)  # the peer lacks one
    assert outgoing.put_last(small(3), decoder.count)
    outgoing.post(small(4))
    outgoing.post_large(large(12))
    assert not outgoing.put_last(small(5), -1)
    assert calls(decoder, written(outgoing)) == [3]
    outgoing.rests = False
    assert calls(decoder, written(outgoing)) == [4, 12]
    assert outgoing.put_last(small(6), decoder.count)
    outgoing.post(small(7))
    outgoing.resume(decoder.count)  # another connection ends the rest
    decoder.restart()
    assert calls(decoder, written(outgoing)) == [6, 7]


def test_a_descriptor_leaves_with_the_first_byte_of_its_frame_again_where_a_connection_carries_it() -> None:
    read, write = os.pipe()
    os.close(write)
    outgoing = Outgoing()
    outgoing.post(small(1))
    outgoing.post(bare_frame(CONTROL, CARRIES), Descriptor(read))
    spans, descriptor = outgoing.next()
    assert descriptor is None
    assert [Header.of(bytes(span)).flags for span in spans] == [0, 0]  # this one does not
    outgoing.broke()
    outgoing.carries_descriptors = True
    outgoing.resume(0)
    spans, descriptor = outgoing.next()
    assert (len(spans), descriptor) == (1, None)
    outgoing.wrote(44)
    spans, descriptor = outgoing.next()
    assert descriptor is not None
    assert descriptor.number == read
    assert Header.of(bytes(spans[0])).flags == CARRIES
    outgoing.wrote(1)
    assert outgoing.next()[1] is None
    del descriptor, spans
    outgoing.wrote(39)
    os.fstat(read)  # kept until it is acknowledged
    outgoing.acknowledged(2)
    with pytest.raises(OSError):
        os.fstat(read)


def test_abandonment_is_a_flag_beside_the_slot() -> None:
    assert ABANDONED & 15 == 0
