"""One story per test: what is said on each way a reference can go, and what each death does."""

from __future__ import annotations

import threading

import msgspec
import pytest

from farcall.protocol.references.machine import References
from farcall.protocol.references.messages import (
    Accept,
    AllDropped,
    Answer,
    Confirm,
    Confirmed,
    CreationAnswered,
    CreationWithdrawn,
    Dropped,
    Effect,
    Event,
    Fork,
    ForkWithdrawn,
    FreeValue,
    Inquire,
    Lost,
    MemberDied,
    MemberJoined,
    Message,
    NeverCreated,
    Received,
    Register,
    Release,
    Send,
    Withdraw,
)
from farcall.protocol.references.outbox import ReleasedForks

OWNER, ANNA, BEN, CARL = 1, 2, 3, 4
EVERYONE = [OWNER, ANNA, BEN, CARL]


class Member(References):
    """A machine, with a word for each thing that happens to it; effects are kept until a test asks for them."""

    kept: tuple[Effect, ...] = ()

    def tell(self, event: Event, now: float = 0.0) -> list[Effect]:
        self.kept += tuple(self.handle(event, now))
        return list(self.kept)

    def hear(self, sender: int, message: Message, now: float) -> list[Effect]:
        self.tell(Received(sender, message), now)
        return self.collect(now)

    def confirm_created(self, fork: Fork) -> None:
        self.tell(CreationAnswered(fork))

    def withdraw(self, fork: Fork) -> None:
        self.tell(ForkWithdrawn(fork))

    def withdraw_creation(self, fork: Fork) -> None:
        self.tell(CreationWithdrawn(fork))

    def drop(self, fork: Fork) -> None:
        self.tell(Dropped(fork))

    def drop_all(self) -> list[Effect]:
        self.tell(AllDropped())
        return self.collect(0.0)

    def member_joined(self, member: int) -> None:
        self.tell(MemberJoined(member))

    def member_died(self, member: int, now: float) -> list[Effect]:
        self.tell(MemberDied(member), now)
        return self.collect(now)

    def collect(self, now: float) -> list[Effect]:
        kept, self.kept = self.kept, ()
        return [*kept, *self.handle_deadline(now)]

    def flush(self) -> list[Effect]:
        return self.collect(float("inf"))


class Trio:
    """Four machines and no network: a test carries each message itself."""

    def __init__(self) -> None:
        self.owner, self.anna, self.ben, self.carl = (Member(me, EVERYONE, linger_s=1.0) for me in EVERYONE)

    def created_by_anna(self) -> Fork:
        fork = self.anna.create(OWNER)
        assert self.owner.own(fork)
        self.anna.confirm_created(fork)
        return fork


@pytest.fixture
def trio() -> Trio:
    return Trio()


def sent(effects: list[Effect]) -> list[tuple[int, Message]]:
    return [(effect.member, effect.message) for effect in effects if isinstance(effect, Send)]


def only(effects: list[Effect], to: int) -> Message:
    [(member, message)] = sent(effects)
    assert member == to
    return message


# --- what each way costs -----------------------------------------------------------------------------------


def test_references_and_forks_are_numbered_together() -> None:
    machine = Member(ANNA, EVERYONE)
    owned, created, more = machine.own_local(), machine.create(OWNER), machine.own_local()
    assert (owned.ref.local_id, created.ref.local_id, created.fork_id.local_id, more.ref.local_id) == (0, 1, 2, 3)
    forks = [owned, created, more, machine.fork(owned, BEN)]
    assert len({fork.fork_id for fork in forks}) == 4


def test_creation_and_drop_cost_one_release(trio: Trio) -> None:
    fork = trio.anna.create(OWNER)
    assert not trio.anna.confirmed_by_owner(fork)
    assert trio.owner.own(fork)
    trio.anna.confirm_created(fork)
    assert trio.anna.confirmed_by_owner(fork)
    assert trio.anna.flush() == []
    assert trio.owner.flush() == []
    trio.anna.drop(fork)
    release = only(trio.anna.flush(), OWNER)
    assert release == Release([(fork.ref, fork.fork_id)])
    assert trio.owner.hear(ANNA, release, 0.0) == [FreeValue(fork.ref)]


def test_drop_before_the_response_waits_for_it(trio: Trio) -> None:
    fork = trio.anna.create(OWNER)
    trio.anna.drop(fork)
    assert trio.anna.flush() == []
    assert trio.anna.counts().pending_users == 1
    trio.anna.confirm_created(fork)
    assert only(trio.anna.flush(), OWNER) == Release([(fork.ref, fork.fork_id)])
    assert trio.anna.counts().users == 0


