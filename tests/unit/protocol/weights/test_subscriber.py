"""The versions of a name at a member: which arrive, which are ready, which go."""

from __future__ import annotations

import itertools

from farcall.protocol.weights.messages import Claim, Key, VersionsWanted, VersionTaken
from farcall.protocol.weights.subscriber import (
    Arrived,
    Claimed,
    Closed,
    Dropped,
    Ended,
    Failed,
    Fetch,
    Fetched,
    Gone,
    Held,
    LetGo,
    Mapped,
    Ready,
    SubscriberMachine,
    SubscriberState,
    Tell,
    Unmappable,
)

FIRST, SECOND = Claim(1, 100), Claim(2, 200)
A, B = (100, 1), (100, 2)
NONE: frozenset[tuple[int, int]] = frozenset()


def machine(claim: Claim = FIRST) -> SubscriberMachine:
    made = SubscriberMachine("policy", itertools.count())
    assert made.handle(Claimed(claim)) == [Tell(claim.publisher, VersionsWanted("policy", True, 0))]
    return made


def taken(key: Key, how: str) -> Tell:
    return Tell(key.claim.publisher, VersionTaken("policy", key.claim, key.number, how))  # type: ignore[arg-type]


def arrive(made: SubscriberMachine, key: Key, blocks: frozenset[tuple[int, int]] | None = NONE) -> list[object]:
    return list(made.handle(Arrived(key, key.claim.publisher, 2, blocks)))


def test_a_version_is_ready_when_all_its_blocks_are_mapped() -> None:
    made = machine()
    one = Key(FIRST, 1)
    assert arrive(made, one, frozenset({A, B})) == []
    assert made.handle(Mapped(A)) == []
    assert made.newest is None
    assert made.handle(Mapped(B)) == [taken(one, "mapped"), Ready(one)]
    assert made.newest == one


def test_older_versions_go_unless_they_are_kept_or_read() -> None:
    made = machine()
    keys = [Key(FIRST, number) for number in range(1, 6)]
    for key in keys[:2]:
        arrive(made, key)
    made.handle(Held(keys[0]))
    for key in keys[2:4]:
        arrive(made, key)
    assert made.ready == [keys[0], keys[2], keys[3]]
    assert made.handle(LetGo(keys[0])) == [Dropped(keys[0]), taken(keys[0], "dropped")]


def test_a_late_version_is_not_taken() -> None:
    made = machine()
    arrive(made, Key(FIRST, 2))
    assert arrive(made, Key(FIRST, 1)) == [Dropped(Key(FIRST, 1)), taken(Key(FIRST, 1), "dropped")]
    assert arrive(made, Key(FIRST, 2)) == [taken(Key(FIRST, 2), "dropped")]
    assert made.newest == Key(FIRST, 2)


def test_a_newer_one_that_is_ready_ends_what_still_arrives() -> None:
    made = machine()
    arrive(made, Key(FIRST, 1), frozenset({A}))
    assert arrive(made, Key(FIRST, 2))[-2:] == [Dropped(Key(FIRST, 1)), taken(Key(FIRST, 1), "dropped")]
    assert made.handle(Mapped(A)) == []


def test_another_publisher_takes_over() -> None:
    made = machine()
    arrive(made, Key(FIRST, 1))
    assert made.handle(Claimed(SECOND)) == [
        Tell(100, VersionsWanted("policy", False, 1)),
        Tell(200, VersionsWanted("policy", True, 2)),
    ]
    assert made.newest == Key(FIRST, 1)
    assert arrive(made, Key(FIRST, 5)) == [Dropped(Key(FIRST, 5)), taken(Key(FIRST, 5), "dropped")]
    assert Ready(Key(SECOND, 2)) in arrive(made, Key(SECOND, 2))
    assert made.handle(Claimed(FIRST)) == []


def test_a_dead_publisher_leaves_what_is_ready() -> None:
    made = machine()
    arrive(made, Key(FIRST, 1))
    arrive(made, Key(FIRST, 2), frozenset({A}))
    assert made.handle(Gone(100)) == [Dropped(Key(FIRST, 2))]
    assert made.state is SubscriberState.ORPHANED
    assert made.newest == Key(FIRST, 1)
    assert made.handle(Claimed(SECOND)) == [Tell(200, VersionsWanted("policy", True, 1))]
    assert made.state is SubscriberState.SUBSCRIBED


def test_bytes_that_cannot_be_mapped_are_fetched() -> None:
    made = machine()
    one = Key(FIRST, 1)
    arrive(made, one, frozenset({A}))
    assert made.handle(Unmappable(A)) == [Fetch(one)]
    assert made.handle(Fetched(one)) == [taken(one, "copied"), Ready(one)]
    two = Key(FIRST, 2)
    assert arrive(made, two, None) == [Fetch(two)]
    assert made.handle(Failed(two)) == [Dropped(two), taken(two, "dropped")]
    assert made.handle(Failed(two)) == []
    assert made.newest == one


def test_a_copy_owes_its_lender_nothing() -> None:
    made = machine()
    for number in (1, 2, 3):
        key = Key(FIRST, number)
        arrive(made, key, None)
        effects = made.handle(Fetched(key))
    assert effects == [taken(Key(FIRST, 3), "copied"), Ready(Key(FIRST, 3)), Dropped(Key(FIRST, 1))]


def test_closed_it_gives_all_back_but_what_is_read() -> None:
    made = machine()
    one, two = Key(FIRST, 1), Key(FIRST, 2)
    arrive(made, one)
    arrive(made, two)
    made.handle(Held(two))
    assert made.handle(Closed()) == [
        Dropped(one),
        taken(one, "dropped"),
        Tell(100, VersionsWanted("policy", False, 1)),
    ]
    assert arrive(made, Key(FIRST, 3)) == [Dropped(Key(FIRST, 3)), taken(Key(FIRST, 3), "dropped")]
    assert made.handle(LetGo(two)) == [Dropped(two), taken(two, "dropped")]


def test_a_publisher_that_ends_is_over_when_its_last_version_is_here() -> None:
    made = machine()
    arrive(made, Key(FIRST, 1))
    assert made.handle(Ended(SECOND, 1)) == []
    assert made.state is SubscriberState.SUBSCRIBED
    made.handle(Ended(FIRST, 2))
    assert made.state is SubscriberState.ENDED
    assert not made.is_over
    arrive(made, Key(FIRST, 2))
    assert made.is_over
    assert made.handle(Claimed(SECOND)) == [Tell(200, VersionsWanted("policy", True, 1))]
    assert not made.is_over


def test_a_last_version_that_will_not_come_is_not_waited_for() -> None:
    told = machine()
    told.handle(Ended(FIRST, 2))
    told.handle(Ended(FIRST, 0))
    assert told.is_over
    failed = machine()
    arrive(failed, Key(FIRST, 2), None)
    failed.handle(Ended(FIRST, 2))
    failed.handle(Failed(Key(FIRST, 2)))
    assert failed.is_over
    dead = machine()
    dead.handle(Ended(FIRST, 2))
    dead.handle(Gone(100))
    assert dead.is_over
