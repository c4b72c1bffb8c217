"""Membership messages: what goes in comes out, and they are as small as promised."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from farcall.protocol.member import Member
from farcall.protocol.membership.messages import (
    BUCKETS,
    MAX_UPDATES,
    Ack,
    Ask,
    Decision,
    Deny,
    Digest,
    Entries,
    Forward,
    Gossip,
    Introduction,
    Join,
    JoinAnswer,
    Message,
    Obituary,
    Ping,
    Resurfaced,
    Status,
    Update,
    Vouch,
    WhoAreYou,
    precedence,
)

RECORD = Member("worker7", 7, 2**63 - 1, ("unix:/tmp/a", "tcp:host:1"), "token", 3)
UPDATES = (
    Update(RECORD.incarnation, Status.UNRESPONSIVE, 4, RECORD),
    Update(9, Status.DEAD, 0, None, "it did not answer"),
    Update(9, Status.DEAD, 0, None, "it did not answer", True),
)
EXAMPLES = [
    Ping(UPDATES),
    Ack(()),
    Ask(9, UPDATES),
    Vouch(9, UPDATES),
    Deny(9, UPDATES),
    Gossip(UPDATES),
    Digest(tuple(range(BUCKETS))),
    Entries((1, 2), UPDATES, True),
    Obituary(9, "why", 1000, 3, True),
    Resurfaced(9),
    Join(RECORD),
    Forward(RECORD),
    Decision(RECORD, ""),
    JoinAnswer(UPDATES),
    WhoAreYou(),
    Introduction(RECORD),
]
decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def test_there_is_an_example_of_every_message() -> None:
    assert {type(example) for example in EXAMPLES} == set(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_the_largest_piggyback_is_small() -> None:
    """With names and addresses as they usually are, and with the longest that are allowed."""
    usual = Member(
        "parameter-server-12", 1012, 2**62, ("unix:/tmp/farcall-1000-abcdef", "tcp:10.0.0.12:40123"), "a" * 32
    )
    message = Gossip(tuple(Update(usual.incarnation, Status.ALIVE, 1, usual) for _ in range(MAX_UPDATES)))
    assert len(msgspec.msgpack.encode(message)) < 6 * 1024
    ends = Gossip(tuple(Update(usual.incarnation, Status.DEAD, 1) for _ in range(MAX_UPDATES)))
    assert len(msgspec.msgpack.encode(ends)) < 512


def test_more_updates_than_allowed_are_a_fault() -> None:
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(Gossip(UPDATES[1:] * (MAX_UPDATES + 3))))


def test_the_order_of_claims() -> None:
    order = [
        (Status.ALIVE, 0),
        (Status.UNRESPONSIVE, 0),
        (Status.ALIVE, 1),
        (Status.UNRESPONSIVE, 1),
        (Status.DEAD, 0),
        (Status.LEFT, 0),
    ]
    assert sorted(order, key=lambda claim: precedence(*claim)) == order
    assert precedence(Status.DEAD, 0) == precedence(Status.DEAD, 9) > precedence(Status.UNRESPONSIVE, 2**53)
