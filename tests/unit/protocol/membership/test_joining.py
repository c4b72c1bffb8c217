"""One machine at a time: who is let in, under which name, and who has left."""

from __future__ import annotations

import pytest
from tests.unit.protocol.membership.bench import OPTIONS, RECORDS, Bench, member, newcomer

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    Admitted,
    Departed,
    Expelled,
    LinkLost,
    LinkRefused,
    LocalJoin,
    LocalLeave,
    MemberDied,
    MemberJoined,
    MemberUnresponsive,
    Refused,
    Send,
)
from farcall.protocol.membership.machine import State
from farcall.protocol.membership.messages import (
    Ack,
    Ask,
    Decision,
    Forward,
    Gossip,
    Join,
    JoinAnswer,
    JoinRefusal,
    Ping,
    Status,
    Update,
)


def test_joining_through_one_that_is_not_the_arbiter() -> None:
    arbiter, sponsor = member(1), member(4)
    record = Member("worker7", 7, 7)
    joiner = newcomer(record)
    joiner.feed(LocalJoin(4))
    (request,) = joiner.sent(Join, to=4)
    sponsor.receive(7, request.message)
    (forward,) = sponsor.sent(Forward, to=1)
    arbiter.receive(4, forward.message)
    (decision,) = arbiter.sent(Decision, to=4)
    assert arbiter.machine.table.size == 6, "an offer binds nobody"
    sponsor.receive(1, decision.message)
    (offer,) = sponsor.sent(Decision, to=7)
    joiner.receive(4, offer.message)
    (confirmation,) = joiner.sent(Join, to=4)
    sponsor.receive(7, confirmation.message)
    assert [effect.member.admission for effect in sponsor.effects if isinstance(effect, MemberJoined)] == [1]
    (answer,) = sponsor.sent(JoinAnswer, to=7)
    joiner.receive(4, answer.message)
    (admitted,) = joiner.take(Admitted)
    assert sorted(admitted.members, key=lambda one: one.rank) == RECORDS
    assert joiner.machine.table.digest() == sponsor.machine.table.digest()


def test_a_newcomer_knows_the_members_that_only_the_arbiter_had_heard_of() -> None:
    """The sponsor may be slow to hear of a member whose start has ended; a newcomer that starts later knows it."""
    arbiter, sponsor = member(1), member(4)
    early, gone = Member("worker8", 8, 8, admission=1), Member("worker9", 9, 9, admission=2)
    arbiter.receive(2, Gossip((Update(8, Status.ALIVE, 0, early), Update(9, Status.ALIVE, 0, gone))))
    arbiter.receive(2, Gossip((Update(9, Status.DEAD, 0),)))
    joiner = newcomer(Member("worker7", 7, 7))
    joiner.feed(LocalJoin(4))
    sponsor.receive(7, joiner.sent(Join, to=4)[0].message)
    arbiter.receive(4, sponsor.sent(Forward, to=1)[0].message)
    sponsor.receive(1, arbiter.sent(Decision, to=4)[0].message)
    joiner.receive(4, sponsor.sent(Decision, to=7)[0].message)
    sponsor.receive(7, joiner.sent(Join, to=4)[0].message)
    joiner.receive(4, sponsor.sent(JoinAnswer, to=7)[0].message)
    (admitted,) = joiner.take(Admitted)
    assert early in admitted.members
    assert gone not in admitted.members


def join_at(arbiter: Bench, record: Member) -> list[Send]:
    arbiter.effects = []
    arbiter.receive(record.incarnation, Join(record))
    return [effect for effect in arbiter.effects if isinstance(effect, Send) and effect.to == record.incarnation]


def test_a_newcomer_asks_until_it_is_answered() -> None:
    joiner = newcomer(Member("worker7", 7, 7))
    joiner.feed(LocalJoin(4))
    joiner.advance(2.1)
    assert [send.to for send in joiner.sent(Join)] == [4] * 5
    joiner.feed(LocalJoin(5))
    joiner.advance(1.1)
    assert [send.to for send in joiner.sent(Join)] == [5] * 3


