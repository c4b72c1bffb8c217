"""A member that lies about others, in a group with a table of what others may do: it ends nobody, and takes no name."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
from tests.unit.protocol.membership.bench import RECORDS, Bench, member, status

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    Expelled,
    Heard,
    LinkRefused,
    MemberDied,
    MemberJoined,
    MemberLeft,
    MembershipOptions,
    Send,
)
from farcall.protocol.membership.machine import State
from farcall.protocol.membership.messages import (
    BUCKETS,
    Ack,
    Ask,
    Decision,
    Deny,
    Entries,
    Forward,
    Gossip,
    Introduction,
    Join,
    JoinAnswer,
    Message,
    Obituary,
    Ping,
    Status,
    Update,
    Vouch,
)

KEPT_S = 10.0
OPTIONS = MembershipOptions(accusers=2, name_kept_s=KEPT_S)
LIAR, OTHER, VICTIM = 2, 3, 4

guarded = partial(member, options=OPTIONS)


def dead(incarnation: int = VICTIM, is_left: bool = False) -> Update:
    return Update(incarnation, Status.LEFT if is_left else Status.DEAD, 0, None, "so I say")


def in_its_name(incarnation: int = 9, admission: int = 1) -> Member:
    """A newcomer with the name and the rank of the victim."""
    return msgspec.structs.replace(RECORDS[VICTIM - 1], incarnation=incarnation, admission=admission)


CARRIERS = [
    *(lambda update, kind=kind: kind((update,)) for kind in (Ping, Ack, Gossip)),
    *(lambda update, kind=kind: kind(5, (update,)) for kind in (Ask, Vouch, Deny)),
    lambda update: Entries((0,), (update,), False),
]


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("carry", CARRIERS)
def test_one_that_says_so_ends_nobody(carry: object, is_left: bool) -> None:
    bench = guarded()
    for _ in range(3):
        bench.receive(LIAR, carry(dead(is_left=is_left)))  # type: ignore[operator]
    assert status(bench, VICTIM) is Status.ALIVE
    assert not bench.machine.table.is_over
    bench.hear_all_but(0, 60)
    assert status(bench, VICTIM) is Status.ALIVE
    assert not any(dead().incarnation == update.incarnation for update in told(bench))


def told(bench: Bench) -> list[Update]:
    """All that it has told others."""
    return [update for send in bench.take(Send) for update in getattr(send.message, "updates", ())]


def test_the_accused_is_probed_at_once() -> None:
    bench = guarded()
    bench.receive(LIAR, Gossip((dead(),)))
    assert bench.sent(Ping, VICTIM)


@pytest.mark.parametrize("is_left", [False, True])
def test_two_that_say_so_are_believed(is_left: bool) -> None:
    bench = guarded()
    for accuser in (LIAR, OTHER):
        bench.receive(accuser, Gossip((dead(is_left=is_left),)))
    assert bench.take(MemberLeft if is_left else MemberDied)
    assert status(bench, VICTIM) is (Status.LEFT if is_left else Status.DEAD)


def test_who_was_heard_meanwhile_needs_two_new_accusers() -> None:
    bench = guarded()
    bench.receive(LIAR, Gossip((dead(),)))
    bench.feed(Heard(VICTIM))
    bench.receive(OTHER, Gossip((dead(),)))
    assert status(bench, VICTIM) is Status.ALIVE


def test_an_accuser_that_has_ended_does_not_count() -> None:
    bench = guarded()
    bench.receive(LIAR, Gossip((dead(),)))
    bench.receive(LIAR, Gossip((dead(LIAR, is_left=True),)))
    bench.receive(OTHER, Gossip((dead(),)))
    assert status(bench, VICTIM) is Status.ALIVE


def test_who_says_that_it_leaves_is_believed() -> None:
    bench = guarded()
    bench.receive(VICTIM, Gossip((dead(is_left=True),)))
    assert bench.take(MemberLeft)


def test_a_dial_of_its_own_that_is_refused_is_believed() -> None:
    bench = guarded()
    bench.feed(LinkRefused(VICTIM, True))
    assert bench.take(MemberDied)


def test_one_accuser_hastens_the_own_finding_after_a_long_silence() -> None:
    """Who only heard of a silent member waits for longer than who found it silent, but not once that one accuses it."""
    bench = guarded()
    bench.silent_hosts = {VICTIM}
    bench.receive(LIAR, Gossip((Update(VICTIM, Status.UNRESPONSIVE, 0, RECORDS[VICTIM - 1]),)))
    bench.hear_all_but(VICTIM, OPTIONS.suspicion_s)
    bench.receive(LIAR, Gossip((dead(),)))
    assert status(bench, VICTIM) is Status.UNRESPONSIVE
    bench.hear_all_but(VICTIM, 5 * OPTIONS.probe_timeout_s)
    assert bench.take(MemberDied)


# --- its own end ---------------------------------------------------------------------------------------


def obituary(size: int = 2**53) -> Obituary:
    return Obituary(1, "so I say", size, 0)


@pytest.mark.parametrize("message", [obituary(), Gossip((dead(1),)), Gossip((dead(1, is_left=True),))])
def test_nobody_goes_because_one_says_so(message: Message) -> None:
    bench = guarded()
    for _ in range(3):
        bench.receive(LIAR, message)
    assert bench.machine.state is State.MEMBER
    bench.receive(OTHER, message)
    assert bench.take(Expelled)


def test_who_declares_this_member_dead_is_dead_to_it_and_to_it_alone() -> None:
    bench = guarded()
    bench.receive(LIAR, obituary())
    assert status(bench, LIAR) is Status.DEAD
    assert not any(update.incarnation == LIAR for update in told(bench))


def test_in_a_group_of_three_it_says_so_again_in_vain() -> None:
    """It is dead to this member then, which has one other left: the word of that one would do."""
    bench = guarded(size=3)
    for _ in range(3):
        bench.receive(LIAR, obituary())
    assert bench.machine.state is State.MEMBER
    bench.receive(OTHER, obituary())
    assert bench.take(Expelled)


def test_a_record_of_another_and_buckets_of_no_table_are_malformed() -> None:
    claim = Update(7, Status.ALIVE, 0, msgspec.structs.replace(RECORDS[VICTIM - 1], incarnation=7))
    fields = msgspec.to_builtins(claim)
    assert msgspec.convert(fields, Update) == claim
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([8, *fields[1:]], Update)
    for bucket in (-1, BUCKETS, 2**64):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(["tag", [bucket], [], True], Entries)


def test_in_a_group_of_two_the_other_is_believed() -> None:
    bench = guarded(size=2)
    bench.receive(LIAR, obituary())
    assert bench.take(Expelled)


def test_one_of_the_dead_alone_expels_nobody() -> None:
    bench = guarded()
    bench.feed(LinkRefused(LIAR, True))
    bench.feed(LinkRefused(OTHER, True))
    bench.receive(LIAR, obituary())
    assert bench.machine.state is State.MEMBER
    bench.receive(OTHER, obituary())
    assert bench.take(Expelled)


def test_strangers_expel_nobody() -> None:
    bench = guarded()
    for stranger in range(100, 110):
        bench.receive(stranger, obituary())
    assert bench.machine.state is State.MEMBER


# --- its name ------------------------------------------------------------------------------------------


def test_a_newcomer_gets_no_name_whose_holder_lives() -> None:
    bench = guarded()
    record = in_its_name(admission=1000)
    bench.receive(LIAR, Gossip((Update(record.incarnation, Status.ALIVE, 0, record),)))
    bench.receive(record.incarnation, Introduction(record))
    bench.receive(record.incarnation, Join(record))
    assert not bench.take(MemberJoined)
    assert status(bench, VICTIM) is Status.ALIVE
    assert record.incarnation not in bench.machine.table.entries


def test_nobody_goes_because_a_newcomer_has_its_name() -> None:
    bench = guarded()
    record = msgspec.structs.replace(RECORDS[0], incarnation=9, admission=1000)
    bench.receive(LIAR, Gossip((Update(9, Status.ALIVE, 0, record),)))
    assert bench.machine.state is State.MEMBER


@pytest.mark.parametrize("what", ["name", "rank"])
def test_a_dead_members_name_and_rank_stay_its_own_for_a_while(what: str) -> None:
    bench = guarded(1)
    bench.feed(LinkRefused(VICTIM, True))
    record = in_its_name(admission=0)
    record = msgspec.structs.replace(record, **{"rank": 77} if what == "name" else {"name": "another"})
    bench.take(Send)
    bench.hear_all_but(0, KEPT_S - 0.1)
    bench.receive(LIAR, Forward(record))
    assert not bench.sent(Decision)  # undecided: the newcomer asks again
    admitted = msgspec.structs.replace(record, admission=7)
    bench.receive(9, Introduction(admitted))
    bench.receive(9, Join(admitted))
    assert not bench.sent(JoinAnswer)
    assert 9 not in bench.machine.table.entries
    bench.hear_all_but(0, 0.2)
    bench.receive(LIAR, Forward(record))
    (decision,) = bench.sent(Decision)
    assert isinstance(decision.message, Decision)
    assert not decision.message.why_not
    bench.receive(9, Join(decision.message.member))
    assert bench.sent(JoinAnswer)
    assert status(bench, 9) is Status.ALIVE


def test_a_name_is_free_at_once_when_its_holder_has_left() -> None:
    bench = guarded()
    bench.receive(VICTIM, Gossip((dead(is_left=True),)))
    bench.receive(LIAR, Forward(in_its_name(admission=0)))
    assert bench.sent(Decision)


def test_of_two_that_were_given_one_name_each_hears_so_from_those_who_know_the_other() -> None:
    bench = guarded()
    record = in_its_name(admission=1000)
    bench.receive(9, Introduction(record))
    assert not bench.sent(Obituary)  # the holder may have died, and this member not know it yet
    bench.advance(0.1)
    bench.feed(Heard(VICTIM))
    bench.receive(9, Introduction(record))
    (sent,) = bench.sent(Obituary)
    assert sent.to == 9


# --- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("about", [1, VICTIM, 9])
def test_a_version_that_nobody_could_go_above_is_not_believed(about: int) -> None:
    bench = guarded()
    record = Member("new", 99, about) if about == 9 else RECORDS[about - 1]
    bench.receive(LIAR, Gossip((Update(about, Status.UNRESPONSIVE, 2**53, record),)))
    entry = bench.machine.table.entries.get(about)
    assert entry is None or entry.version == 0


def test_an_admission_that_nobody_could_come_after_is_not_believed() -> None:
    bench = guarded()
    bench.receive(9, Introduction(Member("new", 99, 9, admission=2**53)))
    assert bench.machine.table.highest_admission == 0
    bench.receive(LIAR, Forward(Member("honest", 98, 10)))
    (decision,) = bench.sent(Decision)
    assert isinstance(decision.message, Decision)
    assert decision.message.member.admission == 1
