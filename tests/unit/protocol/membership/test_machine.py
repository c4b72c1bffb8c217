"""One machine at a time: who is believed, and what is asked before anybody is accused."""

from __future__ import annotations

import pytest
from tests.unit.protocol.membership.bench import OPTIONS, RECORDS, Bench, member, newcomer, status, suspect

from farcall.protocol.member import Member
from farcall.protocol.membership.events import (
    SELDOM,
    Expelled,
    Heard,
    LinkGivenUp,
    LinkLost,
    LinkRefused,
    LinkSilent,
    LocalJoin,
    MemberDied,
    MemberJoined,
    MemberLeft,
    MemberRecovered,
    MembershipOptions,
    MemberUnresponsive,
    Send,
)
from farcall.protocol.membership.joining import GROUP_IS_OVER
from farcall.protocol.membership.machine import State
from farcall.protocol.membership.messages import (
    Ack,
    Ask,
    Decision,
    Deny,
    Gossip,
    Introduction,
    Join,
    JoinAnswer,
    JoinRefusal,
    Obituary,
    Ping,
    Resurfaced,
    Status,
    Update,
    Vouch,
    WhoAreYou,
)
from farcall.protocol.membership.probing import CONFIRMED_S, REFUSED_S

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


def test_in_a_large_group_others_are_asked_five_times_as_late() -> None:
    options = MembershipOptions(full_mesh=4)
    bench = member(options=options)
    bench.feed(Heard(2))
    while not (pings := bench.sent(Ping)):
        bench.advance(0.1)
    target = pings[0].to
    bench.hear_all_but(target, SELDOM * options.probe_timeout_s - 0.2)
    assert not bench.sent(Ask)
    bench.hear_all_but(target, 0.3)
    assert [send.message.target for send in bench.sent(Ask) if isinstance(send.message, Ask)] == [target] * 3


def test_a_member_whose_turn_comes_late_probes_nobody_but_not_for_ever() -> None:
    bench = member()
    bench.machine.handle_deadline(0.0)
    for late_turns in range(1, 4):
        bench.now += OPTIONS.probe_interval_s * 1.1 + OPTIONS.probe_timeout_s
        bench.effects += bench.machine.handle_deadline(bench.now)
        assert bool(bench.sent(Ping)) is (late_turns == 3)


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


def refuse(bench: Bench, target: int, seconds: float) -> None:
    """The driver dials on, and is refused; everybody else talks."""
    for _ in range(round(seconds / 0.1)):
        bench.feed(LinkRefused(target))
        bench.hear_all_but(target, 0.1)


def test_refused_here_and_by_one_who_was_asked_is_dead_soon() -> None:
    bench = member()
    bench.feed(LinkRefused(3))
    helpers = [effect.to for effect in bench.effects if isinstance(effect, Send) and isinstance(effect.message, Ask)]
    assert len(helpers) == OPTIONS.indirect_probes
    bench.receive(helpers[0], Deny(3, ()))
    refuse(bench, 3, CONFIRMED_S - 0.1)
    assert status(bench, 3) is Status.ALIVE, "a proxy that restarts refuses, too"
    refuse(bench, 3, 0.3)
    assert not [effect for effect in bench.effects if isinstance(effect, MemberUnresponsive)]
    assert not [one for one in bench.effects if isinstance(one, Send) and isinstance(one.message, Obituary)]
    assert bench.take(MemberDied)


def test_a_verdict_takes_a_fresh_refusal() -> None:
    """A driver that has a link dials on meanwhile; one that has none is made to dial by a ping."""
    bench = member()
    bench.feed(LinkRefused(3))
    bench.receive(bench.sent(Ask)[0].to, Deny(3, ()))
    bench.hear_all_but(3, CONFIRMED_S - 0.1)
    assert bench.sent(Ping) == []
    bench.hear_all_but(3, 0.2)
    assert [ping.to for ping in bench.sent(Ping)] == [3]
    assert status(bench, 3) is Status.ALIVE
    bench.feed(Heard(3))
    refuse(bench, 3, CONFIRMED_S)
    assert status(bench, 3) is Status.ALIVE, "that is another refusal, which nobody has confirmed"