@pytest.mark.parametrize(
    ("name", "rank", "word", "kind"),
    [("worker3", 7, "name 'worker3'", JoinRefusal.NAME_TAKEN), ("worker7", 3, "rank 3", JoinRefusal.RANK_TAKEN)],
)
def test_a_name_or_a_rank_in_use_is_refused_once_its_holder_has_answered(
    name: str, rank: int, word: str, kind: JoinRefusal
) -> None:
    arbiter, record = member(1), Member(name, rank, 7)
    arbiter.now = 1.0
    assert join_at(arbiter, record) == []
    assert [
        effect.to for effect in arbiter.effects if isinstance(effect, Send) and isinstance(effect.message, Ping)
    ] == [3]
    arbiter.now = 1.1
    assert join_at(arbiter, record) == []
    arbiter.receive(3, Ack(()))
    (refusal,) = join_at(arbiter, record)
    joiner = newcomer(record)
    joiner.feed(LocalJoin(1))
    joiner.receive(1, refusal.message)
    (refused,) = joiner.take(Refused)
    assert word in refused.why
    assert "is taken" in refused.why
    assert refused.kind is kind


def test_a_sponsor_passes_on_what_kind_of_refusal_it_is() -> None:
    """Programs go by that: the words are for people."""
    sponsor, joiner = member(4), newcomer(Member("worker7", 7, 7))
    sponsor.receive(1, Decision(Member("worker7", 7, 7), "in other words", refusal=JoinRefusal.RANK_TAKEN))
    (passed_on,) = sponsor.sent(Decision, to=7)
    joiner.feed(LocalJoin(4))
    joiner.receive(4, passed_on.message)
    assert joiner.take(Refused) == [Refused("in other words", JoinRefusal.RANK_TAKEN)]


def test_the_name_of_one_that_is_busy_or_stopped_is_refused_when_its_death_would_be_known() -> None:
    """Its process is there: whoever wants the name has to end that first, and is told so."""
    arbiter, record = member(1), Member("worker3", 3, 7)
    assert join_at(arbiter, record) == []
    arbiter.hear_all_but(3, OPTIONS.death_bound_s(6))
    assert join_at(arbiter, record) == []
    arbiter.hear_all_but(3, OPTIONS.suspicion_s + 1.0)
    (refusal,) = join_at(arbiter, record)
    assert isinstance(refusal.message, Decision)
    assert "has not ended: end it first" in refusal.message.why_not


def test_the_name_of_one_that_died_is_free_when_its_death_is_known() -> None:
    arbiter, record = member(1), Member("worker3", 3, 7)
    assert join_at(arbiter, record) == []
    arbiter.receive(2, Gossip((Update(3, Status.DEAD, 0),)))
    (offer,) = join_at(arbiter, record)
    assert isinstance(offer.message, Decision)
    assert (offer.message.why_not, offer.message.member.admission) == ("", 1)


def test_the_arbiter_does_not_give_away_its_own_name() -> None:
    (refusal,) = join_at(member(1), Member("worker1", 7, 7))
    assert isinstance(refusal.message, Decision)
    assert "worker1" in refusal.message.why_not


def test_what_is_offered_to_one_is_not_offered_to_another_until_it_is_forgone() -> None:
    arbiter = member(1)
    first, second = Member("same", 7, 7), Member("same", 8, 8)
    assert len(join_at(arbiter, first)) == 1
    assert join_at(arbiter, second) == []
    arbiter.now = 10.0
    assert len(join_at(arbiter, second)) == 1


def test_a_late_confirmation_does_not_drive_out_who_came_since() -> None:
    sponsor = member(2)
    sponsor.receive(3, Gossip((Update(8, Status.ALIVE, 0, Member("same", 8, 8, admission=2)),)))
    (refusal,) = join_at(sponsor, Member("same", 7, 7, admission=1))
    assert isinstance(refusal.message, Decision)
    assert "is taken" in refusal.message.why_not
    assert sponsor.machine.table.member(8) is not None


