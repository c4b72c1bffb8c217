"""Control messages: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from farcall.errors import NetworkError
from farcall.ids import ForkId, RefId
from farcall.protocol import messages, observing, streams
from farcall.protocol.membership import messages as membership
from farcall.protocol.messages import (
    BlocksReleased,
    ClockAsked,
    ClockTold,
    DepartureAcknowledged,
    DepartureProbe,
    DepartureReleased,
    DepartureReport,
    DepartureStatus,
    Goodbye,
    GoodbyeReason,
    Message,
    Ping,
    Pong,
    ProtocolError,
    QueueFull,
    QueueHasRoom,
    SegmentAccepted,
    SegmentOffered,
    SegmentRefused,
    SegmentRetired,
    decode_message,
    encode_message,
)
from farcall.protocol.references import messages as references
from farcall.protocol.weights import messages as weights

CLAIM = weights.Claim(3, 2**62 + 1)
FORK = references.Fork(RefId(1, 2), ForkId(1, 3), owner=4, holder=1, number=5)
EXAMPLES = [
    Ping(nonce=2**63),
    Pong(nonce=0),
    Goodbye(GoodbyeReason.LEFT),
    messages.Part(3),
    messages.Parted(4),
    messages.Stay(),
    SegmentOffered(segment_id=7, size_bytes=1 << 40),
    SegmentAccepted(segment_id=7),
    SegmentRefused(segment_id=7, reason="no memory"),
    SegmentRetired(segment_id=7),
    BlocksReleased(blocks=[(7, 0), (7, 1 << 33)]),
    QueueFull(queued=100_001, limit=100_000),
    QueueHasRoom(),
    messages.CodeWanted(digest=bytes(32)),
    messages.CodeTold(digest=bytes(32), content=b"code"),
    DepartureReport(3, 2, [4, 5], False, 1234, [(5, "still has 1 call or callback under way")], 7, True),
    DepartureProbe(round=3, gone=[1, 2]),
    DepartureStatus(late=[(1, "has not called shutdown")], unnamed_count=2),
    DepartureReleased(),
    DepartureAcknowledged(),
    ClockAsked(sent_ns=2**62),
    ClockTold(sent_ns=2**62, clock_ns=1),
    messages.DevicesMapped(pairs=[("cuda:0", "cuda:1")], automatic=False),
    messages.DeviceTried(device=0, name="GPU-1", opener=b"x"),
    messages.DeviceOpened(device=0, why_not="it is elsewhere"),
    messages.DeviceBlocksReleased(blocks=[(1, 0), (2, 1 << 33)]),
    messages.DeviceSegmentRetired(segment_id=7),
    references.Register([FORK]),
    references.Confirm([(FORK.ref, FORK.fork_id)]),
    references.Accept([FORK.fork_id]),
    references.Release([(FORK.ref, FORK.fork_id)]),
    references.Withdraw([FORK]),
    references.Inquire(round=1, dead=[3]),
    references.Answer(round=1, forks=[FORK]),
    references.Farewell(),
    streams.StreamCredit(number=7, outgoing=True, items=2048, size_bytes=2**40),
    streams.StreamClosed(number=7),
    weights.NameClaimed("policy", CLAIM, 17),
    weights.ClaimAnswered("policy", CLAIM, CLAIM, 17),
    weights.NameClosed("policy", CLAIM, 17),
    weights.VersionsWanted("policy", True, 3),
    weights.VersionPushed("policy", CLAIM, 17, 2, True, b"manifest"),
    weights.VersionPushed("policy", CLAIM, 17, 2, True, b"manifest", [weights.OnDevice(0, 1, b"opener")]),
    weights.VersionTaken("policy", CLAIM, 17, "mapped"),
    weights.BlockOffered(5, 1 << 40),
    weights.BlockRefused(5, "no memory"),
    weights.BlockRetired(5),
    observing.Ask(1, "snapshot", b"", True),
    observing.Told(1, "w0", b"\x01"),
    observing.Roster(1, "cluster", [observing.WorkerState("w0", 0), observing.WorkerState("w1", 1, "it has left")]),
]


def test_every_message_has_an_example() -> None:
    """Those about membership have theirs in membership/test_messages.py."""
    examples = {type(example) for example in EXAMPLES}
    assert examples | set(get_args(membership.Message)) == set(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    for view in (bytes, bytearray, memoryview):
        assert decode_message(view(encode_message(message))) == message


def test_a_message_is_an_array_that_starts_with_its_tag() -> None:
    assert msgspec.msgpack.decode(encode_message(BlocksReleased([(1, 2)]))) == [13, [[1, 2]]]


@pytest.mark.parametrize(
    "content",
    [
        [99, 1],  # no such tag
        ["Ping", 1],
        [1],  # a field is missing
        [1, 1, 1],  # one too many
        [1, "one"],
        [13, [[1, 2, 3]]],
        {"nonce": 1},
        1,
        None,
    ],
)
def test_wrong_content_is_a_protocol_error(content: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_message(msgspec.msgpack.encode(content))
    assert isinstance(caught.value, NetworkError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92\x01",  # truncated
        encode_message(Ping(1)) + b"\x00",
        b"\x92\x03\xa2\xff\xff",  # a text that is not UTF-8
        b"\x92\x0d\xdd\xff\xff\xff\xff",  # announces four billion blocks
        b"\x91" * 60_000,
        b"\x92\x0d" + b"\x91" * 60_000,
    ],
    ids=["empty", "truncated", "trailing", "not UTF-8", "huge", "deep", "deep inside"],
)
def test_broken_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(data)
