"""One machine at a time: who is believed, what is asked before anybody is accused, and who is let in."""

from __future__ import annotations

import random
from typing import TypeVar

import pytest

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    Admitted,
    Departed,
    Effect,
    Expelled,
    Heard,
    HostSeen,
    LinkGivenUp,
    LinkLost,
    LinkRefused,
    LinkSilent,
    LocalJoin,
    LocalLeave,
    MemberDied,
    MemberJoined,
    MemberLeft,
    MemberRecovered,
    MembershipOptions,
    MemberUnresponsive,
    Received,
    Refused,
    Send,
)
from farcall.protocol.membership.joining import GROUP_IS_OVER
from farcall.protocol.membership.machine import MembershipMachine, State
from farcall.protocol.membership.messages import (
    Ack,
    Ask,
    Decision,
    Deny,
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
)

T = TypeVar("T", bound=Effect)
OPTIONS = MembershipOptions()
RECORDS = [Member(f"worker{incarnation}", incarnation, incarnation) for incarnation in range(1, 7)]


class Bench:
    """A machine, its clock, and what it has done."""

    def __init__(self, machine: MembershipMachine) -> None:
        self.machine = machine
        self.now = 0.0
        self.effects: list[Effect] = []
        self.silent_hosts: set[int] = set()

    def feed(self, event: object) -> None:
        self.effects += self.machine.handle(event, self.now)  # type: ignore[arg-type]

    def receive(self, sender: int, message: Message) -> None:
        self.feed(Received(sender, message))

    def advance(self, seconds: float) -> None:
        """Each deadline at its time."""
        until = self.now + seconds
        while (deadline := self.machine.next_deadline()) is not None and deadline <= until:
            self.now = deadline
            for incarnation in self.machine.unresponsive(self.now):
                self.feed(HostSeen(incarnation, incarnation not in self.silent_hosts))
            self.effects += self.machine.handle_deadline(self.now)
        self.now = until

    def take(self, kind: type[T]) -> list[T]:
        """The effects of this kind since they were last taken; forget all others."""
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = []
        return found

    def sent(self, kind: type[Message], to: int | None = None) -> list[Send]:
        return [
            effect for effect in self.take(Send) if isinstance(effect.message, kind) and (to is None or effect.to == to)
        ]

    def hear_all_but(self, silent: int, seconds: float) -> None:
        """Let time pass while everybody else talks."""
        for _ in range(round(seconds / 0.1)):
            self.advance(0.1)
            for incarnation in self.machine.table.others:
                if incarnation != silent:
                    self.feed(Heard(incarnation))


def member(me: int = 1, size: int = 6, options: MembershipOptions = OPTIONS, is_fixed: bool = False) -> Bench:
    machine = MembershipMachine(RECORDS[me - 1], RECORDS[:size], options, random.Random(0), 0.0, is_fixed=is_fixed)
    return Bench(machine)


def newcomer(record: Member) -> Bench:
    return Bench(MembershipMachine(record, None, OPTIONS, random.Random(0), 0.0))


def status(bench: Bench, incarnation: int) -> Status:
    return bench.machine.table.entries[incarnation].status


def suspect(incarnation: int, version: int = 0) -> Gossip:
    return Gossip((Update(incarnation, Status.UNRESPONSIVE, version, RECORDS[incarnation - 1]),))


# --- probing -------------------------------------------------------------------------------------------


def test_who_is_heard_is_not_probed() -> None:
    bench = member()
    bench.hear_all_but(0, 20)
    assert bench.sent(Ping) == []


def test_the_quiet_one_is_probed_then_asked_about_then_unresponsive_then_dead_if_its_host_is_silent() -> None:
    bench = member()
    bench.silent_hosts = {3}
    bench.hear_all_but(3, 1.0)
    while not (pings := bench.sent(Ping)):
        bench.hear_all_but(3, 0.1)
    assert {ping.to for ping in pings} == {3}
    bench.hear_all_but(3, 0.6)
    asks = [effect.message for effect in bench.take(Send) if isinstance(effect.message, Ask)]
    assert [ask.target for ask in asks] == [3] * OPTIONS.indirect_probes
    bench.hear_all_but(3, 0.6)
    assert bench.take(MemberUnresponsive) == [MemberUnresponsive(RECORDS[2])]
    bench.hear_all_but(3, OPTIONS.suspicion_s - 0.5)
    assert status(bench, 3) is Status.UNRESPONSIVE
    bench.hear_all_but(3, 2.0)
    (death,) = bench.take(MemberDied)
    assert death.member == RECORDS[2]
    assert "its host does not answer" in death.why