def test_who_said_that_it_was_refused_says_so_when_it_is_no_more() -> None:
    bench = member()
    bench.receive(2, Ask(3, ()))
    bench.feed(LinkRefused(3))
    assert [send.to for send in bench.sent(Deny)] == [2]
    bench.receive(4, Ask(3, ()))
    assert [send.to for send in bench.sent(Deny)] == [4]
    bench.feed(Heard(3))
    assert [send.to for send in bench.sent(Vouch)] == [2, 4]
    bench.feed(Heard(3))
    assert bench.sent(Vouch) == []


def test_refused_here_while_nobody_else_can_tell_is_dead_later() -> None:
    bench = member()
    refuse(bench, 3, REFUSED_S - 0.1)
    assert status(bench, 3) is Status.ALIVE
    refuse(bench, 3, 0.3)
    assert bench.take(MemberDied)


def test_who_is_refused_no_more_and_does_not_answer_is_probed_as_any_other() -> None:
    bench = member()
    refuse(bench, 3, 1.0)
    bench.take(Send)
    bench.hear_all_but(3, REFUSED_S + 4 * OPTIONS.probe_timeout_s)
    assert bench.take(MemberUnresponsive)


def test_refused_by_the_kernel_that_has_the_member_is_dead_at_once() -> None:
    bench = member()
    bench.receive(2, Ask(3, ()))
    bench.effects = []
    bench.feed(LinkRefused(3, is_certain=True))
    (told,) = [effect for effect in bench.effects if isinstance(effect, Send)]
    assert told.to == 2
    assert isinstance(told.message, Deny)
    assert [update.status for update in told.message.updates] == [Status.DEAD]
    assert bench.take(MemberDied)


def test_who_was_refused_is_neither_dialled_again_nor_are_others_asked_again() -> None:
    bench = member()
    bench.feed(LinkRefused(3))
    bench.take(Send)
    bench.hear_all_but(3, 1.5 * OPTIONS.probe_timeout_s)
    assert not [one for one in bench.take(Send) if one.to == 3 or isinstance(one.message, Ask)]


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


def test_who_tried_for_another_leaves_the_verdict_to_that_one_for_a_while() -> None:
    bench = member()
    bench.receive(2, Ask(3, ()))
    for _ in range(3):  # the driver dials again and again
        bench.feed(LinkRefused(3))
        bench.now += OPTIONS.suspicion_s / 4
    assert [effect.to for effect in bench.take(Send) if isinstance(effect.message, Deny)] == [2]
    assert status(bench, 3) is Status.ALIVE
    bench.now += OPTIONS.suspicion_s / 4
    bench.feed(LinkRefused(3))
    assert len(bench.sent(Ask)) == OPTIONS.indirect_probes, "perhaps the one that asked is gone, too"


def test_refused_here_but_not_elsewhere_is_a_bad_link() -> None:
    bench = member()
    bench.feed(LinkRefused(3))
    helpers = [effect.to for effect in bench.effects if isinstance(effect, Send) and isinstance(effect.message, Ask)]
    bench.receive(helpers[0], Deny(3, ()))
    bench.receive(helpers[1], Vouch(3, (Update(3, Status.ALIVE, 1, RECORDS[2]),)))
    bench.receive(helpers[2], Deny(3, ()))
    assert status(bench, 3) is Status.ALIVE
    assert [type(effect) for effect in bench.effects if not isinstance(effect, Send)] == [LinkSilent]


def test_of_two_the_survivor_decides_alone() -> None:
    bench = member(size=2)
    refuse(bench, 2, REFUSED_S - 0.1)
    assert status(bench, 2) is Status.ALIVE
    refuse(bench, 2, 0.3)
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
    assert all(bench.machine.table.entries[incarnation].host_is_silent for incarnation in died)
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
    assert (refusal.why_not, refusal.refusal) == (GROUP_IS_OVER, JoinRefusal.GROUP_OVER)


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
    bench.receive(2, Gossip((Update(5, Status.LEFT, 0, None, "ended without shutdown()"),)))
    assert bench.take(MemberLeft) == [MemberLeft(RECORDS[4], "ended without shutdown()")]


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
    assert smaller.take(Expelled)[0].why == "the cluster was split, and the other part of it is the larger one (silent)"
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
    (expelled,) = higher.take(Expelled)
    assert "the other part of it is as large, and has the lowest rank" in expelled.why


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


@pytest.mark.parametrize("wrong", [{"probe_interval_s": 0}, {"suspicion_s": float("nan")}, {"indirect_probes": 0}])
def test_options_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MembershipOptions(**wrong)  # type: ignore[arg-type]
