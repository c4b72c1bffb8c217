"""The end of all references, looks inside, and the bytes of messages."""

from __future__ import annotations

import msgspec
import pytest
from tests.kit.reference_machines import ANNA, BEN, CARL, OWNER, Trio, only

from farcall.ids import ForkId, RefId
from farcall.protocol.references.messages import (
    Accept,
    Answer,
    Confirm,
    Counts,
    Fork,
    FreeValue,
    Inquire,
    Message,
    Register,
    Release,
    Withdraw,
)


@pytest.fixture
def trio() -> Trio:
    return Trio()


def test_drop_all_users_and_unforked_owners(trio: Trio) -> None:
    hers = trio.created_by_anna()
    unforked, forked = trio.anna.own_local(), trio.anna.own_local()
    trio.anna.fork(forked, BEN)
    effects = trio.anna.drop_all()
    assert FreeValue(unforked.ref) in effects
    assert only(effects, OWNER) == Release([(hers.ref, hers.fork_id)])
    [left] = trio.anna.snapshot().owned
    assert (left.ref, left.forks_by_holder) == (forked.ref, {BEN: 1})
    trio.anna.released.append(hers)  # the program's object dies later
    assert trio.anna.flush() == []


def test_counts_and_snapshot(trio: Trio) -> None:
    hers = trio.created_by_anna()
    trio.anna.own_local()
    trio.anna.create(OWNER)
    trio.anna.fork(hers, BEN)
    assert trio.anna.counts() == Counts(owned=1, owners=0, forks=0, users=2, pending_users=1, pending_children=1)
    assert trio.anna.snapshot().used[0].children_sent_to == [BEN]
    theirs = trio.owner.counts()
    assert theirs == Counts(theirs.owned, owners=1, forks=1, users=0, pending_users=0, pending_children=0)


def test_messages_survive_their_encoding(trio: Trio) -> None:
    fork = trio.anna.create(OWNER)
    held = (fork.ref, fork.fork_id)
    decoder = msgspec.msgpack.Decoder(Message)
    for message in [
        Register([fork]),
        Confirm([held]),
        Accept([fork.fork_id]),
        Release([held]),
        Withdraw([fork]),
        Inquire(1, [2]),
        Answer(1, [fork]),
    ]:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_one_member_refers_to_so_many_values_that_nobody_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.protocol.references.owner.MOST_AWAITED", 2)
    trio = Trio()

    def register(sender: int, number: int) -> None:
        fork = Fork(RefId(CARL, number), ForkId(sender, number), OWNER, sender, number)
        trio.owner.hear(sender, Register([fork]), 0.0)

    for number in (1, 2, 2):
        register(ANNA, number)
    assert trio.owner.lists(RefId(CARL, 2))
    register(ANNA, 3)
    assert not trio.owner.lists(RefId(CARL, 3))
    fork = Fork(RefId(CARL, 4), ForkId(ANNA, 4), OWNER, OWNER, 1)
    assert not trio.owner.receive(fork, ANNA)
    register(BEN, 3)
    assert trio.owner.lists(RefId(CARL, 3))
    trio.owner.hear(ANNA, Release([(RefId(CARL, 1), ForkId(ANNA, 1))]), 0.0)
    register(ANNA, 4)  # one was given back
    assert trio.owner.own(Fork(RefId(CARL, 2), ForkId(CARL, 2), OWNER, CARL, 1))
    register(ANNA, 5)  # one was created
    register(ANNA, 6)
    assert trio.owner.lists(RefId(CARL, 5))
    assert not trio.owner.lists(RefId(CARL, 6))


def test_one_member_withdraws_so_many_creations_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.protocol.references.owner.MOST_AWAITED", 2)
    trio = Trio()

    def withdraw(number: int) -> bool:
        fork = Fork(RefId(ANNA, number), ForkId(ANNA, number), OWNER, ANNA, number)
        trio.owner.hear(ANNA, Withdraw([fork]), 0.0)
        return trio.owner.lists(fork.ref)

    assert [withdraw(number) for number in (1, 2, 3)] == [True, True, False]
    trio.owner.hear(ANNA, Release([(RefId(ANNA, 1), ForkId(ANNA, 1))]), 0.0)
    assert withdraw(4)