def test_a_voucher_is_as_good_as_an_answer() -> None:
    bench = member()
    for _ in range(300):
        bench.hear_all_but(3, 0.1)
        for send in bench.take(Send):
            if isinstance(send.message, Ask):
                bench.receive(send.to, Vouch(send.message.target, ()))
    assert status(bench, 3) is Status.ALIVE


def test_who_is_busy_or_stopped_is_unresponsive_for_as_long_as_its_host_answers() -> None:
    bench = member()
    bench.hear_all_but(3, 3600)
    assert bench.take(MemberDied) == []
    assert status(bench, 3) is Status.UNRESPONSIVE
    (since_s,) = bench.machine.unresponsive(bench.now).values()
    assert 3590 < since_s < 3600
    bench.receive(3, Gossip((Update(3, Status.ALIVE, 1, RECORDS[2]),)))
    assert bench.take(MemberRecovered) == [MemberRecovered(RECORDS[2])]
    assert bench.machine.unresponsive(bench.now) == {}


def test_a_host_that_answers_again_takes_its_member_from_the_dock() -> None:
    bench = member()
    bench.silent_hosts = {3}
    bench.hear_all_but(3, OPTIONS.suspicion_s)
    bench.silent_hosts = set()
    bench.hear_all_but(3, 100)
    assert bench.take(MemberDied) == []


@pytest.mark.parametrize("unresponsive_s", [2.0, 25.0])
def test_silence_is_a_death_for_those_who_want_that(unresponsive_s: float) -> None:
    bench = member(options=MembershipOptions(unresponsive_s=unresponsive_s))
    while not bench.machine.unresponsive(bench.now):
        bench.hear_all_but(3, 0.1)
    bench.hear_all_but(3, unresponsive_s - 0.2)
    assert bench.take(MemberDied) == []
    bench.hear_all_but(3, 0.2 + 3 * OPTIONS.probe_timeout_s)
    (death,) = bench.take(MemberDied)
    assert "unresponsive_s" in death.why


def test_a_lost_link_asks_others_at_once_and_suspects_nobody_yet() -> None:
    bench = member()
    bench.feed(LinkLost(3))
    sent = [effect for effect in bench.effects if isinstance(effect, Send)]
    assert [effect.to for effect in sent if isinstance(effect.message, Ping)] == [3]
    assert len([effect for effect in sent if isinstance(effect.message, Ask)]) == OPTIONS.indirect_probes
    assert status(bench, 3) is Status.ALIVE


def test_refused_here_and_by_all_who_were_asked_is_dead_at_once() -> None:
    bench = member()
    bench.feed(LinkRefused(3))
    helpers = [effect.to for effect in bench.effects if isinstance(effect, Send) and isinstance(effect.message, Ask)]
    assert bench.take(MemberUnresponsive)
    for helper in helpers:
        assert status(bench, 3) is Status.UNRESPONSIVE
        bench.receive(helper, Deny(3, ()))
    assert len(helpers) == OPTIONS.indirect_probes
    assert bench.take(MemberDied)


def test_a_link_that_is_given_up_is_a_verdict() -> None:
    bench = member()
    bench.feed(LinkGivenUp(3, "for the test"))
    assert status(bench, 3) is Status.DEAD
    assert [effect.member.incarnation for effect in bench.effects if isinstance(effect, MemberDied)] == [3]
    told = [effect for effect in bench.effects if isinstance(effect, Send) and isinstance(effect.message, Obituary)]
    assert [effect.to for effect in told] == [3]
    bench.effects = []
    bench.feed(LinkGivenUp(3, "for the test"))
    assert bench.effects == []