def test_remote_to_oneself_says_nothing(trio: Trio) -> None:
    fork = trio.owner.create(OWNER)
    assert trio.owner.confirmed_by_owner(fork)
    trio.owner.drop(fork)
    assert trio.owner.flush() == [FreeValue(fork.ref)]


def test_owner_to_user_is_listed_when_sent(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    trio.owner.drop(mine)
    assert trio.owner.flush() == []
    assert trio.anna.receive(hers, OWNER)
    assert trio.anna.confirmed_by_owner(hers)
    assert trio.anna.flush() == []
    trio.anna.drop(hers)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == [FreeValue(mine.ref)]


def test_user_to_owner_keeps_the_sender_until_accepted(trio: Trio) -> None:
    hers = trio.created_by_anna()
    back = trio.anna.fork(hers, OWNER)
    trio.anna.drop(hers)
    assert trio.anna.flush() == []  # a Release now could overtake the fork
    assert trio.owner.receive(back, ANNA)
    accept = only(trio.owner.flush(), ANNA)
    assert accept == Accept([back.fork_id])
    trio.anna.hear(OWNER, accept, 0.0)
    trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0)
    assert trio.owner.holds(back)
    trio.owner.drop(back)
    assert trio.owner.flush() == [FreeValue(hers.ref)]


def test_user_to_user(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.anna.drop(hers)
    assert trio.anna.flush() == []
    assert trio.ben.receive(his, ANNA)
    register = only(trio.ben.flush(), OWNER)
    assert register == Register([his])
    confirm = only(trio.owner.hear(BEN, register, 0.0), BEN)
    assert confirm == Confirm([(his.ref, his.fork_id)])
    assert trio.ben.hear(OWNER, confirm, 0.0) == [Confirmed(his)]
    accept = only(trio.ben.flush(), ANNA)
    trio.anna.hear(BEN, accept, 0.0)
    assert only(trio.anna.flush(), OWNER) == Release([(hers.ref, hers.fork_id)])


def test_user_to_itself(trio: Trio) -> None:
    hers = trio.created_by_anna()
    again = trio.anna.fork(hers, ANNA)
    trio.anna.drop(hers)
    assert trio.anna.receive(again, ANNA)
    confirm = only(trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0), ANNA)
    trio.anna.hear(OWNER, confirm, 0.0)
    assert only(trio.anna.flush(), OWNER) == Release([(hers.ref, hers.fork_id)])
    assert trio.anna.holds(again)


# --- twice, and out of order -------------------------------------------------------------------------------