def test_of_two_with_one_name_the_later_admission_stays_whichever_is_heard_of_first() -> None:
    earlier, later = Member("same", 8, 9, admission=1), Member("same", 9, 8, admission=2)
    for order in ((earlier, later), (later, earlier)):
        bench = member()
        for record in order:
            bench.receive(2, Gossip((Update(record.incarnation, Status.ALIVE, 0, record),)))
        assert bench.machine.table.member(8) is not None
        assert bench.machine.table.member(9) is None
    holder = member()
    holder.receive(2, Gossip((Update(9, Status.ALIVE, 0, Member("worker1", 9, 9, admission=1)),)))
    assert "given to another" in holder.take(Expelled)[0].why


LEFT = Ack((Update(1, Status.LEFT, 0),))


def test_leaving_is_told_to_all_neighbours_until_all_know() -> None:
    bench = member()
    bench.feed(LocalLeave())
    told = [send.to for send in bench.sent(Ping)]
    assert sorted(told) == bench.machine.table.others
    for one in told[1:]:
        assert bench.take(Departed) == []
        bench.receive(one, LEFT)
    assert bench.take(Departed) == []
    bench.receive(told[0], LEFT)
    assert bench.take(Departed) == [Departed()]


def test_who_leaves_too_is_no_witness() -> None:
    bench = member(size=4)
    bench.feed(LocalLeave())
    for leaving in (2, 3):
        bench.receive(leaving, Ack((Update(leaving, Status.LEFT, 0), Update(1, Status.LEFT, 0))))
    assert bench.take(Departed) == []
    bench.receive(4, LEFT)
    assert bench.take(Departed) == [Departed()], "nobody else is left"


def test_who_leaves_says_so_to_others_that_leave_and_accuses_nobody() -> None:
    bench = member()
    bench.feed(LinkLost(4))
    bench.feed(LocalLeave())
    bench.take(Send)
    bench.receive(3, Ping((Update(3, Status.LEFT, 0),)))
    (ack,) = bench.sent(Ack, to=3)
    assert isinstance(ack.message, Ack)
    assert {Update(1, Status.LEFT, 0), Update(3, Status.LEFT, 0)} <= set(ack.message.updates)
    for incarnation in (4, 5):
        bench.feed(LinkLost(incarnation))
        bench.feed(LinkRefused(incarnation))
    assert not [send for send in bench.take(Send) if isinstance(send.message, Ask)]
    bench.advance(5 * OPTIONS.probe_timeout_s)
    assert not [one for one in bench.effects if isinstance(one, MemberDied | MemberUnresponsive)]


def test_leaving_waits_for_nobody_that_is_gone_and_not_long_for_the_silent() -> None:
    bench = member()
    bench.feed(LocalLeave())
    for one in (2, 3, 4):
        bench.receive(one, LEFT)
    bench.feed(LinkRefused(5))
    assert bench.take(Departed) == []
    bench.advance(2 * OPTIONS.probe_timeout_s)
    assert bench.take(Departed) == [Departed()], "6 is silent"


def test_leaving_is_told_until_two_know() -> None:
    bench = member(size=3)
    bench.feed(LocalLeave())
    told = [send.to for send in bench.sent(Ping)]
    bench.receive(told[0], Ack(()))
    assert bench.machine.state is State.LEAVING, "that was the answer to something else"
    confirmation = Ack((Update(1, Status.LEFT, 0),))
    bench.receive(told[0], confirmation)
    bench.receive(told[0], confirmation)
    assert bench.take(Departed) == []
    bench.receive(told[1], confirmation)
    assert bench.take(Departed) == [Departed()]


def test_leaving_ends_even_if_nobody_answers() -> None:
    bench = member()
    bench.feed(LocalLeave())
    bench.advance(5 * OPTIONS.probe_timeout_s)
    assert bench.take(Departed)
    alone = member(size=1)
    alone.feed(LocalLeave())
    assert alone.take(Departed)


def test_who_hears_of_a_leave_says_so() -> None:
    bench = member()
    bench.receive(3, Ping((Update(3, Status.LEFT, 0),)))
    (ack,) = bench.sent(Ack, to=3)
    assert isinstance(ack.message, Ack)
    assert Update(3, Status.LEFT, 0) in ack.message.updates
    bench.receive(3, Ping((Update(3, Status.LEFT, 0),)))
    assert bench.sent(Ack, to=3), "the first one may have been lost"