def test_refused_here_but_not_elsewhere_is_a_bad_link() -> None:
    bench = member()
    bench.feed(LinkRefused(3))
    helpers = [effect.to for effect in bench.effects if isinstance(effect, Send) and isinstance(effect.message, Ask)]
    bench.receive(helpers[0], Deny(3, ()))
    bench.receive(helpers[1], Vouch(3, (Update(3, Status.ALIVE, 1, RECORDS[2]),)))
    bench.receive(helpers[2], Deny(3, ()))
    assert status(bench, 3) is Status.ALIVE
    assert [type(effect) for effect in bench.effects if not isinstance(effect, Send)] == [
        MemberUnresponsive,
        MemberRecovered,
        LinkSilent,
    ]


def test_of_two_the_survivor_decides_alone() -> None:
    bench = member(size=2)
    bench.feed(LinkRefused(2))
    assert bench.take(MemberDied)


def test_a_helper_says_what_it_found() -> None:
    bench = member()
    bench.receive(2, Ask(3, ()))
    assert [send.to for send in bench.sent(Ping)] == [3]
    bench.receive(4, Ask(3, ()))
    assert bench.sent(Ping) == [], "one ping serves all who ask"
    bench.receive(3, Ack(()))
    assert [send.to for send in bench.sent(Vouch)] == [2, 4]
    bench.receive(2, Ask(5, ()))
    bench.feed(LinkRefused(5))
    assert [send.to for send in bench.sent(Deny)] == [2]
    assert status(bench, 5) is Status.ALIVE, "it is the asker's affair"
    bench.receive(3, Ask(5, ()))
    assert [send.to for send in bench.sent(Deny)] == [3], "known since a moment ago"


def test_who_hears_nobody_doubts_itself_first() -> None:
    """Health sinks before anybody is accused; in a cluster of two it could be nothing else."""
    isolated, of_two = member(), member(size=2)
    for bench in (isolated, of_two):
        bench.advance(4.5)
    assert isolated.take(MemberUnresponsive) == []
    assert len(of_two.take(MemberUnresponsive)) == 1
    isolated.advance(60)
    assert isolated.take(MemberUnresponsive)


def test_a_verdict_spoken_alone_is_kept_to_oneself() -> None:
    """Who is deaf hears nobody either, and the others would believe it."""
    bench = member(size=3)
    bench.silent_hosts = {2, 3}
    bench.advance(400)
    died = {effect.member.incarnation for effect in bench.effects if isinstance(effect, MemberDied)}
    assert died == {2, 3}
    told = [send.message for send in bench.take(Send) if isinstance(send.message, Obituary | Gossip)]
    assert all(isinstance(message, Obituary) and message.alone for message in told)
    bench.receive(2, Ping(()))
    assert "cut off" in bench.take(Expelled)[0].why


@pytest.mark.parametrize(("rank", "stays"), [(0, True), (1, False)])
def test_of_two_that_gave_each_other_up_alone_the_lower_rank_stays(rank: int, stays: bool) -> None:
    """Their messages cross, and yet only one of them goes: nobody would be left to let the other in again."""
    bench = member(me=rank + 1, size=3)
    other = 2 - rank
    bench.silent_hosts = {1, 2, 3}
    bench.advance(400)
    assert len(bench.take(MemberDied)) == 2
    bench.receive(other, Obituary(rank + 1, "it was not heard", 1, 2 - rank, alone=True))
    assert (bench.machine.state is State.MEMBER) is stays
    if stays:
        (answer,) = bench.sent(Obituary)
        assert isinstance(answer.message, Obituary)
        assert answer.message.alone


def test_one_that_was_deaf_is_answered_by_those_who_did_not_give_it_up() -> None:
    bench = member(size=3)
    bench.receive(2, Obituary(1, "it was not heard", 1, 1, alone=True))
    assert bench.sent(Ack)
    assert bench.machine.state is State.MEMBER