def test_a_late_duplicate_of_register_heals(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    register = only(trio.ben.flush(), OWNER)
    confirm = only(trio.owner.hear(BEN, register, 0.0), BEN)
    trio.ben.hear(OWNER, confirm, 0.0)
    trio.ben.drop(his)
    releases = [message for to, message in sent(trio.ben.flush()) if to == OWNER]
    trio.owner.hear(BEN, releases[0], 0.0)
    again = only(trio.owner.hear(BEN, register, 0.0), BEN)
    assert trio.owner.counts().forks == 2
    trio.ben.hear(OWNER, again, 0.0)
    trio.owner.hear(BEN, only(trio.ben.flush(), OWNER), 0.0)
    assert trio.owner.counts().forks == 1


def test_a_payload_counts_once_even_after_its_fork_is_gone(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    assert trio.anna.receive(hers, OWNER)
    trio.anna.drop(hers)
    trio.anna.flush()
    assert not trio.anna.receive(hers, OWNER)


def test_a_creation_runs_once_even_after_its_value_is_gone(trio: Trio) -> None:
    hers = trio.created_by_anna()
    trio.anna.drop(hers)
    trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0)
    assert not trio.owner.own(hers)
    assert trio.owner.counts().owned == 0


def test_numbers_ahead_are_forgotten_when_the_gap_closes(trio: Trio) -> None:
    mine = trio.owner.own_local()
    forks = [trio.owner.fork(mine, ANNA) for _ in range(100)]
    for fork in reversed(forks[1:]):
        assert trio.anna.receive(fork, OWNER)
    arrivals = trio.anna._arrivals[OWNER]
    assert (arrivals.last, len(arrivals.ahead)) == (0, 99)
    assert trio.anna.receive(forks[0], OWNER)
    assert (arrivals.last, arrivals.ahead) == (100, set())


def test_register_before_the_creation_arrives(trio: Trio) -> None:
    hers = trio.anna.create(OWNER)
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    trio.owner.hear(BEN, only(trio.ben.flush(), OWNER), 0.0)
    [awaited] = trio.owner.snapshot().owned
    assert not awaited.created
    assert trio.owner.own(hers)
    [owned] = trio.owner.snapshot().owned
    assert owned.created
    assert owned.forks_by_holder == {ANNA: 1, BEN: 1}


# --- what is never sent ------------------------------------------------------------------------------------


def test_a_fork_that_never_arrives_is_withdrawn(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.anna.drop(hers)
    trio.anna.withdraw(his)
    withdraw = only(trio.anna.flush(), BEN)
    assert withdraw == Withdraw([his])
    trio.ben.hear(ANNA, withdraw, 0.0)
    assert not trio.ben.receive(his, ANNA)
    trio.anna.hear(BEN, only(trio.ben.flush(), ANNA), 0.0)
    assert only(trio.anna.flush(), OWNER) == Release([(hers.ref, hers.fork_id)])


def test_an_owners_fork_that_never_arrives_is_withdrawn(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    trio.owner.drop(mine)
    trio.owner.withdraw(hers)
    trio.anna.hear(OWNER, only(trio.owner.flush(), ANNA), 0.0)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == [FreeValue(mine.ref)]


def test_a_withdrawal_of_what_did_arrive_changes_nothing(trio: Trio) -> None:
    mine = trio.owner.own_local()
    hers = trio.owner.fork(mine, ANNA)
    trio.anna.receive(hers, OWNER)
    trio.owner.withdraw(hers)
    trio.anna.hear(OWNER, only(trio.owner.flush(), ANNA), 0.0)
    assert trio.anna.holds(hers)
    assert trio.anna.flush() == []


def test_a_creation_that_never_arrives_becomes_an_error(trio: Trio) -> None:
    hers = trio.anna.create(OWNER)
    trio.anna.withdraw_creation(hers)
    effects = trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0)
    assert effects[0] == NeverCreated(hers.ref)
    assert not trio.owner.own(hers)
    trio.anna.hear(OWNER, only(effects, ANNA), 0.0)
    assert trio.anna.confirmed_by_owner(hers)


# --- death -------------------------------------------------------------------------------------------------


def answers(trio: Trio, effects: list[Effect], *others: References) -> list[Effect]:
    """Everyone in ``others`` answers the owner's question; what the owner does then."""
    questions = {to: message for to, message in sent(effects) if isinstance(message, Inquire)}
    done: list[Effect] = []
    for machine in others:
        reply = machine.hear(OWNER, questions[machine.me], 0.0)
        [answer] = [message for to, message in sent(reply) if isinstance(message, Answer)]
        done += trio.owner.hear(machine.me, answer, 0.0)
    return done


def test_a_dead_users_forks_are_dropped_when_all_have_answered(trio: Trio) -> None:
    hers = trio.created_by_anna()
    effects = trio.owner.member_died(ANNA, 0.0)
    assert FreeValue(hers.ref) not in effects
    assert FreeValue(hers.ref) in answers(trio, effects, trio.ben, trio.carl)


def test_a_fork_outlives_the_dead_user_that_sent_it(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    trio.ben.flush()  # his Register is slow
    answers(trio, trio.owner.member_died(ANNA, 0.0), trio.ben, trio.carl)
    [owned] = trio.owner.snapshot().owned
    assert owned.forks_by_holder == {BEN: 1}


def test_a_fork_outlives_two_dead_users_in_a_row(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    third = trio.ben.fork(his, CARL)
    questions = trio.owner.member_died(ANNA, 0.0)
    trio.owner.hear(CARL, only(trio.carl.hear(OWNER, dict(sent(questions))[CARL], 0.0), OWNER), 0.0)
    trio.carl.receive(third, BEN)  # after his answer
    again = trio.owner.member_died(BEN, 0.0)  # without an answer
    assert trio.owner.counts().owned == 1
    answers(trio, again, trio.carl)
    [owned] = trio.owner.snapshot().owned
    assert owned.forks_by_holder == {CARL: 1}


def test_a_parent_lists_its_child_in_the_name_of_the_dead(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    third = trio.ben.fork(his, CARL)
    trio.anna.drop(hers)
    register = only(trio.anna.member_died(BEN, 0.0), OWNER)
    assert register == Register([his])
    trio.owner.member_died(BEN, 0.0)
    effects = trio.owner.hear(ANNA, register, 0.0)
    confirm = next(message for _, message in sent(effects) if isinstance(message, Confirm))
    trio.anna.hear(OWNER, confirm, 0.0)
    release = only(trio.anna.flush(), OWNER)
    assert trio.owner.hear(ANNA, release, 0.0) == []
    # A duplicate of the Confirm must not make her release what is not hers.
    trio.anna.hear(OWNER, confirm, 0.0)
    assert trio.owner.hear(ANNA, only(trio.anna.flush(), OWNER), 0.0) == []
    trio.carl.receive(third, BEN)
    answers(trio, effects, trio.anna, trio.carl)
    [owned] = trio.owner.snapshot().owned
    assert owned.forks_by_holder == {CARL: 1}


def test_nothing_is_taken_from_the_dead(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    trio.ben.member_died(ANNA, 0.0)
    assert not trio.ben.receive(his, ANNA)
    trio.owner.member_died(ANNA, 0.0)
    assert trio.owner.hear(ANNA, Release([(hers.ref, hers.fork_id)]), 0.0) == []
    assert not trio.owner.own(trio.anna.create(OWNER))


def test_a_dead_owner_loses_all_its_references_at_once(trio: Trio) -> None:
    confirmed, pending = trio.created_by_anna(), trio.anna.create(OWNER)
    dropped = trio.anna.create(OWNER)
    trio.anna.drop(dropped)
    trio.anna.fork(confirmed, BEN)
    effects = trio.anna.member_died(OWNER, 0.0)
    assert effects == [Lost(confirmed), Lost(pending)]
    assert trio.anna.counts() == (0, 0, 0, 0, 0, 0)
    with pytest.raises(LookupError, match="owner died"):
        trio.anna.fork(confirmed, BEN)
    assert trio.anna.create(OWNER) in [e.fork for e in trio.anna.flush() if isinstance(e, Lost)]


def test_a_question_buries_the_dead_it_names(trio: Trio) -> None:
    hers = trio.created_by_anna()
    his = trio.anna.fork(hers, BEN)
    answers(trio, trio.owner.member_died(ANNA, 0.0), trio.ben, trio.carl)
    assert not trio.ben.receive(his, ANNA)  # though nobody else told him


def test_an_answer_does_not_name_creations(trio: Trio) -> None:
    trio.ben.create(OWNER)  # listed now and released early, it would be listed for good when the request comes
    assert only(trio.ben.hear(OWNER, Inquire(1, [ANNA]), 0.0), OWNER) == Answer(1, [])


def test_an_answer_to_an_earlier_round_ends_nothing(trio: Trio) -> None:
    hers = trio.created_by_anna()
    early = dict(sent(trio.owner.member_died(ANNA, 0.0)))
    trio.owner.member_died(BEN, 0.0)
    [(_, answer)] = sent(trio.carl.hear(OWNER, early[CARL], 0.0))
    assert FreeValue(hers.ref) not in trio.owner.hear(CARL, answer, 0.0)
    assert trio.owner.counts().owned == 1


def test_a_child_of_a_settled_member_is_confirmed_and_not_listed(trio: Trio) -> None:
    hers, other = trio.created_by_anna(), trio.ben.create(OWNER)
    trio.owner.own(other)
    his = trio.anna.fork(hers, BEN)
    answers(trio, trio.owner.member_died(BEN, 0.0), trio.anna, trio.carl)
    effects = trio.owner.hear(ANNA, Register([his]), 0.0)
    assert only(effects, ANNA) == Confirm([(his.ref, his.fork_id)])
    assert trio.owner.counts().forks == 1


def test_what_is_sent_to_the_dead_keeps_nothing(trio: Trio) -> None:
    hers = trio.created_by_anna()
    mine = trio.owner.own_local()
    trio.anna.member_died(BEN, 0.0)
    trio.owner.member_died(BEN, 0.0)
    trio.anna.fork(hers, BEN)
    trio.owner.fork(mine, BEN)
    assert trio.anna.counts().pending_children == 0
    trio.owner.drop(mine)
    assert trio.owner.flush() == [FreeValue(mine.ref)]


def test_nothing_is_accepted_from_a_dead_parent(trio: Trio) -> None:
    his = trio.anna.fork(trio.created_by_anna(), BEN)
    trio.ben.receive(his, ANNA)
    trio.ben.flush()
    trio.ben.member_died(ANNA, 0.0)
    assert trio.ben.hear(OWNER, Confirm([(his.ref, his.fork_id)]), 0.0) == [Confirmed(his)]
    assert trio.ben.flush() == []


def test_a_reference_first_heard_of_after_its_creator_died(trio: Trio) -> None:
    his = trio.anna.fork(trio.anna.create(OWNER), BEN)
    trio.ben.receive(his, ANNA)
    trio.owner.member_died(ANNA, 0.0)
    effects = trio.owner.hear(BEN, only(trio.ben.flush(), OWNER), 0.0)
    assert effects[0] == NeverCreated(his.ref)


def test_a_creator_that_dies_before_its_request_arrives(trio: Trio) -> None:
    hers = trio.anna.create(OWNER)
    his = trio.anna.fork(hers, BEN)
    trio.ben.receive(his, ANNA)
    register = only(trio.ben.flush(), OWNER)
    trio.owner.hear(BEN, register, 0.0)
    assert NeverCreated(hers.ref) in trio.owner.member_died(ANNA, 0.0)
    assert not trio.owner.own(hers)


def test_a_newcomer_answers_a_round_under_way(trio: Trio) -> None:
    hers = trio.created_by_anna()
    effects = trio.owner.member_died(ANNA, 0.0)
    trio.owner.member_joined(9)
    question = only(trio.owner.flush(), 9)
    assert FreeValue(hers.ref) not in answers(trio, effects, trio.ben, trio.carl)
    newcomer = Member(9, [OWNER, BEN, CARL])
    assert FreeValue(hers.ref) in trio.owner.hear(9, only(newcomer.hear(OWNER, question, 0.0), OWNER), 0.0)


# --- batching and destructors ------------------------------------------------------------------------------


def test_releases_linger_and_travel_together(trio: Trio) -> None:
    forks = [trio.created_by_anna() for _ in range(10)]
    for fork in forks:
        trio.anna.released.append(fork)
    assert trio.anna.collect(5.0) == []
    assert trio.anna.next_deadline() == 6.0
    assert trio.anna.handle_deadline(5.9) == []
    assert only(trio.anna.handle_deadline(6.0), OWNER) == Release([(fork.ref, fork.fork_id) for fork in forks])
    assert trio.anna.next_deadline() is None


def test_many_releases_do_not_linger_and_are_cut_into_messages(trio: Trio) -> None:
    for _ in range(2_500):
        trio.anna.released.append(trio.created_by_anna())
    messages = [message for _, message in sent(trio.anna.collect(0.0))]
    assert [len(message.forks) for message in messages if isinstance(message, Release)] == [1024, 1024, 452]


def test_no_deadline_is_left_when_the_addressee_dies(trio: Trio) -> None:
    trio.anna.drop(trio.created_by_anna())
    trio.anna.collect(0.0)
    assert trio.anna.next_deadline() is not None
    trio.anna.member_died(OWNER, 0.0)
    assert trio.anna.next_deadline() is None


def test_destructors_wake_once_and_lose_nothing() -> None:
    wakes: list[None] = []
    released = ReleasedForks(lambda: wakes.append(None))
    fork = Member(1).own_local()
    for _ in range(3):
        released.append(fork)
    assert len(wakes) == 1
    assert len(list(released.drain())) == 3
    released.append(fork)
    assert len(wakes) == 2

    drained = len(list(released.drain()))
    threads = [threading.Thread(target=lambda: [released.append(fork) for _ in range(2_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += len(list(released.drain()))
    drained += len(list(released.drain()))
    assert drained == 1 + 4 * 2_000


def test_a_destructor_in_the_middle_of_a_drain() -> None:
    wakes: list[None] = []
    machine = Member(ANNA, EVERYONE, wake=lambda: wakes.append(None))
    first, second = machine.own_local(), machine.own_local()
    machine.released.append(first)
    for fork in machine.released.drain():
        machine.released.append(second)
        assert fork == first
    assert len(machine.released) == 1
    assert len(wakes) == 2  # or nobody would come for the second


# --- shutdown and a look inside ----------------------------------------------------------------------------


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
    counts = trio.anna.counts()
    assert counts._asdict() == {
        "owned": 1,
        "owners": 0,
        "forks": 0,
        "users": 2,
        "pending_users": 1,
        "pending_children": 1,
    }
    assert trio.anna.snapshot().used[0].children_sent_to == [BEN]
    assert trio.owner.counts()._replace(owned=0) == (0, 1, 1, 0, 0, 0)


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
