"""Releases travel together; destructors take no lock."""

from __future__ import annotations

import threading

import pytest
from tests.kit.reference_machines import ANNA, EVERYONE, OWNER, Member, Trio, only, sent

from farcall.protocol.references.messages import Release
from farcall.protocol.references.user import ReleasedForks


@pytest.fixture
def trio() -> Trio:
    return Trio()


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


def test_ctrl_c_in_the_wake_of_a_destructor_does_not_silence_all_others() -> None:
    wakes: list[BaseException] = [KeyboardInterrupt()]

    def wake() -> None:
        if wakes:
            raise wakes.pop()

    released = ReleasedForks(wake)
    fork = Member(1).own_local()
    with pytest.raises(KeyboardInterrupt):
        released.append(fork)
    wakes.append(SystemExit())
    with pytest.raises(SystemExit):  # it calls again
        released.append(fork)
    assert len(released) == 2