def test_a_group_of_fixed_size_lets_one_in_for_a_member_that_died_until_somebody_leaves() -> None:
    bench = member(size=3, is_fixed=True)
    bench.receive(2, Gossip((Update(3, Status.DEAD, 0, None, "killed"),)))
    successor = Member(RECORDS[2].name, RECORDS[2].rank, 77, ("tcp:h:1",))
    bench.receive(77, Join(successor))
    (offer,) = [send.message for send in bench.sent(Decision)]
    assert isinstance(offer, Decision)
    assert offer.why_not == ""
    bench.receive(2, Gossip((Update(2, Status.LEFT, 0, None, "ended without shutdown()"),)))
    bench.receive(77, Join(offer.member))
    assert bench.sent(JoinAnswer), "who failed has not left the group"
    bench.receive(77, Gossip((Update(77, Status.LEFT, 0),)))
    bench.receive(78, Join(Member(RECORDS[2].name, RECORDS[2].rank, 78, ("tcp:h:1",))))
    (refusal,) = [send.message for send in bench.sent(Decision)]
    assert isinstance(refusal, Decision)
    assert refusal.why_not == GROUP_IS_OVER


def test_who_slept_accuses_nobody() -> None:
    bench = member()
    while not bench.sent(Ping):
        bench.hear_all_but(3, 0.1)
    bench.now += 30.0  # the process stands still; all timers are overdue, the answers unread
    bench.effects = list(bench.machine.handle_deadline(bench.now))
    assert status(bench, 3) is Status.ALIVE
    assert [effect.to for effect in bench.effects if isinstance(effect, Send) and isinstance(effect.message, Ping)]


def test_the_last_probe_is_begun_after_the_time_is_over() -> None:
    bench = member()
    bench.receive(2, suspect(3))
    bench.now += 100.0
    bench.effects = list(bench.machine.handle_deadline(bench.now))
    assert status(bench, 3) is Status.UNRESPONSIVE
    bench.receive(3, Ack(()))
    bench.hear_all_but(0, 5.0)
    assert status(bench, 3) is Status.UNRESPONSIVE, "it was heard, and given its time again"
    bench.receive(3, Gossip((Update(3, Status.ALIVE, 1, RECORDS[2]),)))
    assert status(bench, 3) is Status.ALIVE


# --- claims --------------------------------------------------------------------------------------------


def test_a_suspicion_of_oneself_is_refuted_in_the_answer() -> None:
    bench = member()
    bench.receive(2, Ping(suspect(1, 4).updates))
    (ack,) = bench.sent(Ack)
    assert isinstance(ack.message, Ack)
    assert Update(1, Status.ALIVE, 5, RECORDS[0]) in ack.message.updates


def test_an_unresponsive_member_is_told_in_every_message_to_it() -> None:
    bench = member()
    bench.receive(2, suspect(3))
    bench.effects = []
    for _ in range(30):
        bench.hear_all_but(0, 1.0)  # the news is old by now
    bench.effects = []
    bench.receive(3, Ping(()))
    (ack,) = bench.sent(Ack)
    assert isinstance(ack.message, Ack)
    assert [(update.incarnation, update.status) for update in ack.message.updates] == [(3, Status.UNRESPONSIVE)]


def test_news_is_told_and_passed_on() -> None:
    bench = member(size=5)
    update = Update(6, Status.ALIVE, 0, RECORDS[5])
    bench.receive(2, Gossip((update,)))
    assert bench.take(MemberJoined) == [MemberJoined(RECORDS[5])]
    bench.advance(OPTIONS.gossip_interval_s)
    told = bench.sent(Gossip)
    assert len(told) == 3
    assert all(send.message == Gossip((update,)) for send in told)
    bench.receive(2, Gossip((Update(6, Status.LEFT, 0),)))
    assert bench.take(MemberLeft) == [MemberLeft(RECORDS[5])]


def test_the_dead_are_told_and_not_believed() -> None:
    bench = member()
    bench.receive(2, Gossip((Update(3, Status.DEAD, 0, None, "it did not answer"),)))
    bench.effects = []
    bench.receive(3, Gossip((Update(4, Status.DEAD, 0), Update(3, Status.ALIVE, 9, RECORDS[2]))))
    assert status(bench, 4) is Status.ALIVE
    (obituary,) = bench.sent(Obituary, to=3)
    assert obituary.message == Obituary(3, "it did not answer", 5, 1)


def test_strangers_are_answered_and_not_believed() -> None:
    bench = member()
    bench.receive(99, Ping((Update(4, Status.DEAD, 0), Update(99, Status.ALIVE, 0, Member("x", 99, 99)))))
    assert bench.sent(Ack, to=99)
    assert status(bench, 4) is Status.ALIVE
    assert bench.machine.table.size == 6


def test_a_newcomer_whose_sponsor_is_gone_introduces_itself() -> None:
    """Found by a property test: the sponsor left before it had told anybody."""
    record = Member("worker7", 7, 7, admission=3)
    joiner = newcomer(record)
    joiner.feed(LocalJoin(2))
    joiner.receive(2, JoinAnswer(tuple(Update(one.incarnation, Status.ALIVE, 0, one) for one in RECORDS)))
    bench = member()
    bench.receive(7, Ping(()))
    question = [effect.message for effect in bench.effects if isinstance(effect, Send)]
    assert question == [Ack(()), WhoAreYou()]
    joiner.receive(1, WhoAreYou())
    (introduction,) = joiner.sent(Introduction, to=1)
    bench.receive(7, introduction.message)
    assert bench.take(MemberJoined) == [MemberJoined(record)]


def test_who_is_dead_to_a_member_is_expelled() -> None:
    for message in (Obituary(1, "it slept", 5, 2), Gossip((Update(1, Status.DEAD, 0, None, "it slept"),))):
        bench = member()
        bench.receive(2, message)
        assert [effect.why for effect in bench.take(Expelled)] == ["it slept"]
        assert bench.machine.next_deadline() is None
        bench.receive(2, Ping(()))
        assert bench.effects == []


# --- partitions ----------------------------------------------------------------------------------------


def split(me: int, others_dead: list[int]) -> Bench:
    bench = member(me)
    friend = next(incarnation for incarnation in range(1, 7) if incarnation != me and incarnation not in others_dead)
    bench.receive(
        friend, Gossip(tuple(Update(incarnation, Status.DEAD, 0, None, "silent") for incarnation in others_dead))
    )
    bench.effects = []
    return bench


def test_of_two_sides_the_larger_stays() -> None:
    larger, smaller = split(1, [5, 6]), split(6, [1, 2, 3, 4])
    larger.receive(6, Obituary(1, "silent", 2, 5))
    (answer,) = larger.sent(Obituary, to=6)
    smaller.receive(1, answer.message)
    assert "split" in smaller.take(Expelled)[0].why
    assert larger.machine.state is State.MEMBER


def test_of_two_equal_sides_the_one_with_the_lowest_rank_stays() -> None:
    lower, higher = split(2, [4, 5, 6]), split(5, [1, 2, 3])
    lower.receive(5, Obituary(2, "silent", 3, 4))
    assert lower.take(Expelled) == []
    higher.receive(2, Obituary(5, "silent", 3, 1))
    assert {effect for effect in higher.effects if isinstance(effect, Send)} == {
        Send(4, Resurfaced(2)),
        Send(6, Resurfaced(2)),
    }, "it names the other to its own side"
    assert higher.take(Expelled)


def test_the_dead_are_tried_again() -> None:
    bench = split(1, [5, 6])
    bench.hear_all_but(0, 5 * OPTIONS.reconnect_interval_s)
    assert {send.to for send in bench.sent(Obituary)} == {5, 6}


def test_a_hint_is_followed_by_asking_the_one_it_names() -> None:
    bench = split(6, [1, 2, 3, 4])
    bench.receive(5, Resurfaced(1))
    (question,) = bench.sent(Obituary, to=1)
    assert isinstance(question.message, Obituary)
    assert question.message.hinted
    stranger = member(1, size=5)
    stranger.receive(6, question.message)
    assert stranger.machine.state is State.MEMBER
    assert stranger.sent(Obituary, to=6)


# --- coming and going ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("name", "rank", "word"), [("worker3", 7, "name 'worker3'"), ("worker7", 3, "rank 3")])
def test_a_name_or_a_rank_in_use_is_refused_once_its_holder_has_answered(name: str, rank: int, word: str) -> None:
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


def test_leaving_is_told_until_two_know() -> None:
    bench = member()
    bench.feed(LocalLeave())
    told = [send.to for send in bench.sent(Ping)]
    assert len(told) == 3
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


@pytest.mark.parametrize("wrong", [{"probe_interval_s": 0}, {"suspicion_s": float("nan")}, {"indirect_probes": 0}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MembershipOptions(**wrong)  # type: ignore[arg-type]
